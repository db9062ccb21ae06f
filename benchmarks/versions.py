"""One saved config, two versions of transformers: 4.57 and the running one, each in an environment of its own.

    python benchmarks/versions.py

Every static method on the bundled model, and on tiny models of the tests' families as far as 4.57 knows them, is saved
by ctxext and loaded by each version without it. A figure is the largest difference of logits over a family's methods.
That the extension is there at all is a figure too, and that 4.57 loses it, silently, without the keys of version 4.
Of Phi-3 and OLMo-2 the two versions take no config in common (docs/engine_evidence.md): there 4.57 reads the one
exported for it, and of OLMo-2 only the methods that it can be told are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np
import torch
import transformers
from report import Report, options

from ctxext import RopeScaling, extend_context, list_methods, load
from ctxext.assets import MODEL
from ctxext.export.rules import NotExportable, export_for
from ctxext.models.context import read_context

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests/support"))
from families import FAMILIES, tiny_model  # noqa: E402

OLDER = "4.57.6"
EXPORTED = ("phi3", "olmo2")
FACTOR = 4
# Runs in each environment, where ctxext cannot be imported: logits of every folder named on standard input.
WORKER = """
import json, sys
import numpy, torch, transformers
try:
    import ctxext.api
    raise SystemExit("ctxext can be imported here")
except ImportError:
    pass
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
version, folders = sys.argv[1], json.load(sys.stdin)
assert transformers.__version__ == version, transformers.__version__
for folder in folders:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.from_numpy(numpy.load(f"{folder}/input_ids.npy"))
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    numpy.save(f"{folder}/logits.npy", logits.numpy())
"""


def environment(version: str) -> Path:
    """The Python of an environment with that version of transformers; torch is the running one's."""
    folder = ROOT / "runs/versions" / version
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"transformers=={version}"], check=True)
        packages = next((folder / "lib").glob("python3*")) / "site-packages"
        # After its own packages in order: only what is missing there, torch above all, is found here.
        (packages / "running.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    return python


def static_methods(config: transformers.PreTrainedConfig) -> list[RopeScaling]:
    """An example of every method for RoPE that a config can say."""
    rope = read_context(config).rope
    examples = [method.example(rope, FACTOR) for method in list_methods("rope")]
    return [each for each in examples if isinstance(each, RopeScaling) and not each.in_attention]


def for_version_4(folder: Path) -> Path | None:
    """The same checkpoint with the config that is exported for version 4; None where none can be."""
    try:
        export = export_for("transformers-v4", transformers.AutoConfig.from_pretrained(folder))
    except NotExportable:
        return None
    older = folder.with_name(f"{folder.name}-4")
    older.mkdir()
    for path in folder.iterdir():
        os.link(path, older / path.name)
    (older / "config.json").unlink()
    (older / "config.json").write_text(json.dumps(export.config))
    return older


def without_version_4(folder: Path, bare: Path) -> Path:
    """The same checkpoint as transformers 5 alone would save it."""
    shutil.copytree(folder, bare)
    config = json.loads((bare / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    (bare / "config.json").write_text(json.dumps(config))
    return bare


def run(python: Path, version: str, folders: dict[tuple[str, str], Path]) -> dict[tuple[str, str], np.ndarray]:
    """Logits of each folder by one version."""
    job = json.dumps([str(path) for path in folders.values()])
    subprocess.run([python, "-I", "-c", WORKER, version], input=job, text=True, check=True)
    return {key: np.load(path / "logits.npy") for key, path in folders.items()}


def model_of(family: str) -> transformers.PreTrainedModel:
    return load(MODEL).float() if family == "bundled model" else tiny_model(family)


@torch.no_grad()
def save_all(families: list[str], root: Path) -> tuple[dict[tuple[str, str], Path], dict[str, np.ndarray]]:
    """Folders of extended models by family and method, and the logits of each family as it was."""
    folders, plain = {}, {}
    for family in families:
        model = model_of(family)
        reach = FACTOR * read_context(model.config).trained_length
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, model.config.vocab_size, (1, min(reach, 1024)), generator=generator)
        plain[family] = model(input_ids=ids, use_cache=False).logits.numpy()
        for method in static_methods(model.config):
            folder = root / family.replace(" ", "_") / method.name
            extend_context(model_of(family), method=method).save_pretrained(folder)
            np.save(folder / "input_ids.npy", ids.numpy())
            folders[family, method.name] = folder
    return folders, plain


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/versions.json")
    args = parser.parse_args()
    report = Report("versions", seed=0)
    pythons = {version: environment(version) for version in (OLDER, transformers.__version__)}
    known = subprocess.run(
        [pythons[OLDER], "-c", "import json, transformers as t; print(json.dumps(list(t.CONFIG_MAPPING)))"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    families = [family for family in FAMILIES if family in json.loads(known.stdout)]
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folders, plain = save_all(["bundled model", *families], Path(temporary))
        older = {key: for_version_4(path) if key[0] in EXPORTED else path for key, path in folders.items()}
        told = {key: path for key, path in older.items() if path is not None}
        newer = {key: folders[key] for key in told}
        bare = Path(temporary) / "bare"
        told["bare", "yarn"] = without_version_4(folders["bundled model", "yarn"], bare)
        logits = {
            version: run(python, version, told if version == OLDER else newer) for version, python in pythons.items()
        }
    found, running = logits[OLDER], logits[transformers.__version__]
    largest: dict[str, dict[str, float]] = {}
    for family, method in newer:
        difference = np.abs(found[family, method] - running[family, method]).max()
        largest.setdefault(family, {})[method] = float(difference)
    for family, of_family in largest.items():
        name = f"{family}, {len(of_family)} methods: largest |difference| of logits"
        report.add(name, largest(of_family.values()), at_most=1e-5)
    effects = [float(np.abs(running[key] - plain[key[0]]).max()) for key in newer]
    report.add("smallest effect of an extension on logits", min(effects), at_least=0.01)
    lost = float(np.abs(found["bare", "yarn"] - running["bundled model", "yarn"]).max())
    report.add(f"what {OLDER} loses without the keys of version 4", lost, at_least=0.01)
    report.add("models compared", len(newer))
    untold = sorted(set(folders) - set(newer))
    report.finish(args.output, older=OLDER, factor=FACTOR, differences=largest, not_said_to_older=untold)


if __name__ == "__main__":
    main()

"""docs/calculator: its maths against the conformance vectors, its answers against ctxext's own."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ctxext.cli.common import in_flags
from ctxext.export.rules import ENGINES, NotExportable, export_for
from ctxext.extension.describe import kv_cache_bytes
from ctxext.extension.request import plan_extension
from ctxext.methods import list_methods
from ctxext.models.context import read_context

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "calculator"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js")
# Each with options that change what engines are given.
HOW: list[tuple[str, float, dict[str, Any]]] = [
    ("yarn", 4.0, {}), ("yarn", 2.5, {"beta_fast": 16.0, "beta_slow": 2.0}), ("yarn", 4.0, {"truncate": False}),
    ("yarn", 8.0, {"attention_factor": 1.3}), ("ntk_by_parts", 4.0, {}), ("llama3", 8.0, {"high_freq_factor": 8.0}),
    ("ntk", 4.0, {}), ("pi", 3.0, {}), ("abf", 4.0, {}), ("resonance", 4.0, {}), ("cope", 4.0, {}), ("p_rope", 4.0, {}),
    ("drope", 4.0, {}),
]  # fmt: skip


def in_node(script: str, cases: Any) -> Any:
    """What `answer(case)` of `script` gives for each case, with the page's own files loaded."""
    assert NODE is not None
    files = ", ".join(json.dumps(str(FOLDER / name)) for name in ("known.js", "rope.js", "engines.js"))
    program = f"""
        const {{ runInThisContext: run }} = require("vm"), fs = require("fs");
        for (const file of [{files}]) run(fs.readFileSync(file, "utf8"), file);
        const answer = run({json.dumps(script)});
        process.stdout.write(JSON.stringify(JSON.parse(fs.readFileSync(0, "utf8")).map(answer)));"""
    done = subprocess.run([NODE, "-e", program], input=json.dumps(cases), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def known() -> dict[str, Any]:
    return in_node("(() => KNOWN)", [0])[0]


def differences(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Where two JSON values differ, numbers by more than 1e-9."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in expected.keys() | found.keys():
            if (name in expected) != (name in found):
                yield f"{path}.{name} is {'missing' if name in expected else 'unexpected'}"
            else:
                yield from differences(found[name], expected[name], f"{path}.{name}")
    elif isinstance(expected, (list, tuple)) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(found, expected)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(expected, (int, float)) and isinstance(found, (int, float)):
        if not math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-15):
            yield f"{path}: {found}, expected {expected}"
    elif isinstance(expected, str) and expected.startswith("{") and isinstance(found, str):
        yield from differences(json.loads(found), json.loads(expected), path)
    elif found != expected:
        yield f"{path}: {found!r}, expected {expected!r}"


def test_the_maths_gives_the_conformance_vectors() -> None:
    """To 1e-9, relative, over every case of every file."""
    files = [path for path in sorted((ROOT / "conformance").glob("*.json")) if path.name != "logprobs.json"]
    cases = [case for path in files for case in json.loads(path.read_text())["cases"]]
    found = in_node(
        """(case_) => {
            const fields = withDefaults(case_.config, { defaults: { rope_theta: 10000 } });
            const { invFreq, attentionFactor } = ropeInUse(
                ropeParameters(fields), headDimOf(fields), fields.max_position_embeddings, case_.length);
            return { invFreq, attentionFactor };
        }""",
        cases,
    )
    assert len(cases) > 100
    for case, got in zip(cases, found):
        expected = {"invFreq": case["inv_freq"], "attentionFactor": case["attention_factor"]}
        assert list(differences(got, expected)) == [], case["name"]


def test_every_static_method_is_on_the_page() -> None:
    static = {cls.name for cls in list_methods("rope")} - {"longrope"}  # whose λ are passed
    in_attention = {
        "dynamic_ntk", "dynamic_yarn", "transformers_dynamic", "self_extend", "rerope", "string", "dca",
        "query_temperature",
    }  # fmt: skip
    assert set(in_node("(() => Object.keys(METHODS))", [0])[0]) == static - in_attention


def module() -> Any:
    spec = importlib.util.spec_from_file_location("calculator", ROOT / "docs" / "calculator.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.slow
def test_the_data_of_the_page_is_current() -> None:
    assert (FOLDER / "known.js").read_text(encoding="utf-8") == module().page(), "run python docs/calculator.py"


def config_of(raw: dict[str, Any], tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return AutoConfig.from_pretrained(tmp_path)


QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
}  # fmt: skip
LLAMA = {**QWEN, "model_type": "llama", "rope_theta": 10000.0, "max_position_embeddings": 4096}
# As people paste them: keys of older versions, keys left out, and layers that differ.
PASTED = {
    "Falcon 7B, whose heads share keys and values": {
        "model_type": "falcon", "alibi": False, "hidden_size": 4544, "num_attention_heads": 71,
        "num_hidden_layers": 32, "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024,
    },
    "Falcon 40B, whose heads do not": {
        "model_type": "falcon", "alibi": False, "hidden_size": 8192, "num_attention_heads": 128,
        "num_hidden_layers": 60, "num_kv_heads": 8, "new_decoder_architecture": True, "vocab_size": 65024,
    },
    "half of the layers slide": {
        **QWEN, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14,
    },
    "no layer slides": {**QWEN, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 14},
    "no original length": {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "a linear factor": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "positions of images": {
        **QWEN, "model_type": "qwen2_5_vl", "max_position_embeddings": 128000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "chunks of attention": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "rope_theta": 500000.0,
    },
    "layers with attention and a state space": {
        "model_type": "falcon_h1", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "layers where max_window_layers has its default": {
        "model_type": "dots1", "hidden_size": 4096, "num_hidden_layers": 62, "num_attention_heads": 32,
    },
}  # fmt: skip


def test_lengths_and_memory_are_those_of_describe(tmp_path: Path) -> None:
    rows = [*known()["models"], *({"name": name, "config": config} for name, config in PASTED.items())]
    found = in_node(
        """({ name, config }) => {
            const context = readContext(JSON.stringify(config), KNOWN);
            const { trained, original, reach, checkpoint } = context;
            const kv = [4096, 131072].map((tokens) => kvCacheBytes(context, tokens, 2));
            return { trained, original, reach, row: checkpoint?.name ?? null, kv };
        }""",
        rows,
    )
    for row, got in zip(rows, found):
        facts = read_context(config_of(row["config"], tmp_path))
        known_as = None if facts.checkpoint is None else facts.checkpoint.name
        assert known_as == row.get("row", known_as) == got["row"], row["name"]
        lengths = (facts.trained_length, facts.original_length, facts.reach)
        assert (got["trained"], got["original"], got["reach"]) == lengths, row["name"]
        assert got["kv"] == [kv_cache_bytes(facts.text_config, n, 2) for n in (4096, 131072)], row["name"]


@pytest.mark.slow
def test_weights_are_counted_within_a_thousandth(tmp_path: Path) -> None:
    rows = known()["models"]
    found = in_node("(({ config }) => parameterCount(readContext(JSON.stringify(config), KNOWN)))", rows)
    for row, got in zip(rows, found):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(row["config"], tmp_path))
        exact = sum(each.numel() for each in {id(p): p for p in model.parameters()}.values())
        assert got is None or got == pytest.approx(exact, rel=1e-3), row["name"]
    assert sum(got is not None for got in found) >= len(found) - 1


EXPORTS = """({ config, method, factor, options, existing, engines }) => {
    try {
        const context = readContext(JSON.stringify(config), KNOWN);
        if (whyNotServed(context)) return { unserved: true };
        const plan = planExtension(context, { method, factor, options, existing });
        const folder = (engine) => `exported/${engine}`;
        const answers = engines.map((engine) => exportFor(engine, context, plan, KNOWN, "ORG/MODEL", folder(engine)));
        return { target: plan.target, parameters: plan.parameters, answers };
    } catch (error) {
        if (error instanceof Refused) return { refused: error.message };
        throw error;
    }
}"""
# What the page prints as a launch of a folder that it wrote; the others take overrides.
READY = ("mlx", "exllamav3", "lmdeploy", "onnxruntime-genai", "openvino")


def compared(rows: list[dict[str, Any]], existing: str, tmp_path: Path) -> int:
    """Compare every engine's answer with `export_for`'s, for every method; returns how many were."""
    cases = [
        {"config": row["config"], "method": method, "factor": factor, "options": options, "existing": existing}
        for row in rows
        for method, factor, options in HOW
    ]
    found = in_node(EXPORTS, [{**case, "engines": ENGINES} for case in cases])
    n_compared, refused = 0, list[tuple[str | None, str, str, str]]()
    for case, got in zip(cases, found):
        raw = case["config"]
        config, what = config_of(raw, tmp_path), f"{raw['model_type']} {case['method']} {case['options']}"
        verb: Any = existing if read_context(config).is_scaled else "refuse"
        try:
            plan = plan_extension(config, case["factor"], case["method"], existing=verb, **case["options"])
        except ValueError:
            assert set(got) == {"refused"}, what
            continue
        assert got.get("target") == plan.target_length, (what, got)
        assert list(differences(got["parameters"], plan.updates["rope_parameters"])) == [], what
        for engine, answer in zip(ENGINES, got["answers"]):
            served = f"exported/{engine}" if engine in READY else "ORG/MODEL"
            try:
                export = export_for(engine, config, plan, model=served, source=raw, ready=engine in READY)
            except NotExportable as error:
                refused.append((answer.get("refused"), in_flags(str(error)), what, engine))
                continue
            assert "refused" not in answer, (what, engine, answer)
            expected = {"command": list(export.flags), "notes": list(export.warnings), "length": export.length}
            assert list(differences({key: answer[key] for key in expected}, expected)) == [], (what, engine)
            if answer["config"] is not None:
                assert list(differences(answer["config"], export.config)) == [], (what, engine)
            n_compared += 1
    assert [each for each in refused if each[0] != each[1]] == []
    return n_compared


def test_engines_are_given_what_export_gives_them(tmp_path: Path) -> None:
    rows = {row["config"]["model_type"]: row for row in known()["models"]}
    assert compared([rows["qwen3"], rows["phi3"]], "replace", tmp_path) > 100


@pytest.mark.parametrize("existing", ["replace", "compose"])
def test_engines_are_given_what_export_gives_them_for_older_keys(existing: str, tmp_path: Path) -> None:
    scaled = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    pasted = ({**QWEN, **scaled, "head_dim": None}, {**LLAMA, "head_dim": None}, PASTED["no original length"])
    rows = [{"config": config} for config in pasted if existing == "replace" or "rope_scaling" in config]
    assert compared(rows, existing, tmp_path) > 100


@pytest.mark.slow
@pytest.mark.parametrize("existing", ["replace", "compose"])
def test_engines_of_every_model_are_given_what_export_gives_them(existing: str, tmp_path: Path) -> None:
    rows = [row for row in known()["models"] if existing == "replace" or row["config"].get("rope_scaling")]
    assert compared(rows, existing, tmp_path) > 50 * len(rows)

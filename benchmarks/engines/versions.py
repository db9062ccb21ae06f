"""In which version of vLLM or SGLang a field's meaning changed: each release's config and rotary code, run alone.

    python benchmarks/engines/versions.py                              # finished releases are kept in runs/engines
    python benchmarks/engines/versions.py --engine sglang
    python benchmarks/engines/versions.py --releases 0.12.0 0.30.0     # in ascending order

Wheels are unpacked, not installed. Their Python files run in the environment of vLLM's newest CPU build, with a
transformers that the release allows, on the cases of cases.py and on `ctxext export`'s line for every static method.
Compiled kernels are not loaded. Figures go to docs/engine_versions.json and docs/sglang_versions.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines.cases import CASES, LLAMA, SGLANG_CASES, VLLM_CASES
from engines.environments import VLLM
from engines.subjects import RUNS
from engines.wheels import beside, unpacked
from transformers import AutoConfig

from ctxext.export.commands import parse_command
from ctxext.export.rules import NotExportable, export_for
from ctxext.extension.request import plan_extension
from ctxext.methods import RopeScaling, list_methods
from ctxext.models.context import read_context
from ctxext.utils.machine import machine

HUB_1 = "huggingface_hub==1.33.0"
TRANSFORMERS_4 = ("gguf==0.19.0", "transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub==0.36.0")
GGUF = ("gguf==0.19.0",)  # which the newest CPU build no longer requires


def _on(transformers: str) -> tuple[str, ...]:
    """A version of transformers 5 and what it requires, older than those of the environment."""
    return (f"transformers=={transformers}", "tokenizers==0.22.2", HUB_1)


# By release, the packages that are put before those of the environment, which has transformers 5.19.0.
RELEASES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        **{f"0.{minor}.0": TRANSFORMERS_4 for minor in range(12, 20)},
        **dict.fromkeys(("0.19.1", *(f"0.{minor}.0" for minor in range(20, 34))), GGUF),
        "0.31.0": (*GGUF, "transformers==5.17.0", HUB_1),
    },
    "sglang": {  # what each wheel requires
        "0.5.10": _on("5.3.0"),
        **dict.fromkeys(("0.5.11", "0.5.12"), _on("5.6.0")),
        **dict.fromkeys(("0.5.13", "0.5.14"), _on("5.8.1")),
        **dict.fromkeys((f"0.5.{patch}" for patch in range(15, 22)), _on("5.12.1")),
        **dict.fromkeys(("0.5.22", "0.5.23"), ()),
    },
}
OUTPUT = {"vllm": Path("docs/engine_versions.json"), "sglang": Path("docs/sglang_versions.json")}
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def exported(engine: str) -> list[tuple[dict[str, Any], dict[str, Any], int | None]]:
    """The line for every static method at ×4 of 8192 tokens, as `ctxext export` prints it, as cases."""
    config, found = AutoConfig.for_model(**json.loads(json.dumps(LLAMA))), []
    for method in list_methods("rope"):
        made = method.example(read_context(config).rope, 4)
        if isinstance(made, RopeScaling) and not made.in_attention:
            try:
                export = export_for(engine, config, plan_extension(config, method=made), source=LLAMA)
            except NotExportable:
                continue
            command = parse_command(export.flags)
            found.append((LLAMA, command.overrides, command.length))
    return found


def run(engine: str, release: str, cases: list[Any]) -> dict[str, Any]:
    """What one release does."""
    kept, given = RUNS / "versions" / f"{engine}-{release}.json", json.loads(json.dumps(cases))
    if kept.is_file() and (record := json.loads(kept.read_text()))["given"] == given:
        return record
    folders = [unpacked(engine, release)] + [beside(*RELEASES[engine][release])] * bool(RELEASES[engine][release])
    path = os.pathsep.join(map(str, folders))
    with tempfile.TemporaryDirectory() as temporary:
        output, asked = Path(temporary, "reads.json"), Path(temporary, "cases.json")
        asked.write_text(json.dumps(cases))
        worker = [VLLM.python, "-W", "ignore", f"benchmarks/engines/{engine}_reads.py", asked, output]
        subprocess.run(worker, check=True, env={**os.environ, "PYTHONPATH": path})
        record = {**json.loads(output.read_text()), "given": given}
    assert record["version"] == release, f"{release} was asked for, and {record['version']} ran"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(record))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=RELEASES, default="vllm")
    parser.add_argument("--releases", nargs="+")
    options = parser.parse_args()
    engine: str = options.engine
    releases = options.releases or list(RELEASES[engine])
    if unknown := set(releases) - RELEASES[engine].keys():
        parser.error(f"unknown releases of {engine}: {', '.join(unknown)}. Known: {', '.join(RELEASES[engine])}")
    VLLM.ready(print)
    cases = [*CASES, *(SGLANG_CASES if engine == "sglang" else VLLM_CASES), *exported(engine)]
    grouped, on = list[dict[str, Any]](), dict[str, str]()
    for release in releases:
        began, record = time.perf_counter(), run(engine, release, cases)
        on[release] = record["transformers"]
        for number, ((config, overrides, asked), does) in enumerate(zip(cases, record["does"], strict=True)):
            if release == releases[0]:
                grouped.append({"config": config, "overrides": overrides, "asked": asked, "did": []})
            does.pop("says", None)
            same = [each for each in grouped[number]["did"] if each["does"] == does]
            if same:
                same[0]["versions"].append(release)
            else:
                grouped[number]["did"].append({"versions": [release], "does": does})
        print(f"{NAMES[engine]} {release} on transformers {on[release]}: {time.perf_counter() - began:.0f} s")
        command = f"python benchmarks/engines/versions.py --engine {engine}"
        told = {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": machine("cpu"), engine: on}
        lines = ",\n".join(json.dumps(case) for case in grouped)
        OUTPUT[engine].write_text(f'{json.dumps(told)[:-1]}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()

"""In which version of vLLM a field's meaning changed: each minor release's config and rotary code, run alone.

    python benchmarks/engines/versions.py                              # finished releases are kept in runs/engines
    python benchmarks/engines/versions.py --releases 0.12.0 0.30.0     # in ascending order

Wheels are unpacked, not installed. Their Python files run in the environment of the newest CPU build, up to 0.19 with
transformers 4, on the cases of vllm_cases.py and on `ctxext export`'s line for every static method.
Compiled kernels are not loaded. Figures go to docs/engine_versions.json.
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

from engines.environments import VLLM
from engines.subjects import RUNS
from engines.vllm_cases import CASES, LLAMA
from engines.wheels import beside, unpacked
from transformers import AutoConfig

from ctxext.export.commands import parse_command
from ctxext.export.rules import NotExportable, export_for
from ctxext.extension.request import plan_extension
from ctxext.methods import RopeScaling, list_methods
from ctxext.models.context import read_context
from ctxext.utils.machine import machine

RELEASES = tuple(f"0.{minor}.0" for minor in range(12, 34))

OUTPUT = Path("docs/engine_versions.json")
GGUF = "gguf==0.19.0"  # which the newest CPU build no longer requires
TRANSFORMERS_4 = ("transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub==0.36.0")  # required up to 0.19


def exported() -> list[tuple[dict[str, Any], dict[str, Any], int | None]]:
    """The line for every static method at ×4 of 8192 tokens, as `ctxext export` prints it, as cases."""
    config, found = AutoConfig.for_model(**json.loads(json.dumps(LLAMA))), []
    for method in list_methods("rope"):
        made = method.example(read_context(config).rope, 4)
        if isinstance(made, RopeScaling) and not made.in_attention:
            try:
                export = export_for("vllm", config, plan_extension(config, method=made), source=LLAMA)
            except NotExportable:
                continue
            command = parse_command(export.flags)
            found.append((LLAMA, command.overrides, command.length))
    return found


def run(release: str, cases: list[Any]) -> dict[str, Any]:
    """What one release does."""
    kept = RUNS / "versions" / f"{release}.json"
    if kept.is_file() and len((record := json.loads(kept.read_text()))["cases"]) == len(CASES) + len(cases):
        return record
    older = tuple(map(int, release.split("."))) < (0, 20)
    folders = (unpacked("vllm", release), beside(GGUF, *(TRANSFORMERS_4 if older else ())))
    path = os.pathsep.join(map(str, folders))
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary, "reads.json")
        more = Path(temporary, "cases.json")
        more.write_text(json.dumps(cases))
        worker = [VLLM.python, "benchmarks/engines/vllm_reads.py", output, more]
        subprocess.run(worker, check=True, env={**os.environ, "PYTHONPATH": path})
        record = json.loads(output.read_text())
    assert record["vllm"] == release, f"{release} was asked for, and {record['vllm']} ran"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(record))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", nargs="+", choices=RELEASES, default=RELEASES)
    releases = parser.parse_args().releases
    VLLM.ready(print)
    cases, grouped, on = exported(), list[dict[str, Any]](), dict[str, str]()
    for release in releases:
        began, record = time.perf_counter(), run(release, cases)
        on[release] = record["transformers"]
        for number, case in enumerate(record["cases"]):
            if release == releases[0]:
                grouped.append({key: case[key] for key in ("config", "overrides", "asked")} | {"did": []})
            case["does"].pop("says", None)
            same = [each for each in grouped[number]["did"] if each["does"] == case["does"]]
            if same:
                same[0]["versions"].append(release)
            else:
                grouped[number]["did"].append({"versions": [release], "does": case["does"]})
        print(f"vLLM {release} on transformers {on[release]}: {time.perf_counter() - began:.0f} s")
        told = {"command": "python benchmarks/engines/versions.py", "date": time.strftime("%Y-%m-%d"),
                "machine": machine("cpu"), "vllm": on}  # fmt: skip
        lines = ",\n".join(json.dumps(case) for case in grouped)
        OUTPUT.write_text(f'{json.dumps(told)[:-1]}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()

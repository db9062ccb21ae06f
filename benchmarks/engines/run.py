"""Engines run, not read: every static method served as `ctxext export` says, against transformers.

    python benchmarks/engines/run.py                  # every engine
    python benchmarks/engines/run.py --only mlx-lm    # one; finished cells are kept in runs/engines, it resumes there

Each engine has its own environment, at pinned versions, under ~/.cache/ctxext/engines (CTXEXT_ENGINES). Figures go to
docs/engines/ENGINE.json; the exit code is 1 if an engine is neither exact nor refused by export, or a mistake passes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from at_scale.cells import Budget, Store, run_part
from engines.built import InONNX, InOpenVINO
from engines.conformance import InLlamaCpp, InMLX, InVLLM
from engines.in_vllm import InVLLMPlugin
from engines.public import OnPublicModel
from engines.subjects import RUNS
from engines.transformers_serve import InTransformersServe

from ctxext.utils.machine import machine, versions

ENGINES = {part.name: part for part in (InLlamaCpp, InMLX, InONNX, InOpenVINO, InTransformersServe, InVLLM,
                                         InVLLMPlugin, OnPublicModel)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=ENGINES, action="append", help="this engine; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="two methods of the bundled model")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop before the cell that would take longer")
    parser.add_argument("--rounds", type=int, default=1, help="texts that judge each mistake, each with a probe")
    parser.add_argument("--output", type=Path, default=Path("docs/engines"), help="for the figures")
    parser.add_argument("--state", type=Path, help="for finished cells; by default, those of the public model are kept "
                        "beside its figures, as they take hours, and the others in runs/engines")  # fmt: skip
    options = parser.parse_args()
    short, budget = False, Budget(60 * options.minutes)
    for name in options.only or ENGINES:
        kept_in = options.output / "raw" if name == OnPublicModel.name else RUNS / "state"
        folder = (options.state or kept_in) / name
        folder.mkdir(parents=True, exist_ok=True)
        part = ENGINES[name](folder, "cpu", options.tiny, options.rounds)
        store = Store(folder / "cells.json")
        complete = run_part(part, store, budget, print)
        done = store.done(part.cells())
        kept = {cell: entry["value"] for cell, entry in done.items()}
        record = {"engine": part.title, "date": time.strftime("%Y-%m-%d"), "machine": machine("cpu"),
                  "versions": versions(), "complete": complete, **part.record(kept),
                  "seconds": round(sum(entry["seconds"] for entry in done.values()))}  # fmt: skip
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        wrong = [cell for cell, value in kept.items() if value.get("right") is False]
        for cell, value in record["differs unextended"].items():
            print(f"{name}: {cell} differs without any extension: {value.get('error') or value['mean']}")
        for cell in (*record["neither"], *wrong):
            value = kept[cell]
            print(f"{name}: {cell}: {value.get('error') or (value.get('verdict'), value.get('mean'))}")
        short |= bool(record["neither"] or wrong)
        print(f"{name}: {record['exact']} exact, {record['refused by export']} refused by export, "
              f"{len(record['neither'])} neither; {record['mistakes judged right']} of {record['mistakes']} mistakes "
              "judged right")  # fmt: skip
    sys.exit(short)


if __name__ == "__main__":
    main()

"""The measurements that convince: public models, real lengths; one command, part by part.

    python benchmarks/at_scale/run.py                        # every part that this machine can run
    python benchmarks/at_scale/run.py --only quality --minutes 28
    python benchmarks/at_scale/run.py --plan                 # what is left and how long it takes; runs nothing
    python benchmarks/at_scale/run.py --tiny                 # each part small, on a CPU in some minutes

A part is a list of cells. Finished cells and raw results are kept in docs/at_scale/raw, so that the same command
resumes, on this or another machine; the figures of what is done so far are written to docs/at_scale. With --tiny, all
of it goes to runs/at_scale-tiny.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from at_scale.cells import Budget, Store, measured_on, run_part
from at_scale.corners import Corners
from at_scale.estimate import estimate, printed
from at_scale.laws import Laws
from at_scale.planning import Planning
from at_scale.quality import Quality
from at_scale.speed import Speed
from at_scale.training import Training
from at_scale.wider import Double, Gemma, Octuple, Quadruple

WIDER = {part.name: part for part in (Double, Quadruple, Gemma, Octuple)}
PARTS = {
    "quality": Quality,
    "speed": Speed,
    "laws": Laws,
    "training": Training,
    "planning": Planning,
    **WIDER,
    "corners": Corners,
}


def positive(text: str) -> float:
    if not (value := float(text)) >= 0:  # NaN, too
        raise argparse.ArgumentTypeError(f"must be a number of minutes >= 0, got {text}")
    return value


def rounds(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument(
        "--minutes", type=positive, default=math.inf, help="stop before the cell that would take longer"
    )
    parser.add_argument("--plan", action="store_true", help="print cells, operations and time on a GPU; run nothing")
    parser.add_argument("--tiny", action="store_true", help="the bundled model, few samples: a rehearsal")
    parser.add_argument("--rounds", type=rounds, default=1, help="samples a cell, in multiples of the plan's")
    parser.add_argument("--output", type=Path, help="where figures and raw results are kept")
    options = parser.parse_args()
    output = options.output or Path("runs/at_scale-tiny" if options.tiny else "docs/at_scale")
    if options.plan:
        print(printed([estimate(PARTS[name], output / "raw", options.rounds) for name in options.only or PARTS]))
        return
    if options.tiny:
        print("A rehearsal: times and ratios mean nothing at this size.")
    here, budget = "cuda" if torch.cuda.is_available() else "cpu", Budget(60 * options.minutes)
    for name in options.only or PARTS:
        device = PARTS[name].only_on or here
        folder = output / "raw" / f"{name}-{device}"
        part = PARTS[name](folder, device, options.tiny, options.rounds)
        if part.missing:
            print(f"{name}: not run: {part.missing}.")
            continue
        store = Store(folder / "cells.json")
        try:
            complete = run_part(part, store, budget, print)
        except KeyboardInterrupt:
            print(f"{name}: interrupted. The same command resumes.")
            complete = False
        kept = store.done(part.cells())
        record = {
            "part": part.title,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            **{name: measured_on(kept, name) for name in ("machine", "cpu_capability", "versions")},
            "cells": len(kept),
            "complete": complete,
            "seconds": sum(cell["seconds"] for cell in kept.values()),
            **part.record({cell: entry["value"] for cell, entry in kept.items()}),
        }
        path = output / f"{name}-{device}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name}: {len(kept)} cells in {path}.")
        if not complete:
            sys.exit(1)


if __name__ == "__main__":
    main()

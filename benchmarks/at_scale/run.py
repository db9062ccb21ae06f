"""The measurements that convince: public models, real lengths; one command, part by part.

    python benchmarks/at_scale/run.py                        # every part that this machine can run
    python benchmarks/at_scale/run.py --only quality --minutes 28
    python benchmarks/at_scale/run.py --plan                 # what is left and how long it takes; runs nothing
    python benchmarks/at_scale/run.py --tiny                 # each part small, on a CPU in some minutes

A part is a list of cells. Finished cells and raw results are kept in docs/at_scale/raw, so that the same command
resumes, on this or another machine; started several times, it shares the texts of `quality`. The figures of what is
done so far are written to docs/at_scale. With --tiny, all of it goes to runs/at_scale-tiny.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from at_scale.cells import Budget, CellsFailed, Part, Store, measured_on, run_part
from at_scale.corners import Corners
from at_scale.estimate import estimate, printed
from at_scale.laws import Laws
from at_scale.planning import Planning
from at_scale.quality import Quality
from at_scale.speed import Speed
from at_scale.training import Training
from at_scale.wider import Double, Gemma, Octuple, Quadruple

from ctxext.utils.machine import device_name

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
    if options.plan and options.tiny:
        parser.error("--plan is of a full run; drop --tiny. A rehearsal prints its own time before it starts.")
    output = options.output or Path("runs/at_scale-tiny" if options.tiny else "docs/at_scale")
    if options.plan:
        print(printed([estimate(PARTS[name], output / "raw", options.rounds) for name in options.only or PARTS]))
        return
    if options.tiny:
        print("A rehearsal: times and ratios mean nothing at this size.")
    here, budget = "cuda" if torch.cuda.is_available() else "cpu", Budget(60 * options.minutes)
    complete = True
    for name in options.only or PARTS:
        if budget.left <= 0:
            sys.exit("The time is over. The same command resumes.")
        device = PARTS[name].only_on or here
        part = PARTS[name](output / "raw" / f"{name}-{device}", device, options.tiny, options.rounds)
        if part.missing:
            print(f"{name}: not run: {part.missing}.")
            complete &= not options.only
            continue
        try:
            complete &= measure(part, output / f"{name}-{device}.json", budget)
        except CellsFailed as error:
            print(error)
            complete = False
        except (ValueError, OSError) as error:
            print(f"{name}: not run: {error}")
            complete = False
        except KeyboardInterrupt:
            sys.exit(f"{name}: interrupted. The same command resumes.")
    if not complete:
        sys.exit(1)


def measure(part: Part, path: Path, budget: Budget) -> bool:
    """Measure what is missing, and write the figures of what is there; whether all of it is."""
    store = Store(part.folder / "cells.json")
    here = device_name(part.device)
    others = {of.split(", ")[-1] for of in measured_on(store.done(part.cells()), "machine")} - {here}
    if others:
        raise ValueError(
            f"{store.path} was measured on {', '.join(sorted(others))}. Choose another --output for {here}."
        )
    try:
        return run_part(part, store, budget, print)
    finally:
        with FileLock(part.folder / "figures.lock"):
            write(part, store.done(part.cells()), path)


def write(part: Part, kept: dict[str, dict[str, Any]], path: Path) -> None:
    """The figures of the cells that are kept, unless the file has those of more."""
    cells = len(part.cells())
    if path.is_file() and (published := json.loads(path.read_text()).get("cells", 0)) > len(kept):
        print(f"{part.name}: {path} has the figures of {published} cells, and is not replaced by those of {len(kept)}.")
        return
    record = {
        "part": part.title,
        "device": device_name(part.device),
        **{name: measured_on(kept, name) for name in ("machine", "cpu_capability", "versions")},
        "cells": len(kept),
        "complete": len(kept) == cells,
        "seconds": sum(cell["seconds"] for cell in kept.values()),
        **part.record({cell: entry["value"] for cell, entry in kept.items()}),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{part.name}: {len(kept)} of {cells} cells in {path}.")


if __name__ == "__main__":
    main()

"""What the benchmarks share: options, timing, and a report of a line a figure, a JSON file and the exit code."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.progress import track

from ctxext.utils.machine import versions

SMOLLM2 = Path("runs/SmolLM2-135M-Instruct")
WARM = 2  # rounds that are not counted


def options(doc: str | None, output: Path | str | None = None) -> argparse.ArgumentParser:
    """A parser of a benchmark with this docstring, which has --output already."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=output and Path(output))
    return parser


def kept(path: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The JSON in a file, which `work` makes if the file is not there."""
    if not path.is_file():
        made = work()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made))
    return json.loads(path.read_text())


def cpu_units() -> str:
    """The widest units that torch may use on this CPU: AMX, AVX512-BF16, or its own name for them."""
    widest = torch.backends.cpu.get_cpu_capability()
    if widest != "AVX512":
        return widest
    has = torch.cpu.get_capabilities()
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX")
    return "AMX" if has["amx_bf16"] and "AMX" in most else "AVX512-BF16" if has["avx512_bf16"] else widest


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(works: dict[str, Callable[[], object]], rounds: int, label: str) -> dict[str, list[float]]:
    """Seconds of each work in each round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    order, shuffle = list(works), random.Random(0).shuffle
    for _ in track(range(rounds), label):
        shuffle(order)  # a work is faster or slower by some per cent behind one work than behind another
        for name in order:
            times[name].append(seconds(works[name]))
    return times


def over(times: dict[str, list[float]], name: str, base: str, skip: int = WARM) -> float:
    """The median over rounds, the first `skip` left out, of the time of `name` over that of `base`."""
    return median(mine / theirs for mine, theirs in zip(times[name][skip:], times[base][skip:]))


def largest(values: Iterable[float]) -> float:
    """As `max`, but NaN where a value is NaN: `max` drops one that is not the first."""
    return float(np.max(list(values)))


@dataclass
class Report:
    """Figures with their bars. `finish` writes them and exits non-zero when one is short.

    Attributes:
        rehearsal: the sizes are too small for the bars, so that none is applied.
    """

    name: str
    seed: int
    rehearsal: bool = False
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, value: float, at_most: float | None = None, at_least: float | None = None) -> None:
        """One figure; without a bar it is there for comparison. One that is not finite is short."""
        if self.rehearsal:
            at_most = at_least = None
        ok = math.isfinite(value) and (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        bar = f"<= {at_most:g}" if at_most is not None else f">= {at_least:g}" if at_least is not None else "no bar"
        self.figures[name] = {"value": value, "bar": bar, "ok": ok}
        judged = "" if self.rehearsal else f" ({bar}) {'ok' if ok else 'short'}"
        print(f"{name} {value:.4g}{judged}", flush=True)

    def finish(self, path: Path, **more: Any) -> None:
        record = {
            "benchmark": self.name,
            "seed": self.seed,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {**versions(), "python": platform.python_version()},
            "figures": self.figures,
            **more,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        sys.exit(0 if all(figure["ok"] for figure in self.figures.values()) else 1)

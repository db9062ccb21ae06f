"""A row of docs/fidelity.md, and the spread of a number over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: what is compared, and in which unit.
        value: the number.
        at_most: the bar; None for a number without one.
        part: the source: a part of authors.json, or one that `run.origin` knows.
        n: over how many settings, tokens or samples.
    """

    name: str
    value: float
    at_most: float | None
    part: str
    n: str


def spread(seeds: Sequence[float]) -> dict[str, Any]:
    """The mean over seeds with its 95% interval (Student's t; none for one seed), and the seeds themselves."""
    middle, n = mean(seeds), len(seeds)
    half = float(student.ppf(0.975, n - 1)) * stdev(seeds) / math.sqrt(n) if n > 1 else None
    ends = [None, None] if half is None else [middle - half, middle + half]
    return {"value": middle, "low": ends[0], "high": ends[1], "seeds": list(seeds)}

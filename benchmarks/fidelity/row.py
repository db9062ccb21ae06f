"""A row of docs/fidelity.md: one number, its bar, its source and its command."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: what is compared, and in which unit.
        value: the number.
        at_most: the bar; None for a number without one.
        part: the source: a part of authors.json, or an entry of `run.SOURCES`.
        n: over how many settings, tokens or samples.
    """

    name: str
    value: float
    at_most: float | None
    part: str
    n: str

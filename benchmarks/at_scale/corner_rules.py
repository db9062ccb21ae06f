"""What the grid of corners shows: the best point of each model, and rules tested on models that did not choose them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from ctxext.evals.statistics import Difference, paired_loss_difference
from ctxext.evals.targets import UNEXTENDED
from ctxext.fitting.gradient import KEY_NATS, GradientSettings

# Turns within the trained length at which λ reaches the factor, turns at which it is 1, and c of the attention factor
# 1 + c ln(factor). YaRN's are 1, 32 and 0.1.
Point = tuple[float, float, float]
# In nats per token: how much the probe may lose below the corner where λ reaches the factor, and below the other.
THRESHOLDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)
ALL = slice(None)


def label(point: Point) -> str:
    return "{:g} to {:g}, {:g}".format(*point)


@dataclass(frozen=True)
class Grid:
    """What was measured on one model.

    Attributes:
        found: by method, `keys` (nats of each passkey, by length, text and depth), `long` and `short` (nats per token
            of each window) and `stretches` (of text, of the long windows).
        points: of the grid, those that were measured.
        probe: by log2 of turns, and of the baseline.
    """

    found: Mapping[str, Mapping[str, Any]]
    points: tuple[Point, ...]
    probe: Mapping[str, Mapping[str, Any]]

    @property
    def named(self) -> list[str]:
        """The named methods that were measured."""
        return [name for name in self.found if name != UNEXTENDED and name not in map(label, self.points)]

    # --------------------------------------------------------------------------------- one method

    def key(self, method: str, part: slice = ALL) -> float:
        """The mean loss of a passkey, in nats."""
        return _mean(loss for texts in self.found[method]["keys"].values() for text in texts[part] for loss in text)

    def text(self, method: str, part: slice = ALL) -> float:
        """The mean loss of text at the target length, in nats per token."""
        return _mean(self.found[method]["long"][part])

    def short(self, method: str, part: slice = ALL) -> float:
        """The short-context regression, in nats per token."""
        return _mean(self.found[method]["short"][part]) - _mean(self.found[UNEXTENDED]["short"][part])

    def objective(self, method: str, part: slice = ALL) -> float:
        """That of a fit, with the regression in the place of the divergence."""
        weights = GradientSettings()
        keys = self.found[method]["keys"].values()
        key = _mean(KEY_NATS * math.log1p(x / KEY_NATS) for texts in keys for text in texts[part] for x in text)
        return (
            weights.text * self.text(method, part)
            + weights.retrieval * key
            + weights.short * max(0.0, self.short(method, part))
        )

    # -------------------------------------------------------------------------------- comparisons

    def difference(self, one: str, other: str, kind: str, part: slice = ALL) -> Difference | None:
        """Paired, `one` - `other`: nats per passkey, or per token; None with fewer than two texts."""
        mine, theirs = self.found[one], self.found[other]
        if kind == "key":
            texts = [(length, k) for length, texts in mine["keys"].items() for k in range(len(texts))[part]]
            sums = [[sum(each["keys"][length][k]) for length, k in texts] for each in (mine, theirs)]
            counts, stretches = [len(mine["keys"][length][k]) for length, k in texts], None
        else:
            sums = [each[kind][part] for each in (mine, theirs)]
            counts = [1] * len(sums[0])
            stretches = mine["stretches"][part] if kind == "long" else None
        if len({*(stretches or range(len(counts)))}) < 2:
            return None
        return paired_loss_difference(*sums, counts, stretches)

    def against(self, method: str, others: Iterable[str], part: slice = ALL) -> dict[str, Any]:
        """`method` beside each of `others`: the paired differences, and whether it is ahead of all of them for sure."""
        beside = {
            other: {kind: self.difference(method, other, kind, part) for kind in ("key", "long", "short")}
            for other in others
        }
        return {
            "differences": {
                other: {kind: None if found is None else found._asdict() for kind, found in kinds.items()}
                for other, kinds in beside.items()
            },
            **{
                f"ahead on {kind}": all(
                    (found := kinds[kind]) is not None and found.high is not None and found.high < 0
                    for kinds in beside.values()
                )
                for kind in ("key", "long")
            },
        }

    def best(self, methods: Iterable[str], value: Callable[[str, slice], float], part: slice = ALL) -> str:
        return min(methods, key=lambda method: value(method, part))

    @cached_property
    def least(self) -> float:
        """The objective of the best named method."""
        return min(map(self.objective, self.named))

    def excess(self, point: Point) -> float:
        """The objective at `point` over that of the best named method."""
        return self.objective(label(point)) - self.least

    # -------------------------------------------------------------------------------------- probe

    @property
    def losses(self) -> dict[int, float]:
        """By log2 of turns, ascending: what interpolating that octave alone loses within the trained length, in nats
        per token."""
        base = _mean(self.probe[UNEXTENDED]["short"])
        octaves = sorted(int(name) for name in self.probe if name != UNEXTENDED)
        return {octave: _mean(self.probe[str(octave)]["short"]) - base for octave in octaves}

    def corner(self, threshold: float) -> float:
        """The turns up to which pairs can be interpolated, by the probe, for `threshold` nats per token in all."""
        lost = 0.0
        for octave, loss in self.losses.items():
            lost += max(0.0, loss)
            if lost > threshold:
                return 2.0**octave
        return 2.0 ** (max(self.losses) + 1)

    def predicted(self, slow: float, fast: float, c: float) -> Point:
        """The measured point nearest to the corners at two thresholds."""
        corners = self.corner(slow), self.corner(fast)

        def distance(point: Point) -> float:
            return sum(abs(math.log(at / corner)) for at, corner in zip(point, corners))

        return min((point for point in self.points if point[2] == c), key=distance)

    # ------------------------------------------------------------------------------------ in words

    def describe(self) -> dict[str, Any]:
        """Every method's figures; and the best point, chosen on every second text and compared on the others."""
        grid = [label(point) for point in self.points]
        chosen = {}
        for name, value in {"key": self.key, "text": self.text, "objective": self.objective}.items():
            point = self.best(grid, value, EVEN)
            chosen[name] = {"point": point, **self.against(point, [self.best(self.named, value, EVEN)], ODD)}
        return {
            "methods": {
                method: {
                    "key": self.key(method),
                    "hits": found["hits"],
                    "text": self.text(method),
                    "short": self.short(method),
                    "objective": self.objective(method),
                }
                for method, found in self.found.items()
            },
            "probe": self.losses,
            "chosen": chosen,
        }


def common(grids: Iterable[Grid]) -> list[Point]:
    """The points that were measured on all models."""
    first, *others = (grid.points for grid in grids)
    return [point for point in first if all(point in points for points in others)]


def of_others(others: Sequence[Grid], grid: Grid) -> Point:
    """The point that is best on the other models, of those measured on all."""
    return min(common([*others, grid]), key=lambda point: sum(other.excess(point) for other in others))


def of_probe(others: Sequence[Grid], grid: Grid) -> Point:
    """The corners where the probe's loss passes thresholds that are best on the other models."""
    temperatures = dict.fromkeys(point[2] for point in common([*others, grid]))
    settings = [(slow, fast, c) for slow, fast, c in product(THRESHOLDS, THRESHOLDS, temperatures) if slow <= fast]
    setting = min(settings, key=lambda at: sum(other.excess(other.predicted(*at)) for other in others))
    return grid.predicted(*setting)


RULES: dict[str, Callable[[Sequence[Grid], Grid], Point]] = {
    "best on the other models": of_others,
    "from the probe": of_probe,
}


def by_rule(grids: Mapping[str, Grid]) -> dict[str, Any]:
    """Each rule on each model, chosen without it: the point, and how it compares with every named method."""
    found: dict[str, Any] = {}
    for rule, predict in RULES.items():
        for name, grid in grids.items():
            others = [other for key, other in grids.items() if key != name]
            if others:
                point = predict(others, grid)
                found.setdefault(rule, {})[name] = {
                    "point": label(point),
                    "excess": grid.excess(point),
                    **grid.against(label(point), grid.named),
                }
    return found


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan

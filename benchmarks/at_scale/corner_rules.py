"""What the grid of corners shows: the best point of each model, and rules tested on models that did not choose them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ctxext.evals.perplexity import stretches
from ctxext.evals.statistics import Difference, paired_loss_difference
from ctxext.evals.targets import UNEXTENDED
from ctxext.fitting.gradient import KEY_NATS, GradientSettings

# Turns within the trained length at which λ reaches the factor, turns at which it is 1, and c of the attention factor
# 1 + c ln(factor). YaRN's are 1, 32 and 0.1.
Point = tuple[float, float, float]
# In nats per token: how much the probe may lose below the corner where λ reaches the factor, and below the other.
THRESHOLDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
# Where samples begin and end in the text, as shares of it: the first half chooses, the second compares. Windows may
# reach around its end.
FIRST, SECOND, ALL = (0.0, 0.5), (0.5, 1.0), (0.0, 2.0)
Half = tuple[float, float]


def label(point: Point) -> str:
    return "{:g} to {:g}, {:g}".format(*point)


@dataclass(frozen=True)
class Grid:
    """What was measured on one model.

    Attributes:
        found: by method, `keys` (nats of each passkey, by length, text and depth), `long` and `short` (nats per token
            of each window), `hits` (passkeys found, by length), and of the baseline `places`: where in the text the
            samples of every method begin and end, as shares of it, by length for `keys`, of `long` and `short`.
        points: of the grid, those that were measured.
        probe: by log2 of turns, and of the baseline.
    """

    found: Mapping[str, Mapping[str, Any]]
    points: tuple[Point, ...]
    probe: Mapping[str, Mapping[str, Any]]

    @property
    def places(self) -> Mapping[str, Sequence[tuple[float, float]]]:
        return self.found[UNEXTENDED]["places"]

    def within(self, kind: str, half: Half) -> list[int]:
        """The samples of `kind` that lie in this part of the text; one across its middle or end is in neither half."""
        return [k for k, (begin, end) in enumerate(self.places[kind]) if half[0] <= begin and end <= half[1]]

    @property
    def named(self) -> list[str]:
        """The named methods that were measured."""
        return [name for name in self.found if name != UNEXTENDED and name not in map(label, self.points)]

    # --------------------------------------------------------------------------------- one method

    def keys(self, method: str, half: Half) -> list[list[float]]:
        """For each text in this half, the losses of its passkeys in nats, by depth."""
        keys = self.found[method]["keys"]
        return [keys[length][k] for length in keys for k in self.within(length, half)]

    def windows(self, method: str, kind: str, half: Half) -> list[float]:
        """For each window of `long` or `short` in this half, its loss in nats per token."""
        return [self.found[method][kind][k] for k in self.within(kind, half)]

    def key(self, method: str, half: Half = ALL) -> float:
        """The mean loss of a passkey, in nats."""
        return _mean(loss for text in self.keys(method, half) for loss in text)

    def text(self, method: str, half: Half = ALL) -> float:
        """The mean loss of text at the target length, in nats per token."""
        return _mean(self.windows(method, "long", half))

    def short(self, method: str, half: Half = ALL) -> float:
        """The short-context regression, in nats per token."""
        return _mean(self.windows(method, "short", half)) - _mean(self.windows(UNEXTENDED, "short", half))

    def objective(self, method: str, half: Half = ALL) -> float:
        """That of a fit, with the regression in the place of the divergence."""
        weights = GradientSettings()
        key = _mean(KEY_NATS * math.log1p(x / KEY_NATS) for text in self.keys(method, half) for x in text)
        return (
            weights.text * self.text(method, half)
            + weights.retrieval * key
            + weights.short * max(0.0, self.short(method, half))
        )

    # -------------------------------------------------------------------------------- comparisons

    def difference(self, one: str, other: str, kind: str, half: Half = ALL) -> Difference | None:
        """Paired, `one` - `other`: nats per passkey, or per token. Samples whose texts overlap count as one; None if
        there are fewer than two."""
        if kind == "key":
            texts = [self.keys(method, half) for method in (one, other)]
            sums, counts = [[sum(text) for text in each] for each in texts], [len(text) for text in texts[0]]
        else:
            sums = [self.windows(method, kind, half) for method in (one, other)]
            counts = [1] * len(sums[0])
        kinds = self.found[one]["keys"] if kind == "key" else (kind,)
        places = [self.places[of][k] for of in kinds for k in self.within(of, half)]
        of = stretches([begin for begin, _ in places], [end - begin for begin, end in places], 1)
        return paired_loss_difference(*sums, counts, of) if len({*of}) > 1 else None

    def against(self, method: str, others: Iterable[str]) -> dict[str, Any]:
        """`method` beside each of `others` on the second half: the paired differences, and whether it is significantly
        ahead of all."""
        beside = {
            other: {kind: self.difference(method, other, kind, SECOND) for kind in ("key", "long", "short")}
            for other in others
        }
        return {
            "differences": {
                other: {kind: None if found is None else found._asdict() for kind, found in kinds.items()}
                for other, kinds in beside.items()
            },
            **{
                f"ahead on {kind}": all(
                    (found := kinds[kind]) is not None and found.high < 0 and found.p < 0.05
                    for kinds in beside.values()
                )
                for kind in ("key", "long")
            },
        }

    def best(self, methods: Iterable[str], value: Callable[[str, Half], float]) -> str:
        """By the first half of the text."""
        return min(methods, key=lambda method: value(method, FIRST))

    def excess(self, point: Point, half: Half) -> float:
        """The objective at `point` over that of the best named method."""
        return self.objective(label(point), half) - min(self.objective(method, half) for method in self.named)

    # -------------------------------------------------------------------------------------- probe

    @property
    def losses(self) -> dict[int, float]:
        """By log2 of turns, ascending: what interpolating that octave alone loses within the trained length, in nats
        per token of the first half of the text."""
        octaves, chosen = sorted(int(name) for name in self.probe if name != UNEXTENDED), self.within("short", FIRST)
        lost = {name: _mean(found["short"][k] for k in chosen) for name, found in self.probe.items()}
        return {octave: lost[str(octave)] - lost[UNEXTENDED] for octave in octaves}

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
        """Every method's figures; and the best point, chosen on one half of the text and compared on the other."""
        grid = [label(point) for point in self.points]
        chosen = {}
        for name, value in {"key": self.key, "text": self.text, "objective": self.objective}.items():
            point = self.best(grid, value)
            chosen[name] = {"point": point, **self.against(point, [self.best(self.named, value)])}
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
            "samples": {kind: [len(self.within(kind, half)) for half in (ALL, FIRST, SECOND)] for kind in self.places},
            "chosen": chosen,
        }


def common(grids: Iterable[Grid]) -> list[Point]:
    """The points that were measured on all models."""
    first, *others = (grid.points for grid in grids)
    return [point for point in first if all(point in points for points in others)]


def of_others(others: Sequence[Grid], grid: Grid) -> Point:
    """The point that is best on the other models, of those measured on all."""
    return min(common([*others, grid]), key=lambda point: sum(other.excess(point, FIRST) for other in others))


def of_probe(others: Sequence[Grid], grid: Grid) -> Point:
    """The corners where the probe's loss passes thresholds that are best on the other models."""
    temperatures = dict.fromkeys(point[2] for point in common([*others, grid]))
    settings = [(slow, fast, c) for slow, fast, c in product(THRESHOLDS, THRESHOLDS, temperatures) if slow <= fast]
    setting = min(settings, key=lambda at: sum(other.excess(other.predicted(*at), FIRST) for other in others))
    return grid.predicted(*setting)


RULES: dict[str, Callable[[Sequence[Grid], Grid], Point]] = {
    "best on the other models": of_others,
    "from the probe": of_probe,
}


def by_rule(grids: Mapping[str, Grid]) -> dict[str, Any]:
    """Each rule on each model, chosen without it and on the first half of the text: the point, and how it compares with
    every named method on the second half."""
    found: dict[str, Any] = {}
    for rule, predict in RULES.items():
        for name, grid in grids.items():
            others = [other for key, other in grids.items() if key != name]
            if others:
                point = predict(others, grid)
                found.setdefault(rule, {})[name] = {
                    "point": label(point),
                    "excess": grid.excess(point, SECOND),
                    **grid.against(label(point), grid.named),
                }
    return found


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan

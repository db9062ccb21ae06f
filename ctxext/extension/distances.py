"""The distances that attention sees with a method that remaps positions: numbers and a terminal chart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ctxext.encodings.rope import RopeGeometry
from ctxext.extension.rope import RopePlan
from ctxext.methods import PositionRemapping

COLUMNS, ROWS = 64, 12


@dataclass(frozen=True)
class Distances:
    """How far keys are from the last query of a text.

    Attributes:
        title: the method, and the lengths.
        trained_length: in tokens.
        true, effective: of some keys, the nearest first, in tokens.
    """

    title: str
    trained_length: int
    true: Int[Tensor, " key"]
    effective: Float64[Tensor, " key"]

    @property
    def summary(self) -> str:
        """What the chart shows, in a sentence."""
        changed = (self.effective != self.true).nonzero()
        exact = int(self.true[int(changed[0]) - 1 if len(changed) else -1])
        return (
            f"Seen from the last token, distances up to {exact:,} tokens are exact. The largest is "
            f"{float(self.effective.max()):,.0f} instead of {int(self.true[-1]):,}."
        )

    def chart(self) -> list[str]:
        """Lines of text: true distances from left to right, effective ones from the bottom to the trained length."""
        highest = max(self.trained_length, float(self.effective.max()))
        rows = [[" "] * COLUMNS for _ in range(ROWS)]
        for column, key in enumerate(torch.linspace(0, len(self.true) - 1, COLUMNS).round().long().tolist()):
            rows[round(float(self.effective[key]) / highest * (ROWS - 1))][column] = "●"
        names = {ROWS - 1: f"{highest:,.0f}", 0: "0"}
        lines = [self.title, "effective distance in tokens"]
        lines += [f"{names.get(row, ''):>9} │{''.join(rows[row])}".rstrip() for row in reversed(range(ROWS))]
        lines.append(f"{'':9} └{'─' * COLUMNS}")
        lines.append(f"{'':10} true distance from the last token, 0 to {int(self.true[-1]):,}")
        return [*lines, self.summary]


def distances(method: PositionRemapping, rope: RopeGeometry, length: int, title: str = "", step: int = 1) -> Distances:
    """The distances of every `step`th key, and of the first, from the last of `length` tokens."""
    true = torch.arange(0, length, step)
    true[-1] = length - 1
    effective = method.distance(rope, torch.tensor(length - 1), length - 1 - true)
    return Distances(title, rope.original_max_position_embeddings, true, effective)


def distances_of(plan: RopePlan) -> Distances | None:
    """The distances at the target length; None if the method keeps positions as they are."""
    method, length = plan.untempered, plan.target_length
    if not isinstance(method, PositionRemapping):
        return None
    return distances(method, plan.rope, length, plan.summary, step=max(1, length // 4096))

"""Which pairs of rotary dimensions turn how often, before and after an extension: numbers and a terminal chart."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float64
from torch import Tensor

from ctxext.encodings.rope import rotations
from ctxext.extension.rope import RopePlan
from ctxext.methods import PositionRemapping

COLUMNS = 64
TRAINED, SEEN, NEW = "○", "●", "×"
# Relative: a pair that is fully interpolated ends on the last trained phase, up to rounding.
ROUNDING = 1e-6


@dataclass(frozen=True)
class PairTurns:
    """The turns of each pair of one RoPE table, fastest pair first.

    A pair that completes a turn within the trained length has shown the model every phase. One that does not meets new
    phases beyond it, unless a method slows it down.

    Attributes:
        title: the extension, and the layers where a model has several tables.
        trained_length, target_length: in tokens.
        trained: turns within the trained length, unscaled or as they were before this extension.
        target: turns within the target length, extended.
    """

    title: str
    trained_length: int
    target_length: int
    trained: Float64[Tensor, " pair"]
    target: Float64[Tensor, " pair"]

    @property
    def unfinished(self) -> Tensor:
        """The pairs that complete no turn within the trained length."""
        return self.trained < 1

    @property
    def new(self) -> Tensor:
        """The pairs that reach phases at the target length that they never had in training."""
        return self.unfinished & (self.target > self.trained * (1 + ROUNDING))

    @property
    def summary(self) -> str:
        """What the chart shows, in a sentence or two."""
        n, unfinished, new = len(self.trained), int(self.unfinished.sum()), int(self.new.sum())
        if not unfinished:
            return f"All {n} pairs complete a turn within {self.trained_length:,} tokens: no phase is new."
        which = {0: "none of them does", unfinished: "they still do"}.get(new, f"{new} of them do")
        return (
            f"{unfinished} of {n} pairs complete no turn within {self.trained_length:,} tokens, and unextended reach "
            f"new phases at {self.target_length:,}. Extended, {which}."
        )

    def chart(self) -> list[str]:
        """Lines of text: pairs from left to right, a row for each power of two of turns."""
        lowest = math.floor(float(self.trained.min().log2()))
        highest = math.floor(float(max(self.trained.max(), self.target.max()).log2()))
        each = math.ceil(len(self.trained) / COLUMNS)
        rows = {octave: [" "] * math.ceil(len(self.trained) / each) for octave in range(highest, lowest - 1, -1)}

        def row(turns: float) -> list[str]:
            # A pair that does not rotate is drawn in the lowest row.
            return rows[max(lowest, math.floor(math.log2(turns)))]

        for pair in range(0, len(self.trained), each):
            row(float(self.trained[pair]))[pair // each] = TRAINED
            row(float(self.target[pair]))[pair // each] = NEW if self.new[pair] else SEEN
        lines = [self.title, "turns"]
        for octave, cells in rows.items():
            label = f"{2**octave:,}" if octave >= 0 else f"1/{2**-octave}"
            lines.append(f"{label:>9} {'┼' if octave == 0 else '│'}{''.join(cells)}".rstrip())
        lines.append(f"{'':9} └{'─' * len(rows[highest])}")
        which = "every pair" if each == 1 else f"one pair in {each}"
        lines.append(f"{'':10} {which}, fastest first: {TRAINED} within {self.trained_length:,} tokens,")
        lines.append(f"{'':10} {SEEN} extended, within {self.target_length:,}, {NEW} there at phases never trained")
        return [*lines, self.summary]


def pair_turns(plan: RopePlan) -> list[PairTurns]:
    """The turns of each table that `plan` changes, of the layers with the largest window first.

    Raises:
        ValueError: the method maps positions and leaves the frequencies as they are.
    """
    if isinstance(plan.method, PositionRemapping):
        raise ValueError(
            f"{plan.method.name} keeps every frequency and maps distant tokens to trained distances, so there is no "
            "chart of frequencies. Choose a method that rescales them, such as yarn."
        )
    several = len(plan.ropes) > 1
    found = []
    for label, rope in plan.ropes.items():
        if several and (rope.inv_freq == plan.tables[label].inv_freq).all():
            continue
        trained = rotations(rope)
        target = plan.tables[label].inv_freq * plan.target_length / (2 * math.pi)
        title = plan.summary + f", {label}" * several
        found.append(PairTurns(title, rope.original_max_position_embeddings, plan.target_length, trained, target))
    return found

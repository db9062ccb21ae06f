"""Which pairs of rotary dimensions turn how often, before and after an extension: numbers and a terminal chart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from ctxext.encodings.rope import rotations
from ctxext.extension.rope import RopePlan, stopped, untrained
from ctxext.methods import PositionRemapping
from ctxext.models.context import ContextFacts

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
    def stopped(self) -> Tensor:
        """The pairs that the extension keeps from rotating."""
        return stopped(self.target, self.trained)

    @property
    def summary(self) -> str:
        """What the chart shows, in a few sentences."""
        stopped = int(self.stopped.sum())
        return self._new_phases() + f" {untrained(stopped)}." * bool(stopped)

    def _new_phases(self) -> str:
        n, unfinished, new = len(self.trained), int(self.unfinished.sum()), int(self.new.sum())
        if not unfinished:
            return f"All {n} pairs complete a turn within {self.trained_length:,} tokens: no angle is new."
        which = {0: "none does", unfinished: "they still do"}.get(new, f"{new} still {'do' if new > 1 else 'does'}")
        return (
            f"{unfinished} of {n} pairs complete no turn within {self.trained_length:,} tokens. Without the extension "
            f"they reach angles at {self.target_length:,} that training never showed; with it, {which}."
        )

    def chart(self) -> list[str]:
        """Lines of text: pairs from left to right, a row for each power of two of turns, and one for stopped pairs."""
        rotating = torch.cat((self.trained, self.target[~self.stopped])).log2().floor().int()
        highest, lowest = int(rotating.max()), int(rotating.min())
        each = math.ceil(len(self.trained) / COLUMNS)
        width = math.ceil(len(self.trained) / each)
        octaves = range(highest, lowest - 1, -1)
        names = [f"{2**octave:,}" if octave >= 0 else f"1/{2**-octave}" for octave in octaves]
        rows = {name: [" "] * width for name in [*names, "0"]}

        def row(turns: float) -> list[str]:
            return rows[names[highest - math.floor(math.log2(turns))]]

        for pair in range(0, len(self.trained), each):
            row(float(self.trained[pair]))[pair // each] = TRAINED
            end = rows["0"] if self.stopped[pair] else row(float(self.target[pair]))
            end[pair // each] = NEW if self.new[pair] else SEEN
        if not self.stopped.any():
            del rows["0"]
        lines = [self.title, "turns"]
        for name, cells in rows.items():
            lines.append(f"{name:>9} {'┼' if name == '1' else '│'}{''.join(cells)}".rstrip())
        lines.append(f"{'':9} └{'─' * width}")
        which = "every pair" if each == 1 else f"one pair in {each}"
        lines.append(f"{'':10} {which}, fastest first: {TRAINED} within {self.trained_length:,} tokens,")
        lines.append(f"{'':10} {SEEN} extended, within {self.target_length:,} ({NEW}: at angles that are new)")
        return [*lines, self.summary]


def turns_in_use(facts: ContextFacts) -> list[PairTurns]:
    """The turns of each table of a model that is scaled already.

    Raises:
        ValueError: its frequencies depend on the length of the text.
    """
    found = []
    for table in facts.tables:
        if table.scaling is not None and table.scaling.in_attention:
            raise ValueError(f"{facts.summary} scales by the length of the text, so there is no one chart of it.")
        original, rope = facts.original_rope_of(table), facts.rope_of(table)
        if len(facts.tables) > 1 and torch.equal(rope.inv_freq, original.inv_freq):
            continue
        title = facts.summary + f", {table.label}" * (len(facts.tables) > 1)
        start = original.original_max_position_embeddings
        found.append(PairTurns(title, start, facts.reach, rotations(original), rotations(rope)))
    return found


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

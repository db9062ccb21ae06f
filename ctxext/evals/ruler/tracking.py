"""Variable tracking: chains of assignments hidden in noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise
from random import Random
from string import ascii_uppercase
from typing import ClassVar

from ctxext.evals.prompts import Prompter
from ctxext.evals.ruler.fitting import GAP, Draft, RulerTask, bare_tokens, nvidia_search, tails
from ctxext.evals.ruler.niah import NOISE
from ctxext.evals.samples import Place, Scene
from ctxext.evals.words import distinct


@dataclass(frozen=True, kw_only=True)
class VariableTracking(RulerTask):
    """Which variables have this value, through chains of assignments? RULER, section 3.2.

    A worked example of at most 500 tokens comes before the text; its variables have three letters.

    Attributes:
        chains: the number of chains; the question is about the first.
        hops: assignments from one variable to the next in each chain.
    """

    tokens_to_generate: ClassVar[int] = 30
    template: ClassVar[str] = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        "Question: Find all variables that are assigned the value {query} in the text above."
    )
    # It ends with a space, and the answer of the example begins with another.
    lead: ClassVar[str] = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        "{variables} variables are assigned the value {query}, they are: "
    )

    chains: int = 1
    hops: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chains < 1 or self.hops < 1:
            raise ValueError(f"chains and hops must be >= 1, got {self.chains} and {self.hops}.")

    def fewest(self) -> int:
        return self.hops

    def step(self, length: int) -> int:
        return 10 if length >= 4096 else 5

    def draft(self, scene: Scene, rng: Random, units: int) -> Draft:
        """`units` counts lines of noise."""
        example = self._example(scene, rng)
        gap = [GAP] if self.exact else []
        puzzle = self._puzzle(rng, [*gap, *[NOISE] * units], 5, self.hops, rng)
        before = f"{NOISE}\n{NOISE}"
        return replace(puzzle, example=f"{example}\n\n", fills=(tails(before), tails(before, r"\S")))

    def _example(self, scene: Scene, rng: Random) -> str:
        lines = [NOISE] * _example_lines(self, scene.prompter)
        # NVIDIA's code writes one example per length, and renames its variables in every sample.
        layout = rng if self.exact else replace(scene.place, trial=0).rng("layout")
        puzzle = self._puzzle(rng, lines, 3, self._example_hops, layout)
        return f"{puzzle.text}{puzzle.lead} {' '.join(puzzle.references)}"

    @property
    def _example_hops(self) -> int:
        return self.hops if self.exact else min(self.hops, 10)

    def _puzzle(self, rng: Random, lines: list[str], letters: int, hops: int, layout: Random) -> Draft:
        names = distinct(lambda: "".join(rng.choices(ascii_uppercase, k=letters)))
        # As numpy's randint(10000, 99999).
        values = distinct(lambda: str(rng.randrange(10_000, 99_999)))
        chains = []
        for value in islice(values, self.chains):
            chain = list(islice((name for name in names if name != "VAR"), hops + 1))
            steps = [f"VAR {name} = VAR {before} " for before, name in pairwise(chain)]
            assignments = [f"VAR {chain[0]} = {value}", *steps]
            places = sorted(layout.sample(range(len(lines)), len(chain)))
            for k, place in enumerate(places):
                lines.insert(place + k, assignments[k])
            chains.append((value, chain, assignments))
        value, variables, _ = chains[0]
        return Draft.of(
            self.template,
            self.lead,
            "\n".join(lines),
            # NVIDIA's example names this number even if it has fewer variables.
            {"query": value, "variables": self.hops + 1},
            references=tuple(variables),
            needles=tuple(step.strip() for *_, assignments in chains for step in assignments),
        )

    def nvidia_tokens(self, scene: Scene, draft: Draft) -> tuple[int, int]:
        """The example does not grow with the units."""
        grows, room = super().nvidia_tokens(scene, replace(draft, example=""))
        return grows, room + bare_tokens(scene.prompter, draft.example.removesuffix("\n"))


@lru_cache(maxsize=64)
def _example_lines(task: VariableTracking, prompter: Prompter) -> int:
    """The most lines of noise with which the example, without its answer, has at most 500 tokens."""
    rng = Place(task.name, 500, None, 0, 0).rng("example")

    def count(lines: int) -> int:
        puzzle = task._puzzle(rng, [NOISE] * lines, 3, task._example_hops, rng)
        return bare_tokens(prompter, puzzle.text + puzzle.lead)

    # NVIDIA's search begins with five lines; a chain needs as many as it has variables.
    return nvidia_search(count, 500, max(5, task._example_hops + 1), 100)

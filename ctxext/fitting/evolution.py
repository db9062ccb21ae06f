"""LongRoPE's search: a population of λ, bred under an objective. Ding et al. (2024), sections 3.2 and 4.

The search is a function of its settings and of the scores alone. Scores are written as they come, so a search that was
stopped is run again from its beginning, over the scores that are there, and goes on bit for bit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from ctxext.encodings.rope import RopeGeometry
from ctxext.extension.method_file import check_writable
from ctxext.fitting.objectives import Score
from ctxext.methods import LongRoPE, RopeScaling, make_method
from ctxext.utils.values import counted

# Named methods of the first population.
FOUNDERS = ("pi", "ntk", "ntk_by_parts", "yarn", "llama3")


@dataclass(frozen=True, kw_only=True)
class EvolutionSettings:
    """How λ is searched for. Sizes and probabilities are those of the paper's appendix.

    Attributes:
        population: candidates of the first generation, the named methods among them; `parents` live on at each.
        mutations, crossovers: children of each generation.
        probability: of each number of a parent to change in a mutation.
        step: λ are multiples of it above 1.
        minutes, evaluations: end at the first of the two that is used up; None for no end but the iterations.
    """

    population: int = 64
    parents: int = 32
    iterations: int = 40
    mutations: int = 16
    crossovers: int = 16
    probability: float = 0.3
    step: float = 0.01
    minutes: float | None = None
    evaluations: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (self.population, self.parents, self.iterations, self.mutations, self.crossovers)
        if min(sizes) < 1 or self.parents < 2 or not 0 < self.probability <= 1 or not 0 < self.step < 1:
            raise ValueError(
                "population, iterations, mutations and crossovers must be >= 1, parents >= 2, probability and step "
                f"between 0 and 1, got {self}."
            )
        if self.population < len(FOUNDERS) or (self.evaluations is not None and self.evaluations < len(FOUNDERS)):
            raise ValueError(
                f"population and evaluations must be at least {len(FOUNDERS)}, so that every founder "
                f"({', '.join(FOUNDERS)}) is measured; got {self.population} and {self.evaluations}."
            )
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be > 0, got {self.minutes}.")


@dataclass(frozen=True)
class Candidate:
    """λ in steps above 1, and the attention factor in steps above 0: whole numbers, so that equal ones are equal."""

    rescale: tuple[int, ...]
    attention: int


@dataclass
class Search:
    """The outcome of a search.

    Attributes:
        founders: the scores of the named methods that it began with.
        best: the score of `method`; `history` has the best one after each generation.
    """

    method: LongRoPE
    best: Score
    founders: dict[str, Score]
    history: list[Score] = field(default_factory=list)
    evaluations: int = 0


class Memory:
    """Scores, in a file if there is one, written as they come.

    Args:
        identity: what the scores depend on, JSON-ready.
        writes: whether this process writes the file. All read it.
        width: candidates that are scored at once, one in each process.

    Raises:
        ValueError: the file holds the scores of another search, or is none of ours.
        OSError: it cannot be written.
    """

    def __init__(
        self, path: Path | None = None, identity: dict[str, Any] | None = None, *, writes: bool = True, width: int = 1
    ) -> None:
        self.scores: dict[Candidate, Score] = {}
        self.width = width
        self._path, self._identity = path if writes else None, identity
        if self._path is not None:
            check_writable(self._path)
        if path is not None and path.is_file():
            self._read(path)

    def add(self, scores: dict[Candidate, Score]) -> None:
        self.scores.update(scores)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                # Not before, as other processes may still be looking whether there is a file.
                if not file.tell():
                    file.write(json.dumps({"search": self._identity}) + "\n")
                for candidate, score in scores.items():
                    file.write(json.dumps({**asdict(candidate), "score": score}) + "\n")

    def _read(self, path: Path) -> None:
        try:
            first, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            known = json.loads(first)["search"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the file of a search. Choose another name.") from error
        if known != json.loads(json.dumps(self._identity)):
            told = self._identity or {}
            differ = [key for key in {**known, **told} if known.get(key) != told.get(key)]
            raise ValueError(
                f"{path} holds another search: {', '.join(sorted(differ))} differ. Choose another file, or remove it."
            )
        if lines and not lines[-1].endswith("\n"):  # of a search that was killed as it wrote
            cut = lines.pop()
            if self._path is not None:
                os.truncate(path, path.stat().st_size - len(cut.encode()))
        for number, line in enumerate(lines, start=2):
            try:
                row = json.loads(line)
                self.scores[Candidate(tuple(row["rescale"]), row["attention"])] = Score(*row["score"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is corrupt at line {number}. Remove that line, or the file.") from error


class Evolution:
    """One search.

    Args:
        rope: of the model. `factor` is target length / trained length.
        score: of a list of methods, in order; it may share them among processes.
        memory: the file of scores; None keeps none. `identity` is what they depend on.
        advance: called with the share that is done and the best score.
        elapsed: minutes since the beginning, the same in every process.

    Raises:
        ValueError: `memory` holds the scores of another search.
    """

    def __init__(
        self,
        rope: RopeGeometry,
        factor: float,
        score: Callable[[Sequence[RopeScaling]], list[Score]],
        settings: EvolutionSettings = EvolutionSettings(),
        *,
        memory: Memory | None = None,
        advance: Callable[[float, str], None] = lambda share, state: None,
        elapsed: Callable[[], float] | None = None,
    ) -> None:
        began = time.perf_counter()
        self.rope, self.factor, self.settings = rope, factor, settings
        self._score, self._advance = score, advance
        self._memory = memory or Memory()
        self._elapsed = elapsed or (lambda: (time.perf_counter() - began) / 60)
        self._known: dict[Candidate, Score] = {}
        self._most = round((1.25 * factor - 1) / settings.step)  # the paper's end of the search space

    def run(self) -> Search:
        """Search until the budget is used up."""
        settings, rng = self.settings, Random(f"evolution {self.settings.seed}")
        founders = {name: self._founder(name) for name in FOUNDERS}
        self._measure(list(founders.values()), needed=True)
        search = Search(
            method=self.method_of(min(founders.values(), key=self._known.__getitem__)),
            best=min(self._known.values()),
            founders={name: self._known[candidate] for name, candidate in founders.items()},
        )
        parents = list(founders.values())
        population = self._bred(settings.population - len(founders), partial(self._mutant, rng, parents))
        for iteration in range(settings.iterations + 1):
            whole = self._measure(population)
            parents = sorted(self._known, key=self._known.__getitem__)[: settings.parents]
            search.method, search.best = self.method_of(parents[0]), self._known[parents[0]]
            search.history.append(search.best)
            if not whole or iteration == settings.iterations:
                break
            population = [
                *self._bred(settings.mutations, partial(self._mutant, rng, parents)),
                *self._bred(settings.crossovers, partial(self._cross, rng, parents)),
            ]
        search.evaluations = len(self._known)
        return search

    def method_of(self, candidate: Candidate) -> LongRoPE:
        """The method that a candidate stands for."""
        step = self.settings.step
        return LongRoPE(
            factor=self.factor,
            long_factor=tuple(1 + step * steps for steps in candidate.rescale),
            attention_factor=step * candidate.attention,
            fitted_to=(self.rope.rope_theta, self.rope.original_max_position_embeddings),
        )

    def _founder(self, name: str) -> Candidate:
        method, step = make_method(name, self.factor), self.settings.step
        assert isinstance(method, RopeScaling)
        rescale = method.rescale_factors(self.rope).tolist()
        return Candidate(
            tuple(max(0, round((value - 1) / step)) for value in rescale),
            round(float(method.attention_scaling(self.rope)) / step),
        )

    def _mutant(self, rng: Random, parents: Sequence[Candidate]) -> Candidate:
        """Each number of a parent is drawn anew by chance: λ between its neighbours, so that it never falls."""
        parent = rng.choice(parents)
        rescale = list(parent.rescale)
        for pair in range(len(rescale)):
            if rng.random() < self.settings.probability:
                low = rescale[pair - 1] if pair else 0
                high = rescale[pair + 1] if pair + 1 < len(rescale) else self._most
                rescale[pair] = rng.randint(low, max(low, high))
        attention = parent.attention
        if rng.random() < self.settings.probability:
            attention = max(1, attention + rng.choice((-2, -1, 1, 2)))
        return Candidate(tuple(rescale), attention)

    def _cross(self, rng: Random, parents: Sequence[Candidate]) -> Candidate:
        """Each number from one of two parents; where λ would fall, the one before it."""
        one, other = rng.sample(parents, 2)
        rescale: list[int] = []
        for pair in zip(one.rescale, other.rescale):
            rescale.append(max(rng.choice(pair), rescale[-1] if rescale else 0))
        return Candidate(tuple(rescale), rng.choice((one.attention, other.attention)))

    def _bred(self, count: int, breed: Callable[[], Candidate]) -> list[Candidate]:
        """New candidates; fewer where a hundred attempts each bring only known ones."""
        new: dict[Candidate, None] = {}
        for _ in range(100 * count):
            child = breed()
            if child not in self._known:
                new[child] = None
            if len(new) == count:
                break
        return list(new)

    def _measure(self, candidates: Sequence[Candidate], needed: bool = False) -> bool:
        """Score candidates; False where the budget ended before the last. The `needed` ones are scored first of all."""
        for at in range(0, len(candidates), self._memory.width):
            if self._share() >= 1 and needed:
                raise ValueError(
                    f"{counted(self.settings.minutes, 'minute')} is not enough: {len(self._known)} of the "
                    f"{len(FOUNDERS)} named methods took {self._elapsed():.2g}. Allow more, or fewer or "
                    "shorter windows."
                )
            if self._share() >= 1:
                break
            part = [candidate for candidate in candidates[at : at + self._memory.width] if candidate not in self._known]
            if self.settings.evaluations is not None and not needed:
                part = part[: self.settings.evaluations - len(self._known)]
            fresh = [candidate for candidate in part if candidate not in self._memory.scores]
            if fresh:
                found = self._score([self.method_of(candidate) for candidate in fresh])
                self._memory.add(dict(zip(fresh, found)))
            self._known.update({candidate: self._memory.scores[candidate] for candidate in part})
            best = min(self._known.values())
            self._advance(min(1.0, self._share()), f"{len(self._known)} read, best {best.value:.4f} nats")
        return all(candidate in self._known for candidate in candidates)

    def _share(self) -> float:
        """How much of the budget is used."""
        settings = self.settings
        whole = settings.population + settings.iterations * (settings.mutations + settings.crossovers)
        used = [len(self._known) / whole]
        if settings.evaluations is not None:
            used.append(len(self._known) / settings.evaluations)
        if settings.minutes is not None:
            used.append(self._elapsed() / settings.minutes)
        return max(used)

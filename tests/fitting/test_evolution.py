"""The search: what it asks for and what it keeps, over scores that are a formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ctxext.encodings.rope import RopeGeometry
from ctxext.fitting.evolution import FOUNDERS, Evolution, EvolutionSettings, Memory, Search
from ctxext.fitting.objectives import Score
from ctxext.methods import LongRoPE, make_method

ROPE = RopeGeometry.plain(16, 10_000.0, 64)
FACTOR = 4.0
SMALL = EvolutionSettings(population=12, parents=6, iterations=6, mutations=5, crossovers=4)
# λ that no founder is near to.
BEST = torch.tensor([1.0, 1.0, 1.3, 1.3, 2.2, 2.9, 4.4, 4.5], dtype=torch.float64)


def distance(method: LongRoPE) -> float:
    """From BEST, with an attention factor of 1.1: what these searches make small."""
    off = method.rescale_factors(ROPE).log() - BEST.log()
    return float((off**2).sum()) + (method.attention_factor - 1.1) ** 2


class Scores:
    """Scores methods by `distance`, remembers them, and may break down after some."""

    def __init__(self, ends_after: float = math.inf, excess: Callable[[LongRoPE], float] = lambda method: 0.0) -> None:
        self.asked: list[LongRoPE] = []
        self.ends_after, self.excess = ends_after, excess

    def __call__(self, methods: Sequence[LongRoPE]) -> list[Score]:
        for method in methods:
            if len(self.asked) >= self.ends_after:
                raise KeyboardInterrupt
            self.asked.append(method)
        return [Score(self.excess(method), distance(method), 0.0) for method in methods]


def searched(score: Scores, settings: EvolutionSettings = SMALL, memory: Memory | None = None) -> Search:
    return Evolution(ROPE, FACTOR, score, settings, memory=memory).run()


def test_a_search_is_a_function_of_its_seed_and_its_scores() -> None:
    one, other = Scores(), Scores()
    assert searched(one) == searched(other)
    assert one.asked == other.asked
    assert searched(Scores(), EvolutionSettings(**{**vars(SMALL), "seed": 1})).method != searched(Scores()).method


def test_every_candidate_is_monotone_and_within_the_space_and_is_asked_for_once() -> None:
    score = Scores()
    found = searched(score)
    assert len(set(score.asked)) == len(score.asked) == found.evaluations
    for method in score.asked:
        rescale = method.rescale_factors(ROPE)
        assert (rescale.diff() >= 0).all()
        assert rescale.min() >= 1
        assert rescale.max() <= 1.25 * FACTOR
        assert method.factor == FACTOR
        assert method.fitted_to == (10_000.0, 64)
        assert method.attention_factor > 0


def test_the_first_population_is_the_named_methods_to_a_step_and_their_mutants() -> None:
    score = Scores()
    found = searched(score, EvolutionSettings(**{**vars(SMALL), "iterations": 1}))
    for name, method in zip(FOUNDERS, score.asked):
        named = make_method(name, FACTOR)
        off = method.rescale_factors(ROPE) - named.rescale_factors(ROPE)
        assert off.abs().max() <= SMALL.step / 2 + 1e-9
        assert abs(method.attention_factor - float(named.attention_scaling(ROPE))) <= SMALL.step / 2 + 1e-9
        assert found.founders[name].value == distance(method)
    # No budget: the iterations are all that ends it.
    assert found.evaluations == SMALL.population + SMALL.mutations + SMALL.crossovers
    assert len(found.history) == 2


def test_a_search_comes_nearer_than_its_best_founder_and_never_goes_back() -> None:
    score = Scores()
    found = searched(score)
    values = [found.value for found in found.history]
    assert values == sorted(values, reverse=True)
    assert found.best.value == distance(found.method) == min(map(distance, score.asked))
    assert found.best.value < 0.8 * min(founder.value for founder in found.founders.values())
    assert searched(Scores(), EvolutionSettings(population=5, iterations=1, mutations=1, crossovers=1)).best <= min(
        found.founders.values()
    )


def test_what_passes_the_limit_loses_to_all_that_keep_it() -> None:
    def steep(method: LongRoPE) -> float:
        return max(0.0, method.long_factor[-1] - 4.0)  # of which BEST has more

    found = searched(Scores(excess=steep))
    assert found.best.excess == 0.0
    assert found.method.long_factor[-1] <= 4.0 < searched(Scores()).method.long_factor[-1]


# ----------------------------------------------------------------------------------------------------- memory

IDENTITY = {"model": "a", "lengths": [64, 256], "objective": {"windows": 2}}


def reads(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]


@pytest.mark.parametrize("cut", [0, 1, 40], ids=["between lines", "at a line's end", "within a line"])
def test_a_search_that_is_killed_again_and_again_ends_as_an_undisturbed_one(cut: int, tmp_path: Path) -> None:
    path, whole = tmp_path / "new/search.jsonl", Scores()
    undisturbed, asked = searched(whole), []
    for ends_after in (7, 9, 11):
        score = Scores(ends_after=ends_after)
        with pytest.raises(KeyboardInterrupt):
            searched(score, memory=Memory(path, IDENTITY))
        asked += score.asked
        kept = path.read_bytes()
        path.write_bytes(kept[: len(kept) - cut])
        asked = asked[: len(asked) - (cut > 0)]  # the line that is lost is read again
    last = Scores()
    assert searched(last, memory=Memory(path, IDENTITY)) == undisturbed
    assert [*asked, *last.asked] == whole.asked
    assert len(set(reads(path))) == len(reads(path)) == undisturbed.evaluations


def test_a_search_that_is_over_asks_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    found = searched(Scores(), memory=Memory(path, IDENTITY))
    before = path.read_bytes()
    assert searched(Scores(ends_after=0), memory=Memory(path, IDENTITY)) == found
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"search": {"model": "b", "lengths": [64, 128], "objective": {"windows": 2}}}\n', "lengths, model differ"),
        ('{"search": {"model": "a", "lengths": [64, 256]}}\n', "objective differ"),
        ("", "is not the file of a search"),
        ("prose, and a reader's only copy", "is not the file of a search"),
        ("[]\n", "is not the file of a search"),
        ("HEADER\n{}\n", "corrupt at line 2"),
        ('HEADER\n{"rescale": [1], "attention": 100, "sco\n', "corrupt at line 2"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    Memory(path, IDENTITY).add({})
    path.write_text(content.replace("HEADER", path.read_text().strip()))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=words):
        Memory(path, IDENTITY)
    assert path.read_bytes() == before


def test_only_the_process_that_writes_writes(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    found = searched(Scores(), memory=Memory(path, IDENTITY, writes=False))
    assert not path.exists()
    searched(Scores(ends_after=1e9), memory=Memory(path, IDENTITY))
    path.write_bytes(path.read_bytes()[:-5])
    before = path.read_bytes()
    assert searched(Scores(), memory=Memory(path, IDENTITY, writes=False)) == found
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is a folder"):
        Memory(tmp_path, IDENTITY)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot be written"):
        Memory(tmp_path / "file/search.jsonl", IDENTITY)


# ---------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("evaluations", [5, 8, 17])
def test_a_budget_of_evaluations_is_used_up_and_kept_by_any_number_of_processes(evaluations: int) -> None:
    settings = EvolutionSettings(**{**vars(SMALL), "evaluations": evaluations})
    found = searched(Scores(), settings)
    assert found.evaluations == evaluations
    assert len(found.history) == (1 if evaluations <= SMALL.population else 2)
    for width in (2, 3):
        assert searched(Scores(), settings, Memory(width=width)) == found


def test_without_a_budget_any_number_of_processes_finds_the_same() -> None:
    assert searched(Scores(), memory=Memory(width=3)) == searched(Scores())


def in_minutes(score: Scores, minutes: float) -> Search:
    """Every candidate takes a minute."""
    settings = EvolutionSettings(**{**vars(SMALL), "minutes": minutes})
    return Evolution(ROPE, FACTOR, score, settings, elapsed=lambda: float(len(score.asked))).run()


def test_minutes_end_a_search_and_too_few_of_them_are_refused_with_figures() -> None:
    assert in_minutes(Scores(), 8).evaluations == 8
    assert in_minutes(Scores(), len(FOUNDERS)).evaluations == len(FOUNDERS)
    with pytest.raises(ValueError, match=r"3 minutes is not enough: 3 of the 5 named methods took 3.*Allow more"):
        in_minutes(Scores(), 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evaluations": 4}, "at least 5.*yarn.*got 64 and 4"),
        ({"population": 4}, "at least 5"),
        ({"iterations": 0}, "must be >= 1"),
        ({"mutations": 0}, "must be >= 1"),
        ({"parents": 1}, "parents >= 2"),
        ({"probability": 0.0}, "between 0 and 1"),
        ({"step": 1.0}, "between 0 and 1"),
        ({"minutes": 0.0}, "minutes must be > 0, got 0"),
        ({"minutes": math.nan}, "minutes must be > 0, got nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EvolutionSettings(**settings)

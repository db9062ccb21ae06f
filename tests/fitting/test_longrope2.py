"""LongRoPE2's search: its space, its loss, and that it finds a critical dimension that is known."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import LENGTH, logits, tiny_model
from live import assert_unchanged, rotary_of, snapshot
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import YaRN
from ctxext.assets import MODEL, PERSUASION
from ctxext.encodings.rope import RopeGeometry, rotations
from ctxext.evals.prompts import Prompter
from ctxext.fitting import longrope2
from ctxext.fitting.episodes import Material, split
from ctxext.fitting.gradient import Fit
from ctxext.fitting.live import LiveFactors, frozen
from ctxext.fitting.longrope2 import (
    Candidate,
    LongRoPE2Settings,
    candidates,
    critical_pairs,
    fit_by_longrope2,
    needle_loss,
)
from ctxext.utils.processes import Processes

TARGET = 128
FACTOR = TARGET / LENGTH
ROPES = [
    RopeGeometry.plain(64, 1250.0, 512),
    RopeGeometry.plain(96, 10_000.0, 2048),
    RopeGeometry.plain(128, 500_000.0, 8192),
    RopeGeometry.plain(16, 10_000.0, 64),
    RopeGeometry.plain(16, 10.0, 8192),  # every pair completes a turn
    RopeGeometry.plain(16, 10_000.0, 8),  # almost none does
]


@cache
def materials(trained: int = LENGTH, target: int = TARGET) -> tuple[Material, Material]:
    text = PERSUASION.read_text(encoding="utf-8")[:50_000]
    return split(text, Prompter(AutoTokenizer.from_pretrained(MODEL)), trained, target)


def model_that_reads() -> Any:
    """Of the bundled tokenizer's size, with 32 pairs of which seven may be critical."""
    rope = {"rope_type": "default", "rope_theta": 1250.0}
    return tiny_model("llama", vocab_size=4096, initializer_range=0.1, head_dim=64, rope_parameters=rope)


def fitted(model: Any, parts: tuple[Material, Material], processes: Processes | None = None, **settings: Any) -> Fit:
    how = {} if processes is None else {"processes": processes}
    with LiveFactors(model) as live, frozen(model):
        return fit_by_longrope2(model, live, *parts, LongRoPE2Settings(**settings), **how)


# ------------------------------------------------------------------------------------------------------- the space


def test_the_theoretical_critical_dimension_of_llama_3_is_70() -> None:
    """2 ⌈64 log_500000(8192 / 2π)⌉, by hand: 64 · 7.1730 / 13.1224 = 34.98."""
    assert 2 * critical_pairs(RopeGeometry.plain(128, 500_000.0, 8192))[-1] == 70


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_critical_pairs_turn_at_most_four_times_and_the_last_is_the_first_with_at_most_one(rope: RopeGeometry) -> None:
    pairs, turns = critical_pairs(rope), rotations(rope).tolist()
    inside = range(1, len(turns))  # λ of the first pair is always 1
    assert pairs[-1] == next((i for i in inside if turns[i] <= 1), inside[-1])
    assert pairs[0] == min(pairs[-1], next((i for i in inside if turns[i] <= 4), inside[-1]))


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_candidates_are_ntk_before_the_critical_pair_and_at_least_the_factor_from_it_on(rope: RopeGeometry) -> None:
    rng, seen = Random(0), []
    made = candidates(rope, 4.0, rng, lambda n: rng.sample(seen, min(n, len(seen))))
    for candidate in itertools.islice(made, 200):
        seen.append(candidate)
        factors, critical = candidate.rescale_factors, candidate.critical
        assert critical in critical_pairs(rope)
        assert len(factors) == rope.dim // 2
        assert min(factors[critical:]) >= 4.0
        assert list(factors[critical:]) == sorted(factors[critical:])
        # λ of a larger base: base'^(2i/d) over base^(2i/d).
        base = rope.rope_theta * factors[critical] ** (rope.dim / (2 * critical))
        raised = [(base / rope.rope_theta) ** (2 * i / rope.dim) for i in range(critical)]
        assert factors[:critical] == pytest.approx(raised)
    assert [c.critical for c in seen[: len(critical_pairs(rope))]] == list(reversed(critical_pairs(rope)))
    assert len({c.critical for c in seen[len(critical_pairs(rope)) :]}) == len(critical_pairs(rope))


def test_the_needle_loss_is_that_of_the_answer_and_of_no_other_token() -> None:
    model, row = model_that_reads(), materials()[0].hidden(TARGET, 0.5, 0)
    ids = torch.tensor([row.input_ids])
    whole = cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:], reduction="none")
    with torch.no_grad():
        torch.testing.assert_close(needle_loss(model, row), whole[-row.n_answer :].sum())


# ------------------------------------------------------------------------------------------------------ the search


@pytest.mark.parametrize("critical", [6, 9])
def test_known_factors_are_found_and_their_critical_pair_or_its_neighbour(
    critical: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is the squared distance to ln λ of a known candidate, from which its neighbour's can hardly be told."""
    model = model_that_reads()
    true = Candidate(critical, tuple(FACTOR * 1.03 ** max(0, pair - critical) for pair in range(32)))
    rope = RopeGeometry.plain(64, 1250.0, LENGTH)

    def distance(model: Any, row: Any) -> torch.Tensor:
        log = (rope.inv_freq / rotary_of(model).inv_freq.double()).log()
        return (log - torch.tensor(true.rescale_factors).double().log()).square().sum()

    monkeypatch.setattr(longrope2, "needle_loss", distance)
    found = fitted(model, materials(), evaluations=300, rows=1)
    assert abs(found.searched["critical_dimension"] - 2 * critical) <= 2
    assert found.searched["theoretical_critical_dimension"] == 22
    keys = [step["key"] for step in found.history[1:]]
    assert min(keys[:40]) < 0.2 * min(keys[: len(critical_pairs(rope))])
    assert min(keys) < 0.02 * min(keys[: len(critical_pairs(rope))])


class Undertrained(torch.nn.Module):
    """A rotary embedding whose pairs from CRITICAL on were trained on no angle beyond those of the trained length.

    Beyond them its cos and sin are large and random, although the pairs complete a turn within the trained length.
    """

    CRITICAL = 17
    inv_freq: torch.Tensor
    attention_scaling: float

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angles = position_ids[..., None].float() * self.inv_freq
        unseen = angles > 1.001 * 512 * RopeGeometry.plain(64, 1250.0, 512).inv_freq.float()
        unseen[..., : self.CRITICAL] = False
        size = torch.where(unseen, 8.0, 1.0).repeat(1, 1, 2) * self.attention_scaling
        angles = torch.where(unseen, 1000 * angles, angles).repeat(1, 1, 2)
        return angles.cos() * size, angles.sin() * size


@pytest.mark.slow
def test_the_critical_dimension_of_an_undertrained_twin_is_found() -> None:
    """Of the bundled model at ×2: its theoretical critical dimension, at which YaRN keeps to λ = factor, is 40."""
    twin = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    rotary = rotary_of(twin)
    rotary.__class__ = type("Twin", (Undertrained, type(rotary)), {})
    found = fitted(twin, materials(512, 1024), evaluations=10, rows=3)
    yarn, *tried = (step["key"] for step in found.history)
    assert found.searched["theoretical_critical_dimension"] == 40
    assert found.searched["critical_dimension"] == 2 * Undertrained.CRITICAL
    assert min(tried) < 0.1 * min(yarn, tried[0])
    assert not found.kept_start


def test_a_search_is_a_function_of_its_seed_and_leaves_no_trace() -> None:
    model = model_that_reads()
    before = snapshot(model)
    one, same, other = (fitted(model, materials(), evaluations=12, rows=2, seed=seed) for seed in (1, 1, 2))
    assert_unchanged(model, before)
    assert one.searched == same.searched
    assert (one.method, one.tried) == (same.method, same.tried)
    assert [step["key"] for step in one.history] == [step["key"] for step in same.history]
    assert one.searched["long_factor"] != other.searched["long_factor"]
    assert len(one.history) == 13  # the first is YaRN's


def test_the_best_candidate_is_given_out_unless_yarn_is_better_on_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_that_reads()
    losses = longrope2.Validation.losses
    for worse in (True, False):

        def biased(check: Any, model: Any, live: Any, method: Any, settings: Any, worse: bool = worse) -> Any:
            found = losses(check, model, live, method, settings)
            return {**found, "key": float((method != YaRN(factor=FACTOR)) == worse)}

        monkeypatch.setattr(longrope2.Validation, "losses", biased)
        found = fitted(model, materials(), evaluations=8, rows=2)
        best = min(found.history[1:], key=lambda step: step["key"])
        assert best["critical_dimension"] == found.searched["critical_dimension"]
        assert found.kept_start is worse
        if worse:
            assert found.method == YaRN(factor=FACTOR)
        else:
            assert found.method.long_factor == found.searched["long_factor"]
            assert found.method.fitted_to == (1250.0, LENGTH)


def test_processes_share_the_rows_of_an_evaluation() -> None:
    model, flat = model_that_reads(), len(critical_pairs(RopeGeometry.plain(64, 1250.0, LENGTH)))
    run = partial(fitted, model, materials(), evaluations=flat, rows=3)
    alone, *shares = (run(processes) for processes in (None, Processes(0, 2), Processes(1, 2)))
    for whole, *parts in zip(alone.history, *(share.history for share in shares), strict=True):
        assert sum(part["key"] for part in parts) == pytest.approx(whole["key"], rel=1e-6)


def test_a_model_that_says_no_numbers_is_refused_and_left_as_it_was() -> None:
    model = model_that_reads()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    before = snapshot(model, run=False)
    with pytest.raises(RuntimeError, match=r"passkey loss of nan.*Load the model in float32"):
        fitted(model, materials(), evaluations=1, rows=1)
    assert_unchanged(model, before)


def test_minutes_are_kept_or_refused_where_they_hold_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_that_reads()
    seconds = map(float, itertools.count())
    monkeypatch.setattr(longrope2, "time", SimpleNamespace(perf_counter=seconds.__next__))
    with pytest.raises(ValueError, match=r"not enough to evaluate one candidate.*Pass at least [0-9.]+ minutes"):
        fitted(model, materials(), minutes=1e-6)
    found = fitted(model, materials(), evaluations=10**6, rows=2, minutes=0.2)
    assert len(found.history) == 12  # of a second each, and one more for the losses on held-out text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evaluations": 0}, "evaluations must be a whole number >= 1, got 0"),
        ({"rows": -2}, "rows must be a whole number >= 1, got -2"),
        ({"minutes": 0.0}, "minutes must be a finite number > 0, got 0"),
        ({"minutes": math.inf}, "minutes must be a finite number > 0, got inf"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LongRoPE2Settings(**settings)

"""Windows and losses: exact in tokens, each token scored once, and equal to what a plain loop says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from families import tiny_model, token_ids
from tokenizers_of_all_kinds import KINDS, tokenizer_of_kind

from ctxext.assets import PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.perplexity import (
    KeyTokens,
    Perplexity,
    ShortContext,
    SlidingPerplexity,
    TextTask,
    beginning,
    sliding_losses,
    stretches,
    unpacked,
)
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place
from ctxext.evals.statistics import paired_loss_difference

TEXT = "It was a fine day. Was it? It was! " * 40


def plain_loss(model, context: list[int], token: int) -> float:
    """One token's loss in nats, from a forward pass over its context alone."""
    with torch.no_grad():
        return -model(input_ids=torch.tensor([context])).logits[0, -1].log_softmax(-1)[token].item()


@pytest.mark.parametrize("bos", [(), (1,)])
@pytest.mark.parametrize(("window", "stride"), [(16, 4), (16, 8), (20, 15), (64, 10)])
def test_sliding_losses_are_those_of_a_plain_loop(bos: tuple[int, ...], window: int, stride: int) -> None:
    """Token by token, in float64: each has at least window - stride tokens before it, and is scored once."""
    model = tiny_model("llama").double()
    ids = token_ids(53)[0].tolist()
    body = window - len(bos)
    expected, end = [], 0
    for k, token in enumerate(ids):
        if k >= end:  # the next window begins
            end = body if end == 0 else end + stride
        start = max(0, min(end, len(ids)) - body)
        context = [*bos, *ids[start:k]]
        if context:
            expected.append(plain_loss(model, context, token))
    losses = sliding_losses(Engine(model, chunk=7), ids, window, stride, bos)
    assert len(losses) == len(ids) - (not bos)
    np.testing.assert_allclose(losses.double().numpy(), expected, rtol=0, atol=1e-6)
    assert math.exp(losses.double().mean()) == pytest.approx(math.exp(np.mean(expected)), abs=1e-6 * math.exp(5))


def test_the_sliding_task_scores_every_token_once_and_equals_the_function() -> None:
    """Windows are samples of their own; together they are the sliding pass over the text."""
    tokenizer = tokenizer_of_kind("bundled")
    haystack = Haystack.from_text(TEXT, tokenizer)
    model = tiny_model("llama", vocab_size=len(tokenizer)).double()
    engine, bos = Engine(model), Prompter(tokenizer).special
    task = SlidingPerplexity(stride=24)
    places = [Place(task.name, 64, None, k, 0) for k in range(6)]
    records = [task.record(task.window(place, haystack, bos), engine) for place in places]
    together = np.concatenate([unpacked(record, "losses") for record in records])
    n_tokens = 63 + 5 * 24
    whole = sliding_losses(engine, haystack.token_ids[:n_tokens], 64, 24, bos)
    assert len(together) == n_tokens
    np.testing.assert_allclose(together, whole.float().numpy(), atol=1e-6)
    n_bytes = haystack.token_starts[n_tokens]
    assert sum(record["bytes"] for record in records) == n_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_exact_and_spread_over_the_text(kind: str) -> None:
    tokenizer = tokenizer_of_kind(kind)
    haystack, bos = Haystack.from_file(PERSUASION, tokenizer), Prompter(tokenizer).special
    starts = []
    for length in (3, 64, 3000):
        for window in range(12):
            made = Perplexity().window(Place("perplexity", length, None, window, 0), haystack, bos)
            assert len(made.input_ids) == length
            assert list(made.input_ids[: len(bos)]) == bos
            start = _find(haystack.token_ids, list(made.input_ids[len(bos) :][:40]))
            starts.append(start / haystack.n_tokens)
            text = tokenizer.decode(list(made.input_ids[made.scored_from :]), clean_up_tokenization_spaces=False)
            assert abs(len(text.encode()) - made.n_bytes) <= 4
    thirds = np.histogram(starts, bins=4, range=(0, 1))[0]
    assert thirds.min() >= 6


def _find(ids: list[int], part: list[int]) -> int:
    ring = ids + ids[: len(part)]
    return next(k for k in range(len(ids)) if ring[k : k + len(part)] == part)


def test_a_shorter_window_of_a_place_is_a_prefix_of_the_longer_one() -> None:
    """So methods that are measured at every length read the text that the others read once."""
    tokenizer = tokenizer_of_kind("bundled")
    haystack, bos = Haystack.from_file(PERSUASION, tokenizer), Prompter(tokenizer).special
    for window in (0, 5, 11):
        short, long = (
            Perplexity().window(Place("perplexity", length, None, window, 3), haystack, bos).input_ids
            for length in (100, 1000)
        )
        assert long[:100] == short


@pytest.mark.parametrize("held", [2.2, 4.5, 6.5])
def test_windows_by_stretches_cover_where_windows_that_share_tokens_do_not(held: float) -> None:
    rng, windows, span, covered, plain = np.random.default_rng(0), 10, 64, 0, 0
    n = int(held * span)
    for seed in range(400):
        ring = np.tile(np.convolve(rng.normal(0, 1, n + 7), np.ones(8), "valid"), 2)
        starts = [int(beginning(seed, trial) * n) for trial in range(windows)]
        sums = [ring[start : start + span].sum() for start in starts]
        for stretch in (stretches(starts, [span] * windows, n), None):
            found = paired_loss_difference(sums, [0] * windows, [span] * windows, stretch, resamples=400)
            covered += stretch is not None and found.low <= 0 <= found.high
            plain += stretch is None and found.low <= 0 <= found.high
    assert covered / 400 >= 0.86
    assert plain / 400 <= 0.86


def test_a_stretch_joins_windows_that_overlap_and_parts_those_that_do_not() -> None:
    first, alone, around = stretches([84, 46, 8], [30, 30, 30], 100)  # the first reaches around into the last
    assert first == around != alone
    assert len({*stretches([0, 40, 50], [30, 5, 20], 100)}) == 3
    assert len({*stretches([0, 40, 50], [30, 15, 20], 100)}) == 2
    assert len({*stretches([3, 3, 5], [10, 10, 10], 8)}) == 1  # a text shorter than the passages
    assert stretches([], [], 100) == []


def test_key_tokens_follow_longppls_rule() -> None:
    tokenizer = tokenizer_of_kind("bundled")
    haystack, bos = Haystack.from_text(TEXT, tokenizer), Prompter(tokenizer).special
    model = tiny_model("llama", vocab_size=len(tokenizer))
    engine = Engine(model)
    task = KeyTokens(long=64, short=16, gain=0.5, sure=9.0)
    window = task.window(Place("key_tokens", 150, None, 0, 0), haystack, bos)
    record = task.record(window, engine)
    ids = list(window.input_ids[1:])
    near, far = (sliding_losses(engine, ids, length, length // 2, bos) for length in (16, 64))
    expected = [bool(a - b > 0.5 and b < 9.0) for a, b in zip(near, far)]
    assert unpacked(record, "mask").tolist() == expected
    assert 0 < record["key_tokens"] == sum(expected) < len(expected)


@pytest.mark.parametrize(
    "task", [Perplexity(), ShortContext(), KeyTokens(long=64, short=16)], ids=lambda task: task.name
)
def test_no_loss_of_a_bos_of_two_tokens_counts(task: TextTask) -> None:
    """As GLM's, whose second token the first would predict."""
    tokenizer = tokenizer_of_kind("bundled")
    haystack, model = Haystack.from_text(TEXT, tokenizer), tiny_model("llama", vocab_size=len(tokenizer))
    window = task.window(Place(task.name, 150, None, 0, 0), haystack, (1, 2))
    assert task.record(window, Engine(model))["tokens"] == 148


def test_a_text_that_is_too_short_is_refused() -> None:
    tokenizer = tokenizer_of_kind("bundled")
    haystack = Haystack.from_text(TEXT, tokenizer, at_least=10_000)
    with pytest.raises(ValueError, match="longer than the text"):  # repeating would let the model copy
        Perplexity().window(Place("perplexity", 5000, None, 0, 0), haystack, ())
    with pytest.raises(ValueError, match="Pass a longer text or fewer windows"):
        SlidingPerplexity(stride=64).window(Place("sliding_perplexity", 128, None, 99, 0), haystack, ())
    with pytest.raises(ValueError, match="stride must be between 1 and"):
        SlidingPerplexity(stride=129).window(Place("sliding_perplexity", 128, None, 0, 0), haystack, ())
    with pytest.raises(ValueError, match="stride must be between 1 and"):
        sliding_losses(Engine(tiny_model("llama")), [5, 6, 7], 16, 0)

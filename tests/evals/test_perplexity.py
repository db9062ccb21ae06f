"""Windows and losses: exact in tokens, each token scored once, and equal to what a plain loop says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import tiny_model, token_ids
from tokenizers_of_all_kinds import KINDS, tokenizer_of_kind

from ctxext.assets import PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.perplexity import (
    Judge,
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

NOVEL = PERSUASION.read_text(encoding="utf-8")[:60_000]
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


# ------------------------------------------------------------------------------------ another judge


def judge_of(kind: str, **how: float) -> tuple[Judge, KeyTokens]:
    tokenizer = tokenizer_of_kind(kind)
    engine = Engine(tiny_model("llama", vocab_size=len(tokenizer)))
    task = KeyTokens(judge="judge", long=64, short=16, **{"gain": 0.5, "sure": 9.0, **how})
    return Judge("judge", engine, tokenizer, Prompter(tokenizer, "base").bos, 64), task


def test_a_judge_with_the_same_tokenizer_finds_the_same_tokens() -> None:
    judge, task = judge_of("bundled")
    haystack = Haystack.from_text(NOVEL, judge.tokenizer)
    for trial in range(3):
        window = task.window(Place("key_tokens", 150, None, trial, 0), haystack, judge.bos)
        assert judge.tokenizer(window.text)["input_ids"] == list(window.input_ids)
        own, judged = task.record(window, judge.engine), judge.record(task, window)
        assert own == judged
        assert 0 < judged["key_tokens"] < judged["tokens"]


@pytest.mark.parametrize("kinds", [("merging", "bundled"), ("bundled", "merging"), ("bundled", "sentencepiece")])
def test_a_token_is_key_if_all_its_characters_are_in_key_tokens_of_the_judge(kinds: tuple[str, str]) -> None:
    of_judge, of_model = kinds
    judge, task = judge_of(of_judge)
    tokenizer = tokenizer_of_kind(of_model)
    haystack, bos = Haystack.from_text(NOVEL, tokenizer), Prompter(tokenizer, "base").bos
    window = task.window(Place("key_tokens", 200, None, 1, 0), haystack, bos)
    record = judge.record(task, window)
    # Written out: the characters of the judge's key tokens, and the tokens of the model without another character.
    read = judge.tokenizer(window.text, add_special_tokens=False, return_offsets_mapping=True)
    key = task.key(judge.engine, read["input_ids"], judge.bos).tolist()
    offsets = read["offset_mapping"][0 if judge.bos else 1 :]
    assert len(key) == len(offsets)
    chars = {k for (start, end), is_key in zip(offsets, key) if is_key for k in range(start, end)}
    spans = list(zip(window.starts, [*window.starts[1:], len(window.text)]))[0 if bos else 1 :]
    expected = [all(k in chars for k in range(start, end)) for start, end in spans]
    assert unpacked(record, "mask").tolist() == expected
    assert record["tokens"] == len(window.input_ids) - 1
    assert 0 < record["key_tokens"] == sum(expected) < len(expected)


def test_parts_of_one_character_are_judged_together() -> None:
    judge, task = judge_of("bundled", gain=-99.0, sure=99.0)  # every token is key
    haystack = Haystack.from_text("山高水长日落风起云飞" * 40, judge.tokenizer)
    window = task.window(Place("key_tokens", 90, None, 0, 0), haystack, judge.bos)
    assert judge.record(task, window)["key_tokens"] == 89
    none = replace(task, gain=99.0)
    assert judge.record(none, window)["key_tokens"] == 0


# ----------------------------------------------------------------------------------------- documents


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    chapters = NOVEL.split("Chapter ")[1:]
    path = tmp_path / "documents.jsonl"
    path.write_text(
        "".join(json.dumps({"text": chapter[: 900 * (k + 1)]}) + "\n" for k, chapter in enumerate(chapters[:5]))
    )
    return path


def test_windows_by_document_are_the_beginnings_of_the_longest(documents: Path) -> None:
    tokenizer = tokenizer_of_kind("bundled")
    haystack, bos = Haystack.of_documents(documents, tokenizer), Prompter(tokenizer).special
    texts = [json.loads(line)["text"].strip() for line in documents.read_text().splitlines()]
    for trial, text in enumerate(texts[:1:-1]):
        window = Perplexity().window(Place("perplexity", 300, None, trial, 0), haystack, bos)
        assert text.startswith(window.text)
        assert len(window.input_ids) == 300
        assert (
            Perplexity().window(Place("perplexity", 100, None, trial, 0), haystack, bos).input_ids
            == (window.input_ids[:100])
        )
    with pytest.raises(ValueError, match=r"has 3 documents of 5\d\d tokens or more, and window 4 needs one of its own"):
        Perplexity().window(Place("perplexity", 520, None, 3, 0), haystack, bos)
    assert haystack.fingerprint != Haystack.from_file(documents, tokenizer).fingerprint
    with pytest.raises(ValueError, match="is not a table of documents"):
        Haystack.of_documents(PERSUASION, tokenizer)

"""A time limit is kept by the clock that is given, and is spent where intervals are widest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.cost import Cost
from ctxext.evals.haystack import Haystack
from ctxext.evals.loading import load
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import Results, read_results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.targets import LiveModel, Variant
from ctxext.evals.timed import FIRST, Timed, widest
from ctxext.evals.workload import Speed


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = load(MODEL)
    return model, Prompter(tokenizer), Haystack.from_text(PERSUASION.read_text(encoding="utf-8")[:30_000], tokenizer)


def timed(loaded, path: Path, seconds: float, **changes: Any) -> Timed:
    """The clock goes on by a second for each 1,000 tokens read."""
    model, prompter, text = loaded
    asked: dict[str, Any] = dict(retrieval=(Passkey(),), texts=(Perplexity(), Cost()), lengths=(96, 256), depths=(0.5,))
    asked["each_length"] = True
    target = LiveModel(model, prompter, "austen-4m")
    target.engine.now = lambda: target.engine.tokens / 1000
    runner = Runner(target, text, Grid(**{**asked, **changes}))
    runner.check([Variant()])
    speed = Speed.measured(target, text.token_ids)
    return Timed(runner, [Variant()], path, seconds / 60, speed, now=target.engine.now)


def counts(results: Results) -> Counter[tuple[str, int]]:
    return Counter((record["task"], record["length"]) for record in results.records)


def test_samples_go_to_the_widest_interval_until_the_time_is_over(
    loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, chosen = timed(loaded, tmp_path / "r.jsonl", 6), []
    measure = made._measure

    def spied(part: tuple[str, int], n: int) -> None:
        if len(made._samples) == 6:
            chosen.append(part)
            widths = made._widths(dict.fromkeys(made._samples, 1000))
            assert widths[part] == max(width for of, width in widths.items() if of[0] != "cost")
        measure(part, n)

    monkeypatch.setattr(made, "_measure", spied)
    results = made.run()
    found = counts(results)
    assert len({*chosen}) > 1
    assert found["cost", 96] == found["cost", 256] == 1
    assert min(n for (task, _), n in found.items() if task != "cost") >= FIRST
    assert max(found.values()) > FIRST
    assert -2 < made._left < 1.5
    assert made.notes() == []
    assert results.header.about["lengths"] == [96, 256]


def test_short_lengths_come_first_and_what_lacked_time_is_said(loaded, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    made = timed(loaded, path, 0.6)
    assert {length for _, length in counts(made.run())} == {96}
    (note,) = made.notes()
    assert note.startswith("There was no time for passkey at 256; perplexity at 256; cost at 256 tokens. Pass more")
    before = read_results(path).records
    more = timed(loaded, path, 4).run()
    assert all(record in more.records for record in before)
    assert {length for _, length in counts(more)} == {96, 256}


def test_a_text_that_is_used_up_ends_it(loaded, tmp_path: Path) -> None:
    model, prompter, _ = loaded
    text = Haystack.from_text(PERSUASION.read_text(encoding="utf-8")[:3_000], prompter.tokenizer)
    made = timed((model, prompter, text), tmp_path / "r.jsonl", 3600, texts=(), lengths=(96,))
    assert counts(made.run()) == {("passkey", 96): 2 * text.n_tokens // 96}
    assert made.notes() == ["Some tasks ran out of text. Pass a longer --haystack for more samples."]


def test_a_time_too_short_for_anything_is_refused_with_what_would_do(loaded, tmp_path: Path) -> None:
    made = timed(loaded, tmp_path / "r.jsonl", 0.001)
    with pytest.raises(ValueError, match=r"is not enough for the first samples at 96 tokens\. Pass --minutes 0\.1 or"):
        made.run()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf")])
def test_minutes_that_are_none_are_refused(loaded, tmp_path: Path, minutes: float) -> None:
    with pytest.raises(ValueError, match="minutes must be a finite number > 0"):
        timed(loaded, tmp_path / "r.jsonl", 60 * minutes)


def test_a_part_of_no_width_gets_nothing() -> None:
    assert widest({"a": 0.0, "b": 0.2, "c": 0.1}) == "b"
    assert widest({"a": 0.0}) is None
    assert widest({}) is None

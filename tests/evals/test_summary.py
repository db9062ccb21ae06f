"""What is made of results: figures equal to those worked out here, and a recommendation that follows its rule."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ctxext.evals.choice import choose, recommended
from ctxext.evals.perplexity import packed, unpacked
from ctxext.evals.results import Header, Results
from ctxext.evals.summary import Summary

LENGTHS, DEPTHS = (512, 1024), (0.0, 0.5, 1.0)


def summary(found: dict[str, float], loss: dict[str, float], trials: int = 12, windows: int = 12, noise: float = 0.0):
    """Results of variants that find a share of the keys beyond 512 tokens, each with a mean loss beyond it."""
    records = []
    for variant in {**found, **loss}:
        for trial in range(trials if variant in found else 0):
            for length in LENGTHS:
                for depth in DEPTHS:
                    hit = float(length == 512 or trial < round(found[variant] * trials))
                    place = {"task": "passkey", "length": length, "depth": depth, "trial": trial, "seed": 0}
                    key = f"passkey {length} {depth} {trial}"
                    records.append({"variant": variant, "key": key, **place, "score": hit, "hit": bool(hit)})
        for window in range(windows if variant in loss else 0):
            values = torch.full((1023,), 4.0 + 0.01 * window)
            # Noise moves half of the windows up and half of them down, otherwise for each variant.
            values[511:] += loss[variant] + noise * (-1) ** (window + len(variant))
            place = {"task": "perplexity", "length": 1024, "depth": None, "trial": window, "seed": 0}
            mean = values.double().mean().item()
            texts = {"tokens": 1023, "bytes": 4000, "loss": mean, **packed(losses=values)}
            records.append({"variant": variant, "key": f"perplexity {window}", **place, **texts})
    header = Header(
        identity={"seed": 0},
        tasks={"passkey": {}, "perplexity": {}},
        variants={variant: {"model": "m"} for variant in {**found, **loss}},
        about={"trained_length": 512, "lengths": list(LENGTHS)},
    )
    return Summary(Results(Path("results.jsonl"), header, records))


def test_the_one_that_finds_more_is_recommended_whatever_its_loss() -> None:
    made = summary({"none": 0.0, "a": 1.0, "b": 0.25}, {"none": 1.0, "a": 0.5, "b": 0.0})
    chosen = recommended(made)
    assert chosen.variant == "a"
    assert "Behind: b (retrieval accuracy -75.0 points, p = 0.0078 against a)." in chosen.text


def test_loss_decides_between_those_that_retrieval_does_not_tell_apart() -> None:
    chosen = recommended(summary({"none": 0.0, "a": 1.0, "b": 1.0}, {"none": 1.0, "a": 0.5, "b": 0.0}))
    assert chosen.variant == "b"
    assert "Behind: a (loss +0.250 nats per token, p = 0.0029 against b)." in chosen.text


def test_a_loss_that_is_not_surely_lower_does_not_decide() -> None:
    found = {"none": 0.0, "a": 1.0, "bb": 1.0}
    made = summary(found, {"none": 1.0, "a": 0.001, "bb": 0.0}, noise=0.5)
    made.header.variants["bb"]["portable"] = False
    chosen = recommended(made)
    assert chosen.variant == "a"
    assert "Tied with bb: a is recommended because plain transformers loads it." in chosen.text


def test_few_trials_do_not_let_a_method_that_finds_nothing_win() -> None:
    made = summary({"none": 0.0, "a": 1.0, "bb": 0.0}, {"none": 1.0, "a": 0.001, "bb": 0.0}, trials=1, noise=0.5)
    assert recommended(made).variant == "a"


def test_no_better_than_unextended_is_said() -> None:
    chosen = recommended(summary({"none": 1.0, "a": 1.0}, {}))
    assert "which is not significant" in chosen.text


def test_without_retrieval_loss_recommends_and_one_window_makes_no_claim() -> None:
    loss = {"none": 1.0, "a": 0.5, "b": 0.0}
    assert recommended(summary({}, loss)).variant == "b"
    chosen = recommended(summary({}, loss, windows=1))
    assert chosen.variant == "b"
    assert "Tied with a: b is recommended because no other measured a lower loss." in chosen.text
    chosen = recommended(summary({}, loss, windows=4))
    assert "No difference in loss can be significant with fewer than 7 independent windows; there are " in chosen.text


def test_nothing_beyond_the_trained_length_recommends_nothing() -> None:
    made = summary({"none": 1.0}, {})
    assert recommended(made).variant is None


def test_the_page_names_the_variant_that_the_command_chose() -> None:
    """A method that a config can say goes before one that surely loses as little and finds as much."""
    made = summary({"none": 0.0, "late": 1.0, "static": 1.0}, {"none": 1.0, "late": 0.5, "static": 0.505})
    assert recommended(made).variant == "late"  # the first
    made.header.variants["late"]["portable"] = False
    assert recommended(made).variant == choose(made, ["late", "static"]).variant == "static"


def test_perplexity_of_prefix_and_band_and_bits_per_byte() -> None:
    made = summary({}, {"none": 0.5}, windows=2)
    # Token 0 has no loss; positions 1 to 511 cost 4.0, those from 512 on 4.5; the second window 0.01 more.
    assert made.perplexity("none", 512) == pytest.approx(math.exp(4.005), rel=1e-6)
    assert made.perplexity("none", 1024, 512) == pytest.approx(math.exp(4.505), rel=1e-6)
    assert made.perplexity("none", 512, 511) == pytest.approx(math.exp(4.005), rel=1e-6)  # one token
    assert made.perplexity("none", 513, 512) == pytest.approx(math.exp(4.505), rel=1e-6)
    whole = (511 * 4.005 + 512 * 4.505) / 1023
    assert made.perplexity("none", 1024) == pytest.approx(math.exp(whole), rel=1e-6)
    assert made.bits_per_byte("none", 1024) == pytest.approx(whole * 1023 / math.log(2) / 4000, rel=1e-6)
    positions, values = zip(*made.curve("none"))
    assert positions[0] == 16
    np.testing.assert_allclose(np.diff(positions), 32, atol=1)  # 1,024 tokens in 32 bins
    np.testing.assert_allclose(sorted({round(math.log(value), 4) for value in values}), [4.005, 4.505], atol=1e-4)


def test_a_shorter_window_of_one_variant_replaces_none_of_its_longer_ones() -> None:
    """As where `ctxext eval` adds to a file of `ctxext compare`."""
    made = summary({}, {"none": 0.5, "a": 0.5}, windows=8)
    (longer,) = (r for r in made.of("a", "perplexity") if r["trial"] == 0)
    losses = unpacked(longer, "losses")[:511]
    extra = {**longer, "key": "shorter", "length": 512, "tokens": 511, **packed(losses=torch.tensor(losses))}
    appended = Summary(replace(made._results, records=[*made.records, extra]))
    for variant in ("none", "a"):
        assert appended.perplexity(variant, 512) == made.perplexity(variant, 512)
        assert len(appended.losses(variant, 512)) == 8


def test_a_loss_that_is_missing_is_left_out() -> None:
    made = summary({}, {"none": 0.5}, windows=2)
    one, other = made.of("none", "perplexity")
    broken = Summary(replace(made._results, records=[{**one, "loss": None}, other]))
    assert broken.bits_per_byte("none", 1024) == pytest.approx(other["loss"] * 1023 / math.log(2) / other["bytes"])
    nothing = Summary(replace(made._results, records=[{**r, "loss": None} for r in made.records]))
    assert nothing.bits_per_byte("none", 1024) is None
    json.dumps(nothing.to_dict(), allow_nan=False)


def test_differences_are_paired_by_sample() -> None:
    made = summary({"none": 0.5, "a": 1.0}, {"none": 0.5, "a": 0.25})
    assert made.difference("a", "none", ["passkey"], [1024]).value == pytest.approx(0.5)
    assert made.loss_difference("a", "none", 1024, 512).value == pytest.approx(-0.25, abs=1e-6)
    assert made.loss_difference("a", "none", 512).value == pytest.approx(0.0)


def test_effective_length_by_both_rules() -> None:
    made = summary({"none": 0.5, "a": 1.0}, {})
    reached = made.effective_length("none", ["passkey"])
    assert {rule: length.length for rule, length in reached.items()} == {"RULER": 512, "85% of own": 512}
    assert {length.length for length in made.effective_length("a", ["passkey"]).values()} == {1024}


def test_a_loss_that_is_no_number_takes_its_own_differences_alone() -> None:
    found = {"none": 0.5, "a": 1.0, "b": 1.0}
    made = summary(found, {"none": 0.5, "a": math.nan, "b": 0.25})
    assert made.loss_difference("a", "none", 1024) is None
    assert made.loss_difference("b", "none", 1024) is not None
    assert recommended(made).variant == "b"
    assert recommended(summary({}, {"none": 0.5, "a": math.nan, "b": 0.25})).variant == "b"


@pytest.mark.parametrize(("held", "apart"), [(36 * 1024, 12), (12 * 1024, 8), (4100, 3), (1024, 1)])
def test_windows_that_share_tokens_count_as_the_text_holds_apart(held: int, apart: int) -> None:
    made = summary({"none": 0.5, "a": 0.5}, {"none": 0.5, "a": 0.25}, windows=12)
    made.header.about["text_tokens"] = held
    assert made.windows_apart == (12, apart)
    assert (made.loss_difference("a", "none", 1024) is None) == (apart == 1)


def test_prompts_whose_texts_overlap_count_as_one() -> None:
    made = summary({"none": 0.0, "a": 1.0}, {})
    assert made.test("a", "none", ["passkey"], [1024]).clusters == 12
    alone = made.pooled("a", ["passkey"], [512, 1024])
    for held, apart in ((10**6, 12), (1024, 1), (2500, 2)):
        made = summary({"none": 0.0, "a": 1.0}, {})
        made.header.about["text_tokens"] = held
        for record in made.records:
            record["start"] = record["trial"] * 7777 % held
        assert made.test("a", "none", ["passkey"], [1024]).clusters == apart
    assert made.pooled("a", ["passkey"], [512, 1024]).low < alone.low


def test_a_server_that_returns_no_most_likely_tokens_leaves_the_regression_of_the_loss() -> None:
    made = summary({"none": 0.0, "a": 1.0}, {})
    for variant, loss in (("none", 4.0), ("a", 4.25)):
        for window in range(12):
            values = torch.full((511,), loss + 0.01 * window)
            place = {"task": "short", "length": 512, "depth": None, "trial": window, "seed": 0}
            texts = {"tokens": 511, "bytes": 2000, "loss": values.double().mean().item(), **packed(losses=values)}
            made.records.append({"variant": variant, "key": f"short {window}", **place, **texts})
    header = replace(made.header, tasks={**made.header.tasks, "short": {}})
    read = Summary(Results(Path("results.jsonl"), header, made.records))
    gate = read.gate("a")
    assert gate.loss is not None
    assert gate.loss.value == pytest.approx(0.25)
    assert gate.agreement is None
    assert "regression of a is +0.250 nats per token." in recommended(read).text

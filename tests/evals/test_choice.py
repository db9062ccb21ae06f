"""Equal methods tie, methods that differ are told apart, and each task weighs the same."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from choice import Setting, chosen, claims, covered

from ctxext.evals.choice import ACCURACY, LEVEL, LOSS, REGRESSION, choose, reasons, recommended, texts_needed
from ctxext.evals.control import Control, Form
from ctxext.evals.perplexity import packed
from ctxext.evals.results import Header, Results
from ctxext.evals.summary import Summary
from ctxext.fitting.race import staying

RNG = np.random.default_rng


def without(summary: Summary, *keep: object) -> Summary:
    """The summary of the records for which `keep[0]` holds."""
    records = [record for record in summary.records if keep[0](record)]  # type: ignore[operator]
    return Summary(Results(Path("results.jsonl"), summary.header, records))


@pytest.mark.parametrize(
    ("setting", "runs"),
    [
        (Setting(2, 0.7, trials=50), 120),
        (Setting(8, 0.7, trials=50), 60),
        (Setting(4, 0.5, trials=16, depths=5, tasks=2, shared=0.5, alike=0.5), 60),
        (Setting(4, 0.7, trials=0, windows=16), 60),
        (Setting(3, 0.95, trials=10, lengths=2, shared=0.9, windows=12, tails="t2"), 60),
    ],
)
def test_equal_methods_are_seldom_told_apart(setting: Setting, runs: int) -> None:
    """The whole grid of sizes, rates and correlations is in benchmarks/choice.py."""
    rng = RNG(0)
    choices = [(summary, chosen(summary, setting)) for summary in (setting.summary(rng) for _ in range(runs))]
    assert sum(claims(choice) for _, choice in choices) <= LEVEL * runs
    if setting.trials:
        assert np.mean([covered(summary, setting, choice) for summary, choice in choices]) >= 0.95


def test_ties_come_with_the_number_of_prompts_that_would_tell_them_apart() -> None:
    setting = Setting(3, 0.7, trials=20, depths=5, shared=0.8, alike=0.3)
    said = recommended(setting.summary(RNG(1))).text
    found = re.search(
        r"To tell 5 points apart takes about ([\d,]+) prompts per length and depth \(there are 20\)", said
    )
    assert found is not None, said
    assert 50 < int(found[1].replace(",", "")) < 2000
    many = recommended(replace(setting, trials=2500, depths=1, shared=0.99).summary(RNG(1))).text
    assert "Tied" in many
    assert "To tell" not in many


def test_one_that_is_better_by_far_is_found_and_one_that_is_worse_never_named() -> None:
    rng = RNG(0)
    better, worse = Setting(6, 0.4, 0.95, trials=50), Setting(6, 0.9, 0.3, trials=50)
    found = [chosen(better.summary(rng), better) for _ in range(20)]
    assert all(choice.variant == "m0" for choice in found)
    assert sum(len(choice.behind) == 5 for choice in found) >= 18
    lost = [chosen(worse.summary(rng), worse) for _ in range(20)]
    assert all("m0" in choice.behind for choice in lost)
    for sign in (1, -1):
        setting = Setting(6, trials=0, windows=24, gain=0.1 * sign)
        choices = [chosen(setting.summary(rng), setting) for _ in range(5)]
        assert all((choice.variant == "m0") == (sign > 0) and choice.behind for choice in choices)


def test_only_samples_that_all_methods_have_decide() -> None:
    """One that was asked easy tasks alone, or short lengths alone, is not ahead by that."""
    records = []
    for task, length, variants in (("passkey", 1024, "ab"), ("needles", 1024, "b"), ("passkey", 2048, "b")):
        for variant in variants:
            for trial in range(20):
                place = {"task": task, "length": length, "depth": 0.5, "trial": trial, "seed": 0}
                right = (variant == "b" and task == "passkey" and length == 1024) or (variant == "a" and trial < 12)
                key = f"{task} {length} {trial}"
                records.append({"variant": variant, "key": key, **place, "score": float(right)})
    header = Header({"seed": 0}, {"passkey": {}, "needles": {}}, {"a": {"model": "m"}, "b": {"model": "m"}},
                    {"trained_length": 512, "lengths": [1024, 2048], "text_tokens": 9000})  # fmt: skip
    summary = Summary(Results(Path("results.jsonl"), header, records))
    assert summary.pooled("a", ["passkey", "needles"], [1024, 2048]).value > 0.5
    assert summary.pooled("b", ["passkey", "needles"], [1024, 2048]).value < 0.5
    said = recommended(summary)
    assert said.variant == "b"
    assert "up to 1,024, its retrieval accuracy is 100%" in said.text
    apart = without(summary, lambda r: r["variant"] == "a" or r["length"] == 2048)
    assert recommended(apart).variant is None
    assert "no samples in common" in recommended(apart).text


def test_each_task_weighs_the_same_in_what_is_shown_and_in_what_decides() -> None:
    """One that finds all of a task with many samples, and nothing of two with few, is not ahead."""
    records = []
    for task, depths in (("passkey", 5), ("vt", 1), ("cwe", 1)):
        for variant, right in (("a", task == "passkey"), ("b", task != "passkey")):
            for trial in range(20):
                for depth in range(depths):
                    place = {"task": task, "length": 1024, "depth": depth / 4, "trial": trial, "seed": 0}
                    key = f"{task} {trial} {depth}"
                    records.append({"variant": variant, "key": key, **place, "score": float(right)})
    header = Header({"seed": 0}, {"passkey": {}, "vt": {}, "cwe": {}}, {"a": {"model": "m"}, "b": {"model": "m"}},
                    {"trained_length": 512, "lengths": [1024], "text_tokens": 9000})  # fmt: skip
    summary = Summary(Results(Path("results.jsonl"), header, records))
    tasks = summary.retrieval_tasks
    assert summary.pooled("a", tasks, [1024]).value == pytest.approx(1 / 3)
    assert summary.pooled("b", tasks, [1024]).value == pytest.approx(2 / 3)
    assert summary.difference("b", "a", tasks, [1024]).value == pytest.approx(1 / 3)
    assert summary.effective_length("a", tasks)["RULER"].length == 0
    assert choose(summary, ["a", "b"]).variant == "b"


def controlled(summary: Summary, **shares: float) -> Summary:
    """With a control in which the baseline found these shares."""
    control = Control(Form("base"), 8, {str(Form("base")): shares}, "key")
    about = {**summary.header.about, "control": control.describe()}
    return Summary(Results(Path("results.jsonl"), replace(summary.header, about=about), summary.records))


@pytest.mark.parametrize("windows", [0, 12])
def test_a_task_whose_control_failed_decides_as_if_it_were_not_measured(windows: int) -> None:
    rng = RNG(0)
    for first in (0.95, 0.05, 0.5):
        setting = Setting(4, 0.5, first, trials=24, depths=2, tasks=2, windows=windows)
        summary = controlled(setting.summary(rng), task0=0.89, task1=0.9)
        alone = controlled(without(summary, lambda r: r["task"] != "task0"), task1=0.9)
        assert chosen(summary, setting) == chosen(alone, setting)
        assert summary.effective_length("m0", summary.deciding_tasks) == alone.effective_length("m0", ["task1"])
        said = recommended(summary).text
        note = "Not counted: task0 (89%). The baseline must find 90% within 8 tokens"
        assert note in said
        assert said.replace(summary.not_counted + " ", "") == recommended(alone).text
        assert [summary.titled(task) for task in summary.retrieval_tasks] == ["task0 (not counted)", "task1"]
        assert summary.by_length("m0", "task0")  # it is shown


def test_without_a_task_that_counts_losses_decide_or_nothing() -> None:
    rng = RNG(0)
    setting = Setting(4, 0.2, 0.9, trials=24, windows=24, gain=-0.1)
    summary = controlled(setting.summary(rng), task0=0.2)
    choice = chosen(summary, setting)
    assert "m0" in choice.behind
    assert choice.gain.measure == LOSS
    said = recommended(summary)
    assert choice.variant != "m0"
    # The others are equal to the baseline.
    assert said.variant is None
    assert f"No method is recommended. The first, {choice.variant}, measured no better than the baseline." in said.text
    assert "Not counted: task0 (20%)" in said.text
    assert "retrieval accuracy" not in said.text
    # Asked again in the same way, a task that is done counts.
    assert ACCURACY in str(recommended(controlled(summary, task0=1.0)))
    nothing = recommended(controlled(Setting(4, 0.2, 0.9, trials=24).summary(rng), task0=0.2))
    assert nothing.variant is None
    assert "nothing to recommend. Not counted: task0 (20%)" in nothing.text
    assert set(staying(summary, ["m0", "m1", "m2"])) == {"m1", "m2"}


def test_ties_are_reported_with_why_one_is_named() -> None:
    summary = Setting(4, 0.9, trials=9, windows=10, shared=1.0).summary(RNG(0))
    for k in range(4):
        summary.header.variants[f"m{k}"]["portable"] = k in (2, 3)
    choice = chosen(summary, Setting(4))
    assert (choice.variant, set(choice.tied), choice.behind) == ("m3", {"m0", "m1", "m2"}, {})
    said = " ".join(reasons(summary, choice))
    assert "m3 is recommended because it measured better than the baseline." in said
    assert "(95% interval, simultaneous over 4 methods)" in said
    assert f"Holm-adjusted for {6 + 4 + 6 + 4 + 6} comparisons" in said
    assert f"fewer than {texts_needed(26)} independent texts; there are " in said
    assert "ehind" not in said


@pytest.mark.parametrize("setting", [Setting(4, 0.9, trials=9, windows=10, shared=1.0), Setting(4, 0.5, trials=3)])
def test_the_order_of_a_run_decides_nothing(setting: Setting) -> None:
    summary = setting.summary(RNG(0))
    names = [f"m{k}" for k in range(4)]
    assert len({choose(summary, order).ranking for order in (names, names[::-1], ["m2", "m0", "m3", "m1"])}) == 1
    # Identical methods are named by the alphabet.
    twins = [{**r, "variant": v} for r in summary.records if r["variant"] == "m1" for v in ("none", *names)]
    twin = choose(Summary(Results(Path("results.jsonl"), summary.header, twins)), names[::-1])
    assert (twin.variant, "it comes first in the alphabet" in twin.decided) == ("m1", True)  # of m1 and m3, which load


def worse_than_baseline(**setting: object) -> Summary:
    """All methods do worse than the baseline."""
    summary = Setting(3, 0.1, **setting).summary(RNG(0))  # type: ignore[arg-type]
    for record in summary.records:
        if record["variant"] == "none" and "score" in record:
            record["score"] = 1.0
        if record["variant"] != "none" and record["task"] == "perplexity":
            losses = torch.full((record["length"] - 1,), record["loss"] + 1)
            record |= {"loss": record["loss"] + 1, **packed(losses=losses)}
    return summary


@pytest.mark.parametrize("setting", [{"trials": 40}, {"trials": 2}, {"trials": 0, "windows": 16}])
def test_a_method_that_is_worse_than_the_baseline_is_not_recommended(setting: dict[str, int]) -> None:
    said = recommended(worse_than_baseline(**setting))
    assert said.variant is None
    assert re.match(r"No method is recommended. The first, m\d, did worse than the baseline \(.*, p = ", said.text)
    better = {"rate_of_first": 1.0, "trials": 40} if setting["trials"] else {"gain": 0.1, "trials": 0, "windows": 16}
    assert recommended(Setting(3, 0.3, **better).summary(RNG(0))).variant == "m0"


def results_of(
    variants: list[str], scores: dict[str, list[int]], losses: dict[str, dict[tuple[int, int], float]],
    not_portable: str = "", held: int = 10**6,
) -> Summary:  # fmt: skip
    """Scores by trial, and the loss of each window by (length, trial); trained at 512 tokens."""
    records = [
        {"variant": v, "key": f"p{trial}", "task": "passkey", "length": 2048, "trial": trial, "depth": 0.5, "seed": 0,
         "score": float(score)}
        for v, found in scores.items() for trial, score in enumerate(found)
    ] + [
        {"variant": v, "key": f"l{length} {trial}", "task": "perplexity", "length": length, "trial": trial,
         "depth": None, "seed": 0, "loss": loss, "tokens": length - 1, "bytes": 4 * length,
         **packed(losses=torch.full((length - 1,), loss))}
        for v, windows in losses.items() for (length, trial), loss in windows.items()
    ]  # fmt: skip
    header = Header(
        {"seed": 0}, {record["task"]: {} for record in records},
        {v: {"model": "m", "portable": v not in not_portable} for v in variants},
        {"trained_length": 512, "lengths": sorted({record["length"] for record in records}), "text_tokens": held},
    )  # fmt: skip
    return Summary(Results(Path("results.jsonl"), header, records))


def flat(loss: float, windows: int = 12, length: int = 2048) -> dict[tuple[int, int], float]:
    return {(length, trial): loss + 0.01 * trial for trial in range(windows)}


def nothing_found(*variants: str) -> dict[str, list[int]]:
    return {v: [0] * 12 for v in variants}


@pytest.mark.parametrize("lost", [1.0, math.nan])
@pytest.mark.parametrize("methods", [["a"], ["a", "b"]])
def test_where_retrieval_ties_a_loss_above_the_baselines_advises_against_a_method(
    methods: list[str], lost: float
) -> None:
    losses = {"none": flat(4.0), **{v: flat(4 + lost) for v in methods}}
    said = recommended(results_of(["none", *methods], nothing_found("none", *methods), losses))
    assert said.variant is None
    assert "not finite" in said.text or "did worse than the baseline (loss +1.000 nats" in said.text


@pytest.mark.parametrize("found", [[1] * 12, [1] * 4 + [0] * 8])
def test_one_that_finds_more_is_recommended_whatever_its_loss(found: list[int]) -> None:
    scores = {"none": [0] * len(found), "a": found}
    made = results_of(["none", "a"], scores, {"none": flat(4.0), "a": flat(4.5)})
    # Four of twelve are no evidence (p = 0.125), while the loss is.
    assert recommended(made).variant == ("a" if sum(found) == 12 else None)
    few = results_of(["none", "a"], {"none": [0] * 4, "a": [1] * 4}, {"none": flat(4.0, 2), "a": flat(4.5, 2)})
    assert recommended(few).variant == "a"


@pytest.mark.parametrize(("methods", "texts"), [(2, 6), (16, 10)])
def test_a_method_that_is_worse_by_far_is_not_recommended_for_want_of_an_adjusted_p(methods: int, texts: int) -> None:
    names = [f"m{k}" for k in range(methods)]
    by_keys = results_of(["none", *names], {"none": [1] * texts, **{v: [0] * texts for v in names}}, {})
    by_loss = results_of(["none", *names], {}, {"none": flat(4, 8), **{v: flat(5, 8) for v in names}})
    assert recommended(by_keys).variant is recommended(by_loss).variant is None


@pytest.mark.parametrize(("windows", "held"), [(1, 10**6), (5, 3000)])
def test_one_window_advises_against_a_method_too(windows: int, held: int) -> None:
    made = results_of(["none", "a"], {}, {"none": flat(4, windows), "a": flat(9, windows)}, held=held)
    assert recommended(made).variant is None


def test_variants_of_different_lengths_are_compared_at_those_that_they_share() -> None:
    short, long = flat(3.0, length=1024), flat(5.0, length=2048)
    said = recommended(results_of(["a", "b"], {}, {"a": short, "b": long}))
    assert said.variant == "a"
    assert "Behind: b (loss +2.000 nats per token" in said.text
    longer = results_of(["none", "a"], {}, {"none": flat(4.0), "a": {**flat(5.0), **flat(5.0, length=4096)}})
    assert recommended(longer).variant is None
    apart = results_of(["a", "b"], {}, {"a": {(2048, 0): 3.0}, "b": {(2048, 1): 3.0}})
    assert "no samples in common" in recommended(apart).text


def test_losses_are_compared_on_the_windows_that_all_have() -> None:
    """One that read two hard windows more is not behind by them, nor shown as if it were."""
    b = {(2048, 0): 3.5, (2048, 1): 3.5, (2048, 2): 6.0, (2048, 3): 6.0}
    made = results_of(["none", "a", "b"], {}, {"none": flat(7, 4), "a": flat(4, 2), "b": b})
    assert recommended(made).variant == "b"
    assert [made.loss(v, 2048) for v in "ab"] == pytest.approx([4.005, 3.5])
    assert made.uneven == "perplexities are over the 2 windows that variants share (measured: baseline 4, b 4)"
    assert results_of(["a", "b"], {}, {"a": flat(4), "b": flat(5)}).uneven == ""


def test_one_that_is_not_worse_than_the_baseline_goes_before_a_cheaper_one_that_is() -> None:
    base, cheap, other = [1] * 10 + [0] * 2, [0] * 7 + [1] * 3 + [0] * 2, [0] * 2 + [1] * 8 + [0] * 2
    made = results_of(["none", "a", "b"], {"none": base, "a": cheap, "b": other}, {}, not_portable="b")
    said = recommended(made)
    assert said.variant is None
    assert said.ranking == ("b", "a")
    assert "Behind: a (retrieval accuracy -58.3 points, p = 0.047 against baseline)" in said.text
    assert "The first, b, measured no better than the baseline." in said.text


def test_a_loss_alone_is_said_against_the_baseline() -> None:
    said = recommended(results_of(["none", "a"], {}, {"none": flat(4.0), "a": flat(3.5)})).text
    assert said.startswith("a: Its loss is -0.500 nats per token against the baseline (p = 0.00049).")


def test_one_method_without_a_baseline_is_compared_with_nothing() -> None:
    said = recommended(results_of(["none", "a"], {}, {"none": {(256, 0): 4.0}, "a": flat(3.5)})).text
    assert said == "Only a was measured beyond the trained length: nothing to compare it with."


def test_a_model_that_came_extended_is_not_set_aside_as_if_it_could_not_be_saved() -> None:
    """A fine-tune's own result has no plan, so that nothing is known of its config."""
    made = results_of(["none", "untrained", "trained"], nothing_found("none", "untrained", "trained"),
                      {"none": flat(4.0), "untrained": flat(3.0), "trained": flat(2.995)})  # fmt: skip
    made.header.variants["trained"]["portable"] = None
    assert recommended(made).variant == "trained"


def test_a_p_is_that_of_the_family_and_behind_is_said_with_it() -> None:
    setting = Setting(3, 0.9, 0.1, trials=40)
    summary = setting.summary(RNG(0))
    choice = chosen(summary, setting)
    (lost,) = choice.behind.values()
    assert lost is not None
    assert (lost.measure, lost.one, choice.family) == (ACCURACY, "m0", 6)
    assert lost.alone < lost.p < LEVEL
    assert f"m0 ({ACCURACY} {100 * lost.value:+.1f} points, p = {lost.p:.2g} against" in " ".join(
        reasons(summary, choice)
    )


def test_one_method_alone_is_named_without_a_claim_on_others() -> None:
    setting = Setting(1, 0.5, trials=10, windows=4)
    choice = chosen(setting.summary(RNG(0)), setting)
    assert (choice.variant, choice.ranking, choice.decided, choice.started) == ("m0", ("m0",), "", 1)
    with pytest.raises(ValueError, match="no candidates to choose from"):
        choose(setting.summary(RNG(0)), [])


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_methods_that_find_nothing_or_everything_tie(rate: float) -> None:
    setting = Setting(5, rate, trials=30)
    summary = setting.summary(RNG(0))
    choice = chosen(summary, setting)
    assert len(choice.tied) == 4
    assert choice.gain is not None
    assert choice.gain.p == 1
    assert "which is not significant" in " ".join(reasons(summary, choice))


def test_missing_samples_compare_what_both_have_and_decide_nothing_where_nothing_is() -> None:
    setting = Setting(3, 0.9, 0.2, trials=40, windows=20, gain=0.2)
    whole = setting.summary(RNG(0))
    half = without(whole, lambda r: r["variant"] != "m0" or r["trial"] < 20)
    assert "m0" in chosen(half, setting).behind
    unread = without(whole, lambda r: r["variant"] != "m1" or r["task"] != "perplexity")
    unread = without(unread, lambda r: r["task"] == "perplexity" or r["variant"] != "m0")
    choice = choose(unread, ["m1", "m2"])
    assert {choice.variant, *choice.tied} == {"m1", "m2"}
    apart = without(whole, lambda r: (r["trial"] % 2 == 0) == (r["variant"] == "m0"))
    assert chosen(apart, setting).behind == {}


@pytest.mark.parametrize("windows", [2, 20])
def test_a_loss_that_is_not_finite_is_behind_and_said_so(windows: int) -> None:
    setting = Setting(3, 0.9, trials=20, shared=1.0, windows=windows)
    summary = setting.summary(RNG(0))
    for value in (math.nan, math.inf, 1e4):
        for record in summary.records:
            if record["variant"] == "m1" and record["task"] == "perplexity":
                record.update(packed(losses=_filled(value)))
        fresh = without(summary, lambda record: True)
        choice = chosen(fresh, setting)
        if math.isfinite(value):
            assert ("m1" in choice.behind) == (windows == 20)
        else:
            assert choice.behind == {"m1": None}
            assert "m1 (its loss is not finite)" in " ".join(reasons(fresh, choice))


def _filled(value: float):
    import torch

    return torch.full((31,), value)


def test_so_few_texts_that_nothing_can_be_significant_name_the_best_as_measured() -> None:
    setting = Setting(3, 1.0, 0.0, trials=2, shared=1.0)
    choice = chosen(setting.summary(RNG(0)), setting)
    assert choice.variant == "m1"
    assert (choice.tied, set(choice.aside)) == (("m2",), {"m0"})
    assert choice.decided.startswith("plain transformers loads it")
    assert choice.needed == {ACCURACY: (texts_needed(choice.family), 2)}


def test_the_least_regression_decides_a_tie_by_a_test() -> None:
    setting = Setting(2, 1.0, trials=20, windows=12)
    summary = setting.summary(RNG(3))
    for record in summary.records:
        record["variant"] = {"m0": "m1", "m1": "m0"}.get(record["variant"], record["variant"])
        if record["variant"] == "m0" and record["task"] == "short":
            record.update(packed(losses=_filled(9.0)[:7], top1=_filled(9.0)[:7].int()))
    for k in range(2):
        summary.header.variants[f"m{k}"]["portable"] = True
    choice = chosen(without(summary, lambda r: r["task"] != "perplexity"), setting)
    assert (choice.variant, choice.tied) == ("m1", ("m0",))
    assert choice.decided == f"its {REGRESSION} is lower"
    assert LOSS not in choice.needed


def test_a_setting_of_the_simulation_draws_what_it_says() -> None:
    setting = Setting(2, 0.3, 0.8, trials=4000, depths=2, alike=0.9)
    summary = replace(setting, trials=4000).summary(RNG(0))
    shares = {v: summary.pooled(v, summary.retrieval_tasks, summary.beyond).value for v in summary.variants}
    assert shares == pytest.approx({"none": 0.3, "m0": 0.8, "m1": 0.3}, abs=0.03)


def test_what_is_worse_than_the_baseline_pushes_nothing_aside() -> None:
    """It loses 0.5 nats less than one that finds 40 points more than the baseline, and finds less than that itself."""
    scores = {"none": [1] * 24 + [0] * 16, "b": [1] * 40, "d": [1] * 8 + [0] * 32}
    losses = {"none": flat(3.04), "b": flat(3.0), "d": flat(2.5)}
    said = recommended(results_of(["none", "b", "d"], scores, losses))
    assert said.variant == "b"
    assert "Behind: d (retrieval accuracy" in said.text


def test_a_loss_that_is_not_finite_is_never_recommended() -> None:
    lost = flat(math.nan)
    said = recommended(
        results_of(["none", "a", "b"], {"none": [0] * 12, "a": [1] * 12, "b": [0] * 11 + [1]},
                   {"none": flat(4.0), "a": lost, "b": flat(3.5)})
    )  # fmt: skip
    assert said.variant == "b"
    assert "a (its loss is not finite)" in said.text
    assert recommended(results_of(["none", "a"], {}, {"none": flat(4.0), "a": lost})).variant is None


def test_a_negligible_regression_does_not_outweigh_retrieval() -> None:
    made = results_of(["none", "a", "b"], {"none": [0] * 40, "a": [1] * 30 + [0] * 10, "b": [0] * 12 + [1] * 28}, {})
    short = {"none": 3.0, "a": 3.0012, "b": 3.001}
    records = [
        {"variant": v, "key": f"s{trial}", "task": "short", "length": 256, "trial": trial, "depth": None, "seed": 0,
         "loss": loss, "tokens": 255, "bytes": 800,
         **packed(losses=torch.full((255,), loss + 1e-6 * trial), top1=torch.zeros(255, dtype=torch.int32))}
        for v, loss in short.items() for trial in range(24)
    ]  # fmt: skip
    header = replace(made.header, tasks={**made.header.tasks, "short": {}})
    summary = Summary(Results(Path("results.jsonl"), header, [*made.records, *records]))
    assert summary.gate("a").length == 256
    said = recommended(summary)
    assert said.variant == "a"
    assert "because its measured retrieval accuracy is the highest" in said.text


@pytest.mark.parametrize(("factor", "ranked"), [(2, False), (8, True)])
def test_variants_of_different_factors_are_ranked_within_the_smallest_target(factor: int, ranked: bool) -> None:
    # Measured up to 2,048 tokens, four times the trained length.
    made = results_of(["none", "yarn", "ntk"], {"none": [0] * 12, "yarn": [1] * 12, "ntk": [1] * 12}, {})
    for name, each in {"yarn": factor, "ntk": 4}.items():
        made.header.variants[name]["extension"] = {"method": {"name": name}, "factor": each}
    said = recommended(made)
    assert (said.variant is not None) == ranked
    refused = "the factors differ (yarn ×2, ntk ×4) and lengths beyond the smallest target were measured"
    assert ranked or f"{refused}. Measure up to 1,024 tokens" in said.text


def test_a_loss_that_one_lacks_decides_nothing() -> None:
    found = {"none": [0] * 12, "a": [1] * 12, "b": [1] * 12}
    said = recommended(results_of(["none", "a", "b"], found, {"none": flat(4.0), "b": flat(3.5)}))
    assert said.variant == "a"
    assert "because it comes first in the alphabet" in said.text


def test_what_is_said_to_be_highest_is_among_those_left() -> None:
    found = {"none": [0] * 40, "a": [1] * 30 + [0] * 10, "b": [1] * 32 + [0] * 8, "c": [1] * 28 + [0] * 12}
    said = recommended(results_of(["none", *"abc"], found, {}, not_portable="b")).text
    assert "plain transformers loads it, and among those its measured retrieval accuracy is the highest" in said


def test_one_that_is_no_better_than_the_baseline_does_not_hide_one_that_is() -> None:
    found = dict.fromkeys(["none", "a", "b"], [1] * 8)
    losses = {"none": flat(4.0, 3), "a": flat(4.0, 3), "b": flat(3.5, 3)}
    said = recommended(results_of(["none", "a", "b"], found, losses, not_portable="b"))
    assert said.variant == "b"
    assert "Tied with a: b is recommended because it measured better than the baseline." in said.text


def test_a_loss_that_decides_is_said() -> None:
    found = dict.fromkeys(["none", "a"], [1] * 8)
    said = recommended(results_of(["none", "a"], found, {"none": flat(4.0), "a": flat(3.5)}))
    assert said.variant == "a"
    assert "Its loss is -0.500 nats per token against the baseline (p = 0.00098)." in said.text


def test_perplexity_of_the_baseline_alone_decides_nothing() -> None:
    made = results_of(["none", "a"], {"none": [0] * 8, "a": [1] * 8}, {"none": flat(4.0)})
    assert recommended(made).variant == "a"

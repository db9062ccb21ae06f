"""What is recommended follows from what was measured, keeps its time, and is ready to apply."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from ctxext import extend_context, restore_context
from ctxext.assets import MODEL, PERSUASION
from ctxext.cli.recommend import recommended_table
from ctxext.evals.choice import choose
from ctxext.evals.control import Control, Form
from ctxext.evals.haystack import read_prose
from ctxext.evals.loading import load
from ctxext.evals.perplexity import packed
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import Header, Results, read_results
from ctxext.evals.summary import Summary
from ctxext.extension.method_file import read_saved
from ctxext.extension.request import plan_extension
from ctxext.fitting.episodes import split
from ctxext.fitting.fit import fit
from ctxext.fitting.recommend import FIRST, recommend, staying, why
from ctxext.methods import YaRN


def measured(
    found: dict[str, float], loss: dict[str, float], regression: dict[str, float] | None = None, texts: int = 16
) -> Summary:
    """Of variants with a passkey accuracy beyond 512 tokens, a mean loss at 1,024 and a regression at 512."""
    records = []
    for variant in ("none", *found):
        for text in range(texts):
            hit = float(text < round(found.get(variant, 0.0) * texts))
            place = {"length": 1024, "trial": text, "seed": 0}
            records.append(
                {"variant": variant, "key": f"p{text}", "task": "passkey", "depth": 0.5, **place, "score": hit}
            )
            # Texts differ from each other, and a little in what a method makes of them.
            noise = 0.1 * text + 0.001 * (text % 3)
            for task, length, mean in (("perplexity", 1024, loss), ("short", 512, regression or {})):
                losses = torch.full((length - 1,), 3 + noise + mean.get(variant, 0.0))
                tensors = {"losses": losses, **({"top1": losses.int()} if task == "short" else {})}
                where = {"task": task, "length": length, "depth": None, "trial": text, "seed": 0}
                count = {"tokens": length - 1, "bytes": 4000, "loss": losses.mean().item()}
                records.append({"variant": variant, "key": f"{task}{text}", **where, **count, **packed(**tensors)})
    header = Header(
        identity={"seed": 0},
        tasks={"passkey": {}, "perplexity": {}, "short": {}},
        variants={
            variant: {"model": "m", "portable": variant not in ("late", "dynamic_ntk")} for variant in ("none", *found)
        },
        about={"trained_length": 512, "lengths": [1024]},
    )
    return Summary(Results(Path("results.jsonl"), header, records))


def test_the_one_that_finds_more_is_chosen_whatever_its_loss_and_wherever_it_runs() -> None:
    summary = measured({"static": 0.5, "late": 1.0}, {"late": 0.5})
    assert choose(summary, ["static", "late"]).variant == "late"


def test_less_loss_decides_between_those_that_find_as_much() -> None:
    summary = measured({"static": 1.0, "late": 1.0}, {"static": 0.05})
    choice = choose(summary, ["static", "late"])
    assert (choice.variant, choice.tied, [*choice.behind]) == ("late", (), ["static"])


def test_of_tied_ones_that_is_chosen_which_plain_transformers_runs() -> None:
    summary = measured({"late": 1.0, "static": 31 / 32}, {"static": 0.005}, {"static": 0.1}, texts=32)
    choice = choose(summary, ["late", "static"])
    assert (choice.variant, choice.tied) == ("static", ("late",))
    assert choice.decided == "plain transformers loads it"


def test_of_tied_ones_that_run_alike_the_cheapest_within_the_trained_length_is_chosen() -> None:
    summary = measured({"a": 1.0, "b": 1.0, "late": 1.0}, {}, {"a": 0.1, "b": 0.05})
    choice = choose(summary, ["a", "b", "late"])
    assert choice.variant == "b"
    assert choice.decided == "plain transformers loads it and its short-context regression is lower"


@pytest.mark.parametrize("broken", [{"a"}, {"a", "b"}])
def test_a_loss_that_is_no_number_is_never_ahead(broken: set[str]) -> None:
    summary = measured({"a": 1.0, "b": 1.0, "c": 0.9}, dict.fromkeys(broken, float("nan")))
    assert choose(summary, ["a", "b", "c"]).variant == ("b" if broken == {"a"} else "c")


def test_few_texts_do_not_make_a_tie_of_all_and_nothing() -> None:
    summary = measured({"late": 1.0, "static": 0.0}, {}, texts=FIRST)
    assert choose(summary, ["late", "static"]).variant == "late"


def test_who_is_surely_behind_leaves_and_who_may_still_win_stays() -> None:
    summary = measured({"a": 1.0, "near": 14 / 16, "far": 0.25, "loses": 1.0}, {"loses": 0.1})
    assert staying(summary, ["far", "near", "loses", "a"]) == ["near", "a"]


def test_the_two_best_stay_to_be_told_apart() -> None:
    summary = measured({"a": 1.0, "b": 0.25, "c": 0.0}, {})
    assert staying(summary, ["c", "b", "a"]) == ["b", "a"]


def test_nobody_leaves_after_the_first_texts() -> None:
    """Two texts cannot tell methods apart, whatever they show."""
    summary = measured({"a": 1.0, "b": 0.0, "c": 0.0}, {"b": 1.0, "c": 1.0}, texts=FIRST)
    assert staying(summary, ["a", "b", "c"]) == ["a", "b", "c"]


def ticking(seconds: float = 0.01) -> Callable[[], float]:
    """A clock that goes on by so much each time it is read, so that no machine's pace decides."""
    return itertools.count(step=seconds).__next__


@pytest.fixture(scope="module")
def bundled():
    model, tokenizer = load(MODEL)
    return model, Prompter(tokenizer)


@pytest.mark.slow
def test_a_time_too_short_for_one_evaluation_is_refused_with_what_would_do(bundled, tmp_path: Path) -> None:
    model, prompter = bundled
    with pytest.raises(ValueError, match=r"0.01 minutes is not enough .* Pass [\d.]+ minutes at least"):
        recommend(model, prompter, read_prose(PERSUASION), 4, minutes=0.01, results=tmp_path / "r", now=ticking())
    assert not hasattr(model, "context_extension")


def test_a_text_shorter_than_the_target_is_refused(bundled, tmp_path: Path) -> None:
    model, prompter = bundled
    with pytest.raises(ValueError, match="fewer than the target length of 2,048"):
        recommend(model, prompter, read_prose(PERSUASION)[:4000], 4, minutes=1, results=tmp_path / "results.jsonl")


def test_other_samples_are_not_touched(bundled, tmp_path: Path) -> None:
    model, prompter = bundled
    (tmp_path / "results.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        recommend(model, prompter, read_prose(PERSUASION), 4, minutes=1, results=tmp_path / "results.jsonl")
    assert (tmp_path / "results.jsonl").read_text() == "mine"


@pytest.mark.slow
def test_a_recommendation_is_a_method_that_extend_context_takes(bundled, tmp_path: Path) -> None:
    model, prompter = bundled
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states: list[tuple[float, str]] = []
    found = recommend(
        model,
        prompter,
        read_prose(PERSUASION)[:2_400],
        2,
        methods=["yarn", "dynamic_yarn"],
        original_max_position_embeddings=128,
        minutes=0.2,
        now=ticking(),
        results=tmp_path / "results.jsonl",
        names=("austen-4m", "persuasion.txt"),
        advance=lambda *state: states.append(state),
    )
    assert found.variant in ("yarn", "dynamic_yarn")
    assert min(found.texts.values()) >= FIRST
    assert "too few to fit" in found.left_out["fitted"]
    assert {*read_results(tmp_path / "results.jsonl").header.variants} == {*found.texts}
    assert [share for share, _ in states] == sorted(share for share, _ in states)
    assert found.speed.keys() == {"none", found.variant}
    assert min(min(speed.prefill, speed.decode) for speed in found.speed.values()) > 0
    found.saved.save(tmp_path / "extension.json")
    assert json.loads((tmp_path / "extension.json").read_text())["about"]["target_length"] == 256
    method = read_saved(tmp_path / "extension.json").method
    extend_context(model, method=method, original_max_position_embeddings=128)
    assert model.context_extension.plan.target_length == 256
    restore_context(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_model_that_finds_nothing_in_a_short_text_is_recommended_a_method_by_its_loss(
    bundled, tmp_path: Path
) -> None:
    control = Control(Form("base"), 128, {str(Form("base")): {"passkey": 0.0}}, "key")
    found = recommend(
        small(bundled[1]), bundled[1], read_prose(PERSUASION)[:2_400], 2, methods=["yarn", "pi"], fitted=False,
        minutes=0.1, now=ticking(), results=tmp_path / "results.jsonl", about={"control": control.describe()},
    )  # fmt: skip
    assert "Not counted: passkey (0%)" in found.why
    assert "retrieval accuracy" not in found.why
    assert {figures["found"] for figures in found.saved.about["figures"].values()} == {None}
    assert next(iter(recommended_table(found).columns[0].cells)) == found.variant
    found.saved.save(tmp_path / "extension.json")


@pytest.mark.slow
def test_portable_leaves_out_what_no_config_can_say(bundled, tmp_path: Path) -> None:
    found = recommend(
        *bundled, read_prose(PERSUASION)[:2_400], 2, methods=["llama3", "self_extend"], portable=True,
        original_max_position_embeddings=128, minutes=0.1, now=ticking(), results=tmp_path / "results.jsonl",
    )  # fmt: skip
    assert found.variant == "llama3"
    assert found.texts.keys() == {"none", "llama3"}
    assert found.left_out["self_extend"] == "config.json cannot express it, as it rotates inside attention."


def test_who_needs_a_config_learns_which_method_comes_first_there() -> None:
    summary = measured({"dynamic_ntk": 1.0, "ntk": 0.6, "yarn": 0.8}, {})
    choice = choose(summary, ["dynamic_ntk", "ntk", "yarn"])
    plan = plan_extension(LlamaConfig(max_position_embeddings=512), factor=2, method="dynamic_ntk")
    said = why(summary, choice, plan, [])
    assert "Of those that config.json can express, for servers too, yarn comes first" in said


def small(prompter: Prompter, **changes: object) -> LlamaForCausalLM:
    """A random model of the bundled tokenizer, trained at 128 tokens as its config has it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(prompter.tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
        **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.slow
def test_what_is_fitted_on_is_not_compared_on(bundled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_evaluation(*arguments: Any, settings: Any, **options: Any) -> Any:
        # A fit has a clock of its own, which it follows where it is given minutes.
        return fit(*arguments, settings=replace(settings, minutes=None, evaluations=1), **options)

    monkeypatch.setattr("ctxext.fitting.recommend.fit", one_evaluation)
    model, prompter = small(bundled[1]), bundled[1]
    text = read_prose(PERSUASION)[:60_000]
    found = recommend(
        model, prompter, text, 2, methods=["yarn"], minutes=0.3, results=tmp_path / "results.jsonl", now=ticking()
    )
    assert found.texts.keys() == {"none", "yarn", "fitted"}
    _, compared = split(text, prompter, 128, 256, held_out=0.5)
    assert found.summary.header.identity["text"] == f"text {compared.haystack.fingerprint}"


@pytest.mark.slow
def test_a_fit_that_fails_is_left_out_and_the_rest_recommended(
    bundled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("ctxext.fitting.recommend.fit", no_memory)
    model, prompter = small(bundled[1]), bundled[1]
    text = read_prose(PERSUASION)[:60_000]
    found = recommend(
        model, prompter, text, 2, methods=["yarn"], minutes=0.3, results=tmp_path / "results.jsonl", now=ticking()
    )
    assert (found.variant, found.left_out["fitted"]) == ("yarn", "out of memory")


@pytest.mark.slow
def test_a_model_in_training_is_measured_without_dropout_and_left_in_training(bundled, tmp_path: Path) -> None:
    model, text, losses = small(bundled[1], attention_dropout=0.5), read_prose(PERSUASION)[:60_000], []
    for training in (False, True):
        path = tmp_path / f"{training}.jsonl"
        model.train(training)
        recommend(model, bundled[1], text, 2, methods=["yarn"], fitted=False, minutes=0.2, results=path, now=ticking())
        records = read_results(path).records
        losses.append({r["key"]: r["loss"] for r in records if r["task"] == "perplexity" and r["trial"] == 0})
    assert model.training
    assert losses[0] == losses[1]


def test_what_transformers_saves_and_no_server_is_known_to_run_is_said_so() -> None:
    summary = measured({"hierarchical": 1.0}, {})
    choice = choose(summary, ["hierarchical"])
    plan = plan_extension(GPT2Config(n_positions=64), factor=2, method="hierarchical")
    said = why(summary, choice, plan, [])
    assert "config.json cannot express it" not in said
    assert "Plain transformers loads" in said


def test_two_of_one_name_are_refused(bundled, tmp_path: Path) -> None:
    model, prompter = bundled
    for methods in (["yarn", "yarn"], [YaRN(factor=2.0), YaRN(factor=2.0, beta_fast=16.0)]):
        with pytest.raises(ValueError, match="'yarn' is there twice"):
            recommend(model, prompter, read_prose(PERSUASION), 2, methods=methods, minutes=1, results=tmp_path / "r")

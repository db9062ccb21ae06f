"""What is recommended follows from what was measured, keeps its time, and is ready to apply."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from ctxext import extend_context, restore_context
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.choice import Recommendation, choose, recommended
from ctxext.evals.control import Control, Form
from ctxext.evals.haystack import Haystack, read_prose
from ctxext.evals.loading import load
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity, packed
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import Header, Results, read_results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.screen import summary_table
from ctxext.evals.summary import Summary
from ctxext.evals.targets import LiveModel, Variant, compared_variants
from ctxext.extension.method_file import SavedMethod, read_saved
from ctxext.extension.request import plan_extension
from ctxext.fitting.episodes import split
from ctxext.fitting.fit import fit
from ctxext.fitting.race import FIRST, Race, saved_choice, staying, where_it_runs
from ctxext.methods import ContextMethod, YaRN


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
    assert choice.decided == "plain transformers loads it, and among those its short-context regression is lower"


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


def race(
    model: Any,
    prompter: Prompter,
    text: str,
    factor: float,
    path: Path,
    *,
    methods: Sequence[str | ContextMethod] = ("yarn",),
    trained: int | None = None,
    about: dict[str, Any] | None = None,
    **options: Any,
) -> Race:
    variants = compared_variants(model.config, methods, factor, original_max_position_embeddings=trained)
    target = LiveModel(model, prompter, "austen-4m", trained)
    target.about |= about or {}
    start = target.about["trained_length"]
    lengths = (round(start * factor**0.5), round(start * factor))
    grid = Grid(retrieval=(Passkey(),), texts=(Perplexity(),), lengths=lengths, gate=(start,))
    haystack = Haystack.from_text(text, prompter.tokenizer, name="persuasion.txt")
    return Race(Runner(target, haystack, grid, beyond=True), variants[1:], path, now=ticking(), **options)


def best_of(made: Race, results: Results) -> tuple[Summary, Recommendation, SavedMethod]:
    """As `ctxext compare --best` writes it."""
    summary = Summary(results)
    chosen = recommended(summary)
    plan = made.target.plan(next(variant for variant in made.candidates if variant.name == chosen.ranking[0]))
    return summary, chosen, saved_choice(summary, chosen.text, plan, made.fitted)


@pytest.mark.slow
def test_a_time_too_short_for_one_evaluation_is_refused_with_what_would_do(bundled, tmp_path: Path) -> None:
    model, prompter = bundled
    with pytest.raises(ValueError, match=r"0.01 minutes is not enough .* Pass --minutes [\d.]+, or fewer --methods"):
        race(model, prompter, read_prose(PERSUASION), 4, tmp_path / "r", minutes=0.01).run()
    assert not hasattr(model, "context_extension")


def test_a_text_shorter_than_the_target_is_refused(bundled, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fewer than the target length of 2,048"):
        race(*bundled, read_prose(PERSUASION)[:4000], 4, tmp_path / "results.jsonl", minutes=1)


def test_other_samples_are_not_touched(bundled, tmp_path: Path) -> None:
    for name in ("results.jsonl", "results.jsonl.part-0"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=f"{tmp_path / name} exists already"):
            race(*bundled, read_prose(PERSUASION), 4, tmp_path / "results.jsonl", minutes=1)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf")])
def test_minutes_that_are_none_are_refused(bundled, tmp_path: Path, minutes: float) -> None:
    with pytest.raises(ValueError, match="minutes must be a finite number > 0"):
        race(*bundled, read_prose(PERSUASION), 4, tmp_path / "results.jsonl", minutes=minutes)


@pytest.mark.slow
def test_a_recommendation_is_a_method_that_extend_context_takes(bundled, tmp_path: Path) -> None:
    model, prompter = bundled
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states: list[tuple[float, str]] = []
    made = race(
        model,
        prompter,
        read_prose(PERSUASION)[:6_000],
        2,
        tmp_path / "results.jsonl",
        methods=["yarn", "dynamic_yarn"],
        minutes=0.5,
        advance=lambda *state: states.append(state),
    )
    _, chosen, saved = best_of(made, made.run())
    assert chosen.variant in ("yarn", "dynamic_yarn")
    results = read_results(tmp_path / "results.jsonl")
    texts = Counter(r["variant"] for r in results.records if r["task"] == "perplexity")
    assert min(texts.values()) >= FIRST
    assert "too few to fit" in made.no_fit
    assert {*results.header.variants} == {*texts} == {"none", "yarn", "dynamic_yarn"}
    assert [share for share, _ in states] == sorted(share for share, _ in states)
    saved.save(tmp_path / "extension.json")
    assert json.loads((tmp_path / "extension.json").read_text())["about"]["target_length"] == 1024
    method = read_saved(tmp_path / "extension.json").method
    extend_context(model, method=method)
    assert model.context_extension.plan.target_length == 1024
    restore_context(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_model_that_finds_nothing_in_a_short_text_is_recommended_a_method_by_its_loss(
    bundled, tmp_path: Path
) -> None:
    control = Control(Form("base"), 128, {str(Form("base")): {"passkey": 0.0}}, "key")
    made = race(
        small(bundled[1]), bundled[1], read_prose(PERSUASION)[:2_400], 2, tmp_path / "results.jsonl",
        methods=["yarn", "pi"], fits=False, minutes=0.1, about={"control": control.describe()},
    )  # fmt: skip
    summary, chosen, saved = best_of(made, made.run())
    assert "Not counted: passkey (0%)" in chosen.text
    assert "retrieval accuracy" not in chosen.text
    assert {figures["found"] for figures in saved.about["figures"].values()} == {None}
    assert chosen.ranking[0] in list(summary_table(summary).columns[0].cells)
    saved.save(tmp_path / "extension.json")


@pytest.mark.slow
def test_who_left_is_in_the_file_and_no_page_compares_it_again(bundled, tmp_path: Path) -> None:
    made = race(
        *bundled, read_prose(PERSUASION)[:70_000], 4, tmp_path / "results.jsonl", methods=["yarn", "pi", "llama3"],
        fits=False, minutes=0.3,
    )  # fmt: skip
    summary, chosen, saved = best_of(made, made.run())
    # Without fine-tuning it finds nothing, which eight passages show that do not overlap.
    assert summary.eliminated == ["pi"]
    assert chosen.variant in ("yarn", "llama3")
    assert "pi" not in chosen.ranking
    assert "Dropped early to save time, as others did better so far: pi." in chosen.text
    assert saved.about["figures"].keys() == {"yarn", "pi", "llama3"}
    texts = Counter(record["variant"] for record in summary.records if record["task"] == "perplexity")
    assert texts["pi"] < texts["yarn"] == texts["llama3"]
    # The same choice among the three as the rounds made: those that left count as compared.
    assert "simultaneous over 3 methods" in chosen.text
    # Measured to the end later, it is compared as the others are.
    grid = replace(made.runner.grid, trials=texts["yarn"], windows=texts["yarn"])
    dropped = Variant("pi", {"method": "pi", "factor": 4})
    whole = Summary(replace(made.runner, grid=grid).run(tmp_path / "results.jsonl", [dropped]))
    assert whole.eliminated == []
    assert "pi" in recommended(whole).ranking


def test_who_needs_a_config_learns_which_method_comes_first_there() -> None:
    summary = measured({"dynamic_ntk": 1.0, "ntk": 0.6, "yarn": 0.8}, {})
    config = LlamaConfig(max_position_embeddings=512)
    plan = plan_extension(config, factor=2, method="dynamic_ntk")
    said = where_it_runs(summary, recommended(summary), plan, config)
    assert "The best method that config.json can express, for servers too, is yarn" in said


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

    monkeypatch.setattr("ctxext.fitting.race.fit", one_evaluation)
    model, prompter = small(bundled[1]), bundled[1]
    text = read_prose(PERSUASION)[:60_000]
    results = race(model, prompter, text, 2, tmp_path / "results.jsonl", minutes=0.3).run()
    assert results.header.variants.keys() == {"none", "yarn", "fitted"}
    _, compared = split(text.strip() + "\n", prompter, 128, 256, held_out=0.5)
    assert results.header.identity["text"] == f"persuasion.txt {compared.haystack.fingerprint}"


@pytest.mark.slow
def test_a_fit_that_fails_is_left_out_and_the_rest_recommended(
    bundled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("ctxext.fitting.race.fit", no_memory)
    text = read_prose(PERSUASION)[:60_000]
    made = race(small(bundled[1]), bundled[1], text, 2, tmp_path / "results.jsonl", minutes=0.3)
    _, chosen, _ = best_of(made, made.run())
    assert (chosen.ranking, made.no_fit, made.fitted) == (("yarn",), "out of memory", None)


@pytest.mark.slow
def test_a_model_in_training_is_measured_without_dropout_and_left_in_training(bundled, tmp_path: Path) -> None:
    model, text, losses = small(bundled[1], attention_dropout=0.5), read_prose(PERSUASION)[:60_000], []
    for training in (False, True):
        model.train(training)
        records = (
            race(model, bundled[1], text, 2, tmp_path / f"{training}.jsonl", fits=False, minutes=0.2).run().records
        )
        losses.append({r["key"]: r["loss"] for r in records if r["task"] == "perplexity" and r["trial"] == 0})
    assert model.training
    assert losses[0] == losses[1]


def test_what_transformers_saves_and_no_server_is_known_to_run_is_said_so() -> None:
    summary = measured({"hierarchical": 1.0}, {})
    config = GPT2Config(n_positions=64)
    plan = plan_extension(config, factor=2, method="hierarchical")
    said = where_it_runs(summary, recommended(summary), plan, config)
    assert "config.json cannot express it" not in said
    assert "Plain transformers loads" in said


def test_two_of_one_name_are_refused(bundled) -> None:
    for methods in (["yarn", "yarn"], [YaRN(factor=2.0), YaRN(factor=2.0, beta_fast=16.0)]):
        with pytest.raises(ValueError, match="'yarn' is given twice"):
            compared_variants(bundled[0].config, methods, 2)


def test_methods_that_need_training_or_options_are_not_tried_within_minutes() -> None:
    tried = {variant.name for variant in compared_variants(LlamaConfig(), None, 2, zero_shot=True)}
    assert {"none", "yarn", "llama3", "dynamic_yarn", "self_extend"} <= tried
    assert not {"longrope", "drope", "p_rope", "cope", "transformers_dynamic"} & tried

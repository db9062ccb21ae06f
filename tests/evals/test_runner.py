"""A grid gives the same results however it is run: batches, processes, order, kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config, tiny_model
from soak import soak

from ctxext import YaRN, extend_context
from ctxext.assets import MODEL, PERSUASION
from ctxext.core.plan import Plan
from ctxext.evals.choice import recommended
from ctxext.evals.haystack import Haystack
from ctxext.evals.loading import load
from ctxext.evals.needle import Needle, Passkey
from ctxext.evals.perplexity import KeyTokens, Perplexity, SlidingPerplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import Results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.samples import Place, Sample
from ctxext.evals.summary import Summary
from ctxext.evals.targets import LiveModel, Variant, compared_variants, model_fingerprint
from ctxext.extension.request import plan_extension
from ctxext.methods import list_methods


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = load(MODEL)
    haystack = Haystack.from_text(PERSUASION.read_text(encoding="utf-8")[:120_000], tokenizer)
    return model, Prompter(tokenizer), haystack


GRID = {
    "retrieval": (Passkey(),),
    "texts": (Perplexity(),),
    "lengths": (96, 768),
    "depths": (0.0, 0.4, 1.0),
    "trials": 4,
    "windows": 2,
    "gate": (512,),
}
VARIANTS = [Variant(), Variant("yarn", {"method": "yarn", "factor": 4})]


def run(loaded, path: Path, variants=VARIANTS, beyond: bool = True, **changes) -> Results:
    model, prompter, haystack = loaded
    grid = Grid(**{**GRID, **changes})
    runner = Runner(LiveModel(model, prompter, "austen-4m"), haystack, grid, beyond)
    return runner.run(path, variants)


@pytest.fixture(scope="module")
def reference(loaded, tmp_path_factory) -> Results:
    return run(loaded, tmp_path_factory.mktemp("reference") / "r.jsonl", batch_size=1)


def same(one: Results, other: Results, atol: float = 1e-4) -> None:
    assert len(one.records) == len(other.records)
    for a, b in zip(one.records, other.records):
        assert a.keys() == b.keys()
        for name in a:
            if name in ("logprob", "loss"):
                assert a[name] == pytest.approx(b[name], abs=atol)
            elif name not in ("losses", "top1"):
                assert a[name] == b[name], name


@pytest.mark.slow
def test_the_grid_is_complete(reference: Results) -> None:
    counts: dict[tuple[str, str, int], int] = {}
    for record in reference.records:
        place = record["variant"], record["task"], record["length"]
        counts[place] = counts.get(place, 0) + 1
    retrieval = {(v, "passkey", n): 12 for v in ("none", "yarn") for n in (96, 512, 768)}
    texts = {(v, task, n): 2 for v in ("none", "yarn") for task, n in (("perplexity", 768), ("short", 512))}
    assert counts == retrieval | texts
    hits = {record["hit"] for record in reference.records if "hit" in record}
    assert hits == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [3, 8])
def test_the_batch_size_changes_nothing(loaded, reference: Results, tmp_path: Path, batch_size: int) -> None:
    same(reference, run(loaded, tmp_path / "r.jsonl", batch_size=batch_size))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_grid_and_merge_to_the_same_file(world: int, reference: Results, tmp_path: Path) -> None:
    """By `accelerate launch`, through the command line."""
    common = ["eval", str(MODEL), "--tasks", "passkey,perplexity", "--lengths", "96,768", "--depths", "0,0.4,1"]
    common += ["--trials", "4", "--windows", "2", "--method", "yarn", "--batch-size", "1", "--dtype", "float32"]
    (tmp_path / "one").mkdir()
    together = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "-m", "ctxext"]
    alone = [sys.executable, "-m", "ctxext"]
    for start, path in ((together, tmp_path / "r.jsonl"), (alone, tmp_path / "one/r.jsonl")):
        subprocess.run([*start, *common, "-o", str(path)], check=True, capture_output=True, env=quiet())
    assert (tmp_path / "r.jsonl").read_bytes() == (tmp_path / "one/r.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "r.jsonl"]


def quiet() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def test_which_tasks_run_and_in_what_order_changes_no_sample(loaded, reference: Results, tmp_path: Path) -> None:
    other = run(
        loaded, tmp_path / "r.jsonl", variants=VARIANTS[::-1], retrieval=(Needle(), Passkey()), texts=(), gate=(),
        lengths=(768,), depths=(1.0, 0.4), trials=2, batch_size=2,
    )  # fmt: skip
    known = {(r["variant"], r["key"]): r for r in reference.records}
    shared = [r for r in other.records if r["task"] == "passkey"]
    assert len(shared) == 8
    for record in shared:
        expected = known[record["variant"], record["key"]]
        assert record["got"] == expected["got"]
        assert record["logprob"] == pytest.approx(expected["logprob"], abs=1e-4)


@pytest.mark.slow
def test_a_run_that_was_killed_ends_as_if_it_had_not_been() -> None:
    outcome = soak(kills=5, seed=1)
    assert outcome.kills == 5
    assert outcome.finished >= 1


def test_a_second_run_measures_nothing(loaded, reference: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference.path.read_bytes()
    monkeypatch.setattr(LiveModel, "outcomes", lambda *_: iter(()))
    monkeypatch.setattr(LiveModel, "read", lambda *_: pytest.fail("a window was read again"))
    run(loaded, reference.path, batch_size=1)
    assert reference.path.read_bytes() == before


def test_a_larger_grid_measures_only_what_is_new(loaded, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    small = run(loaded, path, texts=(), gate=(), lengths=(96,))
    large = run(loaded, path, texts=(), gate=(), lengths=(96,), trials=5, depths=(0.0, 0.2, 0.4, 1.0))
    assert len(small.records) == 2 * 12
    assert len(large.records) == 2 * 20
    keys = {(r["variant"], r["key"]) for r in large.records}
    assert {(r["variant"], r["key"]) for r in small.records} < keys


@pytest.mark.slow
def test_generated_answers_agree_with_teacher_forcing(loaded, reference: Results, tmp_path: Path) -> None:
    generated = run(loaded, tmp_path / "r.jsonl", texts=(), gate=(), generate=True)
    forced = {(r["variant"], r["key"]): r["hit"] for r in reference.records if "hit" in r}
    assert all(forced[r["variant"], r["key"]] == r["hit"] for r in generated.records)
    assert len(generated.records) == 48
    with pytest.raises(ValueError, match=r"\(scoring: "):
        run(loaded, reference.path, generate=True)


def test_every_method_is_compared(loaded) -> None:
    """A method that somebody registers is in the comparison without a change here, if it reaches the target."""
    model, *_ = loaded
    every = ["none", *(cls.name for cls in list_methods("rope"))]
    assert [variant.name for variant in compared_variants(model.config, factor=1.5)] == every
    variants = compared_variants(model.config, factor=4)
    assert [variant.name for variant in variants] == [name for name in every if name != "string"]
    target = LiveModel(*loaded[:2], "austen-4m")
    assert {target.reach(variant) for variant in variants[1:]} == {2048}
    assert [target.refusal(variant) for variant in variants] == [None] * len(variants)
    assert "covers" in target.refusal(Variant("pi", {"method": "pi", "factor": 1}))


@pytest.mark.slow
def test_one_extension_serves_every_length_and_a_scale_of_the_call_has_a_window_for_each(
    loaded, tmp_path: Path
) -> None:
    names = ["dynamic_ntk", "self_extend", "transformers_dynamic"]
    variants = compared_variants(loaded[0].config, names, 4)
    grid = {"lengths": (256, 768), "depths": (0.0,), "trials": 1, "windows": 1, "gate": ()}
    results = run(loaded, tmp_path / "r.jsonl", variants, **grid)

    def of(variant: str, task: str) -> dict:
        found = [r for r in results.records if (r["variant"], r["task"]) == (variant, task)]
        return {r["length"]: r for r in found}

    for name in names:
        assert list(of(name, "perplexity")) == ([256, 768] if name == "transformers_dynamic" else [768])
        mine, plain = of(name, "passkey"), of("none", "passkey")
        assert mine[768]["logprob"] != pytest.approx(plain[768]["logprob"], abs=1e-2)
        if name != "self_extend":  # which groups distances within the trained length as well
            assert mine[256]["logprob"] == pytest.approx(plain[256]["logprob"], abs=1e-4)


def test_each_length_of_sliding_perplexity_has_the_figure_of_that_length_alone(loaded, tmp_path: Path) -> None:
    def measured(name: str, *lengths: int) -> Summary:
        grid = {"retrieval": (), "texts": (SlidingPerplexity(stride=64),), "gate": (), "windows": 3}
        return Summary(run(loaded, tmp_path / name, [Variant()], lengths=lengths, **grid))

    lengths = (96, 200, 512)
    together = measured("together.jsonl", *lengths)
    assert together.lengths("sliding_perplexity") == list(lengths)
    figures = [together.perplexity("none", length, task="sliding_perplexity") for length in lengths]
    for length, figure in zip(lengths, figures):
        alone = measured(f"{length}.jsonl", length)
        assert alone.perplexity("none", length, task="sliding_perplexity") == figure
    assert len(set(figures)) == 3


@pytest.mark.slow
def test_a_method_that_keeps_no_cache_is_compared_and_not_recommended(loaded, tmp_path: Path) -> None:
    variants = compared_variants(loaded[0].config, ["pi", "transformers_dynamic"], 4)
    grid = {"lengths": (256, 768), "depths": (0.0, 1.0), "trials": 1, "texts": (), "gate": ()}
    summary = Summary(run(loaded, tmp_path / "r.jsonl", variants, **grid))
    assert summary.pooled("transformers_dynamic", ["passkey"], [768]).value > 0
    assert summary.pooled("pi", ["passkey"], [768]).value == 0
    assert recommended(summary).ranking == ("pi",)


def test_a_run_of_a_method_with_lists_goes_on(loaded, tmp_path: Path) -> None:
    """JSON has lists where an option is a tuple; the header must still be the same."""
    variants = compared_variants(loaded[0].config, ["longrope"], 4)
    grid = {"lengths": (96,), "depths": (0.0,), "trials": 1, "texts": (), "gate": ()}
    first = run(loaded, tmp_path / "r.jsonl", variants, **grid)
    assert run(loaded, tmp_path / "r.jsonl", variants, **grid).records == first.records


def test_a_model_is_extended_only_while_it_is_measured(loaded, tmp_path: Path) -> None:
    model, *_ = loaded
    before = model_fingerprint(model)
    run(loaded, tmp_path / "r.jsonl", texts=(), trials=1)
    assert model_fingerprint(model) == before


def test_the_same_extension_is_the_same_variant_whatever_words_it_was_asked_for_in(loaded) -> None:
    target = LiveModel(*loaded[:2], "austen")
    asked = [
        {"method": "yarn"},
        {"method": "yarn", "factor": 4},
        {"target_length": 2048, "method": "yarn", "existing": "refuse"},
        {"method": YaRN(factor=4), "original_max_position_embeddings": None},
    ]
    first, *others = [Variant("yarn", extension).describe(target) for extension in asked]
    assert first["extension"]["method"] == json.loads(json.dumps(YaRN(factor=4).to_dict()))
    assert all(other == first for other in others)


def test_fingerprints_tell_models_apart() -> None:
    model = tiny_model("llama")
    first = model_fingerprint(model)
    assert model_fingerprint(tiny_model("llama")) == first
    assert model_fingerprint(tiny_model("llama", seed=1)) != first
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    assert model_fingerprint(model) != first
    other = tiny_model("llama")
    extend_context(other, 4)
    assert model_fingerprint(other) != first
    assert Variant("a", {"method": YaRN(factor=4)}).describe(FakeTarget) != Variant(
        "a", {"method": YaRN(factor=4, beta_fast=16)}
    ).describe(FakeTarget)


class FakeTarget:
    name, fingerprint = "model", "0" * 16

    @staticmethod
    def limit(variant: Variant) -> None: ...

    @staticmethod
    def plan(variant: Variant) -> Plan:
        return plan_extension(tiny_config("llama"), **variant.extension)

    @staticmethod
    def is_portable(variant: Variant) -> bool: ...


def test_a_model_shorter_than_asked_is_refused(loaded, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="supports 512 tokens, got 768"):
        run(loaded, tmp_path / "r.jsonl", [Variant()], beyond=False)
    with pytest.raises(ValueError, match=r"supports 1,024 tokens, got 2,048"):
        run(loaded, tmp_path / "r.jsonl", [Variant("pi", {"method": "pi", "factor": 2})], False, lengths=(2048,))
    assert list(tmp_path.iterdir()) == []
    run(loaded, tmp_path / "r.jsonl", VARIANTS[1:], beyond=False, trials=1, texts=())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"depths": (0.5, 1.5)}, "from 0 .* to 1 .*, got 1.5"),
        ({"depths": (float("nan"),)}, "got nan"),
        ({"depths": ()}, "at least one depth"),
        ({"lengths": ()}, "lengths must be"),
        ({"lengths": (512, 256)}, "ascending"),
        ({"lengths": (0, 256)}, "positive"),
        ({"trials": 0}, "trials must be >= 1"),
        ({"windows": 0}, "windows must be >= 1"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"seed": -1}, "seed must be 0 to 134217728, got -1"),
        ({"seed": 2**27 + 1}, "seed must be 0 to 134217728, got 134217729"),
        ({"retrieval": (), "texts": (), "gate": ()}, "no tasks to measure"),
    ],
)
def test_a_wrong_grid_is_refused(changes: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Grid(**{**GRID, **changes})


def test_a_length_too_short_for_a_task_is_refused_before_the_work(loaded, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(ValueError, match="needle prompt needs at least"):
        run(loaded, path, [Variant()], retrieval=(Passkey(), Needle(needles=6)), texts=(), gate=(), lengths=(96,))
    assert not [*tmp_path.iterdir()]


def test_a_trained_length_too_short_for_a_task_is_refused_before_the_work(loaded, tmp_path: Path) -> None:
    """The task `short` adds that length."""
    with pytest.raises(ValueError, match=r"got 64\. `short` measures every task there, so drop needle or `short`"):
        run(loaded, tmp_path / "r.jsonl", retrieval=(Needle(needles=6),), texts=(), gate=(64,), lengths=(768,))
    assert not [*tmp_path.iterdir()]


class FailsAtTheSecondTrial(Needle):
    def sample(self, place: Place, *about: Any) -> Sample:
        if place.trial:
            raise ValueError("no such sample")
        return super().sample(place, *about)


def test_what_was_measured_before_an_error_is_kept(loaded, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(ValueError, match="no such sample"):
        run(loaded, path, [Variant()], retrieval=(Passkey(), FailsAtTheSecondTrial()), texts=(), gate=(), lengths=(96,))
    part = path.with_name("r.jsonl.part-0").read_text().splitlines()
    kept = [record["task"] for line in part[1:] for record in json.loads(line)]
    assert kept.count("passkey") == 12


def test_key_tokens_are_judged_by_the_model_as_it_is(loaded, tmp_path: Path) -> None:
    results = run(loaded, tmp_path / "r.jsonl", texts=(Perplexity(), KeyTokens(long=512, short=64)), retrieval=())
    judges = {r["variant"] for r in results.records if r["task"] == "key_tokens"}
    assert judges == {"none"}

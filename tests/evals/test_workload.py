"""The plan before a measurement is what the measurement then does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxext import extend_context
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.haystack import Haystack
from ctxext.evals.loading import load
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import KeyTokens, Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.targets import LiveModel, Variant
from ctxext.evals.workload import Speed, Workload, some
from ctxext.extension.describe import kv_cache_bytes

VARIANTS = [Variant(), Variant("yarn", {"method": "yarn", "factor": 4})]


@pytest.fixture(scope="module")
def runner() -> Runner:
    model, tokenizer = load(MODEL)
    text = Haystack.from_text(PERSUASION.read_text(encoding="utf-8")[:60_000], tokenizer)
    grid = Grid(
        retrieval=(Passkey(),), texts=(Perplexity(), KeyTokens(long=128, short=32)), lengths=(128, 256),
        depths=(0.0, 0.5, 1.0), trials=2, windows=2, gate=(128,),
    )  # fmt: skip
    target = LiveModel(model, Prompter(tokenizer), "austen-4m")
    target.engine.now = lambda: target.engine.tokens / 1000  # a millisecond a token
    return Runner(target, text, grid, beyond=True)


@pytest.mark.parametrize(("method", "is_portable"), [("yarn", True), ("dynamic_ntk", False)])
def test_a_model_that_came_extended_says_whether_config_json_expresses_it(method: str, is_portable: bool) -> None:
    """`recommended` prefers what plain transformers loads."""
    model, tokenizer = load(MODEL)
    target = LiveModel(extend_context(model, 4, method), Prompter(tokenizer), "trained")
    assert target.is_portable(Variant("trained")) is is_portable


def test_tokens_and_time_are_those_of_the_run(runner: Runner, tmp_path: Path) -> None:
    target = runner.target
    assert isinstance(target, LiveModel)
    runner.check(VARIANTS)
    speed = Speed.measured(target, runner.haystack.token_ids)
    planned = Workload(runner, VARIANTS)
    assert planned.samples == runner.count(VARIANTS)
    before = target.engine.tokens
    results = runner.run(tmp_path / "r.jsonl", VARIANTS)
    assert results is not None
    read = target.engine.tokens - before
    assert planned.tokens == pytest.approx(read, rel=0.1)
    assert planned.seconds(speed) == pytest.approx(read / 1000, rel=0.2)
    done = {(record["variant"], record["key"]) for record in results.records}
    assert Workload(runner, VARIANTS, done).said(None) == []


def test_attention_makes_long_prompts_slower_and_the_cache_larger(runner: Runner) -> None:
    target = runner.target
    assert isinstance(target, LiveModel)
    speed = Speed.measured(target, runner.haystack.token_ids)
    assert speed.reading(2048) > 4 * speed.reading(512)
    assert speed.reading(512, 1024) > speed.reading(512)
    assert speed.decoding(4096) > speed.decoding(64)
    weights = sum(p.numel() for p in target.model.parameters()) * 4
    assert speed.memory(4096) == weights + kv_cache_bytes(target.model.config, 4096, 4)


def test_the_plan_is_in_words(runner: Runner) -> None:
    target = runner.target
    assert isinstance(target, LiveModel)
    runner.check(VARIANTS)
    lines = Workload(runner, VARIANTS).said(Speed.measured(target, runner.haystack.token_ids))
    assert lines[0] == "plan: 2 variants (baseline, yarn) × 4 tasks (passkey, perplexity, key_tokens, short)"
    assert lines[1].startswith("  at 128, 256 tokens: 34 samples, ")
    assert lines[2].endswith(" on this machine: 512 tokens took 0.5 s")
    assert lines[3].endswith("MiB for weights and KV cache at 256 tokens")
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c, 2 more"
    assert some(["a", "b", "c", "d"]) == "a, b, c, d"

"""What a prompt takes is measured by the clock and the cache that there are, and shown at every length."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import tiny_model, token_ids

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.choice import all_figures
from ctxext.evals.cost import Cost, figures
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.loading import load
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.report import write_report
from ctxext.evals.results import Results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.screen import print_summary
from ctxext.evals.summary import Summary
from ctxext.evals.targets import LiveModel, Variant
from ctxext.extension.describe import kv_cache_bytes

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def paced(model) -> Engine:
    """An engine whose clock goes on by a second for each token read."""
    engine = Engine(model)
    engine.now = lambda: float(engine.tokens)
    return engine


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prefill_and_decoded_tokens_are_timed_apart(family: str) -> None:
    """Also where the model keeps a cache of its own, of windows that slide."""
    model = tiny_model(family)
    found = paced(model).passed(token_ids(40)[0].tolist(), 8)
    assert (found.prefill, found.decode) == (32, 1)
    if family == "llama":
        assert found.kv_bytes == kv_cache_bytes(model.config, 40, 4)
    assert found.kv_bytes > 0


def test_a_model_without_a_cache_reads_everything_for_each_token() -> None:
    found = paced(tiny_model("llama", rope_parameters=DYNAMIC)).passed(token_ids(40)[0].tolist(), 2)
    assert (found.prefill, found.decode, found.kv_bytes) == (38, 39.5, 0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Results:
    model, tokenizer = load(MODEL)
    text = Haystack.from_text(PERSUASION.read_text(encoding="utf-8")[:60_000], tokenizer)
    grid = Grid(texts=(Perplexity(), Cost(decoded=2)), lengths=(96, 192), windows=3)
    target = LiveModel(model, Prompter(tokenizer), "austen-4m")
    target.engine.now = lambda: target.engine.tokens / 1000
    variants = [Variant(), Variant("yarn", {"method": "yarn", "factor": 4})]
    results = Runner(target, text, grid).run(tmp_path_factory.mktemp("cost") / "r.jsonl", variants)
    assert results is not None
    return results


def test_every_length_of_every_variant_is_measured_once(measured: Results) -> None:
    found = [
        (r["variant"], r["length"], round(r["prefill_seconds"], 6)) for r in measured.records if r["task"] == "cost"
    ]
    assert found == [("none", 96, 0.094), ("none", 192, 0.19), ("yarn", 96, 0.094), ("yarn", 192, 0.19)]


def test_figures_page_and_table_show_it(
    measured: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = Summary(measured)
    cost = all_figures(summary)["figures"]["yarn"]["cost"]
    assert {n: pytest.approx((each["prefill_seconds"], each["decode_seconds"])) for n, each in cost.items()} == {
        96: (0.094, 0.001), 192: (0.19, 0.001),
    }  # fmt: skip
    write_report([measured], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "prefill (s) by length" in page
    shown = figures(summary.cost("yarn")[192])
    assert shown["prefill (s)"] == "0.19"
    assert f">{shown['KV cache']}</td>" in page
    monkeypatch.setenv("COLUMNS", "120")
    print_summary(summary)
    said = capsys.readouterr().out
    assert "cost of one prompt" in said
    assert shown["KV cache"] in said

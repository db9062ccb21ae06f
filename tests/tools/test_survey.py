"""The matrix of families on a few model types: what it says is true, and it tells when that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from survey import matrix, report
from survey.__main__ import app
from survey.matrix import EXTENDED, VERDICTS, Row, examine
from survey.small import LENGTH, model_types, small_config, small_model, stock_logits
from survey.workers import examine_all
from typer.testing import CliRunner

from ctxext import api

KINDS = model_types()
PINNED = {
    "llama": "native",
    "mistral": "native",
    "qwen3_5_text": "native",
    "gpt_oss": "native",
    "deepseek_v3": "native",
    "mamba": "refused",
    "gemma4_assistant": "unbuildable",
    "vit": "no tokens",
}


@pytest.mark.parametrize("model_type", PINNED)
def test_each_verdict_is_that_of_a_family_known_to_have_it(model_type: str) -> None:
    row = examine(model_type, KINDS[model_type])
    assert row.verdict == PINNED[model_type], row.reason
    if row.verdict == "native":
        assert (row.native_difference, row.restored, row.reason) == (0.0, True, None)
        assert row.effect > 0.1
    else:
        assert row.reason


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "t5", "marian", "bert", "gemma3_text", "moonshine"])
def test_no_encoding_is_extended_wrongly_or_left_changed(model_type: str) -> None:
    row = examine(model_type, KINDS[model_type])
    assert row.verdict in (*EXTENDED, "refused"), row.reason
    assert row.restored


def test_a_norm_after_rope_is_seen_to_undo_the_attention_factor() -> None:
    assert examine("nanochat", "causal").temperature is False
    assert examine("llama", "causal").temperature is True


def test_published_scaling_is_replaced_and_said_to_be() -> None:
    assert examine("gpt_oss", "causal").replaced
    assert not examine("llama", "causal").replaced


def test_a_dead_patch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def extend_and_put_back(model: Any, *args: Any, **kwargs: Any) -> None:
        stock = model.model.rotary_emb
        api.extend_context(model, *args, **kwargs)
        model.model.rotary_emb = stock

    monkeypatch.setattr(matrix, "extend_context", extend_and_put_back)
    row = examine("llama", "causal")
    assert (row.verdict, row.effect) == ("wrong", 0.0)
    assert "nothing moved" in row.reason


def test_an_extension_that_the_config_does_not_say_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def extend_too_far(model: Any, *args: Any, **kwargs: Any) -> None:
        api.extend_context(model, *args, **kwargs)
        model.model.rotary_emb.inv_freq.mul_(0.99)

    monkeypatch.setattr(matrix, "extend_context", extend_too_far)
    row = examine("llama", "causal")
    assert (row.verdict, row.reason) == (
        "wrong",
        "what plain transformers loads from the saved model differs",
    )


@pytest.mark.parametrize("what", ["weight", "config", "nothing restored"])
def test_what_restoring_leaves_behind_is_told(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def restore(model: Any) -> None:
        if what != "nothing restored":
            api.restore_context(model)
        if what == "weight":
            model.lm_head.weight.data[0, 0].nextafter_(torch.tensor(9.0))
        if what == "config":
            model.config.rope_theta = 1.0

    monkeypatch.setattr(matrix, "restore_context", restore)
    row = examine("llama", "causal")
    assert (row.verdict, row.restored) == ("wrong", False)


def test_an_error_of_the_library_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args: Any, **kwargs: Any) -> None:
        raise KeyError("inv_freq")

    monkeypatch.setattr(matrix, "extend_context", crash)
    row = examine("llama", "causal")
    assert (row.verdict, row.reason) == ("refused", "KeyError: 'inv_freq'")


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama4_text", "qwen3_5_text", "modernbert-decoder", "bamba"])
def test_a_small_model_has_every_type_of_layer(model_type: str) -> None:
    from transformers import AutoConfig

    published, small = AutoConfig.for_model(model_type), small_config(model_type, "causal")
    wanted = {"linear_attention", "full_attention"} if model_type == "bamba" else set(published.layer_types)
    assert set(small.layer_types) == wanted
    assert small.num_hidden_layers == len(small.layer_types) < published.num_hidden_layers


def test_a_small_model_depends_on_its_seed_alone() -> None:
    first, again, other = (stock_logits(small_model("mixtral", "causal", seed), LENGTH) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_type_of_the_installed_transformers_has_one_kind() -> None:
    from transformers.models.auto import modeling_auto

    assert [name for name, kind in KINDS.items() if kind == "causal"] == list(
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    assert KINDS.keys() >= modeling_auto.MODEL_MAPPING_NAMES.keys()


@pytest.mark.slow
def test_a_hang_is_a_row_and_not_the_end() -> None:
    (row,) = examine_all({"llama": "causal"}, workers=1, time_limit=0.0)
    assert (row.verdict, row.reason) == ("unbuildable", "not done in 0 seconds")


# ------------------------------------------------------------------------------------- the page


def a_row(model_type: str, verdict: str, **values: Any) -> Row:
    return Row(model_type=model_type, kind="causal", verdict=verdict, **values)


def test_changes_name_what_is_new_gone_or_otherwise_and_which_of_that_is_worse() -> None:
    before = [a_row("a", "native"), a_row("b", "native"), a_row("c", "refused"), a_row("d", "native")]
    after = [a_row("b", "refused", reason="so"), a_row("c", "formula"), a_row("d", "formula"), a_row("e", "refused")]
    lines, regressions = report.changes(before, after)
    assert lines == [
        "gone: a",
        "changed: b: native → refused (so)",
        "changed: c: refused → formula",
        "changed: d: native → formula",
        "new: e: refused",
    ]
    assert regressions == ["changed: b: native → refused (so)"]


def test_the_page_holds_every_row_once_and_its_counts_add_up() -> None:
    rows = [a_row(f"type_{verdict}", verdict, encoding="rope", reason="a | b <c>") for verdict in VERDICTS]
    rows.append(a_row("other", "native", encoding="alibi"))
    page = report.markdown(rows)
    assert all(page.count(f"`{row.model_type}`") == 1 for row in rows)
    assert "a \\| b &lt;c>" in page
    heading, *lines, sums = report.counts(rows)
    assert sums[-1] == str(len(rows)) == str(sum(int(line[-1]) for line in lines))
    assert sums[1] == "2"
    assert len(heading) == len(VERDICTS) + 2


def test_rows_survive_json(tmp_path: Path) -> None:
    rows = [a_row("llama", "native", effect=0.5, restored=True), a_row("vit", "no tokens", reason="×")]
    report.write_json(rows, tmp_path / "rows.json")
    assert report.read_json(tmp_path / "rows.json") == rows
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="python -m survey --json"):
        report.read_json(tmp_path / "other.json")


@pytest.mark.slow
def test_the_command_writes_what_it_found_and_tells_a_regression_by_its_exit_code(tmp_path: Path) -> None:
    before, written, page = (tmp_path / name for name in ("before.json", "rows.json", "page.md"))
    report.write_json([a_row("mamba", "native"), a_row("gpt2", "native")], before)
    command = ["llama", "mamba", "--workers", "1", "--against", before, "--json", written]
    run = CliRunner().invoke(app, [*map(str, command), "--markdown", str(page)])
    assert run.exit_code == 1
    assert "changed: mamba: native → refused" in run.output
    assert "gone" not in run.output, "gpt2 was not asked about"
    assert {row.model_type: row.verdict for row in report.read_json(written)} == {"llama": "native", "mamba": "refused"}
    assert "`llama`" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lama"], "error: the installed transformers has no model type lama. Did you mean "),
        (["--kind", "causl"], "error: --kind must be one of causal, seq2seq"),
    ],
)
def test_a_mistake_on_its_command_line_is_one_line(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "survey", *arguments]
    path = os.pathsep.join([str(Path(matrix.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 1
    assert run.stderr.startswith(said)
    assert run.stderr.count("\n") == 1

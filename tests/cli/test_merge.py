"""`ctxext merge`, as it is typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import tiny_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import ctxext
from ctxext.cli import commands
from ctxext.hub.adapters import AdapterBase, save_trained
from ctxext.hub.checkpoint import extend_folder


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ctxext", "merge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_merged_folder_has_the_asked_type_and_a_second_one_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "original")
    extend_folder(tmp_path / "original", tmp_path / "extended", 4)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "extended"),
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    save_trained(model, tmp_path / "adapter", AdapterBase.of(tmp_path / "extended", tmp_path / "original"))
    done = run(tmp_path / "adapter", "--output", tmp_path / "merged", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "plain transformers loads it" in " ".join(done.stderr.split())
    assert "Warning" not in done.stderr  # PEFT reads a name that transformers deprecates
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    assert merged.config.max_position_embeddings == 256

    again = run(tmp_path / "adapter", "--output", tmp_path / "merged")
    assert again.returncode == 1
    assert "already exists" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_the_command_names_what_loads_the_merged_folder_extended(method: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), 4, method)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    merged = tmp_path / "merged"
    result = CliRunner().invoke(commands, ["merge", str(tmp_path / "adapter"), "-o", str(merged)])
    assert result.exit_code == 0, result.output
    assert (merged / "context_extension.json").is_file() == (method == "self_extend")
    loads = "plain transformers" if method == "yarn" else f"ctxext.load({str(merged)!r})"
    assert f"; {loads} loads it." in result.output

"""An adapter beside its base in vLLM; that the flags serve it exactly is measured by benchmarks/engines/run.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ctxext import extend_context
from ctxext.assets import MODEL
from ctxext.cli import commands
from ctxext.export.lora import RANKS, why_merge
from ctxext.hub.adapters import AdapterBase, save_trained
from ctxext.hub.checkpoint import extend_folder

LORA: dict[str, Any] = dict(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


def export(*words: Any) -> Any:
    return CliRunner().invoke(commands, ["export", *map(str, words)])


def adapted(base: Path, **changes: Any) -> peft.PeftModel:
    torch.manual_seed(0)
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**{**LORA, **changes}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An extended base, and an adapter that was trained on it."""
    folder = tmp_path_factory.mktemp("run")
    base, adapter = folder / "extended", folder / "adapter"
    extend_folder(MODEL, base, 4, "yarn", say=lambda line: None)
    save_trained(adapted(base), adapter, AdapterBase.of(base, MODEL))
    return base, adapter


def test_the_line_serves_the_extended_base_and_the_adapter(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    (flags,) = (each["flags"] for each in json.loads(export(adapter, "--engine", "vllm", "--json").stdout).values())
    assert flags[:3] == ["vllm", "serve", str(base.resolve())]
    assert flags[flags.index("--enable-lora") :] == [
        "--enable-lora", "--lora-modules", f"adapter={adapter}", "--max-lora-rank", "8"
    ]  # fmt: skip
    assert int(flags[flags.index("--max-model-len") + 1]) == 2048


def test_a_written_folder_is_that_of_the_base(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, adapter = folders
    output = tmp_path / "out"
    said = export(adapter, "--engine", "vllm", "-o", output)
    assert f"vllm serve {output / 'vllm'} " in said.stdout
    assert f"--lora-modules adapter={adapter}" in said.stdout
    assert json.loads((output / "vllm/config.json").read_text())["rope_parameters"]["rope_type"] == "yarn"
    assert (output / "verify.json").is_file()


def test_an_adapter_of_a_live_model_brings_its_extension(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    extend_context(model, 4, "yarn")
    peft.get_peft_model(model, peft.LoraConfig(**LORA)).save_pretrained(tmp_path / "live")
    (told,) = json.loads(export(tmp_path / "live", "--engine", "vllm", "--json").stdout).values()
    assert told["flags"][2] == str(MODEL)
    assert '"rope_type": "yarn"' in told["flags"][told["flags"].index("--hf-overrides") + 1]
    assert "--enable-lora" in told["flags"]


@pytest.mark.parametrize(("changes", "why"), [
    ({"modules_to_save": ["norm"]}, "modules_to_save, which vLLM rejects"),
    ({"use_dora": True}, "use_dora, which vLLM rejects"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ({"bias": "all"}, "bias 'all'"),
    ({"r": RANKS[-1] + 1}, f"rank {RANKS[-1] + 1}"),
    ({"target_modules": ["embed_tokens"]}, "of the embeddings"),
])  # fmt: skip
def test_what_vllm_would_reject_or_read_differently_is_to_be_merged(changes: dict, why: str, tmp_path: Path) -> None:
    adapted(MODEL, **changes).save_pretrained(tmp_path)
    assert why in (why_merge(tmp_path) or "")
    said = str(export(tmp_path, "--engine", "vllm").exception)
    assert why in said
    assert f"Merge it first: ctxext merge {tmp_path} -o MERGED." in said


def test_an_init_that_changed_the_base_is_to_be_merged(folders: tuple[Path, Path], tmp_path: Path) -> None:
    path = folders[1] / "adapter_config.json"
    config = json.loads(path.read_text())
    for name in (path.name, "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((folders[1] / name).read_bytes())
    assert why_merge(tmp_path) is None
    (tmp_path / path.name).write_text(json.dumps({**config, "init_lora_weights": "pissa"}))
    assert "changed the weights of its base" in (why_merge(tmp_path) or "")


def test_other_engines_and_other_methods_are_refused(folders: tuple[Path, Path]) -> None:
    _, adapter = folders
    assert f"{adapter} is an adapter. Merge it first" in str(export(adapter, "--engine", "sglang").exception)
    assert "exported only for vLLM" in " ".join(export(adapter).stdout.split())
    said = str(export(adapter, "--engine", "vllm", "--method", "pi", "--factor", 2).exception)
    assert "with the extension that it was trained with" in said


def test_a_lost_extended_base_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    hidden = base.rename(base.with_name("hidden"))
    try:
        assert "is gone" in str(export(adapter, "--engine", "vllm").exception)
    finally:
        hidden.rename(base)

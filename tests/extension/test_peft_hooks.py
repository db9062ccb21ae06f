"""An adapter of an extended model carries its extension, whoever saves it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from families import logits
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import ctxext
from ctxext.assets import MODEL
from ctxext.extension.metadata_file import RECORD
from ctxext.extension.peft_hooks import ADAPTER_CONFIG
from ctxext.hub.adapters import merge

IDS = torch.randint(2, 4096, (1, 700), generator=torch.Generator().manual_seed(0))  # beyond the trained 512
ROWS = IDS[0].reshape(14, 50)[:4].tolist()
METHODS = ["yarn", "dynamic_yarn"]  # config-expressible, and not


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "save_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }


def by_peft(model: PreTrainedModel, folder: Path) -> Any:
    torch.manual_seed(0)
    adapted = get_peft_model(model, lora(init_lora_weights=False))
    adapted.save_pretrained(folder)
    return adapted


def by_trainer(model: PreTrainedModel, folder: Path) -> Any:
    rows = Dataset.from_dict({"input_ids": ROWS, "labels": ROWS})
    trainer = Trainer(get_peft_model(model, lora()), TrainingArguments(**arguments(folder / "run")), train_dataset=rows)
    trainer.train()
    trainer.save_model(str(folder))
    return trainer.model


def by_a_checkpoint_of_trainer(model: PreTrainedModel, folder: Path) -> Any:
    adapted = by_trainer(model, folder / "trained")
    shutil.copytree(folder / "trained/run/checkpoint-2", folder, dirs_exist_ok=True)
    return adapted


def by_sft(model: PreTrainedModel, folder: Path) -> Any:
    given = SFTConfig(**arguments(folder / "run"), max_length=2048, bf16=False)
    return by_trl(SFTTrainer, model, folder, given, text="It is a truth universally acknowledged")


def by_dpo(model: PreTrainedModel, folder: Path) -> Any:
    given = DPOConfig(**arguments(folder / "run"), max_length=2048, bf16=False)
    return by_trl(
        DPOTrainer, model, folder, given, prompt="It is a truth", chosen=" universal", rejected=" of no account"
    )


def by_grpo(model: PreTrainedModel, folder: Path) -> Any:
    def longest(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    given = GRPOConfig(**arguments(folder / "run"), num_generations=2, max_completion_length=8, bf16=False)
    return by_trl(GRPOTrainer, model, folder, given, {"reward_funcs": longest}, prompt="It is a truth")


def by_trl(
    kind: Any, model: PreTrainedModel, folder: Path, given: Any, options: dict[str, Any] | None = None, **row: str
) -> Any:
    rows = Dataset.from_dict({name: [text] * 4 for name, text in row.items()})
    of_ours = {"processing_class": AutoTokenizer.from_pretrained(MODEL), "peft_config": lora(), **(options or {})}
    trainer = kind(model, args=given, train_dataset=rows, **of_ours)
    trainer.train()
    trainer.save_model(str(folder))
    return trainer.model


def by_transformers(model: PreTrainedModel, folder: Path) -> Any:
    torch.manual_seed(0)
    model.add_adapter(lora(init_lora_weights=False))
    model.save_pretrained(folder)
    return model


def by_prompt_tuning(model: PreTrainedModel, folder: Path) -> Any:
    """Which reads nothing of the base's state as it saves."""
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    adapted.save_pretrained(folder)
    return adapted


ROUTES = [by_peft, by_trainer, by_a_checkpoint_of_trainer, by_sft, by_dpo, by_grpo, by_transformers, by_prompt_tuning]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("route", ROUTES)
def test_an_adapter_of_an_extended_model_comes_back_extended_or_not_at_all(
    route: Callable[[PreTrainedModel, Path], Any], method: str, tmp_path: Path
) -> None:
    model = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4, method)
    adapted, adapter = route(model, tmp_path / "adapter"), tmp_path / "adapter"
    expected = logits(adapted.eval(), IDS)
    loaded = ctxext.load(adapter)
    assert loaded.get_base_model().context_extension.plan.summary == model.context_extension.plan.summary
    assert torch.equal(logits(loaded, IDS), expected)
    for load in (AutoPeftModelForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises((OSError, ValueError), match="extended by ctxext"):
            load(adapter)
    with pytest.raises(ValueError, match=r"was trained with .* but this model is not extended"):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), adapter)
    with pytest.raises(ValueError, match=r"was trained with .* but this model is not extended"):
        AutoModelForCausalLM.from_pretrained(MODEL).load_adapter(str(adapter))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(ctxext.load(tmp_path / "again"), IDS), expected)


@pytest.mark.parametrize(
    ("method", "trained", "other"),
    [
        ("yarn", {}, {"beta_fast": 4.0}),
        ("self_extend", {"group_size": 6}, {"group_size": 16}),
        ("dynamic_yarn", {"ratio": 1.25}, {"ratio": 2.0}),
        ("query_temperature", {"beta": 0.1}, {"beta": 2.0}),
    ],
)
def test_an_adapter_is_refused_on_other_options(
    method: str, trained: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    def extended(options: dict[str, Any]) -> PreTrainedModel:
        return ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4, method, **options)

    adapted = by_peft(extended(trained), tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(extended(trained), tmp_path / "adapter")
    assert torch.equal(logits(loaded.eval(), IDS), logits(adapted.eval(), IDS))
    with pytest.raises(ValueError, match=r"was trained with .* with .* but this model is extended by .* with"):
        PeftModel.from_pretrained(extended(other), tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore:.*saved without it")
def test_an_adapter_is_refused_where_its_base_was_extended_again_with_other_options(tmp_path: Path) -> None:
    for group_size in (6, 16):
        model = AutoModelForCausalLM.from_pretrained(MODEL)
        ctxext.extend_context(model, 4, "self_extend", group_size=group_size).save_pretrained(tmp_path / "model")
        if group_size == 6:
            by_peft(ctxext.load(tmp_path / "model"), tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"was trained with .*group_size 6, but its base .*group_size 16\."):
        ctxext.load(tmp_path / "adapter")


def test_an_adapter_of_a_model_that_is_not_extended_is_peft_s_own(tmp_path: Path) -> None:
    """Though an extension of another model has wrapped PEFT's methods in this process."""
    other = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4)
    by_peft(other, tmp_path / "extended")
    plain = by_peft(AutoModelForCausalLM.from_pretrained(MODEL), tmp_path / "plain")
    assert not (tmp_path / "plain" / RECORD).exists()
    assert json.loads((tmp_path / "plain" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == str(MODEL)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), tmp_path / "plain")
    assert torch.equal(logits(loaded.eval(), IDS), logits(plain.eval(), IDS))
    plain.save_pretrained(tmp_path / "extended")  # over the other
    assert not (tmp_path / "extended" / RECORD).exists()


# PEFT alone, in a process that never imports ctxext, saves another adapter into the same folder.
ANOTHER = """
import sys
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
model = get_peft_model(AutoModelForCausalLM.from_pretrained(sys.argv[1]), LoraConfig(r=4, task_type="CAUSAL_LM"))
model.save_pretrained(sys.argv[2])
assert "ctxext" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["another", "metadata"])
def test_an_adapter_and_metadata_of_two_are_refused(lost: str, tmp_path: Path) -> None:
    by_peft(ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4), tmp_path)
    if lost == "metadata":
        (tmp_path / RECORD).unlink()
    else:
        subprocess.run([sys.executable, "-c", ANOTHER, MODEL, tmp_path], check=True, capture_output=True)
    with pytest.raises(
        ValueError, match="json.* is missing" if lost == "metadata" else "another adapter has been saved there"
    ):
        ctxext.load(tmp_path)


def test_an_adapter_whose_base_was_renamed_by_hand_is_not_loaded_unextended(tmp_path: Path) -> None:
    adapted = by_peft(ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4), tmp_path / "adapter")
    shutil.copytree(MODEL, tmp_path / "moved")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "moved")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    plain = AutoModelForCausalLM.from_pretrained(MODEL)
    with pytest.raises(ValueError, match="If you moved the base model, write '"):
        PeftModel.from_pretrained(plain, tmp_path / "adapter")
    with pytest.raises(ValueError, match="If you moved the base model, write '") as refused:
        ctxext.load(tmp_path / "adapter")
    config["base_model_name_or_path"] = re.search("write '(.*)' there", str(refused.value))[1]
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter"), IDS), logits(adapted.eval(), IDS))


def test_an_adapter_is_not_put_on_another_extension(tmp_path: Path) -> None:
    adapted = by_peft(ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4), tmp_path)
    same = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4)
    loaded = PeftModel.from_pretrained(same, tmp_path).eval()
    assert torch.equal(logits(loaded, IDS), logits(adapted.eval(), IDS))
    other = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 8)
    with pytest.raises(ValueError, match=r"trained with yarn ×4.*extended by yarn ×8"):
        PeftModel.from_pretrained(other, tmp_path)


def test_an_adapter_on_a_base_of_another_dtype_is_refused_by_its_dtype(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "original")
    model = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(tmp_path / "original"), 4)
    by_peft(model, tmp_path / "adapter")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.bfloat16)
    other.save_pretrained(tmp_path / "original")
    with pytest.raises(ValueError, match=r"of another dtype: .*has bfloat16 weights instead of float32.*pass dtype="):
        ctxext.load(tmp_path / "adapter")


def test_an_adapter_on_a_base_of_other_weights_is_refused(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "original")
    model = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(tmp_path / "original"), 4)
    by_peft(model, tmp_path / "adapter")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    other.save_pretrained(tmp_path / "original")
    with pytest.raises(ValueError, match=r"does not belong to the weights in .*original"):
        ctxext.load(tmp_path / "adapter")


def test_every_adapter_of_a_model_carries_its_extension(tmp_path: Path) -> None:
    adapted = by_peft(ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4), tmp_path / "one")
    adapted.add_adapter("second", lora())
    adapted.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two" / RECORD).is_file()
    assert (tmp_path / "two/second" / RECORD).is_file()
    adapted.set_adapter("second")
    assert torch.equal(logits(ctxext.load(tmp_path / "two/second"), IDS), logits(adapted.eval(), IDS))


def test_an_adapter_saves_embeddings_that_were_resized(tmp_path: Path) -> None:
    """PEFT sees that by the base's name, which has to stay a name until then."""
    model = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4)
    adapted = by_peft(model, tmp_path / "first")
    adapted = ctxext.load(tmp_path / "first")
    adapted.get_base_model().resize_token_embeddings(4100)
    adapted.save_pretrained(tmp_path / "second")
    assert any("embed_tokens" in name for name in load_file(tmp_path / "second/adapter_model.safetensors"))


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_of_a_live_extension_is_merged_with_it(method: str, tmp_path: Path) -> None:
    adapted = by_peft(ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4, method), tmp_path / "a")
    merge(tmp_path / "a", tmp_path / "merged")
    merged = ctxext.load(tmp_path / "merged")
    assert (logits(merged, IDS) - logits(adapted.eval(), IDS)).abs().max() < 1e-3
    assert (tmp_path / "merged" / RECORD).exists() == (method == "dynamic_yarn")


def test_a_position_table_in_modules_to_save_is_extended_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=128, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(size).save_pretrained(tmp_path / "base")
    with_table = lora(target_modules=["c_attn"], modules_to_save=["wpe"], init_lora_weights=False)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "base"), IDS[:, :100] % 128
    wrapped = get_peft_model(model, with_table)
    before = logits(wrapped.eval(), ids[:, :32])
    with pytest.raises(
        ValueError, match=r"wpe\.weight is held by an adapter .*modules_to_save.* Extend the model first"
    ):
        ctxext.extend_context(wrapped, 4)
    assert torch.equal(logits(wrapped.eval(), ids[:, :32]), before)
    extended = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), 4)
    adapted = get_peft_model(extended, with_table)
    with torch.no_grad():
        adapted.base_model.model.transformer.wpe.modules_to_save["default"].weight.mul_(1.5)
    adapted.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter"), ids), logits(adapted.eval(), ids))

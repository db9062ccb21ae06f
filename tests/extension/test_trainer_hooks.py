"""A trainer that loads a second model beside an extended one gets the same extension, or does not train."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from families import logits
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import ctxext
from ctxext.assets import MODEL
from ctxext.extension.trainer_hooks import check_trainer

METHODS = ["yarn", "dynamic_yarn"]  # config-expressible, and not
IDS = torch.randint(2, 4096, (1, 700), generator=torch.Generator().manual_seed(0))  # beyond the trained 512


def extended(method: str = "yarn", path: Any = MODEL, factor: int = 4) -> PreTrainedModel:
    return ctxext.extend_context(AutoModelForCausalLM.from_pretrained(path), factor, method)


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
    }


def dpo(model: PreTrainedModel, folder: Path, reference: PreTrainedModel | None = None) -> DPOTrainer:
    rows = Dataset.from_dict({"prompt": ["It is"] * 2, "chosen": [" a truth"] * 2, "rejected": [" no account"] * 2})
    given = DPOConfig(**options(folder), max_length=2048)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return DPOTrainer(model, reference, args=given, train_dataset=rows, processing_class=tokenizer)


def grpo(model: PreTrainedModel, folder: Path) -> GRPOTrainer:
    rows = Dataset.from_dict({"prompt": ["It is a truth"] * 2})
    given = GRPOConfig(**options(folder), beta=0.1, num_generations=2, max_completion_length=4)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return GRPOTrainer(model, lambda completions, **_: [0.0, 1.0], given, rows, processing_class=tokenizer)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("trainer", [dpo, grpo])
def test_a_reference_model_that_trl_loads_unextended_is_refused(trainer: Any, method: str, tmp_path: Path) -> None:
    made = trainer(extended(method), tmp_path)
    if method == "yarn":  # what TRL does by itself; in attention, the reference raises at its first call
        assert torch.equal(logits(made.ref_model, IDS), logits(AutoModelForCausalLM.from_pretrained(MODEL), IDS))
    before, name = logits(made.model.eval(), IDS), type(made).__name__
    with pytest.raises(ValueError, match=rf"reference model of {name} is not extended .*Pass ref_model=, extended"):
        made.train()
    assert torch.equal(logits(made.model.eval(), IDS), before)


@pytest.mark.parametrize("method", METHODS)
def test_a_reference_model_of_the_same_extension_is_trained_against(method: str, tmp_path: Path) -> None:
    made = dpo(extended(method), tmp_path, extended(method))
    assert made.train().training_loss == pytest.approx(math.log(2), abs=1e-4)  # of two equal models


@pytest.mark.parametrize("factor", [2, 8])
def test_a_reference_model_of_another_extension_is_refused(factor: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not extended as the trained one, by yarn ×4"):
        dpo(extended(), tmp_path, extended(factor=factor)).train()


def test_a_reference_model_with_other_options_is_refused(tmp_path: Path) -> None:
    other = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4, "yarn", beta_fast=8.0)
    with pytest.raises(ValueError, match="is not extended as the trained one"):
        dpo(extended(), tmp_path, other).train()


def test_an_unextended_reference_is_not_evaluated_against(tmp_path: Path) -> None:
    made = dpo(extended(), tmp_path)
    with pytest.raises(ValueError, match="is not extended as the trained one"):
        made.evaluate(made.train_dataset)


def test_a_teacher_is_checked_as_a_reference_is() -> None:
    given = SimpleNamespace(max_length=None)
    plain = AutoModelForCausalLM.from_pretrained(MODEL)
    with pytest.raises(ValueError, match="the teacher model of"):
        check_trainer(SimpleNamespace(model=extended(), args=given, teacher_model=plain))


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "llama3", "longrope", "cope", "dynamic_yarn"])
def test_a_trainer_resumes_from_its_checkpoint(method: str, tmp_path: Path) -> None:
    options_of = {"longrope": {"long_factor": [4.0] * 32}}.get(method, {})
    rows = Dataset.from_dict({"input_ids": [IDS[0, :64].tolist()] * 4, "labels": [IDS[0, :64].tolist()] * 4})

    def trained(steps: int, **resume: Any) -> Any:
        model = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4, method, **options_of)
        args = {**options(tmp_path), "max_steps": steps, "save_strategy": "steps", "save_steps": 1}
        trainer = Trainer(model, TrainingArguments(**args), train_dataset=rows)
        trainer.train(**resume)
        return trainer

    trained(1)
    again = trained(2, resume_from_checkpoint=True)
    assert again.state.global_step == 2
    assert again.model.context_extension.plan.method.name == method


def test_an_extended_folder_is_its_own_reference(tmp_path: Path) -> None:
    """Loaded by transformers, or by ctxext: TRL reads the same folder again."""
    extended().save_pretrained(tmp_path / "folder")
    for load in (AutoModelForCausalLM.from_pretrained, ctxext.load):
        made = dpo(load(tmp_path / "folder"), tmp_path / "run")
        assert torch.equal(logits(made.ref_model, IDS), logits(made.model.eval(), IDS))
        made.train()


@pytest.mark.filterwarnings("ignore:.*saved without it")
def test_an_extended_folder_that_no_config_expresses_is_no_reference(tmp_path: Path) -> None:
    extended("dynamic_yarn").save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match="as the trained one, by dynamic_yarn"):
        dpo(ctxext.load(tmp_path / "folder"), tmp_path / "run").train()


def test_vllm_generates_from_an_extended_folder_alone(tmp_path: Path) -> None:
    given = SimpleNamespace(use_vllm=True, max_length=None)
    with pytest.raises(ValueError, match=r"vLLM would generate .*not extended by yarn ×4.*train that folder"):
        check_trainer(SimpleNamespace(model=extended(), args=given))
    extended().save_pretrained(tmp_path)
    check_trainer(SimpleNamespace(model=ctxext.load(tmp_path), args=given))


@pytest.mark.parametrize(("kept", "is_said"), [(512, True), (64, True), (2048, False), (513, False)])
def test_examples_cut_within_the_trained_length_are_warned_of(kept: int, is_said: bool, tmp_path: Path) -> None:
    trainer = SFTTrainer(
        extended(),
        args=SFTConfig(**options(tmp_path), max_length=kept),
        train_dataset=Dataset.from_dict({"text": ["It is a truth universally acknowledged"] * 2}),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    with warnings.catch_warnings(record=True) as caught:
        trainer.train()
    said = [str(each.message) for each in caught if "no longer distance is trained" in str(each.message)]
    assert bool(said) == is_said


def test_a_model_that_is_not_extended_trains_as_before(tmp_path: Path) -> None:
    extended()  # which wraps the trainer
    made = dpo(AutoModelForCausalLM.from_pretrained(MODEL), tmp_path)
    made.train()
    assert made.state.global_step == 1

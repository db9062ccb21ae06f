"""Which configs of a model an extension swaps, and which it leaves."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from families import from_config, tiny_model
from torch import nn

from ctxext import describe_context, extend_context, load, restore_context
from ctxext.models.metadata import BESIDE
from ctxext.patches.rotary import ReplaceRotary


class Part(nn.Module):
    """Holds a config of the model's class, as a draft head does."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config


@pytest.mark.parametrize("same", [True, False])
def test_a_part_with_a_config_of_its_own_follows_only_where_it_says_the_same(same: bool) -> None:
    model = tiny_model("llama")
    held = copy.deepcopy(model.config)
    if not same:
        held.max_position_embeddings *= 2
    before = held.to_dict()
    model.part = Part(held)
    extend_context(model, 4, "yarn")
    assert (model.part.config.to_dict() == before) is not same
    assert held.to_dict() == before
    restore_context(model)
    assert model.part.config is held


@pytest.mark.parametrize("method", ["dca", "dynamic_yarn", "yarn"])
def test_autocast_around_it_changes_no_verdict(method: str) -> None:
    alone = extend_context(tiny_model("llama"), 4, method).context_extension.proof
    with torch.autocast("cpu", torch.bfloat16):
        within = extend_context(tiny_model("llama"), 4, method).context_extension.proof
        assert torch.is_autocast_enabled("cpu")
    assert within == alone


def test_a_shared_config_is_swapped_once_and_stays_shared() -> None:
    model = tiny_model("llama")
    config = model.config
    model.part = Part(config)
    extend_context(model, 4, "yarn")
    assert model.part.config is model.config
    assert model.config is not config
    restore_context(model)
    assert model.part.config is model.config is config


def test_only_an_extension_that_holds_drops_the_reference_to_a_file_beside_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    setattr(model.config, BESIDE, "yarn ×4: 64 → 256 tokens")
    before = model.config.to_dict()

    def fail(self: ReplaceRotary, model: nn.Module, before: object) -> None:
        raise RuntimeError("no proof")

    with monkeypatch.context() as patch:
        patch.setattr(ReplaceRotary, "prove", fail)
        with pytest.raises(RuntimeError, match="no proof"):
            extend_context(model, 4, "yarn")
    assert model.config.to_dict() == before
    extend_context(model, 4, "yarn")
    assert BESIDE not in model.config.to_dict()
    restore_context(model)
    assert BESIDE not in model.config.to_dict()


def lengths_of(model: nn.Module) -> list[str]:
    rows = repr(model.context_extension).splitlines()
    return [" ".join(row.split()) for row in rows if row.strip().startswith(("trained", "starts", "target"))]


def test_the_receipt_tells_the_trained_length_from_the_one_that_the_factor_counts_from() -> None:
    model = extend_context(tiny_model("llama"), 4)
    assert lengths_of(model) == ["trained length 64 (max_position_embeddings of the config)", "target length 256"]
    again = from_config(model.config)  # as loaded from its saved copy
    extend_context(again, 2, existing="compose")
    assert lengths_of(again) == [
        "trained length 64 (the config's extension metadata)", "starts from 256 tokens", "target length 512",
    ]  # fmt: skip
    assert describe_context(again).trained_length == 64
    native = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    replaced = extend_context(tiny_model("llama", rope_parameters=native), 8, existing="replace")
    assert lengths_of(replaced) == ["trained length 16 (before scaling)", "target length 128"]


def test_a_length_passed_as_the_factor_is_refused_but_no_published_factor(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"If 2048 is a length, pass target_length=2048; .*pass target_length=131072"):
        extend_context(model, 2048)
    with pytest.raises(ValueError, match=r"If 4096 is a length, this model already covers it; .*pass target_length="):
        extend_context(tiny_model("llama", max_position_embeddings=8192), 4096)
    assert extend_context(model, 512).context_extension.plan.target_length == 512 * 64
    restore_context(model)
    assert extend_context(model, target_length=131072, method="dynamic_ntk").context_extension.plan.factor == 2048
    model.save_pretrained(tmp_path)
    assert load(tmp_path).context_extension.plan.factor == 2048


def test_a_path_in_place_of_a_model_is_to_be_loaded_first() -> None:
    with pytest.raises(TypeError, match=r"got str\. Load it first with AutoModelForCausalLM\.from_pretrained\."):
        extend_context("my-model", factor=4)

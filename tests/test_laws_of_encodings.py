"""The laws of the verbs, for every position encoding other than RoPE: live, undone, saved, loaded, described."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import ctxext
from ctxext import describe_context, extend_config, extend_context, list_methods, restore_context, temporarily_extended
from ctxext.extension import RECORD, read_record
from ctxext.folders import extend_folder
from ctxext.planning import plan_extension
from ctxext.survey.small import LENGTH, small_model, stock_logits

# One family of each kind of site, with the default method; the last says whether plain transformers loads it saved.
FAMILIES = {
    "gpt2": ("causal", "learned", "hierarchical", True),
    "bart": ("causal", "learned", "hierarchical", True),
    "marian": ("causal", "sinusoidal", "sinusoidal_interpolation", True),
    "xglm": ("causal", "sinusoidal", "sinusoidal_interpolation", False),
    "ctrl": ("causal", "sinusoidal", "sinusoidal_interpolation", False),
    "bloom": ("causal", "alibi", "alibi_scaling", False),
    "mpt": ("causal", "alibi", "alibi_scaling", False),
    "t5": ("seq2seq", "t5", "bucket_scaling", True),
    "umt5": ("seq2seq", "t5", "bucket_scaling", True),
    "xlnet": ("causal", "relative", "distance_interpolation", False),
}
families = pytest.mark.parametrize("model_type", FAMILIES)


def model_of(model_type: str) -> Any:
    return small_model(model_type, FAMILIES[model_type][0])


def state(model: nn.Module) -> dict[str, Any]:
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "tensors": {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "modules": {path: (id(module), type(module), sorted(module.__dict__)) for path, module in modules.items()},
        "numbers": {
            path: {k: v for k, v in module.__dict__.items() if isinstance(v, int | float)}
            for path, module in modules.items()
        },
        "hooks": {path: len(module._forward_pre_hooks) for path, module in modules.items()},
        "config": model.config.to_dict(),
        "logits": stock_logits(model, LENGTH),
    }


def assert_same(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    assert torch.equal(after.pop("logits"), before["logits"])
    tensors = after.pop("tensors")
    assert tensors.keys() == before["tensors"].keys()
    assert all(torch.equal(tensors[name], t) for name, t in before["tensors"].items())
    assert after == {key: value for key, value in before.items() if key not in ("logits", "tensors")}


@families
def test_the_default_is_the_encodings_own_and_the_receipt_says_so(model_type: str) -> None:
    _, encoding, method, portable = FAMILIES[model_type]
    model = model_of(model_type)
    description = describe_context(model)
    assert description.encoding == encoding
    assert f"{method} ×4" in description.would_do
    extend_context(model)
    receipt = model.context_extension
    assert receipt.method == next(cls for cls in list_methods(encoding) if cls.name == method)(factor=4)
    assert receipt.plan.is_portable == portable
    assert receipt.proof.formula_error < 1e-5
    assert receipt.proof.effect > 1e-3
    assert f"{method} ×4" in repr(receipt)
    with pytest.raises(ValueError, match="it has no frequencies"):
        _ = receipt.inv_freq


@families
def test_restoring_is_bitwise_also_after_an_exception(model_type: str) -> None:
    model = model_of(model_type)
    before = state(model)
    extend_context(model)
    with pytest.raises(RuntimeError, match="extended already"):
        extend_context(model)
    restore_context(model)
    assert_same(model, before)
    with pytest.raises(KeyError), temporarily_extended(model, 2):
        raise KeyError
    assert_same(model, before)


@families
def test_a_second_model_is_untouched(model_type: str) -> None:
    one, other = model_of(model_type), model_of(model_type)
    before = state(other)
    other.config = one.config  # which two models may share
    before["config"] = other.config.to_dict()
    extend_context(one)
    assert_same(other, before)


@families
def test_a_copy_and_a_pickle_are_extended_and_restore_by_themselves(model_type: str) -> None:
    model = model_of(model_type)
    stock = stock_logits(model, LENGTH)
    extend_context(model)
    live = stock_logits(model, 2 * LENGTH)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(stock_logits(twin, 2 * LENGTH), live)
        restore_context(twin)
        assert torch.equal(stock_logits(twin, LENGTH), stock)
        assert torch.equal(stock_logits(model, 2 * LENGTH), live)


@families
def test_saved_and_loaded_it_gives_the_same_logits(model_type: str, tmp_path: Path) -> None:
    model = model_of(model_type)
    stock = stock_logits(model, LENGTH)
    extend_context(model)
    live = stock_logits(model, 2 * LENGTH)
    if FAMILIES[model_type][3]:
        model.save_pretrained(tmp_path)
        assert not (tmp_path / RECORD).exists()
        again = type(model).from_pretrained(tmp_path).eval()
    else:
        with pytest.warns(UserWarning, match="no config can say"):
            model.save_pretrained(tmp_path)
        plain = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(stock_logits(plain, LENGTH), stock)
        again = ctxext.load(tmp_path)
        assert again.context_extension.method == model.context_extension.method
    assert torch.equal(stock_logits(again, 2 * LENGTH), live)
    assert torch.equal(stock_logits(model, 2 * LENGTH), live)  # saving changed nothing


def test_a_saved_table_loads_where_ctxext_cannot_be_imported(tmp_path: Path) -> None:
    model = extend_context(model_of("gpt2"))
    model.save_pretrained(tmp_path / "model")
    ids = torch.arange(3, 100)[None].repeat(1, 2)
    torch.save((ids, model(ids).logits), tmp_path / "logits.pt")
    code = (
        "import sys; sys.modules['ctxext'] = None\n"
        "import torch, transformers\n"
        "ids, expected = torch.load(sys.argv[2])\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "assert torch.equal(model(ids).logits, expected)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "model", tmp_path / "logits.pt"], check=True)


@pytest.mark.parametrize("model_type", ["gpt2", "xglm", "bloom", "mpt", "t5"])
def test_a_cache_gives_what_one_pass_gives(model_type: str) -> None:
    model = extend_context(model_of(model_type))
    ids = torch.randint(3, 100, (2, 2 * LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids[:, :20]} if model_type == "t5" else {}
    name = "decoder_input_ids" if model_type == "t5" else "input_ids"
    with torch.no_grad():
        whole = model(**inputs, **{name: ids}).logits
        cache, parts = None, []
        for part in ids.split([50, 30, 40, 1, 1, 6], dim=1):
            output = model(**inputs, **{name: part}, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "bloom"])
def test_what_is_extended_is_described_by_its_trained_length_and_its_method(model_type: str, tmp_path: Path) -> None:
    _, _, method, portable = FAMILIES[model_type]
    model_of(model_type).save_pretrained(tmp_path / "stock")
    extend_folder(tmp_path / "stock", tmp_path / "extended", say=lambda line: None)
    config = AutoConfig.from_pretrained(tmp_path / "extended")
    if not portable:
        plan_extension(config, **read_record(tmp_path / "extended")).apply_to(config)
    description = describe_context(config)
    trained = describe_context(model_of(model_type)).trained_length
    assert (description.trained_length, description.scaling["name"]) == (trained, method)
    assert f"{method} ×4" in str(description)
    assert "extended already" in description.would_do


def test_an_extended_table_is_extended_once_more_by_compose_alone(tmp_path: Path) -> None:
    model = extend_context(model_of("gpt2"), 2)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="extended already by ctxext") as caught:
        extend_context(again, 2)
    assert "existing='compose'" in str(caught.value)
    extend_context(again, 2, existing="compose")
    assert again.context_extension.plan.summary == "hierarchical ×2: 128 → 256 tokens"
    assert again.config.ctxext["original"] == {"length": LENGTH}


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "t5"])
def test_a_folder_is_extended_as_its_model_is(model_type: str, tmp_path: Path) -> None:
    model = model_of(model_type)
    model.save_pretrained(tmp_path / "stock")
    said: list[str] = []
    result = extend_folder(tmp_path / "stock", tmp_path / "extended", say=said.append)
    assert result.plan.summary.endswith("→ 256 tokens" if model_type == "gpt2" else "tokens")
    assert (said != []) == (model_type == "gpt2")  # weights change, so the model is loaded
    assert (tmp_path / "extended" / RECORD).exists() == (model_type == "bloom")
    loaded = ctxext.load(tmp_path / "extended") if model_type == "bloom" else type(model).from_pretrained(
        tmp_path / "extended"
    )  # fmt: skip
    extend_context(model)
    assert torch.equal(stock_logits(loaded.eval(), 2 * LENGTH), stock_logits(model, 2 * LENGTH))
    assert json.loads((tmp_path / "stock" / "config.json").read_text()).get("ctxext") is None


def test_a_config_alone_is_extended_where_it_says_it_all() -> None:
    config = model_of("t5").config
    assert extend_config(config).relative_attention_max_distance == 4 * config.relative_attention_max_distance
    with pytest.raises(ValueError, match="makes new weights, so a config alone would fit no checkpoint"):
        extend_config(model_of("gpt2").config)
    with pytest.raises(ValueError, match="no config can say what alibi_scaling does"):
        extend_config(model_of("bloom").config)


@families
def test_a_config_alone_is_planned_as_its_model_is(model_type: str) -> None:
    model = model_of(model_type)
    on_paper, live = plan_extension(model.config), plan_extension(model.config, model=model)
    assert on_paper.summary == live.summary
    assert on_paper.updates == live.updates


def test_a_model_without_weights_is_refused_and_left_alone() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2"))
    with pytest.raises(ValueError, match="has no weights yet"):
        extend_context(model)
    assert "context_extension" not in model.__dict__
    assert model.config.n_positions == 1024
    model.to_empty(device="cpu")


@pytest.mark.parametrize("model_type", ["gpt2", "xglm", "bloom", "t5"])
def test_a_cast_model_is_extended_and_restored_in_its_dtype(model_type: str) -> None:
    model = model_of(model_type).to(torch.bfloat16)
    before = {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    extend_context(model)
    assert stock_logits(model, 2 * LENGTH).isfinite().all()
    restore_context(model)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(torch.equal(after[name], t) for name, t in before.items())


def test_an_extended_model_can_be_cast_and_restored() -> None:
    model = model_of("gpt2")
    before = model.transformer.wpe.weight.detach().clone()
    extend_context(model)
    model.to(torch.bfloat16)
    restore_context(model)
    assert model.transformer.wpe.weight.dtype == torch.bfloat16
    assert torch.equal(model.transformer.wpe.weight, before.bfloat16())


def test_a_dead_patch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.sites.alibi.ScaledBias.scaled", lambda self, bias: bias)
    model = model_of("bloom")
    before = state(model)
    with pytest.raises(RuntimeError, match=r"does not do what|changes nothing"):
        extend_context(model)
    assert_same(model, before)

"""Refuse, never shrug: each error says what, got and remedy, and leaves the model bitwise as it was."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import LENGTH, logits, tiny_config, tiny_model, token_ids
from live import DYNAMIC, LATE, REMAPPING, assert_unchanged, late, plain_rope, rotary_of, snapshot
from peft import LoraConfig, get_peft_model
from survey.small import small_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlavaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext import describe_context, extend_config, extend_context, restore_context, temporarily_extended
from ctxext.core.edit import Edit
from ctxext.extension.request import plan_extension
from ctxext.methods import NTKAware, RopeMethod, YaRN, list_methods
from ctxext.models.text_config import path_to_text

SHAPE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    pad_token_id=0,
)


def build(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SHAPE, **changes})).eval()


def refuses(model: nn.Module, error: type[Exception], *messages: str, **arguments: Any) -> str:
    """`extend_context` raises `error` with every one of `messages`, and `model` is unchanged."""
    before = snapshot(model)
    with pytest.raises(error) as caught:
        extend_context(model, **arguments)
    text = str(caught.value)
    for message in messages:
        assert message in text
    assert_unchanged(model, before)
    return text


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama")


# ------------------------------------------------------------------------- the method and options


def test_an_unknown_method_is_refused_with_the_nearest_name(llama: Any) -> None:
    text = refuses(llama, ValueError, "unknown method 'yarm'", "did you mean 'yarn'?", "Known: ", method="yarm")
    assert all((cls.name in text) == (cls.encoding == "rope") for cls in list_methods())


def test_an_unknown_option_is_refused_with_the_nearest_name(llama: Any) -> None:
    text = refuses(
        llama, ValueError, "method 'yarn' has no option 'beta_fas'", "did you mean 'beta_fast'?", beta_fas=16
    )
    assert "beta_slow" in text


@pytest.mark.parametrize(
    ("wrong", "meant"), [({"factr": 4}, "factor"), ({"target": 2048}, "target_length"), ({"metod": "pi"}, "method")]
)
def test_an_argument_with_a_typo_is_not_taken_for_an_option(llama: Any, wrong: dict[str, Any], meant: str) -> None:
    refuses(llama, ValueError, f"unknown argument {next(iter(wrong))!r}", f"did you mean '{meant}'?", **wrong)


def test_an_option_of_another_method_is_refused(llama: Any) -> None:
    refuses(llama, ValueError, "method 'pi' has no option 'beta_fast'", "takes none", method="pi", beta_fast=16)


def test_a_missing_option_is_named(llama: Any) -> None:
    refuses(llama, ValueError, "'longrope' needs long_factor", "Pass long_factor=", method="longrope")


def test_a_bad_option_value_is_refused(llama: Any) -> None:
    refuses(llama, ValueError, "beta_fast must exceed beta_slow", "32 and 1", beta_fast=1, beta_slow=32)
    refuses(llama, ValueError, "ramp must be one of", "got 'square'", ramp="square")
    refuses(llama, ValueError, "rope_theta must be", ">= the model's 10000", "got 10", method="abf", rope_theta=10.0)
    refuses(llama, ValueError, "long_factor has 3 numbers", "8 pairs", method="longrope", long_factor=(1.0, 2.0, 3.0))
    refuses(llama, ValueError, "finite", "got nan", method="longrope", long_factor=(math.nan,) * 8)


def test_options_beside_an_instance_are_refused(llama: Any) -> None:
    refuses(llama, ValueError, "beta_fast", "Set them on the instance", method=YaRN(factor=4), beta_fast=16)


@pytest.mark.parametrize("method", [4, YaRN, ["yarn"]])
def test_what_is_no_method_is_refused(llama: Any, method: Any) -> None:
    refuses(llama, (ValueError, TypeError), "method", "yarn", method=method)


@pytest.mark.parametrize("method", [cls.name for cls in list_methods("rope") if cls.name not in LATE])
def test_a_static_method_refuses_a_length(llama: Any, method: str) -> None:
    cls = next(cls for cls in list_methods() if cls.name == method)
    instance = cls.example(plain_rope(llama), 4.0)
    refuses(llama, ValueError, method, "does not depend on the length", "Drop length=", method=instance, length=256)


# ----------------------------------------------------------------------------- factor and lengths


@pytest.mark.parametrize("factor", [0.5, 0, -4, math.nan, math.inf, -math.inf, "4", True])
@pytest.mark.parametrize("method", ["yarn", "pi", "drope"])
def test_a_factor_below_1_or_not_finite_is_refused(llama: Any, factor: Any, method: str) -> None:
    refuses(llama, ValueError, "factor must be", f"got {factor!r}", "pass factor=", factor=factor, method=method)


@pytest.mark.parametrize("factor", [0.5, math.nan, math.inf])
def test_a_method_cannot_be_made_with_such_a_factor(factor: float) -> None:
    rope = plain_rope(tiny_model("llama"))
    for cls in list_methods():
        with pytest.raises(ValueError, match="factor must be"):
            cls.example(rope, factor) if issubclass(cls, RopeMethod) else cls(factor=factor)


def test_factor_and_target_length_together_are_refused(llama: Any) -> None:
    refuses(llama, ValueError, "factor= or target_length=, not both", "factor=4", "=256", factor=4, target_length=256)


def test_an_instance_that_disagrees_is_refused(llama: Any) -> None:
    own = NTKAware(factor=4)
    refuses(llama, ValueError, "factor=2 conflicts", "NTKAware(factor=4). Leave factor= out", factor=2, method=own)
    refuses(
        llama, ValueError, "target_length=128", "extends 64 to 256 tokens", target_length=128, method=NTKAware(factor=4)
    )


@pytest.mark.parametrize("target_length", ["128k", 128.5, 0, -1, True, 10**9])
def test_a_target_length_that_is_no_number_of_tokens_is_refused(llama: Any, target_length: Any) -> None:
    text = f"target_length must be a whole number of tokens up to 134217728, such as 131072, got {target_length!r}"
    refuses(llama, ValueError, text, target_length=target_length)


@pytest.mark.parametrize("arguments", [{"target_length": 64}, {"target_length": 16}, {"factor": 1}, {"factor": 1.001}])
def test_a_target_that_is_covered_already_is_refused(llama: Any, arguments: Any) -> None:
    said = "already covers", "64 (max_position_embeddings of the config)", "Pass a larger factor= or target_length="
    refuses(llama, ValueError, *said, **arguments)


@pytest.mark.parametrize("length", [0, -1, 7, "4096", 4096.0, True])
def test_a_trained_length_that_is_no_number_of_tokens_is_refused(llama: Any, length: Any) -> None:
    refuses(
        llama,
        ValueError,
        "original_max_position_embeddings must be",
        repr(length),
        original_max_position_embeddings=length,
    )


NOTHING: dict[str, dict[str, Any]] = {
    "the same theta": {"method": "abf", "rope_theta": 10000.0},
    "λ = 1": {"method": "longrope", "long_factor": (1.0,) * 8, "attention_factor": 1.0},
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_method_that_would_change_nothing_is_refused(llama: Any, case: str) -> None:
    refuses(llama, ValueError, "changes nothing", **NOTHING[case])


@pytest.mark.parametrize(("method", "length"), [("dynamic_ntk", LENGTH), ("dynamic_yarn", 16)])
def test_a_dynamic_method_is_not_frozen_within_the_trained_length(llama: Any, method: str, length: int) -> None:
    text = f"length={length} extends nothing: this model already covers 64 tokens. Pass a length from 65 to 256."
    refuses(llama, ValueError, text, method=method, length=length)


@pytest.mark.parametrize("length", [0, -1, "256", 0.5, True, 257])
def test_a_pinned_length_that_is_no_number_of_tokens_is_refused(llama: Any, length: Any) -> None:
    refuses(llama, (ValueError, TypeError), "length", repr(length), method="dynamic_ntk", length=length)


# ------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize(
    "what", [nn.Linear(4, 4), nn.Sequential(nn.Embedding(9, 4)), None, "gpt2", tiny_config("llama")]
)
def test_what_is_no_transformers_model_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a transformers model .*got \w+.*(extend_config|Load it first)"):
        extend_context(what)


def test_restoring_what_is_not_extended_is_refused(llama: Any) -> None:
    before = snapshot(llama)
    with pytest.raises(RuntimeError, match="not extended by ctxext"):
        restore_context(llama)
    assert_unchanged(llama, before)


def test_a_second_extension_is_refused(llama: Any) -> None:
    extend_context(llama, 2, "pi")
    refuses(llama, RuntimeError, "already extended", "pi ×2: 64 → 128 tokens", "restore_context")
    refuses(llama, RuntimeError, "already extended", existing="replace")
    before = snapshot(llama)
    with pytest.raises(RuntimeError, match="already extended"), temporarily_extended(llama):
        pass
    assert_unchanged(llama, before)


def test_a_model_whose_every_window_is_short_is_refused() -> None:
    model = tiny_model("mistral", sliding_window=32)
    refuses(model, ValueError, "window of 32 tokens", "no distance is ever new", "raise max_position_embeddings to 256")


def test_a_window_longer_than_the_trained_length_is_no_reason_to_refuse() -> None:
    model = tiny_model("mistral", sliding_window=2 * LENGTH)
    assert extend_context(model).context_extension.proof.consumed


@pytest.mark.parametrize(("model_type", "kind"), [("funnel", "masked"), ("reformer", "causal"), ("cpmant", "causal")])
def test_a_position_encoding_that_is_not_known_is_refused(model_type: str, kind: str) -> None:
    model = small_model(model_type, kind)
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    config = model.config.to_dict()
    with pytest.raises(ValueError, match=rf"model_type {model_type!r}\) has no position encoding that ctxext supports"):
        extend_context(model)
    assert all(torch.equal(t, before[name]) for name, t in [*model.named_parameters(), *model.named_buffers()])
    assert model.config.to_dict() == config


@pytest.mark.parametrize(
    ("model_type", "method", "message"),
    [
        (
            "gpt2",
            "yarn",
            "yarn is a method for rotary position embeddings, but this model has a learned",
        ),
        ("bloom", "hierarchical", "hierarchical is a method for a learned position table, but this model has ALiBi"),
        (
            "llama",
            "alibi_scaling",
            "alibi_scaling is a method for ALiBi, but this model has rotary",
        ),
    ],
)
def test_a_method_for_another_encoding_is_refused(model_type: str, method: str, message: str) -> None:
    model = tiny_model("llama") if model_type == "llama" else small_model(model_type, "causal")
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=message) as caught:
        extend_context(model, method=method)
    assert "Use one of '" in str(caught.value)
    assert model.config.to_dict() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 100}, "length=100 is for rotary position embeddings"),
        ({"original_max_position_embeddings": 32}, "is its trained length, 64 tokens"),
        ({"existing": "replace"}, "not extended yet. Leave it out"),
        ({"target_length": 64}, "already covers 64 tokens"),
        ({"alpha": 0.5}, "alpha must be strictly between 0 and 1"),
        ({"alpah": 0.3}, "did you mean 'alpha'"),
    ],
)
def test_arguments_that_a_table_has_no_use_for_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = small_model("gpt2", "causal")
    weights, config = model.transformer.wpe.weight, model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        extend_context(model, **arguments)
    assert model.transformer.wpe.weight is weights
    assert model.config.to_dict() == config


def test_a_model_without_positions_is_refused_with_the_remedy() -> None:
    model = build(
        "jamba", num_experts=2, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
    )
    refuses(model, ValueError, "'jamba'", "no position encoding with a length limit", "just raise the limit")


def test_a_family_that_scales_its_queries_too_is_kept_by_keep() -> None:
    model = build("ministral3", head_dim=16)
    before = snapshot(model)
    extend_context(model, existing="keep")
    assert torch.equal(logits(model, token_ids(100)), before["logits"])
    restore_context(model)
    assert_unchanged(model, before)


def test_frequencies_changed_by_hand_are_refused(llama: Any) -> None:
    rotary_of(llama).inv_freq.mul_(0.5)
    refuses(llama, ValueError, "'model.rotary_emb' differ from its config's", "Reload the model")


def test_a_model_without_its_rotary_embedding_is_refused(llama: Any) -> None:
    class Rotation(nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ones = x.new_ones(*position_ids.shape, 16)
            return ones, torch.zeros_like(ones)

    llama.model.rotary_emb = Rotation()
    refuses(llama, ValueError, "found no standard rotary embedding in LlamaForCausalLM")


def test_a_family_class_that_reads_its_config_in_another_way_is_refused(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = type(rotary_of(llama))
    stock = cls.__init__

    def init(self: nn.Module, config: Any) -> None:
        stock(self, config)
        self.inv_freq[-1] *= 2

    monkeypatch.setattr(cls, "__init__", init)
    refuses(llama, RuntimeError, "LlamaForCausalLM does not do what 'yarn ×4: 64 → 256 tokens' says")


def test_a_wrong_attention_factor_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(rotary_of(llama))
    stock = cls.__init__

    def init(self: nn.Module, config: Any) -> None:
        stock(self, config)
        self.attention_scaling = 1.0  # as a family would that ignores the temperature

    monkeypatch.setattr(cls, "__init__", init)
    refuses(llama, RuntimeError, "does not do what 'yarn", "cos and sin by")


def test_a_config_that_the_family_cannot_build_from_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(rotary_of(llama))

    def init(self: nn.Module, config: Any) -> None:
        raise KeyError(config.rope_parameters["rope_type"])

    monkeypatch.setattr(cls, "__init__", init)
    refuses(llama, ValueError, "cannot be built with rope_type 'yarn'", "KeyError", "method='ntk'")


def test_a_failing_forward_pass_undoes_the_patch(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(llama)
    with monkeypatch.context() as patch:
        patch.setattr(type(llama.model), "forward", lambda self, **_: 1 / 0)
        with pytest.raises(RuntimeError, match=r"could not run the forward pass.*ZeroDivisionError"):
            extend_context(llama)
    assert_unchanged(llama, before)


def test_weights_of_several_dtypes_are_named(llama: Any) -> None:
    llama.bfloat16().model.norm.float()
    before = snapshot(llama, run=False)
    with pytest.raises(RuntimeError, match=r"weights are in bfloat16 and float32: convert it with model.to\(dtype\)"):
        extend_context(llama)
    assert_unchanged(llama, before)


def test_another_default_dtype_is_no_reason_to_refuse(llama: Any) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        extend_context(llama, 4, "yarn")
    finally:
        torch.set_default_dtype(before)


def test_what_was_loaded_extended_is_not_restored(llama: Any, tmp_path: Path) -> None:
    extend_context(llama, 4, "yarn").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"saved extended\. Load the original"):
        restore_context(loaded)


def test_a_half_done_swap_is_undone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(llama)
    with monkeypatch.context() as patch:
        patch.setattr(Edit, "set_attribute", lambda *_: 1 / 0)  # after the configs and the module
        with pytest.raises(ZeroDivisionError):
            extend_context(llama)
    assert_unchanged(llama, before)


# ----------------------------------------------------------------------- scaling that is there already

BEFORE: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
scaled_already = pytest.mark.parametrize("native", BEFORE)


def scaled(native: str) -> Any:
    return tiny_model("llama", rope_parameters=BEFORE[native])


@scaled_already
def test_existing_scaling_is_refused_by_default_and_all_three_ways_are_named(native: str) -> None:
    refuses(scaled(native), ValueError, "already scaled", "existing='keep'", "existing='compose'", "existing='replace'")


def test_existing_takes_four_words_only(llama: Any) -> None:
    refuses(llama, ValueError, "refuse, keep, compose, replace", "got 'kept'", existing="kept")


@pytest.mark.parametrize("existing", ["keep", "compose"])
def test_keep_and_compose_need_something_to_work_on(llama: Any, existing: Any) -> None:
    refuses(llama, ValueError, f"existing='{existing}'", "plain RoPE", "Leave existing= out", existing=existing)


@scaled_already
@pytest.mark.parametrize(
    "arguments", [{"method": "pi"}, {"beta_fast": 16.0}, {"length": 256}, {"method": YaRN(factor=2)}]
)
def test_keep_refuses_a_method(native: str, arguments: Any) -> None:
    refuses(
        scaled(native),
        ValueError,
        "existing='keep'",
        "a method has no effect",
        "'compose'",
        existing="keep",
        **arguments,
    )


@scaled_already
def test_keep_leaves_the_frequencies_and_widens_the_window(native: str) -> None:
    model = scaled(native)
    before = snapshot(model)
    extend_context(model, 4, existing="keep")
    assert torch.equal(logits(model, token_ids(100)), before["logits"])
    assert model.config.max_position_embeddings == 4 * LENGTH
    assert rotary_of(model).rope_type == native
    restore_context(model)
    assert_unchanged(model, before)


@scaled_already
@pytest.mark.parametrize("method", ["pi", "yarn", "ntk"])
def test_compose_scales_on_top_of_the_frequencies_in_use(native: str, method: str, tmp_path: Any) -> None:
    model = scaled(native)
    before = snapshot(model)
    stock = rotary_of(model)
    in_use, temperature = stock.inv_freq.double(), stock.attention_scaling
    extend_context(model, 4, method, existing="compose")
    ratio = in_use / rotary_of(model).inv_freq.double()
    assert ratio.min() >= 1 - 1e-6
    assert ratio.max() == pytest.approx(4, rel=1e-5)
    assert rotary_of(model).attention_scaling == pytest.approx(
        temperature * (0.1 * math.log(4) + 1 if method == "yarn" else 1)
    )
    assert model.config.rope_parameters["rope_type"] == "longrope"
    assert model.config.max_position_embeddings == 4 * LENGTH
    live = logits(model, token_ids(100))
    assert not torch.equal(live, before["logits"])
    copy.deepcopy(model).save_pretrained(tmp_path)  # stock saving edits a config's dtype and architectures
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), token_ids(100)), live)
    restore_context(model)
    assert_unchanged(model, before)


@scaled_already
def test_replace_starts_again_from_the_original_frequencies(native: str) -> None:
    model = scaled(native)
    plain = tiny_model("llama", max_position_embeddings=32)
    expected = extend_context(plain, 4, "yarn")
    extend_context(model, 4, "yarn", existing="replace")
    assert torch.equal(rotary_of(model).inv_freq, rotary_of(expected).inv_freq)
    assert model.config.max_position_embeddings == 128
    assert torch.equal(logits(model, token_ids(100)), logits(expected, token_ids(100)))


@scaled_already
def test_replace_lowers_a_factor_but_not_below_the_trained_length(native: str) -> None:
    refuses(scaled(native), ValueError, "already covers 32 tokens", existing="replace", factor=1)
    refuses(scaled(native), ValueError, "already covers 64 tokens", existing="keep", factor=1)


def test_transformers_dynamic_scaling_is_not_kept() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    refuses(model, ValueError, "is length-dependent", "existing='replace'", existing="keep")


def test_a_rope_type_that_is_not_known_is_refused() -> None:
    config = tiny_config("llama")
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(ValueError, match="unsupported rope_type 'spiral'"):
        extend_config(config)


MLA = dict(
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    num_key_value_heads=4,
)


def test_a_softmax_scale_of_latent_attention_is_kept_by_keep() -> None:
    parameters = {**BEFORE["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0}
    model = build("deepseek_v3", **MLA, rope_parameters=parameters)
    before = logits(model, token_ids(100))
    extend_context(model, 2, existing="keep")
    assert torch.equal(logits(model, token_ids(100)), before)
    assert model.config.rope_parameters["mscale_all_dim"] == 1.0


# --------------------------------------------------------------------------- what is not rotated in attention

CANNOT = {"falcon": "custom attention code"}


@pytest.mark.parametrize("method", LATE)
@pytest.mark.parametrize("family", CANNOT)
def test_a_family_that_cannot_rotate_late_is_refused_by_name(family: str, method: str) -> None:
    model = tiny_model(family)
    name = f"(model_type '{model.config.get_text_config(decoder=True).model_type}')"
    refuses(model, ValueError, name, CANNOT[family], "'yarn'", method=late(method, model))


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_layers_that_run_several_times_are_refused_by_name(method: str) -> None:
    model = small_model("hrm_text", "causal")
    refuses(model, ValueError, "(model_type 'hrm_text')", "runs layer 1 several times", "'yarn'", method=method)


def test_an_attention_method_that_is_no_plain_softmax_is_refused_by_name() -> None:
    model = tiny_model("gpt_neox_japanese")
    model.gpt_neox_japanese.layers[1].attention.norm_factor *= 1.1
    refuses(model, ValueError, "'gpt_neox_japanese'", "layer 1 computes other than", "'yarn'", method="self_extend")


def test_layers_that_drop_keyword_arguments_are_not_run_again_in_the_backward_pass() -> None:
    model = extend_context(tiny_model("stablelm"), method="dynamic_ntk").train()
    logits(model, token_ids(100))
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"drop keyword arguments.*gradient_checkpointing_disable"):
        logits(model, token_ids(100))


def test_a_failed_pass_leaves_nothing_to_layers_that_drop_keyword_arguments() -> None:
    model = extend_context(tiny_model("stablelm"), method="dynamic_ntk")
    expected = logits(model, token_ids(100))
    with pytest.raises(IndexError):
        logits(model, token_ids(100) + 128)
    states = torch.zeros(1, 8, 64)
    with pytest.raises(RuntimeError, match="was called without token positions"):
        model.model.layers[0](states, position_embeddings=model.model.rotary_emb(states, torch.arange(8)[None]))
    assert torch.equal(logits(model, token_ids(100)), expected)


def test_a_trained_norm_after_the_rotation_is_refused_by_name() -> None:
    model = build("hunyuan_v1_dense", head_dim=16)
    extend_context(model, method="dynamic_ntk")  # as long as its weights are all 1, it turns with the rotation
    restore_context(model)
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.query_layernorm.weight, 0.5, 2.0)
    refuses(
        model,
        ValueError,
        "HunYuanDenseV1ForCausalLM (model_type 'hunyuan_v1_dense')",
        "layer 0 transforms queries and keys other than by rotation",
        method="dynamic_ntk",
    )


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    before = snapshot(model, run=False)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is on the meta device.*Load the weights first"):
        extend_context(model, method="dynamic_ntk")
    assert_unchanged(model, before)


def test_an_encoder_decoder_is_refused() -> None:
    config = tiny_config("llama", is_encoder_decoder=True)
    for method in ("dynamic_ntk", "self_extend"):
        with pytest.raises(ValueError, match=r"\(model_type 'llama'\) is an encoder-decoder model.*'yarn'"):
            plan_extension(config, method=method)


@pytest.mark.parametrize("model_type", ["modernbert", "eurobert"])
def test_an_encoder_is_refused_in_attention_from_its_config(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    for method in ("dynamic_ntk", "self_extend"):
        with pytest.raises(ValueError, match=r"\(model_type '.*bert'\) is an encoder.*needs a causal.*'yarn'"):
            plan_extension(config, factor=4, method=method)
    assert describe_context(config).kv_cache_bytes is None
    assert plan_extension(config, factor=4, method="yarn").is_portable


@pytest.mark.parametrize("name", ["paged|eager", "flash_attention_2", "flash_attention_3"])
def test_another_attention_implementation_is_refused_with_the_remedy(llama: Any, name: str) -> None:
    llama.config._attn_implementation_internal = name  # transformers refuses those without a kernel
    before = snapshot(llama, run=False)
    with pytest.raises(
        ValueError, match=rf"uses '{re.escape(name)}'.*only sdpa, eager.*set_attn_implementation\('sdpa'\)"
    ):
        extend_context(llama, method="self_extend")
    assert_unchanged(llama, before)
    llama.set_attn_implementation("sdpa")
    extend_context(llama, method="self_extend")


@pytest.mark.parametrize(
    ("method", "name"), [("dynamic_ntk", "eager"), ("self_extend", "flex_attention"), ("dynamic_ntk", "paged|eager")]
)
def test_another_attention_implementation_set_later_is_refused_at_the_next_pass(
    llama: Any, method: str, name: str
) -> None:
    extend_context(llama, method=method)
    llama.set_attn_implementation(name)
    with pytest.raises(RuntimeError, match=rf"was set to '{re.escape(name)}' after the model was .*restore_context"):
        logits(llama, token_ids(100))
    restore_context(llama)
    assert llama.config._attn_implementation == name
    llama.set_attn_implementation("eager")
    stock = tiny_model("llama")
    stock.set_attn_implementation("eager")
    assert torch.equal(logits(llama, token_ids(100)), logits(stock, token_ids(100)))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_continuous_batching_is_refused(implementation: str) -> None:
    model = extend_context(tiny_model("llama", attn_implementation=implementation), method="dynamic_ntk")
    expected = logits(model, token_ids(100))
    with pytest.raises(ValueError, match=f"in_attention_{implementation} is not supported for continuous batching"):
        model.generate_batch([token_ids(20)[0].tolist()])
    with pytest.raises(ValueError, match=r"does not support the object of continuous batching.*'yarn'"):
        logits(model, token_ids(100), cache=object())
    assert torch.equal(logits(model, token_ids(100)), expected)


def test_a_layer_of_a_model_that_rotates_late_is_not_run_alone(llama: Any) -> None:
    extend_context(llama, method="dynamic_ntk")
    hidden, positions = torch.zeros(1, 4, 64), torch.arange(4)[None]
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"without token positions.*restore_context"):
        llama.model.layers[0](hidden, position_embeddings=llama.model.rotary_emb(hidden, positions))


def test_a_group_that_cannot_cover_the_length_is_refused_with_the_one_that_can(llama: Any) -> None:
    text = "group_size=2 and window=16 covers 112 tokens from 64, not 256. Pass group_size=5"
    refuses(llama, ValueError, text, method="self_extend", group_size=2)
    extend_context(llama, method="self_extend", group_size=5)


def test_the_trained_length_is_a_target_only_of_a_method_that_changes_it(llama: Any) -> None:
    for wrong in ({"factor": 1}, {"target_length": 64}):
        refuses(llama, ValueError, "already covers 64 tokens", method="self_extend", **wrong)
    refuses(llama, ValueError, "already covers 32 tokens", method="string", target_length=32)
    extension = extend_context(llama, 1, "string").context_extension
    assert (extension.plan.target_length, extension.method.factor) == (64, 1.0)


@pytest.mark.parametrize("method", REMAPPING)
def test_a_method_that_remaps_positions_refuses_a_length(llama: Any, method: str) -> None:
    refuses(llama, ValueError, method, "no static form", "Drop length=", "'yarn'", method=method, length=200)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "self_extend": ("below the trained length of 64, got 64", {"window": 64}),
    "rerope": ("below the trained length of 64, got 100", {"window": 100}),
    "dca": ("smaller than chunk_size, got 32 and 32", {"chunk_size": 32, "local_window": 32}),
    "string": ("covers 124 tokens from 64, not 256", {"window": 4}),
    "dynamic_ntk": ("ratio must be at least 1.01, got 1", {"ratio": 1}),
    "longrope": ("short_factor has 3 numbers", {"long_factor": (2.0,) * 8, "short_factor": (1.0,) * 3}),
}


@pytest.mark.parametrize("method", OPTIONS)
def test_an_option_that_does_not_fit_is_refused(llama: Any, method: str) -> None:
    message, options = OPTIONS[method]
    refuses(llama, ValueError, message, method=method, **options)


@pytest.mark.parametrize("method", LATE)
def test_no_config_can_say_it(method: str) -> None:
    config = tiny_config("llama")
    before = config.to_dict()
    with pytest.raises(ValueError, match=rf"config\.json cannot express {method}") as caught:
        extend_config(config, method=late(method, tiny_model("llama")))
    assert ("length=" in str(caught.value)) == (method in DYNAMIC)
    assert config.to_dict() == before


# Families whose attention is unusual and yet can be rotated in attention, and how each of their layers turns.
TURNED, CROSSED = ("half_split", 1), ("interleaved", 1)
UNUSUAL: dict[str, tuple[dict[str, Any], list[tuple[str, int]]]] = {
    "smollm3": ({"num_hidden_layers": 4, "no_rope_layer_interval": 2}, [TURNED, ("none", 1)] * 2),
    "exaone4": ({"sliding_window": 128, "num_hidden_layers": 4}, [TURNED] * 3 + [("none", 1)]),
    "nanochat": ({}, [("half_split", -1)] * 2),
    "cohere": ({}, [CROSSED] * 2),
    "glm": ({"head_dim": 16, "partial_rotary_factor": 0.5}, [CROSSED] * 2),
    "persimmon": ({}, [TURNED] * 2),
}


@pytest.mark.parametrize("model_type", UNUSUAL)
def test_an_unusual_family_is_rotated_as_it_rotates(model_type: str) -> None:
    changes, expected = UNUSUAL[model_type]
    model = build(model_type, initializer_range=0.3, **changes)
    before = snapshot(model)
    extend_context(model, method="transformers_dynamic")
    layers = rotary_of(model).layers
    assert [(layers[i].convention.pairs, layers[i].convention.sign) for i in sorted(layers)] == expected
    ids = token_ids(150)
    found = logits(model, ids)
    restore_context(model)
    assert_unchanged(model, before)
    # One scale for the whole call: the static model of that length, which rotates by the family's own code.
    extend_context(model, method="transformers_dynamic", length=150)
    scale = float(before["logits"].abs().max())
    torch.testing.assert_close(found, logits(model, ids), rtol=0, atol=1e-5 * scale)
    restore_context(model)
    assert (found - logits(model, ids)).abs().max() > 1e-2 * scale


# ---------------------------------------------------------------------------------- configs alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "yarm"}, "did you mean 'yarn'"),
        ({"factor": 0.5}, "factor must be >= 1, got 0.5"),
        ({"factor": 4, "target_length": 256}, "not both"),
        ({"target_length": 64}, "already covers 64"),
        ({"method": "dynamic_ntk", "length": 64}, "extends nothing"),
        ({"method": "self_extend", "length": 256}, "no static form"),
        ({"existing": "keep"}, "plain RoPE"),
    ],
)
def test_a_config_is_refused_for_the_same_reasons(arguments: Any, message: str) -> None:
    config = tiny_config("qwen3_5")
    before = config.to_dict()
    with pytest.raises(ValueError, match=message):
        extend_config(config, **arguments)
    assert config.to_dict() == before


@pytest.mark.parametrize("method", ["self_extend", "dynamic_ntk"])
def test_a_model_built_from_the_config_of_one_extended_in_attention_is_not_called_extended(method: str) -> None:
    extended = extend_context(tiny_model("llama"), 4, method)
    built = type(extended)(extended.config)
    before = dict(vars(built.config))
    with pytest.raises(ValueError, match=r"built from the config alone is not extended.*original 64 tokens"):
        extend_context(built, 4, method)
    with pytest.raises(ValueError, match=r"attention is 'in_attention_sdpa'.*AutoConfig.from_pretrained"):
        extend_context(built, 4, method, existing="replace")
    assert dict(vars(built.config)) == before


def test_longrope2_is_named_as_a_search() -> None:
    with pytest.raises(ValueError, match="ctxext fit --by longrope2"):
        extend_context(tiny_model("llama"), 4, "longrope2")


def test_extend_config_leaves_its_argument_alone() -> None:
    config = tiny_config("qwen3_5")
    before = config.to_dict()
    extended = extend_config(config)
    assert config.to_dict() == before
    assert extended.text_config.max_position_embeddings == 4 * LENGTH
    refused = pytest.raises(ValueError, match="already scaled by ctxext")
    with refused:
        extend_config(extended)


@pytest.mark.parametrize("wrong", ["path", None])
def test_what_is_no_config_is_named(wrong: str | None) -> None:
    with pytest.raises(TypeError, match="expected a model or a transformers config"):
        describe_context(wrong)
    with pytest.raises(TypeError, match=r"expected a config, got (str|NoneType)\. Pass .*AutoConfig"):
        extend_config(wrong, factor=4)


def test_a_word_is_not_taken_for_true() -> None:
    with pytest.raises(ValueError, match="truncate of 'yarn' must be true or false, got 'False'"):
        YaRN(factor=4, truncate="False")


@pytest.mark.parametrize(
    "family", ["cohere2", "exaone4", "exaone_moe", "afmoe", "llama4_text", "kolibri1", "muse_spark_text"]
)
def test_families_that_rotate_within_a_window_alone_are_left_as_they_are(family: str) -> None:
    """Layers that see everything have no positions there, so that no distance is ever new."""
    field = "attention_chunk_size" if family == "llama4_text" else "sliding_window"
    config = AutoConfig.for_model(family, max_position_embeddings=LENGTH, **{field: LENGTH // 2})
    for method in ("yarn", "dynamic_yarn"):
        with pytest.raises(ValueError, match=r"no distance is ever new.*raise max_position_embeddings to 256"):
            plan_extension(config, 4, method)
    assert "no distance is ever new" in describe_context(config, 4).would_do


def test_a_text_config_of_remote_code_is_found_without_sub_configs() -> None:
    class Outer(PreTrainedConfig):
        def __init__(self, **more: Any) -> None:
            self.text_config = tiny_config("llama")
            super().__init__(**more)

    assert [name for name, _ in path_to_text(Outer())] == ["text_config"]


def test_a_late_method_on_a_multimodal_config_is_described_by_its_own_class() -> None:
    config = LlavaConfig(text_config=tiny_config("llama").to_dict())
    assert describe_context(config, 4, method="dynamic_yarn").would_do.startswith("dynamic_yarn ×4")


def test_exaone_4_without_a_window_rotates_everywhere() -> None:
    everywhere = {"sliding_window": None, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    config = AutoConfig.for_model("exaone4", max_position_embeddings=LENGTH, **everywhere)
    assert plan_extension(config, 4).target_length == 4 * LENGTH


@pytest.mark.parametrize("existing", ["keep", "compose"])
def test_frequencies_that_follow_the_length_are_nothing_to_start_from(existing: str) -> None:
    config = tiny_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match=r"is length-dependent.*existing='replace'"):
        plan_extension(config, 4, existing=existing)


@pytest.mark.parametrize("number", [np.float32(16), np.float64(16), np.int64(16)])
def test_numbers_of_numpy_are_numbers(number: np.generic) -> None:
    assert type(YaRN(factor=4, beta_fast=number).beta_fast) in (int, float)
    assert json.loads(json.dumps(YaRN(factor=4, beta_fast=number).to_dict()))["beta_fast"] == 16


def test_what_is_described_for_a_late_method_is_what_would_become_of_it() -> None:
    model = tiny_model("falcon")
    with pytest.raises(ValueError, match="custom attention code"):
        extend_context(model, 4, "dynamic_yarn")
    for described in (model, model.config):
        assert describe_context(described, 4, method="dynamic_yarn").would_do.startswith("refuse: ")


def test_an_adapter_in_the_place_of_a_new_table_is_to_be_unloaded_first() -> None:
    model = small_model("gpt2", "causal")
    extend_context(model, 2)
    length = model.config.n_positions
    wrapped = get_peft_model(model, LoraConfig(target_modules=["c_attn"], modules_to_save=["wpe"], fan_in_fan_out=True))
    with pytest.raises(RuntimeError, match="was replaced by an adapter"):
        restore_context(wrapped)
    assert model.config.n_positions == length
    assert model.context_extension is not None
    restore_context(wrapped.unload())


def test_a_table_that_was_made_in_inference_mode_can_be_trained() -> None:
    model = small_model("gpt2", "causal")
    with torch.inference_mode():
        extend_context(model, 2)
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_frequencies_that_are_off_by_a_ten_thousandth_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a family reads its config in its own way; float32 rounds a hundred times finer."""
    own = ROPE_INIT_FUNCTIONS["yarn"]

    def slightly_off(*args: Any, **kwargs: Any) -> Any:
        frequencies, scaling = own(*args, **kwargs)
        return frequencies * (1 + 1e-4), scaling

    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "yarn", slightly_off)
    refuses(tiny_model("llama"), RuntimeError, "frequencies differ by 1.0e-04", method="yarn", factor=4)

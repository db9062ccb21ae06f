"""Families that keep their rotary frequencies in an unusual way: extended, live, portable where a config can say it.

One model type for each treatment; the whole of transformers is swept elsewhere.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import COMMON as SHAPE
from families import LENGTH, logits, tiny_model, token_ids
from live import assert_unchanged, snapshot
from survey.matrix import examine
from survey.small import model_types, small_config, small_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import ctxext
from ctxext import extend_config, extend_context, restore_context
from ctxext.core.apply import apply
from ctxext.encodings.rope import RopeGeometry, inverse_frequencies
from ctxext.extension.describe import kv_cache_bytes
from ctxext.extension.request import plan_extension
from ctxext.methods import ABF, PI, YaRN
from ctxext.models.context import has_rope, read_context
from ctxext.models.families import FAMILIES
from ctxext.models.text_config import text_config_of
from ctxext.patches.softmax_scale import ScaleSoftmax

TWO_TYPES: dict[str, Any] = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=32)
EXPERTS: dict[str, Any] = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1)
MLA: dict[str, Any] = dict(
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    moe_intermediate_size=32,
    num_key_value_heads=4,
    **EXPERTS,
)
NATIVE_YARN: dict[str, Any] = dict(
    rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=LENGTH // 2, mscale=1.0,
    mscale_all_dim=1.0,
)  # fmt: skip
BY_TABLES: dict[str, Any] = dict(
    vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH, rotary_dim=8, initializer_range=0.3,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip

# What keeps its frequencies how, and what its config needs.
TREATMENTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, **TWO_TYPES},  # a table for each type of layer
    "modernbert-decoder": {"layer_types": TWO_TYPES["layer_types"], "local_attention": 32},
    "deepseek_v4": {  # tables by other names, in modules inside attention layers too
        "head_dim": 32, "layer_types": ["sliding_attention", "heavily_compressed_attention"], "n_routed_experts": 4,
        "mlp_layer_types": ["moe", "moe"], "moe_intermediate_size": 32, "num_experts_per_tok": 2, "q_lora_rank": 16,
        "o_groups": 2, "o_lora_rank": 16, "sliding_window": 32, "num_key_value_heads": 1,
        "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "compress": {"rope_type": "default", "rope_theta": 1.6e5, "partial_rotary_factor": 0.5},
        },
    },
    "granite_swa": {**TWO_TYPES},  # one module by theta, and one that nothing uses
    "moshi": {"head_dim": 16, "sliding_window": 256, "ffn_dim": 96, "audio_vocab_size": 64},  # one in every layer
    "gemma4_text": {  # a tail of zeros, and heads of two sizes
        "head_dim": 16, "global_head_dim": 32, **TWO_TYPES, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 128,
    },
    "deepseek_v2": {**MLA, "head_dim": 16, "num_experts_per_tok": 2, "topk_method": "greedy"},  # complex numbers
    "deepseek_v3": MLA,  # the scale of the softmax
    "llama4_text": {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 1024},
    "phimoe": {"num_local_experts": 4},  # computes its table again in every pass
    "hunyuan_v1_dense": {"head_dim": 16},  # a norm after the rotation
    "nanochat": {},
    "ministral3": {"head_dim": 16, "rope_parameters": {**NATIVE_YARN, "llama_4_scaling_beta": 0.1}},
    "mistral4": {  # both
        **MLA, "rope_parameters": {**NATIVE_YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5},
    },
    "gptj": BY_TABLES,
    "codegen": {**BY_TABLES, "n_ctx": LENGTH},
    "recurrent_gemma": {"attention_window_size": 256, "lru_width": 64, "num_hidden_layers": 3, "head_dim": 16},
}  # fmt: skip
PORTABLE = [model_type for model_type in TREATMENTS if model_type not in ("gptj", "codegen", "recurrent_gemma")]


def build(model_type: str, **changes: Any) -> PreTrainedModel:
    values = {**SHAPE, **TREATMENTS[model_type], **changes}
    torch.manual_seed(0)
    if model_type == "mistral4":  # it has no auto class of its own
        module = importlib.import_module("transformers.models.mistral4")
        return module.Mistral4ForCausalLM(module.Mistral4Config(**values)).eval()
    if model_type in ("gptj", "codegen"):
        values = {**TREATMENTS[model_type], **changes}
    if model_type == "recurrent_gemma":
        del values["max_position_embeddings"]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).eval()


def arguments(model: PreTrainedModel) -> dict[str, Any]:
    """How to extend a model of the list to 256 tokens."""
    facts = read_context(model.config)
    if facts.scaling is not None:
        return {"factor": 8.0, "existing": "replace"}
    if model.config.model_type == "recurrent_gemma":  # its config does not say how long it was trained
        return {"factor": 4.0, "original_max_position_embeddings": LENGTH}
    return {"factor": 4.0}


def native(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class built from the extended config as it is written, with the same weights."""
    config = type(model.config).from_dict(json.loads(json.dumps(model.config.to_dict())))
    twin = type(model)(config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


IDS = token_ids(2 * LENGTH)


@pytest.mark.parametrize("model_type", PORTABLE)
@pytest.mark.parametrize("method", ["yarn", "ntk", "resonance"])
def test_a_live_model_is_the_natively_built_one_and_restores_bitwise(model_type: str, method: str) -> None:
    model = build(model_type)
    before = snapshot(model)
    stock = logits(model, IDS)
    extend_context(model, method=method, **arguments(model))
    extended = logits(model, IDS)
    assert float((extended - stock).abs().max()) > 1e-4
    assert torch.equal(logits(native(model), IDS), extended)
    restore_context(model)
    assert_unchanged(model, before)


@pytest.mark.parametrize("model_type", [name for name in PORTABLE if name != "mistral4"])
def test_a_saved_model_is_loaded_by_plain_transformers(model_type: str, tmp_path: Any) -> None:
    model = extend_context(build(model_type), **arguments(build(model_type)))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    assert read_context(loaded.config).mark is not None


# ----------------------------------------------------------------------- a table for each type of layer


@pytest.mark.parametrize(
    ("model_type", "left", "extended"),
    [
        ("gemma3_text", "sliding_attention", "full_attention"),
        ("modernbert-decoder", "sliding_attention", "full_attention"),
        ("gemma4_text", "sliding_attention", "full_attention"),
        ("deepseek_v4", "main", "compress"),
    ],
)
def test_layers_with_a_short_window_are_left_as_they_are(model_type: str, left: str, extended: str) -> None:
    model = build(model_type)
    before = {name: buffer.clone() for name, buffer in model.model.rotary_emb.named_buffers()}
    extend_context(model)
    now = dict(model.model.rotary_emb.named_buffers())
    assert torch.equal(now[f"{left}_inv_freq"], before[f"{left}_inv_freq"])
    assert not torch.equal(now[f"{extended}_inv_freq"], before[f"{extended}_inv_freq"])
    assert f"{left}: unchanged" in " ".join(model.context_extension.plan.notes)


def test_layers_whose_window_is_longer_than_the_trained_length_are_extended_too() -> None:
    model = build("gemma3_text", sliding_window=2 * LENGTH)
    extend_context(model, method="pi")
    for label, theta in (("sliding_attention", 1e4), ("full_attention", 1e6)):
        table = model.model.rotary_emb.get_buffer(f"{label}_inv_freq").double()
        torch.testing.assert_close(table, inverse_frequencies(16, theta) / 4, rtol=1e-6, atol=0)
    assert torch.equal(logits(native(model), IDS), logits(model, IDS))


def test_a_sliding_table_changed_by_hand_is_refused() -> None:
    model = build("gemma3_text")
    model.model.rotary_emb.sliding_attention_inv_freq.mul_(0.5)
    with pytest.raises(ValueError, match=r"'model.rotary_emb' differ from its config's"):
        extend_context(model)


def test_truncate_reaches_a_nested_table_in_another_form() -> None:
    # transformers reads `truncate` at the top level alone, so a nested yarn would be rounded whatever it says.
    model = build("gemma3_text")
    extend_context(model, truncate=False)
    parameters = model.config.rope_parameters["full_attention"]
    assert parameters["rope_type"] == "longrope"
    rope = RopeGeometry.plain(16, 1e6, LENGTH)
    torch.testing.assert_close(
        torch.tensor(parameters["short_factor"], dtype=torch.float64),
        YaRN(factor=4, truncate=False).rescale_factors(rope),
        rtol=1e-9,
        atol=0,
    )
    assert torch.equal(logits(native(model), IDS), logits(model, IDS))
    nested = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": LENGTH}
    twins = [build("gemma3_text", rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {**nested, **more},
    }) for more in ({}, {"truncate": False})]  # fmt: skip
    tables = [twin.model.rotary_emb.full_attention_inv_freq for twin in twins]
    assert torch.equal(*tables), "transformers reads a nested truncate now"
    assert extend_context(twins[1], 2, existing="keep") is twins[1]


@pytest.mark.parametrize("existing", ["keep", "compose", "replace"])
def test_scaling_of_one_type_of_layer_is_there_already(existing: Any) -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    model = build("gemma3_text", rope_parameters=parameters)
    with pytest.raises(ValueError, match="already scaled"):
        extend_context(model)
    if existing == "replace":
        with pytest.raises(ValueError, match=r"which is unknown for this model.*original_max_position_embeddings"):
            extend_context(model, existing="replace")
    extend_context(model, existing=existing, original_max_position_embeddings=LENGTH)
    table = model.model.rotary_emb.full_attention_inv_freq.double()
    plain = RopeGeometry.plain(16, 1e6, LENGTH)
    in_use = dataclasses.replace(plain, inv_freq=plain.inv_freq / 2)
    expected = {
        "keep": in_use.inv_freq,
        "compose": in_use.inv_freq / YaRN(factor=4).rescale_factors(in_use),
        "replace": plain.inv_freq / YaRN(factor=4).rescale_factors(plain),
    }
    torch.testing.assert_close(table, expected[existing], rtol=1e-6, atol=0)
    assert torch.equal(logits(native(model), IDS), logits(model, IDS))


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gptj", "a sin/cos table in each layer"),
    ],
)
def test_what_cannot_be_rotated_late_says_why(model_type: str, reason: str, method: str) -> None:
    model = build(model_type)
    before = snapshot(model, run=model_type != "gptj")
    with pytest.raises(ValueError, match=reason):
        extend_context(model, method=method, **arguments(model))
    assert_unchanged(model, before)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "qwen4_exp_text"])
def test_an_indexer_that_rotates_too_is_refused_by_its_path(model_type: str) -> None:
    """It chooses keys by its own rotated queries; over a few tokens it chooses all, so no output would tell."""
    model = small_model(model_type, "causal")
    with pytest.raises(ValueError, match=r"also rotates in model\.layers\.\d\.self_attn\.indexer"):
        extend_context(model, 4, "self_extend")


@pytest.mark.parametrize("model_type", ["gemma3n_text", "granite_swa", "ministral3", "olmo3"])
def test_what_rotates_in_its_own_way_is_rotated_in_attention(model_type: str) -> None:
    """Keys of an earlier layer, an unused rotary embedding, scaled queries, a table for each type of layer."""
    row = examine(model_type, "causal")
    assert (row.verdict, row.in_attention, row.in_attention_reason) == ("native", True, None)


def test_an_attention_factor_does_not_reach_half_of_latent_attention() -> None:
    model = build("deepseek_v3")
    with pytest.raises(ValueError, match="an attention factor belongs to the whole softmax"):
        extend_context(model, 4, "dynamic_yarn")
    extend_context(model, 4, "dynamic_yarn", attention_factor=1.0)
    assert float(model.model.rotary_emb.rung_scaling.max()) == 1.0


def test_positions_with_several_axes_are_those_of_text_alone() -> None:
    model = extend_context(tiny_model("qwen3_5"), 4, "self_extend")
    text = torch.arange(IDS.shape[1])[None]
    expected = logits(model, IDS)
    assert torch.equal(logits(model, IDS, position_ids=text.expand(3, 1, -1)), expected)
    image = text.expand(3, 1, -1).clone()
    image[1, 0, 20:24] = 20
    with pytest.raises(ValueError, match="differ by axis, as those of images do"):
        logits(model, IDS, position_ids=image)


# ------------------------------------------------------------------------------- proportional RoPE


@pytest.mark.parametrize("method", ["yarn", "pi", "ntk", "abf", "drope", "resonance"])
def test_the_tail_of_proportional_rope_stays_zero(method: str) -> None:
    model = build("gemma4_text")
    before = model.model.rotary_emb.full_attention_inv_freq.clone()
    n_turning = int((before > 0).sum())
    extend_context(model, method=method)
    now = model.model.rotary_emb.full_attention_inv_freq
    assert 0 < n_turning < len(before)
    assert bool((now[:n_turning] > 0).all())
    assert float(now[n_turning:].max()) < 1e-37
    assert torch.equal(logits(native(model), IDS), logits(model, IDS))


def test_the_slowest_turning_pair_of_proportional_rope_reaches_the_factor() -> None:
    # Counted in all pairs, NTK would stretch the last that turns by the fourth root of the factor.
    model = build("gemma4_text", global_head_dim=64)
    before = model.model.rotary_emb.full_attention_inv_freq.clone()
    extend_context(model, method="ntk")
    ratio = before / model.model.rotary_emb.full_attention_inv_freq
    last = int((before > 0).sum()) - 1
    assert float(ratio[0]) == pytest.approx(1)
    assert float(ratio[last]) == pytest.approx(4, rel=1e-5)


def test_a_base_by_hand_means_nothing_in_proportional_rope() -> None:
    with pytest.raises(ValueError, match="proportional RoPE"):
        extend_config(build("gemma4_text").config, method=ABF(factor=4, rope_theta=5e6))


@pytest.mark.parametrize("existing", ["compose", "replace"])
@pytest.mark.parametrize("first", ["yarn", "ntk"])
def test_proportional_rope_is_extended_again(first: str, existing: Any) -> None:
    model = build("gemma4_text")
    stock = model.model.rotary_emb.full_attention_inv_freq.clone()
    again = native(extend_context(model, method=first))
    middle = again.model.rotary_emb.full_attention_inv_freq.clone()
    extend_context(again, 8 if existing == "replace" else 2, "pi", existing=existing)
    expected = stock / 8 if existing == "replace" else middle / 2
    torch.testing.assert_close(again.model.rotary_emb.full_attention_inv_freq, expected, rtol=1e-5, atol=1e-30)
    assert torch.equal(logits(native(again), IDS), logits(again, IDS))


def test_longrope_needs_a_word_more_where_layers_differ() -> None:
    # transformers validates longrope by a head_dim that such a config refuses to give.
    config = extend_config(build("gemma4_text").config)
    written = json.loads(json.dumps(config.to_dict()))
    assert written.pop("allow_global_per_layer_attribute_access") is True
    with pytest.raises(Exception, match="'head_dim' is a per-layer attribute"):
        type(config).from_dict(written)


# --------------------------------------------------------------------- the softmax of latent attention


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "mistral4"])
@pytest.mark.parametrize("existing", ["keep", "compose", "replace"])
@pytest.mark.parametrize("method", [YaRN(factor=4.0), YaRN(factor=4.0, attention_factor=1.3), PI(factor=4.0)])
def test_the_softmax_takes_the_temperature_once(model_type: str, existing: Any, method: Any) -> None:
    model = build(model_type, **({} if model_type == "mistral4" else {"rope_parameters": NATIVE_YARN}))
    layers = [layer.self_attn for layer in model.model.layers]
    plain = layers[0].qk_head_dim ** -0.5
    extend_context(model, **({"factor": 4.0} if existing == "keep" else {"method": method}), existing=existing)
    before = 0.1 * math.log(2) + 1
    ours = float(method.attention_scaling(None))
    expected = {"keep": before, "compose": before * ours, "replace": ours}[existing]
    for layer in layers:
        assert layer.scaling == pytest.approx(plain * expected**2)
    assert model.model.rotary_emb.attention_scaling == 1.0
    assert torch.equal(logits(native(model), IDS), logits(model, IDS))


def test_the_quotient_of_two_mscales_stays_on_cos_and_sin() -> None:
    model = build("deepseek_v3", rope_parameters={**NATIVE_YARN, "mscale": 0.7, "mscale_all_dim": 0.4})
    before = model.model.rotary_emb.attention_scaling
    extend_context(model, existing="compose")
    assert model.model.rotary_emb.attention_scaling == pytest.approx(before)
    assert before > 1.01
    assert torch.equal(logits(native(model), IDS), logits(model, IDS))


def test_a_softmax_scale_changed_by_hand_is_refused() -> None:
    model = build("deepseek_v3")
    model.model.layers[1].self_attn.scaling *= 2
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"softmax scale of 'model.layers.1.self_attn'.* edited"):
        extend_context(model)
    assert_unchanged(model, before)


@pytest.mark.parametrize("model_type", ["ministral3", "mistral4"])
@pytest.mark.parametrize("existing", ["compose", "replace"])
def test_the_scale_of_queries_keeps_its_length(model_type: str, existing: Any) -> None:
    model = build(model_type)
    extend_context(model, method="pi", existing=existing)
    assert model.config.rope_parameters["llama_4_scaling_beta"] == 0.1
    assert model.config.rope_parameters["original_max_position_embeddings"] == LENGTH // 2
    assert torch.equal(logits(native(model), IDS), logits(model, IDS))


# ---------------------------------------------------------------------- what no config of a family can say


@pytest.mark.parametrize("method", ["yarn", "pi"])
@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_tables_of_sines_and_cosines_are_the_formula(model_type: str, method: str, tmp_path: Any) -> None:
    model = build(model_type)
    before, short = snapshot(model, run=False), IDS[:, :LENGTH]
    stock = logits(model, short)
    extend_context(model, method=method)
    plan = model.context_extension.plan
    rope = RopeGeometry.plain(8, 1e4, LENGTH)
    inv_freq = rope.inv_freq / plan.method.rescale_factors(rope)
    angles = torch.arange(256)[:, None] * inv_freq
    expected = torch.cat([angles.sin(), angles.cos()], dim=-1) * float(plan.method.attention_scaling(rope))
    for layer in model.transformer.h:
        table = layer.attn.embed_positions
        torch.testing.assert_close(table.double(), expected, rtol=0, atol=3e-5)
    long = logits(model, IDS)
    assert float((long[:, :LENGTH] - stock).abs().max()) > 1e-4
    restore_context(model)
    assert_unchanged(model, before)
    assert torch.equal(logits(model, short), stock)
    extend_context(model, method=method)
    assert not plan.is_portable
    with pytest.warns(UserWarning, match=r"cannot be expressed in config\.json"):
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), short), stock)
    assert torch.equal(logits(ctxext.load(tmp_path).eval(), IDS), long)
    with pytest.raises(ValueError, match=r"config\.json cannot express"):
        extend_config(build(model_type).config, method=method)


def test_a_table_of_sines_that_was_changed_by_hand_is_refused() -> None:
    model = build("gptj")
    model.transformer.h[1].attn.embed_positions.mul_(0.5)
    with pytest.raises(ValueError, match=r"'transformer.h.1.attn' differs from RoPE"):
        extend_context(model)


@pytest.mark.parametrize("touched", [False, True])
def test_a_table_of_sines_that_nothing_uses_is_refused(touched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gptj")
    for layer in model.transformer.h[1:]:

        def kept(ids: Any, attention: Any = layer.attn, fixed: Any = layer.attn.embed_positions) -> Any:
            if touched:
                attention.embed_positions.double()
            return fixed.repeat(1, 1, 1)

        monkeypatch.setattr(layer.attn, "_get_embed_positions", kept)
    before = snapshot(model, run=False)
    with pytest.raises(RuntimeError, match="no attention layer of GPTJForCausalLM uses"):
        extend_context(model)
    assert_unchanged(model, before)


def test_no_table_of_sines_is_allocated_by_a_large_number() -> None:
    with pytest.raises(ValueError, match="exceed the limit of 16777216 rows"):
        extend_context(build("gptj"), target_length=2**26)


def test_a_cast_model_gets_tables_in_float32() -> None:
    exact = extend_context(build("gptj")).transformer.h[0].attn.embed_positions
    cast = extend_context(build("gptj").to(torch.bfloat16)).transformer.h[0].attn.embed_positions
    assert torch.equal(cast, exact)


def test_a_family_of_one_rope_type_is_extended_live(tmp_path: Any) -> None:
    model = build("recurrent_gemma")
    with pytest.raises(ValueError, match="no distance is ever new"):
        extend_context(model)
    before = snapshot(model)
    extend_context(model, **arguments(model))
    rope = RopeGeometry.plain(8, 1e4, LENGTH)
    expected = rope.inv_freq / YaRN(factor=4).rescale_factors(rope)
    for layer in model.model.layers[2::3]:
        rotary = layer.temporal_block.rotary_emb
        torch.testing.assert_close(rotary.inv_freq.double(), expected, rtol=1e-6, atol=0)
        assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    extended = logits(model, IDS)
    with pytest.raises(ValueError, match="in a way it cannot express"):
        plan_extension(copy.deepcopy(model.config), existing="compose", original_max_position_embeddings=LENGTH)
    restore_context(model)
    assert_unchanged(model, before)
    extend_context(model, **arguments(model))
    with pytest.warns(UserWarning, match=r"cannot be expressed in config\.json"):
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path).eval(), IDS), extended)
    restore_context(model)
    extend_context(model, **arguments(model), method="ntk")  # a raised base is what its config can say
    assert model.context_extension.plan.is_portable
    assert torch.equal(logits(native(model), IDS), logits(model, IDS))


def test_a_family_of_one_rope_type_still_refuses_others() -> None:
    # The day transformers takes one, its row goes.
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match="does not support RoPE types other than `default`"):
        build("recurrent_gemma", rope_parameters=parameters)


# ------------------------------------------------------------------------------- sections of pairs


def vision_language(model_type: str) -> PreTrainedModel:
    """A multimodal model with sections of pairs, for each of time, height and width."""
    ernie = model_type == "ernie4_5_vl_moe"
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2] if ernie else [4, 2, 2]}
    text = {**SHAPE, "head_dim": 16, "rope_parameters": parameters}
    if ernie:
        text |= {"moe_intermediate_size": [32, 32], "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "embed_dim": 32}
    vision |= {"out_hidden_size": 64, "out_channels": 64} if model_type != "qwen2_vl" else {"hidden_size": 64}
    if model_type == "qwen2_vl":
        del text["head_dim"]
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    names = {
        "qwen2_vl": "Qwen2VLForConditionalGeneration",
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
    }
    torch.manual_seed(0)
    import transformers

    return getattr(transformers, names[model_type])(config).eval()


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl", "ernie4_5_vl_moe"])
def test_text_is_extended_with_its_sections_and_vision_left(model_type: str) -> None:
    model = vision_language(model_type)
    before = snapshot(model)
    vision = {n: b.clone() for n, b in model.named_buffers() if "visual" in n or "vision" in n}
    sections = model.config.text_config.rope_parameters["mrope_section"]
    for method in ("yarn", "ntk"):
        extend_context(model, method=method)
        extension = model.context_extension
        assert all("language_model" in path for path in extension.changed)
        assert model.config.text_config.rope_parameters["mrope_section"] == sections
        assert vision.keys()
        assert all(torch.equal(model.get_buffer(n), b) for n, b in vision.items())
        if extension.plan.is_portable:
            assert torch.equal(logits(native(model), IDS), logits(model, IDS))
        restore_context(model)
    assert_unchanged(model, before)


@torch.no_grad()
@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "self_extend"])
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl"])
def test_packed_texts_of_a_vision_model_do_not_see_each_other(model_type: str, method: str) -> None:
    """Its positions have four rows: those of the text, and time, height and width."""
    model, sizes = extend_context(vision_language(model_type).double(), method=method), [60, 90]
    ids = token_ids(sum(sizes))
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(sizes, dim=1)], dim=1)
    positions = torch.cat([torch.arange(n) for n in sizes]).expand(4, 1, -1)
    found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)


def test_pairs_in_an_order_of_their_own_are_each_scaled_as_themselves() -> None:
    model = vision_language("ernie4_5_vl_moe")
    rotary: Any = model.model.language_model.rotary_emb
    stock = rotary.inv_freq.double().clone()
    assert not torch.equal(stock, stock.sort(descending=True)[0]), "this family's table is in order now"
    extend_context(model)
    assert not model.context_extension.plan.is_portable
    rope = RopeGeometry.plain(16, 1e4, LENGTH)
    scaled = rope.inv_freq / YaRN(factor=4).rescale_factors(rope)
    which = (stock[:, None] - rope.inv_freq).abs().argmin(dim=1)
    table = model.model.language_model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(table, scaled[which], rtol=1e-6, atol=0)


# --------------------------------------------------------------------------- what the rows say is so


def test_phimoe_multiplies_by_a_field_of_its_config_until_it_rotates_in_attention() -> None:
    scaled: Any = {
        "rope_type": "longrope", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": LENGTH // 2,
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.243, "long_mscale": 1.243,
    }  # fmt: skip
    model = build("phimoe", rope_parameters=scaled)
    before = snapshot(model)
    found = extend_context(model, 4, "self_extend", existing="replace").context_extension.proof
    assert max(found.rotation_error, found.output_error) < 1e-5
    plain = extend_context(build("phimoe"), 4, "self_extend", original_max_position_embeddings=LENGTH // 2)
    torch.testing.assert_close(logits(model, IDS), logits(plain, IDS), rtol=0, atol=1e-4)
    restore_context(model)
    assert_unchanged(model, before)


def test_phimoe_never_uses_its_long_factors() -> None:
    # The day it does, its rows and the refusal to scale on top of such factors go.
    factors = {"short_factor": [1.0] * 8, "short_mscale": 1.0, "long_mscale": 1.0}
    models = [
        build("phimoe", rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": LENGTH // 2,
            **factors, "long_factor": [long] * 8,
        }) for long in (1.0, 8.0)
    ]  # fmt: skip
    assert torch.equal(logits(models[0], IDS), logits(models[1], IDS))
    with pytest.raises(ValueError, match="never uses its long_factor"):
        extend_context(models[1], existing="compose")
    extend_context(models[1], existing="replace")
    assert torch.equal(logits(native(models[1]), IDS), logits(models[1], IDS))


@pytest.mark.parametrize("model_type", PORTABLE)
def test_a_dead_attention_factor_is_noted_and_a_live_one_is_not(model_type: str) -> None:
    model, outputs = build(model_type), []
    options = arguments(model)
    factor = options.pop("factor")
    for attention_factor in (1.0, 1.4):
        extend_context(model, method=YaRN(factor=factor, attention_factor=attention_factor), **options)
        outputs.append(logits(model, IDS))
        notes = " ".join(model.context_extension.plan.notes)
        restore_context(model)
    dead = float((outputs[0] - outputs[1]).abs().max()) < 1e-3
    assert dead == ("has no effect" in notes)


def test_every_family_whose_softmax_takes_mscale_all_dim_has_its_row() -> None:
    models = Path(importlib.import_module("transformers.models").__file__ or "").parent
    found = {file.parent.name for file in models.glob("*/modeling_*.py") if b"yarn_apply_mscale(" in file.read_bytes()}
    assert found == {name for name, family in FAMILIES.items() if family.softmax_mscale}


def test_a_module_that_nothing_uses_needs_no_reader() -> None:
    model = build("granite_swa")
    calls: list[str] = []
    for path in ("model.rotary_emb", "model.rotary_embs.0"):
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: calls.append(path))
    logits(model, IDS)
    assert calls == ["model.rotary_embs.0"], "granite_swa uses its first rotary embedding now"
    assert extend_context(model).context_extension.proof.consumed


def test_a_layer_that_still_calls_what_was_replaced_is_refused() -> None:
    model = build("moshi")
    attention: Any = model.model.layers[1].self_attn
    stock, inner = attention.rotary_emb, type(attention).forward

    def stale(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        now, self.rotary_emb = self.rotary_emb, stock
        try:
            return inner(self, *args, **kwargs)
        finally:
            self.rotary_emb = now

    attention.forward = stale.__get__(attention)
    with pytest.raises(RuntimeError, match="no attention layer of MoshiForCausalLM uses"):
        extend_context(model)
    assert attention.rotary_emb is stock


def test_four_models_in_one_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="consists of four models"):
        extend_config(AutoConfig.for_model("blt"))


def test_nothing_is_half_done_where_the_softmax_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek_v3")
    plan = plan_extension(model.config, 4.0)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="softmax scale"):
        apply(model, dataclasses.replace(plan, patches=(plan.patches[0], ScaleSoftmax(1.5))))
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("model_type", "kind"), [("moonshine", "speech"), ("musicflamingo", "seq2seq"), ("evolla", "base")]
)
def test_a_model_that_also_hears_or_folds_is_extended_where_it_reads(model_type: str, kind: str) -> None:
    row = examine(model_type, kind)
    assert (row.verdict, row.native_difference, row.restored) == ("native", 0.0, True), row.reason


def test_halves_with_a_config_each_are_refused_with_the_reason() -> None:
    model = small_model("t5gemma", "seq2seq")
    before = copy.deepcopy(model.config.to_dict())
    with pytest.raises(ValueError, match="only one of them would be extended"):
        extend_context(model)
    assert model.config.to_dict() == before


def cached_bytes(model_type: str) -> tuple[int, int]:
    """Bytes of keys and values after 40 tokens: in the model's own cache, and as counted from its config."""
    model = small_model(model_type, "causal")
    with torch.no_grad():
        cache = model(input_ids=token_ids(40), use_cache=True).past_key_values
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    counted = kv_cache_bytes(text_config_of(model.config), 40, 4)
    return sum(each.nbytes for each in held if isinstance(each, torch.Tensor)), counted


UNCOUNTED = {
    "deepseek_v4", "mimo_v2_flash",  # compressed keys; sliding layers with other numbers of heads: not counted right
    "blt", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "recurrent_gemma",  # no small model or no cache
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["falcon", "falcon_h1", "llama", "llama4_text", "deepseek_v3", "zamba2"])
def test_the_counted_cache_is_the_models_own(model_type: str) -> None:
    held, counted = cached_bytes(model_type)
    assert held <= counted <= 1.05 * held  # transformers drops a token from a full window


@pytest.mark.slow
def test_the_counted_cache_is_the_models_own_in_every_family() -> None:
    wrong, n = {}, 0
    for model_type, kind in model_types().items():
        if kind != "causal" or model_type in UNCOUNTED:
            continue
        if not has_rope(text_config_of(small_config(model_type, kind))):
            continue
        held, counted = cached_bytes(model_type)
        n += 1
        if not held <= counted <= 1.05 * held:
            wrong[model_type] = held, counted
    assert wrong == {}
    assert n >= 120

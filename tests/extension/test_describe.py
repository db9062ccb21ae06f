"""`describe_context`, layer type by layer type, against the live model."""

from typing import Any

import pytest
import torch
from families import tiny_model
from live import rotary_of
from transformers import Cohere2Config, Exaone4Config, Llama4TextConfig

from ctxext import describe_context, extend_context

# A table for each type of layer; one table for two types; windows beyond the trained length; three layers.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}),
    "gemma3-96": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 96}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma2-96": ("gemma2", {"sliding_window": 96}),
}


def model_of(name: str) -> Any:
    family, changes = MODELS[name]
    return tiny_model(family, **({"head_dim": 16} if family == "gemma3_text" else {}), **changes)


def tables(model: Any) -> dict[str, torch.Tensor]:
    """The frequencies in use, by layer type."""
    types, rotary = model.config.layer_types, rotary_of(model)
    return {name: getattr(rotary, f"{name}_inv_freq", getattr(rotary, "inv_freq", None)).clone() for name in types}


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "self_extend"])
@pytest.mark.parametrize("name", MODELS)
def test_each_type_of_layer_is_described_as_it_rotates(name: str, method: str) -> None:
    model = model_of(name)
    stock, before = tables(model), describe_context(model)
    parameters, window = model.config.rope_parameters, model.config.sliding_window
    assert {layers.name for layers in before.layer_types} == set(stock) == {"sliding_attention", "full_attention"}
    for layers in before.layer_types:
        assert layers.scaling == "plain RoPE"
        assert layers.rope_theta == parameters.get(layers.name, parameters)["rope_theta"]
        assert layers.window == (window if layers.name == "sliding_attention" else None)
        assert layers.n_layers == model.config.layer_types.count(layers.name)
    extend_context(model, 4, method)
    after = describe_context(model)
    for layers in after.layer_types:
        if method == "yarn":
            changed = not torch.equal(tables(model)[layers.name], stock[layers.name])
        else:
            held = rotary_of(model).layers
            changed = any(not held[i].within for i, its in enumerate(model.config.layer_types) if its == layers.name)
        assert layers.scaling == (f"{method} ×4: 64 → 256 tokens" if changed else "plain RoPE")
        assert f"  {layers.name}" in str(after)
        assert str(layers) in str(after)
    assert after.layer_types[-1].scaling == after.summary  # full attention is always extended


def test_native_scaling_of_one_type_is_not_said_of_the_other() -> None:
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    }
    model = tiny_model("gemma3_text", head_dim=16, rope_parameters=parameters, **MODELS["gemma3"][1])
    sliding, full = describe_context(model).layer_types
    assert str(sliding) == "1 layer, window of 32 tokens, theta 10000, plain RoPE"
    assert str(full) == "1 layer, theta 1e+06, pi"


def test_layers_of_one_type_have_no_table_of_types() -> None:
    assert describe_context(tiny_model("llama")).layer_types == ()


@pytest.mark.parametrize("config", [
    Cohere2Config(num_hidden_layers=4, sliding_window=100, max_position_embeddings=64),
    Exaone4Config(num_hidden_layers=4, sliding_window=100, sliding_window_pattern=4, max_position_embeddings=64),
    Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=100),
])  # fmt: skip
def test_layers_without_rope_are_given_none(config: Any) -> None:
    assert describe_context(config).layer_types == ()


@pytest.mark.parametrize(("factor", "noted"), [(4, False), (32, False), (33, True)])
@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk"])
def test_a_factor_that_nothing_reaches_untrained_is_noted(method: str, factor: float, noted: bool) -> None:
    notes = describe_context(tiny_model("llama"), factor, method=method).notes
    assert notes == (("a factor above 32 needs training at the target length before use: ctxext finetune.",) * noted)
    # Distances stay within the trained length, and the recipe refuses to train it.
    assert not describe_context(tiny_model("llama"), factor, method="rerope").notes

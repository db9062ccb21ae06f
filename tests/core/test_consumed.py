"""The proof that a patch reaches attention: layer by layer, by its effect and not by its being touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import tiny_model
from live import assert_unchanged, snapshot

from ctxext import extend_context
from ctxext.core.consumed import readers
from ctxext.core.probing import probing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def with_own_rotary(model: Any, layers: list[int], touch: bool = False) -> Any:
    """The layers rotate by a copy of the rotary embedding, and drop what they are given."""
    own = copy.deepcopy(model.model.rotary_emb)
    for index in layers:
        attention = model.model.layers[index].self_attn
        stock = attention.forward

        def forward(hidden_states: Any, position_embeddings: Any = None, stock: Any = stock, **kwargs: Any) -> Any:
            if touch:
                position_embeddings = [table.to(torch.float64) for table in position_embeddings]
            positions = torch.arange(hidden_states.shape[1])[None]
            return stock(hidden_states, position_embeddings=own(hidden_states, positions), **kwargs)

        attention.forward = forward
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["yarn", "ntk", "self_extend", "dynamic_ntk"])
@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
def test_a_layer_that_rotates_by_itself_is_refused(layers: list[int], method: str, dtype: torch.dtype) -> None:
    model = with_own_rotary(tiny_model("llama").to(dtype), layers)
    before = snapshot(model)
    with pytest.raises((RuntimeError, ValueError), match=r"rotary embedding|no RoPE layer"):
        extend_context(model, factor=4, method=method)
    assert_unchanged(model, before)


def test_tables_that_are_touched_and_dropped_are_not_used() -> None:
    with pytest.raises(RuntimeError, match="no attention layer"):
        extend_context(with_own_rotary(tiny_model("llama"), [0, 1], touch=True), factor=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_without_positions_is_told_from_one_with_its_own(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    attention: Any = model.model.layers[1].self_attn
    stock = attention.forward

    def forward(hidden_states: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        return stock(hidden_states, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **kwargs)

    attention.forward = forward
    assert "used by attention: in 1 of 2 layers" in repr(extend_context(model, factor=4).context_extension)


def test_linear_attention_that_is_given_the_tables_needs_no_rotation() -> None:
    """Its output depends on the order without them, as no other layer's of its class does."""
    model = tiny_model("llama")

    class Recurrent(torch.nn.Module):
        def __init__(self, inside: Any) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
            return self.inside(hidden_states.cumsum(1).cumsum(1)), None

    model.model.layers[1].self_attn = Recurrent(torch.nn.Sequential(torch.nn.Linear(64, 64)))
    with probing(model):
        found = readers(model, [model.model.rotary_emb])
    assert (found.reading, found.blind, found.astray) == (("model.layers.0.self_attn",), (), ())


@pytest.mark.parametrize("projection", ["q_proj", "o_proj"])
def test_zeros_for_weights_are_no_reason_to_refuse(projection: str) -> None:
    """As before training; no output tells whether the tables are read, which an operation does."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        getattr(layer.self_attn, projection).weight.data.zero_()
    assert "used by attention: yes" in repr(extend_context(model, factor=4).context_extension)


def test_a_layer_that_hands_its_attention_other_tables_is_refused() -> None:
    model: Any = tiny_model("llama")
    own, layer = copy.deepcopy(model.model.rotary_emb), model.model.layers[1]
    stock = layer.forward

    def forward(hidden_states: Any, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        tables = own(hidden_states, torch.arange(hidden_states.shape[1])[None])
        return stock(hidden_states, *args, position_embeddings=tables, **kwargs)

    layer.forward = forward
    with pytest.raises(RuntimeError, match=r"model\.layers\.1 of LlamaForCausalLM do not use its rotary embedding"):
        extend_context(model, factor=4)


def test_a_subclass_that_rotates_by_itself_is_refused() -> None:
    model: Any = tiny_model("llama")
    own, attention = copy.deepcopy(model.model.rotary_emb), model.model.layers[1].self_attn

    class Own(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
            tables = own(hidden_states, torch.arange(hidden_states.shape[1])[None])
            return super().forward(hidden_states, position_embeddings=tables, **kwargs)

    attention.__class__ = Own
    with pytest.raises(RuntimeError, match="do not use its rotary embedding"):
        extend_context(model, factor=4)

"""What the tests of the live patcher share: a model's whole state, and the matrix of methods."""

from __future__ import annotations

import copy
from typing import Any

import torch
from families import LENGTH, logits, token_ids
from torch import nn

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import RopeScaling, list_methods

FACTOR = 4.0
METHODS = [cls.name for cls in list_methods()]


def text_config(model: nn.Module) -> Any:
    return model.config.get_text_config(decoder=True)


def plain_rope(model: nn.Module) -> RopeGeometry:
    """The geometry of an unscaled model, read off its own rotary table and not through ctxext."""
    return RopeGeometry.plain(
        2 * rotary_of(model).inv_freq.numel(), text_config(model).rope_parameters["rope_theta"], LENGTH
    )


def rotary_of(model: nn.Module) -> nn.Module:
    """The text model's rotary embedding."""
    found = {id(m): m for n, m in model.named_modules() if n.endswith("rotary_emb") and "visual" not in n}
    (module,) = found.values()
    return module


def arguments(name: str, model: nn.Module, factor: float = FACTOR) -> dict[str, Any]:
    """`extend_context`'s arguments for a registered method; dynamic ones are pinned at their reach."""
    method = example(name, plain_rope(model), factor)
    return {"method": method, **({"length": round(factor * LENGTH)} if method.is_dynamic else {})}


def example(name: str, rope: RopeGeometry, factor: float = FACTOR) -> RopeScaling:
    return next(cls for cls in list_methods() if cls.name == name).example(rope, factor)


def snapshot(model: nn.Module, run: bool = True) -> dict[str, Any]:
    """Everything that an extension may touch: module identities, attributes, hooks, tables, configs, logits."""
    # First, as transformers' dynamic and longrope tables change when they run.
    output = logits(model, token_ids(100)) if run else torch.zeros(())
    modules = dict(model.named_modules(remove_duplicate=False))
    config = getattr(model, "config", None)
    return {
        "modules": {path: id(module) for path, module in modules.items()},
        "attributes": {path: sorted(module.__dict__) for path, module in modules.items()},
        "hooks": {
            path: [list(module._forward_hooks), list(module._forward_pre_hooks)] for path, module in modules.items()
        },
        "modes": {path: module.training for path, module in modules.items()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "config": None if config is None else copy.deepcopy(config.to_dict()),
        "config attributes": None if config is None else copy.deepcopy(_attributes(config)),
        "logits": output,
    }


def _attributes(config: Any) -> dict[str, Any]:
    text = config.get_text_config(decoder=True)
    return {key: value for key, value in text.__dict__.items() if not hasattr(value, "to_dict")}


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    """Bitwise, `before` being a `snapshot`."""
    after = snapshot(model, run=before["logits"].ndim > 0)
    for name in before:
        if name == "buffers":
            assert before[name].keys() == after[name].keys()
            assert all(same(after[name][key], value) for key, value in before[name].items()), name
        elif name == "logits":
            assert torch.equal(before[name], after[name]), name
        else:
            assert before[name] == after[name], name


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, dtype and device included."""
    if a.device.type == "meta" or b.device.type == "meta":
        return a.device == b.device and a.dtype == b.dtype and a.shape == b.shape
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def starve(model: nn.Module) -> None:
    """Make the attention of a Llama-like model blind to its rotary embedding, as a dead patch would be."""
    for layer in model.model.layers:
        layer.self_attn.forward = _Blind(layer.self_attn)


class _Blind:
    def __init__(self, attention: nn.Module) -> None:
        self.forward = type(attention).forward.__get__(attention)

    def __call__(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
        n_tokens, head_dim = hidden_states.shape[1], self.forward.__self__.head_dim
        ones = hidden_states.new_ones(1, n_tokens, head_dim)
        return self.forward(hidden_states, position_embeddings=(ones, torch.zeros_like(ones)), **kwargs)

"""What the tests of the live patcher share: a model's whole state, and the matrix of methods."""

from __future__ import annotations

import copy
from typing import Any

import torch
from families import FAMILIES, LENGTH, logits, token_ids
from torch import nn

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import LongRoPE, PositionRemapping, RopeMethod, RopeScaling, list_methods

FACTOR = 4.0
# Every method that rescales frequencies, on every family; those that follow the length are frozen at one.
METHODS = [cls.name for cls in list_methods() if issubclass(cls, RopeScaling)]
# Every method that rotates inside attention, and the families whose attention lets it.
LATE = [cls.name for cls in list_methods("rope") if cls.at_length is not RopeMethod.at_length]
REMAPPING = [cls.name for cls in list_methods() if issubclass(cls, PositionRemapping)]
DYNAMIC = [name for name in LATE if name not in (*REMAPPING, "query_temperature")]
EXACT_UNDER_A_CACHE = [name for name in LATE if name != "transformers_dynamic"]
LATE_FAMILIES = [family for family in FAMILIES if family != "falcon"]


def text_config(model: nn.Module) -> Any:
    return model.config.get_text_config(decoder=True)


def plain_rope(model: nn.Module) -> RopeGeometry:
    """The geometry of an unscaled model, read off its own rotary table and not through ctxext."""
    return RopeGeometry.plain(
        2 * rotaries_of(model)[0].inv_freq.numel(), text_config(model).rope_parameters["rope_theta"], LENGTH
    )


def rotary_of(model: nn.Module) -> nn.Module:
    """The text model's rotary embedding."""
    (module,) = {id(module): module for module in rotaries_of(model)}.values()
    return module


def rotaries_of(model: nn.Module) -> list[nn.Module]:
    """The text model's rotary embeddings, which are alike."""
    return [m for n, m in model.named_modules() if n.endswith("rotary_emb") and "visual" not in n]


def arguments(name: str, model: nn.Module, factor: float = FACTOR) -> dict[str, Any]:
    """`extend_context`'s arguments for a registered method; dynamic ones are frozen at their reach."""
    method = example(name, plain_rope(model), factor)
    return {"method": method, **({"length": round(factor * LENGTH)} if method.is_dynamic else {})}


def example(name: str, rope: RopeGeometry, factor: float = FACTOR) -> Any:
    return next(cls for cls in list_methods() if cls.name == name).example(rope, factor)


def late(name: str, model: nn.Module, factor: float = FACTOR) -> RopeMethod:
    """A method as it rotates inside attention of `model`; LongRoPE with all that a config cannot say."""
    rope = plain_rope(model)
    if name == "longrope":
        short, long = (torch.linspace(1, last, rope.dim // 2).tolist() for last in (1.2, factor))
        return LongRoPE(factor=factor, short_factor=tuple(short), long_factor=tuple(long), start_tokens=4)
    return example(name, rope, factor)


def cached_logits(model: nn.Module, ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    cache, parts = None, []
    for piece in ids.split(chunks, dim=1):
        with torch.no_grad():
            output = model(input_ids=piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def padded_batch(rows: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    n = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), n, dtype=torch.long), torch.zeros(len(rows), n, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(n - len(row), n) if side == "left" else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    return {"ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


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

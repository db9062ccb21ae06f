"""Shifted sparse attention (S²) for training, full attention for everything else.

LongLoRA (Chen et al. 2024, arXiv 2309.12307, section 3.2): half of the heads attend within groups of
G = tokens / groups tokens, the other half within groups shifted by G/2, so that what one half cuts the other joins.
Attention's products shrink to 1/groups. The published code rolls the sequence, and thereby shows the LAST G/2 tokens
to the first; here the first and the last half-group of the shifted heads stand alone, and every head is causal.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxext.core.apply import transformers_model

ATTRIBUTE = "shifted_sparse"


class _Patch(NamedTuple):
    groups: int
    config: PreTrainedConfig  # the module's own, which restoring puts back


def use_shifted_sparse_attention(model: nn.Module, groups: int = 4) -> None:
    """Let the attention of a model in training mode be S² with this many groups; in eval mode it stays what it was.

    It is for joined documents without padding: a mask, a sliding window or positions that start again raise in
    training. The config that is saved does not change.

    Args:
        model: a transformers model with sdpa or flash attention, or what wraps one.
        groups: into how many each training sequence is cut; its length must divide by twice as many. With 1,
            attention is full.

    Raises:
        ValueError: `groups` is below 1, or the attention is one that S² cannot replace.
        RuntimeError: the model is patched already, or its attention cannot be proven to go through S².
        The model is left as it was.
    """
    if groups < 1:
        raise ValueError(f"groups must be >= 1, got {groups}. LongLoRA uses 4.")
    inner = transformers_model(model)
    if any(ATTRIBUTE in module.__dict__ for module in inner.modules()):
        raise RuntimeError("this model has shifted sparse attention already. Call restore_attention(model) first.")
    modules: list[Any] = [
        module
        for module in inner.modules()
        if getattr(module, "is_causal", False) and isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    for module in modules:
        former = module.config._attn_implementation
        if former != "sdpa" and "flash" not in former:
            raise ValueError(
                f"shifted sparse attention replaces sdpa or flash attention, this model uses {former!r}, which "
                "materialises masks. Load it with attn_implementation='sdpa', if its family has that."
            )
    for module in modules:
        # Only the attention sees the other name: masks and what is saved are made from the model's config. The former
        # name stays part of it, for families that look for "flash" in it.
        name = f"shifted_sparse|{module.config._attn_implementation}"
        AttentionInterface.register(name, _attention)
        setattr(module, ATTRIBUTE, _Patch(groups, module.config))
        module.config = copy.copy(module.config)
        module.config._attn_implementation = name
    try:
        _prove(inner, modules, groups)
    except BaseException:
        _restore(modules)
        raise


def restore_attention(model: nn.Module) -> None:
    """Undo `use_shifted_sparse_attention`.

    Raises:
        RuntimeError: the model has no shifted sparse attention.
    """
    modules = [module for module in transformers_model(model).modules() if ATTRIBUTE in module.__dict__]
    if not modules:
        raise RuntimeError("this model has no shifted sparse attention, so there is nothing to restore.")
    _restore(modules)


def _restore(modules: list[nn.Module]) -> None:
    for module in modules:
        module.config = module.__dict__.pop(ATTRIBUTE).config


@torch.no_grad()
def _prove(model: Any, modules: list[Any], groups: int) -> None:
    """See every attention module of the model come by in a short training pass."""
    seen: list[nn.Module] = []
    names = {module.config._attn_implementation for module in modules}

    def record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(module)
        return _attention(module, *args, **kwargs)

    modes = {module: module.training for module in modules}
    ids = torch.ones(1, 4 * groups, dtype=torch.long, device=model.device)
    try:
        for name in names:
            AttentionInterface.register(name, record)
        for module in modules:
            module.training = True
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            model(input_ids=ids, use_cache=False)
    finally:
        for name in names:
            AttentionInterface.register(name, _attention)
        for module, mode in modes.items():
            module.training = mode
    if not modules or set(seen) != set(modules):
        raise RuntimeError(
            f"{len(set(seen))} of {len(modules)} attention modules of {type(model).__name__} go through transformers' "
            "attention interface; shifted sparse attention needs at least one, and all. Train with full attention."
        )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (batch, head, token, head_dim) to (batch, token, head, head_dim)."""
    groups, config = getattr(module, ATTRIBUTE)
    if not module.training or groups == 1:
        former = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
        return former(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    _refuse(attention_mask, query, key, kwargs)
    heads, tokens = query.shape[1:3]
    if tokens % (2 * groups):
        raise ValueError(
            f"shifted sparse attention with {groups} groups needs a length that divides by {2 * groups}, "
            f"got {tokens} tokens. Cut the sequences to {tokens - tokens % (2 * groups)}, or change the groups."
        )
    if key.shape[1] % 2:  # else both halves have key heads of their own
        key, value = (repeat_kv(states, heads // states.shape[1]) for states in (key, value))
    size = tokens // groups
    straight, shifted = zip(*(_halves(states) for states in (query, key, value)))
    edges = [0, size // 2, tokens - size // 2, tokens]
    parts = [
        _grouped([states[:, :, low:high] for states in shifted], length, dropout, scaling)
        for low, high, length in zip(edges, edges[1:], (size // 2, size, size // 2))
    ]
    return torch.cat([_grouped(straight, size, dropout, scaling), torch.cat(parts, dim=1)], dim=2), None


def _halves(states: Tensor) -> tuple[Tensor, Tensor]:
    """The heads that attend within groups, and those within shifted ones: at odd numbers the more."""
    half = states.shape[1] // 2
    return states[:, :half], states[:, half:]


def _grouped(states: Sequence[Tensor], size: int, dropout: float, scaling: float | None) -> Tensor:
    """Causal attention within each `size` tokens; (batch, head, token, head_dim) to (batch, token, head, head_dim)."""

    def fold(states: Tensor) -> Tensor:
        # Attention's inputs lie in memory as (batch, token, head, head_dim), so that this copies nothing.
        return states.transpose(1, 2).unflatten(1, (-1, size)).flatten(0, 1).transpose(1, 2)

    query, key, value = states
    output = scaled_dot_product_attention(
        fold(query), fold(key), fold(value), dropout_p=dropout, is_causal=True, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output.transpose(1, 2).unflatten(0, (query.shape[0], -1)).flatten(1, 2)


def _refuse(attention_mask: Tensor | None, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
    """Raise where groups of one long document are not what the caller means."""
    positions = kwargs.get("position_ids")
    if (
        attention_mask is not None
        or kwargs.get("cu_seq_lens_q") is not None
        or (positions is not None and bool((positions.diff(dim=-1) < 0).any()))
        or key.shape[2] != query.shape[2]
    ):
        raise ValueError(
            "shifted sparse attention takes joined documents and no mask: got padding, documents packed with their "
            "positions starting again, skipped positions without an attention mask of ones, or a filled cache. Join "
            "the documents into one sequence, pass that mask of ones, or train with full attention."
        )
    special = [name for name in ("softcap", "s_aux", "sliding_window", "position_bias") if kwargs.get(name) is not None]
    if special:
        raise ValueError(
            f"shifted sparse attention knows no {', '.join(special)}, which this model's has. "
            "Train it with full attention."
        )

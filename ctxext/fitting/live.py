"""Differentiable rescale factors in a live model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ctxext.core.apply import extension_of
from ctxext.core.probing import in_eval_mode
from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import RopeScaling
from ctxext.models.context import has_rope, read_context
from ctxext.models.families import family_of
from ctxext.models.text_config import text_config_of
from ctxext.patches.rotary import find_rotary_sites, other_rotary_tables, relative_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LiveFactors:
    """Sets λ and the attention factor of a model's rotary embedding within a `with` block.

    Its class's own forward computes cos and sin, as with λ in the config, but without `no_grad`.

    Attributes:
        rope: the RoPE that the model was trained with.

    Raises:
        ValueError: RoPE is missing, already extended or scaled, or has several tables.
    """

    def __init__(self, model: PreTrainedModel, original_max_position_embeddings: int | None = None) -> None:
        text_config = text_config_of(model.config)
        name = f"{type(model).__name__} (model_type {text_config.model_type!r})"
        if not has_rope(text_config):
            raise ValueError(f"{name} has no rotary position embeddings, so there is no λ to fit.")
        facts = read_context(model.config, original_max_position_embeddings)
        if extension_of(model) is not None or facts.scaling is not None or facts.mark is not None:
            raise ValueError(
                f"the RoPE of {name} is already scaled. Fit the unextended model: restore_context(model), or load it "
                "without its scaling."
            )
        family = family_of(text_config)
        if len(facts.tables) > 1 or facts.tables[0].n_zero or family.softmax_mscale or family.mscale_keys:
            raise ValueError(
                f"{name} has several RoPE tables or a softmax temperature, and λ can be fitted only to a single "
                "RoPE table. Use a named method, such as yarn."
            )
        self.rope: RopeGeometry = facts.original_rope
        sites = find_rotary_sites(model, text_config)
        others = other_rotary_tables(model, sites)
        tables = [site.module._buffers.get("inv_freq") for site in sites]
        if not sites or others or not all(table is not None and _agrees(table, self.rope) for table in tables):
            raise ValueError(
                f"{name} does not use the frequencies in its config{': ' * bool(others)}{', '.join(others)}. "
                "λ can be fitted only to one standard rotary embedding: use a named method, such as yarn."
            )
        self._sites: list[Any] = [site.module for site in sites]
        self._former: list[tuple[Tensor, float, Any]] = []

    def __enter__(self) -> LiveFactors:
        for module in self._sites:
            own = partial(inspect.unwrap(type(module).forward), module)
            self._former.append((module.inv_freq, module.attention_scaling, _set_forward(module, own)))
        return self

    def __exit__(self, *_: object) -> None:
        for module, (table, scaling, forward) in zip(self._sites, self._former):
            module._buffers["inv_freq"], module.attention_scaling = table, scaling
            _set_forward(module, forward)
        self._former.clear()

    def put(self, rescale_factors: Float64[Tensor, " pair"], attention_factor: Tensor | float) -> None:
        """Use `rescale_factors` from now on."""
        for module, (table, _, _) in zip(self._sites, self._former, strict=True):
            # In float32 whatever the model's dtype, as in `extend_context`.
            inv_freq = (self.rope.inv_freq / rescale_factors).to(table.device, torch.float32)
            scale = attention_factor.to(inv_freq) if isinstance(attention_factor, Tensor) else attention_factor
            module._buffers["inv_freq"], module.attention_scaling = inv_freq, scale

    def use(self, method: RopeScaling | None) -> None:
        """Use a static method from now on; None for the original frequencies."""
        if method is None:
            self.put(torch.ones_like(self.rope.inv_freq), 1.0)
        else:
            self.put(method.rescale_factors(self.rope), float(method.attention_scaling(self.rope)))


@contextmanager
def recomputed(model: PreTrainedModel) -> Iterator[None]:
    """Keep one hidden state a layer for the backward pass and recompute the rest.

    transformers' gradient checkpointing works only in training mode, which enables dropout.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    former = [_set_forward(block, partial(checkpoint, block.forward, use_reentrant=False)) for block in blocks]
    try:
        yield
    finally:
        for block, forward in zip(blocks, former):
            _set_forward(block, forward)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Freeze all weights and disable dropout."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        with in_eval_mode(model):
            yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)


def _set_forward(module: nn.Module, forward: Any) -> Any:
    """Set or (None) remove a module's instance-level forward; returns the previous one."""
    former = module.__dict__.pop("forward", None)
    if forward is not None:
        module.forward = forward
    return former


def _agrees(table: Tensor, rope: RopeGeometry) -> bool:
    """Whether a module's frequencies are the config's, up to rounding in its dtype."""
    return relative_error(table, rope.inv_freq) <= max(1e-6, torch.finfo(table.dtype).eps)

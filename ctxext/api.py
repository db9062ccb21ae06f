"""The verbs: extend_context, restore_context, temporarily_extended, extend_config, describe_context."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ctxext import extension
from ctxext.configs import Existing, plan_extension
from ctxext.description import ContextDescription, describe
from ctxext.methods import ContextMethod, RopeScaling

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


def extend_context(
    model: nn.Module,
    factor: float | None = None,
    method: str | ContextMethod = "yarn",
    *,
    target_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    existing: Existing = "refuse",
    length: int | None = None,
    rotated_copy: bool = False,
    **options: Any,
) -> Any:
    """Extend the context window of a live model, in place, and prove that it took effect.

    The rotary embedding is replaced by one of the family's own class, the config is updated, and the
    receipt is put on the model as `model.context_extension`. Saving then writes a checkpoint that
    plain transformers loads. `restore_context(model)` undoes it bitwise.

    Dynamic methods and those that remap positions rotate inside attention instead, exactly under any cache; their
    saved form needs `ctxext.load`, or a `length` to freeze a dynamic one at.

    Args:
        model: a transformers model, or one wrapped by PEFT, torch.compile or DDP.
        factor: target length / trained length; 4 when neither it nor `target_length` is given.
        method: a registered name (`ctxext.list_methods()`), or an instance such as `YaRN(factor=8, beta_fast=16)`.
        target_length: tokens to reach, in the place of `factor`.
        original_max_position_embeddings: the length in tokens at which the model was really trained,
            where you know better than its config and the table of checkpoints.
        existing: what to do with RoPE that is scaled already. "refuse" raises; "keep" leaves the
            frequencies and only widens the window; "compose" scales on top; "replace" starts again from
            the original frequencies, which is also how a factor is lowered. `factor` counts from the
            present length for "keep" and "compose", from the original one for "replace".
        length: pins a dynamic method at the scale of this many tokens, which makes it a static one.
        rotated_copy: lets caches keep a copy of the keys as a dynamic method rotates them: decoding is faster, and
            the cache half as large again.
        **options: fields of the method, such as `beta_fast=16`.

    Returns:
        The same model.

    Raises:
        ValueError: an argument is wrong, the model has no standard rotary embedding, it covers that length
            already, or its RoPE is scaled and `existing` does not say what to do.
        RuntimeError: the model is extended already, or the patch could not be proven to work.
        TypeError: `model` is not a transformers model, or `method` neither a name nor an instance.
        In each case the model is left as it was.
    """
    inner = extension.transformers_model(model)
    done = extension.extension_of(inner)
    if done is not None:
        raise RuntimeError(
            f"this model is extended already ({done.plan.summary}). Call restore_context(model) first, "
            "then extend it anew."
        )
    plan = plan_extension(
        inner.config,
        factor,
        method,
        target_length=target_length,
        original_max_position_embeddings=original_max_position_embeddings,
        existing=existing,
        length=length,
        rotated_copy=rotated_copy,
        **options,
    )
    extension.apply(inner, plan)
    return model


def restore_context(model: nn.Module) -> Any:
    """Undo `extend_context`: modules, config and logits are bitwise what they were. Returns the same model.

    Raises:
        RuntimeError: the model is not extended.
    """
    extension.transformers_model(model)  # or say that it is none
    owner = extension.extended_model(model)
    if owner is None:
        raise RuntimeError("this model is not extended by ctxext, so there is nothing to restore.")
    extension.restore(owner, owner.__dict__[extension.ATTRIBUTE])
    return model


@contextmanager
def temporarily_extended(
    model: nn.Module, factor: float | None = None, method: str | ContextMethod = "yarn", **options: Any
) -> Iterator[Any]:
    """`extend_context` for the length of a `with` block; restored on exceptions too."""
    extend_context(model, factor, method, **options)
    try:
        yield model
    finally:
        restore_context(model)


def extend_config(
    config: PreTrainedConfig, factor: float | None = None, method: str | ContextMethod = "yarn", **options: Any
) -> Any:
    """A copy of `config` for the extended model: for those who hand a config to a trainer or a server.

    Arguments and errors are those of `extend_context`. The copy is not checked against a live model.

    Raises:
        ValueError: as `extend_context`; or the method rotates inside attention, which no config can say.
    """
    plan = plan_extension(config, factor, method, **options)
    if plan.method is not None and plan.is_late:
        pin = ", or pin it with length=" if isinstance(plan.method, RopeScaling) else ""
        raise ValueError(
            f"{plan.method.name} rotates inside attention, which no config can say. Extend a live model with "
            f"extend_context{pin}."
        )
    if plan.live_only is not None:
        raise ValueError(f"no config can say this, as {plan.live_only}. Extend a live model with extend_context.")
    extended = copy.deepcopy(config)
    plan.apply_to(extended.get_text_config(decoder=True))
    return extended


def describe_context(
    model_or_config: Any, factor: float | None = None, *, target_length: int | None = None, **options: Any
) -> ContextDescription:
    """What encoding a model has, how long it was trained and how that is known, and what extending would do.

    Takes a model or a config; loads and changes nothing. Other arguments are those of `extend_context`.
    """
    config = getattr(model_or_config, "config", model_or_config)
    return describe(config, factor, target_length, **options)

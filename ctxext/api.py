"""The public functions: extend_context, restore_context, temporarily_extended, extend_config, describe_context."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ctxext.core.apply import ATTRIBUTE, apply, extended_model, refuse_extended, restore, transformers_model
from ctxext.extension.describe import ContextDescription, describe
from ctxext.extension.peft_hooks import watch_peft
from ctxext.extension.request import plan_extension
from ctxext.extension.saving import saver
from ctxext.extension.trainer_hooks import watch_trainers
from ctxext.methods import ContextMethod, RopeScaling
from ctxext.models.metadata import Existing, live_mark
from ctxext.models.text_config import text_config_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Model = TypeVar("Model", bound=nn.Module)
Config = TypeVar("Config", bound="PreTrainedConfig")


def extend_context(
    model: Model,
    factor: float | None = None,
    method: str | ContextMethod | None = None,
    *,
    target_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    existing: Existing = "refuse",
    length: int | None = None,
    **options: Any,
) -> Model:
    """Extend the context window of a live model, in place, and verify that it took effect.

    Finds the position encoding (RoPE, a position table, ALiBi slopes, T5 buckets, relative representations), changes
    it, updates the config and stores a summary as `model.context_extension`. Where weights and config can express the
    extension, `save_pretrained` writes a checkpoint that plain transformers loads extended; otherwise it writes
    `context_extension.json` beside the unextended checkpoint, and `ctxext.load` reloads it. `restore_context(model)`
    undoes everything bit for bit.

    Pass the outermost model that you will save: if only a base model inside it is extended, saving the outer one loses
    the extension. Where the method creates new weights (a longer position table), build optimisers and wrappers
    afterwards.

    Dynamic RoPE methods and methods that remap positions rotate inside attention and are exact under any KV cache;
    `length` freezes a dynamic method.

    Args:
        model: a transformers model, or one wrapped by PEFT, torch.compile or DDP.
        factor: target length / trained length; 4 when neither it nor `target_length` is given.
        method: a registered name (`ctxext.list_methods()`), an instance such as `YaRN(factor=8, beta_fast=16)`, the
            path of a .json file that `ctxext fit` or `compare` wrote, or an extension on the hub (owner/name); None
            for the encoding's default: yarn for RoPE, alibi_scaling, hierarchical (learned tables),
            sinusoidal_interpolation, bucket_scaling (T5), distance_interpolation (relative).
        target_length: tokens to reach, instead of `factor`.
        original_max_position_embeddings: the length in tokens at which the model was trained, where its config and the
            table of known checkpoints are wrong.
        existing: what to do with a model whose position encoding is already scaled. "refuse" raises; "keep" leaves the
            frequencies and only widens the window; "compose" scales on top; "replace" starts again from the original
            frequencies (also to lower a factor). `factor` counts from the current length for "keep" and "compose", and
            from the original length for "replace", which raises if that length is unknown. Encodings other than RoPE
            support "refuse" and "compose".
        length: freezes a dynamic method at its scale for this many tokens, which makes it static. They become the
            target: longer than the start, and at most the one that `factor` gives.
        **options: fields of the method, such as `beta_fast=16`.

    Returns:
        The same model.

    Raises:
        ValueError: an argument is invalid, the model's position encoding is unsupported, the model already covers that
            length, or it is already scaled and `existing` is "refuse".
        RuntimeError: the model is already extended, or the patch could not be verified.
        TypeError: `model` is not a transformers model, or `method` is neither a name nor an instance. On any error the
            model is unchanged.
    """
    inner = transformers_model(model)
    refuse_extended(inner)
    plan = plan_extension(
        inner.config,
        factor,
        method,
        model=inner,
        target_length=target_length,
        original_max_position_embeddings=original_max_position_embeddings,
        existing=existing,
        length=length,
        **options,
    )
    if plan.changes_weights and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            f"{plan.method and plan.method.name} creates new parameters, whose gradients DistributedDataParallel would "
            "not synchronise. Extend the model before wrapping it."
        )
    watch_peft()
    watch_trainers()
    apply(inner, plan, saver(plan))
    return model


def restore_context(model: Model) -> Model:
    """Undo `extend_context`: modules, config and logits are bit-exact. Returns the same model.

    A position table trained since the extension is discarded with it; all other weights keep their training.

    Raises:
        RuntimeError: the model is not extended.
    """
    inner = transformers_model(model)  # raises if it is not one
    owner = extended_model(model)
    if owner is None and live_mark(text_config_of(inner.config)):
        raise RuntimeError("this model was loaded from a folder that was saved extended. Load the original instead.")
    if owner is None:
        raise RuntimeError("this model is not extended by ctxext; there is nothing to restore.")
    restore(owner, owner.__dict__[ATTRIBUTE])
    return model


@contextmanager
def temporarily_extended(
    model: Model, factor: float | None = None, method: str | ContextMethod | None = None, **options: Any
) -> Iterator[Model]:
    """`extend_context` within a `with` block; the model is restored at the end, even after an exception.

    One thread at a time may extend a model; others that run it meanwhile run it extended.
    """
    extend_context(model, factor, method, **options)
    try:
        yield model
    finally:
        if extended_model(model) is not None:  # else it was restored within the block
            restore_context(model)


def extend_config(
    config: Config, factor: float | None = None, method: str | ContextMethod | None = None, **options: Any
) -> Config:
    """Return an extended copy of `config`, for trainers and servers that take a config.

    Takes the arguments of `extend_context` and raises its errors. The copy is not verified on a live model.

    Raises:
        ValueError: as `extend_context`, or if a config alone cannot express the extension.
    """
    if isinstance(config, nn.Module) or not hasattr(config, "get_text_config"):
        raise TypeError(
            f"expected a config, got {type(config).__name__}. Pass model.config or AutoConfig.from_pretrained(path). "
            "For a model, use extend_context."
        )
    plan = plan_extension(config, factor, method, **options)
    if plan.method is not None and not plan.is_portable:
        pin = ", or freeze it with length=" if plan.in_attention and isinstance(plan.method, RopeScaling) else ""
        raise ValueError(
            f"config.json cannot express {plan.method.name} because {plan.why_not_portable}. Extend a live model with "
            f"extend_context{pin}."
        )
    if plan.method is not None and plan.changes_weights:
        raise ValueError(
            f"{plan.method.name} creates new weights, so an extended config would match no checkpoint. Extend a live "
            "model with extend_context and save it."
        )
    extended = copy.deepcopy(config)
    plan.apply_to(text_config_of(extended))
    return extended


def describe_context(
    model_or_config: Any, factor: float | None = None, *, target_length: int | None = None, **options: Any
) -> ContextDescription:
    """Describe a model's position encoding, its trained length and the source of that, and what extending would do.

    Takes a model or a config, and the arguments of `extend_context`. Loads and changes nothing.
    """
    if isinstance(model_or_config, nn.Module):
        model = transformers_model(model_or_config)
        return describe(model.config, factor, target_length, model=model, **options)
    return describe(model_or_config, factor, target_length, **options)

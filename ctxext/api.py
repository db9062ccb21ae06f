"""The verbs: extend_context, restore_context, temporarily_extended, extend_config, describe_context."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ctxext.core.apply import ATTRIBUTE, apply, extended_model, extension_of, restore, transformers_model
from ctxext.extension.describe import ContextDescription, describe
from ctxext.extension.peft_hooks import watch_peft
from ctxext.extension.request import plan_extension
from ctxext.extension.saving import saver
from ctxext.methods import ContextMethod, RopeScaling
from ctxext.models.metadata import Existing
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
    rotated_copy: bool = False,
    **options: Any,
) -> Model:
    """Extend the context window of a live model, in place, and prove that it took effect.

    What holds the positions (a rotary embedding, a table, ALiBi's slopes, T5's buckets, relative representations) is
    found and changed, the config is updated, and the receipt is put on the model as `model.context_extension`. Saving
    then writes a checkpoint that plain transformers loads, where weights and config can say it; otherwise
    `context_extension.json` beside it is what `ctxext.load` extends by. `restore_context(model)` undoes it bitwise.

    Give the whole model that you will save: a base that is extended inside a head is saved by a head that knows nothing
    of it. Where the method makes new weights (a longer table of positions), build optimisers and wrappers afterwards.

    Dynamic methods for RoPE and those that remap positions rotate inside attention, exactly under any cache; pass a
    `length` to freeze a dynamic one at.

    Args:
        model: a transformers model, or one wrapped by PEFT, torch.compile or DDP.
        factor: target length / trained length; 4 when neither it nor `target_length` is given.
        method: a registered name (`ctxext.list_methods()`), an instance such as `YaRN(factor=8, beta_fast=16)`, the
            path of a .json file that `ctxext fit` or `recommend` wrote, or an extension on the hub (owner/name); None
            for the encoding's default: yarn for RoPE, alibi_scaling, hierarchical (learned tables),
            sinusoidal_interpolation, bucket_scaling (T5), distance_interpolation (relative).
        target_length: tokens to reach, instead of `factor`.
        original_max_position_embeddings: the length in tokens at which the model was really trained,
            where you know better than its config and the table of checkpoints.
        existing: what to do with a model that is scaled already; other encodings than RoPE know "refuse" and
            "compose". "refuse" raises; "keep" leaves the frequencies and only widens the window; "compose" scales on
            top; "replace" starts again from the original frequencies, which is also how a factor is lowered. `factor`
            counts from the present length for "keep" and "compose", from the original one for "replace", which is
            refused where nothing says that length.
        length: freezes a dynamic method at the scale of this many tokens, which makes it a static one.
        rotated_copy: lets caches keep a copy of the keys as a dynamic method rotates them: decoding is faster, and
            the cache half as large again.
        **options: fields of the method, such as `beta_fast=16`.

    Returns:
        The same model.

    Raises:
        ValueError: an argument is wrong, the model has no position encoding that is known here, it covers that length
            already, or it is scaled already and `existing` does not say what to do.
        RuntimeError: the model is extended already, or the patch could not be proven to work.
        TypeError: `model` is not a transformers model, or `method` neither a name nor an instance.
        In each case the model is left as it was.
    """
    inner = transformers_model(model)
    done = extension_of(inner)
    if done is not None:
        raise RuntimeError(
            f"this model is extended already ({done.plan.summary}). Call restore_context(model) first, "
            "then extend it again."
        )
    plan = plan_extension(
        inner.config,
        factor,
        method,
        model=inner,
        target_length=target_length,
        original_max_position_embeddings=original_max_position_embeddings,
        existing=existing,
        length=length,
        rotated_copy=rotated_copy,
        **options,
    )
    if plan.changes_weights and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            f"{plan.method and plan.method.name} makes new weights, which DistributedDataParallel would not reduce: it "
            "holds those that it was given. Extend the model before it is wrapped."
        )
    apply(inner, plan, saver(plan))
    watch_peft()
    return model


def restore_context(model: Model) -> Model:
    """Undo `extend_context`: modules, config and logits are bitwise what they were. Returns the same model.

    A position table that was trained in the meantime goes with the extension; all other weights keep their training.

    Raises:
        RuntimeError: the model is not extended.
    """
    transformers_model(model)  # or say that it is none
    owner = extended_model(model)
    if owner is None:
        raise RuntimeError("this model is not extended by ctxext, so there is nothing to restore.")
    restore(owner, owner.__dict__[ATTRIBUTE])
    return model


@contextmanager
def temporarily_extended(
    model: Model, factor: float | None = None, method: str | ContextMethod | None = None, **options: Any
) -> Iterator[Model]:
    """`extend_context` for the length of a `with` block; restored on exceptions too."""
    extend_context(model, factor, method, **options)
    try:
        yield model
    finally:
        restore_context(model)


def extend_config(
    config: Config, factor: float | None = None, method: str | ContextMethod | None = None, **options: Any
) -> Config:
    """A copy of `config` for the extended model: for those who hand a config to a trainer or a server.

    Arguments and errors are those of `extend_context`. The copy is not checked against a live model.

    Raises:
        ValueError: as `extend_context`; or a config alone cannot say it.
    """
    plan = plan_extension(config, factor, method, **options)
    if plan.method is not None and not plan.is_portable:
        pin = ", or freeze it with length=" if plan.in_attention and isinstance(plan.method, RopeScaling) else ""
        raise ValueError(
            f"config.json cannot express {plan.method.name}, as {plan.why_not_portable}. Extend a live model with "
            f"extend_context{pin}."
        )
    if plan.method is not None and plan.changes_weights:
        raise ValueError(
            f"{plan.method.name} makes new weights, so a config alone would fit no checkpoint. Extend a live model "
            "with extend_context and save it."
        )
    extended = copy.deepcopy(config)
    plan.apply_to(text_config_of(extended))
    return extended


def describe_context(
    model_or_config: Any, factor: float | None = None, *, target_length: int | None = None, **options: Any
) -> ContextDescription:
    """What encoding a model has, how long it was trained and how that is known, and what extending would do.

    Takes a model or a config; loads and changes nothing. Other arguments are those of `extend_context`.
    """
    if isinstance(model_or_config, nn.Module):
        model = transformers_model(model_or_config)
        return describe(model.config, factor, target_length, model=model, **options)
    return describe(model_or_config, factor, target_length, **options)

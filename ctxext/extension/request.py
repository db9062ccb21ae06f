"""Plan an extension, for any position encoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ctxext.core.encoding import Encoding, ModuleEncoding
from ctxext.core.plan import ARGUMENTS, Plan, Request
from ctxext.extension.method_file import check_made_for, opened
from ctxext.extension.rope import RopeEncoding
from ctxext.methods import ContextMethod
from ctxext.models.config_fields import check_config
from ctxext.models.context import check_trained_length, has_rope, no_encoding
from ctxext.models.families import family_of
from ctxext.models.text_config import text_config_of
from ctxext.patches import alibi, position_table, relative_bias, sinusoidal
from ctxext.utils.values import one_line

# In search order; of a model with more than one encoding, the one that limits its length is extended.
FINDERS = (alibi.find, sinusoidal.find, position_table.find, relative_bias.find)


def find_encoding(model: nn.Module, text_config: Any) -> ModuleEncoding | None:
    """The position encoding of a model without RoPE (live or on meta), or None."""
    return next((found for find in FINDERS if (found := find(model, text_config)) is not None), None)


def class_of(config: Any) -> Any:
    """The model class for a config: its first architecture if transformers has that."""
    import transformers

    names = [name for name in getattr(config, "architectures", None) or () if hasattr(transformers, name)]
    if names:
        return getattr(transformers, names[0])
    autos = ("", "ForCausalLM", "ForSeq2SeqLM", "ForMaskedLM", "ForSpeechSeq2Seq")
    mappings = [getattr(transformers, f"AutoModel{kind}")._model_mapping for kind in autos]
    found = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if found is None:
        raise ValueError(f"transformers builds no model from a {type(config).__name__} alone")
    return found[0] if isinstance(found, tuple) else found


def model_on_meta(config: Any) -> nn.Module:
    """Build the model of a config on meta. Raises ValueError if transformers cannot build it."""
    text_config = text_config_of(config)
    try:
        with torch.device("meta"):
            return class_of(config)(config)
    except Exception as error:  # model code raises many exception types
        raise ValueError(
            f"{type(text_config).__name__} (model_type {text_config.model_type!r}): no model could be built from this "
            f"config ({type(error).__name__}: {one_line(error)}). Correct the config, or load the model and pass it."
        ) from error


def plan_extension(
    config: Any,
    /,
    factor: float | None = None,
    method: str | ContextMethod | None = None,
    *,
    model: nn.Module | None = None,
    **arguments: Any,
) -> Plan:
    """Plan an extension. Other arguments and errors are those of `ctxext.extend_context`.

    Args:
        model: the live model of `config`; if None, encodings other than RoPE are searched for in a model on meta.
    """
    known_arguments = {name: arguments.pop(name) for name in ARGUMENTS if name in arguments}  # the rest is the method's
    request = Request(factor=factor, method=opened(method), **known_arguments, options=arguments)
    check_config(config)
    check_trained_length(request.original_max_position_embeddings)
    plan = encoding_of(config, model).plan(config, request)
    check_made_for(method, plan.original_length or plan.start)
    return plan


def encoding_of(config: Any, model: nn.Module | None = None) -> Encoding:
    """The position encoding of a config's model. Raises ValueError if it has no limit or is unknown."""
    check_config(config)
    text_config = text_config_of(config)
    if has_rope(text_config):
        return RopeEncoding()
    refused = family_of(config).refuse
    named = text_config if refused is None else config
    name = f"{type(named).__name__} (model_type {named.model_type!r})"
    reason = no_encoding(text_config) or refused
    if reason is None and getattr(config, "position_embedding_type", None) == "rotary":
        reason = "keeps RoPE in a custom module, and its config does not hold the base."
    if reason is None:
        found = find_encoding(model_on_meta(config) if model is None else model, text_config)
        if found is not None:
            return found
        reason = (
            "has no position encoding that ctxext supports: no rope_parameters in its config, no table that grows "
            "with its limit, no ALiBi, no T5 buckets and no relative positions."
        )
    raise ValueError(f"{name} {reason}")


def check_on_paper(config: Any, plan: Plan, model: nn.Module | None = None) -> None:
    """Raise ValueError unless a model of `config` supports in-attention RoPE, if `plan` needs it. Needs no weights."""
    if plan.in_attention:
        for patch in plan.patches:
            patch.check(model_on_meta(config) if model is None else model)

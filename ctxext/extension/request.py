"""The one way to plan an extension, whatever position encoding a model has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ctxext import __version__
from ctxext.core.encoding import Encoding
from ctxext.core.plan import ENCODINGS, Plan, chosen_method, factor_and_target
from ctxext.extension.method_file import check_made_for, opened
from ctxext.extension.rope import plan_rope
from ctxext.methods import ContextMethod, method_class
from ctxext.models.config_fields import check_config
from ctxext.models.context import check_trained_length, has_rope, no_encoding
from ctxext.models.families import family_of
from ctxext.models.metadata import Existing, Lengths, by_own_names, live_mark
from ctxext.models.text_config import text_config_of
from ctxext.patches import alibi, position_table, relative_bias, sinusoidal
from ctxext.utils.values import check_rows, one_line

# In the order in which they are looked for; a model with more than one is extended where its limit is.
FINDERS = (alibi.find, sinusoidal.find, position_table.find, relative_bias.find)


@dataclass(frozen=True, kw_only=True)
class SitePlan(Plan):
    """The plan of an extension of another encoding than RoPE, for the model that it was found on."""

    method: ContextMethod
    site: Encoding

    @property
    def encoding(self) -> str:
        return self.site.name

    @property
    def start_source(self) -> str:
        return self.site.source

    @property
    def why_not_portable(self) -> str | None:
        return self.site.live_only

    @property
    def changes_weights(self) -> bool:
        return self.site.changes_weights


def find_encoding(model: nn.Module, text_config: Any) -> Encoding | None:
    """What a live model (or one on meta) without RoPE keeps its positions in; None where nothing is found."""
    return next((found for find in FINDERS if (found := find(model, text_config)) is not None), None)


def class_of(config: Any) -> Any:
    """The class of the model that a config is for: its own architecture where it names one of transformers'."""
    import transformers

    names = [name for name in getattr(config, "architectures", None) or () if hasattr(transformers, name)]
    if names:
        return getattr(transformers, names[0])
    autos = ("", "ForCausalLM", "ForSeq2SeqLM", "ForMaskedLM", "ForSpeechSeq2Seq")
    mappings = [getattr(transformers, f"AutoModel{kind}")._model_mapping for kind in autos]
    found = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if found is None:
        raise ValueError(f"no model of transformers is built from a {type(config).__name__} alone")
    return found[0] if isinstance(found, tuple) else found


def model_on_meta(config: Any) -> nn.Module:
    """The model that a config is for, without weights.

    Raises:
        ValueError: transformers builds none from it.
    """
    text_config = text_config_of(config)
    try:
        with torch.device("meta"):
            return class_of(config)(config)  # type: ignore[no-any-return]
    except Exception as error:  # its code raises many kinds
        raise ValueError(
            f"{type(text_config).__name__} (model_type {text_config.model_type!r}): no model could be built from this "
            f"config ({type(error).__name__}: {one_line(error)}). Correct it, or load the model and pass that."
        ) from error


def plan_extension(
    config: Any,
    /,
    factor: float | None = None,
    method: str | ContextMethod | None = None,
    *,
    model: nn.Module | None = None,
    target_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    existing: Existing = "refuse",
    length: int | None = None,
    rotated_copy: bool = False,
    **options: Any,
) -> Plan:
    """Work out an extension. Other arguments and errors are those of `ctxext.extend_context`.

    Args:
        model: the live model of `config`; without one, encodings other than RoPE are looked for in a model on meta.
    """
    how: dict[str, Any] = {
        "target_length": target_length,
        "original_max_position_embeddings": original_max_position_embeddings,
        "existing": existing,
    }
    check_config(config)
    check_trained_length(original_max_position_embeddings)
    text_config = text_config_of(config)
    name, method = method, opened(method)
    if has_rope(text_config):
        plan = plan_rope(config, factor, method, length=length, rotated_copy=rotated_copy, **how, **options)
        check_made_for(name, plan.original_length or plan.start)
        return plan
    site = encoding_of(config, model)
    if length is not None or rotated_copy:
        word = "rotated_copy" if rotated_copy else f"length={length}"
        raise ValueError(f"{word} is for rotary position embeddings, but this model has {ENCODINGS[site.name]}.")
    extended = _plan_site(config, site, factor, method, **how, **options)
    check_made_for(name, extended.original_length or extended.start)
    return extended


def encoding_of(config: Any, model: nn.Module | None = None) -> Encoding:
    """What the model of a config without RoPE keeps its positions in.

    Raises:
        ValueError: it has no position encoding that could run out, or none that is known here.
    """
    check_config(config)
    text_config = text_config_of(config)
    refused = family_of(config).refuse
    named = text_config if refused is None else config
    name = f"{type(named).__name__} (model_type {named.model_type!r})"
    reason = no_encoding(text_config) or refused
    if reason is None and getattr(config, "position_embedding_type", None) == "rotary":
        reason = "keeps RoPE in a module of its own, whose base no config says. It was left as it was."
    if reason is None:
        found = find_encoding(model_on_meta(config) if model is None else model, text_config)
        if found is not None:
            return found
        reason = (
            "has no position encoding that ctxext knows: no rope_parameters in its config, no table that grows with "
            "its limit, no ALiBi, no T5 buckets and no relative positions. It was left as it was."
        )
    raise ValueError(f"{name} {reason}")


def _plan_site(
    config: Any,
    site: Encoding,
    /,
    factor: float | None,
    method: str | ContextMethod | None,
    *,
    target_length: int | None,
    original_max_position_embeddings: int | None,
    existing: Existing,
    **options: Any,
) -> SitePlan:
    text_config = text_config_of(config)
    mark = live_mark(text_config)
    if mark is not None:  # Where nothing ends, the config may not say how far it was extended.
        site = replace(site, trained_length=mark["target"], source="reached when ctxext extended it")
    elif original_max_position_embeddings is not None and site.limit is None:
        site = replace(
            site, trained_length=original_max_position_embeddings,
            source="as you passed it",
        )  # fmt: skip
    elif original_max_position_embeddings not in (None, site.trained_length):
        raise ValueError(
            f"original_max_position_embeddings={original_max_position_embeddings} has no meaning here: "
            f"{ENCODINGS[site.name]} is as long as it was trained, {site.trained_length} tokens ({site.source}). "
            "Leave it out."
        )
    if existing not in ("refuse", "compose") or (existing == "compose" and mark is None):
        raise ValueError(
            f"existing={existing!r} has no meaning here: this model has {ENCODINGS[site.name]}, "
            + ("which only existing='compose' can extend once more." if mark else "not extended yet. Leave it out.")
        )
    if mark is not None and "sinusoidal" in (site.name, method_class(mark["method"]["name"]).encoding):
        raise ValueError(
            f"the table of this model was extended already by ctxext ({mark['method']['name']}, "
            f"{mark['original']['length']} → {site.trained_length} tokens), and sines are not extended twice. Load the "
            "original, or call restore_context(model)."
        )
    if existing == "refuse" and mark is not None:
        raise ValueError(
            f"this model was extended already by ctxext ({mark['method']['name']}, {mark['original']['length']} → "
            f"{site.trained_length} tokens). Say existing='compose' to extend it once more (factor counts from "
            f"{site.trained_length}), or load the original."
        )
    method = site.default_method if method is None else method
    factor, target = factor_and_target(factor, target_length, method, site.trained_length)
    if target <= site.trained_length:
        raise ValueError(
            f"this model already covers {target} tokens: from {site.trained_length} ({site.source}) that is no "
            "extension. Ask for more, or use it as it is."
        )
    if site.limit is not None:
        check_rows(target)
    chosen = chosen_method(method, factor, site.name, options)
    site.check(chosen, target)
    updates = by_own_names(text_config, site.updates(chosen, target))
    original = original_length(config, site)
    lengths = Lengths(original=original, trained=original, start=site.trained_length, target=target, factor=factor)
    updates["ctxext"] = {
        "version": __version__,
        "method": chosen.to_dict(),
        "existing": existing,
        **lengths.to_mark(),
        "fields": dict(updates),
    }
    return SitePlan(
        text_config=text_config,
        existing=existing,
        method=chosen,
        lengths=lengths,
        updates=updates,
        notes=site.notes(chosen),
        site=site,
    )


def original_length(config: Any, site: Encoding) -> int:
    """The length in tokens at which a model without RoPE was trained, before ctxext extended it."""
    mark = live_mark(text_config_of(config))
    return int(mark["original"]["length"]) if mark else site.trained_length

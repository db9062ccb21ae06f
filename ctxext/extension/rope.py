"""Plan an extension of rotary position embeddings: from a config to its extended config."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from ctxext import __version__
from ctxext.core.encoding import Encoding
from ctxext.core.patch import Patch
from ctxext.core.plan import DEFAULT_METHODS, Plan, Request, chosen_method, factor_and_target
from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import (
    ContextMethod,
    PositionRemapping,
    RopeMethod,
    RopeScaling,
    as_longrope,
    method_class,
    scaled_rope_parameters,
)
from ctxext.methods.change import ROUNDING, score_change
from ctxext.models.context import ContextFacts, read_context
from ctxext.models.families import family_of, is_encoder
from ctxext.models.metadata import Existing, Lengths, by_own_names
from ctxext.models.rope_tables import ZERO_FREQUENCY, RopeTable, head_dim, length_limit
from ctxext.patches.rotary import ReplaceRotary
from ctxext.patches.sin_cos import GrowSinCos
from ctxext.patches.softmax_scale import ScaleSoftmax
from ctxext.utils.values import check_rows, is_count, shown

# Keys of `rope_parameters` that describe a scaling. All others (partial_rotary_factor, mrope_section, ...) belong to
# the family and are kept.
SCALING_KEYS = frozenset({
    "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "attn_factor",
    "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "short_factor", "long_factor",
    "short_mscale", "long_mscale", "low_freq_factor", "high_freq_factor",
})  # fmt: skip
# YaRN's own largest factor, after training at it (arXiv 2309.00071, section 4).
FURTHEST = 32


@dataclass(frozen=True, kw_only=True)
class RopePlan(Plan):
    """The plan of an extension of rotary position embeddings.

    Attributes:
        ropes: the RoPE that the method starts from, by label.
        tables: the extended frequencies and attention factors, by label; for a dynamic method, those at its target
            length.
    """

    method: RopeMethod | None
    facts: ContextFacts
    ropes: dict[str, RopeGeometry]
    tables: dict[str, RopeGeometry]

    @property
    def rope(self) -> RopeGeometry:
        """Of the first table, of the layers with the largest window."""
        return self.ropes[self.facts.tables[0].label]

    @property
    def extended(self) -> RopeGeometry:
        """The frequencies of the first table."""
        return self.tables[self.facts.tables[0].label]

    @property
    def figures(self) -> list[tuple[str, str]]:
        now, before, inner = self.extended, self.rope, self.untempered
        times = None if self.method is None else self.method.query_scaling(before, torch.tensor(self.target_length - 1))
        own = [] if times is None else [("query scaling", f"queries × {float(times):.4g} at the last token")]
        own += super().figures
        at = f" at {self.target_length} tokens" if getattr(inner, "is_dynamic", False) else ""
        frequencies = f"{now.inv_freq[0]:.4g} … {now.inv_freq[-1]:.4g} rad/token{at}"
        if isinstance(inner, PositionRemapping):
            return [("inverse freq.", f"{frequencies}, unchanged"), *own]
        frequencies += f" (before {before.inv_freq[0]:.4g} … {before.inv_freq[-1]:.4g})"
        factor = f"{now.attention_factor:.6g}{at}"
        return [("inverse freq.", frequencies), ("attention factor", factor), *own]

    @property
    def options(self) -> dict[str, Any]:
        """As in `Plan`, and those whose defaults depend on the model."""
        inner = self.untempered
        own = {} if inner is None or inner is self.method else inner.chosen
        return {**super().options, **own, **(inner.sizes(self.rope) if isinstance(inner, PositionRemapping) else {})}

    @property
    def untempered(self) -> RopeMethod | None:
        """The method without its temperature."""
        return None if self.method is None else self.method.untempered

    @property
    def saved_as(self) -> str:
        if not self.is_portable:
            return super().saved_as
        parameters = self.updates["rope_parameters"]
        return f"rope_type {parameters.get(self.facts.tables[0].label, parameters).get('rope_type')!r}"


class RopeEncoding(Encoding):
    """Rotary position embeddings, as described by the config."""

    name: ClassVar[str] = "rope"

    def plan(self, config: Any, request: Request) -> RopePlan:
        existing = request.existing
        if existing not in get_args(Existing):
            raise ValueError(f"existing must be one of {', '.join(get_args(Existing))}; got {existing!r}.")
        facts = read_context(config, request.original_max_position_embeddings)
        if existing == "refuse" and facts.is_scaled:
            raise ValueError(_refuse_existing(facts))
        _check_existing(facts, existing)
        from_plain = existing == "replace" or not facts.is_scaled
        ropes = {t.label: facts.original_rope_of(t) if from_plain else facts.rope_of(t) for t in facts.tables}
        rope = ropes[facts.tables[0].label]
        asked = DEFAULT_METHODS[self.name] if request.method is None else request.method
        lengths = _lengths(facts, request, asked, rope.original_max_position_embeddings)
        seen_beyond = facts.seen_beyond(lengths.start)
        if not seen_beyond:
            limited = hasattr(facts.text_config, "max_position_embeddings")
            raise ValueError(
                f"every layer with RoPE has a sliding window of {facts.tables[0].window} tokens, within the trained "
                f"{lengths.start}, so no distance is ever new and RoPE needs no change: just "
                + (f"raise max_position_embeddings to {lengths.target}." if limited else "use the model unchanged.")
            )

        method, why_not_portable = None, None
        frozen: tuple[str, ...] = ()
        tables, softmax_factor = ropes, facts.softmax_factor
        if existing == "keep":
            if request.method is not None or request.options or request.length is not None:
                raise ValueError(
                    "existing='keep' keeps the current frequencies, so a method has no effect. Drop method= and "
                    "its options, or use existing='compose'."
                )
            parameters = _with_factors(facts)
        else:
            chosen = chosen_method(asked, lengths.factor, self.name, request.options)
            method = _checked_method(chosen, facts, request, rope, lengths)
            if request.length is not None:  # frozen there
                if (request.factor or request.target_length) and request.length < lengths.target:
                    now, then = f"{method.factor:g}", f"{lengths.factor:g}"
                    frozen = (f"frozen at {request.length:,} tokens: the factor is {now}, not {then}.",)
                lengths = replace(lengths, target=request.length, factor=method.factor)
            tables = _extended(method, ropes, seen_beyond, facts, lengths.target)
            if method.in_attention and score_change(method, rope, lengths.target) <= ROUNDING:
                raise ValueError(
                    f"{method!r} changes nothing within the target of {lengths.target} tokens. Pass a larger factor, "
                    "or other options."
                )
            softmax_factor = 1.0 if from_plain else softmax_factor
            if isinstance(method, RopeScaling) and not method.in_attention:
                why_not_portable = _why_not_portable(method, rope, facts)
                if family_of(facts.text_config).softmax_mscale:
                    softmax_factor *= float(method.attention_scaling(rope))
            else:
                why_not_portable = "it rotates inside attention"
            parameters = facts.whole_parameters
            if why_not_portable is None:
                new = {t.label: _portable(method, ropes[t.label], facts, t, softmax_factor) for t in seen_beyond}
                parameters = new.get("", {**parameters, **new})  # nested if the old ones were
        plan = RopePlan(
            encoding=self.name,
            text_config=facts.text_config,
            facts=facts,
            existing=existing,
            method=method,
            lengths=lengths,
            # With existing="replace", not the length of the scaled model.
            trained_source=facts.trained_length_source if lengths.trained == facts.trained_length else "before scaling",
            ropes=ropes,
            tables=tables,
            updates={},
            why_not_portable=why_not_portable,
        )
        return replace(
            plan,
            updates=by_own_names(facts.text_config, _updates(plan, parameters)),
            patches=_patches(plan, softmax_factor),
            notes=(*frozen, *_notes(plan, seen_beyond)),
        )


def _lengths(facts: ContextFacts, request: Request, method: str | ContextMethod, start: int) -> Lengths:
    """The lengths of a plan that starts from frequencies with the maximum length `start`."""
    source = facts.trained_length_source
    if request.existing == "keep":  # a window shorter than the scaling's maximum can be widened to it
        start = min(start, length_limit(facts.text_config))
    if start > facts.trained_length:
        source = "the maximum of its scaling"
    factor, target = factor_and_target(request.factor, request.target_length, method, start)
    kind = method_class(method, "rope") if isinstance(method, str) else type(method)
    if target < start or (target == start and not kind.changes_trained):
        raise ValueError(
            f"this model already covers {target} tokens: its context is {start} ({source}). Pass a larger "
            "factor= or target_length=, or use the model unextended."
        )
    if family_of(facts.text_config).sin_cos_tables:
        check_rows(target)
    trained = start if request.existing == "replace" else facts.trained_length
    return Lengths(original=facts.original_length, trained=trained, start=start, target=target, factor=factor)


def _checked_method(
    method: ContextMethod, facts: ContextFacts, request: Request, rope: RopeGeometry, lengths: Lengths
) -> RopeMethod:
    """The method, frozen at `request.length` if given; raises ValueError if this family cannot have it."""
    assert isinstance(method, RopeMethod)
    if request.length is not None:
        if not is_count(request.length, 1, lengths.target):
            raise ValueError(
                f"length must be a number of tokens (an int) up to the target of {lengths.target}, got "
                f"{shown(request.length)}. For more, pass a larger factor."
            )
        method = method.at_length(rope, request.length)
        if request.length <= lengths.start:
            raise ValueError(
                f"length={request.length} extends nothing: this model already covers {lengths.start} tokens. Pass a "
                f"length from {lengths.start + 1} to {lengths.target}."
            )
    if method.in_attention:
        _refuse_in_attention(facts, request.existing, method, rope)
    raised = getattr(method, "rope_theta", None)
    if facts.tables[0].n_zero and raised is not None:
        raise ValueError(
            f"rope_theta={raised:g} cannot be set in this family, whose base has another meaning: only "
            f"{facts.rotary_dim} of {facts.tables[0].head_dim} dimensions rotate (proportional RoPE). Leave it out to "
            "compute one from the factor."
        )
    return method


def _extended(
    method: RopeMethod,
    ropes: dict[str, RopeGeometry],
    seen_beyond: tuple[RopeTable, ...],
    facts: ContextFacts,
    target_length: int,
) -> dict[str, RopeGeometry]:
    """Every table under `method`. Tables of short sliding windows are kept, as are those of a method that remaps
    positions."""
    whole, method = method, method.untempered
    if isinstance(method, PositionRemapping):
        for table in seen_beyond:
            method.branches(ropes[table.label])
            method.check_reach(ropes[table.label], target_length)
        return ropes
    assert isinstance(method, RopeScaling)
    extended = {table.label: facts.rope_of(table) for table in facts.tables}
    in_softmax = family_of(facts.text_config).softmax_mscale
    unchanged = True
    for table in seen_beyond:
        rope = ropes[table.label]
        inv_freq, attention_factor = method.scaled(rope)
        unchanged &= float(attention_factor) == rope.attention_factor and torch.equal(inv_freq, rope.inv_freq)
        extended[table.label] = replace(
            rope, inv_freq=inv_freq, attention_factor=rope.attention_factor if in_softmax else float(attention_factor)
        )
    if unchanged and whole is method:
        raise ValueError(
            f"{method!r} changes nothing: every frequency and the attention factor stay the same. "
            "Pass other options, or a larger factor or length."
        )
    return extended


def _patches(plan: RopePlan, softmax_factor: float) -> tuple[Patch, ...]:
    facts, method, target = plan.facts, plan.method, plan.target_length
    if method is None:
        return ()
    if method.in_attention:
        from ctxext.patches.in_attention import RotateInAttention  # it imports transformers

        ropes = {table.label: plan.ropes[table.label] for table in facts.seen_beyond(plan.start)}
        return (RotateInAttention(facts, method, ropes, target, plan.summary),)
    if family_of(facts.text_config).sin_cos_tables:
        return (GrowSinCos(facts.rope, plan.extended, target),)
    replaced = ReplaceRotary(facts, plan.tables, plan.summary, writes_tables=not plan.is_portable)
    if softmax_factor == facts.softmax_factor:
        return (replaced,)
    return replaced, ScaleSoftmax((softmax_factor / facts.softmax_factor) ** 2)


# ------------------------------------------------------------------------------------------ refusals


def _refuse_in_attention(facts: ContextFacts, existing: Existing, method: RopeMethod, rope: RopeGeometry) -> None:
    config = facts.text_config
    family = family_of(config)
    name = f"{type(config).__name__} (model_type {config.model_type!r})"
    reasons = {
        "is an encoder-decoder model, which in-attention RoPE does not support": getattr(
            config, "is_encoder_decoder", False
        ),
        "is an encoder, and in-attention RoPE needs a causal language model": is_encoder(config),
        "has a sin/cos table in each layer (embed_positions) and no rotary embedding to replace": family.sin_cos_tables,
        "scales its softmax by mscale_all_dim, which in-attention RoPE does not replace": (
            existing == "replace" and facts.softmax_factor != 1.0
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{name} {reason}. Use a method that changes frequencies, such as 'yarn'.")
    inner = method.untempered
    if family.softmax_mscale and isinstance(inner, RopeScaling) and float(inner.attention_scaling(rope)) != 1.0:
        raise ValueError(
            f"{name} has latent attention, where an attention factor belongs to the whole softmax, but in-attention "
            "RoPE multiplies cos and sin by it. Pass attention_factor=1, use dynamic_ntk, or use a method that changes "
            "frequencies, such as 'yarn'."
        )
    if existing == "compose" and facts.scaling is not None and facts.scaling.in_attention:
        raise ValueError(
            f"{name} has native scaling ({facts.scaling.name}) that is length-dependent and cannot be composed. Use "
            "existing='replace'."
        )


def _check_existing(facts: ContextFacts, existing: Existing) -> None:
    """Raise ValueError if the existing scaling cannot be kept, composed with or replaced."""
    scaling, mark = facts.scaling, facts.mark
    if existing == "replace" and facts.original_length is None:
        raise ValueError(
            f"existing='replace' starts from the trained length before any scaling, which is unknown for this "
            f"model ({facts.summary}). Pass original_max_position_embeddings=, or use existing='compose'."
        )
    if existing in ("refuse", "replace"):
        return
    if not facts.is_scaled:
        raise ValueError(
            f"existing={existing!r} needs a model whose RoPE is already scaled, but this one has plain RoPE "
            f"(theta {facts.original_theta:g}). Leave existing= out."
        )
    if scaling is not None and _is_of_attention(facts):
        raise ValueError(
            f"this config is from a live model that {scaling.name} extends inside attention, and "
            f"existing={existing!r} would discard that extension. Call restore_context(model), or use "
            "existing='replace'."
        )
    if isinstance(scaling, RopeScaling) and scaling.of_the_call:
        raise ValueError(
            "transformers' dynamic scaling is length-dependent and counts from max_position_embeddings, so "
            f"existing={existing!r} would start from frequencies that no sequence uses. Use existing='replace'."
        )
    lists = [facts.rope_parameters.get(name) for name in ("short_factor", "long_factor")]
    if existing == "compose" and family_of(facts.text_config).mscale_keys and lists[0] != lists[1]:
        raise ValueError(
            f"transformers never uses its long_factor in this family ({facts.text_config.model_type!r}), so it "
            "cannot be composed. Use existing='replace'."
        )
    if mark is not None and mark.get("live_only"):
        raise ValueError(
            f"this config belongs to a live model whose tables were changed in a way it cannot express, and existing="
            f"{existing!r} would discard that. Call restore_context(model), or use existing='replace'."
        )


def _is_of_attention(facts: ContextFacts) -> bool:
    """Whether ctxext extended the model inside attention, which its config cannot express."""
    if facts.mark is None or facts.scaling is None or not facts.scaling.in_attention:
        return False
    # The mark of a kept scaling leaves the config's own, which starts from `keep` and `compose` as without a mark.
    return bool(facts.mark["existing"] != "keep")


def _refuse_existing(facts: ContextFacts) -> str:
    by = "by ctxext " if facts.mark is not None else ""
    known, unknown = facts.original_length, "frequencies (with original_max_position_embeddings=)"
    original = f"{known:,} tokens" if known else unknown
    does: dict[Existing, str] = {
        "compose": f"scale further, from {facts.reach:,} tokens",
        "keep": f"only raise the maximum length, from {facts.reach:,} tokens",
        "replace": f"start again from the original {original}",
    }
    offers = []
    for existing, words in does.items():
        with suppress(ValueError):
            if existing != "replace":
                _check_existing(facts, existing)
            offers.append(f"existing={existing!r} to {words}")
    if _is_of_attention(facts):
        return (
            f"this config is of a model that is already scaled by ctxext, inside attention ({facts.summary}). A model "
            "built from the config alone is not extended: load the original config, or the extended model with "
            f"ctxext.load. existing='replace' starts again from the original {original}."
        )
    return (
        f"this model's RoPE is already scaled {by}({facts.summary}): it needs no extension up to that length. To "
        f"change it, pass {', or '.join(offers)}."
    )


# ------------------------------------------------------------------------------------- the new config


def _why_not_portable(method: RopeScaling, rope: RopeGeometry, facts: ContextFacts) -> str | None:
    """Why a config of this family cannot express a static `method`; None if it can."""
    family, config = family_of(facts.text_config), type(facts.text_config).__name__
    if family.sin_cos_tables:
        return f"{config} has no RoPE parameters"
    form = scaled_rope_parameters(method, rope)["rope_type"]
    if family.rope_types is not None and not {form, "longrope"} & family.rope_types:
        return f"{config} accepts only rope_type {', '.join(sorted(family.rope_types))}"
    return None


def _with_factors(facts: ContextFacts) -> dict[str, Any]:
    """The config's parameters, with the factor that transformers derives from the lengths if there is none."""
    whole = copy.deepcopy(facts.whole_parameters)
    for table in facts.tables:
        its = whole[table.label] if table.label else whole
        if its.get("rope_type") in ("longrope", "yarn") and its.get("factor") is None and table.scaling is not None:
            its["factor"] = table.scaling.factor
    return whole


def _portable(
    method: ContextMethod, rope: RopeGeometry, facts: ContextFacts, table: RopeTable, softmax_factor: float
) -> dict[str, Any]:
    """One table's new `rope_parameters`: the scaling in transformers' keys, and the family's own keys."""
    assert isinstance(method, RopeScaling)
    family = family_of(facts.text_config)
    parameters = scaled_rope_parameters(method, rope)
    kept = {k: v for k, v in table.parameters.items() if k not in SCALING_KEYS}
    # Ministral scales its queries from this length, so it must not become the method's.
    counted = table.parameters.get("original_max_position_embeddings") if "llama_4_scaling_beta" in kept else None
    allowed = family.rope_types is None or parameters["rope_type"] in family.rope_types
    if table.n_zero and parameters["rope_type"] in ("default", "linear"):
        parameters["rope_type"] = "proportional"
    elif (
        not allowed
        or table.n_zero
        or (table.label and not parameters.get("truncate", True))
        or (counted and parameters.get("original_max_position_embeddings", counted) != counted)
    ):
        parameters = as_longrope(method, rope)
    if parameters["rope_type"] == "longrope" and not rope.is_plain and facts.original_length is not None:
        # λ is relative to the unscaled frequencies, so the lengths must count from there as well: a program that drops
        # our metadata would otherwise take the composed length for the original one.
        reach = method.factor * rope.original_max_position_embeddings
        parameters["original_max_position_embeddings"] = facts.original_length
        parameters["factor"] = reach / facts.original_length
    if table.n_zero:
        parameters["rope_theta"] **= 1 / table.base_power
        kept["partial_rotary_factor"] = table.base_power
        if parameters["rope_type"] == "longrope":
            del kept["partial_rotary_factor"]
            for name in ("short_factor", "long_factor"):
                parameters[name] = parameters[name] + [ZERO_FREQUENCY] * table.n_zero
    if softmax_factor != 1.0:
        parameters |= _in_the_softmax(parameters, softmax_factor, rope)
    if counted is not None:
        parameters["original_max_position_embeddings"] = counted
    if family.mscale_keys and parameters["rope_type"] != "default":
        parameters.setdefault("original_max_position_embeddings", rope.original_max_position_embeddings)
        parameters |= dict.fromkeys(family.mscale_keys, rope.attention_factor * float(method.attention_scaling(rope)))
    return {**kept, **parameters}


def _in_the_softmax(parameters: dict[str, Any], softmax_factor: float, rope: RopeGeometry) -> dict[str, Any]:
    """The keys that apply an attention factor to the softmax of latent attention, and not to cos and sin as well."""
    mscale = (softmax_factor - 1) / (0.1 * math.log(parameters["factor"]))
    if parameters["rope_type"] == "yarn" and "attention_factor" not in parameters:
        # As in DeepSeek's checkpoints: the quotient of the two multiplies cos and sin.
        return {"mscale": 1.0, "mscale_all_dim": 1.0}
    return {"attention_factor": rope.attention_factor, "mscale_all_dim": mscale}


def _updates(plan: RopePlan, parameters: dict[str, Any]) -> dict[str, Any]:
    """The new fields of the text config; `parameters` are its new `rope_parameters`."""
    facts, config, lengths = plan.facts, plan.text_config, plan.lengths
    updates: dict[str, Any] = {}
    if hasattr(config, "rope_parameters"):
        updates["rope_parameters"] = parameters
    if hasattr(config, "max_position_embeddings"):
        updates["max_position_embeddings"] = lengths.target
    if getattr(config, "is_heterogeneous", False) and any(
        isinstance(value, dict) and value.get("rope_type") == "longrope" for value in parameters.values()
    ):
        # transformers validates longrope against config.head_dim, and raises without this if layers differ in it.
        updates["allow_global_per_layer_attribute_access"] = True
    if "original_max_position_embeddings" in config.__dict__ and plan.method is not None:
        # Phi-3 and Phi-4 keep it beside rope_parameters, where it takes precedence.
        updates["original_max_position_embeddings"] = lengths.original or lengths.start
    if config.__dict__.get("head_dim", 0) is None:  # not getattr, which raises if layers differ in it
        # transformers' yarn and longrope multiply with it (Mixtral's configs omit it).
        updates["head_dim"] = head_dim(config)
    described = plan.method or facts.scaling
    theta = facts.original_thetas if facts.tables[0].label else facts.original_theta
    updates["ctxext"] = {
        "version": __version__,
        "method": None if described is None else described.to_dict(),
        # Without existing scaling this is the same as replacing it.
        "existing": "replace" if plan.existing == "refuse" else plan.existing,
        **lengths.to_mark(),
        "original": {"length": lengths.original, "rope_theta": theta},
        "fields": {name: value for name, value in updates.items() if name == "rope_parameters"},
        **({} if plan.is_portable or plan.in_attention else {"live_only": True}),
    }
    return updates


def stopped(extended: Tensor, trained: Tensor) -> Tensor:
    """Which pairs an extension keeps from rotating, by their frequencies or turns."""
    return extended < 1e-3 * trained


def untrained(n_stopped: int) -> str:
    """What to do where pairs no longer rotate."""
    pairs = "1 pair no longer rotates" if n_stopped == 1 else f"{n_stopped} pairs no longer rotate"
    return f"{pairs}, which the model must be trained for, unless ctxext compare shows that it works without"


def _notes(plan: RopePlan, seen_beyond: tuple[RopeTable, ...]) -> tuple[str, ...]:
    notes = []
    facts, config, table = plan.facts, plan.text_config, plan.facts.tables[0]
    attention_factor = plan.extended.attention_factor
    if plan.method is not None and attention_factor != 1.0:
        if family_of(config).norm_after_rope and getattr(config, "use_qk_norm", True):
            notes.append(
                f"the attention factor {attention_factor:.4g} has no effect: this family normalises queries and "
                "keys after the rotation."
            )
        elif facts.rotary_dim < table.head_dim:
            notes.append(
                f"the attention factor {attention_factor:.4g} applies to the {facts.rotary_dim} rotary of "
                f"{table.head_dim} dimensions, as in transformers; the paper's temperature would apply to all."
            )
    n_stopped = max(int(stopped(plan.tables[k].inv_freq, rope.inv_freq).sum()) for k, rope in plan.ropes.items())
    if n_stopped:
        notes.append(f"{untrained(n_stopped)}.")
    if plan.factor > FURTHEST and not isinstance(plan.untempered, PositionRemapping):
        notes.append(f"a factor above {FURTHEST} needs training at the target length before use: ctxext finetune.")
    left = [table.label for table in facts.tables if table not in seen_beyond]
    if left:
        notes.append(f"{', '.join(left)}: unchanged, because their window is within the trained length.")
    layers = getattr(config, "layer_types", None) or []
    both = table.window is None and "sliding_attention" in layers and "full_attention" in layers
    if not table.label and both and not plan.in_attention:
        notes.append("sliding and full layers share one rotary embedding in this family, so both are extended.")
    if facts.checkpoint is not None and facts.checkpoint.recipe:
        recipe = facts.checkpoint.recipe
        notes.append(f"the vendor's own recipe for {facts.checkpoint.name}: {recipe} ({facts.checkpoint.source}).")
    return tuple(notes)

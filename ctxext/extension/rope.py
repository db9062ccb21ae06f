"""Plan an extension of rotary position embeddings: from a config to its extended config."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import torch

from ctxext.core.encoding import Encoding
from ctxext.core.patch import Patch
from ctxext.core.plan import Plan, Request, chosen_method, factor_and_target
from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import (
    ContextMethod,
    PositionRemapping,
    RopeMethod,
    RopeScaling,
    as_longrope,
    scaled_rope_parameters,
)
from ctxext.models.context import ContextFacts, read_context
from ctxext.models.families import family_of
from ctxext.models.metadata import Existing, Lengths, by_own_names, summary_of
from ctxext.models.rope_tables import ZERO_FREQUENCY, RopeTable, head_dim, length_limit
from ctxext.patches.rotary import ReplaceRotary
from ctxext.patches.sin_cos import GrowSinCos
from ctxext.patches.softmax_scale import ScaleSoftmax
from ctxext.utils.values import check_rows, is_count

# Keys of `rope_parameters` that describe a scaling. All others (partial_rotary_factor, mrope_section, ...) belong to
# the family and are kept.
SCALING_KEYS = frozenset({
    "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "attn_factor",
    "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "short_factor", "long_factor",
    "short_mscale", "long_mscale", "low_freq_factor", "high_freq_factor",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopePlan(Plan):
    """The plan of an extension of rotary position embeddings.

    Attributes:
        rope: the RoPE that the method starts from.
        tables: the extended frequencies and attention factors, by label; for a dynamic method, those at its target
            length.
    """

    method: RopeMethod | None
    facts: ContextFacts
    rope: RopeGeometry
    tables: dict[str, RopeGeometry]

    @property
    def extended(self) -> RopeGeometry:
        """The frequencies of the first table."""
        return self.tables[self.facts.tables[0].label]

    @property
    def figures(self) -> list[tuple[str, str]]:
        now, before = self.extended, self.rope
        return [
            (
                "inverse freq.",
                f"{now.inv_freq[0]:.4g} … {now.inv_freq[-1]:.4g} rad/token "
                f"(before {before.inv_freq[0]:.4g} … {before.inv_freq[-1]:.4g})",
            ),
            ("attention factor", f"{now.attention_factor:.6g}"),
        ]

    @property
    def saved_as(self) -> str:
        if not self.is_portable:
            return super().saved_as
        parameters = self.updates["rope_parameters"]
        return f"rope_type {parameters.get(self.facts.tables[0].label, parameters).get('rope_type')!r}"


class RopeEncoding(Encoding):
    """Rotary position embeddings, as described by the config."""

    name: ClassVar[str] = "rope"
    default_method: ClassVar[str] = "yarn"

    def plan(self, config: Any, request: Request) -> RopePlan:
        existing = request.existing
        if existing not in get_args(Existing):
            raise ValueError(f"existing must be one of {', '.join(get_args(Existing))}; got {existing!r}.")
        facts = read_context(config, request.original_max_position_embeddings)
        if existing == "refuse" and facts.is_scaled:
            raise ValueError(_refuse_existing(facts))
        _check_existing(facts, existing)
        method = self.default_method if request.method is None else request.method
        lengths = _lengths(facts, request, method)
        seen_beyond = facts.seen_beyond(lengths.start)
        if not seen_beyond:
            limited = hasattr(facts.text_config, "max_position_embeddings")
            raise ValueError(
                f"every layer with RoPE slides over a window of {facts.tables[0].window} tokens, within the trained "
                f"{lengths.start}, so no distance is ever new and RoPE needs no change: just "
                + (f"raise max_position_embeddings to {lengths.target}." if limited else "use the model as it is.")
            )
        if existing == "keep":
            result = _kept(facts, request)
        else:
            asked = chosen_method(method, lengths.factor, self.name, request.options)
            result = _scaled(facts, request, asked, lengths, seen_beyond)
        chosen = result.method
        dynamic = isinstance(chosen, RopeScaling) and chosen.in_attention and not chosen.of_the_call
        if request.rotated_copy and not dynamic:
            raise ValueError(
                "rotated_copy keeps a copy of the keys for methods whose scale follows each query, such as "
                f"dynamic_ntk; {'native scaling' if chosen is None else chosen.name} has no use for one. Leave it out."
            )
        return RopePlan(
            encoding=self.name,
            text_config=facts.text_config,
            facts=facts,
            existing=existing,
            method=chosen,
            lengths=lengths,
            start_source=facts.trained_length_source,
            rope=_start(facts, existing),
            tables=result.tables,
            updates=by_own_names(facts.text_config, _updates(facts, existing, result, lengths)),
            patches=_patches(facts, existing, result, lengths, request.rotated_copy),
            why_not_portable="it rotates inside attention" if chosen and chosen.in_attention else result.live_only,
            rotated_copy=request.rotated_copy,
            notes=_notes(facts, chosen, result.tables[facts.tables[0].label], seen_beyond),
        )


@dataclass(frozen=True)
class _Result:
    """The new frequencies and their form in the config.

    Attributes:
        method: None if they are kept.
        tables: as in `RopePlan`.
        parameters: the config's new `rope_parameters`.
        softmax_factor: the softmax scale is multiplied by its square.
        live_only: why config.json cannot express the live model; None if it can.
    """

    method: RopeMethod | None
    tables: dict[str, RopeGeometry]
    parameters: dict[str, Any]
    softmax_factor: float
    live_only: str | None = None


def _start(facts: ContextFacts, existing: Existing) -> RopeGeometry:
    """The frequencies of the first table that the method starts from, with their maximum length."""
    return facts.original_rope if existing == "replace" or not facts.is_scaled else facts.rope


def _lengths(facts: ContextFacts, request: Request, method: str | ContextMethod) -> Lengths:
    start, source = _start(facts, request.existing).original_max_position_embeddings, facts.trained_length_source
    if request.existing == "keep":  # if a scaling reaches further than the window, the window can be widened
        start = min(start, length_limit(facts.text_config))
    if start > facts.trained_length:
        source = "which its scaling reaches"
    factor, target = factor_and_target(request.factor, request.target_length, method, start)
    if target <= start:
        raise ValueError(
            f"this model already covers {target} tokens: its context is {start} ({source}). Ask for a longer "
            "target, or use it unextended."
        )
    if family_of(facts.text_config).sin_cos_tables:
        check_rows(target)
    trained = start if request.existing == "replace" else facts.trained_length
    return Lengths(original=facts.original_length, trained=trained, start=start, target=target, factor=factor)


def _kept(facts: ContextFacts, request: Request) -> _Result:
    if request.method is not None or request.options or request.length is not None:
        raise ValueError(
            "existing='keep' leaves the frequencies as they are, so a method has no effect. Drop method= and its "
            "options, or use existing='compose'."
        )
    tables = {table.label: facts.rope_of(table) for table in facts.tables}
    return _Result(None, tables, _with_factors(facts), facts.softmax_factor)


def _scaled(
    facts: ContextFacts,
    request: Request,
    method: ContextMethod,
    lengths: Lengths,
    seen_beyond: tuple[RopeTable, ...],
) -> _Result:
    existing, rope = request.existing, _start(facts, request.existing)
    assert isinstance(method, RopeMethod)
    if request.length is not None:
        if not is_count(request.length, 1, lengths.target):
            raise ValueError(
                f"length must be a number of tokens (an int) up to {lengths.target}, got {request.length!r}."
            )
        method = method.at_length(rope, request.length)
    if method.in_attention:
        _refuse_in_attention(facts, existing)
    raised = getattr(method, "rope_theta", None)
    if facts.tables[0].n_zero and raised is not None:
        raise ValueError(
            f"rope_theta={raised:g} is not what a base means in this family, where only {facts.rotary_dim} of "
            f"{facts.tables[0].head_dim} dimensions turn (proportional RoPE). Leave it out: one is computed from the "
            "factor."
        )
    from_plain = existing == "replace" or not facts.is_scaled
    ropes = {t.label: facts.original_rope_of(t) if from_plain else facts.rope_of(t) for t in facts.tables}
    softmax_factor = _softmax_factor_under(method, rope, facts, from_plain)
    tables = _extended(method, ropes, seen_beyond, facts, lengths.target)
    live_only = None if method.in_attention else _live_only(method, rope, facts)
    parameters = facts.whole_parameters
    if not method.in_attention and live_only is None:
        parameters = _portable_tables(method, ropes, seen_beyond, facts, softmax_factor)
    return _Result(method, tables, parameters, softmax_factor, live_only)


def _patches(
    facts: ContextFacts, existing: Existing, result: _Result, lengths: Lengths, rotated_copy: bool
) -> tuple[Patch, ...]:
    """The patches of the plan."""
    method, tables = result.method, result.tables
    if method is None:
        return ()
    summary = summary_of(method.name, lengths)
    if method.in_attention:
        from ctxext.patches.in_attention import RotateInAttention  # it imports transformers

        rope = _start(facts, existing)
        return (RotateInAttention(facts, method, rope, lengths.target, summary, rotated_copy),)
    if family_of(facts.text_config).sin_cos_tables:
        return (GrowSinCos(facts.rope, tables[""], lengths.target),)
    replaced = ReplaceRotary(facts, tables, summary, writes_tables=result.live_only is not None)
    if result.softmax_factor == facts.softmax_factor:
        return (replaced,)
    return replaced, ScaleSoftmax((result.softmax_factor / facts.softmax_factor) ** 2)


def _with_factors(facts: ContextFacts) -> dict[str, Any]:
    """The config's parameters, with the factor that transformers derives from the lengths if there is none."""
    whole = copy.deepcopy(facts.whole_parameters)
    for table in facts.tables:
        its = whole[table.label] if table.label else whole
        if its.get("rope_type") in ("longrope", "yarn") and its.get("factor") is None and table.scaling is not None:
            its["factor"] = table.scaling.factor
    return whole


def _extended(
    method: RopeMethod,
    ropes: dict[str, RopeGeometry],
    seen_beyond: tuple[RopeTable, ...],
    facts: ContextFacts,
    target_length: int,
) -> dict[str, RopeGeometry]:
    """Every table under `method`; tables of short sliding windows, and all tables of a method that remaps positions,
    are kept."""
    extended = {table.label: facts.rope_of(table) for table in facts.tables}
    if isinstance(method, PositionRemapping):
        (rope,) = ropes.values()
        method.branches(rope)
        method.check_reach(rope, target_length)
        return {label: rope for label in ropes}
    assert isinstance(method, RopeScaling)
    in_softmax = family_of(facts.text_config).softmax_mscale
    unchanged = True
    for label in (table.label for table in seen_beyond):
        rope = ropes[label]
        inv_freq, attention_factor = method.scaled(rope)
        unchanged &= float(attention_factor) == rope.attention_factor and torch.equal(inv_freq, rope.inv_freq)
        extended[label] = replace(
            rope, inv_freq=inv_freq, attention_factor=rope.attention_factor if in_softmax else float(attention_factor)
        )
    if unchanged:
        raise ValueError(
            f"{method!r} changes nothing: every frequency and the attention factor stay as they are. "
            "Pass a larger factor or length, or other options."
        )
    return extended


def _softmax_factor_under(method: ContextMethod, rope: RopeGeometry, facts: ContextFacts, from_plain: bool) -> float:
    """The method's attention factor on the softmax; 1 for families without one there."""
    before = 1.0 if from_plain else facts.softmax_factor
    if not isinstance(method, RopeScaling) or method.in_attention or not family_of(facts.text_config).softmax_mscale:
        return before
    return before * float(method.attention_scaling(rope))


def _refuse_in_attention(facts: ContextFacts, existing: Existing) -> None:
    name = f"{type(facts.text_config).__name__} (model_type {facts.text_config.model_type!r})"
    instead = "Use a method that changes frequencies, such as 'yarn'."
    if getattr(facts.text_config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder model, whose positions cannot be rotated in attention. {instead}"
        )
    if facts.rope_parameters.get("mrope_section"):
        raise ValueError(
            f"{name} has positions of several kinds (mrope), which cannot be rotated in attention. {instead}"
        )
    if family_of(facts.text_config).sin_cos_tables:
        raise ValueError(
            f"{name} has a table of sines and cosines in each layer, and cannot be rotated in attention. {instead}"
        )
    if facts.tables[0].label or facts.tables[0].n_zero:
        raise ValueError(f"{name} has a rotary table of its own kind for each type of layer. {instead}")
    reason = family_of(facts.text_config).refuse_in_attention
    if reason is not None:
        raise ValueError(f"{name} {reason}, so that nothing can be rotated in attention in it. {instead}")
    if existing == "replace" and facts.softmax_factor != 1.0:
        raise ValueError(
            f"{name} scales its softmax by mscale_all_dim, which in-attention RoPE would leave as it is. {instead}"
        )
    if existing == "compose" and facts.scaling is not None and facts.scaling.in_attention:
        raise ValueError(
            f"{name} has native scaling ({facts.scaling.name}) that follows the length itself, which nothing composes "
            "with. Use existing='replace'."
        )


def _check_existing(facts: ContextFacts, existing: Existing) -> None:
    """Raise ValueError if the existing scaling cannot be kept, composed with or replaced."""
    if existing in ("keep", "compose") and facts.scaling is None and facts.mark is None:
        raise ValueError(
            f"existing={existing!r} needs a model whose RoPE is scaled already, but this one has plain RoPE "
            f"(theta {facts.original_theta:g}). Leave existing= out."
        )
    if (
        existing in ("keep", "compose")
        and facts.scaling is not None
        and facts.scaling.in_attention
        and facts.mark is not None
    ):
        raise ValueError(
            f"this config belongs to, or was saved from, a live model that {facts.scaling.name} extends inside "
            f"attention, so existing={existing!r} would leave nothing of that. Call restore_context(model), or use "
            "existing='replace'."
        )
    if existing in ("keep", "compose") and isinstance(facts.scaling, RopeScaling) and facts.scaling.of_the_call:
        raise ValueError(
            "transformers' dynamic scaling is counted from max_position_embeddings and follows the length itself, so "
            f"existing={existing!r} would start from frequencies that no sequence has. Use existing='replace'."
        )
    parameters = facts.rope_parameters
    if (
        existing == "compose"
        and family_of(facts.text_config).mscale_keys
        and parameters.get("short_factor") != parameters.get("long_factor")
    ):
        raise ValueError(
            f"transformers never uses its long_factor in this family ({facts.text_config.model_type!r}), so that "
            "nothing composes with it. Use existing='replace'."
        )
    if existing in ("keep", "compose") and facts.mark is not None and facts.mark.get("live_only"):
        raise ValueError(
            f"this config belongs to a live model whose tables were changed, and does not say how, so existing="
            f"{existing!r} would leave nothing of that. Call restore_context(model), or use existing='replace'."
        )
    if existing == "replace" and facts.original_length is None:
        raise ValueError(
            f"existing='replace' starts from the trained length before any scaling, and nothing says that of this "
            f"model ({facts.summary}). Pass original_max_position_embeddings=, or use existing='compose'."
        )


def _refuse_existing(facts: ContextFacts) -> str:
    by = "by ctxext " if facts.mark is not None else ""
    original = facts.original_length or "original_max_position_embeddings=, which you have to pass"
    replacing = f"existing='replace' starts again from the original frequencies (from {original})"
    others: dict[Existing, str] = {
        "keep": f"leaves the frequencies and only widens the window (factor counts from {facts.reach})",
        "compose": f"scales on top of it (from {facts.reach})",
    }
    offers = []
    for existing, does in others.items():
        with suppress(ValueError):
            _check_existing(facts, existing)
            offers.append(f"existing={existing!r} {does}")
    return (
        f"this model's RoPE is scaled already {by}({facts.summary}). Say what to do with that: "
        f"{'; '.join([*offers, replacing])}."
    )


def _live_only(method: RopeMethod, rope: RopeGeometry, facts: ContextFacts) -> str | None:
    """Why a config of this family cannot express `method`; None if it can."""
    assert isinstance(method, RopeScaling)
    family, config = family_of(facts.text_config), type(facts.text_config).__name__
    if family.sin_cos_tables:
        return f"{config} has no parameters for RoPE"
    form = scaled_rope_parameters(method, rope)["rope_type"]
    if family.rope_types is not None and not {form, "longrope"} & family.rope_types:
        return f"{config} takes no rope_type but {', '.join(sorted(family.rope_types))}"
    return None


def _portable_tables(
    method: ContextMethod,
    ropes: dict[str, RopeGeometry],
    seen_beyond: tuple[RopeTable, ...],
    facts: ContextFacts,
    softmax_factor: float,
) -> dict[str, Any]:
    """The config's new `rope_parameters`, nested if the old ones were."""
    new = {table.label: _portable(method, ropes[table.label], facts, table, softmax_factor) for table in seen_beyond}
    return new.get("", {**facts.whole_parameters, **new})


def _portable(
    method: ContextMethod, rope: RopeGeometry, facts: ContextFacts, table: RopeTable, softmax_factor: float
) -> dict[str, Any]:
    """One table's new `rope_parameters`: the scaling in transformers' keys, and the family's own keys."""
    assert isinstance(method, RopeScaling)
    family = family_of(facts.text_config)
    parameters = scaled_rope_parameters(method, rope)
    kept = {k: v for k, v in table.parameters.items() if k not in SCALING_KEYS}
    # Ministral scales its queries from this length, which must not change with the method's.
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


def _updates(facts: ContextFacts, existing: Existing, result: _Result, lengths: Lengths) -> dict[str, Any]:
    from ctxext import __version__

    config, method, parameters = facts.text_config, result.method, result.parameters
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
    if "original_max_position_embeddings" in facts.text_config.__dict__ and method is not None:
        # Phi-3 and Phi-4 keep it beside rope_parameters, where it takes precedence.
        updates["original_max_position_embeddings"] = lengths.original or lengths.start
    if config.__dict__.get("head_dim", 0) is None:  # not getattr, which raises if layers differ in it
        # transformers' yarn and longrope multiply with it (Mixtral's configs omit it).
        updates["head_dim"] = head_dim(facts.text_config)
    described = facts.scaling if method is None else method
    theta = facts.original_thetas if facts.tables[0].label else facts.original_theta
    updates["ctxext"] = {
        "version": __version__,
        "method": None if described is None else described.to_dict(),
        # Without existing scaling this is the same as to replace it.
        "existing": "replace" if existing == "refuse" else existing,
        **lengths.to_mark(),
        "original": {"length": lengths.original, "rope_theta": theta},
        "fields": {name: value for name, value in updates.items() if name == "rope_parameters"},
        **({} if result.live_only is None else {"live_only": True}),
    }
    return updates


def _notes(
    facts: ContextFacts,
    method: RopeMethod | None,
    extended: RopeGeometry,
    seen_beyond: tuple[RopeTable, ...],
) -> tuple[str, ...]:
    notes = []
    config, table = facts.text_config, facts.tables[0]
    late = method is not None and method.in_attention
    if method is not None and extended.attention_factor != 1.0:
        if family_of(config).norm_after_rope and getattr(config, "use_qk_norm", True):
            notes.append(
                f"the attention factor {extended.attention_factor:.4g} does nothing here: this family normalises "
                "queries and keys after the rotation."
            )
        elif facts.rotary_dim < table.head_dim:
            notes.append(
                f"the attention factor {extended.attention_factor:.4g} reaches the {facts.rotary_dim} rotary of "
                f"{table.head_dim} dimensions, as transformers applies it; the paper's temperature would apply to all."
            )
    left = [table.label for table in facts.tables if table not in seen_beyond]
    if left:
        notes.append(f"{', '.join(left)}: left as they are, as their window is within the trained length.")
    layers = getattr(config, "layer_types", None) or []
    both = table.window is None and "sliding_attention" in layers and "full_attention" in layers
    if not table.label and both and not late:
        notes.append("sliding and full layers share one rotary embedding in this family, so both are extended.")
    if facts.checkpoint is not None and facts.checkpoint.recipe:
        recipe = facts.checkpoint.recipe
        notes.append(f"the vendor's own recipe for {facts.checkpoint.name}: {recipe} ({facts.checkpoint.source}).")
    return tuple(notes)

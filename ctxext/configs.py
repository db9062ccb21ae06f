"""What a config says of a model's context, and the config that it becomes. No model, no weights."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Literal, cast, get_args

import torch

from ctxext.encodings.rope import RopeGeometry
from ctxext.families import family_of
from ctxext.methods import (
    ContextMethod,
    PositionRemapping,
    RopeMethod,
    RopeScaling,
    geometry_in_use,
    longrope_parameters,
    method_from_dict,
    method_from_rope_parameters,
    scaled_rope_parameters,
)
from ctxext.plans import Existing, Plan, chosen_method, factor_and_target
from ctxext.sites.twin import text_config_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Keys of `rope_parameters` that belong to a scaling. All others (partial_rotary_factor,
# mrope_section, ...) belong to the family and stay.
SCALING_KEYS = frozenset({
    "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "attn_factor",
    "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "short_factor", "long_factor",
    "short_mscale", "long_mscale", "low_freq_factor", "high_freq_factor",
})  # fmt: skip


def parse_tokens(text: str) -> int:
    """`131072`, `128k` (times 1024) or `1m` (times 1024²) as a number of tokens.

    Raises:
        ValueError: it is none.
    """
    value = text.strip().lower().replace("_", "").replace(",", "")
    unit = {"k": 1024, "m": 1024**2}.get(value[-1:], 1)
    try:
        tokens = float(value[:-1] if unit > 1 else value) * unit
    except ValueError:
        tokens = 0.5
    if tokens < 1 or tokens != int(tokens):
        raise ValueError(f"{text!r} is no number of tokens; write 131072 or 128k.")
    return int(tokens)


@dataclass(frozen=True)
class Checkpoint:
    """A row of checkpoints.toml: what is known of a published model beyond its config."""

    name: str
    match: dict[str, Any]
    trained_length: int
    scaling: Literal["none", "trained-in", "bolted-on"]
    source: str
    recipe: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@functools.lru_cache(maxsize=1)
def checkpoints() -> tuple[Checkpoint, ...]:
    """The rows of checkpoints.toml, in the order in which they are tried."""
    table = tomllib.loads(files("ctxext").joinpath("checkpoints.toml").read_text(encoding="utf-8"))
    return tuple(Checkpoint(**row) for row in table["checkpoint"])


@dataclass(frozen=True)
class ContextFacts:
    """What a (text) config says of its context.

    Attributes:
        trained_length: tokens at which the frequencies in use were trained.
        trained_length_source: where that number comes from.
        reach: tokens that the model covers as it is; beyond the trained length where scaling was bolted on.
        original_length: tokens at which the model was trained before any scaling.
        scaling: the scaling in use; None for plain RoPE.
        original_theta: the base before any scaling that changed it.
    """

    text_config: Any
    rope_parameters: dict[str, Any]
    rotary_dim: int
    trained_length: int
    trained_length_source: str
    reach: int
    original_length: int
    original_theta: float
    scaling: RopeMethod | None
    mark: dict[str, Any] | None
    checkpoint: Checkpoint | None

    @property
    def window(self) -> int | None:
        """The sliding window in tokens, if every attention layer has one."""
        window = getattr(self.text_config, "sliding_window", None)
        if window is None or getattr(self.text_config, "use_sliding_window", True) is False:
            return None
        return int(window) if set(attention_layers(self.text_config)) <= {"sliding_attention"} else None

    @property
    def rope(self) -> RopeGeometry:
        """The frequencies in use, with the length that they reach."""
        used = geometry_in_use(self.rope_parameters, self.rotary_dim, self.text_config.max_position_embeddings)
        return replace(used, original_max_position_embeddings=self.reach)

    @property
    def original_rope(self) -> RopeGeometry:
        """The plain frequencies from before any scaling."""
        return RopeGeometry.plain(self.rotary_dim, self.original_theta, self.original_length)


def attention_layers(text_config: Any) -> list[str]:
    """The type of every layer that has softmax attention, and so keys and values; linear attention has none."""
    layers = getattr(text_config, "layer_types", None)
    if layers is None:
        window = getattr(text_config, "sliding_window", None)
        slides = window is not None and getattr(text_config, "use_sliding_window", True) is not False
        return ["sliding_attention" if slides else "full_attention"] * int(text_config.num_hidden_layers)
    return [layer for layer in layers if "attention" in layer and layer != "linear_attention"]


def slides_over(text_config: Any, layer: int) -> int | None:
    """The sliding window of a layer in tokens; None where it sees everything."""
    types = getattr(text_config, "layer_types", None) or attention_layers(text_config)
    return int(text_config.sliding_window) if types[layer] == "sliding_attention" else None


def head_dim(text_config: Any) -> int:
    """Dimensions of a head, which many configs leave to be worked out."""
    return int(getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads)


def rotary_dim(text_config: Any, parameters: dict[str, Any]) -> int:
    """Rotary dimensions of a head, as transformers computes them."""
    return int(head_dim(text_config) * (parameters.get("partial_rotary_factor") or 1.0))


def has_rope(text_config: Any) -> bool:
    """Whether a config says that its model rotates queries and keys; ALiBi, where a family has both, wins."""
    return bool(getattr(text_config, "rope_parameters", None)) and not getattr(text_config, "alibi", False)


def no_encoding(text_config: Any) -> str | None:
    """Why there is nothing to extend in a family without positions; None for all others."""
    if not family_of(text_config).no_positions:
        return None
    return (
        "has no position encoding that could run out, so there is nothing to extend: just raise the limit (the "
        "tokenizer's model_max_length, or your server's maximum length)."
    )


def live_mark(text_config: Any) -> dict[str, Any] | None:
    """The note that ctxext left in this config, unless the config was edited since."""
    mark = getattr(text_config, "ctxext", None)
    if not isinstance(mark, dict):
        return None
    now = text_config.rope_parameters
    edited = any(now.get(key) != value for key, value in mark["rope_parameters"].items())
    return None if edited else mark


def _marked_scaling(mark: dict[str, Any], parameters: dict[str, Any], limit: int) -> RopeMethod | None:
    """The method that a mark names; where it is registered in another program only, the form it was saved in."""
    try:
        return None if mark["method"] is None else cast(RopeMethod, method_from_dict(mark["method"]))
    except ValueError:
        return method_from_rope_parameters(parameters, limit)


def known_checkpoint(text_config: Any, parameters: dict[str, Any]) -> Checkpoint | None:
    """The first row of checkpoints.toml whose every field equals the config's."""

    def value(name: str) -> Any:
        if name in ("rope_theta", "factor"):
            return parameters.get(name)
        if name == "rope_type":
            return parameters.get("rope_type", "default")
        return getattr(text_config, name, None)

    return next((row for row in checkpoints() if all(value(k) == v for k, v in row.match.items())), None)


def read_context(config: Any, original_max_position_embeddings: int | None = None) -> ContextFacts:
    """Read a config.

    Args:
        original_max_position_embeddings: the trained length before any scaling, where you know better
            than the config and the table of checkpoints.

    Raises:
        ValueError: no standard RoPE in this config.
    """
    text_config = text_config_of(config)
    name = f"{type(text_config).__name__} (model_type {text_config.model_type!r})"
    reason = no_encoding(text_config)
    if reason is not None:
        raise ValueError(f"{name} {reason}")
    parameters = getattr(text_config, "rope_parameters", None)
    if not parameters:
        raise ValueError(f"{name} has no rotary position embedding: its config holds no rope_parameters.")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError(
            f"{name} keeps rope_parameters for each layer type ({', '.join(parameters)}), which ctxext does not "
            "extend yet. The model was left as it was."
        )
    if original_max_position_embeddings is not None and not (
        isinstance(original_max_position_embeddings, int) and original_max_position_embeddings >= 8
    ):
        raise ValueError(
            "original_max_position_embeddings must be the trained length in tokens (an int >= 8), got "
            f"{original_max_position_embeddings!r}."
        )
    mark = live_mark(text_config)
    checkpoint = known_checkpoint(text_config, parameters)
    limit = int(text_config.max_position_embeddings)
    original_theta = float(parameters["rope_theta"])
    if mark is not None:
        scaling = _marked_scaling(mark, parameters, limit)
        original, original_theta = mark["original"]["length"], mark["original"]["rope_theta"]
        trained, source = original, "noted in this config when ctxext extended it"
    else:
        scaling = method_from_rope_parameters(parameters, limit)
        trained, source = limit, "max_position_embeddings of the config"
        if checkpoint is not None:
            trained, source = checkpoint.trained_length, f"checkpoints.toml: {checkpoint.name}"
        original = trained
        if scaling is not None:
            original = int(parameters.get("original_max_position_embeddings") or trained)
    bolted_on = scaling is not None and checkpoint is not None and checkpoint.scaling == "bolted-on"
    reach = limit if mark is not None or bolted_on else trained
    if original_max_position_embeddings is not None:
        original = original_max_position_embeddings
        if scaling is None:
            trained = reach = original
            source = "original_max_position_embeddings, as you passed it"
    return ContextFacts(
        text_config=text_config,
        rope_parameters=dict(parameters),
        rotary_dim=rotary_dim(text_config, parameters),
        trained_length=trained,
        trained_length_source=source,
        reach=reach,
        original_length=original,
        original_theta=original_theta,
        scaling=scaling,
        mark=mark,
        checkpoint=checkpoint,
    )


@dataclass(frozen=True, kw_only=True)
class RopePlan(Plan):
    """The plan of an extension of rotary position embeddings.

    Attributes:
        rope: what the method starts from.
        extended: the frequencies and the attention factor that the model will have; of a dynamic method at its full
            reach.
        rotated_copy: whether caches keep a copy of the keys as a dynamic method rotates them for decoding.
    """

    method: RopeMethod | None
    facts: ContextFacts
    rope: RopeGeometry
    extended: RopeGeometry
    rotated_copy: bool

    @property
    def encoding(self) -> str:
        return "rope"

    @property
    def start(self) -> int:
        return self.rope.original_max_position_embeddings

    @property
    def start_source(self) -> str:
        return self.facts.trained_length_source

    @property
    def original_length(self) -> int:
        return self.facts.original_length

    @property
    def is_portable(self) -> bool:
        return not self.is_late

    @property
    def is_late(self) -> bool:
        """Whether it rotates inside attention, so that the saved config stays what it was."""
        return self.method is not None and self.method.is_late


def plan_rope(
    config: Any,
    factor: float | None = None,
    method: str | ContextMethod | None = None,
    *,
    target_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    existing: Existing = "refuse",
    length: int | None = None,
    rotated_copy: bool = False,
    **options: Any,
) -> RopePlan:
    """Work out an extension of a config with RoPE. Arguments and errors are those of `ctxext.extend_context`."""
    if existing not in get_args(Existing):
        raise ValueError(f"existing must be one of {', '.join(get_args(Existing))}; got {existing!r}.")
    facts = read_context(config, original_max_position_embeddings)
    scaled = facts.scaling is not None or facts.mark is not None
    if existing == "refuse" and scaled:
        raise ValueError(_refuse_existing(facts))
    if existing in ("keep", "compose") and not scaled:
        raise ValueError(
            f"existing={existing!r} needs a model whose RoPE is scaled already, but this one has plain RoPE "
            f"(theta {facts.original_theta:g}). Leave existing= out."
        )
    if (
        existing in ("keep", "compose")
        and facts.scaling is not None
        and facts.scaling.is_late
        and facts.mark is not None
    ):
        raise ValueError(
            f"this config belongs to, or was saved from, a live model that {facts.scaling.name} extends inside "
            f"attention, so existing={existing!r} would leave nothing of that. Call restore_context(model), or use "
            "existing='replace'."
        )
    _refuse_special_keys(facts, existing)
    rope = facts.original_rope if existing == "replace" or not scaled else facts.rope
    start = rope.original_max_position_embeddings
    named, method = method is not None, "yarn" if method is None else method
    factor, target_length = factor_and_target(factor, target_length, method, start)
    if target_length <= start:
        raise ValueError(
            f"this model already covers {target_length} tokens: from {start} ({facts.trained_length_source}) "
            "that is no extension. Ask for more, or use it as it is."
        )
    if facts.window is not None and facts.window <= start:
        raise ValueError(
            f"every attention layer slides over a window of {facts.window} tokens, within the trained "
            f"{start}, so no distance is ever new and RoPE needs no change: just raise "
            f"max_position_embeddings to {target_length}."
        )

    if existing == "keep":
        if named or options or length is not None:
            raise ValueError(
                "existing='keep' leaves the frequencies as they are, so a method has no effect. Drop method= and its "
                "options, or use existing='compose'."
            )
        if isinstance(facts.scaling, RopeScaling) and facts.scaling.of_the_call:
            raise ValueError(
                "transformers' dynamic scaling is counted from max_position_embeddings, so it cannot be kept while "
                "that is raised. Use existing='replace'."
            )
        chosen: RopeMethod | None = None
        extended, parameters = rope, dict(facts.rope_parameters)
    else:
        chosen = _chosen_method(method, factor, rope, length, options)
        extended = _extended(chosen, rope, target_length)
        parameters = dict(facts.rope_parameters) if chosen.is_late else _portable(chosen, rope, facts)
        if chosen.is_late:
            _refuse_late(facts, existing)
    dynamic = isinstance(chosen, RopeScaling) and chosen.is_late and not chosen.of_the_call
    if rotated_copy and not dynamic:
        raise ValueError(
            "rotated_copy keeps a copy of the keys for methods whose scale follows each query, such as dynamic_ntk; "
            f"{'native scaling' if chosen is None else chosen.name} has no use for one. Leave it out."
        )
    return RopePlan(
        text_config=facts.text_config,
        facts=facts,
        existing=existing,
        method=chosen,
        rope=rope,
        extended=extended,
        factor=factor,
        target_length=target_length,
        updates=_updates(facts, chosen, parameters, start, target_length),
        rotated_copy=rotated_copy,
        notes=_notes(facts, chosen, extended),
    )


def _extended(method: RopeMethod, rope: RopeGeometry, target_length: int) -> RopeGeometry:
    """The frequencies and the attention factor under `method`; those that remap positions leave them alone."""
    if isinstance(method, PositionRemapping):
        method.branches(rope)
        method.check_reach(rope, target_length)
        return rope
    assert isinstance(method, RopeScaling)
    extended = RopeGeometry(
        inv_freq=rope.inv_freq / method.rescale_factors(rope),
        rope_theta=rope.rope_theta,
        original_max_position_embeddings=rope.original_max_position_embeddings,
        attention_factor=rope.attention_factor * float(method.attention_scaling(rope)),
    )
    if torch.equal(extended.inv_freq, rope.inv_freq) and extended.attention_factor == rope.attention_factor:
        raise ValueError(
            f"{method!r} changes nothing: every frequency and the attention factor stay as they are. "
            "Pass a larger factor or length, or other options."
        )
    return extended


def _refuse_late(facts: ContextFacts, existing: Existing) -> None:
    name = f"{type(facts.text_config).__name__} (model_type {facts.text_config.model_type!r})"
    instead = "Use a method that changes frequencies, such as 'yarn'. The model was left as it was."
    if getattr(facts.text_config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model, whose positions cannot be rotated late. {instead}")
    if facts.rope_parameters.get("mrope_section"):
        raise ValueError(f"{name} has positions of several kinds (mrope), which cannot be rotated late. {instead}")
    if existing == "compose" and facts.scaling is not None and facts.scaling.is_late:
        raise ValueError(
            f"{name} has native scaling ({facts.scaling.name}) that follows the length itself, which nothing composes "
            "with. Use existing='replace'. The model was left as it was."
        )


def _refuse_existing(facts: ContextFacts) -> str:
    what = facts.scaling.name if facts.scaling is not None else "native scaling"
    by = "by ctxext " if facts.mark is not None else ""
    origin = f"{facts.original_length} → {facts.reach}"
    return (
        f"this model's RoPE is scaled already {by}({what}, {origin} tokens). Say what to do with that: "
        f"existing='keep' leaves the frequencies and only widens the window (factor counts from "
        f"{facts.reach}); existing='compose' scales on top of it (from {facts.reach}); "
        f"existing='replace' starts again from the original frequencies (from {facts.original_length})."
    )


def _refuse_special_keys(facts: ContextFacts, existing: Existing) -> None:
    """Parameters that reach more than the rotary embedding cannot be changed by changing it."""
    special = {
        "mscale_all_dim": "it also scales the softmax of multi-head latent attention",
        "llama_4_scaling_beta": "it also scales the queries by position",
    }
    for key, why in special.items():
        if existing in ("compose", "replace") and facts.rope_parameters.get(key):
            raise ValueError(
                f"this model's {key} cannot be changed with its rotary embedding alone: {why}. "
                "Use existing='keep' to widen the window with the native scaling."
            )


def _chosen_method(
    method: str | ContextMethod, factor: float, rope: RopeGeometry, length: int | None, options: dict[str, Any]
) -> RopeMethod:
    chosen = chosen_method(method, factor, "rope", options)
    assert isinstance(chosen, RopeMethod)
    if length is None:
        return chosen
    reach = round(factor * rope.original_max_position_embeddings)
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= reach:
        raise ValueError(f"length must be a number of tokens (an int) up to {reach}, got {length!r}.")
    return chosen.at_length(rope, length)


def _portable(method: RopeMethod, rope: RopeGeometry, facts: ContextFacts) -> dict[str, Any]:
    """The config's new `rope_parameters`: the scaling in transformers' words, the family's keys kept."""
    assert isinstance(method, RopeScaling)
    parameters = scaled_rope_parameters(method, rope)
    allowed = family_of(facts.text_config).rope_types
    if allowed is not None and parameters["rope_type"] not in allowed:
        parameters = longrope_parameters(
            method.rescale_factors(rope), float(method.attention_scaling(rope)), method.factor, rope
        )
    kept = {k: v for k, v in facts.rope_parameters.items() if k not in SCALING_KEYS}
    return {**kept, **parameters}


def _updates(
    facts: ContextFacts, method: RopeMethod | None, parameters: dict[str, Any], start: int, target: int
) -> dict[str, Any]:
    from ctxext import __version__

    updates: dict[str, Any] = {"rope_parameters": parameters, "max_position_embeddings": target}
    if "original_max_position_embeddings" in facts.text_config.__dict__ and method is not None:
        # Phi-3 and kin keep it beside rope_parameters, where it wins over the one inside.
        updates["original_max_position_embeddings"] = start
    if getattr(facts.text_config, "head_dim", 0) is None:
        # transformers' yarn and longrope multiply with it (Mixtral's configs leave it out).
        updates["head_dim"] = head_dim(facts.text_config)
    described = facts.scaling if method is None else method
    updates["ctxext"] = {
        "version": __version__,
        "method": None if described is None else described.to_dict(),
        "original": {"length": facts.original_length, "rope_theta": facts.original_theta},
        "rope_parameters": parameters,
    }
    return updates


def _notes(facts: ContextFacts, method: RopeMethod | None, extended: RopeGeometry) -> tuple[str, ...]:
    notes = []
    config = facts.text_config
    late = method is not None and method.is_late
    if method is not None and extended.attention_factor != 1.0 and facts.rotary_dim < head_dim(config):
        notes.append(
            f"the attention factor {extended.attention_factor:.4g} reaches the {facts.rotary_dim} rotary of "
            f"{head_dim(config)} dimensions, as transformers applies it; the paper's temperature would reach all."
        )
    layers = getattr(config, "layer_types", None) or []
    if "sliding_attention" in layers and "full_attention" in layers and not late:
        notes.append("sliding and full layers share one rotary embedding in this family, so both are extended.")
    if facts.checkpoint is not None and facts.checkpoint.recipe:
        recipe = facts.checkpoint.recipe
        notes.append(f"the vendor's own recipe for {facts.checkpoint.name}: {recipe} ({facts.checkpoint.source}).")
    return tuple(notes)

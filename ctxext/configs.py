"""What a config says of a model's context, and the config that it becomes. No model, no weights."""

from __future__ import annotations

import copy
import functools
import math
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Literal, cast, get_args

import torch

from ctxext.config_fields import check_config
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
from ctxext.plans import (
    Existing,
    Lengths,
    Plan,
    by_own_names,
    chosen_method,
    factor_and_target,
    live_mark,
    summary_of,
)
from ctxext.text_configs import text_config_of
from ctxext.values import MAX_ROTARY, MAX_TOKENS, check_rows, is_count, shown

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
    if not 1 <= tokens < math.inf or tokens != int(tokens):
        raise ValueError(f"{shown(text)} is no number of tokens; write 131072 or 128k.")
    return int(tokens)


@dataclass(frozen=True)
class Checkpoint:
    """A row of checkpoints.toml: what is known of a published model beyond its config."""

    name: str
    match: dict[str, Any]
    trained_length: int
    scaling: Literal["none", "trained-in", "bolted-on"]
    source: str
    original_length: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@functools.lru_cache(maxsize=1)
def checkpoints() -> tuple[Checkpoint, ...]:
    """The rows of checkpoints.toml, in the order in which they are tried."""
    table = tomllib.loads(files("ctxext").joinpath("checkpoints.toml").read_text(encoding="utf-8"))
    return tuple(Checkpoint(**row) for row in table["checkpoint"])


# λ of a frequency that is zero: finite, as JSON has no infinity; the largest that float32 holds.
ZERO_FREQUENCY = 1e38


@dataclass(frozen=True)
class RopeTable:
    """One table of rotary frequencies, as a config describes it: the only one, or that of one type of layer.

    Attributes:
        label: the key of nested `rope_parameters` that it stands under; "" where they are flat.
        parameters: its own `rope_parameters`.
        head_dim: dimensions of a head in its layers.
        rotary_dim: dimensions of a head that turn, two for each pair.
        n_zero: pairs after those whose frequency is zero (proportional RoPE).
        limit: max_position_embeddings of the config.
        window: sliding window in tokens of the layers that use it; None where one of them sees everything.
    """

    label: str
    parameters: dict[str, Any]
    head_dim: int
    rotary_dim: int
    n_zero: int
    limit: int
    window: int | None

    @property
    def base_power(self) -> float:
        """The pairs that turn are plain RoPE of base theta to this power: exponents are of all pairs."""
        return self.rotary_dim / (self.rotary_dim + 2 * self.n_zero)

    @property
    def of_turning_pairs(self) -> dict[str, Any]:
        """`parameters` as if the pairs that turn were all there are."""
        parameters = {**self.parameters, "rope_theta": float(self.parameters["rope_theta"]) ** self.base_power}
        if parameters.get("rope_type") == "proportional":
            parameters["rope_type"] = "default" if parameters.get("factor", 1.0) == 1.0 else "linear"
        for name in ("short_factor", "long_factor"):
            if parameters.get(name) is not None:
                parameters[name] = parameters[name][: self.rotary_dim // 2]
        return parameters

    @property
    def scaling(self) -> RopeScaling | None:
        """The scaling in use; None for plain RoPE."""
        return method_from_rope_parameters(self.of_turning_pairs, self.limit)

    @property
    def in_use(self) -> RopeGeometry:
        """The frequencies in use of the pairs that turn."""
        return geometry_in_use(self.of_turning_pairs, self.rotary_dim, self.limit)

    def plain(self, rope_theta: float, length: int) -> RopeGeometry:
        """The frequencies of the pairs that turn before any scaling, of the config's base `rope_theta`."""
        return RopeGeometry.plain(self.rotary_dim, rope_theta**self.base_power, length)


def rope_tables(text_config: Any, parameters: dict[str, Any]) -> tuple[RopeTable, ...]:
    """The tables that `rope_parameters` describe; first those whose layers see the most."""
    nested = {label: value for label, value in parameters.items() if isinstance(value, dict)}
    if not nested:
        slides = set(attention_layers(text_config)) <= {"sliding_attention"}
        return (_rope_table(text_config, "", parameters, slides or family_of(text_config).rope_window is not None),)
    # `_rope_type_labels` name the tables where they are not named by the types of layers.
    used = set(getattr(text_config, "_rope_type_labels", None) or text_config.layer_types)
    # transformers reads this one at the top level alone, whatever a nested one says.
    truncate = {"truncate": parameters["truncate"]} if "truncate" in parameters else {}
    windows = family_of(text_config).window_labels
    tables = [
        _rope_table(
            text_config,
            label,
            {**{k: v for k, v in value.items() if k != "truncate"}, **truncate},
            "sliding" in label or label in windows,
        )
        for label, value in nested.items()
        if label in used
    ]
    return tuple(sorted(tables, key=lambda table: -(table.window or math.inf)))


def _rope_table(text_config: Any, label: str, parameters: dict[str, Any], slides: bool) -> RopeTable:
    config = text_config
    if label and getattr(text_config, "is_heterogeneous", False):
        config = text_config.per_layer_config[label]
    window = getattr(config, family_of(text_config).rope_window or "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    dim, share = head_dim(config), parameters.get("partial_rotary_factor") or 1.0
    turning, n_zero = int(dim * share), 0
    if parameters.get("rope_type") == "proportional":
        pairs = int(share * dim // 2)
        turning, n_zero = 2 * pairs, dim // 2 - pairs
    elif parameters.get("rope_type") == "longrope":
        n_zero = sum(factor >= ZERO_FREQUENCY for factor in parameters["short_factor"])
        turning -= 2 * n_zero
    if not 4 <= turning <= MAX_ROTARY:
        raise ValueError(
            f"{type(text_config).__name__} rotates {turning} of {dim} dimensions a head, by its head_dim (or "
            f"hidden_size and num_attention_heads) and partial_rotary_factor: it must be 4 to {MAX_ROTARY}."
        )
    return RopeTable(
        label=label,
        parameters=dict(parameters),
        head_dim=dim,
        rotary_dim=turning,
        n_zero=n_zero,
        limit=length_limit(text_config),
        window=int(window) if slides and window is not None else None,
    )


def length_limit(text_config: Any) -> int:
    """max_position_embeddings; the sliding window where a config has none, as nothing beyond it is ever seen."""
    limit = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "sliding_window", None)
    if limit is None:
        raise ValueError(f"{type(text_config).__name__} says no length: it is no config of a text model.")
    return int(limit)


@dataclass(frozen=True)
class ContextFacts:
    """What a (text) config says of its context.

    Attributes:
        whole_parameters: `rope_parameters` as the config has them, nested perhaps.
        tables: what they describe; first those whose layers see the most.
        lengths: how far the model reaches as it is, and from where.
        trained_length_source: where `lengths.trained` comes from.
        scaling: the scaling in use; None for plain RoPE.
        original_thetas: the base of each table before any scaling that changed it, by label.
        softmax_factor: the scale of the softmax in use is the square of this times a plain model's.
    """

    text_config: Any
    whole_parameters: dict[str, Any]
    tables: tuple[RopeTable, ...]
    lengths: Lengths
    trained_length_source: str
    original_thetas: dict[str, float]
    softmax_factor: float
    scaling: RopeMethod | None
    mark: dict[str, Any] | None
    checkpoint: Checkpoint | None

    @property
    def trained_length(self) -> int:
        """As in `Lengths`."""
        return self.lengths.trained

    @property
    def reach(self) -> int:
        """The target of `Lengths`: beyond the trained length where scaling was bolted on."""
        return self.lengths.target

    @property
    def original_length(self) -> int | None:
        """As in `Lengths`."""
        return self.lengths.original

    @property
    def summary(self) -> str:
        """`yarn ×4: 512 → 2048 tokens`, as the plan of the extension had it; of native scaling, only its name."""
        name = "plain RoPE" if self.scaling is None else self.scaling.name
        if self.mark is not None:
            return summary_of(None if self.mark["existing"] == "keep" else name, self.lengths)
        if self.original_length is None:
            return f"{name}: {self.reach} tokens"
        return f"{name}: {self.lengths.words}"

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Those of the first table."""
        return self.tables[0].parameters

    @property
    def rotary_dim(self) -> int:
        """That of the first table."""
        return self.tables[0].rotary_dim

    @property
    def original_theta(self) -> float:
        """That of the first table."""
        return self.original_thetas[self.tables[0].label]

    def seen_beyond(self, length: int) -> tuple[RopeTable, ...]:
        """The tables of layers that see further than `length` tokens: those that an extension changes."""
        return tuple(table for table in self.tables if table.window is None or table.window > length)

    def rope_of(self, table: RopeTable) -> RopeGeometry:
        """The frequencies in use, with the length that they reach."""
        return replace(table.in_use, original_max_position_embeddings=self.reach)

    def original_rope_of(self, table: RopeTable) -> RopeGeometry:
        """The plain frequencies from before any scaling."""
        return table.plain(self.original_thetas[table.label], self.original_length or self.reach)

    @property
    def rope(self) -> RopeGeometry:
        """The frequencies in use of the first table, with the length that they reach."""
        return self.rope_of(self.tables[0])

    @property
    def original_rope(self) -> RopeGeometry:
        """The plain frequencies of the first table from before any scaling."""
        return self.original_rope_of(self.tables[0])


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
    dim = getattr(text_config, "head_dim", None)
    if not dim and not (text_config.hidden_size and text_config.num_attention_heads):
        raise ValueError(f"{type(text_config).__name__} says neither head_dim nor hidden_size and num_attention_heads.")
    return int(dim or text_config.hidden_size // text_config.num_attention_heads)


def has_rope(text_config: Any) -> bool:
    """Whether a config says that its model rotates queries and keys; ALiBi, where a family has both, wins."""
    parameters = getattr(text_config, "rope_parameters", None) or family_of(text_config).sin_cos_tables
    return bool(parameters) and not getattr(text_config, "alibi", False)


def no_encoding(text_config: Any) -> str | None:
    """Why there is nothing to extend in a family without positions; None for all others."""
    if not family_of(text_config).no_positions:
        return None
    return (
        "has no position encoding that could run out, so there is nothing to extend: just raise the limit (the "
        "tokenizer's model_max_length, or your server's maximum length)."
    )


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


def check_trained_length(length: int | None) -> None:
    """Raise ValueError unless `length` is None or a trained length in tokens that can be extended."""
    if length is not None and not is_count(length, 8, MAX_TOKENS):
        raise ValueError(
            f"original_max_position_embeddings must be the trained length in tokens (an int >= 8), got {shown(length)}."
        )


def read_context(config: Any, original_max_position_embeddings: int | None = None) -> ContextFacts:
    """Read a config.

    Args:
        original_max_position_embeddings: the trained length before any scaling, where you know better
            than the config and the table of checkpoints.

    Raises:
        ValueError: no standard RoPE in this config.
    """
    check_config(config)
    check_trained_length(original_max_position_embeddings)
    text_config = text_config_of(config)
    name = f"{type(text_config).__name__} (model_type {text_config.model_type!r})"
    reason = no_encoding(text_config) or family_of(text_config).refuse
    if reason is not None:
        raise ValueError(f"{name} {reason}")
    whole = getattr(text_config, "rope_parameters", None)
    if family_of(text_config).sin_cos_tables:
        whole = _sin_cos_parameters(text_config)
    if not whole:
        raise ValueError(f"{name} has no rotary position embedding: its config holds no rope_parameters.")
    tables = rope_tables(text_config, whole)
    if not tables:
        raise ValueError(f"{name} has no layer with RoPE. It was left as it was.")
    mark = live_mark(text_config)
    scaled = next((table for table in tables if table.scaling is not None), tables[0])
    parameters = tables[0].parameters
    checkpoint = known_checkpoint(text_config, parameters)
    limit = length_limit(text_config)
    thetas = {table.label: float(table.parameters["rope_theta"]) for table in tables}
    if mark is not None:
        scaling = _marked_scaling(mark, tables[0].of_turning_pairs, limit)
        theta = mark["original"].get("rope_theta", {})
        thetas = theta if isinstance(theta, dict) else {"": theta}
        if not {table.label for table in tables} <= thetas.keys():
            raise ValueError(
                f"{name}: ctxext.original.rope_theta in its config must hold the base of every table, got {theta!r}. "
                "Restore it, or extend the original model anew."
            )
        lengths, source = Lengths.of_mark(mark), "noted in this config when ctxext extended it"
        if original_max_position_embeddings is not None:
            lengths = replace(lengths, original=original_max_position_embeddings)
    else:
        scaling = scaled.scaling
        lengths, source = _native_lengths(scaled, limit, checkpoint, original_max_position_embeddings)
    return ContextFacts(
        text_config=text_config,
        whole_parameters=copy.deepcopy(whole),
        tables=tables,
        lengths=lengths,
        trained_length_source=source,
        original_thetas=thetas,
        softmax_factor=_softmax_factor(text_config, parameters),
        scaling=scaling,
        mark=mark,
        checkpoint=checkpoint,
    )


def _native_lengths(
    table: RopeTable, limit: int, checkpoint: Checkpoint | None, given: int | None
) -> tuple[Lengths, str]:
    """How far a model reaches that ctxext did not extend, and where its trained length comes from.

    Args:
        table: the one that is scaled, if any.
        given: the trained length before any scaling, as the caller knows it.
    """
    trained, source = limit, "max_position_embeddings of the config"
    if checkpoint is not None:
        trained, source = checkpoint.trained_length, f"checkpoints.toml: {checkpoint.name}"
    scaling, own = table.scaling, table.parameters.get("original_max_position_embeddings")
    if scaling is None:
        if given is not None:
            trained, source = given, "as you passed it"
        return Lengths(original=trained, trained=trained, start=trained, target=trained, factor=1.0), source
    bolted_on = checkpoint is not None and checkpoint.scaling == "bolted-on"
    original = own
    if scaling.of_the_call:  # transformers' dynamic scaling counts from max_position_embeddings
        original = limit
    if bolted_on:  # its weights know the unscaled frequencies alone
        original = trained
    elif checkpoint is not None and checkpoint.original_length is not None:
        original = checkpoint.original_length
    original = given or original
    reach = limit if bolted_on else trained
    if table.parameters.get("rope_type") == "yarn" and limit <= (own or trained):
        # As Qwen has it switched on: the length that the scaling reaches stands nowhere.
        reach = max(reach, round(scaling.factor * (own or trained)))
    start = original or reach
    return Lengths(original=original, trained=trained, start=start, target=reach, factor=reach / start), source


def _sin_cos_parameters(text_config: Any) -> dict[str, Any]:
    """What GPT-J and CodeGen have in their code instead of a config."""
    n = text_config.rotary_dim or text_config.hidden_size
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": n / (head_dim(text_config) or n)}


def _softmax_factor(text_config: Any, parameters: dict[str, Any]) -> float:
    """The square root of what `mscale_all_dim` multiplies the scale of the softmax by."""
    if not family_of(text_config).softmax_mscale or parameters.get("rope_type", "default") == "default":
        return 1.0
    factor = parameters.get("factor") or 1.0
    return 1.0 if factor <= 1 else 0.1 * (parameters.get("mscale_all_dim") or 0.0) * math.log(factor) + 1


@dataclass(frozen=True, kw_only=True)
class RopePlan(Plan):
    """The plan of an extension of rotary position embeddings.

    Attributes:
        rope: what the method starts from.
        extended: the frequencies and the attention factor that the model will have; of a dynamic method at its full
            reach; of the first table where there are several.
        tables: the same for every table, by label.
        softmax_factor: the scale of the softmax will be the square of this times a plain model's.
        live_only: why no config can say what the live model will do; None where one can.
        rotated_copy: whether caches keep a copy of the keys as a dynamic method rotates them for decoding.
    """

    method: RopeMethod | None
    facts: ContextFacts
    rope: RopeGeometry
    extended: RopeGeometry
    tables: dict[str, RopeGeometry]
    softmax_factor: float
    live_only: str | None
    rotated_copy: bool

    @property
    def encoding(self) -> str:
        return "rope"

    @property
    def start_source(self) -> str:
        return self.facts.trained_length_source

    @property
    def why_not_portable(self) -> str | None:
        return "it rotates inside attention" if self.is_late else self.live_only

    @property
    def is_late(self) -> bool:
        """Whether it rotates inside attention, so that the saved config stays what it was."""
        return self.method is not None and self.method.is_late


def plan_rope(
    config: Any,
    /,
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
    _check_existing(facts, existing)
    rope = facts.original_rope if existing == "replace" or not scaled else facts.rope
    start, source = rope.original_max_position_embeddings, facts.trained_length_source
    if existing == "keep":  # where a scaling reaches further than the window, the window is what there is to widen
        start = min(start, length_limit(facts.text_config))
    if start > facts.trained_length:
        source = "which its scaling reaches"
    named, method = method is not None, "yarn" if method is None else method
    factor, target_length = factor_and_target(factor, target_length, method, start)
    trained = start if existing == "replace" else facts.trained_length
    lengths = Lengths(original=facts.original_length, trained=trained, start=start, target=target_length, factor=factor)
    if target_length <= start:
        raise ValueError(
            f"this model already covers {target_length} tokens: from {start} ({source}) that is no extension. Ask for "
            "more, or use it as it is."
        )
    if family_of(facts.text_config).sin_cos_tables:
        check_rows(target_length)
    seen_beyond = facts.seen_beyond(start)
    if not seen_beyond:
        limited = hasattr(facts.text_config, "max_position_embeddings")
        raise ValueError(
            f"every layer with RoPE slides over a window of {facts.tables[0].window} tokens, within the trained "
            f"{start}, so no distance is ever new and RoPE needs no change: just "
            + (f"raise max_position_embeddings to {target_length}." if limited else "use the model as it is.")
        )

    if existing == "keep":
        if named or options or length is not None:
            raise ValueError(
                "existing='keep' leaves the frequencies as they are, so a method has no effect. Drop method= and its "
                "options, or use existing='compose'."
            )
        chosen: RopeMethod | None = None
        parameters = _with_factors(facts)
        tables = {table.label: facts.rope_of(table) for table in facts.tables}
        softmax_factor, live_only = facts.softmax_factor, None
    else:
        chosen = _chosen_method(method, factor, rope, length, options)
        if chosen.is_late:
            _refuse_late(facts, existing)
        raised = getattr(chosen, "rope_theta", None)
        if facts.tables[0].n_zero and raised is not None:
            raise ValueError(
                f"rope_theta={raised:g} is not what a base means in this family, where only "
                f"{facts.rotary_dim} of {facts.tables[0].head_dim} dimensions turn (proportional RoPE). Leave it out: "
                "one is computed from the factor."
            )
        from_plain = existing == "replace" or not scaled
        ropes = {t.label: facts.original_rope_of(t) if from_plain else facts.rope_of(t) for t in facts.tables}
        softmax_factor = _softmax_factor_under(chosen, rope, facts, from_plain)
        tables = _extended(chosen, ropes, seen_beyond, facts, target_length)
        parameters, live_only = facts.whole_parameters, None
        if not chosen.is_late:
            live_only = _live_only(chosen, rope, facts)
        if not chosen.is_late and live_only is None:
            parameters = _portable_tables(chosen, ropes, seen_beyond, facts, softmax_factor)
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
        extended=tables[facts.tables[0].label],
        tables=tables,
        softmax_factor=softmax_factor,
        live_only=live_only,
        lengths=lengths,
        updates=by_own_names(facts.text_config, _updates(facts, chosen, existing, parameters, live_only, lengths)),
        rotated_copy=rotated_copy,
        notes=_notes(facts, chosen, tables[facts.tables[0].label], seen_beyond),
    )


def _with_factors(facts: ContextFacts) -> dict[str, Any]:
    """The config's parameters; with the factor that transformers takes from the lengths where none stands there."""
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
    """Every table under `method`; those of short windows, and all if it remaps positions, stay as they are."""
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
        rope, scaling = ropes[label], float(method.attention_scaling(ropes[label]))
        extended[label] = replace(
            rope,
            inv_freq=rope.inv_freq / method.rescale_factors(rope),
            attention_factor=rope.attention_factor * (1.0 if in_softmax else scaling),
        )
        unchanged &= scaling == 1.0 and torch.equal(extended[label].inv_freq, rope.inv_freq)
    if unchanged:
        raise ValueError(
            f"{method!r} changes nothing: every frequency and the attention factor stay as they are. "
            "Pass a larger factor or length, or other options."
        )
    return extended


def _softmax_factor_under(method: ContextMethod, rope: RopeGeometry, facts: ContextFacts, from_plain: bool) -> float:
    """What `method` makes of the factor in the softmax; 1 for families that have none there."""
    before = 1.0 if from_plain else facts.softmax_factor
    if not isinstance(method, RopeScaling) or method.is_late or not family_of(facts.text_config).softmax_mscale:
        return before
    return before * float(method.attention_scaling(rope))


def _refuse_late(facts: ContextFacts, existing: Existing) -> None:
    name = f"{type(facts.text_config).__name__} (model_type {facts.text_config.model_type!r})"
    instead = "Use a method that changes frequencies, such as 'yarn'. The model was left as it was."
    if getattr(facts.text_config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model, whose positions cannot be rotated late. {instead}")
    if facts.rope_parameters.get("mrope_section"):
        raise ValueError(f"{name} has positions of several kinds (mrope), which cannot be rotated late. {instead}")
    if family_of(facts.text_config).sin_cos_tables:
        raise ValueError(
            f"{name} rotates by a table of sines and cosines in each layer, which cannot be done late. {instead}"
        )
    if facts.tables[0].label or facts.tables[0].n_zero:
        raise ValueError(f"{name} has a rotary table of its own kind for each type of layer. {instead}")
    reason = family_of(facts.text_config).refuse_late
    if reason is not None:
        raise ValueError(f"{name} {reason}, so that nothing can be rotated late in it. {instead}")
    if existing == "replace" and facts.softmax_factor != 1.0:
        raise ValueError(
            f"{name} scales its softmax by mscale_all_dim, which late rotation would leave as it is. {instead}"
        )
    if existing == "compose" and facts.scaling is not None and facts.scaling.is_late:
        raise ValueError(
            f"{name} has native scaling ({facts.scaling.name}) that follows the length itself, which nothing composes "
            "with. Use existing='replace'. The model was left as it was."
        )


def _check_existing(facts: ContextFacts, existing: Existing) -> None:
    """Raise ValueError where what a model has already cannot be kept, composed with or replaced."""
    if existing in ("keep", "compose") and facts.scaling is None and facts.mark is None:
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


def _live_only(method: RopeMethod, rope: RopeGeometry, facts: ContextFacts) -> str | None:
    """Why no config of this family can say `method`; None where one can."""
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
    """The config's new `rope_parameters`, nested if they were."""
    new = {table.label: _portable(method, ropes[table.label], facts, table, softmax_factor) for table in seen_beyond}
    return new.get("", {**facts.whole_parameters, **new})


def _portable(
    method: ContextMethod, rope: RopeGeometry, facts: ContextFacts, table: RopeTable, softmax_factor: float
) -> dict[str, Any]:
    """One table's new `rope_parameters`: the scaling in transformers' words, the family's keys kept."""
    assert isinstance(method, RopeScaling)
    family = family_of(facts.text_config)
    parameters = scaled_rope_parameters(method, rope)
    kept = {k: v for k, v in table.parameters.items() if k not in SCALING_KEYS}
    # The length that Ministral's scale of queries is counted from stays what it was, whatever the method's is.
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
        factors = RopeGeometry.plain(rope.dim, rope.rope_theta, 1).inv_freq / rope.inv_freq
        scaling = rope.attention_factor * float(method.attention_scaling(rope))
        factors = factors * method.rescale_factors(rope)
        parameters = longrope_parameters(factors, scaling, method.factor, rope)
    if parameters["rope_type"] == "longrope" and not rope.is_plain and facts.original_length is not None:
        # λ is over the frequencies before any scaling, and the format's lengths are to be those from there on, too:
        # a program that drops our mark would otherwise take the length that was composed with for the first.
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
    """The keys that put an attention factor into the softmax of latent attention, and not on cos and sin as well."""
    mscale = (softmax_factor - 1) / (0.1 * math.log(parameters["factor"]))
    if parameters["rope_type"] == "yarn" and "attention_factor" not in parameters:
        # As DeepSeek's own checkpoints have it: the quotient of the two is on cos and sin.
        return {"mscale": 1.0, "mscale_all_dim": 1.0}
    return {"attention_factor": rope.attention_factor, "mscale_all_dim": mscale}


def _updates(
    facts: ContextFacts,
    method: RopeMethod | None,
    existing: Existing,
    parameters: dict[str, Any],
    live_only: str | None,
    lengths: Lengths,
) -> dict[str, Any]:
    from ctxext import __version__

    config = facts.text_config
    updates: dict[str, Any] = {}
    if hasattr(config, "rope_parameters"):
        updates["rope_parameters"] = parameters
    if hasattr(config, "max_position_embeddings"):
        updates["max_position_embeddings"] = lengths.target
    if getattr(config, "is_heterogeneous", False) and any(
        isinstance(value, dict) and value.get("rope_type") == "longrope" for value in parameters.values()
    ):
        # transformers validates longrope by config.head_dim, and without this raises where layers differ in it.
        updates["allow_global_per_layer_attribute_access"] = True
    if "original_max_position_embeddings" in facts.text_config.__dict__ and method is not None:
        # Phi-3 and kin keep it beside rope_parameters, where it wins over the one inside.
        updates["original_max_position_embeddings"] = lengths.original or lengths.start
    if config.__dict__.get("head_dim", 0) is None:  # not getattr, which raises where layers differ in it
        # transformers' yarn and longrope multiply with it (Mixtral's configs leave it out).
        updates["head_dim"] = head_dim(facts.text_config)
    described = facts.scaling if method is None else method
    theta = facts.original_thetas if facts.tables[0].label else facts.original_theta
    updates["ctxext"] = {
        "version": __version__,
        "method": None if described is None else described.to_dict(),
        # Where nothing was scaled, this is the same as to replace it.
        "existing": "replace" if existing == "refuse" else existing,
        **lengths.to_mark(),
        "original": {"length": lengths.original, "rope_theta": theta},
        "fields": {name: value for name, value in updates.items() if name == "rope_parameters"},
        **({} if live_only is None else {"live_only": True}),
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
    late = method is not None and method.is_late
    if method is not None and extended.attention_factor != 1.0:
        if family_of(config).norm_after_rope and getattr(config, "use_qk_norm", True):
            notes.append(
                f"the attention factor {extended.attention_factor:.4g} does nothing here: this family normalises "
                "queries and keys after the rotation."
            )
        elif facts.rotary_dim < table.head_dim:
            notes.append(
                f"the attention factor {extended.attention_factor:.4g} reaches the {facts.rotary_dim} rotary of "
                f"{table.head_dim} dimensions, as transformers applies it; the paper's temperature would reach all."
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

"""The tables of rotary frequencies of a config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import RopeScaling, geometry_in_use, method_from_rope_parameters
from ctxext.models.families import family_of
from ctxext.utils.values import MAX_ROTARY

# λ of a zero frequency: the largest float32, as JSON has no infinity.
ZERO_FREQUENCY = 1e38


@dataclass(frozen=True)
class RopeTable:
    """One table of rotary frequencies of a config: the only one, or that of one layer type.

    Attributes:
        label: its key in nested `rope_parameters`; "" if they are flat.
        parameters: its own `rope_parameters`.
        head_dim: dimensions of a head in its layers.
        rotary_dim: rotary dimensions per head, two per pair.
        n_zero: further pairs with frequency zero (proportional RoPE).
        limit: max_position_embeddings of the config.
        window: sliding window in tokens of its layers; None if one of them has full attention.
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
        """The rotating pairs are plain RoPE with base theta to this power, as exponents count all pairs."""
        return self.rotary_dim / (self.rotary_dim + 2 * self.n_zero)

    @property
    def of_turning_pairs(self) -> dict[str, Any]:
        """`parameters` for the rotating pairs alone."""
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
        """The frequencies in use of the rotating pairs."""
        return geometry_in_use(self.of_turning_pairs, self.rotary_dim, self.limit)

    def at(self, length: int) -> RopeGeometry:
        """The frequencies in use of a model that serves `length` tokens: within its original length, those of short
        calls."""
        original = self.parameters.get("original_max_position_embeddings") or self.limit
        return geometry_in_use(self.of_turning_pairs, self.rotary_dim, self.limit, within=length <= original)

    def plain(self, rope_theta: float, length: int) -> RopeGeometry:
        """The unscaled frequencies of the rotating pairs, with the config's base `rope_theta`."""
        return RopeGeometry.plain(self.rotary_dim, rope_theta**self.base_power, length)


def rope_tables(text_config: Any, parameters: dict[str, Any]) -> tuple[RopeTable, ...]:
    """The tables of `rope_parameters`, those of the layers with the largest window first."""
    nested = {label: value for label, value in parameters.items() if isinstance(value, dict)}
    if not nested:
        # Beside rope_parameters it wins; transformers moves it in only when it computes frequencies.
        trained = getattr(text_config, "original_max_position_embeddings", None)
        if trained is not None and parameters.get("rope_type") in ("llama3", "yarn", "longrope"):
            parameters = {**parameters, "original_max_position_embeddings": trained}
        slides = set(attention_layers(text_config)) <= {"sliding_attention"}
        return (_rope_table(text_config, "", parameters, slides or family_of(text_config).rope_window is not None),)
    # `_rope_type_labels` names the tables if they are not named after layer types.
    used = set(getattr(text_config, "_rope_type_labels", None) or text_config.layer_types)
    # transformers reads this key only at the top level.
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
    nested = label and getattr(text_config, "is_heterogeneous", False)
    config = text_config.per_layer_config[label] if nested else text_config
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
            f"{type(text_config).__name__} has {turning} rotary dimensions of {dim} per head (from head_dim, or "
            f"hidden_size and num_attention_heads, and partial_rotary_factor); ctxext needs 4 to {MAX_ROTARY}."
        )
    if parameters.get("rope_type") == "yarn":  # as transformers fills in what is missing, or null
        original = parameters.get("original_max_position_embeddings") or length_limit(text_config)
        factor = parameters.get("factor") or length_limit(text_config) / original
        parameters = {**parameters, "original_max_position_embeddings": original, "factor": factor}
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
    """max_position_embeddings; without it, the sliding window."""
    limit = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "sliding_window", None)
    if limit is None:
        raise ValueError(f"{type(text_config).__name__} has no maximum length; it is not the config of a text model.")
    return int(limit)


def attention_layers(text_config: Any) -> list[str]:
    """The types of the layers with softmax attention, which have a KV cache; linear attention has none."""
    layers = getattr(text_config, "layer_types", None)
    if layers is None:
        window = getattr(text_config, "sliding_window", None)
        slides = window is not None and getattr(text_config, "use_sliding_window", True) is not False
        return ["sliding_attention" if slides else "full_attention"] * int(text_config.num_hidden_layers)
    return [layer for layer in layers if layer == "hybrid" or ("attention" in layer and layer != "linear_attention")]


def span_of(config: Any, layer_type: str) -> int | None:
    """Tokens of the sliding window, or of the chunk, of a layer type's attention; None for full attention."""
    fields = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    return getattr(config, fields.get(layer_type, ""), None)


def label_of_layer(text_config: Any, layer: int) -> str | None:
    """The layer type of a layer, which its table is named by in most families; None if the config lists none."""
    types = getattr(text_config, "layer_types", None)
    return types[layer] if types else None


def slides_over(text_config: Any, layer: int) -> int | None:
    """The sliding window of a layer in tokens; None for full attention."""
    types = getattr(text_config, "layer_types", None) or attention_layers(text_config)
    return int(text_config.sliding_window) if types[layer] == "sliding_attention" else None


def key_value_heads(text_config: Any) -> int:
    """Heads whose keys and values are cached: one with Falcon's and GPT-BigCode's `multi_query`."""
    if getattr(text_config, "multi_query", False) and not getattr(text_config, "new_decoder_architecture", False):
        return 1
    return int(getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads)


def head_dim(text_config: Any) -> int:
    """Dimensions of a head, derived if the config omits them."""
    dim = getattr(text_config, "head_dim", None)
    if not dim and not (text_config.hidden_size and text_config.num_attention_heads):
        raise ValueError(f"{type(text_config).__name__} has neither head_dim nor hidden_size and num_attention_heads.")
    return int(dim or text_config.hidden_size // text_config.num_attention_heads)

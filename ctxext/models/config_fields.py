"""The config fields that ctxext computes with, and their valid values, checked when a config is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ctxext.models.text_config import text_config_of
from ctxext.utils.json_files import FACTOR, FLAG, TEXT, Kind
from ctxext.utils.values import MAX_COUNT, MAX_SIZE, MAX_TOKENS, are_numbers, are_words, is_count, is_number, shown

_SIZE = Kind(f"a whole number from 1 to {MAX_SIZE}", is_count)
_COUNT = Kind(f"a whole number from 0 to {MAX_COUNT}", partial(is_count, low=0, high=MAX_COUNT))
_TOKENS = Kind(
    f"a whole number from 0 to {MAX_TOKENS}", lambda value: is_number(value, 0, MAX_TOKENS) and value == int(value)
)
_LENGTH = Kind(f"a number of tokens from 1 to {MAX_TOKENS}", partial(is_number, low=1, high=MAX_TOKENS))
_POSITIVE = Kind("a number from 1e-6 to 1e6", partial(is_number, low=1e-6, high=1e6))
_TERM = Kind("a number from -1e6 to 1e6", partial(is_number, low=-1e6, high=1e6))
_FACTORS = Kind("a list of finite numbers >= 1e-6", partial(are_numbers, low=1e-6))
_WORDS = Kind("a list of strings", are_words)

# By transformers' common names; null means the same as a missing field.
FIELDS = {
    "model_type": TEXT,
    "architectures": _WORDS,
    "layer_types": _WORDS,
    "use_sliding_window": FLAG,
    **dict.fromkeys(("num_hidden_layers", "num_kv_shared_layers"), _COUNT),
    **dict.fromkeys(
        ("hidden_size", "num_attention_heads", "num_key_value_heads", "rotary_dim",
         "kv_lora_rank", "vocab_size"), _SIZE,
    ),
    **dict.fromkeys(
        ("head_dim", "qk_rope_head_dim"), Kind(f"a whole number from 0 to {MAX_SIZE}", partial(is_count, low=0))
    ),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), _TOKENS),
    # transformers 4 reads a fraction here from Phi-3's config.
    "original_max_position_embeddings": _LENGTH,
    "rope_parameters": Kind("an object", lambda value: isinstance(value, Mapping)),
}  # fmt: skip
ROPE_FIELDS = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    # With a base of 1 every pair has the same frequency, and formulas divide by ln(base) = 0.
    "rope_theta": Kind("a number above 1, up to 1e30", partial(is_number, low=1 + 1e-6, high=1e30)),
    "factor": FACTOR,
    "original_max_position_embeddings": _LENGTH,
    **dict.fromkeys(
        ("attention_factor", "attn_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor",
         "short_mscale", "long_mscale"), _POSITIVE,
    ),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _TERM),
    **dict.fromkeys(("short_factor", "long_factor"), _FACTORS),
    "truncate": FLAG,
    "partial_rotary_factor": Kind("a number above 0, up to 8", partial(is_number, low=1e-6, high=8)),
}  # fmt: skip
# The required keys of each scaling.
NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
}


def check_config(config: Any) -> None:
    """Check the types and bounds of the fields that ctxext computes with, in `config` and its text config.

    Raises ValueError, naming the field and the config's file, if one is invalid.
    """
    text_config = text_config_of(config)
    for part in {id(each): each for each in (config, text_config)}.values():
        for path, words, value in _wrong(part):
            raise ValueError(f"{_where(config, part)}{path} must be {words}, got {shown(value)}. Correct the config.")


def _where(config: Any, part: Any) -> str:
    folder = getattr(config, "name_or_path", "")
    file = Path(folder, "config.json") if isinstance(folder, str) and folder else None
    return f"{file}: " if file and file.is_file() else f"{type(part).__name__}: "


def _wrong(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Path, expected kind and value of each invalid field."""
    if not isinstance(config.attribute_map, Mapping):
        yield "attribute_map", "an object", config.attribute_map
    # Not getattr, which raises if layers differ in a field.
    values = {name: config.__dict__.get(config.attribute_map.get(name, name)) for name in FIELDS}
    values["model_type"] = config.model_type
    if values["model_type"] is None:
        yield "model_type", TEXT.words, None
    for name, field in FIELDS.items():
        if values[name] is not None and not field.holds(values[name]) and not _in_stages(config, name, values[name]):
            yield config.attribute_map.get(name, name), field.words, values[name]
    parameters = values["rope_parameters"]
    if not parameters or not isinstance(parameters, Mapping):
        return
    nested = {label: value for label, value in parameters.items() if isinstance(value, Mapping)}
    if nested and not (values["layer_types"] or getattr(config, "_rope_type_labels", None)):
        yield "layer_types", "a list of strings where rope_parameters are nested", values["layer_types"]
    for label, table in nested.items() if nested else (("", parameters),):
        yield from _wrong_rope(f"rope_parameters.{label}." if label else "rope_parameters.", table)
    if nested and not isinstance(parameters.get("truncate", True), bool):
        yield "rope_parameters.truncate", FLAG.words, parameters["truncate"]


def _in_stages(config: Any, name: str, value: Any) -> bool:
    """Whether a multi-part size is the default of this config class, as in vision families."""
    default = type(config)().__dict__.get(config.attribute_map.get(name, name))
    return name != "rope_parameters" and all(isinstance(each, (list, tuple, dict)) for each in (value, default))


def _wrong_rope(path: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    kind = table.get("rope_type") or table.get("type") or "default"
    needed = ("rope_theta", *NEEDED.get(kind if isinstance(kind, str) else "", ()))
    for name, field in ROPE_FIELDS.items():
        value = table.get(name)
        if (value is not None and not field.holds(value)) or (value is None and name in needed):
            yield path + name, field.words, value


def check_counts(raw: Any, path: str = "") -> None:
    """Raise ValueError, naming the field, if transformers would build a huge list while reading a config.json."""
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if isinstance(value, dict):
            check_counts(value, f"{path}{name}.")
        counted = any(word in name for word in ("layer", "depth", "label", "block")) or name.startswith(("num_", "n_"))
        if counted and isinstance(value, (int, float)) and not -MAX_SIZE <= value <= MAX_SIZE:
            raise ValueError(f"{path}{name} must be at most {MAX_SIZE}, got {shown(value)}. Correct it.")
        if "layer" in name and isinstance(value, int) and value > MAX_COUNT and not name.endswith(("size", "dim")):
            raise ValueError(f"{path}{name} must be at most {MAX_COUNT}, got {shown(value)}. Correct it.")

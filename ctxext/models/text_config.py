"""Find the text model's part of a config."""

from __future__ import annotations

import json
from typing import Any

from ctxext.utils.values import shown

# Every class of transformers has them, but a config keeps `rope_parameters` alone.
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")


def text_config_of(config: Any) -> Any:
    """The sub-config of the text model (of an encoder-decoder, the decoder's), or the config itself.

    transformers' `get_text_config` returns a copy for encoder-decoder models with a flat config, so values set there
    would be lost. Raises TypeError if `config` is not a config, ValueError if its text config is not.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            f"expected a model or a transformers config, got {shown(config)}. Load it first, such as by "
            "AutoConfig.from_pretrained(folder)."
        )
    found = config.get_text_config(decoder=True)
    if not hasattr(found, "get_text_config"):
        raise ValueError(
            f"the text config of {type(config).__name__} must be a config with declared fields, got {found!r}."
        )
    return config if type(found) is type(config) else found


def text_section_of(raw: dict[str, Any], config: Any) -> dict[str, Any]:
    """The part of a config.json that `text_config_of(config)` is read from: `raw` itself or a nested object.

    A part that the file omits is added as transformers would save it, with the keys beside it that its class read
    instead: Qwen2.5-VL's files on the hub are flat. Errors: as `path_to_text`.
    """
    outer = config
    for name, inner in path_to_text(config):
        if name not in raw:
            read = [
                k for k in raw if (getattr(inner, k, k) == raw[k] and not hasattr(type(outer), k)) or k in ROPE_KEYS
            ]
            raw[name] = {**json.loads(inner.to_json_string()), **{key: raw.pop(key) for key in read}}
        raw, outer = raw[name], inner
    return raw


def path_to_text(config: Any) -> tuple[tuple[str, Any], ...]:
    """The configs from `config` down to `text_config_of(config)`, by name. Raises ValueError if there is no path."""
    path = _path_to(text_config_of(config), config)
    if path is None:
        raise ValueError(f"cannot find the text config within {type(config).__name__}. Extend the text model alone.")
    return path


def _path_to(part: Any, config: Any) -> tuple[tuple[str, Any], ...] | None:
    if part is config:
        return ()
    # Remote code often does not declare sub_configs.
    for name in dict.fromkeys((*config.sub_configs, *config.__dict__)):
        inner = getattr(config, name, None)
        rest = _path_to(part, inner) if hasattr(inner, "sub_configs") else None
        if rest is not None:
            return (name, inner), *rest
    return None

"""The same model built from another config, without weights: what differs is what the config decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


def text_config_of(config: Any) -> Any:
    """The part of a config that its text model (the decoder of two) reads: an object that the config holds, or itself.

    `get_text_config` gives a copy for encoder-decoder models whose config is flat, and what is set there is lost.

    Raises:
        TypeError: no config.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"this needs a config of transformers, got {config!r}. Load it: AutoConfig.from_pretrained.")
    found = config.get_text_config(decoder=True)
    return config if type(found) is type(config) else found


def text_section_of(raw: dict[str, Any], config: Any) -> dict[str, Any]:
    """The part of a config.json that `text_config_of(config)` is read from: `raw` itself, or what is nested in it.

    A part that the file leaves out, as all of it is the default, is put in.

    Raises:
        ValueError: the text config is in none of the config's parts.
    """
    for name, _ in path_to_text(config):
        raw = raw.setdefault(name, {})
    return raw


def path_to_text(config: Any) -> tuple[tuple[str, Any], ...]:
    """The configs on the way from `config` to `text_config_of(config)`, that one too, with the names they stand under.

    Raises:
        ValueError: the text config is in none of the config's parts.
    """
    path = _path_to(text_config_of(config), config)
    if path is None:
        raise ValueError(f"{type(config).__name__} does not say where its text config stands. Extend that by itself.")
    return path


def _path_to(part: Any, config: Any) -> tuple[tuple[str, Any], ...] | None:
    if part is config:
        return ()
    # Remote code often declares no sub_configs.
    for name in dict.fromkeys((*config.sub_configs, *config.__dict__)):
        inner = getattr(config, name, None)
        rest = _path_to(part, inner) if hasattr(inner, "sub_configs") else None
        if rest is not None:
            return (name, inner), *rest
    return None


def twin_of(model: nn.Module, config: Any) -> nn.Module:
    """A model of the same class built from `config`, on meta."""
    with torch.device("meta"):
        return type(model)(config)  # type: ignore[operator]


@dataclass(frozen=True)
class Difference:
    """Something of a module that two twins have otherwise: a tensor of another shape, or a plain attribute."""

    path: str
    name: str
    kind: Literal["parameter", "buffer", "attribute"]
    before: Any
    after: Any


def differences(before: nn.Module, after: nn.Module) -> Iterator[Difference]:
    """What the twin `after` has otherwise than the twin `before`, module by module.

    Two twins, and not a live model and a twin: a live one may differ by the person's choice as well.
    """
    for path, there in after.named_modules():
        try:
            here = before.get_submodule(path)
        except AttributeError:
            continue
        for kind, old, new in (
            ("parameter", here._parameters, there._parameters),
            ("buffer", here._buffers, there._buffers),
            ("attribute", here.__dict__, there.__dict__),
        ):
            for name, value in new.items():
                if name in old and _differs(old[name], value):
                    yield Difference(path, name, kind, old[name], value)  # type: ignore[arg-type]


def _differs(here: Any, there: Any) -> bool:
    if isinstance(here, Tensor) and isinstance(there, Tensor):
        return here.shape != there.shape
    # bool is an int; a module's `training` is the person's choice.
    plain = type(here) is type(there) and type(here) in (int, float)
    return plain and bool(here != there)

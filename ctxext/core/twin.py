"""The same model built from another config, without weights: what differs is what the config decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


def twin_of(model: nn.Module, config: Any) -> nn.Module:
    """A model of the same class built from `config`, on meta."""
    with torch.device("meta"):
        return type(model)(config)


@dataclass(frozen=True)
class Difference:
    """What differs in a module of two twins: a tensor's shape, or a plain attribute."""

    path: str
    name: str
    kind: Literal["parameter", "buffer", "attribute"]
    before: Any
    after: Any


def differences(before: nn.Module, after: nn.Module) -> Iterator[Difference]:
    """The differences between two twins, module by module. A live model may differ by the user's choices as well."""
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
    # bool is an int; a module's `training` is the user's choice.
    plain = type(here) is type(there) and type(here) in (int, float)
    return plain and bool(here != there)

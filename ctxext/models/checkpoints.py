"""The table of known checkpoints: checkpoints.toml."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True)
class Checkpoint:
    """A row of checkpoints.toml: facts on a published model that its config does not hold."""

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
    """The rows of checkpoints.toml, in matching order."""
    table = tomllib.loads(files("ctxext.models").joinpath("checkpoints.toml").read_text(encoding="utf-8"))
    return tuple(Checkpoint(**row) for row in table["checkpoint"])


def known_checkpoint(text_config: Any, parameters: dict[str, Any]) -> Checkpoint | None:
    """The first row of checkpoints.toml whose every field equals the config's."""

    def value(name: str) -> Any:
        if name in ("rope_theta", "factor"):
            return parameters.get(name)
        if name == "rope_type":
            return parameters.get("rope_type", "default")
        return getattr(text_config, name, None)

    return next((row for row in checkpoints() if all(value(k) == v for k, v in row.match.items())), None)

"""What every plan of an extension says, whatever the position encoding."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ctxext.methods import ContextMethod, check_factor, list_methods, make_method, method_class
from ctxext.models.metadata import Existing, Lengths, summary_of
from ctxext.utils.values import MAX_TOKENS, is_count, shown


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """An extension worked out on paper: the method, its numbers and the config's new values.

    Attributes:
        method: None where existing="keep" leaves the encoding alone.
        updates: new values of attributes of the text config.
        notes: what a person should know, a sentence each.
    """

    text_config: Any
    existing: Existing
    method: ContextMethod | None
    lengths: Lengths
    updates: dict[str, Any]
    notes: tuple[str, ...]

    @property
    @abstractmethod
    def encoding(self) -> str:
        """As in `ContextMethod.encoding`."""

    @property
    def factor(self) -> float:
        """As in `Lengths`."""
        return self.lengths.factor

    @property
    def target_length(self) -> int:
        """As in `Lengths`."""
        return self.lengths.target

    @property
    def start(self) -> int:
        """As in `Lengths`."""
        return self.lengths.start

    @property
    def original_length(self) -> int | None:
        """As in `Lengths`."""
        return self.lengths.original

    @property
    @abstractmethod
    def start_source(self) -> str:
        """Where `start` comes from."""

    @property
    @abstractmethod
    def why_not_portable(self) -> str | None:
        """Why a saved model's weights and config cannot say it all, after "as"; None where they do."""

    @property
    def is_portable(self) -> bool:
        """Whether a saved model's weights and config say it all; otherwise our own file has to."""
        return self.why_not_portable is None

    @property
    def changes_weights(self) -> bool:
        """Whether a saved model has other weights than before."""
        return False

    @property
    def is_late(self) -> bool:
        """Whether it rotates inside attention."""
        return False

    @property
    def summary(self) -> str:
        """`yarn ×4: 512 → 2048 tokens`"""
        return summary_of(None if self.method is None else self.method.name, self.lengths)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: arguments of `extend_context`, the same whatever words the extension was asked for in."""
        return {
            "method": None if self.method is None else self.method.to_dict(),
            "factor": self.factor,
            "existing": self.existing,
            "original_max_position_embeddings": self.original_length,
            "rotated_copy": getattr(self, "rotated_copy", False),
        }

    def apply_to(self, text_config: Any) -> None:
        for name, value in self.updates.items():
            setattr(text_config, name, copy.deepcopy(value))


def factor_and_target(
    factor: float | None, target_length: int | None, method: str | ContextMethod, start: int
) -> tuple[float, int]:
    if isinstance(method, ContextMethod):
        if factor is not None and factor != method.factor:
            raise ValueError(
                f"factor={factor:g} disagrees with the method's own factor: {type(method).__name__}(factor="
                f"{method.factor:g}). Leave factor= out, or make the method for that factor (a fitted one by "
                "ctxext fit)."
            )
        if target_length is not None and target_length != round(method.factor * start):
            raise ValueError(
                f"target_length={target_length} disagrees with the method's own factor: {type(method).__name__}(factor="
                f"{method.factor:g}) reaches {round(method.factor * start)} tokens from {start}. Leave target_length= "
                "out, or make the method for that length (a fitted one by ctxext fit)."
            )
        factor = method.factor
    elif not isinstance(method, str):
        raise TypeError(
            f"method must be a registered name such as 'yarn', or an instance such as YaRN(factor=4); got {method!r}."
        )
    elif factor is not None and target_length is not None:
        raise ValueError(
            f"pass factor= or target_length=, not both; got factor={factor} and target_length={target_length}."
        )
    if target_length is not None:
        if not is_count(target_length, 1, MAX_TOKENS):
            raise ValueError(f"target_length must be a number of tokens (an int), got {shown(target_length)}.")
        if factor is None:
            factor = max(target_length / start, 1.0)
    else:
        factor = 4.0 if factor is None else factor
        check_factor(factor)
        target_length = round(factor * start)
    return float(factor), target_length


ENCODINGS = {
    "rope": "rotary position embeddings",
    "alibi": "ALiBi",
    "learned": "a learned position table",
    "sinusoidal": "a sinusoidal position table",
    "t5": "T5's bucketed bias",
    "relative": "relative position representations",
}


def chosen_method(method: str | ContextMethod, factor: float, encoding: str, options: dict[str, Any]) -> ContextMethod:
    """The method, built from its name and options if need be.

    Raises:
        ValueError: it is for another position encoding; or as `make_method`.
    """
    if isinstance(method, ContextMethod):
        if options:
            raise ValueError(
                f"options {', '.join(options)} come with a method's name; {type(method).__name__} is built already. "
                "Set them on the instance."
            )
        chosen = method
    else:
        check_encoding(method_class(method), encoding)
        chosen = make_method(method, factor, **options)
    check_encoding(type(chosen), encoding)
    return chosen


def check_encoding(method: type[ContextMethod], encoding: str) -> None:
    """Raise ValueError, naming those that would do, if a method is for another position encoding."""
    if method.encoding != encoding:
        fitting = ", ".join(repr(cls.name) for cls in list_methods(encoding))
        raise ValueError(
            f"{method.name} is a method for {ENCODINGS[method.encoding]}, but this model has {ENCODINGS[encoding]}. "
            f"Use one of {fitting}, or leave method= out."
        )

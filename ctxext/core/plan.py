"""The plan of an extension, for any position encoding."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from ctxext.core.patch import Patch
from ctxext.methods import ContextMethod, check_factor, in_words, list_methods, make_method, method_class
from ctxext.models.metadata import RECORD, Existing, Lengths, summary_of
from ctxext.utils.values import MAX_TOKENS, is_count, reached, shown


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `ctxext.extend_context`; `options` are fields of the method."""

    factor: float | None = None
    method: str | ContextMethod | None = None
    target_length: int | None = None
    original_max_position_embeddings: int | None = None
    existing: Existing = "refuse"
    length: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


# LongRoPE extends LLaMA 2 from 4k to 2,048k tokens (arXiv 2402.13753). A larger factor is probably a length.
LARGEST_PUBLISHED = 512

ARGUMENTS = tuple(each.name for each in fields(Request) if each.name != "options")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planned extension: the method, its numbers, the config's new values, the changes to the model.

    Attributes:
        encoding: as in `ContextMethod.encoding`.
        method: None where existing="keep" leaves the encoding alone.
        trained_source: where `lengths.trained` comes from.
        updates: new values of attributes of the text config.
        patches: the changes to a live model; empty if only the window widens.
        why_not_portable: why a saved model's weights and config cannot express it ("because ..."); None if they can.
        changes_weights: whether the saved weights differ from the original ones.
        notes: notes for the user, a sentence each.
    """

    encoding: str
    text_config: Any
    existing: Existing
    method: ContextMethod | None
    lengths: Lengths
    trained_source: str
    updates: dict[str, Any]
    patches: tuple[Patch, ...] = ()
    why_not_portable: str | None = None
    changes_weights: bool = False
    notes: tuple[str, ...] = ()

    # The next four as in `Lengths`.
    @property
    def factor(self) -> float:
        return self.lengths.factor

    @property
    def target_length(self) -> int:
        return self.lengths.target

    @property
    def start(self) -> int:
        return self.lengths.start

    @property
    def original_length(self) -> int | None:
        return self.lengths.original

    @property
    def is_portable(self) -> bool:
        """Whether a saved model's weights and config express it; otherwise `context_extension.json` does."""
        return self.why_not_portable is None

    @property
    def in_attention(self) -> bool:
        """Whether it rotates inside attention."""
        return self.method is not None and self.method.in_attention

    @property
    def summary(self) -> str:
        """`yarn ×4: 512 → 2,048 tokens`"""
        return summary_of(None if self.method is None else self.method.title, self.lengths)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the method that are not its defaults."""
        return {} if self.method is None else self.method.chosen

    @property
    def options_in_words(self) -> str:
        """`group_size 9, window 128`"""
        return in_words(self.options)

    @property
    def figures(self) -> list[tuple[str, str]]:
        """What `print(model.context_extension)` shows of the encoding, by label."""
        return [("options", words)] if (words := self.options_in_words) else []

    @property
    def saved_as(self) -> str:
        """Where a saved model holds the extension."""
        if not self.is_portable:
            return f"{RECORD} beside a config without it, because {self.why_not_portable}"
        return f"weights and config ({', '.join(name for name in self.updates if name != 'ctxext')})"

    def to_dict(self) -> dict[str, Any]:
        """The arguments of `extend_context`, normalised, as JSON."""
        return {
            "method": None if self.method is None else self.method.to_dict(),
            "factor": self.factor,
            "existing": self.existing,
            "original_max_position_embeddings": self.original_length,
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
                f"factor={factor:g} conflicts with the method's own factor, {type(method).__name__}(factor="
                f"{method.factor:g}). Leave factor= out, or create the method with that factor (refit a fitted one "
                "with ctxext fit)."
            )
        if target_length is not None and target_length != reached(method.factor, start):
            raise ValueError(
                f"target_length={target_length} conflicts with the method's own factor: {type(method).__name__}(factor="
                f"{method.factor:g}) extends {start} to {reached(method.factor, start)} tokens. Leave target_length= "
                "out, or create the method for that length (refit a fitted one with ctxext fit)."
            )
        factor = method.factor
    elif not isinstance(method, str):
        swapped = " Pass the factor first, or by name: factor=4, method='yarn'." * isinstance(factor, str)
        raise TypeError(
            f"method must be a registered name such as 'yarn', or an instance such as YaRN(factor=4); got {method!r}."
            f"{swapped}"
        )
    elif factor is not None and target_length is not None:
        raise ValueError(
            f"pass factor= or target_length=, not both; got factor={factor} and target_length={target_length}. "
            "Leave one of them out (in a config file, set it to null)."
        )
    if target_length is not None:
        if not is_count(target_length, 1, MAX_TOKENS):
            raise ValueError(
                f"target_length must be a whole number of tokens up to {MAX_TOKENS}, such as 131072, "
                f"got {shown(target_length)}."
            )
        if factor is None:
            factor = max(target_length / start, 1.0)
            while factor * start < target_length:  # by rounding
                factor = math.nextafter(factor, math.inf)
    else:
        factor = 4.0 if factor is None else factor
        check_factor(factor)
        target_length = reached(factor, start)
        if isinstance(method, str) and factor > LARGEST_PUBLISHED and float(factor).is_integer():
            of_length = f"pass target_length={factor:.0f}" if factor > start else "this model already covers it"
            raise ValueError(
                f"factor={factor:g} would extend {start} to {target_length} tokens. If {factor:g} is a length, "
                f"{of_length}; for that many tokens, pass target_length={target_length}."
            )
    return float(factor), target_length


ENCODINGS = {
    "rope": "rotary position embeddings",
    "alibi": "ALiBi",
    "learned": "a learned position table",
    "sinusoidal": "a sinusoidal position table",
    "t5": "T5's bucketed bias",
    "relative": "relative position representations",
}
DEFAULT_METHODS = {
    "rope": "yarn",
    "alibi": "alibi_scaling",
    "learned": "hierarchical",
    "sinusoidal": "sinusoidal_interpolation",
    "t5": "bucket_scaling",
    "relative": "distance_interpolation",
}


def chosen_method(method: str | ContextMethod, factor: float, encoding: str, options: dict[str, Any]) -> ContextMethod:
    """The method, built from its name and options if needed. Raises ValueError if it is for another encoding."""
    if isinstance(method, str):
        cls = method_class(method, encoding)
        check_encoding(cls, encoding)
        known = [each.name for each in fields(cls)]
        for option in (each for each in options if each not in known):
            near = get_close_matches(option, [*known, *ARGUMENTS], n=1)
            if near and near[0] in ARGUMENTS:
                raise ValueError(f"unknown argument {option!r}; did you mean {near[0]!r}?")
        return make_method(method, factor, **options)
    if options:
        raise ValueError(
            f"options {', '.join(options)} require a method name, but {type(method).__name__} is an instance. "
            "Set them on the instance."
        )
    check_encoding(type(method), encoding)
    return method


def check_encoding(method: type[ContextMethod], encoding: str) -> None:
    """Raise ValueError, naming the methods that fit, if a method is for another position encoding."""
    if method.encoding != encoding:
        fitting = ", ".join(repr(cls.name) for cls in list_methods(encoding))
        raise ValueError(
            f"{method.name} is a method for {ENCODINGS[method.encoding]}, but this model has {ENCODINGS[encoding]}. "
            f"Use one of {fitting}, or leave method= out."
        )

"""What every plan of an extension says, whatever the position encoding."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ctxext.json_files import FACTOR, NUMBER, OBJECT, TEXT, TOKENS, JsonObject, Kind, or_none
from ctxext.methods import ContextMethod, check_factor, list_methods, make_method, method_class
from ctxext.values import MAX_TOKENS, is_count, shown

Existing = Literal["refuse", "keep", "compose", "replace"]
EXISTING = Kind(f"one of {', '.join(get_args(Existing))}", lambda value: value in get_args(Existing))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How far a model reaches and from where, in tokens: the only definition of these numbers.

    Attributes:
        original: trained length before any scaling, which existing="replace" starts from; None where nothing says it.
        trained: trained length with the frequencies that the extension started from.
        start: what the factor counts from: `original`, or what a scaling that is kept or composed with reaches.
        target: what is reached.
        factor: target / start, as it was asked for.
    """

    original: int | None
    trained: int
    start: int
    target: int
    factor: float

    @property
    def words(self) -> str:
        """`512 → 2048 tokens`"""
        return f"{self.start} → {self.target} tokens"

    @classmethod
    def of_mark(cls, mark: dict[str, Any]) -> Lengths:
        """Those of an extension that a config notes, in the form that `check_mark` asks for."""
        rest = {name: mark[name] for name in ("trained", "start", "target", "factor")}
        return cls(original=mark["original"]["length"], **rest)

    def to_mark(self) -> dict[str, Any]:
        """The inverse of `of_mark`."""
        rest = {name: getattr(self, name) for name in ("trained", "start", "target", "factor")}
        return {"original": {"length": self.original}, **rest}


def summary_of(name: str | None, lengths: Lengths) -> str:
    """`yarn ×4: 512 → 2048 tokens`; None is a native scaling that was kept."""
    return f"{'native scaling kept' if name is None else name} ×{lengths.factor:g}: {lengths.words}"


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


def by_own_names(text_config: Any, updates: dict[str, Any]) -> dict[str, Any]:
    """The fields under the names that the config itself keeps them by: n_positions, not max_position_embeddings."""
    return {text_config.attribute_map.get(name, name): value for name, value in updates.items()}


def live_mark(text_config: Any) -> dict[str, Any] | None:
    """The note that ctxext left in this config, unless one of the fields that it set was edited since.

    Raises:
        ValueError: it is not as ctxext writes it; says which field.
    """
    mark = getattr(text_config, "ctxext", None)
    if mark is None:
        return None
    place = getattr(text_config, "_name_or_path", "")
    check_mark(mark, f"{place or 'the model'}'s config.json")
    return mark if all(still_says(getattr(text_config, n, None), v) for n, v in mark["fields"].items()) else None


def check_mark(mark: Any, file: str, entry: str = "ctxext") -> None:
    """Raise ValueError, naming the field, unless `mark` is as ctxext writes it into a config."""
    if not OBJECT.holds(mark):
        raise ValueError(f"{entry} in {file} must be {OBJECT.words}, got {shown(mark)}. Fetch the file again.")
    read = JsonObject(file, mark, f"{entry}.")
    read.get("version", TEXT)
    read.part("fields")
    if read.get("method", or_none(OBJECT)) is not None:
        method = read.part("method")
        method.get("name", TEXT)
        method.get("factor", FACTOR)
    for name in ("trained", "start", "target"):
        read.get(name, TOKENS)
    read.get("factor", FACTOR)
    read.get("existing", EXISTING)
    original = read.part("original")
    original.get("length", or_none(TOKENS))
    if "rope_theta" not in original.content:  # of another encoding than RoPE
        read.part("method")
    elif isinstance(original.content["rope_theta"], dict):  # by type of layer
        thetas = original.part("rope_theta")
        for name in thetas.content:
            thetas.get(name, NUMBER)
    else:
        original.get("rope_theta", NUMBER)


def still_says(now: Any, then: Any) -> bool:
    """Whether a value of a config is what it was; transformers adds to dictionaries as it loads them."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and now[key] == value for key, value in then.items())
    return bool(now == then)


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

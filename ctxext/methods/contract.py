"""The contract of a method, and the registry. Pure: numbers in, numbers out."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from torch import Tensor

from ctxext.encodings.rope import RopeGeometry
from ctxext.utils.json_files import FACTOR, FLAG, OBJECT, TEXT, JsonObject, Kind
from ctxext.utils.values import MAX_FACTOR, MAX_TOKENS, are_numbers, is_count, is_number, reached, shown, suggest

# λ of a pair that does not rotate: JSON has no infinity, and over a million tokens such a pair turns by 1e-6 radians.
NO_ROTATION = 1e12


class Paper(NamedTuple):
    """The publication of a method."""

    title: str
    year: int
    url: str


@dataclass(frozen=True, kw_only=True)
class ContextMethod(ABC):
    """The base class of every method: a frozen dataclass with a name, a paper, an encoding and a factor.

    Attributes:
        encoding: the position encoding it extends: "rope", "alibi", "learned", "sinusoidal", "t5" or "relative".
        factor: target length / trained length; >= 1.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]]
    # Whether it changes a model within its trained length, so that factor 1 means something.
    changes_trained: ClassVar[bool] = False
    # Where to get the options that have no default, for errors.
    source_of_required: ClassVar[str] = ""
    # Where options belong that are not its own, a sentence for errors.
    other_options: ClassVar[str] = ""
    paper: ClassVar[Paper]
    encoding: ClassVar[str]
    training: ClassVar[str] = "zero-shot or fine-tuned"

    factor: float

    def __post_init__(self) -> None:
        check_factor(self.factor)
        object.__setattr__(self, "factor", float(self.factor))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (np.generic, np.ndarray, Tensor)):  # JSON has none of these
                value = value.tolist()
                object.__setattr__(self, field.name, value)
            _check_option(f"{field.name} of {getattr(self, 'name', type(self).__name__)!r}", field.type, value)

    @property
    def title(self) -> str:
        """Its name on screens and cards."""
        return self.name

    @property
    def in_attention(self) -> bool:
        """Whether it needs in-attention RoPE (`ctxext.attention`), which config.json cannot express."""
        return False

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that are not the defaults, without the factor and other methods."""
        values = {field: getattr(self, field.name) for field in fields(self) if field.name != "factor"}
        return {
            field.name: value
            for field, value in values.items()
            if value != field.default and not isinstance(value, ContextMethod)
        }

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description: the method's name and its fields."""

        def plain(value: Any) -> Any:
            if isinstance(value, ContextMethod):
                return value.to_dict()
            return list(value) if isinstance(value, tuple) else value

        return {"name": self.name, **{field.name: plain(getattr(self, field.name)) for field in fields(self)}}


@dataclass(frozen=True, kw_only=True)
class RopeMethod(ContextMethod):
    """A method for rotary position embeddings."""

    encoding: ClassVar[str] = "rope"

    def at_length(self, rope: RopeGeometry, length: int) -> RopeScaling:
        """The static method that treats every sequence as `length` tokens long.

        Its factor is length / trained length, so that it is a plan for exactly that length.
        """
        raise ValueError(
            f"length={length} applies to dynamic methods only, and {self.name} does not depend on the length. "
            "Drop length=."
        )

    @property
    def untempered(self) -> RopeMethod:
        """The method that gives frequencies and positions: itself, unless it adds a temperature to another."""
        return self

    def query_scaling(self, rope: RopeGeometry, positions: Int[Tensor, "*batch"]) -> Float64[Tensor, "*batch"] | None:
        """A multiplier of each query; None for none."""
        return None

    @classmethod
    def example(cls, rope: RopeGeometry, factor: float) -> RopeMethod:
        """An instance for `rope`: for `compare`, the method table and the tests.

        Raises:
            ValueError: the method has options without a default, and no `example` of its own.
        """
        if needed := required_options(cls):
            raise ValueError(
                f"{cls.name} needs {' and '.join(needed)}. Give the class an `example(cls, rope, factor)` that returns "
                "an instance, or each option a default."
            )
        return cls(factor=factor)


@dataclass(frozen=True, kw_only=True)
class RopeScaling(RopeMethod):
    """A method of one vector and one scalar: rescale factors λ, and a multiplier of cos and sin.

    Both are checked where they are computed: they must be finite and > 0 in float32, or ValueError is raised.
    """

    # Whether the scale depends on the length of the whole call, not on each query: then no cache can be exact.
    of_the_call: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in {"rescale_factors", "attention_scaling"} & cls.__dict__.keys():
            setattr(cls, name, _checked(cls.__dict__[name]))

    def scale(self, rope: RopeGeometry, length: Int[Tensor, "*batch"] | None = None) -> Float64[Tensor, "*batch"]:
        """The factor that applies at each `length` in tokens; dynamic methods override it."""
        return over_lengths(torch.tensor(self.factor, dtype=torch.float64), length)

    @abstractmethod
    def rescale_factors(
        self, rope: RopeGeometry, length: Int[Tensor, "*batch"] | None = None
    ) -> Float64[Tensor, "*batch pair"]:
        """λ for each pair, at each `length` in tokens (None: the target length); NO_ROTATION if it does not rotate."""

    def attention_scaling(
        self, rope: RopeGeometry, length: Int[Tensor, "*batch"] | None = None
    ) -> Float64[Tensor, "*batch"]:
        """The multiplier of cos and sin at each `length`; attention logits grow by its square."""
        return over_lengths(torch.tensor(1.0, dtype=torch.float64), length)

    def scaled(
        self, rope: RopeGeometry, length: Int[Tensor, "*batch"] | None = None
    ) -> tuple[Float64[Tensor, "*batch pair"], Float64[Tensor, "*batch"]]:
        """The frequencies (radians per token) and the multiplier of cos and sin of this method on top of `rope`."""
        scaling = rope.attention_factor * self.attention_scaling(rope, length)
        return rope.inv_freq / self.rescale_factors(rope, length), scaling

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        """This method on unscaled RoPE as transformers' `rope_parameters`; `longrope` where it has no native form."""
        return longrope_parameters(self.rescale_factors(rope), float(self.attention_scaling(rope)), self.factor, rope)

    def ladder(self, rope: RopeGeometry) -> Int[Tensor, " rung"]:
        """The lengths in tokens at which the scale steps, ascending. Dynamic methods must override this.

        Each query uses the first one >= its position + 1, or the last.
        """
        if self.is_dynamic and not self.of_the_call:
            raise TypeError(
                f"{type(self).__name__} is length-dependent, so it must implement ladder(rope): the lengths at which "
                "its scale steps. See the methods in ctxext.methods.dynamic."
            )
        return torch.tensor([reached(self.factor, rope.original_max_position_embeddings)])

    def factor_at(self, rope: RopeGeometry, length: int) -> float:
        """length / trained length, from 1 to `factor`."""
        return min(max(length / rope.original_max_position_embeddings, 1.0), self.factor)

    @property
    def start_tokens(self) -> int:
        """How many tokens at the start keep the unscaled frequencies at any length."""
        return 0

    @property
    def is_dynamic(self) -> bool:
        """Whether λ changes with the length."""
        return type(self).at_length is not RopeMethod.at_length

    @property
    def in_attention(self) -> bool:
        scales_queries = type(self).query_scaling is not RopeMethod.query_scaling
        return self.is_dynamic or self.start_tokens > 0 or scales_queries


def _checked(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `rescale_factors` or `attention_scaling` to check dtype, shape and values."""

    @functools.wraps(compute)
    def checked(self: RopeScaling, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        values = compute(self, rope, length)
        if torch.compiler.is_compiling():  # a traced graph has no values to check
            return values
        what = f"{compute.__name__} of {self.name!r}"
        pairs = (rope.dim // 2,) if compute.__name__ == "rescale_factors" else ()
        shape = (*(() if length is None else length.shape), *pairs)
        if not isinstance(values, Tensor) or values.dtype != torch.float64 or values.shape != shape:
            got = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
            raise ValueError(f"{what} must return a float64 tensor of shape {shape}, got {got}.")
        bad = values[~((values.float() > 0) & values.float().isfinite())]
        if len(bad):
            remedy = f" For a pair that does not rotate, return {NO_ROTATION:g}." if pairs else ""
            raise ValueError(f"{what} must be finite and > 0 in float32, got {float(bad[0]):g}.{remedy}")
        return values

    return checked


@dataclass(frozen=True)
class Branch:
    """The pairs (query, key) whose buckets lie `first` <= bucket(query) - bucket(key) < `stop` apart.

    Attributes:
        bucket: maps positions in tokens to integers, non-decreasing.
        query, key: map positions in tokens to those at which queries and keys are rotated.
    """

    first: float
    stop: float
    bucket: Callable[[Tensor], Tensor]
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]

    def holds(self, query: Shaped[Tensor, "*#pairs"], key: Shaped[Tensor, "*#pairs"]) -> Bool[Tensor, "*pairs"]:
        """Whether each pair of positions belongs to the branch."""
        apart = self.bucket(query) - self.bucket(key)
        if self.first == -math.inf:
            return apart < self.stop
        return apart >= self.first if self.stop == math.inf else (apart >= self.first) & (apart < self.stop)


@dataclass(frozen=True, kw_only=True)
class PositionRemapping(RopeMethod):
    """A method that keeps the frequencies and maps distances beyond the trained length to trained ones.

    Causal pairs of query and key are split into branches; each branch rotates both at its own positions.
    """

    training: ClassVar[str] = "zero-shot"

    @abstractmethod
    def branches(self, rope: RopeGeometry) -> tuple[Branch, ...]:
        """The branches; every pair of positions must belong to exactly one.

        Raises:
            ValueError: an option does not fit the trained length.
        """

    def sizes(self, rope: RopeGeometry) -> dict[str, int]:
        """The options that are whole numbers, with the defaults for this RoPE.

        Raises:
            ValueError: one does not fit the trained length.
        """
        return {}

    @abstractmethod
    def reach(self, rope: RopeGeometry) -> float:
        """The length in tokens up to which every distance is mapped to a trained one."""

    def check_reach(self, rope: RopeGeometry, target_length: int) -> None:
        """Raise ValueError, naming options that suffice, unless `target_length` tokens are covered."""

    def distance(self, rope: RopeGeometry, query: Tensor, key: Tensor) -> Float64[Tensor, "*pairs"]:
        """The effective distance in tokens between positions `query` and `key` (which broadcast)."""
        found = torch.zeros_like(query.double() + key.double())
        for branch in self.branches(rope):
            apart = branch.query(query.double()) - branch.key(key.double())
            found = torch.where(branch.holds(query, key), apart, found)
        return found

    def at_length(self, rope: RopeGeometry, length: int) -> RopeScaling:
        raise ValueError(
            f"{self.name} remaps positions inside attention and has no static form, so length={length} does not "
            "apply. Drop length=, or use a frequency method such as 'yarn'."
        )

    @property
    def in_attention(self) -> bool:
        return True


# --------------------------------------------------------------------- other position encodings


@dataclass(frozen=True, kw_only=True)
class SlopeScaling(ContextMethod):
    """A method for ALiBi: new slopes from the trained ones."""

    encoding: ClassVar[str] = "alibi"

    @abstractmethod
    def slopes(self, slopes: Float64[Tensor, " head"]) -> Float64[Tensor, " head"]:
        """The slope of each head, from the trained slopes."""


@dataclass(frozen=True, kw_only=True)
class TableResizing(ContextMethod):
    """A method for learned position tables: more rows from the trained ones."""

    encoding: ClassVar[str] = "learned"

    @abstractmethod
    def rows(self, table: Float[Tensor, "old dim"], n_rows: int) -> Float64[Tensor, "new dim"]:
        """`n_rows` rows from the trained `table`, one for each position.

        Raises:
            ValueError: the method does not support that many rows.
        """


@dataclass(frozen=True, kw_only=True)
class PositionScaling(ContextMethod):
    """A method for sinusoidal tables: the position at which each row is computed."""

    encoding: ClassVar[str] = "sinusoidal"

    @abstractmethod
    def positions(self, positions: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
        """Map positions in tokens to the (possibly fractional) positions whose sines and cosines are used."""


@dataclass(frozen=True, kw_only=True)
class BucketScaling(ContextMethod):
    """A method for T5's bucketed bias: the distance from which all positions share the last bucket."""

    encoding: ClassVar[str] = "t5"

    @abstractmethod
    def max_distance(self, max_distance: int) -> int:
        """The new maximum distance in tokens, from the trained one."""


@dataclass(frozen=True, kw_only=True)
class DistanceScaling(ContextMethod):
    """A method for relative representations (Shaw, Transformer-XL): the effective distance of each pair."""

    encoding: ClassVar[str] = "relative"

    @abstractmethod
    def distances(self, distances: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
        """Map distances in tokens to the (possibly fractional) distances whose representations are used."""


# ---------------------------------------------------------------------------------- the registry

_METHODS: dict[str, type[ContextMethod]] = {}
_Method = TypeVar("_Method", bound=type[ContextMethod])


def register(name: str, *, aliases: Sequence[str] = ()) -> Callable[[_Method], _Method]:
    """Class decorator: register a method under `name`. Raises ValueError if another method has a name."""

    def decorate(cls: _Method) -> _Method:
        for known in (name, *aliases):
            taken = _METHODS.get(known)
            # The same class is registered again if a notebook cell is run twice.
            if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"the method name {known!r} is already taken by {taken.__qualname__}. Choose another.")
        cls.name, cls.aliases = name, tuple(aliases)
        _METHODS.update(dict.fromkeys((name, *aliases), cls))
        return cls

    return decorate


def list_methods(encoding: str | None = None) -> list[type[ContextMethod]]:
    """Every registered method, in order of registration; with `encoding`, only those for it (such as "rope")."""
    return [cls for cls in dict.fromkeys(_METHODS.values()) if encoding in (None, cls.encoding)]


def method_class(name: str, encoding: str | None = None) -> type[ContextMethod]:
    """The method registered as `name`, or under that alias.

    Raises:
        ValueError: an unknown name; the error lists the methods for `encoding`, or all.
    """
    if name == "longrope2":
        raise ValueError(
            "LongRoPE2 is a search for the factors of 'longrope': run `ctxext fit --by longrope2`, and pass the method "
            "that it finds."
        )
    if name not in _METHODS:
        fitting = [known for known, cls in _METHODS.items() if encoding in (None, cls.encoding)]
        raise ValueError(f"unknown method {name!r}{suggest(name, fitting)}")
    return _METHODS[name]


def required_options(cls: type[ContextMethod]) -> list[str]:
    """The options without a default."""
    of = fields(cls)
    return [f.name for f in of if f.default is f.default_factory is MISSING and f.name != "factor"]


def make_method(name: str, factor: float, /, **options: Any) -> ContextMethod:
    """Build a method by name; `options` are the fields of its dataclass.

    Raises:
        ValueError: the name or an option is unknown, a required option is missing, or a value is invalid.
    """
    cls = method_class(name)
    known = {field.name: field for field in fields(cls) if field.name != "factor"}
    for option in options:
        if option not in known:
            takes = suggest(option, known) if known else ". It takes none."
            raise ValueError(f"method {cls.name!r} has no option {option!r}{takes}{cls.other_options}")
    missing = [name for name in required_options(cls) if name not in options]
    if missing:
        raise ValueError(
            f"method {cls.name!r} needs {', '.join(missing)}. Pass {', '.join(f'{name}=...' for name in missing)}"
            f"{cls.source_of_required}."
        )
    return cls(factor=factor, **options)


def method_from_dict(description: Any, file: str = "a saved method", entry: str = "method") -> ContextMethod:
    """The inverse of `ContextMethod.to_dict`, for file contents.

    Args:
        file, entry: where it was read, for error messages.

    Raises:
        ValueError: it is not a valid method; the error says where, and which field.
    """
    if not OBJECT.holds(description):
        raise ValueError(f"{entry} in {file} must be {OBJECT.words}, got {shown(description)}. Recreate the file.")
    read = JsonObject(file, description, f"{entry}.")
    name, factor = read.get("name", TEXT), read.get("factor", FACTOR)

    options = {key: value for key, value in description.items() if key not in ("name", "factor")}
    for key, value in options.items():
        if isinstance(value, dict):
            options[key] = method_from_dict(value, file, f"{entry}.{key}")
        elif isinstance(value, list):
            options[key] = tuple(value)
    try:
        return make_method(name, factor, **options)
    except (ValueError, TypeError, ArithmeticError) as error:  # raised by a method's own checks
        raise ValueError(f"{entry} in {file}: {error}") from error


# Annotations of options, and the check of their values.
_KINDS: dict[str, Kind] = {
    "bool": FLAG,
    "int": Kind(f"a whole number within ±{MAX_TOKENS}", partial(is_count, low=-MAX_TOKENS, high=MAX_TOKENS)),
    "float": Kind("a finite number", is_number),
    "str": TEXT,
    "tuple[float, ...]": Kind("a list of finite numbers, such as [1, 2.5]", are_numbers),
    "tuple[float, int]": Kind("a list of two numbers", lambda value: are_numbers(value) and len(value) == 2),
}


def _check_option(name: str, annotation: Any, value: Any) -> None:
    """Raise ValueError unless `value` matches the annotation of the method's field; unknown annotations pass."""
    kind = str(getattr(annotation, "__name__", annotation))
    expected = _KINDS.get(kind.removesuffix(" | None"), Kind("given", lambda value: True))
    if value is None:
        if not kind.endswith("| None"):
            raise ValueError(f"{name} must be {expected.words}, got None.")
    elif not expected.holds(value):
        bad = value
        if kind.startswith("tuple[float, ...]") and isinstance(value, (list, tuple)):  # which of many
            bad = next(each for each in value if not is_number(each))
        raise ValueError(f"{name} must be {expected.words}, got {shown(bad)}.")


def with_options(method: ContextMethod | None) -> str:
    """`self_extend with group_size 9`; None is the method of an extension that kept the scaling."""
    if method is None:
        return "the scaling that was kept"
    return f"{method.title} with {in_words(method.chosen) or 'default options'}"


def in_words(options: dict[str, Any]) -> str:
    """`group_size 9, window 128`"""
    shown = {name: f"{len(it)} values" if isinstance(it, tuple) else it for name, it in options.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def check_factor(factor: float) -> None:
    """Raise ValueError unless `factor` is a finite number >= 1."""
    if not is_number(factor, high=MAX_FACTOR):
        raise ValueError(
            f"factor must be a finite number >= 1, up to 1e6, got {shown(factor)}. For twice the length, pass "
            f"factor=2{', without quotes' * isinstance(factor, str)}."
        )
    if factor < 1:
        raise ValueError(
            f"factor must be >= 1, got {factor}. It is target length / trained length: "
            "to reach 16384 tokens from 4096, pass factor=4."
        )


def check_attention_factor(attention_factor: float | None) -> None:
    """Raise ValueError unless `attention_factor` is None or a finite number > 0."""
    if attention_factor is not None and not is_number(attention_factor, 1e-6, 1e6):
        raise ValueError(
            f"attention_factor must be a finite number > 0 (1e-6 to 1e6), got {shown(attention_factor)}. Leave it out "
            "to use the method's own."
        )


def over_lengths(value: Tensor, length: Tensor | None) -> Tensor:
    """Repeat a length-independent value for each of `length`."""
    return value if length is None else value.expand((*length.shape, *value.shape))


def longrope_parameters(
    factors: Float64[Tensor, " pair"], attention_factor: float, factor: float, rope: RopeGeometry
) -> dict[str, Any]:
    """Any static λ over plain RoPE as transformers' `longrope`: both lists are equal, so nothing switches."""
    values = factors.tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": rope.rope_theta,
        "factor": float(factor),
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "attention_factor": attention_factor,
        "short_factor": values,
        "long_factor": list(values),
    }

"""The methods: each a frozen dataclass that turns numbers into rescale factors. Add yours here.

A RoPE method is one vector and one scalar: rescale factors λ (`inv_freq' = inv_freq / λ`) and a
multiplier of cos and sin. It sees a `RopeGeometry`, never a model or a config.

    @register("half_pi", aliases=())
    @dataclass(frozen=True, kw_only=True)
    class HalfPI(RopeScaling):
        \"""λ_i = factor on the lower half of the frequencies, 1 elsewhere.\"""
        paper: ClassVar[Paper] = Paper("My notes", 2026, "https://example.org")

        def rescale_factors(self, rope, length=None):
            pairs = rope.dim // 2
            factors = torch.ones(pairs, dtype=torch.float64)
            factors[pairs // 2 :] = self.factor
            return over_lengths(factors, length)

That is all: `extend_context(model, method="half_pi")`, the command line, the saved config (as
transformers' `longrope`) and the matrix of tests know it by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ctxext.encodings.rope import (
    RopeGeometry,
    correction_dim,
    inverse_frequencies,
    linear_ramp,
    rotations,
    wavelengths,
)


class Paper(NamedTuple):
    """Where a method comes from."""

    title: str
    year: int
    url: str


@dataclass(frozen=True, kw_only=True)
class RopeScaling(ABC):
    """The whole contract of a RoPE method.

    Attributes:
        factor: the largest scale that the method reaches, in units of the trained length; >= 1.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]]
    paper: ClassVar[Paper]
    training: ClassVar[str] = "zero-shot or fine-tuned"

    factor: float

    def __post_init__(self) -> None:
        check_factor(self.factor)
        object.__setattr__(self, "factor", float(self.factor))

    @abstractmethod
    def rescale_factors(
        self, rope: RopeGeometry, length: Int[Tensor, "*batch"] | None = None
    ) -> Float64[Tensor, "*batch pair"]:
        """λ for each pair, at each `length` in tokens (None: at the full reach of `factor`)."""

    def attention_scaling(
        self, rope: RopeGeometry, length: Int[Tensor, "*batch"] | None = None
    ) -> Float64[Tensor, "*batch"]:
        """The multiplier of cos and sin at each `length`; attention logits grow by its square."""
        return over_lengths(torch.tensor(1.0, dtype=torch.float64), length)

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        """This method on unscaled RoPE in transformers' own words, where it has them.

        Without a native form: `longrope` with both factor lists equal to λ, which every static λ fits.
        """
        return longrope_parameters(self.rescale_factors(rope), float(self.attention_scaling(rope)), self.factor, rope)

    def at_length(self, rope: RopeGeometry, length: int) -> RopeScaling:
        """The static method to use when every sequence is to be treated as `length` tokens long."""
        raise ValueError(
            f"{self.name} does not change with the length, so length={length} has no meaning for it. "
            "Drop length=; only the dynamic methods take it."
        )

    @property
    def is_dynamic(self) -> bool:
        """Whether λ changes with the length."""
        return type(self).at_length is not RopeScaling.at_length

    @classmethod
    def example(cls, rope: RopeGeometry, factor: float) -> RopeScaling:
        """An instance for `rope`, as the tests and the method table need one of every method."""
        return cls(factor=factor)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description: the method's name and its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "name": self.name,
            **{k: v.to_dict() if isinstance(v, RopeScaling) else v for k, v in values.items()},
        }


# ---------------------------------------------------------------------------------- the registry

_METHODS: dict[str, type[RopeScaling]] = {}
_Method = TypeVar("_Method", bound=type[RopeScaling])


def register(name: str, *, aliases: Sequence[str] = ()) -> Callable[[_Method], _Method]:
    """Class decorator: make a method known by `name` everywhere.

    Raises:
        ValueError: a name is taken by another method.
    """

    def decorate(cls: _Method) -> _Method:
        for known in (name, *aliases):
            taken = _METHODS.get(known)
            # The same class again is a notebook cell that was run twice.
            if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"the method name {known!r} is taken by {taken.__qualname__}. Choose another.")
        cls.name, cls.aliases = name, tuple(aliases)
        _METHODS.update(dict.fromkeys((name, *aliases), cls))
        return cls

    return decorate


def list_methods() -> list[type[RopeScaling]]:
    """Every registered method once, in order of registration."""
    return list(dict.fromkeys(_METHODS.values()))


def method_class(name: str) -> type[RopeScaling]:
    """The method registered as `name` (or an alias of it)."""
    try:
        return _METHODS[name]
    except KeyError:
        raise ValueError(f"unknown method {name!r}{suggest(name, _METHODS)}") from None


def make_method(name: str, factor: float, **options: Any) -> RopeScaling:
    """Build a method by name; `options` are the fields of its dataclass.

    Raises:
        ValueError: the name or an option is unknown, a needed option is missing, or a value is bad.
    """
    cls = method_class(name)
    known = {field.name: field for field in fields(cls) if field.name != "factor"}
    for option in options:
        if option not in known:
            takes = suggest(option, known) if known else ". It takes none."
            raise ValueError(f"method {cls.name!r} has no option {option!r}{takes}")
    missing = [
        field.name
        for field in known.values()
        if field.default is MISSING and field.default_factory is MISSING and field.name not in options
    ]
    if missing:
        raise ValueError(
            f"method {cls.name!r} needs {', '.join(missing)}. Pass {', '.join(f'{name}=...' for name in missing)}."
        )
    return cls(factor=factor, **options)


def method_from_dict(description: dict[str, Any]) -> RopeScaling:
    """The inverse of `RopeScaling.to_dict`."""

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return method_from_dict(value)
        return tuple(value) if isinstance(value, list) else value

    options = {key: read(value) for key, value in description.items()}
    return make_method(options.pop("name"), options.pop("factor"), **options)


def suggest(word: str, known: Sequence[str] | dict[str, Any]) -> str:
    """The end of an error about an unknown `word`: the nearest known one, and all of them."""
    near = get_close_matches(word.lower(), list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{hint} Known: {', '.join(known)}."


def check_factor(factor: float) -> None:
    """Raise ValueError unless `factor` is a finite number >= 1."""
    if isinstance(factor, bool) or not isinstance(factor, Real) or not math.isfinite(factor):
        raise ValueError(f"factor must be a finite number >= 1, got {factor!r}. For twice the length, pass factor=2.")
    if factor < 1:
        raise ValueError(
            f"factor must be >= 1, got {factor}. It is target length / trained length: "
            "to reach 16384 tokens from 4096, pass factor=4."
        )


def check_attention_factor(attention_factor: float | None) -> None:
    """Raise ValueError unless `attention_factor` is None or a finite number > 0."""
    if attention_factor is not None and not (math.isfinite(attention_factor) and attention_factor > 0):
        raise ValueError(
            f"attention_factor must be a finite number > 0, got {attention_factor}. Leave it out for the method's own."
        )


# ------------------------------------------------------------------------------------ the methods


def over_lengths(value: Tensor, length: Tensor | None) -> Tensor:
    """Repeat a value that does not depend on the length for each of `length`."""
    return value if length is None else value.expand((*length.shape, *value.shape))


def longrope_parameters(
    factors: Float64[Tensor, " pair"], attention_factor: float, factor: float, rope: RopeGeometry
) -> dict[str, Any]:
    """Any static λ over plain RoPE, as transformers' `longrope`: both lists are the same, so nothing switches."""
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


@register("pi", aliases=["linear"])
@dataclass(frozen=True, kw_only=True)
class PI(RopeScaling):
    """λ_i = factor: every position is divided by the factor. Chen et al. (2023), equation 4."""

    paper: ClassVar[Paper] = Paper("Position Interpolation", 2023, "https://arxiv.org/abs/2306.15595")
    training: ClassVar[str] = "fine-tuned"

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return over_lengths(torch.full_like(rope.inv_freq, self.factor), length)

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        return {"rope_type": "linear", "rope_theta": rope.rope_theta, "factor": float(self.factor)}


def ntk_rescale_factors(rope: RopeGeometry, scale: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch pair"]:
    """λ_i = scale^(2i / (d - 2)): 1 at the highest frequency, `scale` at the lowest."""
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.float64, device=scale.device) / (rope.dim - 2)
    return scale[..., None] ** exponent


def ntk_theta(rope: RopeGeometry, scale: float) -> float:
    """The base whose plain RoPE has NTK-aware frequencies: theta * scale^(d / (d - 2))."""
    return float(rope.rope_theta * scale ** (rope.dim / (rope.dim - 2)))


@register("ntk")
@dataclass(frozen=True, kw_only=True)
class NTKAware(RopeScaling):
    """λ_i = factor^(2i/(d-2)): keep the highest frequency, stretch the lowest by factor. bloc97 (2023)."""

    paper: ClassVar[Paper] = Paper(
        "NTK-Aware Scaled RoPE",
        2023,
        "https://www.reddit.com/r/LocalLLaMA/comments/14lz7j5/ntkaware_scaled_rope_allows_llama_models_to_have/",
    )

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return over_lengths(ntk_rescale_factors(rope, torch.tensor(float(self.factor), dtype=torch.float64)), length)

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": ntk_theta(rope, self.factor)}


@register("ntk_by_parts")
@dataclass(frozen=True, kw_only=True)
class NTKByParts(RopeScaling):
    """1/λ_i = (1 - ramp_i) + ramp_i / factor: keep fast pairs, interpolate slow ones. YaRN paper, section 3.2.

    Pairs that turn more than `beta_fast` times within the trained length stay, those that turn less
    than `beta_slow` times are interpolated, and a ramp joins the two.

    Attributes:
        ramp: "index" is linear in the pair's index (the YaRN code, transformers, every engine);
            "rotations" is linear in the number of turns (the paper, equation 18).
        truncate: round the ramp's ends outwards to whole indices (the code; "index" only).
        clamp: the largest end of the ramp: "dim" is d - 1 (the code), "pairs" is d/2 - 1 ("index" only).
    """

    paper: ClassVar[Paper] = Paper("NTK-by-parts (YaRN paper, section 3.2)", 2023, "https://arxiv.org/abs/2309.00071")

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: Literal["index", "rotations"] = "index"
    clamp: Literal["dim", "pairs"] = "dim"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise ValueError(
                f"beta_fast must exceed beta_slow > 0 (in turns within the trained length), got "
                f"beta_fast={self.beta_fast}, beta_slow={self.beta_slow}. The paper's are 32 and 1."
            )
        for option, allowed in (("ramp", ("index", "rotations")), ("clamp", ("dim", "pairs"))):
            if getattr(self, option) not in allowed:
                raise ValueError(f"{option} must be one of {allowed}, got {getattr(self, option)!r}.")

    def interpolated_share(self, rope: RopeGeometry) -> Float64[Tensor, " pair"]:
        """How far each pair is interpolated: 0 not at all, 1 by the whole factor."""
        if self.ramp == "rotations":
            return 1 - ((rotations(rope) - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)
        low, high = correction_dim(self.beta_fast, rope), correction_dim(self.beta_slow, rope)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        last = rope.dim - 1 if self.clamp == "dim" else rope.dim // 2 - 1
        low = max(low, 0)
        return linear_ramp(low, max(min(high, last), low), rope.dim // 2)

    def rescale_at(self, rope: RopeGeometry, scale: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch pair"]:
        """λ with `scale` in the place of the factor. The form keeps λ = 1 exactly at scale 1."""
        share = self.interpolated_share(rope).to(scale.device)
        return 1 / (1 - share * (1 - 1 / scale[..., None]))

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return over_lengths(self.rescale_at(rope, torch.tensor(float(self.factor), dtype=torch.float64)), length)

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        if (self.ramp, self.clamp) != ("index", "dim"):
            return super().rope_parameters(rope)
        parameters = {
            "rope_type": "yarn",
            "rope_theta": rope.rope_theta,
            "factor": float(self.factor),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            "attention_factor": float(self.attention_scaling(rope)),
        }
        return parameters if self.truncate else {**parameters, "truncate": False}


def yarn_attention_factor(scale: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
    """sqrt(1/t) = 0.1 ln(scale) + 1 (YaRN, equation 22)."""
    return 0.1 * scale.log() + 1


@register("yarn")
@dataclass(frozen=True, kw_only=True)
class YaRN(NTKByParts):
    """NTK-by-parts, with cos and sin times 0.1 ln(factor) + 1. Peng et al. (2023), equations 17 to 22.

    Attributes:
        attention_factor: another multiplier of cos and sin than 0.1 ln(factor) + 1.
    """

    paper: ClassVar[Paper] = Paper("YaRN", 2023, "https://arxiv.org/abs/2309.00071")

    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_attention_factor(self.attention_factor)

    def attention_scaling(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        scale = torch.tensor(float(self.factor), dtype=torch.float64)
        value = (
            yarn_attention_factor(scale) if self.attention_factor is None else scale.new_tensor(self.attention_factor)
        )
        return over_lengths(value, length)

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        parameters = super().rope_parameters(rope)
        if parameters["rope_type"] == "yarn" and self.attention_factor is None:
            # It is every engine's default, and some read the key in another sense.
            del parameters["attention_factor"]
        return parameters


class _Dynamic:
    """What the dynamic methods share: the scale is length / trained length, from 1 up to `factor`."""

    factor: float

    def scale(self, rope: RopeGeometry, length: Tensor | None) -> Tensor:
        if length is None:
            return torch.tensor(float(self.factor), dtype=torch.float64)
        return (length.to(torch.float64) / rope.original_max_position_embeddings).clamp(1, self.factor)


@register("dynamic_ntk", aliases=["dynamic"])
@dataclass(frozen=True, kw_only=True)
class DynamicNTK(_Dynamic, RopeScaling):
    """NTK-aware with scale length/L, between 1 and factor. emozilla (2023); YaRN paper, section 3.3.

    Attributes:
        growth: "linear" is length/L up to `factor`; "transformers" is factor * length/L - (factor - 1),
            which has no upper end and reaches factor² - factor + 1 at factor * L.
    """

    paper: ClassVar[Paper] = Paper(
        "Dynamically Scaled RoPE",
        2023,
        "https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr/dynamically_scaled_rope_further_increases/",
    )
    training: ClassVar[str] = "zero-shot"

    growth: Literal["linear", "transformers"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth not in ("linear", "transformers"):
            raise ValueError(f"growth must be 'linear' or 'transformers', got {self.growth!r}.")

    def scale(self, rope: RopeGeometry, length: Tensor | None) -> Tensor:
        if self.growth == "linear":
            return super().scale(rope, length)
        length = torch.tensor(self.factor * rope.original_max_position_embeddings) if length is None else length
        ratio = (length.to(torch.float64) / rope.original_max_position_embeddings).clamp(min=1)
        return self.factor * ratio - (self.factor - 1)

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return ntk_rescale_factors(rope, self.scale(rope, length))

    def at_length(self, rope: RopeGeometry, length: int) -> RopeScaling:
        return NTKAware(factor=float(self.scale(rope, torch.tensor(length))))


@register("dynamic_yarn")
@dataclass(frozen=True, kw_only=True)
class DynamicYaRN(_Dynamic, YaRN):
    """YaRN with scale length/L, between 1 and factor. Peng et al. (2023), section 3.3."""

    paper: ClassVar[Paper] = Paper("Dynamic YaRN (YaRN paper, section 3.3)", 2023, "https://arxiv.org/abs/2309.00071")
    training: ClassVar[str] = "zero-shot"

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return self.rescale_at(rope, self.scale(rope, length))

    def attention_scaling(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        if self.attention_factor is not None:
            return super().attention_scaling(rope, length)
        return yarn_attention_factor(self.scale(rope, length))

    def at_length(self, rope: RopeGeometry, length: int) -> RopeScaling:
        options = {field.name: getattr(self, field.name) for field in fields(YaRN)}
        return YaRN(**{**options, "factor": float(self.scale(rope, torch.tensor(length)))})


@register("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3(RopeScaling):
    """By-parts over wavelengths: 1/λ_i goes from 1/factor at L/low to 1 at L/high. Llama 3.1 (2024).

    Attributes:
        low_freq_factor: pairs with fewer turns within the trained length are interpolated.
        high_freq_factor: pairs with more turns stay.
    """

    paper: ClassVar[Paper] = Paper("The Llama 3 Herd of Models", 2024, "https://arxiv.org/abs/2407.21783")
    training: ClassVar[str] = "fine-tuned"

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"high_freq_factor must exceed low_freq_factor > 0, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}. Llama 3.1 has 4 and 1."
            )

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        width = self.high_freq_factor - self.low_freq_factor
        keep = ((rotations(rope) - self.low_freq_factor) / width).clamp(0, 1)
        return over_lengths(1 / (1 - (1 - keep) * (1 - 1 / self.factor)), length)

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "rope_theta": rope.rope_theta,
            "factor": float(self.factor),
            "low_freq_factor": float(self.low_freq_factor),
            "high_freq_factor": float(self.high_freq_factor),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }


@register("longrope")
@dataclass(frozen=True, kw_only=True)
class LongRoPE(RopeScaling):
    """λ_i as given, attention factor sqrt(1 + ln(factor) / ln(L)). Ding et al. (2024), section 3.

    Attributes:
        long_factor: λ for each pair, used at every length (no switch to a short list).
        attention_factor: another multiplier of cos and sin than the formula's.
    """

    paper: ClassVar[Paper] = Paper("LongRoPE", 2024, "https://arxiv.org/abs/2402.13753")

    long_factor: tuple[float, ...]
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_attention_factor(self.attention_factor)
        object.__setattr__(self, "long_factor", tuple(float(value) for value in self.long_factor))
        bad = [value for value in self.long_factor if not (math.isfinite(value) and value > 0)]
        if bad:
            raise ValueError(
                f"long_factor must hold finite numbers > 0, got {bad[0]}. To drop a frequency, write 1e12."
            )

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        if len(self.long_factor) != rope.dim // 2:
            raise ValueError(
                f"long_factor has {len(self.long_factor)} numbers, but this model has {rope.dim // 2} pairs "
                f"({rope.dim} rotary dimensions a head). Pass one number a pair."
            )
        return over_lengths(torch.tensor(self.long_factor, dtype=torch.float64), length)

    def attention_scaling(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        value = self.attention_factor
        if value is None:
            value = math.sqrt(1 + math.log(self.factor) / math.log(rope.original_max_position_embeddings))
        return over_lengths(torch.tensor(value, dtype=torch.float64), length)

    @classmethod
    def example(cls, rope: RopeGeometry, factor: float) -> RopeScaling:
        return cls(factor=factor, long_factor=tuple(torch.linspace(1, factor, rope.dim // 2).tolist()))


@register("abf", aliases=["rope_theta"])
@dataclass(frozen=True, kw_only=True)
class ABF(RopeScaling):
    """λ_i = (theta' / theta)^(2i/d): a raised base. Xiong et al. (2023), section 4.1.

    Attributes:
        rope_theta: the new base. None takes the one under which as many pairs turn fully within
            factor * L as did within L: ln(theta') = ln(theta) ln(factor L / 2 pi) / ln(L / 2 pi)
            (Liu et al., 2023, arXiv:2310.05209).
    """

    paper: ClassVar[Paper] = Paper("Adjusted Base Frequency (Llama 2 Long)", 2023, "https://arxiv.org/abs/2309.16039")
    training: ClassVar[str] = "fine-tuned"

    rope_theta: float | None = None

    def new_theta(self, rope: RopeGeometry) -> float:
        if self.rope_theta is not None:
            if not (math.isfinite(self.rope_theta) and self.rope_theta >= rope.rope_theta):
                raise ValueError(
                    f"rope_theta must be a finite number >= the model's {rope.rope_theta:g}, got "
                    f"{self.rope_theta}. Leave it out to have one computed from the factor."
                )
            return float(self.rope_theta)
        turns = rope.original_max_position_embeddings / (2 * math.pi)
        return float(rope.rope_theta ** (1 + math.log(self.factor) / math.log(turns)))

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        ratio = self.new_theta(rope) / rope.rope_theta
        exponent = torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
        return over_lengths(ratio**exponent, length)

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.new_theta(rope)}


@register("drope")
@dataclass(frozen=True, kw_only=True)
class DroPE(RopeScaling):
    """λ_i = 1e12: every frequency dropped, so that positions reach attention by the causal mask alone.

    Gelberg et al. (2025). Made to be followed by a short training at the trained length.
    """

    paper: ClassVar[Paper] = Paper("DroPE", 2025, "https://arxiv.org/abs/2512.12167")
    training: ClassVar[str] = "fine-tuned"

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return over_lengths(torch.full_like(rope.inv_freq, 1e12), length)


@register("resonance")
@dataclass(frozen=True, kw_only=True)
class Resonance(RopeScaling):
    """Another method, its wavelengths rounded to whole tokens. Wang et al. (2024), section 4.

    Attributes:
        method: the method to round: a name, or an instance with the same factor.
    """

    paper: ClassVar[Paper] = Paper("Resonance RoPE", 2024, "https://arxiv.org/abs/2403.00071")

    method: str | RopeScaling = "yarn"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.method, str):
            object.__setattr__(self, "method", make_method(self.method, self.factor))
        if self.inner.factor != self.factor:
            raise ValueError(
                f"Resonance has factor={self.factor}, but the method it rounds has {self.inner.factor}. "
                "Give both the same."
            )
        if self.inner.is_dynamic:
            raise ValueError(f"Resonance rounds static methods only, got {self.inner.name}. Use 'yarn' or 'ntk'.")

    @property
    def inner(self) -> RopeScaling:
        """The method that is rounded."""
        assert isinstance(self.method, RopeScaling)
        return self.method

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        before = wavelengths(rope.inv_freq)
        after = (before * self.inner.rescale_factors(rope)).round()
        return over_lengths(after / before, length)

    def attention_scaling(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return self.inner.attention_scaling(rope, length)


# ------------------------------------------------------------------- reading what a config carries


def method_from_rope_parameters(parameters: dict[str, Any], max_position_embeddings: int) -> RopeScaling | None:
    """The method that a config's `rope_parameters` describe; None for unscaled RoPE.

    Args:
        max_position_embeddings: of the same config, for the formats that leave `factor` out.

    Raises:
        ValueError: a `rope_type` that is none of transformers' scalings of plain RoPE.
    """
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    length = parameters.get("original_max_position_embeddings") or max_position_embeddings
    factor = parameters.get("factor") or max_position_embeddings / length
    attention_factor = parameters.get("attention_factor")
    match rope_type:
        case "default":
            return None
        case "linear":
            return PI(factor=factor)
        case "dynamic":
            return DynamicNTK(factor=factor, growth="transformers")
        case "llama3":
            return Llama3(
                factor=factor,
                low_freq_factor=parameters["low_freq_factor"],
                high_freq_factor=parameters["high_freq_factor"],
            )
        case "longrope" | "su":
            return LongRoPE(
                factor=max(factor, 1.0), long_factor=tuple(parameters["long_factor"]), attention_factor=attention_factor
            )
        case "yarn":
            mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
            if attention_factor is None and mscale and all_dim:
                grow = 0.1 * math.log(factor)
                attention_factor = (mscale * grow + 1) / (all_dim * grow + 1)
            return YaRN(
                factor=factor,
                beta_fast=parameters.get("beta_fast") or 32.0,
                beta_slow=parameters.get("beta_slow") or 1.0,
                truncate=parameters.get("truncate", True),
                attention_factor=attention_factor,
            )
    raise ValueError(
        f"rope_type {rope_type!r} is not one ctxext can read (default, linear, dynamic, yarn, longrope, llama3). "
        "The model was left as it was."
    )


def geometry_in_use(parameters: dict[str, Any], dim: int, max_position_embeddings: int) -> RopeGeometry:
    """The frequencies that a config's `rope_parameters` put in use, over `dim` rotary dimensions.

    A method that changes with the length counts at its full reach.
    """
    scaling = method_from_rope_parameters(parameters, max_position_embeddings)
    length = parameters.get("original_max_position_embeddings") or max_position_embeddings
    plain = RopeGeometry.plain(dim, parameters["rope_theta"], length)
    if scaling is None:
        return plain
    return RopeGeometry(
        inv_freq=plain.inv_freq / scaling.rescale_factors(plain),
        rope_theta=plain.rope_theta,
        original_max_position_embeddings=length,
        attention_factor=float(scaling.attention_scaling(plain)),
    )


def scaled_rope_parameters(method: RopeScaling, rope: RopeGeometry) -> dict[str, Any]:
    """`method` on top of `rope` as transformers' `rope_parameters`: native where that is possible.

    Scaling on top of scaling has no native form, so it becomes `longrope` over plain RoPE.
    """
    if rope.is_plain:
        return method.rope_parameters(rope)
    plain = inverse_frequencies(rope.dim, rope.rope_theta)
    return longrope_parameters(
        plain / rope.inv_freq * method.rescale_factors(rope),
        rope.attention_factor * float(method.attention_scaling(rope)),
        method.factor,
        rope,
    )

"""Methods that rescale frequencies, independent of the sequence length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ctxext.encodings.rope import RopeGeometry, correction_dim, linear_ramp, rotations, unscaled_index, wavelengths
from ctxext.methods.contract import (
    NO_ROTATION,
    ContextMethod,
    Paper,
    RopeScaling,
    check_attention_factor,
    make_method,
    over_lengths,
    register,
)
from ctxext.utils.values import shown


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
        scale = self.scale(rope, length)
        exponent = torch.arange(0, rope.dim, 2, dtype=torch.float64, device=scale.device) / (rope.dim - 2)
        return scale[..., None] ** exponent

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        theta = rope.rope_theta * float(self.scale(rope)) ** (rope.dim / (rope.dim - 2))
        return {"rope_type": "default", "rope_theta": float(theta)}


@register("ntk_by_parts")
@dataclass(frozen=True, kw_only=True)
class NTKByParts(RopeScaling):
    """1/λ_i = (1 - ramp_i) + ramp_i / factor: keep fast pairs, interpolate slow ones. YaRN paper, section 3.2.

    Pairs with more than `beta_fast` turns within the trained length L are kept, those with fewer than `beta_slow` are
    interpolated. Between them ramp_i = (i - low) / (high - low): low and high are d ln(L / 2πβ) / (2 ln θ) of the two
    β. Turns are counted with the frequencies in use, after any existing scaling.

    Attributes:
        beta_fast: turns within the trained length L above which a pair is kept.
        beta_slow: turns below which a pair is interpolated by the whole factor.
        ramp: "index" is linear in the pair's index, and so in the logarithm of its turns (the YaRN code,
            transformers, every engine); "rotations" is linear in the number of turns (the paper, equation 18).
        truncate: move the ramp's ends outwards to the nearest pair (the code; "index" only).
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
        divides_by_zero = (
            self.ramp == "rotations" and self.beta_slow == self.beta_fast
        )  # otherwise a step, as in Kimi-K2
        if divides_by_zero or not 1e-6 <= self.beta_slow <= self.beta_fast <= 1e6:
            raise ValueError(
                f"beta_fast must exceed beta_slow > 0 (in turns within the trained length, 1e-6 to 1e6), got "
                f"beta_fast={self.beta_fast}, beta_slow={self.beta_slow}. The paper uses 32 and 1."
            )
        for option, allowed in (("ramp", ("index", "rotations")), ("clamp", ("dim", "pairs"))):
            if getattr(self, option) not in allowed:
                raise ValueError(f"{option} must be one of {allowed}, got {getattr(self, option)!r}.")

    def interpolated_share(self, rope: RopeGeometry) -> Float64[Tensor, " pair"]:
        """How much each pair is interpolated: 0 not at all, 1 by the whole factor."""
        if self.ramp == "rotations":
            return 1 - ((rotations(rope) - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)
        index = unscaled_index(rope)
        first, last = float(index.min()), float(index.max())
        low, high = correction_dim(self.beta_fast, rope), correction_dim(self.beta_slow, rope)
        if self.truncate:
            low = float(index[index <= low].max()) if low > first else first
            high = float(index[index >= high].min()) if high <= last else last + math.ceil(high - last)
        end = last + rope.dim // 2 if self.clamp == "dim" else last
        low = max(low, first)
        return linear_ramp(low, max(min(high, end), low), index)

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        scale = self.scale(rope, length)
        share = self.interpolated_share(rope).to(scale.device)
        return 1 / (1 - share * (1 - 1 / scale[..., None]))  # written so that it is exactly 1 at scale 1

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


@register("yarn")
@dataclass(frozen=True, kw_only=True)
class YaRN(NTKByParts):
    """NTK-by-parts, with cos and sin times 0.1 ln(factor) + 1. Peng et al. (2023), equations 17 to 22.

    1/λ_i = (1 - ramp_i) + ramp_i / factor, with the ramp of `ntk_by_parts`: 0 for pairs with more than `beta_fast`
    turns within the trained length, 1 for those with fewer than `beta_slow`.

    Attributes:
        attention_factor: overrides the multiplier 0.1 ln(factor) + 1 of cos and sin.
    """

    paper: ClassVar[Paper] = Paper("YaRN", 2023, "https://arxiv.org/abs/2309.00071")

    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_attention_factor(self.attention_factor)

    def attention_scaling(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        if self.attention_factor is not None:
            return over_lengths(torch.tensor(self.attention_factor, dtype=torch.float64), length)
        return 0.1 * self.scale(rope, length).log() + 1  # sqrt(1/t), equation 22

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        parameters = super().rope_parameters(rope)
        if parameters["rope_type"] == "yarn" and self.attention_factor is None:
            # Every engine computes this value by default, and some interpret the key differently.
            del parameters["attention_factor"]
        return parameters


@register("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3(RopeScaling):
    """By-parts over wavelengths: 1/λ_i goes from 1/factor at L/low to 1 at L/high. Llama 3.1 (2024).

    Attributes:
        low_freq_factor: pairs with fewer turns within the trained length are interpolated.
        high_freq_factor: pairs with more turns stay.
    """

    paper: ClassVar[Paper] = Paper("The Llama 3 Herd of Models", 2024, "https://arxiv.org/abs/2407.21783")

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-6 <= self.low_freq_factor <= self.high_freq_factor <= 1e6:
            raise ValueError(
                f"high_freq_factor must be at least low_freq_factor > 0, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}. Llama 3.1 uses 4 and 1."
            )

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        width = self.high_freq_factor - self.low_freq_factor
        beyond = rotations(rope) - self.low_freq_factor
        keep = (beyond / width).clamp(0, 1) if width else (beyond >= 0).double()  # a step, as in Llama 4 Scout
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


@register("abf", aliases=["rope_theta"])
@dataclass(frozen=True, kw_only=True)
class ABF(RopeScaling):
    """λ_i = (theta' / theta)^(2i/d): a raised base. Xiong et al. (2023), section 4.1.

    After existing scaling, i is the index at which unscaled RoPE has the pair's frequency.

    Attributes:
        rope_theta: the new base. None takes the base at which as many pairs complete a turn within factor * L as did
            within L: ln(theta') = ln(theta) ln(factor L / 2 pi) / ln(L / 2 pi) (Liu et al., 2023, arXiv:2310.05209).
    """

    paper: ClassVar[Paper] = Paper("Adjusted Base Frequency (Llama 2 Long)", 2023, "https://arxiv.org/abs/2309.16039")
    training: ClassVar[str] = "fine-tuned"

    rope_theta: float | None = None

    def new_theta(self, rope: RopeGeometry) -> float:
        if self.rope_theta is not None:
            if not rope.rope_theta <= self.rope_theta <= 1e30:
                raise ValueError(
                    f"rope_theta must be a finite number >= the model's {rope.rope_theta:g}, got "
                    f"{self.rope_theta}. Leave it out to compute one from the factor."
                )
            return float(self.rope_theta)
        turns = rope.original_max_position_embeddings / (2 * math.pi)
        return float(rope.rope_theta ** (1 + math.log(self.factor) / math.log(turns)))

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        ratio = self.new_theta(rope) / rope.rope_theta
        return over_lengths(ratio ** (2 * unscaled_index(rope) / rope.dim), length)

    def rope_parameters(self, rope: RopeGeometry) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.new_theta(rope)}


@register("drope")
@dataclass(frozen=True, kw_only=True)
class DroPE(RopeScaling):
    """λ_i = 1e12: drops every frequency, so that positions reach attention through the causal mask alone.

    Gelberg et al. (2025). Meant to be followed by a short training at the trained length. λ is finite because JSON has
    no infinity.
    """

    paper: ClassVar[Paper] = Paper("DroPE", 2025, "https://arxiv.org/abs/2512.12167")
    training: ClassVar[str] = "fine-tuned"

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return over_lengths(torch.full_like(rope.inv_freq, NO_ROTATION), length)


@register("resonance")
@dataclass(frozen=True, kw_only=True)
class Resonance(RopeScaling):
    """Another method with its wavelengths rounded to whole tokens. Wang et al. (2024), section 4.

    Attributes:
        rounds: the method to round: a name, or an instance with the same factor.
    """

    paper: ClassVar[Paper] = Paper("Resonance RoPE", 2024, "https://arxiv.org/abs/2403.00071")

    rounds: str | RopeScaling = "yarn"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rounds, str):
            object.__setattr__(self, "rounds", make_method(self.rounds, self.factor))
        if not isinstance(self.rounds, RopeScaling) or self.rounds.in_attention:
            what = self.rounds.name if isinstance(self.rounds, ContextMethod) else shown(self.rounds)
            raise ValueError(f"rounds of 'resonance' must be a static method, such as 'yarn' or 'ntk', got {what}.")
        if self.inner.factor != self.factor:
            raise ValueError(
                f"Resonance has a factor of {self.factor}, but the method it rounds has {self.inner.factor}. "
                "Use the same factor for both."
            )

    @property
    def inner(self) -> RopeScaling:
        """The method that is rounded."""
        assert isinstance(self.rounds, RopeScaling)
        return self.rounds

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        before = wavelengths(rope.inv_freq)
        after = (before * self.inner.rescale_factors(rope)).round()
        return over_lengths(after / before, length)

    def attention_scaling(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        return self.inner.attention_scaling(rope, length)

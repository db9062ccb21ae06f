"""Methods with a length-dependent scale, in a ladder of lengths: each query has the scale of its own position.

So token-by-token decoding, chunked prefill and the full forward pass are one computation. `at_length` gives the static
method of one length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods.contract import NO_ROTATION, Paper, RopeScaling, check_attention_factor, over_lengths, register
from ctxext.methods.scaling import NTKAware, YaRN
from ctxext.utils.values import reached

EMOZILLA = Paper(
    "Dynamically Scaled RoPE",
    2023,
    "https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr/dynamically_scaled_rope_further_increases/",
)


@dataclass(frozen=True, kw_only=True)
class _ByLength(RopeScaling):
    """Base of the methods that are the method `static` at the `scale` of each length."""

    static: ClassVar[type[RopeScaling]]

    def at_length(self, rope: RopeGeometry, length: int) -> RopeScaling:
        options = {field.name: getattr(self, field.name) for field in fields(self.static)}
        return self.static(**{**options, "factor": float(self.scale(rope, torch.tensor(length)))})


@dataclass(frozen=True, kw_only=True)
class _Dynamic(_ByLength):
    """Its scale is length / trained length, from 1 to `factor`.

    Attributes:
        ratio: ratio of consecutive rungs of the ladder. A finer ladder rotates keys more often, and in 16 bits each
            rotation rounds.
    """

    training: ClassVar[str] = "zero-shot"

    ratio: float = 1.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio < 1.01:
            raise ValueError(
                f"ratio must be at least 1.01, got {self.ratio!r}. It is the ratio of consecutive rungs; try 1.25."
            )

    def scale(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        if length is None:
            return super().scale(rope)
        return (length.to(torch.float64) / rope.original_max_position_embeddings).clamp(1, self.factor)

    def ladder(self, rope: RopeGeometry) -> Int[Tensor, " rung"]:
        trained = rope.original_max_position_embeddings
        reach = reached(self.factor, trained)
        rungs = [trained]
        while rungs[-1] < reach:
            rungs.append(min(reach, max(rungs[-1] + 1, math.floor(trained * self.ratio ** len(rungs)))))
        return torch.tensor(rungs)


@register("dynamic_ntk", aliases=["dynamic"])
@dataclass(frozen=True, kw_only=True)
class DynamicNTK(_Dynamic, NTKAware):
    """NTK-aware with scale length/L for each query, between 1 and factor. emozilla (2023); YaRN paper, section 3.3."""

    paper: ClassVar[Paper] = EMOZILLA
    static: ClassVar[type[RopeScaling]] = NTKAware


@register("dynamic_yarn")
@dataclass(frozen=True, kw_only=True)
class DynamicYaRN(_Dynamic, YaRN):
    """YaRN with scale length/L for each query, between 1 and factor. Peng et al. (2023), section 3.3."""

    paper: ClassVar[Paper] = Paper("Dynamic YaRN (YaRN paper, section 3.3)", 2023, "https://arxiv.org/abs/2309.00071")
    static: ClassVar[type[RopeScaling]] = YaRN


@register("transformers_dynamic")
@dataclass(frozen=True, kw_only=True)
class TransformersDynamic(_ByLength, NTKAware):
    """NTK-aware with scale factor·n/L − (factor − 1), n the length of the whole call. transformers' `dynamic`.

    For comparison, without a KV cache: every new token changes the scale of all earlier keys. The scale has no upper
    bound, and is factor² − factor + 1 at factor · L. Each row of a batch has its own scale here.
    """

    paper: ClassVar[Paper] = EMOZILLA
    static: ClassVar[type[RopeScaling]] = NTKAware
    training: ClassVar[str] = "for comparison"
    of_the_call: ClassVar[bool] = True

    def scale(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        if length is None:
            length = torch.tensor(self.factor * rope.original_max_position_embeddings, dtype=torch.float64)
        ratio = (length.to(torch.float64) / rope.original_max_position_embeddings).clamp(min=1)
        return self.factor * ratio - (self.factor - 1)

    def at_length(self, rope: RopeGeometry, length: int) -> RopeScaling:
        # Its scale is not length / L, so the NTK-aware method of that scale would claim another length.
        factors = tuple(super().at_length(rope, length).rescale_factors(rope).tolist())
        return LongRoPE(factor=self.factor_at(rope, length), long_factor=factors, attention_factor=1.0)


@register("longrope")
@dataclass(frozen=True, kw_only=True)
class LongRoPE(RopeScaling):
    """λ_i as passed, attention factor sqrt(1 + ln(factor) / ln(L)). Ding et al. (2024), section 3.

    Attributes:
        long_factor: λ for each pair.
        short_factor: λ for queries within the trained length; None uses `long_factor`.
        start_tokens: how many tokens at the start keep the unscaled frequencies (n̂ in the paper).
        attention_factor: overrides the formula's multiplier of cos and sin, at every length.
        fitted_to: rope_theta and trained length in tokens of the model that λ was fitted to; other models are refused.
    """

    paper: ClassVar[Paper] = Paper("LongRoPE", 2024, "https://arxiv.org/abs/2402.13753")
    source_of_required: ClassVar[str] = ", which `ctxext fit` finds"

    long_factor: tuple[float, ...]
    short_factor: tuple[float, ...] | None = None
    start_tokens: int = 0
    attention_factor: float | None = None
    fitted_to: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_attention_factor(self.attention_factor)
        if self.start_tokens < 0:
            raise ValueError(f"start_tokens must be a number of tokens >= 0, got {self.start_tokens!r}.")
        if self.fitted_to is not None:
            theta, length = self.fitted_to
            object.__setattr__(self, "fitted_to", (float(theta), int(length)))
        for name in ("long_factor", "short_factor"):
            values = getattr(self, name)
            if values is None:
                continue
            object.__setattr__(self, name, tuple(float(value) for value in values))
            if min(values, default=1) <= 0:
                raise ValueError(
                    f"{name} must hold finite numbers > 0, got {float(min(values))}. For a pair that does not rotate, "
                    f"write {NO_ROTATION:g}."
                )

    @property
    def title(self) -> str:
        return self.name if self.fitted_to is None else f"{self.name} (fitted by ctxext fit)"

    @property
    def is_dynamic(self) -> bool:
        return self.short_factor is not None and self.short_factor != self.long_factor

    def ladder(self, rope: RopeGeometry) -> Int[Tensor, " rung"]:
        trained = rope.original_max_position_embeddings
        reach = reached(self.factor, trained)
        return torch.tensor([trained, reach] if self.is_dynamic else [reach])

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        factors = self._checked("long_factor", rope)
        if length is None or not self.is_dynamic:
            return over_lengths(factors, length)
        assert self.short_factor is not None
        within = length <= rope.original_max_position_embeddings
        return torch.where(within[..., None], self._checked("short_factor", rope), factors)

    def _checked(self, name: str, rope: RopeGeometry) -> Tensor:
        values = getattr(self, name)
        theta, length = rope.rope_theta, rope.original_max_position_embeddings
        if self.fitted_to not in (None, (theta, length)):
            raise ValueError(
                f"{name} was fitted to a model with theta {self.fitted_to[0]:g} trained at {self.fitted_to[1]} tokens, "
                f"but this one has theta {theta:g} and {length} tokens. Fit this model (ctxext fit), or, if its "
                "config lacks the trained length, pass original_max_position_embeddings=."
            )
        if self.fitted_to is not None and not rope.is_plain:
            raise ValueError(
                f"{name} was fitted to unscaled frequencies of theta {theta:g}, but this model's are scaled. "
                "Use existing='replace', or a named method such as 'yarn'."
            )
        if len(values) != rope.dim // 2:
            raise ValueError(
                f"{name} has {len(values)} numbers, but this model has {rope.dim // 2} pairs "
                f"({rope.dim} rotary dimensions per head). Pass one number per pair."
            )
        return torch.tensor(values, dtype=torch.float64)

    def attention_scaling(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        value = self.attention_factor
        if value is None:
            value = math.sqrt(1 + math.log(self.factor) / math.log(rope.original_max_position_embeddings))
        return over_lengths(torch.tensor(value, dtype=torch.float64), length)

    def at_length(self, rope: RopeGeometry, length: int) -> RopeScaling:
        if self.start_tokens:
            raise ValueError(
                f"longrope with start_tokens={self.start_tokens} has no static form: config.json cannot express that "
                "the first tokens are unscaled. Leave out length or start_tokens."
            )
        if not self.is_dynamic:
            return super().at_length(rope, length)
        within = length <= rope.original_max_position_embeddings
        factors = self.short_factor if within and self.short_factor else self.long_factor
        return replace(
            self,
            factor=self.factor_at(rope, length),
            long_factor=factors,
            short_factor=None,
            attention_factor=float(self.attention_scaling(rope)),  # of the whole factor, at every length
        )

    @classmethod
    def example(cls, rope: RopeGeometry, factor: float) -> RopeScaling:
        return cls(factor=factor, long_factor=tuple(torch.linspace(1, factor, rope.dim // 2).tolist()))

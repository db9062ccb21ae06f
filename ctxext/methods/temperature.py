"""Temperatures of attention that grow with the position of the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods.contract import (
    ContextMethod,
    Paper,
    PositionRemapping,
    RopeMethod,
    RopeScaling,
    make_method,
    register,
)
from ctxext.utils.values import is_number, shown


@register("query_temperature", aliases=["attn_temperature_tuning"])
@dataclass(frozen=True, kw_only=True)
class QueryTemperature(RopeMethod):
    """Another method, with each query multiplied by 1 + beta ln(1 + ⌊p / L⌋), p its position and L the trained length.

    Llama 4 counts p from 1 in its layers without RoPE; Ministral 3 from 0 in all layers, with YaRN without an
    attention factor. Here it is in the layers with RoPE that see beyond the trained length; others are unchanged.

    Attributes:
        base: the other method: a name, or an instance with the same factor.
        beta: in both models 0.1.
    """

    paper: ClassVar[Paper] = Paper(
        "Llama 4, Ministral 3", 2025, "https://ai.meta.com/blog/llama-4-multimodal-intelligence/"
    )

    other_options: ClassVar[str] = (
        " Options of the base belong to an instance of it, such as base=SelfExtend(factor=4, window=64)."
    )

    base: str | RopeMethod = "ntk_by_parts"
    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.base, str):
            object.__setattr__(self, "base", make_method(self.base, self.factor))
        base = self.base
        if not isinstance(base, RopeScaling | PositionRemapping) or getattr(base, "of_the_call", False):
            what = base.name if isinstance(base, ContextMethod) else shown(base)
            raise ValueError(
                f"base of 'query_temperature' must be another method for RoPE that does not depend on the length of a "
                f"whole call, such as 'yarn' or 'self_extend', got {what}."
            )
        if base.factor != self.factor:
            raise ValueError(
                f"query_temperature has a factor of {self.factor}, but its base has {base.factor}. Use the same factor "
                "for both."
            )
        if not is_number(self.beta, 0.0, 10.0):
            raise ValueError(
                f"beta must be a number from 0 to 10, got {self.beta!r}. Llama 4 and Ministral 3 have 0.1."
            )

    @property
    def title(self) -> str:
        return f"{self.name} on {self.untempered.title}"

    @property
    def untempered(self) -> RopeMethod:
        assert isinstance(self.base, RopeMethod)
        return self.base

    def query_scaling(self, rope: RopeGeometry, positions: Tensor) -> Tensor:
        times = 1 + self.beta * (positions.double() / rope.original_max_position_embeddings).floor().log1p()
        own = self.untempered.query_scaling(rope, positions)
        return times if own is None else times * own

    def at_length(self, rope: RopeGeometry, length: int) -> RopeScaling:
        raise ValueError(
            f"query_temperature depends on each query's position and has no static form, so length={length} does not "
            "apply. Drop length=, or use a frequency method such as 'yarn'."
        )

    @property
    def in_attention(self) -> bool:
        return True

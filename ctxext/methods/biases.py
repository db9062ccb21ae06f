"""Methods for position encodings that act on attention scores: ALiBi, T5's buckets, relative representations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float64
from torch import Tensor

from ctxext.methods.contract import BucketScaling, DistanceScaling, Paper, SlopeScaling, register


@register("alibi_scaling")
@dataclass(frozen=True, kw_only=True)
class AlibiScaling(SlopeScaling):
    """Every slope is divided by factor: distances are interpolated. Al-Khateeb et al. (2023), equation 4."""

    paper: ClassVar[Paper] = Paper(
        "Position Interpolation Improves ALiBi Extrapolation", 2023, "https://arxiv.org/abs/2310.13017"
    )

    def slopes(self, slopes: Float64[Tensor, " head"]) -> Float64[Tensor, " head"]:
        return slopes / self.factor


@register("bucket_scaling")
@dataclass(frozen=True, kw_only=True)
class MaxDistanceScaling(BucketScaling):
    """The distance at which T5's last bucket begins is multiplied by factor. Raffel et al. (2020), section 2.1."""

    paper: ClassVar[Paper] = Paper("T5", 2020, "https://arxiv.org/abs/1910.10683")

    def max_distance(self, max_distance: int) -> int:
        return round(max_distance * self.factor)


@register("distance_interpolation")
@dataclass(frozen=True, kw_only=True)
class DistanceInterpolation(DistanceScaling):
    """Distance d has the representation of d / factor. Chen et al. (2023), for Shaw's and Transformer-XL's."""

    paper: ClassVar[Paper] = Paper("Position Interpolation", 2023, "https://arxiv.org/abs/2306.15595")
    training: ClassVar[str] = "fine-tuned"

    def distances(self, distances: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
        return distances / self.factor

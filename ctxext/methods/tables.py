"""Methods for learned and sinusoidal position tables, which are added to the embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Float64
from torch import Tensor

from ctxext.encodings.learned import hierarchical_rows, interpolate_rows, tile_rows
from ctxext.methods.contract import Paper, PositionScaling, TableResizing, register

_POSITION_INTERPOLATION = Paper("Position Interpolation", 2023, "https://arxiv.org/abs/2306.15595")


@register("row_interpolation")
@dataclass(frozen=True, kw_only=True)
class RowInterpolation(TableResizing):
    """Position p reads the table at p / factor, interpolated between two trained rows. After Chen et al. (2023)."""

    paper: ClassVar[Paper] = _POSITION_INTERPOLATION
    training: ClassVar[str] = "fine-tuned"

    def rows(self, table: Float[Tensor, "old dim"], n_rows: int) -> Float64[Tensor, "new dim"]:
        return interpolate_rows(table, n_rows)


@register("hierarchical")
@dataclass(frozen=True, kw_only=True)
class Hierarchical(TableResizing):
    """Position i n + j is α u_i + (1 - α) u_j: the n trained rows are kept, and up to n² positions are covered.

    Su (2020).

    Attributes:
        alpha: the weight of the coarse position, in (0, 1) and not 1/2.
    """

    paper: ClassVar[Paper] = Paper(
        "Hierarchical decomposition of position embeddings", 2020, "https://kexue.fm/archives/7947"
    )

    alpha: float = 0.4

    def rows(self, table: Float[Tensor, "old dim"], n_rows: int) -> Float64[Tensor, "new dim"]:
        return hierarchical_rows(table, n_rows, self.alpha)


@register("tiling")
@dataclass(frozen=True, kw_only=True)
class Tiling(TableResizing):
    """The trained rows, repeated. Beltagy et al. (2020), section 5."""

    paper: ClassVar[Paper] = Paper("Longformer", 2020, "https://arxiv.org/abs/2004.05150")
    training: ClassVar[str] = "fine-tuned"

    def rows(self, table: Float[Tensor, "old dim"], n_rows: int) -> Float64[Tensor, "new dim"]:
        return tile_rows(table, n_rows)


@register("sinusoidal_interpolation")
@dataclass(frozen=True, kw_only=True)
class SinusoidalInterpolation(PositionScaling):
    """Position p has the sines and cosines of p / factor. Chen et al. (2023), for a table."""

    paper: ClassVar[Paper] = _POSITION_INTERPOLATION
    training: ClassVar[str] = "fine-tuned"

    def positions(self, positions: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
        return positions / self.factor


@register("sinusoidal_extrapolation")
@dataclass(frozen=True, kw_only=True)
class SinusoidalExtrapolation(PositionScaling):
    """The same sines and cosines at more positions. Vaswani et al. (2017), section 3.5."""

    paper: ClassVar[Paper] = Paper("Attention Is All You Need", 2017, "https://arxiv.org/abs/1706.03762")

    def positions(self, positions: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
        return positions

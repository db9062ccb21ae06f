"""Rotary position embedding (RoPE): frequencies and ramps, in float64.

Su et al. (2021), "RoFormer", arXiv:2104.09864. A head of `dim` numbers is `dim / 2` pairs; at
position m, pair i is turned by the angle m * inv_freq[i] (radians).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RopeGeometry:
    """What a checkpoint was trained with.

    Attributes:
        inv_freq: radians per token for each pair, the frequencies in use: existing scaling included.
        rope_theta: the base that the pair's exponents are taken of.
        original_max_position_embeddings: trained length in tokens.
        attention_factor: the multiplier of cos and sin that is in use.
    """

    inv_freq: Float64[Tensor, " pair"]
    rope_theta: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    @classmethod
    def plain(cls, dim: int, rope_theta: float, length: int) -> RopeGeometry:
        """RoPE without any scaling: `dim` rotary dimensions trained at `length` tokens."""
        return cls(
            inv_freq=inverse_frequencies(dim, rope_theta),
            rope_theta=float(rope_theta),
            original_max_position_embeddings=length,
        )

    @property
    def dim(self) -> int:
        """Rotary dimensions: two for each pair."""
        return 2 * self.inv_freq.shape[-1]

    @property
    def is_plain(self) -> bool:
        """Whether the frequencies are those of `rope_theta` alone, with no scaling on top."""
        plain = inverse_frequencies(self.dim, self.rope_theta)
        return self.attention_factor == 1.0 and torch.equal(plain, self.inv_freq)


def inverse_frequencies(dim: int, rope_theta: float) -> Float64[Tensor, " pair"]:
    """theta^(-2i/d) for i = 0 .. d/2 - 1, in radians per token (RoFormer, section 3.2.2)."""
    return rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def wavelengths(inv_freq: Float64[Tensor, " pair"]) -> Float64[Tensor, " pair"]:
    """Tokens that a pair needs for one full turn: 2 pi / inv_freq."""
    return 2 * math.pi / inv_freq


def rotations(rope: RopeGeometry) -> Float64[Tensor, " pair"]:
    """Full turns of each pair within the trained length (r in the YaRN paper, equation 17)."""
    return rope.original_max_position_embeddings / wavelengths(rope.inv_freq)


def unscaled_index(rope: RopeGeometry) -> Float64[Tensor, " pair"]:
    """The index at which unscaled RoPE of the same base turns as fast as each pair does.

    i + d ln(theta^(-2i/d) / inv_freq_i) / (2 ln theta): exactly i for unscaled RoPE, fractional where the frequencies
    in use are scaled.
    """
    offset = (inverse_frequencies(rope.dim, rope.rope_theta) / rope.inv_freq).log()
    return torch.arange(rope.dim // 2, dtype=torch.float64) + rope.dim * offset / (2 * math.log(rope.rope_theta))


def correction_dim(n_rotations: float, rope: RopeGeometry) -> float:
    """The `unscaled_index` of a pair that turns `n_rotations` times within the trained length.

    The inverse of `rotations`: d ln(L / (2 pi r)) / (2 ln theta).
    """
    length = rope.original_max_position_embeddings
    return rope.dim * math.log(length / (n_rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))


def linear_ramp(low: float, high: float, index: Float64[Tensor, " pair"]) -> Float64[Tensor, " pair"]:
    """0 up to index `low`, 1 from index `high` on, linear between."""
    if low == high:
        high += 0.001  # As in the YaRN code: a step, without dividing by zero.
    return ((index - low) / (high - low)).clamp(0, 1)


def cos_sin(
    positions: Shaped[Tensor, "*batch"], inv_freq: Float[Tensor, " pair"], attention_factor: float = 1.0
) -> tuple[Float[Tensor, "*batch pair"], Float[Tensor, "*batch pair"]]:
    """cos and sin of the angles at `positions` (tokens), each times `attention_factor`.

    Both are scaled, so attention logits grow by its square (YaRN's 1/t).
    """
    angles = positions[..., None].to(inv_freq.dtype) * inv_freq
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def interleaved_to_half_split(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Reorder a head so that pairs (2i, 2i + 1) become pairs (i, i + d/2)."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def half_split_to_interleaved(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """The inverse of `interleaved_to_half_split`."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)

"""Attention with linear biases (ALiBi): a penalty that grows with the distance, in float64.

Press, Smith and Lewis (2022), "Train Short, Test Long", arXiv:2108.12409, section 3.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor


def alibi_slopes(n_heads: int) -> Float64[Tensor, " head"]:
    """The slope of each head in nats per token, as in the authors' code.

    For a power of two, 2^(-8/n), 2^(-16/n), ..., 2^-8. Otherwise those of the power of two below, then every other one
    of the power above, from its first on.

    Raises:
        ValueError: `n_heads` is less than 1.
    """
    if n_heads < 1:
        raise ValueError(f"n_heads must be at least 1, got {n_heads}.")
    whole = 2 ** (n_heads.bit_length() - 1)
    exponents = 8 * torch.arange(1, 2 * whole + 1, dtype=torch.float64) / (2 * whole)
    return torch.exp2(-torch.cat([exponents[1::2], exponents[0::2]])[:n_heads])


def alibi_bias(
    slopes: Float64[Tensor, " head"],
    query_positions: Shaped[Tensor, "*batch query"],
    key_positions: Shaped[Tensor, "*batch key"],
) -> Float64[Tensor, "*batch head query key"]:
    """-slope * |query - key|, in nats, to be added to the logits before softmax. Positions in tokens.

    BLOOM, Falcon and MPT add slope * key instead: for keys up to the query, it differs by a constant along the keys,
    which softmax cancels.
    """
    distance = (query_positions[..., :, None] - key_positions[..., None, :]).abs().double()
    return -slopes[:, None, None] * distance[..., None, :, :]

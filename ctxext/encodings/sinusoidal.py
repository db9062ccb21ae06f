"""Sinusoidal position encoding: a table of sines and cosines that is added to the embeddings, in float64.

Vaswani et al. (2017), "Attention Is All You Need", arXiv:1706.03762, section 3.5. Pair i of the `dim`
numbers is (sin, cos) of position * theta^(-2i/dim). Positions may be fractional, so interpolating by a
factor is the table at positions / factor.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from ctxext.encodings.rope import half_split_to_interleaved, inverse_frequencies

Layout = Literal["interleaved", "halves", "tensor2tensor"]
"""How a table is laid out:

`interleaved`: sin, cos, sin, cos, as in the paper;
`halves`: all sines, then all cosines (Marian, Pegasus, RoFormer, CTRL);
`tensor2tensor`: halves, with the exponents spread over dim/2 - 1, so that the slowest pair turns at
exactly 1 / theta (the paper's own code, and after it fairseq, M2M-100, XGLM, FSMT and Whisper's encoder).
"""


def sinusoidal_frequencies(
    dim: int, theta: float = 10000.0, layout: Layout = "interleaved"
) -> Float64[Tensor, " pair"]:
    """Radians per token for each of the dim / 2 pairs, the fastest first.

    Raises:
        ValueError: `dim` is odd or less than 4.
    """
    if dim < 4 or dim % 2:
        raise ValueError(f"a sinusoidal table needs an even dim of at least 4, got {dim}: a sine and a cosine each.")
    if layout == "tensor2tensor":
        return theta ** -torch.linspace(0, 1, dim // 2, dtype=torch.float64)
    return inverse_frequencies(dim, theta)


def sinusoidal_table(
    positions: Shaped[Tensor, "*batch"], dim: int, theta: float = 10000.0, layout: Layout = "interleaved"
) -> Float64[Tensor, "*batch dim"]:
    """The row of the table at each of `positions` (tokens, whole or not). Errors: as `sinusoidal_frequencies`."""
    angles = positions[..., None].double() * sinusoidal_frequencies(dim, theta, layout).to(positions.device)
    halves = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return half_split_to_interleaved(halves) if layout == "interleaved" else halves

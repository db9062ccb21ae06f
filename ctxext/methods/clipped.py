"""Methods that clip or drop the slowest frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ctxext.encodings.rope import RopeGeometry, rotations
from ctxext.methods.contract import NO_ROTATION, Paper, RopeScaling, over_lengths, register


@register("cope")
@dataclass(frozen=True, kw_only=True)
class CoPE(RopeScaling):
    """λ_j = 2 / (1 + cos(πj / (n − 1))) for pair j of the n slowest, counted from 0. CoPE (2026).

    Pairs that complete no turn within the trained length are slowed smoothly, the slowest to a standstill, so that
    fewer of them reach phases at the target that they never had in training. The fastest of these hardly change, and
    all other pairs keep their frequency. λ is the same for any factor. Meant to be followed by training.

    Attributes:
        clipped: n; None for the pairs that complete no turn within the trained length. The authors use 20 of 64.
    """

    paper: ClassVar[Paper] = Paper("CoPE: clipped RoPE", 2026, "https://arxiv.org/abs/2602.05258")
    training: ClassVar[str] = "fine-tuned"

    clipped: int | None = None

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        n = int((rotations(rope) < 1).sum()) if self.clipped is None else self.clipped
        n_pairs = rope.dim // 2
        if self.clipped is not None and not 2 <= n <= n_pairs:
            raise ValueError(f"clipped must be a number of pairs from 2 to {n_pairs}, got {self.clipped}.")
        factors = torch.ones(n_pairs, dtype=torch.float64)
        if n:
            share = torch.linspace(0, 1, n, dtype=torch.float64) if n > 1 else torch.ones(1, dtype=torch.float64)
            factors[n_pairs - n :] = (2 / (1 + (math.pi * share).cos())).clamp(max=NO_ROTATION)
        return over_lengths(factors, length)


@register("p_rope")
@dataclass(frozen=True, kw_only=True)
class PRoPE(RopeScaling):
    """λ_i = 1 for the fastest share p of the pairs, 1e12 for the others, which keep no position. Barbero et al. (2024).

    The models of the paper are trained so from scratch, and Gemma-4 is: transformers' `proportional`. On another model
    it is meant to be followed by training. `drope` is p = 0.

    Attributes:
        p: the share of pairs that rotate; ⌊p · pairs⌋ of them do. The paper's best is 0.75.
    """

    paper: ClassVar[Paper] = Paper("p-RoPE (Round and Round We Go!)", 2024, "https://arxiv.org/abs/2410.06205")
    training: ClassVar[str] = "fine-tuned"

    p: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p <= 1:
            raise ValueError(f"p must be a share of the pairs, from 0 to 1, got {self.p}.")

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        factors = torch.full_like(rope.inv_freq, NO_ROTATION)
        factors[: math.floor(self.p * len(factors))] = 1
        return over_lengths(factors, length)

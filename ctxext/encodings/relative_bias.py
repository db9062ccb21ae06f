"""Relative positions in the attention logits, key - query: T5's buckets and Shaw's distance vectors."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

# --------------------------------------------------------------------------------------------------- T5


def bucket_starts(num_buckets: int, max_distance: int) -> Int[Tensor, " bucket"]:
    """The least distance in tokens of each bucket of one direction.

    The first half of the buckets hold one distance each, the others grow geometrically towards `max_distance`, and the
    last holds all further distances, which T5 cannot tell apart. Raffel et al. (2020), arXiv:1910.10683, section 2.1.

    Raises:
        ValueError: fewer than 2 buckets, or `max_distance` within the half of exact ones.
    """
    exact = num_buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"T5 buckets need num_buckets >= 2 and max_distance > {exact} (the exact buckets), "
            f"got num_buckets={num_buckets}, max_distance={max_distance}."
        )
    share = torch.arange(num_buckets - exact, dtype=torch.float64) / (num_buckets - exact)
    geometric = exact * (max_distance / exact) ** share
    # Rounding error must not push an integer start up by one.
    return torch.cat([torch.arange(exact), (geometric - 1e-9).ceil().long()])


def relative_position_bucket(
    relative_position: Int[Tensor, "*batch"], bidirectional: bool, num_buckets: int, max_distance: int
) -> Int[Tensor, "*batch"]:
    """The row of T5's bias table for each `relative_position` = key - query, in tokens.

    With `bidirectional`, half of the buckets are for keys up to the query, the other half for those after it; otherwise
    keys after the query share bucket 0 with the query itself. Raises ValueError as `bucket_starts`.
    """
    if bidirectional:
        num_buckets //= 2
        side, distance = num_buckets * (relative_position > 0), relative_position.abs()
    else:
        side, distance = torch.zeros_like(relative_position), (-relative_position).clamp(min=0)
    starts = bucket_starts(num_buckets, max_distance).to(distance.device)
    return side + torch.bucketize(distance, starts, right=True) - 1


# ------------------------------------------------------------------------------------------------- Shaw


def clipped_distance(
    query_positions: Int[Tensor, " query"], key_positions: Int[Tensor, " key"], n_left: int, n_right: int
) -> Int[Tensor, "query key"]:
    """The row of the distance table for each pair: key - query clipped to -n_left .. n_right, plus n_left.

    Shaw et al. (2018), "Self-Attention with Relative Position Representations", arXiv:1803.02155, section 3.2.
    """
    return (key_positions - query_positions[:, None]).clamp(-n_left, n_right) + n_left

"""Relative positions in the attention logits: T5's buckets, Shaw's distance vectors, Transformer-XL's terms.

The signs are those of each paper: T5 and Shaw count key - query, Transformer-XL counts query - key.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# --------------------------------------------------------------------------------------------------- T5


def bucket_starts(num_buckets: int, max_distance: int) -> Int[Tensor, " bucket"]:
    """The least distance in tokens of each bucket of one direction.

    The first half of the buckets hold one distance each, the others grow geometrically towards `max_distance`,
    and the last holds everything from its start to infinity: beyond, T5 is blind to the distance. Raffel et al.
    (2020), arXiv:1910.10683, section 2.1.

    Raises:
        ValueError: fewer than 2 buckets, or `max_distance` within the half of exact ones.
    """
    exact = num_buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"buckets need num_buckets >= 2 and max_distance beyond the {exact} exact ones, "
            f"got num_buckets={num_buckets}, max_distance={max_distance}."
        )
    share = torch.arange(num_buckets - exact, dtype=torch.float64) / (num_buckets - exact)
    geometric = exact * (max_distance / exact) ** share
    # A start that is whole must not be rounded up for its last bit.
    return torch.cat([torch.arange(exact), (geometric - 1e-9).ceil().long()])


def relative_position_bucket(
    relative_position: Int[Tensor, "*batch"], bidirectional: bool, num_buckets: int, max_distance: int
) -> Int[Tensor, "*batch"]:
    """The row of T5's bias table for each `relative_position` = key - query, in tokens.

    With `bidirectional`, half of the buckets are for keys before the query (and itself), the other half for
    those after it; otherwise keys after the query share bucket 0 with the query itself.

    Raises:
        ValueError: as `bucket_starts`, of the buckets of one direction.
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


def shaw_logits(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch key dim"],
    table: Float[Tensor, "distance dim"],
    distances: Int[Tensor, "query key"],
) -> Float[Tensor, "*batch query key"]:
    """q_i · (k_j + a_ij) / sqrt(dim), with a_ij the row of `table` at `distances` (Shaw et al., equation 4)."""
    relative = torch.einsum("...qd,qkd->...qk", query, table[distances])
    return (query @ key.mT + relative) / math.sqrt(query.shape[-1])


# --------------------------------------------------------------------------------------- Transformer-XL


def relative_shift(scores: Float[Tensor, "*batch query distance"], n_keys: int) -> Float[Tensor, "*batch query key"]:
    """From one column a distance to one column a key.

    The columns of `scores` are the distances query - key from n_keys down to 1 - n_query, as XLNet lays them out.
    The queries are the last of the keys: query i is at position n_keys - n_query + i. Dai et al. (2019),
    "Transformer-XL", arXiv:1901.02860, appendix B.

    Raises:
        ValueError: `scores` does not have n_query + n_keys columns.
    """
    n_query, n_distances = scores.shape[-2:]
    if n_distances != n_query + n_keys:
        raise ValueError(f"{n_query} queries and {n_keys} keys need {n_query + n_keys} distances, got {n_distances}.")
    column = n_query - torch.arange(n_query)[:, None] + torch.arange(n_keys)
    return scores.gather(-1, column.to(scores.device).expand(*scores.shape[:-1], n_keys))


def relative_attention_terms(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch key dim"],
    relative_key: Float[Tensor, "distance dim"],
    content_bias: Float[Tensor, " dim"],
    position_bias: Float[Tensor, " dim"],
) -> tuple[
    Float[Tensor, "*batch query key"],
    Float[Tensor, "*batch query key"],
    Float[Tensor, "*batch query key"],
    Float[Tensor, "*batch query key"],
]:
    """The terms a, b, c, d of Dai et al. (2019), section 3.3, whose sum over sqrt(dim) are the logits.

    a: content on content, q_i · k_j; b: content on position, q_i · W R_(i-j); c: what holds of a key for every
    query, u · k_j; d: what holds of a distance for every query, v · W R_(i-j).

    Args:
        relative_key: W R, a row for each distance in the order of `relative_shift`.
        content_bias, position_bias: u and v (XLNet's `r_w_bias` and `r_r_bias`).
    """
    content, position = content_bias.expand_as(query), position_bias.expand_as(query)

    def by_distance(query: Tensor) -> Tensor:
        return relative_shift(query @ relative_key.mT, key.shape[-2])

    return query @ key.mT, by_distance(query), content @ key.mT, by_distance(position)

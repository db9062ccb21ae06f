"""Which queries and keys attention computes together: tiles that need no mask.

A causal mask, a window of distances and a chunk of positions all give each query one range of keys, whose ends move by
one key a query or not at all. Such ranges consist of rectangles and triangles, which every flash kernel computes
without a mask, and each pair of a query and a key is computed once. A CPU's kernel takes a mask, too, and computes some
of the pairs outside of a triangle: a narrow band takes less time in one piece with a mask than in two triangles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.methods import Branch

# Queries per block that needs a mask: fewer run slower, more waste work above the diagonal.
BLOCK = 512
# The same of a band, and the most keys that a query sees in one.
BAND, WIDEST = 128, 1024


@dataclass(frozen=True)
class Tile:
    """Pairs of queries and keys.

    Attributes:
        batch: rows of the batch.
        rows, columns: queries and keys.
        shape: "full" has all pairs. Of a square, "lower" has the pairs in which the query's index is at least the
            key's, "upper" those in which it is at most the key's. In a "band" query i sees keys i to
            i + columns - rows. The pairs of "masked" are told by a mask.
    """

    batch: slice
    rows: slice
    columns: slice
    shape: Literal["full", "lower", "upper", "band", "masked"]


# The first key that each query sees, and the one after the last.
Ranges = tuple[Int[Tensor, "batch query"], Int[Tensor, "batch query"]]


def of_branch(branch: Branch, queries: Tensor, keys: Tensor, seen: Ranges) -> Ranges | None:
    """The part of `seen` in `branch`, or None if it is not one range for each query.

    Args:
        queries, keys: positions in tokens, of shape (batch, query) and (batch, key).
    """
    here, there = branch.bucket(queries).double(), branch.bucket(keys).double().contiguous()
    if bool((there.diff(dim=1) < 0).any()):
        return None
    first, stop = (torch.searchsorted(there, here - edge, right=True) for edge in (branch.stop, branch.first))
    return torch.maximum(first, seen[0]), torch.minimum(stop, seen[1])


def of_ranges(ranges: Ranges, bands: bool = False) -> list[Tile] | None:
    """Tiles that contain every pair in `ranges` once; None if they would have less than eight queries on average.

    Args:
        bands: whether tiles may be bands.
    """
    low, high = (side.cpu() for side in ranges)
    same = bool((low == low[:1]).all()) and bool((high == high[:1]).all())
    found: list[Tile] = []
    for row in range(1 if same else len(low)):
        tiles = _of_row(slice(None) if same else slice(row, row + 1), low[row], high[row], bands)
        if tiles is None:
            return None
        found += tiles
    return found


def blocks(branch: Branch, queries: Tensor, keys: Tensor) -> list[Tile]:
    """Masked tiles of up to BLOCK queries that contain every pair in `branch`, for positions in any order."""
    found, bucket = [], branch.bucket(keys)
    for start in range(0, queries.shape[1], BLOCK):
        rows = slice(start, min(start + BLOCK, queries.shape[1]))
        low, high = branch.bucket(queries[:, rows]).aminmax(dim=1, keepdim=True)
        held = ((high - bucket >= branch.first) & (low - bucket < branch.stop)).any(0).nonzero()
        if len(held):
            found.append(Tile(slice(None), rows, slice(int(held[0]), int(held[-1]) + 1), "masked"))
    return found


def _of_row(batch: slice, low: Tensor, high: Tensor, bands: bool) -> list[Tile] | None:
    high = torch.maximum(low, high)
    found: list[Tile] = []

    def add(shape: Literal["full", "lower", "upper", "band"], rows: tuple[int, int], columns: tuple[int, int]) -> None:
        if rows[0] < rows[1] and columns[0] < columns[1]:
            found.append(Tile(batch, slice(*rows), slice(*columns), shape))

    most, first, last = 8 + len(low) // 8, low.tolist(), high.tolist()
    for start, stop in _segments(low, high):
        # Only where the range grows can its first query see nothing and the next one something.
        start += first[start] == last[start]
        if start >= stop or first[start] == last[start]:
            continue
        moves = start + 1 < stop
        low_moves, high_moves = moves and first[start + 1] > first[start], moves and last[start + 1] > last[start]
        width = last[start] - first[start]
        is_band = bands and low_moves and high_moves and width <= WIDEST
        # The triangles at both ends of a band must not overlap.
        size = BAND if is_band else width if low_moves and high_moves else stop - start
        for top in range(start, stop, size):
            end = min(top + size, stop)
            if is_band:
                add("band", (top, end), (first[top], last[end - 1]))
                continue
            add("upper", (top, end - 1), (first[top], first[end - 1]))
            add("full", (top, end), (first[end - 1], last[top] - high_moves))
            if high_moves:
                add("lower", (top, end), (last[top] - 1, last[end - 1]))
            if len(found) > most:
                return None
    return found


def _segments(low: Tensor, high: Tensor) -> list[tuple[int, int]]:
    """The longest runs of queries (start, stop) in which each end moves by one key a query, or by none."""
    low_step, high_step = low.diff(), high.diff()
    regular = ((low_step == 0) | (low_step == 1)) & ((high_step == 0) | (high_step == 1))
    kinds, counts = torch.where(regular, 2 * low_step + high_step, -1).unique_consecutive(return_counts=True)
    found, start, at = [], 0, 0
    for kind, count in zip(kinds.tolist(), counts.tolist()):
        at += count
        if kind >= 0:
            found.append((start, at + 1))
            start = at + 1
        while start < at:
            found.append((start, start + 1))
            start += 1
    if start < len(low):
        found.append((start, len(low)))
    return found

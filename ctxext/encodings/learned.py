"""Learned absolute positions: a longer table made from a trained one, in float64.

A table has one row for each position from 0 on: cut off rows that serve another purpose (OPT's offset of 2, RoBERTa's
padding) first. Each function raises ValueError if `n_rows` is less than the table has.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor


def rows_at(table: Float[Tensor, "old dim"], index: Shaped[Tensor, " row"]) -> Float64[Tensor, "row dim"]:
    """The rows at fractional indices, each interpolated between its neighbours; outside the table, the nearest row."""
    index, table = index.to(table.device).double().clamp(0, len(table) - 1), table.double()
    below = index.floor().long()
    return torch.lerp(table[below], table[index.ceil().long()], (index - below)[:, None])


def interpolate_rows(table: Float[Tensor, "old dim"], n_rows: int) -> Float64[Tensor, "new dim"]:
    """Position p of the new table reads p / factor of the old, factor = n_rows / old: position interpolation.

    Positions beyond (old - 1) * factor read the last row.
    """
    _check_growth(table, n_rows)
    return rows_at(table, torch.arange(n_rows, dtype=torch.float64) * len(table) / n_rows)


def hierarchical_rows(table: Float[Tensor, "old dim"], n_rows: int, alpha: float = 0.4) -> Float64[Tensor, "new dim"]:
    """Position i * n + j is alpha u_i + (1 - alpha) u_j, with u_i = (p_i - alpha p_0) / (1 - alpha).

    So n rows cover n^2 positions, and the first n are the table itself. Su (2020), https://kexue.fm/archives/7947.

    Raises:
        ValueError: `n_rows` exceeds the table's square, or `alpha` is not strictly between 0 and 1, or is 0.5.
    """
    n = len(table)
    _check_growth(table, n_rows)
    if n_rows > n**2:
        raise ValueError(f"{n} rows cover {n}² = {n**2} positions, got n_rows={n_rows}. Interpolate or tile instead.")
    if not 0 < alpha < 1 or alpha == 0.5:
        raise ValueError(
            f"alpha must be strictly between 0 and 1 and not 0.5, got {alpha}. At 0.5 positions (i, j) and (j, i) "
            "would be the same; the source uses 0.4."
        )
    table = table.double()
    base = (table - alpha * table[0]) / (1 - alpha)
    position = torch.arange(n_rows, device=table.device)
    rows = alpha * base[position // n] + (1 - alpha) * base[position % n]
    rows[:n] = table  # Equal up to rounding; the copy keeps the trained rows bit-exact.
    return rows


def tile_rows(table: Float[Tensor, "old dim"], n_rows: int) -> Float64[Tensor, "new dim"]:
    """The table repeated: position p reads p mod old.

    The start for further training in Beltagy et al. (2020), "Longformer", arXiv:2004.05150, section 5: local order is
    kept except at the seams, and positions a table apart are the same until trained.
    """
    _check_growth(table, n_rows)
    return table.double()[torch.arange(n_rows) % len(table)]


def _check_growth(table: Tensor, n_rows: int) -> None:
    if n_rows < len(table):
        raise ValueError(f"n_rows must be at least the {len(table)} rows of the trained table, got {n_rows}.")

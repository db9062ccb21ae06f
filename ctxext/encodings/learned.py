"""Learned absolute positions: a longer table made of a trained one, in float64.

A table holds one row for each position from 0 on; rows that serve another purpose (OPT's offset of 2,
RoBERTa's padding) are to be cut off first.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor


def rows_at(table: Float[Tensor, "old dim"], index: Shaped[Tensor, " row"]) -> Float64[Tensor, "row dim"]:
    """The rows at fractional indices, each on the line between its neighbours.

    An index outside the table reads the nearest end, since nothing beyond it was ever trained.
    """
    index, table = index.to(table.device).double().clamp(0, len(table) - 1), table.double()
    below = index.floor().long()
    above = index.ceil().long()
    return torch.lerp(table[below], table[above], (index - below)[:, None])


def interpolate_rows(table: Float[Tensor, "old dim"], n_rows: int) -> Float64[Tensor, "new dim"]:
    """Position p of the new table reads p / factor of the old, factor = n_rows / old: position interpolation.

    The last positions, those beyond (old - 1) * factor, read the last row.

    Raises:
        ValueError: `n_rows` is less than the table has.
    """
    _check_growth(table, n_rows)
    return rows_at(table, torch.arange(n_rows, dtype=torch.float64) * len(table) / n_rows)


def hierarchical_rows(table: Float[Tensor, "old dim"], n_rows: int, alpha: float = 0.4) -> Float64[Tensor, "new dim"]:
    """Position i * n + j is alpha u_i + (1 - alpha) u_j, with u_i = (p_i - alpha p_0) / (1 - alpha).

    So n rows reach n^2 positions, and the first n are the table itself. Su (2020), "Hierarchical
    decomposition of position encodings", https://kexue.fm/archives/7947.

    Raises:
        ValueError: `n_rows` is less than the table has or more than its square; or `alpha` is not strictly
            between 0 and 1, or is 0.5, where positions (i, j) and (j, i) would be the same.
    """
    n = len(table)
    _check_growth(table, n_rows)
    if n_rows > n**2:
        raise ValueError(f"{n} rows reach {n}² = {n**2} positions, got n_rows={n_rows}. Interpolate or tile instead.")
    if not 0 < alpha < 1 or alpha == 0.5:
        raise ValueError(
            f"alpha must be strictly between 0 and 1 and not 0.5, got {alpha}. At 0.5 positions (i, j) and (j, i) "
            "would be the same; the source uses 0.4."
        )
    table = table.double()
    base = (table - alpha * table[0]) / (1 - alpha)
    position = torch.arange(n_rows, device=table.device)
    rows = alpha * base[position // n] + (1 - alpha) * base[position % n]
    rows[:n] = table  # Equal but for rounding: what was trained stays bitwise.
    return rows


def tile_rows(table: Float[Tensor, "old dim"], n_rows: int) -> Float64[Tensor, "new dim"]:
    """The table again and again: position p reads p mod old.

    The start for further training in Beltagy et al. (2020), "Longformer", arXiv:2004.05150, section 5: local
    order is kept everywhere but at the seams, and positions a table apart are the same until trained.

    Raises:
        ValueError: `n_rows` is less than the table has.
    """
    _check_growth(table, n_rows)
    return table.double()[torch.arange(n_rows) % len(table)]


def _check_growth(table: Tensor, n_rows: int) -> None:
    if n_rows < len(table):
        raise ValueError(f"a longer table must keep the {len(table)} rows it is made of, got n_rows={n_rows}.")

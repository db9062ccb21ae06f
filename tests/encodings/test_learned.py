"""What a longer table is made of: interpolation, the hierarchical decomposition, tiling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctxext.encodings.learned import hierarchical_rows, interpolate_rows, rows_at, tile_rows

every_way = pytest.mark.parametrize("grow", [interpolate_rows, hierarchical_rows, tile_rows])


def table(n: int = 12, dim: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(0)).to(dtype)


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_growth_is_the_table_itself(grow, dtype):
    assert torch.equal(grow(table(dtype=dtype), 12), table(dtype=dtype).double())


@every_way
def test_a_table_never_shrinks(grow):
    with pytest.raises(ValueError, match="n_rows must be at least the 12 rows of the trained table, got 11"):
        grow(table(), 11)


@pytest.mark.parametrize("n_rows", [13, 30, 48])
def test_interpolation_reads_position_over_factor(n_rows):
    old, new = table().double(), interpolate_rows(table(), n_rows)
    for position in range(n_rows):
        index = position * 12 / n_rows
        low = int(index)
        expected = old[low] + (index - low) * (old[min(low + 1, 11)] - old[low])
        torch.testing.assert_close(new[position], expected)


def test_whole_factor_keeps_every_old_row_and_the_last_fills_the_end():
    new = interpolate_rows(table(), 48)
    assert torch.equal(new[::4], table().double())
    assert torch.equal(new[44:], table()[-1:].double().expand(4, -1))


def test_rows_on_a_line_stay_on_it():
    line = torch.arange(10.0)[:, None]
    assert rows_at(line, torch.tensor([0.25, 8.5, 3, -2, 11])).flatten().tolist() == [0.25, 8.5, 3, 0, 9]


@pytest.mark.parametrize("alpha", [0.4, 0.3, 0.9])
def test_hierarchical_rows_are_those_of_the_source(alpha):
    """Su (2020): u_i = (p_i - alpha p_1) / (1 - alpha), q_((i-1)n + j) = alpha u_i + (1 - alpha) u_j, from 1 on."""
    p = [None, *table().double()]
    u = [None, *((row - alpha * p[1]) / (1 - alpha) for row in p[1:])]
    expected = torch.stack([alpha * u[i] + (1 - alpha) * u[j] for i in range(1, 13) for j in range(1, 13)])
    torch.testing.assert_close(hierarchical_rows(table(), 144, alpha), expected)
    torch.testing.assert_close(hierarchical_rows(table(), 50, alpha), expected[:50])


def test_first_rows_of_the_hierarchy_are_the_table_bitwise():
    uneven = table() * torch.logspace(-6, 6, 12)[:, None]
    assert torch.equal(hierarchical_rows(uneven, 100)[:12], uneven.double())


def test_the_hierarchy_reaches_the_square_and_no_further():
    rows = hierarchical_rows(table(), 144)
    assert torch.pdist(rows).min() > 1e-3  # every position its own row
    with pytest.raises(ValueError, match="12 rows cover 12² = 144 positions, got n_rows=145"):
        hierarchical_rows(table(), 145)


@pytest.mark.parametrize("alpha", [0, 1, 0.5, -0.1, float("nan")])
def test_alpha_that_loses_positions_is_refused(alpha):
    with pytest.raises(ValueError, match=r"strictly between 0 and 1 and not 0\.5"):
        hierarchical_rows(table(), 20, alpha)


def test_tiles_repeat():
    new = tile_rows(table(), 30)
    assert all(torch.equal(new[position], table()[position % 12].double()) for position in range(30))

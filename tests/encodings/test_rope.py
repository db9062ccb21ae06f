"""Law 4, and what the rotary maths is by definition, against scalar and complex arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pictures import decay_bound
from torch import Tensor

from ctxext.attention.rotary import Convention, rotate
from ctxext.encodings.rope import (
    RopeGeometry,
    correction_dim,
    cos_sin,
    half_split_to_interleaved,
    interleaved_to_half_split,
    inverse_frequencies,
    linear_ramp,
    rotations,
    wavelengths,
)

DIM = 64
INV_FREQ = inverse_frequencies(DIM, 10000.0)


def rotation(pairs: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The rotation of in-attention RoPE, of `x` with a row for each position."""

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tables = tuple(table.expand(*x.shape[:-1], -1).reshape(1, -1, DIM // 2) for table in (cos, sin))
        return rotate(x.reshape(1, 1, -1, DIM), tables, Convention(pairs)).reshape(x.shape)

    return rotated


def rotate_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoFormer, equation 12: pair i is one complex number, times e^(i m theta_i)."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


rotate_half_split, rotate_interleaved = rotation("half_split"), rotation("interleaved")
every_form = pytest.mark.parametrize("rotate", [rotate_half_split, rotate_interleaved, rotate_complex])


def heads(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def turned(rotate, x: Tensor, positions: Tensor, attention_factor: float = 1.0) -> Tensor:
    return rotate(x, *cos_sin(positions, INV_FREQ, attention_factor))


# --------------------------------------------------------------- law 4: only the distance counts


@every_form
@pytest.mark.parametrize("shift", [1, 4096, 2**24 + 1, 10**9])
def test_dot_product_depends_on_the_distance_alone(rotate, shift):
    m, n = torch.tensor([0, 3, 17, 100, 5000]), torch.tensor([0, 1, 40, 0, 4999])
    q, k = heads(5), heads(5, seed=1)

    def dot(m: Tensor, n: Tensor) -> Tensor:
        return (turned(rotate, q, m) * turned(rotate, k, n)).sum(-1)

    torch.testing.assert_close(dot(m + shift, n + shift), dot(m, n), rtol=0, atol=1e-5)
    assert ((dot(m + 1, n) - dot(m, n)).abs() > 1e-2).all()  # and on the distance it does depend


@every_form
def test_rotations_add_up(rotate):
    x, m, n = heads(3), torch.tensor([0, 7, 90000]), torch.tensor([5, 2000, 11])
    torch.testing.assert_close(turned(rotate, turned(rotate, x, m), n), turned(rotate, x, m + n), rtol=0, atol=1e-9)


@every_form
def test_position_zero_is_left_alone_bitwise(rotate):
    x = heads(3)
    assert torch.equal(turned(rotate, x, torch.zeros(3, dtype=torch.long)), x)


@every_form
def test_attention_factor_enters_the_dot_product_squared(rotate):
    q, k, at = heads(3), heads(3, seed=1), torch.tensor([1, 2, 300])
    plain = (turned(rotate, q, at) * turned(rotate, k, at.flip(0))).sum(-1)
    scaled = (turned(rotate, q, at, 1.5) * turned(rotate, k, at.flip(0), 1.5)).sum(-1)
    torch.testing.assert_close(scaled, 2.25 * plain)


# ------------------------------------------------------------------------------ the two layouts


def test_interleaved_rotation_is_a_complex_product():
    x, positions = heads(4), torch.tensor([0, 1, 777, 10**6])
    turn = torch.polar(torch.ones(4, DIM // 2, dtype=torch.float64), positions[:, None] * INV_FREQ)
    expected = torch.view_as_real(torch.view_as_complex(x.reshape(4, DIM // 2, 2)) * turn).reshape(4, DIM)
    torch.testing.assert_close(turned(rotate_interleaved, x, positions), expected)


def test_half_split_rotation_is_a_complex_product():
    x, positions = heads(4), torch.tensor([0, 1, 777, 10**6])
    turn = torch.polar(torch.ones(4, DIM // 2, dtype=torch.float64), positions[:, None] * INV_FREQ)
    product = torch.complex(x[:, : DIM // 2], x[:, DIM // 2 :]) * turn
    torch.testing.assert_close(turned(rotate_half_split, x, positions), torch.cat([product.real, product.imag], -1))


def test_layout_map_takes_pairs_2i_to_i_and_back():
    x = torch.arange(8.0)
    assert interleaved_to_half_split(x).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert half_split_to_interleaved(x).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    batch = heads(6).reshape(2, 3, DIM)
    assert torch.equal(half_split_to_interleaved(interleaved_to_half_split(batch)), batch)


def test_complex_form_is_the_real_one():
    x, positions = heads(12).reshape(3, 4, DIM), torch.tensor([0, 1, 777, 10**6])
    torch.testing.assert_close(turned(rotate_complex, x, positions), turned(rotate_interleaved, x, positions))
    halves = half_split_to_interleaved(turned(rotate_half_split, interleaved_to_half_split(x), positions))
    torch.testing.assert_close(turned(rotate_complex, x, positions, 1.5), 1.5 * halves)


def test_scores_of_the_two_layouts_agree_once_the_weights_are_mapped():
    q, k, m, n = heads(4), heads(4, seed=1), torch.tensor([0, 5, 900, 40]), torch.tensor([3, 5, 1, 10000])
    interleaved = (turned(rotate_interleaved, q, m) * turned(rotate_interleaved, k, n)).sum(-1)
    q, k = interleaved_to_half_split(q), interleaved_to_half_split(k)
    halves = (turned(rotate_half_split, q, m) * turned(rotate_half_split, k, n)).sum(-1)
    torch.testing.assert_close(halves, interleaved)


# --------------------------------------------------------------------------- decay with the distance


@pytest.mark.slow
def test_decay_bound_bounds_every_score():
    """RoFormer, equation 37: |score| <= max |h_(i+1) - h_i| * sum |S_j|, h_i = q_i k_i* and h_(d/2) = 0."""
    distances = torch.arange(0, 5000, 7)
    q, k = (torch.view_as_complex(heads(200, seed).reshape(200, DIM // 2, 2)) for seed in (0, 1))
    h = torch.cat([q * k.conj(), torch.zeros(200, 1)], dim=-1)
    scores = torch.stack([
        (turned(rotate_interleaved, heads(200), torch.full((200,), int(m))) * heads(200, seed=1)).sum(-1)
        for m in distances
    ])  # fmt: skip
    bound = h.diff(dim=-1).abs().amax(-1) * DIM // 2 * decay_bound(INV_FREQ, distances)[:, None]
    assert (scores.abs() <= bound).all()
    assert (scores.abs() / bound).max() > 0.05  # and it is not idle


def test_decay_bound_is_the_mean_of_partial_sums():
    angles = [100 * float(frequency) for frequency in INV_FREQ]
    sums = [abs(sum(complex(math.cos(a), math.sin(a)) for a in angles[:j])) for j in range(1, DIM // 2 + 1)]
    assert float(decay_bound(INV_FREQ, torch.tensor(100))) == pytest.approx(sum(sums) / len(sums))


def test_bound_falls_from_octave_to_octave_until_the_slow_pairs_turn_and_then_no_more():
    octaves = [float(decay_bound(INV_FREQ, torch.arange(2**k, 2 ** (k + 1))).mean()) for k in range(18)]
    assert octaves[:12] == sorted(octaves[:12], reverse=True)
    assert octaves[0] > 4 * octaves[11]
    assert octaves[11:] == pytest.approx([octaves[11]] * 7, rel=0.03)


# ------------------------------------------------------------------------ frequencies and tables


def test_frequencies_are_powers_of_theta():
    assert inverse_frequencies(8, 10000.0).tolist() == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-15)
    assert inverse_frequencies(6, 8.0).tolist() == pytest.approx([1, 0.5, 0.25], rel=1e-15)


def test_cos_and_sin_are_those_of_position_times_frequency():
    positions = torch.tensor([[0, 5], [2**24 + 1, 123456789]])  # 2^24 + 1 has no float32.
    cos, sin = cos_sin(positions, INV_FREQ, attention_factor=2.0)
    assert cos.shape == sin.shape == (2, 2, DIM // 2)
    for row, column, pair in [(0, 0, 3), (0, 1, 0), (1, 0, 31), (1, 0, 0), (1, 1, 9)]:
        angle = int(positions[row, column]) * 10000.0 ** (-2 * pair / DIM)
        assert float(cos[row, column, pair]) == pytest.approx(2 * math.cos(angle), abs=1e-7)
        assert float(sin[row, column, pair]) == pytest.approx(2 * math.sin(angle), abs=1e-7)


def test_a_pair_returns_after_one_wavelength():
    cos, _ = cos_sin(wavelengths(INV_FREQ), INV_FREQ)  # row i: every pair, after the wavelength of pair i
    torch.testing.assert_close(cos.diagonal(), torch.ones(DIM // 2, dtype=torch.float64))
    half, _ = cos_sin(wavelengths(INV_FREQ) / 2, INV_FREQ)
    torch.testing.assert_close(half.diagonal(), -torch.ones(DIM // 2, dtype=torch.float64))


@pytest.mark.parametrize(("dim", "theta", "length"), [(64, 10000.0, 2048), (128, 500000.0, 8192), (80, 1e7, 131072)])
def test_correction_dim_is_the_inverse_of_rotations(dim, theta, length):
    rope = RopeGeometry.plain(dim, theta, length)
    indices = [correction_dim(turns, rope) for turns in rotations(rope).tolist()]
    assert indices == pytest.approx(list(range(dim // 2)), abs=1e-9)


def test_ramp_is_0_below_1_above_and_linear_between():
    assert linear_ramp(2, 6, torch.arange(8).double()).tolist() == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]
    assert linear_ramp(0.5, 2.5, torch.arange(4).double()).tolist() == [0, 0.25, 0.75, 1]


def test_ramp_of_no_width_is_a_step():
    assert linear_ramp(3, 3, torch.arange(6).double()).tolist() == [0, 0, 0, 0, 1, 1]
    assert linear_ramp(2.5, 2.5, torch.arange(6).double()).tolist() == [0, 0, 0, 1, 1, 1]


def test_geometry_is_plain_only_without_scaling():
    rope = RopeGeometry.plain(DIM, 10000, 2048)
    assert (rope.dim, rope.is_plain, rope.inv_freq.dtype) == (DIM, True, torch.float64)
    same = {"rope_theta": 10000.0, "original_max_position_embeddings": 2048}
    assert not RopeGeometry(inv_freq=rope.inv_freq / 4, **same).is_plain
    assert not RopeGeometry(inv_freq=rope.inv_freq, attention_factor=1.1, **same).is_plain
    assert not RopeGeometry(inv_freq=rope.inv_freq, **{**same, "rope_theta": 20000.0}).is_plain

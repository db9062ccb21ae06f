"""The table of sines against transformers' own modules, and the properties that people rely on."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import shift_matrix

from ctxext.encodings.sinusoidal import Layout, sinusoidal_frequencies, sinusoidal_table

DIM = 32
POSITIONS = torch.arange(96)

every_layout = pytest.mark.parametrize("layout", get_args(Layout))


def marian():
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    return MarianSinusoidalPositionalEmbedding(len(POSITIONS), DIM).create_weight()


def pegasus():
    from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding

    return PegasusSinusoidalPositionalEmbedding(len(POSITIONS), DIM).create_weight()


def roformer():
    from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding

    return RoFormerSinusoidalPositionalEmbedding(len(POSITIONS), DIM).create_weight()


def ctrl():
    from transformers.models.ctrl.modeling_ctrl import positional_encoding

    return positional_encoding(len(POSITIONS), DIM, torch.float32)


def m2m_100():
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

    return M2M100SinusoidalPositionalEmbedding.get_embedding(len(POSITIONS), DIM)


def xglm():
    from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

    return XGLMSinusoidalPositionalEmbedding.get_embedding(len(POSITIONS), DIM)


def fsmt():
    from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding

    return SinusoidalPositionalEmbedding.get_embedding(len(POSITIONS), DIM, padding_idx=None)


def whisper():
    from transformers.models.whisper.modeling_whisper import sinusoids

    return sinusoids(len(POSITIONS), DIM)


@pytest.mark.parametrize(
    ("table", "layout"),
    [(table, "halves") for table in (marian, pegasus, roformer, ctrl)]
    + [(table, "tensor2tensor") for table in (m2m_100, xglm, fsmt, whisper)],
)
def test_table_is_that_of_transformers(table, layout):
    # Some of them multiply in float32: an angle of 96 radians is right to 96 * 2^-24.
    torch.testing.assert_close(sinusoidal_table(POSITIONS, DIM, layout=layout).float(), table(), rtol=0, atol=1e-5)


def test_interleaved_table_is_that_of_the_paper():
    table = sinusoidal_table(torch.tensor([[0, 1, 7], [100, 10**6, 3]]), 8)
    for position, row in [(0, table[0, 0]), (7, table[0, 2]), (100, table[1, 0]), (10**6, table[1, 1])]:
        expected = [
            math.sin(position / 10000 ** (k / 8)) if k % 2 == 0 else math.cos(position / 10000 ** ((k - 1) / 8))
            for k in range(8)
        ]
        assert row.tolist() == pytest.approx(expected, abs=1e-9)


@every_layout
@given(position=st.floats(-1e4, 1e5), offset=st.floats(-1e4, 1e4))
def test_a_shift_is_one_linear_map_whatever_the_position(layout, position, offset):
    here, there = sinusoidal_table(torch.tensor([position, position + offset], dtype=torch.float64), DIM, layout=layout)
    torch.testing.assert_close(shift_matrix(offset, DIM, layout=layout) @ here, there, rtol=0, atol=1e-9)


@every_layout
def test_a_shift_is_a_rotation(layout):
    shift = shift_matrix(12.5, DIM, layout=layout)
    torch.testing.assert_close(shift @ shift.T, torch.eye(DIM, dtype=torch.float64))
    torch.testing.assert_close(shift @ shift_matrix(-12.5, DIM, layout=layout), torch.eye(DIM, dtype=torch.float64))


@every_layout
def test_dot_product_depends_on_the_distance_alone(layout):
    near, far = (sinusoidal_table(start + torch.arange(0, 200, 10), DIM, layout=layout) for start in (0, 54321))
    torch.testing.assert_close(near @ near.T, far @ far.T, rtol=0, atol=1e-8)
    expected = sinusoidal_frequencies(DIM, layout=layout).mul(190).cos().sum()
    torch.testing.assert_close((near @ near.T)[0, -1], expected)


@every_layout
@pytest.mark.parametrize("factor", [2, 4])
def test_interpolated_table_holds_the_old_rows_at_every_factor_th_position(layout, factor):
    old = sinusoidal_table(POSITIONS, DIM, layout=layout)
    new = sinusoidal_table(torch.arange(factor * len(POSITIONS)) / factor, DIM, layout=layout)
    assert torch.equal(new[::factor], old)
    steps = new.diff(dim=0).norm(dim=-1)
    torch.testing.assert_close(steps, steps[:1].expand_as(steps), rtol=0, atol=1e-8)  # and between, even steps
    assert steps[0] < 0.6 * (old[1] - old[0]).norm()


@pytest.mark.parametrize(("layout", "slowest"), [("interleaved", 10000 ** -(30 / 32)), ("tensor2tensor", 1e-4)])
def test_slowest_pair_is_the_last(layout, slowest):
    frequencies = sinusoidal_frequencies(DIM, layout=layout)
    assert (frequencies.diff() < 0).all()
    assert frequencies[[0, -1]].tolist() == pytest.approx([1, slowest])


@pytest.mark.parametrize("dim", [2, 7])
def test_a_sine_without_its_cosine_is_refused(dim):
    with pytest.raises(ValueError, match=f"even dim of at least 4, got {dim}"):
        sinusoidal_table(POSITIONS, dim)

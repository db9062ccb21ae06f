"""ALiBi's slopes and biases against the authors' rule and against each way that transformers writes it."""

from __future__ import annotations

import math

import pytest
import torch

from ctxext.encodings.alibi import alibi_bias, alibi_slopes

HEADS = range(1, 41)


def authors_slopes(n: int) -> list[float]:
    """As in fairseq/models/transformer.py of ofirpress/attention_with_linear_biases."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return authors_slopes(closest) + authors_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("n_heads", HEADS)
def test_slopes_are_the_authors_for_any_number_of_heads(n_heads):
    assert alibi_slopes(n_heads).tolist() == pytest.approx(authors_slopes(n_heads), rel=1e-12)


@pytest.mark.parametrize("n_heads", HEADS)
def test_bloom_falcon_and_mpt_have_the_same_slopes(n_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    two_keys, slopes = torch.ones(1, 2, dtype=torch.long), alibi_slopes(n_heads).float()
    torch.testing.assert_close(bloom(two_keys, n_heads, torch.float32)[:, 0, 1], slopes)
    torch.testing.assert_close(build_mpt_alibi_tensor(n_heads, 2)[:, 0, 0], -slopes)
    # Falcon rounds its slopes to bfloat16.
    torch.testing.assert_close(falcon(two_keys, n_heads, torch.float32)[:, 0, 1], slopes, rtol=2**-8, atol=0)


def test_slopes_of_eight_heads_are_those_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]


def test_bias_is_minus_slope_times_distance():
    bias = alibi_bias(torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([2, 3]), torch.arange(4))
    assert bias[0].tolist() == [[-1, -0.5, 0, -0.5], [-1.5, -1, -0.5, 0]]
    assert torch.equal(bias[1], bias[0] / 2)


def test_rows_of_a_batch_have_positions_of_their_own():
    slopes, left_padded = alibi_slopes(6), torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    bias = alibi_bias(slopes, left_padded, left_padded)
    assert bias.shape == (2, 6, 4, 4)
    for row, positions in zip(bias, left_padded):
        assert torch.equal(row, alibi_bias(slopes, positions, positions))


def test_slope_times_key_is_the_same_attention_under_a_causal_mask():
    slopes, positions = alibi_slopes(12), torch.arange(50)
    future = positions[:, None] < positions
    logits = torch.randn(12, 50, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    by_distance = (logits + alibi_bias(slopes, positions, positions)).masked_fill(future, -torch.inf)
    by_key = (logits + slopes[:, None, None] * positions).masked_fill(future, -torch.inf)
    torch.testing.assert_close(by_key.softmax(-1), by_distance.softmax(-1))
    assert (by_key - by_distance).diff(dim=-1)[:, -1].abs().max() < 1e-9  # they differ by one number a query


def test_no_heads_are_refused():
    with pytest.raises(ValueError, match="n_heads must be at least 1, got 0"):
        alibi_slopes(0)

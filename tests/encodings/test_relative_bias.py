"""T5's buckets, Shaw's distance vectors and Transformer-XL's terms against transformers and naive loops."""

from __future__ import annotations

import math

import pytest
import torch
from pictures import relative_attention_terms, relative_shift
from torch import Tensor

from ctxext.encodings.relative_bias import (
    bucket_starts,
    clipped_distance,
    relative_position_bucket,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------- T5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets", [8, 32, 64])
def test_buckets_are_those_of_t5(bidirectional, num_buckets):
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = torch.arange(-3000, 3000).reshape(3, -1)
    for max_distance in (40, 100, 128, 160, 256, 333, 512, 1024, 2048):
        expected = T5Attention._relative_position_bucket(relative, bidirectional, num_buckets, max_distance)
        assert torch.equal(relative_position_bucket(relative, bidirectional, num_buckets, max_distance), expected)


def test_a_bucket_starts_where_it_says():
    starts = bucket_starts(32, 128)
    assert torch.equal(relative_position_bucket(-starts, False, 32, 128), torch.arange(32))
    assert torch.equal(relative_position_bucket(1 - starts[1:], False, 32, 128), torch.arange(31))


def test_a_start_that_is_whole_is_not_rounded_up():
    assert bucket_starts(12, 384)[6:].tolist() == [6, 12, 24, 48, 96, 192]


def test_beyond_the_last_bucket_every_distance_is_the_same():
    last = int(bucket_starts(32, 128)[-1])
    assert last < 128  # the limit is nearer than its name says
    assert relative_position_bucket(torch.tensor([-last, -128, -(10**6)]), False, 32, 128).tolist() == [31] * 3
    assert relative_position_bucket(torch.tensor([1 - last]), False, 32, 128).tolist() == [30]


def test_a_longer_max_distance_stretches_only_the_geometric_half():
    old, new = bucket_starts(32, 128), bucket_starts(32, 512)
    assert torch.equal(old[:17], new[:17])
    assert (new[17:] > old[17:]).all()


def test_no_room_for_geometric_buckets_is_refused():
    with pytest.raises(ValueError, match=r"max_distance > 16 \(the exact buckets\), got num_buckets=32, max_dist"):
        relative_position_bucket(torch.arange(4), False, 32, 16)


# ------------------------------------------------------------------------------------------------- Shaw


def shaw_by_hand(query: Tensor, key: Tensor, table: Tensor, n_left: int, n_right: int) -> Tensor:
    return torch.tensor(
        [
            [
                float(q @ (k + table[max(-n_left, min(n_right, j - i)) + n_left])) / len(q) ** 0.5
                for j, k in enumerate(key)
            ]
            for i, q in enumerate(query)
        ],
        dtype=torch.float64,
    )


def shaw_logits(query: Tensor, key: Tensor, table: Tensor, distances: Tensor) -> Tensor:
    """q_i · (k_j + a_ij) / sqrt(dim), with a_ij the row of `table` at `distances` (Shaw et al., equation 4)."""
    relative = torch.einsum("...qd,qkd->...qk", query, table[distances])
    return (query @ key.mT + relative) / math.sqrt(query.shape[-1])


def test_shaw_logits_are_equation_4_of_the_paper():
    query, key, table = randn(2, 9, 6), randn(2, 9, 6, seed=1), randn(6, 6, seed=2)
    distances = clipped_distance(torch.arange(9), torch.arange(9), 3, 2)
    for row, q, k in zip(shaw_logits(query, key, table, distances), query, key):
        torch.testing.assert_close(row, shaw_by_hand(q, k, table, 3, 2))


def test_shaw_logits_are_those_of_wav2vec2_bert():
    from transformers import Wav2Vec2BertConfig
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

    config = Wav2Vec2BertConfig(
        hidden_size=16, num_attention_heads=2, position_embeddings_type="relative_key", attention_dropout=0.0,
        left_max_position_embeddings=5, right_max_position_embeddings=2, attn_implementation="eager",
    )  # fmt: skip
    attention = Wav2Vec2BertSelfAttention(config).double().eval()
    hidden = randn(1, 11, 16)
    with torch.no_grad():
        _, weights = attention(hidden)
        query, key = (
            project(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
            for project in (attention.linear_q, attention.linear_k)
        )
        distances = clipped_distance(torch.arange(11), torch.arange(11), 5, 2)
        expected = shaw_logits(query, key, attention.distance_embedding.weight, distances).softmax(-1)
    torch.testing.assert_close(weights, expected)


# --------------------------------------------------------------------------------------- Transformer-XL

N_QUERY, N_KEYS, DIM = 5, 8, 6


@pytest.mark.parametrize(("n_query", "n_keys"), [(5, 5), (5, 8), (1, 4)])
def test_shifted_scores_stand_at_their_distance(n_query, n_keys):
    distances = torch.arange(n_keys, -n_query, -1.0).expand(2, n_query, -1)
    query_positions, key_positions = torch.arange(n_keys - n_query, n_keys), torch.arange(n_keys)
    expected = (query_positions[:, None] - key_positions).float().expand(2, -1, -1)
    assert torch.equal(relative_shift(distances, n_keys), expected)


@pytest.mark.parametrize(("n_query", "n_keys"), [(5, 5), (5, 8)])
def test_shift_is_that_of_xlnet(n_query, n_keys):
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    scores = randn(2, 3, n_query, n_query + n_keys)
    assert torch.equal(relative_shift(scores, n_keys), XLNetRelativeAttention.rel_shift_bnij(scores, klen=n_keys))


def test_terms_are_those_of_the_paper():
    query, key, relative = randn(2, N_QUERY, DIM), randn(2, N_KEYS, DIM, seed=1), randn(N_KEYS + N_QUERY, DIM, seed=2)
    u, v = randn(DIM, seed=3), randn(DIM, seed=4)
    terms = relative_attention_terms(query, key, relative, u, v)
    for batch in range(2):
        for i in range(N_QUERY):
            for j in range(N_KEYS):
                q, k = query[batch, i], key[batch, j]
                r = relative[N_KEYS - (N_KEYS - N_QUERY + i - j)]  # the row of distance i - j
                expected = torch.stack([q @ k, q @ r, u @ k, v @ r])
                torch.testing.assert_close(torch.stack([term[batch, i, j] for term in terms]), expected)


def test_terms_add_up_to_the_attention_of_xlnet():
    from transformers import XLNetConfig
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    attention = XLNetRelativeAttention(XLNetConfig(d_model=12, n_head=2, d_inner=8, n_layer=1, vocab_size=8)).double()
    for seed, parameter in enumerate(attention.parameters()):
        parameter.data = randn(*parameter.shape, seed=seed)
    query, key, relative = randn(N_QUERY, 1, 2, DIM), randn(N_KEYS, 1, 2, DIM, seed=1), randn(13, 1, 2, DIM, seed=2)
    with torch.no_grad():
        _, weights = attention.eval().rel_attn_core(query, key, key, relative, output_attentions=True)
    for head in range(2):
        terms = relative_attention_terms(
            query[:, 0, head], key[:, 0, head], relative[:, 0, head], attention.r_w_bias[head], attention.r_r_bias[head]
        )
        torch.testing.assert_close(weights[:, :, 0, head], (sum(terms) / DIM**0.5).softmax(-1))


def test_scores_without_every_distance_are_refused():
    with pytest.raises(ValueError, match="5 queries and 8 keys need 13 distances, got 12"):
        relative_shift(randn(5, 12), 8)

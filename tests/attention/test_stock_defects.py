"""What is wrong with transformers' own dynamic and longrope scaling, each shown on a stock model and gone here.

transformers scales by the length of the call: github.com/huggingface/transformers/issues/25104, open since 2023.
"""

from collections.abc import Callable

import pytest
import torch
from families import LENGTH, logits
from in_attention_reference import CHUNKS, N_TOKENS, extended, padded, read, rows, stock
from transformers import DynamicCache

# Logits have a standard deviation of 1.2; nothing smaller than SEEN is called a defect.
SEEN, GONE = 0.5, 1e-4


def ours(rope_type: str):
    return extended({"dynamic": "dynamic_ntk", "longrope": "longrope"}[rope_type])


def row() -> torch.Tensor:
    return rows()[0][None]


def between_decoding_and_a_full_forward(make: Callable) -> float:
    """Prefill within the trained length, then one token at a time across it."""
    model, chunks = make(), [LENGTH - 4, *[1] * 30]
    ids = row()[:, : sum(chunks)]
    decoded = read(model, {"input_ids": ids}, DynamicCache(config=model.config), chunks)
    return float((decoded - logits(make(), ids, use_cache=False)).abs().max())


def between_chunks_and_a_full_forward(make: Callable) -> float:
    model = make()
    chunked = read(model, {"input_ids": row()}, DynamicCache(config=model.config), CHUNKS)
    return float((chunked - logits(make(), row(), use_cache=False)).abs().max())


def between_a_row_alone_and_in_a_batch(make: Callable) -> float:
    """Rows of 180 and 40 tokens: the short one, by itself and beside the long one."""
    alone, batch = rows()[3], padded([rows()[0], rows()[3]], "left")
    beside = logits(make(), batch.pop("input_ids"), use_cache=False, **batch)[1, -len(alone) :]
    return float((beside - logits(make(), alone[None], use_cache=False)[0]).abs().max())


def between_a_used_model_and_a_fresh_one(make: Callable, n_tokens: int) -> float:
    """A call of `n_tokens` after one of 180."""
    used = make()
    logits(used, row(), use_cache=False)
    ids = row()[:, :n_tokens]
    return float((logits(used, ids, use_cache=False) - logits(make(), ids, use_cache=False)).abs().max())


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize(
    "gap",
    [between_decoding_and_a_full_forward, between_chunks_and_a_full_forward, between_a_row_alone_and_in_a_batch],
)
def test_a_scale_of_the_call_contradicts_itself_and_a_scale_of_each_query_does_not(
    rope_type: str, gap: Callable
) -> None:
    assert gap(lambda: stock(rope_type)) > SEEN
    assert gap(lambda: ours(rope_type)) < GONE


def test_a_call_leaks_into_a_later_one_and_here_it_does_not() -> None:
    n_tokens = LENGTH + 20
    assert between_a_used_model_and_a_fresh_one(lambda: stock("dynamic"), n_tokens) > SEEN
    assert between_a_used_model_and_a_fresh_one(lambda: ours("dynamic"), n_tokens) == 0.0


def test_a_call_of_the_trained_length_does_not_reset_and_here_there_is_nothing_to_reset() -> None:
    assert between_a_used_model_and_a_fresh_one(lambda: stock("dynamic"), LENGTH) > SEEN
    assert between_a_used_model_and_a_fresh_one(lambda: ours("dynamic"), LENGTH) == 0.0


def test_most_next_tokens_change_under_the_stock_cache_and_none_here() -> None:
    agreement = {}
    for name, model in (("stock", stock("dynamic")), ("ours", ours("dynamic"))):
        full = logits(model, row(), use_cache=False)[0, LENGTH:]
        cached = read(model, {"input_ids": row()}, DynamicCache(), [1] * N_TOKENS)[0, LENGTH:]
        agreement[name] = float((full.argmax(-1) == cached.argmax(-1)).float().mean())
    assert agreement["stock"] < 0.5
    assert agreement["ours"] == 1.0


def test_the_stock_table_grows_by_a_new_tensor_and_here_every_table_stays() -> None:
    def tables(model) -> dict:
        return {name: (buffer.data_ptr(), buffer.sum().item()) for name, buffer in model.named_buffers()}

    for model, steady in ((stock("dynamic"), False), (ours("dynamic"), True)):
        before = tables(model)
        logits(model, row(), use_cache=False)
        assert (tables(model) == before) is steady

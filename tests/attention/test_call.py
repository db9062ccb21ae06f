"""Laws of in-attention RoPE: trained lengths left alone, rows independent, true gradients, separate caches."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from families import LENGTH, logits, tiny_model, token_ids
from in_attention_reference import (
    LATE,
    METHODS,
    N_TOKENS,
    assert_rows,
    extended,
    padded,
    read,
    rows,
    slow_model,
    soft_model,
    truth,
)
from live import rotary_of
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

import ctxext
from ctxext.attention import softmax
from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import PI

# Tokens at which no distance is anything but itself: the trained length; the window and one; a chunk and one.
UNTOUCHED = {
    "dynamic_ntk": LENGTH,
    "dynamic_yarn": LENGTH,
    "self_extend": LENGTH // 4,
    "rerope": LENGTH // 4 + 1,
    "dca": LENGTH * 3 // 4 + 1,
}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("method", UNTOUCHED)
def test_queries_within_the_trained_length_see_the_base_model(method: str, family: str) -> None:
    stock, model, n_tokens = soft_model(family), extended(method, family), UNTOUCHED[method]
    ids = token_ids(n_tokens + 24, batch=2)
    want, found = (logits(one, ids, use_cache=False) for one in (stock, model))
    torch.testing.assert_close(found[:, :n_tokens], want[:, :n_tokens], atol=1e-5, rtol=0)
    assert float((found[:, n_tokens:] - want[:, n_tokens:]).abs().max()) > 0.01


@pytest.mark.parametrize("method", METHODS)
def test_a_row_never_feels_its_neighbours(method: str) -> None:
    """Other tokens, other lengths, other rungs: the third row stays what it was."""
    model, others = extended(method), [*token_ids(178, batch=3, seed=5)]
    first, second = rows()[:3], [others[0], others[1][:66], rows()[2], others[2][:9]]
    for chunks in ((180,), (100, 79, 1)):
        found = []
        for batch in (padded(first, "left"), padded([torch.cat([others[0], others[0][:2]]), *second[1:]], "left")):
            cache = DynamicCache() if len(chunks) > 1 else None
            found.append(read(model, batch, cache, list(chunks))[2, -79:])
        torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_the_slow_truth(method: str, checkpointing: bool, monkeypatch) -> None:
    monkeypatch.setattr(softmax, "SCORES", 1)  # blocks of 16 queries
    ids = rows()[1][:100]

    def gradients(model, predicted: torch.Tensor) -> dict[str, torch.Tensor]:
        torch.nn.functional.cross_entropy(predicted[:-1], ids[1:]).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    slow, model = slow_model(method), extended(method).train()
    want = gradients(slow.model, slow(ids))
    if checkpointing:
        model.gradient_checkpointing_enable()
    found = gradients(model, model(input_ids=ids[None]).logits[0])
    assert want.keys() == found.keys()
    assert all(float(gradient.abs().max()) > 1e-3 for gradient in want.values())
    torch.testing.assert_close(found, want, atol=1e-4, rtol=0)


def test_training_on_padded_rows_is_that_of_each_row_alone() -> None:
    batch, model = padded(rows()[1:], "left"), extended("dca").train()
    assert_rows(model(**batch, use_cache=False).logits, truth("dca")[1:], batch["attention_mask"])


# ------------------------------------------------------------------------------- caches mixed up


def filled(model) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    logits(model, rows()[0][None, :20], past_key_values=cache)
    return cache


def one_more(model, cache: Cache) -> None:
    logits(model, rows()[0][None, 20:21], past_key_values=cache)


def assert_usable(model, method: str) -> None:
    assert_rows(read(model, {"input_ids": rows()[3][None]}, DynamicCache(), [20, *[1] * 20]), truth(method)[3:])


def test_a_cache_from_before_the_extension_is_refused() -> None:
    model = soft_model("llama")
    cache = filled(model)
    ctxext.extend_context(model, 4.0, "dynamic_ntk")
    with pytest.raises(ValueError, match=r"20 tokens from before the model was extended.*Start from an empty cache"):
        one_more(model, cache)
    assert_usable(model, "dynamic_ntk")


def test_an_emptied_cache_from_before_the_extension_is_taken() -> None:
    model = soft_model("llama")
    cache = filled(model)
    cache.reset()
    ctxext.extend_context(model, 4.0, "dynamic_ntk")
    assert_rows(read(model, {"input_ids": rows()[3][None]}, cache, [20, *[1] * 20]), truth("dynamic_ntk")[3:])


@pytest.mark.parametrize("other", ["self_extend", "dynamic_ntk_fine"])
def test_a_cache_of_another_extension_is_refused(other: str) -> None:
    model = extended(other)
    cache = filled(model)
    ctxext.restore_context(model)
    ctxext.extend_context(model, **LATE["dynamic_ntk"][0](rotary_of(model).inv_freq.numel()))
    with pytest.raises(
        ValueError, match=r"this cache was filled under .*, but the model is now extended by dynamic_ntk ×"
    ):
        one_more(model, cache)
    assert_usable(model, "dynamic_ntk")


def test_a_cache_that_outlives_its_extension_is_refused() -> None:
    model = extended("dynamic_ntk")
    cache = filled(model)
    ctxext.restore_context(model)
    with pytest.raises(RuntimeError, match=r"filled under dynamic_ntk ×.*Start from an empty cache"):
        one_more(model, cache)
    assert torch.equal(logits(model, rows()[0][None]), logits(soft_model("llama"), rows()[0][None]))


def test_a_cache_serves_the_same_extension_again() -> None:
    model = extended("dynamic_ntk")
    cache = filled(model)
    ctxext.restore_context(model)
    ctxext.extend_context(model, 4.0, "dynamic_ntk")
    found = read(model, {"input_ids": rows()[0][None]}, cache, [100, *[1] * 20])
    assert_rows(found, [truth("dynamic_ntk")[0][20:140]])


def test_a_call_that_failed_leaves_its_cache_as_it_was() -> None:
    model = extended("dynamic_ntk")
    row, cache = rows()[0][None], filled(model)
    with pytest.raises(IndexError):
        logits(model, torch.full((1, 3), 10**6), past_key_values=cache)
    assert_rows(read(model, {"input_ids": row}, cache, [100, *[1] * 20]), [truth("dynamic_ntk")[0][20:140]])


class RingLayer(CacheLayerMixin):
    """A cache layer of someone's own, which keeps its keys nobody knows how."""

    lazy_initialization = update = get_mask_sizes = get_max_length = None

    def get_seq_length(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "encoder-decoder cache"),
        (Cache(layers=[RingLayer(), RingLayer()]), "unsupported cache layer: RingLayer"),
    ],
)
def test_a_cache_of_an_unknown_kind_is_refused(cache: Cache, reason: str) -> None:
    model = extended("dynamic_ntk")
    with pytest.raises(TypeError, match=reason):
        one_more(model, cache)
    assert_usable(model, "dynamic_ntk")


def test_a_scale_of_the_whole_call_refuses_a_cache() -> None:
    model = ctxext.extend_context(tiny_model("llama"), 4.0, "transformers_dynamic")
    for given in ({"use_cache": True}, {"past_key_values": DynamicCache()}):
        with pytest.raises(ValueError, match="use_cache=False, or use dynamic_ntk"):
            logits(model, rows()[0][None], **given)
    assert logits(model, rows()[0][None]).shape == (1, 180, 128)


def test_a_layer_alone_says_that_it_has_no_positions() -> None:
    model = extended("dynamic_ntk")
    states = torch.randn(1, 4, 64)
    ones = torch.ones(1, 4, 16)
    with pytest.raises(RuntimeError, match="without token positions"):
        model.model.layers[0](states, position_embeddings=(ones, 0 * ones))


def test_a_method_of_ones_own_scales_its_queries() -> None:
    """Its frequencies are those of a static method, which a config could express: its queries are not."""

    @dataclass(frozen=True, kw_only=True)
    class LouderPI(PI):
        name: ClassVar[str] = "louder_pi"

        def query_scaling(self, rope: RopeGeometry, positions: torch.Tensor) -> torch.Tensor:
            return 1 + 0.2 * (positions.double() / LENGTH).floor().log1p()

    model = ctxext.extend_context(soft_model("llama"), method=LouderPI(factor=4.0))
    assert not model.context_extension.plan.is_portable
    assert_rows(read(model, {"input_ids": rows()[0][None]}, None, [N_TOKENS]), truth("query_temperature")[:1])

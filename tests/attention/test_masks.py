"""Causality under in-attention RoPE: a token moves no logit before it, and a traced pass is the eager one.

In float64, so that no CPU's rounding decides.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import LENGTH, tiny_model, token_ids
from in_attention_reference import SOFT, padded, read
from live import EXACT_UNDER_A_CACHE, LATE, late
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

from ctxext import extend_context
from ctxext.attention import masks

pytestmark = pytest.mark.usefixtures("float64")

# Below the trained length, at it and beyond it, past two rungs and the sliding window.
LENGTHS = (40, LENGTH, 150)


def _none(config: Any, n_tokens: int) -> None:
    return None


def _dynamic(config: Any, n_tokens: int) -> DynamicCache:
    return DynamicCache(config=config)


def _static(config: Any, n_tokens: int) -> StaticCache:
    return StaticCache(config=config, max_cache_len=n_tokens)


# A family for each kind of cache: the sliding windows lie beyond the trained length; in gemma2 and gpt_oss, one lies
# within it. gpt_oss has attention sinks, and experts that only "eager" multiplies in float64.
CACHES = {
    "none": ("llama", {}, _none),
    "dynamic": ("llama", {}, _dynamic),
    "static": ("llama", {}, _static),
    "sliding": ("mistral", {"sliding_window": 96}, _dynamic),
    "static sliding": ("mistral", {"sliding_window": 96}, _static),
    "within": ("gemma2", {"sliding_window": 32}, _dynamic),
    "static within": ("gemma2", {"sliding_window": 32}, _static),
    "sinks within": ("gpt_oss", {"experts_implementation": "eager"}, _dynamic),
    "static sinks within": ("gpt_oss", {"experts_implementation": "eager"}, _static),
}
CASES = [
    (method, implementation, cache)
    for method in LATE
    for implementation in ("sdpa", "eager")
    for cache in CACHES
    if (method in EXACT_UNDER_A_CACHE or cache == "none")
    and (implementation == "eager" or "within" not in cache)  # sdpa has no softcap and no sinks
]


def extended(method: str, implementation: str, family: str, **changes: Any) -> Any:
    model = tiny_model(family, **SOFT, attn_implementation=implementation, **changes).double()
    return extend_context(model, method=late(method, model))


def batches(n_tokens: int) -> dict[str, dict[str, torch.Tensor]]:
    """Two rows as they come, and two of which one is padded on the left."""
    rows = token_ids(n_tokens, batch=2)
    return {"full": {"input_ids": rows}, "padded": padded([rows[0], rows[1, 7:]], "left")}


def changed(inputs: dict[str, torch.Tensor], at: int) -> dict[str, torch.Tensor]:
    ids = inputs["input_ids"].clone()
    ids[:, at] = (ids[:, at] + 50) % 128
    return {**inputs, "input_ids": ids}


@pytest.mark.parametrize(("method", "implementation", "cache"), CASES)
def test_law_9_no_token_moves_an_earlier_logit_and_a_traced_pass_is_the_eager_one(
    method: str, implementation: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the branches that tracing takes, run without a compiler, which would need minutes for these cases."""
    family, changes, make = CACHES[cache]
    model = extended(method, implementation, family, **changes)
    for n_tokens in LENGTHS:
        at, whole = n_tokens // 2, [n_tokens]
        for inputs in batches(n_tokens).values():
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
            want = read(model, inputs, None, whole)
            for traced in (False, True):
                monkeypatch.setattr(torch.compiler, "is_compiling", lambda: traced)  # noqa: B023
                found = read(model, inputs, make(model.config, n_tokens), whole)
                torch.testing.assert_close(found[mask], want[mask], rtol=0, atol=1e-9)
                other = read(model, changed(inputs, at), make(model.config, n_tokens), whole)
                assert torch.equal(other[:, :at][mask[:, :at]], found[:, :at][mask[:, :at]])
                assert not torch.equal(other[:, at], found[:, at])
            if cache != "none" and n_tokens == max(LENGTHS):
                found = read(model, inputs, make(model.config, n_tokens), [n_tokens - 9, 8, 1])
                torch.testing.assert_close(found[mask], want[mask], rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "implementation"), [("llama", "sdpa"), ("llama", "eager"), ("mistral", "eager")])
@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend", "dca"])
@torch.no_grad()
def test_law_9_a_compiled_prefill_with_the_default_cache_is_causal(
    method: str, implementation: str, family: str
) -> None:
    """The same, through the compiler itself, for each way through attention, and past Mistral's sliding window."""
    window = {"sliding_window": LENGTH + 2} if family == "mistral" else {}
    model, ids = extended(method, implementation, family, **window), token_ids(LENGTH + 6, batch=2)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    found = compiled(input_ids=ids).logits
    torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=0, atol=1e-9)
    other = compiled(**changed({"input_ids": ids}, -1)).logits
    assert torch.equal(other[:, :-1], found[:, :-1])
    assert not torch.equal(other[:, -1], found[:, -1])
    torch._dynamo.reset()


@pytest.mark.parametrize("module", [True, False, None])
@pytest.mark.parametrize("called", [True, False, None])
def test_a_missing_mask_is_the_triangle_of_a_causal_layer_alone(module: bool | None, called: bool | None) -> None:
    layer = SimpleNamespace() if module is None else SimpleNamespace(is_causal=module)
    query, key = torch.empty(2, 2, 3, 8), torch.empty(2, 2, 5, 8)
    mask = masks.explicit(None, layer, query, key, called)
    causal = called if called is not None else module is not False
    assert (mask is not None) == causal
    if causal:
        assert torch.equal(mask.whole()[0, 0], torch.ones(3, 5).tril(2).bool())
    given = torch.ones(2, 1, 3, 5).bool()
    assert masks.explicit(given, layer, query, key, called) is given


def sees(kind: str) -> Any:
    """A mask function of transformers' interface."""
    rules = {
        "window": lambda batch, head, query, key: (key <= query) & (key > query - 30),
        "chunk": lambda batch, head, query, key: (key <= query) & (key // 40 == query // 40),
        "documents": lambda batch, head, query, key: (key <= query) & ((key >= 70) == (query >= 70)),
        "both ways": lambda batch, head, query, key: (key <= query) | ((key < 20) & (query < 20)),
        "every second": lambda batch, head, query, key: (key <= query) & ((query - key) % 2 == 0),
    }
    return rules[kind]


@pytest.mark.parametrize("offset", [0, 25])
@pytest.mark.parametrize("kind", ["window", "chunk", "documents", "both ways", "every second"])
def test_the_range_of_keys_that_each_query_sees(kind: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "PAIRS", 1)
    at = {"mask_function": sees(kind), "allow_is_causal_skip": False}
    mask = masks.block_mask(2, 100 - offset, 100, q_offset=offset, **at)
    whole, ranges = mask.whole()[:, 0], masks.ranges_of(mask)
    if kind == "every second":
        assert ranges is None
        return
    columns = torch.arange(100)
    low, high = (side[..., None] for side in ranges)
    assert torch.equal((columns >= low) & (columns < high), whole)
    documents = mask.documents
    assert (documents is None) == (bool(offset) or kind == "both ways")
    if kind == "documents" and documents:
        assert documents == [[(0, 70, 70), (70, 100, 30)]]


@pytest.mark.parametrize("kind", ["causal", "window", "padded"])
def test_rows_that_see_every_key_need_no_mask(kind: str) -> None:
    at: dict[str, Any] = {"q_offset": 6}
    if kind == "window":
        at |= {"mask_function": sees("window"), "allow_is_causal_skip": False}
    if kind == "padded":
        at |= {"attention_mask": torch.tensor([[False] + [True] * 9])}
    mask = masks.block_mask(1, 4, 10, **at)
    for start, stop, n_keys in product(range(4), range(1, 5), range(1, 11)):
        if start < stop:
            block = masks.Rows.of(mask, slice(start, stop), 10).block(slice(0, n_keys))
            whole = mask.whole()[:, :, start:stop, :n_keys]
            assert (block is None) == (kind == "causal" and bool(whole.all()))
            assert block is None or torch.equal(block, whole)


def test_tokens_that_see_later_ones_far_from_them_are_in_no_documents() -> None:
    """Transformers' overlay for the tokens of an image or a prefix, which need not be neighbours."""
    groups = torch.tensor([[-1, 0, -1, -1, 0, -1]])
    sees_later = or_masks(causal_mask_function, blockwise_overlay(groups))
    mask = masks.block_mask(1, 6, 6, mask_function=sees_later, allow_is_causal_skip=False)
    assert mask.documents is None

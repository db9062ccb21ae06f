"""In-attention RoPE under torch.compile: one graph for a whole pass, and the same numbers."""

import pytest
import torch
from families import LENGTH
from in_attention_reference import N_TOKENS, assert_rows, extended, read, rows, stock, truth
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("method", ["dynamic_ntk", "longrope_start", "self_extend", "dca"])
@torch.no_grad()
def test_a_compiled_decoding_step_is_the_slow_truth(method: str) -> None:
    """Prefill by hand up to the trained length, then a compiled step at a time across it."""
    model, row = extended(method), rows()[0][None]
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=N_TOKENS)
    found = [model(input_ids=row[:, : LENGTH - 3], past_key_values=cache).logits]
    for at in range(LENGTH - 3, LENGTH + 3):
        found.append(step(input_ids=row[:, at : at + 1], past_key_values=cache).logits)
    assert_rows(torch.cat(found, dim=1), [truth(method)[0][: LENGTH + 3]])
    assert counters["stats"]["unique_graphs"] == 1, "a step was compiled again"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dynamic_ntk", "longrope_start", "self_extend", "dca"])
@torch.no_grad()
def test_a_compiled_forward_pass_is_the_slow_truth(method: str) -> None:
    model = extended(method)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_rows(compiled(input_ids=rows()[0][None], use_cache=False).logits, truth(method)[:1])


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend", "dca"])
@torch.no_grad()
def test_a_compiled_pass_goes_on_from_rotated_keys(method: str) -> None:
    """A dynamic cache that was decoded eagerly, lost some tokens, and is decoded eagerly again afterwards."""
    model, row, cache = extended(method), rows()[0][None], DynamicCache()
    read(model, {"input_ids": row}, cache, [70, *[1] * 15])
    cache.crop(-5)
    found = [torch.compile(model, backend="eager")(input_ids=row[:, 80:90], past_key_values=cache).logits]
    found.append(read(model, {"input_ids": row}, cache, [1] * 20))
    assert_rows(torch.cat(found, dim=1), [truth(method)[0][80:110]])


@torch.no_grad()
def test_the_stock_dynamic_scaling_does_not_trace() -> None:
    compiled = torch.compile(stock("dynamic"), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(input_ids=rows()[0][None], use_cache=False)

"""Every in-attention method × family × implementation × cache: one computation, whatever form it is run in.

That the whole pass is right is the matter of `test_softmax.py`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from families import DEVIATING
from in_attention_reference import CHUNKS, LENGTHS, METHODS, N_TOKENS, extended, padded, read, rows, soft_model
from live import LATE_FAMILIES
from torch import Tensor
from transformers import DynamicCache, StaticCache

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs/in_attention.md"
BAR = 1e-9
# Qwen3.5's linear attention computes in float32.
FAMILIES = [family for family in (*LATE_FAMILIES, *DEVIATING) if family != "qwen3_5"]
# Those that transformers does not have, and gpt-oss' sinks, which flex attention has not on a CPU.
NO_SDPA = {"gemma2", "gpt_oss", "gpt_neox_japanese", "got_ocr2"}
NO_FLEX = {"gpt_oss", "stablelm", "gpt_neox_japanese", "got_ocr2", "doge"}
IMPLEMENTATIONS = {"eager": set(), "sdpa": NO_SDPA, "flex_attention": NO_FLEX}
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=N_TOKENS),
}
# Transformers' own gpt-oss lets packed documents see each other.
JOINED = {"gpt_oss"}
CELLS = [
    (method, family, implementation)
    for method, family, implementation in product(METHODS, FAMILIES, IMPLEMENTATIONS)
    if family not in IMPLEMENTATIONS[implementation]
]


def same(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=BAR)


def packed(model: torch.nn.Module) -> tuple[Tensor, ...]:
    """Logits of all rows, one after the other in one row, told apart by their positions."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return model(input_ids=torch.cat(rows())[None], position_ids=positions, use_cache=False).logits[0].split(LENGTHS)


@torch.compiler.set_stance("force_eager")  # flex attention would compile itself, which float64 does not allow
@torch.no_grad()
@pytest.mark.parametrize(("method", "family", "implementation"), CELLS)
def test_every_form_is_one_computation(method: str, family: str, implementation: str, float64: torch.dtype) -> None:
    model = extended(method, family, attn_implementation=implementation)
    alone = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows()]
    ids, whole = rows()[0][None], alone[0][None]
    same(model(input_ids=ids[:, :-1], use_cache=False).logits, whole[:, :-1])  # causal
    for cache in CACHES.values():
        same(read(model, {"input_ids": ids}, cache(model.config), CHUNKS), whole)
    for side in ("left", "right"):
        batch = padded(rows(), side)
        for row, mask, want in zip(read(model, batch, None, [N_TOKENS]), batch["attention_mask"], alone):
            same(row[mask.bool()], want)
    for found, want in zip(packed(model), alone):
        if family not in JOINED:
            same(found, want)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_joined_where_transformers_joins_them(family: str, float64: torch.dtype) -> None:
    model = soft_model(family, attn_implementation="eager")
    apart = float((packed(model)[1] - model(input_ids=rows()[1][None], use_cache=False).logits[0]).abs().max())
    assert (apart > 0.1) == (family in JOINED)


# One for each way through attention; Llama is in test_compiled.py.
@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt_neox", "stablelm"])
def test_a_compiled_pass_is_the_same_computation(family: str, float64: torch.dtype) -> None:
    model, ids = extended("dynamic_yarn", family), rows()[0][None]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    same(compiled(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits)


def test_the_docs_say_how_many_there_are() -> None:
    assert f"{len(CELLS) * len(CACHES):,} combinations" in DOCS.read_text(encoding="utf-8")

"""In-attention RoPE against a slow formula that builds every pair of tokens by itself."""

from itertools import product
from typing import Any

import pytest
import torch
from families import DEVIATING, tiny_model, token_ids
from in_attention_reference import (
    CHUNKS,
    LATE,
    METHODS,
    N_TOKENS,
    assert_rows,
    extended,
    padded,
    read,
    rows,
    slow_model,
    truth,
)
from torch import Tensor
from transformers import DynamicCache, StaticCache

from ctxext import extend_context
from ctxext.attention import call, masks, rotary, softmax, tiles
from ctxext.attention.softmax import Softmax

FAMILIES = {"llama": {}, "mistral": {"sliding_window": 96}, "qwen3": {}, "gpt_neox": {}, "gemma2": {}}
# A table for each type of layer; dimensions that turn at the end of a head; positions with several axes; pairs that do
# not turn, in heads of two sizes.
UNUSUAL: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    "deepseek_v3": {
        **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
        **{"moe_intermediate_size": 32, "num_key_value_heads": 4},
    },
    "qwen3_5": {},
    "gemma4_text": {
        **{"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
        "vocab_size_per_layer_input": 128,
    },
    **{family: {} for family in DEVIATING},
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks whose edges fall within the test's rows, between the rungs, windows and chunks."""
    monkeypatch.setattr(tiles, "BLOCK", 24)
    monkeypatch.setattr(softmax, "SCORES", 1)
    monkeypatch.setattr(rotary, "TILE", 1)


@pytest.mark.parametrize("scaling", [0.125, 0.1])
def test_raw_scores_beyond_16_bits_do_not_overflow(scaling: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 64, generator=generator, dtype=torch.float64) for _ in range(3))
    offset = 36.0
    parts = [softmax.Part(query=(query + offset).half(), key=(key + offset).half(), holds=torch.ones(5, 5) > 0)]
    assert ((query + offset) @ (key + offset).mT).max() > torch.finfo(torch.float16).max
    assert Softmax(scaling=scaling)(parts, value.half(), masks.Rows(None, slice(0, 5), 5)).isfinite().all()


def test_the_truth_tells_every_method_and_the_stock_model_apart() -> None:
    model = slow_model("dca")
    model.formula = lambda query, key, inv_freq: LATE["dynamic_ntk"][1](query, key, inv_freq, ratio=4.0)
    with torch.no_grad():
        found = [model(rows()[0]), *(truth(name)[0] for name in [*METHODS, "dynamic_ntk_fine"])]
    for index, one in enumerate(found):
        assert all(float((one - other).abs().max()) > 0.1 for other in found[:index])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_in_chunks_and_in_a_padded_batch_it_is_the_slow_truth(family: str, method: str) -> None:
    model, want = extended(method, family, **FAMILIES[family]), truth(method, family, **FAMILIES[family])
    alone, batch = {"input_ids": rows()[0][None]}, padded(rows(), "left")
    mask = batch["attention_mask"]
    assert_rows(read(model, alone, None, [N_TOKENS]), want[:1])
    assert_rows(read(model, alone, DynamicCache(config=model.config), CHUNKS), want[:1])
    assert_rows(read(model, batch, None, [N_TOKENS]), want, mask)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("family", "method"),
    [
        (family, method)
        for family, method in product(UNUSUAL, ["dynamic_ntk", "longrope_start", "self_extend", "rerope"])
        if (family, method) != ("deepseek_v3", "longrope_start")  # whose attention factor is not 1
    ],
)
def test_unusual_tables_are_those_of_the_slow_truth(family: str, method: str) -> None:
    model, want = extended(method, family, **UNUSUAL[family]), truth(method, family, **UNUSUAL[family])
    alone, batch = {"input_ids": rows()[0][None]}, padded(rows(), "right")
    assert_rows(read(model, alone, None, [N_TOKENS]), want[:1])
    assert_rows(read(model, alone, DynamicCache(config=model.config), CHUNKS), want[:1])
    assert_rows(read(model, batch, None, [N_TOKENS]), want, batch["attention_mask"])


@pytest.mark.parametrize("method", [*METHODS, "dynamic_ntk_fine"])
def test_blocks_of_their_own_size_change_nothing(method: str) -> None:
    model = extended(method)
    assert_rows(
        read(model, padded(rows(), "left"), None, [N_TOKENS]), truth(method), padded(rows(), "left")["attention_mask"]
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_right_padding_with_explicit_positions(family: str, method: str) -> None:
    batch = padded(rows(), "right")
    found = read(extended(method, family), batch, None, [N_TOKENS])
    assert_rows(found, truth(method, family), batch["attention_mask"])


@pytest.mark.parametrize("method", METHODS)
def test_positions_with_gaps_and_an_offset(method: str) -> None:
    ids = rows()[0][:60]
    positions = torch.randperm(250, generator=torch.Generator().manual_seed(1))[:60].sort().values
    with torch.no_grad():
        want = slow_model(method)(ids, positions)
    # With a mask, gaps between positions are not taken for the borders of packed documents.
    inputs = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": torch.ones(1, 60).long()}
    model = extended(method)
    assert_rows(read(model, inputs, None, [60]), [want])
    assert_rows(read(model, inputs, DynamicCache(), [29, 1, 1, 20, *[1] * 9]), [want])


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend", "dca"])
def test_packed_documents_do_not_see_each_other(method: str) -> None:
    found = extended(method)(
        input_ids=torch.cat(rows())[None],
        position_ids=torch.cat([torch.arange(len(row)) for row in rows()])[None],
        use_cache=False,
    ).logits[0]
    assert_rows(found.split([len(row) for row in rows()]), truth(method))


@pytest.mark.parametrize("method", ["dynamic_ntk", "dynamic_yarn", "self_extend", "dca", "query_temperature"])
def test_gradients_of_packed_documents_are_those_of_each_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows that are packed differently, one with a document of one token; no mask is larger than a document's."""
    sizes, ids, sides = [[110, 1, 69], [70, 110]], rows()[0].repeat(2, 1), []
    model, whole = extended(method), masks.BlockMask.whole
    alone = [model(part[None], use_cache=False).logits[0] for row, of in zip(ids, sizes) for part in row.split(of)]
    sum(logits.square().mean() for logits in alone).backward()
    want = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    def counted(mask: masks.BlockMask) -> Tensor:
        sides.append(mask.shape[2] * mask.shape[3])
        return whole(mask)

    monkeypatch.setattr(masks, "PAIRS", 1)
    monkeypatch.setattr(masks.BlockMask, "whole", counted)
    positions = torch.stack([torch.cat([torch.arange(n) for n in of]) for of in sizes])
    logits = model(ids, position_ids=positions, use_cache=False).logits
    found = [part for row, of in zip(logits, sizes) for part in row.split(of)]
    assert_rows(found, alone)
    sum(logits.square().mean() for logits in found).backward()
    assert max(sides, default=0) <= 110**2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_a_short_window_take_no_mask_of_tokens_by_tokens(
    method: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the logits and gradients of one call with such a mask."""
    n_documents, ids, seen = 2 if packed else 1, token_ids(150), []
    positions = torch.arange(150 // n_documents).repeat(n_documents)[None]
    model = tiny_model("gemma3_text", **UNUSUAL["gemma3_text"], attn_implementation="sdpa").double()
    extend_context(model, 4, method)
    own = model.model.rotary_emb.attend

    def counted(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.is_sliding:
            seen.append(key.shape[2])
        return own(module, query, key, *args, **kwargs)

    def passed() -> tuple[Tensor, list[Tensor]]:
        seen.clear()
        model.zero_grad()
        logits = model(ids, position_ids=positions, use_cache=False).logits
        logits.square().mean().backward()
        return logits, [parameter.grad.clone() for parameter in model.parameters()]

    model.model.rotary_emb.attend = counted
    found = passed()
    assert max(seen) == 32 + 32
    with monkeypatch.context() as patched:
        patched.setattr(masks.BlockMask, "documents", None)
        wanted = passed()
        assert seen == [150]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
@pytest.mark.parametrize("sizes", [[[80, 70], [150]], [[20, 30, 100], [31, 32, 33, 54]]])
def test_layers_that_see_other_documents_do_not_share_them(sizes: list[list[int]], method: str) -> None:
    """Llama 4's chunks divide long documents in some layers alone."""
    for kinds in (["chunked_attention", "full_attention"], ["full_attention", "chunked_attention"]):
        changes = {"attention_chunk_size": 80, "layer_types": kinds, "no_rope_layers": [1, 1], "num_local_experts": 2}
        model = tiny_model("llama4_text", **changes, head_dim=16, intermediate_size_mlp=96).double()
        extend_context(model, 4, method)
        ids = token_ids(150, batch=2)
        alone = [model(part[None], use_cache=False).logits[0] for row, of in zip(ids, sizes) for part in row.split(of)]
        positions = torch.stack([torch.cat([torch.arange(n) for n in of]) for of in sizes])
        logits = model(ids, position_ids=positions, use_cache=False).logits
        assert_rows([part for row, of in zip(logits, sizes) for part in row.split(of)], alone)


@pytest.mark.parametrize("method", METHODS)
def test_eager_attention_is_the_same(method: str) -> None:
    model = extended(method, attn_implementation="eager")
    batch = padded(rows(), "left")
    assert model.config._attn_implementation == "in_attention_eager"
    assert_rows(read(model, batch, None, [N_TOKENS]), truth(method), batch["attention_mask"])
    cache = DynamicCache(config=model.config)
    assert_rows(read(model, batch, cache, CHUNKS), truth(method), batch["attention_mask"])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma2-96"])
@torch.compiler.set_stance("force_eager")  # flex attention would compile itself for half a minute
def test_flex_attention_is_the_same(family: str, method: str) -> None:
    """Gemma 2 runs it wherever frequencies are scaled, as it has softcaps; single queries have their own ways."""
    family, changes = family.removesuffix("-96"), {"sliding_window": 96} if "-" in family else {}
    model = extended(method, family, attn_implementation="flex_attention", **changes)
    want, alone, batch = truth(method, family, **changes), {"input_ids": rows()[0][None]}, padded(rows(), "left")
    assert model.config._attn_implementation == "in_attention_flex_attention"
    assert_rows(read(model, alone, None, [N_TOKENS]), want[:1])
    assert_rows(read(model, batch, DynamicCache(config=model.config), CHUNKS), want, batch["attention_mask"])


@pytest.mark.parametrize("method", ["dynamic_ntk", "rerope"])
def test_sinks_take_their_weight(method: str) -> None:
    """gpt-oss: a score for each head that takes weight and gives nothing, in layers with and without a window."""
    changes = {"sliding_window": 96}
    model, want = extended(method, "gpt_oss", **changes), truth(method, "gpt_oss", **changes)
    batch = padded(rows(), "left")
    assert_rows(read(model, batch, None, [N_TOKENS]), want, batch["attention_mask"])
    assert_rows(read(model, batch, DynamicCache(config=model.config), CHUNKS), want, batch["attention_mask"])


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_a_mask_of_four_dimensions_is_honoured(method: str) -> None:
    """Bool as sdpa takes it, or numbers to be added."""
    batch, model = padded(rows(), "left"), extended(method)
    seen = batch["attention_mask"].bool()[:, None, None] & torch.ones(N_TOKENS, N_TOKENS).bool().tril()
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (seen, added):
        with torch.no_grad():
            found = model(**{**batch, "attention_mask": mask}, use_cache=False).logits
        assert_rows(found, truth(method), batch["attention_mask"])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float64).min, -torch.inf, None])
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("method", ["rerope", "self_extend", "dca", "string"])
def test_a_query_without_keys_takes_nothing_from_others(method: str, lowest: float | None, with_grad: bool) -> None:
    """In tiles and in one softmax: tokens move no logit of padding before them, and nothing is NaN."""
    model, ids = extended(method), rows()[0][None, :100].clone()
    seen = torch.ones(1, 1, 100, 100).bool().tril()
    seen[..., :20, :] = seen[..., :20] = False
    mask = seen if lowest is None else torch.zeros(seen.shape).double().masked_fill(~seen, lowest)
    at = {"attention_mask": mask, "position_ids": (torch.arange(100) - 20).clamp(min=0)[None], "use_cache": False}
    with torch.set_grad_enabled(with_grad):
        found, alone = model(ids, **at).logits, model(ids[:, 20:], use_cache=False).logits
        torch.testing.assert_close(found[:, 20:], alone, rtol=0, atol=1e-9)
        assert bool(found.isfinite().all())
        ids[0, 30] = ids[0, 30] % 100 + 5
        torch.testing.assert_close(model(ids, **at).logits[:, :20], found[:, :20], rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_autocast_reaches_every_way_through_attention(method: str) -> None:
    """Values are in bfloat16, and what cos and sin of float32 have rotated is not."""
    model, ids = extended(method).float(), rows()[0][None]
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    for cache, sizes, with_grad in (
        (None, [N_TOKENS], True),
        (None, [N_TOKENS], False),
        (DynamicCache(), CHUNKS, False),
    ):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(with_grad):
            found = read(model, {"input_ids": ids}, cache, sizes)
        assert float((found - want).norm() / want.norm()) < 0.03


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bool", "additive", "holes"])
@pytest.mark.parametrize("method", METHODS)
def test_a_mask_that_all_queries_share_is_that_of_each(method: str, kind: str) -> None:
    model, ids = extended(method), rows()[0][None]
    seen = torch.ones(1, 1, 1, N_TOKENS).bool()
    seen[..., :3] = False
    seen[..., 40:50:3] = kind != "holes"
    mask = torch.zeros(seen.shape).double().masked_fill(~seen, -torch.inf) if kind == "additive" else seen
    found, want = (
        model(ids, attention_mask=each, use_cache=False).logits
        for each in (mask, mask.expand(-1, -1, N_TOKENS, -1).contiguous())
    )
    torch.testing.assert_close(found, want, rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_base_model_takes_its_arguments_in_order_and_embeddings_for_tokens() -> None:
    model, ids = extended("dynamic_ntk"), rows()[0][None]
    states = model.model(ids, None, torch.arange(N_TOKENS)[None], use_cache=False)[0]
    assert_rows(model.lm_head(states), truth("dynamic_ntk")[:1])
    embeds = model.get_input_embeddings()(ids)
    assert_rows(model(inputs_embeds=embeds).logits, truth("dynamic_ntk")[:1])


@torch.no_grad()
def test_attention_weights_of_a_dynamic_method_cover_every_query() -> None:
    model, ids = extended("dynamic_ntk", attn_implementation="eager"), token_ids(N_TOKENS)
    for weights in model(input_ids=ids, output_attentions=True).attentions:
        assert weights.shape == (1, 4, N_TOKENS, N_TOKENS)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, N_TOKENS).double(), rtol=0, atol=1e-6)
        assert bool((weights.triu(1) == 0).all())


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_a_query_that_sees_nothing_is_no_number_s_ruin(method: str) -> None:
    """A row of padding alone, among others, gives no NaN to its neighbours."""
    batch = padded([*rows()[1:3], torch.tensor([], dtype=torch.long)], "left")
    found = read(extended(method), batch, None, [131])
    assert bool(found.isfinite().all())
    assert_rows(found[:2], truth(method)[1:3], batch["attention_mask"][:2])


@pytest.mark.parametrize("n_keys", [100, 2**14, 2**20])
def test_the_scores_that_are_held_at_once_are_bounded(n_keys: int) -> None:
    query = torch.empty(4, 8, 4096, 1)
    with torch.enable_grad():
        rows = Softmax(scaling=1.0).block_size(query, n_keys)
    assert rows == tiles.BLOCK or rows == 16 or softmax.SCORES // 2 < 4 * 8 * rows * n_keys <= softmax.SCORES
    assert 16 <= rows <= tiles.BLOCK
    assert (rows == 16) == (n_keys == 2**20)


@torch.no_grad()
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_single_query_meets_each_key_in_its_branch(with_sinks: bool) -> None:
    """Against one softmax over all pairs; the first row sees no key in the last branch, and some keys in none."""
    generator, n_keys = torch.Generator().manual_seed(0), 107
    query, key, value, sinks = (
        torch.randn(shape, generator=generator).double()
        for shape in ((2, 6, 3, 10), (2, 3, n_keys, 10), (2, 3, n_keys, 10), (6,))
    )
    branch = torch.randint(-1, 3, (2, 1, 1, n_keys), generator=generator)
    branch[0][branch[0] == 2] = 1
    mask = torch.zeros(2, 1, 3, n_keys).double().masked_fill(branch != torch.arange(3)[:, None], -1e300)
    of_layer = Softmax(scaling=0.3, sinks=sinks if with_sinks else None)
    rows = query.unflatten(1, (3, 2)).transpose(2, 3).flatten(2, 3)  # of a key head: branch by branch, its two heads
    found = of_layer.of_branches(rows, key, value, mask.repeat_interleave(2, dim=2), 3)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) * 0.3).masked_fill(mask < 0, -torch.inf).amax(2, keepdim=True)
    if with_sinks:
        scores = torch.cat([scores, sinks[:, None, None].expand(2, -1, 1, 1)], dim=-1)
    want = scores.softmax(-1)[..., :n_keys] @ value
    torch.testing.assert_close(found, want.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n_keys", "n_windows"), [(12, 3), (13, 3), (14, 3), (4097, 2), (600, 16)])
def test_windows_show_each_key_once(n_keys: int, n_windows: int) -> None:
    keys = softmax.windows(torch.arange(n_keys)[None, None, :, None].expand(-1, 2, -1, 1), n_windows)
    mask = softmax.windows_of_mask(torch.zeros(1, 2, 3, n_keys), n_windows)
    assert mask.shape == (n_windows, 2, 3, keys.shape[2])
    for head, row in product(range(2), range(3)):
        assert keys[:, head, :, 0][mask[:, head, row] == 0].sort().values.tolist() == list(range(n_keys))


@pytest.mark.parametrize(
    ("n_rows", "n_heads", "n_keys", "n_threads", "n_windows"),
    [
        (1, 3, 4096, 1, 1), (1, 3, 4096, 2, 2), (1, 8, 4096, 2, 1), (1, 8, 16384, 16, 2), (1, 3, 65536, 16, 16),
        (1, 3, 4096, 64, 8), (1, 3, 100, 64, 1), (2, 3, 4096, 2, 1),
    ],
)  # fmt: skip
def test_every_thread_gets_as_many_heads_and_windows(
    n_rows: int, n_heads: int, n_keys: int, n_threads: int, n_windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    assert softmax.number_of_windows(n_rows, n_heads, n_keys) == n_windows


@pytest.mark.parametrize(
    ("family", "method"),
    [*product(["llama"], ["self_extend", "rerope", "dca", "string", "tempered_rerope"]), ("gpt_oss", "rerope")],
)
def test_a_step_that_reads_its_keys_in_windows_is_the_slow_truth(
    family: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "WINDOW", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    cut, counts = softmax.windows_of_mask, set()

    def counted(mask: Tensor, n_windows: int) -> Tensor:
        counts.add(n_windows)
        return cut(mask, n_windows)

    monkeypatch.setattr(call, "windows_of_mask", counted)
    changes = {"sliding_window": 96} if family == "gpt_oss" else {}
    model, batch = extended(method, family, **changes), {"input_ids": rows()[0][None]}
    found = read(model, batch, DynamicCache(config=model.config), [20, *[1] * (N_TOKENS - 20)])
    assert_rows(found, truth(method, family, **changes)[:1])
    assert counts == {2, 3, 4, 5}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", METHODS)
def test_padding_is_told_by_the_mask_without_positions(method: str, side: str) -> None:
    model, batch = extended(method), padded(rows(), side)
    mask = batch["attention_mask"]
    del batch["position_ids"]
    assert_rows(read(model, batch, None, [N_TOKENS]), truth(method), mask)
    if side == "left":
        assert_rows(read(model, batch, DynamicCache(config=model.config), CHUNKS), truth(method), mask)


@pytest.mark.parametrize("kind", ["hole", "documents", "bool", "hidden"])
@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_positions_are_counted_past_what_a_mask_hides(method: str, kind: str) -> None:
    """As in the stock model: only padding before a row's first token does not count."""
    model, ids = extended(method), rows()[0][None, :120]
    mask, step = torch.ones(1, 120).long(), {"attention_mask": torch.ones(1, 121).long()}
    if kind == "hole":
        mask[0, 5:60] = 0
    elif kind == "documents":
        mask[0, 50:] = 2
    elif kind == "bool":
        mask = mask.bool()
    else:
        step["attention_mask"][0, :70] = 0
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    given: list[dict[str, Tensor]] = [{}, {"position_ids": torch.arange(121)[None]}]
    with torch.no_grad():
        found, want = (
            torch.cat([
                model(input_ids=ids, attention_mask=mask, past_key_values=cache,
                      **{name: its[:, :120] for name, its in more.items()}).logits,
                model(input_ids=ids[:, :1], **step, past_key_values=cache,
                      **{name: its[:, 120:] for name, its in more.items()}).logits,
            ], dim=1)
            for cache, more in zip(caches, given)
        )  # fmt: skip
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("step", ["of the cache's size", "of four dimensions", "compiled", "of all tokens"])
@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_a_step_goes_on_where_its_row_ended_whatever_its_mask(method: str, step: str) -> None:
    model, n_pads = extended(method), 30
    ids, mask = rows()[0][None, :100], torch.ones(1, 120).long()
    mask[0, :n_pads] = 0
    cache = StaticCache(config=model.config, max_cache_len=120) if step in ("of the cache's size", "compiled") else None
    cache = cache or DynamicCache(config=model.config)
    masks = {
        "of the cache's size": mask,
        "of four dimensions": mask[:, None, None, :101].bool(),
        "compiled": mask[:, :101],
        "of all tokens": mask[:, :101],
    }
    run = torch.compile(model, backend="eager") if step == "compiled" else model
    with torch.no_grad():
        first = run(input_ids=ids[:, :60], attention_mask=mask[:, :60], past_key_values=cache).logits
        more = run(input_ids=ids[:, 60:], attention_mask=mask[:, :100], past_key_values=cache).logits
        last = run(input_ids=ids[:, :1], attention_mask=masks[step], past_key_values=cache).logits
        row = torch.cat([ids[:, n_pads:], ids[:, :1]], dim=1)
        want = model(input_ids=row, use_cache=False).logits
    torch.testing.assert_close(torch.cat([first[:, n_pads:], more, last], dim=1), want, rtol=0, atol=1e-9)

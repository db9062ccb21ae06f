"""sdpa by document: exact logits and gradients, no mask of tokens × tokens, undone, refused where it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from families import tiny_model, token_ids
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ctxext import extend_context
from ctxext.assets import MODEL
from ctxext.attention import documents as attention_documents
from ctxext.attention import masks
from ctxext.attention.masks import BlockMask, block_mask
from ctxext.training.documents import NAME, use_document_attention

LENGTH = 150
PACKED = torch.cat([torch.arange(65), torch.arange(1), torch.arange(40), torch.arange(LENGTH - 106)])
ALIKE, OTHERS = PACKED.repeat(2, 1), torch.stack([PACKED, torch.arange(LENGTH)])
WHOLE = torch.arange(LENGTH).repeat(2, 1)
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 32},
    "gemma3_text": {"sliding_window": 32, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"attention_chunk_size": 32, "layer_types": ["chunked_attention", "full_attention"],
                    "num_local_experts": 2, "head_dim": 16, "intermediate_size_mlp": 96},
    "phi3": {},
}  # fmt: skip


def exact(family: str, **changes: Any) -> Any:
    """In float64, so that no CPU's rounding decides."""
    return tiny_model(family, **FAMILIES[family] | changes).double()


def passed(model: Any, positions: Tensor) -> dict[str, Tensor]:
    """Logits and gradients of a training pass."""
    model.train().zero_grad()
    ids = token_ids(LENGTH, batch=2)
    output = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False)
    output.loss.backward()
    return {"": output.logits} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() != {""}
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("positions", [ALIKE, OTHERS, WHOLE], ids=["alike", "others", "whole"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_with_masks(family: str, positions: Tensor) -> None:
    model = exact(family)
    wanted = passed(model, positions)
    edit = use_document_attention(model)
    assert_same(passed(model, positions), wanted)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(passed(model, positions), wanted)
    edit.undo()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_blocks_are_smaller_than_a_wide_window(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact(family)
    wanted = passed(model, OTHERS)
    monkeypatch.setattr(attention_documents, "BLOCK", 7)
    use_document_attention(model)
    assert_same(passed(model, OTHERS), wanted)


def test_a_window_keeps_no_more_than_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_documents, "BLOCK", 2)

    def kept(window: int | None) -> int:
        model, sizes = exact("mistral", sliding_window=window), {}

        def save(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        use_document_attention(model)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            logits = model(token_ids(LENGTH, batch=2), position_ids=OTHERS, use_cache=False).logits
        assert logits.requires_grad
        return sum(sizes.values())

    assert kept(8) <= kept(None)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_mask_is_of_tokens_by_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {True: 0, False: 0}
    by_document = False

    def counted(query: Tensor, key: Tensor, *args: Any, attn_mask: Any = None, **kwargs: Any) -> Tensor:
        pairs[by_document] += query.shape[0] * query.shape[2] * key.shape[2]
        assert not by_document or attn_mask is None or attn_mask.numel() <= 2 * 32**2
        return scaled_dot_product_attention(query, key, *args, attn_mask=attn_mask, **kwargs)

    model = exact(family)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    passed(model, OTHERS)
    use_document_attention(model)
    pairs[True], by_document = 0, True
    passed(model, OTHERS)
    assert 0 < pairs[True] < pairs[False]


def test_a_cache_and_padding_get_what_transformers_gives_them() -> None:
    for family in ("llama", "mistral", "gemma3_text"):
        model, ids = exact(family).eval(), token_ids(LENGTH, batch=2)
        padded = torch.ones_like(ids)
        padded[1, :20] = 0
        options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        wanted = [torch.stack(model.generate(ids, attention_mask=mask, **options).logits) for mask in (None, padded)]
        use_document_attention(model)
        found = [torch.stack(model.generate(ids, attention_mask=mask, **options).logits) for mask in (None, padded)]
        for mine, stock in zip(found, wanted):
            torch.testing.assert_close(mine, stock, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_an_extended_model_with_lora_under_autocast(family: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(extend_context(tiny_model(family), 4, "yarn"), config)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = passed(model, OTHERS)
        use_document_attention(model)
        found = passed(model, OTHERS)
    assert found.keys() == wanted.keys() != {""}
    for name, tensor in wanted.items():
        off = (found[name] - tensor).detach().norm() / tensor.detach().norm()
        assert off < 0.05, name


def test_trl_packs_without_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    used: list[int] = []

    def counted(first: Tensor) -> Any:
        used.append(len(spans(first)))
        return spans(first)

    spans = masks._spans
    monkeypatch.setattr(masks, "_spans", counted)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = ["It is a truth universally acknowledged, that a single man must want a wife. " * n for n in (3, 9, 2, 5)]

    def losses(by_document: bool) -> list[float]:
        model = extend_context(AutoModelForCausalLM.from_pretrained(MODEL), 4, "yarn")
        if by_document:
            use_document_attention(model)
        given = trl.SFTConfig(
            str(tmp_path), max_steps=2, max_length=1024, packing=True, logging_steps=1, report_to=[], use_cpu=True,
            bf16=False, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        rows = Dataset.from_dict({"text": texts})
        trainer = trl.SFTTrainer(model, args=given, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    wanted = losses(by_document=False)
    assert not used
    assert losses(by_document=True) == pytest.approx(wanted, rel=1e-4)
    assert max(used) == len(texts)


def test_what_is_not_sdpa_is_refused() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match=r"attends by eager, not by sdpa.*attn_implementation='sdpa'"):
        use_document_attention(model)
    late = extend_context(tiny_model("llama"), 4, "dynamic_yarn")
    with pytest.raises(RuntimeError, match="attends by in_attention_sdpa"):
        use_document_attention(late)


def test_sparse_attention_that_asks_for_sdpa_by_name_is_refused() -> None:
    """With few tokens it selects every key, so that no short probe shows it."""
    config = AutoConfig.for_model(
        "minimax_m3_vl_text", vocab_size=128, hidden_size=64, intermediate_size=32, dense_intermediate_size=64,
        shared_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rotary_dim=8, index_n_heads=2, index_head_dim=16, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["minimax_m3_sparse"] * 2, mlp_layer_types=["dense"] * 2, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with pytest.raises(RuntimeError, match="its code does more for 'sdpa'"):
        use_document_attention(model)


def test_a_model_that_takes_no_probe_is_refused_and_left_as_it_was() -> None:
    short = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_positions=32, n_embd=32, n_layer=1, n_head=2)
    )
    with pytest.raises(RuntimeError, match="needs masks for packed documents"):
        use_document_attention(short)
    assert short.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("prefix", [[5], [3, 9], [4, 5, 6]])
def test_masks_in_which_a_query_sees_later_keys_are_no_documents(prefix: list[int]) -> None:
    def sees(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | torch.isin(key, torch.tensor(prefix))

    mask = block_mask(2, 12, 12, mask_function=sees, allow_is_causal_skip=False)
    assert isinstance(mask, BlockMask)
    assert mask.documents is None


def test_masks_of_later_tokens_of_a_cache_are_left_to_transformers() -> None:
    """Chunks count from the first token of all, not from the first one in the cache."""

    def sees(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // 8 == query // 8)

    at = {"mask_function": sees, "allow_is_causal_skip": False}
    first, later = (block_mask(1, 12, 12, q_offset=n, kv_offset=n, **at) for n in (0, 4))
    assert isinstance(first, BlockMask)
    assert isinstance(later, BlockMask)
    assert first.documents == [[(0, 8, 8), (8, 12, 4)]]
    assert later.documents is None


def test_a_model_that_reads_another_mask_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check, with all documents of a row read as one."""
    model = tiny_model("llama")
    monkeypatch.setattr(masks, "_spans", lambda first: [(0, len(first), len(first))])
    with pytest.raises(RuntimeError, match="needs masks for packed documents: logits differ by"):
        use_document_attention(model)
    assert model.config._attn_implementation == "sdpa" != NAME

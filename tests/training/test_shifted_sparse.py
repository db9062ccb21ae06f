"""S² attention: the groups it says, no look ahead, training only, and nothing left behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import logits, tiny_model, token_ids
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from ctxext.training.loss import use_chunked_loss
from ctxext.training.shifted_sparse import restore_attention, use_shifted_sparse_attention

# Of key heads an even number, an odd one, one alone.
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 4},
    "odd": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
    "multi-query": {"num_key_value_heads": 1},
}
FAMILIES = ["llama", "qwen3", "phi3", "gpt_neox", "mixtral"]


def masks(heads: int, tokens: int, groups: int) -> Tensor:
    """Which key a query sees, (head, query, key), written down from the paper, without the roll."""
    size = tokens // groups
    position = torch.arange(tokens)
    causal = position[:, None] >= position
    straight = position // size
    shifted = (position + size // 2) // size  # 0 for the first half-group, `groups` for the last
    group = torch.stack([straight if head < heads // 2 else shifted for head in range(heads)])
    return causal & (group[:, :, None] == group[:, None, :])


def with_masks(model: Any, ids: Tensor, groups: int) -> Tensor:
    """Training logits of the eager model under these masks."""
    slow = copy.deepcopy(model).train()
    slow.set_attn_implementation("eager")
    seen = masks(model.config.num_attention_heads, ids.shape[1], groups)
    bias = torch.zeros(1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return logits(slow, ids, attention_mask=bias, use_cache=False)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_a_mask_for_each_head(shape: str, groups: int) -> None:
    model, ids = tiny_model("llama", **SHAPES[shape]), token_ids(48, 2)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.7
    expected = with_masks(model, ids, groups)
    full = logits(model, ids)
    use_shifted_sparse_attention(model, groups)
    ours = logits(model.train(), ids, use_cache=False)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (ours - full).abs().max() > 0.1


def test_gradients_are_those_of_a_mask_for_each_head() -> None:
    model, ids = tiny_model("llama").train(), token_ids(32)
    slow = copy.deepcopy(model)
    slow.set_attn_implementation("eager")
    seen = masks(4, 32, 4)
    bias = torch.zeros(1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    slow(input_ids=ids, labels=ids, attention_mask=bias, use_cache=False).loss.backward()
    use_shifted_sparse_attention(model)
    use_chunked_loss(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), slow.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_a_later_one(family: str) -> None:
    """LongLoRA's roll shows the last half-group to the first one."""
    model, ids = tiny_model(family), token_ids(64)
    use_shifted_sparse_attention(model)
    model.train()
    before = logits(model, ids, use_cache=False)
    for changed in (9, 40, 63):
        other = ids.clone()
        other[:, changed:] = 3 + (other[:, changed:] + 1) % 100
        after = logits(model, other, use_cache=False)
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=1e-6)
        assert not torch.equal(after[:, changed:], before[:, changed:])


@pytest.mark.parametrize("family", FAMILIES)
def test_eval_mode_is_bitwise_the_stock_model(family: str) -> None:
    model, ids = tiny_model(family), token_ids(37, 2)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    before = logits(model, ids), logits(model, ids, attention_mask=padding)
    use_shifted_sparse_attention(model)
    assert torch.equal(logits(model, ids), before[0])
    assert torch.equal(logits(model, ids, attention_mask=padding), before[1])
    generated = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    restore_attention(model)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0), generated)


def test_one_group_is_full_attention() -> None:
    model, ids = tiny_model("llama"), token_ids(37)
    full = logits(model, ids, use_cache=False)
    use_shifted_sparse_attention(model, groups=1)
    assert torch.equal(logits(model.train(), ids, use_cache=False), full)


def test_restoring_leaves_nothing_and_other_models_are_untouched(tmp_path: Any) -> None:
    model, other, ids = tiny_model("llama"), tiny_model("llama"), token_ids(64)
    states = [{**module.__dict__} for module in model.modules()]
    config, full = model.config.to_dict(), logits(model, ids)
    use_shifted_sparse_attention(model)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(other.train(), ids, use_cache=False), full)
    model.save_pretrained(tmp_path)
    assert "shifted" not in (tmp_path / "config.json").read_text()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), full)
    restore_attention(model)
    assert [module.__dict__ for module in model.modules()] == states
    with pytest.raises(RuntimeError, match="nothing to restore"):
        restore_attention(model)


def test_copies_and_adapters_keep_it() -> None:
    model, ids = tiny_model("llama"), token_ids(64)
    use_shifted_sparse_attention(model)
    sparse = logits(model.train(), ids, use_cache=False)
    twin = copy.deepcopy(model)
    wrapped = get_peft_model(twin, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()
    torch.testing.assert_close(logits(wrapped, ids, use_cache=False), sparse)
    restore_attention(wrapped)
    full = logits(wrapped, ids, use_cache=False)
    assert not torch.allclose(full, sparse)
    assert torch.equal(logits(model, ids, use_cache=False), sparse)


def test_what_is_not_one_long_document_is_refused_in_training() -> None:
    model, ids = tiny_model("llama"), token_ids(64, 2)
    use_shifted_sparse_attention(model)
    model.train()
    padding, packed = torch.ones_like(ids), torch.arange(32).repeat(2)[None]
    assert logits(model, ids, attention_mask=padding, use_cache=False).isfinite().all()
    padding[0, -5:] = 0
    skipped = torch.cat([torch.arange(32), torch.arange(100, 132)])[None]
    assert logits(model, ids[:1], position_ids=skipped, attention_mask=padding[1:], use_cache=False).isfinite().all()
    for batch in (
        {"input_ids": ids, "attention_mask": padding},
        {"input_ids": ids[:1], "position_ids": packed, "use_cache": False},
        # With a cache transformers itself reads packed rows as one document.
        {"input_ids": ids[:1], "position_ids": packed, "use_cache": True},
        {"input_ids": ids[:1], "position_ids": skipped, "use_cache": False},
    ):
        with pytest.raises(ValueError, match="joined documents and no mask"):
            model(**batch)
    with pytest.raises(ValueError, match=r"divides by 8, got 60 tokens.*to 56"):
        model(input_ids=ids[:, :60])
    with pytest.raises(ValueError, match="joined documents and no mask"):  # what is behind a cache gets a mask
        model(input_ids=ids[:1, 8:24], past_key_values=model(input_ids=ids[:1, :8]).past_key_values)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"attn_implementation": "eager"}, "materialises masks"),
        ("gemma2", {}, "materialises masks"),  # soft-capped attention has no sdpa
        ("mistral", {"sliding_window": 32}, "sliding_window"),
        ("falcon", {}, "0 of 2 attention modules"),  # calls sdpa itself
    ],
)
def test_attention_that_cannot_be_replaced_is_refused_and_left_alone(family: str, changes: Any, message: str) -> None:
    model = tiny_model(family, **changes)
    states = [{**module.__dict__} for module in model.modules()]
    with pytest.raises((ValueError, RuntimeError), match=message):
        use_shifted_sparse_attention(model)
    assert [module.__dict__ for module in model.modules()] == states


def test_wrong_groups_and_a_second_patch_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="groups must be >= 1, got 0"):
        use_shifted_sparse_attention(model, groups=0)
    use_shifted_sparse_attention(model)
    with pytest.raises(RuntimeError, match="already"):
        use_shifted_sparse_attention(model)

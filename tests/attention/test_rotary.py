"""What a second reading of in-attention RoPE found: each was wrong once."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from families import LENGTH, logits, tiny_config, tiny_model, token_ids
from transformers import AutoModelForSequenceClassification, DynamicCache, StaticCache

import ctxext
from ctxext import extend_context, restore_context
from ctxext.attention import masks, rotary
from ctxext.core.apply import extension_of
from ctxext.hub.checkpoint import extend_folder
from ctxext.methods import LongRoPE

IDS = token_ids(150)


def exact(family: str = "llama", **changes: Any) -> Any:
    """In float64, so that no CPU's rounding decides."""
    return tiny_model(family, **changes).double()


# Stock takes its cosines and sines in float32, whatever the model's dtype: the largest difference seen is 4e-6.
STOCK = 1e-4


@pytest.mark.parametrize("method", ["dynamic_ntk", "dynamic_yarn"])
def test_a_method_that_scales_nothing_is_found_out(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    stock = logits(model, IDS)
    monkeypatch.setattr(rotary.Tables, "scaled", lambda self, positions, *used: self.as_it_was(positions))
    with pytest.raises(RuntimeError, match="does not change the output"):
        extend_context(model, 4, method)
    assert torch.equal(logits(model, IDS), stock)


@pytest.mark.parametrize("target", [65, 70, 72, 2100])
def test_the_effect_is_looked_for_beyond_the_trained_length(target: int) -> None:
    model = extend_context(tiny_model("llama"), method="dynamic_ntk", target_length=target)
    assert model.context_extension.proof.effect > 1e-4


@pytest.mark.slow
def test_an_extended_model_comes_out_of_a_pickle_in_a_new_process(tmp_path: Any) -> None:
    model = extend_context(exact(), 4, "self_extend")
    torch.save({"model": model, "ids": IDS, "logits": logits(model, IDS)}, tmp_path / "model.pt")
    program = (
        "import sys, torch; saved = torch.load(sys.argv[1], weights_only=False); "
        "found = saved['model'](input_ids=saved['ids']).logits; "
        "assert (found - saved['logits']).abs().max() < 1e-9"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("labels", [1, 2])
def test_a_head_that_is_no_language_model_does_not_matter(labels: int) -> None:
    config = tiny_config("llama", num_labels=labels)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    stock = logits(model, IDS)
    extend_context(model, 4, "self_extend")
    assert (logits(model, IDS) - stock).abs().max() > 1e-4
    assert torch.equal(logits(restore_context(model), IDS), stock)


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_scaling_that_follows_the_length_is_not_composed_with(method: str) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = exact(rope_parameters=dynamic)
    with pytest.raises(ValueError, match=r"is length-dependent.*existing='replace'"):
        extend_context(model, 4, method, existing="compose")
    short = IDS[:, :15]
    before = logits(exact(), short)
    torch.testing.assert_close(
        logits(extend_context(model, 4, method, existing="replace"), short), before, atol=STOCK, rtol=0
    )


def test_an_adapter_finds_the_extension_of_its_base(tmp_path: Any) -> None:
    from peft import LoraConfig, get_peft_model

    extend_context(tiny_model("llama"), 4, "self_extend").save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    tuned = get_peft_model(
        ctxext.load(tmp_path / "base"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    tuned.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    tuned.save_pretrained(tmp_path / "adapter")
    again = ctxext.load(tmp_path / "adapter")
    torch.testing.assert_close(logits(again.double(), IDS), logits(tuned.eval().double(), IDS), atol=1e-9, rtol=0)


def test_unscaled_first_tokens_have_no_frozen_form(tmp_path: Any) -> None:
    model = extend_context(tiny_model("llama"), method=LongRoPE(factor=4, long_factor=(4.0,) * 8, start_tokens=4))
    with pytest.raises(ValueError, match="start_tokens=4 has no static form"):
        model.save_pretrained(tmp_path, length=4 * LENGTH)
    assert model.context_extension is extension_of(model)


def test_a_folder_that_could_not_be_loaded_is_not_written(tmp_path: Any) -> None:
    tiny_model("falcon").save_pretrained(tmp_path / "falcon")
    with pytest.raises(ValueError, match="custom attention code"):
        extend_folder(tmp_path / "falcon", tmp_path / "out", 4, "self_extend")
    assert not (tmp_path / "out").exists()


def test_attention_weights_that_are_never_held_are_not_promised() -> None:
    model = extend_context(tiny_model("llama", attn_implementation="eager"), 4, "self_extend")
    with pytest.raises(ValueError, match="does not materialise attention weights"):
        model(input_ids=IDS, output_attentions=True)


def test_an_emptied_cache_is_an_empty_cache() -> None:
    model = extend_context(exact(), 4, "dynamic_ntk")
    cache = StaticCache(config=model.config, max_cache_len=200)
    logits(model, IDS, past_key_values=cache)
    cache.reset()
    restore_context(model)
    torch.testing.assert_close(logits(model, IDS, past_key_values=cache), logits(model, IDS), atol=1e-9, rtol=0)
    cache.reset()
    extend_context(model, 4, "self_extend")
    torch.testing.assert_close(logits(model, IDS, past_key_values=cache), logits(model, IDS), atol=1e-9, rtol=0)


def test_a_mask_of_the_new_tokens_alone_is_read_as_stock_reads_it() -> None:
    mask = torch.ones(1, 10, dtype=torch.long)
    found = []
    for model in (exact(), extend_context(exact(), 4, "dynamic_ntk")):
        cache = DynamicCache(config=model.config)
        logits(model, IDS[:, :30], past_key_values=cache)
        found.append(logits(model, IDS[:, 30:40], past_key_values=cache, attention_mask=mask))
    torch.testing.assert_close(*found, atol=STOCK, rtol=0)
    assert masks.block_mask(1, 10, 40, 30, attention_mask=mask.bool()).is_causal is False


def test_the_evaluators_cache_keeps_its_room() -> None:
    from ctxext.evals.engine import KeyValues

    model = extend_context(exact(), 4, "dynamic_ntk")
    cache, ids = KeyValues([True, True], 200), IDS[:, :110]
    logits(model, ids[:, :100], past_key_values=cache)
    where = cache.layers[0].keys.data_ptr()
    cache.crop(-10)
    parts = [logits(model, token, past_key_values=cache) for token in ids[:, 90:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits(model, ids)[:, 90:], atol=1e-9, rtol=0)
    assert cache.layers[0].keys.data_ptr() == where


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("pairs", ["half_split", "interleaved"])
def test_a_part_of_a_head_turns_as_complex_numbers_do(pairs: str, sign: int, gradient: bool) -> None:
    """By a second way of computing it, in more pieces than one, whether autograd is on or off."""
    n_pairs, n_tokens = 3, 1200
    x = torch.randn(2, 2, n_tokens, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(n_tokens)[None, :, None] * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    turned, rest = x[..., : 2 * n_pairs], x[..., 2 * n_pairs :]
    shape = (2, n_pairs) if pairs == "half_split" else (n_pairs, 2)
    first, second = turned.unflatten(-1, shape).unbind(-2 if pairs == "half_split" else -1)
    number = torch.complex(first, second) * torch.polar(torch.ones_like(angles), sign * angles)[:, None]
    want = torch.stack([number.real, number.imag], -2 if pairs == "half_split" else -1).flatten(-2)
    with torch.set_grad_enabled(gradient):
        found = rotary.rotate(x, (angles.cos(), angles.sin()), rotary.Convention(pairs, sign))
    torch.testing.assert_close(found, torch.cat([want, rest], dim=-1), atol=1e-12, rtol=0)

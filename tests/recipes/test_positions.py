"""The recipe's models with other position encodings, and the experiment that compares them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from positions import POSITIONS, PositionedConfig, PositionedLlama
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

ROOT = Path(__file__).resolve().parents[2]
BODY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "initializer_range": 0.3, "tie_word_embeddings": True, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
OTHERS = POSITIONS[1:]


def model_with(position: str) -> PositionedLlama:
    torch.manual_seed(0)
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    return PositionedLlama(PositionedConfig(position=position, **buckets, **BODY)).eval()


def some_tokens(n: int = 24, rows: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (rows, n), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def in_chunks(model, ids: torch.Tensor, edges: tuple[int, ...], **inputs: torch.Tensor) -> torch.Tensor:
    """The logits of a prefill and of what follows it, over one cache."""
    cache, parts = None, []
    for low, high in pairwise(edges):
        given = {
            name: value[:, :high] if name == "attention_mask" else value[:, low:high] for name, value in inputs.items()
        }
        output = model(ids[:, low:high], past_key_values=cache, use_cache=True, **given)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("position", OTHERS)
def test_reading_in_chunks_is_the_full_forward(position: str) -> None:
    model, ids = model_with(position), some_tokens(rows=2)
    full = model(ids).logits
    torch.testing.assert_close(in_chunks(model, ids, (0, 9, 10, 11, 20, 24)), full, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("position", OTHERS)
def test_padding_on_the_left_changes_nothing(position: str, attention: str) -> None:
    model, ids = model_with(position), some_tokens()
    model.set_attn_implementation(attention)
    padded = torch.cat([torch.full((1, 5), 1), ids], dim=1)
    beside = torch.cat([padded, some_tokens(29)])
    mask = torch.ones_like(beside)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = model(ids).logits
    for edges in ((0, 29), (0, 12, 13, 29)):
        logits = in_chunks(model, beside, edges, attention_mask=mask, position_ids=positions)
        torch.testing.assert_close(logits[:1, 5:], alone, atol=1e-4, rtol=0)


def test_bodies_begin_alike_and_rope_is_stock() -> None:
    torch.manual_seed(0)
    stock, drawn = LlamaForCausalLM(LlamaConfig(**BODY)), torch.rand(1)
    for position in OTHERS:
        torch.manual_seed(0)
        model = PositionedLlama(PositionedConfig(position=position, **BODY))
        assert torch.equal(torch.rand(1), drawn), position
        weights = model.state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in stock.state_dict().items()), position


@torch.no_grad()
def test_without_their_encodings_all_are_one_model() -> None:
    torch.manual_seed(0)
    stock, ids = LlamaForCausalLM(LlamaConfig(**BODY)).eval(), some_tokens()
    stock.model.rotary_emb.inv_freq.zero_()
    for position in ("alibi", "learned", "t5"):
        model = model_with(position)
        ours = [tensor for name, tensor in model.state_dict().items() if name not in stock.state_dict()]
        assert (model(ids).logits - stock(ids).logits).abs().max() > 0.1, position
        for tensor in ours:
            tensor.zero_()
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_alibi_is_that_of_bloom() -> None:
    bias = model_with("alibi").bias.compute_bias(24, 24, past_seen_tokens=0)[0]
    theirs = build_alibi_tensor(torch.ones(1, 24), 4, torch.float32)
    scores = torch.randn(4, 24, 24).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    torch.testing.assert_close((scores + bias).softmax(-1), (scores + theirs).softmax(-1))
    assert bias.tril().max() == 0  # it only ever takes away


@torch.no_grad()
@pytest.mark.parametrize("position", OTHERS)
def test_a_saved_model_loads_as_it_was(position: str, tmp_path: Path) -> None:
    model, ids = model_with(position), some_tokens()
    model.save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)  # what is not loaded is NaN then, and not what memory held before
    try:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@torch.no_grad()
def test_only_a_learned_table_ends() -> None:
    ids = some_tokens(48)
    for position in ("alibi", "sinusoidal", "t5"):
        full = model_with(position)(ids).logits
        in_steps = in_chunks(model_with(position), ids, (0, 30, 31, 34, 35, 48))
        torch.testing.assert_close(in_steps, full, atol=1e-4, rtol=0)
    with pytest.raises(IndexError):
        model_with("learned")(ids)


@torch.no_grad()
def test_sinusoids_are_added_to_scaled_embeddings() -> None:
    model, ids = model_with("sinusoidal"), some_tokens()
    plain = LlamaForCausalLM(LlamaConfig(**BODY)).eval()
    plain.load_state_dict(model.state_dict())
    plain.model.rotary_emb.inv_freq.zero_()
    # tensor2tensor's variant of section 3.5, and XGLM's offset of 2.
    angles = torch.arange(2, 26)[:, None] / 10000 ** torch.linspace(0, 1, 16)
    table = torch.cat([angles.sin(), angles.cos()], dim=-1)
    expected = plain(inputs_embeds=plain.get_input_embeddings()(ids) * 32**0.5 + table).logits
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_experiment_trains_once_and_says_what_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_short_test_long as experiment

    def run() -> dict:
        small = ["--only", "learned", "--seeds", "1", "--length", "16", "--steps", "2", "--windows", "2"]
        folders = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs")]
        monkeypatch.setattr("sys.argv", ["train_short_test_long.py", *small, *folders])
        with pytest.raises(SystemExit) as ended:
            experiment.main()
        assert ended.value.code == 0
        return json.loads((tmp_path / "docs/summary.json").read_text())

    first = run()
    assert (tmp_path / "docs/positions.png").stat().st_size > 10_000
    at = first["positions"]["learned"]["lengths"]
    assert at["16"]["stock"]["against"]["value"] == pytest.approx(0, abs=1e-5)
    assert "IndexError" in at["64"]["stock"]["error"]
    monkeypatch.setattr("subprocess.run", None)  # nothing is left to train
    assert run() == first

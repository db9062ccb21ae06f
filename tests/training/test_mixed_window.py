"""Mixed windows: each document is computed on the RoPE of its length, whatever else is in its row."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import LENGTH, from_config, logits, tiny_config, tiny_model, token_ids
from live import assert_unchanged, plain_rope, rotary_of, snapshot
from peft import LoraConfig, get_peft_model
from survey.small import small_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ctxext import extend_context
from ctxext.data.collators import Plain
from ctxext.methods import LongRoPE
from ctxext.training.mixed_window import check_mixture, document_lengths, use_mixed_window

TOKENS = 4 * LENGTH
# Documents of each row: one longer than the trained length beside shorter ones, one of just that length, and one of one
# token more.
ROWS = [[LENGTH + 40, LENGTH, 30, TOKENS - 2 * LENGTH - 70], [TOKENS], [LENGTH + 1, LENGTH - 1, 2 * LENGTH]]
FAMILIES = ["llama", "mistral", "qwen3", "gpt_neox", "olmo2"]


def method_of(model: Any, name: str) -> Any:
    if name == "longrope":
        rope = plain_rope(model)
        return LongRoPE(factor=4, long_factor=tuple(torch.linspace(1, 5, rope.dim // 2).tolist()), attention_factor=1.2)
    return name


def model_of(family: str, method: str = "yarn") -> Any:
    """In float64, and in training mode; no family here has dropout."""
    model = from_config(tiny_config(family), dtype=torch.float64).train()
    return extend_context(model, 4 if method != "longrope" else None, method_of(model, method))


def batch_of(rows: list[list[int]] = ROWS) -> dict[str, Tensor]:
    ids = token_ids(TOKENS, len(rows))
    made = []
    for row, documents in zip(ids, rows, strict=True):
        labels = row.clone()
        labels[torch.tensor([0, *documents]).cumsum(0)[:-1]] = -100
        made.append({"input_ids": row, "labels": labels, "documents": documents})
    return Plain()(made)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Summed over all targets, in nats, in float64: transformers' own loss is in float32."""
    given = {name: tensor for name, tensor in batch.items() if name != "labels"}
    scores = model(**given, use_cache=False).logits[:, :-1].flatten(0, 1)
    return cross_entropy(scores, batch["labels"][:, 1:].flatten(), reduction="sum")


def documents_alone(family: str, method: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of each document by itself: within the trained length under the model before its
    extension, beyond it under the extended model."""
    plain, extended, batch = from_config(tiny_config(family), dtype=torch.float64), model_of(family, method), batch_of()
    total, found = torch.zeros((), dtype=torch.float64), {}
    for row, documents in enumerate(ROWS):
        start = 0
        for length in documents:
            ids = batch["input_ids"][None, row, start : start + length]
            start += length
            model = plain if length <= LENGTH else extended
            loss = cross_entropy(model(input_ids=ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="sum")
            total = total + loss.detach()
            for name, gradient in gradients(model, loss).items():
                found[name] = found.get(name, 0) + gradient
    return total, found


@pytest.mark.parametrize(("family", "method"), [*((family, "yarn") for family in FAMILIES), ("llama", "longrope")])
def test_a_mixed_batch_has_the_loss_and_gradients_of_its_documents_alone(family: str, method: str) -> None:
    model = model_of(family, method)
    extended = loss_of(model, batch_of()).detach()
    use_mixed_window(model)
    loss = loss_of(model, batch_of())
    expected, gradient = documents_alone(family, method)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-12)
    assert abs(float(extended - expected)) > 1e-6 * float(expected)
    found = gradients(model, loss)
    assert found.keys() == gradient.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, gradient[name], rtol=1e-9, atol=1e-9 * float(gradient[name].abs().max()))


def test_an_adapter_with_recomputed_layers_trains_as_one_without() -> None:
    losses, found = [], []
    for recompute in (False, True):
        model = model_of("llama")
        torch.manual_seed(0)
        adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        use_mixed_window(adapter)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = loss_of(adapter.train(), batch_of())
        losses.append(float(loss.detach()))
        found.append(gradients(adapter, loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("documents", [[5], [1, 1, 3], [2, 4, 1], [7]])
def test_the_length_of_a_document_is_that_of_each_of_its_tokens(documents: list[int]) -> None:
    positions = torch.cat([torch.arange(n) for n in documents]).expand(2, -1)
    expected = torch.cat([torch.full((n,), n) for n in documents]).expand(2, -1)
    assert torch.equal(document_lengths(positions), expected)


def test_a_model_in_evaluation_mode_is_the_extended_one_in_parts_too() -> None:
    model = model_of("llama").eval()
    ids = token_ids(TOKENS)
    extended = logits(model, ids)
    use_mixed_window(model)
    assert torch.equal(logits(model, ids), extended)
    assert torch.equal(logits(model, ids[:, :LENGTH]), extended[:, :LENGTH])
    with torch.no_grad():
        first = model(input_ids=ids[:, : LENGTH // 2], use_cache=True)
        rest = model(input_ids=ids[:, LENGTH // 2 :], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), extended, rtol=1e-9, atol=1e-9)


def test_undoing_is_bitwise_and_another_model_is_untouched() -> None:
    model, other = model_of("llama"), model_of("llama")
    before, apart = snapshot(model), loss_of(other, batch_of()).detach()
    edit = use_mixed_window(model)
    assert torch.equal(loss_of(other, batch_of()).detach(), apart)
    assert not torch.equal(loss_of(model, batch_of()).detach(), apart)
    edit.undo()
    assert torch.equal(loss_of(model, batch_of()).detach(), apart)
    assert_unchanged(model, before)


def test_what_is_saved_is_the_extended_model_and_with_the_base_s_config_the_original(tmp_path: Path) -> None:
    model, base = model_of("llama", "longrope"), tiny_config("llama")
    use_mixed_window(model)
    with torch.no_grad():
        model.lm_head.weight *= 1.5  # as training would
    model.save_pretrained(tmp_path)
    short, long = token_ids(LENGTH), token_ids(TOKENS)
    positions = {"position_ids": torch.arange(LENGTH)[None]}
    of_training = logits(model, short, **positions), logits(model, long, position_ids=torch.arange(TOKENS)[None])
    extended = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(logits(extended, long), of_training[1], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(logits(extended, short), of_training[0], rtol=1e-3)
    original = AutoModelForCausalLM.from_pretrained(tmp_path, config=base, dtype=torch.float64)
    torch.testing.assert_close(logits(original, short), of_training[0], rtol=1e-9, atol=1e-9)


def dynamic() -> Any:
    return extend_context(tiny_model("llama"), 4, "dynamic_ntk")


def composed() -> Any:
    model = tiny_model("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})
    return extend_context(model, 4, "yarn", existing="compose")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tiny_model("llama"), "must be extended from plain RoPE.*Extend it first"),
        (composed, "must be extended from plain RoPE"),
        (dynamic, "dynamic_ntk is length-dependent.*static method"),
        (lambda: extend_context(small_model("gemma3_text", "causal"), 4, "yarn"), "only a single RoPE table"),
        (lambda: extend_context(tiny_model("qwen3_5"), 4, "yarn"), "positions with several axes"),
        (lambda: extend_context(small_model("deepseek_v3", "causal"), 4, "yarn"), "softmax temperature"),
        (lambda: small_model("gpt2", "causal"), "RoPE|rotary"),
    ],
    ids=["plain", "composed", "dynamic", "several tables", "several axes", "MLA", "GPT-2"],
)
def test_models_whose_rope_is_not_one_of_two_fixed_tables_are_refused(make: Any, words: str) -> None:
    model = make()
    before = snapshot(model, run=False)
    with pytest.raises(ValueError, match=words):
        use_mixed_window(model)
    assert_unchanged(model, before)


def test_a_rotary_embedding_that_computes_something_else_is_refused_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    kind = type(rotary_of(model))
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, position_ids: own(self, x, 2 * position_ids))
    with pytest.raises(RuntimeError, match="does not give the original cos and sin"):
        use_mixed_window(model)
    assert "forward" not in vars(rotary_of(model))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[60, 40]], "all are no longer. Add a source with longer ones"),
        ([[100, 100]], "all are longer. Add a source with shorter ones"),
        ([[100, 10]], "all are longer"),  # the last is padding
    ],
)
def test_a_mixture_of_one_kind_is_refused(rows: list[list[int]], said: str) -> None:
    padding = [row[-1] if row[-1] == 10 else 0 for row in rows]
    part: Any = SimpleNamespace(rows={"documents": rows, "padding": padding})
    with pytest.raises(ValueError, match=re.escape(said)):
        check_mixture([part], 64, "training.mixed_window", {True, False})
    mixed: Any = SimpleNamespace(rows={"documents": [[64, 65, 7]], "padding": [7]})
    check_mixture([mixed], 64, "training.mixed_window", {True, False})
    check_mixture([mixed], 65, "training.distillation", {True})
    with pytest.raises(ValueError, match="documents within 63 tokens, but all are longer"):
        check_mixture([mixed], 63, "training.distillation", {True})


def test_frequencies_in_complex_numbers_are_switched_too() -> None:
    """Llama 4's rotary embedding gives one complex tensor in the place of cos and sin."""
    model = extend_context(small_model("llama4_text", "causal", attention_chunk_size=1024), 4, "yarn").train()
    trained, rotary = model.config.max_position_embeddings // 4, rotary_of(model)
    positions = torch.cat([torch.arange(trained + 5), torch.arange(9)])[None]
    edit = use_mixed_window(model)
    mixed = rotary(torch.zeros(1, 1, 8), positions)
    edit.undo()
    extended = rotary(torch.zeros(1, 1, 8), positions)
    plain = small_model("llama4_text", "causal", attention_chunk_size=1024).model.rotary_emb(
        torch.zeros(1, 1, 8), positions
    )
    assert torch.equal(mixed[:, : trained + 5], extended[:, : trained + 5])
    assert torch.equal(mixed[:, trained + 5 :], plain[:, trained + 5 :])
    assert not torch.equal(plain, extended)

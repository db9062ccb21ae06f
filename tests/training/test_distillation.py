"""Distillation: short documents are held to the model without its adapter, on its original RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import LENGTH, from_config, tiny_config, tiny_model
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from ctxext import extend_context
from ctxext.data.collators import Plain
from ctxext.training.distillation import use_distillation
from ctxext.training.loss import chunked_loss_of, use_chunked_loss
from ctxext.training.mixed_window import use_mixed_window

# Documents of each row: long beside short, and all short.
ROWS = [[LENGTH + 40, LENGTH - 40], [LENGTH, 30, LENGTH - 30]]
SHORT = [(row, sum(ROWS[row][:k]), n) for row in (0, 1) for k, n in enumerate(ROWS[row]) if n <= LENGTH]


def adapter_of(dropout: float = 0.0, **changes: Any) -> Any:
    """An adapter that changes the model, in float64 and in training mode; embeddings and norms are trained too."""
    model = extend_context(from_config(tiny_config("llama"), dtype=torch.float64), 4, "yarn")
    torch.manual_seed(1)
    config = {
        "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "norm", "lm_head"],
        "init_lora_weights": False, "lora_dropout": dropout, **changes,
    }  # fmt: skip
    adapter = get_peft_model(model, LoraConfig(**config)).train()
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn_like(parameter)
    use_chunked_loss(adapter)
    return adapter


def batch_of(rows: list[list[int]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for documents in rows:
        ids = torch.randint(3, 128, (sum(documents),), generator=generator)
        labels = ids.clone()
        labels[torch.tensor([0, *documents]).cumsum(0)[:-1]] = -100
        made.append({"input_ids": ids, "labels": labels, "documents": documents})
    return Plain()(made)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def by_hand(adapter: Any, share: float) -> Tensor:
    """The mean loss from whole logits; those of the original model are of a model of its own, document by document."""
    original, batch = from_config(tiny_config("llama"), dtype=torch.float64), batch_of(ROWS)
    logits = adapter(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False).logits
    losses = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
    losses = losses.view(2, -1)
    weights = torch.ones_like(losses)
    total = torch.zeros((), dtype=torch.float64)
    for row, start, n in SHORT:
        within = slice(start, start + n - 1)
        weights[row, within] = 1 - share
        with torch.no_grad():
            q = original(input_ids=batch["input_ids"][None, row, start : start + n], use_cache=False).logits[0, :-1]
        log_p = logits[row, within].log_softmax(-1)
        total = total + share * kl_div(log_p, q.log_softmax(-1), log_target=True, reduction="sum")
    return (total + (weights * losses).sum()) / (batch["labels"][:, 1:] != -100).sum()


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients_are_those_of_a_step_by_hand(share: float, recompute: bool) -> None:
    adapter = adapter_of()
    expected = by_hand(adapter, share)
    wanted = gradients(adapter, expected)
    without = adapter(**batch_of(ROWS), use_cache=False).loss
    use_distillation(adapter, share)
    if recompute:
        adapter.gradient_checkpointing_enable({"use_reentrant": False})
    loss = adapter(**batch_of(ROWS), use_cache=False).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert abs(loss.item() - without.item()) > 1e-3
    found = gradients(adapter, loss)
    assert found.keys() == wanted.keys()
    assert len(found) == sum(parameter.requires_grad for parameter in adapter.parameters())
    for name, gradient in found.items():
        largest = float(wanted[name].abs().max())
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-8, atol=1e-9 * largest, msg=name)


def test_an_untrained_adapter_on_the_original_rope_has_no_divergence_whatever_its_dropout() -> None:
    model = extend_context(from_config(tiny_config("llama"), dtype=torch.float64), 4, "yarn")
    adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)).train()
    use_chunked_loss(adapter)
    use_mixed_window(adapter)
    use_distillation(adapter, 1.0)
    assert abs(adapter(**batch_of(ROWS[1:]), use_cache=False).loss.item()) < 1e-12


def test_the_reference_has_no_dropout() -> None:
    config = tiny_config("llama", attention_dropout=0.5)
    model = extend_context(from_config(config, dtype=torch.float64), 4, "yarn")
    adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).train()
    use_chunked_loss(adapter)
    use_distillation(adapter, 1.0)
    inputs = {key: value for key, value in batch_of(ROWS).items() if key != "labels"}
    one, other = (chunked_loss_of(adapter).reference(**inputs).hidden for _ in range(2))
    assert torch.equal(one, other)


def test_longer_documents_and_evaluation_are_left_alone() -> None:
    adapter, plain = adapter_of(), adapter_of()
    use_distillation(adapter, 1.0)
    long, short = batch_of([[2 * LENGTH]]), batch_of(ROWS[1:])
    assert chunked_loss_of(adapter).reference(**{k: v for k, v in long.items() if k != "labels"}) is None
    for model in adapter, plain:
        model.eval()
    assert torch.equal(adapter(**short).loss, plain(**short).loss)
    for model in adapter, plain:
        model.train()
    assert torch.equal(adapter(**long).loss, plain(**long).loss)
    assert not torch.equal(adapter(**short).loss, plain(**short).loss)


def test_after_a_step_the_model_is_in_training_with_its_adapter_and_its_own_rope() -> None:
    adapter, plain = adapter_of(), adapter_of()
    use_distillation(adapter, 0.5)
    adapter(**batch_of(ROWS)).loss.backward()
    inputs = {key: value for key, value in batch_of(ROWS).items() if key != "labels"}
    assert torch.equal(adapter(**inputs).logits, plain(**inputs).logits)
    assert all(module.training for module in adapter.modules())
    assert [p.requires_grad for p in adapter.parameters()] == [p.requires_grad for p in plain.parameters()]


def test_what_cannot_be_distilled_is_refused() -> None:
    adapter = get_peft_model(extend_context(tiny_model("llama"), 4, "yarn"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match="Call use_chunked_loss"):
        use_distillation(adapter, 0.5)
    for model, words in (
        (tiny_model("llama"), "distillation: the model must be extended from plain RoPE"),
        (extend_context(tiny_model("llama"), 4, "dynamic_ntk"), "distillation: only fixed frequencies .* dynamic_ntk"),
    ):
        adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        use_chunked_loss(adapter)
        with pytest.raises(ValueError, match=words):
            use_distillation(adapter, 0.5)
        assert chunked_loss_of(adapter).reference is None
    adapter = adapter_of()
    use_distillation(adapter, 0.5)
    with pytest.raises(ValueError, match="reads the length of documents from position_ids"):
        adapter(input_ids=torch.ones(1, 8, dtype=torch.long), labels=torch.ones(1, 8, dtype=torch.long))

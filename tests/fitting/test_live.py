"""λ that can be changed at every step, on a live model: what the extension would say, with gradients, and no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import LENGTH, from_config, logits, tiny_config, tiny_model, token_ids
from live import assert_unchanged, plain_rope, rotary_of, snapshot
from survey.small import small_model

from ctxext import LongRoPE, YaRN, extend_context, temporarily_extended
from ctxext.encodings.rope import RopeGeometry
from ctxext.fitting import gradient
from ctxext.fitting.episodes import Episode
from ctxext.fitting.gradient import row_losses, short_loss
from ctxext.fitting.live import LiveFactors, frozen, recomputed

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gemma2", "falcon"]
IDS = token_ids(2 * LENGTH)


def uneven(rope: RopeGeometry) -> LongRoPE:
    """λ that no named method has and that falls in places."""
    bent = 1 + 3 * torch.rand(rope.dim // 2, generator=torch.Generator().manual_seed(0))
    return LongRoPE(factor=4, long_factor=tuple(bent.tolist()), attention_factor=1.07)


def model_of(kind: str) -> torch.nn.Module:
    if kind == "made in bfloat16":
        return from_config(tiny_config("llama"), dtype=torch.bfloat16)
    if kind == "cast to bfloat16":
        return tiny_model("llama").to(torch.bfloat16)
    return tiny_model(kind)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-4 * other.abs().max())


@pytest.mark.parametrize("kind", [*FAMILIES, "made in bfloat16", "cast to bfloat16"])
def test_live_factors_say_what_the_extension_says_and_leave_no_trace(kind: str) -> None:
    model = model_of(kind)
    before, method = snapshot(model), uneven(plain_rope(model))
    with LiveFactors(model) as live:
        live.use(method)
        found = logits(model, IDS)
        live.use(None)
        plain = logits(model, IDS)
    assert_unchanged(model, before)
    with temporarily_extended(model, method=method):
        # The family's own class divides in float32: the last bit of a frequency may differ.
        assert close(found, logits(model, IDS))
    assert not close(found, plain)
    if kind != "cast to bfloat16":  # whose own frequencies are rounded
        assert close(plain, logits(model, IDS))


def stopped_after(work: Callable[[], None]) -> None:
    work()
    raise KeyError


def test_a_forward_of_the_modules_own_comes_back_and_so_does_all_else_after_an_error() -> None:
    model = tiny_model("llama")
    rotary = rotary_of(model)
    own = rotary.forward = rotary.forward  # as accelerate's hooks set one
    before = snapshot(model)
    with pytest.raises(KeyError), LiveFactors(model) as live:
        stopped_after(lambda: live.use(YaRN(factor=4)))
    assert_unchanged(model, before)
    assert rotary.forward is own


def test_a_model_in_training_is_left_in_training_and_its_weights_without_gradients() -> None:
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    model.activation_checkpointing_enable()
    asked = {name for name, weight in model.named_parameters() if weight.requires_grad}
    before = snapshot(model, run=False)
    log = torch.zeros(8, dtype=torch.float64, requires_grad=True)

    def step() -> None:
        live.put(log.exp(), 1.0)
        row_losses(model, ROW)["text"].backward()

    with pytest.raises(KeyError), LiveFactors(model) as live, frozen(model), recomputed(model):
        stopped_after(step)
    assert log.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in model.parameters())
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == asked
    assert model.is_activation_checkpointing
    assert_unchanged(model, before)


def extended() -> torch.nn.Module:
    return extend_context(tiny_model("llama"), 4, "yarn")


def scaled() -> torch.nn.Module:
    return tiny_model("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})


def out_of_place() -> torch.nn.Module:
    model = tiny_model("llama")
    rotary_of(model).inv_freq.mul_(1.001)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (extended, "already scaled.*restore_context"),
        (scaled, "already scaled"),
        (out_of_place, "does not use the frequencies in its config"),
        (lambda: small_model("gemma3_text", "causal"), "several RoPE tables.*named method"),
        (lambda: small_model("deepseek_v3", "causal"), "a softmax temperature.*named method"),
        (lambda: small_model("gptj", "causal"), "does not use the frequencies in its config.*named method"),
        (lambda: small_model("laguna", "causal"), "does not use the frequencies in its config.*named method"),
        (lambda: small_model("gpt2", "causal"), "no rotary position embeddings"),
        (lambda: small_model("bloom", "causal"), "no rotary position embeddings"),
        (lambda: tiny_model("falcon", alibi=True), "no rotary position embeddings"),
    ],
    ids=["extended", "scaled", "moved", "several tables", "MLA", "GPT-J", "labelled", "table", "alibi", "falcon alibi"],
)
def test_models_without_one_plain_table_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LiveFactors(make())


# ------------------------------------------------------------------------------------------------------ gradients

ROW = Episode(tuple(token_ids(100)[0].tolist()), text_from=1, n_answer=5)
SHORT = Episode(tuple(token_ids(LENGTH, seed=1)[0].tolist()), text_from=1)


def losses(model: Any, live: LiveFactors, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of every kind, as a function of ln λ and ln attention_factor."""

    def use() -> None:
        live.put(numbers[:-1].exp(), numbers[-1].exp())

    use()
    return {**row_losses(model, ROW), **short_loss(model, live, SHORT, use)}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_finite_differences(recompute: bool) -> None:
    # Small weights: the loss is then smooth at the width of a difference that float32 logits allow.
    model = tiny_model("llama", initializer_range=0.1).double()
    point = torch.linspace(0.1, 1.2, 9, dtype=torch.float64)
    with LiveFactors(model) as live, frozen(model):
        gradients = {}
        for kind in ("text", "key", "short"):
            numbers = point.clone().requires_grad_()
            if recompute:
                with recomputed(model):
                    losses(model, live, numbers)[kind].backward()
            else:
                losses(model, live, numbers)[kind].backward()
            gradients[kind] = numbers.grad
        step = 3e-4  # the fastest pair turns by a hundred times that within the row
        for i in range(len(point)):
            with torch.no_grad():
                shift = torch.zeros_like(point)
                shift[i] = step
                up, down = losses(model, live, point + shift), losses(model, live, point - shift)
            for kind, gradient in gradients.items():
                slope = float(up[kind].double() - down[kind].double()) / (2 * step)
                assert float(gradient[i]) == pytest.approx(slope, rel=0.02, abs=0.01 * float(gradient.abs().max())), i


def test_recomputing_layers_holds_less_and_says_the_same() -> None:
    """Falcon drops numbers at random in the code of its layers, wherever these are in training mode."""
    model = tiny_model("falcon", num_hidden_layers=4, hidden_dropout=0.5, attention_dropout=0.5).train()
    held, found = {}, {}
    with LiveFactors(model) as live, frozen(model):
        for recompute in (False, True):
            seen: dict[int, int] = {}

            def pack(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
                storage = tensor.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
                return tensor

            numbers = torch.full((9,), 0.5, dtype=torch.float64, requires_grad=True)
            live.put(numbers[:-1].exp(), numbers[-1].exp())
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                if recompute:
                    with recomputed(model):
                        loss = row_losses(model, ROW)["text"]
                        loss.backward()
                else:
                    loss = row_losses(model, ROW)["text"]
                    loss.backward()
            weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
            held[recompute] = sum(size for key, size in seen.items() if key not in weights)
            found[recompute] = torch.cat([loss.detach()[None].double(), numbers.grad])
    hidden_states = 4 * 4 * (len(ROW) - 1) * 64  # bytes that checkpoints hold themselves, one a layer
    assert held[True] + hidden_states < 0.4 * held[False]
    assert torch.allclose(found[True], found[False], rtol=1e-5, atol=1e-7)


def test_losses_are_those_of_the_tokens_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids = torch.tensor([ROW.input_ids])
    whole = torch.nn.functional.cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:], reduction="none")
    with torch.no_grad():
        found = row_losses(model, ROW)
    torch.testing.assert_close(found, {"text": whole[:-5].mean(), "key": whole[-5:].sum()})
    monkeypatch.setattr(gradient, "LOGITS", model.config.vocab_size * len(ROW) // 3)
    with torch.no_grad():
        found = row_losses(model, ROW)
    torch.testing.assert_close(found, {"text": whole[:-5:3].mean(), "key": whole[-5:].sum()})
    monkeypatch.undo()
    later = Episode(ROW.input_ids, text_from=4)
    with torch.no_grad():
        torch.testing.assert_close(row_losses(model, later), {"text": whole[3:].mean()})
    ids, method = torch.tensor([SHORT.input_ids]), YaRN(factor=4)
    trained = logits(model, ids)[0].log_softmax(-1)
    with torch.no_grad(), LiveFactors(model) as live:
        found = short_loss(model, live, SHORT, lambda: live.use(method))
    with temporarily_extended(model, method=method):
        changed = logits(model, ids)[0].log_softmax(-1)
    torch.testing.assert_close(found["short"], (trained.exp() * (trained - changed)).sum(-1).mean())

"""The chunked loss is the stock loss: value, gradients, heads, adapters, precision, accumulation."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from typing import Any

import pytest
import torch
from families import COMMON, FAMILIES, from_config, logits, tiny_config, tiny_model, token_ids
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from ctxext.training import loss as loss_module
from ctxext.training.loss import Reference, linear_cross_entropy, prove_loss, restore_loss, use_chunked_loss

IGNORED = -100
# Heads of their own kind: capped, divided, multiplied, tied, with a bias, under another name.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "gemma2, capped hard": ("gemma2", {"final_logit_softcapping": 2.0}),
    "granite": ("granite", {"logits_scaling": 8.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "phi": ("phi", {}),
}


def model_of(head: str, dtype: torch.dtype = torch.float32) -> Any:
    family, changes = HEADS[head]
    if family in FAMILIES:
        return from_config(tiny_config(family, **changes), dtype=dtype)
    return from_config(AutoConfig.for_model(family, **{**COMMON, **changes}), dtype=dtype)


def labelled(n_tokens: int = 48, batch: int = 2) -> dict[str, Tensor]:
    """Tokens, and labels that leave out some."""
    ids = token_ids(n_tokens, batch)
    labels = ids.clone()
    labels[:, ::5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def gradients(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: tuple[float, dict[str, Tensor]], stock: tuple[float, dict[str, Tensor]], rtol: float) -> None:
    assert ours[0] == pytest.approx(stock[0], rel=rtol)
    assert ours[1].keys() == stock[1].keys()
    largest = max(gradient.norm() for gradient in stock[1].values())
    for name, gradient in stock[1].items():
        # A gradient that cancels (attention's key bias) has only noise to compare.
        torch.testing.assert_close(ours[1][name], gradient, rtol=0, atol=float(rtol * (gradient.norm() + largest)))


def problem(n_tokens: int = 37, dtype: torch.dtype = torch.float32, vocabulary: int = 101) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((n_tokens, 16), (vocabulary, 16), (vocabulary,))
    )
    targets = torch.randint(0, vocabulary, (n_tokens,), generator=generator)
    targets[::4] = IGNORED
    return hidden, weight, bias, targets


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, softcap: float | None, scale: float
) -> Tensor:
    z = scale * (hidden @ weight.T + bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return cross_entropy(z, targets, reduction="sum")


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 1.0), (None, 0.25), (3.0, 0.25)])
@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_value_and_gradients_are_those_of_all_logits_at_once(softcap: float | None, scale: float, chunk: int) -> None:
    *inputs, targets = problem()
    ours = linear_cross_entropy(*inputs[:2], targets, bias=inputs[2], softcap=softcap, scale=scale, chunk=chunk)
    stock = reference(*inputs, targets, softcap, scale)
    assert ours.item() == pytest.approx(stock.item(), rel=1e-6)
    for mine, theirs in zip(torch.autograd.grad(3 * ours, inputs), torch.autograd.grad(3 * stock, inputs)):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 0.25)])
@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_a_share_of_each_token_s_loss_is_the_divergence_from_a_reference(
    softcap: float | None, scale: float, chunk: int
) -> None:
    *inputs, targets = problem(dtype=torch.float64)
    share = torch.linspace(0, 1, 37, dtype=torch.float64)
    others = [each.detach().flip(0) for each in inputs]
    given = {"bias": inputs[2], "softcap": softcap, "scale": scale, "chunk": chunk}
    ours = linear_cross_entropy(*inputs[:2], targets, **given, reference=Reference(*others, share))
    log_p, log_q = (
        (z if softcap is None else softcap * torch.tanh(z / softcap)).log_softmax(-1)
        for z in (scale * (hidden @ weight.T + bias) for hidden, weight, bias in (inputs, others))
    )
    kept = targets != IGNORED
    losses = cross_entropy(log_p, targets, reduction="none")
    divergence = (log_q.exp() * (log_q - log_p)).sum(-1)
    expected = ((1 - share) * losses + share * divergence)[kept].sum()
    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
    for mine, theirs in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(expected, inputs)):
        assert (mine - theirs).norm() <= 1e-12 * theirs.norm()


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 0.5)])
def test_gradcheck_in_float64(softcap: float | None, scale: float) -> None:
    *inputs, targets = problem(6, torch.float64, vocabulary=11)
    torch.autograd.gradcheck(
        lambda hidden, weight, bias: linear_cross_entropy(
            hidden, weight, targets, bias=bias, softcap=softcap, scale=scale, chunk=4
        ),
        inputs,
    )


def test_bfloat16_tensors_give_a_float32_value() -> None:
    """torch's own is bfloat16, and whole percents off."""
    hidden, weight, _, targets = problem(512, torch.bfloat16, vocabulary=1000)
    targets = targets.clamp(min=0)
    ours = linear_cross_entropy(hidden, weight, targets)
    assert ours.dtype == torch.float32
    exact = cross_entropy((hidden @ weight.T).float(), targets, reduction="sum").item()
    assert ours.item() == pytest.approx(exact, rel=1e-6)
    bfloat16 = cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert abs(bfloat16.item() / exact - 1) > 1e-4
    assert ours.item() == pytest.approx(
        cross_entropy(hidden.float() @ weight.float().T, targets, reduction="sum").item(), rel=1e-3
    )
    ours.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_nothing_of_the_size_of_the_logits_is_ever_allocated() -> None:
    hidden, weight, _, targets = problem(4096, vocabulary=512)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        linear_cross_entropy(hidden, weight, targets, chunk=128).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 4096 * 512 * 4 / 4


def test_a_frozen_head_is_not_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = problem()
    linear_cross_entropy(hidden, weight.detach(), targets).backward()
    assert hidden.grad is not None
    wanted = []
    compute = loss_module._compute
    monkeypatch.setattr(loss_module, "_compute", lambda *args: wanted.append(args[-1]) or compute(*args))
    linear_cross_entropy(hidden, weight.detach(), targets)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, targets)
    assert wanted == [(True, False, False), (False, False, False)]


def test_a_graph_that_is_kept_gives_the_same_gradient_twice() -> None:
    hidden, weight, _, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, (hidden, weight))):
        assert torch.equal(one, other)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, _, targets = problem()
    with pytest.raises(ValueError, match="one target per token"):
        linear_cross_entropy(hidden, weight, targets[1:])


@pytest.mark.parametrize("head", HEADS)
def test_every_head_gives_its_stock_loss_and_gradients(head: str) -> None:
    model, batch = model_of(head), labelled()
    stock = gradients(model, batch)
    use_chunked_loss(model)
    assert model(**batch).logits is None
    assert_same(gradients(model, batch), stock, 1e-5)
    counted = {**batch, "num_items_in_batch": torch.tensor(7)}
    ours = gradients(model, counted)
    restore_loss(model)
    assert_same(ours, gradients(model, counted), 1e-5)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("head", ["llama", "gemma2", "granite", "phi"])
def test_bfloat16_models_pass_the_proof(head: str) -> None:
    model, batch = model_of(head, torch.bfloat16), labelled()
    stock = model(**batch).loss.item()
    use_chunked_loss(model)
    # Gemma-2 caps in bfloat16, we in float32.
    assert model(**batch).loss.item() == pytest.approx(stock, rel=1e-3 if head == "gemma2" else 1e-5)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)


NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
ADAPTERS = {
    "lora": lora(),
    "lora with embeddings and norms": lora(modules_to_save=["embed_tokens", *NORMS], ensure_weight_tying=True),
    "lora with the head": lora(modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_get_their_stock_gradients(adapter: str, patch_first: bool, tied: bool) -> None:
    model, batch = tiny_model("llama", tie_word_embeddings=tied), labelled()
    if patch_first:
        use_chunked_loss(model)
    wrapped = get_peft_model(model, ADAPTERS[adapter])
    if not patch_first:
        use_chunked_loss(wrapped)
    with torch.no_grad():  # away from the base weights, so that the wrong copy of a head would show
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
    prove_loss(wrapped)
    ours = gradients(wrapped, batch)
    with wrapped.disable_adapter():
        prove_loss(wrapped)
    restore_loss(wrapped)
    assert_same(ours, gradients(wrapped, batch), 1e-5)


def test_lora_on_the_head_is_refused() -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(RuntimeError, match=r"target_modules.*loss: stock"):
        use_chunked_loss(model)
    assert "forward" not in model.get_base_model().__dict__


def test_a_head_that_does_more_is_refused_and_left_alone() -> None:
    model = from_config(AutoConfig.for_model("recurrent_gemma", **COMMON, logits_soft_cap=2.0))
    with pytest.raises(RuntimeError, match="more than a linear layer"):
        use_chunked_loss(model)
    assert "forward" not in model.__dict__
    with pytest.raises(RuntimeError, match="output_router_logits"):
        use_chunked_loss(tiny_model("mixtral", output_router_logits=True))


def test_the_proof_notices_a_wrong_loss() -> None:
    model = tiny_model("gemma2", final_logit_softcapping=2.0)
    with pytest.raises(RuntimeError, match="not the chunked one"):
        prove_loss(model)
    use_chunked_loss(model)
    with pytest.raises(RuntimeError, match="already"):
        use_chunked_loss(model)
    head = model.lm_head
    model.lm_head = torch.nn.Sequential(torch.nn.Identity(), copy.deepcopy(head), torch.nn.Tanh())
    model.get_output_embeddings = lambda: head
    with pytest.raises(RuntimeError, match="more than a linear layer"):
        prove_loss(model)
    restore_loss(model)
    with pytest.raises(RuntimeError, match="nothing to restore"):
        restore_loss(model)


def test_gradient_checkpointing_and_autocast_change_nothing_but_rounding() -> None:
    model, batch = tiny_model("llama").train(), labelled()

    def both() -> tuple[Any, Any]:
        plain = gradients(model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            return plain, gradients(model, batch)

    stock, stock16 = both()
    use_chunked_loss(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ours, ours16 = both()
    assert_same(ours, stock, 1e-5)
    assert ours16[0] == pytest.approx(stock16[0], rel=1e-6)
    assert abs(ours16[0] / ours[0] - 1) > 1e-6  # autocast was on
    assert_same(ours16, stock16, 2e-2)


def test_one_label_and_none() -> None:
    model, batch = tiny_model("llama"), labelled()
    labels = torch.full_like(batch["labels"], IGNORED)
    one = labels.clone()
    one[1, 7] = 5
    stock = gradients(model, {**batch, "labels": one})
    use_chunked_loss(model)
    assert_same(gradients(model, {**batch, "labels": one}), stock, 1e-5)
    loss, of_none = gradients(model, {**batch, "labels": labels})
    assert loss == 0
    assert all(not gradient.any() for gradient in of_none.values())


def test_shifted_labels_are_taken_as_they_are() -> None:
    model, batch = tiny_model("llama"), labelled()
    use_chunked_loss(model)
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    given = model(input_ids=batch["input_ids"], shift_labels=shifted).loss
    assert torch.equal(given, model(**batch).loss)


def test_micro_batches_add_up_to_the_mean_over_tokens_and_not_to_a_mean_of_means() -> None:
    model = tiny_model("llama")
    use_chunked_loss(model)
    ids = token_ids(48, 3)
    labels = ids.clone()
    labels[1:, 8:] = IGNORED  # one long row, two short ones
    n_targets = int((labels[:, 1:] != IGNORED).sum())
    rows = [{"input_ids": ids[k : k + 1], "labels": labels[k : k + 1]} for k in range(3)]
    whole = gradients(model, {"input_ids": ids, "labels": labels})
    parts = [gradients(model, {**row, "num_items_in_batch": n_targets}) for row in rows]
    summed = {name: sum(part[1][name] for part in parts) for name in whole[1]}
    assert_same((sum(part[0] for part in parts), summed), whole, 1e-5)
    means = sum(gradients(model, row)[0] for row in rows) / 3
    assert abs(means / whole[0] - 1) > 0.01


def test_without_labels_the_forward_is_the_one_it_was() -> None:
    model, ids = tiny_model("llama"), token_ids(16)
    before = logits(model, ids)
    signature = inspect.signature(model.forward)
    use_chunked_loss(model)
    assert torch.equal(logits(model, ids), before)
    assert model(input_ids=ids).past_key_values is not None
    assert inspect.signature(model.forward) == signature  # by which Trainer chooses columns
    assert model(input_ids=ids, labels=ids, return_dict=False)[0].ndim == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_a_loss_of_its_own_weights(copied: Any) -> None:
    model, batch = tiny_model("llama"), labelled()
    use_chunked_loss(model)
    twin = copied(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.3)
    prove_loss(twin)
    assert twin(**batch).loss != model(**batch).loss
    restore_loss(twin)
    assert twin(**batch).logits is not None
    assert model(**batch).logits is None


def sharded_gradients(rank: int, folder: str) -> None:
    """One of two processes; the head is gathered by the root, or stays sharded until the loss gathers it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = []
    for sharded in ([], ["model"], ["model", "lm_head"]):
        model = tiny_model("llama")
        if sharded:
            use_chunked_loss(model)
            for name in sharded:
                torch.distributed.fsdp.fully_shard(getattr(model, name))
        torch.distributed.fsdp.fully_shard(model)
        ids = token_ids(32, seed=rank)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for chunked in found[1:]:
        for ours, stock in zip(chunked, found[0]):
            assert (ours - stock).norm() <= 1e-5 * stock.norm()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_sharded_head_is_gathered_and_its_gradient_averaged(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    torch.multiprocessing.spawn(sharded_gradients, (str(tmp_path),), nprocs=2)

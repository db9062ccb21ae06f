"""The tiled MLP: exact gradients, undone, refused where it would be wrong, and no MLP run more often than needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import tiny_model, token_ids
from torch import Tensor

from ctxext import extend_context
from ctxext.training.loss import use_chunked_loss
from ctxext.training.tiled import use_tiled_mlp

IDS = token_ids(150)
TOKENS = 37  # the last tile is shorter


def exact(family: str = "llama") -> Any:
    """In float64, so that no CPU's rounding decides."""
    return extend_context(tiny_model(family), 4, "yarn").double()


def gradients(model: Any) -> dict[str, Tensor]:
    model.train().zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() != set()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3"])
def test_logits_and_gradients_are_those_of_the_whole_mlp(family: str, checkpointed: bool) -> None:
    model = exact(family)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wanted, logits = gradients(model), model(input_ids=IDS).logits
    assert len(use_tiled_mlp(model, TOKENS).undos) == 2
    assert_same(gradients(model), wanted)
    torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-9, atol=1e-12)


def test_lora_on_the_mlp_trains_under_the_chunked_loss() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(exact(), config).double()
    use_chunked_loss(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    wanted = gradients(model)
    use_tiled_mlp(model, TOKENS)
    assert_same(gradients(model), wanted)


def test_parameters_that_are_replaced_afterwards_are_trained() -> None:
    """FSDP2 replaces them when it shards the model."""
    model, replaced = exact(), exact()
    wanted = gradients(model)
    use_tiled_mlp(replaced, TOKENS)
    for module in replaced.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
    assert_same(gradients(replaced), wanted)


def test_autocast_reaches_the_backward_pass() -> None:
    model = extend_context(tiny_model("llama"), 4, "yarn")

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(model)
        return torch.cat([gradient.flatten() for gradient in found.values()])

    wanted = under_autocast()
    use_tiled_mlp(model, TOKENS)
    assert (under_autocast() - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_token_passes_an_mlp_twice(checkpointed: bool) -> None:
    """Once forward and once to recompute it: checkpointing stops before the MLP, where it would run a third time."""
    model, seen = exact(), []
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    use_tiled_mlp(model, TOKENS)
    first = model.model.layers[0].mlp.gate_proj
    first.register_forward_hook(lambda module, given, output: seen.append(output.shape[1]))
    gradients(model)
    assert max(seen) <= TOKENS
    assert sum(seen) == 2 * IDS.shape[1]


def test_restoring_it_leaves_nothing_behind() -> None:
    model = exact()
    before = [sorted(module.__dict__) for module in model.modules()]
    edit = use_tiled_mlp(model, TOKENS)
    with pytest.raises(ValueError, match="tiled already"):
        use_tiled_mlp(model, TOKENS)
    edit.undo()
    assert [sorted(module.__dict__) for module in model.modules()] == before


def test_what_would_be_wrong_is_refused() -> None:
    model = exact()
    model.model.layers[1].mlp.act_fn = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match="dropout"):
        use_tiled_mlp(model, TOKENS)
    mixing = exact()
    mixing.model.layers[0].mlp.act_fn = torch.nn.Softmax(dim=1)  # over tokens
    with pytest.raises(ValueError, match="each token alone"):
        use_tiled_mlp(mixing, TOKENS)
    with pytest.raises(ValueError, match="each token alone"):
        use_tiled_mlp(tiny_model("gpt_oss"), TOKENS)  # its MLP returns the router's scores too
    with pytest.raises(ValueError, match="no module named mlp"):
        use_tiled_mlp(tiny_model("falcon"), TOKENS)  # its layers are elsewhere
    for model_ in (model, mixing):
        assert all("forward" not in layer.mlp.__dict__ for layer in model_.model.layers)


def test_a_second_model_of_the_class_is_untouched() -> None:
    model, other = exact(), exact()
    before = copy.copy(other.model.layers[0].mlp.__dict__)
    use_tiled_mlp(model, TOKENS)
    assert other.model.layers[0].mlp.__dict__ == before

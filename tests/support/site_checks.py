"""What the tests of the sites share: small models, a patch by hand, and a model's whole state."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ctxext.core.edit import Edit
from ctxext.core.encoding import ModuleEncoding
from ctxext.core.patch import FormulaProof
from ctxext.core.probing import probing
from ctxext.methods import ContextMethod
from ctxext.models.text_config import text_config_of

COMMON: dict[str, Any] = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def tiny(model_type: str, auto: Any = AutoModelForCausalLM, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A random model in eval mode; `fields` are its config's."""
    implementation = fields.pop("attn_implementation", None)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**COMMON, **fields})
    return auto.from_config(config, attn_implementation=implementation).eval()


def tokens(n_tokens: int, n_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, COMMON["vocab_size"], (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


class Patched:
    """A model patched by hand, as `extend_context` would."""

    def __init__(
        self, model: PreTrainedModel, encoding: ModuleEncoding, method: ContextMethod, target_length: int
    ) -> None:
        self.model = model
        self.patch = encoding.patch(method, target_length)
        with probing(model):
            self.before = self.patch.observe(model)
        config = text_config_of(model.config)
        updates = encoding.updates(method, target_length)
        self.fields = {name: getattr(config, name) for name in updates}
        for name, value in updates.items():
            setattr(config, name, value)
        self.edit = Edit(model)
        self.patch.write(self.edit, self.before)

    def prove(self) -> FormulaProof:
        with probing(self.model):
            return self.patch.prove(self.model, self.before)

    def undo(self) -> None:
        for name, value in self.fields.items():
            setattr(text_config_of(self.model.config), name, value)
        self.edit.undo()


def state(model: nn.Module) -> dict[str, Any]:
    """Classes, plain attributes, hooks, and copies of parameters and buffers, by path."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "classes": {path: type(module) for path, module in modules.items()},
        "attributes": {
            path: {k: v for k, v in module.__dict__.items() if isinstance(v, int | float | str | tuple)}
            for path, module in modules.items()
        },
        "names": {path: sorted(module.__dict__) for path, module in modules.items()},
        "hooks": {path: len(module._forward_pre_hooks) for path, module in modules.items()},
        "tensors": {
            name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        },
        "config": copy.deepcopy(model.config.to_dict()),
    }


def assert_same_state(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    tensors, earlier = after.pop("tensors"), before["tensors"]
    assert after == {key: value for key, value in before.items() if key != "tensors"}
    assert tensors.keys() == earlier.keys()
    assert all(torch.equal(t, earlier[name]) and t.dtype == earlier[name].dtype for name, t in tensors.items())


def through_pickle(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)

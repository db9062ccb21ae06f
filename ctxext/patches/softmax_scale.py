"""The softmax scale of multi-head latent attention, which includes the attention factor in some families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ctxext.core.edit import Edit
from ctxext.core.patch import Patch, Proof
from ctxext.models.text_config import text_config_of


@dataclass(frozen=True)
class SoftmaxProof(Proof):
    """The proof of the scale.

    Attributes:
        error: largest relative difference between a module's scale and the method's.
        n_modules: number of attention modules whose scale was set.
    """

    error: float
    n_modules: int

    BAR: ClassVar[float] = 1e-6

    def __str__(self) -> str:
        return f"softmax scale of {self.n_modules} attention modules matches (error {self.error:.1e})"

    def fault(self, name: str, summary: str) -> str | None:
        if not self.n_modules:
            return f"found no attention in {name} with a softmax scale that can be set."
        if not self.error <= self.BAR:
            return (
                f"the softmax scale that {name} computes from its config has a relative error of {self.error:.1e} "
                f"for {summary!r}. This family reads its config in a non-standard way."
            )
        return None


@dataclass(frozen=True)
class ScaleSoftmax(Patch):
    """Sets each attention module's scale to what its class computes from the extended config.

    Attributes:
        ratio: the method's ratio of the new scale to the current one.
    """

    needs_weights: ClassVar[bool] = False

    ratio: float

    def check(self, model: nn.Module) -> None:
        for path, module in _modules(model).items():
            stock = _stock_scale(module)
            if module.scaling != stock:
                raise ValueError(
                    f"the softmax scale of {path!r} is {module.scaling:.6g}, but its config says {stock:.6g}: it was "
                    "edited. Reload the model."
                )

    def observe(self, model: nn.Module) -> dict[str, float]:
        return {path: module.scaling for path, module in _modules(model).items()}

    def write(self, edit: Edit, before: dict[str, float]) -> None:
        for path, module in _modules(edit.model).items():
            edit.set_attribute(path, "scaling", _stock_scale(module))

    def prove(self, model: nn.Module, before: dict[str, float]) -> SoftmaxProof:
        now = self.observe(model)
        errors = [abs(now[path] / scale / self.ratio - 1) for path, scale in before.items()]
        return SoftmaxProof(max(errors, default=0.0), len(errors))


def _modules(model: Any) -> dict[str, Any]:
    config = text_config_of(model.config)
    return {
        path: module
        for path, module in model.named_modules()
        if module.__dict__.get("config") is config and isinstance(module.__dict__.get("scaling"), float)
    }


def _stock_scale(module: Any) -> float:
    with torch.device("meta"):
        return float(type(module)(module.config, module.layer_idx).scaling)

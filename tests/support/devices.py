"""Devices that a law is checked on: a CPU in a small form, and CUDA in a larger one where there is a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from families import tiny_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# The skip is a mark of its own, so that it holds without tests/conftest.py too.
ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


class Form(NamedTuple):
    """The size of a check.

    Attributes:
        trained: tokens that the model counts as trained on.
        changes: fields of the config of `tiny_model`.
    """

    device: str
    trained: int
    changes: dict[str, Any]

    @property
    def n_tokens(self) -> int:
        """Beyond twice the trained length, within four times it, and a multiple of nothing."""
        return 2 * self.trained + self.trained // 3

    def model(self, dtype: torch.dtype = torch.float32, family: str = "llama", **changes: Any) -> Any:
        """A small model with the same weights on every device; every head has keys of its own, for every kernel."""
        given = {"num_key_value_heads": self.changes.get("num_attention_heads", 4)} if family == "llama" else {}
        made = tiny_model(family, **{**given, **self.changes, "max_position_embeddings": self.trained, **changes})
        return made.to(dtype).to(self.device)  # .to(dtype) as people write it, which rounds the stock frequencies

    def ids(self, batch: int = 1, n_tokens: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, 128, (batch, n_tokens or self.n_tokens), generator=generator).to(self.device)


SMALL = Form("cpu", 64, {"initializer_range": 0.15})
# Heads of 64 dimensions, which a GPU's kernels are made for; the weights' products are as large as the small ones'.
LARGE = Form("cuda", 1024, {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 4,
    "initializer_range": 0.05,
})  # fmt: skip
every_form = pytest.mark.parametrize("form", [
    pytest.param(SMALL, id="cpu"), pytest.param(LARGE, id="cuda", marks=ON_CUDA),
])  # fmt: skip


def kernel(name: str | None) -> AbstractContextManager[Any]:
    """sdpa with this kernel alone: it raises where the kernel cannot be used."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
    }  # fmt: skip
    return nullcontext() if name is None else sdpa_kernel(backends[name])


def off(found: Tensor, wanted: Tensor) -> float:
    """The root mean square of the difference, over that of what was wanted about its mean."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).square().mean().sqrt() / wanted.std())


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **given: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **given).logits


@torch.no_grad()
def in_chunks(model: nn.Module, ids: Tensor, chunks: list[int], cache: Any = None) -> Tensor:
    """The logits read `chunks` tokens at a time over a cache."""
    found = []
    for piece in ids.split(chunks, dim=1):
        output = model(input_ids=piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, dim=1)

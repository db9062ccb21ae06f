"""GPT-J's and CodeGen's rotary embedding: a table of sines and cosines in each attention layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.core.consumed import Readers, are_read
from ctxext.core.edit import Edit
from ctxext.core.patch import Patch
from ctxext.encodings.rope import RopeGeometry, cos_sin
from ctxext.patches.rotary import SIN_COS, RotaryProof


@dataclass(frozen=True)
class GrowSinCos(Patch):
    """Replaces the tables by longer, scaled ones.

    Attributes:
        rope: the frequencies of the current tables.
        extended: those of the new tables.
    """

    rope: RopeGeometry
    extended: RopeGeometry
    target_length: int

    def check(self, model: nn.Module) -> None:
        if not sin_cos_paths(model):
            raise ValueError(f"found no table of sines and cosines in {type(model).__name__}.")
        for path in sin_cos_paths(model):
            held = model.get_submodule(path).get_buffer(SIN_COS)
            error = _error(held, sin_cos_table(len(held), self.rope))
            if not error <= (1e-3 if held.dtype == torch.float32 else 2e-2):
                raise ValueError(
                    f"the table of {path!r} differs from RoPE with base 10000 by {error:.1e}: it was edited. "
                    "Reload the model."
                )

    def write(self, edit: Edit, before: Any) -> None:
        # In float32 whatever the model's dtype, as in a stock model loaded in that dtype.
        table = sin_cos_table(self.target_length, self.extended)
        for path in sin_cos_paths(edit.model):
            edit.set_tensor(path, SIN_COS, table.clone())  # each layer has its own
            edit.set_attribute(path, "max_positions", self.target_length)

    def prove(self, model: nn.Module, before: Any) -> RotaryProof:
        paths, expected = sin_cos_paths(model), sin_cos_table(self.target_length, self.extended)
        error = max(_error(model.get_submodule(path).get_buffer(SIN_COS), expected) for path in paths)
        return RotaryProof(error, error, Readers(reading=tuple(paths) if are_read(model, paths, SIN_COS) else ()))


def sin_cos_paths(model: nn.Module) -> list[str]:
    """The attention modules with a table."""
    return [path for path, module in model.named_modules() if isinstance(module._buffers.get(SIN_COS), Tensor)]


def sin_cos_table(n_rows: int, rope: RopeGeometry) -> Float[Tensor, "row two_pairs"]:
    """The sines, then the cosines, of positions 0 to `n_rows` - 1, in float32 as GPT-J computes them."""
    cos, sin = cos_sin(torch.arange(n_rows), rope.inv_freq.float(), rope.attention_factor)
    return torch.cat([sin, cos], dim=-1)


def _error(held: Tensor, expected: Tensor) -> float:
    if held.shape != expected.shape:
        return math.inf
    return float((held.detach().cpu().float() - expected.to(held.dtype).float()).abs().max())

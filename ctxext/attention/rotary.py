"""The rotary embedding for in-attention RoPE: returns the identity rotation, and holds the real frequencies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ctxext.core.rotary_module import ExtendedRotary
from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import ContextMethod, RopeScaling


@dataclass(frozen=True)
class Convention:
    """How a layer rotates: which two dimensions form a pair, and the direction.

    "none" is a layer without RoPE.
    """

    pairs: Literal["half_split", "interleaved", "none"] = "half_split"
    sign: int = 1


@dataclass(frozen=True)
class Layer:
    """In-attention RoPE of one layer.

    Attributes:
        convention: how queries and keys are rotated.
        within: its sliding window is at most the trained length, so its RoPE is unchanged.
    """

    convention: Convention
    within: bool


class InAttentionRotary(ExtendedRotary):
    """Mixin for a family's rotary class: returns cos = 1 and sin = 0, and holds what attention needs.

    Attributes:
        method: the method; None for the stock frequencies, as in the proof.
        rope: the RoPE that the method starts from.
        in_use: the frequencies before the extension, which layers with a short window keep.
        layers: the layers, by index.
        attend: the model's own attention function.
        additive_masks: whether it takes additive masks, as eager attention does.
        rotated_copy: whether caches store a rotated copy of their keys for decoding.
        owner: the identifier of this extension in caches.
        phases: the dtype of angles, cos and sin: float32, and float64 in a float64 model.
    """

    method: ContextMethod | None
    rope: RopeGeometry
    in_use: RopeGeometry
    layers: dict[int, Layer]
    attend: Callable[..., Any]
    additive_masks: bool
    rotated_copy: bool
    owner: str
    phases: torch.dtype

    # Float32 and integer buffers, which follow the module's device; `exact` undoes casts.
    rung_inv_freq: Tensor
    rung_scaling: Tensor
    rung_lengths: Tensor
    start_inv_freq: Tensor
    in_use_inv_freq: Tensor

    def set_method(self, method: ContextMethod | None, rope: RopeGeometry) -> None:
        """Compute the tables in float64, and round them once."""
        self.method, self.rope = method, rope
        if isinstance(method, RopeScaling):
            lengths = method.ladder(rope)
            inv_freq, scalings = method.scaled(rope, lengths)
        else:
            lengths = torch.tensor([rope.original_max_position_embeddings])
            inv_freq, scalings = rope.inv_freq[None], torch.tensor([rope.attention_factor], dtype=torch.float64)
        tables = {
            "rung_inv_freq": inv_freq.float(),
            "rung_scaling": scalings.float(),
            "rung_lengths": lengths,
            "start_inv_freq": rope.inv_freq.float(),
            "in_use_inv_freq": self.in_use.inv_freq.float(),
        }
        self.exact.update(tables)
        device = self.inv_freq.device  # type: ignore[attr-defined]
        for name, table in tables.items():
            self.register_buffer(name, table.to(device, copy=True), persistent=False)  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.phases = torch.promote_types(torch.float32, fn(torch.empty(0, dtype=self.phases)).dtype)
        return super()._apply(fn, recurse)

    @staticmethod
    def adjust_forward(plain: Any) -> Any:
        """The family's forward at position 0, where every rotation is the identity."""

        @torch.no_grad()
        def forward(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            return plain(self, x, torch.zeros_like(position_ids), *args, **kwargs)

        return forward

    # ---------------------------------------------------------------------------------- cos and sin

    def rungs(self, positions: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """The ladder rung of each position."""
        last = self.rung_lengths.shape[0] - 1
        return torch.searchsorted(self.rung_lengths.to(positions.device), positions + 1).clamp(max=last)

    def as_it_was(self, positions: Shaped[Tensor, "batch n"]) -> tuple[Tensor, Tensor]:
        """cos and sin before the extension, of shape (batch, n, pair)."""
        return self._cos_sin(positions, self.in_use_inv_freq, self.in_use.attention_factor)

    def plain(self, positions: Shaped[Tensor, "batch n"]) -> tuple[Tensor, Tensor]:
        """cos and sin with the frequencies that the method starts from, of shape (batch, n, pair)."""
        return self._cos_sin(positions, self.start_inv_freq, self.rope.attention_factor)

    def scaled(
        self, positions: Int[Tensor, "batch n"], inv_freq: Float[Tensor, "batch pair"], scaling: Float[Tensor, " batch"]
    ) -> tuple[Tensor, Tensor]:
        """cos and sin with frequencies and a multiplier for each row, of shape (batch, n, pair)."""
        cos, sin = self._cos_sin(positions, inv_freq[:, None], scaling[:, None, None])
        start = self.method.start_tokens if isinstance(self.method, RopeScaling) else 0
        if start:
            plain_cos, plain_sin = self.plain(positions)
            first = (positions < start)[..., None]
            cos, sin = torch.where(first, plain_cos, cos), torch.where(first, plain_sin, sin)
        return cos, sin

    def of_rung(self, rung: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """Frequencies (batch, pair) and multiplier (batch) of a rung for each row."""
        device = rung.device
        return self.rung_inv_freq.to(device)[rung], self.rung_scaling.to(device)[rung]

    def of_length(self, length: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """Frequencies (batch, pair) and multiplier (batch) of a method whose scale depends on the whole call."""
        assert isinstance(self.method, RopeScaling)
        inv_freq, scaling = self.method.scaled(self.rope, length.cpu())
        return inv_freq.float().to(length.device), scaling.float().to(length.device)

    def _cos_sin(self, positions: Tensor, inv_freq: Tensor, times: float | Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].to(self.phases) * inv_freq.to(positions.device)
        return angles.cos() * times, angles.sin() * times


def rotate(
    x: Float[Tensor, "batch heads n dim"],
    cos_sin: tuple[Float[Tensor, "#batch n pair"], Float[Tensor, "#batch n pair"]],
    convention: Convention,
    room: Float[Tensor, "batch heads n dim"] | None = None,
) -> Float[Tensor, "batch heads n dim"]:
    """Rotate the first 2 · pair dimensions of each head, in float32; the others are unchanged.

    Args:
        room: a float32 buffer for the result, used if no gradient is needed.
    """
    cos, sin = cos_sin[0][:, None], cos_sin[1][:, None] * convention.sign
    n_pairs = cos.shape[-1]
    exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    first, second = _of_pairs(exact, n_pairs, convention)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        turned = [first * cos - second * sin, second * cos + first * sin]
        if convention.pairs == "interleaved":
            turned = [torch.stack(turned, dim=-1).flatten(-2)]
        return torch.cat([*turned, exact[..., 2 * n_pairs :]], dim=-1).to(x.dtype)
    # The same without intermediate tensors, in pieces that fit a core's cache.
    result = room if room is not None and exact.dtype == room.dtype else exact.new_empty(exact.shape)
    step = 512 if x.device.type == "cpu" else x.shape[2]
    for start in range(0, x.shape[2], step):
        one, other, c, s, out = (t[:, :, start : start + step] for t in (first, second, cos, sin, result))
        low, high = _of_pairs(out, n_pairs, convention)
        torch.mul(one, c, out=low).addcmul_(other, s, value=-1)
        torch.mul(other, c, out=high).addcmul_(one, s)
    result[..., 2 * n_pairs :] = exact[..., 2 * n_pairs :]
    return result.to(x.dtype)


def _of_pairs(x: Tensor, n_pairs: int, convention: Convention) -> tuple[Tensor, Tensor]:
    """The first and the second dimension of each pair."""
    if convention.pairs == "half_split":
        return x[..., :n_pairs], x[..., n_pairs : 2 * n_pairs]
    return x[..., 0 : 2 * n_pairs : 2], x[..., 1 : 2 * n_pairs : 2]

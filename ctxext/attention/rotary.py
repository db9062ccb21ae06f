"""The rotary embedding for in-attention RoPE: returns the identity rotation, and holds the real frequencies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from ctxext.core.rotary_module import ExtendedRotary, of_label
from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import RopeMethod, RopeScaling

# Numbers of a tile that is rotated at once on a CPU: 512 KiB in float32.
TILE = 2**17


@dataclass(frozen=True)
class Convention:
    """How a layer rotates: which two dimensions form a pair, the direction, and which dimensions of a head.

    Attributes:
        pairs: "none" is a layer without RoPE.
        last: whether the last dimensions of a head rotate, as in latent attention, and not the first.
    """

    pairs: Literal["half_split", "interleaved", "none"] = "half_split"
    sign: int = 1
    last: bool = False


@dataclass(frozen=True)
class Layer:
    """In-attention RoPE of one layer.

    Attributes:
        label: the layer type whose table it uses; "" for the only one.
        convention: how queries and keys are rotated.
        within: its sliding window is at most the trained length, so its RoPE is unchanged.
    """

    label: str
    convention: Convention
    within: bool


class InAttentionRotary(ExtendedRotary):
    """Mixin for a family's rotary class: returns cos = 1 and sin = 0, and holds what attention needs.

    Attributes:
        method: the method; None for the stock frequencies, as in the proof.
        ropes: by label, the RoPE that the method starts from, of the layers that see beyond the trained length.
        in_use: by label, the frequencies before the extension, which layers with a short window keep.
        pairs: by label, how many pairs a head has, of which the last may not rotate (proportional RoPE).
        layers: the layers, by index.
        attend: the model's own attention function.
        implementation: its name, such as "sdpa", which says what masks it takes.
        owner: the identifier of this extension in caches.
        gives_keys_on: whether the last layers attend to the keys of earlier ones, as in Gemma 3n.
        phases: the dtype of angles, cos and sin: float32, and float64 in a float64 model.
    """

    method: RopeMethod | None
    ropes: dict[str, RopeGeometry]
    in_use: dict[str, RopeGeometry]
    pairs: dict[str, int]
    layers: dict[int, Layer]
    attend: Callable[..., Any]
    implementation: str
    owner: str
    gives_keys_on: bool
    phases: torch.dtype

    def set_method(self, method: RopeMethod | None, ropes: dict[str, RopeGeometry]) -> None:
        """Compute the tables in float64, and round them once.

        They are float32 and integer buffers, which follow the module's device; `exact` undoes casts.
        """
        self.method, self.ropes = method, ropes
        inner = self.untempered
        for label, before in self.in_use.items():
            self._store(label, in_use_inv_freq=self.padded(label, before.inv_freq).float())
        for label, rope in ropes.items():
            if isinstance(inner, RopeScaling):
                lengths = inner.ladder(rope)
                inv_freq, scalings = inner.scaled(rope, lengths)
            else:
                lengths = torch.tensor([rope.original_max_position_embeddings])
                inv_freq, scalings = rope.inv_freq[None], torch.tensor([rope.attention_factor], dtype=torch.float64)
            self._store(
                label,
                rung_inv_freq=self.padded(label, inv_freq).float(),
                rung_scaling=scalings.float(),
                rung_lengths=lengths,
                start_inv_freq=self.padded(label, rope.inv_freq).float(),
            )

    @property
    def untempered(self) -> RopeMethod | None:
        """The method that gives frequencies and positions."""
        return None if self.method is None else self.method.untempered

    def _store(self, label: str, **tables: Tensor) -> None:
        device = next(iter(self.buffers())).device  # type: ignore[attr-defined]
        for name, table in tables.items():
            self.exact[of_label(label, name)] = table
            self.register_buffer(of_label(label, name), table.to(device, copy=True), persistent=False)  # type: ignore[attr-defined]

    def padded(self, label: str, inv_freq: Tensor) -> Tensor:
        """With zeros for the pairs that do not rotate."""
        return nn.functional.pad(inv_freq, (0, self.pairs[label] - inv_freq.shape[-1]))

    def of(self, label: str) -> Tables:
        """The tables of a layer type."""
        return Tables(self, label)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.phases = torch.promote_types(torch.float32, fn(torch.empty(0, dtype=self.phases)).dtype)
        return super()._apply(fn, recurse)

    @staticmethod
    def adjust_forward(plain: Any) -> Any:
        """The family's forward at position 0, where every rotation is the identity."""

        @torch.no_grad()
        def forward(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = plain(self, x, torch.zeros_like(position_ids), *args, **kwargs)
            # PhiMoE multiplies cos and sin by a field of its config.
            return (torch.ones_like(found[0]), found[1]) if isinstance(found, tuple) else found

        return forward


@dataclass(frozen=True)
class Tables:
    """cos and sin of the layers of one type."""

    rotary: InAttentionRotary
    label: str

    def _buffer(self, name: str) -> Tensor:
        found: Tensor = getattr(self.rotary, of_label(self.label, name))
        return found

    @property
    def rope(self) -> RopeGeometry:
        """The RoPE that the method starts from."""
        return self.rotary.ropes[self.label]

    @property
    def n_rungs(self) -> int:
        """Rungs of the method's ladder of lengths."""
        return self._buffer("rung_lengths").shape[0]

    def rungs(self, positions: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """The ladder rung of each position."""
        lengths = self._buffer("rung_lengths").to(positions.device)
        return torch.searchsorted(lengths, positions + 1).clamp(max=self.n_rungs - 1)

    def as_it_was(self, positions: Shaped[Tensor, "batch n"]) -> tuple[Tensor, Tensor]:
        """cos and sin before the extension, of shape (batch, n, pair)."""
        before = self.rotary.in_use[self.label]
        return self._cos_sin(positions, self._buffer("in_use_inv_freq"), before.attention_factor)

    def plain(self, positions: Shaped[Tensor, "batch n"]) -> tuple[Tensor, Tensor]:
        """cos and sin with the frequencies that the method starts from, of shape (batch, n, pair)."""
        return self._cos_sin(positions, self._buffer("start_inv_freq"), self.rope.attention_factor)

    def scaled(
        self, positions: Int[Tensor, "batch n"], inv_freq: Float[Tensor, "batch pair"], scaling: Float[Tensor, " batch"]
    ) -> tuple[Tensor, Tensor]:
        """cos and sin with frequencies and a multiplier for each row, of shape (batch, n, pair)."""
        cos, sin = self._cos_sin(positions, inv_freq[:, None], scaling[:, None, None])
        method = self.rotary.untempered
        start = method.start_tokens if isinstance(method, RopeScaling) else 0
        if start:
            plain_cos, plain_sin = self.plain(positions)
            first = (positions < start)[..., None]
            cos, sin = torch.where(first, plain_cos, cos), torch.where(first, plain_sin, sin)
        return cos, sin

    def of_rung(self, rung: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """Frequencies (batch, pair) and multiplier (batch) of a rung for each row."""
        inv_freq, scaling = self._buffer("rung_inv_freq"), self._buffer("rung_scaling")
        return inv_freq.to(rung.device)[rung], scaling.to(rung.device)[rung]

    def of_length(self, length: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """Frequencies (batch, pair) and multiplier (batch) of a method whose scale depends on the whole call."""
        method = self.rotary.untempered
        assert isinstance(method, RopeScaling)
        inv_freq, scaling = method.scaled(self.rope, length.cpu())
        padded = self.rotary.padded(self.label, inv_freq)
        return padded.float().to(length.device), scaling.float().to(length.device)

    def _cos_sin(self, positions: Tensor, inv_freq: Tensor, times: float | Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].to(self.rotary.phases) * inv_freq.to(positions.device)
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if isinstance(times, float) and times == 1 else (cos * times, sin * times)


CosSin = tuple[Float[Tensor, "#batch n pair"], Float[Tensor, "#batch n pair"]]


def change(before: CosSin, after: CosSin) -> CosSin:
    """cos and sin of the rotation that turns what is rotated by `before` into what is rotated by `after`."""
    (cos, sin), (to_cos, to_sin) = before, after
    size = cos.square() + sin.square()
    return (to_cos * cos + to_sin * sin) / size, (to_sin * cos - to_cos * sin) / size


def rotate(
    x: Float[Tensor, "batch heads n dim"],
    cos_sin: CosSin,
    convention: Convention,
) -> Float[Tensor, "batch heads n dim"]:
    """Rotate the first 2 · pair dimensions of each head (or the last), in float32; the others are unchanged."""
    if at_once(x):
        return rotate_at_once(x, widened(cos_sin, convention), convention)
    # Tile by tile, with one tile in float32 at a time.
    exact, (batch, heads, n, dim) = torch.promote_types(x.dtype, torch.float32), x.shape
    turning, still = _dimensions(dim, 2 * cos_sin[0].shape[-1], convention)
    result = torch.empty_like(x)
    step = max(16, TILE // (batch * heads * dim)) if x.device.type == "cpu" else n
    size = min(step, n) if x.dtype != exact else 0
    before, after = (x.new_empty((batch, heads, size, dim), dtype=exact) for _ in range(2))
    for tile, cos, sin, place in zip(
        *(each.split(step, 2) for each in (x, cos_sin[0][:, None], cos_sin[1][:, None], result))
    ):
        out = place
        if size:
            tile, out = before[:, :, : tile.shape[2]].copy_(tile), after[:, :, : tile.shape[2]]
        (first, second), (low, high) = (_of_pairs(each[..., turning], convention) for each in (tile, out))
        torch.mul(first, cos, out=low).addcmul_(second, sin, value=-convention.sign)
        torch.mul(second, cos, out=high).addcmul_(first, sin, value=convention.sign)
        if still.start < still.stop:
            out[..., still] = tile[..., still]
        if size:
            place.copy_(out)
    return result


def at_once(x: Tensor) -> bool:
    """Whether `rotate` computes all of `x` at once."""
    return x.numel() <= TILE or torch.is_grad_enabled() or torch.compiler.is_compiling()


def widened(cos_sin: CosSin, convention: Convention) -> tuple[Tensor, Tensor]:
    """The multipliers of each dimension, and of the other one of its pair, of shape (batch, 1, n, 2 · pair)."""
    cos, sin = cos_sin[0], cos_sin[1] * convention.sign
    if convention.pairs == "interleaved":
        own, others = (torch.stack(parts, dim=-1).flatten(-2) for parts in ((cos, cos), (-sin, sin)))
    else:
        own, others = (torch.cat(parts, dim=-1) for parts in ((cos, cos), (-sin, sin)))
    return own[:, None], others[:, None]


def rotate_at_once(
    x: Float[Tensor, "*#heads n dim"], wide: tuple[Tensor, Tensor], convention: Convention, in_place: bool = False
) -> Float[Tensor, "*heads n dim"]:
    """`rotate` with what `widened` made of cos and sin, with which `x` is broadcast, unless it is rotated in place."""
    own, others = wide
    dim, n_turning = x.shape[-1], own.shape[-1]
    turning, still = _dimensions(dim, n_turning, convention)
    before = x if n_turning == dim else x[..., turning]
    if torch.is_grad_enabled():  # whose sum of both products' gradients is in float32, too
        before = before.to(torch.promote_types(x.dtype, torch.float32))
    if convention.pairs == "interleaved":
        partners = before.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = before.roll(n_turning // 2, -1)
    if in_place:
        torch.addcmul(before * own, partners, others, out=before)
        return x
    turned = torch.addcmul(before * own, partners, others).to(x.dtype)
    if n_turning == dim:
        return turned
    rest = x[..., still].expand(*turned.shape[:-1], -1)
    return torch.cat([rest, turned] if convention.last else [turned, rest], dim=-1)


def _dimensions(dim: int, n_turning: int, convention: Convention) -> tuple[slice, slice]:
    """The dimensions of a head that rotate, and the others."""
    if convention.last:
        return slice(dim - n_turning, dim), slice(0, dim - n_turning)
    return slice(0, n_turning), slice(n_turning, dim)


def _of_pairs(x: Tensor, convention: Convention) -> tuple[Tensor, Tensor]:
    """The first and the second dimension of each pair."""
    if convention.pairs == "half_split":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., 0::2], x[..., 1::2]

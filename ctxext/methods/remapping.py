"""Training-free methods that map distances beyond the trained length to trained ones, inside attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods.contract import Branch, Paper, PositionRemapping, check_attention_factor, register
from ctxext.utils.values import reached


def _as_it_is(positions: Tensor) -> Tensor:
    return positions


@dataclass(frozen=True, kw_only=True)
class _Windowed(PositionRemapping):
    """Its options that are whole numbers are lengths in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in fields(self):
            if field.type == "int | None":
                self._tokens(field.name, 1)

    def _tokens(self, name: str, default: int, below: float = math.inf, most: float = math.inf) -> int:
        """The option `name`, or its default."""
        value = getattr(self, name)
        value = default if value is None else value
        if not 1 <= value < below or value > most:
            end = "" if below == math.inf else f" and below the trained length of {below}"
            end += "" if most == math.inf else f" and at most the trained length of {most}"
            raise ValueError(
                f"{name} must be a number of tokens >= 1{end}, got {value!r}. Leave it out to use the default."
            )
        return int(value)


@register("self_extend")
@dataclass(frozen=True, kw_only=True)
class SelfExtend(_Windowed):
    """Distances d < window are kept; beyond, positions are floor-divided by group_size and shifted to be continuous.

    Jin et al. (2024), equation 4: q = p // G + W - W/G and k = p // G where p_q - p_k >= W.

    Attributes:
        group_size: G; None takes the smallest G with W + (n - W)/G <= 2/3 of the trained length, for n = factor times
            that length (the authors' rule).
        window: W in tokens, the range of exact distances; None takes a quarter of the trained length.
    """

    paper: ClassVar[Paper] = Paper("Self-Extend", 2024, "https://arxiv.org/abs/2401.01325")

    group_size: int | None = None
    window: int | None = None

    def sizes(self, rope: RopeGeometry) -> dict[str, int]:
        trained = rope.original_max_position_embeddings
        window = self._tokens("window", max(1, trained // 4), trained)
        group_size = self.group_size
        if group_size is None:
            # In thirds of a token, because 2/3 is not exact in floating point.
            beyond = reached(self.factor, trained) - window
            group_size = max(1, -(-3 * beyond // max(3, 2 * trained - 3 * window)))
        return {"group_size": group_size, "window": window}

    def branches(self, rope: RopeGeometry) -> tuple[Branch, ...]:
        group, window = self.sizes(rope).values()
        shift = window - window / group

        def grouped(positions: Tensor) -> Tensor:
            return positions.div(group, rounding_mode="floor")

        near = Branch(-math.inf, window, _as_it_is, _as_it_is, _as_it_is)
        return near, Branch(window, math.inf, _as_it_is, lambda positions: grouped(positions) + shift, grouped)

    def reach(self, rope: RopeGeometry) -> float:
        group, window = self.sizes(rope).values()
        return (rope.original_max_position_embeddings - window) * group + window

    def check_reach(self, rope: RopeGeometry, target_length: int) -> None:
        group, window = self.sizes(rope).values()
        if self.reach(rope) < target_length:
            trained = rope.original_max_position_embeddings
            needed = math.ceil((target_length - window) / (trained - window))
            raise ValueError(
                f"self_extend with group_size={group} and window={window} covers {self.reach(rope):.0f} tokens from "
                f"{trained}, not {target_length}. Pass group_size={needed}, or leave group_size out."
            )


@register("rerope")
@dataclass(frozen=True, kw_only=True)
class ReRoPE(_Windowed):
    """Distances d < window are kept, larger ones become window. Su (2023).

    Attributes:
        window: in tokens; None takes a quarter of the trained length.
        log_n: multiply each query beyond the trained length L by ln(position + 1) / ln(L), as the author's code does.
    """

    paper: ClassVar[Paper] = Paper("Rectified RoPE", 2023, "https://kexue.fm/archives/9708")

    window: int | None = None
    log_n: bool = True

    def sizes(self, rope: RopeGeometry) -> dict[str, int]:
        trained = rope.original_max_position_embeddings
        return {"window": self._tokens("window", max(1, trained // 4), trained)}

    def branches(self, rope: RopeGeometry) -> tuple[Branch, ...]:
        window = self.sizes(rope)["window"]
        near = Branch(-math.inf, window, _as_it_is, _as_it_is, _as_it_is)
        far = Branch(
            window, math.inf, _as_it_is, lambda positions: torch.full_like(positions, window), torch.zeros_like
        )
        return near, far

    def reach(self, rope: RopeGeometry) -> float:
        return math.inf

    def query_scaling(self, rope: RopeGeometry, positions: Tensor) -> Tensor | None:
        if not self.log_n:
            return None
        return ((positions.double() + 1).log() / math.log(rope.original_max_position_embeddings)).clamp(min=1)


@register("string")
@dataclass(frozen=True, kw_only=True)
class STRING(_Windowed):
    """Distances d < shift are kept; beyond, they become d - shift + window. An et al. (2024), equation 3.

    It replaces the largest distances, which training hardly saw, by smaller ones: it changes a model within its trained
    length (factor 1) too, and reaches less than twice that length.

    Attributes:
        shift: S in tokens; None takes a third of the trained length, and what the factor needs if that is more. The
            authors suggest 0.25 to 0.4 of it.
        window: W in tokens, the distance that S becomes; None takes 128, at most a sixteenth of the trained length.
            The authors suggest 128 to 512.
        attention_factor: multiplies queries and keys. 1 in the paper; the authors' code takes 0.1 ln 2 + 1.
    """

    paper: ClassVar[Paper] = Paper("STRING: shifted rotary positions", 2024, "https://arxiv.org/abs/2410.18745")
    changes_trained: ClassVar[bool] = True

    shift: int | None = None
    window: int | None = None
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_attention_factor(self.attention_factor)

    @classmethod
    def example(cls, rope: RopeGeometry, factor: float) -> STRING:
        """Up to the largest factor that it reaches."""
        return cls(factor=min(factor, cls(factor=factor)._largest_factor(rope)))

    def _largest_factor(self, rope: RopeGeometry) -> float:
        """With S at most the trained length."""
        return 2 - self._window(rope) / rope.original_max_position_embeddings

    def _window(self, rope: RopeGeometry) -> int:
        trained = rope.original_max_position_embeddings
        return self._tokens("window", min(128, max(1, trained // 16)), trained)

    def sizes(self, rope: RopeGeometry) -> dict[str, int]:
        trained, window = rope.original_max_position_embeddings, self._window(rope)
        needed = math.ceil((self.factor - 1) * trained) + window
        shift = self._tokens("shift", min(max(trained // 3, needed), trained), most=trained)
        if shift <= window:
            raise ValueError(
                f"shift must be larger than window, got {shift} and {window}. Leave both out to use the defaults."
            )
        return {"shift": shift, "window": window}

    def branches(self, rope: RopeGeometry) -> tuple[Branch, ...]:
        shift, window = self.sizes(rope).values()
        near = Branch(-math.inf, shift, _as_it_is, _as_it_is, _as_it_is)
        return near, Branch(shift, math.inf, _as_it_is, lambda positions: positions - shift + window, _as_it_is)

    def reach(self, rope: RopeGeometry) -> float:
        shift, window = self.sizes(rope).values()
        return rope.original_max_position_embeddings + shift - window

    def check_reach(self, rope: RopeGeometry, target_length: int) -> None:
        if self.reach(rope) < target_length:
            shift, window = self.sizes(rope).values()
            trained = rope.original_max_position_embeddings
            default = replace(self, shift=None, window=None)
            given = " and ".join(name for name in ("shift", "window") if getattr(self, name) is not None)
            most = math.floor(100 * default._largest_factor(rope)) / 100
            remedy = f"Pass a factor up to {most:g}; beyond, use 'self_extend' or 'dca'"
            if default.reach(rope) >= target_length:
                remedy = f"Leave {given} out"
            raise ValueError(
                f"string with shift={shift} and window={window} covers {self.reach(rope):.0f} tokens from {trained}, "
                f"not {target_length}. {remedy}."
            )

    def query_scaling(self, rope: RopeGeometry, positions: Tensor) -> Tensor | None:
        if self.attention_factor == 1:
            return None
        return torch.full(positions.shape, self.attention_factor**2, dtype=torch.float64, device=positions.device)


@register("dca", aliases=["dual_chunk"])
@dataclass(frozen=True, kw_only=True)
class DualChunkAttention(_Windowed):
    """Keys at p mod c; queries at p mod c, min(p mod c + c, s) or s, for the same, the previous and earlier chunks.

    An et al. (2024), section 3, with s the chunk size and c = s - local_window, as in the authors' code.

    Attributes:
        chunk_size: s in tokens, the largest distance; None takes three quarters of the trained length.
        local_window: tokens up to which every distance is exact, if it is at most half of chunk_size; None takes an
            eighth of the trained length.
    """

    paper: ClassVar[Paper] = Paper("Dual Chunk Attention (ChunkLlama)", 2024, "https://arxiv.org/abs/2402.17463")

    chunk_size: int | None = None
    local_window: int | None = None

    def sizes(self, rope: RopeGeometry) -> dict[str, int]:
        trained = rope.original_max_position_embeddings
        size = self._tokens("chunk_size", trained * 3 // 4, trained)
        local = self._tokens("local_window", max(1, trained // 8))
        if local >= size:
            raise ValueError(
                f"local_window must be smaller than chunk_size, got {local} and {size}. Leave both out to use the "
                "defaults."
            )
        return {"chunk_size": size, "local_window": local}

    def branches(self, rope: RopeGeometry) -> tuple[Branch, ...]:
        size, local = self.sizes(rope).values()
        step = size - local

        def chunk(positions: Tensor) -> Tensor:
            return positions.div(step, rounding_mode="floor")

        def within(positions: Tensor) -> Tensor:
            return positions % step

        return (
            Branch(-math.inf, 1, chunk, within, within),
            Branch(1, 2, chunk, lambda positions: (within(positions) + step).clamp(max=size), within),
            Branch(2, math.inf, chunk, lambda positions: torch.full_like(positions, min(2 * step - 1, size)), within),
        )

    def reach(self, rope: RopeGeometry) -> float:
        return math.inf

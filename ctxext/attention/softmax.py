"""Exact attention in blocks of queries, for methods with pair-dependent rotations.

Memory is linear in the number of keys. With the CPU's fused kernel, each branch is one call and the results are merged
by their log-sum-exp; otherwise, and with gradients, softcaps or dropout, one softmax runs over the scores of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.attention.masks import Rows

# The most scores held at once without the fused kernel: 64 MiB in float32.
SCORES = 2**24
# Queries per block: fewer run slower, more waste work above the diagonal.
BLOCK = 512


@dataclass(frozen=True)
class Part:
    """The attention of a block of queries to keys within one branch.

    Attributes:
        query: rotated, of shape (batch, heads, rows, head_dim).
        key: rotated, of shape (batch, key heads, keys, head_dim).
        holds: whether each pair of a row and a key from `start` to `stop` is in the branch, bool of shape (batch, 1,
            rows, keys); None if all are.
        possible, certain: columns that contain all its pairs, and columns where every pair is in it.
    """

    query: Tensor
    key: Tensor
    holds: Callable[[int, int], Tensor] | None = None
    possible: tuple[int, int] | None = None
    certain: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """The softmax of a layer.

    Attributes:
        scaling: the scale of the scores.
        softcap: c in c · tanh(score / c), as Gemma 2 has it.
        sinks: a score per head that takes weight without a value, as in gpt-oss.
        dropout: the dropout of the weights.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    def fused(self, query: Tensor) -> bool:
        """Whether the CPU's fused kernel can be used; its log-sum-exp has no gradient."""
        return (
            query.device.type == "cpu"
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and self.softcap is None
            and self.dropout == 0.0
        )

    def block_size(self, query: Tensor, n_keys: int) -> int:
        """The number of queries per block."""
        if torch.compiler.is_compiling():
            return query.shape[2]
        if self.fused(query):
            return BLOCK
        return max(16, min(BLOCK, SCORES // (query.shape[0] * query.shape[1] * n_keys)))

    def __call__(self, parts: list[Part], value: Tensor, rows: Rows) -> Float[Tensor, "batch rows heads dim"]:
        """The attention output of a block of queries; `parts` contain every pair exactly once."""
        run = self._merged if self.fused(parts[0].query) else self._plain
        return run(parts, value, rows).transpose(1, 2)

    def _merged(self, parts: list[Part], value: Tensor, rows: Rows) -> Tensor:
        found: Any = None
        total: Any = None
        for part in parts:
            for start, stop, masked in _pieces(part, rows):
                mask = _both(rows.block(start, stop), part.holds and part.holds(start, stop)) if masked else None
                output, weight = _fused(part.query, part.key, value, start, stop, mask, self.scaling)
                if total is None:
                    found, total = output, weight
                    continue
                both = torch.logaddexp(total, weight)
                # Both are -inf for a row without keys so far.
                share = (weight - both).exp_().nan_to_num_(nan=0.0)[..., None].to(output.dtype)
                found, total = torch.lerp(found, output, share), both
        if found is None:
            return torch.zeros_like(parts[0].query[..., : value.shape[-1]])
        if self.sinks is not None:
            sinks = self.sinks.to(total.dtype)[None, :, None]
            found = found * (total - torch.logaddexp(total, sinks)).exp_()[..., None].to(found.dtype)
        return found

    def _plain(self, parts: list[Part], value: Tensor, rows: Rows) -> Tensor:
        query = parts[0].query
        batch, heads, n_rows, _ = query.shape
        n_keys, key_heads = rows.stop, value.shape[1]
        scores: Any = None
        for part in parts:
            grouped = part.query.reshape(batch, key_heads, -1, query.shape[-1])
            found = (grouped @ part.key[:, :, :n_keys].transpose(-1, -2)).view(batch, heads, n_rows, n_keys)
            scores = found if scores is None else torch.where(part.holds(0, n_keys), found, scores)  # type: ignore[misc]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.scaling
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        mask = rows.block(0, n_keys)
        lowest = torch.finfo(scores.dtype).min
        if mask is not None:
            scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[None, :, None, None].expand(batch, -1, n_rows, 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        weights = torch.nn.functional.dropout(weights, self.dropout, training=self.dropout > 0).to(value.dtype)
        grouped = weights.view(batch, key_heads, -1, n_keys)
        return (grouped @ value[:, :, :n_keys]).view(batch, heads, n_rows, value.shape[-1])


def _pieces(part: Part, rows: Rows) -> list[tuple[int, int, bool]]:
    """The columns of a part as (start, stop, whether some pair may be masked)."""
    start, stop = part.possible or (0, rows.stop)
    stop = min(stop, rows.stop)
    if part.holds is None:
        low, high = start, min(stop, rows.certain)
    else:
        low, high = part.certain or (start, start)
        low, high = max(start, low), min(stop, high, rows.certain)
    split = [(start, low, True), (low, high, False), (high, stop, True)]
    pieces = split if low < high else [(start, stop, True)]
    return [piece for piece in pieces if piece[1] > piece[0]]


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Combine two masks, the first bool or additive, the second bool."""
    if one is None or other is None:
        return other if one is None else one
    if one.dtype == torch.bool:
        return one & other
    return one.masked_fill(~other, float("-inf"))


def _fused(
    query: Tensor, key: Tensor, value: Tensor, start: int, stop: int, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Output of shape (batch, heads, rows, dim), and the log-sum-exp of each row's scores."""
    if mask is not None and mask.dtype == torch.bool:
        seen = mask
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        mask = mask.to(query.dtype)
        seen = mask > torch.finfo(mask.dtype).min
    output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key[:, :, start:stop], value[:, :, start:stop], 0.0, False, attn_mask=mask, scale=scaling
    )
    if mask is not None:
        # The kernel returns 0 for a row without keys.
        weight = weight.masked_fill(~seen.any(-1), float("-inf"))
    return output, weight

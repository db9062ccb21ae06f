"""Exact attention for methods with pair-dependent rotations, with memory linear in the number of keys.

With a flash kernel, which returns the log-sum-exp of each query's scores beside its output, attention runs tile by tile
and the results are joined. Otherwise (with gradients, softcaps or dropout) one softmax runs over the scores of a block
of queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from ctxext.attention.masks import Rows, band
from ctxext.attention.tiles import BLOCK, Tile

# The most scores held at once without a flash kernel: 64 MiB in float32.
SCORES = 2**24

# The fewest keys of a window.
WINDOW = 512

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Part:
    """The attention of a block of queries to keys within one branch.

    Attributes:
        query: rotated, of shape (batch, heads, rows, head_dim).
        key: rotated, of shape (batch, key heads, keys, head_dim).
        holds: whether each pair of a row and a key is in the branch, bool of shape (batch, 1, rows, keys).
    """

    query: Tensor
    key: Tensor
    holds: Tensor


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

    def fused(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether a flash kernel can be used; its log-sum-exp has no gradient."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.softcap is not None or self.dropout:
            return False
        if query.device.type == "cpu":
            return query.shape[3] == value.shape[3]
        # The kernel itself, called without sdpa around it, does not pad heads to multiples of 8.
        supported = query.device.type == "cuda" and query.shape[3] % 8 == 0
        return supported and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True))

    def block_size(self, query: Tensor, n_keys: int) -> int:
        """The number of queries per block without a flash kernel."""
        if torch.compiler.is_compiling():
            return query.shape[2]
        return max(16, min(BLOCK, SCORES // (query.shape[0] * query.shape[1] * n_keys)))

    def __call__(self, parts: list[Part], value: Tensor, rows: Rows) -> Float[Tensor, "batch rows heads dim"]:
        """The attention output of a block of queries; `parts` contain every pair exactly once."""
        query = parts[0].query
        batch, heads, n_rows, _ = query.shape
        n_keys, key_heads = rows.stop, value.shape[1]
        scores: Any = None
        # The power of two in the scale comes first: that is exact, and in 16 bits scores overflow later.
        first = math.ldexp(1.0, math.frexp(self.scaling)[1] - 1)
        for part in parts:
            grouped = (part.query * first).reshape(batch, key_heads, -1, query.shape[-1])
            found = (grouped @ part.key[:, :, :n_keys].transpose(-1, -2)).view(batch, heads, n_rows, n_keys)
            scores = found if scores is None else torch.where(part.holds, found, scores)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * (self.scaling / first)
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        mask, lowest = rows.block(slice(0, n_keys)), torch.finfo(scores.dtype).min
        unseen: Any = None
        if mask is not None:
            unseen = _without_keys(mask)
            # Finite, so that a row without keys is not NaN.
            scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.clamp(min=lowest)
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[None, :, None, None].expand(batch, -1, n_rows, 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        weights = torch.nn.functional.dropout(weights, self.dropout, training=self.dropout > 0).to(value.dtype)
        grouped = weights.view(batch * key_heads, -1, n_keys)
        # Head by head: in 16 bits, torch's batched product would copy the values of a cache with slots to spare.
        found = torch.stack([w @ v for w, v in zip(grouped, value[:, :, :n_keys].flatten(0, 1))])
        found = found.view(batch, heads, n_rows, value.shape[-1])
        if unseen is not None:
            found = found.masked_fill(unseen[..., None], 0.0)
        return found.transpose(1, 2)

    def of_branches(
        self,
        query: Float[Tensor, "batch kv_heads branch_group dim"],
        key: Float[Tensor, "batch kv_heads key dim"],
        value: Float[Tensor, "batch kv_heads key dim"],
        mask: Float[Tensor, "batch mask_heads branch_group key"],
        n_branches: int,
    ) -> Float[Tensor, "batch 1 heads dim"]:
        """The attention output of a single query on a CPU, where `fused`.

        Args:
            query: rotated for each branch, and in rows as `by_group` makes them, like the mask.
            mask: finite numbers that are added to the scores, so that each key is seen in one branch; of more rows
                than the query if its keys are to be read in `windows`.
        """
        batch, kv_heads, _, dim = query.shape
        n_windows = len(mask) // batch
        if n_windows > 1:
            query, key, value = query.expand(n_windows, -1, -1, -1), windows(key, n_windows), windows(value, n_windows)
        output, weight = _flash_on_cpu(query, key, value, 0.0, False, attn_mask=mask, scale=self.scaling)
        # The kernel's heads come behind its rows in memory, so that nothing is copied.
        shape = batch, n_windows * n_branches, -1, kv_heads
        weight = weight.transpose(1, 2).reshape(shape)
        if self.sinks is None:
            share = weight.softmax(1)
        else:
            sinks = self.sinks.to(weight.dtype).view(1, 1, kv_heads, -1).transpose(2, 3)
            share = torch.cat([weight, sinks.expand(batch, -1, -1, -1)], dim=1).softmax(1)[:, :-1]
        joined = (output.transpose(1, 2).reshape(*shape, dim) * share.unsqueeze(-1)).sum(1)
        joined = joined.transpose(1, 2).to(query.dtype, memory_format=torch.contiguous_format)
        return joined.reshape(batch, 1, -1, dim)


def by_group(x: Float[Tensor, "batch heads branch d"], groups: int) -> Float[Tensor, "batch kv_heads branch_group d"]:
    """The rows of all query heads that share a key head, branch by branch."""
    return x.unflatten(1, (-1, groups)).transpose(2, 3).flatten(2, 3)


def number_of_windows(n_rows: int, n_heads: int, n_keys: int) -> int:
    """Into how many `windows` a row's keys are cut, so that all threads of a CPU get as much: its kernel gives a thread
    whole heads of a row."""
    n_threads = torch.get_num_threads()
    return 1 if n_rows > 1 else max(1, min(n_threads // math.gcd(n_heads, n_threads), n_keys // WINDOW))


def windows(x: Float[Tensor, "1 heads n dim"], n_windows: int) -> Float[Tensor, "window heads size dim"]:
    """A row in windows of one size, as a view. Neighbours share fewer than `n_windows` tokens."""
    (_, heads, n, dim), (_, *strides) = x.shape, x.stride()
    step = n // n_windows
    return x.as_strided((n_windows, heads, n - (n_windows - 1) * step, dim), (step * strides[1], *strides))


def windows_of_mask(mask: Float[Tensor, "1 heads row key"], n_windows: int) -> Float[Tensor, "window heads row size"]:
    """The mask of `windows`, in which each key is seen once."""
    cut = windows(mask.transpose(2, 3), n_windows).transpose(2, 3).contiguous()
    cut[:-1, ..., mask.shape[3] // n_windows :] = torch.finfo(mask.dtype).min
    return cut


class Joined:
    """The attention of queries, gathered tile by tile: outputs are averaged by the sum of their exponentiated scores.

    Args:
        bands: the masks of bands by their size, which layers share.

    Attributes:
        output: of shape (batch, heads, query, dim); 0 for a query without keys.
        total: the log-sum-exp of each query's scores so far, of shape (batch, heads, query).
    """

    def __init__(self, softmax: Softmax, query: Tensor, bands: dict[Any, Tensor] | None = None) -> None:
        self.softmax = softmax
        batch, heads, n_queries, dim = query.shape
        # As attention functions return it. In float32, as each tile rounds what it adds to.
        dtype = torch.promote_types(query.dtype, torch.float32)
        self.output = query.new_zeros((batch, n_queries, heads, dim), dtype=dtype).transpose(1, 2)
        self.total = query.new_full((batch, heads, n_queries), float("-inf"), dtype=dtype)
        self._begun = torch.zeros((batch, n_queries), dtype=torch.bool)
        self._bands = {} if bands is None else bands

    def add(
        self,
        tiles: list[Tile],
        query: Float[Tensor, "batch heads query dim"],
        key: Float[Tensor, "batch kv_heads key dim"],
        value: Float[Tensor, "batch kv_heads key dim"],
        mask: Callable[[Tile], Tensor] | None = None,
    ) -> None:
        """Add tiles of rotated queries and keys.

        Args:
            mask: of a masked tile, bool or additive, of shape (batch, 1, rows, columns).
        """
        for tile in tiles:
            q, k, v = query[tile.batch, :, tile.rows], *(x[tile.batch, :, tile.columns] for x in (key, value))
            if q.dtype != v.dtype:  # under autocast, which does not reach the kernel
                q, k = q.to(v.dtype), k.to(v.dtype)
            if tile.shape == "upper":  # "lower", if both are read backwards
                q, k, v = (x.flip(2) for x in (q, k, v))
            used, unseen = None, None
            if tile.shape == "masked" and mask is not None:
                used, unseen = _additive(mask(tile), q.dtype)
            elif tile.shape == "band":
                used = self._band(q.shape[2], k.shape[2], q)
            output, weight = _flash(q, k, v, tile.shape in ("lower", "upper"), used, self.softmax.scaling)
            if unseen is not None:
                output = output.masked_fill(unseen[..., None], 0.0)
                weight = weight.masked_fill(unseen, float("-inf"))
            if tile.shape == "upper":
                output, weight = output.flip(2), weight.flip(2)
            found, total = self.output[tile.batch, :, tile.rows], self.total[tile.batch, :, tile.rows]
            begun = self._begun[tile.batch, tile.rows]
            is_first = not begun.any()
            begun.fill_(True)
            if is_first:
                found.copy_(output)
                total.copy_(weight)
                continue
            both = torch.logaddexp(total, weight)
            # Both are -inf for a query without keys so far.
            share = (weight - both).exp_().nan_to_num_(nan=0.0)[..., None]
            found.lerp_(output.to(found.dtype), share)
            total.copy_(both)

    def _band(self, n_rows: int, n_columns: int, like: Tensor) -> Tensor:
        """The additive mask of a tile that is a band, of shape (1, 1, rows, columns)."""
        size = n_rows, n_columns, like.dtype
        if size not in self._bands:
            self._bands[size] = band(n_columns - n_rows + 1, n_rows, like)[..., 1:].contiguous()
        return self._bands[size]

    def result(self, dtype: torch.dtype) -> Float[Tensor, "batch query heads dim"]:
        if self.softmax.sinks is not None:
            sinks = self.softmax.sinks.to(self.total.dtype)[None, :, None]
            self.output *= (self.total - torch.logaddexp(self.total, sinks)).exp_()[..., None]
        return self.output.transpose(1, 2).to(dtype)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Output of shape (batch, heads, rows, dim), and the log-sum-exp of each row's scores."""
    if query.device.type != "cpu":
        assert mask is None, "this device's flash kernel takes no mask"
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        output, weight, *_ = attend(query, key, value, 0.0, is_causal, scale=scaling)
        return output, weight
    shape = query.shape
    if query.shape[2] == 1 and mask is None:
        # The queries of a group read their keys once.
        query = query.reshape(*key.shape[:2], -1, query.shape[3])
    output, weight = _flash_on_cpu(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scaling)
    return output.reshape(shape), weight.reshape(shape[:3])


def _additive(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A bool or additive mask as a kernel takes it, and which of its rows have no keys."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf")), _without_keys(mask)
    mask = mask.to(dtype)
    return mask, _without_keys(mask)


def _without_keys(mask: Tensor) -> Tensor:
    """Which rows of a bool or additive mask have no keys: bool of its shape but for the last dimension."""
    return ~(mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min).any(-1)

"""Attention to packed documents and within sliding windows, without masks of tokens × tokens.

The model's own attention function is called for each document, and for each block of a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctxext.attention.masks import BlockMask, Span
from ctxext.attention.tiles import BLOCK

Block = tuple[slice, slice, Tensor | None]  # queries, their keys, and a mask


def attend_by_block(
    mask: BlockMask, attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *, keep: bool
) -> Tensor:
    """The attention of all documents and windows of `mask.documents`, of shape (batch, token, head, channel).

    Args:
        attend: the model's own function, of queries, keys, values and a mask; causal without a mask.
        keep: keep what the backward pass needs of each block, instead of computing the block again.
    """

    def one(_: slice, span: Span, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, stop, window = span
        blocks = [*_blocks(mask, stop - start, window, q)]
        join: Any = _join if keep or len(blocks) == 1 else _Recomputed.apply
        return join(q, k, v, attend, blocks)

    return by_document(mask.documents or [], query, key, value, one)


def by_document(
    rows: list[list[Span]], query: Tensor, key: Tensor, value: Tensor, attend: Callable[..., Tensor]
) -> Tensor:
    """The attention of all documents, of shape (batch, token, head, channel).

    Args:
        rows: as in `BlockMask.documents`.
        attend: gives that of one document, from the rows of the batch that have it, its span, and its part of the
            tensors.
    """
    outputs = []
    for index, row in enumerate(rows):
        batch = slice(None) if len(rows) == 1 else slice(index, index + 1)
        sizes = [stop - start for start, stop, _ in row]
        # Slices would each take a gradient of the whole row.
        parts = zip(*(each[batch].split(sizes, dim=2) for each in (query, key, value)))
        outputs.append(torch.cat([attend(batch, span, *part) for span, part in zip(row, parts)], dim=1))
    return torch.cat(outputs)


def _blocks(mask: BlockMask, n: int, window: int, like: Tensor) -> Iterator[Block]:
    """The blocks of a document of `n` tokens; without a mask, each query sees all keys up to its own."""
    size = min(window, BLOCK)
    yield slice(0, window), slice(0, window), None
    for begin in range(window, n, size):
        end = min(begin + size, n)
        band = mask.band(window, size, like)[:, :, : end - begin, : window + end - begin]
        yield slice(begin, end), slice(begin - window, end), band


def _join(query: Tensor, key: Tensor, value: Tensor, attend: Any, blocks: list[Block]) -> Tensor:
    """The attention of all blocks, of shape (row, token, head, channel)."""
    found = [attend(query[:, :, q], key[:, :, k], value[:, :, k], mask)[0] for q, k, mask in blocks]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


class _Recomputed(torch.autograd.Function):
    """`_join`, computed again in the backward pass: the keys of a block, a window and more, are not kept for each."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, attend: Any, blocks: list[Block]) -> Tensor:
        device = query.device.type
        ctx.autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device)}
        ctx.autocast["enabled"] = torch.is_autocast_enabled(device)
        ctx.attend, ctx.blocks = attend, blocks
        ctx.save_for_backward(query, key, value)
        return _join(query, key, value, attend, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = [torch.zeros_like(each) for each in saved]
        for q, k, mask in ctx.blocks:
            parts = [each[:, :, place].detach().requires_grad_() for each, place in zip(saved, (q, k, k))]
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                output, _ = ctx.attend(*parts, mask)
            for whole, place, part in zip(grads, (q, k, k), torch.autograd.grad(output, parts, grad[:, q])):
                whole[:, :, place] += part
        return *grads, None, None

"""sdpa without masks of tokens × tokens: one call for each packed document, and for each block of a sliding window.

transformers separates packed documents, and limits a sliding window, by one mask for the whole row: 16 GiB for 131,072
tokens, and twice that again in the dtype of the scores. Its kernels also compute all that the mask hides.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxext.attention.masks import BlockMask, Span, block_mask, by_document, documents_of
from ctxext.attention.tiles import BLOCK
from ctxext.core.apply import transformers_model
from ctxext.core.edit import Edit
from ctxext.core.probing import in_eval_mode
from ctxext.models.text_config import text_config_of

# Where a model's code asks whether the implementation is sdpa.
BY_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*sdpa")
NAME = "ctxext_documents"  # the attention implementation
BAR = {4: 1e-4, 8: 1e-4, 2: 5e-2}  # of the largest logit, by bytes of a number: kernels sum in another order


def use_document_attention(model: nn.Module) -> Edit:
    """Make sdpa run on each packed document alone, until `undo` of the result. Exact but for rounding.

    Documents are told from each other by their positions, as transformers does, in passes without a cache and without
    padding; other passes are transformers' own. Layers with a sliding window or with chunks are included. Call it after
    PEFT has wrapped the model, and under autocast if it is trained so.

    Raises:
        RuntimeError: the model does not attend by transformers' sdpa, does this already, or its logits for two packed
            documents differ from those with a mask. The model is unchanged.
    """
    inner = transformers_model(model)
    config, edit = text_config_of(inner.config), Edit(inner)
    if config._attn_implementation == NAME:
        raise RuntimeError(
            f"{type(inner).__name__} attends to each packed document alone already. Call `undo` of what that call "
            "returned. In a copy it cannot be undone: copy the model before."
        )
    if config._attn_implementation != "sdpa":
        raise RuntimeError(
            f"{type(inner).__name__} attends by {config._attn_implementation}, not by sdpa. Load it with "
            "attn_implementation='sdpa'."
        )
    # Sparse attention that runs for "eager" and "sdpa" alone (MiniMax-M3) selects every key of a short probe.
    sources = {sys.modules[type(module).__module__] for module in inner.modules()}
    if any(BY_NAME.search(inspect.getsource(each)) for each in sources if each.__name__.startswith("transformers.")):
        raise RuntimeError(f"{type(inner).__name__} needs masks for packed documents: its code does more for 'sdpa'.")
    ids = torch.randint(0, config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.arange(64) % 40, torch.arange(64) % 25])
    with torch.no_grad(), in_eval_mode(inner):
        try:
            given = {name: each.to(inner.device) for name, each in (("input_ids", ids), ("position_ids", positions))}
            wanted = inner(**given, use_cache=False).logits
            edit.set_config_field(config, "_attn_implementation_internal", NAME)
            off = float((inner(**given, use_cache=False).logits - wanted).abs().max() / wanted.abs().max())
            if not off <= BAR[wanted.dtype.itemsize]:
                raise RuntimeError(f"logits differ by {off:.1e} of the largest")
        except Exception as error:  # model code raises many exception types
            edit.undo()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise RuntimeError(f"{type(inner).__name__} needs masks for packed documents: {error}.") from error
    return edit


Block = tuple[slice, slice, Tensor | None]  # queries, their keys, and a mask


@dataclass(frozen=True, eq=False)
class Documents(BlockMask):
    """A mask of documents.

    Attributes:
        rows: the documents of each row; one list if those of all rows are the same.
        bands: the masks of sliding windows, made once for all layers.
    """

    rows: list[list[Span]] = field(default_factory=list)
    bands: dict[Any, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, mask: BlockMask) -> Documents | None:
        """None if the mask is not made of documents and windows alone, or is of a cache's later tokens."""
        rows, own = documents_of(mask), {each.name: getattr(mask, each.name) for each in fields(mask)}
        return None if rows is None else cls(**own, rows=rows)

    def band(self, window: int, size: int, like: Tensor) -> Tensor:
        """What hides keys from `size` queries, of the window + size keys up to the last of the queries; to be added."""
        key = window, like.dtype, like.device
        if key not in self.bands:
            i, j = torch.arange(size, device=like.device)[:, None], torch.arange(window + size, device=like.device)
            hidden = torch.full((size, window + size), float("-inf"), dtype=like.dtype, device=like.device)
            self.bands[key] = hidden.masked_fill_((j > i) & (j <= i + window), 0.0)[None, None]
        return self.bands[key]

    def blocks(self, n: int, window: int, like: Tensor) -> Iterator[Block]:
        """The blocks of a document of `n` tokens; without a mask, each query sees all keys up to its own."""
        size = min(window, BLOCK)
        yield slice(0, window), slice(0, window), None
        for begin in range(window, n, size):
            end = min(begin + size, n)
            band = self.band(window, size, like)[:, :, : end - begin, : window + end - begin]
            yield slice(begin, end), slice(begin - window, end), band


def _mask(*args: Any, **kwargs: Any) -> Any:
    mask = block_mask(*args, **kwargs)
    documents = None if not isinstance(mask, BlockMask) or mask.is_causal else Documents.of(mask)
    return sdpa_mask(*args, **kwargs) if documents is None else documents


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    attend = partial(ALL_ATTENTION_FUNCTIONS["sdpa"], module)
    if not isinstance(attention_mask, Documents):
        return attend(query, key, value, attention_mask, **kwargs)
    attend = partial(attend, **kwargs)

    def one(_: slice, span: Span, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, stop, window = span
        blocks = [*attention_mask.blocks(stop - start, window, q)]
        whole = len(blocks) == 1 or kwargs.get("dropout")  # which draws other numbers when it is computed again
        join: Any = _join if whole else _Recomputed.apply
        return join(q, k, v, attend, blocks)

    return by_document(attention_mask.rows, query, key, value, one), None


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


# A model that another process pickled finds them once this module is imported.
AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)

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
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxext.attention.masks import BlockMask, block_mask
from ctxext.attention.tiles import BLOCK
from ctxext.core.apply import transformers_model
from ctxext.core.edit import Edit
from ctxext.core.probing import in_eval_mode
from ctxext.models.text_config import text_config_of

# Where a model's code asks whether the implementation is sdpa.
BY_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*sdpa")
NAME = "sdpa_by_document"  # the attention implementation
BAR = {4: 1e-4, 8: 1e-4, 2: 5e-2}  # of the largest logit, by bytes of a number: kernels sum in another order


def use_document_attention(model: nn.Module) -> Edit:
    """Make sdpa run on each packed document alone, until `undo` of the result. Exact but for rounding.

    Documents are told from each other by their positions, as transformers does, in passes without a cache and without
    padding; other passes are transformers' own. Layers with a sliding window or with chunks are included. Call it after
    PEFT has wrapped the model, and under autocast if it is trained so.

    Raises:
        RuntimeError: the model does not attend by transformers' sdpa, or its logits for two packed documents differ
            from those with a mask. The model is unchanged.
    """
    inner = transformers_model(model)
    config, edit = text_config_of(inner.config), Edit(inner)
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
            raise RuntimeError(f"{type(inner).__name__} needs masks for packed documents: {error}.") from error
    return edit


# The first token of a document and the one after its last, and the tokens that each sees, itself among them.
Span = tuple[int, int, int]


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
        if mask.make["use_vmap"] or mask.make["attention_mask"] is not None or mask.shape[2] != mask.shape[3]:
            return None
        if mask.q_offset or mask.kv_offset:
            return None
        first = _first_seen(mask)
        if first is None:
            return None
        rows = [_spans(row) for row in (first[:1] if bool((first == first[:1]).all()) else first)]
        known = [row for row in rows if row is not None]
        own = {each.name: getattr(mask, each.name) for each in fields(mask)}
        return cls(**own, rows=known) if len(known) == len(rows) else None

    def band(self, window: int, size: int, like: Tensor) -> Tensor:
        """What hides keys from `size` queries, of the window + size keys up to the last of the queries; to be added."""
        key = window, like.dtype, like.device
        if key not in self.bands:
            i, j = torch.arange(size, device=like.device)[:, None], torch.arange(window + size, device=like.device)
            hidden = torch.full((size, window + size), float("-inf"), dtype=like.dtype, device=like.device)
            self.bands[key] = hidden.masked_fill_((j > i) & (j <= i + window), 0.0)[None, None]
        return self.bands[key]

    def pieces(self, row: list[Span], like: Tensor) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Queries, their keys and a mask, in order; without a mask each query sees the keys up to its own."""
        for start, stop, window in row:
            first, size = slice(start, min(start + window, stop)), min(window, BLOCK)
            yield first, first, None
            for begin in range(first.stop, stop, size):
                end = min(begin + size, stop)
                band = self.band(window, size, like)[:, :, : end - begin, : window + end - begin]
                yield slice(begin, end), slice(begin - window, end), band


def _first_seen(mask: BlockMask) -> Tensor | None:
    """The first key that each query sees, of shape (batch, query), found by bisection; None if one sees later ones."""
    batch, _, n, _ = mask.shape
    sees, device = mask.make["mask_function"], mask.make["device"]
    rows, queries = torch.arange(batch, device=device)[:, None], torch.arange(n, device=device).expand(batch, n)
    head = torch.zeros((), dtype=torch.long, device=device)

    def seen(keys: Tensor) -> Tensor:
        return sees(rows, head, queries, keys)

    if not seen(queries).all() or seen((queries + 1).clamp(max=n - 1))[:, :-1].any():
        return None
    low, high = torch.zeros_like(queries), queries
    while bool((low < high).any()):
        middle = (low + high) // 2
        found = seen(middle)
        low, high = torch.where(found, low, middle + 1), torch.where(found, middle, high)
    # Nor does the first token that a query sees see that query, where it is a key seen early by some queries alone.
    return None if (sees(rows, head, low, queries) & (low < queries)).any() else low


def _spans(first: Tensor) -> list[Span] | None:
    """The documents of a row, from the first key that each query sees; None if it has no documents and windows."""
    here = torch.arange(len(first), device=first.device)
    starts = (first == here).nonzero()[:, 0]
    sizes = torch.diff(starts, append=starts.new_tensor([len(first)]))
    start = starts.repeat_interleave(sizes)
    window = int((here - first).max()) + 1
    if not torch.equal(first, torch.maximum(start, here - (window - 1))):
        return None
    return [(begin, begin + size, min(size, window)) for begin, size in zip(starts.tolist(), sizes.tolist())]


def _mask(*args: Any, **kwargs: Any) -> Any:
    mask = block_mask(*args, **kwargs)
    documents = None if not isinstance(mask, BlockMask) or mask.is_causal else Documents.of(mask)
    return sdpa_mask(*args, **kwargs) if documents is None else documents


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(attention_mask, Documents):
        return attend(module, query, key, value, attention_mask, **kwargs)
    rows, outputs = attention_mask.rows, []
    for index, row in enumerate(rows):
        batch = slice(None) if len(rows) == 1 else slice(index, index + 1)
        q, k, v = query[batch], key[batch], value[batch]
        found = [
            attend(module, q[:, :, queries], k[:, :, keys], v[:, :, keys], mask, **kwargs)[0]
            for queries, keys, mask in attention_mask.pieces(row, query)
        ]
        outputs.append(torch.cat(found, dim=1))
    return torch.cat(outputs), None


# A model that another process pickled finds them once this module is imported.
AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)

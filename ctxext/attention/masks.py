"""Attention masks built block by block, so that no n × n matrix is materialised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function, flex_attention_mask, sdpa_mask

PAIRS = 2**24  # of queries and keys, whose mask is made at a time
# The first token of a document and the one after its last, and the tokens that each sees, itself among them.
Span = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A lazy form of the (batch, 1, query, key) matrix of transformers' mask function.

    Attributes:
        causal: whether it is a causal mask, but for padding.
        shape: of the whole matrix.
        make: arguments of `sdpa_mask`, without offsets and sizes.
        q_offset, kv_offset: cache slots before the first query and before the first key.
        device: of its blocks; they are made on `make["device"]`, as its mask function may hold tensors.
        copies: its copies on other devices.
        bands: its masks of sliding windows, which all layers share.
    """

    causal: bool
    shape: tuple[int, int, int, int]
    make: dict[str, Any]
    q_offset: int
    kv_offset: int
    device: torch.device
    copies: dict[torch.device, BlockMask] = field(default_factory=dict)
    bands: dict[Any, Tensor] = field(default_factory=dict)

    ndim = 4
    dtype = torch.bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Families that compute with their mask (Doge) get the matrix."""
        return func(*tree_map_only(cls, cls.whole, args), **tree_map_only(cls, cls.whole, kwargs or {}))

    @property
    def is_causal(self) -> bool:
        """Whether it is a plain causal mask."""
        return self.causal and self.make["attention_mask"] is None

    @cached_property
    def ranges(self) -> tuple[Tensor, Tensor] | None:
        """As `ranges_of`, of any mask, which is made block by block."""
        found, (batch, _, n_queries, n_keys) = [], self.shape
        size = max(16, PAIRS // (batch * n_keys))
        for start in range(0, n_queries, size):
            seen = self.part(slice(start, min(start + size, n_queries)), slice(0, n_keys)).whole()
            ranges = _one_range(seen[:, 0])
            if ranges is None:
                return None
            found.append(ranges)
        low, high = (torch.cat(sides, dim=1)[..., 0] for sides in zip(*found))
        return low, high

    @cached_property
    def documents(self) -> list[list[Span]] | None:
        """The packed documents of each row of a batch; one list if those of all rows are the same.

        None if the mask is not made of documents and sliding windows alone, or is of a cache's later tokens.
        """
        if self.make["attention_mask"] is not None or self.q_offset or self.kv_offset or self.shape[2] != self.shape[3]:
            return None
        if self.ranges is None:
            return None
        first, end = self.ranges
        if not torch.equal(end, torch.arange(1, self.shape[3] + 1, device=end.device).expand_as(end)):
            return None  # some see later tokens, or not themselves
        rows = [_spans(row) for row in (first[:1] if bool((first == first[:1]).all()) else first)]
        known = [row for row in rows if row is not None]
        return known if len(known) == len(rows) else None

    def band(self, window: int, size: int, like: Tensor) -> Tensor:
        """What hides keys from `size` queries, of the window + size keys up to the last of the queries; to be added."""
        key = window, size, like.dtype, like.device
        if key not in self.bands:
            self.bands[key] = band(window, size, like)
        return self.bands[key]

    def part(self, rows: slice, columns: slice) -> BlockMask:
        """The mask of some queries and keys."""
        shape = self.shape[0], 1, rows.stop - rows.start, columns.stop - columns.start
        offsets = self.q_offset + rows.start, self.kv_offset + columns.start
        return BlockMask(self.causal, shape, self.make, *offsets, self.device)

    def to(self, device: Any, **kwargs: Any) -> BlockMask:
        """For accelerate, which moves what a layer is given to the layer's device."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self.copies:
            self.copies[device] = replace(self, device=device, copies={}, bands={})
        return self.copies[device]

    def whole(self) -> Tensor:
        """Whether each query attends to each key: bool of its shape."""
        return self._made_by(sdpa_mask, allow_is_causal_skip=False)

    def of_flex(self) -> Any:
        """The mask as flex attention takes it, which is of blocks, too."""
        return self._made_by(flex_attention_mask)

    def _made_by(self, make: Callable[..., Any], **options: Any) -> Any:
        sizes = {"q_length": self.shape[2], "kv_length": self.shape[3]}
        offsets = {"q_offset": self.q_offset, "kv_offset": self.kv_offset}
        return make(**self.make, **sizes, **offsets, **options).to(self.device)

    def contiguous(self) -> Tensor:
        """Required by `generate` for masks of a static cache."""
        return self.whole()


def block_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> BlockMask | Tensor:
    """A mask function for transformers' mask interface, with the arguments of `sdpa_mask`.

    Never returns None, which attention functions interpret differently: sdpa as causal, eager attention as no mask.
    Single queries, static caches and traced graphs get a matrix, which has one row or a fixed size.
    """
    tracing = torch.compiler.is_compiling()
    fixed = isinstance(q_offset, Tensor) or kv_length > q_offset + q_length - kv_offset
    # A traced graph cannot read tensor values.
    if attention_mask is not None and not tracing and attention_mask.shape[-1] >= kv_offset + kv_length:
        attention_mask = None if bool(attention_mask.all()) else attention_mask
    make = {
        "batch_size": batch_size,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    # transformers allows the skip for plain causal masks, and for local ones if local_size is given.
    causal = allow_is_causal_skip and (local_size is None or kv_length < local_size)
    shape = batch_size, 1, q_length, kv_length
    mask = BlockMask(causal, shape, make, q_offset, kv_offset, torch.device(device))
    return mask.whole() if fixed or tracing or (q_length == 1 and not mask.is_causal) else mask


def explicit(mask: BlockMask | Tensor | None, module: Any, query: Tensor, key: Tensor, is_causal: bool | None) -> Any:
    """The mask of a layer, or None if every query attends to every key.

    For a causal layer, None becomes the causal mask that ends at the last key. `is_causal` is as passed to attention;
    None reads `module.is_causal`.
    """
    if mask is not None or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return mask
    n_queries, n_keys = query.shape[2], key.shape[2]
    return block_mask(query.shape[0], n_queries, n_keys, q_offset=n_keys - n_queries, device=query.device)


def ranges_of(mask: BlockMask | Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The first key that each query sees and the one after the last, each of shape (batch, query).

    None if some query may see other than one range of keys.
    """
    if isinstance(mask, Tensor) and mask.shape[1:3] == (1, 1) and mask.dtype == torch.bool:
        return _one_range(mask[:, 0, 0])
    if not isinstance(mask, BlockMask):
        return None
    if not mask.causal:  # packed documents, sliding windows and chunks
        return mask.ranges
    (batch, _, n_queries, n_keys), device, padding = mask.shape, mask.device, mask.make["attention_mask"]
    low, last = torch.zeros((batch, 1), dtype=torch.long, device=device), torch.tensor(n_keys, device=device)
    if padding is not None:
        held = _one_range(padding[:, mask.kv_offset : mask.kv_offset + n_keys].to(device).bool())
        if held is None:
            return None
        low, last = held
    high = torch.arange(n_queries, device=device)[None] + (mask.q_offset - mask.kv_offset + 1)
    return low.expand(batch, n_queries), high.clamp(max=last).expand(batch, n_queries)


def _one_range(here: Tensor) -> tuple[Tensor, Tensor] | None:
    """The first column of each row that holds, and the one after the last; None if some between do not."""
    n, low = here.shape[-1], here.byte().argmax(-1, keepdim=True)
    high = torch.where(here.gather(-1, low), n - here.flip(-1).byte().argmax(-1, keepdim=True), low)
    columns = torch.arange(n, device=here.device)
    return (low, high) if torch.equal(here, (columns >= low) & (columns < high)) else None


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


def as_taken(mask: BlockMask | Tensor | None, implementation: str, dtype: torch.dtype) -> Any:
    """A mask in the form that an attention implementation takes, for queries of `dtype`."""
    if isinstance(mask, BlockMask):
        mask = mask.of_flex() if implementation == "flex_attention" else mask.whole()
    if not isinstance(mask, Tensor):
        return mask
    if implementation != "sdpa":
        return additive(mask, dtype)
    # With float64 queries, torch's CPU kernel reads a float32 mask as if it were float64.
    return mask if mask.dtype == torch.bool else mask.to(torch.promote_types(mask.dtype, dtype))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to an additive one, as eager and flex attention need; other masks are returned unchanged."""
    if mask.dtype != torch.bool:
        return mask
    # Families compute the softmax in float32, where the lowest float64 is -inf and a fully masked row NaN.
    lowest = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)


def band(window: int, size: int, like: Tensor) -> Tensor:
    """`BlockMask.band`, made anew: of shape (1, 1, size, window + size)."""
    i, j = torch.arange(size, device=like.device)[:, None], torch.arange(window + size, device=like.device)
    hidden = torch.full((size, window + size), float("-inf"), dtype=like.dtype, device=like.device)
    return hidden.masked_fill_((j > i) & (j <= i + window), 0.0)[None, None]


@dataclass(frozen=True)
class Rows:
    """The mask of some queries of a pass, from any form of mask.

    Attributes:
        mask: None means no mask.
        rows: the queries.
        stop: no query of `rows` attends to keys from this column on.
    """

    mask: BlockMask | Tensor | None
    rows: slice
    stop: int

    @classmethod
    def of(cls, mask: BlockMask | Tensor | None, rows: slice, n_keys: int) -> Rows:
        if isinstance(mask, BlockMask) and mask.causal:
            return cls(mask, rows, min(n_keys, mask.q_offset - mask.kv_offset + rows.stop))
        return cls(mask, rows, n_keys)

    def block(self, columns: slice) -> Tensor | None:
        """The bool or additive mask for the keys in `columns`; None if all are visible."""
        if self.mask is None:
            return None
        if isinstance(self.mask, BlockMask):
            first = self.mask.q_offset - self.mask.kv_offset + self.rows.start
            if self.mask.is_causal and columns.stop <= first + 1:
                return None
            return self.mask.part(self.rows, columns).whole()
        every = self.mask if self.mask.shape[2] > 1 else self.mask.expand(-1, -1, self.rows.stop, -1)
        return every[:, :, self.rows, columns]

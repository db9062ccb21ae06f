"""A forward pass with in-attention RoPE, and the attention function that transformers calls in each layer."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxext.attention import keys, tiles
from ctxext.attention.documents import attend_by_block, by_document
from ctxext.attention.masks import (
    BlockMask,
    Rows,
    Span,
    as_taken,
    block_mask,
    explicit,
    ranges_of,
)
from ctxext.attention.rotary import CosSin, InAttentionRotary, Layer, at_once, change, rotate, rotate_at_once, widened
from ctxext.attention.softmax import Joined, Part, Softmax, by_group, number_of_windows, windows_of_mask
from ctxext.attention.tiles import Tile
from ctxext.methods import Branch, PositionRemapping, RopeScaling

# The keyword argument that passes the `Call` to each layer's attention function.
KEYWORD = "in_attention_rope"
# The same for families whose layers drop keyword arguments (StableLM); compiled graphs break at it.
_running: ContextVar[Any] = ContextVar(KEYWORD, default=None)
IMPLEMENTATIONS = {name: f"in_attention_{name}" for name in ("sdpa", "eager", "flex_attention")}


def in_attention_rope(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Attended:
    """An attention function for transformers' attention interface: rotates, then calls the model's own function."""
    call = kwargs.pop(KEYWORD, None)
    if call is None:
        call = _running.get()
        if call is not None:
            call.dropped = True
    if call is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without token positions: with in-attention RoPE, layers run only "
            "within the model that was extended. If this model was built from an extended model's config, load the "
            "config again (AutoConfig.from_pretrained). Before using layers alone, call restore_context(model)."
        )
    return call.attend(module, query, key, value, attention_mask, **kwargs)


def own_attention(base: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that `base` calls under `implementation`: transformers', or its family's eager one.

    Raises ValueError if its family has no such function.
    """
    if own_methods(base):
        return OwnMethod.attend
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    for module in base.modules():
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is not None and hasattr(module, "layer_idx"):
            return own
    raise ValueError(
        f"{type(base).__name__} has custom attention code that does not use transformers' attention interface, "
        "which in-attention RoPE needs."
    )


@contextmanager
def running(call: Any) -> Iterator[None]:
    """Pass `call` to layers that drop keyword arguments, within a `with` block."""
    token = _running.set(call)
    try:
        yield
    finally:
        _running.reset(token)


class OwnMethod:
    """Mixin for attention modules that compute attention in a method `_attn`, and not by transformers' interface."""

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Attended:
        dropouts = [m.p for name, m in self.named_children() if isinstance(m, nn.Dropout) and "att" in name]  # type: ignore[attr-defined]
        output, weights = in_attention_rope(
            self,  # type: ignore[arg-type]
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            attention_mask,
            scaling=query.shape[-1] ** -0.5,
            dropout=sum(dropouts) if self.training else 0.0,  # type: ignore[attr-defined]
        )
        return output.transpose(1, 2), weights

    @staticmethod
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Attended:
        """The family's own `_attn`, as an attention function of transformers' interface."""
        output, weights = super()._attn(query, key, value, mask)  # type: ignore[misc]
        return output.transpose(1, 2), weights


def own_methods(base: Any) -> list[str]:
    """The paths of attention modules that compute attention in a method `_attn`; none if the interface is used."""
    if base._can_set_attn_implementation():
        return []
    return [path for path, m in base.named_modules() if hasattr(m, "layer_idx") and callable(getattr(m, "_attn", None))]


Attended = tuple[Tensor, Tensor | None]  # the output (batch, query, heads, dim), and the weights if materialised


class Call:
    """One forward pass: the positions of its tokens, and its cache.

    Attributes:
        positions: of the queries, in tokens, of shape (batch, query).
    """

    def __init__(self, rotary: InAttentionRotary, positions: Tensor, cache: Cache | None) -> None:
        self.rotary = rotary
        self.positions = positions
        self.cache = cache
        self.incoming: keys.Incoming | None = None
        self.outer: Any = None  # the call within which this one runs, of layers that drop keyword arguments
        # Values that layers share are computed by the first one that needs them.
        self._shared: dict[Any, Any] = {}
        self._given: list[tuple[Tensor, Tensor | None]] = []
        self._elsewhere: dict[torch.device, Call] = {}
        self._within: dict[Any, tuple[Call, Any]] = {}  # the calls of packed documents, and their masks

    def shared(self, layer: Layer, name: Any, make: Callable[[], Any]) -> Any:
        """What all layers that rotate as `layer` does share under `name`."""
        known = layer.label, layer.within, name
        if known not in self._shared:
            self._shared[known] = make()
        return self._shared[known]

    def _turned(self, layer: Layer, x: Tensor, name: Any, make: Callable[[], CosSin], in_place: bool = False) -> Tensor:
        """`x` rotated by cos and sin that layers share under `name`; a few tokens in place, if asked."""
        convention = layer.convention
        if not at_once(x):
            return rotate(x, self.shared(layer, name, make), convention)
        name = "wide", convention, name
        return rotate_at_once(x, self.shared(layer, name, lambda: widened(make(), convention)), convention, in_place)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Attended:
        """The attention of one layer; arguments are (batch, heads, tokens, head_dim), as in transformers."""
        if query.device != self.positions.device:  # of a model whose layers are on several devices
            if query.device not in self._elsewhere:
                self._elsewhere[query.device] = Call(self.rotary, self.positions.to(query.device), self.cache)
            return self._elsewhere[query.device].attend(module, query, key, value, mask, **kwargs)
        rotary, method, positions = self.rotary, self.rotary.untempered, self.positions
        mask = None if mask is None else mask.to(query.device)
        layer = rotary.layers[module.layer_idx]
        tables = rotary.of(layer.label)
        mask = explicit(mask, module, query, key, kwargs.get("is_causal"))
        if layer.convention.pairs == "none":
            return self._own(module, query, key, value, mask, **kwargs)
        of_the_call = isinstance(method, RopeScaling) and method.of_the_call
        by_block = isinstance(mask, BlockMask) and not mask.causal and rotary.implementation == "sdpa"
        if by_block and not of_the_call:
            documents = self.shared(layer, ("documents", mask), lambda: _packed(mask))
            if documents is not None:
                attend = functools.partial(self._of_document, module, **kwargs)
                return by_document(documents, query, key, value, attend), None
        n_queries, n_keys = query.shape[2], key.shape[2]
        if isinstance(mask, BlockMask) and mask.shape[3] != n_keys:
            raise RuntimeError(
                f"layer {module.layer_idx} has {n_keys} keys, but the mask is of {mask.shape[3]}: one layer of the "
                "cache was changed alone. Start from an empty cache, or crop each of cache.layers to one length."
            )
        places = self._places(module, key)
        store = self._store(module, key)

        turned = functools.partial(self._turned, layer)
        whole = rotary.method
        if whole is not None and not layer.within:

            def scaling() -> Tensor | None:
                times = whole.query_scaling(tables.rope, positions)
                return None if times is None else times[:, None, :, None].to(query.dtype)

            times = self.shared(layer, ("times", query.dtype), scaling)
            query = query if times is None else query * times
        if layer.within or method is None:
            query = turned(query, "plain", lambda: tables.as_it_was(positions))
            state = self.shared(layer, ("state", n_keys), lambda: torch.zeros_like(places))
        elif isinstance(method, PositionRemapping):
            if n_queries > 1 or store is not None:
                return self._by_branch(module, layer, places, query, key, value, mask, store, kwargs)
            # A single query: each key at its distance from the query.
            query = turned(query, "zero", lambda: tables.plain(torch.zeros_like(positions)))
            state = self.shared(layer, ("behind", n_keys), lambda: -method.distance(tables.rope, positions, places))
        elif of_the_call:
            used = self.shared(layer, "used", lambda: tables.of_length(positions.amax(1) + 1))
            query = turned(query, "queries", lambda: tables.scaled(positions, *used))
            key = turned(key, "keys", lambda: tables.scaled(places, *used))
            return self._own(module, query, key, value, mask, **kwargs)
        else:
            rungs = self.shared(layer, "rungs", lambda: tables.rungs(positions))
            if n_queries > 1:
                return self._by_rung(module, layer, rungs, places, query, key, value, mask, store, kwargs)
            used = self.shared(layer, "used", lambda: tables.of_rung(rungs[:, 0]))
            query = turned(query, "queries", lambda: tables.scaled(positions, *used))
            state = self.shared(layer, ("state", n_keys), lambda: rungs[:, :1].expand(-1, n_keys))
        if store is not None:
            key = self._rotated_in_place(store, layer, key, places, state)
        else:
            key = self._rotated(self._cached(module), layer, key, places, state)
        if by_block and mask.documents is not None:
            attend, keep = functools.partial(rotary.attend, module, **kwargs), bool(kwargs.get("dropout"))
            return attend_by_block(mask, attend, query, key, value, keep=keep), None
        return self._own(module, query, key, value, mask, **kwargs)

    def _of_document(
        self, module: Any, batch: slice, span: Span, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Tensor:
        """A packed document, which attends to itself alone."""
        start, stop, _ = span
        where = batch.start, start, stop
        if where not in self._within:
            mask = block_mask(len(query), stop - start, stop - start, device=query.device)
            self._within[where] = Call(self.rotary, self.positions[batch, start:stop], None), mask
        call, mask = self._within[where]
        return call.attend(module, query, key, value, mask, **kwargs)[0]

    def _places(self, module: Any, key: Tensor) -> Tensor:
        """The positions of a layer's keys, of shape (batch, keys)."""
        places = keys.positions_of(self.cache, module.layer_idx, key.shape[2], self.positions)
        if self.rotary.gives_keys_on:
            places = next((its for known, its in self._given if known is key), places)
            self._given.append((key, places))
        if places is None:
            raise RuntimeError(
                f"layer {module.layer_idx} attends to {key.shape[2]} keys whose positions are unknown: the model has a "
                "custom KV cache. Use a method that changes frequencies, such as 'yarn'."
            )
        return places

    def _own(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Attended:
        """Call the model's own attention function; with mask None every query attends to every key."""
        batch, heads, n_queries, head_dim = query.shape
        is_causal, is_sdpa = False, self.rotary.implementation == "sdpa"
        if isinstance(mask, BlockMask) and mask.is_causal:
            # sdpa has a flag for the square causal mask, and a single last query attends to every key.
            is_causal = is_sdpa and n_queries == key.shape[2]
            mask = None if is_causal or n_queries == 1 else mask
        mask = as_taken(mask, self.rotary.implementation, query.dtype)
        groups = heads // key.shape[1]
        is_packable = is_sdpa and (mask is None or mask.shape[1] == 1)
        kwargs = {**kwargs, "is_causal": is_causal}
        if torch.compiler.is_compiling() and n_queries == 1 < groups and is_packable:
            # When compiled, transformers copies keys and values for every query of a group; in eager mode it packs the
            # queries.
            packed = query.reshape(batch, key.shape[1], groups, head_dim)
            output, _ = self.rotary.attend(_Ungrouped(), packed, key, value, mask, **kwargs)
            return output.transpose(1, 2).reshape(batch, 1, heads, value.shape[3]), None
        return self.rotary.attend(module, query, key, value, mask, **kwargs)

    def _cached(self, module: Any) -> Any:
        """The cache layer that knows the positions of a layer's keys; None if there is none."""
        layer = None if self.cache is None else self.cache.layers[module.layer_idx]
        return layer if isinstance(layer, keys.PositionedLayer) else None

    def _store(self, module: Any, key: Tensor) -> Any:
        """The cache layer in which keys can be rotated in place; None if there is none."""
        store = self._cached(module)
        if store is None or not store.appends or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        return store if store.keys is key and not self.rotary.gives_keys_on else None

    def _table(self, layer: Layer, places: Tensor, state: Tensor, before: CosSin | None) -> CosSin:
        """cos and sin of keys at `places`, of shape (batch, keys).

        Args:
            state: what their rotation depends on, of the same shape: rungs of scaled frequencies, remapped positions.
            before: how they are rotated already.
        """
        tables, method = self.rotary.of(layer.label), self.rotary.untempered
        if layer.within or method is None:
            after = tables.as_it_was(places)
        elif isinstance(method, PositionRemapping):
            after = tables.plain(state)
        else:
            after = tables.scaled(places, *tables.of_rung(state[:, 0]))
        return after if before is None else change(before, after)

    def _before(self, store: Any, layer: Layer, places: Tensor) -> CosSin | None:
        """cos and sin by which the keys of a cache layer are rotated already; None if none is."""
        if store is None or not store.rotated:
            return None
        state, rotated, n_keys = store.state, store.rotated, places.shape[1]
        make = functools.partial(self._earlier, layer, places[:, :rotated], state[:, :rotated], n_keys - rotated)
        # `state` is kept with what is found, so that its id stays its own.
        found: CosSin = self.shared(layer, ("before", id(state), rotated, n_keys), lambda: (make(), state))[0]
        return found

    def _earlier(self, layer: Layer, places: Tensor, state: Tensor, n_new: int) -> CosSin:
        """cos and sin by which keys at `places` are rotated already, and of `n_new` keys that are not."""
        cos, sin = self._table(layer, places, state, None)
        others = 0, 0, 0, n_new
        return nn.functional.pad(cos, others, value=1.0), nn.functional.pad(sin, others)

    def _rotated(self, store: Any, layer: Layer, key: Tensor, places: Tensor, state: Tensor) -> Tensor:
        """All keys, rotated as `state` says, in new memory."""
        before = self._before(store, layer, places)
        name = "keys", key.shape[2], id(before)
        return self._turned(layer, key, name, lambda: self._table(layer, places, state, before))

    def _rotated_in_place(self, store: Any, layer: Layer, key: Tensor, places: Tensor, state: Tensor) -> Tensor:
        """All keys of a cache layer, rotated as `state` says: the new ones, and those whose rotation changes.

        Not in place where a key would turn back to an earlier scale or branch, because tokens were taken back: in 16
        bits each turn rounds, and errors would add up over many such steps.
        """
        before, rotated, n_keys = store.state, store.rotated, key.shape[2]
        moved, columns = None, slice(n_keys)
        if rotated:
            sign = -1 if isinstance(self.rotary.untempered, PositionRemapping) else 1
            find = functools.partial(_moved, before, state, rotated, sign)
            # `before` is kept with what is found, so that its id stays its own.
            name = "moved", id(before), rotated, n_keys
            moved, columns, turns_back, _ = self.shared(layer, name, lambda: (*find(), before))
            if turns_back:
                return self._rotated(store, layer, key, places, state)
            if moved is None and rotated == n_keys:  # DiffLlama attends twice in a layer
                return key

        def changes() -> CosSin:
            earlier = None
            if moved is not None:
                earlier = self._earlier(layer, places[:, moved], before[:, moved], n_keys - rotated)
            return self._table(layer, places[:, columns], state[:, columns], earlier)

        with store.rotating(state):
            name = "changes", id(before), rotated, n_keys
            place = key[:, :, columns]
            turned = self._turned(layer, place, name, changes, isinstance(columns, slice))
            if turned is not place:
                key[:, :, columns] = turned
        return key

    def _by_rung(
        self, module: Any, layer: Layer, rungs: Tensor, places: Tensor, query: Tensor, key: Tensor, value: Tensor,
        mask: Any, store: Any, kwargs: dict[str, Any],
    ) -> Attended:  # fmt: skip
        """Scaled frequencies: each run of queries on one rung rotates the keys that it sees by that rung.

        Args:
            store: the cache layer that keeps the keys rotated as the last run sees them.
        """
        tables, positions, n_keys = self.rotary.of(layer.label), self.positions, key.shape[2]

        # Not shared between layers: the tables of all rungs would be as large as the keys.
        def turned(x: Tensor, where: Tensor, used: tuple[Tensor, Tensor]) -> Tensor:
            return rotate(x, tables.scaled(where, *used), layer.convention)

        def turned_keys(end: int, used: tuple[Tensor, Tensor]) -> Tensor:
            before, after = self._before(self._cached(module), layer, places), tables.scaled(places[:, :end], *used)
            after = after if before is None else change((before[0][:, :end], before[1][:, :end]), after)
            return rotate(key[:, :, :end], after, layer.convention)

        if torch.compiler.is_compiling():
            # The rung of each query is unknown here, so each rung is computed for all queries.
            whole: Any = None
            for index in range(tables.n_rungs):
                used = tables.of_rung(torch.full_like(rungs[:, 0], index))
                rotated = turned(query, positions, used), turned_keys(n_keys, used)
                output, _ = self._own(module, *rotated, value, mask, **kwargs)
                whole = output if whole is None else torch.where((rungs == index)[..., None, None], output, whole)
            return whole, None
        runs, softmax = self.shared(layer, "runs", lambda: _runs(rungs)), _softmax(module, kwargs)
        of_run: Any = None
        if isinstance(mask, BlockMask) and self.rotary.implementation != "eager" and softmax.fused(query, key, value):
            of_run = self.shared(layer, ("tiles", mask), lambda: _tiles_of_runs(mask, runs))
        outputs, weights = [], []
        for index, (start, stop) in enumerate(runs):
            rows = Rows.of(mask, slice(start, stop), n_keys)
            used, end = tables.of_rung(rungs[:, start]), rows.stop
            block = turned(query[:, :, start:stop], positions[:, start:stop], used)
            if store is not None and stop == positions.shape[1]:
                state = self.shared(layer, ("state", n_keys), lambda: rungs[:, -1:].expand(-1, n_keys))
                seen = self._rotated_in_place(store, layer, key, places, state)[:, :, :end]
            else:
                seen = turned_keys(end, used)
            if of_run is not None:
                joined = Joined(softmax, block)
                joined.add(of_run[index], block, seen, value)
                outputs.append(joined.result(query.dtype))
                continue
            here = {**kwargs, "position_ids": positions[:, start:stop]}
            is_lazy = isinstance(mask, BlockMask)
            part = mask.part(rows.rows, slice(0, end)) if is_lazy else rows.block(slice(0, end))
            output, weight = self._own(module, block, seen, value[:, :, :end], part, **here)
            outputs.append(output)
            weights.append(weight)
        return torch.cat(outputs, dim=1), _joined(weights, n_keys)

    def _by_branch(
        self, module: Any, layer: Layer, places: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any,
        store: Any, kwargs: dict[str, Any],
    ) -> Attended:  # fmt: skip
        """Remapped positions: queries attend within every branch, at the branch's positions.

        Args:
            store: the cache layer that keeps the keys rotated, if all queries see each key in one branch.
        """
        tables, method, positions = self.rotary.of(layer.label), self.rotary.untempered, self.positions
        assert isinstance(method, PositionRemapping)
        softmax, n_queries, n_keys = _softmax(module, kwargs), query.shape[2], key.shape[2]
        branches = self.shared(layer, "branches", lambda: method.branches(tables.rope))

        def turned(x: Tensor, name: Any, mapped: Callable[[Tensor], Tensor], where: Tensor) -> Tensor:
            return self._turned(layer, x, name, lambda: tables.plain(mapped(where.double())))

        def held_by_each() -> Tensor:
            """Which keys a single query sees in each branch, of shape (batch, 1, branch, keys)."""
            return torch.stack([branch.holds(positions, places) for branch in branches], dim=1)[:, None]

        def mapped_keys() -> Tensor:
            at = branches[0].key(places.double())
            for index, branch in enumerate(branches):
                if branch.key is not branches[0].key:
                    held = self.shared(layer, ("held", n_keys), held_by_each)[:, 0, index]
                    at = torch.where(held, branch.key(places.double()), at)
            return at

        def keys_of(branch: Branch, before: CosSin | None) -> CosSin:
            return self._table(layer, places, branch.key(places.double()), before)

        # By index, as functions cannot be dictionary keys in a compiled graph; branches may share a function.
        seen: list[Tensor] = []
        if store is not None and (n_queries == 1 or all(branch.key is branches[0].key for branch in branches)):
            state = self.shared(layer, ("state", n_keys), mapped_keys)
            seen = [self._rotated_in_place(store, layer, key, places, state)] * len(branches)
        else:
            before = self._before(self._cached(module), layer, places)
            for index, branch in enumerate(branches):
                done = [seen[i] for i in range(index) if branches[i].key is branch.key]
                if not done:
                    name = "key", index, n_keys, id(before)
                    done = [self._turned(layer, key, name, functools.partial(keys_of, branch, before))]
                seen += done[:1]

        def masked(held: Tensor, rows: slice, columns: slice) -> Tensor:
            part = Rows.of(mask, rows, n_keys).block(columns)
            if part is None or part.dtype == torch.bool:
                return held if part is None else held & part
            return part.masked_fill(~held, float("-inf"))

        def mask_of(branch: Branch, tile: Tile) -> Tensor:
            held = branch.holds(positions[:, tile.rows, None], places[:, None, tile.columns])[:, None]
            return masked(held, tile.rows, tile.columns)

        is_fused = softmax.fused(query, key, value)
        if is_fused and n_queries == 1 and query.device.type == "cpu":
            batch, kv_heads = key.shape[:2]
            groups = query.shape[1] // kv_heads

            def every_branch() -> Tensor:
                held = masked(self.shared(layer, ("held", n_keys), held_by_each), slice(0, 1), slice(0, n_keys))
                held = _finite(held, torch.promote_types(query.dtype, torch.float32))  # which is read without a cast
                n_windows = number_of_windows(batch, kv_heads, n_keys)
                if n_windows > 1:
                    held = windows_of_mask(held, n_windows)
                return by_group(held if held.shape[1] > 1 else held.expand(-1, groups, -1, -1), groups)

            def at_every_branch() -> CosSin:
                at = torch.cat([branch.query(positions.double()) for branch in branches], dim=1)
                cos, sin = widened(tables.plain(at), layer.convention)
                return cos.unsqueeze(3), sin.unsqueeze(3)

            wide = self.shared(layer, ("at every branch", layer.convention), at_every_branch)
            each = rotate_at_once(query.reshape(batch, kv_heads, 1, groups, -1), wide, layer.convention).flatten(2, 3)
            masks = self.shared(layer, ("every branch", mask, n_keys), every_branch)
            return softmax.of_branches(each, seen[0], value, masks, len(branches)), None
        if is_fused:
            of_branch = self.shared(
                layer, ("tiles", mask, n_keys), lambda: _tiles_of_branches(branches, positions, places, mask)
            )
            if of_branch is not None:
                joined = Joined(softmax, query, bands=self.shared(layer, "bands", dict))
                for index, branch in enumerate(branches):
                    if of_branch[index]:
                        block = turned(query, ("at", index), branch.query, positions)
                        masks = functools.partial(mask_of, branch)
                        joined.add(of_branch[index], block, seen[index], value, mask=masks)
                return joined.result(query.dtype), None
        size = softmax.block_size(query, n_keys)
        outputs = []
        for start in range(0, n_queries, size):
            rows = Rows.of(mask, slice(start, min(start + size, n_queries)), n_keys)
            here, parts = positions[:, rows.rows], []
            for index, branch in enumerate(branches):
                block = turned(query[:, :, rows.rows], ("at", index, start, size), branch.query, here)
                holds = branch.holds(here[:, :, None], places[:, None, : rows.stop])[:, None]
                parts.append(Part(block, seen[index], holds))
            outputs.append(softmax(parts, value, rows))
        return torch.cat(outputs, dim=1), None


class _Ungrouped:
    """The module attributes that transformers' sdpa function reads, for queries packed by key head."""

    num_key_value_groups = 1
    is_causal = False


def _softmax(module: Any, kwargs: dict[str, Any]) -> Softmax:
    scaling = kwargs.get("scaling")
    return Softmax(
        scaling=module.head_dim**-0.5 if scaling is None else scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=kwargs.get("dropout", 0.0),
    )


def _packed(mask: BlockMask) -> list[list[Span]] | None:
    """The documents of each row; None if there is one a row, or a sliding window."""
    rows = mask.documents or []
    whole = all(window == stop - start for row in rows for start, stop, window in row)
    return rows if whole and any(len(row) > 1 for row in rows) else None


def _finite(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool or additive mask as finite numbers to add to scores."""
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.full(mask.shape, lowest, dtype=dtype, device=mask.device).masked_fill_(mask, 0.0)
    return mask.to(dtype).clamp(min=lowest)


def _moved(
    before: Tensor, state: Tensor, rotated: int, sign: int
) -> tuple[slice | Tensor | None, slice | Tensor, bool]:
    """The columns, of the first `rotated`, in which a row's state changes (None without any); these and the new ones;
    and whether one changes against `sign`."""
    steps, n_keys = state[:, :rotated] - before[:, :rotated], state.shape[1]
    moved = steps.any(0).nonzero()[:, 0]
    if len(moved) == 0:
        return None, slice(rotated, n_keys), False
    turns_back = bool((steps * sign < 0).any())
    if len(moved) == rotated:
        return slice(rotated), slice(n_keys), turns_back
    if len(moved) + n_keys - rotated > 2:
        return moved, torch.cat([moved, torch.arange(rotated, n_keys, device=moved.device)]), turns_back
    columns = [*moved.tolist(), *range(rotated, n_keys)]
    return _slice(columns[: len(moved)]), _slice(columns), turns_back


def _slice(columns: list[int]) -> slice:
    """One or two columns as a slice, which needs no copy."""
    return slice(columns[0], columns[-1] + 1, max(1, columns[-1] - columns[0]))


def _positions(mask: Any, tokens: Tensor, cache: Cache | None) -> Tensor:
    """The positions of new tokens: behind each row's last key, and from 0 on behind padding on the left."""
    n_rows, n_tokens, device = tokens.shape[0], tokens.shape[1], tokens.device
    steps, seen = torch.arange(n_tokens, device=device)[None], 0 if cache is None else cache.get_seq_length()
    last = None if cache is None else keys.last_positions(cache)
    if last is not None and len(last) != n_rows:
        last = None  # the cache itself refuses another number of rows
    positions = steps + seen if last is None else steps + 1 + last.to(device)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return positions
    traced = torch.compiler.is_compiling() and isinstance(seen, Tensor)
    if not traced and mask.shape[1] < n_tokens + int(seen):  # not a mask of all tokens
        return positions
    columns, visible = (steps[0] + seen).clamp(max=mask.shape[1] - 1), mask.to(device) != 0
    counts = visible.cumsum(1).index_select(1, columns)
    is_padding = counts[:, :1] == visible.index_select(1, columns[:1])  # all that came before
    if last is not None:
        is_padding = is_padding & (last.to(device) <= 0)
    n_pads = (counts == 0).sum(1, keepdim=True)
    return torch.where(is_padding, (steps - n_pads).clamp(min=0), positions)


def _runs(rungs: Tensor) -> list[tuple[int, int]]:
    """Ranges of columns (start, stop) in which every row is on one rung."""
    edges = (rungs[:, 1:] != rungs[:, :-1]).any(0).nonzero()[:, 0] + 1
    ends = [0, *edges.tolist(), rungs.shape[1]]
    return list(pairwise(ends))


def _tiles_of_runs(mask: BlockMask, runs: list[tuple[int, int]]) -> list[list[Tile]] | None:
    """The tiles of each run of queries, counted from its first; None if some need a mask."""
    ranges = ranges_of(mask)
    if ranges is None:
        return None
    low, high = ranges
    return _all(tiles.of_ranges((low[:, start:stop], high[:, start:stop])) for start, stop in runs)


def _tiles_of_branches(
    branches: tuple[Branch, ...], positions: Tensor, places: Tensor, mask: BlockMask | Tensor | None
) -> list[list[Tile]] | None:
    """The tiles of each branch; None if some need a mask, and the device's kernel takes none."""
    seen = ranges_of(mask)
    ranges = [tiles.of_branch(branch, positions, places, seen) if seen else None for branch in branches]
    on_cpu = positions.device.type == "cpu"
    found = _all(each and tiles.of_ranges(each, bands=on_cpu) for each in ranges)
    if found is None and on_cpu:
        return [tiles.blocks(branch, positions, places) for branch in branches]
    return found


def _all(lists: Iterable[list[Tile] | None]) -> list[list[Tile]] | None:
    """The lists, or None if one of them is None."""
    found = list(lists)
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else None


def _joined(weights: list[Tensor | None], n_keys: int) -> Tensor | None:
    """The attention weights of all queries, if the model's function returns them."""
    if not weights or any(weight is None for weight in weights):
        return None
    return torch.cat([nn.functional.pad(w, (0, n_keys - w.shape[-1])) for w in weights if w is not None], dim=2)


# ----------------------------------------------------------------------------------------- the hook


class BeforeForward:
    """Forward pre-hook of the base model: adds a `Call` built from mask, positions and cache.

    A class, not a closure, so that it survives deepcopy and pickle.

    Args:
        relays: whether layers drop keyword arguments, and so the call.
    """

    def __init__(self, base: nn.Module, rotary_name: str, n_layers: int, relays: bool) -> None:
        parameters = inspect.signature(base.forward).parameters.values()
        self.parameters = tuple(each.name for each in parameters if each.kind != each.VAR_KEYWORD)
        self.rotary_name = rotary_name
        self.n_layers = n_layers
        self.relays = relays

    def __call__(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        given = {**dict(zip(self.parameters, args)), **kwargs}
        rotary: InAttentionRotary = base.get_submodule(self.rotary_name)
        if base.config._attn_implementation not in IMPLEMENTATIONS.values():
            raise RuntimeError(
                f"the attention implementation was set to {base.config._attn_implementation!r} after the model was "
                "extended, so no query or key would be rotated. Call restore_context(model), set 'sdpa', 'eager' or "
                "'flex_attention', and extend again. Continuous batching (generate_batch) and flash_attention_2 need a "
                "method that changes frequencies, such as 'yarn'."
            )
        if given.get("cache") is not None:  # whose blocks attention itself fills, with keys that it takes for rotated
            raise ValueError(
                f"in-attention RoPE does not support the {type(given['cache']).__name__} of continuous batching. Call "
                "model.generate, or use a method that changes frequencies, such as 'yarn'."
            )
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given["inputs_embeds"]
        cache = self._cache(base, rotary, given)
        positions = given.get("position_ids")
        if positions is None:
            positions = _positions(given.get("attention_mask"), tokens, cache)
        given["position_ids"] = positions
        if positions.ndim == 3 and bool((positions == positions[:1]).all()):  # mrope, of text alone
            positions = positions[0]
        if positions.ndim != 2:
            raise ValueError(
                f"in-attention RoPE needs one position a token, got positions of shape {tuple(positions.shape)} that "
                "differ by axis, as those of images do (mrope). Pass text alone, or use a method that changes "
                "frequencies, such as 'yarn'."
            )
        attentions = given.get("output_attentions") or getattr(base.config, "output_attentions", False)
        if attentions and isinstance(rotary.untempered, PositionRemapping):
            raise ValueError(
                f"{rotary.untempered.name} does not materialise attention weights, so output_attentions=True is not "
                "supported. Leave it out."
            )
        positions = positions.to(tokens.device).expand(tokens.shape[0], -1)
        incoming = None if cache is None else keys.expect(cache, positions, rotary.owner, self.n_layers)
        if isinstance(given.get("attention_mask"), BlockMask):
            given["attention_mask"] = given["attention_mask"].whole()
        call = given[KEYWORD] = Call(rotary, positions, cache)
        call.incoming = incoming
        if self.relays:
            if base.training and getattr(base, "gradient_checkpointing", False):
                raise ValueError(
                    f"the layers of {type(base).__name__} drop keyword arguments, so with in-attention RoPE they "
                    "cannot run again in the backward pass. Call model.gradient_checkpointing_disable()."
                )
            call.outer = _running.get()
            _running.set(call)
        return (), given

    def _cache(self, base: Any, rotary: InAttentionRotary, given: dict[str, Any]) -> Cache | None:
        cache, use_cache = given.get("past_key_values"), given.get("use_cache")
        if isinstance(cache, EncoderDecoderCache):
            raise TypeError("an encoder-decoder cache cannot hold pre-RoPE keys. Extend a decoder-only model.")
        if isinstance(rotary.untempered, RopeScaling) and rotary.untempered.of_the_call:
            if cache is not None or use_cache:
                raise ValueError(
                    f"{rotary.untempered.name} has one scale for the whole call, so keys cannot be cached. Pass "
                    "use_cache=False, or use dynamic_ntk, which is exact with a cache."
                )
            given["use_cache"] = False
            return None
        if cache is None:
            if use_cache is None:
                use_cache = getattr(base.config, "use_cache", False)
            if use_cache and not (base.training and getattr(base, "gradient_checkpointing", False)):
                cache = given["past_key_values"] = DynamicCache(config=base.config)
        return cache


class Finish:
    """Forward hook of the base model, also after an error: tells the cache whether all layers have run."""

    def __call__(self, base: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        call = kwargs.get(KEYWORD)  # None if the pre-hook has failed
        if call is not None and call.incoming is not None:
            call.incoming.finished = output is not None


class AfterForward:
    """Forward hook of the base model: ends what `BeforeForward` began for layers that drop keyword arguments."""

    def __init__(self, rotary_name: str) -> None:
        self.rotary_name = rotary_name

    def __call__(self, base: Any, args: Any, output: Any) -> None:
        call = _running.get()
        if call is not None and call.rotary is base.get_submodule(self.rotary_name):  # else its pre-hook has failed
            _running.set(call.outer)


# On import, so that unpickled extended models find them.
for _name in IMPLEMENTATIONS.values():
    AttentionInterface.register(_name, in_attention_rope)
    AttentionMaskInterface.register(_name, block_mask)

"""A forward pass with in-attention RoPE, and the attention function that transformers calls in each layer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from ctxext.attention import keys
from ctxext.attention.masks import BlockMask, Rows, additive, block_mask, explicit
from ctxext.attention.rotary import InAttentionRotary, Layer, rotate
from ctxext.attention.softmax import Part, Softmax
from ctxext.methods import Branch, PositionRemapping, RopeScaling

# The keyword argument that passes the `Call` to each layer's attention function.
KEYWORD = "in_attention_rope"
IMPLEMENTATIONS = {"sdpa": "in_attention_sdpa", "eager": "in_attention_eager"}


def in_attention_rope(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """An attention function for transformers' attention interface: rotates, then calls the model's own function."""
    call = kwargs.pop(KEYWORD, None)
    if call is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without the positions of its tokens. A model with "
            "in-attention RoPE runs as a whole. Call restore_context(model) before you use its layers alone, or build "
            "another model from its config."
        )
    return call.attend(module, query, key, value, attention_mask, **kwargs)


def _register() -> None:
    """Register the attention functions and their masks with transformers, under new names.

    Runs on import, so that unpickled extended models find them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in IMPLEMENTATIONS.values():
        AttentionInterface.register(name, in_attention_rope)
        AttentionMaskInterface.register(name, block_mask)


def own_attention(model: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that `model` calls under `implementation`: transformers', or its family's eager one.

    Raises:
        ValueError: its family has no such function.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    for module in model.modules():
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is not None and hasattr(module, "layer_idx"):
            return own
    raise ValueError(
        f"{type(model).__name__} has attention code of its own that does not go through transformers' attention "
        "interface, so nothing can be rotated in attention in it."
    )


class Call:
    """One forward pass: the positions of its tokens, and its cache.

    Attributes:
        positions: of the queries, in tokens, of shape (batch, query).
    """

    def __init__(self, rotary: InAttentionRotary, positions: Tensor, cache: Cache | None) -> None:
        self.rotary = rotary
        self.positions = positions
        self.cache = cache
        # Values shared by all layers are computed by the first one that needs them.
        self._shared: dict[Any, Any] = {}

    def shared(self, name: Any, make: Callable[[], Any]) -> Any:
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of one layer, in transformers' shapes: (batch, heads, tokens, head_dim) to (batch, tokens,
        …)."""
        rotary, layer = self.rotary, self.rotary.layers[module.layer_idx]
        mask = explicit(mask, module, query, key, kwargs.get("is_causal"))
        if layer.convention.pairs == "none":
            return self._own(module, query, key, value, mask, **kwargs)
        places = keys.positions_of(self.cache, module.layer_idx, key.shape[2], self.positions)
        if layer.within or rotary.method is None:
            kind = (layer.within, key.shape[2])
            query = rotate(query, self.shared("plain", lambda: rotary.as_it_was(self.positions)), layer.convention)
            key = rotate(key, self.shared(("plain", kind), lambda: rotary.as_it_was(places)), layer.convention)
            return self._own(module, query, key, value, mask, **kwargs)
        if isinstance(rotary.method, RopeScaling):
            return self._scaled(module, layer, places, query, key, value, mask, **kwargs)
        return self._remapped(module, layer, places, query, key, value, mask, **kwargs)

    def _own(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call the model's own attention function; with mask None every query attends to every key."""
        batch, heads, n_queries, head_dim = query.shape
        is_causal = False
        if isinstance(mask, BlockMask):
            # sdpa has a flag for the square causal mask, and a single last query attends to every key.
            is_causal = mask.is_causal and n_queries == key.shape[2] and not self.rotary.additive_masks
            mask = None if is_causal or (mask.is_causal and n_queries == 1) else mask.whole()
        if mask is not None and self.rotary.additive_masks:
            mask = additive(mask, query.dtype)
        groups = heads // key.shape[1]
        shared_mask = mask is None or mask.shape[1] == 1
        kwargs = {**kwargs, "is_causal": is_causal}
        if torch.compiler.is_compiling() and n_queries == 1 < groups and shared_mask and not self.rotary.additive_masks:
            # When compiled, transformers copies keys and values for every query of a group; in eager mode it packs the
            # queries.
            packed = query.reshape(batch, key.shape[1], groups, head_dim)
            output, _ = self.rotary.attend(_Ungrouped(), packed, key, value, mask, **kwargs)
            return output.transpose(1, 2).reshape(batch, 1, heads, value.shape[3]), None
        return self.rotary.attend(module, query, key, value, mask, **kwargs)

    # -------------------------------------------------------------------------- scaled frequencies

    def _scaled(
        self,
        module: Any,
        layer: Layer,
        places: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        rotary, positions = self.rotary, self.positions
        assert isinstance(rotary.method, RopeScaling)
        n_queries, n_keys = query.shape[2], key.shape[2]

        def turned(x: Tensor, where: Tensor, name: Any, used: tuple[Tensor, Tensor]) -> Tensor:
            return rotate(x, self.shared(name, lambda: rotary.scaled(where, *used)), layer.convention)

        if rotary.method.of_the_call:
            used = self.shared("used", lambda: rotary.of_length(positions.amax(1) + 1))
            query = turned(query, positions, "queries", used)
            return self._own(module, query, turned(key, places, "keys", used), value, mask, **kwargs)
        rungs = self.shared("rungs", lambda: rotary.rungs(positions))
        if n_queries == 1:
            used = self.shared("used", lambda: rotary.of_rung(rungs[:, 0]))
            query = turned(query, positions, "queries", used)
            key = self._rotated_keys(module, layer, places, key, rungs[:, 0], used, turned)
            return self._own(module, query, key, value, mask, **kwargs)
        if torch.compiler.is_compiling():
            # The rung of each query is unknown here, so each rung is computed for all queries.
            output: Any = None
            for rung in range(rotary.rung_lengths.shape[0]):
                used = rotary.of_rung(torch.full_like(rungs[:, 0], rung))
                turned_query = rotate(query, rotary.scaled(positions, *used), layer.convention)
                turned_key = rotate(key, rotary.scaled(places, *used), layer.convention)
                found, _ = self._own(module, turned_query, turned_key, value, mask, **kwargs)
                output = found if output is None else torch.where((rungs == rung)[..., None, None], found, output)
            return output, None
        softmax = _softmax(module, kwargs)
        outputs, weights = [], []
        for start, stop in self.shared("runs", lambda: _runs(rungs)):
            rows = Rows.of(mask, slice(start, stop), n_keys)
            used, end = rotary.of_rung(rungs[:, start]), rows.stop
            # Not shared between layers: the tables of all rungs together would be as large as the keys.
            block = rotate(query[:, :, start:stop], rotary.scaled(positions[:, start:stop], *used), layer.convention)
            seen = rotate(key[:, :, :end], rotary.scaled(places[:, :end], *used), layer.convention)
            if softmax.fused(query) and not rotary.additive_masks:
                outputs += _in_blocks(softmax, block, seen, value, rows)
                continue
            here = {**kwargs, "position_ids": positions[:, start:stop]}
            all_rows = stop - start == n_queries  # then a causal mask need not be materialised
            part = mask if all_rows and end == n_keys else rows.block(0, end)
            output, weight = self._own(module, block, seen, value[:, :, :end], part, **here)
            outputs.append(output)
            weights.append(weight)
        return torch.cat(outputs, dim=1), _joined(weights, n_keys)

    def _rotated_keys(
        self,
        module: Any,
        layer: Layer,
        places: Tensor,
        key: Tensor,
        rung: Tensor,
        used: Any,
        turned: Callable[..., Tensor],
    ) -> Tensor:
        """All keys rotated for a single query, from the cache's rotated copy if it has one."""
        store = None if self.cache is None else self.cache.layers[module.layer_idx]
        n_keys = key.shape[2]
        tracked = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not self.rotary.rotated_copy or store is None or store.is_compileable or tracked:
            # All layers share one buffer.
            room = None if tracked else self.shared(("room", key.shape, key.device), lambda: _room_for(key))
            tables = self.shared(("keys", n_keys), lambda: self.rotary.scaled(places, *used))
            return rotate(key, tables, layer.convention, room)
        kept = store.rotated
        fits = kept is not None and kept.shape[0] == key.shape[0] and kept.shape[2] == n_keys - 1
        if fits and self.shared("steady", lambda: torch.equal(store.rung, rung)):
            return store.append_rotated(turned(key[:, :, -1:], places[:, -1:], "new key", used))
        store.rotated, store.rung = turned(key, places, ("keys", n_keys), used), rung
        store._rotated_room = None
        return store.rotated

    # -------------------------------------------------------------------------- remapped positions

    def _remapped(
        self,
        module: Any,
        layer: Layer,
        places: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        rotary, positions = self.rotary, self.positions
        method = rotary.method
        assert isinstance(method, PositionRemapping)
        n_queries, n_keys = query.shape[2], key.shape[2]
        times = self.shared("times", lambda: method.query_scaling(rotary.rope, positions))
        if times is not None:
            query = query * times[:, None, :, None].to(query.dtype)
        if n_queries == 1:
            # A single query: each key at its distance from the query, then the model's own attention.
            def behind() -> tuple[Tensor, Tensor]:
                return rotary.plain(-method.distance(rotary.rope, positions, places))

            query = rotate(
                query, self.shared("zero", lambda: rotary.plain(torch.zeros_like(positions))), layer.convention
            )
            key = rotate(key, self.shared(("behind", n_keys), behind), layer.convention)
            return self._own(module, query, key, value, mask, **kwargs)
        branches = self.shared("branches", lambda: method.branches(rotary.rope))
        # By index, as functions cannot be dictionary keys in a compiled graph; branches may share a function.
        seen: list[Tensor] = []
        for index, branch in enumerate(branches):
            done = [seen[i] for i in range(index) if branches[i].key is branch.key]
            if not done:
                at = self.shared(("key", index, n_keys), lambda: rotary.plain(branch.key(places.double())))  # noqa: B023
                done = [rotate(key, at, layer.convention)]
            seen.append(done[0])
        softmax = _softmax(module, kwargs)
        size = softmax.block_size(query, n_keys)
        outputs = []
        for start in range(0, n_queries, size):
            rows = Rows.of(mask, slice(start, min(start + size, n_queries)), n_keys)
            here = positions[:, rows.rows]
            parts = []
            for index, branch in enumerate(branches):
                possible, certain = (0, rows.stop), (0, 0)
                if softmax.fused(query):
                    possible, certain = self.shared(
                        ("extent", index, start, size, n_keys),
                        lambda: _extent(branch, here, places),  # noqa: B023
                    )
                if possible[1] <= possible[0]:
                    continue
                at = self.shared(("at", index, start, size), lambda: rotary.plain(branch.query(here.double())))  # noqa: B023
                block = rotate(query[:, :, rows.rows], at, layer.convention)
                parts.append(Part(block, seen[index], _holds(branch, here, places), possible, certain))
            outputs.append(softmax(parts, value, rows))
        return torch.cat(outputs, dim=1), None


class _Ungrouped:
    """The module attributes that transformers' sdpa function reads, for queries packed by key head."""

    num_key_value_groups = 1
    is_causal = False


def _room_for(key: Tensor) -> Tensor:
    return torch.empty(key.shape, dtype=torch.float32, device=key.device)


def _softmax(module: Any, kwargs: dict[str, Any]) -> Softmax:
    scaling = kwargs.get("scaling")
    return Softmax(
        scaling=module.head_dim**-0.5 if scaling is None else scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=kwargs.get("dropout", 0.0),
    )


def _runs(rungs: Tensor) -> list[tuple[int, int]]:
    """Ranges of columns (start, stop) in which every row is on one rung."""
    edges = (rungs[:, 1:] != rungs[:, :-1]).any(0).nonzero()[:, 0] + 1
    ends = [0, *edges.tolist(), rungs.shape[1]]
    return list(pairwise(ends))


def _in_blocks(softmax: Softmax, query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> list[Tensor]:
    size, outputs = softmax.block_size(query, key.shape[2]), []
    for start in range(0, query.shape[2], size):
        stop = min(start + size, query.shape[2])
        here = Rows.of(rows.mask, slice(rows.rows.start + start, rows.rows.start + stop), key.shape[2])
        outputs.append(softmax([Part(query[:, :, start:stop], key)], value, here))
    return outputs


def _joined(weights: list[Tensor | None], n_keys: int) -> Tensor | None:
    """The attention weights of all queries, if the model's function returns them."""
    if not weights or any(weight is None for weight in weights):
        return None
    return torch.cat([nn.functional.pad(w, (0, n_keys - w.shape[-1])) for w in weights if w is not None], dim=2)


def _holds(branch: Branch, here: Tensor, places: Tensor) -> Callable[[int, int], Tensor]:
    return lambda start, stop: branch.holds(here[:, :, None], places[:, None, start:stop])[:, None]


def _extent(branch: Branch, here: Tensor, places: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """The columns that contain every pair of the block in `branch`, and those where all pairs are in it."""
    low, high = branch.bucket(here).aminmax(dim=1, keepdim=True)
    bucket = branch.bucket(places)
    possible = ((high - bucket >= branch.first) & (low - bucket < branch.stop)).any(0).nonzero()
    certain = ((low - bucket >= branch.first) & (high - bucket < branch.stop)).all(0)
    if not len(possible):
        return (0, 0), (0, 0)
    inside = certain.nonzero()
    low_edge, high_edge = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
    if not bool(certain[low_edge:high_edge].all()):
        low_edge = high_edge = 0
    return (int(possible[0]), int(possible[-1]) + 1), (low_edge, high_edge)


# ----------------------------------------------------------------------------------------- the hook


def parameter_names(base: nn.Module) -> tuple[str, ...]:
    """The argument names of a base model's forward, in order."""
    return tuple(name for name, p in inspect.signature(base.forward).parameters.items() if p.kind != p.VAR_KEYWORD)


class BeforeForward:
    """Forward pre-hook of the base model: adds a `Call` built from mask, positions and cache.

    A class, not a closure, so that it survives deepcopy and pickle.
    """

    def __init__(self, rotary_name: str, parameters: tuple[str, ...], n_layers: int) -> None:
        self.rotary_name = rotary_name
        self.parameters = parameters
        self.n_layers = n_layers

    def __call__(
        self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {**dict(zip(self.parameters, args)), **kwargs}
        rotary: InAttentionRotary = getattr(base, self.rotary_name)
        if base.config._attn_implementation not in IMPLEMENTATIONS.values():
            raise RuntimeError(
                f"the attention implementation was set to {base.config._attn_implementation!r} after the model was "
                "extended, so nothing would be rotated. Call restore_context(model), set it, and extend again."
            )
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given["inputs_embeds"]
        cache = self._cache(base, rotary, given)
        positions = given.get("position_ids")
        if positions is None:
            seen = cache.get_seq_length() if cache is not None else 0
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None] + seen
        if positions.ndim != 2:
            raise ValueError(
                f"in-attention RoPE takes positions of shape (batch, tokens), got {tuple(positions.shape)}: "
                "positions of several kinds, as multimodal models have them, cannot be rotated in attention."
            )
        attentions = given.get("output_attentions") or getattr(base.config, "output_attentions", False)
        if attentions and isinstance(rotary.method, PositionRemapping):
            raise ValueError(
                f"{rotary.method.name} never holds attention weights, so output_attentions=True has nothing to give. "
                "Leave it out."
            )
        given["position_ids"] = positions
        positions = positions.to(tokens.device).expand(tokens.shape[0], -1)
        if cache is not None:
            keys.expect(cache, positions, rotary.owner, self.n_layers)
        if isinstance(given.get("attention_mask"), BlockMask):
            given["attention_mask"] = given["attention_mask"].whole()
        given[KEYWORD] = Call(rotary, positions, cache)
        return (), given

    def _cache(self, base: Any, rotary: InAttentionRotary, given: dict[str, Any]) -> Cache | None:
        cache, use_cache = given.get("past_key_values"), given.get("use_cache")
        if isinstance(rotary.method, RopeScaling) and rotary.method.of_the_call:
            if cache is not None or use_cache:
                raise ValueError(
                    f"{rotary.method.name} has one scale for the whole call, so no key can be kept for the next: pass "
                    "use_cache=False, or use dynamic_ntk, which is exact under a cache."
                )
            given["use_cache"] = False
            return None
        if cache is None:
            if use_cache is None:
                use_cache = getattr(base.config, "use_cache", False)
            if use_cache and not (base.training and getattr(base, "gradient_checkpointing", False)):
                cache = given["past_key_values"] = DynamicCache(config=base.config)
        return cache


_register()

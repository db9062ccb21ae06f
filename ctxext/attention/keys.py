"""Cache layers that store the positions of their keys, derived from any of transformers' own.

The class of a layer is replaced by a subclass, so storing, cropping, reordering and quantising still work. Positions
are stored in a second layer of the same kind, which follows every step. transformers' dynamic layer copies all keys and
values at every token; ours appends in place, and attention rotates its keys in place, so that a key is rotated again
only when its rotation changes.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


class Room:
    """Slots of shape (batch, heads, slot, dim), more than are filled, so that most tokens are appended in place."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        self.filled: Tensor | None = None

    def append(self, held: Tensor, new: Tensor) -> Tensor:
        """`held` and then `new`. Tensors that earlier calls returned keep their values.

        If `held` is not what the last call returned (it was cropped, reordered or moved), it is copied to new slots.
        """
        if len(held) != len(new):
            return torch.cat([held, new], dim=2)  # which raises; an assignment would repeat a single row
        first, stop, slots = held.shape[2], held.shape[2] + new.shape[2], self.slots
        usable = slots is not None and held is self.filled and stop <= slots.shape[2] and new.dtype == slots.dtype
        if slots is None or not usable or (slots.is_inference() and not torch.is_inference_mode_enabled()):
            shape, dtype = (*held.shape[:2], stop + 16 + stop // 64, held.shape[3]), (held.dtype, new.dtype)
            self.slots = slots = held.new_empty(shape, dtype=torch.promote_types(*dtype))
            slots[:, :, :first] = held
        slots.narrow(2, first, stop - first).copy_(new)
        self.filled = slots.narrow(2, 0, stop)
        return self.filled


class Incoming:
    """The positions of the next keys, stored once for all layers of which the positions before are one tensor.

    Attributes:
        positions: of shape (batch, tokens).
        finished: whether the pass that computes these keys came to its end (True) or failed (False); None within it.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.finished: bool | None = None
        self._stored: tuple[Tensor | None, dict[str, Any], Tensor] | None = None

    def store_in(self, places: Any, device: torch.device) -> Tensor:
        """Append them to the positions that `places` stores. Returns those of all keys, of shape (batch, keys)."""
        held = places.keys if places.is_initialized else None
        shares = type(places) is DynamicLayer and not torch.compiler.is_compiling()
        if shares and self._stored is not None:
            before, after, found = self._stored
            if found.device == device and held is before:
                places.__dict__.update(after)
                return found
        new = self.positions.to(device)
        nothing = new.new_empty((new.shape[0], 1, new.shape[1], 0))
        found = places.update(new[:, None, :, None], nothing)[0][:, 0, :, 0]
        if shares:
            self._stored = held, {**places.__dict__}, found
        return found


class PositionedLayer:
    """Mixin for a cache layer whose keys come before RoPE, and may be rotated in place since.

    Attributes:
        owner: the extension that computed the keys.
        incoming: the positions of the next keys; set before each forward pass, None after the update.
        key_positions: positions of the keys returned by the last update, of shape (batch, keys).
        appends: whether its keys are one tensor that grows, in which they can be rotated.
        rotated: how many of its first keys are rotated.
        state: what their rotation depends on, of shape (batch, at least as many).
        known: False if the keys were changed by hand, or as they were rotated.
    """

    owner: str
    incoming: Incoming | None
    key_positions: Tensor
    appends: bool
    rotated: int
    state: Tensor | None
    known: bool
    keys: Tensor
    values: Tensor
    _seen: tuple[Tensor, int | None] | None
    _places: CacheLayerMixin
    _rooms: defaultdict[str, Room]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        incoming = self.incoming
        if incoming is not None and incoming.finished is not None:
            incoming = None  # its pass has ended, so that these keys are of a model that is not extended
        if incoming is None and not int(self._places.get_seq_length()):
            self.owner = "no extension"
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        if incoming is None:
            raise RuntimeError(
                f"this cache was filled under {self.owner}, but the model is no longer extended in that way. "
                "Start from an empty cache."
            )
        appending = self.appends and int(self._places.get_seq_length())
        self._check_keys()
        # With gradients, a graph may hold the keys, and an append in place would count as a change of them.
        if not appending or torch.is_grad_enabled() or torch.compiler.is_compiling():
            found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        else:
            self.keys = self._rooms["keys"].append(self.keys, key_states)
            self.values = self._rooms["values"].append(self.values, value_states)
            found = self.keys, self.values
        self.key_positions = incoming.store_in(self._places, key_states.device)
        if self.appends and self.keys.shape[2] != self.key_positions.shape[1]:
            raise RuntimeError(_UNKNOWN)
        self.incoming = None
        self._see()
        return found

    @contextmanager
    def rotating(self, state: Tensor) -> Iterator[None]:
        """Within a `with` block all keys are rotated in place as `state` says; if it fails, they are not used again."""
        self.state, self.rotated, self.known = state, state.shape[1], False
        yield
        self.known = True
        self._see()

    def _see(self) -> None:
        """Remember the keys."""
        # Unrotated ones are not looked at in a traced graph, which would be compiled again for them.
        looks = self.rotated or not torch.compiler.is_compiling()
        self._seen = (self.keys, _version(self.keys)) if looks and self.keys is not None else None

    def _knows_keys(self) -> bool:
        """Whether the keys are those that were last seen, or an earlier part of them."""
        compiling = torch.compiler.is_compiling()
        if not self.known or (compiling and not self.rotated) or self._seen is None:
            return self.known
        keys, version = self._seen
        if compiling:  # a traced graph cannot read where tensors are
            return self.keys is keys
        there = self.keys is not None and self.keys.data_ptr() == keys.data_ptr()
        return there and version in (None, _version(self.keys))

    def _carried(self) -> dict[str, Any]:
        """The attributes of a deep copy or a pickle, whose tensors begin to count their changes."""
        return {**self.__dict__, "known": self._knows_keys(), "_seen": self._seen and (self.keys, None)}

    def __copy__(self) -> Any:
        """Of the same tensors, which go on counting: if one of both rotates or appends, the other is refused."""
        twin = _blank(stock_class(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def _check_keys(self) -> None:
        """Raise RuntimeError if `state` does not say how the keys are rotated."""
        if not self._knows_keys():
            raise RuntimeError(_UNKNOWN)
        if self.rotated:
            self.rotated = min(self.rotated, self.keys.shape[2])

    def forget_slots(self) -> None:
        self._rooms = defaultdict(Room)

    def offload(self) -> None:
        self.forget_slots()  # which would keep keys and values on the device
        with self._rearranged():
            super().offload()  # type: ignore[misc]

    def prefetch(self) -> None:
        with self._rearranged():
            super().prefetch()  # type: ignore[misc]

    @contextmanager
    def _rearranged(self) -> Iterator[None]:
        """Within a `with` block the keys are moved or rearranged. Those that were unknown before stay so."""
        known, self.known = self._knows_keys(), False
        yield
        self.known = known
        self._see()


_UNKNOWN = (
    "this cache has keys that were changed by hand, or a forward pass was interrupted: their rotation is unknown. "
    "Start from an empty cache. To take tokens back, use cache.crop; to keep a state, copy.deepcopy the whole cache."
)


def _version(keys: Tensor) -> int | None:
    """How often the tensor was changed in place; None if torch does not count."""
    return None if torch.compiler.is_compiling() or keys.is_inference() else keys._version


def _followed(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        self.forget_slots()
        with self._rearranged():
            getattr(self._places, name)(*args, **kwargs)
            getattr(super(type(self), self), name)(*args, **kwargs)
            if self.rotated:
                self.state = _FOLLOWED[name](self.state, *args, *kwargs.values())
                self.rotated *= self.keys is not None  # fewer keys than that are counted at the next update
        if name == "reset":
            self.incoming, self.known = None, True

    method.__name__ = name
    return method


def _as_it_is(state: Tensor, *_: Any) -> Tensor:
    return state


# Operations on a cache, and what each does to the rows of a state.
_FOLLOWED: dict[str, Callable[..., Tensor]] = {
    "reset": _as_it_is,
    "crop": _as_it_is,
    "reorder_cache": lambda state, rows: state.index_select(0, rows.to(state.device)),
    "batch_repeat_interleave": lambda state, repeats: state.repeat_interleave(repeats, dim=0),
    "batch_select_indices": lambda state, rows: state[rows],
    "activate_past_recording": _as_it_is,
}


@functools.cache
def positioned(base: type[CacheLayerMixin]) -> type[CacheLayerMixin]:
    """The subclass of a cache layer's class that stores positions."""
    members = {name: _followed(name) for name in _FOLLOWED if hasattr(base, name)}
    # A layer_type attribute would register the class with transformers in place of the base class.
    members |= {
        "__module__": __name__,
        "_layer_type": None,
        "appends": base.update is DynamicLayer.update,
        "__reduce_ex__": lambda self, protocol: (_blank, (base,), self._carried()),
    }
    return type(f"Positioned{base.__name__.lstrip('_')}", (PositionedLayer, base), members)


def _blank(base: type[CacheLayerMixin]) -> Any:
    cls = positioned(base)
    return cls.__new__(cls)


def stock_class(layer: Any) -> type:
    """The class of a cache layer without the mixin."""
    return type(layer).__mro__[2] if isinstance(layer, PositionedLayer) else type(layer)


def _places_for(layer: Any) -> CacheLayerMixin:
    if isinstance(layer, StaticSlidingWindowLayer):
        return StaticSlidingWindowLayer(max_cache_len=layer.max_cache_len, sliding_window=layer.max_cache_len)
    if isinstance(layer, StaticLayer):
        return StaticLayer(max_cache_len=layer.max_cache_len)
    if isinstance(layer, DynamicSlidingWindowLayer):
        places = DynamicSlidingWindowLayer(sliding_window=layer.sliding_window)
        # Assisted decoding asks for the past length before the first forward pass.
        places.record_past = getattr(layer, "record_past", False)
        return places
    if isinstance(layer, DynamicLayer):
        return DynamicLayer()
    raise TypeError(
        f"unsupported cache layer: {type(layer).__name__}. "
        "Use transformers' DynamicCache, StaticCache or QuantizedCache."
    )


def expect(cache: Cache, positions: Tensor, owner: str, n_layers: int) -> Incoming:
    """Prepare `cache` for a forward pass at `positions` (batch, tokens), under the extension `owner`.

    Raises ValueError if it holds keys from before the extension, or from another one; RuntimeError if only some of its
    layers hold those of an interrupted pass.
    """
    if not torch.compiler.is_compiling():
        _refuse_interrupted(cache)
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) < n_layers:
            cache.layers.append(cache.layer_class_to_replicate())
    incoming = Incoming(positions)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PositionedLayer):
            held: Any = layer
            if held.owner != owner and int(held.get_seq_length()):
                raise ValueError(
                    f"this cache was filled under {layer.owner}, but the model is now extended by {owner}. "
                    "Start from an empty cache."
                )
            layer.owner = owner
        elif isinstance(layer, CacheLayerMixin):
            if layer.is_initialized and int(layer.get_seq_length()):
                raise ValueError(
                    f"this cache holds {int(layer.get_seq_length())} tokens from before the model was extended, or was "
                    "rebuilt from tensors: the positions of its keys are unknown. Start from an empty cache. To copy "
                    "one, use copy.deepcopy."
                )
            new = _blank(type(layer))
            new.__dict__.update(layer.__dict__)
            new.owner, new._places = owner, _places_for(layer)
            new.rotated, new.state, new.known, new._seen = 0, None, True, None
            new.forget_slots()
            layer = cache.layers[index] = new
        else:
            continue  # linear attention has no keys
        layer.incoming = incoming
    return incoming


def _refuse_interrupted(cache: Cache) -> None:
    """Raise RuntimeError if the last pass stored the keys of some layers only, and these were not cropped since."""
    layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, PositionedLayer)}
    waiting = [i for i, each in layers.items() if each.incoming is not None and not each.incoming.finished]
    if not waiting or len(waiting) == len(layers):
        return
    sizes = {index: int(layer.get_seq_length()) for index, layer in layers.items()}  # type: ignore[attr-defined]
    other = next((index for index in layers if sizes[index] != sizes[waiting[0]]), None)
    if other is not None:
        raise RuntimeError(
            f"layer {waiting[0]} has {sizes[waiting[0]]} keys, but layer {other} has {sizes[other]}: a forward pass "
            "was interrupted. Start from an empty cache, or crop each of cache.layers to one length."
        )


def last_positions(cache: Cache) -> Tensor | None:
    """The position of each row's last key, of shape (batch, 1); None if no layer has known any."""
    layer = next((layer for layer in cache.layers if isinstance(layer, PositionedLayer)), None)
    if layer is None or not layer._places.is_initialized:
        return None
    places: Any = layer._places
    held, n_keys = places.keys[:, 0, :, 0], places.get_seq_length()
    if not isinstance(n_keys, Tensor):
        return held[:, min(n_keys, held.shape[1]) - 1, None] if n_keys else None
    last = held.index_select(1, (n_keys.reshape(1) - 1).clamp(0, held.shape[1] - 1))
    return torch.where(n_keys.reshape(1, 1) > 0, last, -1)


def positions_of(cache: Cache | None, layer_idx: int, n_keys: int, queries: Tensor) -> Tensor | None:
    """The positions of the keys in attention, (batch, keys): the cache layer's, or without a cache the queries' own.

    None if the layer attends to other keys, such as those of an earlier layer.
    """
    if cache is not None:
        layer = cache.layers[layer_idx]
        if isinstance(layer, PositionedLayer) and layer.incoming is None:
            return layer.key_positions
    return queries if n_keys == queries.shape[1] else None

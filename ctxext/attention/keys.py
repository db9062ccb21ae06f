"""Cache layers that store the positions of their keys, derived from any of transformers' own.

The class of a layer is replaced by a subclass, so storing, cropping, reordering and quantising still work. Positions
are stored in a second layer of the same kind, which follows every step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)


class PositionedLayer:
    """Mixin for a cache layer that holds pre-RoPE keys.

    Attributes:
        owner: the extension that computed the keys.
        incoming: positions of the next keys, of shape (batch, tokens); set before each forward pass.
        key_positions: positions of the keys returned by the last update, of shape (batch, keys).
        rotated: a copy of the keys as the last single query saw them, if enabled.
        state: what its rotations depended on, of shape (batch, keys).
    """

    owner: str
    incoming: Tensor | None
    key_positions: Tensor
    rotated: Tensor | None
    state: Tensor | None
    _rotated_room: Tensor | None
    _places: CacheLayerMixin

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        incoming, self.incoming = self.incoming, None
        if incoming is None and not int(self._places.get_seq_length()):
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        if incoming is None:
            raise RuntimeError(
                f"this cache was filled under {self.owner}, but the model is no longer extended in that way. "
                "Start from an empty cache."
            )
        keys, values = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        incoming = incoming.to(keys.device)
        nothing = incoming.new_empty((incoming.shape[0], 1, incoming.shape[1], 0))
        self.key_positions = self._places.update(incoming[:, None, :, None], nothing)[0][:, 0, :, 0]
        return keys, values

    def append_rotated(self, new: Tensor) -> Tensor:
        """Append one key to the rotated copy, in place if there is room; returns the copy."""
        assert self.rotated is not None
        n_keys, room = self.rotated.shape[2], self._rotated_room
        frozen = room is not None and room.is_inference() and not torch.is_inference_mode_enabled()
        if room is None or frozen or n_keys == room.shape[2]:
            # With spare room, so that few steps need a copy.
            shape = (*self.rotated.shape[:2], n_keys + 64 + n_keys // 32, self.rotated.shape[3])
            self._rotated_room = room = self.rotated.new_empty(shape)
            room[:, :, :n_keys] = self.rotated
        room[:, :, n_keys : n_keys + 1] = new
        self.rotated = room[:, :, : n_keys + 1]
        return self.rotated


def _followed(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.rotated = self.state = self._rotated_room = None
        getattr(self._places, name)(*args, **kwargs)
        return getattr(super(type(self), self), name)(*args, **kwargs)

    method.__name__ = name
    return method


_FOLLOWED = (
    "reset", "crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "activate_past_recording",
)  # fmt: skip


@functools.cache
def positioned(base: type[CacheLayerMixin]) -> type[CacheLayerMixin]:
    """The subclass of a cache layer's class that stores positions."""
    members = {name: _followed(name) for name in _FOLLOWED if hasattr(base, name)}
    # A layer_type attribute would register the class with transformers in place of the base class.
    members |= {
        "__module__": __name__,
        "_layer_type": None,
        "__reduce_ex__": lambda self, protocol: (_blank, (base,), self.__dict__),
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


def expect(cache: Cache, positions: Tensor, owner: str, n_layers: int) -> None:
    """Prepare `cache` for a forward pass at `positions` (batch, tokens), under the extension `owner`.

    Raises ValueError if it holds keys from before the extension, or from another one.
    """
    if isinstance(cache, EncoderDecoderCache):
        raise TypeError("an encoder-decoder cache cannot hold pre-RoPE keys. Extend a decoder-only model.")
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) < n_layers:
            cache.layers.append(cache.layer_class_to_replicate())
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
                    f"this cache holds {int(layer.get_seq_length())} tokens from before the model was extended by "
                    f"{owner}: their keys are already rotated. Start from an empty cache."
                )
            new = _blank(type(layer))
            new.__dict__.update(layer.__dict__)
            new.owner, new._places = owner, _places_for(layer)
            new.rotated = new.state = new._rotated_room = None
            layer = cache.layers[index] = new
        else:
            continue  # linear attention has no keys
        layer.incoming = positions


def positions_of(cache: Cache | None, layer_idx: int, n_keys: int, queries: Tensor) -> Tensor | None:
    """The positions of the keys in attention, (batch, keys): the cache layer's, or without a cache the queries' own.

    None if the layer attends to other keys, such as those of an earlier layer.
    """
    if cache is not None:
        layer = cache.layers[layer_idx]
        if isinstance(layer, PositionedLayer) and layer.incoming is None:
            return layer.key_positions
    return queries if n_keys == queries.shape[1] else None

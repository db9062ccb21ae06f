"""In-attention RoPE under every kind of cache, and through all that is done to one: against the same slow truth."""

import copy
import math
import pickle
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from families import LENGTH, tiny_model, token_ids
from in_attention_reference import (
    CHUNKS,
    METHODS,
    N_TOKENS,
    assert_rows,
    extended,
    padded,
    read,
    rows,
    slow_model,
    soft_model,
    truth,
)
from survey.small import small_model
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    Fp8QuantizedLayer,
    HQQQuantizedLayer,
    QuantizedLayer,
    QuantoQuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.utils import is_hqq_available

from ctxext import extend_context
from ctxext.attention import call, rotary, softmax, tiles
from ctxext.attention.call import Call
from ctxext.attention.keys import Incoming, Room, stock_class
from ctxext.methods import Branch, PositionRemapping

ROOM = N_TOKENS + 9
CACHES = {
    "dynamic": (lambda config: DynamicCache(config=config), (DynamicLayer, DynamicSlidingWindowLayer)),
    "unconfigured": (lambda config: DynamicCache(), (DynamicLayer, DynamicLayer)),
    "static": (lambda config: StaticCache(config=config, max_cache_len=ROOM), (StaticLayer, StaticSlidingWindowLayer)),
}
# Windows of all layers beyond the trained length; of one layer beyond it; of one layer within it.
WINDOWS = {
    "mistral-96": ("mistral", {"sliding_window": 96}),
    "gemma2-96": ("gemma2", {"sliding_window": 96}),
    "gemma2-32": ("gemma2", {}),
}
# One for each way through attention: scaled queries, keys whose branch changes, keys whose branches are all one.
KINDS = ["dynamic_ntk", "self_extend", "dca"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", 24)
    monkeypatch.setattr(softmax, "SCORES", 1)
    monkeypatch.setattr(rotary, "TILE", 1)


@pytest.mark.parametrize(
    ("method", "cache"),
    [
        *((method, cache) for method in METHODS for cache in ("dynamic", "static")),
        ("dynamic_ntk_fine", "dynamic"),
        ("dynamic_ntk", "unconfigured"),
    ],
)
def test_every_cache_holds_a_padded_batch(method: str, cache: str) -> None:
    model, batch = extended(method), padded(rows(), "left")
    store = CACHES[cache][0](model.config)
    assert_rows(read(model, batch, store, CHUNKS), truth(method), batch["attention_mask"])
    assert all(stock_class(layer) is CACHES[cache][1][0] for layer in store.layers)


@pytest.mark.parametrize(
    ("windows", "cache"), [(windows, cache) for windows in WINDOWS for cache in ("dynamic", "static")]
)
@pytest.mark.parametrize("method", KINDS)
def test_a_cache_that_drops_what_left_the_window(method: str, windows: str, cache: str) -> None:
    family, changes = WINDOWS[windows]
    model, batch = extended(method, family, **changes), padded(rows(), "left")
    store = CACHES[cache][0](model.config)
    assert_rows(read(model, batch, store, CHUNKS), truth(method, family, **changes), batch["attention_mask"])
    assert stock_class(store.layers[0]) is CACHES[cache][1][1]


def test_a_cache_that_drops_nothing_serves_windows_as_well() -> None:
    model, batch = extended("dynamic_ntk", "mistral", sliding_window=96), padded(rows(), "left")
    assert_rows(
        read(model, batch, DynamicCache(), CHUNKS),
        truth("dynamic_ntk", "mistral", sliding_window=96),
        batch["attention_mask"],
    )


@pytest.mark.parametrize(
    ("room", "windows"), [(N_TOKENS, "llama"), (ROOM, "llama"), (ROOM, "mistral-96"), (ROOM, "gemma2-32")]
)
@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_a_static_cache_with_room_left_needs_no_mask(method: str, windows: str, room: int) -> None:
    """Without padding transformers leaves the mask out, though most keys of the cache are not written yet."""
    family, changes = {"llama": ("llama", {}), **WINDOWS}[windows]
    model, want = extended(method, family, **changes), truth(method, family, **changes)[:1]
    for chunks in ([N_TOKENS], [61, 1, 1, 40, 77], [1, 1, 62, 116]):
        cache = StaticCache(config=model.config, max_cache_len=room)
        assert_rows(read(model, {"input_ids": rows()[0][None]}, cache, chunks), want)


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_right_padded_rows_go_on_where_they_ended(method: str) -> None:
    """With holes between the cached tokens of a row and its next ones: positions are explicit, the mask has them."""
    model, whole, n_new = extended(method), rows(), 12
    want = truth(method)
    batch = padded([row[:-n_new] for row in whole], "right")
    new = padded([row[-n_new:] for row in whole], "right")
    ends = batch["attention_mask"].sum(1, keepdim=True)
    both = {
        "input_ids": torch.cat([batch["input_ids"], new["input_ids"]], 1),
        "attention_mask": torch.cat([batch["attention_mask"], new["attention_mask"]], 1),
        "position_ids": torch.cat([batch["position_ids"], new["position_ids"] + ends], 1),
    }
    found = read(model, both, DynamicCache(config=model.config), [N_TOKENS - n_new, 5, *[1] * 7])
    assert_rows(found, want, both["attention_mask"])


@dataclass(frozen=True, kw_only=True)
class Split(PositionRemapping):
    """Branches of one key function, of which none holds the keys after a query."""

    name: ClassVar[str] = "split"
    paper: ClassVar[Any] = None

    def branches(self, rope) -> tuple[Branch, ...]:
        def shrunk(positions):
            return positions / 2.5

        def same(positions):
            return positions

        return Branch(0, 10, same, shrunk, shrunk), Branch(10, math.inf, same, lambda at: at / 3 + 0.3, shrunk)

    def reach(self, rope) -> float:
        return math.inf


@pytest.mark.usefixtures("float64")
@torch.no_grad()
def test_a_method_of_ones_own_need_not_place_later_keys() -> None:
    model, ids = extend_context(soft_model("llama"), method=Split(factor=4.0)), rows()[0][None]
    found = read(model, {"input_ids": ids}, DynamicCache(), CHUNKS)
    torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=0, atol=1e-9)


def test_a_cache_of_other_frequencies_is_refused() -> None:
    """The same method and trained length, on a RoPE that was scaled before."""
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    cache = DynamicCache()
    given = {"original_max_position_embeddings": LENGTH}
    read(extend_context(soft_model("llama", rope_parameters=scaled), 4, "dynamic_ntk", existing="replace", **given),
         {"input_ids": rows()[0][None]}, cache, [20])  # fmt: skip
    other = extend_context(soft_model("llama", rope_parameters=scaled), 4, "dynamic_ntk", existing="compose", **given)
    with pytest.raises(ValueError, match="this cache was filled under"):
        read(other, {"input_ids": rows()[0][None]}, cache, [1])


@torch.no_grad()
@pytest.mark.parametrize("method", KINDS)
def test_keys_that_later_layers_are_given_too(method: str) -> None:
    """Gemma 3n: those layers rotate the same keys by themselves."""
    model, ids = extend_context(small_model("gemma3n_text", "causal").double(), 4, method), token_ids(N_TOKENS)
    found = read(model, {"input_ids": ids}, DynamicCache(config=model.config), CHUNKS)
    torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=0, atol=1e-9)


class Remembering:
    """Mixin for a cache layer that keeps what its last update returned."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.returned = super().update(*args, **kwargs)
        return self.returned


@pytest.mark.parametrize(
    "quantized",
    [
        Fp8QuantizedLayer,
        QuantoQuantizedLayer,
        pytest.param(
            HQQQuantizedLayer,
            marks=pytest.mark.skipif(
                not is_hqq_available(),
                reason="hqq is not among the packages for tests: transformers imports it wherever it is",
            ),
        ),
    ],
)
@pytest.mark.parametrize("method", KINDS)
def test_a_quantised_cache_is_exact_in_its_own_keys(method: str, quantized: type, monkeypatch) -> None:
    """Queries see the keys and values that come back from 8 bits, or from 4, to which 20 more are added at a time."""
    if quantized is QuantoQuantizedLayer:  # which would compile this for a minute
        numbers = SimpleNamespace(unpack=lambda packed, bits: torch.cat([packed & 15, packed >> 4]))
        monkeypatch.setattr("optimum.quanto.library.extensions.cpp.ext._lib", numbers)
    model, row = extended(method), rows()[0]
    options = {"q_group_size": 16, "residual_length": 20} if issubclass(quantized, QuantizedLayer) else {}
    kind = type("Remembered", (Remembering, quantized), {})
    cache, slow, stop = Cache(layers=[kind(**options) for _ in range(2)]), slow_model(method), 0
    for size in (61, 1, 23, 1, 49, 1, 1):
        found = read(model, {"input_ids": row[None, : stop + size]}, cache, [size])
        slow.seen = {index: layer.returned for index, layer in enumerate(cache.layers)}
        slow.seen_from, stop = stop, stop + size
        with torch.no_grad():
            want = slow(row[:stop])[-size:]
        assert_rows(found, [want])
        assert size == stop or float((want - truth(method)[0][stop - size : stop]).abs().max()) > 0.01


class LosslessLayer(QuantizedLayer):
    """A layer of the kind of quanto's and HQQ's: the last tokens wait in full precision until there are enough."""

    def __init__(self) -> None:
        super().__init__(residual_length=7)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.clone()

    def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
        return q_tensor


@pytest.mark.parametrize("method", KINDS)
def test_a_quantised_cache_that_keeps_the_last_tokens_apart(method: str) -> None:
    model, batch = extended(method), padded(rows(), "left")
    cache = Cache(layers=[LosslessLayer(), LosslessLayer()])
    assert_rows(read(model, batch, cache, CHUNKS), truth(method), batch["attention_mask"])
    assert all(stock_class(layer) is LosslessLayer for layer in cache.layers)


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_layers_are_moved_off_the_device_after_each_update(method: str) -> None:
    """As an offloaded cache does, for which transformers needs CUDA: no slot stays behind."""

    class Offloading(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            self.layers[layer_idx].prefetch()
            found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            self.layers[layer_idx].offload()
            return found

    model, batch, cache = extended(method), padded(rows(), "left"), Offloading()
    assert_rows(read(model, batch, cache, CHUNKS), truth(method), batch["attention_mask"])
    assert not any({"keys", "values"} & layer._rooms.keys() for layer in cache.layers)


@pytest.mark.parametrize("method", KINDS)
def test_rotated_keys_are_moved_to_another_device_and_back(method: str) -> None:
    class Moving(DynamicLayer):
        """Offloads as from a GPU, to other memory."""

        def offload(self) -> None:
            self.keys, self.values = self.keys.clone(), self.values.clone()

        prefetch = offload

    model, batch = extended(method), padded(rows(), "left")
    cache, found = Cache(layers=[Moving(), Moving()]), []
    for size, moves in ((70, ()), (1, ("offload", "prefetch")), (5, ("offload",)), (1, ("prefetch",)), (103, ())):
        found.append(read(model, batch, cache, [size]))
        for layer, move in product(cache.layers, moves):
            getattr(layer, move)()
    assert_rows(torch.cat(found, dim=1), truth(method), batch["attention_mask"])


# ---------------------------------------------------------------------- what is done to a cache


def continued(method: str, kept: list[torch.Tensor], new: torch.Tensor, **changes) -> list[torch.Tensor]:
    """The true logits of `new` (row, token) after the rows in `kept`."""
    slow = slow_model(method, **changes)
    with torch.no_grad():
        return [slow(torch.cat([row, more]))[len(row) :] for row, more in zip(kept, new)]


def follow(model, cache, kept: list[torch.Tensor], new: torch.Tensor) -> torch.Tensor:
    """The logits of `new` after left-padded rows that `cache` holds: six single tokens and a chunk."""
    batch = padded([torch.cat([row, more]) for row, more in zip(kept, new)], "left")
    return read(model, batch, cache, [*[1] * 6, new.shape[1] - 6])


def new_tokens(n_rows: int) -> torch.Tensor:
    return torch.randint(3, 128, (n_rows, 11), generator=torch.Generator().manual_seed(7))


def filled(method: str, cache: str, *given, **changes):
    """A model, and a cache that holds all rows but for the longest's end; the last five tokens came one by one."""
    model = extended(method, *given, **changes)
    store = CACHES[cache][0](model.config)
    kept = [row[:150] for row in rows()]
    read(model, padded(kept, "left"), store, [145, *[1] * 5])
    return model, store, kept


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("method", KINDS)
def test_beams_change_places(method: str, cache: str) -> None:
    model, store, kept = filled(method, cache)
    order = torch.tensor([2, 0, 0, 3])
    store.reorder_cache(order)
    store.reorder_cache(torch.tensor([1, 0, 2, 3]))
    kept, new = [kept[index] for index in order[[1, 0, 2, 3]]], new_tokens(4)
    assert_rows(follow(model, store, kept, new), continued(method, kept, new))


def test_beams_of_a_quantised_cache_change_places() -> None:
    model, batch = extended("dynamic_ntk"), padded(rows(), "left")
    straight, crossed, order = (*(QuantizedCache("fp8", model.config) for _ in range(2)), torch.tensor([2, 3, 1, 0]))
    for cache in (straight, crossed):
        read(model, batch, cache, [100, 50])
    crossed.reorder_cache(order)
    found = read(model, {name: tensor[order] for name, tensor in batch.items()}, crossed, [9, 1])
    torch.testing.assert_close(found, read(model, batch, straight, [9, 1])[order], atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", KINDS)
def test_tokens_are_taken_back(method: str) -> None:
    model, store, kept = filled(method, "dynamic")
    store.crop(-17)
    kept, new = [row[:-17] for row in kept], new_tokens(4)
    assert_rows(follow(model, store, kept, new), continued(method, kept, new))


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_tokens_are_taken_back_from_a_window_that_records_its_past(method: str, when: str) -> None:
    """As assisted decoding does, before the first token is read or later."""
    changes = {"sliding_window": 96}
    model, rows_ = extended(method, "mistral", **changes), [row[:150] for row in rows()]
    store = DynamicCache(config=model.config)
    if when == "before":
        store.activate_past_recording()
    read(model, padded(rows_, "left"), store, [120])
    if when == "after":
        store.activate_past_recording()
    else:
        store.crop(0)
    batch = padded(rows_, "left")
    read(model, batch, store, [20, *[1] * 10])
    store.crop(-17)
    kept, new = [row[:-17] for row in rows_], new_tokens(4)
    found = follow(model, store, kept, new)
    assert_rows(found, continued(method, kept, new, family="mistral", **changes))


@pytest.mark.parametrize("method", KINDS)
def test_rows_are_repeated_and_chosen(method: str) -> None:
    model, store, kept = filled(method, "dynamic")
    store.batch_select_indices(torch.tensor([3, 0]))
    store.batch_repeat_interleave(2)
    kept, new = [kept[3], kept[3], kept[0], kept[0]], new_tokens(4)
    assert_rows(follow(model, store, kept, new), continued(method, kept, new))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("method", KINDS)
def test_a_cache_that_was_emptied_is_as_new(method: str, cache: str) -> None:
    model, store, _ = filled(method, cache, "mistral", sliding_window=96)
    store.reset()
    batch = padded(rows(), "left")
    want = truth(method, "mistral", sliding_window=96)
    assert_rows(read(model, batch, store, [90, *[1] * 8, 82]), want, batch["attention_mask"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_copy_of_a_cache_goes_its_own_way(cache: str, copied) -> None:
    """As prompts with a shared beginning use it."""
    model, store, kept = filled("dynamic_ntk", cache, "mistral", sliding_window=96)
    twin, new = copied(store), new_tokens(4)
    want = continued("dynamic_ntk", kept, new, family="mistral", sliding_window=96)
    for one in (store, twin):
        assert_rows(follow(model, one, kept, new), want)


@pytest.mark.parametrize("method", KINDS)
def test_rotated_keys_are_not_taken_for_those_of_other_rows_or_tokens(method: str) -> None:
    """Beams on one rung change places; tokens are taken back, and as many others are read in their place."""
    whole, new = token_ids(130, batch=3), new_tokens(3)
    order, lost = torch.tensor([2, 0, 0]), 6
    model, reordered, cropped = extended(method), DynamicCache(), DynamicCache()
    for store in (reordered, cropped):
        read(model, {"input_ids": whole}, store, [128, 1, 1])
    reordered.reorder_cache(order)
    found = read(model, {"input_ids": torch.cat([whole[order], new], 1)}, reordered, [1] * 11)
    assert_rows(found, continued(method, list(whole[order]), new))
    cropped.crop(-lost)
    found = read(model, {"input_ids": torch.cat([whole[:, :-lost], new], 1)}, cropped, [lost, *[1] * 5])
    assert_rows(found, continued(method, list(whole[:, :-lost]), new))


@pytest.mark.parametrize(("method", "moved"), [("dynamic_ntk", 0), ("self_extend", 1), ("dca", 0)])
def test_a_key_is_rotated_again_only_when_its_rotation_changes(method: str, moved: int) -> None:
    """When it leaves the window of exact distances of the row that grows."""
    model, store, _ = filled(method, "dynamic")
    before = store.layers[0].keys.clone()
    read(model, padded([row[:151] for row in rows()], "left"), store, [1])
    after = store.layers[0].keys
    assert after.shape[2] == before.shape[2] + 1 == 151
    assert int((after[:, :, :150] != before).any(-1).any(1).sum()) == moved


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("method", ["dynamic_ntk", "dynamic_yarn", "self_extend", "rerope", "dca"])
def test_rotating_keys_in_place_changes_no_number(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients on, keys that were rotated in place are rotated on from there."""
    batch, found, model = padded(rows(), "left"), [], extended(method)
    parts = CHUNKS[: len(CHUNKS) // 2], CHUNKS[len(CHUNKS) // 2 :]
    for graph in (False, True):
        cache = DynamicCache(config=model.config)
        first = read(model, batch, cache, parts[0])
        with torch.set_grad_enabled(graph):
            second = [
                model(
                    input_ids=batch["input_ids"][:, end - step : end],
                    attention_mask=batch["attention_mask"][:, :end],
                    position_ids=batch["position_ids"][:, end - step : end],
                    past_key_values=cache,
                ).logits.detach()
                for step, end in zip(parts[1], (sum(parts[0]) + sum(parts[1][: n + 1]) for n in range(len(parts[1]))))
            ]
        found.append(torch.cat([first, *second], dim=1)[batch["attention_mask"].bool()])
    monkeypatch.setattr(Call, "_store", lambda *given: None)
    found.append(read(model, batch, DynamicCache(config=model.config), CHUNKS)[batch["attention_mask"].bool()])
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=0, atol=1e-9)


def decoded_and_cropped(method: str):
    """A model, a cache whose keys were rotated on and cut again, and its keys and values from before."""
    model, cache = extended(method), DynamicCache()
    read(model, {"input_ids": rows()[0][None]}, cache, [70, *[1] * 5])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    read(model, {"input_ids": rows()[0][None]}, cache, [1] * 40)
    cache.crop(-40)
    return model, cache, before


def sliced(cache, _) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :-6], layer.values[:, :, :-6]


def evicted(cache, _) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 4:], layer.values[:, :, 4:]


def replaced(cache, before) -> None:
    for layer, (keys, values) in zip(cache.layers, before):
        layer.keys, layer.values = keys, values


def overwritten(cache, before) -> None:
    for layer, (keys, values) in zip(cache.layers, before):
        layer.keys.copy_(keys)
        layer.values.copy_(values)


def moved_after(change, how: str, *given):
    def do(cache, before) -> None:
        change(cache, before)
        for layer in cache.layers if how in ("offload", "prefetch") else [cache]:
            getattr(layer, how)(*given)

    do.__name__ = f"{change.__name__}, {how}"
    return do


CHANGES = [
    sliced, evicted, replaced, overwritten, moved_after(replaced, "batch_repeat_interleave", 1),
    moved_after(replaced, "reorder_cache", torch.tensor([0])), moved_after(replaced, "offload"),
]  # fmt: skip


# A traced graph cannot read how often a tensor was changed.
@pytest.mark.parametrize(
    ("change", "compiled"),
    [(each, compiled) for each in CHANGES for compiled in (False, True) if not (compiled and each is overwritten)],
    ids=lambda given: getattr(given, "__name__", f"compiled={given}"),
)
@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_keys_that_were_changed_by_hand_are_refused(method: str, change, compiled: bool) -> None:
    """How they are rotated would be unknown."""
    model, cache, before = decoded_and_cropped(method)
    change(cache, before)
    run = torch.compile(model, backend="eager") if compiled else model
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"this cache (has|are).*Start from an empty cache.*cache.crop.*deepcopy"
        ):
            read(run, {"input_ids": rows()[0][None]}, cache, [1])


@pytest.mark.parametrize("method", KINDS)
def test_a_shallow_copy_of_a_cache_is_refused(method: str) -> None:
    model, cache = extended(method), DynamicCache()
    read(model, {"input_ids": rows()[0][None]}, cache, [78])
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    read(model, {"input_ids": rows()[0][None]}, cache, [1] * 7)
    with pytest.raises(RuntimeError, match="Start from an empty cache"):
        read(model, {"input_ids": rows()[0][None]}, twin, [1])


@pytest.mark.parametrize("method", KINDS)
def test_a_shallow_copy_of_a_cache_that_was_cropped_back_is_refused(method: str) -> None:
    """It has as many positions, but the keys that both share are rotated otherwise."""
    model, cache, batch = extended(method), DynamicCache(), {"input_ids": rows()[0][None]}
    read(model, batch, cache, [76, 1, 1])  # from the second token on in slots that both share
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    read(model, batch, cache, [1] * 7)
    cache.crop(-7)
    with pytest.raises(RuntimeError, match="Start from an empty cache"):
        read(model, batch, twin, [1])


@pytest.mark.parametrize("how", ["dynamic", "static", "gradients"])
@pytest.mark.parametrize("method", KINDS)
def test_rows_that_were_exchanged_by_hand_are_refused(method: str, how: str) -> None:
    """Their positions differ, also where no key is rotated in place."""
    model, batch = extended(method), padded(rows(), "left")
    cache = CACHES["static" if how == "static" else "dynamic"][0](model.config)
    with torch.set_grad_enabled(how == "gradients"):
        inputs = {name: batch[name][:, :70] for name in ("input_ids", "attention_mask", "position_ids")}
        model(**inputs, past_key_values=cache)
    order = list(range(len(batch["input_ids"])))[::-1]
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[order], layer.values[order]
    cache.reorder_cache(torch.arange(len(order)))
    twins = [] if how == "gradients" else [copy.deepcopy(cache)]  # torch copies no tensor of a graph
    for changed in [cache, *twins]:
        with pytest.raises(RuntimeError, match="keys that were changed by hand"):
            read(model, batch, changed, [1])
    cache.reset()
    model(**inputs, past_key_values=cache)


@pytest.mark.parametrize("how", ["dynamic", "static"])
@pytest.mark.parametrize("method", KINDS)
def test_a_cache_is_of_the_model_that_filled_it(method: str, how: str) -> None:
    """After a pass that failed, and after a reset, which leaves a cache to any model."""
    model, stock, ids = extended(method), tiny_model("llama"), rows()[0][None]
    stock.to(torch.float64)
    cache = CACHES[how][0](model.config)

    def fails(*_: Any) -> None:
        raise IndexError

    with torch.no_grad():
        want = stock(ids).logits
        model(ids[:, :40], past_key_values=cache)
        hook = model.model.layers[0].register_forward_pre_hook(fails)
        with pytest.raises(IndexError):
            model(ids[:, 40:50], past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="the model is no longer extended in that way"):
            stock(ids[:, 40:50], past_key_values=cache)
        cache.reset()
        first = stock(ids[:, :90], past_key_values=cache).logits
        torch.testing.assert_close(first, want[:, :90])
        torch.testing.assert_close(stock(ids[:, 90:], past_key_values=cache).logits, want[:, 90:])
        with pytest.raises(ValueError, match="filled under no extension"):
            model(ids[:, 90:], past_key_values=cache)


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_pass_that_fails_to_append_is_repeated_or_refused(
    method: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache, append, calls = extended(method), DynamicCache(), Room.append, []
    read(model, {"input_ids": rows()[0][None]}, cache, [70])

    def out_of_memory(room, *given):
        calls.append(room)
        if which == "keys" or len(calls) == 2:
            raise torch.OutOfMemoryError
        return append(room, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Room, "append", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            read(model, {"input_ids": rows()[0][None]}, cache, [1])
    if which == "keys":
        assert_rows(read(model, {"input_ids": rows()[0][None]}, cache, [1] * 9), [truth(method)[0][70:79]])
    else:
        with pytest.raises(RuntimeError, match="Start from an empty cache"):
            model(rows()[0][None, 70:71], past_key_values=cache)


@pytest.mark.parametrize("method", KINDS)
def test_a_layer_that_was_cropped_alone_is_refused(method: str) -> None:
    model, cache, batch = extended(method), DynamicCache(), {"input_ids": rows()[0][None]}
    read(model, batch, cache, [70])
    cache.layers[1].crop(-1)
    with pytest.raises(
        RuntimeError, match=r"layer 1 has 74 keys, but the mask is of 75: .*changed alone.*crop each of"
    ):
        read(model, batch, cache, [5])


@pytest.mark.parametrize("n_new", [1, 7])
@pytest.mark.parametrize("case", ["padded", "static", "gemma2"])
@pytest.mark.parametrize("method", KINDS)
def test_an_interrupted_pass_is_refused_whatever_the_mask(method: str, case: str, n_new: int) -> None:
    """Masks of single padded tokens and static caches are matrices, and layers with windows have masks of their own."""
    model, batch = (
        extended(method, "gemma2" if case == "gemma2" else "llama"),
        padded([row[:80] for row in rows()], "left"),
    )
    cache = StaticCache(config=model.config, max_cache_len=ROOM) if case == "static" else DynamicCache()
    if case == "gemma2":
        batch = {"input_ids": batch["input_ids"][:1]}
    read(model, batch, cache, [70])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(model, batch, cache, [n_new])
    hook.remove()
    with pytest.raises(RuntimeError, match=r"layer 1 has 70 keys, but layer 0 has 7\d: a forward pass was interrupted"):
        read(model, batch, cache, [n_new])


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("n_read", [0, 62])
def test_a_pass_that_is_interrupted_between_layers_is_refused_until_each_is_cropped(method: str, n_read: int) -> None:
    """The kernel would end the process, or logits would be wrong."""
    model, cache, batch = extended(method), DynamicCache(), {"input_ids": rows()[0][None]}
    if n_read:
        read(model, batch, cache, [n_read])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(rows()[0][None, n_read : n_read + 5], past_key_values=cache)
    hook.remove()
    with pytest.raises(RuntimeError, match=r"layer 1 has .*a forward pass was interrupted.*crop each of"):
        model(rows()[0][None, n_read : n_read + 5], past_key_values=cache)
    if n_read:
        for layer in cache.layers:
            layer.crop(n_read - int(layer.get_seq_length()))
        found = read(model, batch, cache, [5] * 3)
        assert_rows(found, [truth(method)[0][n_read : n_read + 15]])


INTERRUPTED = {
    "crop": (-1,),
    "reorder_cache": (torch.tensor([0]),),
    "batch_repeat_interleave": (1,),
    "offload": (),
    "deepcopy": (),
}


@pytest.mark.parametrize("then", INTERRUPTED)
@pytest.mark.parametrize("n_read", [0, 62])
def test_a_pass_that_fails_while_it_rotates_keys_leaves_a_cache_that_is_refused(
    n_read: int, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the prompt, and at the token that changes the scale."""
    model, cache, batch = extended("dynamic_ntk"), DynamicCache(), {"input_ids": rows()[0][None]}
    if n_read:
        read(model, batch, cache, [n_read])

    turned = call.Call._turned

    def interrupted(self, layer, x, *given):
        if x.shape[1] == model.config.num_key_value_heads and x.shape[2] > 1:
            raise KeyboardInterrupt
        return turned(self, layer, x, *given)

    with monkeypatch.context() as patched:
        patched.setattr(call.Call, "_turned", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read(model, batch, cache, [20] if n_read == 0 else [1] * 8)
    if then == "deepcopy":
        cache = copy.deepcopy(cache)
    for each in cache.layers[:1] if then == "offload" else [cache] * (then != "deepcopy"):
        getattr(each, then)(*INTERRUPTED[then])
    with pytest.raises(RuntimeError, match="a forward pass was interrupted"):
        read(model, batch, cache, [1])
    cache.reset()
    assert_rows(read(model, batch, cache, [N_TOKENS]), truth("dynamic_ntk")[:1])


@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_taking_tokens_back_again_and_again_adds_no_error(method: str) -> None:
    """In bfloat16, over every scale and the edge of the window: a key turns on once, and never back."""
    model, row = extended(method).bfloat16(), rows()[0][None]
    kept, errors = DynamicCache(), []
    read(model, {"input_ids": row}, kept, [60])
    raw = extended(method).bfloat16()
    for _ in range(12):
        read(model, {"input_ids": row}, kept, [1] * 100)
        once = DynamicCache()
        read(raw, {"input_ids": row}, once, [60, *[1] * 100])
        mine, want = (cache.layers[0].keys.double() for cache in (kept, once))
        errors.append(float((mine - want).norm() / want.norm()))
        kept.crop(-100)
    assert errors[-1] <= 2 * errors[1] + 2**-9


def test_rounding_grows_slowly_as_keys_are_rotated_again_and_again() -> None:
    """In bfloat16, each of fifteen changes of the scale rounds every key; the error grows with their number's root."""
    changes, one_rounding = 15, 2**-9
    model, row = extended("dynamic_ntk_fine").bfloat16(), rows()[0][None]
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config)
    read(model, {"input_ids": row}, caches[0], [1] * N_TOKENS)
    read(model, {"input_ids": row}, caches[1], [N_TOKENS])  # whose keys have been rotated once
    again, once = (cache.layers[0].keys.double() for cache in caches)
    error = float((again - once).norm() / once.norm())
    assert one_rounding / 4 < error < changes**0.5 * one_rounding


# ------------------------------------------------------------------------ tokens appended in place


def decoded(n_tokens: int):
    """A model, and a cache that holds `n_tokens` of a row, of which all but twenty were appended one by one."""
    model, cache = extended("dynamic_ntk"), DynamicCache()
    read(model, {"input_ids": rows()[0][None]}, cache, [20, *[1] * (n_tokens - 20)])
    return model, cache


def test_a_token_is_appended_in_place() -> None:
    model, cache = decoded(110)  # the scale stays the same up to 125 tokens
    before = cache.layers[0].keys, cache.layers[0].values
    held = [tensor.clone() for tensor in before]
    read(model, {"input_ids": rows()[0][None]}, cache, [1])
    for old, copy_, new in zip(before, held, (cache.layers[0].keys, cache.layers[0].values)):
        assert new.shape[2] == 111
        assert new.data_ptr() == old.data_ptr()
        assert torch.equal(old, copy_)


def test_layers_share_their_positions_until_one_goes_its_own_way() -> None:
    cache = decoded(60)[1]
    assert len({id(layer._places.keys) for layer in cache.layers}) == 1
    cpu, first, second = torch.device("cpu"), Incoming(torch.tensor([[0, 1]])), Incoming(torch.tensor([[2]]))
    layers = DynamicLayer(), DynamicLayer(), DynamicLayer()
    assert len({id(first.store_in(layer, cpu)) for layer in layers}) == 1
    layers[1].crop(-1)
    assert [second.store_in(layer, cpu).tolist() for layer in layers] == [[[0, 1, 2]], [[0, 2]], [[0, 1, 2]]]


def test_a_step_back_to_an_earlier_tensor_leaves_the_later_one_alone() -> None:
    """As a snapshot of a cache is put back: both continuations are right, and the first one's keys stay."""
    model, cache = decoded(60)
    snapshot = [(layer.keys, layer.values) for layer in cache.layers]
    read(model, {"input_ids": rows()[0][None]}, cache, [1])
    later = [layer.keys.clone() for layer in cache.layers], [layer.keys for layer in cache.layers]
    for layer, (keys, values) in zip(cache.layers, snapshot):
        layer.keys, layer.values = keys, values
        layer._places.crop(-1)
    kept, new = [rows()[0][:60]], new_tokens(1)
    assert_rows(follow(model, cache, kept, new), continued("dynamic_ntk", kept, new))
    assert all(map(torch.equal, *later))


def test_a_graph_keeps_the_keys_that_it_saw() -> None:
    """Tokens appended without gradients, one with them, one without; then the gradient is taken."""
    model, cache = decoded(60)
    want = torch.autograd.grad(model(rows()[0][None, :61]).logits[0, -1].square().sum(), model.lm_head.weight)
    loss = model(rows()[0][None, 60:61], past_key_values=cache).logits[0, -1].square().sum()
    read(model, {"input_ids": rows()[0][None]}, cache, [1, 1])
    torch.testing.assert_close(torch.autograd.grad(loss, model.lm_head.weight), want, rtol=0, atol=1e-6)


def test_slots_written_in_inference_mode_are_left_there() -> None:
    model, cache = extended("dynamic_ntk"), DynamicCache()
    with torch.inference_mode():
        read(model, {"input_ids": rows()[0][None]}, cache, [20, *[1] * 80])
    found = read(model, {"input_ids": rows()[0][None]}, cache, [1] * 80)
    assert_rows(found, [truth("dynamic_ntk")[0][100:]])


def test_another_number_of_rows_is_refused_as_transformers_does() -> None:
    model, cache = decoded(60)
    cache.batch_repeat_interleave(2)
    read(model, {"input_ids": rows()[0][None].expand(2, -1)}, cache, [1])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        read(model, {"input_ids": rows()[0][None]}, cache, [1])
    assert int(cache.get_seq_length()) == 61


def test_another_dtype_is_promoted_as_transformers_does() -> None:
    halves, singles = torch.ones(1, 1, 3, 2, dtype=torch.bfloat16), torch.full((1, 1, 1, 2), 1 / 3)
    room = Room()
    found = room.append(room.append(halves, halves), singles)
    assert torch.equal(found, torch.cat([halves, halves, singles], dim=2))
    assert found.dtype == torch.float32


def test_storing_positions_leaves_the_stock_layers_alone() -> None:
    from transformers import cache_utils

    before = dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING), dict(cache_utils.STATIC_LAYER_TYPE_MAPPING)
    members = {**vars(DynamicLayer)}
    filled("dynamic_ntk", "dynamic")
    assert before == (cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, cache_utils.STATIC_LAYER_TYPE_MAPPING)
    assert members == {**vars(DynamicLayer)}

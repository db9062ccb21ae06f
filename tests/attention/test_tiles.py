"""Tiles: every pair of a query and a key that attention needs, once, and no other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import LENGTH
from in_attention_reference import METHODS, N_TOKENS, extended, padded, read, rows
from torch import Tensor
from transformers import DynamicCache

from ctxext.attention import masks, softmax, tiles
from ctxext.attention.softmax import Joined, Softmax
from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import make_method

ROPE = RopeGeometry.plain(16, 10000.0, LENGTH)
REMAPPING = ["self_extend", "rerope", "dca", "string"]


def pairs(found: list[tiles.Tile], batch: int, n_queries: int, n_keys: int) -> Tensor:
    """How often each pair is in a tile: (batch, query, key)."""
    times = torch.zeros(batch, n_queries, n_keys, dtype=torch.long)
    for tile in found:
        here = times[tile.batch, tile.rows, tile.columns]
        ones, wider = torch.ones(here.shape[1:], dtype=torch.long), here.shape[2] - here.shape[1]
        assert tile.shape == "full" or wider == 0 or (tile.shape == "band" and wider > 0)
        here += {"full": ones, "lower": ones.tril(), "upper": ones.triu(), "band": ones.triu().tril(wider)}[tile.shape]
    return times


def between(low: Tensor, high: Tensor, n_keys: int) -> Tensor:
    columns = torch.arange(n_keys)
    return (columns >= low[..., None]) & (columns < high[..., None])


def assert_exact(low: Tensor, high: Tensor, n_keys: int, bands: bool) -> list[tiles.Tile]:
    found = tiles.of_ranges((low, high), bands)
    assert found is not None
    assert torch.equal(pairs(found, *low.shape, n_keys), between(low, high, n_keys).long())
    return found


@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_tiles_of_any_ranges_contain_each_pair_once(seed: int, bands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends that stay, move by one, jump, cross each other and differ between rows of a batch."""
    monkeypatch.setattr(tiles, "BAND", 12)
    monkeypatch.setattr(tiles, "WIDEST", 24)
    generator = torch.Generator().manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    sides = []
    for _ in range(2):
        steps = random(2, 2, 4).repeat_interleave(40, 1) + (random(30, 2, 160) == 0) * random(9, 2, 160)
        sides.append(steps.cumsum(1) + random(12, 2, 1))
    # Few enough tiles, or the result is None.
    low, high = (side[: 1 + seed % 2] for side in sides)
    found = tiles.of_ranges((low, high), bands)
    if found is not None:
        assert_exact(low, high, 400, bands)
    few = low[:, :50:10].repeat_interleave(40, 1), high[:, :50:10].repeat_interleave(40, 1)
    assert_exact(*few, 400, bands)


@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.parametrize("before", [0, 1, 77])
@pytest.mark.parametrize("method", REMAPPING)
def test_branches_need_no_mask_and_split_the_triangle(method: str, before: int, bands: bool) -> None:
    n_keys = 4 * LENGTH + 5
    positions, places = torch.arange(before, n_keys)[None], torch.arange(n_keys)[None]
    seen = torch.zeros_like(positions), positions + 1
    total = torch.zeros(1, n_keys - before, n_keys, dtype=torch.long)
    for branch in make_method(method, 4).branches(ROPE):
        ranges = tiles.of_branch(branch, positions, places, seen)
        found = assert_exact(*ranges, n_keys, bands)
        held = branch.holds(positions[:, :, None], places[:, None]) & between(*seen, n_keys)
        assert torch.equal(pairs(found, *positions.shape, n_keys), held.long())
        total += held
        is_window = branch.first == -math.inf and method != "dca"
        assert any(tile.shape == "band" for tile in found) == (bands and is_window)
    assert torch.equal(total, between(*seen, n_keys).long())


@pytest.mark.parametrize("method", REMAPPING)
def test_masked_tiles_contain_a_branch_at_positions_in_any_order(method: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(tiles, "BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    queries, places = (torch.randint(0, 4 * LENGTH, (2, n), generator=generator) for n in (50, 90))
    for branch in make_method(method, 4).branches(ROPE):
        assert tiles.of_branch(branch, queries, places, (queries, queries)) is None
        inside = torch.zeros(2, 50, 90, dtype=torch.bool)
        for tile in tiles.blocks(branch, queries, places):
            inside[:, tile.rows, tile.columns] = True
        assert inside[branch.holds(queries[:, :, None], places[:, None])].all()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["alone", "left", "right", "triangles"])
def test_a_prefill_in_tiles_is_one_softmax_and_makes_no_mask(
    method: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "BAND", 24)
    if case == "triangles":  # as on a GPU
        of_ranges = tiles.of_ranges
        monkeypatch.setattr(tiles, "of_ranges", lambda ranges, bands=False: of_ranges(ranges))
    model, chunks = extended(method), [100, N_TOKENS - 100]
    inputs: dict[str, Any] = {"input_ids": rows()[0][None]} if case in ("alone", "triangles") else padded(rows(), case)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    with torch.enable_grad():  # one softmax over all scores, as gradients need
        want = model(**inputs, use_cache=False).logits.detach()

    def no_mask(*_: Any) -> Tensor:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(masks.BlockMask, "_made_by", no_mask)
    for cache, sizes in ((None, [N_TOKENS]), (DynamicCache(config=model.config), chunks)):
        found = read(model, inputs, cache, sizes)
        torch.testing.assert_close(found[mask], want[mask], rtol=0, atol=1e-9)


@torch.no_grad()
def test_layers_share_the_masks_of_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def band(window: int, size: int, like: Tensor) -> Tensor:
        made.append((window, size))
        return masks.band(window, size, like)

    monkeypatch.setattr(softmax, "band", band)
    extended("self_extend")(rows()[0][None], use_cache=False)
    assert 0 < len(made) == len(set(made))


TILES = [
    tiles.Tile(slice(None), slice(0, 96), slice(0, 32), "full"),
    tiles.Tile(slice(None), slice(0, 96), slice(32, 128), "lower"),
    tiles.Tile(slice(1, 2), slice(40, 96), slice(140, 196), "upper"),
]
BANDS = [*TILES, tiles.Tile(slice(0, 1), slice(30, 96), slice(130, 200), "band")]


def inputs(device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, n, 64, generator=generator) for heads, n in ((6, 96), (2, 200), (2, 200))
    )
    return tuple(x.to(device, torch.bfloat16) for x in (query, key, value))


def joined(device: str, of: list[tiles.Tile] = TILES) -> Tensor:
    query, key, value = inputs(device)
    found = Joined(Softmax(scaling=0.2), query)
    found.add(of, query, key, value)
    return found.result(query.dtype)


@pytest.mark.parametrize("of", [TILES, BANDS], ids=["triangles", "bands"])
def test_tiles_joined_are_one_softmax(of: list[tiles.Tile]) -> None:
    query, key, value = (x.double() for x in inputs("cpu"))
    key, value = (x.repeat_interleave(3, 1) for x in (key, value))
    seen = pairs(of, 2, 96, 200).bool()[:, None]
    want = (0.2 * query @ key.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(joined("cpu", of).double(), want.transpose(1, 2), atol=2e-2, rtol=0)


def test_the_kernel_of_a_gpu_takes_these_arguments() -> None:
    """Its signature and the shapes of what it returns, which torch knows without a GPU."""
    assert joined("meta").shape == (2, 96, 6, 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_of_a_gpu_gives_the_same() -> None:
    query, key, value = inputs("cuda")
    with torch.no_grad():
        assert Softmax(scaling=0.2).fused(query, key, value)
        torch.testing.assert_close(joined("cuda").cpu(), joined("cpu"), atol=2e-2, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method", METHODS)
def test_a_prefill_on_a_gpu_is_that_of_a_cpu(method: str) -> None:
    model, batch = extended(method).bfloat16(), padded(rows(), "left")
    mask, want = batch["attention_mask"].bool(), read(model, batch, None, [N_TOKENS])
    found = read(model.cuda(), {name: x.cuda() for name, x in batch.items()}, None, [N_TOKENS]).cpu()
    torch.testing.assert_close(found[mask], want[mask], atol=0.2, rtol=0)

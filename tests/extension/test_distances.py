"""The chart of distances that attention sees."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from ctxext import DualChunkAttention, ReRoPE, SelfExtend
from ctxext.assets import MODEL
from ctxext.encodings.rope import RopeGeometry
from ctxext.extension.distances import COLUMNS, ROWS, distances, distances_of
from ctxext.extension.request import plan_extension
from ctxext.methods.temperature import QueryTemperature

ROPE = RopeGeometry.plain(dim=64, rope_theta=10_000.0, length=512)


def test_distances_are_those_of_the_equation() -> None:
    found = distances(SelfExtend(factor=4, group_size=8, window=128), ROPE, 2048)
    by_hand = [d if d < 128 else 2047 // 8 + 128 - 16 - (2047 - d) // 8 for d in range(2048)]
    assert found.effective.tolist() == by_hand
    exact = next(d for d in range(2048) if by_hand[d] != d)
    assert exact > 128 - 8
    assert found.summary == (
        f"Seen from the last token, distances up to {exact - 1} tokens are exact. The largest is {by_hand[-1]} instead "
        "of 2,047."
    )
    coarse = distances(SelfExtend(factor=4, group_size=8, window=128), ROPE, 2048, step=100)
    assert (int(coarse.true[-1]), coarse.effective[-1]) == (2047, by_hand[-1])
    assert "up to 100 tokens are exact" in coarse.summary


def test_the_chart_ends_at_the_trained_length_and_has_a_point_in_each_column() -> None:
    found = distances(ReRoPE(factor=4, window=256), ROPE, 2048, title="rerope")
    title, _, *rows, _axis, _, summary = found.chart()
    assert (title, len(rows), summary) == ("rerope", ROWS, found.summary)
    assert rows[0].strip().startswith("512 │")
    columns = [row.ljust(11 + COLUMNS)[11:] for row in rows]
    for column in range(COLUMNS):
        assert [row[column] for row in columns].count("●") == 1
    half = next(row for row in columns if row.endswith("●"))  # all far keys are at 256 of 512 tokens
    assert columns.index(half) in (ROWS // 2 - 1, ROWS // 2)


def test_exact_distances_alone_are_said_to_be_exact() -> None:
    assert "distances up to 99 tokens are exact" in distances(ReRoPE(factor=4), ROPE, 100).summary


@pytest.mark.parametrize(
    ("method", "remaps"),
    [(DualChunkAttention(factor=4), True), (QueryTemperature(factor=4, base="rerope"), True), ("yarn", False)],
)
def test_only_a_method_that_remaps_positions_has_distances(method: object, remaps: bool) -> None:
    found = distances_of(plan_extension(AutoConfig.from_pretrained(MODEL), 4, method))
    assert (found is not None) == remaps
    if found is not None:
        assert found.true[0] == found.effective[0] == 0
        assert torch.all(found.effective < 512)

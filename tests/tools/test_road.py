"""The road of `factor` is short, and docs/architecture.md draws it as it runs."""

from __future__ import annotations

import road


def test_a_factor_reaches_the_frequencies_in_eight_hops() -> None:
    hops = road.hops()
    assert hops[0] == "api.py: extend_context"
    assert hops[-1] == "patches/rotary.py: RotarySite.build"
    assert len(hops) <= 8, hops


def test_the_drawing_is_that_of_the_code() -> None:
    page = road.PAGE.read_text(encoding="utf-8")
    assert road.updated(page) == page, "run python tools/road.py"

"""The figures of docs/ draw what was measured: every value is that of its JSON, and every value can be seen."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import finetune_methods
import fit
import numpy as np
import pytest
import train_short_test_long
from evals.test_plots import made
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ctxext.encodings.rope import RopeGeometry
from ctxext.evals import plots
from ctxext.extension.method_file import SavedMethod
from ctxext.methods import make_method

ROOT = Path(__file__).parents[2]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, as they were drawn."""
    figures: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *args: Any, **options: Any) -> None:
        save(figure, *args, **options)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def read(file: str) -> dict[str, Any]:
    return json.loads((ROOT / file).read_text())


def where_drawn(line: Line2D) -> np.ndarray:
    """The points of a line in the coordinates of its axes' data, wherever its own transform put them."""
    return line.axes.transData.inverted().transform(line.get_transform().transform(line.get_xydata()))


def curves(axes: Axes) -> list[Line2D]:
    """The lines of `axes` but for those that mark one value across all of it."""
    across = axes.get_xaxis_transform("grid"), axes.get_yaxis_transform("grid")
    return [line for line in axes.lines if line.get_transform() not in across]


def assert_draws(line: Line2D, points: list[tuple[float, float]]) -> None:
    np.testing.assert_array_equal(line.get_xydata(), points)
    np.testing.assert_allclose(where_drawn(line), points, rtol=1e-9, atol=1e-9)


def assert_seen(panels: list[Axes], points: list[tuple[float, float]]) -> None:
    """Each point lies within the limits of one of the panels that draw it."""
    limits = [(sorted(axes.get_xlim()), sorted(axes.get_ylim())) for axes in panels]
    for x, y in points:
        assert any(left <= x <= right and low <= y <= high for (left, right), (low, high) in limits), (x, y)


def test_curves_of_the_fine_tunes_are_their_measurements_and_all_seen(drawn: list[Figure], tmp_path: Path) -> None:
    runs = read("docs/finetune/summary.json")["runs"]
    finetune_methods.plot(runs, tmp_path / "curves.png")
    *loss_panels, found = sorted(drawn[0].axes, key=lambda axes: axes.get_position().x0)
    panels = {"tail_loss": loss_panels, "passkey": [found]}
    for key, shown in panels.items():
        measured = [[(point["tokens"], point[key]) for point in run["mid_training"]] for run in runs.values()]
        for axes in shown:
            for line, points in zip(curves(axes), measured, strict=True):
                assert_draws(line, points)
            # Of equal curves, each is thinner than those that it is drawn over.
            for below, above in combinations(curves(axes), 2):
                same = np.array_equal(below.get_ydata(), above.get_ydata())
                assert not same or above.get_linewidth() < below.get_linewidth()
        for points in measured:
            assert_seen(shown, points)


def test_curves_by_position_are_those_of_each_seed_and_their_mean(drawn: list[Figure], tmp_path: Path) -> None:
    summary = read("docs/positions/summary.json")
    train_short_test_long.plot(summary, tmp_path / "positions.png")
    size = summary["length"] // 8
    for axes, position in zip(drawn[0].axes, summary["positions"].values(), strict=True):
        expected = []
        for of_seeds in position["curves"].values():
            seeds = [curve for curve in of_seeds if curve is not None]
            if seeds:
                seeds.append(np.mean(seeds, axis=0).tolist())
            expected += [[(size * (k + 0.5), y) for k, y in enumerate(curve)] for curve in seeds]
        for line, points in zip(curves(axes), expected, strict=True):
            assert_draws(line, points)
            assert_seen([axes], points)


def test_rescale_factors_are_those_of_the_fits(
    drawn: list[Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "RUNS", tmp_path)
    rope, methods = RopeGeometry.plain(64, 1250.0, 512), [make_method("ntk", 4.0), make_method("pi", 4.0)]
    for seed, method in enumerate(methods):
        SavedMethod(method).save(fit.fit_file(4, f"fitted, seed {seed}"))
    names = ["fitted, seed 0", "fitted, seed 1", "yarn", "llama3"]
    summary = json.dumps({4: {"rescale_factors": {name: fit.rescale_factors(4, name) for name in names}}})
    fit.draw(json.loads(summary), tmp_path / "lambda.png")
    methods += [make_method("yarn", 4.0), make_method("llama3", 4.0)]
    (axes,) = drawn[0].axes
    for line, method in zip(curves(axes), methods, strict=True):
        points = list(enumerate(method.rescale_factors(rope).tolist()))
        assert_draws(line, points)
        assert_seen([axes], points)


def test_figures_of_a_results_file_are_its_summary(drawn: list[Figure], tmp_path: Path) -> None:
    summary = made(variants=5)
    plots.plot_overview(summary, tmp_path / "overview.png")
    plots.plot_heatmap(summary, "pi", "passkey", tmp_path / "heatmap.png")
    overview, heatmap = drawn
    for line, variant in zip(curves(overview.axes[0]), summary.variants, strict=True):
        assert_draws(line, summary.curve(variant))
        assert_seen([overview.axes[0]], summary.curve(variant))
    maps = [*zip(overview.axes[1:], summary.variants), (heatmap.axes[0], "pi")]
    lengths, depths = plots.grid_of(summary, "passkey")
    for axes, variant in maps:
        cells = summary.cells(variant, "passkey")
        expected = [[cells[length, depth].value for length in lengths] for depth in depths]
        np.testing.assert_array_equal(axes.images[0].get_array(), expected)

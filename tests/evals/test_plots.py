"""The figures: each says its numbers, in any grid, and refuses what was not measured."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path
from random import Random
from typing import Any

import matplotlib.image
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ctxext.evals import plots
from ctxext.evals.perplexity import packed
from ctxext.evals.results import Header, Record, Results
from ctxext.evals.statistics import in_percent
from ctxext.evals.summary import Summary
from ctxext.extension.pairs import PairTurns
from ctxext.methods import list_methods

METHODS = (
    "none", "yarn", "pi", "ntk", "ntk_by_parts", "dynamic_ntk", "dynamic_yarn", "llama3", "abf", "yarn_x8", "ntk_x8",
    "drope",
)  # fmt: skip
EIGHT = (128, 256, 384, 512, 640, 768, 896, 1024)
PARTS = ("passkey", "perplexity", "short")


def made(
    variants: int = 3,
    lengths: Sequence[int] = (256, 512, 1024),
    depths: Sequence[float | None] = (0.0, 0.25, 0.5, 0.75, 1.0),
    parts: Sequence[str] = PARTS,
    trials: int = 10,
    trained: int = 256,
) -> Summary:
    """Results as the runner writes them, without a model: the k-th variant costs more and finds less than
    the one before it."""
    rng, names, records = Random(0), METHODS[:variants], []

    def record(variant: str, task: str, length: int, depth: float | None, trial: int, **values: Any) -> Record:
        place = {"variant": variant, "task": task, "length": length, "depth": depth, "trial": trial, "seed": 0}
        return {**place, "key": f"{task} {length} {depth} {trial}", **values}

    for k, variant in enumerate(names):
        chance = 0.2 if k == 0 else max(0.0, 1 - 0.3 * (k - 1))
        for length in lengths if "passkey" in parts else ():
            for trial in range(trials):
                for depth in depths:
                    hit = length <= trained or rng.random() < chance
                    readable = {"expected": ["123"], "got": "123" if hit else "9", "question": "?", "contexts": []}
                    outcome = {"hit": hit, "score": float(hit), "digits": float(hit), "logprob": -1.0}
                    records.append(record(variant, "passkey", length, depth, trial, **outcome, **readable))
        for task, longest in (("perplexity", lengths[-1]), ("short", trained)):
            for window in range(4 if task in parts else 0):
                losses = 3 + 0.02 * k + torch.rand(longest - 1, generator=torch.Generator().manual_seed(window)) / 10
                losses[trained:] += 0.5 * (k == 0)
                arrays = {"losses": losses} | ({"top1": torch.arange(longest - 1)} if task == "short" else {})
                size = {"tokens": longest - 1, "bytes": 4 * longest, "loss": losses.mean().item()}
                records.append(record(variant, task, longest, None, window, **size, **packed(**arrays)))
    facts = {name: {"model": "tiny", "extension": None, "fingerprint": name} for name in names}
    about = {"trained_length": trained, "lengths": list(lengths)}
    return Summary(
        Results(Path("made.jsonl"), Header({"seed": 0}, {part: {} for part in parts}, facts, about), records)
    )


def words(path: Path) -> list[str]:
    """The texts of an SVG."""
    return [unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.S)]


def joined(path: Path) -> str:
    return "\n".join(words(path))


FIGURES: dict[str, Callable[[Summary, Path], None]] = {
    "overview": plots.plot_overview,
    "heatmap": lambda summary, path: plots.plot_heatmap(summary, summary.variants[-1], "passkey", path),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_is_written_as_png_and_as_svg(name: str, tmp_path: Path) -> None:
    summary = made()
    for suffix in ("png", "svg"):
        FIGURES[name](summary, tmp_path / f"figure.{suffix}")
    height, width, _ = matplotlib.image.imread(tmp_path / "figure.png").shape
    assert width > 500
    assert height > 300
    assert any("tiny" in text for text in words(tmp_path / "figure.svg"))


def test_pairs_are_drawn_as_points_at_their_turns(tmp_path: Path, drawn: list[Figure]) -> None:
    trained = torch.tensor([8.0, 2.0, 0.5, 0.25], dtype=torch.float64)
    found = PairTurns("ntk ×4: 2 → 8 tokens", 2, 8, trained, torch.tensor([32.0, 6.0, 1.0, 0.25], dtype=torch.float64))
    plots.plot_pairs([found, found], tmp_path / "pairs.svg")
    for panel in drawn[-1].axes:
        before, seen, new, stopped = (list(zip(*line.get_data())) for line in panel.lines)
        assert before == [(0, 8), (1, 2), (2, 0.5), (3, 0.25)]
        assert seen == [(0, 32), (1, 6), (3, 0.25)]
        assert (new, stopped) == ([(2, 1)], [])
    assert "turns (log scale)" in words(tmp_path / "pairs.svg")
    assert "no longer rotates" not in words(tmp_path / "pairs.svg")


def test_pairs_that_stop_are_drawn_in_a_row_of_their_own(tmp_path: Path, drawn: list[Figure]) -> None:
    trained = torch.tensor([8.0, 2.0, 0.5, 0.25], dtype=torch.float64)
    found = PairTurns("cut ×4: 2 → 8 tokens", 2, 8, trained, torch.tensor([32.0, 6.0, 0.0, 0.0], dtype=torch.float64))
    plots.plot_pairs([found], tmp_path / "pairs.svg")
    (panel,) = drawn[-1].axes
    *_, stopped = (list(zip(*line.get_data())) for line in panel.lines)
    assert [pair for pair, _ in stopped] == [2, 3]
    assert all(panel.get_ylim()[0] < turns < trained.min() for _, turns in stopped)
    assert "no longer rotates" in words(tmp_path / "pairs.svg")


def test_overview_shows_each_share_of_each_variant(tmp_path: Path) -> None:
    summary, path = made(parts=["passkey"]), tmp_path / "figure.svg"
    plots.plot_overview(summary, path)
    shares = [cell.value for variant in summary.variants for cell in summary.cells(variant, "passkey").values()]
    shown = [text for text in words(path) if re.fullmatch(r"\d+", text)]
    assert sorted(shown) == sorted(f"{100 * share:.0f}" for share in shares)


def test_only_a_cell_without_a_miss_reads_100(tmp_path: Path) -> None:
    path, summary = tmp_path / "figure.svg", made(variants=1, depths=(0.0, 0.5), parts=["passkey"], trials=200)
    summary.of("none", "passkey")[0].update(hit=False, score=0.0)
    plots.plot_overview(summary, path)
    assert {"99.5", "100"} <= set(words(path))


def test_overview_names_its_axes_and_the_trained_length(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    plots.plot_overview(made(), path)
    for text in (
        "baseline",
        "yarn",
        "pi",
        "1×",
        "4×",
        "depth",
        "25%",
        "retrieval accuracy,",
        "n = 10 per cell",
        "1,024",
    ):
        assert text in words(path)
    assert "trained length: 256" in joined(path)
    assert "perplexity at this position (log scale)" in words(path)
    assert "length, as a multiple of the trained 256 tokens" in words(path)


def test_heatmap_shows_share_and_interval_of_each_cell(tmp_path: Path) -> None:
    summary, path = made(), tmp_path / "figure.svg"
    plots.plot_heatmap(summary, "pi", "passkey", path)
    for cell in summary.cells("pi", "passkey").values():
        assert in_percent(cell.value) in words(path)
        assert f"[{in_percent(cell.low)}, {in_percent(cell.high)}]" in words(path)
    for text in ("length (tokens)", "1,024", "75%", "retrieval accuracy,", "n = 10 per cell", "tiny, pi: passkey"):
        assert text in words(path)


def test_overview_of_perplexity_has_a_line_a_variant_and_its_lengths(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    plots.plot_overview(made(parts=["perplexity"]), path)
    for text in ("baseline", "yarn", "pi", "position in the window (tokens)", "1,024", "512", "256"):
        assert text in words(path)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, path: Path) -> None:
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


@pytest.mark.slow
def test_a_curve_far_above_the_others_does_not_flatten_them(tmp_path: Path, drawn: list[Figure]) -> None:
    summary = made(parts=["perplexity"])
    for record in summary.of("none", "perplexity"):
        record.update(packed(losses=torch.full((1023,), 9.0)))
    plots.plot_overview(summary, tmp_path / "figure.svg")
    (axes,) = drawn[-1].axes
    low, high = axes.get_ylim()
    seen = [value for variant in summary.variants if variant != "none" for _, value in summary.curve(variant)]
    assert 0.9 * min(seen) < low < min(seen) < max(seen) < high < 1.2 * max(seen)
    assert "↑ off the scale: baseline (up to 8,103)" in words(tmp_path / "figure.svg")


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    """Importing or using the figures does not switch the backend of a notebook."""
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = ['tests', 'tests/support']\n"
        "from evals.test_plots import made, plots\n"
        f"plots.plot_overview(made(), Path({str(tmp_path)!r}) / 'figure.png')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_of_all_methods_fit_beside_each_other(tmp_path: Path, drawn: list[Figure], monkeypatch) -> None:
    names = ("none", *(cls.name for cls in list_methods("rope")))
    monkeypatch.setattr(sys.modules[__name__], "METHODS", names)
    plots.plot_overview(made(variants=len(names), parts=["perplexity"]), tmp_path / "figure.png")
    (figure,) = drawn
    frame = figure.axes[0].get_legend().get_window_extent(FigureCanvasAgg(figure).get_renderer())
    assert figure.bbox.x0 < frame.x0
    assert frame.x1 < figure.bbox.x1
    styles = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in figure.axes[0].lines[: len(names)]}
    assert len(styles) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(256, 512, 1024), EIGHT])
@pytest.mark.parametrize("variants", [2, 12])
def test_overview_holds_every_panel_whatever_the_grid(variants: int, lengths: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    plots.plot_overview(made(variants, lengths, [k / 10 for k in range(11)], trials=2), path)
    titles = ["baseline", *METHODS[1:variants]]
    # Once in the legend and once above its map.
    assert [words(path).count(title) for title in titles] == [2] * variants
    assert words(path).count("90%") >= 1


@pytest.mark.parametrize(
    ("parts", "refusing"),
    [
        (("passkey",), set()),
        (("perplexity",), {"heatmap"}),
        (("short",), {"overview", "heatmap"}),
    ],
)
def test_figure_is_drawn_of_what_was_measured_or_refused(
    parts: tuple[str, ...], refusing: set[str], tmp_path: Path
) -> None:
    summary = made(parts=parts)
    for name, draw in FIGURES.items():
        if name in refusing:
            with pytest.raises(ValueError, match="measured"):
                draw(summary, tmp_path / "figure.svg")
        else:
            draw(summary, tmp_path / "figure.svg")
            assert "baseline" in joined(tmp_path / "figure.svg") or name == "heatmap"


def test_a_task_that_draws_its_own_depth_has_a_map_of_one_row(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    plots.plot_heatmap(made(depths=[None]), "yarn", "passkey", path)
    assert "depth" not in words(path)
    assert sum(text.startswith("[") for text in words(path)) == 3


def test_a_cell_that_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    summary, path = made(), tmp_path / "figure.svg"
    summary.records = [r for r in summary.records if (r["variant"], r["length"]) != ("pi", 1024)]
    plots.plot_heatmap(summary, "pi", "passkey", path)
    assert words(path).count("–") == 5


def test_text_of_a_cell_stands_out() -> None:
    def luminance(color: str) -> float:
        rgb = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for share in range(101):
        dark, light = sorted(map(luminance, plots.heat_colors(share / 100)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.slow
def test_save_figures_writes_what_was_measured(tmp_path: Path) -> None:
    paths = plots.save_figures(made(variants=2), tmp_path, "run")
    names = {"overview", "passkey-baseline", "passkey-yarn"}
    assert {path.name for path in paths} == {f"run-{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert all(path.stat().st_size > 1000 for path in paths)
    paths = plots.save_figures(made(parts=["perplexity"]), tmp_path, "less")
    assert [path.name for path in paths] == ["less-overview.png", "less-overview.svg"]

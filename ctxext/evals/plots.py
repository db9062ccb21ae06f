"""Pictures of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

from ctxext.evals.comparison import UNEXTENDED, Comparison

matplotlib.use("Agg")


def times(length: int, trained: int) -> str:
    """`2×` for a length of twice the trained one."""
    return f"{length / trained:g}×"


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """One figure: perplexity against position, a line a method, above a passkey map a method (if it was measured)."""
    n = len(comparison.results)
    figure = plt.figure(figsize=(2.2 * n, 7.0 if comparison.trials else 4.4), layout="constrained")
    grid = figure.add_gridspec(
        2 if comparison.trials else 1, n, height_ratios=[1.7, 1.0] if comparison.trials else None
    )
    _plot_curves(comparison, figure.add_subplot(grid[0, :]))
    if comparison.trials:
        _plot_passkey(comparison, figure, [grid[1, column] for column in range(n)])
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_curves(comparison: Comparison, top: Axes) -> None:
    trained, results = comparison.trained_length, comparison.results
    colors = ["0.35", *plt.get_cmap("tab10").colors]
    for result, color in zip(results, colors):
        centers = [(k + 0.5) * comparison.bin_tokens for k in range(len(result.curve))]
        unextended = result.method == UNEXTENDED
        label = "not extended" if unextended else f"{result.method} ×{comparison.factor:g}"
        top.plot(
            centers,
            result.curve,
            color=color,
            label=label,
            lw=2.2 if unextended else 1.8,
            ls="--" if unextended else "-",
        )
    top.axvline(trained, color="0.6", lw=1)
    top.text(
        trained, 0.985, f" trained length: {trained:,}", transform=top.get_xaxis_transform(), va="top", color="0.4"
    )
    top.set_yscale("log")
    top.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    wide = max(max(r.curve) for r in results) > 10 * min(min(r.curve) for r in results)
    top.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if not wide or str(value)[0] in "25" else "")
    top.set_xlim(0, comparison.lengths[-1])
    top.set_xticks(comparison.lengths, [f"{length:,}" for length in comparison.lengths])
    top.set_xlabel("position in the window (tokens)")
    top.set_ylabel("perplexity of the token there")
    passkey = ", and passkey retrieval by length and depth" if comparison.trials else ""
    top.set_title(f"{comparison.model}: perplexity by position{passkey}", loc="left", pad=28)
    top.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=len(results), borderpad=0)
    top.grid(axis="y", color="0.92", which="both")
    top.spines[["top", "right"]].set_visible(False)


def _plot_passkey(comparison: Comparison, figure: Figure, cells: Sequence[SubplotSpec]) -> None:
    trained, first = comparison.trained_length, None
    for column, (cell, result) in enumerate(zip(cells, comparison.results)):
        axes = figure.add_subplot(cell, sharey=first)
        first = first or axes
        shares = [[row[d] / comparison.trials for row in result.hits] for d in range(len(comparison.depths))]
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, row in enumerate(shares):
            for x, share in enumerate(row):
                light = 0.25 < share < 0.8  # the middle of the map is pale, its ends are dark
                axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", color="0.15" if light else "white")
        axes.set_xticks(range(len(comparison.lengths)), [times(length, trained) for length in comparison.lengths])
        axes.set_yticks(range(len(comparison.depths)), [f"{100 * depth:.0f}%" for depth in comparison.depths])
        axes.tick_params(length=0, labelleft=column == 0)
        axes.set_title("not extended" if result.method == UNEXTENDED else result.method, fontsize=10)
        if column == 0:
            axes.set_ylabel("depth of the key")
        for spine in axes.spines.values():
            spine.set_visible(False)
    bar = figure.colorbar(image, ax=figure.axes[1:], shrink=0.9, pad=0.01, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["0%", "50%", "100%"])
    bar.outline.set_visible(False)
    bar.set_label(f"found, of {comparison.trials}")
    figure.supxlabel(f"length, as a multiple of the trained {trained:,} tokens", fontsize=10)

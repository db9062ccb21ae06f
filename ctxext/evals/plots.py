"""Figures of a results file, as PNG or SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ctxext.evals.statistics import in_percent
from ctxext.evals.summary import Summary, label
from ctxext.evals.targets import UNEXTENDED
from ctxext.extension.distances import Distances
from ctxext.extension.pairs import PairTurns

# Okabe and Ito (2008), darkened for thin lines on white; with the dashes, enough for 24 lines.
COLORS = ("#0072b2", "#d55e00", "#00875f", "#b0468a", "#b37400", "#2f8fc4")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.2, 1.2, 1.2)))
# Curves whose peak is so many times the lowest peak are cut off.
OFF_SCALE = 3
# ColorBrewer's red-yellow-blue, safe for colour-blind readers.
HEAT = colormaps["RdYlBu"]


def save_figures(summary: Summary, folder: Path, name: str) -> list[Path]:
    """Write all figures to `folder` as PNG and SVG, and return the paths.

    They are called `name-overview.png` and so on; the maps of tasks with depths `name-passkey-yarn.png`.
    """
    drawn: dict[str, Callable[[Path], None]] = {}
    if summary.lengths("perplexity", *summary.retrieval_tasks):
        drawn["overview"] = partial(plot_overview, summary)
    for task, variant in product(summary.retrieval_tasks, summary.variants):
        if any(depth is not None for _, depth in summary.cells(variant, task)):
            drawn[re.sub(r"[^\w.-]+", "_", f"{task}-{label(variant)}")] = partial(plot_heatmap, summary, variant, task)
    paths = []
    for (what, draw), suffix in product(drawn.items(), ("png", "svg")):
        paths.append(folder / f"{name}-{what}.{suffix}")
        draw(paths[-1])
    return paths


def plot_overview(summary: Summary, path: Path) -> None:
    """Perplexity by position, one line per variant, above a heat map of the first retrieval task per variant.

    Raises:
        ValueError: neither was measured.
    """
    curves, task = bool(summary.lengths("perplexity")), next(iter(summary.retrieval_tasks), None)
    if not curves and task is None:
        raise ValueError("nothing to draw: neither perplexity nor retrieval was measured.")
    variants = [variant for variant in summary.variants if task is not None and summary.of(variant, task)]
    lengths, depths = grid_of(summary, task) if task is not None else ([], [])
    width = max(1.9, 0.38 * len(lengths))
    rows = math.ceil(len(variants) * width / 14)
    columns = math.ceil(len(variants) / rows) if rows else 1
    heights = [4.1] * curves + [0.45 + 0.28 * max(5 if len(depths) > 1 else 2, len(depths))] * rows
    with _saved(path, max(9.0, columns * width + 1.4), sum(heights) + 0.7) as figure:
        grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
        if curves:
            _draw_curves(summary, figure.add_subplot(grid[0, :]))
        for k, variant in enumerate(variants):
            axes = figure.add_subplot(grid[curves + k // columns, k % columns])
            image = _draw_map(summary, variant, str(task), axes)
            axes.set_title(label(variant), fontsize=10)
            axes.set_xticks(range(len(lengths)), [times(length, summary.trained_length) for length in lengths])
            axes.tick_params(labelleft=k % columns == 0, labelsize=_small(lengths))
            if k % columns == 0 and depths != [None]:
                axes.set_ylabel("depth")
        if task is not None:
            _add_color_bar(summary, task, figure, image, figure.axes[curves:])
            figure.supxlabel(f"length, as a multiple of the trained {summary.trained_length:,} tokens", fontsize=10)
        shown = ["perplexity by position"] * curves + (
            [] if task is None else [f"{summary.titled(task)} by length{' and depth' * (depths != [None])}"]
        )
        _set_title(figure, f"{model_name(summary)}: {', and '.join(shown)}")


def plot_heatmap(summary: Summary, variant: str, task: str, path: Path) -> None:
    """A heat map of length by depth, with accuracy and 95% interval in each cell.

    Raises:
        ValueError: this task was not measured on this variant.
    """
    if not summary.cells(variant, task):
        raise ValueError(
            f"{task} was not measured on {label(variant)}. Variants: {', '.join(map(label, summary.variants))}; "
            f"retrieval tasks: {', '.join(summary.retrieval_tasks) or 'none'}."
        )
    lengths, depths = grid_of(summary, task)
    with _saved(path, max(5.2, 2.0 + 0.75 * len(lengths)), 1.2 + max(0.9, 0.48 * len(depths))) as figure:
        axes = figure.add_subplot()
        image = _draw_map(summary, variant, task, axes, intervals=True)
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel("depth" if depths != [None] else "")
        _add_color_bar(summary, task, figure, image, [axes], variant)
        _set_title(figure, f"{model_name(summary)}, {label(variant)}: {summary.titled(task)}")


# ----------------------------------------------------------------------------- what the report needs too


def plot_pairs(found: Sequence[PairTurns], path: Path) -> None:
    """The turns of each pair within the trained length and, extended, within the target: a panel for each table."""
    with _saved(path, 7.0, 3.6 * len(found)) as figure:
        panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
        for turns, axes in zip(found, panels):
            pairs = np.arange(len(turns.trained))
            stopped, new = turns.stopped.numpy(), turns.new.numpy()
            lowest = min(float(turns.trained.min()), float(turns.target[~turns.stopped].min())) / 2
            target, seen = turns.target.numpy(), ~(new | stopped)
            axes.axhspan(lowest / 2, 1, color="0.94", zorder=0)
            axes.plot(pairs, turns.trained, "o", mfc="none", color="0.45", ms=5)
            axes.plot(pairs[seen], target[seen], "o", color=COLORS[0], ms=4)
            axes.plot(pairs[new], target[new], "X", color=COLORS[1], ms=6)
            axes.plot(pairs[stopped], np.full(stopped.sum(), lowest), "v", color=COLORS[0], ms=4)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(
                FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"1/{1 / value:,.0f}")
            )
            axes.set_ylim(lowest / 2, None)
            axes.set_ylabel("turns (log scale)")
            axes.set_title(turns.title, loc="left", fontsize=11)
            names = [f"within {turns.trained_length:,} tokens", f"within {turns.target_length:,}, extended"]
            names += ["the same, at angles that are new", "no longer rotates"]
            for line, name in zip(axes.lines, names):
                line.set_label(name if len(line.get_xdata()) else "")
            axes.legend(fontsize=8, frameon=False, loc="upper right")
            axes.text(0, 0.75, "no full turn", fontsize=8, color="0.4", va="top")
            axes.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xlabel("pair of rotary dimensions, fastest first")


def plot_distances(found: Sequence[Distances], path: Path) -> None:
    """The distances that attention sees, by the true ones: a panel for each method."""
    with _saved(path, 7.0, 3.6 * len(found)) as figure:
        for distances, axes in zip(found, figure.subplots(len(found), 1, squeeze=False)[:, 0]):
            draw_distances(distances, axes)
            axes.set_title(distances.title, loc="left", fontsize=11)


def draw_distances(found: Distances, axes: Axes, name: str = "extended") -> None:
    """Draw the effective distances of a method, and those of plain RoPE.

    Args:
        name: of the method, in the legend.
    """
    trained, last = found.trained_length, int(found.true[-1])
    axes.plot(found.true, found.effective, color=COLORS[0], label=name)
    axes.plot([0, last], [0, last], color="#8a929e", linestyle=":", label="plain RoPE")
    axes.axhline(trained, color="#5a626e", linewidth=0.8, linestyle="--")
    axes.text(last, trained, f"trained: {trained:,}", ha="right", va="bottom", color="#5a626e", fontsize=8)
    axes.set(xlabel="distance (tokens)", ylabel="effective distance (tokens)", ylim=(0, 1.5 * trained))
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def model_name(summary: Summary) -> str:
    """The model or models of a results file."""
    return ", ".join(dict.fromkeys(summary.header.variants[variant]["model"] for variant in summary.variants))


def times(length: int, trained: int) -> str:
    """`2×` for a length of twice the trained one."""
    return f"{length / trained:.3g}×"


def percent(depth: float | None) -> str:
    """`25%` for a depth; empty where the task draws its own."""
    return "" if depth is None else f"{100 * depth:.3g}%"


def heat_colors(share: float) -> tuple[str, str]:
    """Background and text of a map's cell; of black and white, the text is what stands out more."""
    rgb = HEAT(share)[:3]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # WCAG's contrast, (luminance + 0.05) over that of the other, is the same for both here.
    return to_hex(rgb), "#ffffff" if luminance < math.sqrt(1.05 * 0.05) - 0.05 else "#000000"


def grid_of(summary: Summary, task: str) -> tuple[list[int], list[float | None]]:
    """The lengths and the depths of a task's map, those of all variants together."""
    cells = {cell for variant in summary.variants for cell in summary.cells(variant, task)}
    depths = sorted({depth for _, depth in cells}, key=lambda depth: -1.0 if depth is None else depth)
    return sorted({length for length, _ in cells}), depths


# ------------------------------------------------------------------------------------------------- parts


@contextmanager
def _saved(path: Path, width: float, height: float) -> Iterator[Figure]:
    # Text of an SVG stays text.
    with rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=130)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _set_title(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)


def _style(summary: Summary, variant: str) -> dict[str, Any]:
    """The line style of a variant."""
    if variant == UNEXTENDED:
        return {"color": "0.3", "ls": (0, (4, 2)), "lw": 2.2}
    k = [name for name in summary.variants if name != UNEXTENDED].index(variant)
    return {"color": COLORS[k % len(COLORS)], "ls": DASHES[k // len(COLORS) % len(DASHES)], "lw": 1.7}


def _small(lengths: Sequence[int]) -> float:
    """The font size of a map without intervals, in points."""
    return 9.0 if len(lengths) < 6 else 7.5


def _draw_curves(summary: Summary, axes: Axes) -> None:
    trained, last = summary.trained_length, summary.lengths("perplexity")[-1]
    peaks, least = {}, math.inf
    for variant in summary.variants:
        if points := summary.curve(variant):
            axes.plot(*zip(*points), label=label(variant), **_style(summary, variant))
            peaks[variant] = max(value for _, value in points)
            least = min(least, *(value for _, value in points))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # A curve far above the others would flatten them.
    beyond = {variant: peak for variant, peak in peaks.items() if peak > OFF_SCALE * min(peaks.values())}
    if beyond:
        high = 1.15 * max(peak for variant, peak in peaks.items() if variant not in beyond)
        low = 0.95 * least
        axes.set_ylim(low, high)
        said = ", ".join(f"{label(variant)} (up to {peak:,.0f})" for variant, peak in beyond.items())
        axes.annotate(f"↑ off the scale: {said}", (0.99, 0.02), xycoords="axes fraction", ha="right", fontsize=9)
    wide = high > 5 * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5), numticks=20) if wide else MaxNLocator(8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.set_xlim(0, last)
    ticks = _spread([*summary.read_lengths, trained], last)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("perplexity at this position (log scale)")
    if trained <= last:
        axes.axvline(trained, color="0.6", lw=1)
        side = "right" if trained > 0.75 * last else "left"
        words: dict[str, Any] = {"va": "top", "ha": side, "color": "0.4", "fontsize": 9}
        where = axes.get_xaxis_transform()
        axes.text(trained, 0.99, f" trained length: {trained:,} ", transform=where, **words)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    for columns in range(6, 0, -1):
        legend = axes.legend(
            frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, borderpad=0, handlelength=2.6,
            fontsize=9,
        )  # fmt: skip
        if legend.get_window_extent().width < 0.9 * axes.figure.bbox.width:
            break


def _spread(ticks: Sequence[int], last: int) -> list[int]:
    """The `ticks` whose labels fit, largest first."""
    chosen: list[int] = []
    for tick in sorted(set(ticks), reverse=True):
        if tick <= last and all(other - tick > last / 16 for other in chosen):
            chosen.append(tick)
    return chosen


def _draw_map(summary: Summary, variant: str, task: str, axes: Axes, *, intervals: bool = False) -> AxesImage:
    """Draw a heat map: lengths in tokens from left to right, depths from top to bottom."""
    lengths, depths = grid_of(summary, task)
    cells = summary.cells(variant, task)
    shares = np.full((len(depths), len(lengths)), np.nan)
    for (y, depth), (x, length) in product(enumerate(depths), enumerate(lengths)):
        cell = cells.get((length, depth))
        if cell is None:
            axes.text(x, y, "–", ha="center", va="center", color="0.5")
            continue
        shares[y, x] = cell.value
        style: dict[str, Any] = {"ha": "center", "color": heat_colors(cell.value)[1], "textcoords": "offset points"}
        number, bounds = in_percent(cell.value), f"[{in_percent(cell.low)}, {in_percent(cell.high)}]"
        if intervals:
            axes.annotate(number, (x, y), (0, -2), va="bottom", fontsize=10, **style)
            axes.annotate(bounds, (x, y), (0, -3.5), va="top", fontsize=7, **style)
        else:
            axes.annotate(number, (x, y), (0, 0), va="center", fontsize=_small(lengths), **style)
    image = axes.imshow(shares, vmin=0, vmax=1, cmap=HEAT, aspect="auto")
    axes.set_facecolor("0.95")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), map(percent, depths))
    # White lines between the cells.
    axes.set_xticks(np.arange(len(lengths) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(depths) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=0.8)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    return image


def _add_color_bar(
    summary: Summary, task: str, figure: Figure, image: AxesImage, axes: Sequence[Axes], *variants: str
) -> None:
    counts = {cell.n for variant in variants or summary.variants for cell in summary.cells(variant, task).values()}
    n = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    bar = figure.colorbar(image, ax=axes, shrink=0.95, pad=0.015, aspect=18, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["0%", "50%", "100%"])
    bar.outline.set_visible(False)
    bar.set_label(f"retrieval accuracy,\nn = {n} per cell")

"""Figures of a results file, as PNG or SVG by the suffix of the path."""

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
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from ctxext.evals.statistics import Interval, in_percent
from ctxext.evals.summary import Summary, label
from ctxext.evals.targets import UNEXTENDED

# Okabe and Ito (2008), darkened for thin lines on white; with the dashes, enough for 18 lines.
COLORS = ("#0072b2", "#d55e00", "#00875f", "#b0468a", "#b37400", "#2f8fc4")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
# ColorBrewer's red-yellow-blue: its ends and its middle are told apart by the colour-blind.
HEAT = colormaps["RdYlBu"]


def save_figures(summary: Summary, folder: Path, name: str) -> list[Path]:
    """Write all that was measured to `folder`, each figure as PNG and SVG, and return the paths.

    They are called `name-overview.png` and so on; the maps of tasks with depths `name-passkey-yarn.png`.
    """
    drawn: dict[str, Callable[[Path], None]] = {}
    if summary.lengths("perplexity", *summary.retrieval_tasks):
        drawn["overview"] = partial(plot_overview, summary)
    if summary.lengths("perplexity"):
        drawn["perplexity"] = partial(plot_perplexity, summary)
    if _prices(summary) or _found(summary):
        drawn["price"] = partial(plot_gate, summary)
    for task, variant in product(summary.retrieval_tasks, summary.variants):
        if any(depth is not None for _, depth in summary.cells(variant, task)):
            drawn[re.sub(r"[^\w.-]+", "_", f"{task}-{variant}")] = partial(plot_heatmap, summary, variant, task)
    paths = []
    for (what, draw), suffix in product(drawn.items(), ("png", "svg")):
        paths.append(folder / f"{name}-{what}.{suffix}")
        draw(paths[-1])
    return paths


def plot_overview(summary: Summary, path: Path) -> None:
    """Perplexity by position, a line a variant, above a map of the first retrieval task for each variant.

    Raises:
        ValueError: neither was measured.
    """
    curves, task = bool(summary.lengths("perplexity")), next(iter(summary.retrieval_tasks), None)
    if not curves and task is None:
        raise ValueError("neither perplexity nor retrieval was measured, so there is nothing to draw.")
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
            image = _draw_map(summary, variant, task, axes)
            axes.set_title(label(variant), fontsize=10)
            axes.set_xticks(range(len(lengths)), [times(length, summary.trained_length) for length in lengths])
            axes.tick_params(labelleft=k % columns == 0, labelsize=_small(lengths))
            if k % columns == 0 and depths != [None]:
                axes.set_ylabel("depth")
        if task is not None:
            _add_color_bar(summary, task, figure, image, figure.axes[curves:])
            figure.supxlabel(f"length, as a multiple of the trained {summary.trained_length:,} tokens", fontsize=10)
        shown = ["perplexity by position"] * curves + [f"{summary.titled(task)} by length and depth"] * (
            task is not None
        )
        _set_title(figure, f"{model_name(summary)}: {', and '.join(shown)}")


def plot_heatmap(summary: Summary, variant: str, task: str, path: Path) -> None:
    """Length by depth, the share and its 95% interval in each cell.

    Raises:
        ValueError: this task was not measured on this variant.
    """
    if not summary.cells(variant, task):
        raise ValueError(
            f"{task} was not measured on {variant}. Variants: {', '.join(summary.variants)}; "
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


def plot_perplexity(summary: Summary, path: Path) -> None:
    """Perplexity by position, a line a variant.

    Raises:
        ValueError: perplexity was not measured.
    """
    if not summary.lengths("perplexity"):
        raise ValueError("perplexity was not measured, so there is nothing to draw. Add it to the tasks.")
    with _saved(path, 9.0, 4.8) as figure:
        _draw_curves(summary, figure.add_subplot())
        _set_title(figure, f"{model_name(summary)}: perplexity by position")


def plot_gate(summary: Summary, path: Path) -> None:
    """The price of each variant within the trained length against what it finds beyond, with 95% intervals.

    Where only one of the two was measured, it is drawn alone, a row a variant.

    Raises:
        ValueError: neither was measured.
    """
    prices, found = _prices(summary), _found(summary)
    if not prices and not found:
        raise ValueError("neither the short-context gate nor retrieval beyond the trained length was measured.")
    price_label = f"price within the trained {summary.trained_length:,} tokens (nats more a token)"
    found_label = f"found beyond the trained {summary.trained_length:,} tokens (%)"
    both = [variant for variant in summary.variants if variant in prices and variant in found]
    alone = prices or found
    with _saved(path, 8.0 + 0.1 * len(both), 5.6 if both else 1.3 + 0.32 * len(alone)) as figure:
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.93")
        axes.set_axisbelow(True)
        axes.set_xlabel(price_label if prices else found_label)
        _set_title(figure, f"{model_name(summary)}: " + ("price and gain" if both else "price" if prices else "gain"))
        if not both:
            for y, (variant, share) in enumerate(alone.items()):
                _draw_point(axes, share, Interval(y, y, y, 1), _style(summary, variant)["color"])
            axes.set_yticks(range(len(alone)), map(label, alone))
            axes.set_ylim(len(alone) - 0.5, -0.5)
            return
        for variant in both:
            _draw_point(axes, prices[variant], found[variant], _style(summary, variant)["color"])
        axes.set_ylabel(found_label)
        axes.set_ylim(-5, 105)
        axes.margins(x=0.1)
        _spread_prices(axes, [prices[variant].value for variant in both])
        left_out = [label(variant) for variant in summary.variants if variant not in both]
        if left_out:
            figure.supxlabel(f"not measured on both: {', '.join(left_out)}", fontsize=8, color="0.4")
        _place_labels(axes, [(label(v), prices[v], found[v], _style(summary, v)["color"]) for v in both])


# ----------------------------------------------------------------------------- what the report needs too


def model_name(summary: Summary) -> str:
    """The model of a results file, or its models."""
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
        figure.savefig(path)


def _set_title(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)


def _style(summary: Summary, variant: str) -> dict[str, Any]:
    """Of a variant's line."""
    if variant == UNEXTENDED:
        return {"color": "0.3", "ls": (0, (4, 2)), "lw": 2.2}
    k = [name for name in summary.variants if name != UNEXTENDED].index(variant)
    return {"color": COLORS[k % len(COLORS)], "ls": DASHES[k // len(COLORS) % len(DASHES)], "lw": 1.7}


def _small(lengths: Sequence[int]) -> float:
    """Points of the type in a map without intervals."""
    return 9.0 if len(lengths) < 6 else 7.5


def _draw_curves(summary: Summary, axes: Axes) -> None:
    trained, last = summary.trained_length, summary.lengths("perplexity")[-1]
    for variant in summary.variants:
        if points := summary.curve(variant):
            axes.plot(*zip(*points), label=label(variant), **_style(summary, variant))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    wide = high > 5 * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20) if wide else MaxNLocator(8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.set_xlim(0, last)
    ticks = _spread([*summary.read_lengths, trained], last)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("perplexity of the token there")
    if trained <= last:
        axes.axvline(trained, color="0.6", lw=1)
        side = "right" if trained > 0.75 * last else "left"
        note = {"transform": axes.get_xaxis_transform(), "va": "top", "ha": side, "color": "0.4", "fontsize": 9}
        axes.text(trained, 0.99, f" trained length: {trained:,} ", **note)
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
    """Those of `ticks` whose labels have room, the largest first."""
    chosen: list[int] = []
    for tick in sorted(set(ticks), reverse=True):
        if tick <= last and all(other - tick > last / 16 for other in chosen):
            chosen.append(tick)
    return chosen


def _draw_map(summary: Summary, variant: str, task: str, axes: Axes, *, intervals: bool = False) -> AxesImage:
    """Lengths in tokens from left to right, depths from top to bottom."""
    lengths, depths = grid_of(summary, task)
    cells = summary.cells(variant, task)
    shares = np.full((len(depths), len(lengths)), np.nan)
    for (y, depth), (x, length) in product(enumerate(depths), enumerate(lengths)):
        cell = cells.get((length, depth))
        if cell is None:
            axes.text(x, y, "–", ha="center", va="center", color="0.5")
            continue
        shares[y, x] = cell.value
        style = {"ha": "center", "color": heat_colors(cell.value)[1], "textcoords": "offset points"}
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
    bar.set_label(f"found, n = {n} a cell")


def _prices(summary: Summary) -> dict[str, Interval]:
    """In nats a token, for each variant that was measured against the unextended model."""
    losses = {variant: summary.gate(variant).loss for variant in summary.variants}
    return {variant: Interval(*loss[:3], loss.n) for variant, loss in losses.items() if loss is not None}


def _found(summary: Summary) -> dict[str, Interval]:
    """Beyond the trained length, in percent."""
    shares = {v: summary.pooled(v, summary.deciding_tasks, summary.beyond) for v in summary.variants}
    return {v: Interval(*(100 * value for value in share[:3]), share.n) for v, share in shares.items() if share}


def _draw_point(axes: Axes, x: Interval, y: Interval, color: str) -> None:
    bars = {"xerr": [[x.value - x.low], [x.high - x.value]], "yerr": [[y.value - y.low], [y.high - y.value]]}
    axes.errorbar(x.value, y.value, **bars, fmt="o", ms=6, color=color, elinewidth=1)


def _spread_prices(axes: Axes, prices: Sequence[float]) -> None:
    """Logarithmic from the middling price on, where one method is so dear that the others would stand in a heap."""
    middling = float(np.median(np.abs([price for price in prices if price] or [0])))
    if max(map(abs, prices)) <= 5 * middling or not middling:
        return
    axes.set_xscale("symlog", linthresh=middling, linscale=1.5)
    low, high = axes.get_xlim()
    ticks = [0.0, *(sign * step * 10.0**power for sign in (-1, 1) for power in range(-4, 2) for step in (1, 2, 5))]
    axes.set_xticks(
        sorted(tick for tick in ticks if low <= tick <= high and (not tick or abs(tick) >= 0.25 * middling))
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _place_labels(axes: Axes, points: Sequence[tuple[str, Interval, Interval, str]]) -> None:
    """Write each name near its point, where it covers no other name or point, and as few intervals as possible."""
    figure = axes.figure
    figure.draw_without_rendering()
    inside, pixel = axes.get_window_extent(), 72 / figure.dpi
    marks = [axes.transData.transform((x.value, y.value)) for _, x, y, _ in points]
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in marks]
    bars = [
        Bbox(axes.transData.transform(ends))
        for _, x, y, _ in points
        for ends in (((x.low, y.value), (x.high, y.value)), ((x.value, y.low), (x.value, y.high)))
    ]
    for (name, x, y, color), (mark_x, mark_y) in zip(points, marks):
        text = axes.annotate(
            name, (x.value, y.value), (0, 0), textcoords="offset points", color=color, fontsize=9, va="center",
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "shrinkB": 4},
            bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75},
        )  # fmt: skip
        text.set_in_layout(False)
        size = Text.get_window_extent(text).padded(2)
        best, cost, distance = size, math.inf, 0
        for radius, angle in product(range(10, 400, 10), range(0, 360, 15)):
            if radius >= cost:
                break
            right, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            # The side of the label that faces the point is at this radius.
            left = mark_x + radius * right + size.width * (right - 1) / 2
            box = Bbox.from_bounds(left, mark_y + radius * up - size.height / 2, size.width, size.height)
            within = inside.x0 + 4 < box.x0 and box.x1 < inside.x1 and inside.y0 + 4 < box.y0 and box.y1 < inside.y1
            if not within or box.count_overlaps(taken):
                continue
            line = [(mark_x + step * right, mark_y + step * up) for step in range(12, radius, 6)]
            crossed = sum(mark.contains(*step) for step in line for mark in taken)
            here = radius + 15 * (crossed + box.count_overlaps(bars))
            if here < cost:
                best, cost, distance = box, here, radius
        taken.append(best)
        text.set_position(((best.x0 - mark_x) * pixel, ((best.y0 + best.y1) / 2 - mark_y) * pixel))
        text.arrow_patch.set_visible(distance > 20)

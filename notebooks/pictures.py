"""Pictures of position encodings, and the maths that only `notebooks/position_encodings.ipynb` needs.

The notebook walks through all of them. Each `plot_` function takes what the maths gives and returns a figure;
`figure.savefig("name.png")` writes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ctxext.encodings.alibi import alibi_slopes
from ctxext.encodings.relative_bias import bucket_starts
from ctxext.encodings.rope import RopeGeometry, interleaved_to_half_split, wavelengths
from ctxext.encodings.sinusoidal import Layout, sinusoidal_frequencies
from ctxext.evals.plots import COLORS, DASHES, HEAT
from ctxext.methods import RopeScaling


def rope_score(
    inv_freq: Float64[Tensor, " pair"], distances: Float64[Tensor, " distance"]
) -> Float64[Tensor, " distance"]:
    """q · k of equal queries and keys, relative to distance 0: the mean over pairs of cos(distance * inv_freq).

    The same function is the dot product of two rows of a sinusoidal table.
    """
    return (distances[:, None] * inv_freq).cos().mean(-1)


def decay_bound(inv_freq: Float64[Tensor, " pair"], distances: Shaped[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
    """The mean of |S_j| over j = 1 .. d/2, S_j the sum of the first j phases e^(i m theta_i), at m = `distances`.

    Times d/2 and the largest step between neighbouring pairs of q · k, it bounds |score| from above (RoFormer, section
    3.4.3, equation 37). The score itself need not fall with the distance.
    """
    angles = distances[..., None].double() * inv_freq
    return torch.polar(torch.ones_like(angles), angles).cumsum(-1).abs().mean(-1)


def shift_matrix(
    offset: float, dim: int, theta: float = 10000.0, layout: Layout = "interleaved"
) -> Float64[Tensor, "dim dim"]:
    """The linear map that takes the row at any position to the row `offset` tokens later.

    It depends on the offset alone: sin(a + b) = cos b sin a + sin b cos a, and likewise for the cosine. Apply it as
    `table @ shift_matrix(...).T`. Errors: as `sinusoidal_frequencies`.
    """
    angles = offset * sinusoidal_frequencies(dim, theta, layout)
    cos, sin = angles.cos().diag(), angles.sin().diag()
    halves = torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)])
    if layout != "interleaved":
        return halves
    order = interleaved_to_half_split(torch.arange(float(dim))).long().argsort()
    return halves[order][:, order]


def relative_shift(scores: Float[Tensor, "*batch query distance"], n_keys: int) -> Float[Tensor, "*batch query key"]:
    """Convert one column per distance to one column per key.

    The columns of `scores` are the distances query - key from n_keys down to 1 - n_query, as XLNet lays them out. Query
    i is at position n_keys - n_query + i. Dai et al. (2019), "Transformer-XL", arXiv:1901.02860, appendix B.

    Raises:
        ValueError: `scores` does not have n_query + n_keys columns.
    """
    n_query, n_distances = scores.shape[-2:]
    if n_distances != n_query + n_keys:
        raise ValueError(f"{n_query} queries and {n_keys} keys need {n_query + n_keys} distances, got {n_distances}.")
    column = n_query - torch.arange(n_query)[:, None] + torch.arange(n_keys)
    return scores.gather(-1, column.to(scores.device).expand(*scores.shape[:-1], n_keys))


def relative_attention_terms(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch key dim"],
    relative_key: Float[Tensor, "distance dim"],
    content_bias: Float[Tensor, " dim"],
    position_bias: Float[Tensor, " dim"],
) -> tuple[Float[Tensor, "*batch query key"], ...]:
    """The terms a, b, c, d of Dai et al. (2019), section 3.3; their sum over sqrt(dim) is the logits.

    a: content on content, q_i · k_j; b: content on position, q_i · W R_(i-j); c: the bias of a key, u · k_j; d: the
    bias of a distance, v · W R_(i-j).

    Args:
        relative_key: W R, a row for each distance in the order of `relative_shift`.
        content_bias, position_bias: u and v (XLNet's `r_w_bias` and `r_r_bias`).
    """
    content, position = content_bias.expand_as(query), position_bias.expand_as(query)

    def by_distance(query: Tensor) -> Tensor:
        return relative_shift(query @ relative_key.mT, key.shape[-2])

    return query @ key.mT, by_distance(query), content @ key.mT, by_distance(position)


def plot_tables(tables: Mapping[str, Float[Tensor, "position dim"]]) -> Figure:
    """A map for each table, all on one scale: positions from left to right, dimensions from top to bottom."""
    figure, rows = _figure(9.0, 0.5 + 2.1 * len(tables), len(tables), 1)
    largest = max(float(table.abs().max()) for table in tables.values())
    for (axes,), (name, table) in zip(rows, tables.items()):
        image = axes.imshow(table.T, cmap=HEAT, vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylabel("dimension")
    _add_color_bar(figure, image, [axes for (axes,) in rows], "")
    rows[-1][0].set_xlabel("position (tokens)")
    return figure


def plot_wavelengths(rope: RopeGeometry, *methods: RopeScaling) -> Figure:
    """Tokens a turn for each pair, as trained and under each method, against the trained length."""
    figure, [[axes]] = _figure(8.0, 4.2)
    trained = rope.original_max_position_embeddings
    for style, (name, inv_freq) in zip(_styles(), _frequencies(rope, methods).items()):
        axes.semilogy(wavelengths(inv_freq), label=name, **style)
    axes.axhspan(trained, axes.get_ylim()[1], color="0.95", zorder=0)
    axes.axhline(trained, color="0.5", lw=1)
    axes.text(0, 1.15 * trained, f"no full turn within the trained {trained:,} tokens", color="0.35", fontsize=9)
    axes.margins(y=0)
    axes.set_xlabel("pair")
    axes.set_ylabel("wavelength (tokens a turn)")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def plot_rotation(rope: RopeGeometry, pairs: Sequence[int], length: int, *methods: RopeScaling) -> Figure:
    """The angles that each pair has met in training, and the new ones that `length` tokens bring, on its circle."""
    trained = rope.original_max_position_embeddings
    frequencies = _frequencies(rope, methods)
    figure, rows = _figure(1.75 * len(pairs) + 0.6, 1.8 * len(frequencies) + 0.9, len(frequencies), len(pairs))
    for row, (name, inv_freq) in zip(rows, frequencies.items()):
        for axes, pair in zip(row, pairs):
            turn = float(wavelengths(inv_freq)[pair])
            seen = min(trained * float(rope.inv_freq[pair]), 2 * math.pi)
            reached = min(length * float(inv_freq[pair]), 2 * math.pi)
            _draw_arc(axes, 0, 2 * math.pi, color="0.9", lw=5)
            _draw_arc(axes, 0, seen, color=COLORS[0], lw=5)
            _draw_arc(axes, seen, max(seen, reached), color=COLORS[1], lw=5)
            steps = torch.arange(8) * inv_freq[pair]
            axes.plot(steps.cos(), steps.sin(), "o", color="black", ms=2.5)
            tokens = f"{turn:,.0f}" if turn >= 100 else f"{turn:.1f}"
            axes.text(0, 0, f"{tokens}\ntokens a turn", ha="center", va="center", fontsize=8)
            axes.set_aspect("equal")
            axes.set_axis_off()
            axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
            if row is rows[0]:
                axes.set_title(f"pair {pair}", fontsize=10)
        row[0].text(-1.45, 0, name, rotation=90, ha="center", va="center", fontsize=10)
    figure.supxlabel(
        f"blue: angles seen in training ({trained:,} tokens)\n"
        f"orange: new ones up to {length:,} tokens\n"
        "dots: the first 8 positions",
        fontsize=9,
    )  # fmt: skip
    return figure


def plot_decay(inv_freq: Float64[Tensor, " pair"], length: int, favourite: int) -> Figure:
    """The bound on RoPE's score up to `length`, and two scores: equal q and k, and a k turned by `favourite` tokens."""
    figure, [[left, right]] = _figure(9.6, 3.6, 1, 2)
    distances = torch.arange(1, length, dtype=torch.float64)
    bound = decay_bound(inv_freq, distances)
    left.semilogx(distances, bound, color="0.75", lw=0.8, base=2)
    starts = [2**k for k in range(math.ceil(math.log2(length)))]
    means = [float(bound[start - 1 : 2 * start - 1].mean()) for start in starts]
    left.step([*starts, length], [*means, means[-1]], where="post", color=COLORS[0], lw=2, label="mean of each octave")
    left.set_title("upper bound: mean of |S_j|", loc="left", fontsize=10)
    left.set_ylim(0)
    left.legend(frameon=False, fontsize=9, loc="upper right")
    distances = torch.arange(4 * favourite, dtype=torch.float64)
    turned = rope_score(inv_freq, distances - favourite)
    right.plot(distances, turned, color=COLORS[1], lw=1, label=f"k turned to be found {favourite:,} tokens away")
    right.plot(distances, rope_score(inv_freq, distances), color=COLORS[0], lw=1, label="k equal to q")
    right.axhline(0, color="0.6", lw=0.8)
    right.set_title("two scores, as a share of their largest", loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=9, loc="upper right")
    for axes in (left, right):
        axes.set_xlabel("distance (tokens)")
    return figure


def plot_score_maps(
    scores: Mapping[str, Callable[[Float64[Tensor, " distance"]], Float64[Tensor, " distance"]]],
    lengths: Sequence[int] = (100, 1_000, 10_000),
) -> Figure:
    """Query by key at each length, from -1 to 1; a row for each function of the distance in tokens.

    Each of the 100 × 100 cells is the mean over the distances that it covers, so no fast pair is aliased.

    Raises:
        ValueError: a length is not a multiple of 100.
    """
    if any(length % 100 for length in lengths):
        raise ValueError(f"each length must be a multiple of 100, the cells of a map's side, got {tuple(lengths)}.")
    figure, rows = _figure(2.6 * len(lengths) + 1.6, 2.5 * len(scores) + 0.4, len(scores), len(lengths))
    for row, (name, score) in zip(rows, scores.items()):
        for axes, length in zip(row, lengths):
            cells = score(torch.arange(length, dtype=torch.float64)).reshape(100, -1).mean(-1)
            distance = torch.arange(100)[:, None] - torch.arange(100)
            image = cells[distance.clamp(min=0)].masked_fill(distance < 0, torch.nan)
            drawn = axes.imshow(
                image, cmap=HEAT, vmin=-1, vmax=1, extent=(0, length, length, 0), interpolation="nearest"
            )
            axes.set_xticks([0, length], ["0", f"{length:,}"])
            axes.set_yticks([])
            if row is rows[0]:
                axes.set_title(f"{length:,} tokens", fontsize=10)
        row[0].set_ylabel(f"{name}\n\nquery", fontsize=10)
    for axes in rows[-1]:
        axes.set_xlabel("key")
    _add_color_bar(figure, drawn, [axes for row in rows for axes in row], "relative to distance 0")
    return figure


def plot_alibi(*n_heads: int, length: int = 256) -> Figure:
    """The slopes for each number of heads, and the biases of the first of them against the distance."""
    figure, [[left, right]] = _figure(9.6, 3.6, 1, 2)
    for k, (color, n) in enumerate(zip(("0.75", *COLORS), n_heads)):
        # Smaller and smaller, since the first heads have the same slopes.
        style = {"color": color, "ms": 10 / (k + 1), "label": f"{n} heads"}
        left.semilogy(range(1, n + 1), alibi_slopes(n), "o", base=2, **style)
    left.set_xlabel("head")
    left.set_ylabel("slope (nats a token)")
    left.legend(frameon=False, fontsize=9)
    slopes = alibi_slopes(n_heads[0])
    for slope, shade in zip(slopes, torch.linspace(1.0, 0.35, len(slopes))):
        right.plot([0, length], [0, -slope * length], color=COLORS[0], alpha=float(shade), lw=1.5)
    right.set(xlim=(0, length), ylim=(-8, 0.25))
    right.axhline(0, color="0.6", lw=0.8)
    right.set_xlabel("distance (tokens)")
    right.set_ylabel("bias (nats)")
    right.set_title(f"{n_heads[0]} heads: steep ones see near, flat ones far", loc="left", fontsize=10)
    return figure


def plot_buckets(num_buckets: int, *max_distances: int) -> Figure:
    """T5's bucket for each distance, and where the last one starts, for each `max_distance`; one direction."""
    figure, [[axes]] = _figure(8.0, 3.8)
    end = 4 * max(max_distances)
    for style, max_distance in zip(_styles(), max_distances):
        starts = bucket_starts(num_buckets, max_distance)
        last = int(starts[-1])
        label = f"max_distance {max_distance}: one bucket from {last} on"
        axes.step([*starts.tolist(), end], [*range(num_buckets), num_buckets - 1], where="post", label=label, **style)
        axes.plot(last, num_buckets - 1, "o", color=style["color"])
    axes.set_xscale("symlog", base=2, linthresh=num_buckets // 2)
    ticks = [0, num_buckets // 4, *(2**k for k in range(1, 20) if num_buckets // 2 <= 2**k <= end)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlim=(0, end), ylim=(0, 1.05 * num_buckets))
    axes.set_xlabel(f"distance (tokens; logarithmic beyond {num_buckets // 2})")
    axes.set_ylabel("bucket")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def plot_neighbours(rope: RopeGeometry, *methods: RopeScaling, distance: int = 16) -> Figure:
    """What a method does to neighbouring positions: the angle between them, and the score of equal q and k."""
    figure, [[left, right]] = _figure(9.6, 3.8, 1, 2)
    distances = torch.linspace(0, distance, 8 * distance + 1, dtype=torch.float64)
    for style, (name, inv_freq) in zip(_styles(), _frequencies(rope, methods).items()):
        left.plot(inv_freq / rope.inv_freq, label=name, **style)
        right.plot(distances, rope_score(inv_freq, distances), **style)
    left.set_ylim(0, 1.08)
    left.set_xlabel("pair")
    left.set_title("angle between neighbours, as a share of the trained", loc="left", fontsize=10)
    figure.legend(frameon=False, fontsize=9, loc="outside upper left", ncols=4, handlelength=2.6)
    right.set_xlabel("distance (tokens)")
    right.set_title("score of equal q and k, relative to distance 0", loc="left", fontsize=10)
    return figure


# ------------------------------------------------------------------------------------------------- parts


def _figure(width: float, height: float, n_rows: int = 1, n_columns: int = 1) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid.tolist()


def _styles() -> list[dict[str, Any]]:
    """The first for what was trained, the others for methods."""
    return [{"color": "0.3", "ls": DASHES[1], "lw": 2.2}] + [
        {"color": color, "ls": dash, "lw": 1.7} for dash in DASHES for color in COLORS
    ]


def _frequencies(rope: RopeGeometry, methods: Sequence[RopeScaling]) -> dict[str, Tensor]:
    scaled = {f"{method.name} ×{method.factor:g}": rope.inv_freq / method.rescale_factors(rope) for method in methods}
    return {"as trained": rope.inv_freq, **scaled}


def _draw_arc(axes: Axes, start: float, end: float, **style: Any) -> None:
    angles = torch.linspace(start, end, 200)
    axes.plot(angles.cos(), angles.sin(), solid_capstyle="butt", **style)


def _add_color_bar(figure: Figure, image: Any, axes: Sequence[Axes], label: str) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=20 * len(axes) ** 0.5, shrink=0.95)
    bar.outline.set_visible(False)
    bar.set_label(label)

"""The pictures of position encodings show the numbers they say they show, and cut off no word."""

from __future__ import annotations

import math
from functools import partial
from io import BytesIO

import pictures
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from ctxext.encodings.alibi import alibi_slopes
from ctxext.encodings.relative_bias import relative_position_bucket
from ctxext.encodings.rope import RopeGeometry, wavelengths
from ctxext.encodings.sinusoidal import sinusoidal_table
from ctxext.methods import PI, NTKAware, NTKByParts, YaRN

ROPE = RopeGeometry.plain(64, 10000, 2048)
METHODS = (PI(factor=4), NTKAware(factor=4), NTKByParts(factor=4))
TABLE = sinusoidal_table(torch.arange(96), 16, layout="halves")
RECIPROCAL = {"a reciprocal": lambda distance: 1 / (1 + distance)}

DRAWN = {
    "plot_tables": partial(pictures.plot_tables, {"once": TABLE, "twice": 2 * TABLE}),
    "plot_wavelengths": partial(pictures.plot_wavelengths, ROPE, *METHODS, YaRN(factor=4)),
    "plot_rotation": partial(pictures.plot_rotation, ROPE, (0, 20, 31), 8192, *METHODS),
    "plot_decay": partial(pictures.plot_decay, ROPE.inv_freq, 5000, 300),
    "plot_score_maps": partial(pictures.plot_score_maps, RECIPROCAL, (100, 1000)),
    "plot_alibi": partial(pictures.plot_alibi, 8, 12),
    "plot_buckets": partial(pictures.plot_buckets, 32, 128, 512),
    "plot_neighbours": partial(pictures.plot_neighbours, ROPE, *METHODS),
}


def test_every_picture_is_tried_here():
    assert set(DRAWN) == {name for name in vars(pictures) if name.startswith("plot_")}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_no_word_is_cut_off_or_covered(draw, monkeypatch):
    figure, boxes, write = draw(), {}, Text.draw

    def noting(text: Text, renderer) -> None:
        if text.get_visible() and text.get_text().strip():
            boxes[text] = text.get_window_extent(renderer)
        write(text, renderer)

    monkeypatch.setattr(Text, "draw", noting)
    figure.savefig(BytesIO())
    assert len(boxes) > 5
    for text, box in boxes.items():
        assert figure.bbox.contains(*box.min), text
        assert figure.bbox.contains(*box.max), text
        assert box.padded(-1).count_overlaps(boxes.values()) == 1, text  # its own


def curves(figure: Figure, axes: int) -> dict[str, torch.Tensor]:
    return {line.get_label(): torch.as_tensor(line.get_ydata()) for line in figure.axes[axes].get_lines()}


def test_wavelengths_are_those_of_the_divided_frequencies():
    drawn = curves(DRAWN["plot_wavelengths"](), 0)
    torch.testing.assert_close(drawn["as trained"], wavelengths(ROPE.inv_freq))
    torch.testing.assert_close(drawn["pi ×4"], 4 * wavelengths(ROPE.inv_freq))
    assert drawn["ntk_by_parts ×4"][0] == wavelengths(ROPE.inv_freq)[0]


def test_interpolation_takes_no_pair_to_an_angle_unseen_in_training():
    def new_angles(figure: Figure) -> list[float]:
        orange = [line for axes in figure.axes for line in axes.get_lines() if line.get_color() == pictures.COLORS[1]]
        return [math.hypot(*(ends[-1] - ends[0] for ends in line.get_data())) for line in orange]

    drawn = new_angles(pictures.plot_rotation(ROPE, (0, 20, 24, 31), 8192, PI(factor=4)))
    assert drawn[:2] == [0, 0]  # these have seen their whole circle
    assert min(drawn[2:4]) > 0.5
    assert drawn[4:] == pytest.approx([0] * 4, abs=1e-9)


def test_neighbours_are_squeezed_by_pi_and_kept_apart_by_parts():
    figure = DRAWN["plot_neighbours"]()
    angles, scores = curves(figure, 0), [torch.as_tensor(line.get_ydata()) for line in figure.axes[1].get_lines()]
    assert angles["pi ×4"].tolist() == pytest.approx([0.25] * 32)
    assert angles["ntk_by_parts ×4"][:8].tolist() == pytest.approx([1] * 8)
    trained, pi, _, by_parts = scores
    at_one = 8  # of 8 points a token
    assert 1 - pi[at_one] < 0.1 * (1 - trained[at_one])
    assert 1 - by_parts[at_one] == pytest.approx(float(1 - trained[at_one]), rel=0.01)


def test_a_cell_of_a_map_is_the_mean_over_its_distances_and_the_future_is_blank():
    hundred, thousand = (axes.images[0].get_array() for axes in DRAWN["plot_score_maps"]().axes[:2])
    assert hundred[70, 50] == pytest.approx(1 / 21)
    assert thousand[70, 50] == pytest.approx(sum(1 / (1 + d) for d in range(200, 210)) / 10)
    assert thousand.mask[50, 70]
    assert not thousand.mask[50, 50]


def test_a_map_of_uneven_cells_is_refused():
    with pytest.raises(ValueError, match=r"multiple of 100, the cells of a map's side, got \(100, 250\)"):
        pictures.plot_score_maps(RECIPROCAL, (100, 250))


def test_score_peaks_where_the_key_was_turned_and_the_bound_steps_by_octaves():
    figure = DRAWN["plot_decay"]()
    turned, equal = (torch.as_tensor(line.get_ydata()) for line in figure.axes[1].get_lines()[:2])
    assert (int(turned.argmax()), int(equal.argmax())) == (300, 0)
    steps = curves(figure, 0)["mean of each octave"]
    octaves = [
        pictures.decay_bound(ROPE.inv_freq, torch.arange(2**k, min(2 ** (k + 1), 5000))).mean() for k in range(13)
    ]
    torch.testing.assert_close(steps[:-1], torch.stack(octaves))


def test_buckets_are_drawn_from_where_they_start():
    line = DRAWN["plot_buckets"]().axes[0].get_lines()[0]
    assert line.get_drawstyle() == "steps-post"
    drawn = dict(zip(line.get_ydata().tolist()[:32], line.get_xdata().tolist()))
    expected = relative_position_bucket(-torch.arange(2000), False, 32, 128)
    assert drawn == {bucket: int((expected == bucket).nonzero()[0]) for bucket in range(32)}


def test_bias_is_never_above_zero():
    lines = DRAWN["plot_alibi"]().axes[1].get_lines()[:8]
    assert [float(line.get_ydata()[-1]) for line in lines] == pytest.approx((-256 * alibi_slopes(8)).tolist())


def test_tables_share_their_scale():
    once, twice = (axes.images[0] for axes in DRAWN["plot_tables"]().axes[:2])
    assert once.get_clim() == twice.get_clim() == (-2, 2)

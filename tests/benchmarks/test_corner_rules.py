"""What is read off the grid of corners: the best point on samples that did not choose it, and rules on other models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from at_scale.corner_rules import Grid, by_rule, common, label, of_others, of_probe
from at_scale.corners import FAST, GRID, SUBJECTS, UNTRAINED, Subject

from ctxext.encodings.rope import RopeGeometry, rotations
from ctxext.evals.targets import UNEXTENDED

POINTS = tuple(point for point in GRID if point[2] == 0.1)


def measured(loss: float, seed: int, keys: float = 1.0, trials: int = 8) -> dict[str, Any]:
    """A method that loses `loss` more than the best on every window: the windows differ more than methods do."""
    texts = Random(0)
    noise = Random(f"{seed}")
    return {
        "keys": {"512": [[keys + loss + texts.random() for _ in range(5)] for _ in range(trials)]},
        "hits": {"512": 3},
        "long": [4 + loss + texts.random() + 1e-3 * noise.random() for _ in range(16)],
        "stretches": list(range(16)),
        "short": [4 + texts.random() for _ in range(8)],
    }


FLAT = {octave: 0.0 for octave in range(-4, 7)}


def grid(best: tuple[float, float], probe: dict[int, float] = FLAT, points: Any = POINTS) -> Grid:
    """A model on which loss grows with the distance from `best` in turns, and yarn is 0.2 behind the best point."""

    def apart(point: Any) -> float:
        return 0.1 * sum(abs(math.log2(a / b)) for a, b in zip(point, best))

    found = {label(point): measured(apart(point), k) for k, point in enumerate(points)}
    probes = {UNEXTENDED: measured(0, 98)} | {
        str(octave): {"short": [loss + x for x in measured(0, 98)["short"]]} for octave, loss in probe.items()
    }
    return Grid({UNEXTENDED: measured(2, 99), "yarn": measured(0.2, 97), **found}, points, probes)


def test_the_best_point_is_found_and_compared_on_other_samples() -> None:
    """Samples alternate: those that choose say that one point is best, and the others that it is not."""
    one = grid((0.5, 4.0))
    chosen = one.describe()["chosen"]
    assert {choice["point"] for choice in chosen.values()} == {"0.5 to 4, 0.1"}
    assert chosen["text"]["ahead on long"]
    assert chosen["text"]["differences"]["yarn"]["long"]["value"] == pytest.approx(-0.2, abs=2e-3)
    flipped = dict(one.found)
    lucky = measured(0.1, 3)
    lucky["long"] = [loss - (1 if k % 2 == 0 else -1) for k, loss in enumerate(lucky["long"])]
    flipped["2 to 32, 0.1"] = lucky
    judged = Grid(flipped, POINTS, one.probe).describe()["chosen"]["text"]
    assert judged["point"] == "2 to 32, 0.1"
    assert not judged["ahead on long"]
    assert judged["differences"]["yarn"]["long"]["value"] > 0.8


def test_a_point_that_is_best_everywhere_is_the_rule_and_beats_the_named_method() -> None:
    grids = {name: grid((0.5, 2.0)) for name in ("one", "two", "three")}
    for result in by_rule(grids)["best on the other models"].values():
        assert result["point"] == "0.5 to 2, 0.1"
        assert result["ahead on long"]
        assert result["ahead on key"]
        assert result["excess"] < 0


def test_where_models_differ_the_others_mislead_and_the_probe_does_not() -> None:
    """Two kinds of model, told apart only by the octave at which interpolation begins to cost."""

    def costs(first: int) -> dict[int, float]:
        return {octave: 0.0 if octave < first else 0.2 for octave in FLAT}

    slow, fast = grid((0.5, 1.0), costs(-1)), grid((2.0, 4.0), costs(1))
    grids = {"slow 1": slow, "slow 2": slow, "fast 1": fast, "fast 2": fast}
    found = by_rule(grids)
    assert max(result["excess"] for result in found["best on the other models"].values()) > 0
    for name, result in found["from the probe"].items():
        assert result["excess"] < 0, name
    assert of_others([slow, slow], fast) == (0.5, 1.0, 0.1)
    assert of_probe([slow, fast], fast)[0] > of_probe([slow, fast], slow)[0]


def test_rules_choose_among_points_that_every_model_has() -> None:
    few = grid((0.25, 1.0), points=POINTS[2:5])
    assert common([grid((0.5, 2.0)), few]) == list(POINTS[2:5])
    assert of_others([grid((0.25, 1.0))], few) in POINTS[2:5]


def test_one_text_gives_no_interval() -> None:
    short = {name: {**found, "long": found["long"][:1], "stretches": [0]} for name, found in grid((1, 4)).found.items()}
    one = Grid(short, POINTS, grid((1, 4)).probe)
    assert one.difference("1 to 4, 0.1", "yarn", "long") is None
    assert not one.against("1 to 4, 0.1", ["yarn"])["ahead on long"]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_probes_interpolate_each_pair_up_to_the_fastest_corner_once(subject: Subject) -> None:
    rope = RopeGeometry.plain(subject.dim, subject.rope_theta, subject.trained)
    factors = [method.rescale_factors(rope) for method in subject.probes().values() if method is not None]
    assert sum((factor != 1).int() for factor in factors).tolist() == (rotations(rope) < 2 * FAST[-1]).int().tolist()
    for octave, method in subject.probes().items():
        if method is not None:
            turns = rotations(rope)[method.rescale_factors(rope) != 1]
            assert (turns >= 2.0 ** int(octave)).all()
            assert (turns < 2.0 ** (int(octave) + 1)).all()


@pytest.mark.slow
def test_a_training_that_was_stopped_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subject = Subject("small", steps=2, options=UNTRAINED, dim=16)
    assert subject.ready()["steps"] == 2
    record = subject.folder / "training.json"
    record.write_text(json.dumps({"steps": 1}))
    assert subject.ready()["steps"] == 2
    written = record.stat().st_mtime_ns
    assert subject.ready()["steps"] == 2
    assert record.stat().st_mtime_ns == written

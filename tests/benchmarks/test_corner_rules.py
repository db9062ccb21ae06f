"""What is read off the grid of corners: the best point on samples that did not choose it, and rules on other models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from at_scale.corner_rules import ALL, FIRST, SECOND, Grid, by_rule, common, label, of_others, of_probe
from at_scale.corners import FAST, GRID, SUBJECTS, UNTRAINED, Subject
from at_scale.corners import measured as measured_on_model

from ctxext.encodings.rope import RopeGeometry, rotations
from ctxext.evals.targets import UNEXTENDED

POINTS = tuple(point for point in GRID if point[2] == 0.1)


def measured(loss: float, seed: int, keys: float = 1.0, trials: int = 16) -> dict[str, Any]:
    """A method that loses `loss` more than the best on every window: the windows differ more than methods do."""
    texts = Random(0)
    noise = Random(f"{seed}")
    return {
        "keys": {"512": [[keys + loss + texts.random() for _ in range(5)] for _ in range(trials)]},
        "hits": {"512": 3},
        "long": [4 + loss + texts.random() + 1e-3 * noise.random() for _ in range(16)],
        "short": [4 + texts.random() for _ in range(8)],
    }


def apart(count: int) -> list[tuple[float, float]]:
    """Places of as many samples, one after the other."""
    return [(k / count, (k + 0.9) / count) for k in range(count)]


PLACES = {"512": apart(16), "long": apart(16), "short": apart(8)}
FLAT = {octave: 0.0 for octave in range(-4, 7)}


def placed(found: dict[str, Any], places: dict[str, Any], points: Any, probe: Any) -> Grid:
    """With samples one after the other, but for those at `places`."""
    return Grid({**found, UNEXTENDED: {**found[UNEXTENDED], "places": PLACES | places}}, points, probe)


def grid(best: tuple[float, float], probe: dict[int, float] = FLAT, points: Any = POINTS) -> Grid:
    """A model on which loss grows with the distance from `best` in turns, and yarn is 0.2 behind the best point."""

    def behind(point: Any) -> float:
        return 0.1 * sum(abs(math.log2(a / b)) for a, b in zip(point, best))

    found = {label(point): measured(behind(point), k) for k, point in enumerate(points)}
    probes = {UNEXTENDED: measured(0, 98)} | {
        str(octave): {"short": [loss + x for x in measured(0, 98)["short"]]} for octave, loss in probe.items()
    }
    return placed({UNEXTENDED: measured(2, 99), "yarn": measured(0.2, 97), **found}, {}, points, probes)


def test_the_best_point_is_found_and_compared_on_other_samples() -> None:
    """The half of the text that chooses says that one point is best, and the other that it is not."""
    one = grid((0.5, 4.0))
    chosen = one.describe()["chosen"]
    assert {choice["point"] for choice in chosen.values()} == {"0.5 to 4, 0.1"}
    assert chosen["text"]["ahead on long"]
    assert chosen["text"]["differences"]["yarn"]["long"]["value"] == pytest.approx(-0.2, abs=2e-3)
    flipped = dict(one.found)
    lucky = measured(0.1, 3)
    lucky["long"] = [loss - (1 if k < 8 else -1) for k, loss in enumerate(lucky["long"])]
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
    """Nor do several that overlap, or lie in the other half."""
    whole = grid((1, 4))
    for at in ([(0.0, 0.1)] * 16, [(0.6, 0.61), *apart(16)[:8], *[(0.45, 0.55)] * 7]):
        one = placed(whole.found, {"long": at}, POINTS, whole.probe)
        assert one.difference("1 to 4, 0.1", "yarn", "long", SECOND) is None
        assert not one.against("1 to 4, 0.1", ["yarn"])["ahead on long"]
    found = placed(whole.found, {"512": [*apart(16)[:15], (0.9, 1.0)]}, POINTS, whole.probe)
    assert found.difference("1 to 4, 0.1", "yarn", "key").n == 16
    assert [len(found.within("512", half)) for half in (ALL, FIRST, SECOND)] == [16, 8, 8]


def test_two_texts_are_too_few_to_be_ahead() -> None:
    whole = grid((1, 4))
    two = placed(whole.found, {"long": [(0.6, 0.61), (0.7, 0.71), *[(0.1, 0.2)] * 14]}, POINTS, whole.probe)
    found = two.against("1 to 4, 0.1", ["yarn"])
    assert found["differences"]["yarn"]["long"]["p"] == 0.5
    assert not found["ahead on long"]


def test_a_rule_is_rarely_ahead_where_methods_differ_by_noise_that_models_share() -> None:
    """Of each text and method, a part of the noise is the same on all models, as they read the same texts."""
    ahead = total = 0
    for run in range(60):
        rng = Random(run)
        shared = {method: [rng.gauss(0, 0.1) for _ in range(16)] for method in ("yarn", *map(label, POINTS))}
        grids = {}
        for name in ("one", "two", "three"):
            flat = grid((1, 4)).found
            found = {
                method: {**values, "long": [4 + x + rng.gauss(0, 0.02) for x in shared[method]]}
                for method, values in flat.items()
                if method != UNEXTENDED
            }
            same = {method: {**values, "keys": flat["yarn"]["keys"]} for method, values in found.items()}
            grids[name] = Grid({UNEXTENDED: flat[UNEXTENDED], **same}, POINTS, grid((1, 4)).probe)
        for result in by_rule(grids)["best on the other models"].values():
            total += 1
            ahead += result["ahead on long"]
    assert ahead / total < 0.06


def test_places_are_those_of_the_samples() -> None:
    found = measured_on_model(replace(SUBJECTS[0], trials=2, short_windows=3), None, (512, 1024), 2)["places"]
    assert {kind: len(at) for kind, at in found.items()} == {"512": 2, "1024": 2, "long": 2, "short": 3}
    spans = {kind: {round(1e4 * (end - begin)) for begin, end in at} for kind, at in found.items()}
    assert spans["512"] == spans["short"]
    assert spans["1024"] == spans["long"] == {2 * span for span in spans["short"]}
    assert len({*found["1024"]}) == 2


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

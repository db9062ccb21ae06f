"""The comparison of fine-tunes that keep short inputs: the same data and steps, paired by seed, and resumable."""

from __future__ import annotations

from pathlib import Path

import finetune_short_inputs
import pytest
from finetune_short_inputs import ARMS, MEASURED, PLAIN, ShortInputs, command, summarise

from ctxext.training.settings import read_settings


def test_arms_differ_by_their_setting_alone() -> None:
    found = {}
    for arm in ARMS:
        words = command(arm, 1, Path("out"), tiny=False)
        (settings,) = read_settings(Path(words[3]), words[4:])
        assert settings.training.seed == 1
        changed = (settings.training.mixed_window, settings.training.distillation)
        found[changed] = settings.model_dump(exclude={"training": {"mixed_window", "distillation"}})
    (plain, *others), changes = found.values(), list(found)
    assert changes == [(False, 0.0), (True, 0.0), (False, 0.5)]
    assert all(other == plain for other in others)


def figures(value: float) -> dict[str, float]:
    return dict.fromkeys(MEASURED, value)


def test_differences_are_from_the_plain_fine_tune_of_the_same_seed() -> None:
    runs = {arm: [figures(seed + (arm != PLAIN)) for seed in range(3)] for arm in ARMS}
    found = summarise(runs)["distillation"]["short"]
    assert found["value"] == pytest.approx(2)
    assert found["high"] - found["low"] > 1
    assert found["difference"]["value"] == pytest.approx(1)
    assert found["difference"]["high"] - found["difference"]["low"] < 1e-9
    assert summarise(runs)[PLAIN]["short"]["difference"]["value"] == 0


def test_a_seed_counts_once_every_arm_has_it(tmp_path: Path) -> None:
    part = ShortInputs(tmp_path)
    order = [cell.name for cell in part.cells()]
    assert order[:5] == ["baseline", "untrained", "plain, 0", "mixed windows, 0", "distillation, 0"]
    assert part.record({key: {} for key in order[:4]}) == {}
    assert part.record({key: {} for key in order[:6]}) == {key: [{}] for key in ARMS}


@pytest.mark.slow
def test_a_run_measures_what_it_saved_on_both_ropes(tmp_path: Path) -> None:
    before = finetune_short_inputs.measured(finetune_short_inputs.MODEL, 4, tiny=True)
    after = finetune_short_inputs.run("mixed windows", 0, tmp_path, tiny=True)
    assert list(after) == list(before)
    for what in ("long", "short", "short_original"):
        assert after[what] == pytest.approx(before[what], rel=0.05)
        assert after[what] != before[what]
    assert before["short"] > before["short_original"]

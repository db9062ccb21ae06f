"""The comparison of fine-tunes with and without retrieval rows: the same budget, paired, and resumable."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import combinations
from pathlib import Path

import finetune_retrieval
import pytest

from ctxext.training.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "recipes/configs/tiny_yarn_4x.yaml"


@pytest.mark.parametrize("arm", finetune_retrieval.ARMS)
def test_the_runs_of_an_arm_differ_by_the_retrieval_rows_alone(arm: str) -> None:
    found = []
    for data, sentences in finetune_retrieval.DATA.items():
        *_, config = (words := finetune_retrieval.command(arm, data, 1, Path("out"), tiny=False))[:4]
        (settings,) = read_settings(ROOT / config, words[4:])
        length = settings.row_length(512 * finetune_retrieval.ARMS[arm][1])
        assert settings.training.batch_size * length == finetune_retrieval.TOKENS
        weights = {source.name: source.weight for source in settings.data.sources}
        assert sum(weights.values()) == pytest.approx(1)
        assert weights["short"] == 0.3
        assert max(source.retrieval for source in settings.data.sources) == sentences
        found.append(settings.model_dump(exclude={"data": {"sources"}}))
    assert found[0] == found[1] == found[2]


def test_processes_share_the_runs_one_by_one(tmp_path: Path) -> None:
    cells = finetune_retrieval.Retrieval(tmp_path).cells()
    assert len({cell.file for cell in cells}) == len({cell.name for cell in cells}) == 27


def cells(none: list[float], one: list[float], eight: list[float]) -> dict:
    def cell(value: float) -> dict:
        points = [{"tokens": 8192 * k, "passkey": value, "tail_loss": 4 - value} for k in range(3)]
        measured = {"passkey": value, "key_loss": 1 - value, "tail": -value, "regression": 0.01}
        measured |= {"passkey_untrained": 0.1, "key_loss_untrained": 2.5}
        return {**measured, "tokens": 16384, "prompts": 100, "mid_training": points}

    return {data: list(map(cell, values)) for data, values in zip(finetune_retrieval.DATA, (none, one, eight))}


def test_differences_are_paired_by_seed() -> None:
    found = finetune_retrieval.summarise(cells([0.1, 0.5, 0.9], [0.2, 0.6, 1.0], [0.0, 0.6, 0.6]))
    one, eight = (found["passkey"][data] for data in (finetune_retrieval.ONE, finetune_retrieval.EIGHT))
    assert one["difference"]["value"] == pytest.approx(0.1)
    assert one["difference"]["high"] - one["difference"]["low"] < 1e-9
    assert one["high"] - one["low"] > 1
    assert eight["difference"]["value"] == pytest.approx(-0.1)
    assert found["tail"][finetune_retrieval.ONE]["difference"]["value"] == pytest.approx(-0.1)
    assert found["passkey"][finetune_retrieval.NONE]["difference"] is None


def test_the_table_is_that_of_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "docs/update_readme.py")
    update_readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(update_readme)
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    assert "Not measured yet" in update_readme.retrieval_table()
    arms = {"abf x8": finetune_retrieval.summarise(cells([0.1, 0.5, 0.9], [0.2, 0.7, 1.0], [0.1, 0.5, 0.9]))}
    (tmp_path / "docs/finetune").mkdir(parents=True)
    (tmp_path / "docs/finetune/retrieval.json").write_text(json.dumps({"seeds": 3, "arms": arms}))
    untrained, none, one, eight = update_readme.retrieval_table().splitlines()[2:6]
    assert untrained == "| `abf` ×8 | not trained | 10.0% |  | 2.50 |  |  |  |"
    assert none.startswith("| `abf` ×8 | no retrieval rows | 50.0% |  | 0.50 |  |")
    assert one.startswith("| `abf` ×8 | one sentence a row | 63.3% | +13.3 [-1.0, +27.7] | 0.37 | -0.133 [")
    assert eight.startswith("| `abf` ×8 | eight sentences a row | 50.0% | +0.0 [")


@pytest.mark.slow
def test_a_tiny_run_writes_what_a_full_one_does_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--tiny", "--only", "pi", "--seeds", "1", "--runs", str(tmp_path / "runs"), "--output"]
    monkeypatch.setattr(sys, "argv", ["finetune_retrieval.py", *arguments, str(tmp_path / "docs")])
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            finetune_retrieval.main()
        assert ended.value.code == 0
        record = json.loads((tmp_path / "docs/retrieval.json").read_text())
        runs = record["cells"]["pi"]
        assert {data: len(seeds) for data, seeds in runs.items()} == dict.fromkeys(finetune_retrieval.DATA, 1)
        curves = [seeds[0]["mid_training"] for seeds in runs.values()]
        assert all(one != other for one, other in combinations(curves, 2))
        assert (tmp_path / "docs/retrieval.png").stat().st_size > 10_000
        for log in (tmp_path / "runs/tiny").glob("*/log.jsonl"):
            assert len(log.read_text().splitlines()) == 2
            log.unlink()  # a second run of the recipe would miss it
    assert len(json.loads((tmp_path / "docs/retrieval/cells.json").read_text())) == 3


def test_seeds_that_are_there_with_some_data_alone_wait_for_the_other(tmp_path: Path) -> None:
    part = finetune_retrieval.Retrieval(tmp_path)
    order = [cell.name for cell in part.cells()]
    assert len(order) == len({*order}) == 27
    assert order[2:4] == ["abf x8, no retrieval rows, 0", "pi, one sentence a row, 0"]  # each seed before the next
    kept = {name: {"name": name} for name in order[:7]}
    assert part.record(kept) == {"pi": {data: [{"name": f"pi, {data}, 0"}] for data in finetune_retrieval.DATA}}

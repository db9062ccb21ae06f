"""LongBench v2: prompts, their cut and verdicts as in its code, on questions of our own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from evals.test_hidden import novel, prompter_of
from evals.test_suites import summary_of
from longbench_reference import CUTS, GOLDEN, digest, question
from rich.console import Console

from ctxext.assets import PERSUASION
from ctxext.evals import longbench
from ctxext.evals.samples import Place, Sample, make_task
from ctxext.evals.suites import make_suite, suite_notes

NOVEL = PERSUASION.read_text(encoding="utf-8")
HELD = json.loads(GOLDEN.read_text())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([question(k, NOVEL) for k in range(6)]))
    return path


def made(data: Path, trial: int = 0, length: int = 4096, style: str = "chat") -> Sample:
    task = make_task("longbench_v2", data=str(data))
    place = Place("longbench_v2", length, None, trial, 0)
    return task.sample(place, prompter_of("bundled", style=style), novel("bundled"))


@pytest.mark.parametrize("cut", CUTS)
def test_prompts_and_their_cut_are_those_of_its_code(cut: int, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longbench, "MAX_PROMPT", cut)
    samples = [made(data, trial, 131_072) for trial in range(6)]
    assert [digest(sample.body) for sample in samples] == HELD["prompts"][str(cut)]
    assert {sample.answer_tokens for sample in samples} == {128}
    assert HELD["commit"] in longbench.__doc__


def test_verdicts_are_those_of_its_code(data: Path) -> None:
    for said, letter in HELD["verdicts"]:
        for right in "ABCD":
            assert replace(made(data), references=(right,)).score(said) == float(right == letter), said


@pytest.mark.parametrize("style", ["base", "chat"])
def test_long_prompts_lose_their_middle(data: Path, style: str) -> None:
    sample, whole = made(data, 5, 1024, style), made(data, 5, 8192, style)
    assert sample.n_prompt + 128 <= 1024 + 4  # a cut character is read as another
    assert sample.n_prompt + 128 >= 1000
    assert whole.body.startswith(sample.body[:800])
    assert whole.body.endswith(sample.body[-800:])


def test_bad_data_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 6 questions, got trials=7\. Pass trials=6"):
        made(data, 6)
    (tmp_path / "bad.json").write_text('[{"question": 1}]')
    with pytest.raises(ValueError, match=r"bad\.json holds no questions of LongBench v2 \(KeyError: 'context'\)"):
        made(tmp_path / "bad.json")
    with pytest.raises(ValueError, match=r"has no data\.json\. Download it from THUDM/LongBench-v2"):
        make_suite("longbench-v2", tmp_path / "nothing")
    task = make_task("longbench_v2")
    with pytest.raises(ValueError, match=r"needs its questions\. Pass data\.json"):
        task.sample(Place("longbench_v2", 1024, None, 0, 0), prompter_of("bundled"), novel("bundled"))


def test_the_table_has_its_subsets(data: Path) -> None:
    suite = make_suite("longbench-v2", data.parent)
    assert (suite.lengths, suite.trials) == ((131_072,), 6)
    summary = summary_of({8192: 0.5}, trials=6, tasks=("longbench_v2",))  # questions 0, 1 and 2 are right
    console = Console(width=80)
    with console.capture() as capture:
        console.print(suite.table(suite, summary))
    (ours,) = [line for line in capture.get().splitlines() if "my-model" in line]
    # easy: 0 and 2 of 0, 2, 4; short: 0 of 0 and 3.
    assert ours.split() == ["my-model", "8,192", "50.0", "66.7", "33.3", "50.0", "50.0", "50.0"]
    notes = suite_notes(suite, summary)
    assert "cuts the middle of longer prompts" in notes
    assert "greedy answers" in notes
    assert "Other rows" not in notes

"""BABILong: prompts and verdicts are those of its own code, samples those of its files."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from evals.test_hidden import novel, prompter_of

from ctxext.evals.babilong import _PROMPTS, BABILONG, named
from ctxext.evals.samples import Place, Sample, list_tasks, make_task
from ctxext.evals.suites import make_suite

GOLDEN = json.loads((Path(__file__).parents[1] / "support/babilong_golden.json").read_text(encoding="utf-8"))
# babilong_reference.py's.
ROW = {"input": " Mary went to the office.\nIt was cold. ", "question": "Where is Mary? ", "target": "office"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data set's layout, with rows of our own: a list, or one a line."""
    for name in _PROMPTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "1k.json").write_text("".join(json.dumps(ROW) + "\n" for _ in range(3)))
        (tmp_path / name / "4k.json").write_text(json.dumps([{**ROW, "target": "garden"}, ROW]))
    return tmp_path


def made(name: str, data: Path, trial: int = 0, length: int = 1024, **how) -> Sample:
    task = make_task(name, data=str(data))
    return task.sample(Place(name, length, None, trial, 0), prompter_of("bundled", **how), novel("bundled"))


@pytest.mark.parametrize("name", BABILONG)
def test_prompts_are_those_of_its_code(name: str, data: Path) -> None:
    prompt = GOLDEN["prompts"][name.removeprefix("babilong_")]
    for style in ("base", "chat"):
        sample = made(name, data, style=style)
        prompter = prompter_of("bundled", style=style)
        assert sample.body == prompt
        assert list(sample.input_ids) == prompter.encode(prompter.asked(prompt))
        assert (sample.n_prompt, sample.answer_tokens, sample.answer) == (len(sample.input_ids), 20, "")


def test_verdicts_are_those_of_its_code(data: Path) -> None:
    assert len(GOLDEN["verdicts"]) > 200
    for task, target, output, question, right in GOLDEN["verdicts"]:
        sample = made(f"babilong_{task}", data)
        labels = _PROMPTS[task]["labels"]
        sample = replace(sample, references=(target,), rivals=tuple({*labels} - {target}), question=question)
        assert sample.score(output) == float(right), output


def test_samples_are_the_rows_of_a_file(data: Path) -> None:
    assert [made("babilong_qa1", data, trial, 4096).references for trial in (0, 1)] == [("garden",), ("office",)]
    with pytest.raises(ValueError, match=r"4k\.json has 2 samples, got trials=3\. Pass trials=2"):
        made("babilong_qa1", data, 2, 4096)
    with pytest.raises(
        ValueError, match=r"2k\.json holds no samples of BABILong \(FileNotFoundError.*Download RMT-team"
    ):
        made("babilong_qa1", data, 0, 2048)
    with pytest.raises(ValueError, match=r"files for lengths such as 4k \(4,096 tokens\), got 4,000"):
        made("babilong_qa1", data, 0, 4000)
    with pytest.raises(ValueError, match="babilong_qa1 needs BABILong's files"):
        make_task("babilong_qa1").sample(
            Place("babilong_qa1", 1024, None, 0, 0), prompter_of("bundled"), novel("bundled")
        )
    assert [named(n) for n in (1024, 131_072, 1_048_576)] == ["1k", "128k", "1M"]


def test_settings_name_what_the_folder_holds(data: Path) -> None:
    before = make_task("babilong_qa1", data=str(data)).settings()
    (data / "qa1/1k.json").write_text(json.dumps([ROW]))
    assert make_task("babilong_qa1", data=str(data)).settings() != before
    json.dumps(before)


def test_the_suite_is_its_five_tasks(data: Path) -> None:
    suite = make_suite("babilong", data)
    assert suite.tasks == BABILONG == tuple(f"babilong_qa{k}" for k in range(1, 6))
    assert suite.lengths_within(5000) == (1024, 2048, 4096)
    with pytest.raises(ValueError, match=r"no --suite-data has no qa1/4k\.json\. Download RMT-team/babilong"):
        make_suite("babilong", None)


def test_tasks_on_data_are_listed_apart() -> None:
    assert not {*BABILONG} & {*list_tasks()}
    assert {*BABILONG} <= {*list_tasks(data=True)}
    assert GOLDEN["commit"] in files("ctxext.evals").joinpath("babilong.toml").read_text(encoding="utf-8")

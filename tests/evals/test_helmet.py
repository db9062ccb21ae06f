"""HELMET's synthetic recall: prompts, cuts, order and verdicts are those of its own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evals.test_hidden import novel, prompter_of
from helmet_reference import DATASETS, GOLDEN, LENGTH, digest, files

from ctxext.evals import helmet
from ctxext.evals.helmet import HELMET, KEYS
from ctxext.evals.samples import Place, Sample, list_tasks, make_task
from ctxext.evals.suites import make_suite

HELD = json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("helmet")
    files(folder)
    return folder


def made(name: str, data: Path, trial: int = 0, length: int = LENGTH, style: str = "base") -> Sample:
    task = make_task(f"helmet_{name}", data=str(data))
    place = Place(task.name, length, None, trial, 0)
    return task.sample(place, prompter_of("bundled", style=style), novel("bundled"))


@pytest.mark.parametrize("name", DATASETS)
def test_prompts_are_those_of_its_code_in_their_order(name: str, data: Path) -> None:
    theirs = HELD["prompts"][name]
    samples = [made(name, data, trial) for trial in range(0, len(theirs), 7)]
    assert [digest(str(list(sample.input_ids))) for sample in samples] == theirs[::7]
    assert {sample.answer_tokens for sample in samples} == {DATASETS[name]}
    cut = [sample.n_prompt + sample.answer_tokens > LENGTH - 8 for sample in samples]
    assert len(set(cut)) == 2
    assert all(sample.n_prompt + sample.answer_tokens <= LENGTH for sample in samples)


@pytest.mark.parametrize("name", DATASETS)
def test_verdicts_are_those_of_its_code(name: str, data: Path) -> None:
    verdicts = HELD["verdicts"][name]
    assert len({score for _, score in verdicts}) > 1
    for trial, (said, score) in enumerate(verdicts):
        assert made(name, data, trial).score(said) == score, said


def test_in_a_chat_template_the_answer_is_begun(data: Path) -> None:
    sample = made("json_kv", data, style="chat")
    assert (
        prompter_of("bundled")
        .decode(sample.input_ids[: sample.n_prompt])
        .endswith("<s>assistant\nCorresponding value:")
    )


def test_bad_data_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 120 samples, got trials=121\. Pass trials=120"):
        made("json_kv", data, 120)
    with pytest.raises(ValueError, match=r"HELMET has files for 8192, 16384, .* tokens, got 4096"):
        made("json_kv", data, 0, 4096)
    with pytest.raises(ValueError, match=r"validation_16384\.jsonl holds no samples of HELMET \(FileNotFoundError"):
        made("niah_mv", data, 0, 16_384)
    with pytest.raises(ValueError, match=r"has no ruler/niah_multikey_2, .*json_kv\. Run scripts/download_data\.sh"):
        make_suite("helmet-recall", tmp_path)
    with pytest.raises(ValueError, match="helmet_json_kv needs HELMET's files"):
        make_task("helmet_json_kv").path(LENGTH)


def test_the_suite_is_its_recall(data: Path) -> None:
    suite = make_suite("helmet-recall", data)
    assert (suite.tasks, suite.lengths, suite.trials, suite.style) == (HELMET, tuple(KEYS), 100, "base")
    assert {*HELMET} <= {*list_tasks(data=True)} - {*list_tasks()}
    assert HELD["commit"] in helmet.__doc__

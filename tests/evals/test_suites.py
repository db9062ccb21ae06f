"""Published benchmarks: what they run, what they need, and the published rows beside ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import published_rows
import pytest
from cli.test_measuring import ctxext
from published_rows import ruler
from rich.console import Console
from ruler_reference import COMMIT, ENGLISH, HOTPOT, SQUAD

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.results import Header, Results
from ctxext.evals.ruler import RULER
from ctxext.evals.suites import RULER_FILES, SHOWN, Suite, by_length, make_suite, published, suite_notes
from ctxext.evals.summary import Summary

LENGTHS = [4096 * 2**k for k in range(6)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The files of NVIDIA's folder, with other contents."""
    contents = {
        "PaulGrahamEssays.json": {"text": PERSUASION.read_text(encoding="utf-8")},
        "squad.json": SQUAD,
        "hotpotqa.json": HOTPOT,
        "english_words.json": ENGLISH,
    }
    assert contents.keys() == RULER_FILES.keys()
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def summary_of(
    scores: dict[int, float],
    trials: int = 500,
    style: str = "chat",
    tasks: Sequence[str] = RULER,
    failed: str | None = None,
) -> Summary:
    """A run in which every task has the score of its length, but for one that is always failed."""
    records = [
        {
            "variant": "none", "key": f"{task} {length} {trial}", "task": task, "length": length, "depth": None,
            "trial": trial, "seed": 0, "score": float(task != failed and trial < round(score * trials)),
        }
        for task in tasks for length, score in scores.items() for trial in range(trials)
    ]  # fmt: skip
    header = Header(
        identity={"seed": 0, "prompts": f"{style} 0"}, tasks={task: {} for task in tasks},
        variants={"none": {"model": "my-model"}}, about={"trained_length": 4096, "lengths": sorted(scores)},
    )  # fmt: skip
    return Summary(Results(Path("results.jsonl"), header, records))


def shown(suite: Suite, summary: Summary, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(by_length(suite, summary))
    return capture.get().splitlines()


def test_the_suite_is_rulers_thirteen_tasks_with_its_sizes(data: Path) -> None:
    suite = make_suite("ruler-nvidia", data)
    assert (suite.tasks, list(suite.lengths), suite.trials) == (RULER, LENGTHS, 500)
    assert suite.lengths_within(40_000) == (4096, 8192, 16_384, 32_768)
    with pytest.raises(ValueError, match=r"begins at 4,096 tokens, and the model supports 2,048\. Extend it"):
        suite.lengths_within(2048)


def test_missing_files_are_named_with_what_writes_them(data: Path) -> None:
    (data / "squad.json").unlink()
    with pytest.raises(
        ValueError, match=r"does not hold all of it\. Missing: squad\.json \(bash download_qa_dataset\.sh\)\. Clone"
    ):
        make_suite("ruler-nvidia", data)
    with pytest.raises(
        ValueError, match=r"--suite-data is not given\. Missing: PaulGrahamEssays\.json \(python download_paul"
    ):
        make_suite("ruler-nvidia", None)
    with pytest.raises(ValueError, match=r"unknown suite 'ruler'"):
        make_suite("ruler", data)


def test_published_rows_are_those_of_the_readme() -> None:
    """Its underlined scores, which are 85.6 or more, end where its effective length does."""
    table = published("ruler-nvidia")
    assert COMMIT in table["source"]
    assert len(table["rows"]) == 45
    found = {f"{row['model']} {row['size']}": row for row in table["rows"]}
    assert {*SHOWN} <= found.keys()
    assert found["Llama3.1 8B"]["scores"] == dict(zip(map(str, LENGTHS), (95.5, 93.8, 91.6, 87.4, 84.7, 77.0)))
    assert found["Llama2 7B"]["scores"] == {"4096": 85.6}
    assert found["Qwen3-8B 8B"]["source"] == "arXiv:2505.09388"


def test_a_row_is_read_with_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (
        "|[FILM-7B*](https://a) (7B)|32K|32K|<ins>92.8</ins>|<ins>88.2</ins>|81|-|70.1|27.1|75.5|66.4 **(1st)**|\n|a|b|"
    )
    monkeypatch.setattr(published_rows, "shown", lambda checkout, path: readme)
    assert ruler(Path()) == [
        {
            "model": "FILM-7B", "size": "7B", "effective": "32K", "source": "arXiv:2404.16811",
            "scores": {4096: 92.8, 8192: 88.2, 16_384: 81.0, 65_536: 70.1, 131_072: 27.1},
        }
    ]  # fmt: skip


def test_our_row_is_the_macro_average_and_its_effective_length(data: Path) -> None:
    lines = shown(make_suite("ruler-nvidia", data), summary_of({4096: 0.95, 8192: 0.88, 16_384: 0.7}, trials=100), 80)
    assert max(map(len, lines)) <= 80
    (ours,) = [line for line in lines if "my-model" in line]
    assert ours.split() == ["my-model", "8,192", "95.0", "88.0", "70.0", "84.3"]
    (theirs,) = [line for line in lines if "Llama3.1 8B" in line]
    assert theirs.split()[2:] == ["32K", "95.5", "93.8", "91.6", "93.6"]
    lines = shown(make_suite("ruler-nvidia", data), summary_of({4096: 1.0}, trials=10, failed="qa_2"), 80)
    assert any(line.split() == ["my-model", "4,096", "92.3", "92.3"] for line in lines)  # 12 of 13
    assert "<4,096" in "".join(shown(make_suite("ruler-nvidia", data), summary_of({4096: 0.5}, trials=4), 80))


def test_six_lengths_fit_80_columns(data: Path) -> None:
    summary = summary_of(dict.fromkeys(LENGTHS, 1.0), trials=2)
    summary.header.variants["none"]["model"] = "SmolLM2-135M-Instruct"
    lines = shown(make_suite("ruler-nvidia", data), summary, 80)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_every_deviation_is_said(data: Path) -> None:
    suite = make_suite("ruler-nvidia", data)
    few = suite_notes(suite, summary_of({4096: 1.0}, trials=20))
    whole = suite_notes(suite, summary_of({4096: 1.0}, style="base"))
    assert "20 samples of a task and length, not 500" in few
    assert "the example of cwe is not a turn of its own" in few
    assert "not 500" not in whole
    assert "turn of its own" not in whole
    assert "punkt" in whole


@pytest.mark.slow
def test_the_command_measures_it_and_shows_published_rows(data: Path, tmp_path: Path) -> None:
    how = ("--method", "yarn", "--factor", 4, "--lengths", "2k", "--trials", 1, "-o", tmp_path / "results.jsonl")
    outcome = ctxext("eval", MODEL, "--suite", "ruler-nvidia", "--suite-data", data, *how)
    assert outcome.code == 0, outcome.err
    assert "Llama2 7B" in outcome.out
    assert "1 sample of a task and length, not 500" in outcome.out
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()][1:]
    assert sorted({record["task"] for record in records}) == sorted(RULER)
    assert all(record["answer_tokens"] in (128, 30, 120, 50, 32) for record in records)


def test_the_command_refuses_what_the_suite_sets(data: Path, tmp_path: Path) -> None:
    suite = ("--suite", "ruler-nvidia", "--suite-data", data)
    for more, words in (
        (("--tasks", "passkey"), "--suite ruler-nvidia sets --tasks"),
        (("--haystack", "filler"), "--suite ruler-nvidia sets --haystack"),
    ):
        outcome = ctxext("eval", MODEL, *suite, *more, "-o", tmp_path / "results.jsonl")
        assert outcome.code == 2
        assert words in outcome.said
    outcome = ctxext("eval", MODEL, *suite, "-o", tmp_path / "results.jsonl")
    assert "begins at 4,096 tokens" in outcome.said
    outcome = ctxext("eval", MODEL, "--suite-data", data, "-o", tmp_path / "results.jsonl")
    assert "--suite-data is for --suite" in outcome.said

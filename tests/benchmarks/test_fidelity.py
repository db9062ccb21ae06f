"""What ctxext computes is what the authors' code computed, and the comparisons of benchmarks/fidelity can fail."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fidelity import authors, cope, frequencies, posgen, ruler_lm_eval, sliding
from fidelity.authors import SOURCES, Source
from fidelity.row import spread
from report import Report

ROOT = Path(__file__).parents[2]
SUMMARY = json.loads((ROOT / "docs/fidelity/summary.json").read_text())


def named(part: str, case: dict[str, Any]) -> Any:
    setting = (str(case[key]) for key in ("model", "encoding", "factor") if key in case)
    return pytest.param(part, case, id="-".join([part, *setting]))


CASES = [named(part, case) for part in frequencies.TITLES for case in frequencies.compared(part)]


@pytest.mark.parametrize(("part", "case"), CASES)
def test_frequencies_and_attention_factors_are_the_authors(part: str, case: dict[str, Any]) -> None:
    assert max(frequencies.difference(part, case)) <= frequencies.FLOAT32


@pytest.mark.parametrize("part", frequencies.TITLES)
def test_a_change_of_one_frequency_in_ten_thousand_is_seen(part: str) -> None:
    for pair in (0, 1):
        case = copy.deepcopy(frequencies.compared(part)[-1])
        case["inv_freq"][pair] *= 1 + 1e-4
        assert max(frequencies.difference(part, case)) > frequencies.FLOAT32


def test_a_frequency_that_is_no_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = copy.deepcopy(frequencies.golden())
    wrong["yarn"]["cases"][1]["inv_freq"][3] = math.nan
    monkeypatch.setattr(frequencies, "golden", lambda: wrong)
    row = next(frequencies.rows())
    assert math.isnan(row.value)
    report = Report("x", seed=0)
    report.add(row.name, row.value, at_most=row.at_most)
    assert not report.figures[row.name]["ok"]


def test_pairs_of_many_turns_are_kept_where_the_authors_ramp_crosses() -> None:
    case = frequencies.golden()["yarn"]["cases"][-1]
    assert case["model"] == "crossed"
    rope = frequencies.geometry(case)
    theirs = torch.tensor(case["inv_freq"], dtype=torch.float64)
    ours, _ = frequencies.ours("yarn", case)
    torch.testing.assert_close(theirs, rope.inv_freq / case["factor"], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, rope.inv_freq, rtol=1e-6, atol=0)


def test_distances_of_dual_chunk_attention_are_the_authors() -> None:
    settings = list(frequencies.distance_differences())
    assert all(pairs > 1000 and wrong == 0 for _, wrong, pairs in settings)
    # Whole chunks are farther apart than the next in some.
    assert all(case["distances"][-1][0] == case["chunk_size"] for case, _, _ in settings[:3])


def test_goldens_name_the_repository_commit_file_and_command() -> None:
    golden = frequencies.golden()
    assert set(golden) == set(SOURCES)
    for part, source in SOURCES.items():
        record = golden[part]
        assert record["repository"].endswith(source.repository)
        assert (record["commit"], record["file"]) == (source.commit, source.file)
        assert record["command"].startswith(f"python benchmarks/fidelity/authors.py {part} ")
        assert record["cases"]


def test_without_a_clone_the_command_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    clone = "git clone https://github.com/jquesnelle/yarn"
    with pytest.raises(SystemExit, match=rf"error: no clone in \./yarn: {clone} && git -C yarn checkout 995db5b$"):
        authors.main(["yarn"])
    # A folder of another repository is no clone.
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=rf"no clone in \./docs: {clone} docs && git -C docs checkout 995db5b$"):
        authors.main(["yarn", "docs"])
    for arguments in ([], ["yarm"]):
        with pytest.raises(SystemExit):
            authors.main(arguments)
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone `theirs` in the working directory, at the commit of the only source."""
    monkeypatch.chdir(tmp_path)
    clone = tmp_path / "theirs"
    clone.mkdir()
    (clone / "rope.py").write_text("inv_freq = [1.0, 0.5]\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "Add rope"]):
        subprocess.run(["git", "-C", str(clone), *command], check=True)
    commit = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)

    def cases(file: Path) -> Any:
        yield {"inv_freq": authors.load(file).inv_freq}

    source = Source("them/theirs", commit.stdout.strip(), "rope.py", cases)
    monkeypatch.setattr(authors, "SOURCES", {"rope": source})
    monkeypatch.setattr(authors, "GOLDEN", tmp_path / "authors.json")
    return clone


def test_the_authors_numbers_are_added_then_found_equal_or_not(
    cloned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        authors.main([*arguments])
        made, outcome, then = capsys.readouterr().out.splitlines()
        assert made == f"rope: 1 cases by rope.py of them/theirs@{authors.SOURCES['rope'].commit[:7]}."
        assert then == "To compare ctxext with them: python benchmarks/fidelity/run.py"
        return outcome

    golden = cloned.parent / "authors.json"
    assert said("rope") == f"Added to {golden}."
    first = golden.read_text()
    assert said("rope", "theirs") == f"All are equal to those in {golden}."
    golden.write_text(first.replace("0.5", "0.25"))
    assert said("rope") == f"1 differ from those in {golden}, which now has the new ones."
    assert golden.read_text() == first


def test_another_commit_and_a_changed_file_are_refused(cloned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cloned / "rope.py").write_text("inv_freq = [1.0, 0.25]\n")
    with pytest.raises(SystemExit, match=r"theirs has changed files \(rope.py\): git -C theirs stash$"):
        authors.main(["rope"])
    source = replace(authors.SOURCES["rope"], commit="0123456789")
    monkeypatch.setattr(authors, "SOURCES", {"rope": source})
    with pytest.raises(SystemExit, match=r"expected 0123456: git -C theirs fetch && git -C theirs checkout 0123456$"):
        authors.main(["rope"])


def test_a_package_that_their_code_needs_is_named(cloned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needy(file: Path) -> Any:
        raise ModuleNotFoundError("No module named 'einops'", name="einops")

    monkeypatch.setattr(authors, "SOURCES", {"rope": replace(authors.SOURCES["rope"], run=needy)})
    with pytest.raises(SystemExit, match=r"them/theirs needs einops: pip install einops$"):
        authors.main(["rope"])


def test_sequences_of_posgen_are_the_authors() -> None:
    differ, total = posgen.numbers_that_differ()
    assert (differ, total) == (0, 3 * 4 * 256)


@pytest.mark.parametrize(("subtask", "back", "every"), [("recursive", 4, 1), ("cot", 3, 1), ("semi_recursive", 3, 2)])
def test_two_tokens_give_the_next_of_posgen_away(subtask: str, back: int, every: int) -> None:
    # As docs/fidelity.md says: the sum's other terms cancel out, in semi_recursive for every second number.
    rows = posgen.sequences(subtask, 50)[:, 1:]
    after = range(posgen.GIVEN + 1, posgen.TARGET)  # the first number follows from all four
    given_away = [
        k for k in after if torch.equal(rows[:, k], (2 * rows[:, k - 1] - rows[:, k - 1 - back]) % posgen.MODULUS)
    ]
    assert given_away == list(after[::every])


def test_a_spread_is_students() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["value"] == 3.0
    assert found["high"] - 3.0 == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-3)
    assert spread([1.0])["low"] is None


def test_every_number_of_the_page_has_a_source_and_a_command_and_keeps_its_bar() -> None:
    assert SUMMARY["figures"].keys() == SUMMARY["about"].keys()
    assert all(figure["ok"] for figure in SUMMARY["figures"].values())
    for about in SUMMARY["about"].values():
        assert about["source"]
        assert about["link"]
        assert about["command"].startswith("python benchmarks/fidelity/")
    assert SUMMARY["ruler"].keys() == set(ruler_lm_eval.RULER)


def test_losses_of_another_model_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = sliding.token_by_token
    monkeypatch.setattr(sliding, "token_by_token", lambda model, ids, first: loop(model, ids[:-1] + ids[:1], first))
    found = {row.name: row for row in sliding.rows(tiny=True)}
    row = found["sliding perplexity: loss of a token, largest difference (nats)"]
    assert row.at_most is not None
    assert row.value > row.at_most


def test_an_unexpected_difference_from_lm_eval_is_counted() -> None:
    alike = ruler_lm_eval.Compared("niah_single_1", True, (3858, 3953), 0, 24)
    assert alike.unexplained == 0
    assert replace(alike, worded_alike=False).unexplained == 1
    assert replace(alike, tokens=(3953, 3953)).unexplained == 1


@pytest.mark.slow
def test_every_comparison_runs_tiny(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/fidelity/run.py", "--tiny", "--output", str(tmp_path / "summary.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") == len(SUMMARY["figures"])


@pytest.mark.slow
def test_posgen_is_trained_read_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = posgen.Setting(steps=2, test_sequences=4, hidden=32, intermediate=32, sequences=40)
    found = posgen.measured("recursive", 2, setting, tmp_path)
    assert len(found["differences"]["resonance_yarn − yarn"]["seeds"]) == 2
    assert capsys.readouterr().out.count("\n") == 4
    assert posgen.measured("recursive", 2, setting, tmp_path) == found
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_cope_is_trained_beside_its_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = cope.Setting(length=64, steps=2, hidden=32, windows=1, characters=20_000, vocab_size=300)
    found = cope.measured(2, small, tmp_path)["found"]
    assert set(cope.ARMS) < set(found)
    assert found["rope"]["128"]["against_rope"]["value"] == 0
    assert found["cope n=20"]["128"]["against_rope"]["value"] != 0
    assert capsys.readouterr().out.count("\n") == 6
    cope.measured(2, small, tmp_path)
    assert capsys.readouterr().out == ""

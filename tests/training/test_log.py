"""The progress of a run: what a terminal and what a file shows, with a clock of the test's own."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ctxext.training import log as log_module
from ctxext.training.log import Log, bar


class Accelerator:
    """Keeps what trackers get."""

    is_main_process = True

    def __init__(self) -> None:
        self.tracked: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.tracked.append((step, values))


def shown(monkeypatch: pytest.MonkeyPatch, total: int, steps: int, seconds: float, done: int = 0, **given: Any) -> str:
    """What a run has shown after some steps, each of so many seconds."""
    clock, file = [0.0], io.StringIO()
    monkeypatch.setattr(log_module, "console", Console(file=file, get_time=lambda: clock[0], **given))
    with bar(total, done, shown=True) as advance:
        for _ in range(steps):
            clock[0] += seconds
            advance(loss=3.21, peak=3 * 2**30, tokens_per_second=98_765.4, mfu=0.412)
    return file.getvalue()


@pytest.mark.parametrize("seconds", [0.5, 400])
def test_a_terminal_shows_speed_memory_and_the_time_left_however_slow_a_step_is(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = shown(monkeypatch, 1000, 100, seconds, force_terminal=True, width=80, color_system=None)
    last = said.replace("\r", "\n").split("\n")[-2]
    assert len(last.rstrip()) <= 80
    left = round(900 * seconds)
    hours = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    for part in ("100/1000", hours, "loss 3.210, 98,765 tokens/s, MFU 41%, 3.00 GiB"):
        assert part in last


def test_a_file_gets_at_most_a_hundred_lines_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, 1000, 1000, 2).splitlines()
    assert len(lines) == 100
    assert lines[49] == "step 500/1,000: loss 3.210, 98,765 tokens/s, MFU 41%, 3.00 GiB, 16 min 40 s left"
    assert len(shown(monkeypatch, 7, 3, 2, done=4).splitlines()) == 3


def test_trackers_get_the_numbers_of_a_line_and_the_file_those_that_every_run_repeats(tmp_path: Path) -> None:
    accelerator: Any = Accelerator()
    log = Log(tmp_path / "log.jsonl", 0, accelerator)
    log.add({"step": 3, "loss": 1.5}, tokens_per_second=7.0)
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 3, "loss": 1.5}
    assert accelerator.tracked == [(3, {"loss": 1.5, "tokens_per_second": 7.0})]


def test_lines_of_steps_that_will_be_trained_again_are_removed(tmp_path: Path) -> None:
    path, accelerator = tmp_path / "log.jsonl", Accelerator()
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    Log(path, 2, accelerator)  # type: ignore[arg-type]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    for other in "mine\n", '{"mine": 1}\n', "[1]\n":
        path.write_text(other)
        with pytest.raises(ValueError, match=r"log\.jsonl is not the log of a run"):
            Log(path, 0, accelerator)  # type: ignore[arg-type]
        assert path.read_text() == other

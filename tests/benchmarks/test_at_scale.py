"""The plan of the measurements at scale: it resumes, stops in time, and joins what was measured on several texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from at_scale import run
from at_scale.cells import Budget, Cell, Part, Store, run_part
from at_scale.quality import joined

from ctxext.evals.results import Header, Results
from ctxext.evals.summary import Summary


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Counting(Part):
    """Cells that take ten seconds each."""

    name = "counting"
    title = "what a clock says"

    clock: Clock = field(default_factory=Clock)
    ran: list[str] = field(default_factory=list)

    def cells(self) -> Sequence[Cell]:
        def measured(name: str) -> Any:
            def measure() -> int:
                self.clock.now += 10
                self.ran.append(name)
                return len(name)

            return measure

        return [Cell(name, 100.0, measured(name)) for name in ("a", "b", "c")]

    def speed(self) -> float:
        return 10.0

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        return kept


def test_a_run_stops_before_the_cell_that_would_take_too_long_and_resumes_there(tmp_path: Path) -> None:
    clock, said = Clock(), []
    part, store = Counting(tmp_path, clock=clock), Store(tmp_path / "cells.json")
    assert not run_part(part, store, Budget(25, clock), said.append)
    assert part.ran == ["a", "b"]
    assert "3 of 3 cells to measure, about 30 s" in said[0]
    assert "c would take about 10 s, and 5 s are left" in said[1]
    assert run_part(part, store, Budget(now=clock), said.append)
    assert part.ran == ["a", "b", "c"]
    assert run_part(part, store, Budget(0, clock), said.append)  # nothing is left to do
    assert {name: entry["value"] for name, entry in store.done(part.cells()).items()} == {"a": 1, "b": 1, "c": 1}


@pytest.mark.slow
def test_every_part_rehearses_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny", "--output", str(tmp_path)])
    run.main()
    for part in run.PARTS:
        record = json.loads((tmp_path / f"{part}-cpu.json").read_text())
        assert record["complete"]
        assert record["cells"] == len(json.loads((tmp_path / f"raw/{part}-cpu/cells.json").read_text())) > 0
    own = json.loads((tmp_path / "quality-cpu.json").read_text())["own"]
    assert own == {"novel": {length: {"0": 1.0, "0.5": 1.0, "1": 1.0} for length in ("384", "512")}}
    capsys.readouterr()
    run.main()
    assert capsys.readouterr().out.count("cells are done") == len(run.PARTS)


def results(hits: Sequence[bool], tokens: int) -> Results:
    header = Header(
        {"text": "one", "seed": 0, "prompts": "base"},
        {"passkey": {}},
        {"none": {"model": "m"}, "yarn": {"model": "m"}},
        {"trained_length": 512, "lengths": [1024], "text_tokens": tokens},
    )
    records = [
        {"variant": variant, "key": f"{variant} {trial}", "task": "passkey", "length": 1024, "depth": 0.5,
         "trial": trial, "seed": 0, "hit": hit, "score": float(hit), "digits": None, "logprob": None, "got": ""}
        for variant in ("none", "yarn")
        for trial, hit in enumerate(hits)
    ]  # fmt: skip
    return Results(Path("one.jsonl"), header, records)


def test_texts_are_pooled_with_each_prompt_counted_once() -> None:
    both = Summary(joined({"novel": results([True, True, False], 9000), "essay": results([False], 9000)}, [1024]))
    share = both.by_length("yarn", "passkey")[1024]
    assert (share.value, share.n) == (0.5, 4)
    assert len({record["trial"] for record in both.records}) == 4

"""The plan of the measurements at scale: it resumes, stops in time, and joins what was measured on several texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from at_scale import run
from at_scale.cells import Budget, Cell, Part, Store, run_part
from at_scale.quality import joined

from ctxext.evals.perplexity import packed
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
        {"variant": variant, "key": f"{trial}", "task": "passkey", "length": 1024, "depth": 0.5,
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


def windows(losses: Sequence[Sequence[float]]) -> Results:
    """The losses of two variants on one text: `yarn` has those given, a window each, and the baseline has 0."""
    one = results([True], 10**6)
    header = replace(one.header, tasks={"perplexity": {}})
    records = [
        {"variant": variant, "key": f"p{trial}", "task": "perplexity", "length": len(values) + 1, "depth": None,
         "trial": trial, "seed": 0, "tokens": len(values), "bytes": 4, "loss": 0.0,
         **packed(losses=torch.tensor(values) * (variant == "yarn"))}
        for variant in ("none", "yarn")
        for trial, values in enumerate(losses)
    ]  # fmt: skip
    return Results(Path("one.jsonl"), header, records)


def test_one_text_alone_is_as_it_was() -> None:
    alone, pooled = (Summary(each) for each in (windows([[1.0], [2.0]]), joined({"a": windows([[1.0], [2.0]])}, [2])))
    assert pooled.loss_difference("yarn", "none", 2) == alone.loss_difference("yarn", "none", 2)
    assert pooled.records == alone.records


def test_windows_and_passages_of_one_text_are_one_sample_of_several() -> None:
    texts = {name: windows([[k + 1.0], [k + 1.1]]) for k, name in enumerate("abc")}
    found = Summary(joined(texts, [2]))
    assert found.windows_apart == (6, 3)
    assert found.loss_test("yarn", "none", 2).clusters == 3
    twice = {name: results([True, False], 9000) for name in "abc"}
    assert Summary(joined(twice, [1024])).test("yarn", "none", ["passkey"], [1024]).clusters == 3


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.9])
def test_intervals_over_texts_cover_the_truth_however_alike_their_windows_are(alike: float) -> None:
    """`alike`: the share of the variance between windows that is one between texts."""
    rng, covered, runs = Random(0), 0, 400
    for _ in range(runs):
        texts = {}
        for name in "abcd":
            of_text = rng.gauss(0, alike**0.5)
            texts[name] = windows([[of_text + rng.gauss(0, (1 - alike) ** 0.5)] for _ in range(2)])
        found = Summary(joined(texts, [2])).loss_difference("yarn", "none", 2)
        covered += found.low <= 0 <= found.high
    assert covered / runs > 0.92

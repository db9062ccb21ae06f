"""The plan of the measurements at scale: it resumes, stops in time, and joins what was measured on several texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from at_scale import run
from at_scale.cells import Budget, Cell, CellsFailed, Part, Store, run_part
from at_scale.estimate import PEAK, SHARES, estimate, printed
from at_scale.models import GEMMA_CONFIG, SMOLLM2_CONFIG, held
from at_scale.planning import SHAPES
from at_scale.quality import counts, expected, joined
from filelock import FileLock
from report import Report
from transformers import AutoModelForCausalLM, LlamaConfig

from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity, packed
from ctxext.evals.results import Header, Results
from ctxext.evals.runner import Grid
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


def test_the_plan_lists_every_part_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_something(*arguments: Any, **options: Any) -> None:
        raise AssertionError(arguments)

    for name in ("run", "Popen"):
        monkeypatch.setattr(subprocess, name, run_something)
    monkeypatch.setattr(Part, "speed", run_something)
    monkeypatch.chdir(tmp_path)  # without runs/
    monkeypatch.setattr(sys, "argv", ["run.py", "--plan", "--output", "nowhere"])
    run.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-3]] == [*run.PARTS, "all"]
    assert lines[-1] == "On the CPU alone: corners."
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["run.py", "--plan", "--only", "corners", "--output", "nowhere"])
    run.main()
    assert "all on a GPU" not in capsys.readouterr().out


def test_an_estimate_counts_what_is_left_at_the_rate_of_what_is_done(tmp_path: Path) -> None:
    first = estimate(Counting, tmp_path)
    assert (first.device, first.cells, first.done, first.operations) == ("cuda", 3, 0, 300.0)
    assert first.seconds == (300 / (SHARES[0] * PEAK), 300 / (SHARES[1] * PEAK))
    part, store = Counting(tmp_path), Store(tmp_path / "counting-cuda/cells.json")
    store.keep(part.cells()[1], 50.0, None, "cuda")  # 2 operations a second
    then = estimate(Counting, tmp_path)
    assert (then.done, then.operations, then.seconds) == (1, 200.0, (100.0, 100.0))
    assert printed([then]).splitlines()[1].split() == ["counting", "3", "1", "2.0e+02", "2", "min", "2", "min", "–"]


def test_the_plan_knows_the_public_models() -> None:
    shape = {name: getattr(SMOLLM2_CONFIG, name) for name in SHAPES["0.1B"]}
    assert shape == SHAPES["0.1B"]
    with torch.device("meta"):
        for config in (SMOLLM2_CONFIG, GEMMA_CONFIG, LlamaConfig(**SHAPES["8B"])):
            n_parameters = AutoModelForCausalLM.from_config(config).num_parameters()
            assert held(config, 0, "cuda") == pytest.approx(2 * n_parameters, rel=1e-3)
    assert (
        held(SMOLLM2_CONFIG, 8192, "cuda", caches=3) - held(SMOLLM2_CONFIG, 8192, "cuda") == 2 * 8192 * 30 * 6 * 64 * 2
    )


def test_a_rehearsal_judges_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("speed", seed=0, rehearsal=True)
    report.add("prefill: time over stock", 7.5, at_most=1.3)
    assert capsys.readouterr().out == "prefill: time over stock 7.5\n"
    assert report.figures["prefill: time over stock"] == {"value": 7.5, "bar": "no bar", "ok": True}


@pytest.mark.slow
def test_every_part_rehearses_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny", "--output", str(tmp_path)])
    run.main()
    said = capsys.readouterr().out
    assert said.startswith("A rehearsal: times and ratios mean nothing at this size.\n")
    assert "short" not in said
    for part in run.PARTS:
        record = json.loads((tmp_path / f"{part}-cpu.json").read_text())
        assert record["complete"]
        assert record["cells"] == len(json.loads((tmp_path / f"raw/{part}-cpu/cells.json").read_text())) > 0
    own = json.loads((tmp_path / "quality-cpu.json").read_text())["own"]
    assert own == {"novel": {length: {"0": 1.0, "0.5": 1.0, "1": 1.0} for length in ("384", "512")}}
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


def test_a_cell_is_measured_again_with_other_settings_or_where_its_file_is_gone(tmp_path: Path) -> None:
    store, there = Store(tmp_path / "cells.json"), tmp_path / "results"
    there.touch()
    cell = Cell("one", 1.0, int, "rounds 1", there.is_file)
    store.keep(cell, 1.0, 5, "cpu")
    assert store.done([cell])["one"]["value"] == 5
    assert not store.done([replace(cell, settings="rounds 2")])
    there.unlink()
    assert not store.done([cell])


def test_two_processes_keep_their_cells_in_one_store(tmp_path: Path) -> None:
    keep = (
        "import sys; from pathlib import Path; from at_scale.cells import Cell, Store\n"
        "for k in range(40): Store(Path(sys.argv[1])).keep(Cell(f'{sys.argv[2]} {k}', 1.0, int), 1.0, k, 'cpu')"
    )
    path = tmp_path / "cells.json"
    environment = {**os.environ, "PYTHONPATH": str(Path(run.__file__).parents[1])}
    both = [subprocess.Popen([sys.executable, "-c", keep, str(path), who], env=environment) for who in "ab"]
    assert [process.wait() for process in both] == [0, 0]
    assert len(json.loads(path.read_text())) == 80


CUT = ["", "null", "[]", '{"one": {"seconds": 1}}', '{"one": {"val', '{"one": {"value": 1, "seconds": NaN}}']


@pytest.mark.parametrize("content", CUT)
def test_a_store_that_was_cut_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"cells\.json .*move it away to start anew"):
        Store(path).done([Cell("one", 1.0, int)])


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    part, store, said = Counting(tmp_path), Store(tmp_path / "cells.json"), []
    first, *others = part.cells()

    def too_large() -> None:
        raise torch.OutOfMemoryError("tried to allocate 16 GiB")

    part.cells = lambda: [replace(first, run=too_large), *others]  # type: ignore[method-assign]
    with pytest.raises(CellsFailed, match=r"counting: 1 of 3 cells failed\. The same command tries them again\."):
        run_part(part, store, Budget(now=part.clock), said.append)
    assert part.ran == ["b", "c"]
    assert said[-1] == "counting: a failed: OutOfMemoryError: tried to allocate 16 GiB"


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the plan with the one part `counting`; its exit status."""
    monkeypatch.setattr(run, "PARTS", {"counting": Counting, "laws": run.Laws})

    def run_it(*arguments: str, output: Path = tmp_path) -> int:
        monkeypatch.setattr(sys, "argv", ["run.py", "--output", str(output), *arguments])
        try:
            run.main()
        except SystemExit as stopped:
            return int(stopped.code) if isinstance(stopped.code, int) else 1
        return 0

    return run_it


def test_figures_are_not_replaced_by_those_of_fewer_cells(
    tmp_path: Path, counting: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert counting("--only", "counting") == 0
    record, part = tmp_path / "counting-cpu.json", Counting(tmp_path / "raw/counting-cpu")
    published = record.read_text()
    assert json.loads(published)["complete"]
    assert counting("--only", "counting", "--rounds", "2", "--minutes", "0") == 1
    kept = Store(part.folder / "cells.json").done(part.cells())
    del kept["b"], kept["c"]
    run.write(part, kept, record)
    assert record.read_text() == published
    assert "has the figures of 3 cells, and is not replaced by those of 1" in capsys.readouterr().out


def test_what_keeps_a_part_from_running_is_said_and_counts(
    tmp_path: Path, counting: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str, **options: Any) -> str:
        assert counting("--only", *arguments, **options) == 1
        return capsys.readouterr().out

    assert counting() == 0  # without a GPU `laws` is passed over
    capsys.readouterr()
    assert said("laws") == "laws: not run: no GPU.\n"
    (tmp_path / "a file").touch()
    assert "counting: not run: " in said("counting", output=tmp_path / "a file")
    cells = tmp_path / "raw/counting-cpu/cells.json"
    whole = cells.read_text()
    cells.unlink()
    with FileLock(tmp_path / "raw/counting-cpu/run.lock"):
        assert "counting: 3 cells not run: another run is measuring them" in said("counting")
    cells.write_text(whole.replace(", cpu", ", NVIDIA H200"))
    assert "NVIDIA H200. Choose another --output for cpu." in said("counting")
    cells.write_text(whole[:50])
    assert "counting: not run: " in said("counting")


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--minutes", "nan"], ["--minutes", "-1"]])
def test_nothing_is_measured_with_wrong_numbers(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny", *arguments])
    with pytest.raises(SystemExit):
        run.main()
    assert "must be" in capsys.readouterr().err


def test_a_results_file_that_was_cut_has_no_finished_cells(tmp_path: Path) -> None:
    grid = Grid(retrieval=(Passkey(),), lengths=(64, 128), depths=(0.0, 1.0), trials=3, gate=(64,), windows=2)
    assert expected(grid) == {("passkey", 64): 6, ("passkey", 128): 6, ("short", 64): 2}
    assert expected(Grid(texts=(Perplexity(),), lengths=(64, 128), windows=4)) == {("perplexity", 128): 4}
    assert not counts(tmp_path / "missing.jsonl")


def shared(clock: Clock, ran: list[str]) -> list[Cell]:
    """Two cells of each of two texts, and one that writes to no file."""
    made = replace(Counting(Path(), clock=clock, ran=ran).cells()[0], run=int)
    return [replace(made, name=f"{text} {k}", file=text) for k in range(2) for text in ("novel", "essay")] + [made]


def test_a_run_leaves_the_files_of_another_run_to_it(tmp_path: Path) -> None:
    part, store, said = Counting(tmp_path), Store(tmp_path / "cells.json"), []
    cells = shared(part.clock, part.ran)
    part.cells = lambda: cells  # type: ignore[method-assign]
    with FileLock(tmp_path / "novel.lock"):
        assert not run_part(part, store, Budget(now=part.clock), said.append)
        assert set(store.done(cells)) == {"essay 0", "essay 1", "a"}
        assert said[-1] == "counting: 2 cells not run: another run is measuring them."
        assert not run_part(part, store, Budget(now=part.clock), said.append)  # and nothing is timed
        assert said[-1] == "counting: 2 cells not run: another run is measuring them."
    assert run_part(part, store, Budget(now=part.clock), said.append)
    assert len(store.done(cells)) == 5


def test_runs_at_once_measure_each_cell_once(tmp_path: Path) -> None:
    """Six processes, each of which may measure every cell; a cell writes a line."""
    code = """
import sys, time
from pathlib import Path
from at_scale.cells import Budget, Cell, Part, Store, run_part

class Lines(Part):
    name, title = "lines", "lines"
    def cells(self):
        return [Cell(f"{k % 4} {k}", 1.0, lambda k=k: self.line(k), file=f"text {k % 4}") for k in range(24)]
    def line(self, k):
        time.sleep(0.02)
        with open(self.folder / f"{k % 4}.txt", "a") as file:
            file.write(f"{k}\\n")
    def speed(self):
        return 1000.0
    def record(self, kept):
        return kept

run_part(Lines(Path(sys.argv[1])), Store(Path(sys.argv[1]) / "cells.json"), Budget(), print)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(run.__file__).parents[1])}
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment) for _ in range(6)]
    assert not any(process.wait() for process in runs)
    written = [line for path in tmp_path.glob("*.txt") for line in path.read_text().split()]
    assert sorted(map(int, written)) == list(range(24))
    assert len(json.loads((tmp_path / "cells.json").read_text())) == 24

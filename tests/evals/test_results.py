"""The results file: nothing lost, nothing mixed in, nothing that is corrupt taken for a measurement."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctxext.evals.results import Header, ResultsWriter, checked_line, forget_variant, read_results


def header(**changes) -> Header:
    values = {
        "identity": {"model": "m", "seed": 0},
        "tasks": {"passkey": {"digits": 5}},
        "variants": {"none": {"fingerprint": "a"}, "yarn": {"fingerprint": "b"}},
    }
    return Header(**{**values, **changes})


def record(trial: int, variant: str = "none", **changes) -> dict:
    place = {"task": "passkey", "length": 512, "depth": 0.5, "trial": trial, "seed": 0}
    return {"variant": variant, "key": f"{trial:016x}", **place, "hit": True, **changes}


def write(path: Path, batches: list[list[dict]], rank: int = 0, merge: bool = False, **changes) -> None:
    with ResultsWriter(path, header(**changes), rank) as writer:
        for batch in batches:
            writer.add(batch)
        if merge:
            writer.merge()


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "r.jsonl"
    batches = [[record(k), record(k, "yarn")] for k in range(6)]
    write(whole, batches, merge=True)
    write(path, batches[3:5], rank=1)  # an earlier run of two processes, of which nothing was merged
    write(path, batches[:2])
    with ResultsWriter(path, header()) as writer:
        done = writer.done
    assert {key for _, key in done} == {record(k)["key"] for k in (0, 1, 3, 4)}
    write(path, [batches[2], batches[5]], rank=2, merge=True)
    assert path.read_bytes() == whole.read_bytes()
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["r.jsonl", "whole.jsonl"]


def test_a_variant_is_forgotten_with_its_samples(tmp_path: Path) -> None:
    path, expected = tmp_path / "r.jsonl", tmp_path / "expected.jsonl"
    forget_variant(path, "yarn")  # there is nothing yet
    write(path, [[record(0), record(0, "yarn")]], merge=True)
    write(path, [[record(1), record(1, "yarn", hit=False)]])  # and a journal of a killed run
    write(expected, [[record(0), record(1)]], merge=True, variants={"none": {"fingerprint": "a"}})
    forget_variant(path, "yarn")
    assert path.read_bytes() == expected.read_bytes()
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["expected.jsonl", "r.jsonl"]
    write(path, [[record(1, "yarn")]], variants={"yarn": {"fingerprint": "another"}})


def test_what_was_being_written_when_a_run_was_killed_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, [[record(0)], [record(1), record(2)]])
    part = path.with_name("r.jsonl.part-0")
    whole = part.read_bytes()
    for cut in range(1, len(whole) - whole.rstrip(b"\n").rfind(b"\n") - 1):
        part.write_bytes(whole[:-cut])
        assert [r["trial"] for r in read_results(path).records] == [0]
    with ResultsWriter(path, header()) as writer:
        assert len(writer.done) == 1
        writer.add([record(1), record(2)])
    assert part.read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"identity": {"model": "another", "seed": 0}}, "model: 'm' → 'another'"),
        ({"identity": {"model": "m", "seed": 1}}, "seed: 0 → 1"),
        ({"tasks": {"passkey": {"digits": 7}}}, "task passkey: digits 5 → 7"),
        ({"variants": {"yarn": {"fingerprint": "c"}}}, "variant yarn: fingerprint 'b' → 'c'"),
    ],
)
@pytest.mark.parametrize("merged", [True, False])
def test_other_measurements_are_not_mixed_in(tmp_path: Path, changes: dict, word: str, merged: bool) -> None:
    path = tmp_path / "r.jsonl"
    write(path, [[record(0)]], merge=merged)
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=rf"holds other measurements \({word}\)\. Pass another file"):
        ResultsWriter(path, header(**changes))
    assert files == {file: file.read_bytes() for file in tmp_path.iterdir()}


def test_losses_that_are_no_number_are_read_as_they_were_measured(tmp_path: Path) -> None:
    """As float16 gives them: a run that measured them is merged at its end."""
    path = tmp_path / "r.jsonl"
    text = {"task": "perplexity", "tokens": 1, "bytes": 4, "losses": "AADAfw=="}
    found = [record(0, **text, loss=float("nan")), record(1, logprob=-float("inf"))]
    write(path, [found], merge=True, tasks={"passkey": {}, "perplexity": {}})
    losses = {r["key"]: r.get("loss", r.get("logprob")) for r in read_results(path).records}
    assert str(losses) == str({found[1]["key"]: -float("inf"), found[0]["key"]: float("nan")})


def test_of_a_variant_that_differs_only_the_fields_that_do_are_named(tmp_path: Path) -> None:
    def yarn(factor: float, limit: int, fingerprint: str) -> dict:
        method = {"name": "yarn", "factor": factor, "beta_fast": 32.0}
        return {"yarn": {"model": "m", "extension": {"method": method}, "fingerprint": fingerprint, "limit": limit}}

    path = tmp_path / "r.jsonl"
    write(path, [[record(0, "yarn")]], merge=True, variants=yarn(4.0, 2048, "a"))
    with pytest.raises(ValueError, match="holds other") as error:
        ResultsWriter(path, header(variants=yarn(8.0, 4096, "b")))
    assert "(variant yarn: extension.method.factor 4.0 → 8.0, limit 2048 → 4096). Pass another" in str(error.value)
    assert "beta_fast" not in str(error.value)
    assert "fingerprint" not in str(error.value)


def test_variants_of_another_model_are_not_mixed_in(tmp_path: Path) -> None:
    """By its weights: two models may have one name, one tokenizer and one config."""
    path = tmp_path / "r.jsonl"
    write(path, [[record(0, "yarn")]], merge=True, about={"weights": "a"})
    with pytest.raises(ValueError, match=r"\(weights: 'a' → 'b'\)"):
        write(path, [[record(0, "ntk")]], merge=True, about={"weights": "b"})


def test_tasks_and_variants_may_be_added(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, [[record(0)]], merge=True)
    more = {"tasks": {"needle": {}}, "variants": {"pi": {"fingerprint": "d"}}}
    write(path, [[record(1, "pi", task="needle")]], merge=True, **more)
    results = read_results(path)
    assert list(results.header.variants) == ["none", "yarn", "pi"]
    assert [(r["variant"], r["task"]) for r in results.records] == [("none", "passkey"), ("pi", "needle")]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda lines: [b"hello", *lines[1:]], "not a results file"),
        (lambda lines: [b'{"some": "json"}', *lines[1:]], "not a results file"),
        (lambda lines: [lines[0], lines[1][:-9], *lines[2:]], "corrupt at line 2"),
        (lambda lines: [lines[0], b'{"variant": "unknown"}', *lines[2:]], "corrupt"),
        (lambda lines: [*lines[:-1], lines[-1][:20]], "corrupt"),
        (lambda lines: [*lines, checked_line(record(0, hit=False)).encode()], "two outcomes"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, damage, word: str) -> None:
    path = tmp_path / "r.jsonl"
    write(path, [[record(0), record(1)]], merge=True)
    path.write_bytes(b"\n".join(damage(path.read_bytes().splitlines())) + b"\n")
    for open_it in (read_results, lambda path: ResultsWriter(path, header())):
        with pytest.raises(ValueError, match=word):
            open_it(path)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (1, '"seed": 0', '"seed": 1'),
        (2, '"hit": true', '"hit": false'),
        (3, '"trial": 1', '"trial": 2'),
        (3, '"checksum": ', '"note": '),
        (3, '"seed": 0', '"seed": 0, "got": ""'),
    ],
)
def test_a_changed_line_is_refused_by_its_number(tmp_path: Path, merged: bool, number: int, old: str, new: str) -> None:
    path = tmp_path / "r.jsonl"
    write(path, [[record(0)], [record(1)]], merge=merged)
    file = path if merged else path.with_name("r.jsonl.part-0")
    whole = file.read_text()
    lines = whole.splitlines()
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    file.write_text("\n".join([*lines, ""]))
    for open_it in (read_results, lambda path: ResultsWriter(path, header())):
        with pytest.raises(
            ValueError, match=rf"{file.name} is corrupt at line {number}: .* checksum\. Restore it, or "
        ):
            open_it(path)
    if number > 1:  # the remedy
        file.write_text("\n".join([*lines[: number - 1], *lines[number:], ""]))
        write(path, [[record(number - 2)]], merge=True)
        if merged:
            assert path.read_text() == whole
        assert [r["trial"] for r in read_results(path).records] == [0, 1]


def test_a_file_without_checksums_is_read_and_gets_them(tmp_path: Path) -> None:
    """As earlier versions wrote it; another version's run adds to it."""
    path, expected = tmp_path / "r.jsonl", tmp_path / "expected.jsonl"
    write(expected, [[record(0), record(1)]], merge=True)
    old = [{"ctxext_results": 1, **vars(header())}, record(0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    assert read_results(path).records == [record(0)]
    write(path, [[record(1)]], merge=True)
    assert path.read_bytes() == expected.read_bytes()


def test_a_file_whose_end_is_missing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, [[record(0), record(1)]], merge=True)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="cut off"):
        read_results(path)


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl does not exist"):
        read_results(tmp_path / "none.jsonl")
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no results"):
        read_results(tmp_path / "none.jsonl")


FULL = """
import resource, signal, sys
sys.path[:0] = ["tests", "tests/support"]
from pathlib import Path
from evals.test_results import header, record
from ctxext.evals.results import ResultsWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
with ResultsWriter(Path({path!r}), header()) as writer:
    for k in range(100):
        writer.add([record(k)])
"""


def test_a_full_disk_keeps_what_was_measured(tmp_path: Path) -> None:
    """The operating system refuses to let the file grow; a part of the last line may have been written by then."""
    path = tmp_path / "r.jsonl"
    script = FULL.format(limit=2000, path=str(path))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "cannot write results" in ended.stderr
    assert "samples kept in" in ended.stderr
    assert "run the same command again" in ended.stderr
    kept = read_results(path).records
    assert [r["trial"] for r in kept] == list(range(len(kept)))
    assert len(kept) > 5
    assert path.with_name("r.jsonl.part-0").read_bytes().endswith(b"\n")
    write(path, [[record(k)] for k in range(len(kept), 100)], merge=True)
    assert len(read_results(path).records) == 100


def test_a_full_disk_while_merging_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    write(path, [[record(k)] for k in range(5)])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with (
        ResultsWriter(path, header()) as writer,
        pytest.raises(OSError, match=r"5 samples kept in r\.jsonl\.part-"),
    ):
        writer.merge()
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["r.jsonl.part-0"]
    write(path, [], merge=True)
    assert len(read_results(path).records) == 5


OTHER = """
import sys
sys.path[:0] = ["tests", "tests/support"]
from pathlib import Path
from evals.test_results import header, record
from ctxext.evals.results import ResultsWriter
with ResultsWriter(Path({path!r}), header(), {rank}) as writer:
    writer.add([record(7)])
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_two_runs_on_one_file_lose_no_sample(tmp_path: Path, rank: int) -> None:
    """The second is refused while a process of the first lives; after a kill -9 it resumes from what was written."""
    path = tmp_path / "r.jsonl"
    write(path, [[record(0)]])
    script = [sys.executable, "-c", OTHER.format(path=str(path), rank=rank)]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "written\n"
        before = {file: file.read_bytes() for file in tmp_path.iterdir()}
        for _ in range(2):
            with pytest.raises(ValueError, match=r"r\.jsonl is being written by another run\. Wait for it to end"):
                ResultsWriter(path, header())
        assert before == {file: file.read_bytes() for file in tmp_path.iterdir()}
        first.kill()
    write(path, [[record(1)]], merge=True)
    assert [r["trial"] for r in read_results(path).records] == [0, 1, 7]
    assert [file.name for file in tmp_path.iterdir()] == ["r.jsonl"]


def test_the_processes_of_one_run_share_its_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResultsWriter(path, header(), 0) as first:
        with ResultsWriter(path, header(), 1) as second:
            second.add([record(1)])
            first.add([record(0)])
        first.merge()
    assert [r["trial"] for r in read_results(path).records] == [0, 1]


def test_a_run_that_writes_nothing_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "r.jsonl", [])
    assert not [*tmp_path.iterdir()]


def test_each_line_is_json_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, [[record(1), record(0)], [record(0, "yarn")]], merge=True)
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["ctxext_results"] == 2
    assert [(line["variant"], line["trial"]) for line in lines] == [("none", 0), ("none", 1), ("yarn", 0)]

"""The results file: one JSON line per sample. No measurement is lost or repeated.

The first line is the header; every other line is a sample, in the order of the grid. During a run each process keeps a
journal beside the file (`results.jsonl.part-0`): a header per run, then one line per batch. At the end the journals are
merged into the file and removed. A run killed at any moment resumes from its journals, with any number of processes.

The header and every sample end with a checksum of their content, so that a changed line is refused. It protects from
accidents, not from forgery: it has no key. A line that was removed is measured again.

Each process holds an operating system lock (`.results.jsonl.part-0.lock`), so a second run on the same file is refused.
The lock is released when the process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ctxext.evals.checks import CorruptLine, check_header, check_record
from ctxext.utils.values import counted, shown

# Lines of format 1 have no checksums; such files are still read.
FORMAT = 2
Record = dict[str, Any]


def checked_line(content: dict[str, Any]) -> str:
    """A line of a results file: JSON, whose last field is the checksum of the others."""
    return json.dumps({**content, "checksum": _checksum(content)}, ensure_ascii=False)


def _checksum(content: dict[str, Any]) -> str:
    return blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Header:
    """What was measured, and its conditions.

    Attributes:
        identity: what all measurements of a file have in common: model, tokenizer, text, seed, how answers are scored,
            versions; and the base's weights, in `about`.
        tasks: the tasks with their settings.
        variants: the variants of the model, with fingerprint and method.
        about: facts for readers, such as trained length and machine.
    """

    identity: dict[str, Any]
    tasks: dict[str, Any]
    variants: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        return checked_line({"ctxext_results": FORMAT, **vars(self)})

    def joined(self, other: Header, path: Path) -> Header:
        """This header with the tasks and variants of `other`, a run for the same file.

        Raises:
            ValueError: the two have different conditions; the error names them.
        """
        ours, theirs = self._facts(), other._facts()
        for name in ours:
            if name in theirs and ours[name] != theirs[name]:
                raise ValueError(
                    f"{path} holds other measurements ({name}: {_changed(ours[name], theirs[name])}). Pass another "
                    f"file with --output, or remove {path.name.partition('.part-')[0]} and the .part- files beside it."
                )
        return Header(self.identity, self.tasks | other.tasks, self.variants | other.variants, self.about | other.about)

    def _facts(self) -> dict[str, Any]:
        tasks = {f"task {name}": settings for name, settings in self.tasks.items()}
        variants = {f"variant {name}": value for name, value in self.variants.items()}
        # The base's weights: variants of another model do not belong here, whatever its name.
        weights = {"weights": self.about["weights"]} if "weights" in self.about else {}
        return {**self.identity, **weights, **tasks, **variants}


def _changed(old: Any, new: Any) -> str:
    """The fields that differ, as `method.factor 4.0 → 8.0`; fingerprints only if nothing else differs."""
    before, after = _fields(old), _fields(new)
    names = [name for name in before | after if before.get(name) != after.get(name)]
    names = [name for name in names if name != "fingerprint"] or names
    said = [f"{name} {shown(before.get(name))} → {shown(after.get(name))}".strip() for name in names[:3]]
    return ", ".join([*said, *([f"and {len(names) - 3} more"] if len(names) > 3 else [])])


def _fields(value: Any, at: str = "") -> dict[str, Any]:
    """The fields of nested objects, by path."""
    if not isinstance(value, dict):
        return {at: value}
    return {
        path: each
        for name, part in value.items()
        for path, each in _fields(part, f"{at}.{name}".removeprefix(".")).items()
    }


@dataclass
class Results:
    """The content of a results file, including journals of an unfinished run."""

    path: Path
    header: Header
    records: list[Record]


def read_results(path: str | Path) -> Results:
    """Read a results file and the journals beside it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is empty or corrupt (the error says where), or its parts do not belong together.
    """
    results = _read_all(Path(path))
    if results is not None:
        return results
    if Path(path).exists():
        raise ValueError(f"{path} has no results. Create it with ctxext eval or ctxext compare.")
    raise FileNotFoundError(f"{path} does not exist. Create it with ctxext eval or ctxext compare.")


def forget_variant(path: Path, variant: str, about: Collection[str] = ()) -> None:
    """Remove a variant and its samples from a results file and the journals beside it, if there are any.

    Args:
        about: names of the facts in the header's `about` that are of this variant alone.
    """
    results = _read_all(path)
    if results is None or variant not in results.header.variants:
        return
    variants = {name: value for name, value in results.header.variants.items() if name != variant}
    records = [record for record in results.records if record["variant"] != variant]
    facts = {name: value for name, value in results.header.about.items() if name not in about}
    _write_whole(Results(path, replace(results.header, variants=variants, about=facts), records))
    for journal in path.parent.glob(f"{path.name}.part-*"):
        journal.unlink()


def _write_whole(results: Results) -> None:
    path = results.path
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for line in (results.header.line(), *map(checked_line, results.records)):
                file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror}. {counted(len(results.records), 'sample')} kept in "
            f"{path.name}.part-* and {path.name}. Free disk space and run the same command again",
        ) from None
    os.replace(temporary, path)


def _read_all(path: Path) -> Results | None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a results file. Pass a file of ctxext eval or ctxext compare.")
    files = ([path] if path.exists() else []) + sorted(path.parent.glob(f"{path.name}.part-*"))
    header: Header | None = None
    records: dict[tuple[str, str], Record] = {}
    for file in files:
        found, batches = _read(file)
        if found is None:
            continue
        header = found if header is None else header.joined(found, file)
        for record in batches:
            name = (record["variant"], record["key"])
            if records.setdefault(name, record) != record:
                raise ValueError(f"{file} is corrupt: sample {name[1]} of {name[0]} has two outcomes.")
    if header is None:
        return None
    variants, tasks = list(header.variants), list(header.tasks)

    def place(record: Record) -> tuple[Any, ...]:
        depth = -1.0 if record["depth"] is None else record["depth"]
        task, variant = record["task"], record["variant"]
        return variants.index(variant), tasks.index(task), record["length"], record["trial"], depth, record["seed"]

    return Results(path, header, sorted(records.values(), key=place))


def _read(file: Path) -> tuple[Header | None, list[Record]]:
    """The header and records of one file; an incomplete last line of a killed run is ignored."""
    *lines, torn = file.read_bytes().split(b"\n")
    if not lines:
        if torn and b'"ctxext_results"' not in torn[:32]:
            raise ValueError(f"{file} is not a results file of ctxext. Give another file.")
        return None, []
    values = [_parse(file, k, line) for k, line in enumerate(lines, start=1)]
    if not isinstance(values[0], dict) or values[0].get("ctxext_results") not in (1, FORMAT):
        raise ValueError(f"{file} is not a results file of ctxext (formats 1 to {FORMAT}). Give another file.")
    if torn and ".part-" not in file.name:
        raise ValueError(f"{file} is corrupt: its last line, {len(lines) + 1}, is cut off. Restore it, or remove it.")
    header: Header | None = None
    records: list[Record] = []
    summed = True
    for number, value in enumerate(values, start=1):
        try:
            # A journal has a header for each run that continued it, possibly with other variants.
            if isinstance(value, dict) and "ctxext_results" in value:
                if value["ctxext_results"] != 1:
                    _check_sum(value)
                check_header(value)
                found = Header(*(value[part] for part in ("identity", "tasks", "variants", "about")))
                header, summed = found if header is None else header.joined(found, file), value["ctxext_results"] != 1
                continue
            assert header is not None
            for record in value if isinstance(value, list) else [value]:
                if summed:
                    _check_sum(record)
                check_record(record)
                if record["variant"] not in header.variants or record["task"] not in header.tasks:
                    raise CorruptLine("its header does not list the variant or task of a sample")
                records.append(record)
        except CorruptLine as error:
            remedy = "remove it and measure again" if number == 1 else "delete it and run the same command again"
            raise ValueError(f"{file} is corrupt at line {number}: {error}. Restore it, or {remedy}.") from None
    return header, records


def _check_sum(content: Any) -> None:
    """Remove the checksum of a line, and raise CorruptLine unless it is that of the rest."""
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise CorruptLine("it does not have the content that was written, by its checksum")


def _parse(file: Path, number: int, line: bytes) -> Any:
    try:
        value = json.loads(line)
        if b"\\ud" in line.lower():  # half a character, which cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        if number == 1:
            raise ValueError(f"{file} is not a results file of ctxext. Give another file.") from None
        raise ValueError(f"{file} is corrupt at line {number}: {error}. Restore it, or remove it.") from None


def _give_up(lock: FileLock) -> None:
    """Release a lock and remove its file."""
    with contextlib.suppress(OSError):  # Windows cannot remove an open file
        os.unlink(lock.lock_file)
    lock.release()


class ResultsWriter:
    """Appends to a results file; every process of a run has one.

    The process of rank 0 goes first: it refuses a file that another run is writing. With a barrier `wait`:

        if rank > 0: wait()
        with ResultsWriter(path, header, rank=rank) as writer:   # locks, and reads what was measured
            if rank == 0: wait()
            wait()                                               # everybody has read
            writer.add([record, ...])                            # one batch
            if rank == 0: wait(); writer.merge()                 # everybody else has closed its journal
        if rank > 0: wait()

    Raises:
        ValueError: another process writes to this file, or its content does not belong to `header`.
        OSError: the file system cannot lock files.
    """

    def __init__(self, path: str | Path, header: Header, rank: int = 0) -> None:
        self.path = Path(path)
        self.header = header
        self.done: dict[tuple[str, str], Record] = {}
        self._part = self.path.with_name(f"{self.path.name}.part-{rank}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        own = self.path.with_name(f".{self._part.name}.lock")
        self._lock = self._locked(own)
        self._file = open(self._part, "ab")  # noqa: SIM115  open until _close
        try:
            if rank == 0:
                # A process of another run may outlive its rank 0.
                for path in {*self.path.parent.glob(f".{self.path.name}.part-*.lock")} - {own}:
                    _give_up(self._locked(path))
            before = _read_all(self.path)
            if before is not None:
                self.header = before.header.joined(header, self.path)
                self.done = {(record["variant"], record["key"]): record for record in before.records}
            # An incomplete line of a killed run.
            whole = self._part.read_bytes()
            self._size = whole.rfind(b"\n") + 1
            self._file.truncate(self._size)
            self._begun = self.header.line().encode() in whole.splitlines()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _locked(self, path: Path) -> FileLock:
        """Acquire a process's lock."""
        lock = FileLock(path, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"{self.path} is being written by another run. Wait for it to end, or pass another file with --output."
            ) from None
        except OSError as error:
            raise OSError(
                error.errno, f"cannot lock {path}: {error.strerror}. Pass a file on another file system with --output"
            ) from None
        return lock

    def _close(self) -> None:
        """Release the lock, and remove an empty journal."""
        if not self._lock.is_locked:
            return
        self._file.close()
        if self._part.exists() and not self._part.stat().st_size:
            self._part.unlink()
        _give_up(self._lock)

    def add(self, records: list[Record]) -> None:
        """Write the samples of one batch atomically.

        Raises:
            OSError: the disk is full or not writable; earlier samples are kept.
        """
        if not self._begun:
            self._write(self.header.line())
            self._begun = True
        self._write(f"[{', '.join(map(checked_line, records))}]")
        self.done.update(((record["variant"], record["key"]), record) for record in records)

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file.fileno(), data[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise OSError(
                error.errno,
                f"cannot write results: {error.strerror}. {counted(len(self.done), 'sample')} kept in {self._part}. "
                "Free disk space and run the same command again to resume",
                str(self._part),
            ) from None
        self._size += len(data)

    def merge(self) -> Results:
        """Merge the journals into the file, and remove them."""
        results = read_results(self.path)
        parts = list(self.path.parent.glob(f"{self.path.name}.part-*"))
        header = results.header.joined(self.header, self.path)
        if not any(part.stat().st_size for part in parts) and header == results.header:
            return results
        results = Results(self.path, header, results.records)
        _write_whole(results)
        self._file.close()
        for part in parts:
            part.unlink()
        return results

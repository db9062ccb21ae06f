"""How the plan runs: a part is a list of cells, and each finished cell is kept, so that a stopped run resumes."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from filelock import FileLock, Timeout
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ctxext.utils.machine import machine, versions
from ctxext.utils.values import counted


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        cost: floating-point operations, roughly; cells of a part take time in proportion.
        run: measures it; what it returns is kept as JSON.
        settings: what the name leaves out; a kept cell of other settings is measured again.
        there: whether what `run` wrote to other files is still there.
        file: another one that `run` writes to; the cells of a file are measured by one process, those of two files may
            be measured at once.
    """

    name: str
    cost: float
    run: Callable[[], Any]
    settings: str = ""
    there: Callable[[], bool] = lambda: True
    file: str = ""


@dataclass
class Part(ABC):
    """A question and the cells that answer it.

    Attributes:
        folder: for raw results.
        tiny: small, on the bundled model or shape, in seconds.
        rounds: samples a cell, in multiples of the plan's.
        planned: the cells are only listed: nothing is fetched, and every package counts as installed.
        only_on: the device that it runs on where there is another, too.
        in_seconds: whether a cell's cost is a guess in seconds.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    only_on: ClassVar[str | None] = None
    in_seconds: ClassVar[bool] = False

    folder: Path
    device: str = "cpu"
    tiny: bool = False
    rounds: int = 1
    planned: bool = False

    @property
    def missing(self) -> str | None:
        """What this machine lacks for the part; None if it can run here."""
        return None

    @property
    def held_bytes(self) -> float | None:
        """Bytes of the weights and KV caches that its largest cell holds at once; None if the code cannot tell."""
        return None

    def lacking(self, *packages: str) -> list[str]:
        """Those that are not installed."""
        return [name for name in packages if not self.planned and importlib.util.find_spec(name) is None]

    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """The most valuable first."""

    @abstractmethod
    def speed(self) -> float:
        """Operations a second, of one timed pass on this machine."""

    @abstractmethod
    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        """The figures of the cells that are done, as JSON; `kept` holds what each returned."""


@dataclass
class Store:
    """The finished cells of a part in one JSON file, by name: what `run` returned, and how it was measured."""

    path: Path

    def done(self, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
        kept = self._read()
        return {
            cell.name: kept[cell.name]
            for cell in cells
            if cell.name in kept and kept[cell.name].get("settings", "") == cell.settings and cell.there()
        }

    def keep(self, cell: Cell, seconds: float, value: Any, device: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be keeping one
            kept = self._read()
            kept[cell.name] = {
                "seconds": round(seconds, 3),
                "machine": machine(device),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "versions": versions(),
                "settings": cell.settings,
                "value": value,
            }
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(kept, indent=0) + "\n")
            temporary.replace(self.path)

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.is_file():
            return {}
        try:
            kept = json.loads(self.path.read_text())
        except ValueError as error:
            raise ValueError(f"{self.path} is not JSON ({error}). Restore it, or move it away to start anew.") from None
        if not isinstance(kept, dict) or not all(map(_is_measured, kept.values())):
            raise ValueError(f"{self.path} does not hold measured cells. Restore it, or move it away to start anew.")
        return kept


def _is_measured(cell: Any) -> bool:
    if not isinstance(cell, dict) or "value" not in cell:
        return False
    seconds = cell.get("seconds")
    return isinstance(seconds, int | float) and math.isfinite(seconds)


def measured_on(kept: Mapping[str, Mapping[str, Any]], key: str) -> list[Any]:
    """What the kept cells say of `key`, each once."""
    return list({json.dumps(cell[key]): cell[key] for cell in kept.values() if key in cell}.values())


class CellsFailed(Exception):
    """What was printed, cell by cell, with its traceback."""


@dataclass
class Budget:
    """The time that a run may take, in seconds."""

    seconds: float = math.inf
    now: Callable[[], float] = time.perf_counter
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.now()

    @property
    def left(self) -> float:
        return self.seconds - (self.now() - self.began)


def minutes(seconds: float) -> str:
    """Seconds for people."""
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


@dataclass
class Claims:
    """What this process measures: the cells of a file, or all that write to none, until the `with` block ends.

    So the same command, started several times, shares the files of a part.
    """

    folder: Path
    _locks: dict[str, FileLock] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for lock in self._locks.values():
            lock.release()

    def hold(self, cell: Cell) -> bool:
        """Whether `cell` is this process's, which claims it unless another one has."""
        name = cell.file or "run"
        if name not in self._locks:
            lock = FileLock(self.folder / f"{name}.lock", timeout=0)
            with suppress(Timeout):
                lock.acquire()
                self._locks[name] = lock
        return name in self._locks


def run_part(part: Part, store: Store, budget: Budget, say: Callable[[str], None]) -> bool:
    """Measure the missing cells of `part` while the budget lasts; whether all are done.

    A cell that fails, as one does that needs more memory than there is, does not stop the others; those that another
    run has claimed are left to it.

    Raises:
        CellsFailed: some did, when all others are measured or the time is over.
    """
    cells = part.cells()
    if not cells:
        raise ValueError(f"{part.name} has nothing to measure.")
    done = store.done(cells)
    left = [cell for cell in cells if cell.name not in done]
    if not left:
        say(f"{part.name}: all {len(cells)} cells are done.")
        return True
    with Claims(part.folder) as claims:
        if not any(claims.hold(cell) for cell in left):  # nor is a pass timed, which would slow the other run
            say(f"{part.name}: {counted(len(left), 'cell')} not run: another run is measuring them.")
            return False
        return _measured(part, store, budget, say, claims, left, len(cells))


def _measured(
    part: Part, store: Store, budget: Budget, say: Callable[[str], None], claims: Claims, left: list[Cell], n_cells: int
) -> bool:
    """`run_part` for the cells that are left, the first of which is claimed."""
    speed = part.speed()
    ahead = sum(cell.cost for cell in left)
    say(f"{part.name}: {part.title}. {len(left)} of {n_cells} cells to measure, about {minutes(ahead / speed)}.")
    left_over = TextColumn("{task.fields[left]} left  {task.description}")
    spent = measured = 0.0
    failed, taken, in_time = 0, 0, True
    with Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left_over) as progress:
        bar = progress.add_task("", total=n_cells, completed=n_cells - len(left), left=minutes(ahead / speed))
        for cell in left:
            mine = claims.hold(cell)
            if not mine or store.done([cell]):  # by a run that has ended since
                taken, ahead = taken + (not mine), ahead - cell.cost
                continue
            expected = cell.cost / speed
            if expected > budget.left:
                say(
                    f"{part.name}: {cell.name} would take about {minutes(expected)}, and "
                    f"{minutes(max(0, budget.left))} are left. The same command resumes here."
                )
                in_time = False
                break
            progress.update(bar, description=cell.name)
            begun = budget.now()
            try:
                value = cell.run()
            except Exception as error:  # any class: a cell runs whatever it measures
                traceback.print_exc()
                say(f"{part.name}: {cell.name} failed: {type(error).__name__}: {error}")
                failed, ahead = failed + 1, ahead - cell.cost
                continue
            seconds = budget.now() - begun
            store.keep(cell, seconds, value, part.device)
            spent, measured, ahead = spent + seconds, measured + cell.cost, ahead - cell.cost
            speed = measured / spent if spent else speed
            progress.update(bar, advance=1, left=minutes(ahead / speed))
    if taken:
        say(f"{part.name}: {counted(taken, 'cell')} not run: another run is measuring them.")
    if failed:
        raise CellsFailed(f"{part.name}: {failed} of {len(left)} cells failed. The same command tries them again.")
    return in_time and not taken

"""The log of a training run: one JSON line per step, and the progress bar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ctxext.utils.screen import console


class Log:
    """A file with one JSON line per step; lines after step `done`, from an interrupted run, are removed."""

    def __init__(self, path: Path, done: int, writes: bool) -> None:
        self.path, self.writes = path, writes
        if writes and path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            kept = path.with_suffix(".partial")
            kept.write_text("".join(line for line in lines if done and json.loads(line)["step"] <= done))
            kept.replace(path)

    def add(self, record: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


@contextmanager
def bar(total: int, done: int, shown: bool) -> Iterator[Callable[..., None]]:
    columns = (BarColumn(bar_width=12), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task("", total=total, completed=done)

        def advance(loss: float, left: int, tokens_per_second: float, memory_gib: float) -> None:
            said = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, {left / 1e6:.2f}M left, {memory_gib:.1f} GiB"
            progress.update(task, advance=1, description=said)

        yield advance

"""The log of a training run: one JSON line per step, and the progress bar."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ctxext.training.estimate import duration, gib
from ctxext.training.throughput import in_words
from ctxext.utils.screen import console

LINES = 100  # at most, of a run without a terminal


class Log:
    """A file with one JSON line per step; lines after step `done`, from an interrupted run, are removed."""

    def __init__(self, path: Path, done: int, accelerator: Accelerator) -> None:
        self.path, self.accelerator = path, accelerator
        if accelerator.is_main_process and path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            try:
                before = [line for line in lines if json.loads(line)["step"] <= done]
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path} is not the log of a run. Set another output, or remove that file.") from None
            kept = path.with_suffix(".partial")
            kept.write_text("".join(before if done else []))
            kept.replace(path)

    def add(self, record: dict[str, Any], **tracked: float) -> None:
        """Write a line. Trackers get its numbers and those of `tracked`, which differ from run to run."""
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        numbers = {name: value for name, value in record.items() if name != "step"}
        self.accelerator.log({**numbers, **tracked}, step=record["step"])


@contextmanager
def bar(total: int, done: int, shown: bool) -> Iterator[Callable[..., None]]:
    """A progress bar over steps, or lines without a terminal; yields the function to call after each step.

    The time left is that of the steps so far, with evaluations and checkpoints, but without the first step, which
    allocates and compiles.
    """
    columns = (BarColumn(bar_width=8), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    hidden = not (shown and console.is_terminal)
    with Progress(*columns, console=console, disable=hidden, speed_estimate_period=math.inf) as progress:
        task = progress.add_task("", total=total, completed=done)

        def advance(loss: float, peak: int, **speed: float) -> None:
            said = f"loss {loss:.3f}, {in_words(**speed)}, {gib(peak or None)}"
            progress.update(task, advance=1, description=said)
            (now,) = progress.tasks
            step, left = int(now.completed), now.time_remaining
            if shown and hidden and step * LINES // total > (step - 1) * LINES // total:
                said += f", {duration(left)} left" if left else ""
                console.print(f"step {step:,}/{total:,}: {said}", highlight=False, soft_wrap=True)

        yield advance

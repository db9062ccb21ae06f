"""The console for progress, notes and errors."""

import shlex
import warnings
from pathlib import Path

from rich.console import Console

console = Console(stderr=True)
_in_full = warnings.formatwarning


def plain_warnings() -> None:
    """Show a UserWarning by its message alone, and none of PEFT's and accelerate's use of names that are deprecated."""
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
    warnings.formatwarning = _formatted


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"warning: {message}\n" if category is UserWarning else _in_full(message, category, filename, lineno, line)


def next_command(*words: object) -> str:
    """A line that can be copied: the command that usually comes next."""
    return f"next: ctxext {shlex.join(map(str, words))}"


def next_measurement(model: Path) -> str:
    """The command that evaluates a checkpoint, with a results file beside it."""
    return next_command("eval", model, "-o", model.with_name(f"{model.name}.jsonl"))

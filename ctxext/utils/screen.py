"""The console for progress, notes and errors."""

import shlex
import warnings
from pathlib import Path

from rich.console import Console

console = Console(stderr=True)


def hide_deprecations() -> None:
    """Keep off the screen that PEFT and accelerate use names that transformers renames in its version 6."""
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)


def next_command(*words: object) -> str:
    """A line that can be copied: the command that usually comes next."""
    return f"next: ctxext {shlex.join(map(str, words))}"


def next_measurement(model: Path) -> str:
    """The command that evaluates a checkpoint, with a results file beside it."""
    return next_command("eval", model, "-o", model.with_name(f"{model.name}.jsonl"))


def after_training(saved: Path) -> str:
    """The command for what a fine-tune saved: it merges an adapter, or evaluates a whole model."""
    merged = saved.with_name("merged")
    if saved.name == "adapter" and not merged.exists():
        return next_command("merge", saved, "-o", merged)
    return next_measurement(merged if saved.name == "adapter" else saved)

"""The console for progress, notes and errors."""

from rich.console import Console

console = Console(stderr=True)

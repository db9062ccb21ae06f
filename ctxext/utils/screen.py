"""Where progress, notes and errors go."""

from rich.console import Console

console = Console(stderr=True)

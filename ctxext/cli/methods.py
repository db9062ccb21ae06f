"""`ctxext methods`: what is registered."""

from __future__ import annotations

from dataclasses import fields

from rich.console import Console
from rich.padding import Padding

from ctxext.methods import list_methods


def methods() -> None:
    """Print every method with its formula, saved form, paper and options, and each encoding's default."""
    from ctxext.core.plan import DEFAULT_METHODS, ENCODINGS
    from ctxext.extension.method_table import saved_as, sentence

    console = Console(highlight=False)
    for encoding, words in ENCODINGS.items():
        console.print(f"\n[bold underline]For {words}[/]")
        for method in list_methods(encoding):
            names = " ".join((f"[bold cyan]{method.name}[/]", *(f"[dim]({alias})[/]" for alias in method.aliases)))
            if method.name == DEFAULT_METHODS[encoding]:
                names += " [green](default)[/]"
            options = ", ".join(field.name for field in fields(method) if field.name != "factor")
            console.print(f"{names}  {sentence(method)}")
            details = f"saved as {saved_as(method).replace('`', '')}; {method.training}; {method.paper.title}"
            if options:
                details += f"\noptions: {options}"
            console.print(Padding(details, (0, 0, 0, 4)), style="dim")

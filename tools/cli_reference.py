"""Write docs/cli.md, the command line's reference, from its own commands. `python tools/cli_reference.py`"""

from __future__ import annotations

from pathlib import Path

import typer
import typer.cli

from ctxext.cli import commands

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def page() -> str:
    command = typer.main.get_command(commands)
    text = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name="ctxext")
    _, _, rest = text.partition("\n")
    return f"# Command line\n{rest.rstrip()}\n\nWritten by `python tools/cli_reference.py` from the commands.\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)

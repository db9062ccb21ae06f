"""What comes of extending every model type of the installed transformers: `PYTHONPATH=tools python -m survey`."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ctxext.cli.common import console


def families(
    model_types: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL_TYPE", help="These alone. Default: all.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="causal, seq2seq, masked, speech or base alone.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write a page here.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="An earlier --json: print what changed; exit code 1 if something regressed.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, of one thread each.")] = 2,
) -> None:
    """Build every model type small, extend it, compare it with a native build, restore it, and say what came of it."""
    from ctxext.extension.method_file import check_writable
    from survey import report
    from survey.matrix import EXTENDED
    from survey.workers import examine_all

    outputs = [path for path in (json_path, markdown_path) if path is not None]
    for path in outputs:
        check_writable(path)
    earlier = None if against is None else report.read_json(against)  # before the minutes that follow
    types = _chosen(model_types or [], kind)
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    rows = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("families", total=len(types))
        for row in examine_all(types, workers):
            rows.append(row)
            progress.update(task, advance=1, description=row.model_type)
    rows = report.in_order(rows)
    for row in rows:
        if row.verdict not in (*EXTENDED, "no tokens"):
            line = f"{row.model_type}: {row.verdict}: {row.reason}"
            Console().print(line, highlight=False, markup=False, soft_wrap=True)
    heading, *lines = report.counts(rows)
    table = Table(*heading)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    for path in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
    if json_path is not None:
        report.write_json(rows, json_path)
    if markdown_path is not None:
        markdown_path.write_text(report.markdown(rows), encoding="utf-8")
    if earlier is not None:
        chosen = [row for row in earlier if row.model_type in types] if model_types or kind else earlier
        changed, regressions = report.changes(chosen, rows)
        for line in changed or ["nothing changed"]:
            Console().print(line, highlight=False, markup=False, soft_wrap=True)
        if regressions:
            raise typer.Exit(1)


def _chosen(names: list[str], kind: str | None) -> dict[str, str]:
    from survey.small import KINDS, model_types

    if kind is not None and kind not in KINDS:
        raise ValueError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    known = model_types()
    if unknown := [name for name in names if name not in known]:
        near = list(dict.fromkeys(match for name in unknown for match in get_close_matches(name, known)))
        remedy = f"Did you mean {' or '.join(near)}?" if near else "Leave it out to try all."
        raise ValueError(f"the installed transformers has no model type {', '.join(unknown)}. {remedy}")
    return {name: its for name, its in known.items() if (not names or name in names) and (kind is None or its == kind)}


app = typer.Typer(add_completion=False)
app.command()(families)

if __name__ == "__main__":
    try:
        app()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None

"""`ctxext push`: an extended model, or its extension alone, to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.common import console


def push(
    model: Annotated[
        Path, typer.Argument(help="A folder that holds an extended checkpoint, or a saved method (.json).")
    ],
    repo_id: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Where to push it on the hub.")],
    results: Annotated[
        Path | None, typer.Option(help="A file of ctxext eval or ctxext compare, whose numbers go into the card.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The hub's name of the model that was extended (owner/name).")
    ] = None,
    private: Annotated[bool | None, typer.Option("--private/--public", help="For a new repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="The branch to push to.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card and the files, and push nothing.")] = False,
) -> None:
    """Push an extended model, or its extension alone, to the hub, with a card that says what was done and measured."""
    from ctxext.publish.push import prepared, upload

    if not model.exists():
        raise FileNotFoundError(f"{model} is not here. Give a folder that holds an extended checkpoint.")
    with prepared(model, repo_id, base_model=base_model, results=results) as prepared_push:
        if dry_run:
            print(prepared_push.card())
        for path, size in prepared_push.sizes().items():
            console.print(f"{_readable(size):>10}  {path}", highlight=False, markup=False, soft_wrap=True)
        for note in prepared_push.notes():
            console.print(f"note: {note}.", highlight=False, markup=False, soft_wrap=True)
        if dry_run:
            return
        url = upload(prepared_push, private=private, revision=revision)
    console.print(f"pushed: {url}", highlight=False, markup=False, soft_wrap=True)


def _readable(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size = size / 1024  # type: ignore[assignment]
    return f"{size:.2f} GiB"

"""`ctxext push`: an extended model, or its extension alone, to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.common import in_flags, say
from ctxext.utils.screen import next_command
from ctxext.utils.values import size_in_words


def push(
    model: Annotated[Path, typer.Argument(help="The folder of an extended checkpoint, or a saved method (.json).")],
    repo_id: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The hub repository to push to.")],
    results: Annotated[
        Path | None, typer.Option(help="Results file of ctxext eval or ctxext compare, for the model card.")
    ] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub name of the base model (owner/name).")] = None,
    private: Annotated[bool | None, typer.Option("--private/--public", help="Visibility of a new repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="The branch to push to.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card and the files without pushing.")] = False,
) -> None:
    """Push an extended model, or its extension alone, to the hub, with a model card of its settings and results."""
    from ctxext.publish.push import prepared, upload

    if not model.exists():
        raise FileNotFoundError(f"{model} does not exist. Pass an extended folder, or a saved method (.json).")
    with prepared(model, repo_id, base_model=base_model, results=results) as prepared_push:
        if dry_run:
            print(prepared_push.card())
        for path, size in prepared_push.sizes().items():
            say(f"{size_in_words(size):>10}  {path}")
        for note in prepared_push.notes():
            say(f"note: {in_flags(note)}.")
        if dry_run:
            options = {"--results": results, "--base-model": base_model, "--revision": revision}
            given = [word for name, value in options.items() if value is not None for word in (name, value)]
            visibility = [] if private is None else ["--private" if private else "--public"]
            say(next_command("push", model, repo_id, *given, *visibility))
            return
        url = upload(prepared_push, private=private, revision=revision)
    say(f"pushed: {url}")
    say(next_command("serve", repo_id, *([] if revision is None else ["--revision", revision])))

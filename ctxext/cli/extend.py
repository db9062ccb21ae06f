"""`ctxext extend`: a checkpoint in, an extended checkpoint out, no weights loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.common import (
    Factor,
    HowExisting,
    Length,
    Method,
    Model,
    Options,
    Revision,
    TargetLength,
    TrainedLength,
    console,
    in_flags,
    parse_options,
    without_garbage_collection,
)


def extend(
    model: Model,
    factor: Factor = None,
    target_length: TargetLength = None,
    method: Method = None,
    option: Options = None,
    length: Length = None,
    original_max_position_embeddings: TrainedLength = None,
    existing: HowExisting = "refuse",
    revision: Revision = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A new folder for the checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the new config.json and write nothing.")] = False,
) -> None:
    """Write an extended copy of a checkpoint: a new config.json, and the same weight files, hard-linked.

    Where a table of positions grows, they are written again.
    """
    from ctxext.extension.metadata_file import RECORD
    from ctxext.hub.checkpoint import checkpoint_folder, extend_folder
    from ctxext.methods import RopeScaling

    if dry_run == (output is not None):
        raise typer.BadParameter("give either --output FOLDER or --dry-run.")
    with without_garbage_collection():
        result = extend_folder(
            checkpoint_folder(model, revision, config_only=dry_run),
            output,
            factor,
            method,
            target_length=target_length,
            original_max_position_embeddings=original_max_position_embeddings,
            existing=existing,
            length=length,
            say=console.print,
            **parse_options(option),
        )
    console.print(f"[bold]{result.plan.summary}[/]", highlight=False)
    for note in result.plan.notes:
        console.print(f"note: {in_flags(note)}", highlight=False, markup=False)
    if not result.plan.is_portable:
        freeze = " To freeze it in the config instead, pass --length." * (
            result.plan.in_attention and isinstance(result.plan.method, RopeScaling)
        )
        console.print(
            f"note: config.json cannot express this, as {result.plan.why_not_portable}: "
            "config.json stays unextended, and "
            f"{RECORD} beside it is for ctxext.load.{freeze}",
            highlight=False,
            soft_wrap=True,
        )
    if result.output is None:
        print(json.dumps(result.config, indent=2, ensure_ascii=False))
        return
    how = f"{result.linked_bytes / 2**30:.2f} GiB linked, {result.copied_bytes / 2**30:.2f} GiB copied"
    loads = f"ctxext.load({str(result.output)!r})" if not result.plan.is_portable else "plain transformers"
    weighs = any(path.suffix in (".safetensors", ".bin") for path in result.output.iterdir())
    said = f"{loads} loads it." if weighs else f"there were no weights to take along: with them, {loads} loads it."
    console.print(f"wrote {result.output} ({how}); {said}", highlight=False, soft_wrap=True)

"""`ctxext extend`: a checkpoint in, an extended checkpoint out, no weights loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli import common
from ctxext.cli.common import console
from ctxext.utils.values import size_in_words


def extend(
    model: common.Model,
    factor: common.Factor = None,
    target_length: common.TargetLength = None,
    method: common.Method = None,
    option: common.Options = None,
    length: common.Length = None,
    original_max_position_embeddings: common.TrainedLength = None,
    existing: common.HowExisting = "refuse",
    revision: common.Revision = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A new folder for the checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the new config.json and write nothing.")] = False,
) -> None:
    """Write an extended copy of a checkpoint: a new config.json, and the same safetensors, hard-linked.

    If a position table grows, the weights are rewritten. Both folders share a linked file: do not save other weights
    into the new folder with safetensors older than 0.8, which writes in place.
    """
    from ctxext.extension.metadata_file import RECORD
    from ctxext.hub.checkpoint import TOKENIZER_FILES, checkpoint_folder, extend_folder, weights_in
    from ctxext.methods import RopeScaling

    if dry_run == (output is not None):
        raise typer.BadParameter("give either --output FOLDER or --dry-run.")
    with common.without_garbage_collection():
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
            **common.parse_options(option),
        )
    plan = result.plan
    common.say_plan(plan)
    if not plan.is_portable:
        can_freeze = plan.in_attention and isinstance(plan.method, RopeScaling)
        freeze = " To freeze it in the config instead, pass --length." * can_freeze
        common.say(
            f"note: config.json cannot express this, as {plan.why_not_portable}. It stays unextended, and "
            f"ctxext.load reads {RECORD} beside it.{freeze}"
        )
    if result.output is None:
        print(json.dumps(result.config, indent=2, ensure_ascii=False))
        return
    sizes = {"linked": result.linked_bytes, "copied": result.copied_bytes}
    how = ", ".join(f"{size_in_words(size)} {word}" for word, size in sizes.items() if size)
    loads = common.loaded_by(result.output)
    weighs = weights_in(result.output)
    how = how or ("weights rewritten" if weighs else "no weights")
    said = f"{loads} loads it." if weighs else f"there were no weights to copy; once they are added, {loads} loads it."
    common.say(f"wrote {result.output} ({how}); {said}")
    common.say_servers(result.output)
    if not any(any(result.output.glob(pattern)) for pattern in TOKENIZER_FILES):
        common.say(f"note: {model} has no tokenizer, so {result.output} has none. Save it there too.")

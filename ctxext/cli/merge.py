"""`ctxext merge`: an adapter in, a checkpoint out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.common import loaded_by, say, say_servers
from ctxext.utils.screen import next_measurement
from ctxext.utils.values import size_in_words


def merge(
    adapter: Annotated[str, typer.Argument(help="An adapter: a folder, or a name on the hub (owner/name).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder for the checkpoint.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="dtype of the merged weights: float32, float16 or bfloat16. Default: the base model's."),
    ] = None,
) -> None:
    """Merge an adapter into its extended base model, as a checkpoint with the same logits.

    Plain transformers loads it; if config.json cannot express the extension, ctxext.load does.
    """
    from ctxext.hub.adapters import merge as merge_adapter

    written = merge_adapter(adapter, output, dtype)
    size = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    say(f"wrote {written} ({size_in_words(size)}); {loaded_by(written)} loads it.")
    say_servers(written)
    say(next_measurement(written))

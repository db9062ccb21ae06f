"""`ctxext merge`: an adapter in, a plain checkpoint out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.common import console


def merge(
    adapter: Annotated[str, typer.Argument(help="A folder that holds an adapter, or a name on the hub (owner/name).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder for the checkpoint.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights written: float32, float16 or bfloat16. Default: the base's own."),
    ] = None,
) -> None:
    """Merge an adapter into its extended base: a plain checkpoint whose logits are the adapter's."""
    from ctxext.hub.adapters import merge as merge_adapter

    written = merge_adapter(adapter, output, dtype)
    size = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    console.print(f"wrote {written} ({size / 2**30:.2f} GiB); plain transformers loads it.", highlight=False)

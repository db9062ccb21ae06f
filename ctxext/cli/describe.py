"""`ctxext describe`: the table a person wants before choosing."""

from __future__ import annotations

from rich.table import Table

from ctxext.cli.common import (
    Factor,
    HowExisting,
    Model,
    Revision,
    TargetLength,
    TrainedLength,
    without_garbage_collection,
)


def describe(
    model: Model,
    factor: Factor = None,
    target_length: TargetLength = None,
    original_max_position_embeddings: TrainedLength = None,
    existing: HowExisting = "refuse",
    revision: Revision = None,
) -> None:
    """Print what is known of a checkpoint's context, and what extending it would do. Reads the config alone."""
    from rich.console import Console

    from ctxext.api import describe_context
    from ctxext.folders import checkpoint_folder

    with without_garbage_collection():
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(checkpoint_folder(model, revision, config_only=True))
    description = describe_context(
        config,
        factor,
        target_length=target_length,
        original_max_position_embeddings=original_max_position_embeddings,
        existing=existing,
    )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in description.rows():
        table.add_row(label, value)
    Console().print(table, highlight=False)

"""`ctxext describe`: a model's context, and what extending it would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ctxext.cli.common import (
    Factor,
    HowExisting,
    Method,
    Model,
    Options,
    Revision,
    TargetLength,
    TrainedLength,
    folder_of,
    in_flags,
    parse_options,
    without_garbage_collection,
)

if TYPE_CHECKING:
    from ctxext.core.plan import Plan


def describe(
    model: Model,
    factor: Factor = None,
    target_length: TargetLength = None,
    method: Method = None,
    option: Options = None,
    original_max_position_embeddings: TrainedLength = None,
    existing: HowExisting = "refuse",
    revision: Revision = None,
) -> None:
    """Print what is known of the context of a checkpoint or a GGUF file, and what extending it would do.

    Reads the config or the file's metadata alone.
    """
    from rich.console import Console

    from ctxext.export.gguf import context_of_gguf
    from ctxext.extension.describe import describe
    from ctxext.extension.metadata_file import read_record
    from ctxext.hub.checkpoint import checkpoint_folder, extended_json, planned_as_saved, read_config
    from ctxext.models.text_config import text_config_of

    def of_folder(**how: Any) -> Plan:  # its config does not express the extension
        return extended_json(folder, **how)[0]

    record, model = None, folder_of(model)
    with without_garbage_collection():
        if Path(model).is_file():
            config = context_of_gguf(model)
        else:
            folder = checkpoint_folder(model, revision, config_only=True)
            config, record = read_config(folder), read_record(folder)
    if record is not None:  # as ctxext.load has it
        planned_as_saved(config, record).apply_to(text_config_of(config))

    description = describe(
        config,
        factor,
        target_length,
        planned=None if record is None else of_folder,
        method=method,
        original_max_position_embeddings=original_max_position_embeddings,
        existing=existing,
        **parse_options(option),
    )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in description.rows():
        table.add_row(label, in_flags(value))
    Console().print(table, highlight=False)

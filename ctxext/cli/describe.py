"""`ctxext describe`: a model's context, and what extending it would do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ctxext.cli import common
from ctxext.models.metadata import EXISTING


def describe(
    model: common.Model,
    factor: common.Factor = None,
    target_length: common.TargetLength = None,
    method: common.Method = None,
    option: common.Options = None,
    original_max_position_embeddings: common.TrainedLength = None,
    existing: common.HowExisting = "refuse",
    revision: common.Revision = None,
) -> None:
    """Print the context length and position encoding of a checkpoint or GGUF file, and what extending it would do.

    Reads only the config or the file's metadata.
    """
    from ctxext.export.gguf import context_of_gguf
    from ctxext.extension.describe import describe
    from ctxext.extension.metadata_file import read_record
    from ctxext.extension.request import plan_extension
    from ctxext.hub.checkpoint import checkpoint_folder, extended_json, planned_as_saved, read_config
    from ctxext.models.text_config import text_config_of

    record, model, command = None, common.folder_of(model), "ctxext extend"
    with common.without_garbage_collection():
        if Path(model).is_file() and Path(model).suffix != ".safetensors":
            config, command = context_of_gguf(model), "ctxext export"
        else:
            folder = checkpoint_folder(model, revision, config_only=True)
            config, record = read_config(folder), read_record(folder)
    if record is not None:  # as in ctxext.load
        planned_as_saved(config, record).apply_to(text_config_of(config))
    # An extension with extension metadata is not in the config.
    planned = None if record is None else lambda **how: extended_json(folder, **how)[0]
    model_is: dict[str, Any] = {
        "original_max_position_embeddings": original_max_position_embeddings,
        "existing": existing,
    }
    if not EXISTING.holds(existing):
        raise ValueError(f"--existing must be {EXISTING.words}, got {existing!r}.")
    asked = {"factor": factor, "target_length": target_length, "method": method, **common.parse_options(option)}
    plan = planned or partial(plan_extension, config)
    try:
        plan(**model_is)
    except ValueError:  # the model's, which its description says
        pass
    else:
        plan(**model_is, **asked)  # an error is in the arguments
    description = describe(config, **asked, planned=planned, **model_is)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in description.rows():
        table.add_row(label.replace("extend_context", command), common.in_flags(value))
    Console().print(table, highlight=False)

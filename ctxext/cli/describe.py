"""`ctxext describe`: a model's context, and what extending it would do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ctxext.cli import common
from ctxext.extension.method_file import check_writable
from ctxext.models.metadata import EXISTING
from ctxext.utils.extras import require

if TYPE_CHECKING:
    from ctxext.core.plan import Plan


def describe(
    model: common.Model,
    factor: common.Factor = None,
    target_length: common.TargetLength = None,
    method: common.Method = None,
    option: common.Options = None,
    original_max_position_embeddings: common.TrainedLength = None,
    existing: common.HowExisting = "refuse",
    revision: common.Revision = None,
    plot: Annotated[
        bool,
        typer.Option(
            "--plot",
            help="Draw the turns of each pair, before and after; of a method that remaps positions, the distances.",
        ),
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="The same as a PNG or SVG file.")] = None,
) -> None:
    """Print the context length and position encoding of a checkpoint or GGUF file, and what extending it would do.

    Reads only the config or the file's metadata.
    """
    if figure is not None:
        require("eval")
        if figure.suffix not in (".png", ".svg"):
            raise ValueError(f"--figure must end in .png or .svg, got {figure}.")
        check_writable(figure)
    from ctxext.export.gguf import context_of_gguf
    from ctxext.extension.describe import describe
    from ctxext.extension.distances import Distances
    from ctxext.extension.metadata_file import read_record
    from ctxext.extension.pairs import turns_in_use
    from ctxext.extension.request import plan_extension
    from ctxext.hub.checkpoint import checkpoint_folder, extended_json, planned_as_saved, read_config
    from ctxext.models.context import has_rope, read_context
    from ctxext.models.text_config import text_config_of

    record, saved, model, command = None, None, common.folder_of(model), "ctxext extend"
    with common.without_garbage_collection():
        if Path(model).is_file() and Path(model).suffix != ".safetensors":
            config, command = context_of_gguf(model), "ctxext export"
        else:
            folder = checkpoint_folder(model, revision, config_only=True)
            config, record = read_config(folder), read_record(folder)
    if record is not None:  # as in ctxext.load
        saved = planned_as_saved(config, record)
        saved.apply_to(text_config_of(config))
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
    if plot or figure is not None:
        as_it_is = existing == "refuse" and all(value is None for value in asked.values())
        facts = read_context(config) if as_it_is and has_rope(text_config_of(config)) else None
        found: list[Any]
        if as_it_is and saved is not None:
            found = _charts(saved)
        elif facts is not None and facts.is_scaled:
            found = turns_in_use(facts)
        else:
            found = _charts(plan(**model_is, **asked))
        for chart in found if plot else ():
            Console().print("", *chart.chart(), sep="\n", highlight=False, markup=False)
        if figure is not None:
            from ctxext.evals.plots import plot_distances, plot_pairs

            draw: Any = plot_distances if isinstance(found[0], Distances) else plot_pairs
            draw(found, figure)
            common.say(f"Wrote {figure}.")


def _charts(plan: Plan) -> list[Any]:
    from ctxext.core.plan import ENCODINGS
    from ctxext.extension.distances import distances_of
    from ctxext.extension.pairs import pair_turns
    from ctxext.extension.rope import RopePlan

    if not isinstance(plan, RopePlan):
        raise ValueError(
            "--plot and --figure draw the frequencies of rotary position embeddings, and this model has "
            f"{ENCODINGS[plan.encoding]}. Leave them out."
        )
    remapped = distances_of(plan)
    return pair_turns(plan) if remapped is None else [remapped]

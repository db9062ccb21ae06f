"""`ctxext fit`: the rescale factors that belong to one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli import measuring
from ctxext.cli.common import Factor, Model, Revision, TargetLength, TrainedLength, console, name_of, say_written
from ctxext.utils.values import counted

if TYPE_CHECKING:
    from rich.table import Table

    from ctxext.extension.method_file import SavedMethod


def fit(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: a method for --method.")],
    factor: Factor = None,
    target_length: TargetLength = None,
    by: Annotated[str, typer.Option(help="gradient, or evolution (LongRoPE's search).")] = "gradient",
    text: Annotated[Path | None, typer.Option(help="Prose to fit on; Persuasion if not given.")] = None,
    evaluations: Annotated[
        int | None,
        typer.Option(help="By gradient: of the loss, 8 if not given.  By evolution: end after so many candidates."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Texts with a hidden key that an evaluation reads; by the length if not given.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="End after that time at the latest.")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="Begin with yarn, llama3 or a ramp between two numbers of turns within the trained length: "
            "ramp_0.25_1, ramp_0.5_1, ramp_0.5_2 or ramp_1_2; the best of all if not given."
        ),
    ] = None,
    retrieval: Annotated[
        float | None, typer.Option(help="Weight of hidden keys against text; 2.0 if not given.")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="What the search makes small: perplexity, needle_perplexity, key_tokens or passkey.  "
            "Default: perplexity."
        ),
    ] = None,
    short_limit: Annotated[
        float | None,
        typer.Option(help="What the search may lose on text of the trained length, as a share; 0.01 if not given."),
    ] = None,
    windows: Annotated[
        int | None, typer.Option(help="Texts that the search reads under each candidate; 2 if not given.")
    ] = None,
    search: Annotated[Path | None, typer.Option(help="Where the search keeps its scores, to go on from.")] = None,
    original_max_position_embeddings: TrainedLength = None,
    style: measuring.PromptStyle = None,
    dtype: measuring.Dtype = "auto",
    device: measuring.Device = None,
    seed: measuring.Seed = 0,
    revision: Revision = None,
) -> None:
    """Find the rescale factors and the attention factor that serve this model best. No weight changes."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ctxext.assets import PERSUASION
    from ctxext.evals.haystack import read_prose
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.targets import LiveModel
    from ctxext.extension.method_file import check_method_file
    from ctxext.fitting.evolution import EvolutionSettings
    from ctxext.fitting.fit import fit as run
    from ctxext.fitting.gradient import GradientSettings
    from ctxext.fitting.objectives import Objective
    from ctxext.hub.checkpoint import check_not_extended, checkpoint_folder
    from ctxext.utils.processes import Processes

    if by not in ("gradient", "evolution"):
        raise typer.BadParameter(f"--by takes gradient or evolution, got {by!r}.")
    check_method_file(output)
    descent = {"rows": rows, "start": start, "retrieval": retrieval}
    aim: dict[str, Any] = {"objective": objective, "short_limit": short_limit, "windows": windows}
    others = {**aim, "search": search} if by == "gradient" else descent
    wrong = [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]
    if wrong:
        raise typer.BadParameter(f"{', '.join(wrong)} does not go with --by {by}.")
    settings: GradientSettings | EvolutionSettings
    if by == "gradient":
        settings = GradientSettings(minutes=minutes, seed=seed, **_given({**descent, "evaluations": evaluations}))
    else:
        settings = EvolutionSettings(minutes=minutes, evaluations=evaluations, seed=seed)
    aim["name"] = aim.pop("objective")
    chosen = Objective(seed=seed, **_given(aim))
    here, path = Processes.here(), text or PERSUASION
    prose = read_prose(path)
    folder = checkpoint_folder(model, revision)
    check_not_extended(folder)
    loaded, tokenizer = measuring.load(folder, dtype, device, bare=True)
    target = LiveModel(loaded, Prompter(tokenizer, style), name_of(model), original_max_position_embeddings)  # type: ignore[arg-type]
    target = measuring.asked_for_passkeys(target, prose, seed, free=style is None, quiet=here.rank > 0)
    columns = (TextColumn("fitting"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=here.rank > 0) as progress:
        bar = progress.add_task("", total=1.0)
        saved = run(
            loaded,
            target.prompter,
            prose,
            factor,
            target_length=target_length,
            original_max_position_embeddings=original_max_position_embeddings,
            settings=settings,
            objective=chosen,
            memory=search,
            names=(target.name, path.name),
            advance=lambda share, state: progress.update(bar, completed=share, description=state),
            processes=here,
        )
    saved.about["control"] = target.about["control"]
    if here.rank == 0:
        saved.save(output)
        console.print(fit_table(saved))
        if saved.about.get("kept_start"):
            start = saved.about["start"]
            console.print(f"What was learned is no better than {start} on text that was not read: {start} is kept.")
        say_written(output, model, revision, original_max_position_embeddings)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def fit_table(saved: SavedMethod) -> Table:
    """What was tried, and what came of it."""
    from rich.table import Table

    about = saved.about
    if about["by"] == "gradient":
        titles = {
            "short": "change within the trained length (nats a token)",
            "text": "loss of longer text (nats a token)",
            "key": "loss of a hidden key (nats)",
        }
        rows, where = about["losses"], "text that was not learned from"
    else:
        titles = {"value": f"{about['objective']['name']} (nats)", "short": "more loss within the trained length"}
        rows, where = about["scores"], f"{counted(about['evaluations'], 'candidate')} on one text"
    table = Table(
        title=f"{about['trained_length']:,} to {about['target_length']:,} tokens: {where}", title_justify="left"
    )
    table.add_column("method")
    for title in titles.values():
        table.add_column(title, justify="right", max_width=24)
    for name, losses in rows.items():
        cells = [
            f"{losses[kind]:+.2%}" if kind == "short" and "value" in titles else f"{losses[kind]:.4f}"
            for kind in titles
        ]
        table.add_row(name, *cells, style="bold" if name == "fitted" else None)
    return table

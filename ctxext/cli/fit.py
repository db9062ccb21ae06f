"""`ctxext fit`: fit rescale factors to one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxext.cli import measuring
from ctxext.cli.common import Factor, Model, Revision, TargetLength, TrainedLength, console, name_of, say, say_written
from ctxext.utils.extras import require

if TYPE_CHECKING:
    from rich.table import Table

    from ctxext.evals.haystack import Haystack
    from ctxext.evals.targets import LiveModel
    from ctxext.extension.method_file import SavedMethod
    from ctxext.fitting.gradient import GradientSettings
    from ctxext.fitting.longrope2 import LongRoPE2Settings


def fit(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The method file to write, for --method.")],
    factor: Factor = None,
    target_length: TargetLength = None,
    text: Annotated[Path | None, typer.Option(help="Prose to fit on. Default: *Persuasion*.")] = None,
    by: Annotated[
        str,
        typer.Option(
            help="`gradient`, or `longrope2`: LongRoPE2's evolutionary search for the factors and the critical "
            "dimension, by the passkey loss alone."
        ),
    ] = "gradient",
    evaluations: Annotated[
        int | None,
        typer.Option(
            help="How often the loss and its gradient are computed (default: 8), or the number of candidates of "
            "`longrope2` (default: 40). More takes longer."
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Passkey texts per evaluation. Default: by the length.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Time limit in minutes.")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="Start from yarn, llama3 or a ramp between two numbers of rotations within the trained length: "
            "ramp_0.25_1, ramp_0.5_1, ramp_0.5_2 or ramp_1_2. Default: the best of all. For `gradient` only."
        ),
    ] = None,
    retrieval: Annotated[
        float | None,
        typer.Option(help="Weight of the passkey loss relative to the text loss. Default: 2. For `gradient` only."),
    ] = None,
    original_max_position_embeddings: TrainedLength = None,
    style: measuring.PromptStyle = None,
    dtype: measuring.Dtype = "auto",
    device: measuring.Device = None,
    seed: measuring.Seed = 0,
    revision: Revision = None,
) -> None:
    """Learn or search the RoPE rescale factors that suit one model. Its weights do not change."""
    require("eval")
    from ctxext.assets import PERSUASION
    from ctxext.evals.haystack import Haystack, read_prose
    from ctxext.evals.loading import load
    from ctxext.evals.needle import Passkey
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.runner import Grid
    from ctxext.evals.screen import asked_as_it_answers, share_bar
    from ctxext.evals.targets import LiveModel
    from ctxext.extension.method_file import check_method_file
    from ctxext.fitting.fit import fit as run
    from ctxext.fitting.gradient import GradientSettings
    from ctxext.fitting.longrope2 import LongRoPE2Settings
    from ctxext.hub.checkpoint import check_not_extended, checkpoint_folder, read_config
    from ctxext.models.context import has_rope, read_context
    from ctxext.models.text_config import text_config_of
    from ctxext.utils.processes import Processes
    from ctxext.utils.values import suggest

    check_method_file(output)
    chosen = {"evaluations": evaluations, "rows": rows, "start": start, "retrieval": retrieval}
    given = {name: value for name, value in chosen.items() if value is not None}
    kinds: dict[str, Any] = {kind.by: kind for kind in (GradientSettings, LongRoPE2Settings)}
    if by not in kinds:
        raise ValueError(f"a fit cannot be made by {by!r}{suggest(by, kinds)}")
    for name in given:
        if name not in kinds[by].__dataclass_fields__:
            raise ValueError(f"--{name} is for --by gradient, got --by {by}. Drop --{name}.")
    settings = kinds[by](minutes=minutes, seed=seed, **given)
    here, path = Processes.here(), text or PERSUASION
    prose = read_prose(path)
    folder = checkpoint_folder(model, revision)
    check_not_extended(folder)
    config = read_config(folder)
    if has_rope(text_config_of(config)) and read_context(config).is_scaled:
        raise ValueError(f"{model} is already extended. Pass the original checkpoint.")
    loaded, tokenizer = load(folder, dtype, device, bare=True)
    target = LiveModel(loaded, Prompter(tokenizer, style), name_of(model), original_max_position_embeddings)  # type: ignore[arg-type]
    haystack = Haystack.from_text(prose, tokenizer, name=path.name)
    grid = Grid(retrieval=(Passkey(),), lengths=(target.about["trained_length"],), seed=seed)
    if here.rank == 0:
        plan_of_fit(target, settings, factor, target_length, haystack, here.world)
    try:
        # Only forms whose answers can be scored by teacher forcing.
        target = asked_as_it_answers(target, grid, haystack, free=style is None, begun=True, quiet=here.rank > 0)
        with share_bar("fitting", quiet=here.rank > 0) as advance:
            saved = run(
                loaded,
                target.prompter,
                prose,
                factor,
                target_length=target_length,
                original_max_position_embeddings=original_max_position_embeddings,
                settings=settings,
                names=(target.name, path.name),
                advance=advance,
                processes=here,
            )
    except KeyboardInterrupt:
        say(f"A fit does not resume: {output} was not written.")
        raise
    saved.about["control"] = target.about["control"]
    if here.rank == 0:
        saved.save(output)
        console.print(fit_table(saved))
        if by == "longrope2":
            dimension, theoretical = (saved.about[f"{kind}critical_dimension"] for kind in ("", "theoretical_"))
            say(f"Critical dimension: {dimension}, {theoretical} in theory.")
        if saved.about.get("kept_start"):
            start = saved.about["start"]
            say(f"The fitted factors are no better than {start} on held-out text, so {start} itself is saved.")
        say_written(output, model, revision, original_max_position_embeddings)


def plan_of_fit(
    target: LiveModel,
    settings: GradientSettings | LongRoPE2Settings,
    factor: float | None,
    target_length: int | None,
    haystack: Haystack,
    processes: int,
) -> None:
    """Print what the fit will read, and how long one timed pass lets expect."""
    from ctxext.core.plan import factor_and_target
    from ctxext.evals.workload import Speed
    from ctxext.training.estimate import duration
    from ctxext.utils.values import counted

    trained = target.about["trained_length"]
    length = factor_and_target(factor, target_length, "longrope", trained)[1]
    tokens, speed = settings.tokens(trained, length), Speed.measured(target, haystack.token_ids)
    seconds = tokens / length * speed.reading(length) / processes
    limit = f", at most {settings.minutes:g} min" if settings.minutes else ""
    rows = counted(settings.rows_at(length), "text")
    backward = "; a backward pass counts as two forward passes" if settings.by == "gradient" else ""
    pace = f"{speed.n_tokens:,} tokens took {speed.found.prefill:.2g} s"
    say(f"plan: up to {counted(settings.evaluations, 'evaluation')} of {rows} of {length:,} tokens, by {settings.by}")
    say(f"  {counted(tokens, 'token')} to read{backward}")
    say(f"  about {duration(seconds)} on this machine{limit}: {pace}")


def fit_table(saved: SavedMethod) -> Table:
    """A table of the starts tried and their losses."""
    from rich.table import Table

    about = saved.about
    titles = {
        "short": "change within the trained length (nats/token)",
        "text": "loss on longer text (nats/token)",
        "key": "passkey loss (nats)",
        "total": "objective (lower is better)",
    }
    lengths = f"{about['trained_length']:,} to {about['target_length']:,} tokens"
    table = Table(title=f"{lengths}, on held-out text", title_justify="left")
    table.add_column("method")
    for title in titles.values():
        table.add_column(title, justify="right", max_width=24)
    for name, losses in about["losses"].items():
        cells = [f"{losses[kind]:.4f}" for kind in titles]
        table.add_row(name, *cells, style="bold" if name == "fitted" else None)
    return table

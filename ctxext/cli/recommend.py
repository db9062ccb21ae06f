"""`ctxext recommend`: find the best method for a model at a length, within a time limit."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxext.cli import measuring
from ctxext.cli.common import (
    Factor,
    HowExisting,
    Model,
    Revision,
    TargetLength,
    TrainedLength,
    console,
    in_flags,
    name_of,
    say_written,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ctxext.fitting.recommend import Recommended


def recommend(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: a method for --method.")] = Path(
        "extension.json"
    ),
    factor: Factor = None,
    target_length: TargetLength = None,
    minutes: Annotated[float, typer.Option(help="What the whole command may take.")] = 10.0,
    text: Annotated[Path | None, typer.Option(help="Prose to fit and to measure on. Default: Persuasion.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Comma-separated names or files. Default: those that need neither training nor options."),
    ] = None,
    no_fit: Annotated[bool, typer.Option("--no-fit", help="Fit no rescale factors to the model.")] = False,
    portable: Annotated[
        bool,
        typer.Option("--portable", help="Only what a saved config can say: plain transformers and servers run it."),
    ] = False,
    results: Annotated[
        Path | None, typer.Option(help="Keep the samples in this new file, for `ctxext report`.")
    ] = None,
    original_max_position_embeddings: TrainedLength = None,
    existing: HowExisting = "refuse",
    style: measuring.PromptStyle = None,
    dtype: measuring.Dtype = "auto",
    device: measuring.Device = None,
    seed: measuring.Seed = 0,
    revision: Revision = None,
) -> None:
    """Try what could extend this model, within `--minutes`; say what to use and why, and write it."""
    began = time.perf_counter()
    from rich.progress import BarColumn, Progress, TextColumn

    from ctxext.assets import PERSUASION
    from ctxext.evals.haystack import read_prose
    from ctxext.evals.loading import known_by, load
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.screen import asked_for_passkeys
    from ctxext.evals.targets import LiveModel
    from ctxext.extension.method_file import check_method_file
    from ctxext.fitting.recommend import recommend as run
    from ctxext.hub.checkpoint import check_not_extended, checkpoint_folder
    from ctxext.utils.processes import Processes

    check_method_file(output)
    if Processes.here().world > 1:
        raise ValueError("recommend runs in one process. Start it without accelerate; --device auto spreads a model.")
    folder = checkpoint_folder(model, revision)
    check_not_extended(folder, existing)
    loaded, tokenizer = load(folder, dtype, device, bare=True)
    path = text or PERSUASION
    prose, name, trained = read_prose(path), name_of(model), original_max_position_embeddings
    target = asked_for_passkeys(
        LiveModel(loaded, Prompter(tokenizer, style), name, trained),  # type: ignore[arg-type]
        prose,
        seed,
        free=style is None,
    )
    about = {"control": target.about["control"]}

    with (
        tempfile.TemporaryDirectory() as scratch,
        Progress(BarColumn(), TextColumn("{task.fields[left]} left"), TextColumn("{task.description}"),
                 console=console) as progress,
    ):  # fmt: skip
        bar = progress.add_task("", total=1.0, left="")

        def advance(share: float, state: str) -> None:
            left = max(0, round(60 * minutes * (1 - share)))
            progress.update(bar, completed=share, description=state, left=f"{left // 60}:{left % 60:02}")

        found = run(
            loaded,
            target.prompter,
            prose,
            factor,
            minutes=minutes,
            results=results or Path(scratch) / "results.jsonl",
            target_length=target_length,
            methods=[name.strip() for name in methods.split(",")] if methods else None,
            fitted=not no_fit,
            portable=portable,
            original_max_position_embeddings=original_max_position_embeddings,
            existing=existing,
            names=(name, path.name),
            about=known_by(folder) | about,
            seed=seed,
            began=began,
            advance=advance,
        )
    print_recommended(found)
    found.saved.about.update(about)
    found.saved.save(output)
    say_written(output, model, revision, original_max_position_embeddings, existing)


def print_recommended(found: Recommended) -> None:
    """Print the candidates, the reasons, memory and speed, and what was left out."""
    from rich.console import Console

    screen = Console()
    screen.print(recommended_table(found))
    screen.print(found.why, highlight=False, markup=False)
    target = found.summary.beyond[-1]
    size = found.kv_cache_bytes / 2**20
    dtype = found.summary.header.identity["dtype"]
    screen.print(f"Memory at {target:,} tokens: {size:,.1f} MiB of keys and values a sequence in {dtype}.")
    said = [
        f"{name if name == found.variant else 'baseline'} reads {speed.prefill:,.0f} tokens a second and writes "
        f"one in {speed.decode:.1f} ms"
        for name, speed in found.speed.items()
    ]
    screen.print(f"Speed there: {'; '.join(said)}.", highlight=False)
    if found.text_used_up:
        console.print("The text was used up before the time was: a longer --text would tell more.")
    for name, reason in found.left_out.items():
        console.print(f"{name} was left out: {in_flags(reason)}", highlight=False, markup=False, soft_wrap=True)


def recommended_table(found: Recommended) -> Table:
    """One row per candidate, best first; differences to the chosen one are on common texts."""
    from rich import box
    from rich.table import Table

    from ctxext.evals.choice import beyond_difference, by_measurement, found_share, short_regression
    from ctxext.evals.statistics import in_percent

    summary, target = found.summary, found.summary.beyond[-1]
    table = Table(
        title=f"{found.saved.about['model']}, {target:,} tokens from {summary.trained_length:,}",
        title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
        caption="found: of passkeys beyond the trained length, 95% intervals; points and nats: against the chosen "
        f"one on its texts, nats a token over windows of {target:,}; regression: more loss than the baseline within "
        "the trained length, nats a token",
        caption_justify="left",
    )  # fmt: skip
    table.add_column("method", no_wrap=True)
    for title in ("texts", "found", "points", "nats", "regression", "loads in"):
        table.add_column(title, justify="right", no_wrap=True)
    candidates = [variant for variant in found.texts if variant in summary.variants and variant != "none"]
    order = sorted(by_measurement(summary, candidates), key=lambda v: v != found.variant)
    for variant in order:
        share = found_share(summary, variant)
        chosen = variant == found.variant
        points = None if chosen else beyond_difference(summary, variant, found.variant)
        loss = None if chosen else summary.loss_difference(variant, found.variant, target)
        table.add_row(
            variant,
            str(found.texts[variant]),
            ""
            if share is None
            else f"{in_percent(share.value)}% [dim]{in_percent(share.low)}–{in_percent(share.high)}[/]",
            "" if points is None else f"{100 * points.value:+.1f}",
            "" if loss is None else f"{loss.value:+.3f}",
            f"{short_regression(summary, variant):+.3f}",
            "transformers" if variant in summary.portable else "ctxext.load",
            style="bold" if chosen else None,
        )
    return table

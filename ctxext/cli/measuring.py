"""What `eval`, `compare` and `demo` share: loading, settings, the progress bar, and the table at the end."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ctxext.cli.common import console, parse_tokens
from ctxext.utils.values import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ctxext.evals.haystack import Haystack
    from ctxext.evals.results import Results
    from ctxext.evals.runner import Grid, Runner
    from ctxext.evals.summary import Summary
    from ctxext.evals.targets import LiveModel, Variant

# The tasks that need the model's losses.
READING = ("perplexity", "sliding_perplexity", "key_tokens", "short")

RESULTS = "The results file. A run that was stopped resumes; while one writes to the file, a second is refused."
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")

# ------------------------------------------------------------------------------- what people write

Tasks = Annotated[
    str,
    typer.Option(
        help="Comma-separated: passkey, needle, needles, needle_distractors, ruler or one of its 13 tasks, "
        "perplexity, sliding_perplexity, key_tokens, short."
    ),
]
Lengths = Annotated[str | None, typer.Option(help="Comma-separated lengths in tokens, such as 8k,32k.")]
Depths = Annotated[
    str, typer.Option(help="How many depths from 0 to 1, or the depths themselves, such as 0.1,0.5,0.9.")
]
Trials = Annotated[int, typer.Option(help="Samples for each length and depth: 10 for a map, 50 and more for a claim.")]
Windows = Annotated[int, typer.Option(help="Windows of text for perplexity and `short`.")]
Text = Annotated[
    str | None,
    typer.Option("--haystack", help="A text file, or `filler` for repeated filler. Default: *Persuasion*."),
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--setting", metavar="TASK.NAME=VALUE", help="A setting of a task, such as needle.distractors=3."),
]
PromptStyle = Annotated[
    str | None, typer.Option("--style", help="base, chat or thinking. Default: chat where there is a chat template.")
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(help="Leave at least this many tokens for an answer in the model's own words, and generate it."),
]
Generate = Annotated[
    bool, typer.Option("--generate", help="Generate every answer, also where teacher forcing would do.")
]
BatchSize = Annotated[int | None, typer.Option(help="Trials side by side. Default: what fits in 8,192 tokens.")]
Seed = Annotated[int, typer.Option(help="Of the texts, places and numbers: another seed, other samples.")]
Dtype = Annotated[
    str, typer.Option(help=f"One of {', '.join(DTYPES)}; auto is float32 on a CPU, otherwise the checkpoint's own.")
]
Device = Annotated[str | None, typer.Option(help="Such as cuda:1 or cpu; `auto` spreads a model over all GPUs.")]


def parse_lengths(text: str) -> tuple[int, ...]:
    return tuple(sorted({parse_tokens(part) for part in text.split(",")}))


def parse_depths(text: str) -> tuple[float, ...]:
    """`11` as eleven depths from 0 to 1, or `0.1,0.5` as they are."""
    try:
        if "," not in text and "." not in text:
            n = int(text)
            if n < 1:
                raise ValueError
            return tuple(k / (n - 1) for k in range(n)) if n > 1 else (0.5,)
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"{text!r} are no depths; write how many (11), or 0.1,0.5,0.9.") from None


def parse_settings(pairs: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """`["needle.distractors=3"]` as settings by task."""
    from ctxext.cli.common import parse_pairs

    settings: dict[str, dict[str, Any]] = {}
    for name, value in parse_pairs(pairs).items():
        task, dot, setting = name.partition(".")
        if not dot:
            raise typer.BadParameter(f"{name!r} is no setting; write TASK.NAME=VALUE, such as needle.distractors=3.")
        settings.setdefault(task, {})[setting] = value
    return settings


# --------------------------------------------------------------------------------- the measurement


def load(
    folder: Path, dtype: str = "auto", device: str | None = None, *, bare: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a checkpoint, ready to be read with.

    Args:
        bare: leave out the extension that `context_extension.json` in the folder says.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from ctxext.evals.targets import check_causal, check_continues_text
    from ctxext.hub.checkpoint import extended_as_saved, read_config, saved_extension

    logging.disable_progress_bar()
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device {device!r} is not there: this torch sees no CUDA GPU. Leave --device out, or pass cpu."
        )
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}. Pass one of {', '.join(DTYPES)}.")
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    check_continues_text(read_config(folder))
    extension = None if bare else saved_extension(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device if device != "cpu" else None)
    check_causal(model.eval())
    return extended_as_saved(model, extension), tokenizer


def known_by(folder: Path) -> dict[str, Any]:
    """What a card is matched by that is to show results: the weights of a checkpoint, and how it is extended itself."""
    from ctxext.extension.metadata_file import weights_fingerprint
    from ctxext.hub.checkpoint import method_of

    about: dict[str, Any] = {}
    with suppress(ValueError):  # no safetensors
        about["weights"] = weights_fingerprint(folder)
    with suppress(ValueError):  # a method of another program
        method = method_of(folder)
        if method is not None:
            about["method"] = method.to_dict()
    return about


def load_text(choice: str | None, tokenizer: PreTrainedTokenizerBase, at_least: int) -> Haystack:
    """The text by what people write for it, repeated until it has `at_least` tokens."""
    from ctxext.assets import PERSUASION
    from ctxext.evals.haystack import FILLER, Haystack

    if choice == "filler":
        return Haystack.from_text(FILLER * 200, tokenizer, at_least=at_least, name="filler")
    path = PERSUASION if choice is None else Path(choice)
    haystack = Haystack.from_file(path, tokenizer, at_least=at_least)
    if haystack.repeats > 1:
        console.print(
            f"note: {haystack.name} has {haystack.n_tokens:,} tokens; prompts of {at_least:,} repeat it. "
            "Give a longer text with --haystack.",
            highlight=False,
        )
    return haystack


def asked_as_it_answers(
    target: LiveModel,
    grid: Grid,
    text: Haystack,
    path: Path | None = None,
    *,
    free: bool = True,
    begun: bool = False,
    quiet: bool = False,
) -> LiveModel:
    """The model, asked in the form in which its baseline does the retrieval tasks; says so where that is another.

    Args:
        path: the results file, with what an interrupted run found.
        free: whether the form may change; not where the user chose it, nor where the file has results in it.
        begun: only forms whose answers teacher forcing can score.
        quiet: on all processes but the first.
    """
    from ctxext.evals.control import Control, control, controlled, other_forms
    from ctxext.evals.results import read_results

    if not controlled(grid.retrieval):
        return target
    known = None
    with suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or broken: the run says so
        known = path and Control.of_header(read_results(path).header.about)
    if free and known is not None:  # the file holds answers in that form
        target, free = target.asking(known.form.prompter(target.prompter.tokenizer)), False
    found = control(
        target,
        grid.retrieval,
        text,
        longest=max(grid.lengths),
        others=other_forms(target.prompter, begun=begun) if free else [],
        seed=grid.seed,
        known=known,
    )
    if not quiet and (said := found.said()):
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    target = target.asking(found.form.prompter(target.prompter.tokenizer))
    target.about |= {"control": found.describe()}
    return target


def asked_for_passkeys(target: LiveModel, prose: str, seed: int, *, free: bool, quiet: bool = False) -> LiveModel:
    """The model, asked in the form in which its baseline finds passkeys, of those that teacher forcing can score."""
    from ctxext.evals.haystack import Haystack
    from ctxext.evals.needle import Passkey
    from ctxext.evals.runner import Grid

    grid = Grid(retrieval=(Passkey(),), lengths=(target.about["trained_length"],), seed=seed)
    text = Haystack.from_text(prose, target.prompter.tokenizer)
    return asked_as_it_answers(target, grid, text, free=free, begun=True, quiet=quiet)


def run(runner: Runner, path: Path, variants: Sequence[Variant], *, merge: bool = True) -> Results | None:
    """Measure, with a progress bar on the first process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _progress(runner, runner.count(variants)):
            return runner.run(path, variants, merge=merge)
    except BaseException as error:
        # After a refusal the same command would be refused again.
        if not isinstance(error, ValueError) and list(path.parent.glob(f"{path.name}.part-*")):
            console.print(
                f"What was measured is kept beside {path}; the same command goes on from there.", soft_wrap=True
            )
        raise


@contextmanager
def _progress(runner: Runner, total: int) -> Iterator[None]:
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=runner.processes.rank > 0) as progress:
        bar = progress.add_task("", total=total)
        runner.advance = lambda name, samples: progress.update(bar, advance=samples, description=name)
        yield


def make_grid(
    tasks: str,
    *,
    settings: Sequence[str] | None = None,
    trained_length: int,
    **grid: Any,
) -> Grid:
    """The grid of comma-separated tasks; `short` measures all of them within the trained length too."""
    from ctxext.evals.perplexity import KeyTokens, Perplexity, SlidingPerplexity
    from ctxext.evals.ruler import RULER
    from ctxext.evals.runner import Grid
    from ctxext.evals.samples import list_tasks, make_task
    from ctxext.utils.values import suggest

    texts = {
        "perplexity": Perplexity,
        "sliding_perplexity": SlidingPerplexity,
        "key_tokens": lambda **more: KeyTokens(**{"long": trained_length, "short": trained_length // 8, **more}),
    }
    retrieval = list_tasks()
    names = [n for name in tasks.split(",") for n in (RULER if name.strip() == "ruler" else [name.strip()])]
    of_task = parse_settings(settings)
    known = [*retrieval, *texts, "short", "ruler"]
    for name in (*names, *of_task):
        if name not in known:
            raise ValueError(f"unknown task {name!r}{suggest(name, known)}")

    for name in of_task:
        if name not in names and not (name == "ruler" and {*names} & {*RULER}):
            raise ValueError(f"{name} has a --setting but is not measured. Add it to --tasks, or drop the setting.")

    def made(make: Any, name: str) -> Any:
        chosen = {**(of_task.get("ruler", {}) if name in RULER else {}), **of_task.get(name, {})}
        plain = make()
        usual = {field.name: getattr(plain, field.name) for field in fields(plain) if field.name != "name"}
        for setting, value in chosen.items():
            if setting not in usual:
                raise ValueError(f"unknown setting {setting!r} of {name}{suggest(setting, usual)}")
            kind = type(usual[setting])
            if usual[setting] is not None and not isinstance(value, (int, float) if kind is float else kind):
                raise ValueError(f"{name}.{setting} is such as {usual[setting]!r}, got {value!r}.")
        return make(**chosen)

    if "key_tokens" in names and "perplexity" not in names:
        raise ValueError("key_tokens says which tokens to look at, perplexity reads them. Ask for both.")
    begun = {name: of_task.get(name, {}).get("bos", True) for name in ("key_tokens", "perplexity") if name in names}
    if len(set(begun.values())) > 1:
        raise ValueError("key_tokens looks at the tokens that perplexity reads. Set bos of both, or of neither.")
    return Grid(
        retrieval=tuple(
            made(lambda name=name, **more: make_task(name, **more), name) for name in names if name in retrieval
        ),
        texts=tuple(made(texts[name], name) for name in names if name in texts),
        gate=(min(trained_length, 4096),) if "short" in names else (),
        **grid,
    )


# -------------------------------------------------------------------------------------- the table


def print_summary(summary: Summary) -> None:
    """The tables on standard output, and the recommendation if there was something to choose."""
    screen = Console()
    tables = [summary_table(summary)]
    if len(summary.retrieval_tasks) > 2:
        tables += [task_table(summary, variant) for variant in summary.variants]
    for table in tables:
        screen.print(*_fitting(table, screen), sep="")
    if len(summary.variants) > 1:
        screen.print(summary.recommendation().text, highlight=False, markup=False)


def finish(results: Results, path: Path) -> None:
    """What stands at the end of a measurement: the tables, and where its samples are."""
    from ctxext.evals.summary import Summary

    print_summary(Summary(results))
    said = f"{counted(len(results.records), 'sample')} in {path}; ctxext report {path} makes a page of them."
    console.print(said, soft_wrap=True)


def summary_table(summary: Summary) -> Table:
    """A row a variant: retrieval with its interval, perplexity, the price at short length."""
    from ctxext.evals.summary import label
    from ctxext.evals.targets import UNEXTENDED

    model = next(iter(summary.header.variants.values()))["model"]
    table = _table(f"{model}, trained at {summary.trained_length:,} tokens", "variant")

    def column(*lines: str) -> None:
        table.add_column("\n".join(lines), justify="right", no_wrap=True)

    tasks, read, sliding = summary.retrieval_tasks, summary.read_lengths, summary.lengths("sliding_perplexity")
    # Many tasks have a table of their own; here is the mean of those that count.
    groups = [[task] for task in tasks] if len(tasks) <= 2 else [summary.deciding_tasks]
    for group in groups:
        for length in summary.lengths(*group):
            column(summary.titled(group[0]) if len(group) == 1 else f"{len(group)} tasks", f"at {length:,}")
    for length in read:
        column("ppl to", f"{length:,}")
    for length in sliding:
        column("ppl of", f"{length:,}")
    of_bytes = read if len(summary.variants) <= 2 else []
    if of_bytes:
        column("bits per", "byte")
    key = next((found[1] for variant in summary.variants if (found := summary.key_tokens(variant))), 0)
    if key:
        column("ppl of", "keys")
    gates = {variant: summary.gate(variant) for variant in summary.variants}
    gated = any(gate.loss for name, gate in gates.items() if name != UNEXTENDED)
    if gated:
        column("price", "(nats)")
    for variant in summary.variants:
        row = [label(variant)]
        for group in groups:
            row += [_share(summary.pooled(variant, group, [length])) for length in summary.lengths(*group)]
        row += [_number(summary.perplexity(variant, length, after)) for after, length in zip([0, *read], read)]
        row += [_number(summary.perplexity(variant, length, task="sliding_perplexity")) for length in sliding]
        for length in of_bytes[-1:]:
            bits = summary.bits_per_byte(variant, length)
            row.append("" if bits is None else f"{bits:.3f}")
        if key:
            row.append(_number((summary.key_tokens(variant) or (None, 0))[0]))
        if gated:
            loss = gates[variant].loss
            row.append(
                "" if variant == UNEXTENDED or loss is None else f"{loss.value:+.3f}\n[dim]±{_half(loss):.3f}[/]"
            )
        table.add_row(*row)
    table.caption, table.caption_justify = _caption(summary, gated, key), "left"
    return table


def task_table(summary: Summary, variant: str) -> Table:
    """A row a retrieval task, a column a length."""
    from ctxext.evals.summary import label

    lengths = summary.lengths(*summary.retrieval_tasks)
    table = _table(label(variant), "task")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for task in summary.retrieval_tasks:
        shares = summary.by_length(variant, task)
        table.add_row(summary.titled(task), *(_share(shares.get(length), "  ") for length in lengths))
    return table


def _fitting(table: Table, screen: Console) -> Iterator[Table]:
    """The table, as several below each other where it is wider than the screen: no number is cut off."""
    unbounded = screen.options.update(max_width=10_000)
    first, *columns = table.columns
    while columns:
        for n in range(len(columns), 0, -1):
            part = copy(table)
            part.columns = [replace(column, _index=k) for k, column in enumerate([first, *columns[:n]])]
            if Measurement.get(screen, unbounded, part).maximum <= screen.width:
                break
        columns = columns[n:]
        part.caption = None if columns else table.caption
        yield part
        table.title = None


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column(first, no_wrap=True)
    return table


def _share(share: Any, between: str = "\n") -> str:
    from ctxext.evals.statistics import in_percent

    if share is None:
        return ""
    color = "green" if share.value >= 0.7 else "yellow" if share.value >= 0.3 else "red"
    return f"[{color}]{in_percent(share.value)}%[/]{between}[dim]{in_percent(share.low)}–{in_percent(share.high)}[/]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 1e4 else f"{value:.0e}"


def _half(difference: Any) -> float:
    return (difference.high - difference.low) / 2


def _caption(summary: Summary, gated: bool, key: int) -> str:
    said = []
    if tasks := summary.retrieval_tasks:
        shares = [share for v in summary.variants for t in tasks for share in summary.by_length(v, t).values()]
        most = counted(max(share.n for share in shares), "sample")
        said.append(f"retrieval: up to {most} a cell, 95% intervals, each on its own")
    if read := summary.read_lengths:
        said.append("ppl: perplexity from one length to the next" if len(read) > 1 else "ppl: perplexity")
        windows, apart = summary.windows_apart
        if windows > apart:
            said.append(f"the {windows} longest windows overlap and count as {apart}: a longer --haystack tells more")
    if key:
        said.append(f"keys: {counted(key, 'token')} in need of long context, by LongPPL's rule")
    if gated:
        said.append("price: more loss than the baseline within the trained length")
    if summary.cannot_run:
        said.append(f"blank: {summary.cannot_run}")
    return "; ".join(said)


def default_lengths(trained: int, reach: int) -> tuple[int, ...]:
    """The trained length and its doublings up to `reach`."""
    steps = max(1, math.ceil(math.log2(reach / trained)))
    return tuple(sorted({*(trained * 2**k for k in range(steps)), reach}))

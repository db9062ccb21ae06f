"""Terminal output of a measurement: the progress bar, the control's result, and the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ctxext.evals.choice import recommended
from ctxext.evals.control import Control, control, other_forms
from ctxext.evals.cost import figures
from ctxext.evals.haystack import Haystack
from ctxext.evals.results import Results, read_results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.statistics import in_percent
from ctxext.evals.summary import Summary, label
from ctxext.evals.targets import UNEXTENDED, LiveModel, LocalModel, Variant
from ctxext.evals.timed import FIRST, Timed
from ctxext.evals.workload import Speed, Workload, some
from ctxext.utils.screen import console
from ctxext.utils.values import counted

Local = TypeVar("Local", bound=LocalModel)
KEY_TOKENS = 20  # the fewest whose perplexity is shown


def asked_as_it_answers(
    target: Local,
    grid: Grid,
    text: Haystack,
    path: Path | None = None,
    *,
    free: bool = True,
    begun: bool = False,
    quiet: bool = False,
) -> Local:
    """Run the control, and return the model with the prompt form in which its baseline solves the retrieval tasks.

    Args:
        path: the results file, possibly of an interrupted run.
        free: whether the form may change: not if the user chose it, or if the file already has results.
        begun: only forms whose answers can be scored by teacher forcing.
        quiet: print nothing, on all processes but the first.
    """
    tasks = [task for task in grid.retrieval if task.looks_up]
    if not tasks:
        return target
    known: Control | None = None
    with suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or corrupt: the run reports it
        known = Control.of_header(read_results(path).header.about) if path else None
    if free and known is not None:  # the file has answers in that form
        target, free = target.asking(known.form.prompter(target.prompter.tokenizer)), False
    if known is None and not quiet:
        _say(f"control: does the baseline solve {some([task.name for task in tasks])} within its trained length?")
    found = control(
        target,
        tasks,
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


def run_with_bar(
    runner: Runner, path: Path, variants: Sequence[Variant], *, merge: bool = True, planned: bool = False
) -> Results | None:
    """Run the measurement, with a progress bar on the first process, or a line per variant if it has no terminal.

    Args:
        planned: whether the plan was printed already.
    """
    quiet = runner.processes.rank > 0
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    name = TextColumn("{task.description:<14}")
    try:
        runner.check(variants)
        total = {variant.name: runner.count([variant]) for variant in variants}
        if not (quiet or planned):
            print_plan(runner, variants, path)
        with _started_late(
            Progress(name, *columns, console=console, disable=quiet or not console.is_terminal)
        ) as progress:
            bar, done = progress.add_task("", total=sum(total.values())), Counter[str]()

            def advance(name: str, samples: int) -> None:
                progress.start()
                progress.update(bar, advance=samples, description=label(name))
                done[name] += samples
                if samples and done[name] == total[name] and not (quiet or console.is_terminal):
                    _say(f"{label(name)}: {counted(total[name], 'sample')} done")

            runner.advance = advance
            return runner.run(path, variants, merge=merge)
    except BaseException as error:
        if not quiet:
            say_kept(error, path)
        raise


def run_timed(
    runner: Runner, path: Path, variants: Sequence[Variant], minutes: float, speed: Speed, began: float
) -> Results:
    """Run the measurement within a time limit, with a progress bar, and say what there was no time for."""
    try:
        timed = Timed(runner, variants, path, minutes, speed, began=began)
        with share_bar() as timed.advance:
            results = timed.run()
    except BaseException as error:
        say_kept(error, path)
        raise
    for note in timed.notes():
        _say(note)
    return results


def print_plan(runner: Runner, variants: Sequence[Variant], path: Path, minutes: float | None = None) -> Speed | None:
    """Print what the measurement has left to do, and how long one timed pass lets expect.

    Args:
        minutes: its time limit; the plan is then that of the first samples.

    Returns:
        The pass; None for a server, or if nothing is left.
    """
    done: set[tuple[str, str]] = set()
    with suppress(OSError, ValueError):  # none yet, or corrupt: the run reports it
        done = {(record["variant"], record["key"]) for record in read_results(path).records}
    if minutes is None:
        left = Workload(runner, variants, done)
    else:
        left = Workload(runner.narrowed(lambda batch: True, FIRST), variants)
    speed = None
    if left.parts and isinstance(runner.target, LiveModel):
        speed = Speed.measured(runner.target, runner.haystack.token_ids)
    for line in left.said(speed):
        _say(line)
    if minutes is not None:
        _say(f"  then more samples, until {minutes:g} min are over")
    return speed


def say_kept(error: BaseException, path: Path) -> None:
    """Say what a run that ended early has saved, and how to resume."""
    if isinstance(error, ValueError):  # the same command would fail again
        return
    if not list(path.parent.glob(f"{path.name}.part-*")):
        if isinstance(error, KeyboardInterrupt):
            _say("Stopped before the first sample: nothing new was saved.")
        return
    kept = counted(len(read_results(path).records), "sample")
    _say(f"Stopped. {kept} kept beside {path}. To resume, run the same command; ctxext report {path} reads them now.")


@contextmanager
def share_bar(title: str = "", quiet: bool = False) -> Iterator[Callable[[float, str], None]]:
    """A progress bar, or a line per message without a terminal; yields the function that sets share and message."""
    columns = (
        TextColumn(title),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with _started_late(Progress(*columns, console=console, disable=quiet or not console.is_terminal)) as progress:
        bar, said = progress.add_task("", total=1.0), ""

        def advance(share: float, state: str) -> None:
            nonlocal said
            progress.start()
            progress.update(bar, completed=share, description=state)
            if state != said and not (quiet or console.is_terminal):
                _say(f"{title} {round(100 * share)}%: {state}".lstrip())
            said = state

        yield advance


@contextmanager
def _started_late(progress: Progress) -> Iterator[Progress]:
    """A progress bar to be started with the work; a refusal leaves no bar above its error."""
    try:
        yield progress
    except BaseException as error:
        refused = isinstance(error, ValueError) or not any(task.completed for task in progress.tasks)
        progress.live.transient |= refused
        raise
    finally:
        progress.stop()


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


# -------------------------------------------------------------------------------------- the table


def print_summary(summary: Summary) -> None:
    """Print the tables, and the recommendation if there is a choice."""
    screen = Console()
    tables = [summary_table(summary)]
    if len(summary.retrieval_tasks) > 2:
        tables += [task_table(summary, variant) for variant in summary.variants]
    tables += [cost_table(summary)] if summary.lengths("cost") else []
    for table in tables:
        # rich would wrap both at the table's width.
        title, table.title = table.title, None
        caption, table.caption = table.caption, None
        screen.print(title, style="table.title", highlight=False, markup=False)
        screen.print(*_fitting(table, screen), sep="")
        if caption is not None:
            screen.print(caption, style="table.caption", highlight=False, markup=False)
    if len(summary.variants) > 1:
        screen.print(recommended(summary).text, highlight=False, markup=False)


def summary_table(summary: Summary) -> Table:
    """One row per variant: retrieval with its interval, perplexity, short-context regression."""
    model = next(iter(summary.header.variants.values()))["model"]
    table = _table(f"{model}, trained at {summary.trained_length:,} tokens", "variant")

    def column(*lines: str) -> None:
        table.add_column("\n".join(lines), justify="right", no_wrap=True)

    tasks, read, sliding = summary.retrieval_tasks, summary.read_lengths, summary.lengths("sliding_perplexity")
    # Many tasks have a separate table; this shows the mean of those that count.
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
    shows_key = key >= KEY_TOKENS
    if shows_key:
        column("ppl of", "key tokens")
    gates = {variant: summary.gate(variant) for variant in summary.variants}
    gated = any(gate.loss for name, gate in gates.items() if name != UNEXTENDED)
    if gated:
        column("regression", "(nats)")
    for variant in summary.variants:
        row = [label(variant)]
        row += [_share(summary.pooled(variant, tasks, [n])) for tasks in groups for n in summary.lengths(*tasks)]
        row += [_number(summary.perplexity(variant, length, after)) for after, length in zip([0, *read], read)]
        row += [_number(summary.perplexity(variant, length, task="sliding_perplexity")) for length in sliding]
        for length in of_bytes[-1:]:
            bits = summary.bits_per_byte(variant, length)
            row.append("" if bits is None else f"{bits:.3f}")
        if shows_key:
            row.append(_number((summary.key_tokens(variant) or (None, 0))[0]))
        if gated:
            loss = None if variant == UNEXTENDED else gates[variant].loss
            row.append("" if loss is None else f"{loss.value:+.3f}\n[dim]±{(loss.high - loss.low) / 2:.3f}[/]")
        table.add_row(*row)
    table.caption = _caption(summary, gated, key)
    return table


def task_table(summary: Summary, variant: str) -> Table:
    """One row per retrieval task, one column per length."""
    lengths = summary.lengths(*summary.retrieval_tasks)
    table = _table(label(variant), "task")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for task in summary.retrieval_tasks:
        shares = summary.by_length(variant, task)
        table.add_row(summary.titled(task), *(_share(shares.get(length), "  ") for length in lengths))
    return table


def cost_table(summary: Summary) -> Table:
    """One row per variant: what a prompt of each length takes."""
    table = _table("cost of one prompt, alone in its batch", "variant")
    costs = {v: {n: figures(sample) for n, sample in summary.cost(v).items()} for v in summary.variants}
    rows = {v: [label(v)] for v, cost in costs.items() if cost}
    headings = next(found for cost in costs.values() for found in cost.values())
    for heading, length in product(headings, summary.lengths("cost")):
        table.add_column("\n".join([*heading.split(), f"at {length:,}"]), justify="right", no_wrap=True)
        for v, row in rows.items():
            row.append(costs[v].get(length, {}).get(heading, ""))
    for row in rows.values():
        table.add_row(*row)
    memory = "accelerators" if summary.header.about.get("machine", "").endswith("cuda") else "the whole process"
    table.caption = f"one pass of each length; peak memory: of {memory}"
    return table


def _fitting(table: Table, screen: Console) -> Iterator[Table]:
    """The table, split into several if it is wider than the screen, so that no number is truncated."""
    unbounded = screen.options.update(max_width=10_000)
    first, *columns = table.columns
    while columns:
        for n in range(len(columns), 0, -1):
            part = copy(table)
            part.columns = [replace(column, _index=k) for k, column in enumerate([first, *columns[:n]])]
            if Measurement.get(screen, unbounded, part).maximum <= screen.width:
                break
        columns = columns[n:]
        yield part


def _table(title: str, first: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column(first, no_wrap=True)
    return table


def _share(share: Any, between: str = "\n") -> str:
    if share is None:
        return ""
    color = "green" if share.value >= 0.7 else "yellow" if share.value >= 0.3 else "red"
    return f"[{color}]{in_percent(share.value)}%[/]{between}[dim]{in_percent(share.low)}–{in_percent(share.high)}[/]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 1e4 else f"{value:.0e}"


def _caption(summary: Summary, gated: bool, key: int) -> str:
    said = []
    if tasks := summary.retrieval_tasks:
        shares = [share for v in summary.variants for t in tasks for share in summary.by_length(v, t).values()]
        most = counted(max(share.n for share in shares), "sample")
        said.append(f"retrieval: up to {most} per cell, unadjusted 95% intervals")
    if read := summary.read_lengths:
        said.append("ppl: perplexity from one length to the next" if len(read) > 1 else "ppl: perplexity")
        windows, apart = summary.windows_apart
        if windows > apart:
            said.append(f"the {windows} longest windows overlap and count as {apart}: a longer --haystack avoids this")
        if summary.uneven:
            said.append(summary.uneven)
    if key >= KEY_TOKENS:
        said.append(f"key tokens: {counted(key, 'token')} judged to need long context, by LongPPL's rule")
    elif summary.lengths("key_tokens"):
        said.append(f"key tokens: {key}, too few for a perplexity: more --windows or a longer --haystack find more")
    if gated:
        said.append("regression: loss increase over the baseline within the trained length")
    if summary.cannot_run:
        said.append(f"blank: {summary.cannot_run}")
    return "\n".join(said)


def finish(results: Results, path: Path) -> None:
    """Print the tables and the path of the samples, at the end of a measurement."""
    print_summary(Summary(results))
    said = f"{counted(len(results.records), 'sample')} in {path}; ctxext report {path} makes an HTML report."
    console.print(said, soft_wrap=True)

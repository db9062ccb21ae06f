"""Run a grid of samples on a model, batch by batch; samples already in the results file are skipped.

Batches depend on the grid's settings alone, so a resumed run measures the same batches. Processes take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ctxext.evals.cost import Cost
from ctxext.evals.haystack import Haystack
from ctxext.evals.perplexity import KeyTokens, ShortContext, TextTask
from ctxext.evals.results import Header, Record, Results, ResultsWriter
from ctxext.evals.samples import Place, RetrievalTask, TooShort, fingerprint
from ctxext.evals.targets import Target, Variant
from ctxext.utils.machine import versions
from ctxext.utils.processes import ALONE, Processes
from ctxext.utils.values import MAX_TOKENS

SOME = 16  # tokens, to try out a server
AnyTask = RetrievalTask | TextTask


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The grid of measurements.

    Attributes:
        retrieval, texts: the tasks.
        lengths: in tokens, ascending.
        depths: from 0 (beginning) to 1 (just before the question).
        trials: samples per length and depth.
        windows: windows for the text tasks.
        each_length: read windows of every length; otherwise the longest alone, whose prefixes give the others.
        gate: lengths within the trained one for the short-context regression; may be empty.
        generate: generate every answer, even where teacher forcing could score it.
        batch_size: trials per batch; None for as many as fit in 8,192 tokens.
    """

    retrieval: tuple[RetrievalTask, ...] = ()
    texts: tuple[TextTask, ...] = ()
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 10
    windows: int = 8
    each_length: bool = False
    gate: tuple[int, ...] = ()
    generate: bool = False
    batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted({n for n in self.lengths if n > 0}):
            raise ValueError(f"lengths must be positive, ascending and distinct, got {list(self.lengths)}.")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depths must be from 0 (beginning) to 1 (end), got {depth:g}.")
        for name in ("trials", "windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if self.gate and self.windows < 2:
            raise ValueError("windows must be >= 2 for the task `short`, got 1. Pass windows=8, or drop the task.")
        if not 0 <= self.seed <= MAX_TOKENS:  # as results files hold it
            raise ValueError(f"seed must be 0 to {MAX_TOKENS}, got {self.seed}.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}.")
        if not self.depths:
            raise ValueError("at least one depth is needed, from 0 (beginning) to 1 (end).")
        if not (self.retrieval or self.texts or self.gate):
            raise ValueError("no tasks to measure. Name at least one, such as passkey.")

    def batches(self, variant: Variant, whole: bool, limit: int | None) -> Iterator[Batch]:
        """The batches of one variant.

        Args:
            whole: its frequencies depend on the length, so windows give no figures for shorter lengths.
            limit: the maximum length it can run at; longer samples are skipped.
        """
        runs = [length for length in self.lengths if limit is None or length <= limit]
        wanted = [] if variant.gate_only else runs
        for task in self.retrieval:
            for length in sorted({*wanted, *self.gate}):
                trials = self.batch_size or max(1, 8192 // length)
                places = task.places([length], self.depths, self.trials, self.seed)
                per_trial = len(places) // self.trials
                rows = [tuple(places[k : k + per_trial]) for k in range(0, len(places), per_trial)]
                yield from (Batch(task, tuple(rows[k : k + trials])) for k in range(0, len(rows), trials))
        for text_task in self._text_tasks:
            lengths: Sequence[int] = wanted[-1:] if text_task.prefixes and not (whole or self.each_length) else wanted
            if isinstance(text_task, ShortContext):
                lengths = self.gate[-1:]
            elif isinstance(text_task, KeyTokens):  # judged once, with the variant that is not extended here
                lengths = self.lengths[-1:] if variant.extension is None else ()
            for length, window in product(lengths, range(1 if isinstance(text_task, Cost) else self.windows)):
                yield Batch(text_task, ((Place(text_task.name, length, None, window, self.seed),),))

    @property
    def _text_tasks(self) -> list[TextTask]:
        return [*self.texts, *([ShortContext()] if self.gate else [])]

    @property
    def tasks(self) -> dict[str, Any]:
        tasks: list[AnyTask] = [*self.retrieval, *self._text_tasks]
        return {task.name: task.settings() for task in tasks}


@dataclass(frozen=True)
class Batch:
    """Places measured together: rows of trials, each with its depths."""

    task: AnyTask
    rows: tuple[tuple[Place, ...], ...]

    @property
    def length(self) -> int:
        return self.rows[0][0].length

    def __len__(self) -> int:
        return sum(len(row) for row in self.rows)

    def without(self, done: Callable[[AnyTask, Place], bool]) -> list[Batch]:
        """The unfinished part of the batch; rows that lack the same depths stay together."""
        left: dict[tuple[float | None, ...], list[tuple[Place, ...]]] = {}
        for row in self.rows:
            places = tuple(place for place in row if not done(self.task, place))
            if places:
                left.setdefault(tuple(place.depth for place in places), []).append(places)
        return [Batch(self.task, tuple(rows)) for rows in left.values()]


@dataclass
class Runner:
    """Measures a grid with one model and text.

    Attributes:
        beyond: allow lengths beyond a variant's maximum, as comparisons need for the baseline; otherwise an error.
            Cells where it cannot run stay empty.
        advance: called with the variant's name and the number of finished samples, for a progress bar.
        picked: which batches of the grid to measure.
        answer_tokens: the tokens reserved for an answer of each retrieval task, once checked.
    """

    target: Target
    haystack: Haystack
    grid: Grid
    beyond: bool = False
    advance: Callable[[str, int], None] = lambda variant, samples: None
    processes: Processes = ALONE
    picked: Callable[[Batch], bool] = lambda batch: True
    answer_tokens: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _checked: tuple[Any, ...] = field(default=(), init=False, repr=False)

    def header(self, variants: Sequence[Variant]) -> Header:
        target = self.target
        return Header(
            identity={
                "prompts": f"{target.prompter.style} {target.prompter.fingerprint}",
                "text": f"{self.haystack.name} {self.haystack.fingerprint}",
                "seed": self.grid.seed,
                "scoring": "generate" if self.grid.generate else "greedy, by teacher forcing where possible",
                **target.facts,
                **versions(),
            },
            tasks=self._settings,
            variants={variant.name: variant.describe(target) for variant in variants},
            about={
                **target.about,
                **({"documents": len(self.haystack.documents) - 1} if self.haystack.documents else {}),
                "text_tokens": self.haystack.n_tokens,
                "text_repeats": self.haystack.repeats,
                "lengths": list(self.grid.lengths),
            },
        )

    def run(self, path: str | Path, variants: Sequence[Variant], *, merge: bool = True) -> Results | None:
        """Measure what is missing in `path`, and write it there: all variants at the shortest length, then the next.

        Args:
            merge: whether this is the last run; otherwise the journals are kept.

        Returns:
            The results, on the process of rank 0.

        Raises:
            ValueError: the file holds other measurements, another run is writing it, or a sample cannot be made.
            OSError: the file cannot be written or locked. What was measured before is kept in both cases.
        """
        self.check(variants)
        first = self.processes.rank == 0
        if not first:
            self.processes.wait()
        with ResultsWriter(path, self.header(variants), self.processes.rank) as writer:
            if first:
                self.processes.wait()
            self.processes.wait()
            shares = [(variant, self._share(variant)) for variant in variants]
            for length in sorted({batch.length for _, batches in shares for batch in batches}):
                for variant, batches in shares:
                    self._measure(writer, variant, [batch for batch in batches if batch.length == length])
            if first:
                self.processes.wait()
                return writer.merge() if merge else None
        self.processes.wait()
        return None

    def check(self, variants: Sequence[Variant]) -> None:
        """Check, before the work and on every process, that each length can be read, and that each task fits the
        shortest and the text the longest.

        Called by `run`, unless it was already called for the same variants and prompt form.

        Raises:
            ValueError: one does not.
        """
        of = (self.target.prompter.fingerprint, *variants)
        if of == self._checked:
            return
        longest = max(self.grid.lengths)
        for variant in () if self.beyond else variants:
            reach = self.target.reach(variant)
            if reach is not None and longest > reach and not variant.gate_only:
                by = "" if variant.extension is None else f" with {variant.name}"
                remedy = "Extend it (--method yarn --target-length ...)"
                if "method" in self.target.about:
                    remedy = "Extend the original model further (ctxext extend --target-length ...)"
                if variant.extension is not None:
                    instead = "Replace factor= by" if "factor" in variant.extension else "Pass"
                    remedy = f"{instead} target_length={longest}"
                raise ValueError(
                    f"{self.target.name}{by} supports {reach:,} tokens, got {longest:,}. {remedy}, lower --lengths, or "
                    "pass --beyond."
                )
        limits = [self.target.limit(variant) for variant in variants if not variant.gate_only]
        ends = [limit for limit in limits if limit is not None]
        if limits and len(ends) == len(limits) and longest > (most := max(ends)):
            raise ValueError(
                f"{self.target.name} cannot run past {most:,} tokens, the end of its position table, got "
                f"{longest:,}. Extend it (--method, --target-length ...), or lower --lengths."
            )
        lengths = self.grid.lengths + self.grid.gate
        for task, length in product(self.grid.retrieval, dict.fromkeys((min(lengths), max(lengths)))):
            place = task.places([length], self.grid.depths, 1, self.grid.seed)[0]
            try:
                self.answer_tokens[task.name] = task.sample(place, self.target.prompter, self.haystack).answer_tokens
            except TooShort as error:
                drop = f"Drop {length} from lengths=, or {task.name} from the tasks."
                if length in self.grid.gate:
                    drop = f"`short` measures every task there, so drop {task.name} or `short` from the tasks."
                raise ValueError(f"{error} {drop}") from None
        batches = [batch for variant in variants for batch in self.batches(variant)]
        windows = {batch.rows[0][0]: batch.task for batch in batches if isinstance(batch.task, TextTask)}
        for place, reads in windows.items():
            reads.window(place, self.haystack, self.target.prompter.bos)
        texts = {task.name: task for task in windows.values()}
        self.target.check([*texts.values()], self.haystack.token_ids[:SOME], self.grid.generate)
        self._checked = of

    def narrowed(self, picked: Callable[[Batch], bool], samples: int) -> Runner:
        """This runner with only the picked batches, and so many samples of each; what it checked stays checked."""
        grid = replace(self.grid, trials=samples, windows=max(samples, 2 if self.grid.gate else 1))
        made = replace(self, grid=grid, picked=picked)
        made._checked, made.answer_tokens = self._checked, self.answer_tokens
        return made

    def count(self, variants: Sequence[Variant]) -> int:
        """The samples of this process, including those already measured."""
        return sum(len(batch) for variant in variants for batch in self._share(variant))

    def asked(self, results: Results, variants: Sequence[Variant]) -> Results:
        """The samples of this grid and these variants, without those that earlier runs left in the file."""
        keys = {
            (variant.name, self.key(batch.task, place))
            for variant in variants
            for batch in self.batches(variant)
            for row in batch.rows
            for place in row
        }
        names, tasks = {variant.name for variant in variants}, self._settings
        header = replace(
            results.header,
            tasks={name: value for name, value in results.header.tasks.items() if name in tasks},
            variants={name: value for name, value in results.header.variants.items() if name in names},
        )
        records = [record for record in results.records if (record["variant"], record["key"]) in keys]
        return Results(results.path, header, records)

    def key(self, task: AnyTask, place: Place) -> str:
        """A hash of all inputs of the sample at `place`."""
        return fingerprint(
            vars(place), self._settings[task.name], self.target.prompter.fingerprint, self.haystack.fingerprint
        )

    @cached_property
    def _settings(self) -> dict[str, Any]:
        # Read once: a task with data of its own hashes its file for them.
        return self.grid.tasks

    def batches(self, variant: Variant) -> list[Batch]:
        """The batches of one variant, those of all processes."""
        batches = self.grid.batches(variant, self.target.whole(variant), self.target.limit(variant))
        return [batch for batch in batches if self.picked(batch)]

    def left(self, variant: Variant, batches: Sequence[Batch], done: Collection[tuple[str, str]]) -> list[Batch]:
        """The parts of some batches that are not `done`, given by variant and key."""
        return [
            part
            for batch in batches
            for part in batch.without(lambda task, place: (variant.name, self.key(task, place)) in done)
        ]

    def _share(self, variant: Variant) -> list[Batch]:
        return self.batches(variant)[self.processes.rank :: self.processes.world]

    def _measure(self, writer: ResultsWriter, variant: Variant, batches: Sequence[Batch]) -> None:
        """Measure what is missing of these batches, under one extension."""
        missing = self.left(variant, batches, writer.done)
        self.advance(variant.name, sum(map(len, batches)) - sum(map(len, missing)))
        if not missing:
            return
        with self.target.applied(variant):
            for outcomes in self._outcomes(missing):
                records = [
                    {"variant": variant.name, "key": self.key(task, place), **vars(place), **outcome}
                    for task, place, outcome in outcomes
                ]
                writer.add(records)
                self.advance(variant.name, len(outcomes))

    def _outcomes(self, batches: list[Batch]) -> Iterator[list[tuple[AnyTask, Place, Record]]]:
        """The measured records, in batches that are written atomically."""
        tasks = {task.name: task for task in self.grid.retrieval}
        questions = (
            [[batch.task.sample(place, self.target.prompter, self.haystack) for place in row] for row in batch.rows]
            for batch in batches
            if isinstance(batch.task, RetrievalTask)
        )
        for outcomes in self.target.outcomes(questions, self.grid.generate):
            yield [(tasks[sample.place.task], sample.place, outcome) for sample, outcome in outcomes]
        for batch in batches:
            if isinstance(batch.task, TextTask):
                (place,) = batch.rows[0]
                window = batch.task.window(place, self.haystack, self.target.prompter.bos)
                yield [(batch.task, place, self.target.read(batch.task, window))]

"""Measure within a time limit, where intervals are widest, as `ctxext eval --minutes` does.

Each task at each length is a part. All parts get a few samples, short lengths first; then the part with the widest
interval gets more, until no part has time or text left. The clock ends the run, not the results, and the samples of a
part are independent of how many there are, so intervals cover as those of a fixed number do
(benchmarks/statistics_coverage.py simulates both).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ctxext.evals.cost import Cost
from ctxext.evals.perplexity import KeyTokens, SlidingPerplexity
from ctxext.evals.results import Results, read_results
from ctxext.evals.runner import AnyTask, Batch, Runner
from ctxext.evals.summary import Summary
from ctxext.evals.targets import LiveModel, Variant
from ctxext.evals.workload import Speed, Workload
from ctxext.utils.values import check_minutes, counted

# The smallest number of samples: one does not show the variance.
FIRST = 2
# The largest number of samples per length and depth; more would not narrow any relevant interval.
MOST = 1000

Part = tuple[str, int]
P = TypeVar("P")


def widest(widths: Mapping[P, float]) -> P | None:
    """The part with the widest interval; None if all have width 0."""
    part = max(widths, key=widths.__getitem__, default=None)
    return part if part is not None and widths[part] > 0 else None


def part_of(batch: Batch) -> Part:
    """Key tokens are those of the windows of perplexity, and are measured with them."""
    return "perplexity" if isinstance(batch.task, KeyTokens) else batch.task.name, batch.length


class Timed:
    """Measures variants until the time or the text is used up. A second run on the same file adds to it.

    Args:
        runner: its grid's `trials` and `windows` are replaced.
        minutes: the time limit, from `began`, by `now()`.
        speed: by which the first samples of a part are expected to take their time.
        advance: called with the used share of the time and a progress message.

    Attributes:
        skipped: parts that there was no time for.
        text_used_up: whether samples ran out of text.
    """

    def __init__(
        self,
        runner: Runner,
        variants: Sequence[Variant],
        path: Path,
        minutes: float,
        speed: Speed,
        *,
        began: float | None = None,
        now: Callable[[], float] = time.perf_counter,
        advance: Callable[[float, str], None] = lambda share, state: None,
    ) -> None:
        check_minutes(minutes)
        assert isinstance(runner.target, LiveModel)
        self.runner, self.variants, self.path, self.speed = runner, variants, path, speed
        self.target = runner.target
        self.limit, self.now, self.advance = 60 * minutes, now, advance
        self.began = now() if began is None else began
        self.skipped: list[Part] = []
        self.text_used_up = False
        self._samples: dict[Part, int] = {}
        self._seconds: dict[Part, float] = {}  # a sample
        self._expected = self._took = 0.0

    def run(self) -> Results:
        tasks = {part_of(batch): batch.task for v in self.variants for batch in self.runner.batches(v)}
        for part in sorted(tasks, key=lambda part: part[1]):
            first = 1 if isinstance(tasks[part], Cost) else FIRST
            expected = self._expect(part, first)
            # How wrong earlier estimates were corrects this one.
            wrong = self._took / self._expected if self._samples else 1
            if wrong * expected > self._left:
                self.skipped.append(part)
                continue
            self._measure(part, first)
            self._expected, self._took = self._expected + expected, self._took + first * self._seconds[part]
        if not self._samples:
            least = min(self._expect(part, FIRST) for part in self.skipped)
            needed = math.ceil((self.now() - self.began + least) / 6) / 10
            raise ValueError(
                f"{counted(self.limit / 60, 'minute')} is not enough for the first samples at {self.skipped[0][1]:,} "
                f"tokens. Pass --minutes {needed:g} or more, or shorter --lengths."
            )
        most = {part: self._most(tasks[part], part[1]) for part in self._samples}
        while (next_part := widest(self._widths(most))) is not None:
            n, room = self._samples[next_part], int(self._left / self._seconds[next_part])
            self._measure(next_part, min(most[next_part], n + max(1, n // 2), n + room))
        self.text_used_up = any(n == most[part] < MOST and n > 1 for part, n in self._samples.items())
        results = self.runner.narrowed(lambda batch: False, FIRST).run(self.path, self.variants)
        assert results is not None
        return results

    def notes(self) -> list[str]:
        """What there was no time, or no text, for."""
        notes = []
        if self.skipped:
            lengths: dict[str, list[str]] = {}
            for task, length in self.skipped:
                lengths.setdefault(task, []).append(f"{length:,}")
            parts = "; ".join(f"{task} at {', '.join(of)}" for task, of in lengths.items())
            notes.append(f"There was no time for {parts} tokens. Pass more --minutes: the run continues from here.")
        if self.text_used_up:
            notes.append("Some tasks ran out of text. Pass a longer --haystack for more samples.")
        return notes

    @property
    def _left(self) -> float:
        """The remaining time in seconds."""
        return self.limit - (self.now() - self.began)

    def _runner(self, part: Part, n: int) -> Runner:
        return self.runner.narrowed(lambda batch: part_of(batch) == part, n)

    def _expect(self, part: Part, n: int) -> float:
        return Workload(self._runner(part, n), self.variants).seconds(self.speed)

    def _measure(self, part: Part, n: int) -> None:
        (task, length), before, begun = part, self._samples.get(part, 0), self.now()
        engine, read = self.target.engine, self.target.engine.tokens
        told = f"{task} at {length:,}: samples {before + 1} to {n}"
        runner = self._runner(part, n)
        runner.advance = lambda name, _: self.advance(min(1.0, 1 - self._left / self.limit), told)
        runner.run(self.path, self.variants, merge=False)
        # Samples that the file had already took no time, and say nothing of the next ones.
        took = self._expect(part, n - before) if engine.tokens == read else self.now() - begun
        self._seconds[part] = took / (n - before)
        self._samples[part] = n

    def _most(self, task: AnyTask, length: int) -> int:
        """How many samples of a part there are: later ones would repeat the text."""
        held = self.runner.haystack.n_tokens
        if isinstance(task, Cost):
            return 1
        if isinstance(task, SlidingPerplexity):
            return (held - length) // task.stride + 1
        return max(FIRST, min(MOST, 2 * held // length))

    def _widths(self, most: Mapping[Part, int]) -> dict[Part, float]:
        """The width of the widest interval of each part that has time and text left: of a rate, or of a loss in nats; 1
        point is as wide as 1% of perplexity."""
        summary, widths = Summary(read_results(self.path)), {}
        for task, length in self._samples:
            part = task, length
            if self._samples[part] >= most[part] or self._seconds[part] > self._left:
                continue
            intervals = [summary.interval(variant.name, task, length) for variant in self.variants]
            found = [each for each in intervals if each is not None]
            widths[task, length] = max((each.high - each.low for each in found), default=0.0)
        return widths

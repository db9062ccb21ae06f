"""Compare methods within a time limit, as `ctxext compare --minutes` does.

All candidates answer the same samples. Candidates significantly behind are eliminated; the rest share the remaining
time, in rounds with twice as many texts each. Rescale factors are never fitted on the text used for comparison.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctxext.core.plan import Plan
from ctxext.evals.choice import (
    TIED_LOSS,
    Recommendation,
    beyond_difference,
    by_measurement,
    choose,
    found_share,
    short_regression,
    summary_loss,
)
from ctxext.evals.results import Results, read_results
from ctxext.evals.runner import Runner
from ctxext.evals.summary import Summary, label
from ctxext.evals.targets import UNEXTENDED, LiveModel, Variant
from ctxext.export.rules import ENGINES, NotExportable, export_for
from ctxext.extension.method_file import SavedMethod
from ctxext.fitting.episodes import split
from ctxext.fitting.fit import fit
from ctxext.fitting.gradient import GradientSettings
from ctxext.fitting.live import LiveFactors, frozen
from ctxext.utils.machine import versions
from ctxext.utils.values import check_minutes, counted, finite

FITTED = "fitted"
# A candidate is eliminated at this unadjusted p: elimination saves time and is not reported as behind.
LEAVES = 0.01
# The smallest number of texts: one window does not show the variance between windows.
FIRST = 2
# The share of the time for a fit, and the fewest worthwhile evaluations.
FIT_SHARE, EVALUATIONS = 0.4, 5
# The maximum number of texts; more would not narrow any relevant interval.
MOST = 100
# Texts beyond the trained length for the unextended model.
MOST_UNEXTENDED = 8


def staying(summary: Summary, candidates: Sequence[str]) -> list[str]:
    """The candidates that could still turn out best, in their order; at least two.

    A candidate is eliminated if its retrieval accuracy is significantly below the best's, or if it is not higher and
    its loss is larger by significantly more than TIED_LOSS.
    """
    target = summary.loss_length or 0
    best, *others = by_measurement(summary, candidates)
    stay = [best]
    for variant in others:
        found = beyond_difference(summary, variant, best)
        loss = summary.loss_difference(variant, best, target)
        finds_less = found is not None and found.value < 0 and found.p < LEAVES
        loses_more = loss is not None and loss.low > TIED_LOSS and loss.p < LEAVES
        if not (finds_less or (loses_more and (found is None or found.value <= 0))):
            stay.append(variant)
    # Keep the second best, to measure the lead of the first.
    stay += others[: 2 - len(stay)]
    return [variant for variant in candidates if variant in stay]


def check_start(path: Path, minutes: float) -> None:
    """Raise ValueError unless `minutes` is a positive number and the results file is new."""
    check_minutes(minutes)
    if found := str(path) if path.exists() else left_beside(path):
        what = "" if path.exists() else " (samples of an unfinished run)"
        raise ValueError(
            f"{found} exists already{what}, and a run with --minutes or --quick does not resume. Remove it, or choose "
            "another --output."
        )


def left_beside(path: Path) -> str:
    """The journals that an unfinished run left beside its results file; "" without any."""
    return ", ".join(map(str, sorted(path.parent.glob(f"{path.name}.part-*"))))


class Race:
    """Measures candidates in rounds until the time or the text is used up; the model is unchanged.

    Args:
        runner: of a `LiveModel`; the rounds replace its grid's `trials` and `windows`. If the text is long enough, one
            half of it is for fitting.
        candidates: variants that the model takes.
        path: a new results file.
        minutes: the time limit, from `began`.
        fits: whether to fit rescale factors as well.
        began: the start time, by `now()`; None for now.
        now: the clock, in seconds.
        advance: called with the used share of the time and a progress message.

    Attributes:
        candidates: the remaining candidates.
        fitted: the fitted method, or None; `no_fit` says why.
        text_used_up: whether the text was used up before the time.

    Raises:
        ValueError: as `check_start`; no length is beyond the trained one, or the text is shorter than the longest.
    """

    def __init__(
        self,
        runner: Runner,
        candidates: Sequence[Variant],
        path: Path,
        minutes: float,
        *,
        fits: bool = True,
        began: float | None = None,
        now: Callable[[], float] = time.perf_counter,
        advance: Callable[[float, str], None] = lambda share, state: None,
    ) -> None:
        check_start(path, minutes)
        assert isinstance(runner.target, LiveModel)
        self.runner, self.candidates, self.path, self.target = runner, [*candidates], path, runner.target
        self.seconds, self.now, self.advance = 60 * minutes, now, advance
        self.began = now() if began is None else began
        self.trained, self.length = self.target.about["trained_length"], max(runner.grid.lengths)
        if self.length <= self.trained:
            raise ValueError(
                f"--lengths ends at {self.length}, but the model already covers {self.trained} tokens. Pass a length "
                f"beyond, such as --lengths {2 * self.trained}."
            )
        text = runner.haystack
        if text.n_tokens < self.length:
            raise ValueError(
                f"{text.name} has {text.n_tokens:,} tokens, fewer than the target length of {self.length:,}. Pass "
                "a longer text, or a shorter length."
            )
        self.how = {name: value for name, value in (candidates[0].extension or {}).items() if name != "method"}
        self.reach = self.target.reach(candidates[0]) or self.length
        self.fitted: SavedMethod | None = None
        self.no_fit = self.learnt = ""
        if fits:
            try:
                LiveFactors(self.target.model, self.how.get("original_max_position_embeddings"))
                first, second = self._split(text.once, text.name)
                self._split(first.haystack.text, f"half of {text.name}")
                self.learnt, runner.haystack = first.haystack.text, second.haystack
            except ValueError as error:
                self.no_fit = str(error)
        self.text_used_up = False
        self._eliminated: list[str] = []
        self._pace = math.nan  # tokens a second, of the baseline
        self._texts: dict[str, int] = {}
        self._seconds: dict[str, float] = {}  # a text

    def _split(self, text: str, name: str) -> Any:
        return split(text, self.target.prompter, self.trained, self.reach, held_out=0.5, name=name)

    def run(self) -> Results:
        """Measure the baseline, fit, and run the rounds.

        Raises:
            ValueError: the time is too short to measure each candidate on FIRST texts.
        """
        with frozen(self.target.model):
            self._begin()
            if self.learnt:
                self._fit()
            self._rounds()
            self.target.about["eliminated"] = self._eliminated
            last = self._texts[self.candidates[0].name]
            grid = replace(self.runner.grid, trials=last, windows=last)
            results = replace(self.runner, grid=grid).run(self.path, self.candidates)
            assert results is not None
            return results

    @property
    def _left(self) -> float:
        """The remaining time in seconds."""
        return self.seconds - (self.now() - self.began)

    def _tell(self, state: str) -> None:
        self.advance(min(1.0, 1 - self._left / self.seconds), state)

    def _begin(self) -> None:
        """Measure the baseline, to estimate the time of the candidates."""
        # A short text first, to fail early.
        self._tell("measuring the speed")
        engine, probe = self.target.engine, self.runner.haystack.token_ids[: min(self.trained, 512)]
        self._pace = max(self._pace_of(lambda: engine.losses(probe)) for _ in range(3))
        self._check_time(len(self.candidates) + 1)
        self._pace = self._pace_of(lambda: self._measure(Variant(), FIRST))
        self._check_time(len(self.candidates))

    def _pace_of(self, work: Callable[[], Any]) -> float:
        """The speed of `work` in tokens per second."""
        read, begun = self.target.engine.tokens, self.now()
        work()
        return (self.target.engine.tokens - read) / (self.now() - begun)

    def _check_time(self, candidates: int) -> None:
        lacking = self._first_round(candidates) - self._left
        if lacking > 0:
            raise ValueError(
                f"{counted(self.seconds / 60, 'minute')} is not enough to measure {counted(candidates, 'candidate')} "
                f"on {FIRST} texts each up to {self.length:,} tokens. Pass --minutes "
                f"{_minutes(self.seconds + lacking)}, or fewer --methods."
            )

    def _first_round(self, candidates: int) -> float:
        """The estimated seconds of the first round with this many candidates."""
        grid = replace(self.runner.grid, trials=FIRST, windows=FIRST)
        rows = [row for batch in grid.batches(self.candidates[0], False, None) for row in batch.rows]
        # The depths of a trial share their beginning.
        parts = [[1 - (place.depth or 0) for place in row] + [1] * (row[0].depth is not None) for row in rows]
        tokens = sum(row[0].length * sum(part) for row, part in zip(rows, parts))
        # Methods with in-attention RoPE take about 1.5 times as long.
        return 1.2 * candidates * tokens / self._pace

    def _fit(self) -> None:
        room = min(FIT_SHARE * self.seconds, self._left - self._first_round(len(self.candidates) + 1))
        least = GradientSettings(evaluations=EVALUATIONS).tokens(self.trained, self.reach) / self._pace
        if room < least:
            enough = max(least / FIT_SHARE, self.seconds - room + least)
            self.no_fit = f"there is not enough time. Pass --minutes {_minutes(enough)}."
            return
        try:
            self.fitted = fit(
                self.target.model,
                self.target.prompter,
                self.learnt,
                target_length=self.reach,
                original_max_position_embeddings=self.how.get("original_max_position_embeddings"),
                settings=GradientSettings(minutes=room / 60, seed=self.runner.grid.seed),
                names=(self.target.name, self.runner.haystack.name),
                advance=lambda share, state: self._tell("fitting"),
            )
        except (ValueError, RuntimeError) as error:  # or out of memory: only a fit has a backward pass
            self.no_fit = str(error)
        else:
            self.candidates.append(Variant(FITTED, {"method": self.fitted.method, **self.how}))

    def _rounds(self) -> None:
        # A second pass over the text has different windows; a third one would add little.
        most = min(MOST, max(FIRST, 2 * self.runner.haystack.n_tokens // self.length))
        texts = FIRST
        while True:
            for variant in self.candidates:
                self._measure(variant, texts)
            if texts == most:
                self.text_used_up = True
                return
            summary = Summary(read_results(self.path))
            self._keep(staying(summary, [variant.name for variant in self.candidates]))
            names = [variant.name for variant in self.candidates]
            front = choose(summary, names, left=len(self._eliminated)).ranking
            while not (room := self._room(front)) and len(front) > 2:
                # The remaining time is for the leaders.
                front = front[:-1]
            if not room:
                return
            self._keep(front)
            texts = min(2 * texts, texts + room, most)
            # The baseline's failure beyond the trained length is soon clear; the short-context regression needs every
            # text.
            self._measure(Variant(gate_only=texts > MOST_UNEXTENDED), texts)

    def _keep(self, names: Collection[str]) -> None:
        self._eliminated += [variant.name for variant in self.candidates if variant.name not in names]
        self.candidates = [variant for variant in self.candidates if variant.name in names]

    def _room(self, names: Sequence[str]) -> int:
        """How many more texts of these candidates fit in the time."""
        return max(0, int(self._left / sum(self._seconds[name] for name in (UNEXTENDED, *names))))

    def _measure(self, variant: Variant, texts: int) -> None:
        limit, lengths = self.target.limit(variant), self.runner.grid.lengths
        within = tuple(length for length in lengths if limit is None or length <= limit)
        # A position table that is shorter than all lengths is measured within the trained length.
        grid = replace(self.runner.grid, lengths=within or (self.trained,), trials=texts, windows=texts)
        before, begun = self._texts.get(variant.name, 0), self.now()
        told = f"texts {before + 1} to {texts}"
        runner = replace(self.runner, grid=grid, advance=lambda name, _: self._tell(f"{label(name)}: {told}"))
        runner.run(self.path, [variant], merge=False)
        self._seconds[variant.name] = (self.now() - begun) / (texts - before)
        self._texts[variant.name] = texts


def _minutes(seconds: float) -> str:
    """Seconds in minutes, rounded up to a tenth."""
    return f"{math.ceil(seconds / 6) / 10:g}"


def where_it_runs(summary: Summary, chosen: Recommendation, plan: Plan, config: Any) -> str:
    """What runs the saved model of a recommended variant, in a sentence or two."""
    if engines := [engine for engine in ENGINES if _runs(engine, config, plan)]:
        return f"Engines that run the saved model: {', '.join(engines)}. ctxext export prints how."
    if plan.is_portable:
        return "Plain transformers loads the saved model."
    said = f"config.json cannot express it, as {plan.why_not_portable}: reload it with ctxext.load."
    plain = next((v for v in chosen.ranking if v not in summary.not_portable), None)
    if plain is None:
        return said
    return f"{said} The best method that config.json can express, for servers too, is {plain} (--portable)."


def _runs(engine: str, config: Any, plan: Plan) -> bool:
    try:
        export_for(engine, config, plan)
    except NotExportable:
        return False
    return True


def saved_choice(summary: Summary, said: str, plan: Plan, fitted: SavedMethod | None = None) -> SavedMethod:
    """The method of a recommended variant's plan, with the figures of all variants in `about`."""
    assert plan.method is not None
    header, extended = summary.header, [v for v in summary.variants if v != UNEXTENDED]
    about = {
        "model": next(iter(header.variants.values()))["model"],
        "trained_length": summary.trained_length,
        "target_length": plan.target_length,
        "text": header.identity["text"],
        "by": "compare",
        "recommendation": said,
        "figures": {
            v: {
                "found": (share := found_share(summary, v)) and share._asdict(),
                "loss": finite(summary_loss(summary, v)),
                "short_regression": short_regression(summary, v),
            }
            for v in extended
        },
        "control": header.about.get("control"),
        "machine": header.about["machine"],
        "versions": versions(),
    }
    return SavedMethod(plan.method, about if fitted is None else {**about, "fit": fitted.about})

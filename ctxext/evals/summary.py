"""The figures of a results file: rates and losses with their intervals, and the short-context regression."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ctxext.evals.checks import CorruptLine, check_alike
from ctxext.evals.control import ENOUGH, Control
from ctxext.evals.cost import COST
from ctxext.evals.perplexity import stretches, unpacked, window_stretches
from ctxext.evals.results import Record, Results
from ctxext.evals.statistics import (
    RULER_THRESHOLD,
    Difference,
    EffectiveLength,
    Interval,
    PairedTest,
    effective_length,
    in_percent,
    mean_share,
    paired_difference,
    paired_loss_difference,
    paired_loss_test,
    paired_test,
    pooled_share,
    wilson,
)
from ctxext.evals.targets import UNEXTENDED
from ctxext.utils.values import counted, finite


@dataclass(frozen=True)
class Gate:
    """An extended model compared with its baseline within the trained length.

    Attributes:
        length: of the windows, in tokens.
        loss: the loss increase in nats per token; paired by window.
        agreement: the share of positions with the same most likely token.
        retrieval: the difference of retrieval accuracy, by task.
    """

    length: int
    loss: Difference | None
    agreement: Interval | None
    retrieval: dict[str, Difference]


class Summary:
    """The figures of one results file.

    Perplexities are over the windows that all `compared` variants have, so that rows of a table can be compared.

    Args:
        compared: all variants but those dropped early, if None.
        longest: ignore the losses of tokens beyond this position; None for none.
    """

    def __init__(self, results: Results, compared: Sequence[str] | None = None, longest: int | None = None) -> None:
        for part, name in (("identity", "seed"), ("about", "trained_length"), ("about", "lengths")):
            if name not in getattr(results.header, part):
                raise ValueError(f"{results.path} has no {part}.{name} in its header. Restore it, or measure again.")
        for name, about in results.header.variants.items():
            if "model" not in about:
                raise ValueError(f"{results.path} has no model of {name} in its header. Restore it, or measure again.")
        try:
            check_alike(results.records)
        except CorruptLine as error:
            raise ValueError(f"{results.path} is corrupt: {error}. Restore it, or measure again.") from None
        try:
            self.control = Control.of_header(results.header.about)
            self._failing = {} if self.control is None else self.control.failing
        except (AttributeError, KeyError, TypeError):
            raise ValueError(
                f"{results.path} has a broken about.control in its header. Restore it, or measure again."
            ) from None
        self._results, self._compared, self._longest = results, compared, longest
        self.header = results.header
        self.records = results.records
        self.trained_length: int = results.header.about["trained_length"]
        self._held: dict[tuple[str, int, str], dict[int, Record]] = {}
        self._summed: dict[tuple[str, int, int, str], dict[int, tuple[float, int]]] = {}

    @cached_property
    def _by(self) -> dict[tuple[str, str], list[Record]]:
        groups = defaultdict(list)
        for record in self.records:
            groups[record["variant"], record["task"]].append(record)
        return groups

    def of(self, variant: str, task: str) -> list[Record]:
        return self._by.get((variant, task), [])

    @cached_property
    def variants(self) -> list[str]:
        """The variants with samples, in the order of the run."""
        return [name for name in self.header.variants if any(variant == name for variant, _ in self._by)]

    @cached_property
    def retrieval_tasks(self) -> list[str]:
        return [
            task for task in self.header.tasks if any("score" in r for v in self.variants for r in self.of(v, task)[:1])
        ]

    @property
    def deciding_tasks(self) -> list[str]:
        """The retrieval tasks that the baseline solves within its trained length, or that have no control.

        Other tasks are shown, but excluded from means, comparisons and recommendations.
        """
        return [task for task in self.retrieval_tasks if task not in self._failing]

    def titled(self, task: str) -> str:
        """A retrieval task's display name."""
        return task if task in self.deciding_tasks else f"{task} (not counted)"

    @property
    def not_counted(self) -> str:
        """Which retrieval tasks are excluded, and why; "" if none."""
        failed = [
            f"{task} ({in_percent(self._failing[task])}%)" for task in self.retrieval_tasks if task in self._failing
        ]
        if self.control is None or not failed:
            return ""
        return (
            f"Not counted: {', '.join(failed)}. The baseline must find {in_percent(ENOUGH)}% within "
            f"{self.control.length:,} tokens for a difference between methods to mean anything."
        )

    def shared_by(self, variants: Sequence[str]) -> Summary:
        """These figures, with retrieval on the common samples of `variants`, and losses on their common windows, up to
        the longest length that they share."""
        keys = [{r["key"] for task in self.retrieval_tasks for r in self.of(v, task)} for v in variants]
        shared = set.intersection(*keys)
        records = [r for r in self.records if "score" not in r or r["key"] in shared]
        read = [v for v in variants if self.of(v, "perplexity")]
        common = [n for n in self.read_lengths if read and set.intersection(*({*self._windows_of(v, n)} for v in read))]
        longest = max(common, default=self.trained_length)
        return Summary(replace(self._results, records=records), variants, longest)

    def lengths(self, *tasks: str) -> list[int]:
        return sorted({r["length"] for v in self.variants for task in tasks for r in self.of(v, task)})

    @cached_property
    def read_lengths(self) -> list[int]:
        """The lengths with perplexity, from windows of that length or longer ones."""
        longest = max(self.lengths("perplexity"), default=0)
        longest = longest if self._longest is None else min(longest, self._longest)
        wanted = {*self.header.about["lengths"], *self.lengths("perplexity", *self.retrieval_tasks)}
        return [length for length in sorted(wanted) if length <= longest]

    @property
    def loss_length(self) -> int | None:
        """The longest length beyond the trained one with perplexity."""
        return next((length for length in reversed(self.read_lengths) if length > self.trained_length), None)

    # -------------------------------------------------------------------------------------- retrieval

    def cells(self, variant: str, task: str) -> dict[tuple[int, float | None], Interval]:
        """The accuracy of each cell of the grid, by (length, depth)."""
        scores = defaultdict(list)
        for record in self.of(variant, task):
            scores[record["length"], record["depth"]].append(record["score"])
        order = sorted(scores, key=lambda cell: (cell[0], -1.0 if cell[1] is None else cell[1]))
        return {cell: wilson(sum(scores[cell]), len(scores[cell])) for cell in order}

    def pooled(
        self, variant: str, tasks: Sequence[str], lengths: Iterable[int], comparisons: int = 1
    ) -> Interval | None:
        """The accuracy over all depths of some lengths, macro-averaged over the measured tasks.

        Samples whose texts overlap form a cluster; `comparisons` as in `wilson`.
        """
        measured, wanted = [], set(lengths)
        for task in tasks:
            passages = self._passages(task, wanted)
            clusters: dict[Hashable, list[float]] = defaultdict(list)
            for record in self.of(variant, task):
                if record["length"] in wanted:
                    clusters[passages[record["length"], record["trial"]]].append(record["score"])
            if clusters:
                measured.append(clusters)
        return mean_share(measured, comparisons) if measured else None

    def by_length(self, variant: str, *tasks: str) -> dict[int, Interval]:
        """The accuracy at each length, macro-averaged over tasks."""
        lengths = sorted({record["length"] for task in tasks for record in self.of(variant, task)})
        return {length: pooled for length in lengths if (pooled := self.pooled(variant, tasks, [length]))}

    def interval(self, variant: str, task: str, length: int) -> Interval | Difference | None:
        """The rate of a retrieval task at a length, or a mean loss in nats (of `short`, its increase over the
        baseline's); None with too few windows for an interval, and for tasks without one."""
        if task in self.retrieval_tasks:
            return self.pooled(variant, [task], [length])
        if task == "short":
            return None if variant == UNEXTENDED else self.gate(variant).loss
        read = task in ("perplexity", "sliding_perplexity")
        windows = self._windows(variant, variant, length, 0, task) if read else None
        if windows is None or len({*windows[-1]}) < 2:
            return None
        sums, _, tokens, apart = windows
        return paired_loss_difference(sums, [0.0] * len(sums), tokens, apart)

    def effective_length(self, variant: str, tasks: Sequence[str]) -> dict[str, EffectiveLength]:
        """By RULER's threshold (85.6%), and by 85% of the model's own accuracy at the shortest length."""
        shares = self.by_length(variant, *tasks)
        if not shares:
            return {}
        own = 0.85 * next(iter(shares.values())).value
        return {"RULER": effective_length(shares, RULER_THRESHOLD), "85% of own": effective_length(shares, own)}

    def difference(self, one: str, other: str, tasks: Sequence[str], lengths: Iterable[int]) -> Difference | None:
        """The paired difference of retrieval accuracy on common samples, macro-averaged over tasks."""
        pairs = self._pairs(one, other, tasks, lengths)
        return paired_difference(*pairs) if pairs else None

    def test(self, one: str, other: str, tasks: Sequence[str], lengths: Iterable[int]) -> PairedTest | None:
        """As `difference`, without the interval."""
        pairs = self._pairs(one, other, tasks, lengths)
        return paired_test(*pairs) if pairs else None

    def _pairs(self, one: str, other: str, tasks: Sequence[str], lengths: Iterable[int]) -> list[list[Any]]:
        """The scores of both, texts and tasks of the common samples."""
        wanted = set(lengths)
        passages = {task: self._passages(task, wanted) for task in tasks}
        theirs = {r["key"]: r["score"] for task in tasks for r in self.of(other, task) if r["length"] in wanted}
        pairs = [
            (r["score"], theirs[r["key"]], (task, passages[task][r["length"], r["trial"]]), task)
            for task in tasks
            for r in self.of(one, task)
            if r["key"] in theirs
        ]
        return [list(part) for part in zip(*pairs)]

    @cached_property
    def _begun(self) -> dict[str, dict[tuple[int, int], int | None]]:
        """By task, where in the text the prompts of each length and trial begin, in tokens; None if not recorded.

        All depths of a trial share a passage.
        """
        found: dict[str, dict[tuple[int, int], int | None]] = defaultdict(dict)
        for task in self.retrieval_tasks:
            for record in (record for variant in self.variants for record in self.of(variant, task)):
                place = record["length"], record["trial"]
                if found[task].get(place) is None:
                    found[task][place] = record.get("start")
        return found

    @cached_property
    def _texts(self) -> dict[int, str]:
        """The text of each trial, where the results are on several texts; empty for a single one."""
        return {record["trial"]: record["text"] for record in self.records if "text" in record}

    def _passages(self, task: str, lengths: set[int]) -> dict[tuple[int, int], Hashable]:
        """By length and trial, the stretch of text of the prompts: one for those that overlap.

        Where none is recorded, as for prompts without a text, it is their own. Of several texts, each is one stretch.
        """
        if self._texts:
            return {place: self._texts[place[1]] for place in self._begun[task] if place[0] in lengths}
        held = self.header.about.get("text_tokens")
        places = {place: start for place, start in self._begun[task].items() if place[0] in lengths}
        begun = {place: start for place, start in places.items() if start is not None and held is not None}
        of = stretches(list(begun.values()), [length for length, _ in begun], held or 0)
        return {place: place for place in places} | dict(zip(begun, of))

    # ------------------------------------------------------------------------------------- perplexity

    def losses(self, variant: str, length: int, task: str = "perplexity") -> dict[int, np.ndarray]:
        """By window, the losses in nats of the first `length` tokens, possibly from a longer window."""
        held = self._windows_of(variant, length, task)
        return {trial: unpacked(r, "losses")[: length - r["length"] or None] for trial, r in held.items()}

    def perplexity(self, variant: str, length: int, after: int = 0, task: str = "perplexity") -> float | None:
        """exp of the mean loss over the tokens from position `after` up to `length`."""
        loss = self.loss(variant, length, after, task)
        return None if loss is None else _exp(loss)

    def loss(self, variant: str, length: int, after: int = 0, task: str = "perplexity") -> float | None:
        """The mean loss over the tokens from position `after` up to `length`, in nats."""
        sums = self._loss_sums(variant, length, after, task)
        windows = [sums[trial] for trial in self._shown(variant, length, task)]
        tokens = sum(tokens for _, tokens in windows)
        return sum(total for total, _ in windows) / tokens if tokens else None

    def _shown(self, variant: str, length: int, task: str = "perplexity") -> set[int]:
        """The windows of `variant` that figures are over: those of all compared variants, or its own if it has none."""
        compared = [v for v in self.variants if v not in self.eliminated] if self._compared is None else self._compared
        own, *having = ({*self._windows_of(v, length, task)} for v in (variant, *compared))
        return own.intersection(*filter(None, having)) or own

    def _windows_of(self, variant: str, length: int, task: str = "perplexity") -> dict[int, Record]:
        """The shortest record of each window that holds `length` tokens."""
        name = variant, length, task
        if name not in self._held:
            # Windows of one trial begin at the same place, so a longer one holds the shorter; sliding ones do not.
            fits = operator.eq if task == "sliding_perplexity" else operator.ge
            records = sorted(self.of(variant, task), key=lambda r: -r["length"]) if length > 0 else ()
            self._held[name] = {r["trial"]: r for r in records if fits(r["length"], length)}
        return self._held[name]

    @property
    def uneven(self) -> str:
        """Which variants have other windows of the longest length than those that perplexities are over, or ""."""
        if not self.read_lengths:
            return ""
        longest = self.read_lengths[-1]
        shown = {v: self._shown(v, longest) for v in self.variants}
        most = max(map(len, shown.values()))
        own = {v: len(self._windows_of(v, longest)) for v in self.variants}
        others = ", ".join(f"{label(v)} {n}" for v, n in own.items() if n and n != most)
        return (
            others and f"perplexities are over the {counted(most, 'window')} that variants share (measured: {others})"
        )

    def curve(self, variant: str, bins: int = 32) -> list[tuple[float, float]]:
        """Perplexity by position: (middle of the bin, perplexity there)."""
        lengths, points = self.read_lengths, []
        for after, length in pairwise([0, *lengths]):
            shown, losses = self._shown(variant, length), self.losses(variant, length)
            if parts := [losses[trial] for trial in losses if trial in shown]:
                table = np.stack(parts).astype(float)[:, max(0, after - 1) :]
                width = max(1, lengths[-1] // bins)
                for low in range(0, table.shape[1], width):
                    part = table[:, low : low + width]
                    points.append((after + low + part.shape[1] / 2, _exp(part.mean())))
        return points

    def bits_per_byte(self, variant: str, length: int, task: str = "perplexity") -> float | None:
        records = [r for r in self.of(variant, task) if r["length"] == length and r["loss"] is not None]
        records = [r for r in records if r["trial"] in self._shown(variant, length, task)]
        if not records:
            return None
        return sum(r["loss"] * r["tokens"] for r in records) / math.log(2) / sum(r["bytes"] for r in records)

    def key_tokens(self, variant: str) -> tuple[float, int] | None:
        """The perplexity on the key tokens (judged by the unextended model), and their number."""
        lengths = self.lengths("key_tokens")
        shown = self._shown(variant, lengths[-1]) if lengths else set()
        parts = [losses for trial, losses in self._key_losses(variant).items() if trial in shown]
        picked = np.concatenate(parts).astype(float) if parts else np.empty(0)
        return (_exp(picked.mean()), len(picked)) if len(picked) else None

    def _key_losses(self, variant: str) -> dict[int, np.ndarray]:
        """By window, the losses of the key tokens, in nats."""
        lengths = self.lengths("key_tokens")
        losses = self.losses(variant, lengths[-1]) if lengths else {}
        judged = next((found for v in (UNEXTENDED, *self.variants) if (found := self.of(v, "key_tokens"))), [])
        masks = {r["trial"]: unpacked(r, "mask") for r in judged}
        return {trial: losses[trial][mask[: len(losses[trial])]] for trial, mask in masks.items() if trial in losses}

    def key_difference(self, one: str, other: str | None = None) -> Difference | None:
        """The difference of the mean loss of the key tokens in nats, with its interval over independent windows.

        Args:
            other: None for the loss of `one` itself.

        None with fewer than two independent windows.
        """
        ours, theirs = self._key_losses(one), self._key_losses(one if other is None else other)
        trials = [trial for trial in ours if trial in theirs and len(ours[trial])]
        apart = self._apart(trials, self.lengths("key_tokens")[-1]) if trials else []
        if len({*apart}) < 2:
            return None
        mine, other_sums = ([float(part[k].astype(float).sum()) for k in trials] for part in (ours, theirs))
        if not all(map(math.isfinite, (*mine, *other_sums))):
            return None
        zero = [0.0] * len(trials)
        return paired_loss_difference(
            mine, zero if other is None else other_sums, [len(ours[k]) for k in trials], apart
        )

    def loss_difference(
        self, one: str, other: str, length: int, after: int = 0, task: str = "perplexity"
    ) -> Difference | None:
        """The difference of the mean loss in nats per token, on common windows.

        None with fewer than two independent windows.
        """
        windows = self._windows(one, other, length, after, task)
        return paired_loss_difference(*windows) if windows and len({*windows[-1]}) > 1 else None

    def loss_test(self, one: str, other: str, length: int, task: str = "perplexity") -> PairedTest | None:
        """As `loss_difference`, without the interval; of one window, p is 1."""
        windows = self._windows(one, other, length, 0, task)
        return paired_loss_test(*windows) if windows else None

    def _windows(
        self, one: str, other: str, length: int, after: int, task: str
    ) -> tuple[list[float], list[float], list[int], Sequence[Hashable]] | None:
        """For the common windows: both losses, the tokens, and the stretch of text."""
        ours, theirs = self._loss_sums(one, length, after, task), self._loss_sums(other, length, after, task)
        trials = [trial for trial in ours if trial in theirs]
        if not trials:
            return None
        one_sums, other_sums = ([losses[trial][0] for trial in trials] for losses in (ours, theirs))
        apart = self._apart(trials, length - after, task)
        # In float16 a loss may be NaN.
        if not all(map(math.isfinite, (*one_sums, *other_sums))):
            return None
        return one_sums, other_sums, [ours[trial][1] for trial in trials], apart

    def _loss_sums(self, variant: str, length: int, after: int, task: str) -> dict[int, tuple[float, int]]:
        """By window, the summed loss of the tokens from position `after` to `length`, and their number."""
        name = variant, length, after, task
        if name not in self._summed:
            self._summed[name] = {
                trial: (float(part.astype(float).sum()), len(part))
                for trial, losses in self.losses(variant, length, task).items()
                for part in [losses[max(0, after - 1) :]]
            }
        return self._summed[name]

    def _apart(self, trials: Sequence[int], span: int, task: str = "perplexity") -> Sequence[Hashable]:
        """The stretch of text of each window; of several texts, each is one stretch, as windows of one are alike."""
        if self._texts:
            return [self._texts[trial] for trial in trials]
        held = self.header.about.get("text_tokens")
        if held is None or self.header.about.get("documents") or task == "sliding_perplexity":
            return list(range(len(trials)))
        return window_stretches(trials, self.header.identity["seed"], span, held)

    @property
    def windows_apart(self) -> tuple[int, int]:
        """The number of windows of the longest length, and how many of them are independent."""
        lengths = self.read_lengths
        trials = max((list(self.losses(v, lengths[-1])) for v in self.variants), key=len, default=[]) if lengths else []
        return len(trials), len({*self._apart(trials, lengths[-1])}) if trials else 0

    # ------------------------------------------------------------------------------------ what it means

    def cost(self, variant: str) -> dict[int, Record]:
        """What a prompt of each length takes: the samples of the task `cost`."""
        return {record["length"]: record for record in self.of(variant, "cost")}

    def gate(self, variant: str) -> Gate:
        """The short-context regression of `variant`."""
        length = max(self.lengths("short"), default=self.trained_length)
        top1, own = (
            {r["trial"]: unpacked(r, "top1") for r in self.of(v, "short") if "top1" in r} for v in (UNEXTENDED, variant)
        )  # not every server returns it
        same = {trial: tokens == top1[trial] for trial, tokens in own.items() if trial in top1}
        within = [length for length in self.lengths(*self.retrieval_tasks) if length <= self.trained_length]
        retrieval = {task: self.difference(variant, UNEXTENDED, [task], within) for task in self.retrieval_tasks}
        return Gate(
            length=length,
            loss=self.loss_difference(variant, UNEXTENDED, length, task="short"),
            agreement=pooled_share({k: v.astype(float) for k, v in same.items()}) if same else None,
            retrieval={task: difference for task, difference in retrieval.items() if difference is not None},
        )

    def to_dict(self) -> dict[str, Any]:
        """Every figure with its interval, JSON-ready; infinite and NaN values become None."""
        lengths = self.read_lengths

        def figures(variant: str) -> dict[str, Any]:
            gate, retrieval = self.gate(variant), {task: self.by_length(variant, task) for task in self.retrieval_tasks}
            effective = self.effective_length(variant, self.deciding_tasks)
            key_loss, key_difference = self.key_difference(variant), None
            if UNEXTENDED in self.variants and variant != UNEXTENDED:
                key_difference = self.key_difference(variant, UNEXTENDED)
            return {
                "retrieval": {
                    task: {length: share._asdict() for length, share in shares.items()}
                    for task, shares in retrieval.items()
                },
                "effective_length": {rule: reached._asdict() for rule, reached in effective.items()},
                "perplexity": {
                    f"{after}-{length}": self.perplexity(variant, length, after)
                    for after, length in pairwise([0, *lengths])
                },
                "bits_per_byte": self.bits_per_byte(variant, lengths[-1]) if lengths else None,
                "curve": self.curve(variant),
                "key_tokens": self.key_tokens(variant),
                "key_loss": key_loss and key_loss._asdict(),
                "key_difference": key_difference and key_difference._asdict(),
                "cost": {n: {name: record[name] for name in COST} for n, record in self.cost(variant).items()},
                "gate": {
                    "length": gate.length,
                    "loss": gate.loss and gate.loss._asdict(),
                    "agreement": gate.agreement and gate.agreement._asdict(),
                    "retrieval": {task: difference._asdict() for task, difference in gate.retrieval.items()},
                },
            }

        windows = len(self.losses(self.variants[0], lengths[-1])) if lengths else 0
        measured = {variant: figures(variant) for variant in self.variants}
        return finite({**vars(self.header), "figures": measured, "windows": windows})

    @property
    def cannot_run(self) -> str:
        """Which variants cannot run at some lengths (blank cells), or ""."""
        longest = max(self.header.about["lengths"])
        limits = {v: about.get("limit") for v, about in self.header.variants.items() if v in self.variants}
        short = {v: limit for v, limit in limits.items() if limit is not None and limit < longest}
        return ", ".join(f"{label(v)} cannot run past {limit:,} tokens" for v, limit in short.items())

    @cached_property
    def beyond(self) -> list[int]:
        """The lengths beyond the trained one."""
        lengths = {*self.read_lengths, *self.lengths(*self.retrieval_tasks)}
        return [length for length in sorted(lengths) if length > self.trained_length]

    @cached_property
    def eliminated(self) -> list[str]:
        """The variants that a run with a time limit dropped, unless they were measured to the end later."""
        samples = Counter(record["variant"] for record in self.records)
        dropped = self.header.about.get("eliminated", [])
        most = max((n for v, n in samples.items() if v not in (UNEXTENDED, *dropped)), default=0)
        return [v for v in dropped if 0 < samples[v] < most]

    @property
    def not_portable(self) -> set[str]:
        """The variants whose extension config.json cannot express; unknown of a model that came extended."""
        return {name for name, about in self.header.variants.items() if about.get("portable") is False}


def _exp(loss: float) -> float:
    """A perplexity; infinite on overflow."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


def label(variant: str) -> str:
    """A variant's display name."""
    return "baseline" if variant == UNEXTENDED else variant

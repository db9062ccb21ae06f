"""Choose the variant of a results file to use, and say why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ctxext.evals.statistics import Difference, Interval, PairedTest, holm, in_percent
from ctxext.evals.summary import Summary
from ctxext.evals.targets import UNEXTENDED
from ctxext.methods import ContextMethod, RopeScaling, list_methods

# A comparison whose adjusted p is larger is a tie.
LEVEL = 0.05
# In nats per token: smaller differences of losses are negligible and decide nothing.
TIED_LOSS = 0.01

ACCURACY, LOSS, REGRESSION = "retrieval accuracy", "loss", "short-context regression"


@dataclass(frozen=True)
class Comparison:
    """A paired comparison of `one` with `other` on their common samples.

    Attributes:
        value: one - other: retrieval accuracy, or nats per token.
        p: adjusted for all comparisons of the results file; `alone` is unadjusted.
        clusters: the number of independent texts.
    """

    measure: str
    one: str
    other: str
    value: float
    p: float
    alone: float
    clusters: int

    def __str__(self) -> str:
        value = f"{100 * self.value:+.1f} points" if self.measure == ACCURACY else f"{self.value:+.3f} nats a token"
        return f"{self.measure} {value}, p = {self.p:.2g}"


class Comparisons:
    """All pairs of candidates by every measure, and each candidate's retrieval accuracy against the baseline's.

    The p-values are from exact paired tests (`statistics.paired_test`), adjusted jointly by Holm's procedure: among
    equal methods, any is called better or worse in at most 5% of runs.

    Args:
        left: number of candidates eliminated earlier, which count as compared.

    Attributes:
        family: the number of comparisons that p is adjusted for.
    """

    def __init__(self, summary: Summary, candidates: Sequence[str], left: int = 0) -> None:
        short, longest = max(summary.lengths("short"), default=0), summary.beyond[-1]
        pairs = list(combinations(candidates, 2))
        raw: list[tuple[str, str, str, PairedTest | None]] = [
            *((ACCURACY, one, other, _tested(summary, one, other)) for one, other in pairs),
            *((ACCURACY, one, UNEXTENDED, _tested(summary, one, UNEXTENDED)) for one in candidates),
            *((LOSS, one, other, summary.loss_test(one, other, longest)) for one, other in pairs),
            *((REGRESSION, one, other, summary.loss_test(one, other, short, "short")) for one, other in pairs),
        ]
        found = [(measure, one, other, test) for measure, one, other, test in raw if test is not None]
        started = len(candidates) + left
        measures = {measure: started * (started - 1) // 2 for measure, _, other, _ in found if other != UNEXTENDED}
        self.family = sum(measures.values()) + started * any(other == UNEXTENDED for _, _, other, _ in found)
        adjusted = holm([test.p for _, _, _, test in found], self.family)
        self._found = {
            (measure, one, other): Comparison(measure, one, other, test.value, p, test.p, test.clusters)
            for (measure, one, other, test), p in zip(found, adjusted)
        }

    def between(self, measure: str, one: str, other: str) -> Comparison | None:
        """None if the two have no common samples."""
        if (measure, one, other) in self._found:
            return self._found[measure, one, other]
        turned = self._found.get((measure, other, one))
        return turned and replace(turned, one=one, other=other, value=-turned.value)

    def behind(self, measure: str, one: str, others: Sequence[str], adjusted: bool = True) -> Comparison | None:
        """The most significant comparison in which `one` is worse; None if it ties with all others."""
        worse = -1 if measure == ACCURACY else 1
        margin = TIED_LOSS if measure == LOSS else 0.0
        against = [c for other in others if other != one and (c := self.between(measure, one, other))]
        lost = [c for c in against if (c.p if adjusted else c.alone) < LEVEL and worse * c.value > margin]
        return min(lost, key=lambda c: (c.alone, -abs(c.value)), default=None)

    def front(self, measure: str, variants: Sequence[str], adjusted: bool = True) -> list[str]:
        """The candidates that no other is significantly better than; all of them if that leaves none (on different
        samples)."""
        return [v for v in variants if self.behind(measure, v, variants, adjusted) is None] or list(variants)

    def texts(self, measure: str) -> int:
        """The largest number of independent texts in a comparison."""
        return max((c.clusters for c in self._found.values() if c.measure == measure), default=0)


def texts_needed(comparisons: int) -> int:
    """The independent texts n that must all agree for one of so many comparisons to be significant: 2^(1-n) < 5%/m."""
    return math.floor(1 + math.log2(max(1, comparisons) / LEVEL)) + 1


@dataclass(frozen=True)
class Choice:
    """The choice, and its reasons.

    Attributes:
        variant: the one to use.
        tied: the others that are not significantly worse than any candidate.
        behind: the rest, each with the comparison that shows it, or None if its loss is not finite. Both lists begin
            with the best point estimate.
        decided: why `variant` was chosen among the tied ones; "" without ties.
        gain: the difference of its retrieval accuracy to the baseline's.
        needed: by measure, the number of independent texts that significance would need, if there were fewer.
        family: how many comparisons the p-values are adjusted for.
        started: the number of candidates.
    """

    variant: str
    tied: tuple[str, ...]
    behind: dict[str, Comparison | None]
    decided: str
    gain: Comparison | None
    needed: dict[str, int]
    family: int
    started: int

    @property
    def ranking(self) -> tuple[str, ...]:
        """All candidates, best first."""
        return self.variant, *self.tied, *self.behind


def candidates_of(summary: Summary) -> list[str]:
    """The usable extended variants with retrieval measured beyond the trained length; without any, those with
    losses."""
    extended = [v for v in summary.variants if v != UNEXTENDED and _is_for_use(summary, v)]
    asked = [v for v in extended if found_share(summary, v) is not None]
    return asked or [v for v in extended if summary_loss(summary, v) < math.inf]


def choose(summary: Summary, candidates: Sequence[str], left: int = 0) -> Choice:
    """The candidate to use.

    A candidate is behind if its retrieval accuracy beyond the trained length is significantly lower than another's; or,
    among the others, if its loss over windows of the longest length is not finite, or significantly larger than
    another's by more than TIED_LOSS. The rest are tied. Among the tied, candidates that are worse before the adjustment
    are set aside, and the cheapest of the rest is chosen: first one that plain transformers loads, then one without
    significantly more short-context regression, then the first in the run's order. With too few texts for any
    significant comparison, point estimates take precedence over cost. Missing measurements decide nothing.

    Args:
        left: number of candidates eliminated earlier, which count as compared.

    Raises:
        ValueError: there are no candidates.
    """
    if not candidates:
        raise ValueError("there are no candidates to choose from. Measure at least one extended variant.")
    tests = Comparisons(summary, candidates, left)
    order = by_measurement(summary, candidates)
    missed = {v: -share.value for v in order if (share := found_share(summary, v))}
    losses = {v: loss for v in order if (loss := summary_loss(summary, v)) < math.inf}
    measures = {measure: least for measure, least in ((ACCURACY, missed), (LOSS, losses)) if least}
    level = tests.front(ACCURACY, order)
    finite = [v for v in level if not _is_broken(summary, v)] or level
    front = tests.front(LOSS, finite)
    lost = {v: tests.behind(ACCURACY, v, order) or tests.behind(LOSS, v, finite) for v in order if v not in front}

    named, decided = front, []
    if measures and tests.texts(first := next(iter(measures))) < texts_needed(1):
        best = min(measures[first].get(v, math.inf) for v in front)
        named = [v for v in front if measures[first].get(v, math.inf) == best]
        if len(named) < len(front):
            decided.append(f"its measured {first} is the {'highest' if first == ACCURACY else 'lowest'}")
    likely = tests.front(LOSS, tests.front(ACCURACY, named, adjusted=False), adjusted=False)
    if len(likely) < len(named):
        decided.append("none is ahead of it before the adjustment")
    portable = [v for v in likely if v in summary.portable]
    if 0 < len(portable) < len(likely):
        decided.append("plain transformers loads it")
    cheapest = tests.front(REGRESSION, portable or likely)
    if len(cheapest) < len(portable or likely):
        decided.append(f"its {REGRESSION} is lower")
    if len(cheapest) > 1:
        decided.append("it comes first in the order of the run")
    chosen = min(cheapest, key=summary.variants.index)
    others = tuple(v for v in front if v != chosen)
    needed = texts_needed(tests.family)
    return Choice(
        chosen,
        others,
        lost,
        decided=" and ".join(decided) if others else "",
        gain=tests.between(ACCURACY, chosen, UNEXTENDED),
        needed={measure: needed for measure in measures if tests.texts(measure) < needed},
        family=tests.family,
        started=len(candidates) + left,
    )


def by_measurement(summary: Summary, candidates: Sequence[str]) -> list[str]:
    """The candidates ordered by point estimates, best first."""
    found = {v: share.value if (share := found_share(summary, v)) else 0.0 for v in candidates}
    loss = {v: summary_loss(summary, v) for v in candidates}
    return sorted(candidates, key=lambda v: (_is_broken(summary, v), -found[v], loss[v]))


@dataclass(frozen=True)
class Recommendation:
    """The variant to use (None without candidates), and the reasons as text."""

    variant: str | None
    text: str

    def __str__(self) -> str:
        return self.text


def recommended(summary: Summary) -> Recommendation:
    """The recommendation and its certainty, as one paragraph."""
    candidates = candidates_of(summary) if summary.beyond else []
    if not candidates:
        said = "No extended variant was measured beyond the trained length: nothing to recommend."
        return Recommendation(None, f"{said} {summary.not_counted}".rstrip())
    shared = summary.shared_by(candidates)
    if found_share(summary, candidates[0]) is not None and found_share(shared, candidates[0]) is None:
        return Recommendation(
            None,
            f"{', '.join(candidates)} have no samples in common beyond the trained length: nothing to recommend. "
            "Measure them with the same tasks, lengths and trials.",
        )
    choice = choose(shared, candidates)
    return Recommendation(choice.variant, " ".join(reasons(shared, choice)))


def all_figures(summary: Summary) -> dict[str, Any]:
    """Every figure with its interval and the recommendation, JSON-ready."""
    return {**summary.to_dict(), "recommendation": recommended(summary).text}


def reasons(summary: Summary, choice: Choice) -> list[str]:
    """The reasons for the choice, as sentences."""
    name = choice.variant
    said = [f"Use {name}." if len(choice.ranking) > 1 else f"{name}:"]
    share = found_share(summary, name, choice.started)
    if share is not None:
        asked_to = summary.lengths(*summary.deciding_tasks)[-1]
        together = f" (95% interval, simultaneous over {choice.started} methods)" if choice.started > 1 else ""
        said.append(
            f"Beyond the trained {summary.trained_length:,} tokens, up to {asked_to:,}, its {ACCURACY} is "
            f"{share.percent()}{together}."
        )
        if choice.gain is not None:
            value = f"{100 * choice.gain.value:+.1f} points against the baseline (p = {choice.gain.p:.2g})"
            sure = choice.gain.p < LEVEL and choice.gain.value > 0
            said.append(f"That is {value}{'' if sure else ', no evidence that it helps'}.")
        elif summary.cannot_run:
            said.append(f"There is no baseline there: {summary.cannot_run}.")
    if summary.not_counted:
        said.append(summary.not_counted)
    if choice.tied:
        said.append(f"Tied with {', '.join(choice.tied)}: {name} is named because {choice.decided}.")
        said += [
            f"No difference in {measure} can be significant with fewer than {texts} independent "
            f"{'texts (--trials)' if measure == ACCURACY else 'windows (--windows)'}."
            for measure, texts in choice.needed.items()
        ]
    if choice.behind:
        shown = [
            f"{v} ({f'{found} against {found.other}' if found else 'its loss is not finite'})"
            for v, found in choice.behind.items()
        ]
        said.append(f"Behind: {'; '.join(shown)}.")
    if choice.family > 1:
        said.append(f"Each p is of an exact paired test, adjusted by Holm for {choice.family} comparisons.")
    gate = summary.gate(name)
    if gate.loss is not None and gate.agreement is not None:
        said.append(
            f"The {REGRESSION} of {name} is {gate.loss.value:+.3f} nats a token, and its most likely token differs at "
            f"{in_percent(1 - gate.agreement.value, 1)}% of the positions."
        )
    return said


def found_share(summary: Summary, variant: str, comparisons: int = 1) -> Interval | None:
    """Mean retrieval accuracy beyond the trained length over the tasks that count, or None."""
    return summary.pooled(variant, summary.deciding_tasks, summary.beyond, comparisons)


def summary_loss(summary: Summary, variant: str) -> float:
    """In nats per token, over windows of the longest length; infinite if not measured or NaN."""
    loss = summary.loss(variant, summary.beyond[-1])
    return loss if loss is not None and math.isfinite(loss) else math.inf


def beyond_difference(summary: Summary, one: str, other: str) -> Difference | None:
    """The difference of retrieval accuracy beyond the trained length on common samples; p is unadjusted."""
    return summary.difference(one, other, summary.deciding_tasks, summary.beyond)


def short_regression(summary: Summary, variant: str) -> float:
    """The loss increase over the baseline within the trained length, in nats per token."""
    loss = summary.gate(variant).loss
    return 0.0 if loss is None else loss.value


def _tested(summary: Summary, one: str, other: str) -> PairedTest | None:
    return summary.test(one, other, summary.deciding_tasks, summary.beyond)


def _is_broken(summary: Summary, variant: str) -> bool:
    """Whether its loss was measured and is not finite."""
    return summary.loss(variant, summary.beyond[-1]) is not None and summary_loss(summary, variant) == math.inf


def _is_for_use(summary: Summary, variant: str) -> bool:
    """Whether a variant is usable; methods that cannot use a KV cache are for comparison only."""
    extension = summary.header.variants[variant].get("extension") or {}
    name = (extension.get("method") or {}).get("name")
    known = next((cls for cls in list_methods() if name in (cls.name, *cls.aliases)), ContextMethod)
    return not (issubclass(known, RopeScaling) and known.of_the_call)


def nats(difference: Difference) -> str:
    """Format a difference of losses."""
    return f"{difference.value:+.3f} nats a token [{difference.low:+.3f}, {difference.high:+.3f}]"

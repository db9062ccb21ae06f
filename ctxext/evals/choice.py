"""Which variant of a results file to use, and why."""

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
# In nats a token: a difference of losses that nobody would notice decides nothing.
TIED_LOSS = 0.01

ACCURACY, LOSS, REGRESSION = "retrieval accuracy", "loss", "short-context regression"


@dataclass(frozen=True)
class Comparison:
    """`one` against `other` on the samples that both have.

    Attributes:
        value: one - other: a share of passkeys found, or nats a token.
        p: adjusted for all comparisons of the results file; `alone` is that of this one alone.
        clusters: the independent texts behind it.
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
    """Every pair of candidates by every measure, and each candidate's retrieval accuracy against the baseline's.

    The p-values are those of exact paired tests (`statistics.paired_test`), adjusted together by Holm's procedure:
    where methods are equal, any one of them is called better or worse in at most 5% of runs.

    Args:
        left: candidates that left a race before these were compared, which count as compared.

    Attributes:
        family: how many comparisons p is adjusted for.
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
        """None where the two have no samples in common."""
        if (measure, one, other) in self._found:
            return self._found[measure, one, other]
        turned = self._found.get((measure, other, one))
        return turned and replace(turned, one=one, other=other, value=-turned.value)

    def behind(self, measure: str, one: str, others: Sequence[str], adjusted: bool = True) -> Comparison | None:
        """The surest comparison in which `one` is significantly worse; None where it ties with all of the others."""
        worse = -1 if measure == ACCURACY else 1
        margin = TIED_LOSS if measure == LOSS else 0.0
        against = [c for other in others if other != one and (c := self.between(measure, one, other))]
        lost = [c for c in against if (c.p if adjusted else c.alone) < LEVEL and worse * c.value > margin]
        return min(lost, key=lambda c: (c.alone, -abs(c.value)), default=None)

    def front(self, measure: str, variants: Sequence[str], adjusted: bool = True) -> list[str]:
        """Those that none of the others is significantly better than; all, where each has one (on other samples)."""
        return [v for v in variants if self.behind(measure, v, variants, adjusted) is None] or list(variants)

    def texts(self, measure: str) -> int:
        """The most independent texts behind a comparison."""
        return max((c.clusters for c in self._found.values() if c.measure == measure), default=0)


def texts_needed(comparisons: int) -> int:
    """The independent texts n that must all agree for one of so many comparisons to be significant: 2^(1-n) < 5%/m."""
    return math.floor(1 + math.log2(max(1, comparisons) / LEVEL)) + 1


@dataclass(frozen=True)
class Choice:
    """What was chosen, and by what.

    Attributes:
        variant: the one to use.
        tied: the others that are not significantly worse than any candidate.
        behind: the rest, with what shows it: a comparison, or None where the loss is not finite. Both begin with the
            best as measured.
        decided: why `variant` is named and not one of the tied; "" where there were none.
        gain: its retrieval accuracy against the baseline's.
        needed: by measure, the independent texts that any difference would need to be significant, where it has fewer.
        family: how many comparisons the p-values are adjusted for.
        started: how many candidates there were.
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
        """All candidates, the best first."""
        return self.variant, *self.tied, *self.behind


def candidates_of(summary: Summary) -> list[str]:
    """The extended variants for use whose retrieval was measured beyond the trained length; without any, whose loss."""
    extended = [v for v in summary.variants if v != UNEXTENDED and _is_for_use(summary, v)]
    asked = [v for v in extended if found_share(summary, v) is not None]
    return asked or [v for v in extended if summary_loss(summary, v) < math.inf]


def choose(summary: Summary, candidates: Sequence[str], left: int = 0) -> Choice:
    """The candidate to use.

    Behind is who has significantly less retrieval accuracy beyond the trained length than another candidate; then, of
    the others, whose loss over windows of the longest length is not finite, or significantly larger than another's by
    more than TIED_LOSS. All that is left is tied. Of the tied, those are set aside that another one is ahead of before
    the adjustment, and the cheapest of the rest is named: one that plain transformers loads before one that it does
    not, then one without significantly more short-context regression than another, then the first in the order of the
    run. With so few texts that not even one comparison could be significant, the best as measured come before the
    cheapest. What was not measured decides nothing.

    Args:
        left: candidates that left a race before, which count as compared.

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
    """The candidates, the best as measured first, whatever is significant."""
    found = {v: share.value if (share := found_share(summary, v)) else 0.0 for v in candidates}
    loss = {v: summary_loss(summary, v) for v in candidates}
    return sorted(candidates, key=lambda v: (_is_broken(summary, v), -found[v], loss[v]))


@dataclass(frozen=True)
class Recommendation:
    """The variant to use, None where there was nothing to choose from, and why, for people."""

    variant: str | None
    text: str

    def __str__(self) -> str:
        return self.text


def recommended(summary: Summary) -> Recommendation:
    """Which variant to use, and how sure that is: one paragraph."""
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
    """Why this one, for people: sentences."""
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
    """Retrieval accuracy beyond the trained length, a mean over the tasks that count; None where there is none."""
    return summary.pooled(variant, summary.deciding_tasks, summary.beyond, comparisons)


def summary_loss(summary: Summary, variant: str) -> float:
    """In nats a token, over windows of the longest length; infinite where it was not measured or is not a number."""
    loss = summary.loss(variant, summary.beyond[-1])
    return loss if loss is not None and math.isfinite(loss) else math.inf


def beyond_difference(summary: Summary, one: str, other: str) -> Difference | None:
    """How much more `one` finds beyond the trained length, on the samples of both; p is of this pair alone."""
    return summary.difference(one, other, summary.deciding_tasks, summary.beyond)


def short_regression(summary: Summary, variant: str) -> float:
    """Loss beyond the baseline's within the trained length, in nats a token."""
    loss = summary.gate(variant).loss
    return 0.0 if loss is None else loss.value


def _tested(summary: Summary, one: str, other: str) -> PairedTest | None:
    return summary.test(one, other, summary.deciding_tasks, summary.beyond)


def _is_broken(summary: Summary, variant: str) -> bool:
    """Whether its loss was measured and is not finite."""
    return summary.loss(variant, summary.beyond[-1]) is not None and summary_loss(summary, variant) == math.inf


def _is_for_use(summary: Summary, variant: str) -> bool:
    """Not so a method that can keep no key from one token to the next: it is there to be compared with."""
    extension = summary.header.variants[variant].get("extension") or {}
    name = (extension.get("method") or {}).get("name")
    known = next((cls for cls in list_methods() if name in (cls.name, *cls.aliases)), ContextMethod)
    return not (issubclass(known, RopeScaling) and known.of_the_call)


def nats(difference: Difference) -> str:
    """A difference of losses, for people."""
    return f"{difference.value:+.3f} nats a token [{difference.low:+.3f}, {difference.high:+.3f}]"

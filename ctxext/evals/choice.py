"""Choose the variant of a results file to use, and say why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ctxext.evals.statistics import Difference, Interval, PairedTest, holm, in_percent, texts_to_tell
from ctxext.evals.summary import Summary, label
from ctxext.evals.targets import UNEXTENDED
from ctxext.methods import ContextMethod, RopeScaling, list_methods
from ctxext.utils.values import counted

# Comparisons with a larger adjusted p are ties.
LEVEL = 0.05
# In nats per token: smaller loss differences are negligible and decide nothing.
TIED_LOSS = 0.01
# The difference of retrieval accuracy that the advice on the number of samples is for.
WORTHWHILE = 0.05

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

    @property
    def suffices(self) -> bool:
        """Whether it is enough to advise against `one`: significant before the adjustment, which protects claims and
        not users; or any difference, if there are too few texts for that."""
        return self.alone < LEVEL or self.clusters < texts_needed(1)

    @property
    def shown(self) -> str:
        return f"{100 * self.value:+.1f} points" if self.measure == ACCURACY else f"{self.value:+.3f} nats per token"

    def __str__(self) -> str:
        return f"{self.measure} {self.shown}, p = {self.p:.2g}"


class Comparisons:
    """All pairs of candidates by every measure, and each candidate's accuracy and loss against the baseline's.

    The p-values are from exact paired tests (`statistics.paired_test`), adjusted jointly by Holm's procedure: among
    equal methods, any is called better or worse in at most 5% of runs.

    Args:
        left: number of candidates eliminated earlier, which count as compared.

    Attributes:
        family: the number of comparisons that p is adjusted for.
    """

    def __init__(self, summary: Summary, candidates: Sequence[str], left: int = 0) -> None:
        short, longest = max(summary.lengths("short"), default=0), summary.loss_length or 0
        pairs, baseline = list(combinations(candidates, 2)), [(one, UNEXTENDED) for one in candidates]
        tests = {(ACCURACY, *pair): _tested(summary, *pair) for pair in pairs + baseline}
        tests |= {(LOSS, *pair): summary.loss_test(*pair, longest) for pair in pairs}
        tests |= {(LOSS, *pair): _longest_loss_test(summary, *pair) for pair in baseline}
        tests |= {(REGRESSION, *pair): summary.loss_test(*pair, short, "short") for pair in pairs}
        found = {key: test for key, test in tests.items() if test is not None}
        started = len(candidates) + left
        kinds = {(measure, other == UNEXTENDED) for measure, _, other in found}
        self.family = sum(started if against else started * (started - 1) // 2 for _, against in kinds)
        adjusted = holm([test.p for test in found.values()], self.family)
        self._found = {
            key: Comparison(*key, test.value, p, test.p, test.clusters)
            for (key, test), p in zip(found.items(), adjusted)
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
        margin = 0.0 if measure == ACCURACY else TIED_LOSS
        against = [c for other in others if other != one and (c := self.between(measure, one, other))]
        lost = [c for c in against if (c.p if adjusted else c.alone) < LEVEL and worse * c.value > margin]
        return min(lost, key=lambda c: (c.alone, -abs(c.value)), default=None)

    def front(self, measure: str, variants: Sequence[str], adjusted: bool = True) -> list[str]:
        """The candidates that no other is significantly better than; all of them if that leaves none (on different
        samples)."""
        return [v for v in variants if self.behind(measure, v, variants, adjusted) is None] or list(variants)

    def worse_than_baseline(self, one: str) -> Comparison | None:
        """As `Choice.worse`."""
        found, loss = (self.between(measure, one, UNEXTENDED) for measure in (ACCURACY, LOSS))
        if found is not None and found.value < 0 and found.suffices:
            return found
        finds_more = found is not None and found.value > 0 and found.suffices
        return loss if loss is not None and not finds_more and loss.value > TIED_LOSS and loss.suffices else None

    def against_baseline(self, one: str) -> list[Comparison]:
        """By retrieval accuracy, then by loss, as far as measured."""
        return [found for measure in (ACCURACY, LOSS) if (found := self.between(measure, one, UNEXTENDED))]

    def helps(self, one: str) -> bool:
        """As `Choice.helps`."""
        found = self.against_baseline(one)
        return not found or any(map(_is_better, found))

    def texts(self, measure: str) -> int:
        """The largest number of independent texts in a comparison."""
        return max((c.clusters for c in self._found.values() if c.measure == measure), default=0)


def texts_needed(comparisons: int) -> int:
    """The independent texts n that must all agree for one of `comparisons` to be significant: 2^(1-n) < 5%/m."""
    return math.floor(1 + math.log2(max(1, comparisons) / LEVEL)) + 1


@dataclass(frozen=True)
class Choice:
    """The choice, and its reasons.

    Attributes:
        variant: the one to use.
        tied: the others that are not significantly worse than any candidate.
        behind: those that are significantly worse than one of these or the baseline, each with the comparison that
            shows it, or None if its loss is not finite.
        aside: the rest, which measured worse than the baseline. All lists begin with the best point estimate.
        decided: why `variant` was chosen among the tied ones; "" without ties.
        gain: its retrieval accuracy against the baseline's; if that is not higher, its loss where that is lower.
        worse: why it is not recommended: its retrieval accuracy is worse than the baseline's, or its loss is and it
            does not find more (`Comparison.suffices`).
        helps: whether its retrieval accuracy is higher, or its loss lower, than the baseline's, or that is unknown.
        needed: by measure, the number of independent texts that significance would need and the number that there is,
            if that is smaller.
        family: how many comparisons the p-values are adjusted for.
        started: the number of candidates.
    """

    variant: str
    tied: tuple[str, ...]
    behind: dict[str, Comparison | None]
    aside: dict[str, Comparison]
    decided: str
    gain: Comparison | None
    worse: Comparison | None
    helps: bool
    needed: dict[str, tuple[int, int]]
    family: int
    started: int

    @property
    def ranking(self) -> tuple[str, ...]:
        """All candidates, best first."""
        return self.variant, *self.tied, *self.behind, *self.aside


def candidates_of(summary: Summary) -> list[str]:
    """The usable extended variants with retrieval measured beyond the trained length; without any, those with
    losses."""
    out = {UNEXTENDED, *summary.eliminated}
    extended = [v for v in summary.variants if v not in out and _is_for_use(summary, v)]
    asked = [v for v in extended if found_share(summary, v) is not None]
    return asked or [v for v in extended if any(summary.loss(v, length) is not None for length in summary.beyond)]


def choose(summary: Summary, candidates: Sequence[str], left: int = 0) -> Choice:
    """The candidate to use.

    Candidates whose loss is not finite, or that are worse than the baseline, are set aside first, unless that leaves
    none. Of the others, a candidate is behind if its retrieval accuracy beyond the trained length is significantly
    lower than another's; or, among the rest, if its loss over windows of the longest length is significantly larger
    than another's by more than TIED_LOSS. The rest are tied. Among the tied, those no better than the baseline, or
    worse than another before the adjustment, are passed over, and the cheapest is chosen: first one that plain
    transformers loads, then one without significantly more short-context regression, then the best as measured. With
    too few texts for any significant comparison, point estimates take precedence over cost. Missing measurements decide
    nothing.

    Args:
        left: number of candidates eliminated earlier, which count as compared.

    Raises:
        ValueError: there are no candidates.
    """
    if not candidates:
        raise ValueError("there are no candidates to choose from. Measure at least one extended variant.")
    tests = Comparisons(summary, candidates, left)
    order = by_measurement(summary, candidates)
    worse = {v: found for v in order if (found := tests.worse_than_baseline(v))}
    usable = [v for v in order if not _is_broken(summary, v)] or order
    sound = [v for v in usable if v not in worse] or usable
    level = tests.front(ACCURACY, sound)
    front = tests.front(LOSS, level)
    behind: dict[str, Comparison | None] = {}
    for v in order:
        found = tests.behind(ACCURACY, v, [*sound, UNEXTENDED]) or tests.behind(LOSS, v, [*level, UNEXTENDED])
        if v not in front and (found or v not in usable):
            behind[v] = found if v in usable else None
    aside = {v: found for v, found in worse.items() if v not in front and v not in behind}

    named, decided = front, list[str]()
    shares = {v: share.value for v in order if (share := found_share(summary, v))}
    with_losses = _all_have_losses(summary, candidates)
    estimates = shares or ({v: -summary_loss(summary, v) for v in order} if with_losses else {})
    measures = [name for name, known in ((ACCURACY, shares), (LOSS, summary.loss_length)) if known]

    def keep(those: Sequence[str], why: str) -> list[str]:
        if 0 < len(those) < len(named):
            decided.append(f"among those {why}" if decided and not why.startswith("plain") else why)
        return list(those) or named

    if estimates and tests.texts(measures[0]) < texts_needed(1):
        best = max(estimates[v] for v in named)
        named = keep(
            [v for v in named if estimates[v] == best],
            f"no other measured a {'higher' if shares else 'lower'} {measures[0]}",
        )
    named = keep([v for v in named if tests.helps(v)], "it measured better than the baseline")
    likely = tests.front(LOSS, tests.front(ACCURACY, named, adjusted=False), adjusted=False)
    named = keep(likely, "none beats it before the adjustment")
    named = keep([v for v in named if v not in summary.not_portable], "plain transformers loads it")
    named = keep(tests.front(REGRESSION, named), f"its {REGRESSION} is lower")
    chosen, *rest = [v for v in order if v in named]
    if rest:
        finds, loses = ([_measurement(summary, v, with_losses)[k] for v in (chosen, rest[0])] for k in (1, 2))
        keep(
            [chosen],
            f"its measured {ACCURACY} is the highest"
            if finds[0] < finds[1]
            else f"its measured {LOSS} is the lowest"
            if loses[0] < loses[1]
            else "it comes first in the alphabet",
        )
    others, against = tuple(v for v in front if v != chosen), tests.against_baseline(chosen)
    needed = texts_needed(tests.family)
    return Choice(
        chosen,
        others,
        behind,
        aside,
        decided=", and ".join(decided) if others else "",
        gain=next(filter(_is_better, against), next(iter(against), None)),
        worse=worse.get(chosen),
        helps=tests.helps(chosen),
        needed={measure: (needed, held) for measure in measures if (held := tests.texts(measure)) < needed},
        family=tests.family,
        started=len(candidates) + left,
    )


def by_measurement(summary: Summary, candidates: Sequence[str]) -> list[str]:
    """The candidates ordered by point estimates, best first; equal ones by name, as the order of a run says nothing."""
    with_losses = _all_have_losses(summary, candidates)
    return sorted(candidates, key=lambda v: (_measurement(summary, v, with_losses), v))


def _measurement(summary: Summary, variant: str, with_losses: bool) -> tuple[bool, float, float]:
    """Smaller is better; losses count `with_losses`, where all candidates have one."""
    share = found_share(summary, variant)
    loss = summary_loss(summary, variant) if with_losses else 0.0
    return _is_broken(summary, variant), -share.value if share else 0.0, loss


def _all_have_losses(summary: Summary, candidates: Sequence[str]) -> bool:
    return all(summary.loss(v, summary.loss_length or 0) is not None for v in candidates)


def _is_better(comparison: Comparison) -> bool:
    """Whether `one` is better by more than a negligible difference, certain or not."""
    return comparison.value > 0 if comparison.measure == ACCURACY else comparison.value < -TIED_LOSS


@dataclass(frozen=True)
class Recommendation:
    """The variant to use (None without candidates), the reasons as text, and all candidates, best first."""

    variant: str | None
    text: str
    ranking: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


def recommended(summary: Summary) -> Recommendation:
    """The recommendation and its certainty, as one paragraph."""
    candidates = candidates_of(summary) if summary.beyond else []
    if not candidates:
        said = "No extended variant was measured beyond the trained length: nothing to recommend."
        return Recommendation(None, f"{said} {summary.not_counted}".rstrip())
    shared = summary.shared_by(candidates)
    asked = found_share(summary, candidates[0]) is not None
    if found_share(shared, candidates[0]) is None if asked else shared.loss_length is None:
        return Recommendation(
            None,
            f"{', '.join(candidates)} have no samples in common beyond the trained length: nothing to recommend. "
            "Measure them with the same tasks, lengths, trials and windows.",
        )
    if all(_is_broken(shared, v) for v in candidates):
        return Recommendation(None, f"No method is recommended: the loss of {', '.join(candidates)} is not finite.")
    factors = {v: factor for v in candidates if (factor := _factor(summary, v))}
    least = min(factors.values(), default=1.0) * summary.trained_length
    if len({*factors.values()}) > 1 and summary.beyond[-1] > least:
        shown = ", ".join(f"{v} ×{factor:g}" for v, factor in factors.items())
        return Recommendation(
            None,
            f"Nothing is recommended, because the factors differ ({shown}) and lengths beyond the smallest target were "
            f"measured. Measure up to {least:,.0f} tokens, or every method at one factor.",
        )
    choice = choose(shared, candidates, left=len(summary.eliminated))
    chosen = None if choice.worse or not choice.helps else choice.variant
    return Recommendation(chosen, " ".join(reasons(shared, choice)), choice.ranking)


def all_figures(summary: Summary) -> dict[str, Any]:
    """Every figure with its interval and the recommendation, JSON-ready."""
    return {**summary.to_dict(), "recommendation": recommended(summary).text}


def reasons(summary: Summary, choice: Choice) -> list[str]:
    """The reasons for the choice, as sentences."""
    name = choice.variant
    gain = choice.gain
    sure = gain is None or (gain.p < LEVEL and (gain.value > 0) == (gain.measure == ACCURACY))
    said = [f"{name}:" if len(choice.ranking) == 1 else f"Use {name}." if sure else f"Best as measured: {name}."]
    first, advised = f"The first, {name}," if len(choice.ranking) > 1 else name, choice.helps and not choice.worse
    if choice.worse:
        said = [f"No method is recommended. {first} did worse than the baseline ({choice.worse})."]
    elif not choice.helps:
        said = [f"No method is recommended. {first} measured no better than the baseline."]
    share = found_share(summary, name, choice.started)
    if share is not None:
        asked_to = summary.lengths(*summary.deciding_tasks)[-1]
        together = f" (95% interval, simultaneous over {choice.started} methods)" if choice.started > 1 else ""
        said.append(
            f"Beyond the trained {summary.trained_length:,} tokens, up to {asked_to:,}, its {ACCURACY} is "
            f"{share.percent()}{together}."
        )
    if gain is not None and not choice.worse:
        what = "That" if gain.measure == ACCURACY else f"Its {LOSS}"
        how_many = counted(gain.clusters, f"independent {'text' if gain.measure == ACCURACY else 'window'}")
        said.append(
            f"{what} is {gain.shown} against the baseline (p = {gain.p:.2g})"
            f"{'' if sure else f', which is not significant with {how_many}'}."
        )
    elif summary.cannot_run and not choice.worse:
        said.append(f"The baseline was not measured there: {summary.cannot_run}.")
    if summary.not_counted:
        said.append(summary.not_counted)
    if choice.tied:
        comes = "is recommended" if advised else "comes first"
        said.append(f"Tied with {', '.join(choice.tied)}: {name} {comes} because {choice.decided}.")
        said += [
            f"No difference in {measure} can be significant with fewer than {texts} independent "
            f"{'texts' if measure == ACCURACY else 'windows'}; there {'is' if held == 1 else 'are'} {held}."
            for measure, (texts, held) in choice.needed.items()
        ]
        if (advice := prompts_to_tell(summary, choice)) is not None:
            said.append(
                f"To tell {100 * WORTHWHILE:.0f} points apart takes about {advice[0]:,} prompts per length and depth "
                f"(there {'is' if advice[1] == 1 else 'are'} {advice[1]:,}), from a longer text."
            )
    if choice.behind:
        shown = [
            f"{v} ({f'{found} against {label(found.other)}' if found else 'its loss is not finite'})"
            for v, found in choice.behind.items()
        ]
        said.append(f"Behind: {'; '.join(shown)}.")
    if choice.aside:
        shown = [f"{v} ({found})" for v, found in choice.aside.items()]
        said.append(f"Set aside, as measured worse than the baseline: {'; '.join(shown)}.")
    if choice.family > 1:
        said.append(f"p-values are from exact paired tests, Holm-adjusted for {choice.family} comparisons.")
    gate = summary.gate(name)
    if gate.loss is not None:
        differs = ""
        if gate.agreement is not None:
            other = in_percent(1 - gate.agreement.value, 1)
            differs = f", and its most likely token differs at {other}% of the positions"
        said.append(f"The {REGRESSION} of {name} is {gate.loss.value:+.3f} nats per token{differs}.")
    if summary.eliminated:
        names = ", ".join(summary.eliminated)
        said.append(f"Dropped early to save time, as others did better so far: {names}.")
    if said == [f"{name}:"]:
        return [f"Only {name} was measured beyond the trained length: nothing to compare it with."]
    return said


def prompts_to_tell(summary: Summary, choice: Choice) -> tuple[int, int] | None:
    """How many prompts per cell tell `choice.variant` from the tied variant least like it if their retrieval accuracies
    differ by WORTHWHILE, in 80% of measurements, and how many there are; None if that many are enough."""
    tests = [test for other in choice.tied if (test := _tested(summary, choice.variant, other))]
    if not tests:
        return None
    needed, of = max((texts_to_tell(WORTHWHILE, test, choice.family), test.clusters) for test in tests)
    wanted = {(task, length) for task in summary.deciding_tasks for length in summary.beyond}
    trials = {(r["task"], r["length"], r["trial"]) for r in summary.records if r["variant"] == choice.variant}
    held = max(Counter((task, length) for task, length, _ in trials if (task, length) in wanted).values())
    return (math.ceil(held * needed / of), held) if needed > of else None


def found_share(summary: Summary, variant: str, comparisons: int = 1) -> Interval | None:
    """Mean retrieval accuracy beyond the trained length over the tasks that count, or None."""
    return summary.pooled(variant, summary.deciding_tasks, summary.beyond, comparisons)


def summary_loss(summary: Summary, variant: str) -> float:
    """In nats per token, over windows of the longest length; infinite if not measured or NaN."""
    loss = summary.loss(variant, summary.loss_length or 0)
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


def _longest_loss_test(summary: Summary, one: str, other: str) -> PairedTest | None:
    """On windows of the longest length beyond the trained one that both have."""
    tests = (summary.loss_test(one, other, length) for length in reversed(summary.beyond))
    return next((test for test in tests if test is not None), None)


def _is_broken(summary: Summary, variant: str) -> bool:
    """Whether its loss was measured, beyond the trained length or within, and is not finite."""
    short = max(summary.lengths("short"), default=0)
    losses = summary.loss(variant, summary.loss_length or 0), summary.loss(variant, short, task="short")
    return any(loss is not None and not math.isfinite(loss) for loss in losses)


def _factor(summary: Summary, variant: str) -> float | None:
    """The factor that a variant is extended by."""
    factor = (summary.header.variants[variant].get("extension") or {}).get("factor")
    return factor if isinstance(factor, int | float) else None


def _is_for_use(summary: Summary, variant: str) -> bool:
    """Whether a variant is usable; methods that cannot use a KV cache are for comparison only."""
    extension = summary.header.variants[variant].get("extension") or {}
    name = (extension.get("method") or {}).get("name")
    known = next((cls for cls in list_methods() if name in (cls.name, *cls.aliases)), ContextMethod)
    return not (issubclass(known, RopeScaling) and known.of_the_call)


def nats(difference: Difference) -> str:
    """Format a difference of losses."""
    return f"{difference.value:+.3f} nats per token [{difference.low:+.3f}, {difference.high:+.3f}]"

"""Which variant of a results file to use, and why."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxext.evals.statistics import Difference, Interval
from ctxext.evals.targets import UNEXTENDED
from ctxext.methods import ContextMethod, RopeScaling, list_methods

if TYPE_CHECKING:
    from ctxext.evals.summary import Summary

# Two variants whose difference has a larger p are not told apart.
LEVEL = 0.05
# Differences that nobody would notice decide nothing: shares found, and nats a token.
TIED_FOUND, TIED_LOSS = 0.05, 0.01


@dataclass(frozen=True)
class Choice:
    """What was chosen, and by what.

    Attributes:
        variant: the one to use.
        tied: the others that these samples do not tell apart from it in what they find and in their loss.
        behind: the rest. Both begin with the next best.
        decided: what decided among the tied ones, for people; "" where there were none.
    """

    variant: str
    tied: tuple[str, ...]
    behind: tuple[str, ...]
    decided: str

    @property
    def ranking(self) -> tuple[str, ...]:
        """All candidates, the best first."""
        return self.variant, *self.tied, *self.behind


def candidates_of(summary: Summary) -> list[str]:
    """The extended variants for use whose retrieval was measured beyond the trained length; without any, whose loss."""
    extended = [v for v in summary.variants if v != UNEXTENDED and _is_for_use(summary, v)]
    asked = [v for v in extended if found_share(summary, v) is not None]
    return asked or [v for v in extended if summary_loss(summary, v) < math.inf]


def choose(summary: Summary, candidates: Collection[str]) -> Choice:
    """The candidate to use.

    What is found beyond the trained length comes first, of those whose loss is a number; those not surely behind the
    best there, nor by more than TIED_FOUND, are held to the least loss over windows of the longest length, give or take
    TIED_LOSS. What is left is tied: those that plain transformers runs go before those that it cannot run, and then the
    least price counts. What was not measured decides nothing.
    """
    loss = {v: summary_loss(summary, v) for v in candidates}
    found = {v: share.value if (share := found_share(summary, v)) else 0.0 for v in candidates}
    order = sorted(candidates, key=lambda v: (loss[v] == math.inf, -found[v], loss[v]))
    level = [v for v in order if not _behind(beyond_difference(summary, v, order[0]))]
    least = min(loss[v] for v in level)
    tied = [v for v in level if loss[v] <= least + TIED_LOSS]
    portable = summary.portable
    chosen, *others = sorted(tied, key=lambda v: (v not in portable, price(summary, v)))
    alike = [(v in portable) == (chosen in portable) for v in others]
    priced = summary.gate(chosen).loss is not None
    last = "it costs least within the trained length" if priced else "it comes first by what it finds and its loss"
    decided = ["plain transformers runs it"] * (not all(alike)) + [last] * any(alike)
    return Choice(chosen, tuple(others), tuple(v for v in order if v not in tied), " and ".join(decided))


def reasons(summary: Summary, choice: Choice) -> list[str]:
    """Why this one, for people: sentences."""
    name, longest = choice.variant, summary.beyond[-1]
    said = [f"Use {name}." if len(choice.ranking) > 1 else f"{name}:"]
    share = found_share(summary, name)
    if share is not None:
        said.append(
            f"Beyond the trained {summary.trained_length:,} tokens, up to {longest:,}, it finds {share.percent()} in "
            "retrieval."
        )
        gain = beyond_difference(summary, name, UNEXTENDED)
        if gain is not None:
            sure = "" if gain.p < LEVEL and gain.value > 0 else ", which is no proof that it helps at all"
            said.append(f"That is {points(gain)} against the unextended model{sure}.")
        elif summary.cannot_run:
            said.append(f"There is nothing to hold against it: {summary.cannot_run}.")
    if choice.tied:
        what = "Neither what they find nor their loss tells" if share is not None else "Their loss does not tell"
        said.append(f"{what} it apart from {', '.join(choice.tied)}: it is taken as {choice.decided}.")
    if choice.behind:
        behind = choice.behind[0]
        found, loss = beyond_difference(summary, behind, name), summary.loss_difference(behind, name, longest)
        if _behind(found):
            said.append(f"The next, {behind}, is behind: {points(found)}.")
        elif loss is not None:
            said.append(f"The next, {behind}, is behind: {nats(loss)} over windows of {longest:,} tokens.")
        else:
            said.append(f"The next, {behind}, is behind in loss; one window of text does not show how sure that is.")
    gate = summary.gate(name)
    if gate.loss is not None and gate.agreement is not None:
        said.append(
            f"The price of {name} within the trained length: {nats(gate.loss)}, and another most likely token at "
            f"{1 - gate.agreement.value:.1%} of the places."
        )
    return said


def found_share(summary: Summary, variant: str) -> Interval | None:
    """The share found beyond the trained length; None where it was not measured."""
    return summary.pooled(variant, summary.retrieval_tasks, summary.beyond)


def summary_loss(summary: Summary, variant: str) -> float:
    """In nats a token, over windows of the longest length; infinite where it was not measured or is no number."""
    perplexity = summary.perplexity(variant, summary.beyond[-1])
    return math.log(perplexity) if perplexity is not None and math.isfinite(perplexity) else math.inf


def beyond_difference(summary: Summary, one: str, other: str) -> Difference | None:
    """How much more `one` finds beyond the trained length, on the samples of both."""
    return summary.difference(one, other, summary.retrieval_tasks, summary.beyond)


def price(summary: Summary, variant: str) -> float:
    """More loss than the unextended model's within the trained length, in nats a token."""
    loss = summary.gate(variant).loss
    return 0.0 if loss is None else loss.value


def _behind(difference: Difference | None) -> bool:
    return difference is not None and difference.value < 0 and (difference.p < LEVEL or -difference.value > TIED_FOUND)


def _is_for_use(summary: Summary, variant: str) -> bool:
    """Not so a method that can keep no key from one token to the next: it is there to be compared with."""
    extension = summary.header.variants[variant].get("extension") or {}
    method = extension.get("method")
    name = method["name"] if isinstance(method, dict) else method
    known = next((cls for cls in list_methods() if name in (cls.name, *cls.aliases)), ContextMethod)
    return not (issubclass(known, RopeScaling) and known.of_the_call) or "length" in extension


def points(difference: Difference | None) -> str:
    """A difference of shares, for people."""
    if difference is None:
        return "not measured"
    low, high = 100 * difference.low, 100 * difference.high
    return (
        f"{100 * difference.value:+.1f} points [{low:+.1f}, {high:+.1f}] (p = {difference.p:.2g}, n = {difference.n})"
    )


def nats(difference: Difference) -> str:
    """A difference of losses, for people."""
    return f"{difference.value:+.3f} nats a token [{difference.low:+.3f}, {difference.high:+.3f}]"

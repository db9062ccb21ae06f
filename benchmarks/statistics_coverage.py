"""How often 95% intervals hold the truth, and how often equal methods are told apart, on simulated samples.

    python benchmarks/statistics_coverage.py

Fixed sizes, sizes that `eval --minutes` reaches by giving samples to the widest interval, the rounds of
`compare --minutes`, and the number of prompts that `compare` advises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import numpy as np
from choice import Setting, claims, raced
from numpy.typing import NDArray
from report import Report, options

from ctxext.evals.choice import LEVEL, WORTHWHILE
from ctxext.evals.statistics import (
    mean_share,
    paired_difference,
    paired_loss_difference,
    paired_test,
    pooled_share,
    texts_to_tell,
    wilson,
)
from ctxext.evals.timed import FIRST, widest

Rng = np.random.Generator
Hits = NDArray[np.bool_]
POWER = 0.8
# Figures of equal methods, whose lower ends hold together in 95% of runs.
FALSE_CLAIMS = 7
# What intervals of 95% must hold on average over the settings; simulation itself is uncertain by a point.
COVERED = 0.94


def clustered(hits: Hits) -> dict[int, list[float]]:
    """The scores of each text, of hits of shape (trials, depths)."""
    return {k: row.astype(float).tolist() for k, row in enumerate(hits)}


def rates() -> Iterable[Setting]:
    for rate, trials, alike in product((0.05, 0.3, 0.7, 0.95), (10, 20, 50), (0.0, 0.5)):
        yield Setting(2, rate, trials=trials, depths=5, alike=alike, shared=0.5)


def holds_rate(setting: Setting, rng: Rng) -> bool:
    found = pooled_share(clustered(setting.hits(rng, [setting.rate])[0]))
    return found.low <= setting.rate <= found.high


def holds_mean(setting: Setting, rng: Rng) -> bool:
    """Over four tasks that differ."""
    truths = np.clip(setting.rate + np.array([-0.2, 0.0, 0.05, 0.1]), 0.02, 0.98)
    found = mean_share([clustered(setting.hits(rng, [rate])[0]) for rate in truths])
    return found.low <= truths.mean() <= found.high


def labelled(setting: Setting) -> list[int]:
    return np.repeat(np.arange(setting.trials), setting.depths).tolist()


def holds_difference(setting: Setting, rng: Rng) -> bool:
    other = min(0.98, setting.rate + 0.1)
    one, two = setting.hits(rng, [setting.rate, other]).reshape(2, -1).astype(float)
    found = paired_difference(one.tolist(), two.tolist(), labelled(setting), resamples=500)
    return found.low <= setting.rate - other <= found.high


def tells_equals(setting: Setting, rng: Rng) -> bool:
    one, two = setting.hits(rng, [setting.rate] * 2).reshape(2, -1).astype(float)
    return paired_test(one.tolist(), two.tolist(), labelled(setting)).p < LEVEL


def holds_loss(windows: int, rng: Rng) -> bool:
    """Two models that differ by 0.05 nats, on windows that differ more."""
    text = rng.normal(3, 0.5, windows)
    one, two = (100 * (text + shift + rng.normal(0, 0.05, windows)) for shift in (0.05, 0.0))
    found = paired_loss_difference(one.tolist(), two.tolist(), [100] * windows, resamples=500)
    return found.low <= 0.05 <= found.high


def holds_where_widest(setting: Setting, rng: Rng) -> list[bool]:
    """Cells of four rates, as `eval --minutes` measures them until they have `setting.trials` texts in all."""
    truths = (0.95, setting.rate, 0.3, 0.05)
    drawn = setting.hits(rng, truths)
    n = dict.fromkeys(range(len(truths)), FIRST)
    while sum(n.values()) < setting.trials:
        found = {k: pooled_share(clustered(drawn[k, : n[k]])) for k in n}
        most = widest({k: share.high - share.low for k, share in found.items()})
        assert most is not None
        n[most] += max(1, n[most] // 2)
    found = {k: pooled_share(clustered(drawn[k, : n[k]])) for k in n}
    return [found[k].low <= truth <= found[k].high for k, truth in enumerate(truths)]


def told(setting: Setting, rng: Rng, difference: float) -> tuple[int, bool]:
    """The prompts that a first measurement advises, and whether a second one of that size finds a difference."""

    def test(trials: int, better: float) -> Any:
        of = Setting(2, setting.rate, trials=trials, shared=setting.shared)
        one, two = of.hits(rng, [of.rate, of.rate + better]).reshape(2, -1).astype(float)
        return paired_test(one.tolist(), two.tolist())

    needed = texts_to_tell(WORTHWHILE, test(setting.trials, difference), power=POWER)
    return needed, test(needed, difference).p < LEVEL


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/statistics_coverage.json")
    parser.add_argument("--runs", type=int, default=200, help="of each setting")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report, rng = Report("statistics_coverage", seed=args.seed), np.random.default_rng(args.seed)

    def covered(name: str, settings: Iterable[Any], holds: Callable[[Any, Rng], bool]) -> None:
        counts = [sum(bool(holds(setting, rng)) for _ in range(args.runs)) for setting in settings]
        report.add(f"{name}: coverage", sum(counts) / (args.runs * len(counts)), at_least=COVERED)
        report.add(f"{name}: the worst setting", min(counts) / args.runs)
        highest = wilson(min(counts), args.runs, comparisons=len(counts)).high
        report.add(f"{name}: the worst setting, upper end of 95%", highest, at_least=0.95)

    def wrong(name: str, claimed: Iterable[bool]) -> None:
        found = [bool(each) for each in claimed]
        report.add(name, sum(found) / len(found))
        lowest = wilson(sum(found), len(found), comparisons=FALSE_CLAIMS).low
        report.add(f"{name}, lower end of 95%", lowest, at_most=LEVEL)

    covered("a rate", rates(), holds_rate)
    covered("a mean of 4 tasks", rates(), holds_mean)
    covered("a difference of rates", rates(), holds_difference)
    covered("a difference of losses", (4, 8, 16, 48), holds_loss)
    wrong("two equal methods told apart", (tells_equals(setting, rng) for setting in rates() for _ in range(args.runs)))

    spent = np.array([holds_where_widest(Setting(4, 0.7, trials=120), rng) for _ in range(args.runs)])
    report.add("samples where intervals are widest: coverage", float(spent.mean()), at_least=COVERED)
    fewest = int(spent.sum(axis=0).min())
    report.add("samples where intervals are widest: the worst cell", fewest / args.runs)
    highest = wilson(fewest, args.runs, comparisons=4).high
    report.add("samples where intervals are widest: the worst cell, upper end of 95%", highest, at_least=0.95)

    for name, race in {
        "8 methods": Setting(8, 0.7, trials=32, lengths=2, shared=0.5, windows=32),
        "4 methods, 5 depths": Setting(4, 0.5, trials=32, depths=5, shared=0.5, alike=0.5),
        "12 methods": Setting(12, 0.9, trials=16, shared=0.8, windows=16),
    }.items():
        ended = (claims(raced(race, rng)) for _ in range(args.runs))
        wrong(f"{name}, all equal, eliminated in rounds: runs with a claim", ended)

    for rate, shared in ((0.5, 0.5), (0.8, 0.5), (0.8, 0.9)):
        name = f"{100 * rate:.0f}% against {100 * (rate + WORTHWHILE):.0f}%, {100 * shared:.0f}% of luck shared"
        setting = Setting(2, rate, trials=20, shared=shared)
        needed, found = zip(*(told(setting, rng, WORTHWHILE) for _ in range(args.runs)))
        report.add(f"{name}: prompts advised", float(np.median(needed)))
        report.add(f"{name}: found with them", float(np.mean(found)), at_least=POWER - 0.05)
        wrong(f"{name}: found with them where there is none", (told(setting, rng, 0.0)[1] for _ in range(args.runs)))
    report.finish(args.output, runs=args.runs, level=LEVEL)


if __name__ == "__main__":
    main()

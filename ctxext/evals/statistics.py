"""95% intervals and p-values of rates, differences and effective lengths.

Samples that share a text are correlated, so the unit of independence is the text (a trial, a window). Methods are
compared on the same samples, in pairs. Intervals and p-values are for a single comparison; `holm` adjusts p-values for
several, and `comparisons` widens the interval of a rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import takewhile
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scores = Sequence[float]
Labels = Sequence[Hashable]

NORMAL = NormalDist()
Z = NORMAL.inv_cdf(0.975)

# With fewer clusters of losses, intervals are not bootstrapped.
FEW = 6

# Steps of the grid for counting the sums of sign flips, if they share no unit.
GRID = 2**15

# Llama-2-7B-chat's share at 4,096 tokens, the mean of 13 tasks. Hsieh et al. (2024), "RULER".
RULER_THRESHOLD = 0.856


def in_percent(share: float, digits: int = 0) -> str:
    """A rate in percent, without the sign; 100 and 0 mean exactly all and none: 199 of 200 are `99.5`."""
    while f"{100 * share:.{digits}f}" in {f"{end:.{digits}f}" for end in (0, 100)} and 1e-12 < share < 1 - 1e-12:
        digits += 1
    return f"{100 * share:.{digits}f}"


class Interval(NamedTuple):
    """A share or a mean with its 95% interval, from `n` samples."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}] n={self.n}"

    def percent(self) -> str:
        """A share as `90% [82, 95] n=110`."""
        return f"{in_percent(self.value)}% [{in_percent(self.low)}, {in_percent(self.high)}] n={self.n}"


class PairedTest(NamedTuple):
    """A difference of means, the exact p-value of no difference, and the number of independent clusters.

    `variance` is that of one cluster's difference if the true difference is 0, so that the mean's is variance/clusters.
    """

    value: float
    p: float
    clusters: int
    variance: float


class Difference(NamedTuple):
    """mean(a − b) with its 95% interval, and the p-value of no difference.

    `n` is the number of pairs: samples, or windows for losses. The interval is from a bootstrap and p from a
    permutation test, so they can disagree near p = 0.05. Both are unadjusted.
    """

    value: float
    low: float
    high: float
    p: float
    n: int


class EffectiveLength(NamedTuple):
    """In tokens, 0 for none: up to `length` every rate reaches the threshold, up to `certain` every lower bound
    does."""

    length: int
    certain: int


def wilson(hits: float, n: float, comparisons: int = 1) -> Interval:
    """(p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), with p = hits/n. Wilson (1927), JASA 22.

    The rates that a score test does not reject: within [0, 1], and of positive width even for 10 of 10 ([72%, 100%]).

    Args:
        hits: a sum of scores from 0 to 1, possibly fractional.
        n: samples; fractional for an effective number.
        comparisons: the number of intervals that jointly cover in 95% of cases (Bonferroni), so that one selected for
            its value does too.

    Raises:
        ValueError: n is not above 0, or hits are not between 0 and n.
    """
    if not n > 0:
        raise ValueError(f"n must be > 0, got {n:g}. A share needs at least one sample.")
    if not 0 <= hits <= n:
        raise ValueError(f"hits must be from 0 to n={n:g}, got {hits:g}.")
    z = NORMAL.inv_cdf(1 - 0.025 / comparisons)
    p, shrink = hits / n, 1 + z**2 / n
    centre = (p + z**2 / (2 * n)) / shrink
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / shrink
    # With no or all hits a bound is 0 or 1 up to rounding.
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)), round(n))


def pooled_share(clusters: Mapping[Hashable, Scores], comparisons: int = 1) -> Interval:
    """Wilson's interval with n/d samples: d = (m/(m-1) Σ(yᵢ - nᵢp)² + K) / (n p(1-p) + 1), K = Σnᵢ²/n, 1 <= d <= K.

    Cluster i of m has nᵢ of the n samples and the sum of scores yᵢ; p = Σyᵢ/n. Without the K and the 1, d is the design
    effect of Rao and Scott (1992), Biometrics 48, whose intervals cover too rarely with few misses. The K (Kish's
    effect, 1965, where the samples of a cluster are all alike) and the 1 draw it towards K by the weight of one sample
    of variance 1. So uninformative clusters (all hits, no hits, or only one) count as one sample each: 22 texts with 5
    hits each give [85%, 100%], and one miss among them [89%, 100%]. Clusters of one sample give `wilson`.

    Args:
        clusters: for each text, the scores from 0 to 1 of its samples.
        comparisons: as in `wilson`.

    Returns:
        The rate over all samples; `n` is their actual number.

    Raises:
        ValueError: there is no cluster, one has no samples, or a score is not between 0 and 1.
    """
    p, n, effective = _effective(clusters)
    return wilson(p * effective, effective, comparisons)._replace(value=p, n=n)


def mean_share(tasks: Sequence[Mapping[Hashable, Scores]], comparisons: int = 1) -> Interval:
    """The mean rate p of T equally weighted tasks, with the wider of two bounds on each side.

    - MOVER: p ∓ √Σ(pₜ - boundₜ)²/T over each task's own bounds. Zou and Donner (2008), Statistics in Medicine 27. Alone
      it is too narrow for many tasks with few misses, as those without a miss add nothing above.
    - Wilson's with N/h samples, h = (Nv + 1) / (N p(1-p) + 1), where task t has nₜ effective samples (`pooled_share`),
      N = T² / Σ 1/nₜ, and v is the mean of pₜ(1-pₜ) nₜ/(nₜ-1) weighted by 1/nₜ: h is the variance within tasks as a
      share of that of equal tasks. Alone it is too narrow for a few samples of a task that is unlike the others.

    Args:
        tasks: for each task, its clusters as in `pooled_share`.

    Raises:
        ValueError: there are no tasks, or as in `pooled_share`.
    """
    if not tasks:
        raise ValueError("a mean over tasks needs at least one task, got none.")
    parts = [pooled_share(clusters, comparisons) for clusters in tasks]
    if len(parts) == 1:
        return parts[0]
    rates, counts, sizes = (np.array(part) for part in zip(*map(_effective, tasks)))
    total = len(tasks) ** 2 / float((1 / sizes).sum())
    p, low, high = _mover(rates, [part.low for part in parts], [part.high for part in parts])
    unbiased = rates * (1 - rates) * sizes / np.maximum(sizes - 1, 1e-9)
    within = np.average(np.where(sizes > 1, unbiased, p * (1 - p)), weights=1 / sizes)
    effective = total / min(1.0, (total * float(within) + 1) / (total * p * (1 - p) + 1))
    other = wilson(p * effective, effective, comparisons)
    return Interval(p, min(low, other.low), max(high, other.high), int(counts.sum()))


def _mover(values: Sequence[float] | Array, *bounds: Sequence[float]) -> tuple[float, float, float]:
    """The mean of independent estimates, and its bounds."""
    value = float(np.mean(values))
    below, above = (math.sqrt(float(((values - np.array(ends)) ** 2).sum())) / len(values) for ends in bounds)
    return value, value - below, value + above


def _effective(clusters: Mapping[Hashable, Scores]) -> tuple[float, int, float]:
    """The rate over all samples, their number, and the effective number; see `pooled_share`."""
    empty = [name for name, scores in clusters.items() if not len(scores)]
    if empty or not clusters:
        raise ValueError(f"every cluster needs samples, got {len(clusters)} clusters, without samples: {empty}.")
    sums = np.array([_scores(scores).sum() for scores in clusters.values()])
    sizes = np.array([len(scores) for scores in clusters.values()])
    n = int(sizes.sum())
    p = min(1.0, float(sums.sum()) / n)
    return p, n, n / _design_effect(sums, sizes, p * (1 - p))


def _design_effect(sums: Array, sizes: NDArray[np.int64], variance: float) -> float:
    """The d of `pooled_share`, of clusters of samples with this variance."""
    m, n = len(sizes), int(sizes.sum())
    alike = float((sizes**2).sum()) / n
    if m == 1:
        return alike
    spread = m / (m - 1) * float(((sums - sizes * sums.sum() / n) ** 2).sum())
    return min(max(1.0, (spread + alike) / (n * variance + 1)), alike)


def holm(p_values: Sequence[float], family: int) -> list[float]:
    """p-values adjusted for `family` comparisons, stepping down from the smallest: max over j <= i of (family - j) pⱼ.

    Under any dependence between comparisons, a true null falls below 5% in at most 5% of cases. Holm (1979),
    Scandinavian Journal of Statistics 6.

    Args:
        family: the number of comparisons; those beyond `p_values` were not tested, and count as ties.

    Raises:
        ValueError: family is smaller than the number of p-values, or one of them is not between 0 and 1.
    """
    wrong = [p for p in p_values if not 0 <= p <= 1]
    if wrong or family < len(p_values):
        raise ValueError(f"need p-values from 0 to 1, at most family={family}; got {len(p_values)}, wrong: {wrong}.")
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, least = [1.0] * len(p_values), 0.0
    for rank, k in enumerate(order):
        least = adjusted[k] = min(1.0, max(least, (family - rank) * p_values[k]))
    return adjusted


def paired_test(a: Scores, b: Scores, clusters: Labels | None = None, strata: Labels | None = None) -> PairedTest:
    """The mean over strata of mean(a - b), and its exact p-value from sign flips of whole clusters.

    Counts all 2^m flips of the m clusters' sums, without sampling (Fisher 1935). For scores of 0 or 1 without clusters
    this is McNemar's exact test (1947). If the two methods' answers to a text are exchangeable, p <= x in at most x of
    cases, however correlated the answers within a text.

    Args:
        a: scores from 0 to 1; `b` those of the same samples in the same order.
        clusters: for each sample its text; None if each has its own.
        strata: for each sample its task; tasks have equal weight. Each cluster must be within one task.

    Raises:
        ValueError: there are no samples, the lengths differ, or a score is not between 0 and 1.
    """
    differences, of, kind = _paired(a, b, clusters, strata)
    sizes = np.bincount(kind)
    sums = _totals(of, differences / (len(sizes) * sizes[kind]))
    return PairedTest(float(sums.sum()), _sign_flips(sums), len(sums), _variance(sums))


def paired_difference(
    a: Scores,
    b: Scores,
    clusters: Labels | None = None,
    strata: Labels | None = None,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Difference:
    """mean(a - b) over common samples, with a cluster bootstrap interval and the p-value of `paired_test`.

    A percentile bootstrap, widened for small samples: a cluster of +1s and one of -1s are added, as in Bonett and Price
    (2012), since identical answers would give an interval of zero width; each has as many samples as count for one, the
    d of `pooled_share`. And the percentiles are Hesterberg's (2015) expanded ones, wider by the ratio of Student's t
    to z.

    The intervals of strata are combined by MOVER (`mean_share`). Arguments and errors are those of `paired_test`.
    """
    differences, of, kind = _paired(a, b, clusters, strata)
    rng, values, bounds = np.random.default_rng(seed), [], []
    for stratum in range(kind.max() + 1):
        mine = kind == stratum
        inside = _numbered(of[mine].tolist())
        sums, counts = _totals(inside, differences[mine]), np.bincount(inside)
        values.append(float(differences[mine].mean()))
        added = _design_effect(sums, counts, float(differences[mine].var()))
        bounds.append(_bootstrap(np.append(sums, [added, -added]), np.append(counts, [added, added]), resamples, rng))
    value, low, high = _mover(values, *zip(*bounds))
    return Difference(value, low, high, paired_test(a, b, clusters, strata).p, len(differences))


def paired_loss_test(a: Scores, b: Scores, tokens: Sequence[int], clusters: Labels | None = None) -> PairedTest:
    """Σ(aᵢ - bᵢ) / Σtokensᵢ, and the p-value of `paired_test`; arguments are those of `paired_loss_difference`, but one
    cluster will do (p is 1)."""
    sums, counts = _loss_sums(a, b, tokens, clusters, least=1)
    return PairedTest(float(sums.sum() / counts.sum()), _sign_flips(sums), len(sums), _variance(sums / counts.sum()))


def texts_to_tell(difference: float, test: PairedTest, comparisons: int = 1, power: float = 0.8) -> int:
    """n = (z(0.025/comparisons) + z(power))² s² / difference²: the texts at which `paired_test` finds a difference.

    s² is the variance of a text's difference of accuracy, measured on the m texts of `test`, with one difference of +1
    and one of -1 added. So few texts, or equal answers, promise nothing.

    Args:
        difference: of accuracy, such as 0.05 for 5 points.
        comparisons: the number of comparisons that p is adjusted for.
        power: the share of measurements that find it.
    """
    spread = (test.clusters * test.variance + 2) / (test.clusters + 2)
    z = NORMAL.inv_cdf(1 - 0.025 / comparisons) + NORMAL.inv_cdf(power)
    return math.ceil(z**2 * spread / difference**2)


def paired_loss_difference(
    a: Scores, b: Scores, tokens: Sequence[int], clusters: Labels | None = None, *, resamples: int = 2000, seed: int = 0
) -> Difference:
    """Σ(aᵢ - bᵢ) / Σtokensᵢ, the difference of two token-weighted mean losses on the same windows of text.

    Interval and p as in `paired_difference`, without the two added differences. Resamples cannot exceed the extreme
    clusters, which is too narrow for few: with fewer than six, the interval is Student's, of the linearised ratio.

    Args:
        a: for each window the sum of its tokens' losses in nats; `b` the other model's.
        tokens: how many tokens each sum is over, the same for both models.
        clusters: for each window its stretch of text or document; None if each has its own.

    Returns:
        In nats per token, or per unit of `tokens` (bytes, if the tokenizers differ). `n` is the number of windows.

    Raises:
        ValueError: there are fewer than two clusters, the lengths differ, a window has no tokens, or a
            sum is not finite.
    """
    sums, counts = _loss_sums(a, b, tokens, clusters)
    rng = np.random.default_rng(seed)
    low, high = _bootstrap(sums, counts, resamples, rng) if len(sums) >= FEW else _linearised(sums, counts)
    return Difference(float(sums.sum() / counts.sum()), low, high, _sign_flips(sums), len(a))


def effective_length(shares: Mapping[int, Interval], threshold: float) -> EffectiveLength:
    """The largest length up to which every rate reaches `threshold`. After RULER (2024).

    Args:
        shares: for each length in tokens.
        threshold: a rate: `RULER_THRESHOLD`, or NoLiMa's (2025) 0.85 of the model's own rate at the shortest length.
            Nothing reaches a threshold of 0.

    Raises:
        ValueError: the threshold is not between 0 and 1.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be a share from 0 to 1, got {threshold:g}. Pass 0.856 for 85.6%.")

    def reached(bound: Callable[[Interval], float]) -> int:
        return max(takewhile(lambda length: 0 < threshold <= bound(shares[length]), sorted(shares)), default=0)

    return EffectiveLength(reached(lambda share: share.value), reached(lambda share: share.low))


def _variance(parts: Array) -> float:
    """Of one cluster, where the mean is the sum of `parts`."""
    return len(parts) * float((parts**2).sum())


def _scores(values: Scores) -> Array:
    scores = np.array(values, dtype=np.float64)
    wrong = scores[~((scores >= 0) & (scores <= 1))]
    if len(wrong):
        raise ValueError(f"scores must be from 0 to 1, got {wrong[0]:g}.")
    return scores


def _numbered(labels: Labels) -> list[int]:
    """Number the labels by first occurrence."""
    index: dict[Hashable, int] = {}
    return [index.setdefault(label, len(index)) for label in labels]


def _totals(of: Sequence[int] | NDArray[np.int64], values: Scores | Array) -> Array:
    """The sum of each cluster's values."""
    return np.bincount(of, values).astype(np.float64)


def _paired(
    a: Scores, b: Scores, clusters: Labels | None, strata: Labels | None
) -> tuple[Array, NDArray[np.int64], NDArray[np.int64]]:
    """For each sample a - b, and the numbers of its cluster and its stratum."""
    labels = range(len(a)) if clusters is None else clusters
    kinds = [None] * len(a) if strata is None else strata
    if not len(a) or not len(a) == len(b) == len(labels) == len(kinds):
        raise ValueError(
            f"a, b, clusters and strata must have equal lengths, got {len(a)}, {len(b)}, {len(labels)} and "
            f"{len(kinds)}."
        )
    return _scores(a) - _scores(b), np.array(_numbered(labels)), np.array(_numbered(kinds))


def _loss_sums(
    a: Scores, b: Scores, tokens: Sequence[int], clusters: Labels | None, least: int = 2
) -> tuple[Array, Array]:
    """For each cluster the difference in nats, and its tokens."""
    labels = range(len(a)) if clusters is None else clusters
    lengths, of = (len(a), len(b), len(tokens), len(labels)), _numbered(labels)
    if len({*lengths}) > 1 or len({*of}) < least:
        raise ValueError(
            f"a, b, tokens and clusters must have equal lengths and at least {least} clusters, got lengths {lengths} "
            f"and {len({*of})} distinct clusters."
        )
    wrong = [window for window in zip(a, b, tokens) if not (window[2] > 0 and math.isfinite(window[0] - window[1]))]
    if wrong:
        raise ValueError(f"every window must have tokens and finite losses, got (a, b, tokens) = {wrong[0]}.")
    return _totals(of, np.subtract(a, b)), _totals(of, tokens)


def _linearised(sums: Array, counts: Array) -> tuple[float, float]:
    """The 95% interval of Σsums/Σcounts over clusters: Student's t times the ratio's linearised standard error."""
    m, ratio = len(sums), float(sums.sum() / counts.sum())
    error = math.sqrt(m / (m - 1) * float(((sums - ratio * counts) ** 2).sum())) / float(counts.sum())
    half = _student(m - 1) * error
    return ratio - half, ratio + half


def _bootstrap(sums: Array, counts: Array, resamples: int, rng: np.random.Generator) -> tuple[float, float]:
    """The 95% interval of Σsums/Σcounts over clusters: percentiles at Φ(∓√(m/(m-1)) t). Hesterberg (2015)."""
    m = len(sums)
    # Equal clusters are drawn as one, by weight.
    kinds, weights = np.unique(np.column_stack([sums, counts]), axis=0, return_counts=True)
    drawn = rng.multinomial(m, weights / m, size=resamples) @ kinds
    tail = NORMAL.cdf(-math.sqrt(m / (m - 1)) * _student(m - 1))
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [tail, 1 - tail])
    return float(low), float(high)


def _student(freedom: int) -> float:
    """Student's t at 97.5%; from 3 degrees of freedom on expanded about z in 1/freedom, and within 1%.

    Abramowitz and Stegun (1964), 26.7.5.
    """
    if freedom < 3:
        return math.tan(0.475 * math.pi) if freedom == 1 else 0.95 / math.sqrt(2 * 0.975 * 0.025)
    return (
        Z
        + (Z**3 + Z) / (4 * freedom)
        + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
        + (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * freedom**3)
    )


def _sign_flips(sums: Array) -> float:
    """The share of sign patterns s with |Σ sᵢ sumsᵢ| >= |Σ sumsᵢ|: exact, or conservative by the grid's rounding."""
    sizes = np.abs(sums)
    # Smaller ones vanish in the rounding below.
    sizes = sizes[sizes > 1e-12 * sizes.max()]
    if not len(sizes):
        return 1.0
    unit = _unit(sizes)
    steps = np.rint(sizes / unit).astype(int)
    # The probability of each number of flipped steps.
    chances, reached = np.zeros(steps.sum() + 1), 0
    chances[0] = 1
    for step in steps:
        half = chances[: reached + 1] / 2
        chances[: reached + 1] = half
        chances[step : step + reached + 1] += half
        reached += step
    # Ties count, and must not be lost to rounding.
    rounded = np.abs(sizes - steps * unit).sum() + 1e-9 * sizes.sum()
    reach = np.abs(reached - 2 * np.arange(reached + 1)) * unit >= abs(sums.sum()) - rounded
    return min(1.0, float(chances[reach].sum()))


def _unit(sizes: Array) -> float:
    """A common unit of all sizes, or a step of the grid."""
    for parts in range(1, 13):
        unit = sizes.min() / parts
        steps = sizes / unit
        if steps.sum() <= GRID and np.abs(steps - np.rint(steps)).max() < 1e-6:
            return float(unit)
    return float(sizes.sum() / GRID)

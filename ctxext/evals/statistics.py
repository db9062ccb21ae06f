"""How sure a measured share, a difference or an effective length is: 95% intervals and p-values.

Samples that share a text are alike, so the text (a trial, a window) is what is counted as independent
throughout. Two methods are compared on the same samples, pair by pair. Nothing here corrects for how
many comparisons are made.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import takewhile
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NORMAL = NormalDist()
Z = NORMAL.inv_cdf(0.975)

# Of fewer clusters of losses no interval is bootstrapped.
FEW = 6

# Llama-2-7B-chat's share at 4,096 tokens, the mean of 13 tasks. Hsieh et al. (2024), "RULER".
RULER_THRESHOLD = 0.856


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
        return f"{self.value:.0%} [{100 * self.low:.0f}, {100 * self.high:.0f}] n={self.n}"


class Difference(NamedTuple):
    """mean(a − b) with its 95% interval, and the p-value of no difference.

    `n` counts the pairs: samples, or windows where losses are compared. Interval and p-value come from
    different arguments, a bootstrap and a permutation: near p = 0.05 they can disagree.
    """

    value: float
    low: float
    high: float
    p: float
    n: int


class EffectiveLength(NamedTuple):
    """In tokens, 0 for none: up to `length` every share reaches the threshold, up to `certain` every lower bound."""

    length: int
    certain: int


def wilson(hits: float, n: float) -> Interval:
    """(p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), with p = hits/n. Wilson (1927), JASA 22.

    The shares that a score test does not reject: it never leaves [0, 1] and has a width when all are
    hits (10 of 10 is [72%, 100%]).

    Args:
        hits: a sum of scores from 0 to 1, whole or not.
        n: samples; not whole if it is an effective number.

    Raises:
        ValueError: n is not above 0, or hits are not between 0 and n.
    """
    if not n > 0:
        raise ValueError(f"n must be > 0, got {n:g}. A share needs at least one sample.")
    if not 0 <= hits <= n:
        raise ValueError(f"hits must be from 0 to n={n:g}, got {hits:g}.")
    p, shrink = hits / n, 1 + Z**2 / n
    centre = (p + Z**2 / (2 * n)) / shrink
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2)) / shrink
    # With no or all hits a bound is 0 or 1, but for rounding.
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)), round(n))


def pooled_share(clusters: Mapping[Hashable, Sequence[float]]) -> Interval:
    """Wilson's interval with n/d samples: d = (m/(m-1) Σ(yᵢ - nᵢp)² + K) / (n p(1-p) + 1), K = Σnᵢ²/n, 1 <= d <= K.

    Cluster i of m has nᵢ of the n samples and the sum of scores yᵢ; p = Σyᵢ/n. Without the K and the 1,
    d is the design effect of Rao and Scott (1992), Biometrics 48: the variance of a ratio of cluster
    totals, linearised, over that of n independent samples. K is Kish's (1965) where the samples of a
    cluster are all alike. Few misses tell little about how alike they are, and Rao and Scott's d then
    covers too rarely; the K and the 1 draw it towards K by the weight of one sample of variance 1.

    So where the clusters tell nothing (all hits, no hits, or one cluster), d = K: each counts as one
    sample. 22 texts with 5 hits each give [85%, 100%], while one miss among them shows that a text does
    not decide all its samples, and gives [89%, 100%]. Clusters of one sample give `wilson`.

    Args:
        clusters: for each text, the scores from 0 to 1 of its samples.

    Returns:
        The share of all samples; `n` is their true number.

    Raises:
        ValueError: there is no cluster, one has no samples, or a score is not between 0 and 1.
    """
    empty = [name for name, scores in clusters.items() if not len(scores)]
    if empty or not clusters:
        raise ValueError(f"every cluster needs samples, got {len(clusters)} clusters, without samples: {empty}.")
    sums = np.array([_scores(scores).sum() for scores in clusters.values()])
    sizes = np.array([len(scores) for scores in clusters.values()])
    m, n = len(sizes), int(sizes.sum())
    p = min(1.0, float(sums.sum()) / n)
    alike = float((sizes**2).sum()) / n
    effect = alike
    if m > 1:
        spread = m / (m - 1) * float(((sums - sizes * p) ** 2).sum())
        effect = min(max(1.0, (spread + alike) / (n * p * (1 - p) + 1)), alike)
    return wilson(p * (n / effect), n / effect)._replace(value=p, n=n)


def mcnemar(only_a: int, only_b: int) -> float:
    """min(1, 2 P(X <= min(only_a, only_b))), X ~ Binomial(only_a + only_b, 1/2): exact, two-sided. McNemar (1947).

    Args:
        only_a: samples that a answered and b did not; `only_b` the other way round.

    Raises:
        ValueError: a count is negative.
    """
    if min(only_a, only_b) < 0:
        raise ValueError(f"counts must be >= 0, got only_a={only_a} and only_b={only_b}.")
    n = only_a + only_b
    term = tail = 1
    for k in range(min(only_a, only_b)):
        term = term * (n - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / (1 << n))


def paired_difference(
    a: Sequence[float],
    b: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Difference:
    """mean(a - b) over samples that both answered; whole clusters are resampled, and flipped for the p-value.

    The interval is that of the percentile bootstrap, widened where samples are few. One difference of
    +1 and one of -1 join the data it draws from, as in the closed form of Bonett and Price (2012):
    methods that answer alike would else differ by 0 with no width. And the percentiles are Hesterberg's
    (2015) expanded ones, as much farther out as Student's t exceeds z. BCa mends bias and skewness, but
    the fault here is narrowness.

    p is `mcnemar`'s where all scores are 0 or 1 and there are no clusters. Otherwise it is the share of
    sign flips of the clusters' differences that give at least as large a total (Fisher 1935): of all
    flips, where there are no more than `resamples`; else of that many and the data themselves (Phipson
    and Smyth 2010), so never below 1 / (resamples + 1).

    Args:
        a: scores from 0 to 1; `b` those of the same samples in the same order.
        clusters: for each sample the text it shares with others; None if each has its own.

    Raises:
        ValueError: there are no samples, the lengths differ, or a score is not between 0 and 1.
    """
    labels = range(len(a)) if clusters is None else clusters
    if not len(a) or not len(a) == len(b) == len(labels):
        raise ValueError(f"a, b and clusters must be as long as each other, got {len(a)}, {len(b)} and {len(labels)}.")
    first, second = _scores(a), _scores(b)
    of = _numbered(labels)
    sums = _totals(of, first - second)
    rng = np.random.default_rng(seed)
    low, high = _bootstrap(np.append(sums, [1, -1]), np.append(_totals(of, np.ones(len(a))), [1, 1]), resamples, rng)
    if clusters is None and {*a, *b} <= {0, 1}:
        p = mcnemar(int((first > second).sum()), int((first < second).sum()))
    else:
        p = _sign_flips(sums, resamples, rng)
    return Difference(float(sums.sum()) / len(a), low, high, p, len(a))


def paired_loss_difference(
    a: Sequence[float],
    b: Sequence[float],
    tokens: Sequence[int],
    clusters: Sequence[Hashable] | None = None,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Difference:
    """Σ(aᵢ - bᵢ) / Σtokensᵢ, the difference of two token-weighted mean losses on the same windows of text.

    Interval and p are `paired_difference`'s, without the two differences added; whole clusters are
    resampled and flipped. No resample lies beyond the smallest and the largest cluster, which a few are
    not far enough apart for: of fewer than six the interval is Student's, of the linearised ratio.

    Args:
        a: for each window the sum of its tokens' losses in nats; `b` the other model's.
        tokens: how many tokens each sum is over, the same for both models.
        clusters: for each window the stretch of text, or the document, that it shares with others; None
            if each has its own.

    Returns:
        In nats per token, or per whatever `tokens` counts: bytes, where the tokenizers differ. `n` counts
        the windows.

    Raises:
        ValueError: there are fewer than two clusters, the lengths differ, a window has no tokens, or a
            sum is not finite.
    """
    labels = range(len(a)) if clusters is None else clusters
    lengths, of = (len(a), len(b), len(tokens), len(labels)), _numbered(labels)
    if len({*lengths}) > 1 or max(of, default=0) < 1:
        raise ValueError(
            f"a, b, tokens and clusters must have the same windows, in two clusters or more, got {lengths} windows in "
            f"{len({*of})}. One does not show how much they differ."
        )
    wrong = [window for window in zip(a, b, tokens) if not (window[2] > 0 and math.isfinite(window[0] - window[1]))]
    if wrong:
        raise ValueError(f"every window must have tokens and finite losses, got (a, b, tokens) = {wrong[0]}.")
    sums = _totals(of, np.array(a, dtype=np.float64) - np.array(b, dtype=np.float64))
    counts = _totals(of, np.array(tokens, dtype=np.float64))
    rng = np.random.default_rng(seed)
    low, high = _bootstrap(sums, counts, resamples, rng) if len(sums) >= FEW else _linearised(sums, counts)
    return Difference(float(sums.sum() / counts.sum()), low, high, _sign_flips(sums, resamples, rng), len(a))


def effective_length(shares: Mapping[int, Interval], threshold: float) -> EffectiveLength:
    """The largest length at which, as at all shorter ones, the share reaches `threshold`. After RULER (2024).

    Args:
        shares: for each length in tokens.
        threshold: a share: `RULER_THRESHOLD`, or NoLiMa's (2025) 0.85 of the model's own share at the
            shortest length. Nothing reaches a threshold of 0: who answers nothing has no such length.

    Raises:
        ValueError: the threshold is not between 0 and 1.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be a share from 0 to 1, got {threshold:g}. Pass 0.856 for 85.6%.")

    def reached(bounds: Mapping[int, float]) -> int:
        return max(takewhile(lambda length: 0 < threshold <= bounds[length], sorted(bounds)), default=0)

    return EffectiveLength(
        length=reached({length: share.value for length, share in shares.items()}),
        certain=reached({length: share.low for length, share in shares.items()}),
    )


def _scores(values: Sequence[float]) -> NDArray[np.float64]:
    scores = np.array(values, dtype=np.float64)
    wrong = scores[~((scores >= 0) & (scores <= 1))]
    if len(wrong):
        raise ValueError(f"scores must be from 0 to 1, got {wrong[0]:g}.")
    return scores


def _numbered(labels: Sequence[Hashable]) -> list[int]:
    """Each label by the number of the first like it."""
    index: dict[Hashable, int] = {}
    return [index.setdefault(label, len(index)) for label in labels]


def _totals(of: Sequence[int], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of each cluster's values."""
    totals = np.zeros(max(of) + 1)
    np.add.at(totals, of, values)
    return totals


def _linearised(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> tuple[float, float]:
    """The 95% interval of Σsums/Σcounts over clusters: Student's t times the ratio's linearised standard error."""
    m, ratio = len(sums), float(sums.sum() / counts.sum())
    error = math.sqrt(m / (m - 1) * float(((sums - ratio * counts) ** 2).sum())) / float(counts.sum())
    return ratio - _student(m - 1) * error, ratio + _student(m - 1) * error


def _bootstrap(
    sums: NDArray[np.float64], counts: NDArray[np.float64], resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """The 95% interval of Σsums/Σcounts over clusters: percentiles at Φ(∓√(m/(m-1)) t). Hesterberg (2015)."""
    m = len(sums)
    # Which cluster is which does not matter, so equal ones are drawn as one, by weight.
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


def _sign_flips(sums: NDArray[np.float64], resamples: int, rng: np.random.Generator) -> float:
    """The share of sign patterns s with |Σ sᵢ sumsᵢ| >= |Σ sumsᵢ|."""
    sizes = np.abs(sums[sums != 0])
    # Ties count, and must not be lost to rounding.
    observed = abs(sums.sum()) - 1e-9 * sizes.sum()
    if 2 ** len(sizes) <= resamples:
        bits = (np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))) & 1
        return float(np.mean(np.abs((2 * bits - 1) @ sizes) >= observed))
    kinds, weights = np.unique(sizes, return_counts=True)
    totals = (2 * rng.binomial(weights, 0.5, size=(resamples, len(kinds))) - weights) @ kinds
    return (1 + int((np.abs(totals) >= observed).sum())) / (1 + resamples)

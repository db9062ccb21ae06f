"""Intervals cover as often as they say, p-values are what they are under the null, and no case is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ctxext.evals.statistics import (
    RULER_THRESHOLD,
    EffectiveLength,
    Interval,
    PairedTest,
    effective_length,
    holm,
    in_percent,
    mean_share,
    paired_difference,
    paired_loss_difference,
    paired_test,
    pooled_share,
    texts_to_tell,
    wilson,
)

Array = np.ndarray

scores = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
trials = st.lists(st.lists(scores, min_size=1, max_size=6), min_size=1, max_size=12)
hits_of = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
pairs = st.lists(st.tuples(scores, scores), min_size=1, max_size=30)
examples = settings(max_examples=100, deadline=None, derandomize=True)


def pool(answers: Array | Sequence[Sequence[float]]) -> Interval:
    return pooled_share(dict(enumerate(answers)))


def covers(interval: tuple[float, ...], truth: float) -> bool:
    return interval[1] - 1e-12 <= truth <= interval[2] + 1e-12


def clustered_answers(
    rng: np.random.Generator, trials: int, samples: int, share: float | Array, correlation: float
) -> Array:
    """Zeros and ones of shape (trials, samples): the share of a trial is beta-distributed about `share`."""
    strength = (1 - correlation) / correlation
    shares = rng.beta(np.multiply(share, strength), np.multiply(1 - np.asarray(share), strength), trials)
    return (rng.random((trials, samples)) < shares[:, None]).astype(float)


# Wilson's interval


@pytest.mark.parametrize(("n", "low"), [(1, 21), (2, 34), (5, 57), (10, 72), (20, 84), (50, 93), (100, 96)])
def test_all_hits_are_no_proof(n: int, low: int) -> None:
    assert wilson(n, n).percent() == f"100% [{low}, 100] n={n}"


@examples
@given(hits_of, st.integers(0, 1))
def test_only_all_print_as_100_percent_and_none_as_0(case: tuple[int, int], digits: int) -> None:
    hits, n = case
    printed = float(in_percent(hits / n, digits))
    assert (printed == 100, printed == 0) == (hits == n, hits == 0)
    assert abs(printed - 100 * hits / n) <= 0.5 / 10**digits + 1e-9


def test_199_of_200_print_as_99_5_percent() -> None:
    assert wilson(199, 200).percent() == "99.5% [97, 99.9] n=200"
    assert wilson(1, 200).percent() == "0.5% [0.1, 3] n=200"
    assert wilson(1000, 1000).percent() == "100% [99.6, 100] n=1000"


def test_an_interval_prints_its_value_bounds_and_n() -> None:
    assert wilson(99, 110).percent() == "90% [83, 94] n=110"
    assert str(Interval(2.5625, 2.25, 2.8125, 12)) == "2.56 [2.25, 2.81] n=12"


@examples
@given(hits_of)
def test_wilson_is_scipys(case: tuple[int, int]) -> None:
    hits, n = case
    oracle = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson(hits, n) == pytest.approx((hits / n, oracle.low, oracle.high, n), abs=1e-12)


@examples
@given(scores, st.floats(0.1, 1e6))
def test_wilson_bounds_are_the_shares_that_a_score_test_just_keeps(share: float, n: float) -> None:
    interval = wilson(share * n, n)
    for bound in (interval.low, interval.high):
        distance = stats.norm.ppf(0.975) ** 2 * bound * (1 - bound) / n
        assert (interval.value - bound) ** 2 == pytest.approx(distance, rel=1e-6, abs=1e-12)


@examples
@given(scores, st.floats(0.1, 1e6))
def test_wilson_stays_within_0_and_1_and_holds_its_value(share: float, n: float) -> None:
    interval = wilson(share * n, n)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1


@examples
@given(st.floats(0, 1), st.floats(0.1, 1e6))
def test_hits_and_misses_mirror_each_other(share: float, n: float) -> None:
    hits, misses = wilson(share * n, n), wilson(n - share * n, n)
    assert (misses.low, misses.high) == pytest.approx((1 - hits.high, 1 - hits.low), abs=1e-9)


def test_more_hits_raise_both_bounds_and_more_samples_narrow_them() -> None:
    for fewer, more in pairwise(wilson(hits, 40) for hits in range(41)):
        assert more.low > fewer.low
        assert more.high > fewer.high
    for small, large in pairwise(wilson(0.9 * n, n) for n in (10, 20, 40, 80)):
        assert large.high - large.low < small.high - small.low


@pytest.mark.parametrize("n", [10, 50, 110])
def test_wilson_covers_95_percent_on_average_over_shares(n: int) -> None:
    shares = np.linspace(0.005, 0.995, 199)
    probability = stats.binom.pmf(np.arange(n + 1)[:, None], n, shares)
    covered = [[covers(wilson(hits, n), share) for share in shares] for hits in range(n + 1)]
    assert (probability * covered).sum(0).mean() == pytest.approx(0.95, abs=0.01)


# The pooled share


@examples
@given(trials)
def test_a_pooled_share_is_the_mean_of_all_samples_within_its_bounds(answers: list[list[float]]) -> None:
    interval, every = pool(answers), [score for trial in answers for score in trial]
    assert interval.value == pytest.approx(np.mean(every))
    assert interval.n == len(every)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1


@examples
@given(trials)
def test_clusters_never_narrow_and_never_count_for_less_than_alike_samples(answers: list[list[float]]) -> None:
    interval, sizes = pool(answers), np.array([len(trial) for trial in answers])
    n, alike = sizes.sum(), sizes.sum() ** 2 / (sizes**2).sum()
    independent, one_each = wilson(interval.value * n, n), wilson(interval.value * alike, alike)
    assert one_each.low - 1e-12 <= interval.low <= independent.low + 1e-12
    assert independent.high - 1e-12 <= interval.high <= one_each.high + 1e-12


@examples
@given(st.lists(scores, min_size=1, max_size=30))
def test_clusters_of_one_sample_are_wilsons(answers: list[float]) -> None:
    assert pool([[score] for score in answers]) == pytest.approx(wilson(math.fsum(answers), len(answers)), abs=1e-12)


@pytest.mark.parametrize("hits", [0, 1, 7, 12])
def test_clusters_of_equal_answers_count_as_one_sample_each(hits: int) -> None:
    interval = pool([[1.0] * 5] * hits + [[0.0] * 5] * (12 - hits))
    assert interval == pytest.approx(wilson(hits, 12)._replace(n=60))


@pytest.mark.parametrize("answers", [[1, 1, 1, 1, 1], [0, 0], [1, 0, 1, 1], [0.25, 0.75]])
def test_one_cluster_counts_as_one_sample(answers: list[float]) -> None:
    assert pool([answers]) == pytest.approx(wilson(np.mean(answers), 1)._replace(n=len(answers)))


def test_a_miss_shows_that_a_cluster_is_not_alike() -> None:
    every, but_one = [[1.0] * 5] * 22, [[0.0] + [1.0] * 4] + [[1.0] * 5] * 21
    assert pool(every).percent() == "100% [85, 100] n=110"
    assert pool(but_one).percent() == "99% [89, 99.9] n=110"


# Weil's (1970) rats: litters as (surviving, born); the design effects as R's PF::rsb gives them.
WEIL = {
    1.232495: "13/13 12/12 9/9 9/9 8/8 8/8 12/13 11/12 9/10 9/10 8/9 11/13 4/5 5/7 7/10 7/10",
    3.952861: "12/12 11/11 10/10 9/9 10/11 9/10 9/10 8/9 8/9 4/5 7/9 4/7 5/10 3/6 3/10 0/7",
}


@pytest.mark.parametrize("published", WEIL)
def test_the_design_effect_is_rao_and_scotts_drawn_to_kishs(published: float) -> None:
    litters = [tuple(map(int, litter.split("/"))) for litter in WEIL[published].split()]
    alive, n = map(sum, zip(*litters))
    variance, alike = alive * (n - alive) / n, sum(born**2 for _, born in litters) / n
    effect = (published * variance + alike) / (variance + 1)
    interval = pool([[1.0] * alive + [0.0] * (born - alive) for alive, born in litters])
    assert interval == pytest.approx(wilson(alive / effect, n / effect)._replace(n=n), abs=1e-6)


@pytest.mark.parametrize(("trials", "share"), product([10, 22], [0.5, 0.8, 0.9, 0.95]))
def test_a_pooled_share_covers_where_samples_are_alike_and_wilson_does_not(trials: int, share: float) -> None:
    rng = np.random.default_rng(trials)
    runs = [clustered_answers(rng, trials, 5, share, 0.5) for _ in range(1000)]
    assert np.mean([covers(pool(answers), share) for answers in runs]) >= 0.92
    assert np.mean([covers(wilson(answers.sum(), answers.size), share) for answers in runs]) <= 0.9


# McNemar's test


# The mean over tasks


def answers(hits: int, n: int) -> dict[int, list[float]]:
    return {k: [float(k < hits)] for k in range(n)}


def test_each_task_weighs_the_same_however_many_samples_it_has() -> None:
    easy, hard = answers(500, 500), answers(0, 10)
    assert mean_share([easy, hard]).value == 0.5
    assert mean_share([easy, hard]).n == 510
    assert mean_share([hard]) == pooled_share(hard)
    many, few = [1.0] * 50, [0.0] * 2
    assert paired_test(many + few, [0.0] * 52, strata=["many"] * 50 + ["few"] * 2).value == 0.5
    assert paired_difference(many + few, [0.0] * 52, strata=["many"] * 50 + ["few"] * 2).value == 0.5


@pytest.mark.parametrize(
    ("rates", "sizes"),
    [
        ((0.9, 0.5), (10, 20)),
        ((0.98, 0.95, 0.9, 0.6), (10, 20, 30, 40)),
        ((0.9,) * 13, (5,) * 13),
        ((0.9,) * 13, (10,) * 13),
        ((0.98,) * 13, (20,) * 13),
        ((0.5,) * 13, (10,) * 13),
        ((1.0,) * 8 + (0.6, 0.3, 0.1, 0.9, 0.5), (10,) * 13),
        ((1.0,) * 6 + (0.1,) * 7, (10,) * 13),
        ((1.0, 0.1), (500, 10)),
        ((1.0, 0.2), (50, 10)),
    ],
)
def test_a_mean_over_tasks_covers(rates: tuple[float, ...], sizes: tuple[int, ...]) -> None:
    rng, runs = np.random.default_rng(0), []
    known = cache(lambda hits: mean_share([answers(k, n) for k, n in zip(hits, sizes)]))
    for _ in range(1000):
        run = known(tuple(rng.binomial(sizes, rates).tolist()))
        runs.append(run.low - 1e-12 <= np.mean(rates) <= run.high + 1e-12)
    assert np.mean(runs) >= 0.93


# Many comparisons


@examples
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(0, 30))
def test_holm_adjusts_in_order_and_never_downwards(p: list[float], more: int) -> None:
    adjusted = holm(p, len(p) + more)
    assert all(q >= min(1, raw) for raw, q in zip(p, adjusted))
    assert [q for _, q in sorted(zip(p, adjusted))] == sorted(adjusted)
    assert min(adjusted) == min(1.0, (len(p) + more) * min(p))
    if not more:
        rejected = {k for k, q in enumerate(adjusted) if q <= 0.05}
        by_steps, left = set(), sorted(range(len(p)), key=p.__getitem__)
        while left and p[left[0]] * len(left) <= 0.05:
            by_steps.add(left.pop(0))
        assert rejected == by_steps


def test_the_best_of_many_is_covered_by_intervals_that_cover_together() -> None:
    rng, hits = np.random.default_rng(0), []
    for hits_of_best in rng.binomial(50, 0.7, (3000, 8)).max(1):
        hits.append([covers(wilson(hits_of_best, 50, n), 0.7) for n in (1, 8)])
    alone, together = np.mean(hits, axis=0)
    assert alone < 0.9
    assert together >= 0.95


# Paired differences


@examples
@given(pairs, st.booleans())
def test_a_paired_difference_is_within_its_bounds(data: list[tuple[float, float]], clustered: bool) -> None:
    a, b = zip(*data)
    difference = paired_difference(a, b, [i // 3 for i in range(len(a))] if clustered else None, resamples=500)
    assert difference.value == pytest.approx(np.mean(a) - np.mean(b))
    assert difference.n == len(a)
    assert -1 <= difference.low <= difference.value <= difference.high <= 1
    assert 0 < difference.p <= 1


@pytest.mark.parametrize("whole", [True, False])
def test_swapping_the_methods_mirrors_the_difference(whole: bool) -> None:
    a, b = np.random.default_rng(0).random((2, 60)) ** [[0.5], [1]]
    a, b = (a.round(), b.round()) if whole else (a, b)
    there, back = paired_difference(a, b, resamples=20000), paired_difference(b, a, resamples=20000)
    assert back.value == -there.value
    assert (-back.high, -back.low) == pytest.approx((there.low, there.high), abs=0.02)
    assert back.p == pytest.approx(there.p, abs=0.01)


def test_the_same_seed_gives_the_same_difference_whatever_the_order_of_samples() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 2, (2, 60))
    texts = np.arange(60) // 4
    mixed = rng.permutation(60)
    once = paired_difference(a, b, texts, seed=3)
    assert once == paired_difference(a, b, texts, seed=3)
    assert once == paired_difference(a[mixed], b[mixed], [f"text {text}" for text in texts[mixed]], seed=3)
    assert once != paired_difference(a, b, texts, seed=4)


@pytest.mark.parametrize("clusters", [None, [0] * 5 + [1] * 5])
def test_equal_answers_prove_no_equality(clusters: list[int] | None) -> None:
    difference = paired_difference([1.0] * 10, [1.0] * 10, clusters)
    assert difference.p == 1
    assert difference.low < -0.1
    assert difference.high > 0.1


def test_one_pair_says_nothing() -> None:
    assert paired_difference([1], [0])[1:] == (-1, 1, 1, 1)


def test_repeating_a_sample_within_its_text_adds_nothing() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.random((2, 40)) < [[0.8], [0.5]]).astype(float)
    once = paired_difference(a, b)
    repeated = paired_difference(np.repeat(a, 5), np.repeat(b, 5), np.repeat(np.arange(40), 5))
    assert repeated.value == pytest.approx(once.value)
    assert repeated.n == 200
    assert repeated.high - repeated.low == pytest.approx(once.high - once.low, rel=0.01)
    assert repeated.p == pytest.approx(once.p, abs=2e-3)


def test_pairing_narrows_the_interval_of_methods_that_answer_alike() -> None:
    rng = np.random.default_rng(0)
    luck, other = rng.random((2, 200))
    a, b, unpaired = (luck < 0.8).astype(float), (luck < 0.7).astype(float), (other < 0.7).astype(float)
    together, apart = paired_difference(a, b), paired_difference(a, unpaired)
    assert together.high - together.low < 0.7 * (apart.high - apart.low)


def paired_answers(shares: tuple[float, float], trials: int, samples: int, correlation: float) -> Callable:
    """A source of answers of two methods, half of whose luck is common."""

    def draw(rng: np.random.Generator) -> tuple[Array, Array]:
        common = clustered_answers(rng, trials, samples, shares[0], correlation)
        own = clustered_answers(rng, trials, samples, shares[0], correlation)
        b = np.where(rng.random((trials, 1)) < 0.5, common, own)
        # Thinned to its own share; at least as alike within a trial as it has to be.
        return common, b * (rng.random((trials, samples)) < shares[1] / shares[0])

    return draw


@pytest.mark.parametrize("shares", [(0.9, 0.9), (0.9, 0.8), (0.98, 0.95), (0.95, 0.2)])
@pytest.mark.parametrize(("trials", "samples"), [(50, 1), (110, 1), (10, 5), (22, 5)])
def test_a_paired_difference_covers(shares: tuple[float, float], trials: int, samples: int) -> None:
    rng, draw = np.random.default_rng(trials), paired_answers(shares, trials, samples, 0.2)
    clusters = np.repeat(np.arange(trials), samples) if samples > 1 else None
    runs = [(a.ravel(), b.ravel()) for a, b in (draw(rng) for _ in range(300))]
    differences = [paired_difference(a, b, clusters, resamples=500) for a, b in runs]
    assert np.mean([covers(difference, shares[0] - shares[1]) for difference in differences]) >= 0.91


@pytest.mark.parametrize(("rates", "comparisons"), [((0.5, 0.6), 1), ((0.8, 0.9), 6)])
def test_as_many_texts_as_advised_find_the_difference_as_often_as_promised(
    rates: tuple[float, float], comparisons: int
) -> None:
    """By a first measurement of 40 texts; benchmarks/statistics_coverage.py has more."""
    rng = np.random.default_rng(0)

    def test(texts: int, better: float) -> PairedTest:
        luck = rng.random(texts)
        own = np.where(rng.random(texts) < 0.5, luck, rng.random(texts))
        return paired_test((luck < rates[0] + better).astype(float), (own < rates[0]).astype(float))

    better = rates[1] - rates[0]
    texts = round(float(np.median([texts_to_tell(better, test(40, better), comparisons) for _ in range(50)])))
    assert 100 < texts < 600
    level = 0.05 / comparisons
    assert 0.74 <= np.mean([test(texts, better).p < level for _ in range(300)]) <= 0.93
    assert np.mean([test(texts, 0.0).p < level for _ in range(300)]) <= 0.05


def test_few_texts_or_equal_answers_promise_nothing() -> None:
    def advised(n: int) -> int:
        return texts_to_tell(0.05, paired_test([1.0] * n, [1.0] * n))

    assert advised(2) > advised(20) > advised(200) > 20
    uneven = paired_test([1.0] * 30, [0.0, 1.0] * 15)
    assert texts_to_tell(0.05, uneven) == pytest.approx(4 * texts_to_tell(0.1, uneven), abs=4)
    assert texts_to_tell(0.05, uneven, 10) > texts_to_tell(0.05, uneven)


@pytest.mark.parametrize("values", ["shares", "scores"])
def test_p_is_uniform_where_the_methods_do_not_differ(values: str) -> None:
    rng = np.random.default_rng(0)
    p = []
    for run in range(1000):
        a, b = rng.random((2, 30, 4)) + rng.random((30, 1)) / 2
        a, b = ((a > 0.75).astype(float), (b > 0.75).astype(float)) if values == "scores" else (a / 2, b / 2)
        p.append(paired_difference(a.ravel(), b.ravel(), np.repeat(np.arange(30), 4), resamples=200, seed=run).p)
    for level in (0.05, 0.1, 0.25, 0.5):
        # Answers of 0 and 1 tie, so p jumps and reaches a level less often.
        slack = 0.03 if values == "shares" else 0.1
        assert level - slack <= np.mean(np.array(p) <= level) <= level + 0.03


@pytest.mark.parametrize(("only_a", "only_b"), [*product(range(8), repeat=2), (40, 60), (0, 200), (700, 500)])
def test_sign_flips_of_hits_are_mcnemars_exact_test(only_a: int, only_b: int) -> None:
    n = only_a + only_b
    a = [1] * only_a + [0] * only_b + [1] * 20
    b = [0] * only_a + [1] * only_b + [1] * 20
    assert paired_test(a, b).p == pytest.approx(stats.binomtest(only_a, n).pvalue if n else 1.0)


@pytest.mark.parametrize("scale", [[1], [0.2], [0.1], [1 / 3]])
def test_sign_flips_are_counted_as_if_each_were_written_down(scale: list[float]) -> None:
    """Also where sums share no unit, up to the steps of a grid, and then never too small."""
    rng = np.random.default_rng(0)
    signs = 1 - 2 * ((np.arange(2**10)[:, None] >> np.arange(10)) & 1)
    for whole in (True, False):
        for _ in range(20):
            a, b = rng.integers(0, 6, (2, 10)) / 5 * scale[0] if whole else rng.random((2, 10)) * scale[0]
            totals = np.abs(signs @ (a - b))
            every = float(np.mean(totals >= abs((a - b).sum()) - 1e-9))
            p = paired_test(a, b).p
            assert every - 1e-12 <= p <= every + (1e-12 if whole else 0.01)


def test_a_tie_counts_in_spite_of_rounding() -> None:
    # Of the flips of 0.1 + 0.2 - 0.1, two fall short of 0.2.
    assert paired_difference([0.1, 0.2, 0.0], [0.0, 0.0, 0.1]).p == 0.75


def test_no_p_is_0_however_many_samples_agree() -> None:
    assert paired_test([1.0] * 99, [0.5] * 99).p == paired_test([1.0] * 99, [0.0] * 99).p == 2 / 2**99


# Paired differences of losses


def test_a_loss_difference_weighs_windows_by_their_tokens() -> None:
    difference = paired_loss_difference([30.0, 100.0] * 3, [20.0, 300.0] * 3, [10, 90] * 3)
    assert difference.value == pytest.approx(-1.9)
    assert -200 / 90 <= difference.low < difference.value < difference.high <= 1
    assert difference.n == 6
    short_ones_differ = paired_loss_difference(
        [11.0] * 10 + [500.0] * 10, [1.0] * 10 + [500.0] * 10, [10] * 10 + [990] * 10
    )
    assert short_ones_differ.low < short_ones_differ.value < short_ones_differ.high < 0.05


def test_a_loss_difference_moves_and_scales_with_the_losses() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(100, 1000, 20)
    a, b = rng.random((2, 20)) * tokens
    plain = paired_loss_difference(a, b, tokens)
    assert paired_loss_difference(a + 2 * tokens, b + 2 * tokens, tokens) == pytest.approx(plain)
    assert paired_loss_difference(8 * a, 8 * b, tokens)[:3] == pytest.approx([8 * x for x in plain[:3]])
    worse = paired_loss_difference(a + 3 * tokens, b, tokens)
    assert worse[:3] == pytest.approx([x + 3 for x in plain[:3]], rel=0.01)
    assert worse.p < plain.p
    assert plain == paired_loss_difference(a, b, tokens)


@pytest.mark.parametrize("windows", [8, 12, 24])
def test_a_loss_difference_of_normal_windows_is_students(windows: int) -> None:
    per_token = 0.3 + stats.norm.ppf((np.arange(windows) + 0.5) / windows)
    difference = paired_loss_difference(500 * per_token, [0] * windows, [500] * windows, resamples=20000)
    student = stats.ttest_1samp(per_token, 0)
    assert difference[1:3] == pytest.approx(student.confidence_interval(), abs=0.02 * difference.high)
    assert difference.p == pytest.approx(student.pvalue, abs=0.01)


@pytest.mark.parametrize("windows", [6, 12])
def test_a_loss_difference_covers_with_few_windows_where_plain_percentiles_do_not(windows: int) -> None:
    rng, covered, plain = np.random.default_rng(windows), 0, 0
    for _ in range(1000):
        tokens = rng.integers(400, 600, windows)
        a = tokens * rng.normal(0.05, 0.05, windows)
        covered += covers(paired_loss_difference(a, np.zeros(windows), tokens, resamples=500), 0.05)
        drawn = rng.integers(windows, size=(500, windows))
        percentiles = np.quantile(a[drawn].sum(1) / tokens[drawn].sum(1), [0.025, 0.975])
        plain += covers((0.0, *percentiles), 0.05)
    assert covered / 1000 == pytest.approx(0.95, abs=0.03)
    assert plain / 1000 <= 0.92


@pytest.mark.parametrize("windows", [2, 3, 4, 5])
def test_a_loss_difference_of_a_few_windows_is_students(windows: int) -> None:
    per_token = np.random.default_rng(windows).normal(0.05, 0.05, windows)
    difference = paired_loss_difference(500 * per_token, [0] * windows, [500] * windows)
    student = stats.ttest_1samp(per_token, 0).confidence_interval()
    half = (student.high - student.low) / 2
    assert difference[1:3] == pytest.approx(student, abs=0.01 * half)


def test_a_loss_difference_of_a_few_windows_of_unlike_lengths_covers() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        tokens = rng.integers(100, 900, 3)
        covered += covers(paired_loss_difference(tokens * rng.normal(0.05, 0.05, 3), [0] * 3, tokens), 0.05)
    assert covered / 2000 == pytest.approx(0.95, abs=0.03)


def test_windows_of_one_stretch_count_as_one() -> None:
    rng = np.random.default_rng(0)
    a, tokens = rng.random(8) * 100, rng.integers(100, 900, 8)
    twice = paired_loss_difference([*a, *a], [0] * 16, [*tokens, *tokens], [*range(8), *range(8)])
    assert twice[:4] == pytest.approx(paired_loss_difference(a, [0] * 8, tokens)[:4])
    assert twice.n == 16
    with pytest.raises(ValueError, match="at least 2 clusters"):
        paired_loss_difference(a, [0] * 8, tokens, ["one"] * 8)


# Effective length


def curve(*shares: float, n: int = 100) -> dict[int, Interval]:
    return {1024 * 2**i: wilson(share * n, n) for i, share in enumerate(shares)}


@pytest.mark.parametrize(
    ("shares", "length", "certain"),
    [
        ((1.0, 0.99, 0.9, 0.5), 4096, 2048),
        ((1.0, 0.5, 1.0, 1.0), 1024, 1024),
        ((0.9, 1.0, 1.0), 4096, 0),
        ((0.5, 1.0), 0, 0),
        ((0.856, 0.855), 1024, 0),
        ((1.0, 1.0), 2048, 2048),
    ],
)
def test_effective_length_ends_at_the_first_length_that_fails(
    shares: tuple[float, ...], length: int, certain: int
) -> None:
    measured = curve(*shares)
    assert effective_length(measured, RULER_THRESHOLD) == EffectiveLength(length, certain)
    assert effective_length(dict(reversed(measured.items())), RULER_THRESHOLD) == EffectiveLength(length, certain)


@examples
@given(st.lists(scores, min_size=1, max_size=8), st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_lower_threshold_never_shortens_and_certain_never_exceeds(shares: list[float], x: float, y: float) -> None:
    easy, hard = (effective_length(curve(*shares), threshold) for threshold in sorted((x, y)))
    assert easy.length >= hard.length >= hard.certain
    assert easy.length >= easy.certain >= hard.certain


def test_a_base_that_answers_nothing_has_no_effective_length() -> None:
    shares = curve(0.0, 0.0, 0.3)
    assert effective_length(shares, 0.85 * shares[1024].value) == EffectiveLength(0, 0)


# Refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wilson(0, 0), "n must be > 0, got 0"),
        (lambda: wilson(11, 10), "from 0 to n=10, got 11"),
        (lambda: wilson(-1, 10), "got -1"),
        (lambda: wilson(math.nan, 10), "got nan"),
        (lambda: pooled_share({}), "got 0 clusters"),
        (lambda: pooled_share({"a": [1], "b": []}), r"without samples: \['b'\]"),
        (lambda: pooled_share({"a": [1, 1.5]}), "from 0 to 1, got 1.5"),
        (lambda: mean_share([]), "at least one task, got none"),
        (lambda: holm([0.1, 0.2], 1), "at most family=1; got 2"),
        (lambda: holm([0.1, math.nan], 2), r"wrong: \[nan\]"),
        (lambda: paired_difference([], []), "got 0, 0, 0 and 0"),
        (lambda: paired_difference([1], [1, 0]), "got 1, 2, 1 and 1"),
        (lambda: paired_difference([1, 0], [1, 0], ["x"]), "got 2, 2, 1 and 2"),
        (lambda: paired_test([1, 0], [1, 0], strata=["x"]), "got 2, 2, 2 and 1"),
        (lambda: paired_difference([1, 0], [math.nan, 0]), "from 0 to 1, got nan"),
        (lambda: paired_loss_difference([1.0], [1.0], [5]), "equal lengths and at least 2 clusters"),
        (lambda: paired_loss_difference([1.0, 2.0], [1.0, 2.0], [5]), r"got lengths \(2, 2, 1, 2\)"),
        (lambda: paired_loss_difference([1.0, math.nan], [1.0, 2.0], [5, 5]), r"\(nan, 2.0, 5\)"),
        (lambda: paired_loss_difference([1.0, 2.0], [1.0, 2.0], [5, 0]), r"\(2.0, 2.0, 0\)"),
        (lambda: effective_length(curve(1.0), 85.6), "got 85.6. Pass 0.856"),
        (lambda: effective_length(curve(1.0), math.nan), "got nan"),
    ],
)
def test_what_has_no_answer_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

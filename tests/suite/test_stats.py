"""Intervals against scipy and by simulation; every rule says each of its words, at and on both sides of its border."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from dpngd.errors import UsageError
from dpngd.suite import stats
from dpngd.suite.stats import (
    EQUIVALENT,
    INCONCLUSIVE,
    NOT_RUN,
    NOT_TESTABLE,
    REFUTED,
    REPRODUCED,
    Contrast,
    Estimate,
    Part,
)

VALUES = st.lists(st.floats(0, 100).map(lambda x: round(x, 2)), min_size=2, max_size=8)


def estimate(mean, se, n=8, df=7.0):
    """With a normal-looking t interval around `mean`."""
    half = stats.t_quantile(df, 0.975) * se
    return Estimate(mean, se * math.sqrt(n), n, mean - half, mean + half, "difference", se, df)


def by_seed(*values):
    return dict(enumerate(values))


# ---- Intervals over seeds --------------------------------------------------------------------------------------------

@given(VALUES)
def test_the_interval_over_seeds_is_scipys(values):
    ours = stats.mean(values)
    assert ours.mean == pytest.approx(np.mean(values))
    assert ours.n == len(values)
    if ours.spread:
        assert ours.sd == pytest.approx(np.std(values, ddof=1))
        test = scipy_stats.ttest_1samp(values, 50.0)
        for level in (0.9, 0.95):
            theirs = test.confidence_interval(level)
            assert ours.interval(level) == pytest.approx((theirs.low, theirs.high))
        assert (ours.low, ours.high) == pytest.approx(ours.interval(0.95))
        assert ours.p_above(50.0) == pytest.approx(scipy_stats.ttest_1samp(values, 50.0, alternative="greater").pvalue)
        assert ours.p_below(50.0) == pytest.approx(scipy_stats.ttest_1samp(values, 50.0, alternative="less").pvalue)


def test_a_hand_computed_interval():
    # 1, 2, 3: mean 2, deviation 1, and t(0.975, 2) = 4.30265
    half = 4.302653 / math.sqrt(3)
    found = stats.mean([1, 2, 3])
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), abs=1e-5)


def test_few_values_have_no_interval():
    assert stats.mean([]).n == 0
    one = stats.mean([3.0])
    assert (one.mean, one.low, one.high, one.spread) == (3.0, -math.inf, math.inf, False)
    equal = stats.mean([2.0, 2.0, 2.0])
    assert (equal.low, equal.high, equal.spread) == (2.0, 2.0, False)
    nearly = stats.mean([0.1 + 0.2, 0.3])  # equal but for rounding
    assert not nearly.spread
    assert math.isnan(one.power)
    assert math.isnan(equal.margin)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(UsageError, match="must score chance"):
        stats.mean([1.0, bad])


def test_power_is_the_difference_seen_in_80_of_100_cases():
    """Of experiments with that true difference, 80 % say "above"; of experiments with none, 80 % are in the margin."""
    rng, n, sd = np.random.default_rng(1), 8, 1.3
    exact = replace(estimate(0, sd / math.sqrt(n)), df=n - 1.0)
    seen = np.mean([stats.superior("", stats.mean(x)).word == REPRODUCED
                    for x in rng.normal(exact.power, sd, size=(2000, n))])
    within = np.mean([stats.hardly("", stats.mean(x), exact.margin).word == REPRODUCED
                      for x in rng.normal(0.0, sd, size=(2000, n))])
    assert seen == pytest.approx(0.8, abs=0.04)
    assert within == pytest.approx(0.8, abs=0.05)


def test_ratios_are_geometric():
    found = stats.as_ratio(stats.log_ratio({0: 8.0, 1: 2.0, 2: 9.0}, {0: 2.0, 1: 2.0}).estimate())
    assert found.mean == pytest.approx(2.0)
    assert found.n == 2
    assert found.low * found.high == pytest.approx(4.0)
    assert stats.as_ratio(stats.log_ratio({}, {}).estimate()).n == 0
    with pytest.raises(UsageError, match="positive"):
        stats.log_ratio({0: 0.0}, {0: 1.0})


def test_a_pair_needs_both_seeds():
    found = stats.paired({0: 10.0, 1: 20.0, 2: 30.0}, {2: 29.0, 1: 18.0, 7: 500.0})
    assert found.by_seed == {1: 2.0, 2: 1.0}


# ---- Seeds and images ------------------------------------------------------------------------------------------------

def crossed(rng, n, m, seeds, images, noise):
    """L_si = a_s + b_i + e_si with a true mean of 0."""
    return rng.normal(0, seeds, (n, 1)) + rng.normal(0, images, (1, m)) + rng.normal(0, noise, (n, m))


def of_table(L_si):
    return Contrast(dict(enumerate(L_si.mean(1))), stats.image_part(L_si), L_si.shape[1])


@pytest.mark.parametrize(("seeds", "images", "noise"), [
    (0.5, 9.0, 8.0),  # both count: 0.5/sqrt(8) = 0.18 beside 9/sqrt(400) = 0.45
    (1.5, 9.0, 8.0), (1.5, 0.0, 3.0), (0.1, 20.0, 3.0)])
def test_intervals_cover_seeds_and_images(seeds, images, noise):
    """95 of 100 experiments with new seeds and new images cover the truth. Over seeds alone far fewer would."""
    rng, n, m = np.random.default_rng(2), 8, 400
    found = [of_table(crossed(rng, n, m, seeds, images, noise)) for _ in range(1500)]
    both = np.mean([e.low <= 0 <= e.high for e in (c.estimate() for c in found)])
    alone = np.mean([e.low <= 0 <= e.high for e in (Contrast(c.by_seed).estimate() for c in found)])
    assert both == pytest.approx(0.95, abs=0.02)
    if images / math.sqrt(m) > seeds / math.sqrt(n):
        assert alone < 0.75


def test_intervals_cover_with_bits_of_two_methods():
    """The same with what runs really keep: right or wrong, image by image, for two methods with a true difference."""
    rng, n, m, covered = np.random.default_rng(3), 8, 500, []
    grid = scipy_stats.norm.ppf((np.arange(100_000) + 0.5) / 100_000) * math.hypot(0.25, 0.01) + 0.5
    truth = 100 * (np.clip(grid + 0.05, 0, 1) - np.clip(grid, 0, 1)).mean()
    for _ in range(1500):
        easy = rng.normal(0.5, 0.25, m)  # an image's chance of being right, for both methods

        def bits(better, easy=easy):
            return 100.0 * (rng.random((n, m)) < np.clip(easy + better + rng.normal(0, 0.01, (n, 1)), 0, 1))
        found = of_table(bits(0.05) - bits(0.0)).estimate()
        covered.append(found.low <= truth <= found.high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_the_image_part_is_what_images_add():
    rng = np.random.default_rng(4)
    parts = [stats.image_part(crossed(rng, 8, 400, 1.0, 9.0, 8.0)) for _ in range(600)]
    assert np.mean(parts) == pytest.approx(81 / 400, rel=0.03)
    none = np.mean([stats.image_part(crossed(rng, 8, 400, 1.0, 0.0, 8.0)) for _ in range(600)])
    assert none < 0.1 * 64 / (8 * 400)
    assert stats.image_part(rng.normal(size=(1, 5))) == 0.0


def test_no_interval_is_shorter_than_that_over_seeds():
    rng = np.random.default_rng(5)
    for _ in range(50):
        c = of_table(crossed(rng, 4, 60, 1.0, 0.5, 5.0))
        assert c.estimate().se >= Contrast(c.by_seed).estimate().se - 1e-12


def test_seeds_without_spread_have_no_interval_whatever_the_images_say():
    equal = Contrast(by_seed(1.0, 1.0, 1.0), image_part=0.2, images=400).estimate()
    assert not equal.spread
    assert stats.superior("", equal).word == INCONCLUSIVE


# ---- Trends ----------------------------------------------------------------------------------------------------------

def test_a_trend_is_the_rise_of_the_least_squares_line():
    x, y = np.log([50, 150, 500, 1500, 5000]), np.array([60.0, 61.5, 61.0, 63.0, 62.5])
    rise = np.polyfit(x, y, 1)[0] * (x[-1] - x[0])
    assert np.dot(stats.slope_weights(x), y) == pytest.approx(rise)
    assert np.dot(stats.slope_weights([0, 1]), [3, 7]) == pytest.approx(4.0), "of two values, their difference"
    for bad in ([1.0], [2.0, 2.0]):
        with pytest.raises(UsageError, match="two different values"):
            stats.slope_weights(bad)


# ---- Pooling ---------------------------------------------------------------------------------------------------------

def correlated(rng, m, n, rho, sd=1.0):
    return sd * (math.sqrt(rho) * rng.normal(size=(1, n)) + math.sqrt(1 - rho) * rng.normal(size=(m, n)))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_the_degrees_of_freedom_of_a_pooled_variance_count_shared_seeds_once(rho):
    """2 E^2 / Var of the pooled variance over many experiments, against the formula with the true correlation; the
    formula with the estimated one is never above it by more than chance, so that intervals are not too short."""
    rng, m, n = np.random.default_rng(6), 5, 8
    pools = [stats.pool([Contrast(dict(enumerate(row))) for row in correlated(rng, m, n, rho)]) for _ in range(4000)]
    s2 = np.array([p.s2 for p in pools])
    true = m * (n - 1) / (1 + (m - 1) * rho**2)
    assert s2.mean() == pytest.approx(1.0, rel=0.03)
    assert 2 * s2.mean() ** 2 / s2.var() == pytest.approx(true, rel=0.1)
    assert np.mean([p.df for p in pools]) <= 1.05 * true
    assert np.mean([p.df for p in pools]) >= 0.6 * true


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_pooled_intervals_cover(rho):
    rng, m, n = np.random.default_rng(7), 5, 8
    hits = []
    for _ in range(2500):
        cells = [Contrast(dict(enumerate(row))) for row in correlated(rng, m, n, rho)]
        hits += [e.low <= 0 <= e.high for e in stats.estimates(cells, ["data"] * m)]
    assert 0.94 <= np.mean(hits) <= 0.975, "the guard makes them a little longer than they need be"


def test_pooled_intervals_cover_where_deviations_differ():
    """Twice the deviation at the smallest epsilon: that interval must not be cut by its neighbours."""
    rng, hits = np.random.default_rng(12), []
    for _ in range(1500):
        table = correlated(rng, 5, 8, 0.3) * np.array([[2.0], [1.5], [1.0], [1.0], [1.0]])
        found = stats.estimates([Contrast(dict(enumerate(row))) for row in table], ["data"] * 5)
        hits.append([e.low <= 0 <= e.high for e in found])
    assert np.mean(hits, axis=0).min() > 0.925


def test_a_wild_cell_keeps_its_own_variance():
    rng = np.random.default_rng(8)
    calm = [Contrast(dict(enumerate(row))) for row in correlated(rng, 4, 8, 0.0)]
    wild = Contrast(dict(enumerate(rng.normal(0, 30, 8))))
    found = stats.estimates([*calm, wild], ["a"] * 5)
    assert found[-1] == wild.estimate()
    lost = replace(calm[0], lost=True)
    found = stats.estimates([lost, *calm[1:]], ["a"] * 4)
    assert found[0] == lost.estimate(), "a run that scores chance is no reason to trust its neighbours' spread"
    common = stats.pool(calm[1:])
    still = min(calm[1:], key=lambda c: c.estimate().sd)
    assert found[calm.index(still)] == still.estimate(common)


def test_what_cannot_be_pooled():
    one, two = Contrast(by_seed(1.0, 2.0)), Contrast({0: 1.0, 5: 3.0})
    assert stats.pool([one]) is None
    assert stats.pool([one, two]) is None, "other seeds"
    assert stats.pool([Contrast({0: 1.0}), Contrast({0: 2.0})]) is None
    assert stats.pool([Contrast(by_seed(1.0, 1.0)), Contrast(by_seed(2.0, 2.0))]) is None
    assert stats.estimates([one, two], [None, None]) == [one.estimate(), two.estimate()]
    assert stats.estimates([one, one], ["a", "b"]) == [one.estimate(), one.estimate()]


# ---- Words -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("mean", "se", "word"), [
    (2.0, 0.5, REPRODUCED), (-2.0, 0.5, REFUTED), (0.1, 0.3, EQUIVALENT), (-0.1, 0.3, EQUIVALENT),
    (0.5, 0.5, INCONCLUSIVE), (0.9, 1.0, INCONCLUSIVE), (-0.9, 1.0, INCONCLUSIVE)])
def test_superior(mean, se, word):
    assert stats.superior("", estimate(mean, se)).word == word


def test_superior_at_its_borders():
    half, half90 = (stats.t_quantile(7.0, p) for p in (0.975, 0.95))
    assert stats.superior("", estimate(half, 1.0)).word == INCONCLUSIVE, "the limit is 0"
    assert stats.superior("", estimate(half + 1e-6, 1.0)).word == REPRODUCED
    se = 1.0 / half90
    assert stats.superior("", estimate(0.0, se + 1e-6)).word == INCONCLUSIVE, "the 90% limits are past the margin"
    assert stats.superior("", estimate(0.0, se - 1e-6)).word == EQUIVALENT
    assert stats.superior("", estimate(0.5, 0.1), margin=None).word == REPRODUCED
    assert stats.superior("", estimate(0.01, 0.1), margin=None).word == INCONCLUSIVE, "no margin, no equivalence"
    assert stats.superior("", estimate(-0.5, 0.1), threshold=-1.0, margin=None).word == REPRODUCED
    assert stats.superior("", estimate(-1.5, 0.1), threshold=-1.0, margin=None).word == REFUTED


@pytest.mark.parametrize(("mean", "se", "word"), [
    (0.0, 0.3, REPRODUCED), (0.6, 0.1, REPRODUCED), (2.0, 0.3, REFUTED), (-2.0, 0.3, REFUTED), (0.5, 0.5, INCONCLUSIVE),
    (1.2, 0.3, INCONCLUSIVE), (0.0, 2.0, INCONCLUSIVE)])
def test_hardly(mean, se, word):
    assert stats.hardly("", estimate(mean, se)).word == word


def test_a_margin_must_be_one():
    with pytest.raises(UsageError, match="margin = 0"):
        stats.hardly("", estimate(0, 1), 0)


@pytest.mark.parametrize("value", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("n", [0, 1, 2, 8])
def test_without_an_interval_nothing_is_decided(value, n):
    """No run, one run, or runs that all agree: never a word from the sign of a mean."""
    e = stats.mean([value] * n)
    word = INCONCLUSIVE if n else NOT_RUN
    assert stats.superior("", e).word == stats.hardly("", e).word == word
    assert stats.conjunction([stats.superior("", e)]).word == word


@pytest.mark.parametrize(("yes", "n", "word"), [
    (10, 10, REPRODUCED), (9, 10, REPRODUCED), (8, 10, INCONCLUSIVE), (5, 10, INCONCLUSIVE), (1, 10, REFUTED),
    (0, 10, REFUTED), (6, 6, REPRODUCED), (5, 5, INCONCLUSIVE), (1, 1, INCONCLUSIVE), (0, 0, NOT_RUN)])
def test_mostly(yes, n, word):
    part = stats.mostly("", yes, n)
    assert part.word == word
    if n:
        test = scipy_stats.binomtest(yes, n, 0.5)
        assert (part.estimate.low, part.estimate.high) == pytest.approx(test.proportion_ci(0.95, "exact"))
        assert part.up == pytest.approx(scipy_stats.binomtest(yes, n, 0.5, "greater").pvalue)
        assert part.down == pytest.approx(scipy_stats.binomtest(yes, n, 0.5, "less").pvalue)


def test_an_impossible_share():
    with pytest.raises(UsageError, match="3 of 2"):
        stats.share(3, 2)


def ratio(values, n=6):
    values = np.asarray(values, dtype=float)
    return stats.percentile(float(np.median(values)), values, n), values


@pytest.mark.parametrize(("values", "word"), [
    (np.linspace(2.4, 4, 200), REPRODUCED), (np.linspace(1, 2.2, 200), REFUTED), (np.linspace(1, 4, 200), INCONCLUSIVE),
    ([3.0] * 200, REPRODUCED), ([2.3] * 200, REPRODUCED), ([0.0] * 200, REFUTED)])
def test_at_least(values, word):
    e, values = ratio(values)
    assert stats.at_least("", e, 2.3, values).word == word
    assert stats.conjunction([stats.at_least("", e, 2.3, values)]).word == word
    one = stats.percentile(3.0, values, 1)
    assert stats.at_least("", one, 2.3, values).word == INCONCLUSIVE
    assert stats.conjunction([stats.at_least("", one, 2.3, values)]).word == INCONCLUSIVE
    assert stats.at_least("", stats.NOTHING, 2.3, values).word == NOT_RUN
    with pytest.raises(UsageError, match="factor = 0"):
        stats.at_least("", e, 0, values)


def test_the_bootstrap_is_the_same_every_time_and_its_interval_is_that_of_t():
    """Of a mean: samples of the seeds vary by (n - 1)/n of what seeds do, so the quantiles are taken further out."""
    x = np.random.default_rng(9).normal(3.0, 1.0, 20)
    picked = stats.resampled(20)
    assert picked.shape == (stats.DRAWS, 20)
    assert np.array_equal(picked, stats.resampled(20))
    values = x[picked].mean(1)
    assert values.std() == pytest.approx(x.std() / math.sqrt(20), rel=0.03)
    e = stats.percentile(float(x.mean()), values, 20)
    theirs = scipy_stats.t.interval(0.95, 19, x.mean(), x.std(ddof=1) / math.sqrt(20))
    assert (e.low, e.high) == pytest.approx(theirs, abs=0.05)


@pytest.mark.parametrize("n", [6, 8])
def test_the_bootstrap_interval_of_few_seeds_covers(n):
    """The plain percentile interval of 6 seeds covers in 86 % of cases."""
    rng, picked = np.random.default_rng(n), stats.resampled(n)
    inside = plain = 0
    for _ in range(400):
        x = rng.normal(size=n)
        values = x[picked].mean(1)
        e = stats.percentile(0.0, np.exp(values), n)
        inside += math.log(e.low) < 0 < math.log(e.high)
        low, high = np.quantile(values, [0.025, 0.975])
        plain += low < 0 < high
    assert plain / 400 < 0.9
    assert inside / 400 > 0.91


def test_the_p_of_a_bootstrap_belongs_to_its_interval():
    for n in (3, 6, 20):
        tail = scipy_stats.norm.cdf(math.sqrt(n / (n - 1)) * scipy_stats.t.ppf(0.025, n - 1))
        assert stats.expanded_p(tail, n) == pytest.approx(0.025)
        assert stats.expanded_p(0.0, n) == 0.0
        assert stats.expanded_p(1.0, n) == 1.0
        assert stats.expanded_p(0.5, n) == pytest.approx(0.5)


# ---- Holm and conjunctions -------------------------------------------------------------------------------------------

def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert stats.holm([]) == []


def test_holm_keeps_the_family_error():
    """Of 15 true nulls, some one is called in 2.5 of 100 experiments at most; uncorrected it would be in a third."""
    p = np.random.default_rng(10).random((4000, 15))
    assert np.mean([min(stats.holm(row)) <= 0.025 for row in p.tolist()]) == pytest.approx(0.025, abs=0.008)
    assert np.mean(p.min(1) <= 0.025) > 0.25


def parts(*means, se=0.5):
    return [stats.superior(f"cell {i}", estimate(m, se)) for i, m in enumerate(means)]


@pytest.mark.parametrize(("given", "word", "held"), [
    (parts(3, 4, 5), REPRODUCED, 3),
    (parts(1.3, 1.3, 1.3), REPRODUCED, 3),  # each at 95%, none after Holm: all is shown, by intersection-union
    (parts(5, 5, 0.5), INCONCLUSIVE, 2),
    (parts(5, 5, -5), REFUTED, 2),
    (parts(5, 5, -1.3), INCONCLUSIVE, 2),  # refuted alone, not after Holm
    (parts(0.1, -0.1, 0.2, se=0.2), EQUIVALENT, 0),
    (parts(5, 0.1, se=0.2), INCONCLUSIVE, 1),  # one ahead, one level: neither word is true of both
    ([*parts(5), stats.absent("b")], NOT_RUN, 1),
    ([*parts(5), stats.not_testable("b", "why", "what")], INCONCLUSIVE, 1),  # one of two is shown
    ([*parts(-5), stats.not_testable("b", "why", "what")], REFUTED, 0),
    ([stats.not_testable("b", "why", "what")], NOT_TESTABLE, 0),
    ([], NOT_RUN, 0)])
def test_conjunction(given, word, held):
    verdict = stats.conjunction(given)
    assert (verdict.word, verdict.held) == (word, held)


def test_the_parts_of_a_cell_count_as_one_by_their_largest_p():
    given = [replace(p, cell=c) for p, c in zip(parts(5, 5, 5, 0.2), "aabb", strict=True)]
    verdict = stats.conjunction(given)
    assert (verdict.held, verdict.cells, verdict.word) == (1, 2, INCONCLUSIVE)
    assert verdict.weakest.estimate.mean == 0.2
    refuted = stats.conjunction(parts(5, -5, -9))
    assert refuted.weakest.estimate.mean == -9


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(0.05, 2)), min_size=1, max_size=1))
def test_a_conjunction_of_one_is_that_one(pairs):
    (part,) = [stats.superior("", estimate(*pair)) for pair in pairs]
    assert stats.conjunction([part]).word == part.word
    other = stats.hardly("", estimate(*pairs[0]))
    assert stats.conjunction([other]).word == other.word


@given(st.integers(0, 12), st.integers(1, 12))
def test_a_share_alone_is_its_own_conjunction(yes, n):
    part = stats.mostly("", min(yes, n), n)
    assert stats.conjunction([part]).word == part.word


# ---- What would decide it --------------------------------------------------------------------------------------------

def test_the_seeds_needed_are_enough_and_one_fewer_is_not():
    rng = np.random.default_rng(11)
    e = stats.mean(rng.normal(0.5, 1.0, 8))
    needed = stats.seeds_needed(e, 0.5)
    def power(n):
        se, df = e.sd / math.sqrt(n), n - 1
        return (stats.t_quantile(df, 0.975) + stats.t_quantile(df, 0.8)) * se
    assert power(needed) <= 0.5 < power(needed - 1)
    assert stats.seeds_needed(e, 0.0) is None
    assert stats.seeds_needed(stats.mean([1.0]), 0.5) is None
    images = replace(e, image_part=0.5**2, images=400)
    assert stats.seeds_needed(images, 0.5) is None, "the images alone leave more than that"


def test_texts():
    assert stats.mean([0.60, 0.61, 0.62]).text(scale=100) == "61.00 [58.52, 63.48] n=3"
    assert stats.mean([0.6]).text(scale=100, digits=1) == "60.0 n=1"
    assert stats.mean([]).text() == "not run"


def test_the_words_are_those_of_the_docstring():
    assert all(word in stats.__doc__ for word in stats.WORDS)
    assert {REPRODUCED, REFUTED, EQUIVALENT, INCONCLUSIVE, NOT_TESTABLE, NOT_RUN} == set(stats.WORDS)
    assert isinstance(stats.absent("x"), Part)

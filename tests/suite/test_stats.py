"""Intervals against scipy and by simulation; every verdict rule at and on both sides of its border."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from dpngd.errors import UsageError
from dpngd.suite import stats
from dpngd.suite.stats import DIRECTION, NOT_REPRODUCED, NOT_RUN, REPRODUCED, Estimate, Verdict

VALUES = st.lists(st.floats(0, 100).map(lambda x: round(x, 2)), min_size=2, max_size=8)


def interval(low, high, n=5, kind="mean"):
    return Estimate((low + high) / 2, 1.0, n, low, high, kind)


@given(VALUES)
def test_the_mean_interval_is_scipys(values):
    ours = stats.mean(values)
    assert ours.mean == pytest.approx(np.mean(values))
    assert ours.sd == pytest.approx(np.std(values, ddof=1))
    assert ours.n == len(values)
    if ours.sd > 1e-9:
        theirs = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))


@given(VALUES, VALUES)
def test_the_welch_interval_is_scipys(a, b):
    if np.std(a) < 1e-3 or np.std(b) < 1e-3:
        return
    ours = stats.welch(a, b)
    theirs = scipy_stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.n == min(len(a), len(b))


def test_a_hand_computed_interval():
    # 1, 2, 3: mean 2, deviation 1, and t(0.975, 2) = 4.30265
    half = 4.302653 / math.sqrt(3)
    estimate = stats.mean([1, 2, 3])
    assert (estimate.low, estimate.high) == pytest.approx((2 - half, 2 + half), abs=1e-5)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_intervals_cover_the_truth_95_times_in_100(n):
    rng = np.random.default_rng(0)
    draws = rng.normal(1.0, 2.0, size=(2000, n))
    covered = np.mean([e.low <= 1.0 <= e.high for e in map(stats.mean, draws)])
    assert covered == pytest.approx(0.95, abs=0.015)


def test_differences_are_paired_by_seed_where_possible():
    a = {0: 10.0, 1: 20.0, 2: 30.0}
    b = {2: 29.0, 1: 19.0, 0: 9.0, 7: 500.0}
    paired = stats.difference(a, b)
    assert paired.kind == "paired difference"
    assert (paired.mean, paired.low, paired.high, paired.n) == (1.0, 1.0, 1.0, 3)
    unpaired = stats.difference(a, {5: 9.0, 6: 19.0, 7: 29.0})
    assert unpaired.kind == "Welch difference"
    assert unpaired.low < 0 < unpaired.high
    assert stats.difference({0: 1.0, 1: 2.0}, {1: 1.0, 2: 2.0}).kind == "Welch difference"
    assert stats.difference({0: 3.0}, {0: 1.0, 1: 7.0}) == stats.mean([2.0], "paired difference")


def test_few_values():
    assert stats.mean([]).n == 0
    assert stats.difference({}, {0: 1.0}).n == 0
    one = stats.mean([3.0])
    assert (one.mean, one.low, one.high) == (3.0, -math.inf, math.inf)
    assert stats.welch([1.0, 1.0], [1.0, 1.0]).high == 0.0
    assert stats.welch([4.0], [1.0, 2.0]).mean == 2.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_diverged_values_are_refused(bad):
    with pytest.raises(UsageError, match="leave out diverged runs"):
        stats.mean([1.0, bad])
    with pytest.raises(UsageError, match="not finite"):
        stats.welch([1.0, bad], [1.0])


def test_ratios_are_geometric():
    ratio = stats.ratio({0: 8.0, 1: 2.0, 2: 9.0}, {0: 2.0, 1: 2.0})
    assert ratio.mean == pytest.approx(2.0)
    assert ratio.n == 2
    assert ratio.low * ratio.high == pytest.approx(4.0)
    inverse = stats.ratio({0: 2.0, 1: 2.0}, {0: 8.0, 1: 2.0})
    assert inverse.low == pytest.approx(1 / ratio.high)
    assert stats.ratio({}, {}).n == 0
    with pytest.raises(UsageError, match="positive"):
        stats.ratio({0: 0.0}, {0: 1.0})


@pytest.mark.parametrize(
    ("estimate", "margin", "verdict"),
    [
        (interval(0.1, 2), 0, REPRODUCED),
        (interval(0.0, 2), 0, DIRECTION),
        (interval(-0.1, 2), 0, DIRECTION),
        (interval(-1, 1), 0, NOT_REPRODUCED),
        (interval(-2, -1), 0, NOT_REPRODUCED),
        (interval(0.1, 2), 0.5, DIRECTION),
        (interval(0.1, 2), 1.5, NOT_REPRODUCED),
        (stats.mean([1.0]), 0, DIRECTION),
        (stats.mean([-1.0]), 0, NOT_REPRODUCED),
        (stats.mean([]), 0, NOT_RUN),
    ],
)
def test_greater(estimate, margin, verdict):
    assert stats.greater(estimate, margin).verdict == verdict


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (interval(-0.9, 0.9), REPRODUCED),
        (interval(0.2, 0.9), REPRODUCED),
        (interval(-1.0, 0.5), DIRECTION),
        (interval(-0.5, 1.0), DIRECTION),
        (interval(0.5, 1.5), NOT_REPRODUCED),
        (interval(2, 3), NOT_REPRODUCED),
        (stats.mean([0.5]), DIRECTION),
        (stats.mean([-1.5]), NOT_REPRODUCED),
        (stats.mean([]), NOT_RUN),
    ],
)
def test_within_one(estimate, verdict):
    assert stats.within(estimate, 1.0).verdict == verdict


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (interval(2.3, 3), REPRODUCED),
        (interval(2.2, 3), DIRECTION),
        (interval(0.5, 5), DIRECTION),
        (interval(1.1, 1.5), DIRECTION),
        (interval(0.9, 1.5), NOT_REPRODUCED),
        (stats.mean([2.5]), DIRECTION),
        (stats.mean([1.5]), NOT_REPRODUCED),
        (stats.mean([]), NOT_RUN),
    ],
)
def test_at_least_2_3(estimate, verdict):
    assert stats.at_least(estimate, 2.3).verdict == verdict


@pytest.mark.parametrize(
    ("happened", "verdict"),
    [
        ([True, True], REPRODUCED),
        ([True], DIRECTION),
        ([True, True, False], DIRECTION),
        ([True, False], NOT_REPRODUCED),
        ([False], NOT_REPRODUCED),
        ([], NOT_RUN),
    ],
)
def test_outcome(happened, verdict):
    assert stats.outcome(happened).verdict == verdict


def cells(*verdicts):
    return [Verdict(v, None, "") for v in verdicts]


@pytest.mark.parametrize(
    ("parts", "verdict", "held"),
    [
        (cells(REPRODUCED, REPRODUCED), REPRODUCED, 2),
        (cells(REPRODUCED, DIRECTION), DIRECTION, 1),
        (cells(REPRODUCED, NOT_RUN), DIRECTION, 1),
        (cells(DIRECTION, DIRECTION, NOT_REPRODUCED), DIRECTION, 0),
        (cells(REPRODUCED, NOT_REPRODUCED), NOT_REPRODUCED, 1),
        (cells(NOT_RUN, NOT_RUN), NOT_RUN, 0),
        (cells(), NOT_RUN, 0),
    ],
)
def test_every_cell(parts, verdict, held):
    decided = stats.every(parts)
    assert (decided.verdict, decided.held, decided.cells) == (verdict, held, len(parts))


def test_bad_bounds():
    with pytest.raises(UsageError, match="bound = 0"):
        stats.within(interval(0, 1), 0)
    with pytest.raises(UsageError, match="factor = 1"):
        stats.at_least(interval(0, 1), 1)


def test_texts():
    assert stats.mean([0.60, 0.61, 0.62]).text(scale=100) == "61.00 [58.52, 63.48] n=3"
    assert stats.mean([0.6]).text(scale=100, digits=1) == "60.0 n=1"
    assert stats.mean([]).text() == "not run"
    assert stats.greater(interval(1, 2)).text() == "reproduced: 1.50 [1.00, 2.00] n=5"
    assert stats.greater(stats.mean([])).text() == "not run"
    assert stats.every(cells(REPRODUCED, NOT_REPRODUCED)).text() == "not reproduced: 1 of 2 cells"
    assert stats.greater(interval(1, 2)).rule == "the whole 95% interval of the mean is above 0"


@given(st.lists(st.sampled_from([0.1, 0.2, 0.25, 0.9]), max_size=4), st.sampled_from([-0.1, 0.0, 0.2]))
def test_a_verdict_is_one_of_four_and_reproduced_needs_two_runs(values, margin):
    verdict = stats.greater(stats.mean(values), margin).verdict
    assert verdict in stats.VERDICTS
    assert len(values) >= 2 or verdict != REPRODUCED
    assert (verdict == NOT_RUN) == (not values)


def test_two_equal_runs_are_no_proof():
    twice, thrice = stats.mean([2.0, 2.0], "paired difference"), stats.mean([2.0, 2.0, 2.0], "paired difference")
    assert (twice.low, twice.high) == (2.0, 2.0)
    assert stats.greater(twice).verdict == stats.within(twice, 3.0).verdict == stats.DIRECTION
    assert stats.greater(thrice).verdict == stats.REPRODUCED
    assert stats.at_least(stats.ratio({0: 4.0, 1: 4.0}, {0: 2.0, 1: 2.0}), 1.5).verdict == stats.DIRECTION

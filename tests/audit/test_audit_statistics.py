"""The audit's statistics against published formulas, exact cases, and their own coverage."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpngd.audit import checks, estimators
from dpngd.audit import statistics as st


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (180, 200), (1, 2000)])
def test_clopper_pearson_is_the_exact_interval(k, n):
    exact = stats.binomtest(k, n).proportion_ci(0.98, method="exact")
    assert st.clopper_pearson(k, n, 0.01) == pytest.approx((exact.low, exact.high))


def test_mu_lower_inverts_the_noncentral_t():
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(0.5, 1, 50), rng.normal(0, 1, 40)
    mu, low = st.mu_lower(inside, outside, 0.01)
    unit = math.sqrt(1 / 50 + 1 / 40)
    assert stats.nct.sf(mu / unit, 88, low / unit) == pytest.approx(0.01, rel=2e-2)
    assert low < mu


@pytest.mark.parametrize("mu", [0.3, 4.0])
def test_mu_lower_covers(mu):
    """The limit is above the truth in a share alpha of the cases, whatever the scale and offset of the scores."""
    rng = np.random.default_rng(1)
    above = sum(st.mu_lower(7 + 3 * rng.normal(mu, 1, 200), 7 + 3 * rng.normal(0, 1, 200), 0.1)[1] > mu
                for _ in range(400))
    assert st.count_p(above, 400, 0.1) > 1e-3


def test_mu_power_is_found():
    rng = np.random.default_rng(2)
    mu, n, alpha = 3.4, 500, 1e-3
    larger = st.mu_power(mu, n, alpha, power=0.9)
    found = sum(st.mu_lower(rng.normal(larger, 1, n), rng.normal(0, 1, n), alpha)[1] > mu for _ in range(100))
    assert 80 <= found <= 98


def test_scores_without_noise_have_no_finite_distance():
    assert st.mu_lower(np.ones(10), np.zeros(10), 0.01) == (math.inf, math.inf)


def test_epsilon_lower_is_a_lower_limit():
    """Randomised response at epsilon 1: above the truth in at most a share alpha of the cases."""
    rng, p = np.random.default_rng(3), 1 / (1 + math.exp(-1))
    wrong = sum(st.epsilon_lower((rng.random(400) < p).astype(float), (rng.random(400) > p).astype(float), 0.0, 0.1) > 1
                for _ in range(200))
    assert wrong <= 30
    assert st.epsilon_lower(np.ones(2000), np.zeros(2000), 1e-5, 1e-3) > 4


def published_p(m, r, v, eps, delta):
    """The reference implementation of Steinke et al. (2023), appendix D, as printed there."""
    q = 1 / (1 + math.exp(-eps))
    beta = stats.binom.sf(v - 1, r, q)
    alpha, total = 0.0, 0.0
    for i in range(1, v + 1):
        total = total + stats.binom.pmf(v - i, r, q)
        if total > i * alpha:
            alpha = total / i
    return min(beta + alpha * delta * 2 * m, 1)


@pytest.mark.parametrize(("m", "r", "v"), [(100, 100, 75), (1000, 200, 180), (96, 32, 32), (50, 10, 0)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 1e-5), (3.0, 1e-3)])
def test_one_run_is_the_published_formula(m, r, v, epsilon, delta):
    assert st.one_run_p(m, r, v, epsilon, delta) == pytest.approx(published_p(m, r, v, epsilon, delta), abs=1e-12)


def test_one_run_epsilon_is_where_the_p_value_reaches_the_level():
    low = st.one_run_epsilon(1000, 200, 180, 1e-5, 0.05)
    assert st.one_run_p(1000, 200, 180, low, 1e-5) == pytest.approx(0.05, rel=1e-4)
    assert st.one_run_epsilon(1000, 200, 100, 1e-5, 0.05) == 0.0


# Numbers of jax-privacy 2.0.0 (CanaryScoreAuditor with an explicit threshold; its one-run functions).
@pytest.mark.parametrize(("hits", "false", "alpha", "delta", "theirs"), [
    (834, 163, 0.05, 1e-5, 1.46323023781873), (312, 7, 1e-3, 0.0, 2.5581210027238024),
    (161, 1, 1e-5, 1e-3, 2.0267816239009)])
def test_clopper_pearson_epsilon_is_that_of_jax_privacy(hits, false, alpha, delta, theirs):
    assert st._ratio(hits, 1000, false, 1000, delta, alpha / 2) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize(("m", "guesses", "right", "alpha", "delta", "theirs"), [
    (1000, 200, 180, 0.05, 1e-5, 1.796285070718516), (500, 300, 290, 1e-3, 1e-4, 0.8098043291978348),
    (96, 32, 32, 1e-5, 1e-5, 0.0), (96, 32, 20, 1e-5, 1e-5, 0.0)])
def test_one_run_epsilon_is_that_of_jax_privacy(m, guesses, right, alpha, delta, theirs):
    assert st.one_run_epsilon(m, guesses, right, delta, alpha) == pytest.approx(theirs, abs=2e-6)


def test_both_estimators_bound_from_below_and_agree():
    """With the extra `audit` these are jax-privacy's own (its threshold is another one), without it ours."""
    rng = np.random.default_rng(11)
    inside, outside = rng.normal(2, 1, 1000), rng.normal(0, 1, 1000)
    found, how = estimators.from_scores(inside, outside, 1e-5, 1e-3)
    assert 0.9 * st.epsilon_lower(inside, outside, 1e-5, 1e-3) - 0.3 <= found <= st.gdp_epsilon(2.0, 1e-5)
    assert how.startswith("Clopper-Pearson")
    coins = rng.random(96) < 0.5
    told, how = estimators.from_one_run(coins + 0.01 * rng.random(96), coins, 1e-7, 1e-5)
    assert told > checks.END["epsilon"], "a run that tells every coin fails the audit"
    assert "guesses right" in how
    assert estimators.from_one_run(rng.random(96), coins, 1e-7, 1e-5)[0] == 0.0


def test_jax_privacys_estimators_are_used_where_they_are_installed():
    pytest.importorskip("jax_privacy")
    rng = np.random.default_rng(11)
    assert "jax-privacy" in estimators.from_scores(rng.random(50) + 1, rng.random(50), 1e-5, 0.05)[1]


def test_the_gaussian_mechanism_is_exact():
    assert st.gdp_epsilon(1.0, 1e-5) == pytest.approx(4.3772, abs=1e-4)  # Balle and Wang (2018), sigma = 1
    assert st.gdp_delta(2.0, st.gdp_epsilon(2.0, 1e-6)) == pytest.approx(1e-6)
    assert st.gdp_epsilon(1e-7, 1e-5) == 0.0


@pytest.mark.parametrize(("parts", "q"), [([(1.0, 16)], 0.125), ([(0.7, 100)], 0.01), ([(2.0, 300)], 0.05),
                                          ([(1.5, 12), (2.9, 3)], 0.25)])
def test_sampled_epsilon_encloses_a_second_opinion(parts, q):
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    low, high = st.sampled_epsilon(parts, q, 1e-5)
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for sigma, n in parts:
        accountant.compose(accounting.PoissonSampledDpEvent(q, accounting.GaussianDpEvent(sigma)), n)
    second = accountant.get_epsilon(1e-5)  # pessimistic, by much less than our gap
    assert low <= second <= high + 1e-3
    assert high - low <= 0.005 + 1e-9


def test_sampled_epsilon_without_sampling_is_the_gaussian():
    low, high = st.sampled_epsilon([(2.0, 4)], 1.0, 1e-5)
    assert low == high == pytest.approx(st.gdp_epsilon(1.0, 1e-5))
    near = st.sampled_epsilon([(2.0, 4)], 1 - 1e-9, 1e-5)
    assert near[0] - 1e-3 <= low <= near[1] + 1e-3


def test_the_variance_test_has_its_level_and_its_power():
    rng = np.random.default_rng(4)
    scores = np.array([st.variance_z(rng.standard_normal(3000)) for _ in range(1000)])
    assert stats.kstest(scores, "norm").pvalue > 1e-4
    n, alpha = 70_000, 1e-5
    short = 1 - st.shortfall_power(n, alpha)
    limit = stats.norm.isf(alpha / 2)
    assert sum(st.variance_z(short * rng.standard_normal(n)) < -limit for _ in range(100)) >= 94
    assert st.variance_z(np.array([math.nan])) == math.inf


def test_tail_p_values_have_their_level():
    rng = np.random.default_rng(5)
    largest = [np.abs(rng.standard_normal(1000)).max() for _ in range(1000)]
    assert np.mean([st.max_p(m, 1000) < 0.05 for m in largest]) == pytest.approx(0.05, abs=0.03)
    assert st.max_p(3.5, 10**6) < 1e-5  # a cut tail
    assert st.max_p(9.0, 10**6) < 1e-5
    assert st.count_p(50, 100, 0.5) == 1.0
    assert st.count_p(0, 10**6, 1e-3) < 1e-5


@pytest.mark.parametrize("size", [16, 48, 148, 4096])
def test_the_grid_of_single_precision_is_seen(size):
    g = torch.Generator().manual_seed(0)
    draws = 400_000 // size
    single = [torch.randn(size, generator=g).numpy() for _ in range(draws)]
    double = [torch.randn(size, generator=g, dtype=torch.float64).float().numpy() for _ in range(draws)]
    near, pairs = st.grid_distance(single)
    far, many = st.grid_distance(double)
    assert near < 0.12
    assert abs(far - 0.25) < 5 * math.sqrt(1 / 48 / many)
    assert min(pairs, many) > 1000

"""The accounting: against the paper's runs, closed forms, Opacus, and an independent pessimistic composition."""

import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from opacus.accountants.utils import get_noise_multiplier
from scipy.optimize import brentq
from scipy.stats import norm

from dpngd import privacy
from dpngd.errors import UsageError

DELTA = 1e-5
FEW = settings(max_examples=10, deadline=None)
# Budgets, rates and step counts as people use them; every draw costs several compositions.
epsilons, rates, steps = st.floats(0.1, 12), st.floats(0.005, 0.5), st.integers(1, 3000)


def gaussian_epsilon(sigma: float, T: int, delta: float) -> float:
    """Exact, at q = 1: T releases are one with mu = sqrt(T)/sigma (Balle and Wang, 2018)."""
    mu = math.sqrt(T) / sigma

    def excess(e: float) -> float:
        return norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu)) - delta

    return brentq(excess, 0, 300, xtol=1e-10)


def pessimistic_delta(epsilon: float, sigma: float, q: float, T: int, direction: str, h: float = 2e-5) -> float:
    """An upper bound of delta(epsilon), by composing the loss of one step rounded up to a grid of mesh h.

    Shares no code with Opacus. remove: P is the mixture and Q = N(0, sigma^2), the loss is log(P/Q) under P; add:
    the two exchanged. Loss beyond the grid counts in full.
    """
    size = 2**20
    grid = (np.arange(size) - size // 2) * h
    sign = 1 if direction == "remove" else -1
    with np.errstate(invalid="ignore", divide="ignore"):
        # The x at which log(P/Q) of "remove" is l; below log(1 - q) no x has so small a loss.
        x = sigma**2 * np.log((np.exp(sign * grid) - 1 + q) / q) + 0.5
    x = np.where(np.isnan(x), -np.inf, x)
    removed, added = (1 - q) * norm.cdf(x / sigma) + q * norm.cdf((x - 1) / sigma), norm.sf(x / sigma)
    cdf = removed if direction == "remove" else added  # the loss of adding falls as x rises
    pmf = np.diff(cdf, prepend=0.0)
    lost = 1 - pmf.sum()
    composed = np.fft.irfft(np.fft.rfft(np.roll(pmf, -size // 2)) ** T, size)
    composed = np.maximum(np.roll(composed, size // 2), 0)
    above = grid > epsilon
    return float((composed[above] * -np.expm1(epsilon - grid[above])).sum() + T * lost)


@pytest.mark.parametrize(
    ("N", "epsilon", "T", "sigma"),
    [(50_000, *row) for row in [(1, 840, 9.06), (2, 1320, 6.05), (4, 1920, 3.98), (6, 1800, 2.78), (8, 2640, 2.64)]]
    + [(73_257, *row) for row in [(1, 1360, 7.89), (2, 1870, 4.94), (4, 2040, 2.86), (6, 2380, 2.22), (8, 3400, 2.10)]],
)
def test_the_papers_runs(N, epsilon, T, sigma):
    """Sigmas of an independent measurement, which stopped up to 0.01 below epsilon: at epsilon = 1 that is 1%."""
    ours = privacy.calibrate(epsilon, DELTA, 4096 / N, T, N=N)
    assert ours == pytest.approx(sigma, rel=0.0075)
    assert epsilon - 1e-3 <= privacy.spent(ours, 4096 / N, T, DELTA) <= epsilon


@pytest.mark.parametrize(("sigma", "q", "T", "delta"), [
    (9.06, 4096 / 50_000, 840, 1e-5), (2.64, 4096 / 50_000, 2640, 1e-5), (1.54, 256 / 1437, 40, 1e-5),
    (0.89, 0.02, 100, 1e-5), (1.0, 0.01, 500, 1e-7),
])  # fmt: skip
def test_prv_is_opacuss_prv(sigma, q, T, delta):
    opacus = PRVAccountant()
    opacus.history = [(sigma, q, T)]
    assert privacy.prv(((sigma, T),), q, delta, 0.01) == pytest.approx(opacus.get_epsilon(delta), abs=1e-6)
    # At everyday budgets our eps_error is Opacus's default, so its PrivacyEngine reports what we report.
    if opacus.get_epsilon(delta) > 0.95:
        above = privacy.spent(sigma, q, T, delta) / opacus.get_epsilon(delta) - 1
        assert -1e-6 <= above <= 1.1e-5, "rounded up to 6 digits"


def test_calibration_is_tighter_than_opacuss_own():
    args = {"target_epsilon": 2.0, "target_delta": DELTA, "sample_rate": 0.02, "steps": 300, "accountant": "prv"}
    theirs, ours = get_noise_multiplier(**args), privacy.calibrate(2.0, DELTA, 0.02, 300)
    assert theirs * 0.99 < ours <= theirs * 1.0005


@pytest.mark.parametrize(("sigma", "q"), [(9.0, 0.08), (1.5, 0.18), (0.3, 1e-3), (0.5, 0.9), (50.0, 1e-3)])
def test_mean_of_the_loss(sigma, q):
    """Against its definition, on a grid 25 times as fine."""
    loss = privacy._Loss(privacy.PoissonSubsampledGaussianPRV(q, sigma), -50, 500)
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 100_001)
    p = (1 - q) * norm.pdf(x, 0, sigma) + q * norm.pdf(x, 1, sigma)
    exact = np.trapezoid(p * np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2))), x)
    assert loss.mean() == pytest.approx(exact, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("delta", [1e-4, 1e-6, 1e-8, privacy.PRV_DELTA_MIN])
@pytest.mark.parametrize(("sigma", "T"), [(1.0, 1), (20.0, 100), (300.0, 1000), (20.0, 1000), (4.0, 3)])
def test_without_sampling_the_gaussian_mechanisms_closed_form(sigma, T, delta):
    """q = 1, down to the smallest delta that is accepted: never below the truth, and hardly above it."""
    exact = gaussian_epsilon(sigma, T, delta)
    assert exact <= privacy.spent(sigma, 1, T, delta) <= exact + max(0.0105, 0.0013 * exact)
    assert exact < privacy.spent(sigma, 1, T, delta, "rdp")


@pytest.mark.parametrize(
    ("epsilon", "q", "T"), [(1.0, 0.08, 100), (4.0, 256 / 1437, 40), (0.2, 0.3, 30), (3.0, 0.01, 200)]
)
def test_guarantee_by_an_independent_composition_in_both_directions(epsilon, q, T):
    sigma = privacy.calibrate(epsilon, DELTA, q, T)
    for direction in ("remove", "add"):
        assert pessimistic_delta(epsilon, sigma, q, T, direction) <= DELTA
    # The check has teeth: with 3% less noise it fails.
    assert pessimistic_delta(epsilon, 0.97 * sigma, q, T, "remove") > DELTA


@FEW
@given(epsilons, rates, steps, st.sampled_from([1e-6, 1e-5, 1e-4]))
def test_never_above_the_target_and_hardly_below(epsilon, q, T, delta):
    sigma = privacy.calibrate(epsilon, delta, q, T)
    gap = epsilon - privacy.spent(sigma, q, T, delta)
    assert 0 <= gap <= 1e-3 * min(1, epsilon)


@FEW
@given(st.floats(0.6, 30), rates, steps)
def test_prv_is_not_above_rdp(sigma, q, T):
    bound = privacy.spent(sigma, q, T, DELTA, "rdp")
    assume(bound < 50)
    # PRV's own enclosure is wider than the gap between the two where hardly anything is spent.
    assert privacy.spent(sigma, q, T, DELTA) <= bound + privacy.eps_error(bound)
    if bound > 0.5:
        assert privacy.spent(sigma, q, T, DELTA) < bound


@settings(FEW, max_examples=2)  # five calibrations each
@given(epsilons, rates, steps)
def test_more_is_asked_of_the_noise_by_less_epsilon_more_steps_and_more_sampling(epsilon, q, T):
    sigma = privacy.calibrate(epsilon, DELTA, q, T)
    assert privacy.calibrate(1.1 * epsilon, DELTA, q, T) < sigma
    assert privacy.calibrate(epsilon, DELTA, q, 2 * T) > sigma
    assert privacy.calibrate(epsilon, DELTA, 1.2 * q, T) > sigma
    assert privacy.calibrate(epsilon, DELTA / 3, q, T) > sigma


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_sigma_grows_as_the_square_root_of_the_steps(epsilon):
    """The paper, section 2.1. It is asymptotic: within 5% once sigma is a few units."""
    one, four = (privacy.calibrate(epsilon, DELTA, 4096 / 50_000, T) for T in (840, 4 * 840))
    assert four / one == pytest.approx(2, rel=0.05)


def test_rdp_calibrates_too_and_asks_for_more_noise():
    rdp = privacy.calibrate(2, DELTA, 0.08, 1000, accountant="rdp")
    assert 2 - 1e-3 <= privacy.spent(rdp, 0.08, 1000, DELTA, "rdp") <= 2
    assert privacy.calibrate(2, DELTA, 0.08, 1000) < rdp


def test_extremes_are_finite_bounds_without_warnings():
    assert privacy.spent(1e6, 0.08, 10, DELTA) < 1e-3
    assert privacy.spent(0.02, 0.5, 1000, DELTA) > 1e3
    assert 0.01 - 1e-5 <= privacy.spent(privacy.calibrate(0.01, DELTA, 0.02, 10), 0.02, 10, DELTA) <= 0.01


@pytest.mark.parametrize(("epsilon", "q", "T"), [(2.0, 0.08, 100), (8.0, 0.02, 400), (1.0, 4096 / 50_000, 840),
                                                 (0.2, 0.3, 30), (100.0, 1e-3, 1000), (150.0, 1.0, 1000)])
def test_another_machine_finds_the_same_noise_and_states_the_same_epsilon(epsilon, q, T, monkeypatch):
    """Bounds that differ from ours in their tenth digit, up and down, lead to the same six digits."""
    def found():
        for cache in (privacy._calibrate, privacy._bound, privacy._together):
            cache.cache_clear()
        spends = privacy.plan(epsilon, DELTA, q, T) if q < 0.08 else privacy.plan(epsilon, DELTA, q, T,
                                                                                   curvature_share=0.3, T_cur=7)
        return [*spends, *(privacy.composed(spends, q, T, DELTA, a) for a in privacy.ACCOUNTANTS)]

    here, source = found(), np.random.default_rng(0)
    assert all(float(f"{spend.sigma:.6g}") == spend.sigma for spend in here[:-2])

    def elsewhere(ours):
        def bound(*args):
            return None if (found := ours(*args)) is None else found * (1 + 1e-10 * source.uniform(-1, 1))
        return bound

    for name in ("prv", "rdp", "pld", "gaussian"):
        monkeypatch.setattr(privacy, name, elsewhere(getattr(privacy, name)))
    assert found() == here == found()


@given(st.floats(1e-12, 1e12))
def test_bounds_are_rounded_up_and_only_once(x):
    up = privacy._up(x)
    assert x <= up <= x * (1 + 1.0001e-5)
    assert privacy._up(up) == up == float(f"{up:.6g}")
    assert [privacy._up(x) for x in (0.0, math.inf)] == [0.0, math.inf]


def test_a_repeated_calibration_is_remembered():
    privacy.calibrate(3, DELTA, 0.05, 777)
    before = privacy._calibrate.cache_info().hits
    start = time.perf_counter()
    for _ in range(100):
        privacy.calibrate(3.0, DELTA, 0.05, np.int64(777), N=10_000)
    assert privacy._calibrate.cache_info().hits == before + 100
    assert time.perf_counter() - start < 1  # 100 calibrations take half a minute


def test_a_plan_without_private_curvature_is_one_calibration():
    (only,) = privacy.plan(2.0, DELTA, 0.08, 100, 5000)
    sigma = privacy.calibrate(2.0, DELTA, 0.08, 100)
    assert only == privacy.Spend("gradients", 2.0, DELTA, sigma)
    assert only.spent(0.08, 100) == privacy.spent(sigma, 0.08, 100, DELTA)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_plan_with_private_curvature_composes_to_the_budget(share):
    """Less noise than if the epsilons were added, in the same ratio; 13 releases of curvature in 100 steps."""
    gradients, curvature = spends = privacy.plan(2.0, DELTA, 0.08, 100, 5000, curvature_share=share, T_cur=8)
    paid, rest = privacy.split(2.0, DELTA, share)
    added = privacy.calibrate(*rest, 0.08, 100), privacy.calibrate(*paid, 0.08, 13)
    assert gradients.sigma / curvature.sigma == pytest.approx(added[0] / added[1], rel=1.1e-5)  # of 6 digits each
    assert gradients.sigma < 0.95 * added[0]
    assert gradients.sigma > privacy.calibrate(2.0, DELTA, 0.08, 100)
    assert (gradients.releases(100), curvature.releases(100), curvature.releases(1)) == (100, 13, 1)
    assert 2.0 - 1e-3 <= privacy.composed(spends, 0.08, 100, DELTA) <= 2.0
    assert privacy.composed(spends, 0.08, 100, DELTA, "rdp") > 2.0
    assert max(s.spent(0.08, 100) for s in spends) < 2.0 < sum(s.spent(0.08, 100) for s in spends)


def test_equal_parts_compose_as_one():
    """T + T' releases at one sigma, as two parts and as one, under every accountant."""
    spends = [privacy.Spend("a", 1.0, DELTA, 1.3), privacy.Spend("b", 1.0, DELTA, 1.3, every=3)]
    for q, accountant in ((0.05, "prv"), (0.05, "rdp"), (1.0, "prv")):
        one = privacy.spent(1.3, q, 60 + 20, DELTA, accountant)
        assert privacy.composed(spends, q, 60, DELTA, accountant) == pytest.approx(one, rel=1e-6)
    assert privacy.pld(((1.3, 60), (1.3, 20)), 0.05, DELTA) == pytest.approx(privacy.pld(((1.3, 80),), 0.05, DELTA))


@pytest.mark.parametrize(("sigma", "q", "T"), [(9.06, 0.082, 840), (1.54, 0.178, 40), (0.6, 0.01, 30)])
def test_pld_and_prv_enclose_the_same_number(sigma, q, T):
    error = 0.01
    upper, ours = privacy.prv(((sigma, T),), q, DELTA, error), privacy.pld(((sigma, T),), q, DELTA)
    assert upper - 2 * error <= ours <= upper


@pytest.mark.parametrize("T", [1, 30, 1000, 10**6])
@pytest.mark.parametrize("q", [1e-5, 1e-3, 0.05, 0.5, 1.0])
def test_the_whole_range_calibrates(q, T):
    """epsilon from 0.05 to 200, all corners included: never above the target, at most 0.1% below it."""
    sigmas = []
    for epsilon in (0.05, 1.0, 60.0, 200.0):
        sigma = privacy.calibrate(epsilon, 1e-6, q, T)
        assert epsilon - max(1e-3 * min(1.0, epsilon), 2e-5 * epsilon) <= privacy.spent(sigma, q, T, 1e-6) <= epsilon
        sigmas.append(sigma)
    assert sigmas == sorted(sigmas, reverse=True)


@pytest.mark.parametrize(("epsilon", "delta", "q", "T"), [
    (0.05, 1e-5, 1e-5, 1), (200, 1e-5, 1e-5, 1), (200, 1e-10, 1e-5, 10**6), (0.05, 1e-10, 1e-5, 10**6),
    (0.05, 1e-10, 1.0, 10**6), (200, 1e-10, 0.5, 10**6), (200, 1e-4, 1e-5, 10**6), (0.05, 1e-4, 0.5, 1),
])  # fmt: skip
def test_other_deltas_calibrate_or_are_refused_in_one_line(epsilon, delta, q, T):
    if delta >= q * T * 0.99:  # met without any noise
        with pytest.raises(UsageError, match=r"^delta=.* must be below .*, the probability that a sample is drawn at"):
            privacy.calibrate(epsilon, delta, q, T)
    else:
        sigma = privacy.calibrate(epsilon, delta, q, T)
        assert 0.98 * epsilon <= privacy.spent(sigma, q, T, delta) <= epsilon


@pytest.mark.parametrize("sigma", [1e-4, 0.05, 1.0, 1e6])
@pytest.mark.parametrize("T", [1, 10**6])
@pytest.mark.parametrize("q", [1e-5, 0.3, 1.0])
def test_what_any_noise_spends_is_a_number_without_warnings(sigma, q, T):
    """Also where no budget is meant: a bound, perhaps infinite, never nan, and no warning (they are errors here)."""
    bounds = [privacy.spent(sigma, q, n, 1e-6) for n in (T, 2 * T)]
    assert 0 <= bounds[0] <= bounds[1]


def test_a_whole_delta_of_1_over_N_is_refused_though_each_part_is_below():
    with pytest.raises(UsageError, match="must be below 1/N"):
        privacy.plan(2.0, 1e-3, 0.08, 100, 1000, curvature_share=0.5, T_cur=8)


@pytest.mark.parametrize(("change", "message"), [({"curvature_share": 1.0}, "must be below 1"),
                                                 ({"curvature_share": -0.2}, "must be above 0"),
                                                 ({"curvature_share": 0.2, "T_cur": 0}, "T_cur=0 must be an integer")])
def test_impossible_plans_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        privacy.plan(2.0, DELTA, 0.08, 100, 5000, **change)


@given(st.floats(1e-3, 100), st.floats(1e-12, 0.1), st.floats(1e-3, 0.999))
def test_a_split_budget_composes_to_no_more_than_the_whole(epsilon, delta, fraction):
    first, second = privacy.split(epsilon, delta, fraction)
    for whole, a, b in ((epsilon, first.epsilon, second.epsilon), (delta, first.delta, second.delta)):
        assert Fraction(a) + Fraction(b) <= Fraction(whole)
        assert a == pytest.approx(fraction * whole)
        assert a + b == pytest.approx(whole, rel=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0}, "epsilon=0 must be above 0"),
        ({"epsilon": -1}, "epsilon=-1 must be above 0"),
        ({"epsilon": math.inf}, "epsilon=inf is not finite"),
        ({"epsilon": math.nan}, "epsilon=nan is not finite"),
        ({"epsilon": "one"}, "epsilon='one' is not a number"),
        ({"epsilon": None}, "epsilon=None is not a number"),
        ({"epsilon": 201}, "epsilon=201 must be at most 200"),
        ({"epsilon": 1e-5}, "epsilon=1e-05 must be at least 0.001"),
        ({"delta": 0}, "delta=0 must be above 0"),
        ({"delta": 1}, "delta=1 must be below 1"),
        ({"delta": 1e-3}, "delta=0.001 must be below 1/N = 0.001 for N=1000"),
        ({"delta": 0.5, "N": None, "T": 1}, "delta=0.5 must be below 0.1, the probability"),
        ({"delta": 1e-12}, "delta=1e-12 is below the least that PRV supports"),
        ({"q": 0}, "q=0 must be above 0"),
        ({"q": 1.001}, "q=1.001 must be at most 1: the batch size B exceeds N"),
        ({"q": math.nan}, "q=nan is not finite"),
        ({"T": 0}, "T=0 must be an integer of at least 1"),
        ({"T": True}, "T=True must be an integer of at least 1"),
        ({"T": 10.5}, "T=10.5 is not an integer"),
        ({"N": 0}, "N=0 must be an integer of at least 1"),
        ({"accountant": "gdp"}, "unknown accountant 'gdp': did you mean 'rdp'"),
    ],
)
def test_impossible_requests_say_what_is_wrong(change, message):
    with pytest.raises(UsageError, match=message) as caught:
        privacy.calibrate(**{"epsilon": 1.0, "delta": DELTA, "q": 0.1, "T": 100, "N": 1000} | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("args", "message"), [
    ((0, 0.1, 10, DELTA), "sigma=0 must be above 0"), ((-1, 0.1, 10, DELTA), "sigma=-1"),
    ((math.nan, 0.1, 10, DELTA), "sigma=nan"), ((1, 2, 10, DELTA), "q=2"), ((1, 0.1, 0, DELTA), "T=0"),
    ((1, 0.1, 10, 1.5), "delta=1.5"), ((1, 0.1, 10, DELTA, "PRV"), "unknown accountant"),
])  # fmt: skip
def test_impossible_sigmas_say_what_is_wrong(args, message):
    with pytest.raises(UsageError, match=message):
        privacy.spent(*args)


@pytest.mark.parametrize("args", [(0, DELTA, 0.1), (1, 0, 0.1), (1, DELTA, 0), (1, DELTA, 1), (1, DELTA, math.nan)])
def test_impossible_splits_are_refused(args):
    with pytest.raises(UsageError):
        privacy.split(*args)

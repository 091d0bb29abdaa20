"""Privacy accounting: the noise for a budget, the budget that a noise spends, and how a run divides its budget.

Guarantee. T releases of

    sum_i clip_C(L g_i) + sigma C xi,   xi ~ N(0, I),

each on a batch into which every one of the N private samples is drawn independently with probability q
(Poisson sampling), are together (epsilon, delta)-DP: for data sets D, D' of which one has one sample more
than the other (add or remove one), and every set S of outputs, P[M(D) in S] <= e^epsilon P[M(D') in S] +
delta. L and everything after the noise (R, the rate, EMA) are functions of public data, of the step count and of
earlier releases, so they cost nothing (the paper, section 3.5); C cancels. DP-NGD spends exactly what DP-SGD spends.

| symbol | meaning |
| --- | --- |
| q | B/N exactly, with B the expected batch size; 1/len(loader) is a different number |
| T | steps (releases) |
| sigma | noise multiplier: the noise's standard deviation divided by the clipping norm C |

Not counted: tuning of hyper-parameters, the choice of the best seed, and anything else that looks at the private
data outside those T releases. Batches of a fixed size (shuffling) are not covered.

Truncated noise. xi is taken to be exactly normal. A generator whose values never exceed b standard deviations
releases, for a sample that moves one coordinate by C, values beyond b sigma C - C that only one of D, D' can produce.
Each release in which the sample is drawn adds at most P[xi > b - 1/sigma] to delta (in a worst-case direction), all T
together at most q T Phi(1/sigma - b) in expectation. float64 noise by Box-Muller or inversion has b > 8: 6e-16 q T for
sigma >> 1, 1e-12 q T at sigma = 1. float32 noise ends at b = 5.77 and can exceed delta itself.

| function | answers |
| --- | --- |
| `calibrate` | which sigma spends (epsilon, delta) in T steps |
| `spent` | which epsilon a sigma spends in T steps |
| `split` | two budgets that add up to one |
| `plan` | the sigma, or the two sigmas, of a whole run |
| `composed` | which epsilon a whole run spends |

Accountants. `prv` (Gopi et al., 2021) is the paper's; `rdp` (Mironov et al., 2019) is looser and reported beside it.
Both are Opacus's analyses. Where PRV's grid would be too large (large epsilon at small q, T near 10^6), `prv` is our
own composition of the discretised loss, `pld`; without sampling (q = 1) it is the exact formula. Every reported
epsilon, and every epsilon compared with a target, is an upper bound, rounded up to 6 digits. Range: epsilon 0.05 to
200, q 1e-5 to 1, T up to 10^6, delta from 1e-10; tests compare it with dp-accounting's PLD.

Machines. The last bits of an accountant differ between machines (in the eleventh digit of epsilon). A calibration looks
only at sigmas of 6 digits and at bounds rounded to 6 digits, so every machine finds the same sigma and states the same
epsilon, and records can be compared exactly: about one number in 10^5 would lie so close to a rounding edge that two
machines disagree in its sixth digit.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.prv import (
    Domain,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    discretize,
)
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp, ndtr, ndtri

from dpngd.errors import UsageError, unknown

ACCOUNTANTS = ("prv", "rdp")

TOLERANCE = 1e-3  # a calibrated epsilon is at most this far below its target (relative to targets below 1)
EPSILON_MIN, EPSILON_MAX = 1e-3, 200.0  # targets that are accepted
DIGITS = 6  # of a calibrated sigma and of a stated epsilon: see "Machines"

Parts = tuple[tuple[float, int], ...]  # (sigma, releases) of each kind of release; all at the same q


class Budget(NamedTuple):
    """The two numbers of a guarantee."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Spend:
    """One part of a run's budget: its purpose, its noise multiplier, and how many steps lie between two releases.

    (epsilon, delta) is the part's nominal share. With several parts it fixes the ratio of their noises (`plan`); what
    they spend together is `composed`.
    """

    purpose: str
    epsilon: float
    delta: float
    sigma: float
    every: int = 1

    def releases(self, steps: int) -> int:
        """How many releases this many steps make; the first is in step 0."""
        return math.ceil(steps / self.every)

    def spent(self, q: float, steps: int, accountant: str = "prv") -> float:
        """The epsilon that this part alone spends in this many steps, at its own delta."""
        return spent(self.sigma, q, self.releases(steps), self.delta, accountant)


def calibrate(
    epsilon: float, delta: float, q: float, T: int, *, N: int | None = None, accountant: str = "prv"
) -> float:
    """Find the sigma, a number of 6 digits, with which T steps at rate q spend at most `epsilon`, and hardly less.

    At most 0.001 less, below epsilon = 1 relative, and at large epsilon what the sixth digit of sigma makes. Where the
    accountant changes its method (see above) there is a step in its bound, and the gap may be up to 2% of epsilon. With
    N, the size of the private set, a delta of 1/N or more is refused: it would allow a mechanism that publishes a
    random sample.
    """
    return _calibrate(*_target(epsilon, delta, q, T, N, accountant), accountant)


def spent(sigma: float, q: float, T: int, delta: float, accountant: str = "prv") -> float:
    """Bound from above the epsilon that T steps at rate q with noise multiplier sigma spend at `delta`.

    Below sigma = 0.001 `prv` returns the bound of `rdp`, which may be infinite.
    """
    delta = _delta(delta, accountant)
    return _bound(((_positive("sigma", sigma), _count("T", T)),), _q(q), delta, accountant)


def split(epsilon: float, delta: float, fraction: float) -> tuple[Budget, Budget]:
    """Divide a budget into two that compose to at most (epsilon, delta); the first has `fraction` of both numbers.

    Basic composition: if M1 is (e1, d1)-DP and M2, which may see M1's output, is (e2, d2)-DP, then both
    together are (e1 + e2, d1 + d2)-DP.
    """
    epsilon, delta, fraction = _positive("epsilon", epsilon), _delta(delta), _positive("fraction", fraction)
    if fraction >= 1:
        raise UsageError(f"fraction={fraction:g} must be below 1: the second part needs a budget too")
    (e1, e2), (d1, d2) = _share(epsilon, fraction), _share(delta, fraction)
    return Budget(e1, d1), Budget(e2, d2)


def _share(total: float, fraction: float) -> tuple[float, float]:
    first = total * fraction
    rest = total - first
    # Rounded to nearest, the two parts can exceed the total by half a unit in the last place.
    return first, rest if Fraction(first) + Fraction(rest) <= Fraction(total) else math.nextafter(rest, 0)


def plan(
    epsilon: float, delta: float, q: float, T: int, N: int | None = None, *,
    curvature_share: float = 0.0, T_cur: int = 1,
) -> list[Spend]:
    """Compute the sigma, or the two sigmas, of a run: what its budget pays for, gradients first, calibrated by PRV.

    Gradients are released in each of the T steps. With `curvature_share` = f > 0, private curvature is released every
    T_cur steps as well, on batches drawn independently at the same rate q. f fixes the ratio of the two noises: that of
    curvature calibrated to (f epsilon, f delta) and gradients calibrated to the rest. Since epsilons that are added
    overstate the cost, both sigmas are then multiplied by the same factor below 1 with which both kinds of releases,
    composed in one accountant, spend (epsilon, delta). This is the one function that turns a run's budget into noise.
    """
    epsilon, delta, q, T = _target(epsilon, delta, q, T, N)
    if curvature_share == 0:
        return [Spend("gradients", epsilon, delta, calibrate(epsilon, delta, q, T))]
    curvature, gradients = split(epsilon, delta, curvature_share)
    releases = math.ceil(T / _count("T_cur", T_cur))
    sigma_g, sigma_c = calibrate(*gradients, q, T), calibrate(*curvature, q, releases)
    (sigma_g, _), (sigma_c, _) = _together(((sigma_g, T), (sigma_c, releases)), epsilon, delta, q)
    return [Spend("gradients", *gradients, sigma_g), Spend("curvature", *curvature, sigma_c, T_cur)]


def composed(spends: list[Spend], q: float, T: int, delta: float, accountant: str = "prv") -> float:
    """Bound from above the epsilon that all parts of a run spend together in T steps, at `delta`.

    The parts' batches are drawn independently at rate q. For one part this is its own `spent`.
    """
    delta, q, T = _delta(delta, accountant), _q(q), _count("T", T)
    return _bound(tuple((_positive("sigma", s.sigma), s.releases(T)) for s in spends), q, delta, accountant)


# ---- The search for sigma.


@functools.lru_cache(maxsize=1024)
def _calibrate(epsilon: float, delta: float, q: float, T: int, accountant: str) -> float:
    def bound(sigma: float) -> float:
        return rdp(((sigma, T),), q, delta)

    def coarse(sigma: float) -> float:
        fine = eps_error(bound(sigma))
        upper = None if q == 1 else prv(((sigma, T),), q, delta, 10 * fine)
        return _bound(((sigma, T),), q, delta, accountant) if upper is None else upper - 9 * fine

    tolerance = TOLERANCE * min(1.0, epsilon)
    # Start at the sigma of the central limit, the paper's q sqrt(T log(1/delta)) / epsilon.
    sigma = max(0.3, q * math.sqrt(2 * T * math.log(1 / delta)) / epsilon)
    if accountant == "prv":
        # Two cheap searches come first: RDP is about 8% above PRV, and PRV's estimate hardly depends on eps_error.
        # Only the last search decides; after these two it nearly always ends at its first look.
        with suppress(UsageError):
            sigma = _solve(bound, 1.08 * epsilon, 0.01 * epsilon, sigma, looks=12)
            sigma = _solve(coarse, epsilon, tolerance / 2, sigma, looks=12)
    return _solve(lambda sigma: _bound(((sigma, T),), q, delta, accountant), epsilon, tolerance, sigma)


@functools.lru_cache(maxsize=1024)
def _together(parts: Parts, epsilon: float, delta: float, q: float) -> Parts:
    """Multiply all sigmas by one factor, such that the parts together spend at most epsilon, and hardly less."""
    def scaled(factor: float) -> Parts:
        return tuple((_digits(factor * sigma), n) for sigma, n in parts)

    factor = _solve(lambda factor: _bound(scaled(factor), q, delta, "prv"), epsilon, TOLERANCE * min(1.0, epsilon), 0.8)
    return scaled(factor)


def _digits(x: float) -> float:
    """The nearest number of DIGITS digits."""
    return float(f"{x:.{DIGITS}g}")


def _up(x: float) -> float:
    """The next number of DIGITS digits that is not below x; x itself if it is one."""
    return float(Context(prec=DIGITS, rounding=ROUND_CEILING).plus(Decimal(repr(x))))


def _solve(
    epsilon_of: Callable[[float], float], target: float, tolerance: float, sigma: float, looks: int = 100
) -> float:
    """Find a sigma with target - tolerance <= epsilon_of(sigma) <= target, for a decreasing epsilon_of.

    Every sigma that is looked at has DIGITS digits: last bits of epsilon_of then do not add up along the search. Regula
    falsi on log epsilon against log sigma, which is nearly a straight line; bisection where that is slow. (Not scipy's
    brentq: its tolerance is on sigma and has two sides, ours is on epsilon and must not be exceeded.) If epsilon_of has
    a step at the target, or sigma's last digit is too coarse, the result is the side with enough noise.
    """
    low = high = None  # (sigma, epsilon) with too little noise, and with enough
    aim = target - tolerance / 2
    for look in range(looks):
        sigma = _digits(sigma)
        epsilon = epsilon_of(sigma)
        if target - tolerance <= epsilon <= target:
            return sigma
        if epsilon > target:
            low = (sigma, epsilon)
        else:
            high = (sigma, epsilon)
        if low is None or high is None:
            # The step that epsilon ~ 1/sigma suggests, and a longer one at each look, so that the search brackets soon.
            step = math.log(min(4.0, max(0.25, epsilon / aim)))
            sigma *= math.exp(min(math.log(4), max(-math.log(4), step * 2**look)))
            if not 1e-3 < sigma < 1e9:
                break
        else:
            weight = 0.5
            if look < 10 and high[1] > 0 and low[1] < math.inf:
                weight = math.log(low[1] / aim) / math.log(low[1] / high[1])
            sigma = low[0] * (high[0] / low[0]) ** min(0.99, max(0.01, weight))
            if not low[0] < _digits(sigma) < high[0]:
                sigma = (low[0] + high[0]) / 2
                if not low[0] < _digits(sigma) < high[0]:  # neighbours
                    break
    if low is not None and high is not None and high[1] >= 0.98 * target:
        return high[0]
    raise UsageError(f"no sigma found that spends epsilon={target:g}: the accountant cannot resolve it")


# ---- Checks of what the caller passes.


def _target(
    epsilon: float, delta: float, q: float, T: int, N: int | None, accountant: str = "prv"
) -> tuple[float, float, float, int]:
    """Check what a calibration is asked for: a budget that noise can meet, and that means something."""
    epsilon, delta, q, T = _positive("epsilon", epsilon), _delta(delta, accountant), _q(q), _count("T", T)
    if epsilon > EPSILON_MAX:
        raise UsageError(f"epsilon={epsilon:g} must be at most {EPSILON_MAX:g}: a larger one is no privacy guarantee")
    if epsilon < EPSILON_MIN:
        raise UsageError(f"epsilon={epsilon:g} must be at least {EPSILON_MIN:g}: the accountant does not resolve less")
    if N is not None and delta * _count("N", N) >= 1:
        raise UsageError(f"delta={delta:g} must be below 1/N = {1 / N:g} for N={N} samples")
    drawn = 1.0 if q == 1 else -math.expm1(T * math.log1p(-q))
    if delta >= drawn:  # met without any noise: the guarantee would be empty
        raise UsageError(f"delta={delta:g} must be below {drawn:g}, the probability that a sample is drawn at all")
    return epsilon, delta, q, T


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name}={value!r} is not a number") from None
    if not math.isfinite(number):
        raise UsageError(f"{name}={value!r} is not finite")
    return number


def _positive(name: str, value: float) -> float:
    number = _number(name, value)
    if number <= 0:
        raise UsageError(f"{name}={number:g} must be above 0")
    return number


def _delta(value: float, accountant: str = "rdp") -> float:
    if accountant not in ACCOUNTANTS:
        raise unknown("accountant", accountant, ACCOUNTANTS)
    delta = _positive("delta", value)
    if delta >= 1:
        raise UsageError(f"delta={delta:g} must be below 1 (and below 1/N): 1 permits any output")
    if accountant == "prv" and delta < PRV_DELTA_MIN:
        raise UsageError(f"delta={delta:g} is below the least that PRV supports, {PRV_DELTA_MIN:g}: use 'rdp'")
    return delta


def _q(value: float) -> float:
    q = _positive("q", value)
    if q > 1:
        raise UsageError(f"q={q:g} must be at most 1: the batch size B exceeds N in q = B/N")
    return q


def _count(name: str, value: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise UsageError(f"{name}={value!r} is not an integer") from None
    if count < 1 or isinstance(value, bool):
        raise UsageError(f"{name}={value!r} must be an integer of at least 1")
    return count


# ---- Upper bounds of epsilon for releases of the Poisson-subsampled Gaussian mechanism.

# Opacus's own orders end at 63, where the RDP bound cannot go below 0.1; above 1024 its binomials overflow.
LARGE_ORDERS = (64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
ORDERS = (*RDPAccountant.DEFAULT_ALPHAS, *LARGE_ORDERS)
# Fewer orders give an upper bound too. Fractional ones are slow, and fail for large sigma.
INTEGER_ORDERS = (*range(2, 17), *range(18, 64, 4), *LARGE_ORDERS)

# Below this delta the rounding error of PRV's double-precision FFT is no longer small compared with delta: at q = 1,
# where the exact value is known, PRV's upper end is still correct at 1e-12 and too low at 1e-13.
PRV_DELTA_MIN = 1e-10
PRV_POINTS_MAX = 3 * 10**6  # about 300 MB, and 2 s
PRV_LOSS_MAX = 700.0  # exp overflows soon after
SIGMA_MIN = 1e-3  # below it no useful guarantee is left


@functools.lru_cache(maxsize=4096)
def _bound(parts: Parts, q: float, delta: float, accountant: str) -> float:
    """Bound from above the epsilon that all releases spend together, rounded up to DIGITS digits."""
    return _up(_exact_bound(parts, q, delta, accountant))


def _exact_bound(parts: Parts, q: float, delta: float, accountant: str) -> float:
    if accountant == "rdp":
        return rdp(parts, q, delta, ORDERS)
    if min(sigma for sigma, _ in parts) < SIGMA_MIN:
        return rdp(parts, q, delta)
    if q == 1:
        return gaussian(parts, delta)
    error = eps_error(rdp(parts, q, delta))
    upper = prv(parts, q, delta, error)
    if upper is None:
        return pld(parts, q, delta)
    # RDP, and with it the error, can be far too large where a sample is rarely drawn. PRV's bound is then above 1.0125
    # times the other; where the error just exceeds the limit it is below that, so the minimum is continuous.
    return upper if error <= 0.0115 * upper else min(upper, 1.0125 * pld(parts, q, delta))


def eps_error(bound: float) -> float:
    """Choose PRV's eps_error: Opacus's 0.01, but at most 1% of a small epsilon, and 0.1% of a large one (wide grid).

    It is continuous in sigma: at a jump there would be targets that no sigma comes close to.
    """
    return max(1e-4, min(bound / 100, max(0.01, bound / 1000)))


def rdp(parts: Parts, q: float, delta: float, orders: tuple[float, ...] = INTEGER_ORDERS) -> float:
    """Bound epsilon by Renyi DP, minimised over `orders`; infinity where every order overflows."""
    accountant = RDPAccountant()
    accountant.history = [(sigma, q, n) for sigma, n in parts]
    try:
        with _quiet():
            epsilon, _ = accountant.get_privacy_spent(delta=delta, alphas=list(orders))
    except (ValueError, OverflowError):  # Opacus's series for fractional orders cancels to nothing
        return math.inf if orders is INTEGER_ORDERS else rdp(parts, q, delta)
    # nan: every order overflowed, so there is no bound.
    return math.inf if math.isnan(epsilon) else max(0.0, float(epsilon))


def gaussian(parts: Parts, delta: float) -> float:
    """Compute epsilon without sampling (q = 1), exactly: all releases are one with mu^2 = sum n / sigma^2.

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)   (Balle and Wang, 2018)
    """
    mu = math.sqrt(sum(n / sigma**2 for sigma, n in parts))

    def log_delta(epsilon: float) -> float:
        a, b = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return a + math.log(-math.expm1(b - a)) if b < a else -math.inf

    def excess(epsilon: float) -> float:
        return max(log_delta(epsilon), -1e4) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    largest = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))  # P[N(mu^2/2, mu^2) > largest] < delta
    epsilon = brentq(excess, 0.0, largest, xtol=1e-12, rtol=1e-12)
    return epsilon * (1 + 1e-9) + 1e-11  # the root's error is to either side


class _Loss(TruncatedPrivacyRandomVariable):
    """One step's loss l(x) = log(1 - q + q e^((2x - 1) / 2 sigma^2)), x ~ (1 - q) N(0, sigma^2) + q N(1, sigma^2)."""

    def mean(self) -> float:
        """Integrate E l(x) by the trapezoidal rule: exact to rounding for an analytic integrand with Gaussian tails.

        Opacus integrates the cdf adaptively, which takes 60 times as long and has errors up to 1e-7 (sigma = 0.3,
        q = 0.001), multiplied by T.
        """
        q, sigma = self._prv.sample_rate, self._prv.noise_multiplier
        x = np.linspace(-12 * sigma, 1 + 12 * sigma, 4096 + 8 * math.ceil(1 / sigma))
        p = (1 - q) * np.exp(-(x**2) / (2 * sigma**2)) + q * np.exp(-((x - 1) ** 2) / (2 * sigma**2))
        loss = np.logaddexp(np.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        return float(p @ loss / p.sum())


def prv(parts: Parts, q: float, delta: float, error: float) -> float | None:
    """Compute the upper end of PRV's enclosure of epsilon, estimate +- `error`: Opacus's, with our domain and mean.

    Each part is composed with itself, then the parts with each other. None where the grid would be too large.
    """
    delta_error, T = delta / 1000, sum(n for _, n in parts)
    # The domain [-L, L] and its mesh follow Gopi et al., remark 5.6; its size is one that suits the FFT.
    single = max(rdp(((sigma, 1),), q, delta_error / (8 * T)) for sigma, _ in parts)
    L = max(rdp(parts, q, delta_error / 4), single, error) + 3
    if L - math.log(q) > PRV_LOSS_MAX:
        return None
    mesh = error / math.sqrt(T * math.log(12 / delta_error) / 2)
    half = next_fast_len(math.ceil(L / mesh) + 1, real=True)
    if 2 * half > PRV_POINTS_MAX:
        return None
    domain = Domain(-(half - 1) * mesh, half * mesh, 2 * half)
    try:
        with _quiet():
            losses = [_Loss(PoissonSubsampledGaussianPRV(q, sigma), domain.t_min, domain.t_max) for sigma, _ in parts]
            total = compose_heterogeneous([discretize(loss, domain) for loss in losses], [n for _, n in parts])
            if total.domain.ts[-1] > PRV_LOSS_MAX:  # the composed domain is shifted by its mean
                return None
            _, _, upper = total.compute_epsilon(delta, delta_error, error)
    except (ValueError, RuntimeError):  # Opacus refuses the grid
        return None
    return None if math.isnan(upper) else max(0.0, float(upper))


# The composition where PRV's grid is too large. PLD_LOOSE is the share of epsilon that the mesh may cost.
PLD_LOOSE = 1e-3
PLD_CELLS = 10**6
PLD_TAIL = 1e-4  # share of delta for losses beyond the grids
TILTS = np.geomspace(1e-3, 1e3, 121)


def pld(parts: Parts, q: float, delta: float) -> float:
    """Bound epsilon by composing a discretised loss that dominates the true one, for adding and for removing a sample.

    The loss of one release lies in cells [t, t + h]; a cell's mass is moved to its two ends such that its probability
    under both data sets is kept, which bounds delta(epsilon) from above at every epsilon, also under composition
    ("connect the dots", Doroshenko et al., 2022). T releases cost O(T h^2), where PRV allows for O(sqrt(T) h). Losses
    above the grid count in full, as delta.
    """
    removing = _pld(parts, q, delta)
    return max(removing, _pld(parts, q, delta, adding=True, least=removing))


def _pld(parts: Parts, q: float, delta: float, adding: bool = False, least: float = 0.0) -> float:
    """Bound epsilon in one direction, as finely as an epsilon of at least `least` needs."""
    ranges, rough, tilt = _survey(parts, q, delta, adding)
    epsilon, h, T = rough, math.inf, sum(n for _, n in parts)
    for _ in range(4):  # the mesh depends on epsilon, which the survey overestimates where a sample is rarely drawn
        # T releases add T h^2/12 to the loss's mean, and T h^2/6 to its variance, which matters for small epsilon.
        scale = max(epsilon, least)
        fine = min(math.sqrt(PLD_LOOSE * scale * min(scale / 2, 8.0) / T), scale / 50)
        fine = max(fine, max(high - low for low, high in ranges) / PLD_CELLS)
        if not fine < 0.7 * h:
            break
        h = fine
        steps = [(n, *_cells(sigma, q, h, *edges, adding)) for (sigma, n), edges in zip(parts, ranges, strict=True)]
        epsilon = min(epsilon, _compose(steps, h, delta, tilt))
    return epsilon


def _survey(parts: Parts, q: float, delta: float, adding: bool) -> tuple[list[tuple[float, float]], float, float]:
    """Find the range of each part's loss, and roughly epsilon and the tilt, by Chernoff's bound on a few points x."""
    z = -ndtri(PLD_TAIL * delta / sum(n for _, n in parts))
    ranges, moments = [], np.zeros_like(TILTS)
    for sigma, n in parts:
        x = np.linspace(-z * sigma, z * sigma + (0 if adding else 1), 4096)
        p = np.exp(-(x**2) / (2 * sigma**2))
        loss = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        if adding:
            loss = -loss
        else:
            p = (1 - q) * p + q * np.exp(-((x - 1) ** 2) / (2 * sigma**2))
        p = np.maximum(p / p.sum(), 1e-300)
        moments += n * np.array([logsumexp(np.log(p) + u * loss) for u in TILTS])
        ranges.append((float(loss.min()), float(loss.max())))
    bounds = (moments - math.log(delta)) / TILTS
    best = int(np.argmin(bounds))
    return ranges, max(float(bounds[best]), 1e-6), float(TILTS[best])


def _cells(
    sigma: float, q: float, h: float, low: float, high: float, adding: bool
) -> tuple[int, np.ndarray, float]:
    """Discretise one release's loss on multiples of h: the first multiple, probabilities, and the probability above."""
    first = math.floor(low / h)
    t = np.arange(first, math.ceil(high / h) + 1) * h
    s = -t if adding else t
    with np.errstate(divide="ignore", invalid="ignore"):  # below s = log(1 - q) there is no x
        log = np.where(s > 1, s + np.log1p((q - 1) * np.exp(-np.maximum(s, 1))),
                       np.log(np.maximum(q + np.expm1(np.minimum(s, 1)), 0)))
    x = sigma**2 * (log - math.log(q)) + 0.5  # where the loss of removing is s
    a, b = (x[1:], x[:-1]) if adding else (x[:-1], x[1:])
    without, drawn = _between(a / sigma, b / sigma), _between((a - 1) / sigma, (b - 1) / sigma)
    P, Q = (1 - q) * without + q * drawn, without
    if adding:
        P, Q = Q, P
    with np.errstate(all="ignore"):  # cells so far out that they underflow are rounded up
        up = (1 - Q / P * np.exp(np.minimum(t[:-1], 600))) / -math.expm1(-h)
    up = np.where((P > 1e-290) & (Q > 1e-290), np.clip(up, 0, 1), 1.0)
    p = np.zeros(len(t))
    p[1:] += P * up
    p[:-1] += P * (1 - up)
    if adding:
        below, above = ndtr(-x[0] / sigma), ndtr(x[-1] / sigma)
    else:
        below = (1 - q) * ndtr(x[0] / sigma) + q * ndtr((x[0] - 1) / sigma)
        above = (1 - q) * ndtr(-x[-1] / sigma) + q * ndtr((1 - x[-1]) / sigma)
    p[0] += below
    return first, p, float(above)


def _between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """P[a < N(0, 1) < b], from the tail in which it does not cancel."""
    return np.maximum(np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a)), 0.0)


def _compose(steps: list[tuple[int, int, np.ndarray, float]], h: float, delta: float, tilt: float) -> float:
    """Compose discretised losses (releases, first multiple, probabilities, probability above) and solve for epsilon.

    The FFT is of probabilities times e^(tilt t), whose sum lies around epsilon: rounding is then small compared with
    the tail beyond epsilon, and a short window around it is enough. What leaves the window at the top reappears at the
    bottom; by Chernoff's bound that is at most PLD_TAIL delta, which is added to delta. What leaves it at the bottom
    only adds to the loss.
    """
    with np.errstate(divide="ignore"):
        logs = [np.log(p) for _, _, p, _ in steps]
    losses = [(first + np.arange(len(p))) * h for _, first, p, _ in steps]

    @functools.cache
    def moment(u: float) -> float:
        return sum(step[0] * logsumexp(log + u * t) for step, log, t in zip(steps, logs, losses, strict=True))

    k, far = moment(tilt), math.log(1e-9)  # far: the tilted probability outside of the window
    above = [tilt * (1 + c) for c in np.geomspace(0.05, 100, 12)]
    below = [tilt - c * max(tilt, 0.05) for c in np.geomspace(0.05, 100, 12)]
    top = max(min((moment(u) - math.log(PLD_TAIL * delta)) / u for u in (tilt, *above)),
              min((moment(u) - k - far) / (u - tilt) for u in above))
    bottom = math.floor(max((far + k - moment(u)) / (tilt - u) for u in below) / h)
    lost = PLD_TAIL * delta - math.expm1(sum(n * math.log1p(-gone) for n, _, _, gone in steps))
    size = next_fast_len(max(math.ceil(top / h) - bottom + 1, 16), real=True)
    if size > 16 * PLD_CELLS:  # Chernoff's bound is left
        return min((moment(u) - math.log(delta - lost)) / u for u in (tilt, *above))
    spectrum, shift = np.ones(size // 2 + 1, dtype=complex), -bottom
    for (n, first, p, _), log, t in zip(steps, logs, losses, strict=True):
        tilted = np.exp(log + tilt * t - logsumexp(log + tilt * t))
        spectrum *= rfft(np.bincount(np.arange(len(p)) % size, weights=tilted, minlength=size)) ** n
        shift += n * first
    p = np.roll(np.maximum(irfft(spectrum, size), 0.0), shift % size)
    t = (bottom + np.arange(size)) * h
    t, p = t[t >= 0], p[t >= 0]
    p = np.exp(np.minimum(np.log(np.maximum(p, 1e-300)) + k - tilt * t, 0.0))

    def tail(i: int) -> tuple[float, float]:
        """P[loss >= t_i], and E[e^(t_i - loss); loss >= t_i]: their difference is delta at epsilon = t_i."""
        return float(p[i:].sum()) + lost, float(p[i:] @ np.exp(t[i] - t[i:]))

    low, high = -1, len(t) - 1
    while high - low > 1:
        middle = (low + high) // 2
        beyond, weighted = tail(middle)
        low, high = (low, middle) if beyond - weighted <= delta else (middle, high)
    beyond, weighted = tail(high)
    # Between two points of the grid delta is linear in e^epsilon.
    end = float(t[high])
    return end if beyond <= delta else max(0.0, min(end, end + math.log((beyond - delta) / weighted)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence two warnings about harmless cases: the best order is the last of the list; log(1 - q) = -inf at q = 1."""
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.filterwarnings("ignore", message="Optimal order is the")
        yield

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
data outside those T releases. Batches of a fixed size (shuffling) are not covered. Noise comes from an ordinary
floating-point generator.

| function | answers |
| --- | --- |
| `calibrate` | which sigma spends (epsilon, delta) in T steps |
| `spent` | which epsilon a sigma spends in T steps |
| `split` | two budgets that add up to one |
| `plan` | the sigma, or the two sigmas, of a whole run |

Accountants. `prv` (Gopi et al., 2021) is the paper's; `rdp` (Mironov et al., 2019) is looser and reported beside it.
Both are Opacus's analyses. Every reported epsilon, and every epsilon compared with a target, is an upper bound.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from scipy.fft import next_fast_len

from dpngd.errors import UsageError, unknown

ACCOUNTANTS = ("prv", "rdp")

TOLERANCE = 1e-3  # a calibrated epsilon is at most this far below its target (relative to targets below 1)
EPSILON_MAX = 100.0  # the largest target


class Budget(NamedTuple):
    """The two numbers of a guarantee."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Spend:
    """One part of a run's budget: its purpose, its noise multiplier, and how many steps lie between two releases."""

    purpose: str
    epsilon: float
    delta: float
    sigma: float
    every: int = 1

    def releases(self, steps: int) -> int:
        """How many releases this many steps make; the first is in step 0."""
        return math.ceil(steps / self.every)

    def spent(self, q: float, steps: int, accountant: str = "prv") -> float:
        """The epsilon that this part spends in this many steps, at its own delta."""
        return spent(self.sigma, q, self.releases(steps), self.delta, accountant)


def calibrate(
    epsilon: float, delta: float, q: float, T: int, *, N: int | None = None, accountant: str = "prv"
) -> float:
    """Find the sigma with which T steps at rate q spend at most `epsilon`, and at most 0.001 less.

    Below epsilon = 1 the 0.001 is relative. With N, the size of the private set, a delta of 1/N or more is
    refused: it would allow a mechanism that publishes a random sample.
    """
    epsilon, delta, q, T = _positive("epsilon", epsilon), _delta(delta, accountant), _q(q), _count("T", T)
    if epsilon > EPSILON_MAX:
        raise UsageError(f"epsilon={epsilon:g} must be at most {EPSILON_MAX:g}: a larger one is no privacy guarantee")
    if N is not None and delta * _count("N", N) >= 1:
        raise UsageError(f"delta={delta:g} must be below 1/N = {1 / N:g} for N={N} samples")
    drawn = 1.0 if q == 1 else -math.expm1(T * math.log1p(-q))
    if delta >= drawn:  # met without any noise: the guarantee would be empty
        raise UsageError(f"delta={delta:g} must be below {drawn:g}, the probability that a sample is drawn at all")
    return _calibrate(epsilon, delta, q, T, accountant)


def spent(sigma: float, q: float, T: int, delta: float, accountant: str = "prv") -> float:
    """Bound from above the epsilon that T steps at rate q with noise multiplier sigma spend at `delta`.

    Where sigma is so small that the privacy loss overflows in floating point, `prv` returns the bound of `rdp`.
    """
    delta = _delta(delta, accountant)
    return _bound(_positive("sigma", sigma), _q(q), _count("T", T), delta, accountant)


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


def plan(
    epsilon: float, delta: float, q: float, T: int, N: int | None = None, *,
    curvature_share: float = 0.0, T_cur: int = 1,
) -> list[Spend]:
    """Compute the sigma, or the two sigmas, of a run: what its budget pays for, gradients first, calibrated by PRV.

    Gradients are released in each of the T steps. With `curvature_share` = f > 0, private curvature is released every
    T_cur steps as well; it receives (f epsilon, f delta), and the gradients receive the rest (`split`). This is the one
    function that turns a run's budget into noise.
    """
    if curvature_share == 0:
        return [Spend("gradients", epsilon, delta, calibrate(epsilon, delta, q, T, N=N))]
    curvature, gradients = split(epsilon, delta, curvature_share)
    releases = math.ceil(_count("T", T) / _count("T_cur", T_cur))
    return [
        Spend("gradients", *gradients, calibrate(*gradients, q, T, N=N)),
        Spend("curvature", *curvature, calibrate(*curvature, q, releases, N=N), T_cur),
    ]


def _share(total: float, fraction: float) -> tuple[float, float]:
    first = total * fraction
    rest = total - first
    # Rounded to nearest, the two parts can exceed the total by half a unit in the last place.
    return first, rest if Fraction(first) + Fraction(rest) <= Fraction(total) else math.nextafter(rest, 0)


# ---- The search for sigma.


@functools.lru_cache(maxsize=1024)
def _calibrate(epsilon: float, delta: float, q: float, T: int, accountant: str) -> float:
    def bound(sigma: float) -> float:
        return rdp(sigma, q, T, delta)

    def coarse(sigma: float) -> float:
        fine = eps_error(bound(sigma))
        return prv(sigma, q, T, delta, 10 * fine) - 9 * fine

    tolerance = TOLERANCE * min(1.0, epsilon)
    # Start at the sigma of the central limit, the paper's q sqrt(T log(1/delta)) / epsilon.
    sigma = max(0.3, q * math.sqrt(2 * T * math.log(1 / delta)) / epsilon)
    if accountant == "prv":
        # Two cheap searches come first: RDP is about 8% above PRV, and PRV's estimate hardly depends on eps_error.
        # Only the last search decides; after these two it nearly always ends at its first look.
        with suppress(UsageError):
            sigma = _solve(bound, 1.08 * epsilon, 0.01 * epsilon, sigma, looks=12)
            sigma = _solve(coarse, epsilon, tolerance / 2, sigma, looks=12)
    return _solve(lambda sigma: _bound(sigma, q, T, delta, accountant), epsilon, tolerance, sigma)


def _solve(
    epsilon_of: Callable[[float], float], target: float, tolerance: float, sigma: float, looks: int = 100
) -> float:
    """Find a sigma with target - tolerance <= epsilon_of(sigma) <= target, for a decreasing epsilon_of.

    Regula falsi on log epsilon against log sigma, which is nearly a straight line; bisection where that is slow.
    """
    low = high = None  # (sigma, epsilon) with too little noise, and with enough
    aim = target - tolerance / 2
    for look in range(looks):
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
        elif high[0] <= low[0] * (1 + 1e-12):
            break
        else:
            weight = 0.5
            if look < 10 and high[1] > 0 and low[1] < math.inf:
                weight = math.log(low[1] / aim) / math.log(low[1] / high[1])
            sigma = low[0] * (high[0] / low[0]) ** min(0.99, max(0.01, weight))
    raise UsageError(f"no sigma found that spends epsilon={target:g}: the accountant cannot resolve it")


# ---- Checks of what the caller passes.


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


# ---- Upper bounds of epsilon for T steps of the Poisson-subsampled Gaussian mechanism, by Opacus's analyses.

# Opacus's own orders end at 63, where the RDP bound cannot go below 0.1; above 1024 its binomials overflow.
LARGE_ORDERS = (64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
ORDERS = (*RDPAccountant.DEFAULT_ALPHAS, *LARGE_ORDERS)
# Fewer orders give an upper bound too. Fractional ones are slow, and fail for large sigma.
INTEGER_ORDERS = (*range(2, 17), *range(18, 64, 4), *LARGE_ORDERS)

# Below this delta the rounding error of PRV's double-precision FFT is no longer small compared with delta: at q = 1,
# where the exact value is known, PRV's upper end is still correct at 1e-12 and too low at 1e-13.
PRV_DELTA_MIN = 1e-10
PRV_POINTS_MAX = 10**7  # about 1 GB, and 5 s
PRV_LOSS_MAX = 700.0  # exp overflows soon after


@functools.lru_cache(maxsize=4096)
def _bound(sigma: float, q: float, T: int, delta: float, accountant: str) -> float:
    """Bound from above the epsilon that T steps spend."""
    if accountant == "rdp":
        return rdp(sigma, q, T, delta, ORDERS)
    return prv(sigma, q, T, delta, eps_error(rdp(sigma, q, T, delta)))


def eps_error(bound: float) -> float:
    """Choose PRV's eps_error: Opacus's 0.01, but at most 1% of a small epsilon, and 0.1% of a large one (wide grid).

    It is continuous in sigma: at a jump there would be targets that no sigma comes close to.
    """
    return max(1e-4, min(bound / 100, max(0.01, bound / 1000)))


def rdp(sigma: float, q: float, T: int, delta: float, orders: tuple[float, ...] = INTEGER_ORDERS) -> float:
    """Bound epsilon by Renyi DP, minimised over `orders`; infinity where every order overflows."""
    accountant = RDPAccountant()
    accountant.history = [(sigma, q, T)]
    try:
        with _quiet():
            epsilon, _ = accountant.get_privacy_spent(delta=delta, alphas=list(orders))
    except (ValueError, OverflowError):  # Opacus's series for fractional orders cancels to nothing
        return math.inf if orders is INTEGER_ORDERS else rdp(sigma, q, T, delta)
    # nan: every order overflowed, so there is no bound.
    return math.inf if math.isnan(epsilon) else max(0.0, float(epsilon))


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


def prv(sigma: float, q: float, T: int, delta: float, error: float) -> float:
    """Compute the upper end of PRV's enclosure of epsilon, estimate +- `error`: Opacus's, with our domain and mean."""
    delta_error = delta / 1000
    # The domain [-L, L] and its mesh follow Gopi et al., remark 5.6; its size is one that suits the FFT.
    L = max(rdp(sigma, q, T, delta_error / 4), rdp(sigma, q, 1, delta_error / (8 * T)), error) + 3
    if L > PRV_LOSS_MAX:  # sigma is far too small for a useful guarantee
        return rdp(sigma, q, T, delta)
    mesh = error / math.sqrt(T * math.log(12 / delta_error) / 2)
    half = next_fast_len(math.ceil(L / mesh) + 1, real=True)
    case = f"sigma={sigma:g}, q={q:g}, T={T}, delta={delta:g}"
    if 2 * half > PRV_POINTS_MAX:
        raise UsageError(f"PRV needs a grid of {2 * half:.1g} points for {case}: use accountant='rdp'")
    domain = Domain(-(half - 1) * mesh, half * mesh, 2 * half)
    try:
        with _quiet():
            loss = _Loss(PoissonSubsampledGaussianPRV(q, sigma), domain.t_min, domain.t_max)
            total = compose_heterogeneous([discretize(loss, domain)], [T])
            _, _, upper = total.compute_epsilon(delta, delta_error, error)
    except (ValueError, RuntimeError) as failure:
        raise UsageError(f"PRV fails for {case} ({failure}): use accountant='rdp'") from failure
    if math.isnan(upper):
        raise UsageError(f"PRV finds no number for {case}: use accountant='rdp'")
    return max(0.0, float(upper))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence two warnings about harmless cases: the best order is the last of the list; log(1 - q) = -inf at q = 1."""
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.filterwarnings("ignore", message="Optimal order is the")
        yield

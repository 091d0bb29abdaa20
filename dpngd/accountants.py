"""Upper bounds of epsilon for T steps of the Poisson-subsampled Gaussian mechanism, by Opacus's analyses.

`prv` (Gopi et al., 2021) composes the privacy loss numerically and encloses epsilon in estimate +- eps_error; `rdp`
bounds it by Renyi divergences. Both look at removing a sample, which is the worse direction in each step; that it
also is after composition is not proven in general, so the tests compose both.

Opacus's PRV code is used with two parts replaced, the domain and the mean of the loss: 1.5 to 8 times as fast, and
equal to `opacus.accountants.PRVAccountant` to 1e-6. Inputs are checked by `dpngd.privacy`.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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

from dpngd.errors import UsageError

# Opacus stops at order 63, where the RDP bound cannot go below 0.1. Its binomials overflow above 1024.
LARGE_ORDERS = (64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
ORDERS = (*RDPAccountant.DEFAULT_ALPHAS, *LARGE_ORDERS)
# A bound from fewer orders is a bound too. Fractional ones are slow, and fail for large sigma.
INTEGER_ORDERS = (*range(2, 17), *range(18, 64, 4), *LARGE_ORDERS)

# Below this delta the rounding of PRV's double-precision FFT is no longer small beside delta: at q = 1, where
# the answer is known, its upper end is still right at 1e-12, and too low at 1e-13.
PRV_DELTA_MIN = 1e-10
PRV_POINTS_MAX = 10**7  # about 1 GB, and 5 s
PRV_LOSS_MAX = 700.0  # exp overflows soon after


@functools.lru_cache(maxsize=4096)
def spent(sigma: float, q: float, T: int, delta: float, accountant: str) -> float:
    """An upper bound of the epsilon that T steps spend."""
    if accountant == "rdp":
        return rdp(sigma, q, T, delta, ORDERS)
    return prv(sigma, q, T, delta, eps_error(rdp(sigma, q, T, delta)))


def eps_error(bound: float) -> float:
    """Opacus's default, but at most 1% of a small epsilon, and 0.1% of a large one, for which a grid is wide.

    It is continuous in sigma: with a jump there would be targets that no sigma comes close to.
    """
    return max(1e-4, min(bound / 100, max(0.01, bound / 1000)))


def rdp(sigma: float, q: float, T: int, delta: float, orders: tuple[float, ...] = INTEGER_ORDERS) -> float:
    accountant = RDPAccountant()
    accountant.history = [(sigma, q, T)]
    try:
        with _quiet():
            epsilon, _ = accountant.get_privacy_spent(delta=delta, alphas=list(orders))
    except (ValueError, OverflowError):  # Opacus's series for fractional orders cancels to nothing
        return math.inf if orders is INTEGER_ORDERS else rdp(sigma, q, T, delta)
    # Not a number: every order overflowed. That bounds nothing.
    return math.inf if math.isnan(epsilon) else max(0.0, float(epsilon))


class _Loss(TruncatedPrivacyRandomVariable):
    """One step's loss l(x) = log(1 - q + q e^((2x - 1) / 2 sigma^2)), x ~ (1 - q) N(0, sigma^2) + q N(1, sigma^2)."""

    def mean(self) -> float:
        """E l(x), by the trapezoidal rule: exact to rounding for an analytic integrand with Gaussian tails.

        Opacus integrates the cdf adaptively, in 60 times the time and with errors up to 1e-7, which T steps
        multiply (sigma = 0.3, q = 0.001).
        """
        q, sigma = self._prv.sample_rate, self._prv.noise_multiplier
        x = np.linspace(-12 * sigma, 1 + 12 * sigma, 4096 + 8 * math.ceil(1 / sigma))
        p = (1 - q) * np.exp(-(x**2) / (2 * sigma**2)) + q * np.exp(-((x - 1) ** 2) / (2 * sigma**2))
        loss = np.logaddexp(np.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        return float(p @ loss / p.sum())


def prv(sigma: float, q: float, T: int, delta: float, error: float) -> float:
    """The upper end of PRV's enclosure of epsilon, estimate +- `error`: Opacus's, with another domain and mean."""
    delta_error = delta / 1000
    # The domain [-L, L] and its mesh by the rule of Gopi et al., remark 5.6, of a size that suits the FFT.
    L = max(rdp(sigma, q, T, delta_error / 4), rdp(sigma, q, 1, delta_error / (8 * T)), error) + 3
    if L > PRV_LOSS_MAX:  # far from any privacy
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
    """Silence what is in order: the best order is the last of the list; log(1 - q) = -inf at q = 1."""
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.filterwarnings("ignore", message="Optimal order is the")
        yield

"""Confidence limits, tests and privacy curves of the audit, in numpy and scipy.

    function            answers
    clopper_pearson     exact limits of a binomial probability
    mu_lower            lower limit of the distance mu of two normal samples, in units of their standard deviation
    mu_limit            the estimate of mu that has a given lower limit
    epsilon_lower       lower limit of epsilon from the scores of a membership test, without any assumption
    one_run_epsilon     lower limit of epsilon from the guesses of one run (Steinke, Nasr and Jagielski, 2023)
    gdp_epsilon         the epsilon of a Gaussian mechanism with 1/sigma = mu, exact (Balle and Wang, 2018)
    sampled_epsilon     an enclosure of the epsilon of Poisson-sampled releases, by a discretised privacy loss
    variance_z, count_p, grid_distance    tests of noise

Every limit holds with probability 1 - alpha for every true value. None of these functions is shared with
`dpngd.privacy`, which the audit tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import fft, optimize, special, stats

Array = np.ndarray


def clopper_pearson(k: int, n: int, alpha: float) -> tuple[float, float]:
    """Limits of p for k successes of n: P[p < low] <= alpha and P[p > high] <= alpha, each."""
    low = 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, alpha))
    high = 1.0 if k == n else float(special.betaincinv(k + 1, n - k, 1 - alpha))
    return low, high


def mu_lower(scores_in: Array, scores_out: Array, alpha: float) -> tuple[float, float]:
    """The estimate of mu and its lower limit, for scores N(m + mu s, s^2) in and N(m, s^2) out; m and s unknown.

    t = (mean_in - mean_out) / (s sqrt(1/n + 1/k)) has a noncentral t distribution with n + k - 2 degrees of freedom and
    noncentrality mu / sqrt(1/n + 1/k); the limit is the mu at which P[t >= observed] = alpha.
    """
    n, k = len(scores_in), len(scores_out)
    df, unit = n + k - 2, math.sqrt(1 / n + 1 / k)
    pooled = math.sqrt(((n - 1) * np.var(scores_in, ddof=1) + (k - 1) * np.var(scores_out, ddof=1)) / df)
    if not (math.isfinite(pooled) and pooled > 0):
        return math.inf, math.inf  # no noise at all, or nan
    mu = float(np.mean(scores_in) - np.mean(scores_out)) / pooled
    t = mu / unit

    def excess(nc: float) -> float:
        return float(_nct_sf(t, df, nc)) - alpha

    width = 10 + abs(t) / math.sqrt(df) * 10
    return mu, optimize.brentq(excess, t - width, t + width) * unit


def _nct_sf(t: float, df: int, nc: float) -> float:
    """P[T >= t] of the noncentral t distribution, by integrating P[Z + nc >= t sqrt(v / df)] over the chi-square v.

    scipy's own loses its tail for large noncentralities, which are the case here.
    """
    return float(np.mean(special.ndtr(nc - t * _chi_levels(df))))


@functools.lru_cache(maxsize=64)
def _chi_levels(df: int) -> Array:
    """sqrt(v / df) at 2,001 levels of equal probability."""
    return np.sqrt(stats.chi2.ppf((np.arange(2001) + 0.5) / 2001, df) / df)


def mu_limit(mu: float, n: int, k: int, alpha: float) -> float:
    """The estimate of mu from n and k scores at which its lower limit is `mu`: of any larger one the limit is above."""
    df, unit = n + k - 2, math.sqrt(1 / n + 1 / k)
    nc = mu / unit
    high = nc + 1
    while _nct_sf(high, df, nc) > alpha:
        high *= 2
    return optimize.brentq(lambda t: float(_nct_sf(t, df, nc)) - alpha, nc, high) * unit


def mu_power(mu: float, n: int, alpha: float, power: float = 0.99) -> float:
    """The smallest mu' > mu whose lower limit from n scores on each side exceeds mu with this probability."""
    z = special.ndtri(1 - alpha) + special.ndtri(power)
    return optimize.brentq(lambda m: m - mu - z * math.sqrt(2 / n + m**2 / (4 * n)), mu, 100 * mu + 100)


def epsilon_lower(scores_in: Array, scores_out: Array, delta: float, alpha: float) -> float:
    """Lower limit of epsilon: log((TPR - delta) / FPR) with Clopper-Pearson limits, each of level alpha / 2.

    The threshold is chosen on the first half of the scores, the rates are counted on the other half, so that the limit
    holds without a correction for the choice.
    """
    n, k = len(scores_in) // 2, len(scores_out) // 2
    best, threshold = -math.inf, math.inf
    for candidate in np.quantile(np.concatenate([scores_in[:n], scores_out[:k]]), np.linspace(0.01, 0.995, 100)):
        bound = _ratio(int((scores_in[:n] > candidate).sum()), n, int((scores_out[:k] > candidate).sum()), k, delta,
                       alpha / 2)
        if bound > best:
            best, threshold = bound, candidate
    hits, false = int((scores_in[n:] > threshold).sum()), int((scores_out[k:] > threshold).sum())
    return max(0.0, _ratio(hits, len(scores_in) - n, false, len(scores_out) - k, delta, alpha / 2))


def _ratio(hits: int, n: int, false: int, k: int, delta: float, alpha: float) -> float:
    tpr, fpr = clopper_pearson(hits, n, alpha)[0], clopper_pearson(false, k, alpha)[1]
    return math.log((tpr - delta) / fpr) if tpr > delta else -math.inf


def one_run_p(m: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """P-value of `right` of `guesses` correct about m fair coins under (epsilon, delta): Steinke et al., theorem 5.2.

    P[right >= v] <= P[Binomial(r, e^eps / (1 + e^eps)) >= v] + 2 m delta max_i P[v - i <= Binomial < v] / i.
    """
    p = special.expit(epsilon)
    tail = float(stats.binom.sf(right - 1, guesses, p))
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, p))
    worst = float(np.max(below / np.arange(1, right + 1))) if right else 0.0
    return min(1.0, tail + 2 * m * delta * worst)


def one_run_epsilon(m: int, guesses: int, right: int, delta: float, alpha: float) -> float:
    """The largest epsilon that the guesses refute at level alpha; 0 where they refute none."""
    if one_run_p(m, guesses, right, 0.0, delta) > alpha:
        return 0.0
    high = 1.0
    while one_run_p(m, guesses, right, high, delta) < alpha:
        high *= 2
        if high > 1e3:
            return math.inf
    return optimize.brentq(lambda e: one_run_p(m, guesses, right, e, delta) - alpha, 0.0, high, xtol=1e-6)


def gdp_delta(mu: float, epsilon: float) -> float:
    """delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    return float(special.ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)))


def gdp_epsilon(mu: float, delta: float) -> float:
    """The epsilon at which a Gaussian mechanism of distance mu has this delta."""
    if gdp_delta(mu, 0.0) <= delta:
        return 0.0
    top = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta)) + 1
    return optimize.brentq(lambda e: gdp_delta(mu, e) - delta, 0.0, top)


def sampled_epsilon(parts: Sequence[tuple[float, int]], q: float, delta: float, gap: float = 0.005,
                    ) -> tuple[float, float]:
    """An enclosure (low, high) of the epsilon of Poisson-sampled Gaussian releases: (sigma, count) of each kind.

    One release with and without the sample is P = (1-q) N(0, sigma^2) + q N(1, sigma^2) against Q = N(0, sigma^2). Its
    loss log(P/Q) is rounded up to a grid of width gap / (number of releases), so the composed loss is too large by at
    most `gap`, and the same masses shifted down by `gap` bound it from below. Both directions (adding and removing) are
    composed; the larger epsilon counts.
    """
    count = sum(n for _, n in parts)
    if q == 1:
        exact = gdp_epsilon(math.sqrt(sum(n / s**2 for s, n in parts)), delta)
        return exact, exact
    mesh = gap / count
    epsilons = [_composed(parts, q, delta, mesh, remove) for remove in (True, False)]
    high = max(epsilons)
    return max(0.0, high - gap), high


def _composed(parts: Sequence[tuple[float, int]], q: float, delta: float, mesh: float, remove: bool) -> float:
    singles = [_loss_masses(sigma, q, mesh, remove) for sigma, _ in parts]
    # The window of the sum: mean and 12 standard deviations, and at least each release's own range.
    mean = var = width = 0.0
    for (first, mass, _), (_, n) in zip(singles, parts, strict=True):
        loss = (first + np.arange(len(mass))) * mesh
        m = float(mass @ loss)
        mean, var = mean + n * m, var + n * float(mass @ (loss - m) ** 2)
        width = max(width, float(loss[-1] - loss[0]))
    half = math.ceil((12 * math.sqrt(var) + width) / mesh)
    size = fft.next_fast_len(2 * half + 1, real=True)
    spectrum, infinite = 1.0, 0.0
    start = 0
    for (first, mass, beyond), (_, n) in zip(singles, parts, strict=True):
        spectrum = spectrum * fft.rfft(np.bincount(np.arange(len(mass)) % size, mass, size)) ** n
        start += n * first
        infinite += n * beyond
    masses = np.clip(fft.irfft(spectrum, size), 0, None)
    low = round(mean / mesh) - size // 2  # the window [low, low + size) of the wrapped sum
    order = (np.arange(low, low + size) - start) % size
    masses, loss = masses[order], np.arange(low, low + size) * mesh

    def excess(epsilon: float) -> float:
        above = loss > epsilon
        return infinite + float(masses[above] @ -np.expm1(epsilon - loss[above])) - delta

    if excess(0.0) <= 0:
        return 0.0
    if excess(loss[-1]) > 0:
        return math.inf
    return optimize.brentq(excess, 0.0, loss[-1], xtol=1e-9)


def _loss_masses(sigma: float, q: float, mesh: float, remove: bool) -> tuple[int, Array, float]:
    """(first grid index, masses, mass beyond the grid) of one release's loss, rounded up to the grid."""
    ends = np.array([-10 * sigma - 1, 1 + 10 * sigma])  # 1e-23 lies beyond
    low, high = (_loss(x, sigma, q) for x in ends)
    if not remove:
        low, high = -high, -low
    first, last = math.floor(low / mesh), math.ceil(high / mesh)
    edges = np.arange(first, last + 1) * mesh
    x = _inverse(edges if remove else -edges, sigma, q)
    # Removing: x ~ P, and the loss l(x) increases. Adding: x ~ Q, and the loss -l(x) decreases.
    mixture = (1 - q) * special.ndtr(x / sigma) + q * special.ndtr((x - 1) / sigma)
    cdf = mixture if remove else special.ndtr(-x / sigma)
    mass = np.diff(cdf)
    mass[0] += cdf[0]
    return first + 1, mass, float(1 - cdf[-1])


def _loss(x: float, sigma: float, q: float) -> float:
    return float(np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2)))


def _inverse(loss: Array, sigma: float, q: float) -> Array:
    """The x at which log(1 - q + q e^((2x - 1) / 2 sigma^2)) is this; -inf where it never is so small."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rest = loss + np.log1p(-(1 - q) * np.exp(-loss))  # log(e^loss - (1 - q))
    x = sigma**2 * (rest - math.log(q)) + 0.5
    return np.where(loss > math.log1p(-q), x, -np.inf)


def variance_z(z: Array) -> float:
    """How many standard deviations sum z^2 lies from its mean, for z ~ N(0, 1): chi-square, normal at these sizes.

    Exact by the Wilson-Hilferty cube root, whose error at 10,000 degrees of freedom and more is far below 1e-6.
    """
    n = z.size
    ratio = float(np.square(z, dtype=np.float64).sum()) / n
    return (ratio ** (1 / 3) - (1 - 2 / (9 * n))) / math.sqrt(2 / (9 * n)) if math.isfinite(ratio) else math.inf


def shortfall_power(n: int, alpha: float, power: float = 0.99) -> float:
    """The smallest share that the noise may be short of its standard deviation and still be found by `variance_z`."""
    z = special.ndtri(1 - alpha / 2) + special.ndtri(power)
    return 1 - math.sqrt(max(0.0, 1 - z * math.sqrt(2 / n)))


def count_p(k: int, n: int, p: float) -> float:
    """Two-sided p-value of k successes of n at probability p: twice the smaller tail."""
    return min(1.0, 2 * min(float(stats.binom.cdf(k, n, p)), float(stats.binom.sf(k - 1, n, p))))


def max_p(largest: float, n: int) -> float:
    """Two-sided p-value of the largest |z| of n normal numbers: too small (a cut tail) or too large."""
    log_below = n * math.log1p(-2 * special.ndtr(-largest)) if largest < 38 else 0.0
    return min(1.0, 2 * min(math.exp(log_below), -math.expm1(log_below)))


LAYOUTS = ("blocks of 16", "neighbours", "halves")


def grid_distance(blocks: Sequence[Array]) -> tuple[float, int]:
    """Mean distance of the radii of normal pairs from the grid of 24-bit uniforms, and how many pairs it is over.

    Box-Muller in single precision computes (z, z') = sqrt(-2 log u) (cos, sin) from u = k / 2^24, so that its radius
    ends at sqrt(2 log 2^24) = 5.768 and exp(-(z^2 + z'^2) / 2) 2^24 is an integer. Noise from float64 is uniform
    around the integers: mean distance 0.25 with standard deviation 0.144 / sqrt(pairs). Pairs are looked for as
    torch's kernels lay them out (`LAYOUTS`); the least distance counts. Only u < 1/64 is used, where float32 rounds
    by less than a tenth of the grid.
    """
    least, pairs = math.inf, 0
    for layout in LAYOUTS:
        u = np.concatenate([np.exp(-0.5 * _radii(b, layout)) for b in blocks])
        u = u[u < 1 / 64] * 2.0**24
        if len(u) >= 30:
            distance = float(np.abs(u - np.round(u)).mean())
            if distance < least:
                least, pairs = distance, len(u)
    return least, pairs


def _radii(z: Array, layout: str) -> Array:
    """z^2 + z'^2 of the pairs of one flat block of noise."""
    z = z.astype(np.float64)
    if layout == "blocks of 16":  # torch on CPUs, 16 numbers and more: i and i + 8 of each block
        z = z[: len(z) // 16 * 16].reshape(-1, 2, 8)
        return (z[:, 0] ** 2 + z[:, 1] ** 2).ravel()
    if layout == "neighbours":  # numpy's and torch's scalar loops
        z = z[: len(z) // 2 * 2].reshape(-1, 2)
        return (z**2).sum(1)
    half = len(z) // 2
    return z[:half] ** 2 + z[half : 2 * half] ** 2

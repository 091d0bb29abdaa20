"""Estimates, intervals and words: what a few seeds and one test set allow to say, under rules fixed here.

Everything that is decided from accuracies is one estimator, a contrast over cells k (a method in a setting):

    L = sum_k c_k accuracy_k        a difference, a lead, a mean over budgets, a slope (least-squares weights)

| symbol | shape | meaning |
| --- | --- | --- |
| L_si | (n, m) | sum_k c_k bit_ksi, in points: seed s, test image i; paired: only seeds that every cell has |
| L_s, L_i, L | (n,), (m,), () | means of L_si over images, over seeds, over both |
| s^2 | () | variance of L_s over seeds (n - 1) |

Seeds and images are both drawn at random, L_si = L + a_s + b_i + e_si. The mean has the variance

    Var(L) = var(a)/n + var(b)/m + var(e)/(n m)

and s^2/n estimates its first and last part, var_i(L_i)/m its second and last. The last one is counted once:

    Var(L) = s^2/n + max(0, var_i(L_i)/m - MS_e/(n m)),   MS_e the mean square of L_si - L_s - L_i + L

so no interval is shorter than that over seeds alone. Degrees of freedom are Welch and Satterthwaite's of the two parts.
Records that keep no images, or were evaluated on different ones, give s^2/n alone, and the text says "seeds only".

Pooling. m contrasts of the same methods at the epsilons of one data set may share s^2 = mean of their s_j^2. They share
seeds, so the s_j^2 are correlated: for normal residuals with correlation rho, Var(s_j^2) = 2 sigma^4/(n-1) and
corr(s_j^2, s_k^2) = rho^2, hence Var(s^2) = 2 sigma^4/(n-1) (1 + (m-1) r2)/m and

    df = m (n-1) / (1 + (m-1) r2),   r2 the mean of rho_jk^2 over pairs j < k

(clustering by seed: r2 = 1 gives n - 1, r2 = 0 gives m (n - 1)). A contrast with a run that scores chance, or whose own
s_j^2 / s^2 is above the upper quartile of F, keeps its own: noise may grow towards small epsilons, so pooling would cut
the interval there. Simulated with n = 8 and deviations that differ by a factor of 2 between five epsilons, every
interval covers in 94 % of cases or more (of two epsilons, the noisier one in 93 %); with a guard at 5 % it would be
87 % where the deviation is largest.

| claim | reproduced | refuted | equivalent | inconclusive |
| --- | --- | --- | --- | --- |
| `superior`: L > 0 | 95% interval above 0 | 95% interval below 0 | 90% interval within +-1 point | otherwise |
| `hardly`: abs(L) < 1 point | 90% interval within +-1 point | 95% interval outside +-1 point | - | otherwise |
| `at_least`: ratio >= r | 95% interval at or above r | 95% interval below r | - | otherwise |
| `mostly`: share of runs > 1/2 | Clopper-Pearson 95% above 1/2 | 95% below 1/2 | - | otherwise |
| `conjunction`: in every part | in each (intersection-union) | in one after Holm | in each | otherwise |

Words are never taken from the sign of a mean. One seed has no interval, and neither have seeds without any spread: both
are inconclusive. "not testable here" is a setting that cannot answer, "not run" one whose planned runs are missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special  # quantiles and tails of t, F, beta; scipy.stats would cost every notebook a second

from dpngd.errors import UsageError

LEVEL, ALPHA = 0.95, 0.025  # of an interval, and of one side of it
MARGIN = 1.0
"""Points of accuracy that count as no difference, in every claim that needs a margin. The paper says 0.3 in one place:
with half a point of deviation between seeds, 25 seeds would be needed to show that, so 1 point is asked there too."""
POWER = 0.8
GUARD = 0.75  # quantile of F above which a contrast does not pool: see above
DRAWS, BOOTSTRAP_SEED = 10_000, 0
REPRODUCED, REFUTED, EQUIVALENT, INCONCLUSIVE = "reproduced", "refuted", "equivalent", "inconclusive"
NOT_TESTABLE, NOT_RUN, DEMONSTRATION = "not testable here", "not run", "demonstration only"
WORDS = (REPRODUCED, REFUTED, EQUIVALENT, INCONCLUSIVE, NOT_TESTABLE, NOT_RUN)
NO_SPREAD = 1e-9  # below this a deviation over seeds is rounding of equal values


@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval. n = 0: nothing was run; n = 1: no interval."""

    mean: float
    sd: float  # over seeds, of one run (or one contrast) each
    n: int
    low: float
    high: float
    kind: str = "mean"  # or "difference", "ratio", "share"
    se: float = math.nan  # of the mean, seeds and images
    df: float = math.nan
    images: int = 0  # test images that the interval covers; 0: seeds only
    image_part: float = 0.0  # what they add to se^2

    @property
    def spread(self) -> bool:
        """Whether there is an interval: two seeds or more that are not all equal."""
        return self.n >= 2 and self.high - self.low > NO_SPREAD * max(1.0, abs(self.mean))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The two-sided t interval of another level."""
        if not self.spread:
            return self.low, self.high
        half = t_quantile(self.df, (1 + level) / 2) * self.se
        return self.mean - half, self.mean + half

    def p_above(self, value: float) -> float:
        """One-sided p of "the truth is at most `value`": small where the estimate shows that it is above."""
        return float(special.stdtr(self.df, (value - self.mean) / self.se)) if self.spread else 1.0

    def p_below(self, value: float) -> float:
        return float(special.stdtr(self.df, (self.mean - value) / self.se)) if self.spread else 1.0

    @property
    def power(self) -> float:
        """The smallest difference that this n sees with 80 % power: (t_.975 + t_.8) SE."""
        return (t_quantile(self.df, 1 - ALPHA) + t_quantile(self.df, POWER)) * self.se if self.spread else math.nan

    @property
    def margin(self) -> float:
        """The smallest margin within which this n shows a true 0 with 80 % power: (t_.95 + t_.9) SE."""
        return (t_quantile(self.df, 0.95) + t_quantile(self.df, (1 + POWER) / 2)) * self.se if self.spread \
            else math.nan

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """For tables: `60.78 [60.31, 61.25] n=5`; `scale=100` shows shares as percent."""
        if self.n == 0:
            return NOT_RUN
        mean = f"{scale * self.mean:.{digits}f}"
        if not math.isfinite(self.high - self.low):
            return f"{mean} n={self.n}"
        return f"{mean} [{scale * self.low:.{digits}f}, {scale * self.high:.{digits}f}] n={self.n}"


NOTHING = Estimate(math.nan, math.nan, 0, math.nan, math.nan)


def t_quantile(df: float, p: float) -> float:
    return float(special.stdtrit(df, p)) if math.isfinite(df) else float(special.ndtri(p))


# ---- Contrasts -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Contrast:
    """L_s by seed, and what the test images add to the variance of their mean."""

    by_seed: Mapping[int, float]
    image_part: float = 0.0
    images: int = 0
    lost: bool = False  # a run in it scores chance
    kind: str = "difference"

    def estimate(self, pool: Pool | None = None) -> Estimate:
        """Mean, interval and degrees of freedom, with the variance over seeds of its own or of a pool."""
        x = np.asarray([self.by_seed[s] for s in sorted(self.by_seed)], dtype=float)
        if not np.isfinite(x).all():
            raise UsageError("a contrast holds a value that is not finite: a diverged run must score chance")
        n = len(x)
        if n == 0:
            return NOTHING
        if n == 1:
            return Estimate(float(x[0]), math.nan, 1, -math.inf, math.inf, self.kind)
        L, sd = float(x.mean()), float(x.std(ddof=1))
        if sd <= NO_SPREAD * max(1.0, abs(L)):  # no interval, whatever the images say: see `Estimate.spread`
            return Estimate(L, 0.0, n, L, L, self.kind)
        s2, df_seeds = (sd**2, n - 1.0) if pool is None else (pool.s2, pool.df)
        seeds, images = s2 / n, self.image_part
        df = (seeds + images) ** 2 / (seeds**2 / df_seeds + images**2 / max(1, self.images - 1))
        se = math.sqrt(seeds + images)
        half = t_quantile(df, 1 - ALPHA) * se
        return Estimate(L, sd, n, L - half, L + half, self.kind, se, df, self.images, images)


def image_part(L_si: np.ndarray) -> float:
    """max(0, var_i(L_i)/m - MS_e/(n m)) of an (n, m) table; 0 for one seed, which has no interval."""
    n, m = L_si.shape
    if n < 2 or m < 2:
        return 0.0
    L_i = L_si.mean(0)
    rest = L_si - L_si.mean(1, keepdims=True) - L_i + L_i.mean()
    return max(0.0, float(L_i.var(ddof=1)) / m - float((rest**2).sum()) / ((n - 1) * (m - 1)) / (n * m))


def mean(values: Sequence[float], kind: str = "mean") -> Estimate:
    """Of plain numbers, one per seed."""
    return Contrast(dict(enumerate(values)), kind=kind).estimate()


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Contrast:
    """A - B of plain numbers by seed, over the seeds that both have."""
    return Contrast({s: a[s] - b[s] for s in a.keys() & b.keys()})


def log_ratio(a: Mapping[int, float], b: Mapping[int, float]) -> Contrast:
    """log(A / B) of positive values by seed; `as_ratio` turns its estimate into the geometric mean of A / B."""
    common = a.keys() & b.keys()
    if any(a[s] <= 0 or b[s] <= 0 for s in common):
        raise UsageError("a ratio needs positive values")
    return Contrast({s: math.log(a[s] / b[s]) for s in common}, kind="ratio")


def as_ratio(e: Estimate) -> Estimate:
    return replace(e, mean=math.exp(e.mean), low=math.exp(e.low), high=math.exp(e.high)) if e.n else e


def slope_weights(x: Sequence[float]) -> list[float]:
    """w with sum w_k y_k = (least-squares slope of y over x) (max x - min x): the rise of the line over the range."""
    x = np.asarray(x, dtype=float)
    off = x - x.mean()
    if len(x) < 2 or not off.any():
        raise UsageError("a trend needs two different values or more")
    return list(off / (off**2).sum() * (x.max() - x.min()))


# ---- Pooling over the epsilons of a data set -------------------------------------------------------------------------

@dataclass(frozen=True)
class Pool:
    """A shared variance over seeds and its degrees of freedom."""

    s2: float
    df: float


def pool(contrasts: Sequence[Contrast]) -> Pool | None:
    """The pooled variance of contrasts with the same seeds; None where there are not two of them."""
    seeds = {tuple(sorted(c.by_seed)) for c in contrasts}
    if len(contrasts) < 2 or len(seeds) != 1 or len(next(iter(seeds))) < 2:
        return None
    (order,) = seeds
    x = np.asarray([[c.by_seed[s] for s in order] for c in contrasts], dtype=float)
    n, s2 = x.shape[1], x.var(axis=1, ddof=1)
    varying = s2 > NO_SPREAD**2  # a contrast without any spread keeps its own
    if not varying.any():
        return None
    rho = np.corrcoef(x[varying]) if varying.sum() > 1 else np.ones((1, 1))
    pairs = rho[np.triu_indices(len(rho), 1)]
    r2 = float((pairs**2).mean()) if len(pairs) else 1.0  # nothing to correlate: count the seeds once
    return Pool(float(s2[varying].mean()), len(rho) * (n - 1) / (1 + (len(rho) - 1) * r2))


def estimates(contrasts: Sequence[Contrast], groups: Sequence[object] | None = None) -> list[Estimate]:
    """Of several contrasts; those with the same group (not None) pool their variance over seeds, as said above."""
    groups = [None] * len(contrasts) if groups is None else list(groups)
    shared = {}
    for g in dict.fromkeys(g for g in groups if g is not None):
        shared[g] = pool([c for c, group in zip(contrasts, groups, strict=True) if group == g and not c.lost])
    found = []
    for c, g in zip(contrasts, groups, strict=True):
        own, common = c.estimate(), shared.get(g)
        if common is None or c.lost or not own.spread:
            found.append(own)
            continue
        wide = own.sd**2 > float(special.fdtri(own.n - 1, common.df, GUARD)) * common.s2
        found.append(own if wide else c.estimate(common))
    return found


# ---- Shares of runs, and ratios by bootstrap -------------------------------------------------------------------------

def share(yes: int, n: int) -> Estimate:
    """A share of runs with its Clopper-Pearson 95% interval."""
    if not 0 <= yes <= n:
        raise UsageError(f"{yes} of {n} runs: impossible")
    if n == 0:
        return NOTHING
    low = float(special.betaincinv(yes, n - yes + 1, ALPHA)) if yes else 0.0
    high = float(special.betaincinv(yes + 1, n - yes, 1 - ALPHA)) if yes < n else 1.0
    return Estimate(yes / n, math.nan, n, low, high, "share")


def resampled(n: int, draws: int = DRAWS) -> np.ndarray:
    """`draws` samples of n seeds with replacement, as indices, (draws, n): the same ones every time."""
    return np.random.default_rng(BOOTSTRAP_SEED).integers(n, size=(draws, n))


def percentile(point: float, values: np.ndarray, n: int) -> Estimate:
    """A ratio with its expanded percentile interval.

    Samples of n seeds vary by (n - 1)/n of what seeds do, and their quantiles are a normal's and not a t's: with n = 6
    the plain percentile interval covers in 86 % of cases. So the quantiles are taken further out, at

        alpha' = Phi(sqrt(n/(n-1)) t_{alpha, n-1}),     0.0024 in place of 0.025 for n = 6
    """
    if n < 2:
        return Estimate(point, math.nan, n, -math.inf, math.inf, "ratio")
    tail = float(special.ndtr(math.sqrt(n / (n - 1)) * t_quantile(n - 1, ALPHA)))
    low, high = np.quantile(values, [tail, 1 - tail], method="inverted_cdf")
    with np.errstate(divide="ignore"):
        logs = np.log(values)
    se = float(logs.std(ddof=1)) * math.sqrt(n / (n - 1)) if np.isfinite(logs).all() else math.nan
    return Estimate(point, math.nan, n, float(low), float(high), "ratio", se, n - 1.0)


def expanded_p(share: float, n: int) -> float:
    """The one-sided p that belongs to a share of bootstrap values: `percentile`'s expansion, the other way round."""
    return float(special.stdtr(n - 1, special.ndtri(share) * math.sqrt((n - 1) / n)))


# ---- Words -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Part:
    """One comparison of a claim, decided by itself, with what a conjunction needs of it."""

    name: str
    estimate: Estimate
    word: str
    up: float = 1.0  # one-sided p against "the claim does not hold here"
    down: float = 1.0  # one-sided p against "the claim is not false here"
    level: bool = False  # shown to be within the margin
    power: float = math.nan
    cell: str = ""  # parts of one cell count as one: its p is the largest of theirs
    note: str = ""  # why it cannot be tested here
    would: str = ""  # and what would make it testable
    target: float = 0.0  # what the estimate is held against: a threshold, a margin or a factor


def absent(name: str) -> Part:
    return Part(name, NOTHING, NOT_RUN)


def not_testable(name: str, why: str, would: str) -> Part:
    return Part(name, NOTHING, NOT_TESTABLE, note=why, would=would)


def _worded(e: Estimate, up: bool, down: bool, level: bool = False) -> str:
    if e.n == 0:
        return NOT_RUN
    if not e.spread:
        return INCONCLUSIVE
    return REPRODUCED if up else REFUTED if down else EQUIVALENT if level else INCONCLUSIVE


def superior(name: str, e: Estimate, threshold: float = 0.0, margin: float | None = MARGIN, cell: str = "") -> Part:
    """The claim that L is above `threshold`; a margin of None, where none is fixed, never says "equivalent"."""
    inside = False
    if margin is not None and e.spread:
        low, high = e.interval(0.9)
        inside = threshold - margin < low and high < threshold + margin
    word = _worded(e, e.low > threshold, e.high < threshold, inside)
    return Part(name, e, word, e.p_above(threshold), e.p_below(threshold), inside, e.power, cell,
                target=threshold)


def hardly(name: str, e: Estimate, margin: float = MARGIN, cell: str = "") -> Part:
    """The claim that L is within the margin: two one-sided tests, so shown small, not merely not shown large."""
    if not margin > 0:
        raise UsageError(f"margin = {margin}: must be above 0")
    low, high = e.interval(0.9)
    word = _worded(e, -margin < low and high < margin, e.low > margin or e.high < -margin)
    # Both tests of the two one-sided ones at 5 %: halved, to be held against the same level as the other rules.
    up = max(e.p_above(-margin), e.p_below(margin)) / 2
    return Part(name, e, word, up, min(e.p_above(margin), e.p_below(-margin)), False, e.margin, cell,
                target=margin)


def at_least(name: str, e: Estimate, factor: float, values: np.ndarray, most: np.ndarray | None = None) -> Part:
    """The claim that a ratio is at least `factor`, from its bootstrap values. Budgets are a grid, so here all draws may
    agree: an interval of zero width is one. `most` has upper limits where values are only lower limits (inf)."""
    if not factor > 0:
        raise UsageError(f"factor = {factor}: must be above 0")
    if e.n < 2:
        return Part(name, e, INCONCLUSIVE if e.n else NOT_RUN)
    most = values if most is None else most
    up, down = (expanded_p(float(beyond.mean()), e.n) for beyond in (values < factor, most >= factor))
    refuted = percentile(e.mean, most, e.n).high < factor
    word = REPRODUCED if e.low >= factor else REFUTED if refuted else INCONCLUSIVE
    power = math.exp((t_quantile(e.df, 1 - ALPHA) + t_quantile(e.df, POWER)) * e.se)  # nan stays nan
    return Part(name, e, word, up, down, False, power, target=factor)


def mostly(name: str, yes: int, n: int) -> Part:
    """The claim that something happens in more than half of all runs."""
    e = share(yes, n)
    if n == 0:
        return absent(name)
    up, down = float(special.bdtrc(yes - 1, n, 0.5)) if yes else 1.0, float(special.bdtr(yes, n, 0.5))
    word = REPRODUCED if e.low > 0.5 else REFUTED if e.high < 0.5 else INCONCLUSIVE
    return Part(name, e, word, up, down)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values."""
    order, adjusted, largest = sorted(range(len(p)), key=lambda i: p[i]), [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


@dataclass(frozen=True)
class Verdict:
    """The word of a claim of one part or several."""

    word: str
    held: int  # cells in which it is shown: all where the claim is, else those that are left after Holm
    cells: int  # that could be tested
    weakest: Part | None  # the part that the word rests on: where the claim is least shown, or most contradicted


def conjunction(parts: Sequence[Part]) -> Verdict:
    """The claim that all parts hold. One part that cannot be tested here leaves the others to refute it, and no more:
    the claim is then not shown. A part that was not run decides that nothing is said yet."""
    tested = [p for p in parts if p.word not in (NOT_TESTABLE, NOT_RUN)]
    by_cell: dict[str, float] = {}
    for p in tested:
        by_cell[p.cell or p.name] = max(p.up, by_cell.get(p.cell or p.name, 0.0))
    held = sum(p <= ALPHA for p in holm(list(by_cell.values())))
    if not parts or any(p.word == NOT_RUN for p in parts):
        return Verdict(NOT_RUN, held, len(by_cell), None)
    if not tested:
        return Verdict(NOT_TESTABLE, 0, 0, None)
    against = [d <= ALPHA and p.estimate.n >= 2 for d, p in zip(holm([p.down for p in tested]), tested, strict=True)]
    whole = len(tested) == len(parts)
    if whole and all(p.word == REPRODUCED for p in tested):
        word = REPRODUCED
    elif any(against):
        word = REFUTED
    elif whole and all(p.level for p in tested):
        word = EQUIVALENT
    else:
        word = INCONCLUSIVE
    held = len(by_cell) if word == REPRODUCED else held
    def nearest(p: Part) -> float:  # where bootstrap values leave p-values equal, the interval decides
        return p.estimate.high - p.target if word == REFUTED else p.target - p.estimate.low

    weakest = min(tested, key=lambda p: (p.down, nearest(p))) if word == REFUTED else \
        max(tested, key=lambda p: (p.up, nearest(p)))
    return Verdict(word, held, len(by_cell), weakest)


# ---- What would decide it --------------------------------------------------------------------------------------------

MOST_SEEDS = 1000


def seeds_needed(e: Estimate, target: float, p: float = 1 - ALPHA, power: float = POWER) -> int | None:
    """Seeds with which (t_p + t_power) SE is at most `target`, with the variances seen here; None for over 1,000, which
    is also what it is where the test images alone are too few."""
    if not e.spread or not target > 0 or not math.isfinite(e.se):
        return None
    s2 = max(0.0, e.se**2 - e.image_part) * e.n
    for n in range(2, MOST_SEEDS + 1):
        variance = s2 / n + e.image_part
        df = variance**2 / ((s2 / n) ** 2 / (n - 1) + e.image_part**2 / max(1, e.images - 1))
        if (t_quantile(df, p) + t_quantile(df, power)) * math.sqrt(variance) <= target:
            return n
    return None

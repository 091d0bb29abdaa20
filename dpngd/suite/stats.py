"""Intervals and verdicts: what a few seeds allow to say, under rules fixed here and nowhere else.

All intervals are two-sided 95% intervals from Student's t. A difference between two methods is paired by seed
where both ran the same seeds (same initial weights, batches and public images), and is Welch's otherwise.

| claim | reproduced | direction only | not reproduced |
| --- | --- | --- | --- |
| `greater`: A - B > margin | interval above the margin | mean above it, interval not | mean not above |
| `within`: A - B within +-x | interval inside +-x | mean inside, interval not | mean not inside |
| `ratio`: A / B at least r | interval at or above r | interval above 1, or mean at or above r | otherwise |
| `outcome`: happened in every run | in all of two runs or more | in one single run, or in most | otherwise |
| `every`: a conjunction over cells | all cells | more than half hold at least in direction | otherwise |

Whatever the numbers, one run has no interval and gives "direction only" at best, and none gives "not run". Two runs
with the very same difference count as one: they say nothing about its spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit  # Student's t quantile; scipy.stats would cost every notebook a second

from dpngd.errors import UsageError

LEVEL = 0.95
REPRODUCED, DIRECTION, NOT_REPRODUCED, NOT_RUN = "reproduced", "direction only", "not reproduced", "not run"
VERDICTS = (REPRODUCED, DIRECTION, NOT_REPRODUCED, NOT_RUN)


@dataclass(frozen=True)
class Estimate:
    """A mean, its sample deviation and its 95% interval: all numbers for n = 1, NaN for n = 0."""

    mean: float
    sd: float
    n: int
    low: float
    high: float
    kind: str = "mean"  # or "paired difference", "Welch difference", "ratio"

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """For tables: `60.78 [60.31, 61.25] n=5`; `scale=100` shows shares as percent."""
        if self.n == 0:
            return "not run"
        mean = f"{scale * self.mean:.{digits}f}"
        if not math.isfinite(self.high - self.low):
            return f"{mean} n={self.n}"
        return f"{mean} [{scale * self.low:.{digits}f}, {scale * self.high:.{digits}f}] n={self.n}"


@dataclass(frozen=True)
class Verdict:
    """A decided claim: the verdict, the interval that it rests on, and the rule in words."""

    verdict: str
    estimate: Estimate | None
    rule: str
    held: int | None = None  # for a conjunction: cells that are reproduced, of `cells`
    cells: int | None = None

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """`reproduced: 1.53 [0.90, 2.16] n=5` or `direction only: 12 of 15 cells`."""
        if self.cells is not None:
            return f"{self.verdict}: {self.held} of {self.cells} cells"
        return f"{self.verdict}: {self.estimate.text(digits, scale)}" if self.estimate else self.verdict


NOTHING = Estimate(math.nan, math.nan, 0, math.nan, math.nan)


def _interval(mean: float, error: float, df: float, sd: float, n: int, kind: str) -> Estimate:
    half = float(stdtrit(df, (1 + LEVEL) / 2)) * error if error > 0 else 0.0
    return Estimate(float(mean), float(sd), n, float(mean - half), float(mean + half), kind)


def _numbers(values: Sequence[float], what: str) -> np.ndarray:
    array = np.asarray(list(values), dtype=float)
    if not np.isfinite(array).all():
        raise UsageError(
            f"{what} holds a value that is not finite: leave out diverged runs, and say how many"
        )
    return array


def mean(values: Sequence[float], kind: str = "mean") -> Estimate:
    """Mean, sample deviation (n - 1) and t interval."""
    x = _numbers(values, kind)
    if len(x) == 0:
        return NOTHING
    if len(x) == 1:
        return Estimate(float(x[0]), math.nan, 1, -math.inf, math.inf, kind)
    sd = x.std(ddof=1)
    return _interval(x.mean(), sd / math.sqrt(len(x)), len(x) - 1, sd, len(x), kind)


def difference(a: Mapping[int, float], b: Mapping[int, float]) -> Estimate:
    """A - B from values by seed: paired over the seeds that both have, Welch's if there are no two."""
    common = sorted(a.keys() & b.keys())
    if len(common) >= 2 or (common and min(len(a), len(b)) == 1):
        return mean([a[s] - b[s] for s in common], "paired difference")
    return welch(list(a.values()), list(b.values()))


def welch(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """A - B of unpaired samples with unequal variances; n is the size of the smaller one."""
    x, y = _numbers(a, "A"), _numbers(b, "B")
    n = min(len(x), len(y))
    kind = "Welch difference"
    if n == 0:
        return NOTHING
    delta = x.mean() - y.mean()
    if n == 1:
        return Estimate(float(delta), math.nan, 1, -math.inf, math.inf, kind)
    vx, vy = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    total = vx + vy
    # Welch-Satterthwaite; with no variance at all any number of degrees gives the interval of length zero.
    df = total**2 / (vx**2 / (len(x) - 1) + vy**2 / (len(y) - 1)) if total > 0 else n - 1
    return _interval(delta, math.sqrt(total), df, math.sqrt(x.var(ddof=1) + y.var(ddof=1)), n, kind)


def ratio(a: Mapping[int, float], b: Mapping[int, float]) -> Estimate:
    """A / B of positive values, paired by seed: the geometric mean, its interval from the logarithms."""
    common = sorted(a.keys() & b.keys())
    if any(a[s] <= 0 or b[s] <= 0 for s in common):
        raise UsageError("a ratio needs positive values")
    logs = mean([math.log(a[s] / b[s]) for s in common], "ratio")
    if logs.n == 0:
        return logs
    return Estimate(math.exp(logs.mean), logs.sd, logs.n, math.exp(logs.low), math.exp(logs.high), "ratio")


def _decide(estimate: Estimate, rule: str, reproduced: bool, direction: bool) -> Verdict:
    if estimate.n == 0:
        return Verdict(NOT_RUN, None, rule)
    if estimate.n == 1 or (estimate.n == 2 and estimate.low == estimate.high):  # no interval, whatever it says
        return Verdict(DIRECTION if direction else NOT_REPRODUCED, estimate, rule)
    return Verdict(REPRODUCED if reproduced else DIRECTION if direction else NOT_REPRODUCED, estimate, rule)


def greater(estimate: Estimate, margin: float = 0.0) -> Verdict:
    """The claim that a difference is above `margin`."""
    rule = f"the whole 95% interval of the {estimate.kind} is above {margin:g}"
    return _decide(estimate, rule, estimate.low > margin, estimate.mean > margin)


def within(estimate: Estimate, bound: float) -> Verdict:
    """The claim that a change is smaller than `bound`: shown to be small, not merely not shown large."""
    if not bound > 0:
        raise UsageError(f"bound = {bound}: must be above 0")
    rule = f"the whole 95% interval of the {estimate.kind} is within +-{bound:g}"
    inside = estimate.low > -bound and estimate.high < bound
    return _decide(estimate, rule, inside, abs(estimate.mean) < bound)


def at_least(estimate: Estimate, factor: float) -> Verdict:
    """The claim that a ratio is at least `factor` (> 1): better by less than that is the direction only."""
    if not factor > 1:
        raise UsageError(f"factor = {factor}: must be above 1")
    rule = f"the whole 95% interval of the {estimate.kind} is at or above {factor:g}"
    direction = estimate.mean >= factor or (estimate.n > 1 and estimate.low > 1)
    return _decide(estimate, rule, estimate.low >= factor, direction)


def outcome(happened: Sequence[bool]) -> Verdict:
    """The claim that something happens in every run (the no-floor arm diverges)."""
    rule = "it happens in all of two runs or more"
    n, yes = len(happened), sum(map(bool, happened))
    if n == 0:
        return Verdict(NOT_RUN, None, rule)
    share = Estimate(yes / n, math.nan, n, -math.inf, math.inf, "share of runs")
    if yes == n and n >= 2:
        return Verdict(REPRODUCED, share, rule)
    return Verdict(DIRECTION if yes > n / 2 else NOT_REPRODUCED, share, rule)


def every(cells: Sequence[Verdict]) -> Verdict:
    """The claim that something holds in every cell of a table. Cells that were not run count as not shown."""
    run = [v for v in cells if v.verdict != NOT_RUN]
    held = sum(v.verdict == REPRODUCED for v in cells)
    leaning = sum(v.verdict in (REPRODUCED, DIRECTION) for v in run)
    rule = "reproduced in every cell; direction only where more than half of the cells at least lean that way"
    if not run:
        verdict = NOT_RUN
    elif held == len(cells):
        verdict = REPRODUCED
    else:
        verdict = DIRECTION if leaning > len(run) / 2 else NOT_REPRODUCED
    return Verdict(verdict, None, rule, held, len(cells))

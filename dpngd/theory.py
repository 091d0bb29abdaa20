"""What the paper proves, as measured numbers: Theorem 1, the KL-DP duality, the safety bound.

`dpngd.measure` computes a Theory on a real network; this module holds the numbers and decides. Noise is random, so
sums of squares are compared with what chance allows: five standard deviations of a chi-square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dpngd import stats
from dpngd.rules import Decision

SIGMAS = 5.0  # one false alarm in millions


@dataclass(frozen=True)
class Chi:
    """A mean of `terms` squares that are standard normal if the theorem holds."""

    what: str
    mean: float
    terms: int

    @property
    def holds(self) -> bool:
        return abs(self.mean - 1) <= SIGMAS * math.sqrt(2 / self.terms)


@dataclass(frozen=True)
class Theory:
    """Measured on several seeds: each list has an entry for every seed, spectrum bin, sample or cell."""

    means: list[Chi] = field(default_factory=list)
    spectrum: list[tuple[Chi, float, float]] = field(default_factory=list)  # bin, its eigenvalue, its variance
    predicted: list[tuple[float, float]] = field(default_factory=list)  # eigenvalue, variance of Theorem 1
    kl: list[dict] = field(default_factory=list)  # a sample: quadratic, realised, bound, clipped
    steps: list[dict] = field(default_factory=list)  # a floor: floor, squared (mean, bound), safe
    budget: list[dict] = field(default_factory=list)  # a cell and method: sigma and what it spends

    def mean(self) -> Decision:
        worst = max(self.means, key=lambda c: abs(c.mean - 1), default=None)
        said = worst and (f"squared error of the mean over its expectation: {worst.mean:.4f} (1 ± "
                          f"{SIGMAS * math.sqrt(2 / worst.terms):.4f}, {worst.terms:,} parameters)")
        return decided([c.holds for c in self.means], said)

    def covariance(self) -> Decision:
        chis = [c for c, _, _ in self.spectrum]
        worst = max(chis, key=lambda c: abs(c.mean - 1) / math.sqrt(2 / c.terms), default=None)
        said = worst and (f"measured over predicted variance {min(c.mean for c in chis):.3f} to "
                          f"{max(c.mean for c in chis):.3f} in {len(chis)} bins of the spectrum")
        return decided([c.holds for c in chis], said)

    def duality(self) -> Decision:
        inside = [row["quadratic"] <= row["bound"] * (1 + 1e-4) for row in self.kl]
        realised = sum(row["realised"] <= row["bound"] for row in self.kl)
        return decided(inside, f"½ΔθᵀFΔθ within the radius for {sum(inside)} of {len(inside)} samples; the network's "
                               f"own KL for {realised}")

    def safety(self) -> Decision:
        safe = [row for row in self.steps if row["safe"]]
        worst = max((row["squared"] / row["bound"] for row in safe), default=math.nan)
        return decided([row["squared"] <= row["bound"] * (1 + row["slack"]) for row in safe],
                       f"squared step at most {worst:.2f} of the bound")


def decided(held: list[bool], said: str | None) -> Decision:
    return Decision(stats.outcome(held), said if held and said else stats.NOT_RUN, len(held))

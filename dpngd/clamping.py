"""Module 2: the clamping floor lambda_t (section 3.3 of the paper).

    lambda_safe = (eta_ngd C_ngd / (eta_sgd C_sgd))^2                                     (safety bound)
    lambda_t    = lambda_safe - (lambda_safe - lambda_base) t / T_1            0 <= t < T_1
                  lambda_base + (lambda_safe - lambda_base) ((t - T_1)/(T - T_1))^p   T_1 <= t <= T

With every eigenvalue of F at or above lambda_safe, E||step of DP-NGD||^2 is at most DP-SGD's bound
eta_sgd^2 C_sgd^2 (1 + d sigma^2 / B^2). No private data enter: lambda_t is a function of t alone.

lambda_safe="auto" takes lambda_safe from F at theta_0 instead (`floor_by_rank`), and lambda_base = lambda_safe / 4: a
function of public images and of initial weights that no private data have touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpngd.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from dpngd.curvature import LayerCurvature

AUTO = "auto"
RANK_SHARE = 0.003
BASE_RATIO = 0.25  # lambda_base / lambda_safe where only lambda_safe is given


def lambda_safe(eta_ngd: float, C_ngd: float, eta_sgd: float, C_sgd: float) -> float:
    """The smallest eigenvalue at which DP-NGD's expected step is no longer than DP-SGD's."""
    for name, value in (("eta_ngd", eta_ngd), ("C_ngd", C_ngd), ("eta_sgd", eta_sgd), ("C_sgd", C_sgd)):
        _positive(name, value)
    return (eta_ngd * C_ngd / (eta_sgd * C_sgd)) ** 2


def eta_ngd(lambda_safe: float, C_ngd: float, eta_sgd: float, C_sgd: float, right: float = -0.5) -> float:
    """The same equation solved for the rate: eta_ngd C_ngd = eta_sgd C_sgd sqrt(lambda_safe).

    `right` is the power of F with which a method maps back. DP-NGD's is -1/2; for an arm with another one the longest
    step, eta C lambda_safe^right, is made equal to DP-SGD's in the same way.
    """
    for name, value in (("lambda_safe", lambda_safe), ("C_ngd", C_ngd), ("eta_sgd", eta_sgd), ("C_sgd", C_sgd)):
        _positive(name, value)
    return eta_sgd * C_sgd * lambda_safe**-right / C_ngd


def floor_by_rank(curvature: Sequence[LayerCurvature], share: float = RANK_SHARE) -> float:
    """The eigenvalue of F above which `share` of all directions lie: a floor from public images alone.

    With n directions over all layers, largest eigenvalue first, it is number floor(share n) + 1, so that floor(share n)
    directions (fewer where eigenvalues are equal) are above it; of a tiny network, one. It scales with F.
    """
    import torch

    return by_rank(torch.cat([layer.spectrum().flatten() for layer in curvature]), share)


def by_rank(spectrum: Tensor, share: float) -> float:
    """The value of `spectrum` (n,) above which floor(share n) of its values are, at least one of them."""
    check_share("share", share)
    floor = ranked(spectrum, share)
    if not floor > 0:
        raise UsageError(f"only {int((spectrum > 0).sum())} of {spectrum.numel()} directions have curvature, fewer "
                         f"than {100 * share:g} %: take more public images, or a smaller share")
    return floor


def ranked(spectrum: Tensor, share: float) -> float:
    """The same, zero where no more than that have curvature."""
    rank = min(max(1, int(share * spectrum.numel())), spectrum.numel() - 1)
    return float(spectrum.topk(rank + 1).values[rank])


def check_share(name: str, value: float) -> None:
    """Refuse what is no share of all directions."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise UsageError(f"{name} is {value!r}: it must be above 0 and below 1")


def check_lambda_safe(value: float | str) -> None:
    """Refuse what is neither a positive number nor "auto"."""
    if isinstance(value, str) and value != AUTO:
        raise UsageError(f"lambda_safe is {value!r}: it must be a positive number, or {AUTO!r}")
    if value != AUTO:
        _positive("lambda_safe", value)


def dynamic_floor(lambda_safe: float | str, T: int, *, lambda_base: float | None = None, T1: float = 0.1,
                  p: float = 10.0, curvature: Callable[[], Sequence[LayerCurvature]] | None = None,
                  share: float = RANK_SHARE) -> DynamicFloor:
    """The paper's schedule from a number, or from "auto" and F at theta_0, which is estimated only then."""
    check_lambda_safe(lambda_safe)
    if lambda_safe == AUTO:
        if curvature is None:
            raise UsageError(f"lambda_safe={AUTO!r} is found from the curvature of public images: pass one")
        lambda_safe = floor_by_rank(curvature(), share)
    return DynamicFloor(lambda_safe, BASE_RATIO * lambda_safe if lambda_base is None else lambda_base, T, T1, p)


@dataclass(frozen=True)
class DynamicFloor:
    """The paper's schedule: down from lambda_safe to lambda_base over T_1 steps, a plateau, and up again at the end."""

    lambda_safe: float
    lambda_base: float
    T: int
    T1: float = 0.1  # a fraction of T, as the paper gives it
    p: float = 10.0

    def __post_init__(self) -> None:
        _positive("lambda_safe", self.lambda_safe)
        _positive("lambda_base", self.lambda_base)
        if self.lambda_base > self.lambda_safe:
            raise UsageError(f"lambda_base {self.lambda_base:g} is above lambda_safe {self.lambda_safe:g}: the "
                             "schedule relaxes the floor, so lambda_base must not be the larger")
        if self.T < 1 or not 0 < self.T1 < 1 or self.p < 1:
            raise UsageError(f"schedule needs T >= 1, 0 < T1 < 1 and p >= 1, not T={self.T}, T1={self.T1}, p={self.p}")

    def __call__(self, t: float) -> float:
        drop, T_1 = self.lambda_safe - self.lambda_base, self.T1 * self.T
        if t < T_1:
            return self.lambda_safe - drop * t / T_1
        return self.lambda_base + drop * ((t - T_1) / (self.T - T_1)) ** self.p


@dataclass(frozen=True)
class FixedFloor:
    """lambda_t = lambda_safe at every step (an arm of the paper's Figure 4)."""

    lambda_safe: float

    def __post_init__(self) -> None:
        _positive("lambda_safe", self.lambda_safe)

    def __call__(self, t: float) -> float:
        return self.lambda_safe


@dataclass(frozen=True)
class NoFloor:
    """No clamping. Eigenvalues that are zero, or below it by rounding, count as the smallest float32 resolves here."""

    tiny: float = 1e-12

    def __call__(self, t: float) -> float:
        return self.tiny


Floor = DynamicFloor | FixedFloor | NoFloor


def _positive(name: str, value: float) -> None:
    if isinstance(value, str) or not (math.isfinite(value) and value > 0):
        raise UsageError(f"{name} is {value!r}: it must be a positive number")

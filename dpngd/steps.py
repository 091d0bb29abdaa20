"""How far to go along a private direction d: theta <- theta - s d, with s from a rate or from a KL budget.

    KL(s) = mean over probe images x of KL( p_theta(. | x) || p_{theta - s d}(. | x) )

    Rate       s = eta; with a guard `kl_radius`, the steps with KL(eta) above it are shortened to it
    KLBudget   s with KL(s) = kappa = K / T: every step changes the predictions on the probe by the same amount, and the
               whole run by K nats. There is no rate

The KL divergence that the noise alone causes is known before the step, to second order:

    noise(s) = s^2 (sigma C / B)^2 / 2 * sum_i lambda_i lambda~_i^2r

over the spectrum of F, with lambda~_i = max(lambda_i, lambda_t) and r the power of F~ in the map back: for DP-NGD the
terms are lambda_i / max(lambda_i, lambda_t). KLBudget holds it at K_noise / T or below: where noise binds, most of the
KL divergence is noise, and steps become shorter.

Guarantee: choosing s is post-processing, and costs no privacy. s is a function of
    d           the release of this step, which the mechanism has noised and the accountant has counted;
    theta       public initial weights minus earlier steps: by induction a function of public data and earlier releases;
    the probe   public images that are fixed before training;
    the last s  a function of the same things at the step before, by induction;
    noise(1)    sigma, C, B (fixed numbers), and F of public images at theta.
No private sample, loss or gradient enters other than through d. So (theta_1, ..., theta_T) is a function of the T
releases and of public data, and has their (epsilon, delta). This holds only as long as the probe is public.

The search: s starts from the last step's value and is corrected by s <- s sqrt(kappa / KL(s)), exact for a quadratic KL
(a second correction takes the power that the two passes before show, instead of 2), until KL(s) is within 20 % of
kappa, in at most three forward passes over the probe (and one at theta). The first step starts from the quadratic model
itself, which one more pass measures at a tiny s. If no s tried has KL(s) <= 1.5 kappa, the shortest is scaled down by
kappa / KL(s) and taken untested: KL(s) is convex in s where logits are linear in s, so that KL(a s) <= a KL(s). A step
is never scaled up untested.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpngd.errors import UsageError

PASSES = 3  # forward passes over the probe per step, beside the one at theta (the first step: one more)
WITHIN = 0.2  # KL(s) is accepted this close to kappa, relatively
MOST = 1.5  # no step with a larger KL(s) / kappa is taken as it is
GROWTH = 10.0  # s grows by at most this factor per pass
TINY = 1e-3  # the first trial step moves the weights by this share of their norm
RESOLVED = 1e-12  # a KL below it is rounding of float32 logits
PROBE, SMALLEST_PROBE = 128, 16
K_DEFAULT, K_NOISE_DEFAULT = 10.0, 3.0

Direction = Mapping[str, Tensor]
"""d as {name of a parameter: tensor of its shape}; parameters without an entry do not move."""


@dataclass(frozen=True)
class Step:
    """The length that was chosen. Public, as everything that it comes from."""

    s: float
    kl: float = math.nan  # KL(s) on the probe; nan where it was not measured
    passes: int = 0


class Steps(Protocol):
    """A rule for the length of a step. The caller moves the weights: theta <- theta - s d."""

    def __call__(self, direction: Direction, noise: Callable[[], float] | None = None) -> Step:
        """s for this direction at the model's present weights; noise() is the noise's own KL at s = 1."""

    def diagnose(self) -> dict[str, float]:
        """Numbers of the last step for the record."""

    def state_dict(self) -> dict[str, float | None]: ...

    def load_state_dict(self, state: Mapping[str, float | None]) -> None: ...


class Probe:
    """Fixed public images, and how far a change of the weights moves the model's predictions on them.

    x (n, ...) as the model takes it, n >= 16. The model runs in evaluation mode (no dropout) and without gradients.
    """

    def __init__(self, model: nn.Module, x: Tensor):
        if len(x) < SMALLEST_PROBE:
            raise UsageError(f"the probe has {len(x)} images: a step's KL divergence needs at least {SMALLEST_PROBE} "
                             "public images")
        self.model, self.x = model, x
        logits = fits(model, x[:2])
        if logits.dim() != 2 or logits.shape[1] < 2:
            raise UsageError(f"the model's output on the probe has shape {tuple(logits.shape)}: a KL divergence of "
                             "predictions needs (images, classes)")

    def along(self, direction: Direction) -> Callable[[float], float]:
        """s -> KL(s) at the model's present weights; inf where the predictions are not finite."""
        weights = {name: p.detach() for name, p in self.model.named_parameters() if name in direction}
        here = self._log_p({})
        if not here.isfinite().all():
            raise FloatingPointError("the model's output on the probe is not finite: training has diverged")

        def kl(s: float) -> float:
            there = self._log_p({name: w.add(direction[name], alpha=-s) for name, w in weights.items()})
            value = float((here.exp() * (here - there)).sum(1).mean())
            return max(value, 0.0) if math.isfinite(value) else math.inf

        return kl

    def relative(self, direction: Direction) -> float:
        """||theta|| / ||d|| over the parameters that move; inf for a direction of zeros."""
        named = dict(self.model.named_parameters())
        d, theta = (math.sqrt(sum(float(t.detach().double().square().sum()) for t in ts))
                    for ts in (direction.values(), [named[name] for name in direction]))
        if not math.isfinite(d):
            raise FloatingPointError("the release is not finite: training has diverged")
        return math.inf if d == 0 else (theta or 1.0) / d

    @torch.no_grad()
    def _log_p(self, weights: Mapping[str, Tensor]) -> Tensor:
        with evaluating(self.model):
            return functional_call(self.model, dict(weights), (self.x,)).double().log_softmax(1)


def search(kl: Callable[[float], float], start: float, kappa: float, limit: float = math.inf) -> Step:
    """The s <= limit with KL(s) = kappa within 20 %, from `start`, by at most three evaluations of KL.

    Where that many do not suffice: the best s tried with KL(s) <= 1.5 kappa, or the shortest one scaled down.
    """
    s, tried = min(start, limit), []
    for n in range(1, PASSES + 1):
        found = kl(s)
        tried.append((s, found))
        if found <= (1 + WITHIN) * kappa and (found >= (1 - WITHIN) * kappa or s >= limit):
            return Step(s, found, n)
        s = min(limit, s * _factor(kappa, found, _power(*tried[-2:], least=0.5 if found < kappa else 1.0)))
    good = [(s, found) for s, found in tried if found <= MOST * kappa]
    if good:
        return Step(*min(good, key=lambda at: (abs(math.log(max(at[1], RESOLVED) / kappa)), -at[0])), PASSES)
    s, found = min(tried)
    return Step(s * kappa / found, math.nan, PASSES)  # 0 where even the shortest made the predictions infinite


def _factor(kappa: float, found: float, power: float = 2.0) -> float:
    """The correction of s: (kappa / KL)^(1/power)."""
    if found < RESOLVED:
        return GROWTH
    return 0.1 if math.isinf(found) else min((kappa / found) ** (1 / power), GROWTH)


def _power(first: tuple[float, float], second: tuple[float, float] | None = None, *, least: float) -> float:
    """The power of s with which KL(s) grows: 2, or after two passes what they show, from `least` to 4.

    KL(s) grows slowly where predictions are saturated, and faster again at shorter steps: on the way down, at least 1.
    """
    if second is None or first[0] == second[0] or not all(RESOLVED < at[1] < math.inf for at in (first, second)):
        return 2.0
    return min(max(math.log(second[1] / first[1]) / math.log(second[0] / first[0]), least), 4.0)


class Rate:
    """s = eta; with `kl_radius`, steps that change the predictions on the probe by more are shortened to it.

    Each of them is a function of the release and of public data only: see the top of this module.
    """

    def __init__(self, eta: float, kl_radius: float | None = None, probe: Probe | None = None):
        _positive("eta", eta)
        if kl_radius is not None:
            _positive("kl_radius", kl_radius)
            if probe is None:
                raise UsageError("kl_radius needs a probe: public images on which a step's KL divergence is measured")
        self.eta, self.kl_radius, self.probe = eta, kl_radius, probe
        self.last = Step(eta)

    def __call__(self, direction: Direction, noise: Callable[[], float] | None = None) -> Step:
        if self.kl_radius is not None:
            still = math.isinf(self.probe.relative(direction))
            self.last = Step(self.eta, 0.0) if still else search(
                self.probe.along(direction), self.eta, self.kl_radius, limit=self.eta)
        return self.last

    def diagnose(self) -> dict[str, float]:
        return {} if self.kl_radius is None else {"s": self.last.s, "kl": self.last.kl}

    def state_dict(self) -> dict[str, float | None]:
        return {}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Nothing is carried from step to step."""


class KLBudget:
    """s with KL(s) = K / T on the probe, and the noise's own KL at most K_noise / T. See the top of this module.

    K        nats that the whole run may move the predictions by, step by step
    T        steps of the run
    probe    public images, fixed
    K_noise  nats of it that may be noise; None for no such bound
    """

    def __init__(self, K: float, T: int, probe: Probe, K_noise: float | None = K_NOISE_DEFAULT):
        _positive("the KL budget K", K)
        if K_noise is not None:
            _positive("the noise's KL budget K_noise", K_noise)
        if isinstance(T, bool) or not isinstance(T, int) or T < 1:
            raise UsageError(f"T is {T!r}: a KL budget is divided among T >= 1 steps")
        self.K, self.T, self.probe, self.K_noise = K, T, probe, K_noise
        self.start: float | None = None  # where the next search starts: the last step's s
        self.last: Step | None = None

    @property
    def kappa(self) -> float:
        """KL(s) of each step."""
        return self.K / self.T

    def limit(self, noise: float) -> float:
        """The s at which the noise's own KL, s^2 noise, is K_noise / T."""
        return math.inf if self.K_noise is None or noise <= 0 else math.sqrt(self.K_noise / self.T / noise)

    def __call__(self, direction: Direction, noise: Callable[[], float] | None = None) -> Step:
        ratio = self.probe.relative(direction)
        if math.isinf(ratio):  # no samples and no noise: there is nowhere to go
            self.last = Step(self.start or 0.0, 0.0)
            return self.last
        kl, limit, extra = self.probe.along(direction), math.inf, 0
        if self.K_noise is not None:
            if noise is None:
                raise UsageError("K_noise bounds the noise's own KL divergence, which this method does not know: pass "
                                 "K_noise=None")
            limit = self.limit(noise())
        if self.start is None:
            tiny, extra = TINY * ratio, 1
            found = kl(tiny)
            self.start = tiny * (math.sqrt(self.kappa / found) if RESOLVED < found < math.inf else
                                 _factor(self.kappa, found))
        step = search(kl, self.start, self.kappa, limit)
        self.last = Step(step.s, step.kl, step.passes + extra)
        self.start = step.s if step.s > 0 else self.start / 100
        return self.last

    def diagnose(self) -> dict[str, float]:
        return {} if self.last is None else {"s": self.last.s, "kl": self.last.kl}

    def state_dict(self) -> dict[str, float | None]:
        return {"s": self.start}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        if state["s"] is not None:
            _positive("s of a saved KL budget", state["s"])
        self.start = state["s"]


@torch.no_grad()
def fits(model: nn.Module, x: Tensor) -> Tensor:
    """The model's output on x; an error of one line where images of this shape do not fit it."""
    try:
        with evaluating(model):
            return model(x)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"public images of shape {tuple(x.shape[1:])} do not fit the model: "
                         f"{str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this block every module is in evaluation mode; afterwards in its own again."""
    training = [m for m in model.modules() if m.training]
    try:
        for m in training:
            m.training = False
        yield
    finally:
        for m in training:
            m.training = True


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise UsageError(f"{name} is {value!r}: it must be a positive number")

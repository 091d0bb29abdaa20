"""The methods of the paper's tables by name: how each is built around the one mechanism.

A method fixes a geometry before each batch is drawn (`prepare`), and says what the mechanism clips to and how much
noise it adds. Adding one is an entry in `BUILDERS`, a geometry, and its row in `config.METHODS`.

    name                   releases a step                        noise multiplier calibrated to
    dp-sgd, dp-sgd-pt      gradient sum, sensitivity C            (epsilon, delta)
    adadps                 scaled gradient sum, C                 (epsilon, delta)
    gep                    embedding C0 and residual C1, jointly  (epsilon, delta), noise sqrt(2) larger on each
    dp-ngd and its arms    whitened gradient sum, C               (epsilon, delta)
    dp-ngd-private-f       as dp-ngd; every T_cur steps also      (1-f)(epsilon, delta) for the gradients and
                           K-FAC factors, 2 channels              f (epsilon, delta) for the factors, PRV each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dpngd import privacy
from dpngd.baselines import Diagonal, Subspace, principal_basis, second_moment
from dpngd.clamping import Dynamic, Fixed, NoFloor, Schedule
from dpngd.config import RunConfig
from dpngd.curvature import KFAC, LayerCurvature
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import PerSample
from dpngd.mechanism import GaussianMechanism, Geometry
from dpngd.private_curvature import PrivateKFAC
from dpngd.streams import stream


@dataclass
class Setting:
    """What a method may use. `draw` gives a fresh Poisson batch of the private set as micro-batches (x, y)."""

    config: RunConfig
    per_sample: PerSample
    q: float
    N: int
    public: Tensor | None
    draw: Callable[[], Iterable[tuple[Tensor, Tensor]]]

    def calibrate(self, budget: privacy.Budget, T: int) -> float:
        return privacy.calibrate(budget.epsilon, budget.delta, self.q, T, N=self.N)


@dataclass(frozen=True)
class Spend:
    """One part of the budget: what it is for, and the releases that use it up."""

    purpose: str
    epsilon: float
    delta: float
    sigma: float
    releases: int


@dataclass
class Method:
    """A geometry, the mechanism's numbers, and what to do before the batch of step t is drawn."""

    geometry: Geometry
    mechanism: GaussianMechanism
    spends: list[Spend]
    prepare: Callable[[int], None] = lambda t: None
    diagnose: Callable[[], dict] = field(default=dict)


def build(setting: Setting) -> Method:
    """The method that the config names."""
    return BUILDERS[setting.config.method](setting)


def _gradient_spend(setting: Setting, budget: privacy.Budget | None = None) -> Spend:
    c = setting.config
    budget = budget or privacy.Budget(c.epsilon, c.delta)
    return Spend("gradients", *budget, setting.calibrate(budget, c.T), c.T)


def _single(setting: Setting, geometry: Geometry, spend: Spend, **extra) -> Method:
    mechanism = GaussianMechanism((setting.config.C,), spend.sigma, setting.config.B)
    return Method(geometry, mechanism, [spend], **extra)


def euclidean(setting: Setting) -> Method:
    """DP-SGD: clip and noise in parameter space."""
    return _single(setting, Euclidean(), _gradient_spend(setting))


def adadps(setting: Setting) -> Method:
    """Gradients divided by the root of their public second moment before clipping."""
    c, geometry = setting.config, Diagonal(setting.config.adadps_e)
    labels, plain = stream(c.seed, "labels"), PerSample(setting.per_sample.model, check=False)

    def prepare(t: int) -> None:
        if t % c.T_cur == 0:
            y = _sampled_labels(plain, setting.public, labels)
            geometry.set(second_moment(plain, setting.public, y))

    return _single(setting, geometry, _gradient_spend(setting), prepare=prepare)


def gep(setting: Setting) -> Method:
    """Embedding in a public gradient subspace, and the residual, each clipped and noised."""
    c, spend = setting.config, _gradient_spend(setting)
    plain = PerSample(setting.per_sample.model, check=False)
    geometry = Subspace(setting.per_sample.zeros())
    with torch.no_grad():
        classes = plain.model(setting.public[:1]).shape[1]
    y = torch.randint(classes, (len(setting.public),), generator=stream(c.seed, "labels"))  # drawn once, as theirs

    def prepare(t: int) -> None:
        if t % c.T_cur == 0:
            geometry.set(*principal_basis(plain, setting.public, y, c.gep_directions))

    return Method(geometry, GaussianMechanism((c.C0, c.C1), spend.sigma, c.B), [spend], prepare)


def natural(setting: Setting, *, left: float = -0.5, right: float = -0.5, clamp: str = "product",
            floor: str = "dynamic", labels: str = "sampled", private: float = 0.0) -> Method:
    """DP-NGD (Algorithm 2) and its arms: which powers of F~ stand before and after, how it is clamped, whose data."""
    c = setting.config
    geometry, schedule = Kronecker(left, right, clamp), _schedule(c, floor)
    if private:
        share, rest = privacy.split(c.epsilon, c.delta, private)
        releases = math.ceil(c.T / c.T_cur)
        spends = [_gradient_spend(setting, rest),
                  Spend("curvature", *share, setting.calibrate(share, releases), releases)]
        noisy = PrivateKFAC(PerSample(setting.per_sample.model, check=False), c.curvature_C, spends[1].sigma, c.B,
                            stream(c.seed, "curvature-noise"))

        def estimate() -> list[LayerCurvature]:
            return noisy(setting.draw())
    else:
        spends = [_gradient_spend(setting)]
        generator = stream(c.seed, "labels") if labels != "exact" else None
        estimate = KFAC(setting.per_sample.model, setting.public, labels=labels, generator=generator)
    cache: list[LayerCurvature] = []

    def prepare(t: int) -> None:
        if t % c.T_cur == 0:
            cache[:] = [estimate()]
        geometry.set(cache[0], schedule(t))

    def diagnose() -> dict:
        return {"lambda_t": geometry.lambda_t, "clamped_share": geometry.clamped_share()}

    mechanism = GaussianMechanism((c.C,), spends[0].sigma, c.B)
    return Method(geometry, mechanism, spends, prepare, diagnose)


def _schedule(c: RunConfig, floor: str) -> Schedule:
    if floor == "none":
        return NoFloor()
    return Fixed(c.lambda_safe) if floor == "fixed" else Dynamic(c.lambda_safe, c.lambda_base, c.T, c.T1, c.p)


def _sampled_labels(per_sample: PerSample, x: Tensor, generator: torch.Generator) -> Tensor:
    """y ~ p_theta(. | x), the labels of DP-NGD's Fisher, for baselines that need public gradients."""
    with torch.no_grad():
        p = torch.cat([per_sample.model(part).softmax(1) for part in x.split(500)])
    return torch.multinomial(p, 1, generator=generator)[:, 0]


BUILDERS: dict[str, Callable[[Setting], Method]] = {
    "dp-sgd": euclidean,
    "dp-sgd-pt": euclidean,  # it differs in where it starts: see train.initial_model
    "adadps": adadps,
    "gep": gep,
    "dp-ngd": natural,
    "dp-ngd-fixed-floor": partial(natural, floor="fixed"),
    "dp-ngd-no-floor": partial(natural, floor="none"),
    "dp-ngd-factor-clamp": partial(natural, clamp="factor"),
    "dp-ngd-pre": partial(natural, left=0.0, right=-1.0),
    "dp-ngd-post": partial(natural, left=-1.0, right=0.0),
    "dp-ngd-one-sided": partial(natural, right=0.0),
    "dp-ngd-labels-exact": partial(natural, labels="exact"),
    "dp-ngd-labels-random": partial(natural, labels="random"),
    "dp-ngd-private-20": partial(natural, private=0.2),
    "dp-ngd-private-50": partial(natural, private=0.5),
}

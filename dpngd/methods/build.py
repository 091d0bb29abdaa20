"""The methods of the paper's tables by name: how each is built around the one mechanism.

A method fixes a geometry before each batch is drawn (`prepare`), and says what the mechanism clips to. Adding one is a
row of `config.METHODS`, an entry of `BUILDERS`, and a geometry where none of those here is the right one.

    name                   releases a step                           noise multiplier calibrated to
    dp-sgd, dp-sgd-pt      gradient sum, sensitivity C               (epsilon, delta)
    adadps                 scaled gradient sum, C                    (epsilon, delta)
    gep                    embedding sum C0 and residual sum C1      (epsilon, delta), noise sqrt(2) larger on each
    dp-ngd and its arms    gradient sum under F~'s power, C          (epsilon, delta)
    dp-ngd-private-f       as dp-ngd; every T_cur steps also         (1-f)(epsilon, delta) for the gradients and
                           K-FAC factors, 1 and curvature_C          f (epsilon, delta) for the factors, PRV each

The guarantee of a method stands in the docstring of its builder. All are for adding or removing one sample, under
Poisson sampling at rate q = B/N, and all rest on the mechanism's own (see `mechanism`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpngd import privacy
from dpngd.clamping import DynamicFloor, FixedFloor, Floor, NoFloor
from dpngd.curvature import KFAC
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import PerSample
from dpngd.mechanism import GaussianMechanism, Geometry
from dpngd.methods.baselines import Diagonal, Subspace, check_memory, principal_basis, sampled_labels, second_moment
from dpngd.methods.private_curvature import PrivateKFAC
from dpngd.natural import Estimate, Natural
from dpngd.noise import seeded_noise, stream
from dpngd.privacy import Spend
from dpngd.training.config import RunConfig

CURVATURE_SHARE = {"dp-ngd-private-20": 0.2, "dp-ngd-private-50": 0.5}
"""The fraction f of epsilon and of delta that a private curvature costs."""


def plan(config: RunConfig, q: float, N: int) -> list[Spend]:
    """What the budget of a run pays for (`privacy.plan`, with the method's share). Needs no data, only q and N."""
    share = CURVATURE_SHARE.get(config.method, 0.0)
    return privacy.plan(config.epsilon, config.delta, q, config.T, N, curvature_share=share, T_cur=config.T_cur or 1)


@dataclass
class Setting:
    """What a method may use. `draw` gives a Poisson batch of the private set for releases of the method's own."""

    config: RunConfig
    per_sample: PerSample
    spends: list[Spend]
    shape: tuple[int, ...]  # (C, H, W) of an image
    public: Tensor | None = None
    draw: Callable[[], Iterable[tuple[Tensor, Tensor]]] | None = None


@dataclass
class Method:
    """A geometry, the mechanism's numbers, and what to do before the batch of step t is drawn."""

    geometry: Geometry
    mechanism: GaussianMechanism
    prepare: Callable[[int], None] = lambda t: None
    diagnose: Callable[[], dict[str, float]] = dict


def build(setting: Setting) -> Method:
    """The method that the config names."""
    return BUILDERS[setting.config.method](setting)


def euclidean(setting: Setting) -> Method:
    """DP-SGD: clip and add noise in parameter space. DP-SGD-PT is the same from another start (`train.initial_model`).

    Guarantee: T releases of the gradient sum, sensitivity C, noise sigma C; (epsilon, delta) by PRV. The start of
    DP-SGD-PT depends on public images only, so it costs nothing.
    """
    return Method(Euclidean(), _mechanism(setting))


def adadps(setting: Setting) -> Method:
    """AdaDPS: gradients divided by the root of their public second moment before clipping; never mapped back.

    Guarantee: T releases of the sum of D^-1 g, sensitivity C, noise sigma C; (epsilon, delta) by PRV. D is a function
    of public images, and of weights that were released before: it costs nothing.
    """
    c, geometry = setting.config, Diagonal(setting.config.adadps_e)
    plain, labels = PerSample(setting.per_sample.model, check=False), stream(c.seed, "labels")

    def refresh() -> None:
        geometry.set(second_moment(plain, setting.public, sampled_labels(plain.model, setting.public, labels)))

    return Method(geometry, _mechanism(setting), _every(c.T_cur, refresh))


def gep(setting: Setting) -> Method:
    """GEP: the embedding in a public gradient subspace, and the residual, each clipped and noised.

    Guarantee: T releases of two channels, embedding sum with sensitivity C0 and residual sum with sensitivity C1. Both
    are functions of one sample of the batch, so scaled by 1/C0 and 1/C1 they move by sqrt(2) together: the noise is
    sqrt(2) sigma C0 and sqrt(2) sigma C1, and (epsilon, delta) follows by PRV as for one channel. (The published code
    counts them as two subsampled releases with noise sigma each.) The subspace is public and costs nothing.
    """
    c, model = setting.config, setting.per_sample.model
    plain, geometry = PerSample(model, check=False), Subspace(setting.per_sample.zeros())
    check_memory(sum(z.numel() for z in geometry.like), len(setting.public), c.gep_directions)
    with torch.no_grad():
        classes = model(setting.public[:1]).shape[1]
    y = torch.randint(classes, (len(setting.public),), generator=stream(c.seed, "labels"))  # once, as theirs
    y = y.to(setting.public.device)

    def refresh() -> None:
        geometry.set(*principal_basis(plain, setting.public, y, c.gep_directions))

    return Method(geometry, _mechanism(setting, c.C0, c.C1), _every(c.T_cur, refresh))


def natural(setting: Setting, *, left: float = -0.5, right: float = -0.5, clamp: str = "product",
            floor: str = "dynamic", labels: str = "sampled") -> Method:
    """DP-NGD (Algorithm 2) and its public arms: the powers of F~ before and after, how F is clamped, whose labels.

    Guarantee: T releases of the sum of F~^left g, sensitivity C, noise sigma C; (epsilon, delta) by PRV. F comes from
    public images at weights that were released before, and lambda_t is a function of t: both cost nothing. F~^right
    comes after the noise and is post-processing. Gradients are float32, and their last bits depend on the company in
    a micro-batch. That reaches the release times the root of F~'s condition number: far below 1e-5 C with a floor, but
    not without one (`dp-ngd-no-floor`, where it is up to 1e6), whose guarantee is that of exact arithmetic only.
    """
    c = setting.config
    generator = None if labels == "exact" else stream(c.seed, "labels")
    estimate = KFAC(setting.per_sample.model, setting.public, labels=labels, generator=generator)
    return _natural(setting, Kronecker(left, right, clamp), _floor(c, floor), estimate)


def natural_private(setting: Setting) -> Method:
    """DP-NGD with curvature from the private set, paid for with a fraction f of the budget (the paper's Table 3).

    Guarantee: ceil(T / T_cur) releases of two channels (see `private_curvature`), calibrated by PRV to (f epsilon,
    f delta), and T releases of the sum of F~^-1/2 g, sensitivity C, calibrated by PRV to the rest. Basic composition
    makes that (epsilon, delta); the curvature is a released quantity, so whitening with it is post-processing.
    """
    c, (_, paid) = setting.config, setting.spends
    private = PerSample(setting.per_sample.model, K=c.K, check=False)
    noisy = PrivateKFAC(private, setting.shape, c.curvature_C, paid.sigma, c.B, labels=stream(c.seed, "labels"),
                        noise=seeded_noise(c.seed, "curvature-noise"))
    return _natural(setting, Kronecker(), _floor(c, "dynamic"), lambda: noisy(setting.draw()))


def _mechanism(setting: Setting, *clips: float) -> GaussianMechanism:
    c = setting.config
    return GaussianMechanism(clips or (c.C,), setting.spends[0].sigma, c.B)


def _every(n: int, refresh: Callable[[], None]) -> Callable[[int], None]:
    return lambda t: refresh() if t % n == 0 else None


def _natural(setting: Setting, geometry: Kronecker, floor: Floor, estimate: Estimate) -> Method:
    natural = Natural(estimate, floor, setting.config.T_cur, geometry=geometry,
                      dtype=setting.per_sample.zeros()[0].dtype)
    return Method(natural.geometry, _mechanism(setting), natural.prepare, natural.diagnose)


def _floor(c: RunConfig, floor: str) -> Floor:
    if floor == "none":
        return NoFloor()
    return FixedFloor(c.lambda_safe) if floor == "fixed" else DynamicFloor(c.lambda_safe, c.lambda_base, c.T, c.T1, c.p)


BUILDERS: dict[str, Callable[[Setting], Method]] = {
    "dp-sgd": euclidean,
    "dp-sgd-pt": euclidean,
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
    "dp-ngd-private-20": natural_private,
    "dp-ngd-private-50": natural_private,
}

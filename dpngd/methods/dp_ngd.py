"""DP-NGD (Algorithm 2) and its arms with public curvature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dpngd.clamping import AUTO, DynamicFloor, FixedFloor, Floor, NoFloor, dynamic_floor, eta_ngd
from dpngd.curvature import KFAC, LayerCurvature
from dpngd.geometry import Kronecker
from dpngd.gradients import PerSample
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import Built, Setting, steps_of
from dpngd.natural import Estimator, Natural, public_clip
from dpngd.noise import stream


def build(setting: Setting) -> Built:
    """L = F~^left, R = F~^right with F from public images; the method's entry says the powers, clamp and labels.

    Guarantee: T releases of the sum of F~^left g, sensitivity C, noise sigma C; (epsilon, delta) by PRV. F comes from
    public images at weights that were released before, and lambda_t is a function of t: both cost nothing. F~^right
    comes after the noise and is post-processing. Gradients are float32, and their last bits depend on the company in
    a micro-batch. That reaches the release times the root of F~'s condition number: far below 1e-5 C with a floor, but
    not without one (`dp-ngd-no-floor`, where it is up to 1e6), whose guarantee is that of exact arithmetic only.
    """
    labels = setting.method.labels
    generator = None if labels == "exact" else stream(setting.config.seed, "labels")
    # Directions below the floor need no eigenvectors; without a floor, or where each factor has its own, they do.
    span = setting.method.clamp == "product" and setting.method.floor != "none"
    kfac = KFAC(setting.per_sample.model, setting.public, labels=labels, generator=generator, span=span,
                least=lowest(floor_of(setting.method.floor, setting.config)), group=setting.group)
    return whitened(setting, kfac, {} if generator is None else {"labels": generator})


def build_auto(setting: Setting) -> Built:
    """The same with lambda_safe by rank, lambda_base = lambda_safe / 4 and eta = eta_sgd C_sgd sqrt(lambda_safe) / C.

    Guarantee: T releases of the sum of F~^-1/2 g, sensitivity C, noise sigma C; (epsilon, delta) by PRV. The floor is
    found once, from F on public images at theta_0, before any private sample is drawn: it and eta are constants of the
    run, and the rate is post-processing. For the rest, see `build`.
    """
    c = setting.config
    labels = stream(c.seed, "labels")
    kfac = KFAC(setting.per_sample.model, setting.public, labels=setting.method.labels, generator=labels)
    F = kfac()
    floor = dynamic_floor(AUTO, c.T, T1=c.T1, p=c.p, curvature=lambda: F, share=c.floor_rank)
    built = whitened(setting, kfac, {"labels": labels}, floor, start=F)
    eta = eta_ngd(floor.lambda_safe, c.C, c.eta_sgd, c.C_sgd)
    clamped = built.diagnose
    return replace(built, steps=steps_of(setting, eta), diagnose=lambda: {**clamped(), "eta": eta})


def build_kl(setting: Setting) -> Built:
    """The same maps; floor and C from public images, and a KL budget in place of a rate.

    Guarantee: T releases of the sum of F~^left g, sensitivity C, noise sigma C; (epsilon, delta) by PRV. The floor and
    C are found once, from public images at theta_0, before any private sample is drawn: they are constants of the run.
    The length of a step is post-processing (`dpngd.steps`). For the rest, see `build`.
    """
    m, c, model = setting.method, setting.config, setting.per_sample.model
    labels = stream(c.seed, "labels")
    kfac = KFAC(model, setting.public, labels=m.labels, generator=labels, span=True, group=setting.group)
    F = kfac()
    floor = (NoFloor() if m.floor == "none" else
             dynamic_floor(AUTO, c.T, T1=c.T1, p=c.p, curvature=lambda: F, share=c.floor_rank))
    kfac.least = lowest(floor)  # from here on; the floor was found among all eigenvalues
    dtype = setting.per_sample.zeros()[0].dtype
    natural = Natural(kfac, floor, c.T_cur, geometry=Kronecker(m.left, m.right, m.clamp), dtype=dtype, start=F)
    natural.geometry.set(F, floor(0), dtype)
    C = public_clip(PerSample(model, check=False), natural.geometry, setting.public, c.clip_ratio,
                    stream(c.seed, "clip"))
    mechanism = GaussianMechanism((C,), setting.spends[0].sigma, c.B)
    diagnose = dict if m.left == m.right == 0 else natural.diagnose  # F is no part of a control without whitening
    return Built(natural.geometry, mechanism, natural.prepare, diagnose, noise_kl(mechanism, natural),
                 held={"natural": natural, "labels": labels})


def noise_kl(mechanism: GaussianMechanism, natural: Natural) -> Callable[[], float]:
    """The KL divergence that a step's noise causes at s = 1: (sigma C / B)^2 / 2 tr(R F R)."""
    return lambda: (mechanism.noise_std[0] / mechanism.B) ** 2 / 2 * natural.noise_energy()


def whitened(setting: Setting, estimate: Estimator, held: dict[str, Any], floor: Floor | None = None,
             start: list[LayerCurvature] | None = None) -> Built:
    """The method's geometry around an estimate of F, which draws from the sources in `held`.

    `floor` is the config's unless given, and `start` is F at theta_0 where it was estimated already.
    """
    m, c = setting.method, setting.config
    natural = Natural(estimate, floor or floor_of(m.floor, c), c.T_cur, geometry=Kronecker(m.left, m.right, m.clamp),
                      dtype=setting.per_sample.zeros()[0].dtype, start=start)
    mechanism = GaussianMechanism((c.C,), setting.spends[0].sigma, c.B)
    return Built(natural.geometry, mechanism, natural.prepare, natural.diagnose, held={"natural": natural, **held})


def floor_of(kind: str, c: Any) -> Floor:
    """lambda_t of a run: the schedule of the method's kind with the config's numbers."""
    if kind == "none":
        return NoFloor()
    return FixedFloor(c.lambda_safe) if kind == "fixed" else DynamicFloor(c.lambda_safe, c.lambda_base, c.T, c.T1, c.p)


def lowest(floor: Floor) -> float:
    """The least lambda_t of a run."""
    if isinstance(floor, DynamicFloor):
        return floor.lambda_base
    return floor.lambda_safe if isinstance(floor, FixedFloor) else floor.tiny

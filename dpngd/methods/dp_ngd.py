"""DP-NGD (Algorithm 2) and its arms with public curvature."""

from __future__ import annotations

from typing import Any

from dpngd.clamping import DynamicFloor, FixedFloor, Floor, NoFloor
from dpngd.curvature import KFAC
from dpngd.geometry import Kronecker
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import Built, Setting
from dpngd.natural import Estimate, Natural
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
    return whitened(setting, KFAC(setting.per_sample.model, setting.public, labels=labels, generator=generator))


def whitened(setting: Setting, estimate: Estimate) -> Built:
    """The method's geometry around an estimate of F."""
    m, c = setting.method, setting.config
    natural = Natural(estimate, floor_of(m.floor, c), c.T_cur, geometry=Kronecker(m.left, m.right, m.clamp),
                      dtype=setting.per_sample.zeros()[0].dtype)
    mechanism = GaussianMechanism((c.C,), setting.spends[0].sigma, c.B)
    return Built(natural.geometry, mechanism, natural.prepare, natural.diagnose)


def floor_of(kind: str, c: Any) -> Floor:
    """lambda_t of a run: the schedule of the method's kind with the config's numbers."""
    if kind == "none":
        return NoFloor()
    return FixedFloor(c.lambda_safe) if kind == "fixed" else DynamicFloor(c.lambda_safe, c.lambda_base, c.T, c.T1, c.p)

"""DP-SGD, and DP-SGD-PT, which is the same from another start."""

from __future__ import annotations

from dpngd.geometry import Euclidean
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import Built, Setting


def build(setting: Setting) -> Built:
    """Clip and add noise in parameter space: L = R = I.

    Guarantee: T releases of the gradient sum, sensitivity C, noise sigma C; (epsilon, delta) by PRV. The start of
    DP-SGD-PT depends on public images only, so it costs nothing.
    """
    c = setting.config
    return Built(Euclidean(), GaussianMechanism((c.C,), setting.spends[0].sigma, c.B), held={})

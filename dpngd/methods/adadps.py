"""AdaDPS (Li et al., 2022): gradients scaled entry by entry by the root of their public second moment, then clipped.

    symbol  shape   meaning
    v       (d,)    E[g^2] over public samples, one entry per parameter
    L       (d,)    1 / (sqrt(v) + e), entry by entry;  R = I: it never maps back

Theirs squares minibatch means once per epoch; here v is the per-sample second moment, refreshed like DP-NGD's curvature
and with the same labels: its strong version.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpngd.curvature import sampled_labels
from dpngd.geometry import SUMMED_ABOVE
from dpngd.gradients import Blocks, PerSample, SampleGradients, micro_batches
from dpngd.layers.forms import Dense
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import Built, Setting, every
from dpngd.noise import stream


def build(setting: Setting) -> Built:
    """Gradients divided by the root of their public second moment before clipping.

    Guarantee: T releases of the sum of D^-1 g, D = sqrt(v) + e, sensitivity C, noise sigma C; (epsilon, delta) by PRV.
    D is a function of public images, and of weights that were released before: it costs nothing.
    """
    c, geometry = setting.config, Diagonal(setting.config.adadps_e)
    plain, labels = PerSample(setting.per_sample.model, check=False), stream(c.seed, "labels")

    def refresh() -> None:
        geometry.set(second_moment(plain, setting.public, sampled_labels(plain.model, setting.public, labels)))

    return Built(geometry, GaussianMechanism((c.C,), setting.spends[0].sigma, c.B), every(c.T_cur, refresh),
                 held={"scale": geometry, "labels": labels})


class Diagonal:
    """L = 1 / (sqrt(v) + e) entry by entry, R = I."""

    def __init__(self, e: float):
        self.e = e
        self.scale: Blocks = []

    def set(self, second_moment: Blocks) -> None:
        """Fix L from public E[g^2]."""
        self.scale = [1 / (v.sqrt() + self.e) for v in second_moment]

    def state_dict(self) -> dict[str, Blocks]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Blocks]) -> None:
        self.scale = state["scale"]

    def sq_norms(self, g: SampleGradients) -> tuple[Tensor, Tensor]:
        norms = torch.stack([x.diagonal_sq_norms(s.square()) for x, s in zip(g.layers, self.scale, strict=True)])
        cancels = [x.sq_norms() < SUMMED_ABOVE * x.terms() for x in g.layers if not isinstance(x, Dense)]
        fragile = torch.stack(cancels).any(0) if cancels else norms.new_zeros(len(g), dtype=torch.bool)
        if fragile.any():  # positions that cancel: what is left is float32's rounding
            exact = g.select(fragile.nonzero()[:, 0]).layers
            norms[:, fragile] = torch.stack([x.double().diagonal_sq_norms(s.double().square()) for x, s in
                                                  zip(exact, self.scale, strict=True)]).to(norms.dtype)
        return norms.sum(0).unsqueeze(0), fragile

    def into(self, sums: list[Blocks]) -> list[Blocks]:
        return [[s * u for s, u in zip(self.scale, blocks, strict=True)] for blocks in sums]

    def back(self, releases: list[Blocks]) -> Blocks:
        return releases[0]


def second_moment(per_sample: PerSample, x: Tensor, y: Tensor) -> Blocks:
    """E[g^2] over the samples x (n, ...), y (n,)."""
    total = per_sample.zeros()
    for g in micro_batches(per_sample, x, y):
        for v, layer in zip(total, g.layers, strict=True):
            v += layer.materialise().square().sum(0)
    return [v / len(y) for v in total]

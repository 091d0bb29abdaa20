"""AdaDPS (Li et al., 2022): gradients scaled entry by entry by the root of their public second moment, then clipped.

    symbol  shape   meaning
    v       (d,)    E[g^2] over public samples, one entry per parameter
    L       (d,)    1 / (sqrt(v) + e), entry by entry;  R = I: it never maps back

`adadps-kl` is an ablation of ours: this map with a KL budget (`dpngd.steps`) in place of a rate.

Theirs squares minibatch means once per epoch; here v is the per-sample second moment, refreshed like DP-NGD's curvature
and with the same labels: its strong version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpngd.clamping import by_rank
from dpngd.curvature import sampled_labels
from dpngd.geometry import SUMMED_ABOVE
from dpngd.gradients import Blocks, PerSample, SampleGradients, micro_batches
from dpngd.layers.forms import Dense
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import Built, Setting, every
from dpngd.natural import public_clip
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


def build_kl(setting: Setting) -> Built:
    """The same map; e and C from public images at theta_0, and a KL budget in place of a rate.

    e is the root of the moment above which a share `floor_rank` of all entries lie: as DP-NGD's floor by rank, on the
    diagonal.

    Guarantee: T releases as those of `build`, sensitivity C, noise sigma C; (epsilon, delta) by PRV. e and C are found
    before any private sample is drawn, and the length of a step is post-processing (`dpngd.steps`).
    """
    c, labels = setting.config, stream(setting.config.seed, "labels")
    plain = PerSample(setting.per_sample.model, check=False)

    def moment() -> Blocks:
        return second_moment(plain, setting.public, sampled_labels(plain.model, setting.public, labels))

    first = moment()
    geometry = Diagonal(by_rank(torch.cat([v.flatten() for v in first]), c.floor_rank) ** 0.5)
    geometry.set(first)
    C = public_clip(plain, geometry, setting.public, c.clip_ratio, stream(c.seed, "clip"))
    mechanism = GaussianMechanism((C,), setting.spends[0].sigma, c.B)
    return Built(geometry, mechanism, every(c.T_cur, lambda: geometry.set(moment())),
                 noise_kl=lambda: (mechanism.noise_std[0] / c.B) ** 2 / 2 * geometry.trace,
                 held={"scale": geometry, "labels": labels})


class Diagonal:
    """L = 1 / (sqrt(v) + e) entry by entry, R = I."""

    def __init__(self, e: float):
        self.e = e
        self.scale: Blocks = []
        self.trace = 0.0  # of F, whose diagonal v is

    def set(self, second_moment: Blocks) -> None:
        """Fix L from public E[g^2]."""
        self.scale = [1 / (v.sqrt() + self.e) for v in second_moment]
        self.trace = float(sum(v.double().sum() for v in second_moment))

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "trace": self.trace}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.trace = state["scale"], state["trace"]

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

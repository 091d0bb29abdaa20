"""Theorem 1, the KL-DP duality and the safety bound, measured on the small network with the package's own mechanism.

Ours is compared with the dense formulas of the paper: full rotations by K-FAC's eigenvectors, in float64, which share
nothing with the low-rank shortcut of `dpngd.geometry`. `rules.Theory` holds the numbers and decides; notebook 00
shows them.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from dpngd import privacy
from dpngd.clamping import eta_ngd
from dpngd.curvature import KFAC, LayerCurvature
from dpngd.data import load_private, load_public
from dpngd.geometry import Kronecker
from dpngd.gradients import Blocks, PerSample, SampleGradients
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import METHODS, spends_of
from dpngd.noise import seeded_noise, stream
from dpngd.suite.profiles import Profile, largest_norm
from dpngd.suite.rules import Chi, Theory
from dpngd.training import models
from dpngd.training.recipe import to_float

BATCH, PUBLIC, DRAWS, BINS = 64, 200, 40, 12
C, SIGMA, ETA_SGD, FLOOR = 1.0, 1.0, 2.0, 0.05


class Example:
    """A network, the gradients of one batch of digits, and K-FAC's curvature from patches of photographs."""

    def __init__(self, seed: int):
        private = load_private("digits", seed=seed)
        public = load_public("photos", PUBLIC, seed=seed, shape=tuple(private.x_train.shape[1:]))
        self.model = models.build("small", classes=private.classes, in_channels=private.x_train.shape[1],
                                  size=private.x_train.shape[2], generator=stream(seed, "weights"))
        self.per_sample = PerSample(self.model)
        self.x_public = to_float(public.x)
        self.F = KFAC(self.model, self.x_public, generator=stream(seed, "labels"))()
        self.g: SampleGradients = self.per_sample(to_float(private.x_train[:BATCH]), private.y_train[:BATCH])
        self.noise = seeded_noise(seed)
        self.d = sum(z.numel() for z in self.per_sample.zeros())

    def releases(self, floor: float, draws: int = DRAWS) -> list[Blocks]:
        """Directions (the update is -eta times one) that differ in their noise alone."""
        geometry = Kronecker()
        geometry.set(self.F, floor)
        mechanism = GaussianMechanism((C,), SIGMA, BATCH)
        return [mechanism.release([self.g], geometry, self.per_sample.zeros(), self.noise).direction
                for _ in range(draws)]

    def samples(self) -> list[Tensor]:
        """Every layer's per-sample gradients (b, R, O, I)."""
        return [layer.materialise().double() for layer in self.g.layers]

    def clip(self, floor: float, most: float = 1.0) -> Tensor:
        """c_i of the theorem, from the dense formula; at most 1, unless the bare ratio is asked for."""
        norms = sum(dense(F, g, -0.5, floor).square().flatten(1).sum(1) for F, g in zip(self.F, self.samples(),
                                                                                      strict=True)).sqrt()
        return (C / norms).clamp(max=most)


def dense(F: LayerCurvature, u: Tensor, power: float, floor: float) -> Tensor:
    """F~^power u by full rotations."""
    spectrum = F.spectrum().clamp(min=floor) ** power
    return F.Q_G @ (spectrum * (F.Q_G.mT @ u @ F.Q_A)) @ F.Q_A.mT


def theorem_1(subject: Example, floor: float = FLOOR) -> tuple[Chi, list[tuple[Chi, float, float]]]:
    """Mean and covariance of the released direction against Theorem 1 (eta = 1), in units of the predicted noise."""
    c = subject.clip(floor)
    scale = SIGMA * C / BATCH
    draws = subject.releases(floor)
    error, squares, eigenvalues = 0.0, [], []
    for F, g, *blocks in zip(subject.F, subject.samples(), *draws, strict=True):
        expected = dense(F, torch.einsum("b,broi->roi", c, g), -1.0, floor) / BATCH
        off = torch.stack([b.double() - expected for b in blocks])
        white = F.Q_G.mT @ dense(F, off, 0.5, floor) @ F.Q_A / scale  # standard normal, in eigen-coordinates
        error += float(white.mean(0).square().sum()) * len(blocks)
        squares.append(white.square().mean(0).flatten())
        eigenvalues.append(F.spectrum().clamp(min=floor).flatten())
    z, lam = torch.cat(squares), torch.cat(eigenvalues)
    edges = torch.logspace(math.log10(floor), math.log10(float(lam.max()) * 1.001), BINS, dtype=torch.float64)
    bins = [(lam <= floor * (1 + 1e-9)), *((lam > max(lo, floor * (1 + 1e-9))) & (lam <= hi)
                                           for lo, hi in itertools.pairwise(edges.tolist()))]
    rows = []
    for chosen in bins:
        count = int(chosen.sum())
        if count:
            at = float(lam[chosen].log().mean().exp())
            ratio = float(z[chosen].mean())
            rows.append((Chi(f"λ≈{at:.2g}", ratio, count * len(draws)), at, ratio * scale**2 / at))
    return Chi("mean", error / len(z), len(z)), rows


def duality(subject: Example, eta: float = 0.01, floor: float = FLOOR, samples: int = 24) -> list[dict]:
    """KL of the step that one clipped sample makes alone: by the quadratic form, and by the network's outputs.

    C is the median norm here, so that about half of the samples are clipped."""
    norms = C / subject.clip(floor, torch.inf)
    radius = float(norms.median())
    c, rows = (radius / norms).clamp(max=1.0), []
    with torch.no_grad():
        before = subject.model(subject.x_public).log_softmax(1)
    for i in range(samples):
        step = [-eta * c[i] * dense(F, g[i], -1.0, floor) for F, g in zip(subject.F, subject.samples(), strict=True)]
        quadratic = 0.5 * sum(float((u * dense(F, u, 1.0, floor)).sum()) for F, u in zip(subject.F, step, strict=True))
        subject.per_sample.add_([u.float() for u in step], 1.0)
        with torch.no_grad():
            after = subject.model(subject.x_public).log_softmax(1)
        subject.per_sample.add_([u.float() for u in step], -1.0)
        realised = float((before.exp() * (before - after)).sum(1).mean())
        rows.append({"quadratic": quadratic, "realised": realised, "bound": eta**2 * radius**2 / 2,
                     "clipped": bool(c[i] < 1)})
    return rows


def safety(subject: Example, lambda_safe: float = 0.3) -> list[dict]:
    """E||step||^2 at the floor lambda_safe and below it, at the rate that lambda_safe implies."""
    eta = eta_ngd(lambda_safe, C, ETA_SGD, 1.0)
    bound = ETA_SGD**2 * (1 + subject.d * SIGMA**2 / BATCH**2)
    rows = []
    for share in (1.0, 0.25, 0.05, 0.01):
        squared = [eta**2 * sum(float(b.double().square().sum()) for b in u)
                   for u in subject.releases(lambda_safe * share, 8)]
        rows.append({"floor": lambda_safe * share, "share": share, "squared": sum(squared) / len(squared),
                     "bound": bound, "safe": share == 1.0,
                     "slack": 5 * math.sqrt(2 / (subject.d * len(squared)))})
    return rows


def privacy_rows(profile: Profile, artifact: str = "utility_table", **given) -> list[dict]:
    """The gradients' sigma in every cell and method of a profile, and what the run spends under both accountants."""
    rows = {}
    for c in profile.configs(artifact, **given):
        if (c.data, c.epsilon, c.method) in rows:
            continue
        q = c.B / c.N
        spends = spends_of(c, q, c.N)
        # a method with a KL budget finds its C when it starts, from public images
        S = None if METHODS[c.method].kl_step else largest_norm(vars(c))
        rows[c.data, c.epsilon, c.method] = {
            "data": c.data, "epsilon": c.epsilon, "method": c.method, "N": c.N, "B": c.B, "q": q, "T": c.T,
            "delta": c.delta, "S": S, "sigma": spends[0].sigma, "spent": privacy.composed(spends, q, c.T, c.delta),
            "spent_rdp": privacy.composed(spends, q, c.T, c.delta, "rdp")}
    return list(rows.values())


def measure(profile: Profile, seeds: tuple[int, ...] = (0, 1), **given) -> Theory:
    """Everything that notebook 00 decides."""
    means, spectrum, kl, steps = [], [], [], []
    for seed in seeds:
        subject = Example(seed)
        mean, bins = theorem_1(subject)
        means.append(mean)
        spectrum += bins
        kl += duality(subject)
        steps += safety(subject)
    line = [(lam, (SIGMA * C / BATCH) ** 2 / lam) for lam in sorted(at for _, at, _ in spectrum)]
    return Theory(means, spectrum, line, kl, steps, privacy_rows(profile, **given))

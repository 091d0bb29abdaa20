"""Geometries: the linear maps L and R around the Gaussian mechanism that make it one method or another.

    update = -(eta / B) R( sum_i clip_C(L g_i) + sigma C xi )

    method                            L          R
    DP-SGD                            I          I
    DP-NGD (Algorithm 1)              F~^-1/2    F~^-1/2
    pre-conditioning clipping         I          F~^-1
    post-conditioning clipping        F~^-1      I
    one-sided whitening               F~^-1/2    I

F~ is the clamped curvature (Algorithm 2, Module 2), with eigenvalues max(lambda_G lambda_A, lambda_t). Let Q_A (I, k)
and Q_G (O, m) be the eigenvectors that some pair lifts above the floor, P = Q_G' g Q_A, and Lam the (m, k) block of
clamped eigenvalues. Off that block F~ is lambda_t times the identity, so, exactly,

    F~^p u         = lambda_t^p u + Q_G ((Lam^p - lambda_t^p) * (Q_G' u Q_A)) Q_A'
    ||F~^p g||^2   = lambda_t^2p ||g||^2 + sum( P^2 * (Lam^2p - lambda_t^2p) )

The second line subtracts. Where a sample's energy lies in steep directions, little is left, and float32 has lost it:
such samples are recomputed in float64 (see `EXACT_BELOW`). When the block is the whole matrix nothing is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpngd.curvature import LayerCurvature
from dpngd.gradients import Blocks, SampleGradients
from dpngd.layers.forms import LayerGradient, weighted_energy

EXACT_BELOW = 0.05
"""A norm below this share of what it was subtracted from is recomputed: float32's 3e-7 / 0.05 is within 1e-5."""


SUMMED_ABOVE = 1e-3
"""A norm^2 below this share of what its gradient is added up from: float32 sums would lose sqrt(1000) 6e-8 C there."""


class Euclidean:
    """L = R = I: DP-SGD."""

    def sq_norms(self, g: SampleGradients) -> tuple[Tensor, Tensor]:
        n = g.sq_norms()
        return n.unsqueeze(0), n < SUMMED_ABOVE * g.terms()

    def into(self, sums: list[Blocks]) -> list[Blocks]:
        return sums

    def back(self, releases: list[Blocks]) -> Blocks:
        return releases[0]


@dataclass(frozen=True)
class ClampedLayer:
    """F~_l as floor times identity plus a correction on the block spanned by Q_G and Q_A (see the module's top)."""

    floor: float
    Lam: Tensor  # (R, m, k), float64
    Q_G: Tensor  # (R, O, m)
    Q_A: Tensor  # (R, I, k)
    whole: bool  # the block is all of F~_l: nothing lies on the floor outside it
    Q32: tuple[Tensor, Tensor]  # Q_G and Q_A for the per-sample work

    @classmethod
    def of(cls, F: LayerCurvature, floor: float, clamp: str, dtype: torch.dtype) -> ClampedLayer:
        lA, lG = F.lambda_A, F.lambda_G
        if clamp == "factor":  # each factor on its own: no common floor, so the block is everything
            root = floor**0.5
            k, m = lA.shape[1], lG.shape[1]
            Lam = lG.clamp(min=root).unsqueeze(2) * lA.clamp(min=root).unsqueeze(1)
        else:
            k = int((lA * lG[:, :1] > floor).sum(1).max())
            m = int((lG * lA[:, :1] > floor).sum(1).max()) if k else 0
            Lam = (lG[:, :m].unsqueeze(2) * lA[:, :k].unsqueeze(1)).clamp(min=floor)
        Q_G, Q_A = F.Q_G[..., :m], F.Q_A[..., :k]
        whole = k == Q_A.shape[1] and m == Q_G.shape[1]
        return cls(floor, Lam, Q_G, Q_A, whole, (Q_G.to(dtype).contiguous(), Q_A.to(dtype).contiguous()))

    def apply(self, u: Tensor, power: float) -> Tensor:
        """F~_l^power u for u (..., R, O, I), in float64 and back."""
        v = u.double()
        if self.whole:
            P = self.Q_G.mT @ v @ self.Q_A
            return (self.Q_G @ (self.Lam**power * P) @ self.Q_A.mT).to(u.dtype)
        base = self.floor**power
        if not self.Lam.numel():
            return (base * v).to(u.dtype)
        P = self.Q_G.mT @ v @ self.Q_A
        return (base * v + self.Q_G @ ((self.Lam**power - base) * P) @ self.Q_A.mT).to(u.dtype)

    def sq_norms(self, g: LayerGradient, power: float, Q: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """||F~_l^power g_i||^2, and what it was subtracted from (its own size where nothing was); both (b,).

        Q   Q_G and Q_A in g's precision, where that is not that of `Q32`
        """
        Q = self.Q32 if Q is None else Q
        scale, base = self.Lam ** (2 * power), self.floor ** (2 * power)
        if self.whole:
            P = g.project(*Q)
            # Nothing is subtracted, but P's rounding is weighted too: it costs the root of what a subtraction costs.
            top = weighted_energy(P, scale.max().expand_as(scale)).maximum(scale.max() * g.projected_terms())
            return weighted_energy(P, scale), SUMMED_ABOVE / EXACT_BELOW * top.to(P.dtype)
        n = g.sq_norms()
        if not self.Lam.numel():
            return base * n, base * n.maximum(SUMMED_ABOVE / EXACT_BELOW * g.terms())
        energy = base * n.maximum(SUMMED_ABOVE / EXACT_BELOW * g.projected_terms())
        return base * n + g.projected_energy(*Q, scale - base), energy

    def exact_sq_norms(self, g: LayerGradient, power: float) -> Tensor:
        """The same without subtracting: in float64 on the dense gradient."""
        return self.apply(g.double().materialise(), power).flatten(1).square().sum(1)


class Kronecker:
    """L = F~^left and R = F~^right with K-FAC's F, clamped at lambda_t. DP-NGD has left = right = -1/2."""

    def __init__(self, left: float = -0.5, right: float = -0.5, clamp: str = "product"):
        self.left, self.right, self.clamp = left, right, clamp
        self.curvature: list[LayerCurvature] = []
        self.layers: list[ClampedLayer] = []
        self.lambda_t = float("nan")
        self.recomputed = 0  # samples whose norm needed float64, for diagnosis: two threads may lose a count

    def set(self, curvature: list[LayerCurvature], lambda_t: float, dtype: torch.dtype = torch.float32) -> None:
        """Fix F~ for the coming step. Must not depend on the batch: curvature is public, lambda_t a schedule."""
        if curvature is not self.curvature or lambda_t != self.lambda_t:
            self.curvature, self.lambda_t = curvature, lambda_t
            self.layers = [ClampedLayer.of(F, lambda_t, self.clamp, dtype) for F in curvature]

    def clamped_share(self) -> float:
        """Share of all eigenvalues that lie at the floor."""
        total = sum(F.Q_A.shape[1] * F.lambda_G.numel() for F in self.curvature)
        above = sum(int((layer.Lam > layer.floor).sum()) for layer in self.layers)
        return 1 - above / total

    def noise_energy(self) -> float:
        """tr(R F R) = sum_i lambda_i lambda~_i^(2 right): twice the KL divergence that N(0, I) in R's input causes.

        To second order, KL(p_theta || p_{theta - u}) = u' F u / 2, with F as estimated, not clamped; u = R xi.
        """
        total = 0.0
        for F, layer in zip(self.curvature, self.layers, strict=True):
            m, k = layer.Lam.shape[1:]
            block = F.lambda_G[:, :m].unsqueeze(2) * F.lambda_A[:, :k].unsqueeze(1)
            off = float((F.traces().sum() - block.sum()).clamp(min=0))  # what lies on the floor off the block
            total += float((block * layer.Lam ** (2 * self.right)).sum()) + off * self.lambda_t ** (2 * self.right)
        return total

    def sq_norms(self, g: SampleGradients) -> tuple[Tensor, Tensor]:
        if self.left == 0:
            return Euclidean.sq_norms(self, g)
        pairs = [layer.sq_norms(x, self.left) for layer, x in zip(self.layers, g.layers, strict=True)]
        total = torch.stack([n for n, _ in pairs]).sum(0)
        energy = torch.stack([e for _, e in pairs]).sum(0)
        fragile = total < EXACT_BELOW * energy  # comparisons with nan are false: those samples are dropped later
        lost = fragile.nonzero()[:, 0]
        if len(lost):
            self.recomputed += len(lost)
            total = total.clone()
            for part in lost.split(16):  # dense and in float64: a few at a time
                total[part] = self._exact(g.select(part)).to(total.dtype)
        return total.unsqueeze(0), fragile

    def _exact(self, g: SampleGradients) -> Tensor:
        """||F~^left g_i||^2 without subtracting, (b,) float64."""
        return torch.stack([layer.exact_sq_norms(x, self.left) for layer, x in
                            zip(self.layers, g.layers, strict=True)]).sum(0)

    def into(self, sums: list[Blocks]) -> list[Blocks]:
        return [self._apply(blocks, self.left) for blocks in sums]

    def back(self, releases: list[Blocks]) -> Blocks:
        return self._apply(releases[0], self.right)

    def _apply(self, blocks: Blocks, power: float) -> Blocks:
        if power == 0:
            return blocks
        return [layer.apply(u, power) for layer, u in zip(self.layers, blocks, strict=True)]

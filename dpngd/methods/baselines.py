"""Geometries of the baselines that learn theirs from public gradients: AdaDPS (diagonal) and GEP (subspace).

    method   channels                     L                                R
    AdaDPS   1                            D^-1, D = sqrt(v) + e            I
    GEP      2: embedding, residual       V'  and  I - V V'                V e + r

    symbol  shape     meaning
    v       (d,)      E[g^2] over public samples, one entry a parameter
    V       (d, k)    orthonormal basis of public gradients, block-diagonal over groups of parameters
    e, r    (k,), (d,)   noisy embedding and residual

AdaDPS (Li et al., 2022) scales before clipping and never maps back. Theirs squares minibatch means once an epoch; here
v is the per-sample second moment, refreshed like DP-NGD's curvature and with the same labels: its strong version.

GEP (Yu et al., 2021) clips the embedding V'g to C0 and the residual g - V V'g to C1. Both are functions of the same
sampled batch, so they are one release of two channels (see `mechanism`), and each gets sqrt(2) times the noise. Theirs
takes one power iteration a step; here the basis is the exact principal one of the same public gradients.
"""

from __future__ import annotations

import itertools
import math

import psutil
import torch
from torch import Tensor, nn

from dpngd.errors import UsageError
from dpngd.geometry import EXACT_BELOW, SUMMED_ABOVE
from dpngd.gradients import Blocks, PerSample, SampleGradients, micro_batches
from dpngd.layers.forms import Dense

GROUPS = 3
DENSE_GRAM = 2000  # public samples up to which all eigenvectors of their Gram matrix are computed
RESIDUAL = 1e-4


def flatten(blocks: Blocks) -> Tensor:
    """Blocks -> (d,)."""
    return torch.cat([b.flatten() for b in blocks])


def unflatten(flat: Tensor, like: Blocks) -> Blocks:
    """(d,) -> blocks of the shapes of `like`."""
    parts = flat.split([b.numel() for b in like])
    return [p.view_as(b) for p, b in zip(parts, like, strict=True)]


def draw_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """y ~ softmax(logits), one uniform number a row: neither the size of the parts nor a nan row disturbs the rest."""
    u = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator).to(logits.device)
    return (logits.double().softmax(1).cumsum(1) < u).sum(1).clamp(max=logits.shape[1] - 1)


@torch.no_grad()
def sampled_labels(model: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """y ~ p_theta(. | x), the labels of DP-NGD's Fisher matrix."""
    return draw_labels(torch.cat([model(part) for part in x.split(500)]), generator)


class Diagonal:
    """L = 1 / (sqrt(v) + e) entry by entry, R = I."""

    def __init__(self, e: float):
        self.e = e
        self.scale: Blocks = []

    def set(self, second_moment: Blocks) -> None:
        """Fix L from public E[g^2]."""
        self.scale = [1 / (v.sqrt() + self.e) for v in second_moment]

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


class Subspace:
    """Two channels: V'g, clipped to C0, and g - V V'g, clipped to C1."""

    def __init__(self, zeros: Blocks):
        self.like = zeros
        self.bounds: list[tuple[int, int]] = []
        self.bases: list[Tensor] = []

    def set(self, bounds: list[tuple[int, int]], bases: list[Tensor]) -> None:
        """Fix V: group j of the flat vector is [lo, hi), its basis (hi - lo, k_j) orthonormal."""
        self.bounds, self.bases = bounds, bases

    def embed(self, flat: Tensor) -> Tensor:
        """V' g for g (..., d): (..., k)."""
        return torch.cat([flat[..., lo:hi] @ V.to(flat.dtype)
                          for (lo, hi), V in zip(self.bounds, self.bases, strict=True)], -1)

    def lift(self, e: Tensor) -> Tensor:
        """V e for e (..., k): (..., d)."""
        parts = e.split([V.shape[1] for V in self.bases], -1)
        return torch.cat([p @ V.mT.to(e.dtype) for p, V in zip(parts, self.bases, strict=True)], -1)

    def sq_norms(self, g: SampleGradients) -> tuple[Tensor, Tensor]:
        flat = g.materialise()
        whole, inside = flat.square().sum(1), self.embed(flat).square().sum(1)
        outside = whole - inside
        # Little is left of the subtraction, or of the terms that are added up: a gradient that lies almost wholly in
        # one channel is large in the sum from which the other is computed, and so is that sum's rounding in float32.
        fragile = (outside < EXACT_BELOW * whole) | (inside < SUMMED_ABOVE * whole) | (whole < SUMMED_ABOVE * g.terms())
        if fragile.any():
            exact = torch.cat([x.double().materialise().flatten(1)
                               for x in g.select(fragile.nonzero()[:, 0]).layers], 1)
            e = self.embed(exact)
            inside[fragile] = e.square().sum(1).to(inside.dtype)
            outside[fragile] = (exact - self.lift(e)).square().sum(1).to(outside.dtype)
        return torch.stack([inside, outside]), fragile

    def into(self, sums: list[Blocks]) -> list[Blocks]:
        first, second = (flatten(blocks).double() for blocks in sums)
        residual = second - self.lift(self.embed(second))
        dtype = self.like[0].dtype
        return [[self.embed(first).to(dtype)], unflatten(residual.to(dtype), self.like)]

    def back(self, releases: list[Blocks]) -> Blocks:
        (embedding,), residual = releases
        return [u + r for u, r in zip(unflatten(self.lift(embedding), self.like), residual, strict=True)]


def shares(d: int, n: int, directions: int) -> list[tuple[int, int, int]]:
    """(lo, hi, k) of each group: equal parts of d, `directions` shared out by the roots of their sizes, at most n."""
    bounds = list(itertools.pairwise(round(j * d / GROUPS) for j in range(GROUPS + 1)))
    roots = [math.sqrt(hi - lo) for lo, hi in bounds]
    return [(lo, hi, max(1, min(round(directions * root / sum(roots)), n, hi - lo)))
            for (lo, hi), root in zip(bounds, roots, strict=True)]


def basis_bytes(d: int, n: int, directions: int) -> int:
    """What `principal_basis` holds at its peak: the public gradients, the basis, and a group's QR in float64."""
    groups = shares(d, n, directions)
    return 4 * n * d + sum(4 * (hi - lo) * k for lo, hi, k in groups) + max(24 * (hi - lo) * k for lo, hi, k in groups)


def check_memory(d: int, n: int, directions: int) -> None:
    """An error where the basis would not fit, before the machine finds out."""
    need, free = basis_bytes(d, n, directions), psutil.virtual_memory().available
    if need > 0.8 * free:
        raise UsageError(f"GEP's basis of {n} public gradients of {d:,} parameters needs {need / 2**30:.1f} GiB, "
                         f"{free / 2**30:.1f} GiB are free: take fewer public images or directions")


def principal_basis(per_sample: PerSample, x: Tensor, y: Tensor, directions: int,
                    ) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """For each of three equal parts of the flat vector, the principal directions of the public gradients.

    `directions` in all, no more in a part than public samples span. The principal directions of G (n, d_j) are
    G' times the leading eigenvectors of G G', and a QR makes them orthonormal to rounding, whatever G's rank.
    """
    G = torch.cat([g.materialise() for g in micro_batches(per_sample, x, y)])
    bounds, bases = [], []
    for lo, hi, k in shares(G.shape[1], len(G), directions):
        part = G[:, lo:hi]
        vectors = gram_vectors(part, k) if len(G) <= DENSE_GRAM else krylov_vectors(part, k)
        span = part.mT @ vectors
        bases.append(torch.linalg.qr(span.double()).Q.to(G.dtype))
        bounds.append((lo, hi))
    return bounds, bases


def gram_vectors(G: Tensor, k: int) -> Tensor:
    """The k leading eigenvectors of G G' (n, k), from all of them: n^2 d + n^3."""
    return torch.linalg.eigh((G @ G.mT).double()).eigenvectors[:, -k:].to(G.dtype)


def krylov_vectors(G: Tensor, k: int, spare: int = 8, blocks: int = 40) -> Tensor:
    """The same by block Lanczos, for many samples: G G' is never formed, each block costs 4 n d k.

    Blocks are added until G G' leaves the k leading Ritz vectors in place, to `RESIDUAL` of the largest eigenvalue;
    if that does not happen, all eigenvectors are computed after all. The start is fixed: a run repeats.
    """
    block = torch.randn(len(G), k + spare, generator=torch.Generator().manual_seed(0)).to(G)
    block = torch.linalg.qr(block).Q
    V, KV = [block], [G @ (G.mT @ block)]
    for _ in range(blocks):
        Q, KQ = torch.cat(V, 1).double(), torch.cat(KV, 1).double()
        values, rotation = torch.linalg.eigh(Q.mT @ KQ)
        ritz, values = Q @ rotation[:, -k:], values[-k:]
        if (KQ @ rotation[:, -k:] - ritz * values).norm(dim=0).max() <= RESIDUAL * values[-1]:
            return ritz.to(G.dtype)
        if Q.shape[1] + block.shape[1] > len(G):
            break
        block = KV[-1].double()
        for _ in range(2):  # once more: after the first time little may be left
            block = torch.linalg.qr(block - Q @ (Q.mT @ block)).Q
        V.append(block.to(G.dtype))
        KV.append(G @ (G.mT @ V[-1]))
    return gram_vectors(G, k)

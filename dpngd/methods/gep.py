"""GEP (Yu et al., 2021): the embedding in a subspace of public gradients, and the residual, each clipped and noised.

    channel    L          clip   R
    embedding  V'         C0     V e
    residual   I - V V'   C1     + r

    symbol  shape        meaning
    V       (d, k)       orthonormal basis of public gradients, block-diagonal over groups of parameters
    e, r    (k,), (d,)   noisy embedding and residual

Both channels are functions of the same sampled batch, so they are one release (see `dpngd.mechanism`), and each gets
sqrt(2) times the noise. Theirs takes one power iteration per step; here the basis is the exact principal one of
the same public gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import scipy.linalg
import torch
from torch import Tensor

from dpngd.curvature import scipys_blas
from dpngd.errors import UsageError
from dpngd.geometry import EXACT_BELOW, SUMMED_ABOVE
from dpngd.gradients import Blocks, PerSample, SampleGradients, micro_batches
from dpngd.layers.forms import product
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import Built, Setting, every
from dpngd.noise import stream

GROUPS = 3
ROWS = 256  # of V, worked on at once


def build(setting: Setting) -> Built:
    """The embedding in a public gradient subspace, and the residual.

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

    return Built(geometry, GaussianMechanism((c.C0, c.C1), setting.spends[0].sigma, c.B), every(c.T_cur, refresh),
                 held={"basis": geometry})


def flatten(blocks: Blocks) -> Tensor:
    """Blocks -> (d,)."""
    return torch.cat([b.flatten() for b in blocks])


def unflatten(flat: Tensor, like: Blocks) -> Blocks:
    """(d,) -> blocks of the shapes of `like`."""
    parts = flat.split([b.numel() for b in like])
    return [p.view_as(b) for p, b in zip(parts, like, strict=True)]


class Subspace:
    """Two channels: V'g, clipped to C0, and g - V V'g, clipped to C1."""

    def __init__(self, zeros: Blocks):
        self.like = zeros
        self.bounds: list[tuple[int, int]] = []
        self.bases: list[Tensor] = []
        self._pieces: list[tuple[int, int, int, int, Tensor]] = []

    def set(self, bounds: list[tuple[int, int]], bases: list[Tensor]) -> None:
        """Fix V: group j of the flat vector is [lo, hi), its basis (hi - lo, k_j) orthonormal."""
        self.bounds, self.bases = bounds, bases
        self._pieces = list(self._cut())

    def _cut(self) -> Iterator[tuple[int, int, int, int, Tensor]]:
        """(group, layer, lo, hi, V'): the parts of V' (k_j, hi - lo) that meet entries lo .. hi of a layer's block."""
        ends = list(itertools.accumulate((z.numel() for z in self.like), initial=0))
        for j, ((lo, hi), V) in enumerate(zip(self.bounds, self.bases, strict=True)):
            for layer, (start, stop) in enumerate(itertools.pairwise(ends)):
                first, last = max(lo, start), min(hi, stop)
                if first < last:
                    yield j, layer, first - start, last - start, V[first - lo : last - lo].mT.contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"bounds": self.bounds, "bases": self.bases}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.set(state["bounds"], state["bases"])

    def embed(self, flat: Tensor) -> Tensor:
        """V' g for g (..., d): (..., k)."""
        return torch.cat([flat[..., lo:hi] @ V.to(flat.dtype)
                          for (lo, hi), V in zip(self.bounds, self.bases, strict=True)], -1)

    def lift(self, e: Tensor) -> Tensor:
        """V e for e (..., k): (..., d)."""
        parts = e.split([V.shape[1] for V in self.bases], -1)
        return torch.cat([p @ V.mT.to(e.dtype) for p, V in zip(parts, self.bases, strict=True)], -1)

    def _inside(self, g: SampleGradients) -> Tensor:
        """||V' g_i||^2, (b,), layer by layer: the flat gradients are never copied side by side."""
        if not self.bases:
            raise ValueError("GEP has no basis: `set` comes before the first step")
        flat = [x.materialise().flatten(1) for x in g.layers]
        parts: list[Tensor | None] = [None] * len(self.bases)
        for j, layer, lo, hi, Vt in self._pieces:
            e = product(flat[layer][:, lo:hi], Vt)
            parts[j] = e if parts[j] is None else parts[j].add_(e)
        return torch.stack([e.square().sum(1) for e in parts]).sum(0)

    def sq_norms(self, g: SampleGradients) -> tuple[Tensor, Tensor]:
        inside, whole = self._inside(g), g.sq_norms()  # in this order: g is formed by the first
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
        both = torch.stack([flatten(blocks).double() for blocks in sums])
        embedding, residual = [], both[1].clone()
        for (lo, hi), V in zip(self.bounds, self.bases, strict=True):
            # In float64, a few rows of V at a time, which stay in cache: as a whole its copy costs more than the rest.
            rows = [(slice(lo + r, min(lo + r + ROWS, hi)), V[r : r + ROWS]) for r in range(0, hi - lo, ROWS)]
            e = both.new_zeros(2, V.shape[1])
            for here, part in rows:
                e.addmm_(both[:, here], part.double())
            embedding.append(e[0])
            for here, part in rows:
                residual[here] -= part.double() @ e[1]
        dtype = self.like[0].dtype
        return [[torch.cat(embedding).to(dtype)], unflatten(residual.to(dtype), self.like)]

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
    """What `principal_basis` holds at its peak: the public gradients, the basis, a group's Gram matrix and its QR."""
    groups = shares(d, n, directions)
    sizes = [(hi - lo) * k for lo, hi, k in groups]
    return 4 * n * d + 20 * n**2 + 4 * sum(sizes) + 24 * max(sizes)


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
    G' times the leading eigenvectors of G G', made orthonormal to rounding, whatever G's rank.
    """
    G = torch.cat([g.materialise() for g in micro_batches(per_sample, x, y)])
    bounds, bases = [], []
    for lo, hi, k in shares(G.shape[1], len(G), directions):
        bases.append(principal(G[:, lo:hi].contiguous(), k))
        bounds.append((lo, hi))
    return bounds, bases


def principal(G: Tensor, k: int) -> Tensor:
    """The k principal directions of the rows of G (n, d), (d, k), orthonormal to rounding."""
    return orthonormal(product(G.mT.contiguous(), gram_vectors(G, k).mT.contiguous()))


def gram_vectors(G: Tensor, k: int) -> Tensor:
    """The k leading eigenvectors of G G', (n, k). Where k is a small part of n, only those are computed."""
    gram = product(G, G).double()
    if not gram.isfinite().all():
        raise FloatingPointError("the public gradients are not finite: training has diverged")
    n = len(G)
    if 4 * k > n:
        return torch.linalg.eigh(gram).eigenvectors[:, -k:].to(G.dtype)
    with scipys_blas().limit(limits=1):
        return torch.from_numpy(scipy.linalg.eigh(gram.cpu().numpy(), subset_by_index=(n - k, n - 1))[1]).to(G)


def orthonormal(span: Tensor) -> Tensor:
    """An orthonormal basis of the columns of span (d, k), leading columns last, computed in float64.

    The columns are almost orthogonal, so with X the columns at length 1, Cholesky's R, R'R = X'X, is well conditioned
    and X R^-1 is orthonormal to rounding, in less than half the time of a QR. Where columns are dependent (a pivot
    below 1e-3), a QR is taken.
    """
    X = span.double()
    M = X.mT @ X
    length = M.diagonal().sqrt().clamp(min=torch.finfo(X.dtype).tiny)
    R, failed = torch.linalg.cholesky_ex(M / length / length[:, None], upper=True)
    if failed or not R.diagonal().min() > 1e-3:
        return torch.linalg.qr(X / length).Q.to(span.dtype)
    return torch.linalg.solve_triangular(R * length, X, upper=True, left=False).to(span.dtype)

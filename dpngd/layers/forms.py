"""The gradient of one layer for every sample of a micro-batch, in the form that is cheapest for the layer.

A layer's parameters are one matrix, or R of them for a grouped convolution: [W | bias], so that K-FAC's homogeneous
coordinate is its last column. A norm layer's scale and shift are a single row, which makes its K-FAC block exact.

    symbol  shape         meaning
    b                     samples in the micro-batch
    K                     views per sample; rows i*K .. i*K+K-1 of a and d belong to sample i
    S                     positions that a sample's gradient sums over (time, or K * height * width)
    a       (b, S, I)     the layer's inputs (unfolded for a convolution)
    d       (b, S, O)     gradients of the samples' losses with respect to the layer's outputs
    g       (b, R, O, I)  per-sample gradients: g_i = sum_s d_is a_is'
    Q_G     (R, O, m)     directions on the output side
    Q_A     (R, I, k)     directions on the input side

`Dense` holds g; `Factors` and `ConvFactors` hold a and d, and never form g unless asked. All answer the same questions:
norms, projections, weighted sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class LayerGradient(Protocol):
    """Per-sample gradients g_i of one layer."""

    def sq_norms(self) -> Tensor:
        """||g_i||^2, shape (b,)."""

    def terms(self) -> Tensor:
        """Sum of the squared terms that g_i is added up from in a weighted sum, (b,); zero where it is g_i itself."""

    def diagonal_sq_norms(self, w: Tensor) -> Tensor:
        """sum(w * g_i^2) for non-negative weights w (R, O, I), shape (b,)."""

    def project(self, Q_G: Tensor, Q_A: Tensor) -> Tensor:
        """Q_G' g_i Q_A, shape (b, R, m, k)."""

    def projected_energy(self, Q_G: Tensor, Q_A: Tensor, w: Tensor) -> Tensor:
        """sum(w * (Q_G' g_i Q_A)^2) for weights w (R, m, k), shape (b,)."""

    def projected_terms(self) -> Tensor:
        """As `terms`, of what a projection is added up from: where g_i is far below it, its projection is rounding."""

    def weighted_sum(self, c: Tensor) -> Tensor:
        """sum_i c_i g_i for c (b,), shape (R, O, I)."""

    def materialise(self) -> Tensor:
        """g, shape (b, R, O, I)."""

    def select(self, keep: Tensor) -> LayerGradient:
        """The same for the samples whose indices are in `keep` only."""

    def double(self) -> LayerGradient:
        """The same in float64."""


def weighted_energy(g: Tensor, w: Tensor) -> Tensor:
    """sum(g^2 * w) per sample. Long dot products in float32 are off by 1e-4, as sums in one run are; `sum` is not."""
    g, w = g.square().flatten(1), w.to(g.dtype).flatten()
    return g @ w if len(w) <= 2**14 else g.mul_(w).sum(1)


def product(x: Tensor, w: Tensor) -> Tensor:
    """x w' for x (n, I) and w (k, I), large ones: by oneDNN in float32, which is twice as fast as the library's BLAS on
    some CPUs and nowhere slower.

    Rows of w that lie further apart than they are long (a view without the bias column) are copied together first:
    oneDNN has no fast kernel for them, and takes 200 times as long.
    """
    if ONEDNN is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return x @ w.mT
    if w.stride(1) == 1 and not w.is_contiguous():
        w = w.contiguous()
    return ONEDNN(x, w, None, "none", [], "")


ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def times(t: Tensor, Q: Tensor) -> Tensor:
    """t (n, I) times Q (I, k), as (Q' t')': few columns take half the time that way round, and many no more."""
    return (Q.mT.contiguous() @ t.mT).mT


def two_sided(Q_G: Tensor, t: Tensor, Q_A: Tensor) -> Tensor:
    """Q_G' t Q_A for Q_G (O, m), t (b, O, n) and Q_A (n, k), that side first which leaves less to do for the other.

    One large product per side takes less time than b small ones. The result (b, m, k) is a view of another order.
    """
    (O, m), (b, _, n), k = Q_G.shape, t.shape, Q_A.shape[1]
    if m * n * (O + k) < O * k * (n + m):
        left = torch.einsum("om,bon->bmn", Q_G, t)
        return times(left.reshape(b * m, n), Q_A).mT.view(k, b, m).permute(1, 2, 0)
    right = times(t.reshape(b * O, n), Q_A).mT  # (k, b * O)
    return (right.reshape(k * b, O) @ Q_G).view(k, b, m).permute(1, 2, 0)


class Dense:
    """g itself, with its bias column held separately so that no layer has to be copied to append it.

    w      (b, R, O, I_w)
    bias   (b, R, O), or None
    taps   a convolution's kernel positions, where the columns of w run (tap, channel) and not, as everywhere else,
           (channel, tap): norms do not depend on the order, and sums are put in order once for all samples
    """

    def __init__(self, w: Tensor, bias: Tensor | None = None, taps: int = 1):
        self.w, self.bias, self.taps = w, bias, taps

    def _in_order(self, t: Tensor) -> Tensor:
        """(..., I_w) with columns (tap, channel) -> (channel, tap)."""
        return t if self.taps == 1 else t.unflatten(-1, (self.taps, -1)).mT.flatten(-2)

    def _as_held(self, t: Tensor) -> Tensor:
        """The inverse of `_in_order`."""
        return t if self.taps == 1 else t.unflatten(-1, (-1, self.taps)).mT.flatten(-2)

    def sq_norms(self) -> Tensor:
        n = torch.linalg.vector_norm(self.w, dim=-1).flatten(1).square().sum(1)  # in rows: see `weighted_energy`
        return n if self.bias is None else n + self.bias.flatten(1).square().sum(1)

    def terms(self) -> Tensor:
        return self.w.new_zeros(len(self.w))

    def diagonal_sq_norms(self, w: Tensor) -> Tensor:
        n = weighted_energy(self.w, self._as_held(w[..., : self.w.shape[-1]]))
        return n if self.bias is None else n + weighted_energy(self.bias, w[..., -1])

    def project(self, Q_G: Tensor, Q_A: Tensor) -> Tensor:
        I = self.w.shape[-1]
        Q_Aw = self._as_held(Q_A[:, :I].mT).mT
        one = len(Q_G) == 1
        P = two_sided(Q_G[0], self.w[:, 0], Q_Aw[0]).unsqueeze(1) if one else Q_G.mT @ (self.w @ Q_Aw)
        if self.bias is not None:
            P = P + (self.bias.unsqueeze(-2) @ Q_G).mT * Q_A[:, I:]
        return P

    def projected_energy(self, Q_G: Tensor, Q_A: Tensor, w: Tensor) -> Tensor:
        return weighted_energy(self.project(Q_G, Q_A), w)

    def projected_terms(self) -> Tensor:
        return self.terms()

    def weighted_sum(self, c: Tensor) -> Tensor:
        w = self._in_order((c @ self.w.flatten(1)).view(self.w.shape[1:]))
        return w if self.bias is None else torch.cat([w, (c @ self.bias.flatten(1)).view(*w.shape[:2], 1)], -1)

    def materialise(self) -> Tensor:
        w = self._in_order(self.w)
        return w if self.bias is None else torch.cat([w, self.bias.unsqueeze(-1)], -1)

    def select(self, keep: Tensor) -> Dense:
        return self._each(lambda t: t[keep])

    def double(self) -> Dense:
        return self._each(Tensor.double)

    def _each(self, f: Callable[[Tensor], Tensor]) -> Dense:
        """The same with f of every tensor that is held."""
        return Dense(f(self.w), None if self.bias is None else f(self.bias), self.taps)


class Factors:
    """A linear layer's a (b, S, I), a 1 appended for the bias, and d (b, S, O). With S = 1, g_i has rank one."""

    def __init__(self, a: Tensor, d: Tensor):
        self.a, self.d = a, d

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        return pair_sq_norms(self.a, self.d)

    def sq_norms(self) -> Tensor:
        """||g||^2 = <d d', a a'> over pairs of positions; with one position, ||d||^2 ||a||^2."""
        return self._norms[0]

    def terms(self) -> Tensor:
        return self._norms[1]

    def diagonal_sq_norms(self, w: Tensor) -> Tensor:
        if self.a.shape[1] > 1:
            return weighted_energy(self.materialise(), w)
        return ((self.d[:, 0].square() @ w[0]) * self.a[:, 0].square()).sum(1)

    def _times(self, Q_A: Tensor) -> Tensor:
        """The inputs (b*S, I) times Q_A (I, k)."""
        return times(self.a.flatten(0, 1), Q_A)

    def project(self, Q_G: Tensor, Q_A: Tensor) -> Tensor:
        aQ = self._times(Q_A[0]).view(*self.a.shape[:2], Q_A.shape[2])
        return ((self.d @ Q_G[0]).mT @ aQ).unsqueeze(1)

    def projected_energy(self, Q_G: Tensor, Q_A: Tensor, w: Tensor) -> Tensor:
        if self.a.shape[1] > 1:
            return weighted_energy(self.project(Q_G, Q_A), w)
        # With one position P is of rank one. Its squares are those of its factors, scaled so that they stay in range.
        d, a = (self.d[:, 0] @ Q_G[0]), self._times(Q_A[0])
        scale = self.d[:, 0].abs().amax(1, keepdim=True).clamp(min=torch.finfo(d.dtype).tiny)
        return (((d / scale).square() @ w[0].to(d.dtype)) * (a * scale).square()).sum(1)

    def projected_terms(self) -> Tensor:
        return self.terms()

    def weighted_sum(self, c: Tensor) -> Tensor:
        return ((self.d * c[:, None, None]).flatten(0, 1).mT @ self.a.flatten(0, 1)).unsqueeze(0)

    def materialise(self) -> Tensor:
        return (self.d.mT @ self.a).unsqueeze(1)

    def select(self, keep: Tensor) -> Factors:
        return Factors(self.a[keep], self.d[keep])

    def double(self) -> Factors:
        return Factors(self.a.double(), self.d.double())


def pair_sq_norms(a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """`gram_sq_norms` of a (b, S, I) and d (b, S, O)."""
    return gram_sq_norms(pairs(a), d, lambda rows: d[rows].double().mT @ a[rows].double(), a.shape[2])


def pairs(a: Tensor) -> Tensor:
    """The products a_s' a_t (b, S, S) of a (b, S, I); of a single position in float64."""
    if a.shape[1] > 1:
        return a @ a.mT
    return torch.linalg.vector_norm(a, dim=2, keepdim=True, dtype=torch.float64).square()


def gram_sq_norms(A: Tensor, d: Tensor, exact: Callable[[Tensor], Tensor], I: int, one: float = 0,
                  ) -> tuple[Tensor, Tensor]:
    """||sum_s d_s a_s'||^2 = <d d', A + one> over pairs of positions, `one` for a bias that a has no column for.

    A      (b, S, S)  `pairs` of a (b, S, I)
    exact  g of the samples at these rows, in float64, with its bias column
    Where positions cancel, or squares leave float32's range, such a sum is rounding: those samples are redone in
    float64. Also the sum of the terms with s = t, as an upper bound.
    """
    if d.shape[1] == 1:
        rows = torch.linalg.vector_norm(d[:, 0], dim=1, dtype=torch.float64).square()
        return ((A[:, 0, 0] + one) * rows).to(d.dtype), d.new_zeros(len(d))  # one term, which is g_i
    D, info = d @ d.mT, torch.finfo(d.dtype)
    n = ((A + one) * D).sum((1, 2))
    rows = [M.diagonal(dim1=1, dim2=2).double() + width * info.tiny for M, width in ((A, I), (D, d.shape[2]))]
    terms = ((rows[0] + one) * rows[1]).sum(1)  # squares below `tiny` may be lost
    lost = ((n < 0.05 * terms) & (terms > 1e-30)).nonzero()[:, 0]
    if len(lost):
        n[lost] = exact(lost).flatten(1).square().sum(1).to(n.dtype)
    return n, terms.to(n.dtype)

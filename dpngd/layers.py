"""The gradient of one layer for every sample of a micro-batch, in the form that is cheapest for the layer.

A layer's parameters are one matrix, or R of them for a grouped convolution: [W | bias], so that K-FAC's homogeneous
coordinate is its last column. A norm layer's scale and shift are a single row, which makes its K-FAC block exact.

    symbol  shape         meaning
    b                     samples in the micro-batch
    K                     views a sample; rows i*K .. i*K+K-1 of a and d belong to sample i
    S                     positions a sample's gradient sums over (time, or K * height * width)
    a       (b, S, I)     the layer's inputs (unfolded for a convolution)
    d       (b, S, O)     gradients of the samples' losses with respect to the layer's outputs
    g       (b, R, O, I)  per-sample gradients: g_i = sum_s d_is a_is'
    Q_G     (R, O, m)     directions on the output side
    Q_A     (R, I, k)     directions on the input side

`Dense` holds g; `Factors` and `ConvFactors` hold a and d, and never form g unless asked. All answer the same questions:
norms, projections, weighted sums.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dpngd.second_moments import keeps_size, patch_moment


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

    def weighted_sum(self, c: Tensor) -> Tensor:
        """sum_i c_i g_i for c (b,), shape (R, O, I)."""

    def materialise(self) -> Tensor:
        """g, shape (b, R, O, I)."""

    def select(self, keep: Tensor) -> LayerGradient:
        """The same for the samples whose indices are in `keep` only."""

    def double(self) -> LayerGradient:
        """The same in float64."""


def weighted_energy(g: Tensor, w: Tensor) -> Tensor:
    """sum(g^2 * w) a sample. Long dot products in float32 are off by 1e-4, as sums in one run are; `sum` is not."""
    g, w = g.square().flatten(1), w.to(g.dtype).flatten()
    return g @ w if len(w) <= 2**14 else g.mul_(w).sum(1)


class Dense:
    """g itself, its bias column kept apart so that no layer has to be copied to append it."""

    def __init__(self, w: Tensor, bias: Tensor | None = None):
        self.w, self.bias = w, bias  # (b, R, O, I_w) and (b, R, O)

    def sq_norms(self) -> Tensor:
        n = torch.linalg.vector_norm(self.w, dim=-1).flatten(1).square().sum(1)  # in rows: see `weighted_energy`
        return n if self.bias is None else n + self.bias.flatten(1).square().sum(1)

    def terms(self) -> Tensor:
        return self.w.new_zeros(len(self.w))

    def diagonal_sq_norms(self, w: Tensor) -> Tensor:
        n = weighted_energy(self.w, w[..., : self.w.shape[-1]])
        return n if self.bias is None else n + weighted_energy(self.bias, w[..., -1])

    def project(self, Q_G: Tensor, Q_A: Tensor) -> Tensor:
        I = self.w.shape[-1]
        Q_Aw = Q_A[:, :I]
        if Q_G.shape[-1] <= Q_A.shape[-1]:  # contract the side that leaves less to do for the other
            left = torch.einsum("brom,broi->brmi", Q_G.expand(len(self.w), -1, -1, -1), self.w)
            P = left @ Q_Aw
        else:
            P = Q_G.mT @ (self.w @ Q_Aw)
        if self.bias is not None:
            P = P + (self.bias.unsqueeze(-2) @ Q_G).mT * Q_A[:, I:]
        return P

    def weighted_sum(self, c: Tensor) -> Tensor:
        w = (c @ self.w.flatten(1)).view(self.w.shape[1:])
        return w if self.bias is None else torch.cat([w, (c @ self.bias.flatten(1)).view(*w.shape[:2], 1)], -1)

    def materialise(self) -> Tensor:
        return self.w if self.bias is None else torch.cat([self.w, self.bias.unsqueeze(-1)], -1)

    def select(self, keep: Tensor) -> Dense:
        return Dense(self.w[keep], None if self.bias is None else self.bias[keep])

    def double(self) -> Dense:
        return Dense(self.w.double(), None if self.bias is None else self.bias.double())


class Factors:
    """A linear layer's a (b, S, I), a 1 appended for the bias, and d (b, S, O). With S = 1, g_i has rank one."""

    def __init__(self, a: Tensor, d: Tensor):
        self.a, self.d = a, d

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        return _pair_sq_norms(self.a, self.d)

    def sq_norms(self) -> Tensor:
        """||g||^2 = <d d', a a'> over pairs of positions; with one position, ||d||^2 ||a||^2."""
        return self._norms[0]

    def terms(self) -> Tensor:
        return self._norms[1]

    def diagonal_sq_norms(self, w: Tensor) -> Tensor:
        if self.a.shape[1] > 1:
            return weighted_energy(self.materialise(), w)
        return ((self.d[:, 0].square() @ w[0]) * self.a[:, 0].square()).sum(1)

    def project(self, Q_G: Tensor, Q_A: Tensor) -> Tensor:
        return ((self.d @ Q_G[0]).mT @ (self.a @ Q_A[0])).unsqueeze(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        return ((self.d * c[:, None, None]).flatten(0, 1).mT @ self.a.flatten(0, 1)).unsqueeze(0)

    def materialise(self) -> Tensor:
        return (self.d.mT @ self.a).unsqueeze(1)

    def select(self, keep: Tensor) -> Factors:
        return Factors(self.a[keep], self.d[keep])

    def double(self) -> Factors:
        return Factors(self.a.double(), self.d.double())


def _pair_sq_norms(a: Tensor, d: Tensor, one: float = 0.0) -> tuple[Tensor, Tensor]:
    """||sum_s d_s a_s'||^2 = <d d', a a' + one> over pairs of positions, `one` for a bias that a has no column for.

    Where positions cancel, or squares leave float32's range, such a sum is rounding: those samples are redone in
    float64. Also the sum of the terms with s = t, as an upper bound.
    """
    if a.shape[1] == 1:
        rows = [torch.linalg.vector_norm(t[:, 0], dim=1, dtype=torch.float64).square() for t in (a, d)]
        return ((rows[0] + one) * rows[1]).to(d.dtype), d.new_zeros(len(d))  # one term, which is g_i
    A, D, info = a @ a.mT, d @ d.mT, torch.finfo(d.dtype)
    n = ((A + one) * D).sum((1, 2))
    rows = [M.diagonal(dim1=1, dim2=2).double() + t.shape[2] * info.tiny for M, t in ((A, a), (D, d))]
    terms = ((rows[0] + one) * rows[1]).sum(1)  # squares below `tiny` may be lost
    lost = ((n < 0.05 * terms) & (terms > 1e-30)).nonzero()[:, 0]
    if len(lost):
        d, a = d[lost].double(), a[lost].double()
        g = d.mT @ a
        n[lost] = (g.flatten(1).square().sum(1) + one * d.sum(1).square().sum(1)).to(n.dtype)
    return n, terms.to(n.dtype)


class ConvFactors:
    """A wide convolution with few positions: a (b*K, C, H, W) and d (b*K, O, H', W') kept as they are.

    ||g||^2 = <U U', d d'> over pairs of positions, U the unfolded input, costs S^2 (I + O) where g costs S I O;
    projections are convolutions with the directions as kernels; the weighted sum is one ordinary weight gradient.
    """

    def __init__(self, spec: ConvSpec, a: Tensor, d: Tensor, K: int):
        self.spec, self.a, self.d, self.K = spec, a, d, K

    def _positions(self, t: Tensor) -> Tensor:
        """(b*K, rows, H', W') -> (b, rows, S)."""
        t = t.flatten(2)
        return t if self.K == 1 else t.unflatten(0, (-1, self.K)).transpose(1, 2).flatten(2)

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        s = self.spec
        U = self._positions(F.unfold(self.a, s.kernel, s.dilation, s.padding, s.stride))
        return _pair_sq_norms(U.mT, self._positions(self.d).mT, one=float(s.bias))  # the bias' coordinate is 1

    def sq_norms(self) -> Tensor:
        return self._norms[0]

    def terms(self) -> Tensor:
        return self._norms[1]

    def diagonal_sq_norms(self, w: Tensor) -> Tensor:
        return weighted_energy(self.materialise(), w)

    def project(self, Q_G: Tensor, Q_A: Tensor) -> Tensor:
        s, k = self.spec, Q_A.shape[-1]
        kernels = Q_A[0, : s.I].mT.reshape(k, -1, *s.kernel)
        aQ = self._positions(F.conv2d(self.a, kernels, Q_A[0, s.I] if s.bias else None, s.stride, s.padding,
                                      s.dilation))
        dQ = self._positions(torch.einsum("nohw,om->nmhw", self.d, Q_G[0]))
        return (dQ @ aQ.mT).unsqueeze(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        d = self.d * c.repeat_interleave(self.K)[:, None, None, None]
        w = self.spec.weight_gradient(self.a, d, 1)
        return torch.cat([w, d.sum((0, 2, 3)).view(1, -1, 1)], -1) if self.spec.bias else w

    def materialise(self) -> Tensor:
        return self.spec.per_sample(self.a, self.d, self.K).materialise()

    def select(self, keep: Tensor) -> ConvFactors:
        rows = (keep[:, None] * self.K + torch.arange(self.K, device=keep.device)).flatten()
        return ConvFactors(self.spec, self.a[rows], self.d[rows], self.K)

    def double(self) -> ConvFactors:
        return ConvFactors(self.spec, self.a.double(), self.d.double(), self.K)


class ConvSpec:
    """The geometry of a convolution, and the ways to its per-sample gradients.

    Which way is fastest depends on the shapes (as measured on CPU cores):
    - few input channels, or 1x1: unfold, then one matrix product a sample;
    - K >= 8 views: an ordinary weight gradient for each sample, whose batch is the sample's views;
    - else: the weight gradient of one convolution with a group for every sample.
    The choice is by shape and not by timing, so that a run repeats bit for bit.
    """

    def __init__(self, module: torch.nn.Conv2d, bias: bool):
        self.kernel, self.stride, self.dilation = module.kernel_size, module.stride, module.dilation
        self.R, self.bias = module.groups, bias
        self.O, self.C = module.out_channels // self.R, module.in_channels // self.R
        self.I = self.C * self.kernel[0] * self.kernel[1]
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        self.padding = module.padding if plain else (0, 0)
        # 'same' may be lopsided and other modes are not zeros: pad the input itself, once, for both.
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self.pad = None if plain else (module._reversed_padding_repeated_twice, mode)

    def gradient(self, a: Tensor, d: Tensor, K: int) -> LayerGradient:
        """Per-sample gradients in the form that costs least for these shapes."""
        if self.pad is not None:
            a = F.pad(a, self.pad[0], mode=self.pad[1])
        S = K * d.shape[2] * d.shape[3]
        wide = self.O * self.I >= 2**18 and 2 * S * (self.I + self.O) < self.O * self.I
        return ConvFactors(self, a, d, K) if wide and self.R == 1 else self.per_sample(a, d, K)

    def per_sample(self, a: Tensor, d: Tensor, K: int) -> Dense:
        """g from the (padded) input a (b*K, R*C, H, W) and d (b*K, R*O, H', W')."""
        b = len(d) // K
        if self.kernel == (1, 1) or self.C <= 4 or (K == 1 and self.O >= 64 and d[0, 0].numel() <= 256):
            w = self._unfolded(a, d, b)
        elif K >= 8:
            w = torch.cat([self.weight_gradient(x, e, 1) for x, e in zip(a.split(K), d.split(K), strict=True)])
        else:
            a = a.unflatten(0, (b, K)).transpose(0, 1).flatten(1, 2)
            w = self.weight_gradient(a, d.unflatten(0, (b, K)).transpose(0, 1).flatten(1, 2), b)
        w = w.view(b, self.R, self.O, self.I)
        if not self.bias:
            return Dense(w)
        return Dense(w, d.flatten(2).sum(2).view(b, K, self.R, self.O).sum(1))

    def weight_gradient(self, a: Tensor, d: Tensor, b: int) -> Tensor:
        """Weight gradient of a convolution whose channels hold b samples side by side: (b*R, O, I)."""
        groups = b * self.R
        shape = a.new_empty(()).expand(groups * self.O, self.C, *self.kernel)  # only its shape is read
        w = torch.ops.aten.convolution_backward(
            d, a, shape, None, self.stride, self.padding, self.dilation, False, (0, 0), groups, (False, True, False)
        )[1]
        return w.reshape(groups, self.O, self.I)

    def _unfolded(self, a: Tensor, d: Tensor, b: int) -> Tensor:
        """One product d U' a view, summed over views: (b, R, O, I) up to a view."""
        n, (H, W) = len(a), d.shape[2:]
        U = self.patches(a, H, W).reshape(n * self.R, self.I, H * W)
        w = d.reshape(n * self.R, self.O, H * W) @ U.mT
        return w if n == b else w.view(b, n // b, -1).sum(1)

    def patches(self, a: Tensor, H: int, W: int) -> Tensor:
        """The patches that the H x W output positions see, as a view (n, R, C, kh, kw, H, W): nothing is copied."""
        if self.padding != (0, 0):
            a = F.pad(a, (self.padding[1], self.padding[1], self.padding[0], self.padding[0]))
        s0, s1, s2, s3 = a.stride()
        (sh, sw), (dh, dw) = self.stride, self.dilation
        return a.as_strided((len(a), self.R, self.C, *self.kernel, H, W),
                            (s0, self.C * s1, s1, dh * s2, dw * s3, sh * s2, sw * s3))

    def second_moment(self, a: Tensor, H: int, W: int) -> Tensor:
        """sum over images and positions of a a', a 1 appended for the bias: (R, I, I)."""
        same_size = keeps_size(self.kernel, self.stride, self.padding, self.dilation, self.R)
        if same_size and self.pad is None and min(H, W) >= 16:  # below that, unfolding is no dearer
            A, ones = (t.unsqueeze(0) for t in patch_moment(a, self.kernel[0]))
        else:
            if self.pad is not None:
                a = F.pad(a, self.pad[0], mode=self.pad[1])
            U = self.patches(a, H, W).permute(1, 2, 3, 4, 0, 5, 6).reshape(self.R, self.I, -1)
            A, ones = U @ U.mT, U.sum(2)
        if not self.bias:
            return A
        ones = ones.unsqueeze(2)
        last = torch.cat([ones.mT, ones.new_full((self.R, 1, 1), len(a) * H * W)], 2)
        return torch.cat([torch.cat([A, ones], 2), last], 1)

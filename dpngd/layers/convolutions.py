"""Per-sample gradients of convolutions: four ways to them, chosen by shape. Symbols as in `layers`."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dpngd.layers.forms import Dense, LayerGradient, pair_sq_norms, weighted_energy
from dpngd.layers.second_moments import keeps_size, patch_moment


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
        return pair_sq_norms(U.mT, self._positions(self.d).mT, one=float(s.bias))  # the bias' coordinate is 1

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

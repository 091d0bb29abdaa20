"""Convolutions in two dimensions, with stride, padding, dilation and groups. Symbols as in `base` and `forms`.

K-FAC's A, the sum over images and positions of a a' for the patches a that a convolution sees, needs no unfolding where
the convolution has stride 1 and keeps the image's size. A patch holds the pixels r + delta for the k*k offsets delta
around a position, so

    A[(c, delta), (c', delta')] = sum_{r in V(delta)} x_c(r) x_c'(r + delta' - delta),    x = 0 outside the image

depends on delta only through V(delta), the positions that the window leaves inside the image. The sum over all r is the
image's autocorrelation, which is one weight gradient of a convolution of x with itself, at k (2k-1) lags, since A is
symmetric: 15 products per pair of channels for k = 3 where unfolding takes 81. What V(delta) lacks is a few border rows
and columns, which are taken off by inclusion and exclusion (`patch_moment`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.layers.base import Layer, register
from dpngd.layers.forms import Dense, Factors, LayerGradient, gram_sq_norms, pairs, product, weighted_energy

UNFOLDED = 2**20
"""Bytes of patches that are copied out at once: about what a core's second cache holds."""


@register(nn.Conv2d)
class Conv2dLayer(Layer):
    """z_t = W a_t + bias, a_t the patch of the input that output position t sees; R groups of channels.

    Which way to the per-sample gradients is fastest depends on the shapes (measured on CPU cores; see `way`):
    - few positions for the size of g: none at all, a and d are kept (`ConvFactors`);
    - 1x1, or few positions: unfold, then one matrix product per sample;
    - many views: an ordinary weight gradient for each sample, whose batch is the sample's views;
    - else: the weight gradient of one convolution with a group for every sample. The library's kernels for it take
      channels in eights; other numbers of channels are fast with the channels of a pixel side by side.
    The choice is by shape and not by timing, so that a run repeats bit for bit.
    """

    def __init__(self, name: str, module: nn.Conv2d):
        super().__init__(name, module)
        self.kernel, self.stride, self.dilation = module.kernel_size, module.stride, module.dilation
        self.R = module.groups
        self.O, self.C = module.out_channels // self.R, module.in_channels // self.R
        self.taps = self.kernel[0] * self.kernel[1]
        self.patch = self.C * self.taps  # I without the bias
        self.shape = (self.R, self.O, self.patch + self.bias)
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        self.padding = module.padding if plain else (0, 0)
        # 'same' may be lopsided and other modes are not zeros: pad the input itself, once, for both.
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self._starts: dict[tuple, tuple[Tensor, int]] = {}  # of the last shapes seen: see `_runs`
        self.pad = None if plain else (module._reversed_padding_repeated_twice, mode)

    def columns(self, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        n, S = len(d), d[0, 0].numel()
        U = self.patches(self.padded(a), *d.shape[2:]).reshape(n, self.R, self.patch, S)
        D = d.reshape(n, self.R, self.O, S)
        return (F.pad(U, (0, 0, 0, 1), value=1.0) if self.bias else U), D

    def gradient(self, a: Tensor, d: Tensor, K: int) -> LayerGradient:
        """Per-sample gradients in the form that costs least for these shapes."""
        a, I = self.padded(a), self.patch
        S = K * d.shape[2] * d.shape[3]
        # Pairs of positions, S^2 (I + O) products or with stride 1 S^2 (C + O), and one weight gradient of S O I,
        # against S O I products that run slower, and g to be written and read.
        pairs_cost = min(2 * (I + self.O), 4 * (self.C + self.O)) if self.by_pixels(a) else 2 * (I + self.O)
        few = S * pairs_cost < self.O * I
        return ConvFactors(self, a, d, K) if few and self.R == 1 else self.per_sample(a, d, K)

    def by_pixels(self, a: Tensor) -> bool:
        """Whether pairs of pixels decide what is cheap. Not on a GPU: it would wait at every such layer,
        for the search for norms that are lost in rounding."""
        return self.pixels_pair and a.device.type == "cpu"

    @property
    def pixels_pair(self) -> bool:
        """Whether `patch_pairs` covers it: stride 1, and more taps than one."""
        return self.stride == (1, 1) and self.taps > 1 and self.R == 1

    def samples(self, a: Tensor, d: Tensor) -> Dense | Factors:
        """g, or where positions are few the patches and output gradients that it is a product of."""
        if self.R == 1 and 4 * d[0, 0].numel() <= self.O:
            U, D = self.columns(a, d)
            return Factors(U[:, 0].mT.contiguous(), D[:, 0].mT.clone())
        return self.per_sample(self.padded(a), d, 1)

    def apart(self, g: Dense | Factors) -> list[Tensor]:
        """As of every layer; columns that run (tap, channel) stay so in memory, and nothing is copied."""
        if isinstance(g, Factors) or g.taps == 1:
            return super().apart(g)
        w = g.w.unflatten(3, (self.taps, self.C)).mT.flatten(1, 2).unflatten(3, self.kernel)
        return [w, g.bias.flatten(1)] if self.bias else [w]

    def join(self, *gradients: Tensor) -> Dense:
        """The inverse of `apart`, of what Opacus gives too."""
        w = gradients[0].permute(0, 1, 3, 4, 2)
        if self.taps == 1 or gradients[0].is_contiguous() or not w.is_contiguous():
            return super().join(*gradients)
        bias = gradients[1].view(-1, self.R, self.O) if self.bias else None
        return Dense(w.view(-1, self.R, self.O, self.patch), bias, self.taps)

    def moments(self, a: Tensor, d: Tensor, inputs: bool) -> tuple[Tensor | None, Tensor]:
        H, W = d.shape[2:]
        A = self.second_moment(a, H, W) if inputs else None
        d = d.unflatten(1, (self.R, -1)).flatten(3).permute(1, 2, 0, 3).flatten(2)  # (R, O, n*S)
        return A, d @ d.mT / (H * W)

    def padded(self, a: Tensor) -> Tensor:
        """The input as the convolution itself sees it, but for zeros that `padding` still asks for."""
        return a if self.pad is None else F.pad(a, self.pad[0], mode=self.pad[1])

    def per_sample(self, a: Tensor, d: Tensor, K: int, way: str | None = None) -> Dense:
        """g from the (padded) input a (b*K, R*C, H, W) and d (b*K, R*O, H', W'); `way` as below, where it is given."""
        b = len(d) // K
        bias = d.flatten(2).sum(2).view(b, K, self.R, self.O).sum(1) if self.bias else None
        way = way or self.way(K, d[0, 0].numel())
        if way == "unfold":
            return self._unfolded(a, d, b, bias)
        if way == "loop":
            w = torch.cat([self.weight_gradient(x, e, 1) for x, e in zip(a.split(K), d.split(K), strict=True)])
            return Dense(w.view(b, self.R, self.O, self.patch), bias)
        innermost = way == "pixels"
        size = self._at_once(a, d, b)
        parts = zip(a.split(size * K), d.split(size * K), strict=True)
        w = [self.weight_gradient(*(self._side_by_side(t, K, innermost) for t in part), len(part[0]) // K)
             for part in parts]
        w = (torch.cat(w) if len(w) > 1 else w[0]).view(b, self.R, self.O, self.patch)
        return Dense(w, bias, self.taps if innermost else 1)

    def _at_once(self, a: Tensor, d: Tensor, b: int) -> int:
        """Samples per convolution with a group for each: what a core's caches hold, where g is small beside a and d."""
        read, written = (a.numel() + d.numel()) * a.element_size(), b * self.R * self.O * self.patch * a.element_size()
        parts = -(-read // (4 * UNFOLDED)) if read >= 4 * written else 1
        return -(-b // min(parts, max(1, b // 16)))

    def way(self, K: int, S: int) -> str:
        """How g is computed, for K views of S positions each.

        A convolution with a group per sample starts slowly where positions are few, and for several views its input has
        to be rearranged, which a loop over samples spares. Unfolding writes k*k copies of the input.
        """
        if K * S < 64 or (self.taps == 1 and (self.C < 64 or self.C % 16)):
            return "unfold"
        if self.C % 8 == 0:
            return "loop" if K >= 8 and S >= 1024 else "groups"
        return "pixels" if K == 1 else "loop"

    @staticmethod
    def _side_by_side(t: Tensor, K: int, innermost: bool) -> Tensor:
        """(b*K, C, H, W) -> (K, b*C, H, W): all samples' channels side by side; for K = 1, innermost in memory."""
        if K > 1:
            return t.unflatten(0, (-1, K)).transpose(0, 1).flatten(1, 2)
        t = t.reshape(1, -1, *t.shape[2:])
        if not innermost:
            return t
        # As a matrix: its transpose is copied block by block, in a third of the time of a copy between layouts.
        return t.view(t.shape[1], -1).t().contiguous().view(1, *t.shape[2:], -1).permute(0, 3, 1, 2)

    def weight_gradient(self, a: Tensor, d: Tensor, b: int) -> Tensor:
        """Weight gradient of a convolution whose channels hold b samples side by side: (b*R, O, I).

        The columns run (channel, tap); where the channels of a pixel are innermost in memory, (tap, channel).
        """
        groups = b * self.R
        shape = a.new_empty(()).expand(groups * self.O, self.C, *self.kernel)  # only its shape is read
        w = torch.ops.aten.convolution_backward(
            d, a, shape, None, self.stride, self.padding, self.dilation, False, (0, 0), groups, (False, True, False)
        )[1]
        if not w.is_contiguous():
            w = w.permute(0, 2, 3, 1)
        return w.reshape(groups, self.O, self.patch)

    def _unfolded(self, a: Tensor, d: Tensor, b: int, bias: Tensor | None) -> Dense:
        """g = sum_t d_t a_t' from patches copied out, the columns of a patch tap by tap.

        The patches are the rows of U (b, R, S, I). With the channels of a pixel side by side, a row of a patch is one
        run of memory, and `index_select` copies run by run: a fraction of the time of a strided copy. A few samples
        are unfolded at a time, so that the product finds them in cache.
        """
        views, (H, W), (ph, pw) = len(a) // b, d.shape[2:], self.padding
        if self.taps == 1 and self.R == 1 and not (ph or pw):  # the patches are the pixels
            U = a[:, :, :: self.stride[0], :: self.stride[1]].permute(0, 2, 3, 1)
            D = d.permute(0, 2, 3, 1)
            return Dense((D.reshape(b, -1, self.O).mT @ U.reshape(b, -1, self.C)).unsqueeze(1), bias)
        if views == 1:
            D = d.reshape(b, self.R, self.O, H * W)
        else:  # the views of a sample are further positions
            D = d.view(b, views, self.R, self.O, H, W).permute(0, 2, 3, 1, 4, 5).reshape(b, self.R, self.O, -1)
        g, lo = d.new_empty(b, self.R, self.O, self.patch), 0
        for U in self._patch_rows(a, b, H, W):
            hi = lo + len(U) // self.R
            torch.bmm(D[lo:hi].flatten(0, 1), U, out=g[lo:hi].flatten(0, 1))
            lo = hi
        return Dense(g, bias, self.taps)

    def _patch_rows(self, a: Tensor, b: int, H: int, W: int) -> Iterator[Tensor]:
        """The patches of b samples as rows, a few samples at a time: (samples * R, S, I), columns tap by tap."""
        views, (ph, pw) = len(a) // b, self.padding
        step = min(b, max(1, UNFOLDED // (self.R * self.patch * views * H * W * a.element_size())))
        padded = (a.shape[2] + 2 * ph, a.shape[3] + 2 * pw)
        runs, length = self._runs((step, views, *padded), (H, W), a.device)
        for lo in range(0, b, step):
            part = a[lo * views : (lo + step) * views].permute(0, 2, 3, 1)
            part = F.pad(part, (0, 0, pw, pw, ph, ph)) if ph or pw else part.contiguous()
            rows = part.as_strided(((part.numel() - length) // self.C + 1, length), (self.C, 1))  # overlapping
            U = rows.index_select(0, runs[: len(part) // views * (len(runs) // step)])
            yield U.view(-1, views * H * W, self.patch)

    def patch_pairs(self, a: Tensor, b: int, H: int, W: int) -> Tensor:
        """`pairs` of the patches of b samples, (b, S, S), where `pixels_pair`: no patch is copied out.

        Patches are made of pixels x(r), so a_s' a_t = sum over taps delta of x(s + delta)' x(t + delta): the products
        of all pairs of pixels, once, added up along the taps; first those of a kernel row, then the rows.
        """
        K, C, height, width = len(a) // b, *a.shape[1:]
        X = a.view(b, K, C, -1).transpose(1, 2).reshape(b, C, -1)
        P = pairs(X.mT).view(b, K, height, width, K, height, width)
        for axis, out, tap in ((3, W, 1), (2, H, 0)):
            P = self._along_taps(P, axis, out, tap)
        return P.view(b, K * H * W, -1)

    def _along_taps(self, P: Tensor, axis: int, out: int, tap: int) -> Tensor:
        """sum_j P(s + j, t + j) over the taps j of one axis of the kernel, s and t its output positions.

        P    products of pairs, of which the axes `axis` and `axis` + 3 count pixels; those outside the image are 0
        """
        size, pad, step = P.shape[axis], self.padding[tap], self.dilation[tap]
        shape = list(P.shape)
        shape[axis] = shape[axis + 3] = out
        total = P.new_zeros(shape)
        for j in range(self.kernel[tap]):
            first = j * step - pad  # the pixel that output position 0 sees
            lo, hi = max(0, -first), min(out, size - first)
            if lo < hi:
                here, there = total, P
                for at in (axis, axis + 3):
                    here, there = here.narrow(at, lo, hi - lo), there.narrow(at, lo + first, hi - lo)
                here += there
        return total

    def _runs(self, image: tuple[int, ...], output: tuple[int, int], device: torch.device) -> tuple[Tensor, int]:
        """Where the runs of memory of all patches start, in pixels' groups of C channels, and their length.

        image     (samples, views, padded height, padded width); the channels are innermost
        Order: sample, group, view, output row, output column, kernel row, and kernel column where a run is one tap.
        """
        key = (image, output, device)
        if key not in self._starts:
            (kh, kw), (sh, sw), (dh, dw), R = self.kernel, self.stride, self.dilation, self.R
            whole = dw == 1 and R == 1  # the taps of a kernel row are neighbours in memory
            taps = 1 if whole else kw
            b, K, Hp, Wp = image

            def axis(n: int, step: int, place: int) -> Tensor:
                return (torch.arange(n, device=device) * step).view(-1, *[1] * (6 - place))

            rows = axis(b, K * Hp * Wp, 0) + axis(K, Hp * Wp, 2) + axis(output[0], sh * Wp, 3)
            rows = rows + axis(output[1], sw, 4) + axis(kh, dh * Wp, 5) + axis(taps, dw, 6)
            self._starts = {key: ((rows * R + axis(R, 1, 1)).flatten(), self.C * (kw if whole else 1))}
        return self._starts[key]

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
        if same_size and self.pad is None and min(H, W) >= max(4, self.kernel[0]):  # in smaller ones borders are most
            A, ones = (t.unsqueeze(0) for t in patch_moment(a, self.kernel[0]))
        elif self.R == self.taps == 1 and self.pad is None and self.padding == (0, 0):  # a patch is a pixel
            U = a[:, :, :: self.stride[0], :: self.stride[1]].transpose(0, 1).flatten(1)
            A, ones = (U @ U.mT).unsqueeze(0), U.sum(1).unsqueeze(0)
        elif self.R == 1:
            A, ones = a.new_zeros(self.patch, self.patch), a.new_zeros(self.patch)
            for U in self._patch_rows(self.padded(a), len(a), H, W):
                U = U.flatten(0, 1)
                A += product(U.mT, U.mT)
                if self.bias:
                    ones += U.sum(0)
            A, ones = self._in_order(A, ones)
        else:
            U = self.patches(self.padded(a), H, W).permute(1, 2, 3, 4, 0, 5, 6).reshape(self.R, self.patch, -1)
            A, ones = U @ U.mT, U.sum(2)
        return self._bordered(A, ones, len(a) * H * W)

    def sampled_moment(self, a: Tensor, d: Tensor, positions: int) -> Tensor | None:
        """`second_moment` from every (S / positions)-th position, beginning at position i of image i, times that."""
        n, (H, W) = len(a), d.shape[2:]
        if self.R > 1 or 2 * positions > H * W:
            return None
        every = torch.linspace(0, H * W, positions + 1)[:-1].long()
        t = (torch.arange(n).unsqueeze(1) + every) % (H * W)  # (n, positions)
        U = self._rows_at(self.padded(a), (t // W).to(a.device), (t % W).to(a.device))
        scale = H * W / positions
        A, ones = self._in_order(U.mT @ U * scale, U.sum(0) * scale)
        return self._bordered(A, ones, n * H * W)

    def _rows_at(self, a: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Patches that the output positions (row, column), both (n, p), see, as rows (n * p, I), tap by tap; R = 1."""
        (kh, kw), (sh, sw), (dh, dw), (ph, pw) = self.kernel, self.stride, self.dilation, self.padding
        pixels = a.permute(0, 2, 3, 1)
        pixels = F.pad(pixels, (0, 0, pw, pw, ph, ph)) if ph or pw else pixels.contiguous()
        n, Hp, Wp, C = pixels.shape
        whole = dw == 1  # the taps of a kernel row are neighbours in memory
        start = (torch.arange(n, device=a.device).unsqueeze(1) * Hp + row * sh) * Wp + column * sw
        start = start.unsqueeze(2) + torch.arange(kh, device=a.device) * (dh * Wp)
        if not whole:
            start = start.unsqueeze(3) + torch.arange(kw, device=a.device) * dw
        length = C * (kw if whole else 1)
        runs = pixels.as_strided(((pixels.numel() - length) // C + 1, length), (C, 1))  # overlapping
        return runs.index_select(0, start.flatten()).view(-1, self.patch)

    def _in_order(self, A: Tensor, ones: Tensor) -> tuple[Tensor, Tensor]:
        """Moments (I, I) and (I,) of rows that run (tap, channel), as (1, I, I) and (1, I) in the order of weights."""
        A = A.view(self.taps, self.C, self.taps, self.C).permute(1, 0, 3, 2).reshape(1, self.patch, self.patch)
        return A, ones.view(self.taps, self.C).mT.reshape(1, -1)

    def _bordered(self, A: Tensor, ones: Tensor, count: int) -> Tensor:
        """A with the row and column of the bias' coordinate, 1: sums of a (R, I), and of 1, `count`."""
        if not self.bias:
            return A
        whole = A.new_empty(self.R, self.patch + 1, self.patch + 1)
        whole[:, :-1, :-1] = A
        whole[:, -1, :-1] = whole[:, :-1, -1] = ones
        whole[:, -1, -1] = count
        return whole


class ConvFactors:
    """A wide convolution with few positions: a (b*K, C, H, W) and d (b*K, O, H', W') kept as they are.

    ||g||^2 = <U U', d d'> over pairs of positions, U the unfolded input, costs S^2 (I + O) where g costs S I O,
    and with stride 1 only S^2 (C + O), since U U' follows from pairs of pixels (`Conv2dLayer.patch_pairs`);
    projections are convolutions with the directions as kernels; the weighted sum is one ordinary weight gradient.
    """

    def __init__(self, layer: Conv2dLayer, a: Tensor, d: Tensor, K: int):
        self.layer, self.a, self.d, self.K = layer, a, d, K
        self._g: Dense | None = None  # kept once somebody asked for it: norms and sums are then those of g

    def _positions(self, t: Tensor) -> Tensor:
        """(b*K, rows, H', W') -> (b, rows, S)."""
        t = t.flatten(2)
        return t if self.K == 1 else t.unflatten(0, (-1, self.K)).transpose(1, 2).flatten(2)

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        layer, (H, W) = self.layer, self.d.shape[2:]
        d, b = self._positions(self.d).mT, len(self.d) // self.K
        if layer.pixels_pair:
            A = layer.patch_pairs(self.a, b, H, W)
        else:
            A = torch.cat([pairs(U) for U in layer._patch_rows(self.a, b, H, W)])
        return gram_sq_norms(A, d, lambda rows: self.select(rows).double().materialise(), layer.patch, one=layer.bias)

    def sq_norms(self) -> Tensor:
        return self._norms[0] if self._g is None else self._g.sq_norms()

    def terms(self) -> Tensor:
        return self._norms[1] if self._g is None else self._g.terms()

    def diagonal_sq_norms(self, w: Tensor) -> Tensor:
        return weighted_energy(self.materialise(), w)

    def project(self, Q_G: Tensor, Q_A: Tensor) -> Tensor:
        layer, k = self.layer, Q_A.shape[-1]
        kernels = Q_A[0, : layer.patch].mT.reshape(k, -1, *layer.kernel)
        last = Q_A[0, layer.patch] if layer.bias else None
        aQ = self._positions(F.conv2d(self.a, kernels, last, layer.stride, layer.padding, layer.dilation))
        (O, m), S = Q_G.shape[1:], aQ.shape[2]
        if O * k * (S + m) < S * m * (O + k):  # the side first that leaves less to do for the other
            right = aQ @ self._positions(self.d).mT  # (b, k, O)
            return (right.reshape(-1, O) @ Q_G[0]).view(-1, k, m).mT.unsqueeze(1)
        dQ = self._positions(torch.einsum("nohw,om->nmhw", self.d, Q_G[0]))
        return (dQ @ aQ.mT).unsqueeze(1)

    def projected_energy(self, Q_G: Tensor, Q_A: Tensor, w: Tensor) -> Tensor:
        return weighted_energy(self.project(Q_G, Q_A), w)

    def projected_terms(self) -> Tensor:
        return self.terms()

    def weighted_sum(self, c: Tensor) -> Tensor:
        if self._g is not None:
            return self._g.weighted_sum(c)
        d = self.d * c.repeat_interleave(self.K)[:, None, None, None]
        w = self.layer.weight_gradient(self.a, d, 1)
        return torch.cat([w, d.sum((0, 2, 3)).view(1, -1, 1)], -1) if self.layer.bias else w

    def materialise(self) -> Tensor:
        # Groups leave the columns in order; where g is wanted whole, that spares a copy. Not in float64: no kernel.
        ordered = self.layer.C % 8 == 0 and self.layer.taps > 1 and self.a.dtype == torch.float32
        g = self.layer.per_sample(self.a, self.d, self.K, "groups" if ordered else None)
        if self.layer.pixels_pair:  # with other strides it would change the rounding of recorded runs
            self._g = g
        return g.materialise()

    def select(self, keep: Tensor) -> ConvFactors:
        rows = (keep[:, None] * self.K + torch.arange(self.K, device=keep.device)).flatten()
        return ConvFactors(self.layer, self.a[rows], self.d[rows], self.K)

    def double(self) -> ConvFactors:
        return ConvFactors(self.layer, self.a.double(), self.d.double(), self.K)


def keeps_size(kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int],
               groups: int) -> bool:
    """Whether `patch_moment` covers a convolution of this shape."""
    k = kernel[0]
    return (kernel == (k, k) and k % 2 == 1 and k > 1 and stride == (1, 1) and dilation == (1, 1)
            and padding == (k // 2, k // 2) and groups == 1)


def patch_moment(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """x (n, C, H, W) -> sum of a a' (C k k, C k k) and sum of a (C k k), over all n*H*W zero-padded patches.

    A is symmetric, so only lags that do not point down are computed. Of a border strip fewer matter: with h = k // 2, a
    lag of h or more across the strip leads out of the image or to an offset that no patch has.
    """
    C, H, W = x.shape[1:]
    h = k // 2
    reach, near = 2 * h, h - 1  # the largest lag of all, and across a border strip
    total = x.sum(0)

    def correlation(x: Tensor, rows: slice, cols: slice, up: int, aside: int) -> Tensor:
        """sum_{r in rows x cols} x_c(r) x_c'(r + lag), lags -up .. 0 by -aside .. aside: (C, C, up+1, 2 aside+1)."""
        top, left, right = rows.start - up, cols.start - aside, cols.stop + aside
        around = F.pad(x[:, :, max(0, top) : rows.stop, max(0, left) : right],
                       (max(0, -left), max(0, right - W), max(0, -top), 0))
        shape = x.new_empty(()).expand(C, C, up + 1, 2 * aside + 1)  # only its shape is read
        return torch.ops.aten.convolution_backward(x[:, :, rows, cols].contiguous(), around, shape, None, (1, 1),
                                                   (0, 0), (1, 1), False, (0, 0), 1, (False, True, False))[1]

    def outside(delta: int, size: int) -> slice:
        """The positions r of 0 .. size-1 that are no o + delta for o in 0 .. size-1."""
        return slice(size + delta, size) if delta < 0 else slice(0, delta)

    def within(i: int) -> tuple[slice, slice]:
        """The offsets of 0 .. k-1 at a lag of at most `near` from i, and those lags among -near .. near."""
        lo, hi = max(0, i - near), min(k, i + near + 1)
        return slice(lo, hi), slice(near + lo - i, near + hi - i)

    down, across = slice(0, H), slice(0, W)
    at_once = max(1, 2 * UNFOLDED // (C * H * W * x.element_size()))  # images that stay in a core's caches
    every = sum(correlation(part, down, across, reach, reach) for part in x.split(at_once))
    offsets = range(-h, h + 1)
    row = {d: correlation(x, outside(d, H), across, near, reach) for d in offsets if d}
    col = {d: correlation(x, down, outside(d, W), reach, near) for d in offsets if d}
    A = x.new_empty(C, k, k, C, k, k)
    s = x.new_empty(C, k, k)
    for i, dy in enumerate(offsets):
        rows, up = slice(max(0, i - near), i + 1), slice(near - min(i, near), near + 1)
        for j, dx in enumerate(offsets):
            cols, aside = within(j)
            block = A[:, i, j, :, : i + 1]  # (C, C, i+1, k): taps (i', j') with i' <= i, at the lags (i' - i, j' - j)
            block.copy_(every[:, :, reach - i :, reach - j : reach - j + k])
            if dy:
                block[:, :, rows] -= row[dy][:, :, up, reach - j : reach - j + k]
            if dx:
                block[..., cols] -= col[dx][:, :, reach - i :, aside]
            if dy and dx:
                corner = correlation(x, outside(dy, H), outside(dx, W), near, near)
                block[:, :, rows, cols] += corner[:, :, up, aside]
            s[:, i, j] = total[:, max(0, dy) : H + min(0, dy), max(0, dx) : W + min(0, dx)].sum((1, 2))
    for i in range(k):
        for below in range(i + 1, k):
            A[:, i, :, :, below] = A[:, below, :, :, i].permute(2, 3, 0, 1)
    return A.view(C * k * k, -1), s.flatten()

"""sum over images and positions of a a' for the patches a that a convolution sees: K-FAC's A, without unfolding.

A patch holds the pixels r + delta for the k*k offsets delta around a position, so for a convolution of stride 1 that
keeps the image's size,

    A[(c, delta), (c', delta')] = sum_{r in V(delta)} x_c(r) x_c'(r + delta' - delta),    x = 0 outside the image

depends on delta only through V(delta), the positions that the window leaves inside the image. The sum over all r is the
image's autocorrelation at (2k-1)^2 lags, which is one weight gradient of a convolution of x with itself: 25 products a
pair of channels for k = 3 where unfolding takes 81. What V(delta) lacks is a few border rows and columns, which are
taken off by inclusion and exclusion.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def keeps_size(kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int],
               groups: int) -> bool:
    """Whether `patch_moment` covers a convolution of this shape."""
    k = kernel[0]
    return (kernel == (k, k) and k % 2 == 1 and k > 1 and stride == (1, 1) and dilation == (1, 1)
            and padding == (k // 2, k // 2) and groups == 1)


def patch_moment(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """x (n, C, H, W) -> sum of a a' (C k k, C k k) and sum of a (C k k), over all n*H*W zero-padded patches."""
    C, H, W = x.shape[1:]
    h = k // 2
    padded = F.pad(x, (2 * h,) * 4)
    total = x.sum(0)

    def correlation(rows: slice, cols: slice) -> Tensor:
        """sum_{r in rows x cols} x_c(r) x_c'(r + lag), shape (C, C, 4h+1, 4h+1)."""
        here = x[:, :, rows, cols]
        around = padded[:, :, rows.start : rows.stop + 4 * h, cols.start : cols.stop + 4 * h]
        shape = x.new_empty(()).expand(C, C, 4 * h + 1, 4 * h + 1)  # only its shape is read
        return torch.ops.aten.convolution_backward(here.contiguous(), around, shape, None, (1, 1), (0, 0), (1, 1),
                                                   False, (0, 0), 1, (False, True, False))[1]

    def outside(delta: int, size: int) -> slice:
        """The positions r of 0 .. size-1 that are no o + delta for o in 0 .. size-1."""
        return slice(size + delta, size) if delta < 0 else slice(0, delta)

    every = correlation(slice(0, H), slice(0, W))
    offsets = range(-h, h + 1)
    row = {d: correlation(outside(d, H), slice(0, W)) if d else 0 for d in offsets}
    col = {d: correlation(slice(0, H), outside(d, W)) if d else 0 for d in offsets}
    A = x.new_empty(C, k, k, C, k, k)
    s = x.new_empty(C, k, k)
    for i, dy in enumerate(offsets):
        for j, dx in enumerate(offsets):
            corner = correlation(outside(dy, H), outside(dx, W)) if dy and dx else 0
            lags = every - row[dy] - col[dx] + corner
            A[:, i, j] = lags[:, :, h - dy : 3 * h + 1 - dy, h - dx : 3 * h + 1 - dx]
            s[:, i, j] = total[:, max(0, dy) : H + min(0, dy), max(0, dx) : W + min(0, dx)].sum((1, 2))
    return A.view(C * k * k, -1), s.flatten()

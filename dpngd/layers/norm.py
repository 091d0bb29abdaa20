"""Group norm and layer norm: z = scale * xhat + shift, whose gradient is the single row [d xhat | d]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.layers.base import RowLayer, register
from dpngd.layers.forms import Dense


class NormLayer(RowLayer):
    """What the norms share. A subclass gives `scale_and_shift`."""

    def __init__(self, name: str, module: nn.GroupNorm | nn.LayerNorm):
        super().__init__(name, module)
        self.shape = (1, 1, module.weight.numel() * (1 + self.bias))

    def scale_and_shift(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of scale and shift per row, each (n, ..., *parameter's shape): what precedes is summed over."""
        raise NotImplementedError(f"{type(self).__name__} must define `scale_and_shift`")

    def gradient(self, a: Tensor, d: Tensor, K: int) -> Dense:
        b = len(d) // K
        scale, shift = self.scale_and_shift(a, d)
        wanted = (scale, shift) if self.bias else (scale,)
        rows = [t.reshape(b, -1, self.module.weight.numel()).sum(1) for t in wanted]
        return Dense(torch.cat(rows, 1).view(b, 1, 1, -1))


@register(nn.GroupNorm)
class GroupNormLayer(NormLayer):
    """xhat is normalised over the channels of a group and all positions; scale and shift are per channel."""

    def scale_and_shift(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """d * xhat and d, summed over positions.

        Group norm of n samples with G groups is group norm of one sample with n*G groups, so the library's own
        backward gives the sums of every sample separately, and no normalised copy of x is made.
        """
        m = self.module
        n, C, G, S = len(x), m.num_channels, m.num_groups, x[0, 0].numel()
        x, d = x.contiguous(), d.contiguous()
        _, mean, rstd = torch.native_group_norm(x, None, None, n, C, S, G, m.eps)
        _, scale, shift = torch.ops.aten.native_group_norm_backward(
            d.view(1, n * C, S), x.view(1, n * C, S), mean.view(1, -1), rstd.view(1, -1), x.new_ones(n * C), 1, n * C,
            S, n * G, (False, True, True))
        return scale.view(n, C), shift.view(n, C)


@register(nn.LayerNorm)
class LayerNormLayer(NormLayer):
    """xhat is normalised over the last axes, which are those of scale and shift."""

    def scale_and_shift(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return d * F.layer_norm(x, self.module.normalized_shape, None, None, self.module.eps), d

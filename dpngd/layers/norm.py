"""Group norm, layer norm and instance norm: z = scale * xhat + shift, whose gradient is the single row [d xhat | d]."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.errors import UsageError
from dpngd.layers.base import RowLayer, register


class NormLayer(RowLayer):
    """What the norms share. A subclass gives `scale_and_shift`."""

    def __init__(self, name: str, module: nn.GroupNorm | nn.LayerNorm):
        super().__init__(name, module)
        self.shape = (1, 1, module.weight.numel() * (1 + self.bias))

    def scale_and_shift(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of scale and shift per row, each (n, ..., *parameter's shape): what precedes is summed over."""
        raise NotImplementedError(f"{type(self).__name__} must define `scale_and_shift`")

    def rows(self, a: Tensor, d: Tensor) -> Tensor:
        return self._joined(len(d), *self.scale_and_shift(a, d))

    def _joined(self, n: int, scale: Tensor, shift: Tensor) -> Tensor:
        wanted = (scale, shift) if self.bias else (scale,)
        return torch.cat([t.reshape(n, -1, self.module.weight.numel()).sum(1) for t in wanted], 1)


@register(nn.GroupNorm)
class GroupNormLayer(NormLayer):
    """xhat is normalised over the channels of a group and all positions; scale and shift are per channel.

    Group norm of n samples with G groups is group norm of one sample with n*G groups, so the library's own backward
    gives the sums of every sample separately, and no normalised copy of x is made.
    """

    def scale_and_shift(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """d * xhat and d, summed over positions."""
        return self._backward(x, d, *self._moments(x), (False, True, True))[1:]

    def backward_of(self, a: Tensor, z: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """The gradient of x needs the same sums over positions: one pass gives both.

        Autograd has kept the mean and 1 / sd of the forward pass. Where z is not group norm's own output (a hook
        changed it), or a version of torch does not show what it kept, there is no shortcut.
        """
        if type(z.grad_fn).__name__ != "NativeGroupNormBackward0" or not hasattr(z.grad_fn, "_saved_result2"):
            return None
        mean, rstd = z.grad_fn._saved_result1, z.grad_fn._saved_result2

        def backward(d: Tensor) -> tuple[Tensor, Tensor]:
            dx, scale, shift = self._backward(a, d, mean, rstd, (True, True, True))
            return dx.view_as(a), self._joined(len(a), scale, shift)

        return backward

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and 1 / sd of every group, each (n, G)."""
        m = self.module
        return torch.native_group_norm(x.contiguous(), None, None, len(x), m.num_channels, x[0, 0].numel(),
                                       m.num_groups, m.eps)[1:]

    def _backward(self, x: Tensor, d: Tensor, mean: Tensor, rstd: Tensor, wanted: tuple[bool, bool, bool],
                  ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, of scale and of shift, the last two (n, C) per row."""
        n, C, G, S = len(x), self.module.num_channels, self.module.num_groups, x[0, 0].numel()
        x, d = (t.reshape(1, n * C, S) for t in (x, d))
        scale = self.module.weight.detach().expand(n, C).contiguous().view(-1)
        dx, scale, shift = torch.ops.aten.native_group_norm_backward(
            d, x, mean.view(1, -1), rstd.view(1, -1), scale, 1, n * C, S, n * G, wanted)
        return dx, scale.view(n, C), shift.view(n, C)


@register(nn.LayerNorm)
class LayerNormLayer(NormLayer):
    """xhat is normalised over the last axes, which are those of scale and shift."""

    def scale_and_shift(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return d * F.layer_norm(x, self.module.normalized_shape, None, None, self.module.eps), d


@register(nn.InstanceNorm1d, nn.InstanceNorm2d)
class InstanceNormLayer(NormLayer):
    """xhat is normalised over the positions of each channel; scale and shift are per channel."""

    def __init__(self, name: str, module: nn.InstanceNorm1d | nn.InstanceNorm2d):
        super().__init__(name, module)
        if module.track_running_stats:
            raise UsageError(f"layer {name!r} ({type(module).__name__}) keeps running statistics, which hold private "
                             "data outside the guarantee: pass track_running_stats=False")

    def scale_and_shift(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """d * xhat and d, summed over positions."""
        return (d * F.instance_norm(x, eps=self.module.eps)).flatten(2).sum(2), d.flatten(2).sum(2)

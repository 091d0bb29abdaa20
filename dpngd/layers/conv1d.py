"""Convolutions in one dimension, with stride, padding (of every mode), dilation and groups."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.layers.base import Layer, register


@register(nn.Conv1d)
class Conv1dLayer(Layer):
    """z_t = W a_t + bias, a_t the window of the input that output position t sees; R groups of channels."""

    def __init__(self, name: str, module: nn.Conv1d):
        super().__init__(name, module)
        R = module.groups
        self.patch = module.in_channels // R * module.kernel_size[0]  # I without the bias
        self.shape = (R, module.out_channels // R, self.patch + self.bias)
        self.mode = "constant" if module.padding_mode == "zeros" else module.padding_mode

    def columns(self, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        m, n, S = self.module, len(d), d.shape[2]
        a = F.pad(a, m._reversed_padding_repeated_twice, mode=self.mode)  # also where 'same' is lopsided
        s0, s1, s2 = a.stride()
        windows = a.as_strided((n, m.in_channels, *m.kernel_size, S), (s0, s1, m.dilation[0] * s2, m.stride[0] * s2))
        U = windows.reshape(n, m.groups, self.patch, S)
        return (F.pad(U, (0, 0, 0, 1), value=1.0) if self.bias else U), d.unflatten(1, (m.groups, -1))

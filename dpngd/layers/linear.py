"""Linear layers, over any number of leading axes (time steps are positions)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.layers.base import Layer, register
from dpngd.layers.forms import Dense, Factors


@register(nn.Linear)
class LinearLayer(Layer):
    """z_t = W a_t + bias: g = sum_t d_t a_t', of rank one where there is one position."""

    def __init__(self, name: str, module: nn.Linear):
        super().__init__(name, module)
        self.shape = (1, module.out_features, module.in_features + self.bias)

    def columns(self, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        U, D = (t.reshape(len(d), 1, -1, t.shape[-1]).mT for t in (a, d))
        return (F.pad(U, (0, 0, 0, 1), value=1.0) if self.bias else U), D

    def gradient(self, a: Tensor, d: Tensor, K: int) -> Factors | Dense:
        """The factors a (b, S, I) and d (b, S, O) with the views among the positions, or g where that is smaller."""
        b = len(d) // K
        a, d = a.reshape(b, -1, a.shape[-1]), d.reshape(b, -1, d.shape[-1])
        if self.bias:
            a = F.pad(a, (0, 1), value=1.0)
        S, O, I = d.shape[1], d.shape[2], a.shape[2]
        return Factors(a, d) if S * (O + I) <= O * I or S == 1 else Dense((d.mT @ a).unsqueeze(1))

    def samples(self, a: Tensor, d: Tensor) -> Factors | Dense:
        return self.gradient(a if self.bias else a.clone(), d.clone(), 1)  # with a bias, a is copied to append a 1

    def input_rows(self, a: Tensor) -> Tensor:
        a = a.reshape(-1, a.shape[-1])  # nothing is copied
        return F.pad(a, (0, 1), value=1.0) if self.bias else a

    def moments(self, a: Tensor, d: Tensor, inputs: bool) -> tuple[Tensor | None, Tensor]:
        S, d = d[0].numel() // d.shape[-1], d.reshape(-1, d.shape[-1])
        if inputs:
            a = self.input_rows(a)
        return ((a.mT @ a).unsqueeze(0) if inputs else None), (d.mT @ d).unsqueeze(0) / S

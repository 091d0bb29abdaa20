"""Opacus's attention: `DPMultiheadAttention` is built from Linear layers and, with add_bias_kv, two `SequenceBias`."""

from __future__ import annotations

from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor

from dpngd.layers.base import RowLayer, register


@register(SequenceBias)
class SequenceBiasLayer(RowLayer):
    """Appends the bias to the end of a sequence: g is d at the last position."""

    parameters = ("bias",)

    def __init__(self, name: str, module: SequenceBias):
        super().__init__(name, module)
        self.shape = (1, 1, len(module.bias))
        self.batch_axis = 0 if module.batch_first else 1

    def rows(self, a: Tensor, d: Tensor) -> Tensor:
        return d.select(1 - self.batch_axis, -1)

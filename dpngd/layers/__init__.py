"""The trainable layers of a model: one class per kind, which holds all that depends on the kind.

    linear.py      Linear
    conv.py        Conv2d (stride, padding, dilation, groups)
    conv1d.py      Conv1d (the same)
    norm.py        GroupNorm, LayerNorm, InstanceNorm1d and InstanceNorm2d without running statistics
    embedding.py   Embedding
    attention.py   SequenceBias of Opacus's DPMultiheadAttention, which is Linear otherwise
    base.py        the interface `Layer`, the registry, what is refused
    forms.py       how per-sample gradients are held: `Dense`, `Factors`

Each with or without bias, among any layers without parameters. Everything else that trains is refused by name, unless
a class of your own is registered for it: see `base`.
"""

from dpngd.layers import attention, conv, conv1d, embedding, linear, norm  # noqa: F401 (each registers its kinds)
from dpngd.layers.base import Layer, RowLayer, register, trainable_layers, unregister
from dpngd.layers.forms import Dense, Factors, LayerGradient

__all__ = ["Dense", "Factors", "Layer", "LayerGradient", "RowLayer", "register", "trainable_layers", "unregister"]

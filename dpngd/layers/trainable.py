"""The trainable layers of a model, and what each needs for per-sample gradients.

Covered: Linear, Conv2d (stride, padding, dilation, groups), GroupNorm, LayerNorm, each with or without bias, among any
layers without parameters. Everything else that trains is refused by name: a parameter without a per-sample gradient
would go unclipped, or untrained.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.errors import UsageError
from dpngd.layers.convolutions import ConvSpec
from dpngd.layers.forms import Dense, Factors, LayerGradient

KINDS = {nn.Conv2d: "conv", nn.Linear: "linear", nn.GroupNorm: "norm", nn.LayerNorm: "norm"}
MIXING = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)


class Layer:
    """A trainable layer: its module, its parameters' names, and its gradient's shape (R, O, I) (see `layers`)."""

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module, self.kind = name, module, KINDS[type(module)]
        trainable = {n for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        self.bias = "bias" in trainable
        if "weight" not in trainable:
            raise UsageError(f"layer {name!r} has a frozen weight and a trainable bias, which is not covered: "
                             "freeze or train both")
        if self.kind == "conv":
            self.conv = ConvSpec(module, self.bias)
            self.shape = (self.conv.R, self.conv.O, self.conv.I + self.bias)
        elif self.kind == "linear":
            self.shape = (1, module.out_features, module.in_features + self.bias)
        else:
            self.shape = (1, 1, module.weight.numel() * (1 + self.bias))

    def params(self) -> dict[str, nn.Parameter]:
        names = ("weight", "bias") if self.bias else ("weight",)
        return {f"{self.name}.{n}" if self.name else n: getattr(self.module, n) for n in names}

    def gradient(self, a: Tensor, d: Tensor, K: int) -> LayerGradient:
        """Per-sample gradients from the layer's input a and output gradient d, rows grouped by sample."""
        b = len(d) // K
        if self.kind == "conv":
            return self.conv.gradient(a, d, K)
        if self.kind == "linear":
            a, d = a.reshape(b, -1, a.shape[-1]), d.reshape(b, -1, d.shape[-1])
            if self.bias:
                a = F.pad(a, (0, 1), value=1.0)
            S, O, I = d.shape[1], d.shape[2], a.shape[2]
            return Factors(a, d) if S * (O + I) <= O * I or S == 1 else Dense((d.mT @ a).unsqueeze(1))
        scale, shift = norm_gradients(self.module, a, d)
        wanted = (scale, shift) if self.bias else (scale,)
        rows = [t.reshape(b, -1, self.module.weight.numel()).sum(1) for t in wanted]
        return Dense(torch.cat(rows, 1).view(b, 1, 1, -1))

    def join(self, weight: Tensor, bias: Tensor | None) -> Dense:
        """Per-sample gradients from those of the parameters themselves, (b, *parameter's shape) each."""
        R, O, I = self.shape
        if self.kind == "norm":
            parts = [weight.flatten(1)] + ([bias.flatten(1)] if self.bias else [])
            return Dense(torch.cat(parts, 1).view(-1, 1, 1, I))
        return Dense(weight.reshape(-1, R, O, I - self.bias), bias.reshape(-1, R, O) if self.bias else None)

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """(R, O, I) -> the parameters' own shapes."""
        if not self.bias:
            parts = [block]
        elif self.kind == "norm":
            parts = block.chunk(2, -1)
        else:
            parts = [block[..., :-1], block[..., -1]]
        return {n: part.reshape(p.shape) for (n, p), part in zip(self.params().items(), parts, strict=True)}


def norm_gradients(module: nn.GroupNorm | nn.LayerNorm, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of scale and shift: d * xhat and d, for group norm already summed over positions.

    Group norm of n samples with G groups is group norm of one sample with n*G groups, so the library's own backward
    gives the sums for every sample apart, and no normalised copy of x is made.
    """
    if isinstance(module, nn.LayerNorm):
        return d * F.layer_norm(x, module.normalized_shape, None, None, module.eps), d
    n, C, G, S = len(x), module.num_channels, module.num_groups, x[0, 0].numel()
    x, d = x.contiguous(), d.contiguous()
    _, mean, rstd = torch.native_group_norm(x, None, None, n, C, S, G, module.eps)
    _, scale, shift = torch.ops.aten.native_group_norm_backward(
        d.view(1, n * C, S), x.view(1, n * C, S), mean.view(1, -1), rstd.view(1, -1), x.new_ones(n * C), 1, n * C, S,
        n * G, (False, True, True))
    return scale.view(n, C), shift.view(n, C)


def trainable_layers(model: nn.Module) -> list[Layer]:
    """The layers with trainable parameters, in order; an error names what is not covered, and what to do."""
    owners: dict[int, str] = {}
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, MIXING):
            raise UsageError(f"layer {name!r} is a {type(module).__name__}, which mixes the samples of a batch, so no "
                             "per-sample gradient exists: use GroupNorm")
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own:
            continue
        if type(module) not in KINDS:
            raise UsageError(f"layer {name!r} ({type(module).__name__}) has trainable parameters and is not covered: "
                             "build it from Linear, Conv2d, GroupNorm and LayerNorm, or freeze it with "
                             "requires_grad_(False)")
        for n, p in own.items():
            if id(p) in owners:
                raise UsageError(f"parameter {name}.{n} is shared with layer {owners[id(p)]!r}, which is not covered: "
                                 "give each layer its own parameters")
            owners[id(p)] = name
        layers.append(Layer(name, module))
    # named_modules() lists a module object once, however often it is registered: a second call is caught at run time.
    if not layers:
        raise UsageError("the model has no trainable parameters: nothing to train")
    return layers

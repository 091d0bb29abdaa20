"""Per-sample gradients g_i = grad of (1/K) sum_k loss(view k of sample i), kept as factors.

One forward pass records every layer's input a, one backward pass its output gradient d. Autograd is asked for
the gradients of layer outputs only: the summed weight gradient, which private training cannot use, is never computed.

Privacy rests on g_i depending on sample i alone. Layers that mix samples are refused by name, and the first
micro-batch is checked against autograd and against a pass of one sample on its own: a model that slips through the
first test fails the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dpngd.errors import UsageError
from dpngd.layers import ConvSpec, Dense, Factors, LayerGradient

Blocks = list[Tensor]
"""One (R, O, I) matrix stack a layer: how sums, noise and updates are held. See `layers` for the symbols."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(predictions (n, ...), targets (n,)) -> the n losses."""

MIXING = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """-log p(y | x), one value a row."""
    return F.cross_entropy(output, y, reduction="none")


class Layer:
    """A trainable layer: its module, its parameters' names, and its gradient's shape (R, O, I)."""

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        trainable = {n for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        self.bias = "bias" in trainable
        if "weight" not in trainable:
            raise UsageError(f"layer {name!r} has a frozen weight and a trainable bias, which is not covered: "
                             "freeze or train both")
        if isinstance(module, nn.Conv2d):
            self.conv = ConvSpec(module, self.bias)
            self.shape = (self.conv.R, self.conv.O, self.conv.I + self.bias)
        elif isinstance(module, nn.Linear):
            self.shape = (1, module.out_features, module.in_features + self.bias)
        else:
            self.shape = (1, 1, module.weight.numel() * (1 + self.bias))

    def params(self) -> dict[str, nn.Parameter]:
        names = ("weight", "bias") if self.bias else ("weight",)
        return {f"{self.name}.{n}" if self.name else n: getattr(self.module, n) for n in names}

    def gradient(self, a: Tensor, d: Tensor, K: int) -> LayerGradient:
        """Per-sample gradients from the layer's input a and output gradient d, rows grouped by sample."""
        b, module = len(d) // K, self.module
        if isinstance(module, nn.Conv2d):
            return self.conv.gradient(a, d, K)
        if isinstance(module, nn.Linear):
            a, d = a.reshape(b, -1, a.shape[-1]), d.reshape(b, -1, d.shape[-1])
            if self.bias:
                a = F.pad(a, (0, 1), value=1.0)
            S, O, I = d.shape[1], d.shape[2], a.shape[2]
            return Factors(a, d) if S * (O + I) <= O * I or S == 1 else Dense((d.mT @ a).unsqueeze(1))
        scale, shift = _norm_gradients(module, a, d)
        rows = [t.reshape(b, -1, module.weight.numel()).sum(1) for t in ((scale, shift) if self.bias else (scale,))]
        return Dense(torch.cat(rows, 1).view(b, 1, 1, -1))

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """(R, O, I) -> the parameters' own shapes."""
        parts = _halves(block, self.bias) if self.shape[1] == 1 and not isinstance(
            self.module, nn.Linear | nn.Conv2d) else ([block[..., :-1], block[..., -1]] if self.bias else [block])
        return {n: part.reshape(p.shape) for (n, p), part in zip(self.params().items(), parts, strict=True)}


def _halves(block: Tensor, bias: bool) -> Sequence[Tensor]:
    return block.chunk(2, -1) if bias else [block]


def _norm_gradients(module: nn.GroupNorm | nn.LayerNorm, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
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


@dataclass(frozen=True)
class SampleGradients:
    """The per-sample gradients of one micro-batch of b samples, layer by layer, and their losses (b,)."""

    layers: list[LayerGradient]
    losses: Tensor

    def __len__(self) -> int:
        return len(self.losses)

    def sq_norms(self) -> Tensor:
        return torch.stack([g.sq_norms() for g in self.layers]).sum(0)

    def weighted_sum(self, c: Tensor) -> Blocks:
        return [g.weighted_sum(c) for g in self.layers]

    def materialise(self) -> Tensor:
        """The flat per-sample gradients (b, d)."""
        return torch.cat([g.materialise().flatten(1) for g in self.layers], 1)

    def select(self, keep: Tensor) -> SampleGradients:
        return SampleGradients([g.select(keep) for g in self.layers], self.losses[keep])


class PerSample:
    """Per-sample gradients of `model`; call it with one micro-batch.

    x (b*K, ...) holds the K views of each sample in adjacent rows, y (b,) or (b*K,) the targets.
    """

    def __init__(self, model: nn.Module, loss: Loss = cross_entropy, K: int = 1, check: bool = True):
        self.model, self.loss, self.K = model, loss, K
        self.layers = trainable_layers(model)
        self._unchecked = check

    def zeros(self) -> Blocks:
        p = next(self.model.parameters())
        return [p.new_zeros(layer.shape) for layer in self.layers]

    def to_params(self, blocks: Blocks) -> dict[str, Tensor]:
        """Blocks -> {parameter's name: tensor of its shape}."""
        return {k: v for layer, block in zip(self.layers, blocks, strict=True) for k, v in layer.split(block).items()}

    @torch.no_grad()
    def add_(self, blocks: Blocks, scale: float = 1.0) -> None:
        """theta += scale * blocks."""
        for layer, block in zip(self.layers, blocks, strict=True):
            params = layer.params()
            for name, part in layer.split(block).items():
                params[name].add_(part, alpha=scale)

    def __call__(self, x: Tensor, y: Tensor) -> SampleGradients:
        if len(x) == 0:
            return SampleGradients([Dense(p.new_zeros(0, *layer.shape)) for layer in self.layers
                                    for p in [layer.module.weight]], x.new_zeros(0))
        if len(y) * self.K == len(x) and self.K > 1:
            y = y.repeat_interleave(self.K)
        if len(x) % self.K or len(y) != len(x):
            raise UsageError(f"{len(x)} views and {len(y)} targets do not make samples of K={self.K} views each: pass "
                             "the views of a sample in adjacent rows")
        if self._unchecked:
            self._self_check(x, y)
            self._unchecked = False
        return self._run(x, y, self.K)

    def _run(self, x: Tensor, y: Tensor, K: int) -> SampleGradients:
        def build(layer: Layer, a: Tensor, d: Tensor) -> LayerGradient:
            return layer.gradient(a, d / K if K > 1 else d, K)

        with Tape(self.model, self.layers, build) as tape:
            losses = self.loss(tape.forward(x), y)
            if losses.shape != y.shape[:1]:
                raise UsageError(f"the loss gave shape {tuple(losses.shape)} for {len(y)} rows: it must return one "
                                 "value a row (reduction='none')")
            tape.backward(losses)
        b = len(x) // K
        grads = [g if g is not None else Dense(x.new_zeros(b, *layer.shape))  # a layer the loss does not depend on
                 for layer, g in zip(self.layers, tape.results, strict=True)]
        return SampleGradients(grads, losses.detach().view(b, K).mean(1))

    def _self_check(self, x: Tensor, y: Tensor) -> None:
        """One small micro-batch against autograd, and one sample on its own against the same sample in company."""
        n = min(len(x), max(2, self.K))
        x, y = x[:n], y[:n]
        params = {k: p for layer in self.layers for k, p in layer.params().items()}
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(0)  # the same dropout masks in both passes
            total = self.loss(self.model(x), y).sum()
            exact = torch.autograd.grad(total, list(params.values()), allow_unused=True)
            torch.manual_seed(0)
            grads = self._run(x, y, 1)
        if not all(torch.isfinite(e).all() for e in exact if e is not None):
            return  # nothing to compare; such samples are dropped by the mechanism
        ours = self.to_params(grads.weighted_sum(x.new_ones(n)))
        for (name, p), e in zip(params.items(), exact, strict=True):
            e = torch.zeros_like(p) if e is None else e
            scale = torch.stack([e.norm() for e in exact if e is not None]).max()
            if (ours[name] - e).norm() > 1e-3 * scale + 1e-12:
                raise UsageError(f"the per-sample gradients of {name!r} do not add up to autograd's: the parameter is "
                                 "used outside its layer's forward (weight tying, a functional call, a hook); use "
                                 "each layer once, as a module")
        if n < 2 or any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0
                        for m in self.model.modules()):
            return
        with torch.no_grad():
            together, alone = self.model(x)[:1], self.model(x[:1])
        if not torch.allclose(together, alone, rtol=1e-3, atol=1e-3 * float(together.abs().max())):
            raise UsageError("the model's output for a sample changes with the other samples of the batch: it mixes "
                             "samples, so no per-sample gradient exists; make every operation act on one sample")


class Tape:
    """Records, for each layer, what `build(layer, a, d)` makes of its input and output gradient, in one pass."""

    def __init__(self, model: nn.Module, layers: list[Layer], build: Callable[[Layer, Tensor, Tensor], object]):
        self.model, self.layers, self.build = model, layers, build
        self.results: list = [None] * len(layers)
        self._inputs: dict[int, Tensor] = {}
        self._leaves: list[Tensor] = []
        # Detached parameters stand in for the model's: autograd then has no weight gradients to compute.
        self._detached = {k: p.detach() for k, p in model.named_parameters()}

    def __enter__(self) -> Tape:
        self._handles = [layer.module.register_forward_hook(self._recorder(i, layer))
                         for i, layer in enumerate(self.layers)]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return functional_call(self.model, self._detached, (x.detach(),))

    def backward(self, output: Tensor, gradient: Tensor | None = None, retain: bool = False) -> None:
        """Send `gradient` (default: ones) back from `output`; layers are built as their d arrives."""
        if output.requires_grad:
            gradient = torch.ones_like(output) if gradient is None else gradient
            torch.autograd.grad(output, self._leaves, gradient, allow_unused=True, retain_graph=retain)

    def _recorder(self, i: int, layer: Layer) -> Callable:
        def hook(module: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> Tensor:
            if i in self._inputs:
                raise UsageError(f"layer {layer.name!r} is called twice in one forward pass, which is not covered: "
                                 "give each call a layer of its own")
            a = self._inputs[i] = args[0].detach()
            version = a._version
            if not z.requires_grad:  # nothing before it asks for gradients: backward passes start to end here
                self._leaves.append(z.requires_grad_())
                z = z.clone()  # the model may change its copy in place; a leaf it may not

            def arrived(d: Tensor) -> None:
                if a._version != version:
                    raise UsageError(f"the input of layer {layer.name!r} was changed in place after use: use the "
                                     "out-of-place operation before it (e.g. ReLU(inplace=False))")
                with torch.no_grad():
                    self.results[i] = self.build(layer, a, d.detach())

            z.register_hook(arrived)
            return z

        return hook


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
        if type(module) not in (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm):
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

"""Per-sample gradients g_i = grad of (1/K) sum_k loss(view k of sample i), kept as factors.

One forward pass records every layer's input a, one backward pass its output gradient d. Autograd is asked for
the gradients of layer outputs only: the summed weight gradient, which private training cannot use, is never computed.

Privacy requires that g_i depends on sample i alone. Layers that mix samples are refused by name, and the first
micro-batch is checked, sample by sample, against autograd and against passes of single rows: a model or a layer class
that slips through the first test fails the second.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.errors import UsageError
from dpngd.layers import Dense, Layer, LayerGradient, RowLayer, trainable_layers
from dpngd.steps import evaluating

Blocks = list[Tensor]
"""One (R, O, I) matrix stack per layer: how sums, noise and updates are held. Symbols as in `layers.forms`."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(predictions (n, ...), targets (n,)) -> the n losses."""


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """-log p(y | x), one value per row."""
    return F.cross_entropy(output, y, reduction="none")


@dataclass(frozen=True)
class SampleGradients:
    """The per-sample gradients of one micro-batch of b samples, layer by layer, and their losses (b,)."""

    layers: list[LayerGradient]
    losses: Tensor

    def __len__(self) -> int:
        return len(self.losses)

    def sq_norms(self) -> Tensor:
        return torch.stack([g.sq_norms() for g in self.layers]).sum(0)

    def terms(self) -> Tensor:
        return torch.stack([g.terms() for g in self.layers]).sum(0)

    def double(self) -> SampleGradients:
        return SampleGradients([g.double() for g in self.layers], self.losses)

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
        check_precision(self.layers)
        self._unchecked = check

    @property
    def checked(self) -> bool:
        """Whether the model has passed the check that its first micro-batch brings."""
        return not self._unchecked

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
            zeros = self.zeros()  # not of x's dtype: tokens are integers
            return SampleGradients([Dense(z.expand(0, *z.shape)) for z in zeros], zeros[0].new_zeros(0))
        if len(y) * self.K == len(x) and self.K > 1:
            y = y.repeat_interleave(self.K)
        if len(x) % self.K or len(y) != len(x):
            raise UsageError(f"{len(x)} views and {len(y)} targets do not make samples of K={self.K} views each: pass "
                             "the views of a sample in adjacent rows")
        if self._unchecked:
            self._unchecked = not self._self_check(x, y)
        return self._run(x, y, self.K)

    def _run(self, x: Tensor, y: Tensor, K: int) -> SampleGradients:
        def build(layer: Layer, a: Tensor, d: Tensor) -> LayerGradient:
            if d.shape[layer.batch_axis] != len(x):
                raise UsageError(f"layer {layer.name!r} gives {d.shape[layer.batch_axis]} rows for a batch of "
                                 f"{len(x)}: the batch must be its output's axis {layer.batch_axis} (batch_first=True; "
                                 "positions expanded to (batch, time) before an Embedding)")
            return layer.gradient(a, d / K if K > 1 else d, K)

        with torch.enable_grad(), Tape(self.model, self.layers, build) as tape:
            losses = self.loss(tape.forward(x), y)
            if losses.shape != y.shape[:1]:
                raise UsageError(f"the loss gave shape {tuple(losses.shape)} for {len(y)} rows: it must return one "
                                 "value per row (reduction='none')")
            tape.backward(losses)
        b = len(x) // K
        grads = [Dense(layer.like.new_zeros(b, *layer.shape)) if g is None else g  # None: without effect on the loss
                 for layer, g in zip(self.layers, tape.results, strict=True)]
        return SampleGradients(grads, losses.detach().view(b, K).mean(1))

    def _self_check(self, x: Tensor, y: Tensor) -> bool:
        """Check that samples do not mix, that gradients are autograd's, and that a forward pass leaves no trace.

        Eight samples of the batch (others are added where there are fewer) surround an outlier, a sample times
        1,000: mixing too weak to see among ordinary samples moves their outputs when one is that large. Outputs and
        losses of every sample in the batch are compared with those of its row alone, with dropout switched off; the
        gradients of the first and the last with autograd's, with dropout as it is and the same masks in both passes.
        A buffer that the passes changed (running statistics) holds private data that nothing pays for: refused.

        Returns whether it could tell: samples or gradients that are not finite show nothing.
        """
        K, held = self.K, {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        whole = x.flatten(1).isfinite().all(1).view(-1, K).all(1).nonzero()[:ROWS, 0]
        if not len(whole):
            return False
        rows = (whole[:, None] * K + torch.arange(K, device=x.device)).flatten()
        x, y, outlier = _with_outlier(x[rows], y[rows], K)
        n = len(y) // K
        ends = (0, n - 1)
        params = {k: p for layer in self.layers for k, p in layer.params().items()}
        try:
            with torch.random.fork_rng(), torch.enable_grad():
                torch.manual_seed(0)  # the same dropout masks in both passes
                grads = self._run(x, y, K)  # first: its refusals say more than autograd's errors
                torch.manual_seed(0)
                losses = self.loss(self.model(x), y).view(n, K).mean(1)
                exact = [torch.autograd.grad(losses[i], list(params.values()), allow_unused=True, retain_graph=True)
                         for i in ends]
            self._check_outputs(x, y, outlier)
        finally:
            changed = [name for name, buffer in self.model.named_buffers()
                       if name not in held or not torch.equal(held[name], buffer)]
            for name in changed:
                if name in held:
                    self.model.get_buffer(name).copy_(held[name])
        if changed:
            raise UsageError(f"a forward pass changes the buffer {changed[0]!r}, which would keep private data outside "
                             "the guarantee: use a layer without running statistics (track_running_stats=False)")
        if not all(torch.isfinite(e).all() for own in exact for e in own if e is not None):
            return False  # nothing to compare; such samples are dropped by the mechanism
        for i, own in zip(ends, exact, strict=True):
            one = grads.select(torch.tensor([i], device=x.device))
            ours = self.to_params(one.weighted_sum(one.losses.new_ones(1)))
            scale = torch.stack([e.norm() for e in own if e is not None]).max()
            for (name, p), e in zip(params.items(), own, strict=True):
                if (ours[name] - (torch.zeros_like(p) if e is None else e)).norm() > 1e-3 * scale + 1e-12:
                    raise UsageError(f"a sample's gradient of {name!r} is not autograd's: the parameter is used "
                                     "outside its layer's forward (weight tying, a functional call, a hook), samples "
                                     "are mixed, or its layer's class is wrong; use each layer once, as a module")
        return True

    @torch.no_grad()
    def _check_outputs(self, x: Tensor, y: Tensor, outlier: slice) -> None:
        """Compare the first and the last view of every sample but the outlier, alone and in the batch."""
        kept = [i for i in range(len(x)) if i % self.K in (0, self.K - 1) and not outlier.start <= i < outlier.stop]
        dropout = [m for m in self.model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
        try:
            for m in dropout:
                m.training = False
            together, alone = self.model(x), torch.cat([self.model(x[i : i + 1]) for i in kept])
        finally:
            for m in dropout:
                m.training = True
        losses = torch.cat([self.loss(z[None], y[i : i + 1]) for i, z in zip(kept, alone, strict=True)])
        pairs = (("model's output", together[kept], alone), ("loss", self.loss(together, y)[kept], losses))
        shown = alone.flatten(1).isfinite().all(1) & losses.isfinite()
        for what, company, own in pairs:
            company, own = company[shown], own[shown]
            if len(own) and not torch.allclose(company, own, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
                raise UsageError(f"the {what} for a sample changes with the other samples of the batch: it mixes "
                                 "samples, so no per-sample gradient exists; make every operation act on one sample")


ROWS = 8  # samples that the check looks at
OUTLIER = 1000.0


def _with_outlier(x: Tensor, y: Tensor, K: int) -> tuple[Tensor, Tensor, slice]:
    """ROWS samples of K rows each with one more in their middle, the first times OUTLIER; and where that one is.

    Missing samples are added: noise of the size of x, or for inputs that are not floats (tokens) the same ones again.
    """
    add = ROWS * K - len(x)
    if add > 0:
        more = x.repeat(-(-add // len(x)), *[1] * (x.dim() - 1))[:add]
        if x.is_floating_point():
            g = torch.Generator().manual_seed(0)
            noise = torch.randn(more.shape, generator=g, dtype=torch.float64)
            more = (noise * x.double().square().mean().sqrt().clamp(min=1e-3).cpu()).to(x)
        x, y = torch.cat([x, more]), torch.cat([y, y.repeat(-(-add // len(y)))[:add]])
    at = ROWS // 2 * K
    large = x[:K] * OUTLIER if x.is_floating_point() else x[:K]
    return torch.cat([x[:at], large, x[at:]]), torch.cat([y[:at], y[:K], y[at:]]), slice(at, at + K)


def check_precision(layers: list[Layer]) -> None:
    """Refuse parameters below float32: their norms round by far more than the 1e-5 that the mechanism allows for."""
    for layer in layers:
        for name, p in layer.params().items():
            if p.dtype not in (torch.float32, torch.float64):
                raise UsageError(f"parameter {name!r} is {str(p.dtype).removeprefix('torch.')}, in which clipping is "
                                 "exact to 3 % at best: use float32 (model.float())")


MICRO_BATCH = 128
"""Views worked on at once. Each pass costs about 1 ms whatever its size, and its memory grows with it."""

LARGE_MICRO_BATCH, LIGHT = 256, 2**14
"""Views worked on at once where the layers give at most LIGHT numbers per view: a pass is over so soon that its fixed
part counts. On one thread the small network takes 10 % longer with 128; WRN-10-1 takes the same time with 64 to 256."""


SMALL_MICRO_BATCH = 64
"""Where several threads work on a micro-batch each, together they hold what one would, but none takes fewer than this:
with two threads WRN-10-1 takes 64 faster than 128, in half the memory, and 32 slower."""

FLOATS = 2**25
"""Numbers that the trained layers give for a micro-batch, at most, whatever the number of threads: 128 MiB. That is 28
views of WRN-16-4, which takes no longer with 32 than with 64."""


@torch.no_grad()
def views_at_once(model: nn.Module, shape: tuple[int, ...], threads: int = 1) -> int:
    """Views per micro-batch for samples of this shape, by the size of the outputs of the trained layers.

    MICRO_BATCH or LARGE_MICRO_BATCH, shared by the threads that have a micro-batch each; of heavy networks, as many as
    FLOATS allows for.
    """
    sizes: list[int] = []
    handles = [layer.module.register_forward_hook(lambda m, a, z: sizes.append(z.numel()))
               for layer in trainable_layers(model)]
    try:
        with evaluating(model):
            model(next(model.parameters()).new_zeros(1, *shape))
    finally:
        for handle in handles:
            handle.remove()
    views = LARGE_MICRO_BATCH if sum(sizes) <= LIGHT else MICRO_BATCH
    return max(1, min(max(SMALL_MICRO_BATCH, views // threads), FLOATS // sum(sizes)))


def micro_batch_size(K: int, views: int = MICRO_BATCH, *, samples: int | None = None, threads: int = 1) -> int:
    """Samples per micro-batch, the one rule: whole samples of K views each, about `views` views, at least a sample.

    Given the number of samples in the batch, micro-batches of equal size, at least one for each thread: a few samples
    left over would cost a pass of their own, so up to a quarter more than `views` are taken instead.
    """
    size = max(1, views // K)
    if not samples:
        return size
    parts = max(min(threads, samples), math.ceil(samples / size - 0.25))
    return -(-samples // parts)


def micro_batches(per_sample: PerSample, x: Tensor, y: Tensor, views: int = MICRO_BATCH) -> Iterator[SampleGradients]:
    """The gradients of x (b*K, ...), y (b,), a few samples at a time: memory does not grow with the batch."""
    for part in pieces(x, y, per_sample.K, views):
        yield per_sample(*part)


def pieces(x: Tensor, y: Tensor, K: int, views: int = MICRO_BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """x (b*K, ...), y (b,) in micro-batches of whole samples."""
    n = micro_batch_size(K, views)
    for lo in range(0, len(y), n):
        yield x[lo * K : (lo + n) * K], y[lo : lo + n]


class Tape:
    """Records, for each layer, what `build(layer, a, d)` makes of its input and output gradient, in one pass."""

    def __init__(self, model: nn.Module, layers: list[Layer], build: Callable[[Layer, Tensor, Tensor], object]):
        self.model, self.layers, self.build = model, layers, build
        self.results: list = [None] * len(layers)
        self._inputs: dict[int, Tensor] = {}
        self._leaves: list[Tensor] = []

    def __enter__(self) -> Tape:
        self._handles = [layer.module.register_forward_hook(self._recorder(i, layer))
                         for i, layer in enumerate(self.layers)]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad(), detached(self.model):
            return self.model(x.detach())

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
            def arrived(d: Tensor, rows: bool = False) -> None:
                if a._version != version:
                    raise UsageError(f"the input of layer {layer.name!r} was changed in place after use: use the "
                                     "out-of-place operation before it (e.g. ReLU(inplace=False))")
                with torch.no_grad():
                    self.results[i] = self.build(layer, None if rows else a, d.detach())

            if not z.requires_grad:  # nothing before it asks for gradients: backward passes end here
                self._leaves.append(z.new_zeros((), requires_grad=True))
                own = z.data if z.data_ptr() != a.data_ptr() else z.clone()
                return Fused.apply(self._leaves[-1], Fuse(own, lambda d: (None, d), arrived))
            backward = layer.backward_of(a, z) if isinstance(layer, RowLayer) else None
            if backward is not None:
                return Fused.apply(args[0], Fuse(z.data, backward, functools.partial(arrived, rows=True)))
            z.register_hook(arrived)
            return z

        return hook


@contextlib.contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """Within this block detached parameters take the place of the model's: autograd has no weight gradients to compute.

    What `torch.func.functional_call` does, without its search for tied parameters, which takes a tenth of a small
    network's pass.
    """
    held = [(own, name, p) for module in model.modules() for own in (module._parameters,) for name, p in own.items()
            if p is not None]
    try:
        for own, name, p in held:
            own[name] = p.detach()
        yield
    finally:
        for own, name, p in held:
            own[name] = p


@dataclass
class Fuse:
    """A layer's output z, its backward pass, d -> (gradient of its input, what `arrived` is told)."""

    z: Tensor | None
    backward: Callable[[Tensor], tuple[Tensor | None, Tensor]]
    arrived: Callable[[Tensor], None]


class Fused(torch.autograd.Function):
    """Takes the place in autograd's graph of a layer whose backward pass is not autograd's own.

    Either the layer is the first, and nothing lies before it; or one pass gives the gradient of its input together
    with the samples' gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        z, fuse.z = fuse.z, None  # z will refer to ctx: a reference back would keep both alive
        ctx.fuse = fuse
        return z

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None]:
        dx, told = ctx.fuse.backward(d)
        ctx.fuse.arrived(told)
        return dx, None

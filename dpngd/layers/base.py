"""What a kind of layer is: the interface, the registry, and what is refused.

A layer is covered when a class is registered for the exact type of its module. The class holds everything that the
package needs to know of the kind; nothing elsewhere asks what kind a layer is. To add one:

    @register(nn.Conv3d)
    class Conv3dLayer(Layer):
        def __init__(self, name, module):
            super().__init__(name, module)
            self.shape = (R, O, I)

        def columns(self, a, d):
            return U, D

`columns` is enough: gradients and curvature follow from it. A kind that knows a faster way overrides `gradient` and
`moments` as well. Where the gradient is a single row (scales, shifts), derive from `RowLayer` and give `rows`.

    symbol  shape            meaning
    n                        rows of the batch: images, or views of images
    K                        views per sample; rows i*K .. i*K+K-1 belong to sample i
    S                        positions (time steps, or height * width) per row
    a, d                     the layer's input, and the gradient of the loss with respect to its output, as the module
                             takes and gives them
    U       (n, R, I, S)     the inputs a_t of position t as columns, a 1 appended where the layer has a bias
    D       (n, R, O, S)     the output gradients d_t as columns
    g       (R, O, I)        the gradient of one row's loss, sum_t d_t a_t' = D U'
    A       (R, I, I)        K-FAC's input factor E[ sum_t a_t a_t' ]
    G       (R, O, O)        K-FAC's output factor E[ mean_t d_t d_t' ]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from dpngd.errors import UsageError
from dpngd.layers.forms import Dense, Factors, LayerGradient

MIXING = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
"""Modules that mix the samples of a batch: no per-sample gradient exists, so they are refused, trainable or not."""


class Layer:
    """A trainable layer: its module, its parameters, the shape (R, O, I) of its gradient, and all that depends on its
    kind.

    The parameters are R matrices [W | bias] of O rows and I columns. A subclass sets `shape` and gives `columns`; it
    refuses a module it cannot treat by a UsageError in __init__.

    name     the module's name in the model
    bias     whether the bias is trained
    """

    parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")
    """The module's parameters that the kind knows, in the order of the block. The first one must be trained."""

    shape: tuple[int, int, int]

    batch_axis: int = 0
    """The axis of the module's output that counts the rows of the batch."""

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        trainable = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
        unknown = [n for n in trainable if n not in self.parameters]
        if unknown:
            raise UsageError(f"layer {name!r} ({type(module).__name__}) has a trainable parameter {unknown[0]!r} that "
                             "its kind does not have, which is not covered: freeze it with requires_grad_(False), or "
                             "give it a layer of its own")
        self.trained = tuple(n for n in self.parameters if n in trainable)
        first = self.parameters[0]
        if first not in trainable:
            raise UsageError(f"layer {name!r} has a frozen {first} and a trainable {self.trained[0]}, which is not "
                             "covered: freeze or train both")
        self.bias = "bias" in self.trained

    # What a kind defines: `columns`, and where it knows a faster way, `gradient` and `moments`.

    def columns(self, a: Tensor, d: Tensor) -> tuple[Tensor | None, Tensor]:
        """U (n, R, I, S) and D (n, R, O, S), so that g = D U'. For a `RowLayer`, None and g' (n, 1, I, 1)."""
        raise NotImplementedError(f"{type(self).__name__} must define `columns`")

    def gradient(self, a: Tensor, d: Tensor, K: int) -> LayerGradient:
        """Per-sample gradients, sums over the K views of each sample (adjacent rows of a and d)."""
        U, D = (views_as_positions(t, K) for t in self.columns(a, d))
        return Dense(D @ U.mT)

    def moments(self, a: Tensor, d: Tensor, inputs: bool) -> tuple[Tensor | None, Tensor | None]:
        """Sums over the n rows of sum_t a_t a_t' (R, I, I) and mean_t d_t d_t' (R, O, O).

        inputs   whether the first is wanted: with several backward passes per forward pass, it is counted once
        A layer whose gradient is a single row gives None for the second: its block is A alone, and G = 1.
        """
        U, D = (t.permute(1, 2, 0, 3) for t in self.columns(a, d))  # (R, I or O, n, S)
        S, U, D = D.shape[3], U.flatten(2), D.flatten(2)
        return (U @ U.mT if inputs else None), D @ D.mT / S

    def input_rows(self, a: Tensor) -> Tensor | None:
        """The inputs a_t of all images and positions as rows (n*S, I), where they are at hand; R must be 1."""
        return None

    def samples(self, a: Tensor, d: Tensor) -> Dense | Factors | None:
        """`gradient` of single rows, in memory of its own, where the kind has a faster way to it than Opacus."""
        return None

    def sampled_moment(self, a: Tensor, d: Tensor, positions: int) -> Tensor | None:
        """An estimate of `moments`' first sum from so many positions per row; None where all of them cost no more."""
        return None

    # What follows from that.

    @property
    def sides(self) -> tuple[int | None, int]:
        """Rows of U and of D as `columns` gives them; None where it gives none."""
        return self.shape[2], self.shape[1]

    def kfac(self, A: Tensor | None, G: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
        """K-FAC's (A, G) from sums of `moments` over n rows; zeros where no gradient reached the layer."""
        R, O, I = self.shape
        if A is None:
            return self.like.new_zeros(R, I, I), self.like.new_zeros(R, O, O)
        return A / n, A.new_ones(R, O, O) if G is None else G / n

    def params(self) -> dict[str, nn.Parameter]:
        """{name in the model: parameter} of what is trained, in the order of the block."""
        return {f"{self.name}.{n}" if self.name else n: getattr(self.module, n) for n in self.trained}

    @property
    def like(self) -> nn.Parameter:
        """A parameter of the layer: its dtype and device."""
        return getattr(self.module, self.trained[0])

    def join(self, *gradients: Tensor) -> Dense:
        """Per-sample gradients from those of the parameters (b, *parameter's shape), in the order of `params`."""
        R, O, I = self.shape
        weight, *bias = gradients
        return Dense(weight.reshape(-1, R, O, I - self.bias), bias[0].reshape(-1, R, O) if self.bias else None)

    def apart(self, g: Dense | Factors) -> list[Tensor]:
        """The inverse of `join`: per-sample gradients of the parameters, in the order of `params`."""
        shapes = [p.shape for p in self.params().values()]
        w = g.materialise()
        return [part.reshape(len(w), *shape) for part, shape in zip(self._parts(w), shapes, strict=True)]

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """(R, O, I) -> {name in the model: tensor of the parameter's shape}."""
        params = self.params()
        return {n: part.reshape(params[n].shape) for n, part in zip(params, self._parts(block), strict=True)}

    def _parts(self, block: Tensor) -> list[Tensor]:
        return [block[..., :-1], block[..., -1]] if self.bias else [block]


class RowLayer(Layer):
    """A layer whose gradient g is a single row (1, 1, I): its parameters side by side.

    Its Fisher block E[g g'] needs no factors: A = E[g g'] and G = 1 are exact. A subclass sets `shape` and gives
    `rows`.

    A kind that gets g as a by-product of the gradient of its input gives `backward_of` as well. Then `gradient`,
    `columns` and `moments` are called with None for a and the rows (n, I) for d.
    """

    def rows(self, a: Tensor, d: Tensor) -> Tensor:
        """g of every row of the batch: (n, I)."""
        raise NotImplementedError(f"{type(self).__name__} must define `rows`")

    def backward_of(self, a: Tensor, z: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """For the input a and the output z: the function from d to (gradient of a, rows). None: there is none."""
        return None

    def gradient(self, a: Tensor | None, d: Tensor, K: int) -> Dense:
        rows = d if a is None else self.rows(a, d)
        return Dense((rows if K == 1 else rows.unflatten(0, (-1, K)).sum(1)).view(-1, *self.shape))

    def columns(self, a: Tensor, d: Tensor) -> tuple[None, Tensor]:
        return None, self.gradient(a, d, 1).materialise().mT

    def moments(self, a: Tensor, d: Tensor, inputs: bool) -> tuple[Tensor, None]:
        g = self.gradient(a, d, 1).materialise()[:, 0, 0]  # (n, I)
        return (g.mT @ g).unsqueeze(0), None  # every backward pass has a g of its own: `inputs` does not matter

    @property
    def sides(self) -> tuple[None, int]:
        return None, self.shape[2]

    def join(self, *gradients: Tensor) -> Dense:
        return Dense(torch.cat([t.flatten(1) for t in gradients], 1).view(-1, *self.shape))

    def _parts(self, block: Tensor) -> list[Tensor]:
        return list(block.split([p.numel() for p in self.params().values()], -1))


def views_as_positions(t: Tensor, K: int) -> Tensor:
    """(b*K, R, rows, S) -> (b, R, rows, K*S): the views of a sample are further positions of it."""
    return t if K == 1 else t.unflatten(0, (-1, K)).movedim(1, -2).flatten(-2)


KINDS: dict[type[nn.Module], type[Layer]] = {}
"""The registry: the exact type of a module -> the class of its layers."""


def register(*module_types: type[nn.Module]) -> Callable[[type[Layer]], type[Layer]]:
    """Class decorator: the class treats modules of exactly these types.

    Not of their subclasses: a subclass may compute something else, and its gradients would be wrong without a sign.
    """

    def add(kind: type[Layer]) -> type[Layer]:
        if not (isinstance(kind, type) and issubclass(kind, Layer)):
            raise UsageError(f"register was given {kind!r}: it takes a subclass of dpngd.layers.Layer")
        for t in module_types:
            if not (isinstance(t, type) and issubclass(t, nn.Module)):
                raise UsageError(f"register was given {t!r}: it takes the types of modules, such as nn.Conv1d")
            if t in KINDS:
                raise UsageError(f"{t.__name__} already has a layer class, {KINDS[t].__name__}: call "
                                 f"unregister({t.__name__}) first")
        KINDS.update(dict.fromkeys(module_types, kind))
        return kind

    return add


def unregister(*module_types: type[nn.Module]) -> None:
    """Take the types out of the registry again."""
    for t in module_types:
        if KINDS.pop(t, None) is None:
            raise UsageError(f"{t!r} has no layer class: nothing to unregister")


def trainable_layers(model: nn.Module) -> list[Layer]:
    """The layers with trainable parameters, in order; an error names what is not covered, and what to do.

    A parameter without a per-sample gradient would go unclipped, or untrained: everything that is not known to have
    one is refused.
    """
    owners: dict[int, str] = {}
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, MIXING):
            raise UsageError(f"layer {name!r} is a {type(module).__name__}, which mixes the samples of a batch, so no "
                             "per-sample gradient exists: use GroupNorm")
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own:
            continue
        kind = KINDS.get(type(module))
        if kind is None:
            raise UsageError(f"layer {name!r} ({type(module).__name__}) has trainable parameters and is not covered: "
                             f"build it from {', '.join(t.__name__ for t in KINDS)}, freeze it with "
                             "requires_grad_(False), or register a class for it (dpngd.layers.register)")
        for n, p in own.items():
            if id(p) in owners:
                raise UsageError(f"parameter {name}.{n} is shared with layer {owners[id(p)]!r}, which is not covered: "
                                 "give each layer its own parameters")
            owners[id(p)] = name
        layers.append(kind(name, module))
    # named_modules() lists a module object once, however often it is registered: a second call is caught at run time.
    if not layers:
        raise UsageError("the model has no trainable parameters: nothing to train")
    return layers

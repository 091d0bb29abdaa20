"""The training recipe around every method: augmentation multiplicity and averaged weights.

After De et al. (2022): K random views per sample, whose losses are averaged before the per-sample gradient is taken
(the plain image is not one of them), an exponential moving average of the weights for evaluation, a constant rate eta,
no momentum, no weight decay.

| symbol | meaning                                     | where                                            |
| ------ | ------------------------------------------- | ------------------------------------------------ |
| K      | views per sample                            | `augment`: (b,C,H,W) -> (b*K,C,H,W)              |
| t      | number of updates so far                    | `EMA`: decay min(decay, (1+t)/(10+t))            |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from dpngd.data import sets
from dpngd.data.sets import Views
from dpngd.errors import UsageError

# Every source of randomness of a run draws from `noise.stream(seed, name)` under one of these names, so that a run
# repeats bit for bit and drawing more from one leaves the others alone. The splits of UTKFace and digits are no part of
# it: they have a seed of their own, so that the test set is the same in all runs.
STREAMS = {
    "weights": "initial weights",
    "sampling": "Poisson batches",
    "augmentation": "crops and flips",
    "noise": "the Gaussian mechanism",
    "labels": "labels for the Fisher matrix, from the model or at random",
    "clip": "labels of the public gradients whose norms give C, where C is found so",
    "pretraining": "order of the public images in DP-SGD-PT's pre-training",
    "curvature-noise": "noise on private curvature, in the ablation that estimates it so",
    "curvature-sampling": "Poisson batches of that estimate",
    "curvature-augmentation": "crops and flips of those batches",
    "public/<set>": "which public images, or the making of them",
    "data/subset": "which N private images",
    "data/validation": "which of them are held out for tuning",
}

# (x/255 - MEAN) / STD, for every channel of every data set. Fixed round numbers: the mean and the deviation of the
# private images would be a release of private data that no budget pays for.
MEAN, STD = 0.5, 0.25


def views_of(data: str) -> Views | None:
    """The views that keep the labels of a private set; own data have the recipe's."""
    return sets.SETS[data].views if data in sets.SETS else Views()


def to_float(x: Tensor) -> Tensor:
    """x uint8 as the network sees it: float32 (x/255 - 0.5)/0.25. Constants: statistics of private data would leak."""
    return x.float().mul_(1 / (255 * STD)).sub_(MEAN / STD)


def draw_views(b: int, K: int, generator: Generator, *, pad: int = 4, flip: bool = True) -> Tensor:
    """Which view each of b*K is, (b*K,) int64, for `take_views`.

    A training step draws for its whole batch and then takes the views of one microbatch after the other: so the size of
    the microbatches, a matter of memory, changes no result.
    """
    if b < 0 or K < 1 or pad < 0:
        raise UsageError(f"{K} views with padding {pad} of {b} images: K is at least 1, the padding at least 0")
    return torch.randint(Views(pad, flip).count, (b * K,), generator=generator, device=generator.device)


def take_views(x: Tensor, views: Tensor, *, pad: int = 4) -> Tensor:
    """Views (b*K,C,H,W) float32 of images x (b,C,H,W) uint8; the K views of an image follow one another.

    Images are padded by reflection, both as they are and mirrored, in floats; then each view is one window of one
    padded image, and a single gather copies all of them.
    """
    b, _, height, width = x.shape
    if pad >= min(height, width):
        raise UsageError(f"images of {height}x{width} cannot be padded by {pad} pixels of their own reflection")
    if not b:
        return to_float(x)
    padded = to_float(x)[:, :, _reflected(height, pad, x.device)][:, :, :, _reflected(width, pad, x.device)]
    both = torch.stack([padded, padded.flip(3)])  # (2, b, C, H+2p, W+2p)
    windows = both.unfold(3, height, 1).unfold(4, width, 1)  # (2, b, C, 2p+1, 2p+1, H, W), a view
    views = views.to(x.device)
    image = torch.arange(b, device=x.device).repeat_interleave(len(views) // b)
    offsets = 2 * pad + 1
    return windows[views // offsets**2, image, :, views // offsets % offsets, views % offsets]


def augment(x: Tensor, K: int, generator: Generator, *, pad: int = 4, flip: bool = True) -> Tensor:
    """K random views of each image: x (b,C,H,W) uint8 to (b*K,C,H,W) float32, the views of an image side by side."""
    return take_views(x, draw_views(len(x), K, generator, pad=pad, flip=flip), pad=pad)


def _reflected(n: int, pad: int, device: torch.device) -> Tensor:
    """Where each of the n + 2*pad positions of a padded line comes from; the edge itself is not repeated."""
    at = torch.arange(-pad, n + pad, device=device).abs()
    return torch.where(at >= n, 2 * (n - 1) - at, at)


class EMA:
    """The exponential moving average of a model's parameters, for evaluation: it touches nothing that training reads.

    After update t (from 0): average <- d average + (1-d) weights, with d = min(decay, (1+t)/(10+t)). Without this
    warm-up a decay of 0.9999 would still hold most of the random start after a few thousand steps. (torch's
    AveragedModel copies the weights at its first update and has no such warm-up, and it holds a second model.)
    """

    def __init__(self, model: torch.nn.Module, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise UsageError(f"EMA decay is {decay}: take it from 0 to below 1")
        self.decay, self.t = decay, 0
        self.weights = list(model.parameters())
        self.average = [w.detach().clone() for w in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present weights into the average: once after every step."""
        d = min(self.decay, (1 + self.t) / (10 + self.t))
        torch._foreach_lerp_(self.average, self.weights, 1 - d)
        self.t += 1

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this block the model has the averaged weights; afterwards its own again, bit for bit."""
        own = [w.detach().clone() for w in self.weights]
        self._load(self.average)
        try:
            yield
        finally:
            self._load(own)

    def keep(self) -> None:
        """Give the model the averaged weights for good."""
        self._load(self.average)

    @torch.no_grad()
    def _load(self, values: list[Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on from here."""
        return {"t": self.t, "average": [a.clone() for a in self.average]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = state["t"]
        for a, value in zip(self.average, state["average"], strict=True):
            a.copy_(value)

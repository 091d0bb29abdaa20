"""What the benchmark times: one training step of each contender, on the same model, batch and public images."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.curvature import KFAC
from dpngd.errors import UsageError
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import PerSample, micro_batches
from dpngd.mechanism import GaussianMechanism
from dpngd.streams import stream

Step = Callable[[], None]


@dataclass
class Bench:
    """A model and data to step on: x (b*K, C, H, W) with the K views of a sample adjacent, y (b,)."""

    model: nn.Module
    x: Tensor
    y: Tensor
    K: int
    public: Tensor
    floor: float
    micro_batch: int

    @property
    def B(self) -> int:
        return len(self.y)

    def targets(self) -> Tensor:
        return self.y.repeat_interleave(self.K)


@dataclass
class Contender:
    """`step` is done every iteration, `refresh` once every T_cur of them (its time is amortised)."""

    step: Step
    refresh: Step | None = None


def plain(bench: Bench) -> Contender:
    """Forward and backward without privacy: what any training pays."""
    model, y = copy.deepcopy(bench.model), bench.targets()

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(bench.x), y).backward()

    return Contender(step)


def opacus(mode: str) -> Callable[[Bench], Contender]:
    """Opacus as its users call it. K > 1: the gradients of a sample's views are averaged before the step."""

    def build(bench: Bench) -> Contender:
        from opacus import PrivacyEngine

        if mode == "ghost" and bench.K > 1:
            raise UsageError("ghost clipping keeps no per-view gradients to average: K > 1 is not possible")
        model, y = copy.deepcopy(bench.model), bench.targets()
        data = torch.utils.data.TensorDataset(bench.x, y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about secure_mode and the like: not what is timed
            made = PrivacyEngine().make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6), criterion=nn.CrossEntropyLoss(),
                data_loader=torch.utils.data.DataLoader(data, batch_size=len(y)), noise_multiplier=1.0,
                max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode)
        model, optimizer = made[:2]
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
        optimizer.attach_step_hook(lambda _: None)  # accounting is not what is timed

        def step() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.zero_grad()
                criterion(model(bench.x), y).backward()
                if bench.K > 1:
                    for p in model.parameters():
                        p.grad_sample = p.grad_sample.unflatten(0, (bench.B, bench.K)).mean(1)
                optimizer.step()

        return Contender(step)

    return build


def _private(bench: Bench, geometry) -> tuple[PerSample, Step]:
    per_sample = PerSample(copy.deepcopy(bench.model), K=bench.K)
    mechanism, noise = GaussianMechanism((1.0,), 1.0, bench.B), stream(0, "noise")

    def step() -> None:
        batches = micro_batches(per_sample, bench.x, bench.y, bench.micro_batch)
        per_sample.add_(mechanism.release(batches, geometry, per_sample.zeros(), noise).direction, -1e-6)

    return per_sample, step


def dp_sgd(bench: Bench) -> Contender:
    """Ours, the identity around the mechanism."""
    return Contender(_private(bench, Euclidean())[1])


def dp_ngd(bench: Bench) -> Contender:
    """Ours, whitened at the floor given; the refresh is K-FAC on the public images with its eigendecompositions."""
    geometry = Kronecker()
    per_sample, step = _private(bench, geometry)
    kfac = KFAC(per_sample.model, bench.public, generator=stream(0, "labels"))

    def refresh() -> None:
        geometry.set(kfac(), bench.floor)

    refresh()
    return Contender(step, refresh)


CONTENDERS: dict[str, Callable[[Bench], Contender]] = {
    "plain": plain,
    "opacus-hooks": opacus("hooks"),
    "opacus-functorch": opacus("functorch"),
    "opacus-ghost": opacus("ghost"),
    "dp-sgd": dp_sgd,
    "dp-ngd": dp_ngd,
}

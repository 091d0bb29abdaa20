"""What the benchmark times: one training step of each contender, on the same model, batch and public images."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.baselines import (
    Diagonal,
    Subspace,
    basis_bytes,
    principal_basis,
    sampled_labels,
    second_moment,
)
from dpngd.curvature import KFAC
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import PerSample, pieces
from dpngd.mechanism import GaussianMechanism, Geometry
from dpngd.parallel import Workers
from dpngd.streams import stream

Step = Callable[[], None]
GEP_DIRECTIONS = 1000
GEP_GIB = 4.0
"""A basis that needs more memory than this is not timed: the benchmark is for ordinary machines."""


class NotApplicable(Exception):
    """A contender cannot run on this bench; the message says why, and the table shows it."""


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
            raise NotApplicable("ghost clipping keeps no per-view gradients to average")
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


def _private(bench: Bench, geometry: Geometry, clips: tuple[float, ...] = (1.0,)) -> tuple[PerSample, Step]:
    per_sample = PerSample(copy.deepcopy(bench.model), K=bench.K)
    mechanism, noise = GaussianMechanism(clips, 1.0, bench.B), stream(0, "noise")

    workers = Workers(per_sample, torch.get_num_threads())
    views = bench.K * workers.size(bench.B, bench.micro_batch, bench.K)

    def step() -> None:
        batches = workers.gradients(pieces(bench.x, bench.y, bench.K, views))
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


def adadps(bench: Bench) -> Contender:
    """Ours, scaled by the second moment of public gradients, which is the refresh."""
    geometry, labels = Diagonal(1e-5), stream(0, "labels")
    per_sample, step = _private(bench, geometry)
    public = PerSample(per_sample.model, check=False)

    def refresh() -> None:
        y = sampled_labels(public.model, bench.public, labels)
        geometry.set(second_moment(public, bench.public, y))

    refresh()
    return Contender(step, refresh)


def gep(bench: Bench) -> Contender:
    """Ours, embedding and residual; the refresh is the basis of public gradients, as often as the others refresh."""
    d, n = sum(p.numel() for p in bench.model.parameters()), len(bench.public)
    need = basis_bytes(d, n, GEP_DIRECTIONS) / 2**30
    if need > GEP_GIB:
        raise NotApplicable(f"its basis needs {need:.1f} GiB, more than the benchmark's {GEP_GIB:g}")
    geometry = Subspace(PerSample(bench.model, check=False).zeros())
    per_sample, step = _private(bench, geometry, (10.0, 2.0))
    public, y = PerSample(per_sample.model, check=False), torch.randint(10, (n,), generator=stream(0, "labels"))

    def refresh() -> None:
        geometry.set(*principal_basis(public, bench.public, y, GEP_DIRECTIONS))

    refresh()
    return Contender(step, refresh)


CONTENDERS: dict[str, Callable[[Bench], Contender]] = {
    "plain": plain,
    "opacus-hooks": opacus("hooks"),
    "opacus-functorch": opacus("functorch"),
    "opacus-ghost": opacus("ghost"),
    "dp-sgd": dp_sgd,
    "adadps": adadps,
    "gep": gep,
    "dp-ngd": dp_ngd,
}

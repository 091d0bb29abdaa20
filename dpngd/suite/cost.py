"""What a profile costs on GPUs, before anything is run: flops that are measured, and assumptions that are stated.

    flops of a run = T (B K per_view + per_step) + ceil(T / T_cur) (n per_image + per_refresh)

| symbol | meaning |
| --- | --- |
| per_view | forward and backward pass, per-sample gradient, norm and weighted sum of one view |
| per_step | maps L and R on the sum |
| per_image | what a refresh does for one of its n public images (F, moments, basis) |
| per_refresh | eigendecompositions: EIGEN m^3 for an (m, m) matrix |

The first three are counted by torch's FlopCounterMode while our own code runs on a few images, so they follow the code.
Matrix products and convolutions are counted, nothing else: elementwise work is what the assumed utilisation pays for.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpngd.data import sets
from dpngd.methods import METHODS
from dpngd.suite.params import SEARCHES
from dpngd.suite.profiles import Profile
from dpngd.training.config import RunConfig

EIGEN = 9.0
PEAK = {"NVIDIA RTX 3090": 35.6e12}  # flop/s in float32, the vendor's number
UTILISATION = 0.3
PRICE = 0.3  # US dollars per GPU-hour


@dataclass(frozen=True)
class Flops:
    """Of one kind of run, see the module's top."""

    per_view: float
    per_step: float
    per_image: float
    per_refresh: float


def flops_of(config: RunConfig) -> float:
    """The flops of a whole run."""
    entry = sets.SETS.get(config.data)
    shape, classes = (entry.shape, entry.classes) if entry else (sets.DataSet.shape, sets.DataSet.classes)
    f = measured(base_of(config.method), config.model, config.K, shape, classes)
    refreshes = 0 if config.T_cur is None else math.ceil(config.T / config.T_cur)
    return (config.T * (config.B * config.K * f.per_view + f.per_step)
            + refreshes * ((config.public_size or config.B) * f.per_image + f.per_refresh))


def base_of(method: str) -> str:
    """The method whose flops are taken for this one's: the first with curvature, or the first of the same builder."""
    entry = METHODS[method]
    return next(m.name for m in METHODS.values()
                if (m.second_order if entry.second_order else m.builder == entry.builder))


@functools.cache
def measured(method: str, model: str, K: int, shape: tuple[int, int, int], classes: int) -> Flops:
    """Count the flops of a method on a network, with the floor at the middle of F's spectrum for DP-NGD."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from dpngd import methods
    from dpngd.gradients import PerSample
    from dpngd.noise import stream
    from dpngd.privacy import Spend
    from dpngd.suite.bench import Bench, settings_of
    from dpngd.training import models

    net = models.build(model, classes=classes, in_channels=shape[0], size=shape[1], generator=stream(0, "weights"))
    g, uses = stream(0, "cost"), METHODS[method].uses

    def images(n: int) -> torch.Tensor:
        return torch.randn(n, *shape, generator=g)

    def counted(what: Any) -> float:
        with FlopCounterMode(display=False) as counter:
            what()
        return float(counter.get_total_flops())

    def built(n: int) -> methods.Built:
        bench = Bench(net, images(K), torch.zeros(1, dtype=torch.long), K, images(n), 0.01, 128)
        config = replace(settings_of(method, bench), **({"gep_directions": 40} if "gep_directions" in uses else {}))
        per_sample = PerSample(net, K=K, check=False)
        return methods.build(methods.Setting(config, per_sample, [Spend("gradients", 1.0, 1e-5, sigma=1.0)], shape,
                                             bench.public))

    few, more = built(50), built(60)
    refresh = counted(lambda: few.prepare(0)), counted(lambda: more.prepare(0))
    per_sample = PerSample(net, K=K, check=False)

    def step(b: int) -> float:
        x, y = images(b * K), torch.zeros(b, dtype=torch.long)
        return counted(lambda: few.mechanism.release([per_sample(x, y)], few.geometry, per_sample.zeros(),
                                                     lambda like, std: torch.zeros_like(like)))

    one, two = step(1), step(2)
    per_image = (refresh[1] - refresh[0]) / 10
    sides = [n for layer in per_sample.layers for n in layer.sides if n is not None]
    eigen = EIGEN * sum(float(n) ** 3 for n in sides) if METHODS[method].second_order else 0.0
    return Flops((two - one) / K, max(0.0, 2 * one - two), per_image, max(0.0, refresh[0] - 50 * per_image) + eigen)


def gpu_hours(config: RunConfig, device: str) -> float:
    return flops_of(config) / (PEAK.get(device, PEAK["NVIDIA RTX 3090"]) * UTILISATION) / 3600


def makespan(hours: Sequence[float], workers: int) -> float:
    """Hours until `workers` devices have done these runs, the longest first."""
    ends = [0.0] * workers
    for each in sorted(hours, reverse=True):
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def stages(wanted: Mapping[str, Mapping[str, Sequence[RunConfig]]]) -> list[list[RunConfig]]:
    """What must be done before what: the search, then everything that uses what it chose. Each run once."""
    by_stage: list[dict[str, RunConfig]] = [{}, {}]
    for groups in wanted.values():
        for artifact, group in groups.items():
            for config in group:
                by_stage[artifact not in SEARCHES].setdefault(config.key(), config)
    return [list(stage.values()) for stage in by_stage if stage]


def cost_table(profile: Profile, wanted: Mapping[str, Mapping[str, Sequence[RunConfig]]], workers: int) -> list[str]:
    """GPU-hours by artifact, each run counted where it comes first; days on one device and on several."""
    device = profile.settings["cost"]["device"]
    peak = PEAK.get(device, PEAK["NVIDIA RTX 3090"])
    lines = ["", f"{'artifact':22}{'runs':>6}{'steps':>11}{'PFLOP':>12}{'GPU-hours':>11}{'by the paper':>14}{'US$':>9}"]
    seen: set[str] = set()
    hours: dict[str, float] = {}
    total = [0, 0, 0.0, 0.0]
    for groups in wanted.values():
        for artifact, group in groups.items():
            new = [c for c in {c.key(): c for c in group}.values() if c.key() not in seen]
            seen |= {c.key() for c in new}
            hours |= {c.key(): gpu_hours(c, device) for c in new}
            row = (len(new), sum(c.T for c in new), sum(hours[c.key()] for c in new),
                   sum(profile.seconds(c) for c in new) / 3600)
            total = [a + b for a, b in zip(total, row, strict=True)]
            lines.append(_row(artifact, *row, peak))
    lines += [_row("in all", *total, peak), "",
              f"GPU-hours: flops measured on this code / ({peak / 1e12:.1f} TFLOP/s of one {device} x "
              f"{100 * UTILISATION:.0f} % used). By the paper: its seconds per step (Table 5). US$: {PRICE:g} per "
              "GPU-hour. Assumptions all; no GPU was here to measure on."]
    parts = stages(wanted)
    for n in sorted({1, workers}):
        days = sum(makespan([hours[c.key()] for c in stage], n) for stage in parts) / 24
        lines.append(f"{n} GPU{'s' if n > 1 else ''}: {days:,.1f} days")
    path = [max(stage, key=lambda c: hours[c.key()]) for stage in parts]
    lines.append(f"critical path, with as many GPUs as runs: {sum(hours[c.key()] for c in path):.1f} hours ("
                 + ", then ".join(f"{c.label()} {hours[c.key()]:.1f}" for c in path) + ")")
    return lines


def _row(name: str, runs: int, steps: int, hours: float, paper: float, peak: float) -> str:
    return (f"{name:22}{runs:6}{steps:11,}{hours * 3600 * peak * UTILISATION / 1e15:12,.0f}{hours:11,.0f}{paper:14,.0f}"
            f"{hours * PRICE:9,.0f}")

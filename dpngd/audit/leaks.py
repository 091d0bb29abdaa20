"""Planted leaks: faulty parts that the audit must find, each beside a clean control that it must pass.

A leak replaces one part of a `Subject`, or of an Opacus optimizer, by one with a known fault. It counts as found when a
test fails, or when the product refuses the part. `run` is `dpngd audit --self-test`.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpngd import methods
from dpngd.audit import checks, optimizer
from dpngd.audit.checks import Result
from dpngd.audit.subject import CLASSES, Subject, images, network, targets, with_weights
from dpngd.errors import UsageError
from dpngd.geometry import Euclidean
from dpngd.gradients import Blocks, PerSample, SampleGradients, cross_entropy
from dpngd.layers import trainable_layers
from dpngd.mechanism import ROUNDING, Each, GaussianMechanism, Release, Share
from dpngd.noise import Noise, SecretNoise, stream
from dpngd.opacus import DPNGD
from dpngd.sampling import PoissonSampler

NUMBERS = 500  # releases with a canary, and without: 148,000 noise values, enough for 2 %


# ---- Noise.


class Float64Noise:
    """The clean control: normal numbers in float64, then cast."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def __call__(self, like: Tensor, std: float) -> Tensor:
        return (std * torch.randn(like.shape, generator=self.generator, dtype=torch.float64)).to(like)


def clean_noise(seed: int) -> Noise:
    return Float64Noise(stream(seed, "audit/clean"))


def short_noise(seed: int) -> Noise:
    """Every number 2 % too small."""
    source = clean_noise(seed)
    return lambda like, std: source(like, 0.98 * std)


def no_noise(seed: int) -> Noise:
    return lambda like, std: torch.zeros_like(like)


def float32_noise(seed: int) -> Noise:
    """Drawn in single precision: nothing beyond 5.768 standard deviations."""
    g = stream(seed, "audit/clean")
    return lambda like, std: std * torch.randn(like.shape, generator=g, dtype=torch.float32)


def repeated_noise(seed: int) -> Noise:
    """The same stream from its start in every release, as after a reseeding in each step."""
    first: dict[torch.Size, Tensor] = {}
    source = clean_noise(seed)
    return lambda like, std: std * first.setdefault(like.shape, source(like, 1.0))


def secret_noise(_: int) -> Noise:
    """The product's noise for releases, which no seed decides."""
    return SecretNoise()


# ---- The mechanism.


class NoRoot(GaussianMechanism):
    """sqrt(J) is missing: two channels are released as if each were the only one."""

    @property
    def noise_std(self) -> tuple[float, ...]:
        return tuple(self.sigma * C for C in self.clips)


class ActualSize(GaussianMechanism):
    """Divides by the size of the batch, which is private."""

    def release(self, batches: Iterable[SampleGradients], geometry: Any, zeros: Blocks, noise: Noise,
                each: Each = map) -> Release:
        batches = list(batches)
        out = super().release(batches, geometry, zeros, noise, each)
        scale = self.B / max(1, sum(len(g) for g in batches))
        return dataclasses.replace(out, direction=[b * scale for b in out.direction])


class WeightedByZero(GaussianMechanism):
    """A sample that is not finite gets weight 0: but 0 * nan is nan."""

    def share(self, g: SampleGradients, geometry: Any) -> Share:
        n = geometry.sq_norms(g)[0].sqrt()
        c = torch.where(n[0].isfinite(), (self.clips[0] * (1 - ROUNDING) / n[0]).clamp(max=1.0), 0.0)
        return Share([[g.weighted_sum(c)]], len(g), n, g.losses)


class RawNorms:
    """Clips by ||g|| and releases L g: whitening stretches what was clipped."""

    def __init__(self, geometry: Any):
        self._geometry = geometry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._geometry, name)

    def sq_norms(self, g: SampleGradients) -> tuple[Tensor, Tensor]:
        return Euclidean().sq_norms(g)


def with_mechanism(kind: type[GaussianMechanism]) -> Callable[[methods.Setting], methods.Built]:
    def build(setting: methods.Setting) -> methods.Built:
        built = methods.build(setting)
        m = built.mechanism
        return dataclasses.replace(built, mechanism=kind(m.clips, m.sigma, m.B))

    return build


def with_raw_norms(setting: methods.Setting) -> methods.Built:
    built = methods.build(setting)
    return dataclasses.replace(built, geometry=RawNorms(built.geometry))


def private_as_public(setting: methods.Setting) -> methods.Built:
    """Curvature from a private batch, as if it were public: no release, nothing paid."""
    stolen = torch.cat([x for x, _ in setting.draw()])
    return methods.build(dataclasses.replace(setting, public=stolen))


# ---- Networks and gradients.


class Mixing(nn.Module):
    """Subtracts the batch mean: each sample's gradient depends on all others."""

    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(0, keepdim=True)


def dropout_network(mix: bool = False) -> nn.Module:
    """Dropout, and behind it a layer that mixes samples."""
    return with_weights(nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.Dropout(1e-9), Mixing() if mix else nn.Tanh(),
                                      nn.Linear(6, CLASSES)))


def statistics_network(track: bool = True) -> nn.Module:
    """Instance norm; with `track`, running statistics keep the batch's exact means."""
    return with_weights(nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1),
                                      nn.InstanceNorm2d(4, track_running_stats=track), nn.ReLU(), nn.Flatten(),
                                      nn.Linear(36, CLASSES)))


class Unguarded(PerSample):
    """Without the product's own checks: what the audit measures of a model that should have been refused."""

    def __init__(self, model: nn.Module, K: int = 1):
        self.model, self.loss, self.K, self.layers = model, cross_entropy, K, trainable_layers(model)
        self._unchecked = False


class ViewsApart(PerSample):
    """Clips every view by itself: a sample of K views moves the sum by K C."""

    def __init__(self, model: nn.Module, K: int = 1, **more: Any):
        super().__init__(model, K=1, **more)
        self.views = K

    def __call__(self, x: Tensor, y: Tensor) -> SampleGradients:
        return super().__call__(x, y.repeat_interleave(self.views) if len(y) != len(x) else y)


# ---- Accounting and sampling.


def half_rate(config: Any, q: float, N: int) -> list:
    return methods.spends_of(config, q / 2, N)


def half_steps(config: Any, q: float, N: int) -> list:
    short = copy.copy(config)
    short.T = config.T // 2
    return methods.spends_of(short, q, N)


class FixedSize(PoissonSampler):
    """B samples exactly in every batch, in the order of a shuffled epoch: not what the accountant assumes."""

    def __init__(self, N: int, B: int, generator: torch.Generator):
        super().__init__(N, B, generator)
        self.own, self.left = generator, torch.zeros(0, dtype=torch.long)

    def draw(self) -> Tensor:
        if len(self.left) < self.B:
            self.left = torch.randperm(self.N, generator=self.own)
        rows, self.left = self.left[: self.B], self.left[self.B :]
        return rows.sort().values


class Oversampled(PoissonSampler):
    """q is 3 % larger than recorded."""

    def __init__(self, N: int, B: int, generator: torch.Generator):
        super().__init__(N, B, generator)
        self.q *= 1.03


# ---- The Opacus optimizer.


def opacus(kind: Callable[..., DPOptimizer] | None = None, model: nn.Module | None = None, public: Any = None,
           ) -> optimizer.Harness:
    """A private optimizer on the small network: DPNGD, or what `kind` makes of Opacus's own."""
    return opacus_parts(kind, model, public)[0]


def opacus_parts(kind: Callable[..., DPOptimizer] | None = None, model: nn.Module | None = None, public: Any = None,
                 ) -> tuple[optimizer.Harness, PrivacyEngine]:
    """The same with the engine that made it private."""
    x, y = images(96, "opacus"), targets(96, "opacus")
    model = network() if model is None else model
    engine = PrivacyEngine(accountant="prv")
    module, plain, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.3, max_grad_norm=0.7,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=16))
    if kind is not None:
        own = kind(plain)
    else:
        public = images(60, "public") if public is None else public(loader)
        own = DPNGD(plain, module, public, lambda_safe=0.2, T=64)
    bench = optimizer.Harness(own, module, x, y, torch.nn.functional.cross_entropy, "Opacus optimizer")
    bench.loader = loader
    return bench, engine


class Leftover(DPOptimizer):
    """`zero_grad` keeps sums that were never released: after an interrupt they enter the next step."""

    def __init__(self, plain: DPOptimizer):
        super().__init__(plain.original_optimizer, noise_multiplier=plain.noise_multiplier,
                         max_grad_norm=plain.max_grad_norm, expected_batch_size=plain.expected_batch_size)

    def zero_grad(self, set_to_none: bool = False) -> None:
        kept = [p.summed_grad for p in self.params]
        super().zero_grad(set_to_none)
        for p, s in zip(self.params, kept, strict=True):
            if s is not None and not getattr(s, "_processed", False):
                p.summed_grad = s


class Silent(DPOptimizer):
    """Adds no noise."""

    def __init__(self, plain: DPOptimizer):
        super().__init__(plain.original_optimizer, noise_multiplier=plain.noise_multiplier,
                         max_grad_norm=plain.max_grad_norm, expected_batch_size=plain.expected_batch_size)

    def add_noise(self) -> None:
        for p in self.params:
            p.grad = p.summed_grad.view_as(p)


def held(check: Callable[[optimizer.Harness], list[Result]], make: Callable[[], optimizer.Harness]) -> list[Result]:
    bench = make()
    with bench.held():
        return check(bench)


# ---- The self-test.


@dataclass(frozen=True)
class Leak:
    """A planted leak: the check that must find it, on the faulty part and on the clean one."""

    name: str
    check: str  # in words, for the table
    faulty: Callable[[], list[Result]]
    clean: Callable[[], list[Result]]
    size: str  # how large the planted leak is


def _noise(subject: Subject) -> list[Result]:
    r = checks.draw_releases(subject, NUMBERS)
    return [*checks.post_processing(r), *checks.noise(r), *checks.canary(r), *checks.independence(r)]


def _pair(name: str, words: str, size: str, check: Callable[[Subject], list[Result]], clean: Subject,
          **faulty: Any) -> Leak:
    return Leak(name, words, lambda: check(clean.but(**faulty)), lambda: check(clean), size)


def leaks() -> list[Leak]:
    """All planted leaks, in the order of the issue that asks for them."""
    sgd, ngd, gep = (Subject(m, noise=clean_noise) for m in ("dp-sgd", "dp-ngd", "gep"))
    secret = Subject("dp-sgd", noise=secret_noise)
    runs = lambda s: checks.across_runs([s, s.but(method="dp-ngd")], "release mode")  # noqa: E731
    return [
        _pair("noise 2 % short", "noise", "2 %", _noise, sgd, noise=short_noise),
        _pair("no noise in a whole run", "end to end", "all of it", checks.end_to_end, sgd, noise=no_noise),
        Leak("no noise in a whole run, Opacus optimizer", "end to end",
             lambda: held(optimizer.end_to_end, lambda: opacus(Silent)),
             lambda: held(optimizer.end_to_end, lambda: opacus(lambda plain: plain)), "all of it"),
        _pair("sqrt(2) missing in GEP", "noise", "41 %", _noise, gep, build=with_mechanism(NoRoot)),
        _pair("clipping by raw norms, whitened noise", "sensitivity", "the spectrum", checks.sensitivity, ngd,
              build=with_raw_norms),
        _pair("division by the actual batch size", "state", "12 or 9 for 10", checks.state, sgd,
              build=with_mechanism(ActualSize)),
        _pair("mixing behind dropout", "sensitivity", "batch mean", checks.sensitivity,
              sgd.but(network=dropout_network), network=lambda: dropout_network(mix=True)),
        _pair("mixing behind dropout, product's check off", "sensitivity", "batch mean", checks.sensitivity,
              sgd.but(network=dropout_network, per_sample=Unguarded), network=lambda: dropout_network(mix=True)),
        _pair("running statistics", "state", "batch means", checks.state,
              sgd.but(network=lambda: statistics_network(track=False)), network=statistics_network),
        _pair("running statistics, product's check off", "state", "batch means", checks.state,
              sgd.but(network=lambda: statistics_network(track=False), per_sample=Unguarded),
              network=statistics_network),
        Leak("running statistics, Opacus optimizer", "buffers",
             lambda: held(optimizer.state, lambda: opacus(model=statistics_network())),
             lambda: held(optimizer.state, lambda: opacus(model=statistics_network(track=False))), "batch means"),
        Leak("private loader as public", "public images",
             lambda: optimizer.public_images(opacus(public=lambda loader: loader), None),
             lambda: optimizer.public_images(opacus(), None), "all images"),
        Leak("private images as public, a copy", "public images",
             lambda: optimizer.public_images(opacus(public=lambda loader: loader.dataset.tensors[0].clone()), None),
             lambda: optimizer.public_images(opacus(), None), "all images"),
        _pair("curvature from private data, unpaid", "state", "all of F", checks.state, ngd, build=private_as_public),
        _pair("curvature from private data, one draw unpaid", "releases", "1 draw", checks.accounting, ngd,
              build=private_as_public),
        _pair("noise repeated in every step", "independence", "all of it", _noise, sgd, noise=repeated_noise),
        _pair("release noise from a seed", "independence of runs", "all of it", runs, secret, noise=clean_noise),
        Leak("interrupted step", "interrupted step", lambda: held(optimizer.interrupts, lambda: opacus(Leftover)),
             lambda: held(optimizer.interrupts, lambda: opacus(lambda plain: plain)), "one batch"),
        _pair("q counted half", "accounting", "factor 2", checks.accounting, sgd, plan=half_rate),
        _pair("T counted half", "accounting", "factor 2", checks.accounting, sgd, plan=half_steps),
        _pair("batches of a fixed size", "batch size", "shuffled", checks.inclusion, sgd, sampler=FixedSize),
        _pair("q 3 % too large", "inclusion rate", "3 %", checks.inclusion, sgd, sampler=Oversampled),
        _pair("noise in float32", "float32 tail", "beyond 5.77", _noise, sgd, noise=float32_noise),
        _pair("bfloat16", "sensitivity", "rounding of 2^-8", checks.sensitivity, sgd,
              network=lambda: network().bfloat16()),
        _pair("bfloat16, product's check off", "sensitivity", "rounding of 2^-8", checks.sensitivity,
              sgd.but(per_sample=Unguarded), network=lambda: network().bfloat16()),
        _pair("non-finite sample weighted by zero", "sensitivity", "nan", checks.sensitivity, sgd,
              build=with_mechanism(WeightedByZero)),
        _pair("K views clipped apart", "sensitivity", "2 C at K = 2", checks.sensitivity, sgd, per_sample=ViewsApart),
    ]


@dataclass(frozen=True)
class Finding:
    """What the audit said of a planted leak and of its control."""

    leak: str
    check: str
    size: str
    found: bool
    by: str  # the failing line, or the refusal
    control: bool  # whether the control passed
    control_by: str
    power: str
    seconds: float  # of CPU time

    @property
    def passed(self) -> bool:
        return self.found and self.control

    def line(self) -> str:
        found = f"found by {self.by}" if self.found else "MISSED"
        return (f"{'pass' if self.passed else 'FAIL'}  {self.leak:45} {found}; control "
                f"{'clean' if self.control else 'FLAGGED by ' + self.control_by}; sees {self.power} "
                f"({self.seconds:.1f} s)")


def try_leak(leak: Leak) -> Finding:
    """Run the check on the faulty part and on the clean one."""
    start = time.process_time()
    faulty, clean = (checks.with_seconds(leak.name, leak.check, f) for f in (leak.faulty, leak.clean))
    bad, flagged = ([r for r in lines if not r.passed] for lines in (faulty, clean))
    bad.sort(key=lambda r: not r.test.startswith(leak.check))  # the test that the leak is meant for, first
    by = f"{bad[0].test} ({bad[0].measured})" if bad else ""
    return Finding(leak.name, leak.check, leak.size, bool(bad), by, not flagged,
                   f"{flagged[0].test} ({flagged[0].measured})" if flagged else "",
                   bad[0].power if bad else "nothing", time.process_time() - start)


def find(name: str) -> Leak:
    for leak in leaks():
        if leak.name == name:
            return leak
    raise UsageError(f"no planted leak {name!r}")


def run(show: Callable[[Finding], None] = lambda o: None) -> list[Finding]:
    """Try every planted leak; `show` is called after each."""
    outcomes = []
    for leak in leaks():
        outcomes.append(try_leak(leak))
        show(outcomes[-1])
    return outcomes

"""What the audit looks at: a method on a small network with made-up data, and a spy on every release.

A `Subject` names the parts that make a private run (network, gradients, builder, noise, sampler, plan); the product's
own are the defaults, and a planted leak replaces one of them. `Subject.start` builds the method as a training run does,
from a budget (epsilon, delta) through `methods.spends_of`, and a `Session` makes releases by Algorithm 2.

The spy sits in the geometry: what L gives the mechanism (the exact sums s_j) and what the mechanism hands to R (the
noisy channels) pass through it. So the audit sees the mechanism from outside, whatever it does in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dpngd import methods
from dpngd.errors import UsageError
from dpngd.gradients import Blocks, PerSample, SampleGradients
from dpngd.mechanism import Each, GaussianMechanism, Geometry
from dpngd.noise import Noise, seeded_noise, stream
from dpngd.privacy import Spend
from dpngd.sampling import PoissonSampler

SHAPE, CLASSES = (1, 6, 6), 4
DELTA = 1e-5
VALUES: dict[str, Any] = {
    "public": "made up", "public_size": 60, "C": 0.7, "lambda_safe": 0.2, "lambda_base": 0.05, "T1": 0.25, "p": 2.0,
    "T_cur": 4, "adadps_e": 1e-4, "C0": 0.9, "C1": 0.4, "gep_directions": 45, "pt_steps": 5, "pt_eta": 0.05,
    "curvature_C": 0.6, "kl_budget": 1.0, "kl_noise": 0.3, "probe": 32, "floor_rank": 0.1, "clip_ratio": 0.05,
    "eta_sgd": 0.5, "C_sgd": 1.0,
}
"""Settings of the methods' own fields. No two clips are equal, so that a channel clipped to another's is seen."""


def network() -> nn.Module:
    """Convolutions with and without bias, a norm, a linear layer: 148 parameters, the same weights at every call."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.GroupNorm(2, 4),
                          nn.Conv2d(4, 3, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES))
    return with_weights(model)


def with_weights(model: nn.Module) -> nn.Module:
    """The model with weights of a fixed seed, dropout off: its random masks would hide what a sample does."""
    g = stream(7, "audit/weights")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.4)
    for m in model.modules():
        if isinstance(m, nn.modules.dropout._DropoutNd):
            m.eval()
    return model


def images(n: int, name: str, seed: int = 0) -> Tensor:
    return torch.randn(n, *SHAPE, generator=stream(seed, f"audit/{name}"))


def targets(n: int, name: str, seed: int = 0) -> Tensor:
    return torch.randint(CLASSES, (n,), generator=stream(seed, f"audit/{name}/targets"))


@dataclass
class Seen:
    """One release as the spy saw it."""

    mechanism: GaussianMechanism
    sums: list[Blocks]  # what L gave, before noise: private
    noisy: list[Blocks]  # what R got: released
    direction: Blocks | None = None

    def noise(self) -> list[Tensor]:
        """What was added, flat, for each channel."""
        return [flat(after) - flat(before) for before, after in zip(self.sums, self.noisy, strict=True)]


class Spy:
    """A geometry that notes what passes. With `censor`, the exact sums are replaced by zeros: noise alone leaves."""

    def __init__(self, geometry: Geometry, censor: bool = False):
        self.geometry, self.censor = geometry, censor
        self.sums: list[Blocks] = []
        self.noisy: list[Blocks] = []

    def sq_norms(self, g: SampleGradients) -> tuple[Tensor, Tensor]:
        return self.geometry.sq_norms(g)

    def into(self, sums: list[Blocks]) -> list[Blocks]:
        out = self.geometry.into(sums)
        if self.censor:
            out = [[torch.zeros_like(b) for b in channel] for channel in out]
        self.sums = out
        return out

    def back(self, releases: list[Blocks]) -> Blocks:
        self.noisy = releases
        return self.geometry.back(releases)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.geometry, name)


@contextlib.contextmanager
def watched(censor: bool = False) -> Iterator[list[Seen]]:
    """Note every release of the mechanism within this block, also those that a method makes on its own."""
    seen: list[Seen] = []
    original = GaussianMechanism.release

    def release(self: GaussianMechanism, batches: Iterable, geometry: Geometry, zeros: Blocks, noise: Noise,
                each: Each = map) -> Any:
        spy = Spy(geometry, censor)
        out = original(self, batches, spy, zeros, noise, each)
        seen.append(Seen(self, spy.sums, spy.noisy, out.direction))
        return out

    GaussianMechanism.release = release
    try:
        yield seen
    finally:
        GaussianMechanism.release = original


@dataclass(frozen=True)
class Subject:
    """The parts of a private run. The defaults are the product's."""

    method: str
    network: Callable[[], nn.Module] = network
    per_sample: Callable[..., PerSample] = PerSample
    build: Callable[[methods.Setting], methods.Built] = methods.build
    noise: Callable[[int], Noise] = seeded_noise
    sampler: Callable[..., PoissonSampler] = PoissonSampler
    plan: Callable[..., list[Spend]] = methods.spends_of
    values: dict[str, Any] = field(default_factory=dict)

    def config(self, *, epsilon: float, T: int, B: int, K: int = 1, seed: int = 0, **more: Any) -> SimpleNamespace:
        """The fields that a builder reads; all others are None."""
        own = methods.method(self.method).uses
        unknown = own - VALUES.keys() - self.values.keys() - more.keys()
        if unknown:
            raise UsageError(f"the audit has no value for {', '.join(sorted(unknown))} of {self.method}: add one to "
                             "dpngd.audit.subject.VALUES, or pass values={...} to Subject")
        fields = {k: v if k in own or k == "T_cur" else None for k, v in VALUES.items()}
        return SimpleNamespace(**{**fields, "method": self.method, "epsilon": epsilon, "delta": DELTA, "T": T, "B": B,
                                  "K": K, "seed": seed, "eta": 0.1, "ema": 0.0, "public_size": 60, **self.values,
                                  **more})

    def start(self, x: Tensor, y: Tensor, *, epsilon: float, T: int, q: float, K: int = 1, seed: int = 0,
              B: int | None = None, **more: Any) -> Session:
        """The method, built for the private set x (N*K, ...), y (N,) as a training run builds it.

        B, by which the step divides, is q N unless given: runs on sets of different size must divide alike.
        """
        N = len(y)
        config = self.config(epsilon=epsilon, T=T, B=round(q * N) if B is None else B, K=K, seed=seed, **more)
        model = self.network()
        dtype = next(model.parameters()).dtype
        x = x.to(dtype)
        per_sample = self.per_sample(model, K=K)
        run = Session(self, config, model, per_sample, x, y, q, self.noise(seed))
        setting = methods.Setting(config, per_sample, self.plan(config, q, N), SHAPE,
                                  images(60, "public", seed).to(dtype), run.draw_own)
        run.spends, run.built = setting.spends, self.build(setting)
        return run

    def but(self, **parts: Any) -> Subject:
        return replace(self, **parts)


@dataclass
class Session:
    """A run of Algorithm 2, one step at a time."""

    subject: Subject
    config: SimpleNamespace
    model: nn.Module
    per_sample: PerSample
    x: Tensor
    y: Tensor
    q: float
    noise: Noise
    spends: list[Spend] = field(default_factory=list)
    built: methods.Built = None
    draws: int = 0

    def __post_init__(self) -> None:
        N, seed = len(self.y), self.config.seed
        self.sampler, self.own = (self.subject.sampler(N, round(self.q * N), stream(seed, f"audit/{name}sampling"))
                                  for name in ("", "curvature-"))

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        K = self.config.K
        return self.x.view(len(self.y), K, *self.x.shape[1:])[rows].flatten(0, 1), self.y[rows]

    def draw_own(self) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch for releases of the method's own: the whole set at q = 1, else a Poisson batch."""
        self.draws += 1
        rows = torch.arange(len(self.y)) if self.q == 1 else self.own.draw()
        if len(rows):
            yield self.rows(rows)

    def gradients(self, x: Tensor, y: Tensor, micro_batch: int = 64) -> list[SampleGradients]:
        K = self.config.K
        return [self.per_sample(x[lo * K : (lo + micro_batch) * K], y[lo : lo + micro_batch])
                for lo in range(0, len(y), micro_batch)]

    def sums(self, batches: list[SampleGradients]) -> list[Tensor]:
        """s_j of each channel, flat in float64: what the sensitivity is stated of."""
        clipped = self.built.mechanism.clipped_sums(batches, self.built.geometry, self.per_sample.zeros())
        return [flat(channel) for channel in clipped.sums]

    def release(self, batches: list[SampleGradients], censor: bool = False) -> Seen:
        spy = Spy(self.built.geometry, censor)
        out = self.built.mechanism.release(batches, spy, self.per_sample.zeros(), self.noise)
        return Seen(self.built.mechanism, spy.sums, spy.noisy, out.direction)

    def step(self, t: int, rows: Tensor | None = None, censor: bool = False) -> Seen:
        """One step of Algorithm 2 on these samples, or on a Poisson batch."""
        self.built.prepare(t)
        rows = self.sampler.draw() if rows is None else rows
        seen = self.release(self.gradients(*self.rows(rows)) if len(rows) else [], censor)
        self.move(seen)
        return seen

    def move(self, seen: Seen) -> None:
        """The update: as far as the method goes, a function of public images and of the release."""
        s = self.built.steps(self.per_sample.to_params(seen.direction), self.built.noise_kl).s
        self.per_sample.add_(seen.direction, -s)

    def stds(self) -> list[float]:
        """The noise that the guarantee asks for: sigma sqrt(J) C_j, from the plan and not from the mechanism."""
        clips = self.built.mechanism.clips
        return [self.spends[0].sigma * len(clips) ** 0.5 * C for C in clips]


def flat(blocks: Blocks) -> Tensor:
    return torch.cat([b.detach().double().flatten() for b in blocks])

"""One run: `run(config) -> Record`, the only training loop. It reads like Algorithm 2 of the paper.

`python -m dpngd.train --method dp-ngd --data digits --public photos --epsilon 2` does one from the command line.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd import models, privacy
from dpngd.config import RunConfig
from dpngd.data import Private, Public, check_disjoint, load_private, load_public
from dpngd.errors import UsageError
from dpngd.gradients import MICRO_BATCH, PerSample, SampleGradients
from dpngd.mechanism import Release
from dpngd.methods import Method, Setting, build
from dpngd.pretrain import pretrained
from dpngd.recipe import EMA, PoissonSampler, draw_views, take_views, to_float, views_of
from dpngd.record import Record, where
from dpngd.streams import stream

Progress = Callable[[int, dict], None]
"""Called after each step with the number of steps done and {"loss": ..., "sigma": ..., "q": ...}."""

QUANTILES = (0.1, 0.5, 0.9)


class Clock:
    """Seconds by phase. Phases may nest: the inner one's time is its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1] if self._open else "rest"] += now - self._since
        self._since = now


class TimedGeometry:
    """A geometry whose time counts as whitening."""

    def __init__(self, geometry, clock: Clock):
        self.geometry, self.clock = geometry, clock

    def __getattr__(self, name: str):
        call = getattr(self.geometry, name)

        def timed(*args):
            with self.clock.phase("whitening"):
                return call(*args)

        return timed


class Batches:
    """Poisson batches of the private set, as micro-batches of K views a sample."""

    def __init__(self, private: Private, config: RunConfig, views: int = MICRO_BATCH):
        self.private, self.K, self.views = private, config.K, views
        self.sampler = PoissonSampler(len(private.x_train), config.B, stream(config.seed, "sampling"))
        self.augmentation = stream(config.seed, "augmentation")
        self.rule = views_of(config.data) if config.augment else None
        if config.augment and self.rule is None:
            raise UsageError(f"augment is set, but {config.data} has no views that keep its labels: leave it out")

    def draw(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One batch: x (b*K, C, H, W) float, y (b,), a micro-batch at a time."""
        rows = self.sampler.draw()
        chosen = None
        if self.rule is not None:  # drawn for the whole batch, so that the micro-batch size changes nothing
            chosen = draw_views(len(rows), self.K, self.augmentation, pad=self.rule.pad, flip=self.rule.flip)
        size = max(1, self.views // self.K)
        for lo in range(0, len(rows), size):
            part = rows[lo : lo + size]
            x = self.private.x_train[part]
            x = to_float(x) if chosen is None else take_views(x, chosen[lo * self.K : (lo + size) * self.K],
                                                              pad=self.rule.pad)
            yield x, self.private.y_train[part]


def run(config: RunConfig, *, progress: Progress | None = None) -> Record:
    """Train as the config says and report. The same config gives the same facts, bit for bit, on one machine."""
    clock = Clock()
    private, public = load(config)
    model = initial_model(config, private, public)
    per_sample = PerSample(model, K=config.K)
    batches = Batches(private, config)
    q, N = batches.sampler.q, batches.sampler.N
    setting = Setting(config, per_sample, q, N, None if public is None else to_float(public.x), batches.draw)
    method = build(setting)
    ema, noise = EMA(model, config.ema), stream(config.seed, "noise")
    geometry = TimedGeometry(method.geometry, clock)
    log = Log(config, private, clock)

    for t in range(config.T):
        with clock.phase("curvature"):
            method.prepare(t)  # Modules 1 and 2: the geometry is fixed before the batch is drawn
        gradients = timed_gradients(per_sample, batches.draw(), clock)
        release = method.mechanism.release(gradients, geometry, per_sample.zeros(), noise)  # Module 3
        per_sample.add_(release.direction, -config.eta)
        ema.update()
        log.step(release, method)
        if progress:
            progress(t + 1, {"loss": release.loss, "sigma": method.mechanism.sigma, "q": q})
        if log.diverged(release):
            break
        if log.due(t + 1):
            with clock.phase("evaluation"), ema.averaged():
                log.evaluate(t + 1, model)
    return log.record(method, model, public, q, N)


def load(config: RunConfig) -> tuple[Private, Public | None]:
    """The private and the public set of a run, checked to have no image in common."""
    private = load_private(config.data, N=config.N, seed=config.seed, validation=config.validation)
    if config.public is None:
        return private, None
    public = load_public(config.public, config.public_size, seed=config.seed, shape=tuple(private.x_train.shape[1:]))
    check_disjoint(private, public)
    return private, public


def initial_model(config: RunConfig, private: Private, public: Public | None) -> nn.Module:
    """theta_0: random, or pre-trained on the public set for dp-sgd-pt."""
    channels, size = private.x_train.shape[1:3]
    weights = stream(config.seed, "weights")
    if config.method != "dp-sgd-pt":
        return models.build(config.model, classes=private.classes, in_channels=channels, size=size, generator=weights)
    return pretrained(config.model, x=to_float(public.x), y=public.y, public_classes=public.classes,
                      classes=private.classes, steps=config.pt_steps, eta=config.pt_eta, weights=weights,
                      order=stream(config.seed, "pretraining"))


def timed_gradients(per_sample: PerSample, batch: Iterable[tuple[Tensor, Tensor]], clock: Clock
                    ) -> Iterator[SampleGradients]:
    for x, y in batch:
        with clock.phase("gradients"):
            g = per_sample(x, y)
        yield g


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, size: int = 500) -> tuple[float, float]:
    """Accuracy and mean loss on images x (uint8)."""
    right = loss = 0.0
    for part, target in zip(x.split(size), y.split(size), strict=True):
        logits = model(to_float(part))
        right += float((logits.argmax(1) == target).sum())
        loss += float(F.cross_entropy(logits, target, reduction="sum"))
    return right / len(y), loss / len(y)


class Log:
    """What happens along a run, and its record at the end."""

    def __init__(self, config: RunConfig, private: Private, clock: Clock):
        self.config, self.private, self.clock = config, private, clock
        self.evaluations: list[dict] = []
        self.losses: list[float | None] = []
        self.clipped: list[float] = []
        self.norms: list[list[list[float]]] = []
        self.method: dict[str, list[float]] = defaultdict(list)
        self.nonfinite = 0
        self.status = "ok"

    def step(self, release: Release, method: Method) -> None:
        self.losses.append(release.loss if math.isfinite(release.loss) else None)
        self.clipped.append(release.clipped)
        self.nonfinite += release.nonfinite
        if release.norms.shape[1]:
            levels = release.norms.new_tensor(QUANTILES)
            self.norms.append(release.norms.quantile(levels, dim=1).mT.tolist())
        for name, value in method.diagnose().items():
            self.method[name].append(value)

    def diverged(self, release: Release) -> bool:
        """Whether training has blown up: a batch with samples, but no finite loss."""
        if (release.nonfinite and not release.norms.shape[1]) or math.isinf(release.loss):
            self.status = "diverged"
        return self.status == "diverged"

    def due(self, step: int) -> bool:
        T, evals = self.config.T, self.config.evals
        return any(step == round(T * (i + 1) / evals) for i in range(evals))

    def evaluate(self, step: int, model: nn.Module) -> None:
        accuracy, loss = evaluate(model, self.private.x_test, self.private.y_test)
        self.evaluations.append({"step": step, "accuracy": accuracy, "loss": loss if math.isfinite(loss) else None})

    def record(self, method: Method, model: nn.Module, public: Public | None, q: float, N: int) -> Record:
        config, ok, steps = self.config, self.status == "ok", len(self.losses)
        with self.clock.phase("rest"):
            spent = accounting(method, q, config)
        return Record(
            key=config.key(), config=config.canonical(), status=self.status, steps=steps,
            accuracy=self.evaluations[-1]["accuracy"] if ok else None, evaluations=self.evaluations,
            train_loss=[None if x is None else round(x, 5) for x in self.losses],
            evaluated_on=self.private.evaluated_on, privacy={**spent, "N": N},
            diagnostics={
                "clipped": mean(self.clipped), "nonfinite_samples": self.nonfinite,
                "norm_quantiles": {"levels": QUANTILES, "first": self.norms[:1], "last": self.norms[-1:]},
                **{name: [round(v, 8) for v in values] for name, values in self.method.items()},
            },
            data={"private": describe(self.private), "public": describe(public) if public else None},
            parameters=sum(p.numel() for p in model.parameters()),
            seconds={**self.clock.seconds, "total": sum(self.clock.seconds.values())}, where=where(),
        )


def accounting(method: Method, q: float, config: RunConfig) -> dict:
    """What the run's releases spend, under both accountants, each part and all together (basic composition)."""
    parts = []
    for s in method.spends:
        part = {"purpose": s.purpose, "sigma": s.sigma, "releases": s.releases, "delta": s.delta, "target": s.epsilon}
        for accountant in privacy.ACCOUNTANTS:
            part[f"epsilon_{accountant}"] = privacy.spent(s.sigma, q, s.releases, s.delta, accountant)
        parts.append(part)
    whole = {f"epsilon_{a}": sum(p[f"epsilon_{a}"] for p in parts) for a in privacy.ACCOUNTANTS}
    return {"q": q, "T": config.T, "B": config.B, "delta": config.delta, "sigma": method.mechanism.sigma,
            "noise_std": method.mechanism.noise_std, "sensitivity": method.mechanism.sensitivity, **whole,
            "parts": parts}


def describe(data: Private | Public) -> dict:
    sizes = {"N": len(data.x_train)} if isinstance(data, Private) else {"N": len(data.x)}
    return {"name": data.name, **sizes, "classes": data.classes, "source": data.source, "digest": data.digest}


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


if __name__ == "__main__":
    from dpngd.cli import train_main
    from dpngd.errors import exit_code

    raise SystemExit(exit_code(train_main))

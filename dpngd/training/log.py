"""What is written down along a run: seconds by phase, losses, diagnostics, and at the end its record."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd import privacy
from dpngd.data import Private, Public
from dpngd.files import finite_or_none
from dpngd.mechanism import GaussianMechanism, Release
from dpngd.methods import Built
from dpngd.privacy import Spend
from dpngd.training.config import RunConfig
from dpngd.training.recipe import to_float
from dpngd.training.record import Record, packed, where

QUANTILES = (0.1, 0.5, 0.9)
NOTED = ("status", "losses", "clipped", "weights", "nonfinite", "evaluations", "correct", "along")
"""What a log adds to along a run."""


class Clock:
    """Seconds by phase. Phases may nest: the inner one's time is its own.

    setup        data, calibration, start; at the end what was spent
    curvature    what the method estimates before a step (F, moments, basis)
    gradients    forward and backward passes, and per-sample gradients (several threads: norms and sums as well)
    step         how far to go: passes over the probe of a KL budget
    mechanism    norms ||L g_i||, clipping, weighted sums, L, noise and R
    evaluation   accuracy on the test part
    rest         everything else: updates, averages, notes
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open = ["rest"]
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

    def state_dict(self) -> dict[str, float]:
        self._switch()
        return dict(self.seconds)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Add the seconds of the processes before this one."""
        for name, seconds in state.items():
            self.seconds[name] += seconds

    def _switch(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


class Log:
    """What happens along a run."""

    def __init__(self, config: RunConfig, model: nn.Module, method: Built):
        self.config, self.model, self.method = config, model, method
        self.status = "ok"
        self.losses: list[float] = []
        self.clipped: list[float] = []
        self.weights = [self._weight_norm()]
        self.nonfinite = 0
        self.evaluations: list[dict] = []
        self.correct: dict | None = None
        self.along: list[dict] = []
        self._marks = {round(config.T * (i + 1) / config.evals) for i in range(config.evals)}

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in NOTED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in NOTED:
            setattr(self, name, state[name])

    @property
    def steps(self) -> int:
        return len(self.losses)

    def step(self, release: Release) -> None:
        """After the update: the loss before it, and whether the run can go on."""
        self.losses.append(release.loss)
        self.clipped.append(release.clipped)
        self.nonfinite += release.nonfinite
        self.weights.append(self._weight_norm())
        no_loss = release.nonfinite > 0 and release.norms.shape[1] == 0  # an empty batch has none either, rightly
        if no_loss or math.isinf(release.loss) or not math.isfinite(self.weights[-1]):
            self.diverged()
        if self.steps == 1 or self.due or self.status != "ok":
            self._look(release)

    def diverged(self) -> None:
        self.status = "diverged"

    @property
    def due(self) -> bool:
        """Whether the weights are to be evaluated now."""
        return self.status == "ok" and self.steps in self._marks

    def _look(self, release: Release) -> None:
        """A row of diagnostics. The clip fraction is the mean since the last row, the others are of this step."""
        since = self.along[-1]["step"] if self.along else 0
        norms = release.norms.double()
        levels = norms.new_tensor(QUANTILES)
        public = self.method.diagnose() | self.method.steps.diagnose()
        self.along.append({
            "step": self.steps, "clipped": mean(self.clipped[since:]), "weight_norm": finite_or_none(self.weights[-1]),
            "norms": norms.quantile(levels, dim=1).mT.tolist() if norms.shape[1] else None,
            **{name: finite_or_none(value) for name, value in public.items()}})

    def _weight_norm(self) -> float:
        squares = [torch.linalg.vector_norm(p.detach(), dtype=torch.float64) ** 2 for p in self.model.parameters()]
        return math.sqrt(float(sum(squares)))

    def evaluate(self, x: Tensor, y: Tensor) -> None:
        correct, loss = evaluate(self.model, x, y)
        if not math.isfinite(loss):
            self.diverged()
        accuracy = int(correct.sum()) / len(y)
        self.evaluations.append({"step": self.steps, "accuracy": accuracy, "loss": digits(loss)})
        if self.steps == self.config.T:
            self.correct = packed(correct.numpy())

    def record(self, private: Private, public: Public | None, spends: list[Spend], q: float, clock: Clock) -> Record:
        config = self.config
        with clock.phase("setup"):
            spent = {"simulation": True, **accounting(spends, self.method.mechanism, q, config)}
        return Record(
            key=config.key(), config=config.canonical(), status=self.status, steps=self.steps,
            accuracy=self.evaluations[-1]["accuracy"] if self.status == "ok" else None, evaluations=self.evaluations,
            correct=self.correct if self.status == "ok" else None,
            train_loss=[digits(x) for x in self.losses], evaluated_on=private.evaluated_on, privacy=spent,
            diagnostics={
                "clipped": mean(self.clipped), "nonfinite_samples": self.nonfinite, "norm_levels": list(QUANTILES),
                "largest_loss": largest(self.losses), "largest_weight_norm": largest(self.weights),
                "start_weight_norm": self.weights[0], "along": self.along},
            data={"private": describe(private, len(private.x_train)),
                  "public": None if public is None else describe(public, len(public.x))},
            parameters=sum(p.numel() for p in self.model.parameters()),
            seconds={**clock.seconds, "total": sum(clock.seconds.values())}, where=where(),
        )


class Sealed(Log):
    """What may be said of a run whose weights are released: nothing but what the guarantee covers.

    Losses, norms, counts and accuracies are not looked at. A run ends early only where its weights are not finite:
    they are the release, and what is a function of them is post-processing. A loss would be a function of the batch.
    """

    @property
    def steps(self) -> int:
        return len(self.weights) - 1

    @property
    def due(self) -> bool:
        return False

    def step(self, release: Release) -> None:
        self.weights.append(self._weight_norm())
        if not math.isfinite(self.weights[-1]):
            self.diverged()

    def record(self, private: Private, public: Public | None, spends: list[Spend], q: float, clock: Clock) -> Record:
        config = self.config
        spent = {"simulation": False, **accounting(spends, self.method.mechanism, q, config)}
        data = {"private": describe(private, len(private.x_train)),
                "public": None if public is None else describe(public, len(public.x))}
        del data["private"]["digest"]
        return Record(
            key=config.key(), config=config.canonical(), status=self.status, steps=self.steps, accuracy=None,
            evaluations=[], train_loss=[], evaluated_on="nothing", privacy=spent, diagnostics={}, data=data,
            parameters=sum(p.numel() for p in self.model.parameters()), seconds={}, where={})


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, size: int = 500) -> tuple[Tensor, float]:
    """Which images x (n,C,H,W) uint8 are classified rightly, (n,) bool on the CPU, and the mean loss."""
    right, loss, device = [], 0.0, next(model.parameters()).device
    for part, target in zip(x.split(size), y.to(device).split(size), strict=True):
        logits = model(to_float(part.to(device)))
        right.append((logits.argmax(1) == target).cpu())
        loss += float(F.cross_entropy(logits, target, reduction="sum"))
    return torch.cat(right), loss / len(y)


def accounting(spends: list[Spend], mechanism: GaussianMechanism, q: float, config: RunConfig) -> dict:
    """What all T steps spend, under both accountants: all parts composed, and each part alone, at the same delta.

    A run that diverged is counted in full: it stopped early, but the step at which it stopped depends on its releases.
    """
    parts = []
    for s in spends:
        spent = {f"epsilon_{a}": privacy.composed([s], q, config.T, config.delta, a) for a in privacy.ACCOUNTANTS}
        parts.append({"purpose": s.purpose, "sigma": s.sigma, "releases": s.releases(config.T), "delta": config.delta,
                      "share": s.epsilon / config.epsilon, **spent})
    whole = {f"epsilon_{a}": privacy.composed(spends, q, config.T, config.delta, a) for a in privacy.ACCOUNTANTS}
    return {"q": q, "T": config.T, "B": config.B, "delta": config.delta, "sigma": mechanism.sigma,
            "sensitivity": list(mechanism.sensitivity), "noise_std": list(mechanism.noise_std), **whole, "parts": parts}


def describe(data: Private | Public, N: int) -> dict:
    return {"name": data.name, "N": N, "classes": data.classes, "source": data.source, "digest": data.digest}


def digits(value: float) -> float | None:
    """A loss to 5 significant digits, None where it is not finite: a record keeps one per step."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def largest(values: list[float]) -> float | None:
    return max((v for v in values if math.isfinite(v)), default=None)

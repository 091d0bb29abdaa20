"""Whole audits: which tests are run on what, side by side on the cores, and the report with its table and figure."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

import dpngd
from dpngd import methods
from dpngd.audit import checks, distributed, figure, leaks
from dpngd.audit import optimizer as opacus_checks
from dpngd.audit import release as release_checks
from dpngd.audit.checks import FALSE_ALARM, LEVEL, RELEASES, TESTS, Releases, Result
from dpngd.audit.subject import Subject
from dpngd.errors import UsageError
from dpngd.noise import secret_uniform

Show = Callable[[Result], None]
Scores = dict[str, tuple[list[float], list[float], float]]
"""By subject: the canary's scores with it in the batch and without, in units of their deviation, and 1/sigma."""


@dataclass
class Report:
    """The lines of an audit. It passes when all of them do."""

    lines: list[Result] = field(default_factory=list)
    scores: Scores = field(default_factory=dict)
    seconds: float = 0.0
    cpu: float = 0.0  # seconds of all processes

    @property
    def passed(self) -> bool:
        return bool(self.lines) and all(line.passed for line in self.lines)

    @property
    def failures(self) -> list[Result]:
        return [line for line in self.lines if not line.passed]

    def add(self, other: Report) -> None:
        self.lines += other.lines
        self.scores |= other.scores
        self.seconds += other.seconds
        self.cpu += other.cpu

    def summary(self) -> str:
        statistical = sum(line.level is not None for line in self.lines)
        if statistical > TESTS:
            raise UsageError(f"{statistical} statistical tests in one audit: the levels are set for {TESTS}; audit "
                             "fewer methods at a time")
        return (f"{len(self.failures)} of {len(self.lines)} tests failed. {statistical} are statistical, each at level "
                f"{LEVEL:.0e}: false alarms below {100 * FALSE_ALARM:g} % for up to {TESTS}. "
                f"{self.seconds:.0f} s, {self.cpu:.0f} s of CPU time")

    def to_dict(self) -> dict:
        """All of it as plain values, for a JSON file: the lines, and the canary's scores as counts."""
        return {"version": dpngd.__version__, "commit": code(), "passed": self.passed, "level": LEVEL, "tests": TESTS,
                "false_alarm": FALSE_ALARM, "seconds": round(self.seconds, 1), "cpu_seconds": round(self.cpu, 1),
                "lines": [line.to_dict() for line in self.lines],
                "canary": {name: figure.counts(*scores) for name, scores in self.scores.items()}}

    def figure(self, path: str | Path) -> None:
        """Draw the canary's scores (`dpngd.audit.figure`). Needs matplotlib."""
        figure.draw(self.to_dict()["canary"], LEVEL).savefig(path, dpi=150)


class _Notes(Report):
    """A report that shows its lines as they come, and keeps the canary's scores."""

    def __init__(self, show: Show = lambda line: None):
        super().__init__()
        self._show, self._start, self._cpu = show, time.perf_counter(), time.process_time()

    def keep(self, r: Releases) -> None:
        scale = float(np.std(r.scores_out)) or 1.0
        shift = float(np.mean(r.scores_out))
        inside, outside = ([round(float(v - shift) / scale, 3) for v in s] for s in (r.scores_in, r.scores_out))
        self.scores[r.name] = inside, outside, 1 / r.sigma

    def take(self, lines: Iterable[Result]) -> None:
        for line in lines:
            self.lines.append(line)
            self._show(line)

    def done(self) -> Report:
        return Report(self.lines, self.scores, time.perf_counter() - self._start,
                      self.cpu + time.process_time() - self._cpu)


def audit(optimizer: DPOptimizer, model: nn.Module, x: Tensor, y: Tensor, *, loss: Callable = F.cross_entropy,
          public: Tensor | None = None, loader: Any = None, engine: Any = None, delta: float = 1e-5,
          release: bool = False, n: int = RELEASES, seconds: float | None = None, show: Show = lambda line: None,
          name: str = "Opacus optimizer") -> Report:
    """Audit an Opacus optimizer (`DPNGD`, or Opacus's own) on the module that it trains.

        report = dpngd.audit.audit(optimizer, model, x, y, loader=loader, engine=engine)
        assert report.passed, report.failures

    x, y      at least 9 samples as the model gets them; images (float) are also scaled and spoiled by the audit
    loss      (output, y) -> scalar, with the reduction that the optimizer expects
    public    public images to compare with x; those of DPNGD unless given
    loader    the DPDataLoader: how often each sample is drawn is counted
    engine    the PrivacyEngine: what it has counted so far is composed again by the audit's own accountant
    release   whether the weights are to be published: a seeded generator of noise is then a failure
    n         releases with the canary, and as many without; `seconds` limits how long they may take

    Weights, buffers, schedule and generator are as before at the end, and nothing is counted in the accountant.
    """
    notes = _Notes(show)
    deadline = None if seconds is None else time.monotonic() + 0.7 * seconds
    notes.take(opacus_checks.run(optimizer, model, x, y, loss=loss, public=public, loader=loader, name=name, n=n,
                                 release=release, deadline=deadline, keep=notes.keep))
    if engine is not None and engine.accountant.history:
        notes.take(checks.with_seconds(name, "accounting", lambda: [opacus_checks.spent(
            engine.accountant.history, engine.get_epsilon(delta), delta, name)]))
    return notes.done()


def audit_opacus(*, n: int = RELEASES, seconds: float | None = None, show: Show = lambda line: None) -> Report:
    """Audit `DPNGD` on the audit's small network, with its loader and accountant."""
    notes = _Notes(show)

    def whole() -> list[Result]:
        bench, engine = leaks.opacus_parts()
        x, y = bench.x, bench.y
        for _ in range(3):  # something for the accountant to have counted
            bench.optimizer.zero_grad()
            F.cross_entropy(bench.model(x[:16]), y[:16]).backward()
            bench.optimizer.step()
        report = audit(bench.optimizer, bench.model, x, y, loader=bench.loader, engine=engine, n=n, seconds=seconds)
        notes.scores.update(report.scores)
        return report.lines

    try:
        notes.take(whole())
    except UsageError as error:
        notes.take([checks.refused("Opacus optimizer", "construction", error)])
    return notes.done()


def audit_method(name: str, n: int = RELEASES, seed: int = 0, seconds: float | None = None,
                 subject: Subject | None = None) -> Report:
    """All tests of one method. With `seconds`, fewer releases are drawn (at least 200 on each side): less power."""
    subject, notes = subject or Subject(name), _Notes()
    deadline = None if seconds is None else time.monotonic() + 0.6 * seconds
    private = methods.method(name).curvature_share > 0
    if deadline is not None and private:
        n = min(n, 1200)
    for test, check in (
        ("releases", lambda: checks.of_releases(subject, n, seed, deadline, notes.keep)),
        ("sensitivity", lambda: checks.sensitivity(subject, seed)),
        ("noise, curvature", lambda: checks.own_noise(subject, max(100, 2 * n // 5), seed) if private else []),
        ("accounting", lambda: checks.accounting(subject, seed)),
        ("state", lambda: checks.state(subject, seed)),
        ("end to end", lambda: checks.end_to_end(subject, seed)),
        ("loop", lambda: checks.loop(name, seed)),
    ):
        notes.take(checks.with_seconds(subject, test, check))
    return notes.done()


def audit_methods(names: list[str] | None = None, *, n: int = RELEASES, seed: int = 0, seconds: float | None = None,
                  jobs: int = 1, show: Show = lambda line: None) -> Report:
    """Audit methods (all unless named), the Poisson sampler, and the noise of release mode.

    With `jobs` above 1, methods are audited side by side in processes. `seconds` is shared out among them.
    """
    names = list(methods.METHODS) if names is None else names
    for name in names:
        methods.method(name)  # an unknown name is an error
    notes = _Notes(show)
    jobs = min(jobs, len(names))
    each = None if seconds is None else seconds * jobs / len(names)
    # A seed of its own for each method: the same noise in all of them would be one draw looked at many times.
    tasks = [(name, n, 1000 * seed + i, each) for i, name in enumerate(names)]
    notes.take(checks.with_seconds("sampler", "inclusion", lambda: checks.inclusion(Subject(names[0]), seed)))
    secret = [Subject(m, noise=leaks.secret_noise) for m in ("dp-sgd", "dp-ngd")]
    for test, check in (
        ("noise", lambda: checks.across_runs(secret, "release mode", seed=seed)),
        ("inclusion", lambda: checks.inclusion(Subject("dp-sgd"), source=secret_uniform, name="release mode")),
        ("loop", lambda: checks.release_loop(seed)),
        ("distributed", lambda: distributed.check(seed=seed)),
    ):
        notes.take(checks.with_seconds("release mode", test, check))
    notes.take(checks.with_seconds("training loop", "resume", lambda: checks.resume_loop(seed)))
    for report in _side_by_side(tasks, jobs):
        notes.scores.update(report.scores)
        notes.take(report.lines)
        notes.cpu += report.cpu if jobs > 1 else 0.0  # of other processes
    return notes.done()


def _side_by_side(tasks: list[tuple], jobs: int) -> Iterator[Report]:
    if jobs <= 1:
        yield from itertools.starmap(audit_method, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=torch.set_num_threads,
                             initargs=(1,)) as pool:
        yield from pool.map(audit_method, *zip(*tasks, strict=True))


def audit_release(folder: str | Path, show: Show = lambda line: None) -> Report:
    """Audit what a release left on disk: see `dpngd.audit.release`."""
    notes = _Notes(show)
    notes.take(checks.with_seconds(Path(folder).name, "release", lambda: release_checks.folder(Path(folder))))
    return notes.done()


def self_test(show: Callable[[leaks.Finding], None] = lambda outcome: None) -> list[leaks.Finding]:
    """Plant every leak, and audit it and its clean control. All must be found, and no control flagged."""
    return leaks.run(show)


def code() -> str:
    """The commit of the audited code, with '+' where the work tree differs; 'unknown' outside a checkout."""
    try:
        return importlib.import_module("dpngd.training.record").commit()
    except ModuleNotFoundError:  # it needs the extra `train`
        return "unknown"


def outcome_dict(outcome: leaks.Finding) -> dict:
    return {**dataclasses.asdict(outcome), "passed": outcome.passed}

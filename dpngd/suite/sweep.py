"""Many runs: compute those that are missing, in parallel, and lose none of the others when one fails.

    records = ensure(configs, store=Store("quick"), jobs=2)

A task claims a run in the store, computes it and stores it; only then is it done. So a sweep that was ended
by Ctrl-C or by kill -9 goes on where it was when started again, and two sweeps over the same runs share them.
A run that is expected to take longer than LONG keeps a checkpoint beside its place in the store
(`dpngd.training.checkpoint`), about every BETWEEN seconds, until its record is there.

    mine = shard(configs, "2/8")

is one of eight parts of a plan, for eight machines that share a store or bring their records together later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpngd import progress
from dpngd.errors import UsageError
from dpngd.suite.executors import Executor, Inline, LocalProcesses, Outcome, Outcomes, Task, failed
from dpngd.suite.store import Store
from dpngd.training.config import RunConfig

if TYPE_CHECKING:
    from dpngd.training.checkpoint import Checkpoint

Run = Callable[[RunConfig], Any]
POLL = 0.5  # seconds between two looks at a run that another process is computing
LONG = 600.0  # seconds: runs expected to take longer keep a checkpoint
BETWEEN = 300.0  # seconds from one checkpoint to the next, as expected


class SweepError(RuntimeError):
    """Some runs failed; all others are stored. `failures` has each failed config with its outcome."""

    def __init__(self, failures: Sequence[tuple[RunConfig, Outcome]], total: int):
        self.failures = list(failures)
        causes: dict[str, list[RunConfig]] = defaultdict(list)
        for config, outcome in failures:
            causes[outcome.error].append(config)
        lines = [f"{len(failures)} of {total} runs failed, the others are stored:"]
        for error, configs in causes.items():
            more = f" and {len(configs) - 1} more" if len(configs) > 1 else ""
            lines.append(f"  {configs[0].label()}{more}: {error}")
        super().__init__("\n".join(lines))


def ensure(
    configs: Iterable[RunConfig],
    *,
    store: Store,
    jobs: int = 2,
    run: Run | None = None,
    executor: Executor | None = None,
    seconds: Callable[[RunConfig], float] | None = None,
) -> list[dict]:
    """The records of `configs`, in their order, after computing the missing ones.

    `run` is `dpngd.training.train.run` unless given. With one job the runs are computed in this process, with more in
    workers of one thread each (for a long sweep with a job per core, by measurement), or else wherever `executor` puts
    them. Raises SweepError at the very end.
    `seconds` says how long a run is expected to take (`Profile.seconds`): long ones keep checkpoints, unless `run` is
    the caller's own.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise UsageError(f"jobs = {jobs!r}: must be a whole number from 1")
    configs = list(configs)
    unique = {c.key(): c for c in configs}
    records = {key: store.get(config) for key, config in unique.items()}
    missing = in_turns([config for key, config in unique.items() if records[key] is None])
    if missing:
        every = checkpoint_steps(missing, seconds) if run is None and seconds is not None else {}
        _compute(missing, store, run, executor or _executor(missing, jobs, seconds if run is None else None), every)
        for config in missing:
            records[config.key()] = store.get(config)
            if records[config.key()] is None:
                raise RuntimeError(f"{config.label()} was computed but its record cannot be read")
    return [records[c.key()] for c in configs]


PACED = 1800.0  # seconds on one core: a sweep expected to take longer first measures how the cores are used best


def _executor(missing: Sequence[RunConfig], jobs: int, seconds: Callable[[RunConfig], float] | None) -> Executor:
    """This process for one job, else workers; for a long sweep on all cores, whichever was faster (`bench.layout`)."""
    if jobs > 1 and jobs == os.cpu_count() and seconds is not None and sum(map(seconds, missing)) > PACED:
        from dpngd.suite import bench  # late: it loads torch

        jobs = bench.layout(jobs).processes
    return Inline() if jobs == 1 else LocalProcesses(jobs)


def shard(configs: Iterable[RunConfig], part: str | None) -> list[RunConfig]:
    """Part "i/n" of a plan, i from 1 to n; all of it where `part` is None.

    The runs are sorted by key and dealt out in turn. So the n parts of one plan are disjoint, together they are the
    plan, and their sizes differ by at most one. They depend on the plan only, not on what is stored already.
    """
    unique = {c.key(): c for c in configs}
    if part is None:
        return list(unique.values())
    i, n = shard_numbers(part)
    mine = set(sorted(unique)[i - 1 :: n])
    return [config for key, config in unique.items() if key in mine]


def shard_numbers(part: str) -> tuple[int, int]:
    """i and n of "i/n"."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part, re.ASCII)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"shard {part!r}: write i/n with i from 1 to n, for example 2/8")
    return int(found[1]), int(found[2])


def checkpoint_steps(configs: Iterable[RunConfig], seconds: Callable[[RunConfig], float]) -> dict[str, int]:
    """Key of each long run -> steps from one checkpoint to the next."""
    expected = {config: seconds(config) for config in configs}
    return {c.key(): max(1, round(c.T * BETWEEN / s)) for c, s in expected.items() if s > LONG}


def in_turns(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """The methods in turns, each with its runs in their order: what is compared is then run side by side, so that their
    seconds meet the same machine and the same hour of it."""
    turns: dict[str, int] = defaultdict(int)
    numbered = []
    for config in configs:
        numbered.append((turns[config.method], config))
        turns[config.method] += 1
    return [config for _, config in sorted(numbered, key=lambda pair: pair[0])]


def _compute(missing: list[RunConfig], store: Store, run: Run | None, executor: Executor,
             every: Mapping[str, int]) -> None:
    if getattr(run, "__module__", None) == "__main__" and not isinstance(executor, Inline):
        raise UsageError(
            "a run function of a notebook or script cannot be sent to workers: put it in a module"
        )
    store.prepare()
    store.tidy()
    task, failures = Work(store, run, every), []
    with (progress.bar(len(missing), "runs", unit="run") as bar,
          contextlib.closing(_until_done(task, missing, store, executor, bar)) as outcomes):
        for config, outcome in outcomes:
            if outcome.status == "full":  # every other run would be computed in vain
                raise UsageError(f"the disk of the store {store.folder} is full: {bar.n} of {len(missing)} runs were "
                                 "stored, and those are whole; make room and start again")
            if outcome.status == "failed":
                failures.append((config, outcome))
                bar.set_postfix(failed=len(failures))
            bar.update()
    if failures:
        raise SweepError(failures, len(missing))


def _until_done(
    task: Task, configs: list[RunConfig], store: Store, executor: Executor, bar: progress.Bar
) -> Outcomes:
    """All outcomes. Runs that another process has are looked at again until it has stored or dropped them."""
    while configs:
        waiting = []
        with contextlib.closing(executor.run(task, configs)) as outcomes:
            for config, outcome in outcomes:
                if outcome.status == "busy":
                    waiting.append(config)
                else:
                    yield config, outcome
        configs = []
        while waiting and not configs:
            bar.set_postfix_str(f"{len(waiting)} in another process")
            time.sleep(POLL)
            configs = [config for config in waiting if not store.claimed(config.key())]
        configs += [config for config in waiting if config not in configs]


@dataclass(frozen=True)
class Work:
    """The task of one run.

    every   the steps between two checkpoints of long runs, by key
    """

    store: Store
    run: Run | None = None
    every: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __call__(self, config: RunConfig) -> Outcome:
        """Claim it, compute it, store it, in that order, in this process."""
        try:
            with self.store.claim(config.key()) as mine:
                if not mine:
                    return Outcome("busy")
                if self.store.get(config) is None:  # another process may have been faster
                    self.store.put(config, self.compute(config, self.store.checkpoint(config.key())))
                self.forget(config)
            return Outcome("stored")
        except Exception as error:
            return failed(error)

    def compute(self, config: RunConfig, checkpoint: Path | None = None) -> Mapping[str, Any]:
        """The record of a run. A long one keeps its state in the folder `checkpoint` meanwhile."""
        run = self.run
        if run is None:
            from dpngd.training.train import run  # late: redrawing from stored runs needs no torch

            if checkpoint is not None and config.key() in self.every:
                run = partial(run, checkpoint=_checkpoint(checkpoint, self.every[config.key()]))
        record = run(config)
        if dataclasses.is_dataclass(record) and not isinstance(record, type):
            record = dataclasses.asdict(record)
        if not isinstance(record, Mapping):
            raise UsageError(f"run returned a {type(record).__name__}, not a record")
        return record

    def forget(self, config: RunConfig) -> None:
        """The checkpoint goes once the record is there."""
        shutil.rmtree(self.store.checkpoint(config.key()), ignore_errors=True)


def _checkpoint(folder: Path, every: int) -> Checkpoint:
    from dpngd.training.checkpoint import Checkpoint  # late: it loads torch

    return Checkpoint(folder, every, automatic=True)

"""`dpngd bench --load`: what a run costs beside itself, by executor; and a store with many records.

    executors   RUNS tiny runs (a sleep of OWN seconds) through each: seconds of a worker per run beyond the run's own,
                start of the workers included; memory of the driver after a tenth of the runs and at the end
    store       RECORDS records of the shipped kind: seconds to open them, and to draw a table and a figure from them
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dpngd.errors import UsageError
from dpngd.suite.executors import Executor, LocalProcesses, Outcomes, Task
from dpngd.suite.store import Store, encode, jsonable
from dpngd.suite.sweep import ensure
from dpngd.training.config import RunConfig

RUNS, RECORDS, OWN = 1000, 20_000, 0.01
LOAD_GOALS = {"processes": 0.05, "ray": 0.2, "store": 10.0}
"""Seconds: per run beyond the run itself, and to open and redraw the store."""


def tiny(config: RunConfig) -> dict[str, Any]:
    """A run that takes OWN seconds and says how long it took."""
    start = time.perf_counter()
    time.sleep(OWN)
    return {"status": "ok", "accuracy": 0.5, "train_loss": [1.0] * 100, "own": time.perf_counter() - start}


def tiny_configs(n: int) -> list[RunConfig]:
    return [RunConfig(method="dp-sgd", data="digits", model="small", epsilon=2, B=256, T=40, eta=1, C=1, seed=seed)
            for seed in range(n)]


@dataclass
class Watched:
    """An executor, with the memory of this process and of those that it started, noted at every tenth of the runs."""

    executor: Executor
    mib: list[tuple[float, float]] = field(default_factory=list)  # this process, and its largest child
    first: float = 0.0  # seconds until the first run was stored: what starting takes

    def run(self, task: Task, configs: Sequence[RunConfig]) -> Outcomes:
        start = time.perf_counter()
        for i, outcome in enumerate(self.executor.run(task, configs), 1):
            self.first = self.first or time.perf_counter() - start
            if i % max(1, len(configs) // 10) == 0:
                self.mib.append((memory(os.getpid()), max(map(memory, children()), default=0.0)))
            yield outcome


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def memory(pid: int) -> float:
    """MiB of a process."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss / 2**20
    return 0.0


def through(executor: Executor, workers: int, n: int) -> dict[str, Any]:
    """Seconds per run beyond the run itself, of n tiny runs, and the driver's memory along the way."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        watched = Watched(executor)
        start = time.perf_counter()
        records = ensure(tiny_configs(n), store=Store("load", root=folder, results=folder), run=tiny, executor=watched)
        wall = time.perf_counter() - start
    own = sum(record["own"] for record in records) / n
    own_mib, child_mib = zip(*watched.mib, strict=True)
    return {"runs": n, "workers": workers, "seconds": wall, "own": own, "overhead": wall * workers / n - own,
            "first": watched.first,
            "driver_mib": [own_mib[0], own_mib[-1]], "child_mib": [child_mib[0], child_mib[-1]]}


def many_records(n: int) -> Iterator[dict[str, Any]]:
    """n records for the runs of Table 2 of `cpu`, with many seeds: each has the form and size of a real one."""
    from dpngd.suite import profiles
    from dpngd.training.train import run

    real = run(profiles.load("quick").config("dp-ngd", "digits", 2.0, 0)).to_dict()
    kinds = profiles.load("cpu").configs("utility_table", seeds=[0])
    for i, config in enumerate(itertools.islice(itertools.cycle(kinds), n)):
        new = config.replace(seed=10_000 + i // len(kinds))
        yield jsonable({**real, "key": new.key(), "config": new.canonical()}, "record")


def store(n: int) -> dict[str, Any]:
    """Seconds to open a store of n records and to draw Table 2 and its figure from them; one file each, and shipped."""
    from matplotlib import pyplot as plt

    from dpngd.suite import figures, tables
    from dpngd.suite.runs import Runs

    out: dict[str, Any] = {"records": n}
    with tempfile.TemporaryDirectory() as folder:
        local = Store("load", root=folder, results=folder)
        local.folder.mkdir(parents=True)
        records = list(many_records(n))
        for record in records:
            local.path(record["key"]).write_text(encode(record) + "\n", encoding="utf-8")
        configs = [RunConfig.from_dict(record["config"]) for record in records]
        for name in ("files", "shipped"):
            if name == "shipped":
                local.export()
                local.clear()
            fresh = Store("load", root=folder, results=folder)
            start = time.perf_counter()
            runs = Runs.of(configs, map(fresh.get, configs))
            opened = time.perf_counter()
            tables.accuracy(runs, "utility_table")
            plt.close(figures.utility(runs))
            out[name] = {"open": opened - start, "redraw": time.perf_counter() - opened,
                         "found": len(runs.found), "mib": sum(p.stat().st_size for p in Path(folder).rglob("*.json*"))
                         / 2**20}
    return out


def main(args: argparse.Namespace) -> int:
    """Measure, and print the table or the JSON."""
    jobs = os.cpu_count() or 1
    report: dict[str, Any] = {"load": os.getloadavg()[0], "cores": jobs,
                              "processes": through(LocalProcesses(jobs), jobs, RUNS)}
    if importlib.util.find_spec("ray") is None:
        report["ray"] = "not measured: ray is not installed (in a checkout, pip install '.[cluster]')"
    else:
        from dpngd.suite.cluster import Ray

        try:
            report["ray"] = through(Ray("local"), jobs, RUNS)
        except UsageError as error:  # ray's own limits on a busy machine
            report["ray"] = f"not measured: {error}"
    report["store"] = store(RECORDS)
    print(json.dumps(report, indent=1) if args.json else text(report))
    return 0


def text(report: dict[str, Any]) -> str:
    lines = [f"{report['cores']} cores, load {report['load']:.1f}", "",
             f"{'executor':12}{'runs':>6}{'workers':>9}{'seconds':>9}{'start':>8}{'own ms':>8}{'beyond ms':>11}"
             f"{'goal':>6}{'sweep MiB':>14}{'driver MiB':>14}"]
    for name in ("processes", "ray"):
        r = report[name]
        if isinstance(r, str):
            lines.append(f"{name:12}{r}")
            continue
        memory = ["{:.0f} -> {:.0f}".format(*r[key]) for key in ("driver_mib", "child_mib")]
        lines.append(f"{name:12}{r['runs']:6}{r['workers']:9}{r['seconds']:9.1f}{r['first']:8.1f}{1e3 * r['own']:8.1f}"
                     f"{1e3 * r['overhead']:11.1f}{1e3 * LOAD_GOALS[name]:6.0f}"
                     f"{memory[0]:>14}{memory[1]:>14}")
    s = report["store"]
    lines += ["", *(f"{s['records']:,} records, {what} ({s[key]['mib']:.0f} MiB): open {s[key]['open']:.1f} s, redraw "
                    f"{s[key]['redraw']:.1f} s (goal {LOAD_GOALS['store']:.0f} s for both)"
                    for key, what in (("files", "a file each"), ("shipped", "one shipped file")))]
    return "\n".join(lines)

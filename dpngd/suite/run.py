"""`dpngd run`, run_all.py: one sweep over the missing runs of all notebooks, then each notebook in its own process.

The sweep comes first so that there is one progress bar, one pool of workers and no idle core; the notebooks then find
their runs in the store. A failed run or notebook stops nothing else: failures are collected and decide the exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from dpngd.errors import UsageError, unknown
from dpngd.methods import spends_of
from dpngd.suite import paths, profiles, report, sweep
from dpngd.suite.execute import Execution, execute
from dpngd.suite.profiles import Profile
from dpngd.suite.store import Store
from dpngd.suite.study import ARTIFACTS, CHOICES, PARAMETERS, configs
from dpngd.training.config import RunConfig

Wanted = dict[str, dict[str, list[RunConfig]]]
"""Notebook -> artifact -> its runs."""


def runs_of(wanted: Wanted) -> list[RunConfig]:
    """All runs of some notebooks, each once."""
    return list({c.key(): c for groups in wanted.values() for group in groups.values() for c in group}.values())


def check(args: argparse.Namespace) -> argparse.Namespace:
    """The options of `command.run`, once notebooks and their parameters have been checked too."""
    args.only = [notebook_name(name) for name in args.only] if args.only else list(ARTIFACTS)
    args.params = dict(map(parameter, args.param))
    if args.output is None:
        args.output = paths.FIGURES / (args.profile.name + ("-custom" if args.params else ""))
    return args


def notebook_name(name: str) -> str:
    """The notebook of this name, or of this number (01, 1)."""
    stem = name.removesuffix(".ipynb").removeprefix("notebooks/")
    found = [n for n in ARTIFACTS if n == stem or (stem.isdigit() and n.startswith(f"{int(stem):02d}_"))]
    if not found:
        raise unknown("notebook", name, ARTIFACTS)
    return found[0]


def parameter(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"--param {text!r}: write it as name=value, for example epsilons=[2,4]")
    if name not in PARAMETERS:
        raise unknown("parameter", name, CHOICES)
    if name not in CHOICES:
        raise UsageError(f"--param {name}: there is an option for it, --{name}")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise UsageError(f"--param {text!r}: its value is not YAML") from None


def main(args: argparse.Namespace) -> int:
    """Do what the options of `command.run` say; the exit code is 1 where a run or a notebook failed."""
    args = check(args)
    wanted = {name: configs(name, args.profile, **args.params) for name in args.only}
    if args.list:
        if args.shard:
            mine = {c.key() for c in sweep.shard(runs_of(wanted), args.shard)}
            wanted = {name: {artifact: [c for c in group if c.key() in mine] for artifact, group in groups.items()}
                      for name, groups in wanted.items()}
        print(listing(args.profile, wanted, Store(args.profile.name)))
        return 0
    if args.export:
        print(export(args.profile, Store(args.profile.name)))
        return 0
    started = time.perf_counter()
    store = prepare_store(args)
    if args.shard:
        return train_shard(wanted, store, args)
    train = args.train or args.refresh or not store.shipped_path.exists()
    failures = train_missing(runs_of(wanted), store, args.jobs, args.profile) if train else []
    outcomes = run_notebooks(args)
    failures += [f"{o.notebook}: {o.error}" for o in outcomes if o.error]
    try:
        page = report.write_report(args.profile.name, args.output)
    except UsageError as error:
        failures.append(f"report: {error}")
        page = None
    print(notebook_table(outcomes, args.output))
    print(f"\n{len(outcomes)} notebooks in {(time.perf_counter() - started) / 60:.1f} minutes"
          + (f"; report: {relative(page)}" if page else ""))
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def export(profile: profiles.Profile, store: Store) -> str:
    """Write results/<profile>.jsonl: the runs that the profile asks for now. Those of an earlier choice are dropped."""
    wanted = {c.key(): c for c in profile.all_configs()}
    found = [key for key, c in wanted.items() if store.get(c) is not None]
    if not found:
        raise UsageError(f"{profile.name} has no runs to ship: train some, run_all.py --profile {profile.name} --train")
    store.export(found)
    return f"results/{store.shipped_path.name}: {len(found)} of {len(wanted)} runs"


def prepare_store(args: argparse.Namespace) -> Store:
    store = Store(args.profile.name, read_shipped=False if args.refresh else None)
    if args.refresh:
        os.environ["DPNGD_REFRESH"] = "1"  # for the notebooks' processes
        store.clear()
    return store


def train_shard(wanted: Wanted, store: Store, args: argparse.Namespace) -> int:
    """Train one part of the plan, and no more: the notebooks need all of it."""
    mine = sweep.shard(runs_of(wanted), args.shard)
    failures = train_missing(mine, store, args.jobs, args.profile)
    done = sum(store.get(c) is not None for c in mine)
    print(f"shard {args.shard}: {done} of its {len(mine)} runs are stored; when all shards have ended, run the same "
          "command without --shard for the notebooks")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def train_missing(runs: Iterable[RunConfig], store: Store, jobs: int, profile: Profile) -> list[str]:
    """Train what the notebooks will ask for; the failures, in words."""
    try:
        sweep.ensure(runs, store=store, jobs=jobs, seconds=profile.seconds)
    except sweep.SweepError as error:
        return str(error).splitlines()
    return []


def run_notebooks(args: argparse.Namespace) -> list[Execution]:
    """Each in its own process, `jobs` at a time. They train nothing: what the sweep left missing failed, or is not to
    be trained."""
    parameters = {"profile": args.profile.name, "train": False, "jobs": 1, **args.params}
    with ThreadPoolExecutor(min(args.jobs, 4)) as pool:
        return list(pool.map(lambda name: execute(name, parameters, args.output, timeout=args.timeout, html=args.html),
                             args.only))


def notebook_table(outcomes: list[Execution], folder: Path) -> str:
    """Time, peak memory and verdicts per notebook."""
    lines = [f"{'notebook':32}{'seconds':>9}{'peak MB':>9}{'runs':>6}  verdicts"]
    for o in outcomes:
        entry = {}
        if not o.error:
            entry = json.loads((folder / f"{o.notebook}.json").read_text(encoding="utf-8"))
        words = [c["verdict"] for c in entry.get("claims", [])]
        said = ", ".join(f"{words.count(w)} {w}" for w in dict.fromkeys(words)) or f"failed: {o.error}"
        runs = entry.get("compute", {}).get("runs", "-")
        lines.append(f"{o.notebook:32}{o.seconds:9.1f}{o.peak_mb:9.0f}{runs!s:>6}  {said}")
    return "\n".join(lines)


def relative(path: Path) -> str:
    return str(path.relative_to(paths.ROOT)) if path.is_relative_to(paths.ROOT) else str(path)


# ---- `--list`: what a profile would run, before anything is trained --------------------------------------------------

def listing(profile: Profile, wanted: Wanted, store: Store) -> str:
    """Runs by notebook; then every kind of run with its noise, steps and expected hours."""
    runs = {c.key(): c for c in runs_of(wanted)}
    done = {key for key, c in runs.items() if store.get(c) is not None}
    lines = [f"profile {profile.name}: {profile.about}", "",
             f"{'notebook':32}{'artifact':22}{'runs':>6}{'stored':>8}{'hours':>10}"]
    counted: set[str] = set()
    for notebook, groups in wanted.items():
        for artifact, group in groups.items():
            keys = {c.key() for c in group}
            new = keys - counted
            counted |= keys
            hours = sum(profile.seconds(runs[k]) for k in new) / 3600
            shared = f"  ({len(keys) - len(new)} shared with rows above)" if len(new) < len(keys) else ""
            lines.append(f"{notebook:32}{artifact:22}{len(keys):6}{len(keys & done):8}{spell(hours):>10}{shared}")
        if not groups:
            lines.append(f"{notebook:32}{'(no training)':22}{0:6}{0:8}{0:10.2f}")
    lines += ["", f"{'method':22}{'data':10}{'model':11}{'eps':>5}{'T':>7}{'B':>6}{'q':>9}{'sigma':>9}{'runs':>6}"
                  f"{'hours':>10}"]
    kinds: dict[tuple, list[RunConfig]] = defaultdict(list)
    for c in runs.values():
        kinds[c.data, c.epsilon, c.T, c.method, c.model, c.B, c.validation].append(c)
    for (data, epsilon, T, method, model, B, _), group in sorted(kinds.items(), key=lambda kv: str(kv[0][:2]) + str(
            kv[0][2]).zfill(9)):
        hours = sum(map(profile.seconds, group)) / 3600
        q, sigma = noise_of(group[0])
        lines.append(f"{method:22}{data:10}{model:11}{epsilon:5g}{T:7}{B:6}{q:9.5f}{sigma:>9}{len(group):6}{spell(hours):>10}")
    total = sum(map(profile.seconds, runs.values())) / 3600
    left = sum(profile.seconds(c) for k, c in runs.items() if k not in done) / 3600
    steps = sum(c.T for c in runs.values())
    lines += ["", f"{len(runs)} runs, {steps:,} steps, {spell(total)} hours on {profile.settings['cost']['device']} "
                  f"(estimated); {len(done)} stored, {spell(left)} hours left"]
    return "\n".join(lines)


def spell(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def noise_of(config: RunConfig) -> tuple[float, str]:
    """q, and the sigma of the gradients as the run will have it."""
    N = config.N - round(config.N * config.validation)
    q = config.B / N
    return q, f"{spends_of(config, q, N)[0].sigma:.3f}"

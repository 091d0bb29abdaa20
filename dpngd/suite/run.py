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

from dpngd import progress
from dpngd.errors import UsageError, unknown
from dpngd.methods import spends_of
from dpngd.suite import cost, paths, profiles, report, sweep, tuning
from dpngd.suite.execute import Execution, execute
from dpngd.suite.executors import Executor
from dpngd.suite.params import SEARCHES
from dpngd.suite.profiles import Profile
from dpngd.suite.spotcheck import missing_data, needs
from dpngd.suite.store import Store
from dpngd.suite.study import ARTIFACTS, CHOICES, PARAMETERS, check_parameters, configs
from dpngd.training.config import RECORD_VERSION, RunConfig, key_of

LONG_PLAN = 3600.0  # seconds of one core: a longer plan is trained artifact by artifact
NOTEBOOK_SECONDS = 15.0  # that a notebook takes to draw, its runs being stored
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
    found = [n for n in ARTIFACTS if n == stem or (stem.isdecimal() and n.startswith(f"{int(stem):02d}_"))]
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
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: 2026-13-45 looks like a date, and is none
        raise UsageError(f"--param {text!r}: its value is not YAML") from None


def main(args: argparse.Namespace) -> int:
    """Do what the options of `command.run` say; the exit code is 1 where a run or a notebook failed."""
    args = check(args)
    check_parameters(args.profile, {**dict.fromkeys(CHOICES), **args.params}, True, args.jobs)
    wanted = {name: configs(name, args.profile, **args.params) for name in args.only}
    if not (args.refresh or args.export):
        check_version(Store(args.profile.name))
    if args.list:
        if args.shard:
            mine = {c.key() for c in sweep.shard(runs_of(wanted), args.shard)}
            wanted = {name: {artifact: [c for c in group if c.key() in mine] for artifact, group in groups.items()}
                      for name, groups in wanted.items()}
        print(listing(args.profile, wanted, Store(args.profile.name)))
        if args.profile.settings["resources"]["gpus"]:
            print("\n".join(cost.cost_table(args.profile, wanted, args.workers)))
        return 0
    if args.export:
        print(export(args.profile, Store(args.profile.name)))
        return 0
    started = time.perf_counter()
    train = args.train or args.refresh or args.shard or not Store(args.profile.name).shipped_path.exists()
    if train:
        check_tuned(args.profile, runs_of(wanted))
    store = prepare_store(args, runs_of(wanted))
    if args.shard:
        return train_shard(wanted, store, args)
    progress.say(first_line(wanted, store, args, train))
    failures = train_missing(runs_of(wanted), store, args.jobs, args.profile, args.executor) if train else []
    outcomes = run_notebooks(args)
    failures += [f"{o.notebook}: {o.error}" for o in outcomes if o.error]
    try:
        page = report.write_report(args.profile.name, args.output)
    except UsageError as error:
        failures.append(f"report: {error}")
        page = None
    print(notebook_table(outcomes, args.output))
    print(f"\n{len(outcomes)} notebooks in {(time.perf_counter() - started) / 60:.1f} minutes"
          + (f"; open {relative(page)}" if page else ""))
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def check_version(store: Store) -> None:
    """An error where shipped records are of another version: their numbers mean something else than those of today."""
    old = [key for key, record in store.shipped.items() if key_of(record["config"]) != key]
    if old:
        raise UsageError(f"results/{store.shipped_path.name}: {len(old)} of {len(store.shipped)} records are not of "
                         f"record version {RECORD_VERSION} (the first is {old[0]}): remove the file, or train again "
                         "with --refresh and ship with --export")


def first_line(wanted: Wanted, store: Store, args: argparse.Namespace, train: bool) -> str:
    """What will happen, and for about how long: the first line of the command."""
    runs = runs_of(wanted)
    missing = [c for c in runs if store.get(c) is None] if train else []
    first = progress.outlook(len(runs), map(args.profile.seconds, missing), args.jobs)
    then = "" if args.shard else f"{len(wanted)} notebooks into {relative(args.output)}/, about " + progress.span(
        NOTEBOOK_SECONDS * len(wanted) / min(args.jobs, 4, len(wanted)))
    return f"profile {args.profile.name}: " + "; then ".join(filter(None, (first, then)))


def not_searched(profile: Profile, runs: Iterable[RunConfig]) -> list[str]:
    """The data sets of these runs on which the profile has a search that has not been finished."""
    searched = {d for s in SEARCHES if profile.settings[s]["grid"] for d in profile.settings[s]["cells"]}
    return sorted({c.data for c in runs} & searched - set(profile.settings["tuned"].get("eta_sgd", {})))


def check_tuned(profile: Profile, runs: Iterable[RunConfig]) -> None:
    """An error before runs are trained at rates that nobody chose."""
    if missing := not_searched(profile, runs):
        raise UsageError(f"{profile.name} is not tuned yet on {', '.join(missing)}: run `dpngd tune {profile.name}` "
                         "before its results are trained")


def export(profile: profiles.Profile, store: Store) -> str:
    """Write results/<profile>.jsonl: the runs that the profile asks for now. Those of an earlier choice are dropped.

    A search that is not complete asks for trials that no file names yet: they follow from the stored ones."""
    wanted = {c.key(): c for c in profile.all_configs()}
    trials: dict[str, RunConfig] = {}

    def get(config: RunConfig) -> dict | None:
        trials[config.key()] = config
        return store.get(config)

    tuning.search_plan(profile.name, get)
    found = [key for key, c in {**wanted, **trials}.items() if store.get(c) is not None]
    if not found:
        raise UsageError(f"{profile.name} has no runs to ship: train some, run_all.py --profile {profile.name} --train")
    store.export(found)
    return f"results/{store.shipped_path.name}: {len(found)} of {len(wanted)} runs"


def prepare_store(args: argparse.Namespace, runs: list[RunConfig]) -> Store:
    store = Store(args.profile.name, read_shipped=False if args.refresh else None)
    if args.refresh:
        os.environ["DPNGD_REFRESH"] = "1"  # for the notebooks' processes
        store.prepare()
        if missing := missing_data(set().union(*(needs(c.canonical()) for c in runs))):
            raise UsageError(f"--refresh: {', '.join(missing)} not found, so these runs could not be trained again; "
                             "`dpngd data fetch NAME` gets one or says how; or set DPNGD_DATA")
        store.clear(c.key() for c in runs)
    return store


def train_shard(wanted: Wanted, store: Store, args: argparse.Namespace) -> int:
    """Train one part of the plan, and no more: the notebooks need all of it."""
    mine = sweep.shard(runs_of(wanted), args.shard)
    progress.say(first_line({"shard": {args.shard: mine}}, store, args, True))
    failures = train_missing(mine, store, args.jobs, args.profile, args.executor)
    done = sum(store.get(c) is not None for c in mine)
    print(f"shard {args.shard}: {done} of its {len(mine)} runs are stored; when all shards have ended, run the same "
          "command without --shard for the notebooks")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def train_missing(runs: Iterable[RunConfig], store: Store, jobs: int, profile: Profile,
                  executor: Executor | None = None) -> list[str]:
    """Train what the notebooks will ask for; the failures, in words.

    A plan of hours is trained artifact by artifact, in the profile's order, so that one that is ended early leaves
    whole tables and not a part of each.
    """
    failures, where = [], {} if executor is None else {"executor": executor}
    for group in in_order(list(runs), profile):
        try:
            sweep.ensure(group, store=store, jobs=jobs, seconds=profile.seconds, **where)
        except sweep.SweepError as error:
            failures += str(error).splitlines()
    return failures


def in_order(runs: list[RunConfig], profile: Profile) -> list[list[RunConfig]]:
    """The runs in the parts in which they are trained."""
    if sum(map(profile.seconds, runs)) < LONG_PLAN:
        return [runs]
    left = {c.key(): c for c in runs}
    parts = [[left.pop(key) for c in profile.configs(name) if (key := c.key()) in left] for name in profile.artifacts]
    return [part for part in (*parts, list(left.values())) if part]


def run_notebooks(args: argparse.Namespace) -> list[Execution]:
    """Each in its own process, `jobs` at a time. They train nothing: what the sweep left missing failed, or is not to
    be trained."""
    parameters = {"profile": args.profile.name, "train": False, "jobs": 1, **args.params}
    with (ThreadPoolExecutor(min(args.jobs, 4)) as pool,
          progress.bar(len(args.only), "notebooks", unit="notebook") as bar):
        def one(name: str) -> Execution:
            outcome = execute(name, parameters, args.output, timeout=args.timeout, html=args.html)
            bar.update()
            return outcome

        return list(pool.map(one, args.only))


def notebook_table(outcomes: list[Execution], folder: Path) -> str:
    """Time, peak memory and verdicts per notebook."""
    lines = [f"{'notebook':32}{'seconds':>9}{'peak MB':>9}{'runs':>6}  verdicts"]
    for o in outcomes:
        entry = {}
        if not o.error:
            entry = json.loads((folder / f"{o.notebook}.json").read_text(encoding="utf-8"))
        words = [c["word"] for c in entry.get("claims", [])]
        said = ", ".join(f"{words.count(w)} {w}" for w in dict.fromkeys(words)) or "no claim of the paper's"
        said = f"failed: {o.error}" if o.error else said
        runs = entry.get("compute", {}).get("runs", "-")
        lines.append(f"{o.notebook:32}{o.seconds:9.1f}{o.peak_mb:9.0f}{runs!s:>6}  {said}")
    return "\n".join(lines)


def relative(path: Path) -> str:
    return str(path.relative_to(paths.ROOT)) if path.is_relative_to(paths.ROOT) else str(path)


# ---- `--list`: what a profile would run, before anything is trained --------------------------------------------------

def listing(profile: Profile, wanted: Wanted, store: Store) -> str:
    """Runs by artifact, in the order of a sweep; then every kind of run with its noise, steps and expected hours."""
    runs = {c.key(): c for c in runs_of(wanted)}
    done = {key for key, c in runs.items() if store.get(c) is not None}
    lines = [f"profile {profile.name}: {profile.about}", "",
             f"{'artifact':28}{'notebook':32}{'planned':>8}{'done':>7}{'core-hours':>12}{'left':>8}"]
    places: dict[str, list[str]] = {}
    for notebook, groups in wanted.items():
        for artifact in groups:
            places.setdefault(artifact, []).append(notebook)
    counted: set[str] = set()
    for artifact in sorted(places, key=profile.artifacts.index):
        keys = {c.key() for c in wanted[places[artifact][0]][artifact]}
        new = keys - counted
        counted |= keys
        hours, left = (sum(profile.seconds(runs[k]) for k in some) / 3600 for some in (new, new - done))
        shared = f"  ({len(keys) - len(new)} shared with rows above)" if len(new) < len(keys) else ""
        lines.append(f"{artifact:28}{', '.join(places[artifact]):32}{len(keys):8}{len(keys & done):7}{spell(hours):>12}"
                     f"{spell(left):>8}{shared}")
    if not places:
        lines.append("(no training)")
    if missing := not_searched(profile, runs.values()):
        lines += ["", f"not tuned yet on {', '.join(missing)}: rates and T are where the tuning starts, so that hours "
                      f"will change with `dpngd tune {profile.name}`, which has {profile.later_trials()} more trials "
                      "(second round and finalists)"]
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
    device = profile.settings["cost"]["device"]
    lines += ["", f"{len(runs)} runs, {steps:,} steps, {spell(total)} core-hours on {device} (estimated); {len(done)} "
                  f"done, {spell(left)} core-hours left"]
    return "\n".join(lines)


def spell(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def noise_of(config: RunConfig) -> tuple[float, str]:
    """q, and the sigma of the gradients as the run will have it."""
    N = config.N - round(config.N * config.validation)
    q = config.B / N
    return q, f"{spends_of(config, q, N)[0].sigma:.3f}"

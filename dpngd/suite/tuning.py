"""The grid search of a profile: its trials, what won, and the file that every other run takes its rate and steps from.

    dpngd tune cpu           # runs the trials that are missing, writes params/tuned/cpu.yaml
    dpngd tune cpu --shard 2/8    # the second of eight parts of those trials, on a machine of its own
    dpngd tune cpu --show    # what won so far, and which winners lie at the edge of their grid

The trials are on a validation part of the private training set, with seeds that no other run has: the test set chooses
nothing. Round one is the grid, with one seed. Its best settings (tuned/<profile>-finalists.yaml) are repeated with
other seeds, and the one with the highest mean accuracy wins: one seed alone would choose what was lucky, or is barely
stable. Of equals, the smaller rate. First every method of the comparison, each with the same number of trials; then the
arms of DP-NGD, which start from what won for DP-NGD.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from dpngd.errors import UsageError
from dpngd.files import write_atomically
from dpngd.methods import METHODS
from dpngd.suite import params, paths, profiles, sweep
from dpngd.suite.profiles import blocks, place, points
from dpngd.suite.store import Store
from dpngd.training.config import RunConfig

Chosen = dict[str, dict[str, Any]]


def expected_best(accuracies: Sequence[float], k: int) -> float:
    """The mean, over all choices of k of the n trials, of the best one: sum_i v_(i) C(i-1, k-1) / C(n, k)."""
    ranked = sorted(accuracies)
    return sum(v * math.comb(i, k - 1) for i, v in enumerate(ranked)) / math.comb(len(ranked), k)


def searched(profile: profiles.Profile) -> Iterator[tuple[str, str, str, float, int]]:
    """(search, method, data set, epsilon, seed) of every grid of the profile."""
    for search in profiles.SEARCHES:
        section = profile.settings[search]
        if len(section["seeds"]) != 1 or any(len(row) != 1 for row in section["cells"].values()):
            raise UsageError(f"{profile.name}: {search} takes one epsilon per data set, and one seed")
        for method in section["grid"]:
            for data, (epsilon,) in section["cells"].items():
                yield search, method, data, epsilon, section["seeds"][0]


def choose_finalists(profile: profiles.Profile, store: Store) -> Chosen:
    """Method -> data set (or data set/network) -> the best settings of round one, of a grid that is complete."""
    found: Chosen = {}
    for search, method, data, epsilon, seed in searched(profile):
        trials = [(axes, c, store.get(c)) for axes, c in profile.trials(method, data, epsilon, seed, search)]
        if trials and all(record for *_, record in trials):
            ended = [(record["accuracy"], -c.eta, -i, axes) for i, (axes, c, record) in enumerate(trials)
                     if record["accuracy"] is not None]
            best = [axes for *_, axes in sorted(ended, key=lambda t: t[:3], reverse=True)]
            section = profile.settings[search]
            if best:
                found.setdefault(method, {})[place(data, section["model"])] = best[: section["repeat"]["best"]]
    return found


def choose_winners(profile: profiles.Profile, store: Store) -> Chosen:
    """Method -> data set (or data set/network) -> of the finalists, the setting with the highest mean accuracy over all
    seeds. One that diverged with some seed does not win; a search with repeats missing has no winner."""
    found: Chosen = {}
    for search, method, data, epsilon, seed in searched(profile):
        first = profile.trials(method, data, epsilon, seed, search)
        scored = []
        for i, (axes, repeats) in enumerate(profile.repeats(method, data, epsilon, search)):
            configs = [c for a, c in first if a == axes] + repeats
            records = [store.get(c) for c in configs]
            if not configs or None in records:
                scored = []
                break
            accuracies = [r["accuracy"] for r in records]
            if None not in accuracies:
                scored.append((sum(accuracies) / len(accuracies), -configs[0].eta, -i, axes))
        if scored:
            section = profile.settings[search]
            found.setdefault(method, {})[place(data, section["model"])] = max(scored, key=lambda t: t[:3])[-1]
    return found


def edges(profile: profiles.Profile, method: str, where: str) -> list[str]:
    """Axes on which the winner is the first or the last of three trials or more that differ in that axis alone: a
    wider grid might do better."""
    won, model = profile.settings["tuned"][method][where], where.partition("/")[2] or None
    grid = next(profile.settings[s]["grid"] for s in profiles.SEARCHES if profile.settings[s]["model"] == model)[method]
    found = []
    for axis in dict.fromkeys(axis for block in blocks(grid) for axis in block):
        parts = axis.split("+")
        others = {n: v for n, v in won.items() if n not in parts}
        line = [point for point in points(grid) if others.items() <= point.items()]
        if len(line) >= 3 and won in (line[0], line[-1]):
            found.append(axis)
    return found


def write_chosen(profile: str, store: Store) -> Chosen:
    """Write params/tuned/<profile>-finalists.yaml and <profile>.yaml; nothing where no search is complete."""
    for choose, name, what in ((choose_finalists, f"{profile}-finalists", "the best trials of round one, best first"),
                               (choose_winners, profile, "the trials that won")):
        found = choose(profiles.load(profile), store)
        path = paths.PARAMS / "tuned" / f"{name}.yaml"
        if found or path.exists():
            head = f"# Written by `dpngd tune {profile}`: {what}. rate and T are factors.\n"
            write_atomically(path, head + yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=100))
    return found


def present_trials(profile: profiles.Profile) -> list[RunConfig]:
    """The trials of the present round and of those before."""
    return [c for s in profiles.SEARCHES if s in profile.artifacts for c in profile.configs(s)]


def train_trials_of_shard(profile: str, store: Store, jobs: int, part: str) -> str:
    """Train one part of the present round's trials. It chooses nothing: that needs the trials of all parts."""
    loaded = profiles.load(profile)
    mine = sweep.shard(present_trials(loaded), part)
    sweep.ensure(mine, store=store, jobs=jobs, seconds=loaded.seconds)
    return (f"shard {part}: its {len(mine)} trials are stored; when all shards have ended, `dpngd tune {profile}` "
            "chooses among them and goes on with the next round")


def search(profile: str, store: Store, jobs: int = 2) -> Chosen:
    """All trials, round by round: the methods, their finalists, then the arms from what won for their method."""
    while True:
        before = params.stored_finalists(profile), params.stored_winners(profile)
        loaded = profiles.load(profile)
        sweep.ensure(present_trials(loaded), store=store, jobs=jobs, seconds=loaded.seconds)
        found = write_chosen(profile, store)
        if (params.stored_finalists(profile), params.stored_winners(profile)) == before:
            return found


def main(args: argparse.Namespace) -> int:
    """Search, unless only `--show` is asked for, and print what won."""
    if args.shard:
        print(train_trials_of_shard(args.profile, Store(args.profile), args.jobs, args.shard))
        return 0
    if not args.show:
        search(args.profile, Store(args.profile), args.jobs)
    profile = profiles.load(args.profile)
    for method, by_place in profile.settings["tuned"].items():
        for where, axes in by_place.items():
            edge = f"; at the edge of its grid: {', '.join(found)}" if (found := edges(profile, method, where)) else ""
            print(f"{METHODS[method].label:18} {where:16} " + " ".join(f"{n}={v:g}" for n, v in axes.items()) + edge)
    return 0

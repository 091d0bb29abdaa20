"""The grid search of a profile: its trials, what won, and the file that every other run takes its rate and steps from.

    python -m dpngd.tuning cpu           # runs the trials that are missing, writes params/tuned/cpu.yaml
    python -m dpngd.tuning cpu --show    # what won so far, and which winners lie at the edge of their grid

The trials are on a validation part of the private training set, with seeds that no other run has: the test set chooses
nothing. The winner has the highest accuracy there; of equals, the one with the smaller rate. First every method of the
comparison, each with the same number of trials; then the arms of DP-NGD, which start from what won for DP-NGD.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import yaml

from dpngd import params, profiles, sweep
from dpngd.config import METHODS, RunConfig
from dpngd.errors import Parser, UsageError, exit_code
from dpngd.runs import Runs
from dpngd.store import Store, write_atomically


def best(runs: Runs) -> RunConfig | None:
    """The run with the highest accuracy, the smaller rate of equals; None where none ended well."""
    scored = [(r["accuracy"], -c.eta, i, c) for i, (c, r) in enumerate(runs.each()) if r["accuracy"] is not None]
    return max(scored)[-1] if scored else None


def expected_best(accuracies: Sequence[float], k: int) -> float:
    """The mean, over all choices of k of the n trials, of the best one: sum_i v_(i) C(i-1, k-1) / C(n, k)."""
    ranked = sorted(accuracies)
    return sum(v * math.comb(i, k - 1) for i, v in enumerate(ranked)) / math.comb(len(ranked), k)


def winners(profile: profiles.Profile, store: Store) -> dict[str, dict[str, dict[str, Any]]]:
    """Method -> data set (or data set/network) -> what its best trial set. A search with trials missing has none."""
    found: dict[str, dict] = {}
    for search in profiles.SEARCHES:
        section = profile.settings[search]
        if len(section["seeds"]) != 1 or any(len(row) != 1 for row in section["cells"].values()):
            raise UsageError(f"{profile.name}: {search} takes one epsilon a data set, and one seed")
        for method in section["grid"]:
            for data, (epsilon,) in section["cells"].items():
                trials = profile.trials(method, data, epsilon, section["seeds"][0], search)
                runs = Runs.of([config for _, config in trials], (store.get(config) for _, config in trials))
                if trials and not runs.missing and (won := best(runs)) is not None:
                    chosen = next(axes for axes, config in trials if config == won)
                    found.setdefault(method, {})[profiles.place(data, section["model"])] = chosen
    return found


def edges(profile: profiles.Profile, method: str, where: str) -> list[str]:
    """Axes on which the winner is the first or the last of three trials or more that differ in that axis alone: a
    wider grid might do better."""
    won, model = profile.settings["tuned"][method][where], where.partition("/")[2] or None
    grid = next(profile.settings[s]["grid"] for s in profiles.SEARCHES if profile.settings[s]["model"] == model)[method]
    found = []
    for axis in dict.fromkeys(axis for block in profiles.blocks(grid) for axis in block):
        parts = axis.split("+")
        others = {n: v for n, v in won.items() if n not in parts}
        line = [point for point in profiles.points(grid) if others.items() <= point.items()]
        if len(line) >= 3 and won in (line[0], line[-1]):
            found.append(axis)
    return found


def write(profile: str, store: Store) -> dict[str, Any]:
    """Write params/tuned/<profile>.yaml; nothing where no search is complete."""
    found = winners(profiles.load(profile), store)
    if found:
        head = f"# Written by `python -m dpngd.tuning {profile}`: the trials that won. rate and T are factors.\n"
        write_atomically(params.PARAMS / "tuned" / f"{profile}.yaml",
                         head + yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=100))
    return found


def search(profile: str, store: Store, jobs: int = 2) -> dict[str, Any]:
    """All trials, in two rounds: the methods, then the arms from what won for their method."""
    for _ in range(2):
        loaded = profiles.load(profile)
        trials = [c for s in profiles.SEARCHES if s in loaded.artifacts for c in loaded.configs(s)]
        sweep.ensure(trials, store=store, jobs=jobs)
        found = write(profile, store)
    return found


def main(argv: list[str] | None = None) -> int:
    p = Parser(prog="python -m dpngd.tuning", description="The grid search of a profile.", allow_abbrev=False)
    p.add_argument("profile", help=f"one of {', '.join(profiles.profile_names())}")
    p.add_argument("--jobs", type=int, default=2, help="runs at once (default 2)")
    p.add_argument("--show", action="store_true", help="run and write nothing, show what won so far")
    args = p.parse_args(argv)
    if not args.show:
        search(args.profile, Store(args.profile), args.jobs)
    profile = profiles.load(args.profile)
    for method, by_place in profile.settings["tuned"].items():
        for where, axes in by_place.items():
            edge = f"; at the edge of its grid: {', '.join(found)}" if (found := edges(profile, method, where)) else ""
            print(f"{METHODS[method].label:18} {where:16} " + " ".join(f"{n}={v:g}" for n, v in axes.items()) + edge)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))

"""The gate and the grid search of a profile: their trials, what won, and the files that every other run reads.

    dpngd tune cpu --gate         # in which setting epsilon matters to DP-SGD; writes params/tuned/cpu-gate.yaml
    dpngd tune cpu                # runs the trials that are missing, writes params/tuned/cpu.yaml
    dpngd tune cpu --shard 2/8    # the second of eight parts of the trials that can be run now, on a machine of its own
    dpngd tune cpu --show         # what won so far, and which winners lie at the edge of their grid

All trials are on a validation part of the private training set, with seeds that no other run has: the test set chooses
nothing. They are stored as any run is, so a search that was ended goes on where it was. What is chosen follows from the
stored trials alone (`search_plan`), in this order for each data set and epsilon:

1. DP-SGD: its grid, then `second` more trials, shared among the T's. At each T the best few are repeated with more
   seeds, and one is chosen: eta_sgd(T). Of these, one is DP-SGD's own.
2. Every other method: its grid, with eta from the equation and eta_sgd(T); then `second` more trials; the best few of
   all with more seeds; one is chosen.
3. The arms of DP-NGD, at its T and floor: five factors on the rate; the best few with more seeds; one is chosen.

The second round goes one and two steps beyond an edge of the grid that the best trial lies at, and half a step to
either side where it does not. Every method has it, whether any lies at an edge or not: so all have as many trials.

The choice among finalists (`choose`): the smallest rate within one standard error of the best mean, of those whose loss
after the first tenth of the steps never exceeds 1.5 times its first value, in any seed. The standard error of a mean is
pooled over the finalists. So nothing wins that was lucky once, or is on the brink of instability.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dpngd import progress
from dpngd.errors import UsageError, unknown
from dpngd.files import write_atomically
from dpngd.methods import METHODS
from dpngd.suite import params, paths, profiles, sweep
from dpngd.suite.params import SEARCHES
from dpngd.suite.profiles import GATE, Grid, Profile, Trial, blocks, joint, largest_norm, place, points
from dpngd.suite.store import Store
from dpngd.training.config import FIELDS, RunConfig, in_interval

UNSTABLE = 1.5  # a run whose loss exceeds this times its first one, after the first tenth of its steps
Axes = dict[str, Any]
Get = Callable[[RunConfig], Mapping[str, Any] | None]
"""The record of a run, or None where there is none."""


# ---- Who wins --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Candidate:
    """A setting with the records of its runs, one per seed."""

    axes: Axes
    config: RunConfig
    records: Sequence[Mapping[str, Any]]

    @property
    def accuracies(self) -> list[float]:
        """Of every seed; a run that diverged counts as nothing right."""
        return [r["accuracy"] or 0.0 for r in self.records]

    @property
    def mean(self) -> float:
        return sum(self.accuracies) / len(self.records)

    @property
    def variance(self) -> float:
        """Of one seed's accuracy; 0 where there is one seed."""
        n = len(self.records)
        return sum((a - self.mean) ** 2 for a in self.accuracies) / (n - 1) if n > 1 else 0.0

    @property
    def stable(self) -> bool:
        return all(map(stable, self.records))

    @property
    def rate(self) -> float:
        """eta S, the longest Euclidean step before the map back.

        Of DP-NGD it is eta_sgd sqrt(lambda_safe), although its longest step after the map back is the same at every
        lambda_safe: so the rule for ties takes its lowest floor (docs/protocol.md, log of 2026-11-19).
        """
        return self.config.eta * largest_norm(vars(self.config))


def stable(record: Mapping[str, Any]) -> bool:
    """Whether a run ended, and its loss after T/10 steps never exceeded UNSTABLE times its first one."""
    losses = [x for x in record["train_loss"] if x is not None]
    late = [x for x in record["train_loss"][math.ceil(len(record["train_loss"]) / 10):] if x is not None]
    return record["status"] == "ok" and (not late or max(late) <= UNSTABLE * losses[0])


def best(candidates: Sequence[Candidate], n: int) -> list[Candidate]:
    """The n best, best first: stable ones before others, then by accuracy, then the smaller rate, then the earlier."""
    order = sorted(enumerate(candidates), key=lambda ic: (not ic[1].stable, -ic[1].mean, ic[1].rate, ic[0]))
    return [c for _, c in order[:n]]


def choose(finalists: Sequence[Candidate]) -> Candidate:
    """The smallest rate within one standard error of the best mean, of the stable ones (of all where none is)."""
    able = [c for c in finalists if c.stable] or list(finalists)
    top = max(c.mean for c in able)
    pooled = sum(c.variance / len(c.records) for c in finalists) / len(finalists)
    near = [c for c in able if c.mean >= top - math.sqrt(pooled)]
    return min(near, key=lambda c: (c.rate, -c.mean))


def best_mean(finalists: Sequence[Candidate]) -> Candidate:
    """The finalist with the best mean, of the stable ones (of all where none is): what `choose` takes without its
    preference for small rates."""
    able = [c for c in finalists if c.stable] or list(finalists)
    return min(able, key=lambda c: (-c.mean, c.rate))


def expected_best(accuracies: Sequence[float], k: int) -> float:
    """The mean, over all choices of k of the n trials, of the best one: sum_i v_(i) C(i-1, k-1) / C(n, k)."""
    ranked = sorted(accuracies)
    return sum(v * math.comb(i, k - 1) for i, v in enumerate(ranked)) / math.comb(len(ranked), k)


# ---- The second round: where it goes ---------------------------------------------------------------------------------

def second_round(grid: Grid, won: Axes, n: int, fixed: Sequence[str]) -> list[Axes]:
    """The n trials that follow from the best one, `won`: single moves on each axis, then two axes at a time.

    An axis has two moves: one and two steps beyond the edge that `won` lies at, or half a step to either side. A step
    is the ratio of the last two values of the grid. Axes in `fixed`, and those of one value, have none. A move to a
    value that no run can have (lambda_base above lambda_safe) gives way to a shorter one: half a step beyond the edge,
    then half a step and a quarter of one back.
    """
    old = points(grid)
    moves = {axis: found for axis in dict.fromkeys(a for block in blocks(grid) for a in block)
             if axis not in fixed and (found := _moves(axis, _values(grid, axis), _value(axis, won)))}
    ways = [[{axis: pair[i]} for axis, pair in moves.items()] for i in (0, 1)]
    single = list(itertools.chain(*ways))
    double = [a | b for a, b in itertools.combinations(single, 2) if a.keys() != b.keys()]
    found: list[Axes] = []
    for way in (*single, *double):
        trial = dict(won)
        for axis, value in way.items():
            trial |= joint(axis, value)
        if trial not in old and trial not in found:
            found.append(trial)
    return found[:n]


def _values(grid: Grid, axis: str) -> list:
    """The values of an axis in all blocks, in order."""
    found: list = []
    for block in blocks(grid):
        found += [v for v in block.get(axis, []) if v not in found]
    return sorted(found)


def _value(axis: str, axes: Axes) -> Any:
    parts = axis.split("+")
    return axes[axis] if len(parts) == 1 else [axes[n] for n in parts]


def _moves(axis: str, values: list, at: Any) -> list:
    """The two values to try next on an axis of these values, from the value `at`; none where it has one value."""
    if len(values) < 2:
        return []
    i = values.index(at)
    if 0 < i < len(values) - 1:
        return [_times(at, values[i + 1], at, 0.5), _times(at, values[i - 1], at, 0.5)]
    inner = values[1] if i == 0 else values[-2]
    found = [_times(at, at, inner, power) for power in (1.0, 2.0, 0.5, -0.5, -0.25)]
    return [value for value in found if _possible(axis, value)][:2]


def _possible(axis: str, value: Any) -> bool:
    """Whether a run can have this value: the interval of its field, and lambda_base is at most lambda_safe."""
    within = {n: f.metadata["within"] for n, f in FIELDS.items()} | {"lambda_base_ratio": "(0, 1]"}
    return all(in_interval(v, within.get(n) or "(0, inf)") for n, v in joint(axis, value).items())


def _times(value: Any, above: Any, below: Any, power: float) -> Any:
    """value (above / below)^power, each part of a joint value for itself; whole numbers stay whole."""
    if isinstance(value, list):
        return [_times(*parts, power) for parts in zip(value, above, below, strict=True)]
    moved = value * (above / below) ** power
    return max(1, round(moved)) if isinstance(value, int) else float(f"{moved:.3g}")


# ---- The search as far as stored trials carry it ---------------------------------------------------------------------

@dataclass
class Plan:
    """What the stored trials decide: what is chosen, the trials that followed, and which are to be run next."""

    tuned: dict[str, Any]
    trials: dict[str, Any]
    missing: list[RunConfig] = field(default_factory=list)
    done: set[str] = field(default_factory=set)  # the places (`profiles.place`) of which every epsilon is chosen


class Waiting(Exception):
    """A search cannot go on before these runs are stored."""

    def __init__(self, missing: list[RunConfig]):
        self.missing = missing


def search_plan(name: str, get: Get, searches: Sequence[str] = SEARCHES) -> Plan:
    """The searches of a profile, as far as `get` has their trials.

    What is missing is of the first search that is not complete: another network's trials take minutes each, and come
    last."""
    found = Plan({"eta_sgd": {}, "methods": {}, "by_mean": {}}, {"second": {}, "finalists": {}})
    stated = profiles.untuned(name)
    profile = Profile(name, {**stated.settings, "tuned": found.tuned, "trials": found.trials})
    for search in SEARCHES:
        section, missing = profile.settings[search], []
        if not section["grid"]:
            continue
        for data, epsilons in section["cells"].items():
            waits = False
            for epsilon in epsilons:
                try:
                    SearchCell(profile, found, search, data, epsilon, get).search()
                except Waiting as waiting:
                    missing += waiting.missing
                    waits = True
            if not waits:
                found.done.add(place(data, profile.kept(search)))
        if search in searches and not found.missing:
            found.missing = list({c.key(): c for c in missing}.values())
    return found


@dataclass
class SearchCell:
    """The search of every method on one data set at one epsilon."""

    profile: Profile
    plan: Plan
    search_name: str
    data: str
    epsilon: float
    get: Get

    @property
    def section(self) -> dict[str, Any]:
        return self.profile.settings[self.search_name]

    @property
    def cell(self) -> tuple[str, float, str]:
        return self.data, self.epsilon, self.search_name

    def search(self) -> None:
        """All rounds, in their order; Waiting where trials are missing."""
        methods = list(self.section["grid"])
        self.dp_sgd()
        self.others([m for m in methods if m != "dp-sgd" and not METHODS[m].arm_of], second=self.section["second"])
        self.others([m for m in methods if METHODS[m].arm_of], second=0)

    def dp_sgd(self) -> None:
        """eta_sgd at every T of the grid and of the curve, and DP-SGD's own T."""
        grid = points(self.section["grid"]["dp-sgd"])
        own = list(dict.fromkeys(axes.get("T") for axes in grid))
        tried = self.candidates([self.profile.trials("dp-sgd", *self.cell)])
        by_T = _grouped(tried)
        more = self.section["second"] // len(own)
        second = []
        for group in by_T.values():
            rates, won = {"eta": [c.axes["eta"] for c in group]}, best(group, 1)[0].axes
            second += [{**won, **move} for move in second_round(rates, {"eta": won["eta"]}, more, ())]
        self.keep("second", "dp-sgd", second)
        tried += self.candidates([self.profile.second("dp-sgd", *self.cell)])
        finalists = [c for group in _grouped(tried).values() for c in best(group, self.section["finalists"]["per_T"])]
        chosen = {T: choose(group) for T, group in _grouped(self.repeated("dp-sgd", finalists)).items()}
        table = self.plan.tuned["eta_sgd"].setdefault(self.where, {})
        table[self.epsilon] = {T: c.config.eta for T, c in sorted(chosen.items())}
        winner = choose([c for c in chosen.values() if c.axes.get("T") in own])
        self.won("dp-sgd", {"T": winner.config.T} if "T" in winner.axes else {})

    def others(self, methods: Sequence[str], second: int) -> None:
        """Each method's rounds, all methods side by side."""
        tried = dict(zip(methods, self.groups([self.profile.trials(m, *self.cell) for m in methods]), strict=True))
        tried = {m: group for m, group in tried.items() if group}  # an arm is searched on the data sets of its table
        if second:
            for m, group in tried.items():
                self.keep("second", m, second_round(self.section["grid"][m], best(group, 1)[0].axes, second,
                                                    self.section["fixed"]))
            later = self.groups([self.profile.second(m, *self.cell) for m in tried])
            tried = {m: group + more for (m, group), more in zip(tried.items(), later, strict=True)}
        finalists = {m: best(group, self.section["finalists"]["best"]) for m, group in tried.items()}
        for m, group in finalists.items():
            self.keep("finalists", m, [c.axes for c in group])
        repeats = [[(a, c) for a, cs in self.profile.repeats(m, *self.cell) for c in cs] for m in finalists]
        self.groups(repeats)  # all of them, before anyone is chosen
        for m, group in finalists.items():
            repeated = self.repeated(m, group)
            self.won(m, choose(repeated).axes)
            if not METHODS[m].arm_of:
                self.won(m, best_mean(repeated).axes, "by_mean")

    def repeated(self, method: str, finalists: Sequence[Candidate]) -> list[Candidate]:
        """The finalists with the runs of all seeds."""
        self.keep("finalists", method, [c.axes for c in finalists])
        repeats = self.profile.repeats(method, *self.cell)
        later = self.candidates([[(a, c) for a, cs in repeats for c in cs]])
        return [Candidate(c.axes, c.config, [*c.records, *(r.records[0] for r in later if r.axes == c.axes)])
                for c in finalists]

    @property
    def where(self) -> str:
        return place(self.data, self.profile.kept(self.search_name))

    def won(self, method: str, axes: Axes, part: str = "methods") -> None:
        self.plan.tuned[part].setdefault(method, {}).setdefault(self.where, {})[self.epsilon] = axes

    def keep(self, part: str, method: str, rows: list[Axes]) -> None:
        if rows:
            self.plan.trials[part].setdefault(method, {}).setdefault(self.where, {})[self.epsilon] = rows

    def candidates(self, trials: Sequence[Sequence[Trial]]) -> list[Candidate]:
        return list(itertools.chain(*self.groups(trials)))

    def groups(self, trials: Sequence[Sequence[Trial]]) -> list[list[Candidate]]:
        """Trials with their records; Waiting where one has none."""
        records = [[(axes, c, self.get(c)) for axes, c in group] for group in trials]
        if missing := [c for group in records for _, c, record in group if record is None]:
            raise Waiting(missing)
        return [[Candidate(axes, c, [record]) for axes, c, record in group] for group in records]


def _grouped(candidates: Sequence[Candidate]) -> dict[int, list[Candidate]]:
    """By the steps of their runs."""
    found: dict[int, list[Candidate]] = {}
    for c in candidates:
        found.setdefault(c.config.T, []).append(c)
    return found


def winner(profile: Profile, method: str, data: str, epsilon: float, search: str = "tuning") -> Axes:
    """The trial that was chosen, as what it sets. DP-SGD's is its T with the rate of that T."""
    own = params.nearest(profile.settings["tuned"]["methods"][method][place(data, profile.kept(search))], epsilon)
    if method != "dp-sgd":
        return own
    return {"eta": profile.config(method, data, epsilon, 0, model=profile.settings[search]["model"], search=search).eta,
            **own}


def edges(profile: Profile, method: str, data: str, epsilon: float, search: str = "tuning") -> list[str]:
    """Axes on which the winner has the first or the last of three or more values that were tried."""
    grid, won = profile.settings[search]["grid"][method], winner(profile, method, data, epsilon, search)
    tried = [axes for trials in (profile.trials, profile.second) for axes, _ in trials(method, data, epsilon, search)]
    found = []
    for axis in dict.fromkeys(a for block in blocks(grid) for a in block):
        rows = tried
        if method == "dp-sgd":  # its rates belong to a T, and the T's of the curve are no part of its own choice
            own = {a.get("T") for a in points(grid)}
            rows = [a for a in tried if (a.get("T") in own if axis == "T" else a.get("T") == won.get("T"))]
        values = sorted({tuple(v) if isinstance(v := _value(axis, a), list) else v for a in rows})
        at = _value(axis, won)
        if len(values) >= 3 and (tuple(at) if isinstance(at, list) else at) in (values[0], values[-1]):
            found.append(axis)
    return found


# ---- The gate --------------------------------------------------------------------------------------------------------

def gate(profile: Profile, get: Get) -> tuple[dict[str, Any], list[RunConfig]]:
    """Data set -> what was tried and the N and B that passed; and the runs that are missing to go on."""
    found: dict[str, Any] = {}
    missing: list[RunConfig] = []
    for data in profile.settings[GATE]["cells"]:
        try:
            found[data] = _gate(profile, data, get)
        except Waiting as waiting:
            missing += waiting.missing
    return found, missing


def _gate(profile: Profile, data: str, get: Get) -> dict[str, Any]:
    """The largest N with a B that passes, and for that N the smallest such B: B is what a run costs."""
    section, tried = profile.settings[GATE], []
    for N in section["N"][data]:
        for B in section["B"]:
            tried.append(gained(profile, data, N, B, get))
            if tried[-1]["points"] >= section["points"][data]:
                return {"passed": {"N": N, "B": B}, "tried": tried}
    return {"passed": None, "tried": tried}


def gained(profile: Profile, data: str, N: int, B: int, get: Get) -> dict[str, Any]:
    """What DP-SGD gains from the smallest to the largest epsilon, in points, at the best rate of each."""
    runs = profile.gate_runs(data, N, B)
    records = [get(c) for c in runs]
    if missing := [c for c, r in zip(runs, records, strict=True) if r is None]:
        raise Waiting(missing)
    best_at: dict[float, tuple[float, float]] = {}
    for epsilon in sorted({c.epsilon for c in runs}):
        rates: dict[float, list[float]] = {}
        for c, r in zip(runs, records, strict=True):
            if c.epsilon == epsilon:
                rates.setdefault(c.eta, []).append(100 * (r["accuracy"] or 0.0))
        mean, eta = max((sum(v) / len(v), -eta) for eta, v in rates.items())
        best_at[epsilon] = mean, -eta
    (low, at_low), (high, at_high) = best_at[min(best_at)], best_at[max(best_at)]
    return {"N": N, "B": B, "accuracy": [round(low, 2), round(high, 2)], "eta": [at_low, at_high],
            "points": round(high - low, 2)}


def run_gate(name: str, store: Store, jobs: int) -> dict[str, Any]:
    """Every setting that the gate has to try; writes params/tuned/<profile>-gate.yaml."""
    profile = profiles.untuned(name)
    if not profile.settings[GATE]["cells"]:
        raise UsageError(f"{name} has no gate: state its cells, N, B and points in params/{name}.yaml")
    while True:
        found, missing = gate(profile, store.get)
        if not missing:
            write(f"{name}-gate", f"# Written by `dpngd tune {name} --gate`: what DP-SGD gains, smallest epsilon to "
                                  "largest.\n", found)
            return found
        sweep.ensure(missing, store=store, jobs=jobs, seconds=profile.seconds)


def check_gate(profile: Profile) -> None:
    """The profile's N and B are those that passed its gate; an error before anything is tuned in another setting."""
    section, found = profile.settings[GATE], profile.settings["gated"]
    for data in section["cells"]:
        if data not in found:
            raise UsageError(f"the gate of {profile.name} has not been run on {data}: run `dpngd tune {profile.name} "
                             "--gate` first")
        passed = found[data]["passed"]
        config = profile.config("dp-sgd", data, section["cells"][data][0], section["seeds"][0])
        if passed and (passed["N"], passed["B"]) != (config.N, config.B):
            raise UsageError(f"params/{profile.name}.yaml has N = {config.N}, B = {config.B} for {data}, but the gate "
                             f"chose N = {passed['N']}, B = {passed['B']}: state these")


def gate_text(profile: Profile, found: Mapping[str, Any]) -> str:
    """What the gate measured, a line per setting."""
    lines = [f"{'data':10}{'N':>7}{'B':>6}  DP-SGD from the smallest epsilon to the largest"]
    for data, row in found.items():
        need = profile.settings[GATE]["points"][data]
        for t in row["tried"]:
            lines.append(f"{data:10}{t['N']:7}{t['B']:6}  {t['accuracy'][0]:.1f} -> {t['accuracy'][1]:.1f} (eta "
                         f"{t['eta'][0]:g}, {t['eta'][1]:g}): {t['points']:+.1f} points of {need:g}")
        passed = row["passed"]
        lines.append(f"{data:10}" + (f"takes N = {passed['N']}, B = {passed['B']}" if passed else
                                     "no setting passes: claims about epsilon are not testable here"))
    return "\n".join(lines)


# ---- `dpngd tune` ----------------------------------------------------------------------------------------------------

def search(name: str, store: Store, jobs: int = 2, searches: Sequence[str] = SEARCHES) -> Plan:
    """All trials, round by round; what is chosen is written for each data set once all of it is."""
    check_gate(profiles.untuned(name))
    while True:
        found = search_plan(name, store.get, searches)
        write_chosen(name, found)
        if not found.missing:
            return found
        seconds = profiles.untuned(name).seconds
        outlook = progress.outlook(len(found.missing), map(seconds, found.missing), jobs, "trials")
        progress.say(f"search of {name}, present round: {outlook}")
        sweep.ensure(found.missing, store=store, jobs=jobs, seconds=seconds)


def write_chosen(name: str, found: Plan) -> None:
    """params/tuned/<profile>.yaml and <profile>-trials.yaml, of the data sets that are done; nothing where none is."""
    digest = params.digest(profiles.untuned(name).settings)
    stored = params.written(name)
    if stored.get("digest") == digest and not stored.get("eta_sgd", {}).keys() <= found.done:
        return  # a stored trial is gone or damaged: what it decided stays until it can be decided again

    def done(by_place: Mapping[str, Any]) -> dict[str, Any]:
        return {where: rows for where, rows in by_place.items() if where in found.done}

    tuned = {"digest": digest, "eta_sgd": done(found.tuned["eta_sgd"]),
             **{part: {m: rows for m, by_place in found.tuned[part].items() if (rows := done(by_place))}
                for part in ("methods", "by_mean")}}
    later = {"digest": digest, **{part: {m: rows for m, by_place in table.items() if (rows := done(by_place))}
                                  for part, table in found.trials.items()}}
    if found.done:
        write(name, f"# Written by `dpngd tune {name}`. eta_sgd: DP-SGD's rate by data set, epsilon and T.\n"
                    "# methods: what was chosen by data set and epsilon; rate is a factor on the equation's eta.\n"
                    "# by_mean: the finalist with the best mean, for the question `choice: mean`.\n",
              tuned)
        write(f"{name}-trials", f"# Written by `dpngd tune {name}`: the trials of the second round, and the finalists, "
                                "best first.\n", later)


def write(name: str, head: str, values: Mapping[str, Any]) -> None:
    text = head + yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)
    write_atomically(paths.PARAMS / "tuned" / f"{name}.yaml", text)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # anchors would make the file hard to read


def train_trials_of_shard(name: str, store: Store, jobs: int, part: str, gated: bool = False,
                          searches: Sequence[str] = SEARCHES) -> str:
    """Train one part of the trials that can be run now. It chooses nothing: that needs the trials of all parts."""
    profile = profiles.untuned(name)
    mine = sweep.shard(gate(profile, store.get)[1] if gated else search_plan(name, store.get, searches).missing,
                       part)
    sweep.ensure(mine, store=store, jobs=jobs, seconds=profile.seconds)
    return (f"shard {part}: its {len(mine)} trials are stored; when all shards have ended, `dpngd tune {name}"
            f"{' --gate' if gated else ''}` chooses among them and goes on with the next round")


def told(name: str, found: Plan) -> str:
    """What won so far, a line per method, data set and epsilon."""
    profile = Profile(name, {**profiles.untuned(name).settings, "tuned": found.tuned, "trials": found.trials})
    lines = []
    for search_name in SEARCHES:
        kept = profile.kept(search_name)
        for method, by_place in found.tuned["methods"].items():
            for where, by_epsilon in by_place.items():
                data = where.partition("/")[0]
                for epsilon in by_epsilon if place(data, kept) == where else ():
                    axes = winner(profile, method, data, epsilon, search_name)
                    at = edges(profile, method, data, epsilon, search_name)
                    lines.append(f"{METHODS[method].label:18} {where:16} epsilon {epsilon:<4g} "
                                 + " ".join(f"{n}={v:g}" for n, v in axes.items())
                                 + (f"; at the edge of its grid: {', '.join(at)}" if at else ""))
    if found.missing:
        lines.append(f"{len(found.missing)} trials of the present rounds are missing")
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Search, unless only `--show` is asked for, and print what won."""
    only = args.only or SEARCHES
    for name in set(only) - set(SEARCHES):
        raise unknown("search", name, SEARCHES)
    if args.only and args.gate:
        raise UsageError("--only beside --gate: the gate is no search; give one of them")
    store = Store(args.profile)
    if args.shard:
        print(train_trials_of_shard(args.profile, store, args.jobs, args.shard, args.gate, only))
        return 0
    if args.gate:
        profile = profiles.untuned(args.profile)
        found = gate(profile, store.get)[0] if args.show else run_gate(args.profile, store, args.jobs)
        print(gate_text(profile, found))
        return 0
    found = search_plan(args.profile, store.get) if args.show else search(args.profile, store, args.jobs, only)
    print(told(args.profile, found))
    if not args.show:
        progress.say(f"written to params/tuned/{args.profile}.yaml; notebook 06 shows every trial")
    return 0

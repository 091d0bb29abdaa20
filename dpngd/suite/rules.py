"""How each claim is decided from the runs: functions Runs -> Decision, all on the fixed rules of `stats`.

Differences are in points of accuracy, paired by seed. Where a claim is about "the best baseline", that is the one
with the highest mean in the cell: choosing it after the fact favours the baselines, never DP-NGD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpngd.methods import METHODS, arms
from dpngd.suite import stats
from dpngd.suite.runs import Runs, seconds_per_step
from dpngd.training.config import RunConfig

NGD = {"method": "dp-ngd"}


# ---- What the rules share: a Decision, and how several comparisons become one ----------------------------------------

@dataclass(frozen=True)
class Decision:
    """A verdict, and our side of it in words."""

    verdict: stats.Verdict
    ours: str
    n: int  # seeds behind it: the least of any comparison that was run
    brief: str = ""  # `ours` in a line, where it has many parts

    @property
    def word(self) -> str:
        return self.verdict.verdict


Part = tuple[str, stats.Verdict]  # what was compared, and how it came out
Rule = Callable[[Runs], Decision]


def together(parts: Iterable[Part], unit: str = " points", digits: int = 2) -> Decision:
    """One part is its own verdict; several are a conjunction, told part by part."""
    parts = list(parts)
    ran = [v for _, v in parts if v.verdict != stats.NOT_RUN]
    n = min((v.estimate.n for v in ran if v.estimate), default=0)
    verdict = parts[0][1] if len(parts) == 1 else stats.every([v for _, v in parts])
    if not ran:
        return Decision(verdict, "not run", 0)
    shown, brief = "; ".join(f"{name} {_said(v, unit, digits)}" for name, v in parts), ""
    if verdict.cells is not None:
        shown = f"{verdict.held} of {verdict.cells} reproduced: {shown}"
        means = [v.estimate.mean for v in ran if v.estimate]
        if len(parts) > 3 and means:
            sign = "+" if any(v.estimate and v.estimate.kind.endswith("difference") for v in ran) else ""
            leaning = sum(v.verdict in (stats.REPRODUCED, stats.DIRECTION) for v in ran)
            brief = (f"{verdict.held} of {verdict.cells} reproduced, {leaning} at least in direction; "
                     f"{min(means):{sign}.{digits}f} to {max(means):{sign}.{digits}f}{unit}")
    return Decision(verdict, shown, n, brief)


def _said(v: stats.Verdict, unit: str, digits: int) -> str:
    e = v.estimate
    if e is None:
        return stats.NOT_RUN
    interval = f" [{e.low:.{digits}f}, {e.high:.{digits}f}]" if math.isfinite(e.high - e.low) else ""
    sign = "+" if e.kind.endswith("difference") else ""
    return f"{e.mean:{sign}.{digits}f}{interval}{unit}"


def cell_name(cell: tuple[str, float]) -> str:
    return f"{cell[0]} ε={cell[1]:g}"


def above(runs: Runs, a: Mapping, b: Mapping | None) -> stats.Verdict:
    return stats.greater(stats.NOTHING if b is None else runs.lead(a, b))


def leads(runs: Runs) -> dict[int, float]:
    """Seed -> DP-NGD's accuracy less that of the best baseline, in runs of one setting."""
    rival = runs.best({"method": m} for m in runs.baselines())
    ours, theirs = runs.by_seed(**NGD), runs.by_seed(**rival) if rival else {}
    return {s: ours[s] - theirs[s] for s in ours.keys() & theirs.keys()}


def varying(runs: Runs, axis: str) -> Runs:
    """Of runs in which several fields are varied one at a time, those that vary `axis`."""
    fixed = {n: runs.default(n, runs.values("method")[0]) for n in ("T_cur", "p", "T1") if n != axis and runs.configs}
    return runs.where(**{n: v for n, v in fixed.items() if v is not None}) if axis in ("T_cur", "p", "T1") else runs


# ---- The paper's claims: accuracy and privacy (Table 2; notebook 01) -------------------------------------------------

def best_in_every_cell(runs: Runs) -> Decision:
    """DP-NGD above the best baseline of each cell."""
    parts = []
    for data, epsilon in runs.cells():
        here = runs.where(data=data, epsilon=epsilon)
        parts.append((cell_name((data, epsilon)), above(here, NGD, here.best({"method": m} for m in here.baselines()))))
    return together(parts)


def larger_when_stricter(runs: Runs) -> Decision:
    """Lead at the smallest epsilon less lead at the largest, for every data set."""
    parts = []
    for data in runs.values("data"):
        epsilons = [e for d, e in runs.cells() if d == data]
        ends = [leads(runs.where(data=data, epsilon=e)) for e in (min(epsilons), max(epsilons))]
        spread = stats.difference(*ends) if min(epsilons) < max(epsilons) else stats.NOTHING
        parts.append((f"{data} ε={min(epsilons):g} against {max(epsilons):g}", stats.greater(spread)))
    return together(parts)


def same_privacy(runs: Runs) -> Decision:
    """One noise multiplier for all methods with as many steps in a cell, and no run spends more than its budget."""
    sigmas: dict[tuple, set[float]] = {}
    for config, record in runs.each():
        sigmas.setdefault((config.data, config.epsilon, config.B, config.T), set()).add(record["privacy"]["sigma"])
    # Two machines that calibrate the same budget differ in the eleventh digit: the search ends where it may.
    same = [max(found) <= min(found) * (1 + 1e-9) for found in sigmas.values()]
    within = [record["privacy"]["epsilon_prv"] <= config.epsilon for config, record in runs.each()]
    said = (f"one σ for all methods in {sum(same)} of {len(same)} settings; {sum(within)} of {len(within)} runs spent "
            "at most their budget")
    held = all(same) and all(within)  # a guarantee that fails once has failed
    return Decision(stats.outcome([held] * len(within)), said, len(runs.values("seed")))


# ---- The paper's claims: steps (Figure 2; notebook 02) ---------------------------------------------------------------

def higher_at_every_budget(runs: Runs) -> Decision:
    parts = []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        for T in here.values("T"):
            rivals = ({"method": m, "T": T} for m in here.baselines())
            parts.append((f"{cell_name(cell)} T={T}", above(here, {**NGD, "T": T}, here.best(rivals))))
    return together(parts)


def steps_to_peak(runs: Runs, rivals: Sequence[str]) -> tuple[dict[int, float], dict[int, float]]:
    """Seed -> budget of the rivals' best run, and the smallest budget with which DP-NGD matches it.

    Where DP-NGD never does, that counts as one step more than the largest budget: a ratio below 1."""
    theirs, ours = {}, {}
    budgets = runs.values("T")
    for seed in runs.values("seed"):
        here = runs.where(seed=seed)
        scores = {(m, T): a for m in rivals for T in budgets for a in here.by_seed(method=m, T=T).values()}
        mine = {T: a for T in budgets for a in here.by_seed(method="dp-ngd", T=T).values()}
        if scores and mine:
            peak = max(scores.values())
            theirs[seed] = min(T for (_, T), a in scores.items() if a == peak)
            ours[seed] = min((T for T, a in mine.items() if a >= peak), default=max(budgets) + 1)
    return theirs, ours


def fewer_steps(factors: Mapping[str, float]) -> Rule:
    """Budget of the baselines' peak over the budget with which DP-NGD reaches it."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            speedup = stats.ratio(*steps_to_peak(here, here.baselines()))
            parts.append((cell_name(cell), stats.at_least(speedup, factors.get(cell[0], min(factors.values())))))
        return together(parts, unit=" times fewer")
    return rule


# ---- The paper's claims: public images (Figure 3; notebook 03) -------------------------------------------------------

def baselines_need_images(runs: Runs) -> Decision:
    """Every baseline that uses public images is better with the most of them than with the fewest."""
    sizes, parts = runs.values("public_size"), []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        parts += [(f"{m} {sizes[-1]} over {sizes[0]} images",
                   above(here.where(method=m), {"public_size": sizes[-1]}, {"public_size": sizes[0]}))
                  for m in here.baselines()]
    return together(parts)


def ahead_with_most_images(runs: Runs) -> Decision:
    """DP-NGD above every baseline when all have the largest public set."""
    size = runs.values("public_size")[-1]
    return together((f"over {m}", above(runs.where(data=c[0], epsilon=c[1], public_size=size), NGD, {"method": m}))
                    for c in runs.cells() for m in runs.baselines())


# ---- The paper's claims: ablations (Tables 3 and 4, Figure 4; notebook 04) -------------------------------------------

def chain(*pairs: tuple[str, str]) -> Rule:
    """For each pair of methods and each cell, the first is more accurate than the second."""
    def rule(runs: Runs) -> Decision:
        return together((f"{cell_name(c)} {a} over {b}",
                         above(runs.where(data=c[0], epsilon=c[1]), {"method": a}, {"method": b}))
                        for c in runs.cells() for a, b in pairs)
    return rule


def diverges(method: str) -> Rule:
    """Training ends in numbers that are not finite, or with a loss above the one it started from."""
    def rule(runs: Runs) -> Decision:
        records = runs.where(method=method).records
        verdict = stats.outcome([blown_up(r) for r in records])
        nan = sum(r["status"] == "diverged" for r in records)
        blown = sum(map(blown_up, records))
        said = f"{blown} of {len(records)} runs end above their first loss or in NaN ({nan} in NaN)"
        return Decision(verdict, said if records else stats.NOT_RUN, len(records))
    return rule


def blown_up(record: Mapping[str, Any]) -> bool:
    losses = [x for x in record["train_loss"] if x is not None]
    return record["status"] == "diverged" or not losses or losses[-1] > losses[0]


def lower_loss(a: str, b: str) -> Rule:
    """Mean training loss after the first quarter of the steps: that of `b` less that of `a`."""
    def late(runs: Runs, method: str) -> dict[int, float]:
        found = {}
        for config, record in runs.where(method=method).each():
            tail = [x for x in record["train_loss"][config.T // 4:] if x is not None]
            if record["status"] == "ok" and tail:
                found[config.seed] = sum(tail) / len(tail)
        return found

    def rule(runs: Runs) -> Decision:
        return together(((cell_name(c), stats.greater(stats.difference(late(here, b), late(here, a))))
                         for c in runs.cells() if (here := runs.where(data=c[0], epsilon=c[1])) is not None),
                        unit=" nats", digits=3)
    return rule


# ---- The paper's claims: robustness (Table 6; notebook 06) -----------------------------------------------------------

def spread(axis: str, bound: float, method: str = "dp-ngd", upto: float = math.inf) -> Rule:
    """The two values of an axis with the highest and the lowest mean differ by less than `bound`."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = varying(runs.where(data=cell[0], epsilon=cell[1], method=method), axis)
            means = {v: here.mean(**{axis: v}).mean for v in here.values(axis) if here.by_seed(**{axis: v})
                     and v <= upto}
            if len(means) < 2:
                parts.append((cell_name(cell), stats.within(stats.NOTHING, bound)))
                continue
            high, low = max(means, key=means.get), min(means, key=means.get)
            change = here.lead({axis: high}, {axis: low})
            parts.append((f"{cell_name(cell)} {axis}={high:g} over {low:g}", stats.within(change, bound)))
        return together(parts)
    return rule


def drop(axis: str, start: float, end: float) -> Rule:
    """Accuracy at one value of an axis above that at another."""
    def rule(runs: Runs) -> Decision:
        return together((cell_name(c), above(varying(runs.where(data=c[0], epsilon=c[1], **NGD), axis),
                                        {axis: start}, {axis: end})) for c in runs.cells())
    return rule


# ---- Our questions, which the paper leaves open ----------------------------------------------------------------------

def rivals() -> list[str]:
    """What Tables 3 and 4 and our ablations compare DP-NGD with, where it has a rate of its own."""
    return [m for m in METHODS if METHODS[m].pretrained] + arms("private curvature") + arms("clipping")


def over_each(fields: Sequence[str], rival: str) -> Rule:
    """DP-NGD above another method, for every combination of these fields that was asked for."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            for values in dict.fromkeys(tuple(getattr(c, f) for f in fields) for c in here.configs):
                chosen = dict(zip(fields, values, strict=True))
                parts.append((", ".join(f"{f}={v}" for f, v in chosen.items()),
                              above(here.where(**chosen), NGD, {"method": rival})))
        return together(parts)
    return rule


def with_most_views(rule: Rule) -> Rule:
    """A rule on the runs on the data set's own network, the first one asked for, with the largest K."""
    def on_those(runs: Runs) -> Decision:
        here = runs.where(model=runs.values("model")[0])
        return rule(here.where(K=here.values("K")[-1]))
    return on_those


def at_a_fraction(factors: Mapping[str, float]) -> Rule:
    """DP-NGD above the best run of the baselines, with 1/factor of that run's steps or the next budget below."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            theirs = here.best({"method": m, "T": T} for m in here.baselines() for T in here.values("T"))
            most = math.ceil(theirs["T"] / factors.get(cell[0], min(factors.values()))) if theirs else 0
            budgets = [budget for budget in here.where(**NGD).values("T") if budget <= most]
            said = f" ({budgets[-1]} steps against {theirs['T']} of {theirs['method']})" if budgets else ""
            parts.append((cell_name(cell) + said, above(here, {**NGD, "T": budgets[-1]}, theirs) if budgets else
                          stats.greater(stats.NOTHING)))
        return together(parts)
    return rule


def ahead_at_own_budget(runs: Runs) -> Decision:
    """DP-NGD at its best step budget above the best baseline at its own: both are chosen by their means."""
    parts = []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        budgets = here.values("T")
        ours = here.best({**NGD, "T": T} for T in budgets)
        theirs = here.best({"method": m, "T": T} for m in here.baselines() for T in budgets)
        said = f" ({ours['T']} steps against {theirs['T']} of {theirs['method']})" if ours and theirs else ""
        parts.append((cell_name(cell) + said, above(here, ours or NGD, theirs)))
    return together(parts)


def lead_fades(runs: Runs) -> Decision:
    """Lead over the best baseline at the second smallest step budget less that at the largest."""
    parts = []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        budgets = here.values("T")
        early, late = budgets[min(1, len(budgets) - 1)], budgets[-1]
        fading = stats.difference(leads(here.where(T=early)), leads(here.where(T=late))) if early < late else \
            stats.NOTHING
        parts.append((f"{cell_name(cell)} T={early} against {late}", stats.greater(fading)))
    return together(parts)


def more_images_pay(runs: Runs) -> Decision:
    """A pre-trained method with the most public images above itself with the fewest, each with its best `pt_steps`."""
    sizes, parts = runs.values("public_size"), []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        few, many = (here.best({"public_size": n, "pt_steps": t} for t in here.where(public_size=n).values("pt_steps"))
                     for n in (sizes[0], sizes[-1]))
        said = f" {sizes[-1]} images, {many['pt_steps']} steps, over {sizes[0]}, {few['pt_steps']}" if few and many \
            else ""
        parts.append((cell_name(cell) + said, above(here, many or {}, few)))
    return together(parts)


def over(field: str, rival: str) -> Rule:
    """DP-NGD above another method, for every value of a field (which the rival may not have)."""
    def rule(runs: Runs) -> Decision:
        return together((str(v), above(runs, {**NGD, field: v}, {"method": rival})) for v in runs.values(field))
    return rule


def below_when_released(rival: str) -> Rule:
    """The rival above each of the other methods at their smallest T_cur, where they release curvature most often."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            parts += [(f"{cell_name(cell)} {rival} over {m}", above(here, {"method": rival}, {
                "method": m, "T_cur": here.where(method=m).values("T_cur")[0]}))
                for m in here.methods() if m != rival]
        return together(parts)
    return rule


def at_half_rate(here: Runs) -> dict[str, Any]:
    """DP-NGD at the smallest rate that was run in a cell: half of what the search chose (`rates` in params)."""
    return {**NGD, "eta": here.where(**NGD).values("eta")[0]}


def ahead_at_half_rate(rival: str) -> Rule:
    """DP-NGD at half its rate above the rival at the best of the rates that were run for it (it may be one)."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            best = here.best({"method": rival, "eta": eta} for eta in here.where(method=rival).values("eta"))
            parts.append((cell_name(cell), above(here, at_half_rate(here), best)))
        return together(parts)
    return rule


def half_rate_over(rivals: Sequence[str]) -> Rule:
    """DP-NGD at half its rate above each of these methods at the rate tuned for it, in the cells that they share."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            parts += [(f"{cell_name(cell)} over {m}", above(here, at_half_rate(here), {"method": m}))
                      for m in rivals if m in here.methods()]
        return together(parts)
    return rule


def mostly_clamped(runs: Runs) -> Decision:
    """More than half of the eigenvalues lie on DP-NGD's floor, at every look of every run."""
    shares = [[a["clamped_share"] for a in r["diagnostics"]["along"] if a.get("clamped_share") is not None]
              for r in runs.where(**NGD).records]
    shares = [s for s in shares if s]
    if not shares:
        return Decision(stats.outcome([]), stats.NOT_RUN, 0)
    start, least, end = (100 * sum(f(s) for s in shares) / len(shares) for f in (lambda s: s[0], min, lambda s: s[-1]))
    return Decision(stats.outcome([min(s) > 0.5 for s in shares]),
                    f"{start:.1f}% of the eigenvalues at the first look, {least:.1f}% at the fewest, {end:.1f}% at the "
                    f"last (means of {len(shares)} runs)", len(shares))


def alike(methods: Sequence[str], bound: float) -> Rule:
    """DP-NGD and those of the arms that were asked for differ by less than `bound` points."""
    def rule(runs: Runs) -> Decision:
        return together((f"{cell_name(c)} {m}", stats.within(
            runs.where(data=c[0], epsilon=c[1]).lead({"method": m}, NGD), bound))
            for c in runs.cells() for m in methods if m in runs.methods())
    return rule


def best_trial_ahead(rival: str) -> Rule:
    """Accuracy of DP-NGD's best trial less that of the rival's, on the validation part: one difference per data set.

    Trials are those of round one. Data sets on which one of the two grids is not complete are left out: its best is not
    known."""
    def rule(runs: Runs) -> Decision:
        runs = round_one(runs)
        best, trials = {}, set()
        for data, epsilon in runs.cells():
            ours, theirs = (runs.where(data=data, epsilon=epsilon, method=m) for m in ("dp-ngd", rival))
            if not ours.missing and not theirs.missing and ours.accuracies() and theirs.accuracies():
                best[cell_name((data, epsilon))] = max(ours.accuracies()) - max(theirs.accuracies())
                trials |= {len(ours), len(theirs)}
        verdict = stats.greater(stats.mean(list(best.values()), "difference over data sets"))
        if not best:
            return Decision(verdict, stats.NOT_RUN, 0)
        said = "; ".join(f"{cell} {lead:+.2f} points" for cell, lead in best.items())
        return Decision(verdict, f"{said} (best of {' or '.join(map(str, sorted(trials)))} trials)", len(best))
    return rule


def round_one(runs: Runs) -> Runs:
    """The trials of a grid, without the repeats of its best ones: all have the search's first seed."""
    return runs.where(seed=min(runs.values("seed"), default=None))


def rarest_curvature_costs(runs: Runs) -> Decision:
    """Accuracy with the default T_cur above that with the largest one."""
    rarest = runs.values("T_cur")[-1]
    return drop("T_cur", runs.default("T_cur"), rarest)(runs)


# ---- Time (Table 5; notebook 05) -------------------------------------------------------------------------------------

def side_by_side(runs: Runs) -> Runs:
    """Of runs of several methods, those whose seed and step budget every method has been run with on one machine."""
    def place(config: RunConfig, record: Mapping[str, Any]) -> tuple:
        return config.data, config.epsilon, config.seed, config.T, machine(record["where"])

    methods: dict[tuple, set[str]] = {}
    for config, record in runs.each():
        methods.setdefault(place(config, record), set()).add(config.method)
    return Runs([c for c, r in runs.each() if methods[place(c, r)] == set(runs.methods())], runs.found)


def machine(where: Mapping[str, Any]) -> tuple:
    """What tells machines of different speed apart; the name of the processor alone does not."""
    return tuple(where.get(n) for n in ("device", "cpu", "rounding", "cores"))


def step_cost(limits: Mapping[str, float]) -> Rule:
    """Seconds per step, DP-SGD-PT's over DP-NGD's, above the paper's."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            cost = {m: _by_seed(side_by_side(here).where(method=m), seconds_per_step) for m in ("dp-sgd-pt", "dp-ngd")}
            bound = limits.get(cell[0], max(limits.values()))
            parts.append((f"{cell_name(cell)} a DP-SGD-PT step takes",
                          stats.greater(stats.ratio(cost["dp-sgd-pt"], cost["dp-ngd"]), 1 / bound)))
        return together(parts, unit=" of a DP-NGD step")
    return rule


def benched(limit: float) -> Callable[[Mapping[str, Any]], Decision]:
    """The same in a report of `dpngd bench`, whose contenders take turns: DP-SGD's step (that of DP-SGD-PT, which only
    starts elsewhere) over DP-NGD's with its share of a curvature refresh, round by round."""
    def rule(report: Mapping[str, Any]) -> Decision:
        parts = []
        for network, result in report["models"].items():
            rounds = [dict(enumerate(result["contenders"].get(m, {}).get("seconds", []))) for m in ("dp-sgd", "dp-ngd")]
            parts.append((f"{network} a DP-SGD step takes", stats.greater(stats.ratio(*rounds), 1 / limit)))
        return together(parts, unit=" of a DP-NGD step")
    return rule


def total_time(factors: Mapping[str, float]) -> Rule:
    """Time of DP-SGD-PT to its peak over time of DP-NGD to the same accuracy, above the paper's."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            steps = steps_to_peak(here, ["dp-sgd-pt"])
            hours = [{s: T * cost[s] for s, T in budget.items() if s in cost} for budget, cost in
                     zip(steps, (_by_seed(side_by_side(here).where(method=m), seconds_per_step)
                                 for m in ("dp-sgd-pt", "dp-ngd")), strict=True)]
            bound = factors.get(cell[0], min(factors.values()))
            parts.append((cell_name(cell), stats.greater(stats.ratio(*hours), bound)))
        return together(parts, unit=" times as fast")
    return rule


def _by_seed(runs: Runs, value: Callable[[dict], float]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for config, record in runs.each():
        found.setdefault(config.seed, []).append(value(record))
    return {seed: sum(v) / len(v) for seed, v in found.items()}


# ---- Theory: what the paper proves (Theorem 1, sections 3.2 and 3.3; notebook 00) ------------------------------------
#
# `theory.measure` fills a Theory with numbers measured on a real network. Noise is random, so sums of squares are
# compared with what chance allows: five standard deviations of a chi-square.

SIGMAS = 5.0  # one false alarm in millions


@dataclass(frozen=True)
class Chi:
    """A mean of `terms` squares that are standard normal if the theorem holds."""

    what: str
    mean: float
    terms: int

    @property
    def holds(self) -> bool:
        return abs(self.mean - 1) <= SIGMAS * math.sqrt(2 / self.terms)


@dataclass(frozen=True)
class Theory:
    """Measured on several seeds: each list has an entry for every seed, spectrum bin, sample or cell."""

    means: list[Chi] = field(default_factory=list)
    spectrum: list[tuple[Chi, float, float]] = field(default_factory=list)  # bin, its eigenvalue, its variance
    predicted: list[tuple[float, float]] = field(default_factory=list)  # eigenvalue, variance of Theorem 1
    kl: list[dict] = field(default_factory=list)  # a sample: quadratic, realised, bound, clipped
    steps: list[dict] = field(default_factory=list)  # a floor: floor, squared (mean, bound), safe
    budget: list[dict] = field(default_factory=list)  # a cell and method: sigma and what it spends

    def mean(self) -> Decision:
        worst = max(self.means, key=lambda c: abs(c.mean - 1), default=None)
        said = worst and (f"squared error of the mean over its expectation: {worst.mean:.4f} (1 ± "
                          f"{SIGMAS * math.sqrt(2 / worst.terms):.4f}, {worst.terms:,} parameters)")
        return _decided([c.holds for c in self.means], said)

    def covariance(self) -> Decision:
        chis = [c for c, _, _ in self.spectrum]
        worst = max(chis, key=lambda c: abs(c.mean - 1) / math.sqrt(2 / c.terms), default=None)
        said = worst and (f"measured over predicted variance {min(c.mean for c in chis):.3f} to "
                          f"{max(c.mean for c in chis):.3f} in {len(chis)} bins of the spectrum")
        return _decided([c.holds for c in chis], said)

    def duality(self) -> Decision:
        inside = [row["quadratic"] <= row["bound"] * (1 + 1e-4) for row in self.kl]
        realised = sum(row["realised"] <= row["bound"] for row in self.kl)
        return _decided(
            inside, f"½ΔθᵀFΔθ within the radius for {sum(inside)} of {len(inside)} samples; the network's "
                    f"own KL for {realised}")

    def safety(self) -> Decision:
        safe = [row for row in self.steps if row["safe"]]
        worst = max((row["squared"] / row["bound"] for row in safe), default=math.nan)
        return _decided([row["squared"] <= row["bound"] * (1 + row["slack"]) for row in safe],
                        f"squared step at most {worst:.2f} of the bound")


def _decided(held: list[bool], said: str | None) -> Decision:
    return Decision(stats.outcome(held), said if held and said else stats.NOT_RUN, len(held))

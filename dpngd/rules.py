"""How each claim is decided from the runs: functions Runs -> Decision, all on `dpngd.stats`' fixed rules.

Differences are in points of accuracy, paired by seed. Where a claim is about "the best baseline", that is the one
with the highest mean in the cell: choosing it after the fact favours the baselines, never DP-NGD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpngd import stats
from dpngd.runs import Runs

NGD = {"method": "dp-ngd"}


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


def name(cell: tuple[str, float]) -> str:
    return f"{cell[0]} ε={cell[1]:g}"


def above(runs: Runs, a: Mapping, b: Mapping | None) -> stats.Verdict:
    return stats.greater(stats.NOTHING if b is None else runs.lead(a, b))


def best_in_every_cell(runs: Runs) -> Decision:
    """DP-NGD above the best baseline of each cell."""
    parts = []
    for data, epsilon in runs.cells():
        here = runs.where(data=data, epsilon=epsilon)
        parts.append((name((data, epsilon)), above(here, NGD, here.best({"method": m} for m in here.baselines()))))
    return together(parts)


def leads(runs: Runs) -> dict[int, float]:
    """Seed -> DP-NGD's accuracy less that of the best baseline, in runs of one setting."""
    rival = runs.best({"method": m} for m in runs.baselines())
    ours, theirs = runs.by_seed(**NGD), runs.by_seed(**rival) if rival else {}
    return {s: ours[s] - theirs[s] for s in ours.keys() & theirs.keys()}


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


def higher_at_every_budget(runs: Runs) -> Decision:
    parts = []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        for T in here.values("T"):
            rivals = ({"method": m, "T": T} for m in here.baselines())
            parts.append((f"{name(cell)} T={T}", above(here, {**NGD, "T": T}, here.best(rivals))))
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
            parts.append((name(cell), stats.at_least(speedup, factors.get(cell[0], min(factors.values())))))
        return together(parts, unit=" times fewer")
    return rule


def spread(axis: str, bound: float, method: str = "dp-ngd", upto: float = math.inf) -> Rule:
    """The two values of an axis with the highest and the lowest mean differ by less than `bound`."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = along(runs.where(data=cell[0], epsilon=cell[1], method=method), axis)
            means = {v: here.mean(**{axis: v}).mean for v in here.values(axis) if here.by_seed(**{axis: v})
                     and v <= upto}
            if len(means) < 2:
                parts.append((name(cell), stats.within(stats.NOTHING, bound)))
                continue
            high, low = max(means, key=means.get), min(means, key=means.get)
            change = here.lead({axis: high}, {axis: low})
            parts.append((f"{name(cell)} {axis}={high:g} over {low:g}", stats.within(change, bound)))
        return together(parts)
    return rule


def along(runs: Runs, axis: str) -> Runs:
    """Of runs in which several fields are varied one at a time, those that vary `axis`."""
    fixed = {n: runs.default(n, runs.values("method")[0]) for n in ("T_cur", "p", "T1") if n != axis and runs.configs}
    return runs.where(**{n: v for n, v in fixed.items() if v is not None}) if axis in ("T_cur", "p", "T1") else runs


def drop(axis: str, start: float, end: float) -> Rule:
    """Accuracy at one value of an axis above that at another."""
    def rule(runs: Runs) -> Decision:
        return together((name(c), above(along(runs.where(data=c[0], epsilon=c[1], **NGD), axis),
                                        {axis: start}, {axis: end})) for c in runs.cells())
    return rule


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


def chain(*pairs: tuple[str, str]) -> Rule:
    """For each pair of methods and each cell, the first is more accurate than the second."""
    def rule(runs: Runs) -> Decision:
        return together((f"{name(c)} {a} over {b}",
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
        return together(((name(c), stats.greater(stats.difference(late(here, b), late(here, a))))
                         for c in runs.cells() if (here := runs.where(data=c[0], epsilon=c[1])) is not None),
                        unit=" nats", digits=3)
    return rule

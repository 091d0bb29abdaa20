"""How the questions that the paper leaves open are decided: functions Runs -> Decision, as in `rules`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpngd import stats
from dpngd.rules import NGD, Decision, Rule, above, drop, leads, name, together
from dpngd.runs import Runs

RIVALS = ("dp-sgd-pt", "dp-ngd-private-20", "dp-ngd-private-50", "dp-ngd-pre", "dp-ngd-post", "dp-ngd-one-sided")
"""What Tables 3 and 4 and our ablations compare DP-NGD with, where it has a rate of its own."""
OPEN = ("dp-ngd-factor-clamp", "dp-ngd-labels-exact", "dp-ngd-labels-random")
"""What the paper leaves open about the curvature itself; these arms have DP-NGD's rate."""


def over(field: str, rival: str) -> Rule:
    """DP-NGD above another method, for every value of a field (which the rival may not have)."""
    def rule(runs: Runs) -> Decision:
        return together((str(v), above(runs, {**NGD, field: v}, {"method": rival})) for v in runs.values(field))
    return rule


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


def best_trial_ahead(rival: str) -> Rule:
    """Accuracy of DP-NGD's best trial less that of the rival's, on the validation part: one difference a data set.

    Trials are those of round one. Data sets on which one of the two grids is not complete are left out: its best is not
    known."""
    def rule(runs: Runs) -> Decision:
        runs = round_one(runs)
        best, trials = {}, set()
        for data, epsilon in runs.cells():
            ours, theirs = (runs.where(data=data, epsilon=epsilon, method=m) for m in ("dp-ngd", rival))
            if not ours.missing and not theirs.missing and ours.accuracies() and theirs.accuracies():
                best[name((data, epsilon))] = max(ours.accuracies()) - max(theirs.accuracies())
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


def alike(methods: Sequence[str], bound: float) -> Rule:
    """DP-NGD and those of the arms that were asked for differ by less than `bound` points."""
    def rule(runs: Runs) -> Decision:
        return together((f"{name(c)} {m}", stats.within(
            runs.where(data=c[0], epsilon=c[1]).lead({"method": m}, NGD), bound))
            for c in runs.cells() for m in methods if m in runs.methods())
    return rule


def below_when_released(rival: str) -> Rule:
    """The rival above each of the other methods at their smallest T_cur, where they release curvature most often."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            parts += [(f"{name(cell)} {rival} over {m}", above(here, {"method": rival}, {
                "method": m, "T_cur": here.where(method=m).values("T_cur")[0]}))
                for m in here.methods() if m != rival]
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
            parts.append((name(cell) + said, above(here, {**NGD, "T": budgets[-1]}, theirs) if budgets else
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
        parts.append((name(cell) + said, above(here, ours or NGD, theirs)))
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
        parts.append((f"{name(cell)} T={early} against {late}", stats.greater(fading)))
    return together(parts)


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
            parts.append((name(cell), above(here, at_half_rate(here), best)))
        return together(parts)
    return rule


def with_most_views(rule: Rule) -> Rule:
    """A rule on the runs on the data set's own network, the first one asked for, with the largest K."""
    def on_those(runs: Runs) -> Decision:
        here = runs.where(model=runs.values("model")[0])
        return rule(here.where(K=here.values("K")[-1]))
    return on_those


def half_rate_over(rivals: Sequence[str]) -> Rule:
    """DP-NGD at half its rate above each of these methods at the rate tuned for it, in the cells that they share."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            parts += [(f"{name(cell)} over {m}", above(here, at_half_rate(here), {"method": m}))
                      for m in rivals if m in here.methods()]
        return together(parts)
    return rule


def more_images_pay(runs: Runs) -> Decision:
    """A pre-trained method with the most public images above itself with the fewest, each with its best `pt_steps`."""
    sizes, parts = runs.values("public_size"), []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        few, many = (here.best({"public_size": n, "pt_steps": t} for t in here.where(public_size=n).values("pt_steps"))
                     for n in (sizes[0], sizes[-1]))
        said = f" {sizes[-1]} images, {many['pt_steps']} steps, over {sizes[0]}, {few['pt_steps']}" if few and many \
            else ""
        parts.append((name(cell) + said, above(here, many or {}, few)))
    return together(parts)


def rarest_curvature_costs(runs: Runs) -> Decision:
    """Accuracy with the default T_cur above that with the largest one."""
    rarest = runs.values("T_cur")[-1]
    return drop("T_cur", runs.default("T_cur"), rarest)(runs)

"""How the claims about time are decided (Table 5): functions Runs -> Decision, as in `rules`.

Seconds are compared only between runs that one machine made: `side_by_side`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dpngd import stats
from dpngd.config import RunConfig
from dpngd.rules import Decision, Rule, name, steps_to_peak, together
from dpngd.runs import Runs, seconds_a_step


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
    """Seconds a step, DP-SGD-PT's over DP-NGD's, above the paper's."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            cost = {m: _by_seed(side_by_side(here).where(method=m), seconds_a_step) for m in ("dp-sgd-pt", "dp-ngd")}
            bound = limits.get(cell[0], max(limits.values()))
            parts.append((f"{name(cell)} a DP-SGD-PT step takes",
                          stats.greater(stats.ratio(cost["dp-sgd-pt"], cost["dp-ngd"]), 1 / bound)))
        return together(parts, unit=" of a DP-NGD step")
    return rule


def benched(limit: float) -> Callable[[Mapping[str, Any]], Decision]:
    """The same in a report of `dpngd.bench`, whose contenders take turns: DP-SGD's step (that of DP-SGD-PT, which only
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
                     zip(steps, (_by_seed(side_by_side(here).where(method=m), seconds_a_step)
                                 for m in ("dp-sgd-pt", "dp-ngd")), strict=True)]
            parts.append((name(cell), stats.greater(stats.ratio(*hours), factors.get(cell[0], min(factors.values())))))
        return together(parts, unit=" times as fast")
    return rule


def _by_seed(runs: Runs, value: Callable[[dict], float]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for config, record in runs.each():
        found.setdefault(config.seed, []).append(value(record))
    return {seed: sum(v) / len(v) for seed, v in found.items()}

"""How the claims about time are decided (Table 5): functions Runs -> Decision, as in `rules`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dpngd import stats
from dpngd.rules import Decision, Rule, name, steps_to_peak, together
from dpngd.runs import Runs, seconds_a_step


def step_cost(limits: Mapping[str, float]) -> Rule:
    """Seconds a step, DP-SGD-PT's over DP-NGD's, above the paper's."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            cost = {m: _by_seed(here.where(method=m), seconds_a_step) for m in ("dp-sgd-pt", "dp-ngd")}
            bound = limits.get(cell[0], max(limits.values()))
            parts.append((f"{name(cell)} a DP-SGD-PT step takes",
                          stats.greater(stats.ratio(cost["dp-sgd-pt"], cost["dp-ngd"]), 1 / bound)))
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
                     zip(steps, (_by_seed(here.where(method=m), seconds_a_step) for m in ("dp-sgd-pt", "dp-ngd")),
                         strict=True)]
            parts.append((name(cell), stats.greater(stats.ratio(*hours), factors.get(cell[0], min(factors.values())))))
        return together(parts, unit=" times as fast")
    return rule


def _by_seed(runs: Runs, value: Callable[[dict], float]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for config, record in runs.each():
        found.setdefault(config.seed, []).append(value(record))
    return {seed: sum(v) / len(v) for seed, v in found.items()}

"""How each claim is decided from the runs: functions Runs -> Decision, all on the estimator and the words of `stats`.

Differences are in points of accuracy, paired by seed, with intervals over seeds and test images. A claim that says
"more accurate than the baselines" is tried against each of them, never against the best of them after the fact, and so
is one about a trend of the lead. Steps to the rivals' peak are the exception: the peak is the maximum over rivals and
budgets, which is biased upwards where several are level (`peak_ratio`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dpngd.data import sets
from dpngd.suite import stats
from dpngd.suite.runs import Runs, Terms, seconds_per_step
from dpngd.suite.stats import Part
from dpngd.training.config import RunConfig

NGD = {"method": "dp-ngd"}
IN_POINTS = " points"
AS_FAST = " times as fast"
OVER_BEST = " over the best baseline"


# ---- What the rules share: a Decision, and how several comparisons become one ----------------------------------------

@dataclass(frozen=True)
class Decision:
    """A word, our side of it in words, and the numbers that it rests on."""

    word: str
    ours: str
    n: int  # seeds behind it: the least of any comparison that was run
    brief: str = ""  # `ours` in a line, where it has many parts
    tally: str = ""  # of several cells, in how many it holds
    rule: str = ""
    parts: tuple[Part, ...] = ()
    verdict: stats.Verdict | None = None
    unit: str = IN_POINTS
    power: float = math.nan  # the smallest difference seen with 80 % power; of `unchanged`, the smallest margin
    power_said: str = ""
    would: str = ""  # what would decide it
    holds: bool | None = None  # for facts and counts: whether it was so every time


Rule = Callable[[Runs], Decision]

SUPERIOR = ("reproduced: the 95% interval is above {0:g}; refuted: below {0:g}; equivalent: the 90% interval is within "
            "±{1:g} point")
ONE_SIDED = "reproduced: the 95% interval is above {0:g}; refuted: below {0:g}"
HARDLY = ("reproduced: the 90% interval is within ±{0:g} point (two one-sided tests); refuted: a 95% interval is "
          "outside ±{0:g}")
AT_LEAST = ("reproduced: the 95% bootstrap interval is at or above the factor; refuted: below it; not testable here: "
            "the rivals' peak is at the largest budget")
MOSTLY = "reproduced: the Clopper-Pearson 95% interval of the share of runs is above 1/2; refuted: below 1/2"
FACT = "reproduced: it holds in every case; refuted: it fails in one"
SEVERAL = ("; of several parts all must be reproduced, one that is refuted after Holm refutes the claim, and with one "
           "that is not testable here it is not shown")


@dataclass(frozen=True)
class Compared:
    """A contrast with its name, the group that it pools its variance with, and the cell that it counts in."""

    name: str
    contrast: stats.Contrast
    pool: Any = None
    cell: str = ""


def estimated(tests: Iterable[Compared]) -> list[tuple[Compared, stats.Estimate]]:
    tests = list(tests)
    found = stats.estimates([t.contrast for t in tests], [t.pool for t in tests])
    return list(zip(tests, found, strict=True))


def superiority(tests: Iterable[Compared], *, threshold: float = 0.0, margin: float | None = stats.MARGIN,
                others: Sequence[Part] = (), unit: str = IN_POINTS, digits: int = 2) -> Decision:
    """Every contrast is above the threshold; `others` are parts that are decided already (not testable here)."""
    parts = [stats.superior(t.name, e, threshold, margin, t.cell) for t, e in estimated(tests)]
    corrected = 1 - stats.ALPHA / max(1, len(parts))  # Holm's first step, where the claim is to be refuted
    rule = ONE_SIDED.format(threshold) if margin is None else SUPERIOR.format(threshold, margin)

    def would(p: Part) -> str:
        off, low = abs(p.estimate.mean - threshold), p.estimate.mean < threshold
        what = f"show{' after Holm' * (len(parts) > 1)} that it is below {threshold:g}" if low else \
            f"tell {off:.{digits}f}{unit} from none" if threshold == 0 else f"tell it from {threshold:g}{unit}"
        said = [seeds_said(p, stats.seeds_needed(p.estimate, off, corrected if low else 1 - stats.ALPHA), what)]
        if margin is not None and off < margin and not p.level:
            said.append(seeds_said(p, stats.seeds_needed(p.estimate, margin - off, 0.95), f"show that it is within "
                                   f"{margin:g}{unit.rstrip('s')}"))
        return "; ".join(said)

    return decided([*parts, *others], rule, would, unit, digits)


def unchanged(tests: Iterable[Compared], margin: float = stats.MARGIN) -> Decision:
    """Every contrast is within the margin."""
    parts = [stats.hardly(t.name, e, margin, t.cell) for t, e in estimated(tests)]
    corrected = 1 - stats.ALPHA / max(1, len(parts))

    def would(p: Part) -> str:
        off = abs(p.estimate.mean)
        within, level = ("within", 0.95) if off < margin else ("more than", corrected)
        return seeds_said(p, stats.seeds_needed(p.estimate, abs(margin - off), level),
                          f"show that it is {within} {margin:g} point")

    return decided(parts, HARDLY.format(margin), would, power_said="with n = {n} an unchanged accuracy is shown to be "
                   "within {power} with 80 % power")


def counted(parts: Sequence[Part], ours: str, holds: bool | None = None) -> Decision:
    """Something happens in most runs."""
    def would(p: Part) -> str:
        for n in range(p.estimate.n + 1, 1001):
            if stats.mostly("", round(p.estimate.mean * n), n).word != stats.INCONCLUSIVE:
                return f"{n} runs with about the same share would decide it"
        return "so even a share is not decided by 1,000 runs"

    return decided(parts, MOSTLY, would, " of the runs", ours=ours, holds=holds)


def fact(held: Sequence[bool], ours: str | None, counts: str, n: int | None = None, sampled: bool = False) -> Decision:
    """What holds without chance, or `sampled` within a tolerance: a guarantee that fails once has failed. `counts` is
    what n counts."""
    how = "sampled noise; the tolerance is stated beside the number" if sampled else \
        "checked in every case: no chance is involved"
    if not held or ours is None:
        return Decision(stats.NOT_RUN, stats.NOT_RUN, 0, rule=FACT)
    return Decision(stats.REPRODUCED if all(held) else stats.REFUTED, ours, len(held) if n is None else n, rule=FACT,
                    holds=all(held), power_said=f"{how} (n counts {counts})")


def seeds_said(p: Part, n: int | None, what: str) -> str:
    e = p.estimate
    if e.n < 2:
        return "one seed has no interval: at least two are needed"
    if not e.spread:
        return "all seeds agree to the last digit, so that there is no interval"
    if n is None and e.images and 3 * math.sqrt(e.image_part) > abs(e.mean):
        left = 2 * math.sqrt(e.image_part)
        return f"more seeds alone would not {what}: the {e.images:,} test images leave ±{left:.2f} points"
    return f"{f'about {n}' if n else 'more than 1,000'} seeds would {what}"


def decided(parts: Sequence[Part], rule: str, would: Callable[[Part], str], unit: str = IN_POINTS, digits: int = 2,
            ours: str = "", holds: bool | None = None,
            power_said: str = "with n = {n} a difference of {power} is seen with 80 % power") -> Decision:
    """The word of a conjunction (or of one part), told part by part; of a cell with several rivals, the best one."""
    verdict = stats.conjunction(parts)
    ran = [p for p in parts if p.word not in (stats.NOT_RUN, stats.NOT_TESTABLE)]
    rule += SEVERAL if len(parts) > 1 else ""
    if not ran and not any(p.note for p in parts):
        return Decision(stats.NOT_RUN, stats.NOT_RUN, 0, rule=rule, parts=tuple(parts), verdict=verdict, unit=unit)
    shown, brief, tally = ours, "", ""
    if not ours:
        cells: dict[str, Part] = {}
        for p in parts:
            at = p.cell or p.name
            cells[at] = min(p, cells.get(at, p), key=_lead)
        said = "; ".join(f"{p.name} {part_said(p, unit, digits)}" for p in cells.values())
        shown = said
        if len(cells) > 1 and ran:
            every = "both hold" if verdict.cells == 2 else f"all {verdict.cells} hold"
            tally = every if verdict.word == stats.REPRODUCED else f"{verdict.held} of {verdict.cells} hold after Holm"
            untested = sum(p.word == stats.NOT_TESTABLE for p in cells.values())
            tally += f", {untested} not testable here" if untested else ""
        if len(cells) > 3 and ran:
            means = [p.estimate.mean for p in cells.values() if p in ran]
            sign = "+" if ran[0].estimate.kind == "difference" else ""
            brief = f"{min(means):{sign}.{digits}f} to {max(means):{sign}.{digits}f}{unit}"
            brief += OVER_BEST if len(cells) < len(parts) else ""
    powers = [p.power for p in ran if math.isfinite(p.power)]
    power = max(powers, default=math.nan)
    n = min((p.estimate.n for p in ran), default=0)
    ratio = bool(ran) and ran[0].estimate.kind == "ratio"
    said = power_said.format(n=n, power=f"{power:.{digits}f}{'' if ratio else unit}") if powers else ""
    if said and len(powers) > 1:
        said += " (the least sharp of its comparisons)"
    undecided = would(verdict.weakest) if verdict.word == stats.INCONCLUSIVE and verdict.weakest else ""
    if undecided and len(parts) > 1:
        undecided = f"{verdict.weakest.name}: {undecided}"
    if verdict.word in (stats.NOT_TESTABLE, stats.INCONCLUSIVE):
        if verdict.weakest and verdict.weakest.word == stats.REPRODUCED:  # all that could be tested is shown
            undecided = ""
        testable = [f"{p.name}: {p.would}" if ran else p.would for p in parts if p.would]
        undecided = "; ".join(dict.fromkeys([*filter(None, [undecided]), *testable]))
    return Decision(verdict.word, shown, n, brief, tally, rule, tuple(parts), verdict, unit, power, said, undecided,
                    holds)


def _lead(p: Part) -> float:
    return p.estimate.mean if p.estimate.n else math.inf


def part_said(p: Part, unit: str, digits: int) -> str:
    e = p.estimate
    if p.word in (stats.NOT_RUN, stats.NOT_TESTABLE):
        return f"{p.word}{f' ({p.note})' if p.note else ''}"
    if unit == AS_FAST and 0 < e.low <= e.mean < 1:  # a slowdown is read the other way
        return f"takes {1 / e.mean:.{digits}f} [{1 / e.high:.{digits}f}, {1 / e.low:.{digits}f}] times as long"
    interval = f" [{e.low:.{digits}f}, {e.high:.{digits}f}]" if math.isfinite(e.high - e.low) else ""
    sign = "+" if e.kind == "difference" else ""
    return f"{e.mean:{sign}.{digits}f}{interval}{unit}"


def field_said(name: str, value: Any) -> str:
    """A field of a config with its value, in words where it has some."""
    said = {"model": f"network {value}", "K": f"{value} view{'' if value == 1 else 's'} per image",
            "public_size": f"public images {value}"}
    return said.get(name) or f"{name}={value:g}"


def cell_name(cell: tuple[str, float]) -> str:
    return f"{cell[0]} ε={cell[1]:g}"


def above(runs: Runs, name: str, a: Mapping | None, b: Mapping | None, pool: Any = None, cell: str = "") -> Compared:
    """A less B; nothing where one of them is not there."""
    there = a is not None and b is not None
    return Compared(name, runs.contrast([(1.0, a), (-1.0, b)]) if there else stats.Contrast({}), pool, cell)


def best_baseline(runs: Runs, **at: Any) -> dict[str, Any] | None:
    """The baseline with the highest mean in one setting."""
    return runs.best({"method": m, **at} for m in runs.baselines())


def trend(runs: Runs, name: str, values: Sequence[float], terms: Callable[[float, float], Terms],
          sign: float = 1.0, cell: str = "") -> Compared:
    """`sign` times the rise of a quantity along its least-squares line over log(values), from the first to the last;
    `terms(weight, value)` is the quantity at a value, weighted."""
    if len(values) < 2:
        return Compared(name, stats.Contrast({}), cell=cell)
    weights = stats.slope_weights([math.log(v) for v in values])
    return Compared(name, runs.contrast([t for w, v in zip(weights, values, strict=True) for t in terms(sign * w, v)]),
                    cell=cell)


def falls(runs: Runs, where: str, axis: str, values: Sequence[float], ends: str) -> list[Compared]:
    """The fall of DP-NGD's lead over each baseline along `axis`: one rival per line. With the best baseline of
    every value the rivals would differ along it, and their choice would have a slope of its own."""
    return [trend(runs, f"{where} over {m}, fall of the lead {ends} along the fitted line", values,
                  lambda w, v, m=m: [(w, {**NGD, axis: v}), (-w, {"method": m, axis: v})], -1.0, where)
            for m in runs.baselines()]


def varying(runs: Runs, axis: str) -> Runs:
    """Of runs in which several fields are varied one at a time, those that vary `axis`."""
    fixed = {n: runs.default(n, runs.values("method")[0]) for n in ("T_cur", "p", "T1") if n != axis and runs.configs}
    return runs.where(**{n: v for n, v in fixed.items() if v is not None}) if axis in ("T_cur", "p", "T1") else runs


# ---- The paper's claims: accuracy and privacy (Table 2; notebook 01) -------------------------------------------------

def best_in_every_cell(runs: Runs) -> Decision:
    """DP-NGD above each baseline in each cell: the p of a cell is the largest of its baselines'."""
    return superiority(above(runs.where(data=d, epsilon=e), f"{cell_name((d, e))} over {m}", NGD, {"method": m},
                             (d, m), cell_name((d, e)))
                       for d, e in runs.cells() for m in runs.where(data=d, epsilon=e).baselines())


def larger_when_stricter(runs: Runs, gated: Mapping[str, Any]) -> Decision:
    """DP-NGD's lead over each baseline falls with epsilon: along its line over log epsilon, for every data set.

    gated    what the gate found by data set (params/tuned/<profile>-gate.yaml); where no setting passed it, privacy
             costs too little for the question to have an answer
    """
    tests, others = [], []
    for data in runs.values("data"):
        here, epsilons = runs.where(data=data), sorted(e for d, e in runs.cells() if d == data)
        if data in gated and not gated[data]["passed"]:
            most = max(tried["points"] for tried in gated[data]["tried"])
            others.append(stats.not_testable(f"{data}, lead against ε", f"in no setting that the gate tried did DP-SGD "
                                             f"gain what it asks for; at most {most:g} points",
                                             "a setting in which privacy costs more"))
        else:
            tests += falls(here, data, "epsilon", epsilons, f"from ε={epsilons[0]:g} to {epsilons[-1]:g}")
    return superiority(tests, others=others)


def same_privacy(runs: Runs) -> Decision:
    """One noise multiplier for all methods with as many steps in a cell, and no run spends more than its budget."""
    sigmas: dict[tuple, set[float]] = {}
    for config, record in runs.each():
        setting = (config.data, config.epsilon, config.N, config.B, config.T)
        sigmas.setdefault(setting, set()).add(record["privacy"]["sigma"])
    # Two machines that calibrate the same budget differ in the eleventh digit: the search ends where it may.
    same = [max(found) <= min(found) * (1 + 1e-9) for found in sigmas.values()]
    within = [record["privacy"]["epsilon_prv"] <= config.epsilon for config, record in runs.each()]
    said = (f"one σ for all methods in {sum(same)} of {len(same)} settings; {sum(within)} of {len(within)} runs spent "
            "at most their budget")
    return fact([*same, *within], said, "seeds", len(runs.values("seed")))


# ---- The paper's claims: steps (Figure 2; notebook 02) ---------------------------------------------------------------

def higher_at_every_budget(runs: Runs) -> Decision:
    """DP-NGD above each baseline at each step budget."""
    tests = []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        tests += [above(here, f"{cell_name(cell)} T={T} over {m}", {**NGD, "T": T}, {"method": m, "T": T},
                        cell=f"{cell_name(cell)} T={T}")
                  for T in here.values("T") for m in here.baselines()]
    return superiority(tests)


@dataclass(frozen=True)
class Peak:
    """Where the rivals' mean curves peak, and where DP-NGD's first reaches that accuracy (inf: nowhere)."""

    theirs: float
    ours: float
    rival: str
    edge: str  # "largest" or "smallest" where the peak is at that budget: it may lie beyond
    bound: bool  # DP-NGD is there at the smallest budget already: the ratio is a lower bound

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


class Curves:
    """Accuracy by method, budget and seed, in one cell; complete, or there is nothing to say."""

    def __init__(self, runs: Runs, rivals: Sequence[str]):
        self.rivals, self.budgets = list(rivals), runs.values("T")
        found = [[runs.by_seed(method=m, T=T) for T in self.budgets] for m in (*rivals, "dp-ngd")]
        complete = rivals and self.budgets
        self.seeds = sorted(set.intersection(*(set(f) for row in found for f in row))) if complete else []
        self.table = np.asarray([[[f[s] for s in self.seeds] for f in row] for row in found])  # (methods, T, seeds)

    def reached(self, picked: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each row of seeds picked, (draws, n): the budget (its place) of the rivals' peak, the steps with which
        DP-NGD first has that accuracy, and whether that is so at the smallest budget already.

        Of the mean curves over those seeds, DP-NGD's made monotone and linear in log T between budgets."""
        means, T = self.table[:, :, picked].mean(-1), np.asarray(self.budgets, dtype=float)  # (methods, T, draws)
        theirs, ours = means[:-1].max(0), np.maximum.accumulate(means[-1])
        top, draws = theirs.max(0), np.arange(len(picked))
        at, j = np.argmax(theirs == top, 0), np.argmax(ours >= top, 0)
        before, never = np.maximum(j - 1, 0), ours[-1] < top
        rise = ours[j, draws] - ours[before, draws]
        share = np.where(rise > 0, (top - ours[before, draws]) / np.where(rise > 0, rise, 1.0), 0.0)
        steps = T[before] * (T[j] / T[before]) ** share
        return at, np.where(never, np.inf, steps), (j == 0) & ~never

    def peak(self) -> Peak:
        """Of all seeds. Where DP-NGD is there at the smallest budget already, that budget counts: its ratio is a lower
        bound, which can show a factor and cannot refute one."""
        (at,), (steps,), (bound,) = self.reached(np.arange(len(self.seeds))[None])
        rival = self.rivals[int(np.argmax(self.table[:-1, at].mean(-1)))]
        edge = "largest" if at == len(self.budgets) - 1 else "smallest" if at == 0 else ""
        return Peak(float(self.budgets[at]), float(steps), rival, edge, bool(bound))


def peak_ratio(name: str, curves: Curves, factor: float,
               cost: Callable[[np.ndarray], np.ndarray | float] = lambda picked: 1.0) -> Part:
    """Steps (or with `cost`, by seeds picked, time) to the rivals' peak, theirs over DP-NGD's, at least `factor`.

    The peak is a maximum of means, so where several rivals are level it lies above each of their true means, and the
    ratio below its true value: "refuted" is then reached too often (simulated with four equal rivals and six seeds: 7
    to 18 % instead of 2.5), "reproduced" is not."""
    if not len(curves.seeds):
        return stats.absent(name)
    peak, everyone = curves.peak(), np.arange(len(curves.seeds))[None]
    if peak.edge:
        side = "more" if peak.edge == "largest" else "fewer"
        return stats.not_testable(name, f"{peak.rival} is best at the {peak.edge} budget, {peak.theirs:g} steps",
                                  f"runs of {side} than {peak.theirs:g} steps, to see where the rivals peak")
    picked = stats.resampled(len(curves.seeds))
    at, steps_of, bounds = curves.reached(picked)
    values = np.asarray(curves.budgets)[at] / steps_of * cost(picked)
    e = stats.percentile(float(np.ravel(peak.ratio * cost(everyone))[0]), values, len(curves.seeds))
    steps = f"{peak.ours:.0f}{' or fewer' if peak.bound else ''}" if math.isfinite(peak.ours) else "never there"
    said = f"{name} ({steps} against {peak.theirs:g} steps of {peak.rival})"
    if len(curves.seeds) > 1 and not np.ptp(curves.table, axis=-1).any():  # all seeds agree: there is no interval
        return Part(said, e, stats.INCONCLUSIVE, target=factor)
    return stats.at_least(said, e, factor, values, np.where(bounds, math.inf, values))


def speedups(parts: Sequence[Part], unit: str) -> Decision:
    def would(p: Part) -> str:
        e = p.estimate
        if e.n < 2:
            return "one seed has no interval: at least two are needed"
        off = abs(math.log(e.mean / p.target)) if e.mean > 0 else 0.0
        if not math.isfinite(e.se) or not off:
            return "more seeds, or budgets closer to each other, would narrow the interval"
        seeds = math.ceil(e.n * ((stats.t_quantile(math.inf, 1 - stats.ALPHA) + stats.t_quantile(math.inf, stats.POWER))
                                 * e.se / off) ** 2)
        return f"about {seeds} seeds would tell {e.mean:.2f} from {p.target:g}"

    return decided(parts, AT_LEAST, would, unit, power_said="with n = {n} a factor of {power} is seen with 80 % power")


def fewer_steps(factors: Mapping[str, float]) -> Rule:
    """Budget of the baselines' peak over the steps with which DP-NGD reaches it, at least the data set's factor."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for data, epsilon in runs.cells():
            here = runs.where(data=data, epsilon=epsilon)
            parts.append(peak_ratio(cell_name((data, epsilon)), Curves(here, here.baselines()),
                                    factors.get(data, min(factors.values()))))
        return speedups(parts, " times fewer")
    return rule


# ---- The paper's claims: public images (Figure 3; notebook 03) -------------------------------------------------------

def baselines_need_images(runs: Runs) -> Decision:
    """Every baseline that uses public images rises along its line over log(images)."""
    tests = []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        for m in here.baselines():
            mine = here.where(method=m)
            sizes = mine.values("public_size")
            tests.append(trend(mine, f"{m} {sizes[0]} to {sizes[-1]} images" if sizes else m, sizes,
                               lambda w, size: [(w, {"public_size": size})]))
    return superiority(tests)


def ahead_with_most_images(runs: Runs) -> Decision:
    """DP-NGD above every baseline when all have the largest public set."""
    size = max(runs.values("public_size"), default=None)
    return superiority(above(runs.where(data=c[0], epsilon=c[1], public_size=size), f"{cell_name(c)} over {m}", NGD,
                             {"method": m}) for c in runs.cells() for m in runs.baselines())


# ---- The paper's claims: ablations (Tables 3 and 4, Figure 4; notebook 04) -------------------------------------------

def chain(*pairs: tuple[str, str]) -> Rule:
    """For each pair of methods and each cell, the first is more accurate than the second."""
    def rule(runs: Runs) -> Decision:
        return superiority(above(runs.where(data=d, epsilon=e), f"{cell_name((d, e))} {a} over {b}", {"method": a},
                                 {"method": b}, (d, a, b)) for d, e in runs.cells() for a, b in pairs)
    return rule


def diverges(method: str) -> Rule:
    """Training ends in numbers that are not finite, or with a loss above the one it started from."""
    def rule(runs: Runs) -> Decision:
        records = runs.where(method=method).records
        blown = sum(map(blown_up, records))
        nan = sum(r["status"] == "diverged" for r in records)
        return counted([stats.mostly(method, blown, len(records))],
                       f"{blown} of {len(records)} runs end above their first loss or in NaN ({nan} in NaN)",
                       blown == len(records))
    return rule


def blown_up(record: Mapping[str, Any]) -> bool:
    losses = [x for x in record["train_loss"] if x is not None]
    return record["status"] == "diverged" or not losses or losses[-1] > losses[0]


def unstable(record: Mapping[str, Any]) -> bool:
    """Diverged, or after the first tenth of the steps once above 1.5 times its first loss: what tuning refuses too."""
    losses = record["train_loss"]
    late = [x for x in losses[max(1, len(losses) // 10):] if x is not None]
    return record["status"] == "diverged" or not late or losses[0] is None or max(late) > 1.5 * losses[0]


def lower_loss(a: str, b: str) -> Rule:
    """Mean training loss after the first quarter of the steps: that of `b` less that of `a`, by seed. A diverged run
    has the loss of chance, log(classes)."""
    def late(runs: Runs, method: str) -> dict[int, float]:
        found = {}
        for config, record in runs.where(method=method).each():
            tail = [x for x in record["train_loss"][config.T // 4:] if x is not None]
            lost = record["status"] == "diverged" or not tail
            found[config.seed] = math.log(record["data"]["private"]["classes"]) if lost else sum(tail) / len(tail)
        return found

    def rule(runs: Runs) -> Decision:
        return superiority((Compared(cell_name(c), stats.paired(late(here, b), late(here, a)))
                            for c in runs.cells() if (here := runs.where(data=c[0], epsilon=c[1])) is not None),
                           margin=None, unit=" nats", digits=3)
    return rule


# ---- The paper's claims: robustness (Table 6; notebook 06) -----------------------------------------------------------

def hardly_depends(axis: str, default: float | None = None, method: str = "dp-ngd", upto: float = math.inf,
                   pairs: bool = False) -> Rule:
    """Every value of an axis within 1 point of the default one (the most frequent where none is named); with `pairs`,
    every two values within 1 point of each other."""
    def rule(runs: Runs) -> Decision:
        tests = []
        for cell in runs.cells():
            all_ = runs.where(data=cell[0], epsilon=cell[1], method=method)
            here = varying(all_, axis)
            if not here.values(axis):
                continue
            base = all_.default(axis, method) if default is None else default
            values = [v for v in here.values(axis) if v <= upto]
            tests += [above(here, f"{cell_name(cell)} {field_said(axis, v)} against {w:g}", {axis: v}, {axis: w})
                      for v, w in (itertools.combinations(values, 2) if pairs else ((v, base) for v in values))
                      if v != w]
        return unchanged(tests)
    return rule


def drop(axis: str, start: float, end: float) -> Rule:
    """Accuracy at one value of an axis above that at another."""
    def rule(runs: Runs) -> Decision:
        return superiority(above(varying(runs.where(data=c[0], epsilon=c[1], **NGD), axis),
                                 f"{cell_name(c)} {axis}={start:g} over {end:g}", {axis: start}, {axis: end})
                           for c in runs.cells())
    return rule


# ---- Our questions, which the paper leaves open ----------------------------------------------------------------------

def over_each(fields: Sequence[str], rival: str) -> Rule:
    """DP-NGD above another method, for every combination of these fields that was asked for."""
    def rule(runs: Runs) -> Decision:
        tests = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            for values in dict.fromkeys(tuple(getattr(c, f) for f in fields) for c in here.configs):
                chosen = dict(zip(fields, values, strict=True))
                name = ", ".join((cell_name(cell), *(field_said(f, v) for f, v in chosen.items())))
                tests.append(above(here.where(**chosen), name, NGD, {"method": rival}))
        return superiority(tests)
    return rule


def ahead_at_own_budget(runs: Runs) -> Decision:
    """DP-NGD at its best step budget above each baseline at its own: all are chosen by their means."""
    tests = []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        own = {m: here.best({"method": m, "T": T} for T in here.values("T")) for m in (*here.baselines(), "dp-ngd")}
        ours = own.pop("dp-ngd")
        for m, theirs in own.items():
            said = f" ({ours['T']} steps against {theirs['T']})" if ours and theirs else ""
            tests.append(above(here, f"{cell_name(cell)} over {m}{said}", ours, theirs, cell=cell_name(cell)))
    return superiority(tests)


def lead_fades(runs: Runs) -> Decision:
    """DP-NGD's lead over each baseline falls with the step budget: along its line over log T."""
    tests = []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        budgets = here.values("T")
        tests += falls(here, cell_name(cell), "T", budgets, f"from T={budgets[0]} to {budgets[-1]}")
    return superiority(tests)


def more_images_pay(runs: Runs) -> Decision:
    """A pre-trained method with the most public images above itself with the fewest, each with its best `pt_steps`."""
    sizes, tests = runs.values("public_size"), []
    for cell in runs.cells() if sizes else ():
        here = runs.where(data=cell[0], epsilon=cell[1])
        few, many = (here.best({"public_size": n, "pt_steps": t} for t in here.where(public_size=n).values("pt_steps"))
                     for n in (sizes[0], sizes[-1]))
        said = f" {sizes[-1]:,} images and {many['pt_steps']} pre-training steps, over {sizes[0]} images and " \
               f"{few['pt_steps']} steps:" if few and many else ""
        tests.append(above(here, cell_name(cell) + said, many, few))
    return superiority(tests)


def over(axis: str, rival: str) -> Rule:
    """DP-NGD above another method, for every value of a field (which the rival may not have)."""
    def rule(runs: Runs) -> Decision:
        return superiority(above(runs.where(data=c[0], epsilon=c[1]), f"{cell_name(c)} {sets.label(v)}",
                                 {**NGD, axis: v}, {"method": rival})
                           for c in runs.cells() for v in runs.where(**NGD).values(axis))
    return rule


def below_when_released(rival: str) -> Rule:
    """The rival above each of the other methods at their smallest T_cur, where they release curvature most often."""
    def rule(runs: Runs) -> Decision:
        tests = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            most = {m: min(here.where(method=m).values("T_cur"), default=None) for m in here.methods() if m != rival}
            tests += [above(here, f"{cell_name(cell)} {rival} over {m}", {"method": rival}, {"method": m, "T_cur": T})
                      for m, T in most.items()]
        return superiority(tests)
    return rule


def mostly_clamped(runs: Runs) -> Decision:
    """More than half of the eigenvalues lie on DP-NGD's floor, at every look of a run, in most runs."""
    shares = [[a["clamped_share"] for a in r["diagnostics"]["along"] if a.get("clamped_share") is not None]
              for r in runs.where(**NGD).records]
    shares = [s for s in shares if s]
    if not shares:
        return decided([stats.absent("dp-ngd")], MOSTLY, lambda p: "")
    yes = sum(min(s) > 0.5 for s in shares)
    start, least, end = (100 * sum(f(s) for s in shares) / len(shares) for f in (lambda s: s[0], min, lambda s: s[-1]))
    return counted([stats.mostly("dp-ngd", yes, len(shares))],
                   f"in {yes} of {len(shares)} runs; {start:.1f}% of the eigenvalues at the first look, {least:.1f}% "
                   f"at the fewest, {end:.1f}% at the last (means)", yes == len(shares))


def alike(methods: Sequence[str]) -> Rule:
    """DP-NGD and those of the arms that were asked for are within 1 point of each other."""
    def rule(runs: Runs) -> Decision:
        return unchanged(above(runs.where(data=d, epsilon=e), f"{cell_name((d, e))} {m}", {"method": m}, NGD, (d, m))
                      for d, e in runs.cells() for m in methods if m in runs.methods())
    return rule


def over_budgets(runs: Runs, method: str, rival: str, data: str) -> Terms:
    """The mean over a data set's epsilons of one method less another."""
    epsilons = runs.where(data=data).values("epsilon")
    return [(sign / len(epsilons), {"method": m, "data": data, "epsilon": e}) for e in epsilons
            for sign, m in ((1.0, method), (-1.0, rival))]


def all_budgets(runs: Runs, data: str) -> str:
    """The name of a mean over a data set's epsilons."""
    epsilons = runs.where(data=data).values("epsilon")
    return cell_name((data, epsilons[0])) if len(epsilons) == 1 else f"{data} (mean of {len(epsilons)} ε)"


def untuned_ahead(method: str) -> Rule:
    """A method that is not tuned above each tuned baseline, in the mean over the epsilons of each data set."""
    def rule(runs: Runs) -> Decision:
        return superiority(Compared(f"{all_budgets(runs, d)} over {m}", runs.contrast(over_budgets(runs, method, m, d)),
                                    cell=d) for d in runs.values("data") for m in runs.baselines())
    return rule


def untuned_level(method: str, loss: float = stats.MARGIN) -> Rule:
    """A method that is not tuned less than `loss` points below tuned DP-NGD, in the mean over the epsilons of each data
    set (non-inferiority)."""
    def rule(runs: Runs) -> Decision:
        return superiority(
            (Compared(f"{all_budgets(runs, d)} {method} over dp-ngd",
                      runs.contrast(over_budgets(runs, method, "dp-ngd", d))) for d in runs.values("data")),
            threshold=-loss, margin=None)
    return rule


def subset_matters(rival: str) -> Rule:
    """DP-NGD's lead over the rival on the whole private set within 1 point of that on the subset, where both ran."""
    def rule(runs: Runs) -> Decision:
        tests = []
        for cell in runs.cells():
            here = runs.where(data=cell[0], epsilon=cell[1])
            sizes = sorted({c.N for c in here.configs}, key=lambda N: math.inf if N is None else N)
            if len(sizes) == 2:
                few, all_ = sizes
                tests.append(Compared(f"{cell_name(cell)} N={all_ or 'all'} against {few}", here.contrast([
                    (sign * side, {"method": m, "N": N}) for sign, N in ((1.0, all_), (-1.0, few))
                    for side, m in ((1.0, "dp-ngd"), (-1.0, rival))])))
        return unchanged(tests)
    return rule


def broken_bounds(runs: Runs) -> dict[float, tuple[dict, dict]]:
    """Factor by which eta C / sqrt(lambda_safe) exceeds what the safety equation allows -> the runs that break it, and
    those with the same rate and the floor that the equation asks for. Factor 1 is where both are one run."""
    ours = runs.where(**NGD)
    if not ours.configs:
        return {}

    def strength(c: RunConfig) -> float:
        return c.eta * c.C / math.sqrt(c.lambda_safe)

    least = min(map(strength, ours.configs))
    at = {(round(strength(c) / least, 2), float(f"{c.eta:.4g}")): {**NGD, "eta": c.eta, "lambda_safe": c.lambda_safe}
          for c in ours.configs}
    base = min(eta for factor, eta in at if factor == 1)
    return {factor: (fields, at[1.0, eta]) for (factor, eta), fields in sorted(at.items(), key=lambda item: item[0])
            if (1.0, eta) in at and (factor > 1 or eta == base)}


def breaking_costs(runs: Runs) -> Decision:
    """Accuracy with the equation kept less that with it broken, at the same rate: its rise over log(factor)."""
    tests = []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        rows = broken_bounds(here)
        name = cell_name(cell) + (f" factor {min(rows):g} to {max(rows):g}" if rows else "")
        tests.append(trend(here, name, list(rows), lambda w, f, rows=rows: [(w, rows[f][1]), (-w, rows[f][0])]))
    return superiority(tests)


def breaking_destabilises(runs: Runs) -> Decision:
    """At the largest factor most runs are unstable. The runs that keep the equation are told beside it."""
    parts, said, always = [], [], []
    for cell in runs.cells():
        here = runs.where(data=cell[0], epsilon=cell[1])
        rows = broken_bounds(here)
        if len(rows) < 2:
            parts.append(stats.absent(cell_name(cell)))
            continue
        for f, (broken, kept) in rows.items():
            hit, safe = ([unstable(r) for r in here.where(**fields).records] for fields in (broken, kept))
            if f > 1:
                decides = " (decides)" if f == max(rows) else ""
                said.append(f"{cell_name(cell)} factor {f:g}{decides}: {sum(hit)} of {len(hit)} runs unstable, with "
                            f"the equation kept {sum(safe)} of {len(safe)}")
        parts.append(stats.mostly(cell_name(cell), sum(hit), len(hit)))
        always.append(all(hit))
    return counted(parts, "; ".join(said) or stats.NOT_RUN, all(always))


def round_one(runs: Runs) -> Runs:
    """The trials of a grid, without the repeats of its best ones: all have the search's first seed."""
    return runs.where(seed=min(runs.values("seed"), default=None))


def rarest_curvature_costs(runs: Runs) -> Decision:
    """Accuracy with the default T_cur above that with the largest one."""
    here = runs.where(**NGD)
    return drop("T_cur", here.default("T_cur"), max(here.values("T_cur")))(here) if here.configs else superiority([])


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


TIMES_A_STEP = " times a DP-SGD step"


def timed(ratios: Iterable[tuple[str, Mapping[int, float], Mapping[int, float], float]], unit: str) -> Decision:
    """Seconds of a rival's step over those of DP-NGD's, paired by seed or round, each above a bound: t intervals of
    their logarithms. They are told the other way round, as multiples of the rival's step."""
    parts = []
    for name, a, b, bound in ratios:
        e = stats.log_ratio(a, b).estimate()
        p = stats.superior(name, e, math.log(bound), margin=None)
        multiple = stats.as_ratio(replace(e, mean=-e.mean, low=-e.high, high=-e.low))
        parts.append(Part(name, multiple, p.word, p.up, p.down, power=math.exp(p.power)))
    rule = "reproduced: the 95% interval of the multiple is below the paper's; refuted: above it"
    return decided(parts, rule, lambda p: "more rounds on a quiet machine would narrow the interval", unit,
                   power_said="with n = {n} a factor of {power} is seen with 80 % power")


def costs(runs: Runs) -> dict[str, dict[int, float]]:
    return {m: _by_seed(side_by_side(runs).where(method=m), seconds_per_step) for m in ("dp-sgd-pt", "dp-ngd")}


def step_cost(limits: Mapping[str, float]) -> Rule:
    """Seconds per step, DP-SGD-PT's over DP-NGD's, above the paper's."""
    def rule(runs: Runs) -> Decision:
        rows = []
        for data, epsilon in runs.cells():
            cost = costs(runs.where(data=data, epsilon=epsilon))
            rows.append((cell_name((data, epsilon)), cost["dp-sgd-pt"], cost["dp-ngd"],
                         1 / limits.get(data, max(limits.values()))))
        return timed(rows, f"{TIMES_A_STEP.removesuffix(' step')}-PT step")
    return rule


def benched(limit: float) -> Callable[[Mapping[str, Any]], Decision]:
    """The same in a report of `dpngd bench`, whose contenders take turns: DP-SGD's step (that of DP-SGD-PT, which only
    starts elsewhere) over DP-NGD's with its share of a curvature refresh, round by round."""
    def rule(report: Mapping[str, Any]) -> Decision:
        def rounds(result: Mapping[str, Any], name: str) -> dict[int, float]:
            return dict(enumerate(result["contenders"].get(name, {}).get("seconds", [])))

        return timed(((network, rounds(result, "dp-sgd"), rounds(result, "dp-ngd"), 1 / limit)
                      for network, result in report["models"].items()), TIMES_A_STEP)
    return rule


def total_time(comparable: float) -> Rule:
    """Time of DP-SGD-PT to its peak over time of DP-NGD to the same accuracy, at least `comparable`."""
    def rule(runs: Runs) -> Decision:
        parts = []
        for data, epsilon in runs.cells():
            here = runs.where(data=data, epsilon=epsilon)
            curves, cost = Curves(here, ["dp-sgd-pt"]), costs(here)
            if not all(s in cost[m] for s in curves.seeds for m in cost):
                parts.append(stats.absent(cell_name((data, epsilon))))
                continue
            table = np.asarray([[cost[m][s] for s in curves.seeds] for m in ("dp-sgd-pt", "dp-ngd")])
            parts.append(peak_ratio(cell_name((data, epsilon)), curves, comparable,
                                    lambda picked, table=table: np.divide(*table[:, picked].mean(-1))))
        return speedups(parts, AS_FAST)
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
        return fact([c.holds for c in self.means], said, "seeds", sampled=True)

    def covariance(self) -> Decision:
        chis = [c for c, _, _ in self.spectrum]
        worst = max(chis, key=lambda c: abs(c.mean - 1) / math.sqrt(2 / c.terms), default=None)
        said = worst and (f"measured over predicted variance {min(c.mean for c in chis):.3f} to "
                          f"{max(c.mean for c in chis):.3f} in {len(chis)} bins of the spectrum (tolerance 1 ± "
                          f"{SIGMAS * math.sqrt(2 / max(c.terms for c in chis)):.3f} to "
                          f"{SIGMAS * math.sqrt(2 / min(c.terms for c in chis)):.3f}, by bin)")
        return fact([c.holds for c in chis], said, "bins of the spectrum", sampled=True)

    def duality(self) -> Decision:
        inside = [row["quadratic"] <= row["bound"] * (1 + 1e-4) for row in self.kl]
        realised = sum(row["realised"] <= row["bound"] for row in self.kl)
        return fact(
            inside, f"½ΔθᵀFΔθ within the radius for {sum(inside)} of {len(inside)} samples; the network's "
                    f"own KL for {realised}", "samples")

    def safety(self) -> Decision:
        safe = [row for row in self.steps if row["safe"]]
        worst = max((row["squared"] / row["bound"] for row in safe), default=math.nan)
        slack = max((row["slack"] for row in safe), default=0.0)
        return fact([row["squared"] <= row["bound"] * (1 + row["slack"]) for row in safe],
                    f"squared step at most {worst:.2f} of the bound (tolerance {slack:.3f})", "seeds", sampled=True)

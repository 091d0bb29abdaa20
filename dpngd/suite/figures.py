"""The figures of the notebooks: Runs -> Figure.

Every figure says by itself what is shown: data set, network and epsilon over each panel, n and the meaning of the
marks below them. A number of the paper is drawn hollow beside ours only where both mean the same: accuracies where the
network is the paper's too, differences between two methods where the data set is. A difference is the one that its
claim compares, in the claim's direction, its bar the interval that decides the claim, and the axis says which side is
whose. A figure without a number of ours is `plots.nothing`, a panel or row without one says so, and n, legend and notes
are made from what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dpngd.audit.figure import distance, limit
from dpngd.audit.figure import draw as draw_canary
from dpngd.clamping import DynamicFloor
from dpngd.data import sets
from dpngd.methods import METHODS
from dpngd.suite import plots, rules, stats
from dpngd.suite.params import published
from dpngd.suite.plots import INK, SOFT, WIDTH, colour, end_labels, hollow, label, point, settle
from dpngd.suite.rules import (
    Curves,
    Theory,
    above,
    best_baseline,
    broken_bounds,
    estimated,
    round_one,
    side_by_side,
    unstable,
)
from dpngd.suite.runs import Runs, step_phases
from dpngd.suite.story import missing
from dpngd.suite.tables import leads, paper_accuracy
from dpngd.suite.tuning import expected_best
from dpngd.training.config import RunConfig

if TYPE_CHECKING:
    from dpngd.suite.motivation import Valley

PHASES = {"gradients": "per-sample gradients", "whitening": "whitening", "mechanism": "clip, sum, noise",
          "curvature": "curvature or basis", "step": "length of the step", "rest": "rest"}
HATCHES = dict(zip(PHASES, ("", "////", "----", "xxxx", "||||", ""), strict=True))
"""The shade differs by method. Lines only: dots make an SVG of 2 MB."""
PANELS = {"T_cur": "T_cur: steps between refreshes", "p": "p: exponent", "T1": "T1: warm-up share"}
FREE = "dp-ngd-free"


# ---- What several figures share --------------------------------------------------------------------------------------

def title(runs: Runs, data: str, epsilon: float | None = None) -> str:
    models = runs.where(data=data).values("model")
    network = ", ".join("small network" if m == "small" else m for m in models)
    return ", ".join(p for p in (sets.label(data), f"ε = {epsilon:g}" if epsilon else "", network) if p)


def papers_network(runs: Runs, data: str) -> bool:
    return [published()["utility_table"]["models"].get(data, "").lower()] == runs.where(data=data).values("model")


def log_axis(ax, values: Sequence[float]) -> None:
    """A logarithmic x axis with these ticks, also where nothing is drawn on it."""
    ax.set_xscale("log")
    ax.set_xticks(values, [f"{v:,g}" for v in values])
    ax.minorticks_off()
    if values:
        beyond = (max(values) / min(values)) ** 0.05 if len(values) > 1 else 2.0
        ax.set_xlim(min(values) / beyond, max(values) * beyond)


def seeds_of(runs: Runs) -> list[int]:
    """How many seeds there are of each setting: the different counts."""
    counts: dict[tuple, set[int]] = {}
    for config, _ in runs.each():
        setting = tuple(v for k, v in sorted(config.canonical().items()) if k != "seed")
        counts.setdefault((config.method, str(setting)), set()).add(config.seed)
    return sorted({len(seeds) for seeds in counts.values()})


def seeds_note(n: Sequence[int], runs: Runs) -> str:
    """The fewest and the most seeds behind what is drawn, and how many of the runs are missing."""
    if not n:
        return "not run"
    lost = f" ({missing(runs)})" if runs.missing else ""
    return f"n = {n[0]}" + (f" to {n[-1]}" if len(n) > 1 else "") + f" seeds{lost}"


def interval_note(figure: Figure, runs: Runs) -> str:
    images = any("correct" in r for r in runs.records)
    over = "seeds and test images" if images else "seeds"
    return f"Filled: mean and 95% interval over {over}, {seeds_note(plots.counts(figure), runs)}"


def notes(*parts: str) -> str:
    """Sentences, each with a capital letter."""
    return ". ".join(p[0].upper() + p[1:] for p in parts if p) + "."


SHARED = "all methods share seeds and test images: judge a difference where it is drawn, not by bars that overlap"


Fields = Mapping[str, Any]


def differences_of(runs: Runs, pairs: Sequence[tuple[Fields, Fields]],
                pooled: bool = True) -> dict[tuple[str, float, int], stats.Estimate]:
    """(data set, epsilon, number of the pair) -> first less second. `pooled` as most claims have it: the variance over
    seeds is shared by the epsilons of a data set. A bar must be the interval that its claim is decided by."""
    places = [(d, e, k) for d, e in runs.cells() for k in range(len(pairs))]
    found = estimated(above(runs.where(data=d, epsilon=e), "", *pairs[k], (d, k) if pooled else None)
                      for d, e, k in places)
    return {place: e for place, (_, e) in zip(places, found, strict=True)}


def held(decision: rules.Decision) -> set[str]:
    """The cells of a claim in which it holds after Holm, as its tally counts them; none while runs are missing."""
    if decision.verdict is None or decision.word == stats.NOT_RUN:
        return set()
    p: dict[str, float] = {}
    for part in decision.parts:
        p[part.cell or part.name] = max(part.up, p.get(part.cell or part.name, 0.0))
    everywhere = decision.word == stats.REPRODUCED
    return {c for c, q in zip(p, stats.holm(list(p.values())), strict=True) if everywhere or q <= stats.ALPHA}


def marks_held(runs: Runs, rule: rules.Rule) -> set[str]:
    """`held`, but none on the digits: these runs show the suite at work and decide nothing."""
    return set() if runs.values("data") == ["digits"] else held(rule(runs))


EACH = "bars are 95% each, not corrected for their number"
EQUAL = "at the rate of the equation"
HELD_NOTE = f"{EACH}; ✓: above every baseline after Holm's correction, as the claim is decided"


@dataclass(frozen=True)
class Difference:
    """A row of differences: first less second, in the look of a method."""

    text: str
    first: Fields
    second: Fields
    look: str


@plots.themed
def dots(runs: Runs, rows: Sequence[Difference], head: str, *, equal: Runs | None = None, paper: str | None = None,
         band: bool = False, pooled: bool = True, xlabel: str = "difference, points", better: str = "",
         said: str = "") -> Figure:
    """Rows of differences with intervals, a panel per cell, all on one scale. `equal`: the same arms at the equation's
    rate, below those at their own best one; the paper's differences hollow."""
    if not len(runs):
        return plots.nothing(head)
    cells, pairs = runs.cells(), [(r.first, r.second) for r in rows]
    found = differences_of(runs, pairs, pooled)
    other = differences_of(equal, pairs, pooled) if equal is not None and len(equal) else {}
    two = any(e.n for e in other.values())
    figure, axes = plots.new(len(cells), width=6.6 if len(cells) == 1 else WIDTH, sharey=True, sharex=True,
                             height=1.75 + (0.62 if two else 0.45) * len(rows))
    shown, bars, beside = [0.0], [], False
    for ax, (data, epsilon) in zip(axes, cells, strict=True):
        here = runs.where(data=data, epsilon=epsilon)
        for i, row in enumerate(rows):
            e, alike = found[data, epsilon, i], other.get((data, epsilon, i), stats.NOTHING)
            point(ax, i - (0.22 if two else 0.0), e, row.look, at=row.text, horizontal=True)
            point(ax, i, alike, row.look, at=row.text, series=f"{label(row.look)}, {EQUAL}", horizontal=True, fmt="|",
                  ms=11, mew=2)
            sides = [here.where(**fields) for fields in (row.first, row.second)]
            lost, ran = max((side.diverged(), len(side)) for side in sides)
            if lost:  # its accuracy is chance: the axis is set by the others, and an arrow says where it lies
                ax.annotate(f"{lost} of {ran} diverged: chance", (0.5, i), xycoords=("axes fraction", "data"),
                            xytext=(0, 6), textcoords="offset points", fontsize=7.5, ha="center", color=SOFT)
            there = [x for x, counts in ((e, lost < max(1, ran)), (alike, True)) if x.n and counts]
            shown += [x.mean for x in there]
            bars += there
            theirs = [paper_accuracy(paper, fields["method"], data, epsilon) if paper else None
                      for fields in (row.first, row.second)]
            if None not in theirs and (e.n or alike.n):
                hollow(ax, theirs[0] - theirs[1], i + 0.25, row.look, at=row.text, horizontal=True)
                shown.append(theirs[0] - theirs[1])
                beside = True
        for i in range(len(rows)):
            if not found[data, epsilon, i].n and not other.get((data, epsilon, i), stats.NOTHING).n:
                plots.row_not_run(ax, i)
        ax.set_yticks(range(len(rows)), [row.text for row in rows])
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
        ax.set_title(title(here, data, epsilon), loc="left", pad=16 if better else None)
        ax.set_xlabel(xlabel)
        if better:
            plots.better(ax, better)
    for ax in axes:
        settle(ax, shown, 0.2, room=2.0, intervals=bars, horizontal=True)
        plots.none_band(ax, horizontal=True, margin=stats.MARGIN if band else 0.0)
    looks = (("o", 5.5, 1, "each arm at its own best rate"), ("|", 10, 2, EQUAL))
    marks = [Line2D([], [], color=SOFT, marker=m, lw=0, ms=ms, mew=w, label=text) for m, ms, w, text in looks if two]
    marks += [plots.papers_mark("the paper, its own network")] if beside else []
    plots.headline(figure, head, marks=marks)
    plots.note(figure, notes(interval_note(figure, runs), "differences paired by seed" + (
        ", the variance over seeds shared by the epsilons, as in the claim" if pooled and len(cells) > 1 else ""),
        f"grey: within ±{stats.MARGIN:g} point" if band else "", said))
    return figure


@plots.themed
def curves(runs: Runs, axis: str, xlabel: str, head: str, side: Callable[[Any, Runs, list], str], *,
           peak: bool = False, said: str = "") -> Figure:
    """Accuracy against one axis (log), a row per cell, each point a full run with its own sigma; beside it the
    differences that `side` draws."""
    if not len(runs):
        return plots.nothing(head)
    cells = runs.cells()
    figure, axes = plots.new(2, len(cells), width=WIDTH, height=0.95 + 2.9 * len(cells), width_ratios=(1.75, 1))
    for i, (data, epsilon) in enumerate(cells):
        ax, right = axes[2 * i:2 * i + 2]
        here, ends, shown, bars = runs.where(data=data, epsilon=epsilon), [], [], []
        methods = here.methods()
        for k, m in enumerate(methods):
            mine = here.where(method=m)
            xs = [x for x in mine.values(axis) if mine.by_seed(**{axis: x})]
            if not xs:
                continue
            means = [mine.mean(**{axis: x}) for x in xs]
            at = [x * 1.035 ** (k - (len(methods) - 1) / 2) for x in xs]
            ax.plot(at, [e.mean for e in means], color=colour(m), lw=2.2 if m == "dp-ngd" else 1.2, zorder=2)
            for x, e in zip(at, means, strict=True):
                point(ax, x, e, m, at=xs[at.index(x)], ms=6 if m == "dp-ngd" else 4.5, lw=1.0, capsize=2)
            shown += [e.mean for e in means]
            bars += means
            ends.append((at[-1], means[-1].mean, label(m), colour(m)))
        settle(ax, shown, 0.15, room=2, intervals=bars, within=plots.PERCENT)
        if peak:
            _mark_peak(ax, here)
        end_labels(ax, ends)
        ax.set_title(title(here, data, epsilon), loc="left")
        ax.set_ylabel("test accuracy, %")
        right.set_title(side(right, here, here.values(axis)), loc="left")
        right.set_label(f"{ax.get_title(loc='left')}: {right.get_title(loc='left')}")
        for panel in (ax, right):
            log_axis(panel, here.values(axis))
            panel.set_xlabel(xlabel)
    plots.headline(figure, head)
    plots.note(figure, notes(interval_note(figure, runs), SHARED, said))
    return figure


def _mark_peak(ax, runs: Runs) -> None:
    """The baselines' best mean, and where DP-NGD's mean curve first reaches it, as `rules.fewer_steps` counts."""
    found = Curves(runs, runs.baselines())
    if not len(found.seeds):
        return
    peak = found.peak()
    level = found.table[:-1].mean(-1).max()
    ax.axhline(level, color=colour(peak.rival), lw=1, ls=":", zorder=1)
    edge = f" (the {peak.edge} budget)" if peak.edge else ""
    said = f"dotted: best baseline, {label(peak.rival)} at {peak.theirs:g} steps{edge}"
    said += f";\nDP-NGD is there after {peak.ours:.0f} steps" if math.isfinite(peak.ours) else \
        ";\nDP-NGD does not reach it"
    ax.annotate(said, (0.98, 0.03), xycoords="axes fraction", ha="right", fontsize=7.5, color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5}, zorder=5)


# ---- One run ---------------------------------------------------------------------------------------------------------

@plots.themed
def one_run(config: RunConfig, record: dict | None) -> Figure:
    """The training loss of one run, step by step, and its running mean."""
    head = f"{label(config.method)} on {sets.label(config.data)} ({config.model}), ε = {config.epsilon:g}, " \
           f"{config.T} steps, seed {config.seed}"
    if record is None:
        return plots.nothing(head)
    figure, (ax,) = plots.new(width=6.6, height=3.0)
    losses = np.array([math.nan if x is None else x for x in record["train_loss"]], dtype=float)
    steps, window = np.arange(1, len(losses) + 1), max(1, len(losses) // 20)
    means = [np.nanmean(losses[max(0, t - window):t]) for t in steps if np.isfinite(losses[max(0, t - window):t]).any()]
    ax.plot(steps, losses, color=colour(config.method), lw=0.7, alpha=0.45)
    ax.plot(steps[:len(means)], means, color=colour(config.method), lw=2.2)
    plots.keep(ax, label(config.method), steps[:len(means)], means)
    ax.set_xlabel("step")
    ax.set_ylabel("training loss")
    plots.headline(figure, head)
    plots.note(figure, f"Thin: the loss of each batch; thick: mean of the last {window} steps. Shown because the data "
                       "set is a public benchmark.")
    return figure


# ---- Notebook 00: trajectories (Figure 1), Theorem 1, the KL-DP duality, the clamping schedule -----------------------

@plots.themed
def trajectories(valley: Valley) -> Figure:
    """Figure 1: the same number of private steps, at the same privacy, in one narrow valley; several draws of noise."""
    figure, axes = plots.new(3, width=WIDTH, height=3.9)
    levels = np.geomspace(valley.loss.min() * 1.002, valley.loss.max(), 16)
    n, T = next(iter(valley.every.values())).shape[0], len(next(iter(valley.paths.values()))) - 1
    for ax, method in zip(axes, valley.paths, strict=False):
        ax.grid(False)
        ax.contour(*valley.axes, valley.loss, levels=levels, colors="#C4C4C4", linewidths=0.7)
        for other in valley.every[method]:
            ax.plot(*other.T, color=colour(method), lw=0.6, alpha=0.35)
        path = valley.every[method].mean(0)
        ax.plot(*path.T, color=colour(method), lw=1.6, marker=".", ms=4)
        plots.keep(ax, label(method), *path.T)
        ax.plot(*path[0], "o", mfc="white", mec=INK, zorder=5)
        ax.plot(*valley.optimum, "*", color=INK, ms=11, zorder=5)
        ax.annotate("start", path[0], xytext=(-4, -12), textcoords="offset points", fontsize=8, ha="right")
        ax.annotate("θ*", valley.optimum, xytext=(-8, -4), textcoords="offset points", fontsize=9, ha="right",
                    va="top")  # below the valley: the paths come from the right and end above
        ax.set_title(label(method), color=colour(method), loc="left")
        ax.set_xlabel("θ₁")
        ax.set_ylabel("θ₂")
    ends = []
    for method, losses in valley.losses.items():
        for loss in losses:
            axes[2].plot(loss, color=colour(method), lw=0.5, alpha=0.35)
        mean = losses.mean(0)
        axes[2].plot(mean, color=colour(method), lw=2.2)
        plots.keep(axes[2], label(method), range(T + 1), mean)
        ends.append((T, float(mean[-1]), label(method), colour(method)))
    floor = min(loss.min() for loss in valley.losses.values())
    axes[2].axhline(valley.lowest, color=INK, lw=1, ls=":")
    axes[2].annotate("loss at the minimum θ*", (0.02, valley.lowest), xycoords=("axes fraction", "data"),
                     xytext=(0, -3), textcoords="offset points", va="top", fontsize=8)
    axes[2].set_ylim(0.93 * min(floor, valley.lowest), 1.03 * max(loss[:, 0].max() for loss in valley.losses.values()))
    end_labels(axes[2], ends)
    axes[2].set_title("training loss", loc="left")
    axes[2].set_xlabel("step")
    plots.headline(figure, f"{T} private steps in a narrow valley, ε = {valley.epsilon:g} (Figure 1)"
                   if valley.sigma else f"{T} steps in a narrow valley, without noise")
    plots.note(figure, f"Two-class logistic model with two weights, the same privacy and start for both. {n} draws of "
                       "batches and noise: each thin, their mean thick. With clipping, the iterates settle away from "
                       "θ*, with noise and without it: a path may pass θ* and end beyond it.")
    return figure


@plots.themed
def theorem(theory: Theory) -> Figure:
    """Variance along each eigen-direction and the line of Theorem 1; the KL of single steps; steps at lower floors."""
    figure, (left, middle, right) = plots.new(3, width=WIDTH, height=3.8)
    left.loglog([x for x, _ in theory.predicted], [y for _, y in theory.predicted], color=INK, lw=1)
    left.loglog([at for _, at, _ in theory.spectrum], [v for _, _, v in theory.spectrum], "o", ms=5,
                color=colour("dp-ngd"))
    plots.keep(left, "Theorem 1", *zip(*theory.predicted, strict=True))
    plots.keep(left, "measured", *zip(*((at, v) for _, at, v in theory.spectrum), strict=True))
    left.set_title("noise follows F⁻¹", loc="left")
    left.set_xlabel("eigenvalue of the clamped F")
    left.set_ylabel("variance of the update at η = 1")
    left.annotate("line: σ²C²/(B²λ), Theorem 1 at η = 1", (0.04, 0.06), xycoords="axes fraction", fontsize=8)
    for clipped, ink, marker in ((True, colour("dp-ngd"), "o"), (False, SOFT, "x")):
        rows = [r for r in theory.kl if r["clipped"] is clipped]
        if rows:
            at, kl = ([r[k] / r["bound"] for r in rows] for k in ("quadratic", "realised"))
            middle.plot(at, kl, marker, ms=4, color=ink, label="clipped" if clipped else "not clipped")
            plots.keep(middle, "clipped" if clipped else "not clipped", at, kl)
    top = max(1.3, 1.15 * max(r["realised"] / r["bound"] for r in theory.kl))
    middle.plot([0, top], [0, top], color="#999999", lw=0.8)
    middle.annotate("KL = quadratic form", (0.02, 0.02), xytext=(0, 4), textcoords="offset points", fontsize=7.5,
                    color=SOFT, rotation=math.degrees(math.atan(1.4 / top)), rotation_mode="anchor",
                    ha="left", va="bottom")
    middle.axvline(1, color=INK, lw=1)
    middle.annotate("the radius\nη²C²/2", (1, 0), xytext=(3, 4), textcoords="offset points", fontsize=8)
    middle.set_xlim(0, 1.4)
    middle.set_ylim(0, top)
    middle.set_title("one sample's step, in KL", loc="left")
    middle.set_xlabel("½ Δθᵀ F Δθ, in radii")
    middle.set_ylabel("KL of the network's outputs, in radii")
    middle.legend(loc="upper left")
    rows = sorted({r["share"]: r for r in theory.steps}.values(), key=lambda r: r["share"])
    at, length = [r["share"] for r in rows], [r["squared"] / r["bound"] for r in rows]
    right.loglog(at, length, "o-", color=colour("dp-ngd"))
    plots.keep(right, "measured", at, length)
    right.axhline(1, color=INK, lw=1)
    right.annotate("DP-SGD's bound", (0.05, 1), xycoords=("axes fraction", "data"), xytext=(0, -10),
                   textcoords="offset points", fontsize=8)
    right.set_title("a lower floor, a longer step", loc="left")
    right.set_xlabel(r"floor / $\lambda_\mathrm{safe}$")
    right.set_ylabel("E‖Δθ‖² / bound")
    plots.headline(figure, "Theorem 1, the KL radius and the safety bound, measured")
    terms = sorted(c.terms for c, _, _ in theory.spectrum)
    plots.note(figure, "Small network on digits, public images: patches of two photographs. Left: bins of the "
                       "spectrum, each a mean over draws of noise; by chance alone a dot lies off the line by "
                       f"{100 * math.sqrt(2 / terms[-1]):.2g}% (most directions) to "
                       f"{100 * math.sqrt(2 / terms[0]):.2g}% (fewest). Middle: {len(theory.kl)} samples. "
                       "Right: one seed's steps.")
    return figure


@plots.themed
def schedule(lambda_safe: float, lambda_base: float, T: int, T1: float = 0.1, p: float = 10.0, where: str = "",
             said: str = "") -> Figure:
    """The clamping floor over a run; `where` says of which one."""
    figure, (ax,) = plots.new(width=6.2, height=3.2)
    floor = DynamicFloor(lambda_safe, lambda_base, T, T1, p)
    t = np.linspace(0, T, 401)
    ax.plot(t, [floor(x) for x in t], color=colour("dp-ngd"), lw=2)
    plots.keep(ax, label("dp-ngd"), t, map(floor, t))
    safe, base = r"$\lambda_\mathrm{safe}$", r"$\lambda_\mathrm{base}$"
    levels = ((lambda_safe, safe), (lambda_base, base)) if lambda_base != lambda_safe else \
        ((lambda_safe, f"{safe} = {base}"),)
    for value, name in levels:
        ax.axhline(value, color="#999999", lw=0.8, ls=":")
        ax.annotate(f"{name} = {value:g}", (0.5 * T, value), xytext=(0, 3), textcoords="offset points", fontsize=8,
                    ha="center")
    ax.set_ylim(0, 1.2 * lambda_safe)
    ax.set_ylabel(r"floor $\lambda_t$")
    ax.set_xlabel("step t")
    ax.set_title(where, loc="left")
    plots.headline(figure, f"The clamping floor: T = {T}, T1 = {T1:g} T, p = {p:g}")
    if said:
        plots.note(figure, said)
    return figure


# ---- Notebook 01: accuracy (Table 2), other networks, views, the whole set -------------------------------------------

@plots.themed
def lead(runs: Runs, settings: str = "") -> Figure:
    """The result in one picture: the lead over the best baseline in every cell, the paper's beside it. `settings` says
    how they were chosen, where that is not the protocol's way."""
    head = "Lead over the best baseline at each privacy budget" + (f", {settings}" if settings else "")
    table = leads(runs)
    if table.empty:
        return plots.nothing(head)
    datasets = [d for d in runs.values("data") if (table["data"] == d).any()]
    methods = [m for m in ("dp-ngd", FREE) if (table["name"] == m).any()]
    rows = runs.values("epsilon")
    figure, axes = plots.new(len(datasets), width=WIDTH, height=1.75 + 0.42 * len(rows), sharey=True, sharex=True)
    shown, bars = [0.0], []
    holds = marks_held(runs.where(method=[*runs.baselines(), "dp-ngd"]), rules.best_in_every_cell)
    for ax, data in zip(axes, datasets, strict=True):
        for line in table[table["data"] == data].itertuples():
            row = rows.index(line.epsilon)
            e = stats.Estimate(line.lead, line.sd, line.n, line.low, line.high)
            point(ax, row + (-0.14 if line.name == "dp-ngd" else 0.12), e, line.name, at=f"ε = {line.epsilon:g}",
                  horizontal=True, ms=7)
            shown.append(e.mean)
            bars.append(e)
            if line.name == "dp-ngd" and rules.cell_name((data, line.epsilon)) in holds:
                plots.tick(ax, e.high, row - 0.14)
            if line.name == "dp-ngd" and line.paper is not None and np.isfinite(line.paper):
                hollow(ax, line.paper, row + 0.32, "dp-ngd", at=f"ε = {line.epsilon:g}", horizontal=True)
                shown.append(line.paper)
        for epsilon in set(runs.where(data=data).values("epsilon")) - {*table[table["data"] == data]["epsilon"]}:
            plots.row_not_run(ax, rows.index(epsilon))
        ax.set_title(title(runs, data), loc="left")
        ax.grid(axis="y", visible=False)
        plots.better(ax)
        ax.set_xlabel("points above the best baseline")
    axes[0].set_yticks(range(len(rows)), [f"ε = {e:g}" for e in rows])
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    for ax in axes:
        settle(ax, shown, 0.12, room=2.0, intervals=bars, horizontal=True)
        plots.none_band(ax, horizontal=True, margin=0.0)
    theirs = Line2D([], [], color=colour("dp-ngd"), marker=METHODS["dp-ngd"].marker, mfc="white", lw=0, ms=6.5,
                    label="DP-NGD in the paper")
    plots.headline(figure, head, methods, [theirs] if table["paper"].notna().any() else [])
    free = f"{label(FREE)}: nothing tuned, public images made here" if FREE in methods else ""
    plots.note(figure, notes(f"{interval_note(figure, runs)}, paired by seed", "best baseline: the tuned DP-SGD, "
                             "DP-SGD-PT, GEP or AdaDPS with the highest mean in that cell, chosen afterwards, which "
                             "favours the baseline", HELD_NOTE if holds else EACH,
                             free))
    return figure


@plots.themed
def utility(runs: Runs) -> Figure:
    """Table 2: accuracies above, the lead over DP-SGD below."""
    head = "Test accuracy at each privacy budget, and points above DP-SGD (Table 2)"
    if not len(runs):
        return plots.nothing(head)
    datasets = runs.values("data")
    methods = runs.methods()
    others = [m for m in methods if m != "dp-sgd"]
    step = len(others) + 1.2  # rows per epsilon
    tall = 0.165 * step * max(len(runs.where(data=d).values("epsilon")) for d in datasets)
    figure, axes = plots.new(len(datasets), 2, width=max(5.5, min(10.0, 3.3 * len(datasets))),
                             height=3.2 + tall + 0.9, height_ratios=(2.3, tall + 0.3))
    beside = False
    found = differences_of(runs, [({"method": m}, {"method": "dp-sgd"}) for m in others])
    gains, gain_bars = [0.0], []
    for j, data in enumerate(datasets):
        top, bottom = axes[j], axes[len(datasets) + j]
        here = runs.where(data=data)
        epsilons = here.values("epsilon")
        shown, bars = [], []
        for k, m in enumerate(methods):
            means = [here.mean(method=m, epsilon=epsilon) for epsilon in epsilons]
            at = [i + 0.05 * (k - (len(methods) - 1) / 2) for i in range(len(epsilons))]
            top.plot(at, [e.mean for e in means], color=colour(m), lw=2 if m == "dp-ngd" else 1, zorder=2)
            for i, (epsilon, e) in enumerate(zip(epsilons, means, strict=True)):
                point(top, at[i], e, m, at=epsilon, ms=4.5, lw=0.9, capsize=1.5)
                shown.append(e.mean)
                bars.append(e)
                paper, base = (paper_accuracy("utility_table", x, data, epsilon) for x in (m, "dp-sgd"))
                if paper is not None and e.n and papers_network(here, data):
                    hollow(top, at[i], paper, m, at=epsilon)
                    shown.append(paper)
                if m == "dp-sgd":
                    continue
                row = i * step + others.index(m)
                gain = found.get((data, epsilon, others.index(m)), stats.NOTHING)
                point(bottom, row, gain, m, at=f"ε = {epsilon:g}", horizontal=True, ms=5.5, lw=1.1, capsize=2)
                gains.append(gain.mean)
                gain_bars.append(gain)
                if paper is not None and gain.n:
                    hollow(bottom, paper - base, row + 0.3, m, at=f"ε = {epsilon:g}", horizontal=True, ms=5.5, mew=0.9)
                    gains.append(paper - base)
                    beside = True
        settle(top, shown, 0.2, intervals=bars, within=plots.PERCENT)
        top.set_title(title(here, data), loc="left")
        top.set_xticks(range(len(epsilons)), [f"{e:g}" for e in epsilons])
        top.set_xlabel("ε")
        bottom.set_label(f"{title(here, data)}: lead over DP-SGD")
        plots.none_band(bottom, horizontal=True, margin=0.0)
        plots.better(bottom, "better than DP-SGD")
        middles = [i * step + (len(others) - 1) / 2 for i in range(len(epsilons))]
        bottom.set_yticks(middles, [f"ε = {e:g}" for e in epsilons] if j == 0 else [""] * len(epsilons))
        bottom.tick_params(axis="y", length=0)
        bottom.grid(axis="y", visible=False)
        for i in range(1, len(epsilons)):
            bottom.axhline(i * step - 1.1, color=plots.FAINT, lw=1)
        for epsilon, middle in zip(epsilons, middles, strict=True):
            if not any(d.at == f"ε = {epsilon:g}" for d in plots.ours(bottom)):
                plots.row_not_run(bottom, middle)
        bottom.set_ylim(len(epsilons) * step - 1, -1.0)
        bottom.set_xlabel("points above DP-SGD")
    for bottom in axes[len(datasets):]:  # one scale: a lead may be compared between data sets
        settle(bottom, gains, 0.15, room=2, intervals=gain_bars, horizontal=True)
    axes[0].set_ylabel("test accuracy, %")
    plots.headline(figure, head, methods, [plots.papers_mark("the paper's")] if beside else [])
    plots.note(figure, notes(interval_note(figure, runs), SHARED, "below: paired by seed, the variance over seeds "
                             "shared by the epsilons, as in the claim", "hollow: the paper's difference, on its own "
                             "larger network" if beside else ""))
    return figure


@plots.themed
def by_setting(runs: Runs, fields: tuple[str, ...], names: Callable[[tuple], str], head: str, said: str = "",
               pooled: bool = False) -> Figure:
    """Does the lead over DP-SGD depend on a setting: accuracies in each, and the lead beside them; a row per cell."""
    if not len(runs):
        return plots.nothing(head)
    cells = runs.cells()
    found = dict.fromkeys(tuple(getattr(c, f) for f in fields) for c in runs.configs)
    kinds = sorted(found, key=lambda v: tuple(math.inf if x is None else x for x in v))
    methods = runs.methods()
    others = [m for m in methods if m != "dp-sgd"]
    step = len(methods) + 0.8
    figure, axes = plots.new(2, len(cells), width=WIDTH, height=1.45 + len(cells) * (0.75 + 0.24 * step * len(kinds)))
    pairs = [({"method": m}, {"method": "dp-sgd"}) for m in others]
    found = [differences_of(runs.where(**dict(zip(fields, kind, strict=True))), pairs, pooled) for kind in kinds]
    shown, gains, bars, gain_bars = [], [0.0], [], []
    for i, (data, epsilon) in enumerate(cells):
        left, right = axes[2 * i:2 * i + 2]
        cell = runs.where(data=data, epsilon=epsilon)
        for k, kind in enumerate(kinds):
            here = cell.where(**dict(zip(fields, kind, strict=True)))
            for r, m in enumerate(methods):
                e, at = here.mean(method=m), names(kind)
                point(left, k * step + r, e, m, at=at, horizontal=True)
                shown.append(e.mean)
                bars.append(e)
                if m in others:
                    gain = found[k].get((data, epsilon, others.index(m)), stats.NOTHING)
                    point(right, k * step + r, gain, m, at=at, horizontal=True)
                    gains.append(gain.mean)
                    gain_bars.append(gain)
        plots.none_band(right, horizontal=True, margin=0.0)
        plots.better(right, "better than DP-SGD")
        for ax in (left, right):
            ax.set_ylim(len(kinds) * step - 0.6, -1.0)
            ax.grid(axis="y", visible=False)
            ax.tick_params(axis="y", length=0)
            for k in range(1, len(kinds)):
                ax.axhline(k * step - 0.9, color=plots.FAINT, lw=1)
        middles = [k * step + (len(methods) - 1) / 2 for k in range(len(kinds))]
        left.set_yticks(middles, [names(kind) for kind in kinds])
        right.set_yticks(middles, [""] * len(kinds))
        for ax in (left, right):
            for kind, middle in zip(kinds, middles, strict=True):
                if not any(d.at == names(kind) for d in plots.ours(ax)):
                    plots.row_not_run(ax, middle)
        short = f"{sets.label(data)}, ε = {epsilon:g}"
        left.set_title(short if "model" in fields else title(cell, data, epsilon), loc="left")
        right.set_label(f"{left.get_title(loc='left')}: lead over DP-SGD")
        left.set_xlabel("test accuracy, %")
        right.set_xlabel("points above DP-SGD")
    for left, right in zip(axes[::2], axes[1::2], strict=True):  # one scale for all cells
        settle(left, shown, 0.15, room=2, intervals=bars, horizontal=True, within=plots.PERCENT)
        settle(right, gains, 0.15, room=2, intervals=gain_bars, horizontal=True)
    plots.headline(figure, head, methods)
    plots.note(figure, notes(interval_note(figure, runs), SHARED, "right: differences paired by seed", said))
    return figure


def networks(runs: Runs) -> Figure:
    return by_setting(runs, ("model",), lambda v: "small network" if v[0] == "small" else v[0],
                    "Does the lead depend on the network?")


def views(runs: Runs) -> Figure:
    return by_setting(runs, ("K",), lambda v: "one view, K = 1" if v[0] == 1 else f"augmented,\nK = {v[0]} views",
                    "Does the lead depend on training without augmentation?")


def whole(runs: Runs, table: Runs) -> Figure:
    """The whole private set beside the subset of Table 2, in the cells that both have."""
    both = runs + Runs([c for c in table.configs if (c.data, c.epsilon) in runs.cells()
                        and c.method in runs.methods() and c.seed in runs.values("seed")], table.found)
    most = max((math.inf if c.N is None else c.N for c in runs.configs), default=math.inf)

    def name(v: tuple) -> str:
        size = math.inf if v[0] is None else v[0]
        return ("whole set" if size >= most else "subset") + (f",\nN = {v[0]:,}" if v[0] else "")

    return by_setting(both if len(runs) else runs, ("N",), name,
                    "Does it matter that the runs are on a subset of the private set?", pooled=True)


# ---- Notebook 02: accuracy against steps (Figure 2) ------------------------------------------------------------------

def convergence(runs: Runs) -> Figure:
    """Figure 2, and the lead over the best baseline at each budget."""
    holds = marks_held(runs.where(method=[*runs.baselines(), "dp-ngd"]), rules.higher_at_every_budget) \
        if len(runs) else set()

    def side(ax, here: Runs, budgets: list) -> str:
        shown, bars = [0.0], []
        ours = [m for m in ("dp-ngd", FREE) if m in here.methods()]
        for k, m in enumerate(ours):
            found = [(T, here.lead({"method": m, "T": T}, rival)) for T in budgets
                     if (rival := best_baseline(here, T=T)) is not None]
            at = [T * 1.05 ** (k - (len(ours) - 1) / 2) for T, e in found if e.n]
            bars += [e for _, e in found if e.n]
            ax.plot(at, [e.mean for _, e in found if e.n], color=colour(m), lw=1.2)
            for x, (T, e) in zip(at, [f for f in found if f[1].n], strict=True):
                point(ax, x, e, m, at=T, ms=5)
                shown.append(e.mean)
                if m == "dp-ngd" and f"{rules.cell_name(here.cells()[0])} T={T}" in holds:
                    plots.tick(ax, x, e.high)
        settle(ax, shown, 0.25, room=2, intervals=bars)
        plots.none_band(ax, margin=0.0)
        plots.better(ax, up=True)
        ax.set_ylabel("points above the best at that budget")
        return "lead over the best baseline"

    return curves(runs, "T", "steps of the whole run", "Accuracy against the step budget (Figure 2)", side, peak=True,
                  said=f"every point is a full run whose noise spends exactly ε at its last step; {EACH}; dotted line "
                       "and leads: over all baselines drawn, where the paper's claims need DP-SGD-PT and AdaDPS only"
                       + ("; ✓: above all of them after Holm's correction" if holds else ""))


# ---- Notebook 03: public images (Figure 3) ---------------------------------------------------------------------------

def _public_size() -> int:
    """The paper's number of public images, which all other runs have."""
    return next(row["value"] for row in published()["setup"]["values"] if row["name"] == "public_size")


def sizes(runs: Runs) -> Figure:
    """Figure 3, and the change from the default number of public images."""
    images = _public_size()

    def side(ax, here: Runs, sizes: list) -> str:
        shown, bars, methods = [0.0], [], here.methods()
        for k, m in enumerate(methods):
            mine, beside = here.where(method=m), 1.04 ** (k - (len(methods) - 1) / 2)
            found = [(n, e) for n in sizes
                     if n != images and (e := mine.lead({"public_size": n}, {"public_size": images})).n]
            for n, e in found:
                point(ax, n * beside, e, m, at=n, ms=4.5, lw=1.0, capsize=2)
                shown.append(e.mean)
                bars.append(e)
            if found:  # the number of images that the others are compared with is zero
                line = sorted([(images, 0.0), *((n, e.mean) for n, e in found)])
                ax.plot([n * beside for n, _ in line], [y for _, y in line], color=colour(m), lw=1.0)
                ax.plot([images * beside], [0.0], METHODS[m].marker, color=colour(m), ms=4.5)
        settle(ax, shown, 0.2, room=2, intervals=bars)
        plots.none_band(ax)
        ax.set_ylabel("points")
        return f"change from {images} images"

    return curves(runs, "public_size", "public images", "Accuracy against the number of public images (Figure 3)", side,
                  said=f"right: the others are compared with {images} images, which therefore have no bar; grey: "
                       f"within ±{stats.MARGIN:g} point, where the verdict needs the 90% interval to lie")


def sources(runs: Runs) -> Figure:
    """DP-NGD with each public set, in points above DP-SGD."""
    rows = [Difference(" + ".join(map(sets.label, source.split("+"))), {"method": m, "public": source},
                       {"method": "dp-sgd"}, m)
            for source in runs.values("public") for m in runs.methods() if m != "dp-sgd"]
    sizes = runs.values("public_size")
    count = f"{sizes[0]:,} public images each" if len(sizes) == 1 else ""
    patches = "photographs: patches of two of scikit-learn's" if "photos" in runs.values("public") else ""
    return dots(runs, rows, "DP-NGD's lead over DP-SGD by what the public images are", pooled=False,
                xlabel="DP-NGD minus DP-SGD, points", better="DP-NGD better", said=notes(count, patches).rstrip("."))


@plots.themed
def pretraining(runs: Runs) -> Figure:
    """DP-SGD-PT by public images and pre-training steps."""
    head = "DP-SGD-PT with few and with many public images, by pre-training steps"
    if not len(runs):
        return plots.nothing(head)
    cells = runs.cells()
    figure, axes = plots.new(len(cells), width=6.6 if len(cells) == 1 else WIDTH, height=3.7, sharey=True)
    for ax, (data, epsilon) in zip(axes, cells, strict=True):
        here, shown, bars, ends = runs.where(data=data, epsilon=epsilon), [], [], []
        counts = here.values("public_size")
        for k, (size, line) in enumerate(zip(counts, ("--", "-", ":", "-."), strict=False)):
            mine = here.where(public_size=size)
            found = [(t, mine.mean(pt_steps=t)) for t in mine.values("pt_steps")]
            found, beside = [(t, e) for t, e in found if e.n], 1.1 ** (k - (len(counts) - 1) / 2)
            ax.plot([t * beside for t, _ in found], [e.mean for _, e in found], line, color=colour("dp-sgd-pt"), lw=1.6)
            for t, e in found:
                point(ax, t * beside, e, "dp-sgd-pt", at=t, series=f"{size:,} images")
                shown.append(e.mean)
                bars.append(e)
            if found:
                ends.append((found[-1][0] * beside, found[-1][1].mean, f"{size:,} images", INK))
        log_axis(ax, here.values("pt_steps"))
        settle(ax, shown, 0.2, room=2, intervals=bars, within=plots.PERCENT)
        end_labels(ax, ends)
        ax.set_title(title(here, data, epsilon), loc="left")
        ax.set_xlabel("pre-training steps on the public images")
    axes[0].set_ylabel("test accuracy of DP-SGD-PT, %")
    plots.headline(figure, head)
    plots.note(figure, notes(interval_note(figure, runs), f"by default there are {_public_size():,} public images"))
    return figure


# ---- Notebook 04: ablations (Tables 3 and 4, Figure 4) ---------------------------------------------------------------

TITLES = {"ablation_decoupling": "Curvature from public images against curvature from the budget (Table 3)",
        "ablation_clipping": "Where to clip: whitened, before or after (Table 4)",
        "ablation_ours": "The choices that the paper leaves open",
        "kl_maps": "Which part does the work: the floor, the KL step or the maps"}


NGD, PT, KL = "dp-ngd", "dp-sgd-pt", "dp-ngd-kl"
PAIRS = {  # what the claims compare, in their direction: the paper's order, then that of our questions
    "ablation_decoupling": ((NGD, PT), (PT, "dp-ngd-private-20"), (PT, "dp-ngd-private-50"),
                            (NGD, "dp-ngd-private-20"), (NGD, "dp-ngd-private-50")),
    "ablation_clipping": ((NGD, "dp-ngd-post"), ("dp-ngd-post", "dp-ngd-pre"), (NGD, "dp-ngd-pre")),
    "ablation_ours": (("dp-ngd-auto", NGD), (NGD, "dp-ngd-one-sided"), ("dp-ngd-factor-clamp", NGD),
                      ("dp-ngd-labels-exact", NGD), ("dp-ngd-labels-random", NGD)),
    "kl_maps": ((KL, "dp-sgd-kl"), ("dp-sgd", "dp-sgd-kl"), (KL, "adadps-kl"), (KL, "dp-ngd-kl-one-sided"),
                (KL, "dp-ngd-kl-post"), ("dp-ngd-auto", NGD), (KL, NGD), ("dp-ngd-free", NGD), (NGD, "dp-sgd")),
}
IN_WORDS = {  # what a label does not say, in a few words
    "dp-ngd-private-20": "20% of the budget buys the curvature",
    "dp-ngd-private-50": "half the budget buys the curvature",
    "dp-ngd-pre": "clip the gradient, then F⁻¹", "dp-ngd-post": "F⁻¹ first, then clip",
    "dp-ngd-one-sided": "whitened, never mapped back", "dp-ngd-kl-one-sided": "whitened, never mapped back",
    "dp-ngd-kl-post": "F⁻¹ first, then clip", "dp-ngd-factor-clamp": "Kronecker factors clamped, not the product",
    "dp-ngd-labels-exact": "Fisher summed over all classes", "dp-ngd-labels-random": "Fisher from random labels",
    "dp-ngd-auto": "nothing new to tune", "dp-sgd-kl": "no curvature", "adadps-kl": "diagonal curvature",
    "dp-ngd-kl": "no rate to tune", "dp-ngd-free": "no rate, no public data",
}


def arms(runs: Runs, artifact: str, equal: Runs | None = None) -> Figure:
    """An ablation: the differences that its claims are about, the paper's hollow; `equal` are the arms at the
    equation's rate."""
    there = runs.methods()
    found = [p for p in PAIRS[artifact] if p[0] in there and p[1] in there]
    untuned = not all(METHODS[m].rate for m in there)  # then the others are told apart as tuned

    def name(m: str) -> str:
        return f"tuned {label(m)}" if untuned and m in (NGD, "dp-sgd") else label(m)

    looks = [a if b == NGD else b for a, b in found]
    rows = [Difference(f"{name(a)} minus {name(b)}" + (f"\n({IN_WORDS[m]})" if m in IN_WORDS else ""),
                       {"method": a}, {"method": b}, m) for (a, b), m in zip(found, looks, strict=True)]
    return dots(runs, rows, TITLES[artifact], equal=equal, paper=artifact, better="the first is better",
                band=artifact in ("ablation_ours", "kl_maps"))


@plots.themed
def bound(runs: Runs) -> Figure:
    """What breaking the safety equation does: accuracy and instability by the factor by which the rate is too large."""
    head = "A rate too large for its floor: what breaking the safety equation does"
    cells = runs.cells()
    each = {cell: runs.where(data=cell[0], epsilon=cell[1]) for cell in cells}
    broken = {cell for cell, here in each.items() for f, pair in broken_bounds(here).items()
              if f > 1 and len(here.where(**pair[0]))}
    if not broken:  # at factor 1 the equation holds: there is nothing to compare
        return plots.nothing(head)
    figure, axes = plots.new(2, len(cells), width=WIDTH, height=1.0 + 2.9 * len(cells), width_ratios=(1.6, 1))
    for i, (data, epsilon) in enumerate(cells):
        ax, right = axes[2 * i:2 * i + 2]
        here = each[data, epsilon]
        rows, shown, bars, ends = broken_bounds(here), [], [], []
        ax.set_title(title(here, data, epsilon), loc="left")
        if (data, epsilon) not in broken:
            plots.not_run(ax)
            right.set_axis_off()
            continue
        for which, name, ink, marker, line in ((1, "equation kept:\nfloor grows too", colour("dp-ngd"), "P", "-"),
                                               (0, "equation broken:\nfloor left alone", SOFT, "X", "--")):
            means = [(f, here.mean(**pair[which])) for f, pair in rows.items()]
            means, beside = [(f, e) for f, e in means if e.n], 1.02 if which else 0.98
            ax.plot([f * beside for f, _ in means], [e.mean for _, e in means], line, color=ink, lw=1.6)
            for f, e in means:
                point(ax, f * beside, e, "dp-ngd", at=f, series=name.replace("\n", " "), color=ink, fmt=marker)
                shown.append(e.mean)
                bars.append(e)
            if means:
                ends.append((means[-1][0] * beside, means[-1][1].mean, name, ink))
            counted = [(f, [unstable(r) for r in here.where(**pair[which]).records]) for f, pair in rows.items()]
            for f, hit in counted:
                e = stats.share(sum(hit), len(hit))
                point(right, f * (1.03 if which else 0.97), e, "dp-ngd", at=f, series=name.replace("\n", " "),
                      scale=100, color=ink, fmt=marker)
        settle(ax, shown, 0.15, room=2, intervals=bars, within=plots.PERCENT)
        end_labels(ax, ends)
        ax.set_ylabel("test accuracy of DP-NGD, %")
        right.set_title("unstable or diverged runs", loc="left")
        right.set_label(f"{ax.get_title(loc='left')}: unstable or diverged runs")
        right.set_ylabel("% of the runs")
        right.set_ylim(-4, 104)
        for panel in (ax, right):
            log_axis(panel, list(rows))
            panel.set_xlabel("factor on the rate")
    plots.headline(figure, head)
    plots.note(figure, notes(interval_note(figure, runs), "factor 1: the rate that the equation gives", "a "
                             "diverged run counts as chance", "right: share with its Clopper-Pearson interval; "
                             "unstable: diverged, or late in the run a loss above 1.5 times the first"))
    return figure


def releases(runs: Runs) -> Figure:
    """DP-SGD-PT less private curvature, by how often that is released."""
    rows = {}
    usual = next(row["value"] for row in published()["setup"]["values"] if row["name"] == "T_cur")
    for c in sorted(runs.configs, key=lambda c: (list(METHODS).index(c.method), c.T_cur or 0)):
        if c.T_cur is not None:
            count = math.ceil(c.T / c.T_cur)
            text = f"{label(c.method)}, {count} release{'s' if count > 1 else ''}"
            rows[c.method, c.T_cur] = Difference(text + ("\n(as in Table 3)" if c.T_cur == usual else ""),
                                          {"method": PT}, {"method": c.method, "T_cur": c.T_cur}, c.method)
    return dots(runs, list(rows.values()), "Curvature paid from the budget, by how often it is released", pooled=False,
                xlabel="DP-SGD-PT minus the row, points", better="DP-SGD-PT better",
                said="; ".join(f"{label(m)}: {IN_WORDS[m]}" for m in runs.methods() if m in IN_WORDS))


@plots.themed
def floors(runs: Runs) -> Figure:
    """Figure 4: training loss under three floors and the difference of two of them, which is what the claim is about;
    below them the floor and the share of eigenvalues that lie on it."""
    where = "; ".join(title(runs, d, e) for d, e in runs.cells())
    head = f"Three clamping floors over a run (Figure 4): {where}"
    if not len(runs):
        return plots.nothing(head)
    figure, (left, gap, middle, right) = plots.new(2, 2, width=WIDTH, height=6.2)
    marks, top, lost = [], [], []
    for m in runs.methods():
        records = runs.where(method=m).records
        if not records:
            continue
        name, line, ink = ("dynamic floor" if m == "dp-ngd" else label(m)), "-", colour(m)
        if m == "dp-ngd-no-floor":
            line, ink = ":", SOFT  # both arms are blue: here they share a panel
        steps, losses = _rows([[*enumerate(r["train_loss"], 1)] for r in records])
        marks.append(Line2D([], [], color=ink, ls=line, lw=2, label=name))
        for row in losses:
            left.plot(steps, row, line, color=ink, lw=0.4, alpha=0.4)
        mean = np.nanmean(losses, 0)
        if np.nanmax(losses) < 10 * np.nanmax(losses[:, 0]):
            left.plot(steps, mean, line, color=ink, lw=2)
            plots.keep(left, name, steps, mean)
            top.append(np.nanmax(losses))
        else:
            nan = sum(r["status"] == "diverged" for r in records)
            lost.append(f"{name}: loss up to {_about(np.nanmax(losses))},\n{nan} of {len(records)} runs diverged")
        for ax, key, scale in ((middle, "lambda_t", 1.0), (right, "clamped_share", 100.0)):
            if m == "dp-ngd-no-floor":
                break  # it has none
            steps, values = _rows([[(a["step"], a.get(key)) for a in r["diagnostics"].get("along", [])]
                                   for r in records])
            if len(steps) and not np.isnan(values).all():
                ax.plot(steps, scale * np.nanmean(values, 0), color=ink, lw=2, marker=".")
                plots.keep(ax, name, steps, scale * np.nanmean(values, 0))
    if top:
        left.set_ylim(0, 1.2 * max(top))
    if lost:
        left.annotate("\n".join(lost), (0.98, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize=8,
                      color=SOFT)  # the curves fall: this corner is free
    _loss_gap(gap, runs)
    for ax, text in ((left, "training loss"), (gap, "fixed minus dynamic: training loss, nats"),
                     (middle, "floor $\\lambda_t$"), (right, "eigenvalues on the floor, %")):
        ax.set_title(text, loc="left")
        ax.set_xlabel("step")
    middle.set_ylim(bottom=0)
    middle.margins(y=0.2)
    right.margins(y=0.2)
    cut = right.get_ylim()[0] > 0
    if cut:
        right.annotate(f"this axis starts at {right.get_ylim()[0]:.1f}%", (0.98, 0.03), xycoords="axes fraction",
                       ha="right", fontsize=7.5, color=SOFT)
        right.set_ylim(right.get_ylim())
    plots.headline(figure, head, marks=marks)
    plots.note(figure, notes(f"Thick: mean of {seeds_note(seeds_of(runs), runs)}; thin: each of them", "the losses are "
                             "private, shown because the data set is a public benchmark", "difference: paired by seed, "
                             "running mean over a twentieth of the steps, with its 95% interval over seeds; above 0 "
                             "the dynamic floor is better" if plots.ours(gap) else ""))
    return figure


def _about(x: float) -> str:
    """A large number in a few digits: 80,000."""
    return f"{float(f'{x:.1g}'):,.0f}" if x < 1e9 else f"{x:.0e}"


def _loss_gap(ax, runs: Runs) -> None:
    """The loss with a fixed floor less that with the dynamic one, by seed, as a running mean; in words what the claim
    has of it."""
    pair = ("dp-ngd", "dp-ngd-fixed-floor")
    dynamic, fixed = ({(c.data, c.epsilon, c.seed): r["train_loss"] for c, r in runs.where(method=m).each()
                       if r["status"] != "diverged"} for m in pair)
    both = [[*enumerate(np.subtract(*(np.array(x[k], dtype=float) for x in (fixed, dynamic))), 1)]
            for k in fixed if k in dynamic and len(fixed[k]) == len(dynamic[k])]
    if not both:
        plots.not_run(ax)
        return
    steps, table = _rows(both)
    window = max(1, len(steps) // 20)
    smooth = np.stack([np.nanmean(table[:, max(0, t - window):t], 1) for t in range(1, len(steps) + 1)], 1)
    means = [stats.mean(list(column), "difference") for column in smooth.T]
    ax.plot(steps, [e.mean for e in means], color=INK, lw=1.6)
    plots.keep(ax, "fixed minus dynamic", steps, [e.mean for e in means], ends=[(e.low, e.high) for e in means])
    if len(both) > 1:
        ax.fill_between(steps, [e.low for e in means], [e.high for e in means], color=SOFT, alpha=0.25, lw=0)
    ax.axhline(0, color=INK, lw=0.8)
    plots.better(ax, "dynamic floor better", up=True)
    for part in rules.lower_loss(*pair)(runs).parts:
        said = f"after the first quarter: {rules.part_said(part, '', 3)}"
        ax.annotate(said, (0.98, 0.03), xycoords="axes fraction", ha="right", fontsize=8, color=INK)
        break
    low, high = ax.get_ylim()
    ax.set_ylim(low - 0.12 * (high - low), high + 0.12 * (high - low))


def _rows(series: list[list[tuple[int, float | None]]]) -> tuple[list[int], np.ndarray]:
    """Several runs on one axis of steps: (runs, steps), nan where a run has no value (it may have ended early)."""
    steps = sorted({step for run in series for step, _ in run})
    table = np.full((len(series), len(steps)), np.nan)
    at = {step: i for i, step in enumerate(steps)}
    for row, run in zip(table, series, strict=True):
        for step, value in run:
            row[at[step]] = np.nan if value is None else value
    return steps, table


# ---- Notebook 05: the cost of a step (Table 5) -----------------------------------------------------------------------

@plots.themed
def overhead(runs: Runs) -> Figure:
    """Seconds per step by phase; beside it the paper's, on its own scale. Shades are phases, colours methods."""
    head = "Where the time of a step goes (Table 5)"
    if not len(runs):
        return plots.nothing(head)
    cells, timed = runs.cells(), side_by_side(runs)
    methods = runs.methods()
    figure, axes = plots.new(2, len(cells), width=WIDTH, height=1.35 + len(cells) * (0.75 + 0.3 * len(methods)),
                             width_ratios=(1.7, 1))
    everything = _phase_means(timed.records)
    used = [p for p in PHASES if everything.get(p)]
    for i, (data, epsilon) in enumerate(cells):
        ax, right = axes[2 * i:2 * i + 2]
        here = timed.where(data=data, epsilon=epsilon)
        totals = {m: _phase_means(here.where(method=m).records) for m in methods}
        base = sum(totals.get("dp-sgd-pt", {}).values())
        for row, m in enumerate(methods):
            start, phases = 0.0, {phase: 1e3 * totals[m].get(phase, 0.0) for phase in used}
            if not any(phases.values()):
                continue
            plots.keep(ax, label(m), phases, phases.values(), horizontal=True)
            for (phase, value), ink in zip(phases.items(), plots.shades(colour(m), len(used)), strict=True):
                ax.barh(row, value, left=start, color=ink, height=0.66, edgecolor="white", lw=0.5, hatch=HATCHES[phase])
                start += value
            times = f" ({1e-3 * start / base:.2f}×)" if base else ""
            ax.annotate(f"{start:.0f} ms{times}", (start, row), xytext=(4, 0), textcoords="offset points", va="center",
                        fontsize=8)
        rows = [r for r in published()["overhead"]["rows"] if r[0] == data]
        theirs = {r[2]: r[3] for r in rows}
        for row, m in enumerate(methods):
            if m in theirs:
                right.barh(row, theirs[m], height=0.66, facecolor="white", edgecolor=colour(m), lw=1.6)
                plots.keep(right, label(m), ["step"], [theirs[m]], paper=True, horizontal=True)
                right.annotate(f"{theirs[m]:g} s ({theirs[m] / theirs['dp-sgd-pt']:.2f}×)", (theirs[m], row),
                               xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
            elif rows:
                right.annotate("not in the paper", (0, row), xytext=(4, 0), textcoords="offset points", va="center",
                               fontsize=7.5, color=SOFT)
        for panel in (ax, right):
            panel.set_ylim(len(methods) - 0.4, -0.6)
            panel.grid(axis="y", visible=False)
            panel.margins(x=0.28 if panel is right else 0.2)
        ax.set_yticks(range(len(methods)), [label(m) for m in methods])
        right.set_yticks([])
        ax.set_title(f"ours, one CPU core: {title(here, data)}", loc="left")
        ax.set_xlabel("milliseconds per step")
        right.set_label(f"the paper: {sets.label(data)}")
        if not plots.ours(ax):
            plots.not_run(ax, horizontal=True)
        right.set_xlabel("seconds per step")
        if rows:
            right.set_title(f"the paper, RTX 3090: {published()['utility_table']['models'][data]}", loc="left")
        else:
            right.set_axis_off()
    greys = plots.shades("#333333", len(used))
    plots.headline(figure, head, marks=[Patch(facecolor=ink, edgecolor="white", hatch=HATCHES[p], label=PHASES[p])
                                        for p, ink in zip(used, greys, strict=True)])
    plots.note(figure, notes(f"Means of {seeds_note(seeds_of(timed), runs)} that every method was run with on one "
                             "machine", "in brackets: times DP-SGD-PT's step; hatch and shade: phase; colour: method",
                             "the paper's seconds are a GPU's: only the ratios may be compared"))
    return figure


def _phase_means(records: list[dict]) -> dict[str, float]:
    """Seconds per step by phase, a mean over runs; phases without a name here are in the rest."""
    found = dict.fromkeys(PHASES, 0.0)
    for r in records:
        for phase, seconds in step_phases(r).items():
            found[phase if phase in PHASES else "rest"] += seconds / len(records)
    return found


# ---- Notebook 06: robustness (Table 6), the grid search --------------------------------------------------------------

@plots.themed
def robustness(runs: Runs, axes_of: dict[str, Runs]) -> Figure:
    """Table 6: the change from the default value, ours filled and the paper's hollow."""
    where = "; ".join(title(runs, d, e) for d, e in runs.cells())
    head = f"DP-NGD when one setting leaves its default (Table 6): {where}"
    if not len(runs):
        return plots.nothing(head)
    figure, axes = plots.new(len(axes_of), width=WIDTH, height=3.8, sharey=True)
    shown, bars = [0.0], []
    for ax, (axis, here) in zip(axes, axes_of.items(), strict=True):
        default, paper = runs.default(axis), published()["robustness"]["axes"][axis]
        values = sorted({*here.values(axis), *paper["values"]})
        for i, v in enumerate(values):
            if v != default and v in here.values(axis):
                e = here.lead({axis: v}, {axis: default})
                point(ax, i - 0.12, e, "dp-ngd", at=v)
                shown.append(e.mean)
                bars.append(e)
        for i, v in enumerate(values) if plots.ours(ax) else ():
            if v == default:
                ax.plot([i - 0.12], [0], METHODS["dp-ngd"].marker, color=colour("dp-ngd"), ms=5.5)
            if v in paper["values"]:
                change = paper["mean"][paper["values"].index(v)] - paper["mean"][paper["values"].index(default)]
                hollow(ax, i + 0.12, change, "dp-ngd", at=v)
                shown.append(change)
        ax.grid(axis="x", visible=False)
        ax.set_xticks(range(len(values)), [f"{v:g}" + ("\ndefault" if v == default else "") for v in values])
        ax.set_xlim(-0.5, len(values) - 0.5)
        ax.set_title(PANELS[axis], loc="left")
    for ax in axes:
        settle(ax, shown, 0.2, room=3, intervals=bars)
        plots.none_band(ax)
    axes[0].set_ylabel("points above the default")
    ours = Line2D([], [], color=colour("dp-ngd"), marker=METHODS["dp-ngd"].marker, lw=0, ms=6, label="ours")
    theirs = Line2D([], [], color=colour("dp-ngd"), marker=METHODS["dp-ngd"].marker, mfc="white", lw=0, ms=6.5,
                    label="the paper, on ResNet-20")
    plots.headline(figure, head, marks=[ours, theirs])
    plots.note(figure, notes(interval_note(figure, runs), "differences paired by seed; the default is their zero",
                             f"grey: within ±{stats.MARGIN:g} point, where the verdict needs the 90% interval to lie"))
    return figure


@plots.themed
def trials(runs: Runs) -> Figure:
    """What a search of k trials is worth: the expected best validation accuracy of k of a method's trials."""
    head = "What a search is worth: expected best validation accuracy of k trials"
    runs = round_one(runs)
    if not len(runs):
        return plots.nothing(head)
    cells = runs.cells()
    columns = min(len(cells), 2 if len(cells) in (2, 4) else 3)
    rows = math.ceil(len(cells) / columns)
    figure, axes = plots.new(columns, rows, width=WIDTH if columns > 1 else 6.2, height=1.2 + 2.6 * rows)
    for ax, (data, epsilon) in zip(axes, cells, strict=False):
        here, shown = runs.where(data=data, epsilon=epsilon), []
        tried = [here.where(method=m).values("T") for m in here.baselines()]
        # DP-SGD was tried at other budgets too, for Figure 2: more trials than the others have.
        common = [T for T in here.values("T") if all(T in budgets for budgets in tried)]
        for m in here.methods():
            found = here.accuracies(method=m, T=common)
            if METHODS[m].arm_of or len(found) < 2:  # of one trial there is no best
                continue
            best = [expected_best(found, k) for k in range(1, len(found) + 1)]
            ax.plot(range(1, len(best) + 1), best, color=colour(m), lw=2 if m == "dp-ngd" else 1.2,
                    marker=METHODS[m].marker, ms=4)
            plots.keep(ax, label(m), range(1, len(best) + 1), best)
            shown += best
        settle(ax, shown, 0.1, room=2)
        ax.set_title(title(here, data, epsilon), loc="left")
        ax.xaxis.get_major_locator().set_params(integer=True)
    for i, ax in enumerate(axes):
        if i >= len(cells):
            ax.set_axis_off()
        elif i + columns >= len(cells):
            ax.set_xlabel("trials k")
    for row in range(rows):
        axes[row * columns].set_ylabel("validation accuracy, %")
    plots.headline(figure, head, runs.methods())
    lost = f" {missing(runs).capitalize()}." if runs.missing else ""
    plots.note(figure, "Mean of the best of k trials drawn from a method's own, in closed form; one seed per trial, a "
                       f"validation part of the private set, the first round of the search.{lost}")
    return figure


# ---- The audit -------------------------------------------------------------------------------------------------------

def canary(stored: dict) -> Figure:
    """Scores of a release with a canary and without it, per method, beside what sigma allows and what fails the audit
    (results/audit.json)."""
    with matplotlib.rc_context(plots.style()):
        figure = draw_canary(stored["canary"], stored["level"], {name: m.label for name, m in METHODS.items()})
        top, rows = figure.axes
        for bars in top.containers:
            plots.keep(top, bars.get_label(), [b.get_x() + b.get_width() / 2 for b in bars],
                       [b.get_height() for b in bars])
        beyond = 0
        for name, c in stored["canary"].items():
            (at, half), said = distance(c), label(name) if name in METHODS else name
            ends = ((at - half) / c["claim"], (at + half) / c["claim"])
            plots.keep(rows, "measured", [said], [at / c["claim"]], ends=[ends], horizontal=True)
            plots.keep(rows, "the audit fails beyond", [said], [limit(c, stored["level"]) / c["claim"]],
                       horizontal=True)
            beyond += ends[0] > 1
        plots.note(figure, "Each method makes as many releases of one batch with the canary in it as without, and a "
                           f"score tells them apart as well as can be. Of {len(stored['canary'])} intervals of 95% "
                           f"{beyond} {'lies' if beyond == 1 else 'lie'} wholly beyond 1; by chance a few do. The "
                           "audit fails a row only beyond its tick: a dot there would have its lower limit at level "
                           f"{stored['level']:.0e} above what σ allows.")
        plots.stamp(figure, f"dpngd {stored['version']} audit, commit {stored['commit']}")
        return figure

"""The figures of the notebooks: Runs -> Figure.

A number of the paper is drawn hollow beside ours only where both mean the same: accuracies where the network is the
paper's too, differences between two methods where the data set is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dpngd.clamping import DynamicFloor
from dpngd.data import sets
from dpngd.methods import METHODS
from dpngd.suite import plots, stats
from dpngd.suite.params import published
from dpngd.suite.plots import OKABE_ITO, colour, end_labels, hollow, label, point, settle
from dpngd.suite.rules import Theory, at_half_rate, rivals, round_one, side_by_side
from dpngd.suite.runs import Runs, step_phases
from dpngd.suite.tables import paper_accuracy
from dpngd.suite.tuning import expected_best

if TYPE_CHECKING:
    from dpngd.suite.motivation import Valley

Reference = dict | Callable[[Runs], dict]  # what differences are to: fields of runs, or what finds them in a cell
PHASES = {"gradients": "#0072B2", "whitening": "#D55E00", "mechanism": "#D55E00",
          "curvature": "#E69F00", "rest": "#999999"}
PHASE_NAMES = {"whitening": "norms and maps", "mechanism": "norms, maps, sums, noise"}
AXES = {"T_cur": "T_cur: steps between estimates", "p": "p: exponent", "T1": "T1: warm-up share"}


# ---- What several figures share --------------------------------------------------------------------------------------

def title(runs: Runs, data: str, epsilon: float | None = None) -> str:
    models = ", ".join(runs.where(data=data).values("model"))
    return f"{sets.label(data)} ({models})" + (f", ε = {epsilon:g}" if epsilon else "")


def papers_network(runs: Runs, data: str) -> bool:
    return [published()["utility_table"]["models"].get(data, "").lower()] == runs.where(data=data).values("model")


def interval_note(runs: Runs) -> str:
    counts = sorted({n for n in (len(runs.where(method=m, data=d, epsilon=e).by_seed()) for m in runs.methods()
                                 for d, e in runs.cells()) if n})
    return f"bars: 95% intervals, n = {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "") if counts else \
        "not run"


def legend(figure: Figure, methods: list[str], note: str) -> None:
    handles = [Line2D([], [], color=colour(m), marker=METHODS[m].marker, lw=0, label=label(m)) for m in methods]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(5, len(methods)), fontsize=8,
                  title=note, title_fontsize=7.5, frameon=False)


def curves(runs: Runs, axis: str, xlabel: str, log: bool = False, peak: bool = False) -> Figure:
    """Accuracy against one axis, one panel per cell, each point a full run with its own sigma."""
    cells = runs.cells()
    figure, axes = plots.new(len(cells), width=max(6.2, 5.4 * len(cells)), height=3.5)
    for ax, (data, epsilon) in zip(axes, cells, strict=True):
        here, ends, shown, bars = runs.where(data=data, epsilon=epsilon), [], [], []
        for m in here.methods():
            mine = here.where(method=m)
            xs = [x for x in mine.values(axis) if mine.by_seed(**{axis: x})]
            means = [mine.mean(**{axis: x}) for x in xs]
            if not xs:
                continue
            ax.plot(xs, [e.mean for e in means], color=colour(m), lw=1.5, zorder=2)
            for x, e in zip(xs, means, strict=True):
                point(ax, x, e, m)
            shown += [e.mean for e in means]
            bars += means
            ends.append((xs[-1], means[-1].mean, label(m), colour(m)))
        if log:
            ax.set_xscale("log")
            ax.set_xticks(here.values(axis), [f"{v:g}" for v in here.values(axis)])
            ax.minorticks_off()
        settle(ax, shown, 0.2, room=2, intervals=bars, within=plots.PERCENT)
        if peak:
            _mark_peak(ax, here)
        end_labels(ax, ends)
        ax.set_title(title(here, data, epsilon), loc="left")
        ax.set_xlabel(xlabel)
    axes[0].set_ylabel("test accuracy, %")
    figure.suptitle(interval_note(runs), fontsize=7.5, x=0.99, ha="right")
    return figure


def _mark_peak(ax, runs: Runs) -> None:
    """The baselines' best mean, and where DP-NGD's mean first reaches it."""
    best = runs.best({"method": m, "T": T} for m in runs.baselines() for T in runs.values("T"))
    if best is None:
        return
    level = runs.mean(**best).mean
    reached = [T for T in runs.values("T") if runs.by_seed(method="dp-ngd", T=T)
               and runs.mean(method="dp-ngd", T=T).mean >= level]
    ax.axhline(level, color=colour(best["method"]), lw=0.9, ls=":")
    said = f"best baseline: {label(best['method'])}, {best['T']} steps"
    said += f"; DP-NGD reaches it in {reached[0]}" if reached else "; DP-NGD does not reach it"
    ax.annotate(said, (0.98, 0.03), xycoords="axes fraction", ha="right", fontsize=7.5, color=plots.INK)


def dots(runs: Runs, groups: list[tuple[str, dict]], note: str = "", reference: Reference | None = None,
         paper: str | None = None, above: str = "") -> Figure:
    """Rows of means with intervals, a panel per cell; `reference` draws differences to it instead, `above` names it."""
    cells = runs.cells()
    figure, axes = plots.new(len(cells), width=min(13.0, max(6.0, 4.2 * len(cells))), height=1.2 + 0.42 * len(groups),
                             sharey=True)
    for ax, (data, epsilon) in zip(axes, cells, strict=True):
        here, shown, bars = runs.where(data=data, epsilon=epsilon), [], []
        base = reference(here) if callable(reference) else reference
        for row, (_, fields) in enumerate(groups):
            e = here.lead(fields, base) if base else here.mean(**fields)
            point(ax, row, e, fields["method"], horizontal=True)
            shown.append(e.mean)
            bars.append(e)
            if not e.n and here.diverged(**fields):
                ax.annotate("diverged", (0.02, row), xycoords=("axes fraction", "data"), fontsize=8, va="center")
            theirs = paper and paper_accuracy(paper, fields["method"], data, epsilon)
            zero = paper and base and paper_accuracy(paper, base["method"], data, epsilon)
            if theirs and zero:
                ax.plot([theirs - zero], [row], "o", mfc="white", mec=colour(fields["method"]), zorder=2)
                shown.append(theirs - zero)
        ax.set_yticks(range(len(groups)), [text for text, _ in groups])
        ax.set_ylim(len(groups) - 0.5, -0.5)
        if found := plots.limits(shown, bars, 0.2, 2.0):
            ax.set_xlim(*found)
        if base:
            ax.axvline(0, color=plots.INK, lw=0.8)
        short = f"{sets.label(data)}, ε = {epsilon:g}"
        ax.set_title(title(here, data, epsilon) if len(cells) <= 3 else short, loc="left")
        ax.set_xlabel(f"points above {above or label(base['method'])}" if base else "test accuracy, %")
    figure.suptitle("; ".join(x for x in (interval_note(runs), note) if x), fontsize=7.5, x=0.99, ha="right")
    return figure


# ---- Notebook 00: trajectories (Figure 1), Theorem 1, the KL-DP duality, the clamping schedule -----------------------

def trajectories(valley: Valley) -> Figure:
    """Figure 1: the same number of private steps, at the same privacy, in one narrow valley."""
    figure, axes = plots.new(3, width=10, height=3.6)
    levels = np.geomspace(valley.loss.min() * 1.002, valley.loss.max(), 16)
    for ax, (method, path) in zip(axes, valley.paths.items(), strict=False):
        ax.contour(*valley.axes, valley.loss, levels=levels, colors="#BBBBBB", linewidths=0.7)
        ax.plot(*path.T, color=colour(method), lw=1.4, marker=".", ms=4)
        ax.plot(*path[0], "o", mfc="white", mec=plots.INK)
        ax.plot(*valley.optimum, "*", color=plots.INK, ms=11)
        ax.annotate("start", path[0], xytext=(-4, -12), textcoords="offset points", fontsize=8, ha="right")
        ax.annotate("θ*", valley.optimum, xytext=(6, 5), textcoords="offset points", fontsize=9)
        ax.set_title(f"{label(method)}: {len(path) - 1} steps", color=colour(method), loc="left")
        ax.set_xlabel("θ₁")
    axes[0].set_ylabel("θ₂")
    floor = min(loss.min() for loss in valley.losses.values())
    for method, loss in valley.losses.items():
        axes[2].plot(loss, color=colour(method), lw=1.8)
        axes[2].annotate(label(method), (len(loss) - 1, loss[-1]), xytext=(0, 5), textcoords="offset points",
                         ha="right", color=colour(method), fontsize=8)
    axes[2].set_ylim(bottom=0.93 * floor)
    axes[2].set_title("training loss", loc="left")
    axes[2].set_xlabel("step")
    return figure


def theorem(theory: Theory) -> Figure:
    """Variance along each eigen-direction and the line of Theorem 1; the KL of single steps; steps at lower floors."""
    figure, (left, middle, right) = plots.new(3, width=10, height=3.4)
    left.loglog([x for x, _ in theory.predicted], [y for _, y in theory.predicted], color=plots.INK, lw=1)
    left.loglog([at for _, at, _ in theory.spectrum], [v for _, _, v in theory.spectrum], "o", ms=5,
                color=colour("dp-ngd"))
    left.set_title("noise follows F⁻¹", loc="left")
    left.set_xlabel("eigenvalue of the clamped F")
    left.set_ylabel("variance of the update")
    left.annotate("σ²C²/(B²λ), Theorem 1", (0.04, 0.06), xycoords="axes fraction", fontsize=8)
    for clipped, ink in ((True, colour("dp-ngd")), (False, OKABE_ITO["blue"])):
        rows = [r for r in theory.kl if r["clipped"] is clipped]
        if rows:
            middle.plot([r["quadratic"] / r["bound"] for r in rows], [r["realised"] / r["bound"] for r in rows], "o",
                        ms=4, color=ink, label="clipped" if clipped else "not clipped")
    top = max(1.3, 1.15 * max(r["realised"] / r["bound"] for r in theory.kl))
    middle.plot([0, top], [0, top], color="#999999", lw=0.8)
    middle.axvline(1, color=plots.INK, lw=1)
    middle.annotate("the radius\nη²C²/2", (1, 0), xytext=(3, 4), textcoords="offset points", fontsize=8)
    middle.set_xlim(0, 1.4)
    middle.set_ylim(0, top)
    middle.set_title("one sample's step, in KL", loc="left")
    middle.set_xlabel("½ Δθᵀ F Δθ, in radii")
    middle.set_ylabel("KL of the network's outputs, in radii")
    middle.legend(loc="upper left", fontsize=8, frameon=False)
    rows = sorted({r["share"]: r for r in theory.steps}.values(), key=lambda r: r["share"])
    right.loglog([r["share"] for r in rows], [r["squared"] / r["bound"] for r in rows], "o-", color=colour("dp-ngd"))
    right.axhline(1, color=plots.INK, lw=1)
    right.annotate("DP-SGD's bound", (0.05, 1), xycoords=("axes fraction", "data"), xytext=(0, -10),
                   textcoords="offset points", fontsize=8)
    right.set_title("a lower floor, a longer step", loc="left")
    right.set_xlabel("floor / λ_safe")
    right.set_ylabel("E‖Δθ‖² / bound")
    return figure


def schedule(lambda_safe: float, lambda_base: float, T: int, T1: float = 0.1, p: float = 10.0) -> Figure:
    """The clamping floor over a run."""
    figure, (ax,) = plots.new(width=5.2, height=2.8)
    floor = DynamicFloor(lambda_safe, lambda_base, T, T1, p)
    t = np.linspace(0, T, 400)
    ax.plot(t, [floor(x) for x in t], color=colour("dp-ngd"), lw=2)
    for value, name in ((lambda_safe, "λ_safe"), (lambda_base, "λ_base")):
        ax.axhline(value, color="#999999", lw=0.8, ls=":")
        ax.annotate(f"{name} = {value:g}", (0.5 * T, value), xytext=(0, 3), textcoords="offset points", fontsize=8,
                    ha="center")
    ax.set_ylim(0, 1.2 * lambda_safe)
    ax.set_title(f"floor λ_t: T = {T}, T1 = {T1:g}, p = {p:g}", loc="left")
    ax.set_xlabel("step t")
    return figure


# ---- Notebook 01: accuracy (Table 2), and other networks -------------------------------------------------------------

def utility(runs: Runs) -> Figure:
    """Table 2: accuracies above, the lead over DP-SGD below."""
    datasets = runs.values("data")
    figure, axes = plots.new(len(datasets), 2, width=max(5.5, 3.4 * len(datasets)), height=5.4, sharex="col")
    for j, data in enumerate(datasets):
        top, bottom = axes[j], axes[len(datasets) + j]
        here = runs.where(data=data)
        epsilons, methods = here.values("epsilon"), here.methods()
        shift = {m: 0.13 * (i - (len(methods) - 1) / 2) for i, m in enumerate(methods)}
        shown, leads, bars, lead_bars = [], [], [], []
        for m in methods:
            for i, epsilon in enumerate(epsilons):
                cell = here.where(epsilon=epsilon)
                e = cell.mean(method=m)
                point(top, i + shift[m], e, m)
                shown.append(e.mean)
                bars.append(e)
                lead = cell.lead({"method": m}, {"method": "dp-sgd"})
                point(bottom, i + shift[m], lead, m)
                leads.append(lead.mean)
                lead_bars.append(lead)
                paper, base = (paper_accuracy("utility_table", x, data, epsilon) for x in (m, "dp-sgd"))
                if paper is not None:
                    hollow(bottom, i + shift[m], paper - base, m)
                    leads.append(paper - base)
                    if papers_network(here, data):
                        hollow(top, i + shift[m], paper, m)
                        shown.append(paper)
        settle(top, shown, 0.25, intervals=bars, within=plots.PERCENT)
        settle(bottom, leads, 0.25, room=2, intervals=lead_bars)
        bottom.axhline(0, color=plots.INK, lw=0.8)
        top.set_title(title(here, data), loc="left")
        bottom.set_xticks(range(len(epsilons)), [f"ε = {e:g}" for e in epsilons])
    axes[0].set_ylabel("test accuracy, %")
    axes[len(datasets)].set_ylabel("points above DP-SGD")
    comparable = set(datasets) & set(published()["utility_table"]["mean"])
    legend(figure, runs.methods(), interval_note(runs) + ("; hollow: the paper" if comparable else ""))
    return figure


def networks(runs: Runs) -> Figure:
    """Each method on each network, with each number of views K, at each rate that was run there."""
    rows = dict.fromkeys((c.model, c.K, c.method, c.eta) for c in runs.configs)
    return dots(runs, [(f"{model}, K = {K}: {label(m)}, η = {eta:g}", {"model": model, "K": K, "method": m, "eta": eta})
                       for model, K, m, eta in sorted(rows, key=lambda r: (r[0], r[1], r[2] == "dp-ngd", r[3]))])


# ---- Notebook 03: public images (Figure 3 is `curves`, as is Figure 2 of notebook 02) --------------------------------

def sources(runs: Runs) -> Figure:
    """Each method with each public set, in points above DP-SGD."""
    groups = [(f"{label(m)}, {source}", {"method": m, "public": source})
              for source in runs.values("public") for m in runs.methods() if m != "dp-sgd"]
    return dots(runs, groups, reference={"method": "dp-sgd"})


def pretraining(runs: Runs) -> Figure:
    """DP-SGD-PT by public images and pre-training steps."""
    shapes = dict.fromkeys((c.method, c.public_size, c.pt_steps) for c in runs.configs)
    return dots(runs, [(f"{size:,} images, {steps:,} steps", {"method": m, "public_size": size, "pt_steps": steps})
                       for m, size, steps in sorted(shapes)])


# ---- Notebook 04: ablations (Tables 3 and 4, Figure 4) ---------------------------------------------------------------

def arms(runs: Runs, artifact: str) -> Figure:
    """An ablation: every arm in points above DP-NGD, the paper's hollow."""
    groups = [(label(m), {"method": m}) for m in runs.methods() if m != "dp-ngd"]
    beside = published().get(artifact, {}).get("data") in runs.values("data")
    note = "hollow: the paper" if beside else ""
    return dots(runs, groups, reference={"method": "dp-ngd"}, paper=artifact, note=note)


def arms_at_half_rate(runs: Runs) -> Figure:
    """What has a rate of its own, in points above DP-NGD at half of what was chosen for it."""
    shared = {(c.data, c.epsilon) for c in runs.configs if c.method in rivals()}
    here = Runs([c for c in runs.configs if (c.data, c.epsilon) in shared], runs.found)
    groups = [(label(m), {"method": m}) for m in here.methods() if m in rivals()]
    return dots(here, groups, reference=at_half_rate, above="DP-NGD at half its rate")


def releases(runs: Runs) -> Figure:
    """Private curvature by how often it is released, in points above DP-SGD-PT."""
    groups = {}
    for c in runs.configs:
        if c.T_cur is not None:
            count = math.ceil(c.T / c.T_cur)
            groups[f"{label(c.method)}, {count} release{'s' if count > 1 else ''}"] = {"method": c.method,
                                                                                       "T_cur": c.T_cur}
    return dots(runs, list(groups.items()), reference={"method": "dp-sgd-pt"})


def floors(runs: Runs) -> Figure:
    """Figure 4: training loss under three floors; beside it the floor and the share of eigenvalues that lie on it."""
    figure, (left, middle, right) = plots.new(3, width=10, height=3.3)
    ends, top = [], []
    for m in runs.methods():
        records = runs.where(method=m).records
        if not records:
            continue
        name = "dynamic floor" if m == "dp-ngd" else label(m)
        losses = _rows([[*enumerate(r["train_loss"], 1)] for r in records])
        for row in losses[1]:
            left.plot(losses[0], row, color=colour(m), lw=0.5, alpha=0.6)
        mean = np.nanmean(losses[1], 0)
        left.plot(losses[0], mean, color=colour(m), lw=1.8)
        if np.nanmax(losses[1]) < 10 * np.nanmax(losses[1][:, 0]):
            ends.append((losses[0][-1], mean[-1], name, colour(m)))
            top.append(np.nanmax(losses[1]))
        else:
            left.annotate(f"{name}: up to {np.nanmax(losses[1]):.0e}", (0.98, 0.93), xycoords="axes fraction",
                          ha="right", color=colour(m), fontsize=8)
        for ax, key, scale in ((middle, "lambda_t", 1.0), (right, "clamped_share", 100.0)):
            if m == "dp-ngd-no-floor":
                break  # it has none
            steps, values = _rows([[(a["step"], a.get(key)) for a in r["diagnostics"].get("along", [])]
                                   for r in records])
            if len(steps) and not np.isnan(values).all():
                ax.plot(steps, scale * np.nanmean(values, 0), color=colour(m), lw=1.8, marker=".")
                ax.annotate(name, (steps[len(steps) // 2], scale * np.nanmean(values, 0)[len(steps) // 2]),
                            xytext=(0, 5), textcoords="offset points", color=colour(m), fontsize=8, ha="center")
    if top:
        left.set_ylim(0, 1.25 * max(top))
    for ax, text in ((left, "training loss"), (middle, "floor λ_t"), (right, "eigenvalues on the floor, %")):
        ax.set_title(text, loc="left")
        ax.set_xlabel("step")
    middle.set_ylim(bottom=0)
    middle.margins(y=0.2)
    right.margins(y=0.2)
    end_labels(left, ends)
    figure.suptitle(f"thick: mean of the seeds; thin: each of {len(runs.values('seed'))}", fontsize=7.5, x=0.99,
                    ha="right")
    return figure


def _rows(series: list[list[tuple[int, float | None]]]) -> tuple[list[int], np.ndarray]:
    """Several runs on one axis of steps: (runs, steps), nan where a run has no value (it may have ended early)."""
    steps = sorted({step for run in series for step, _ in run})
    table = np.full((len(series), len(steps)), np.nan)
    for row, run in zip(table, series, strict=True):
        for step, value in run:
            row[steps.index(step)] = np.nan if value is None else value
    return steps, table


# ---- Notebook 05: the cost of a step (Table 5) -----------------------------------------------------------------------

def overhead(runs: Runs) -> Figure:
    """Seconds per step by phase; beside it the paper's, on its own scale."""
    cells = runs.cells()
    figure, axes = plots.new(len(cells) + 1, width=4.2 * (len(cells) + 1), height=2.6)
    used = set()
    for ax, (data, epsilon) in zip(axes, cells, strict=False):
        here = runs.where(data=data, epsilon=epsilon)
        for row, m in enumerate(here.methods()):
            phases = [step_phases(r) for r in side_by_side(here).where(method=m).records]
            start = 0.0
            for phase, ink in PHASES.items():
                value = 1e3 * float(np.mean([p.get(phase, 0.0) for p in phases])) if phases else 0.0
                ax.barh(row, value, left=start, color=ink, height=0.6)
                start += value
                used |= {phase} if value else set()
            ax.annotate(f"{start:.0f} ms", (start, row), xytext=(4, 0), textcoords="offset points", va="center",
                        fontsize=8)
        ax.set_yticks(range(len(here.methods())), [label(m) for m in here.methods()])
        ax.set_title(f"ours, a CPU core: {title(here, data)}", fontsize=9, loc="left")
        ax.set_xlabel("milliseconds per step")
        ax.margins(x=0.2)
    rows = [r for r in published()["overhead"]["rows"] if r[0] == "cifar10"]
    for row, (_, _, m, step, *_) in enumerate(rows):
        axes[-1].barh(row, step, height=0.6, facecolor="none", edgecolor=colour(m), lw=1.4)
        axes[-1].annotate(f"{step:g} s", (step, row), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=8)
    axes[-1].set_yticks(range(len(rows)), [label(r[2]) for r in rows])
    axes[-1].set_title(f"the paper, RTX 3090: {sets.label('cifar10')} (WRN-16-4)", fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds per step")
    axes[-1].margins(x=0.2)
    figure.legend(handles=[Patch(color=PHASES[p], label=PHASE_NAMES.get(p, p)) for p in PHASES if p in used],
                  loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


# ---- Notebook 06: robustness (Table 6), rates, the grid search -------------------------------------------------------

def robustness(runs: Runs, axes_of: dict[str, Runs]) -> Figure:
    """Table 6: the change from the default value, ours filled and the paper's hollow."""
    figure, axes = plots.new(len(axes_of), width=9.5, height=3.2, sharey=True)
    shown, bars = [0.0], []
    for ax, (axis, here) in zip(axes, axes_of.items(), strict=True):
        default, paper = runs.default(axis), published()["robustness"]["axes"][axis]
        values = sorted({*here.values(axis), *paper["values"]})
        for i, v in enumerate(values):
            if v == default:
                ax.plot([i - 0.12], [0], METHODS["dp-ngd"].marker, color=colour("dp-ngd"), ms=5.5)
            else:
                e = here.lead({axis: v}, {axis: default}) if v in here.values(axis) else stats.NOTHING
                point(ax, i - 0.12, e, "dp-ngd")
                shown.append(e.mean)
                bars.append(e)
            if v in paper["values"]:
                change = paper["mean"][paper["values"].index(v)] - paper["mean"][paper["values"].index(default)]
                hollow(ax, i + 0.12, change, "dp-ngd")
                shown.append(change)
        ax.axhline(0, color=plots.INK, lw=0.8)
        ax.axhspan(-1, 1, color=plots.FAINT, alpha=0.4, lw=0)
        ax.set_xticks(range(len(values)), [f"{v:g}" + ("\ndefault" if v == default else "") for v in values])
        ax.set_xlim(-0.5, len(values) - 0.5)
        ax.set_title(AXES[axis], loc="left")
    settle(axes[0], shown, 0.3, room=3, intervals=bars)
    axes[0].set_ylabel("points above the default")
    figure.suptitle(f"{interval_note(runs)}; hollow: the paper, UTKFace; grey: ±1 point", fontsize=7.5, x=0.99,
                    ha="right")
    return figure


def rates(runs: Runs) -> Figure:
    """Each method at half and at the whole of its tuned rate."""
    groups = [(f"{label(m)}, η = {eta:g}", {"method": m, "eta": eta})
              for m in runs.methods() for eta in runs.where(method=m).values("eta")]
    return dots(runs, groups)


def trials(runs: Runs) -> Figure:
    """What a search of k trials is worth: the expected best validation accuracy of k of a method's trials."""
    runs = round_one(runs)
    cells = runs.cells()
    figure, axes = plots.new(len(cells), width=max(6.2, 3.7 * len(cells)), height=3.3)
    for ax, (data, epsilon) in zip(axes, cells, strict=True):
        here, ends, shown = runs.where(data=data, epsilon=epsilon), [], []
        for m in here.methods():
            found = here.accuracies(method=m)
            if METHODS[m].arm_of or not found:
                continue
            best = [expected_best(found, k) for k in range(1, len(found) + 1)]
            ax.plot(range(1, len(best) + 1), best, color=colour(m), lw=1.6, marker=METHODS[m].marker, ms=3.5)
            ends.append((len(best), best[-1], label(m), colour(m)))
            shown += best
        settle(ax, shown, 0.08, room=2)
        end_labels(ax, ends)
        ax.set_title(title(here, data, epsilon), loc="left")
        ax.set_xlabel("trials")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("expected best validation accuracy, %")
    return figure

"""The figures of notebooks 01 to 06: Runs -> Figure.

A number of the paper stands hollow beside ours only where both mean the same: accuracies where the network is the
paper's too, differences between two methods where the data set is.
"""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from dpngd import plots, stats
from dpngd.params import published
from dpngd.plots import colour, end_labels, hollow, label, point, settle
from dpngd.runs import Runs, step_phases
from dpngd.tables import paper_accuracy

P = published()
SHORT = {"cifar10": "CIFAR-10", "svhn": "SVHN", "utkface": "UTKFace", "digits": "digits"}
PHASES = {"gradients": "#0072B2", "whitening": "#D55E00", "curvature": "#E69F00", "rest": "#999999"}


def title(runs: Runs, data: str, epsilon: float | None = None) -> str:
    models = ", ".join(runs.where(data=data).values("model"))
    return f"{SHORT.get(data, data)} ({models})" + (f", ε = {epsilon:g}" if epsilon else "")


def papers_network(runs: Runs, data: str) -> bool:
    return [P["utility_table"]["models"].get(data, "").lower()] == runs.where(data=data).values("model")


def seeds(runs: Runs) -> str:
    counts = sorted({n for n in (len(runs.where(method=m, data=d, epsilon=e).by_seed()) for m in runs.methods()
                                 for d, e in runs.cells()) if n})
    return f"bars: 95% intervals, n = {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "") if counts else \
        "not run"


def utility(runs: Runs) -> Figure:
    """Table 2: accuracies above, the lead over DP-SGD below."""
    datasets = runs.values("data")
    figure, axes = plots.new(len(datasets), 2, width=max(5.5, 3.4 * len(datasets)), height=5.4, sharex="col")
    for j, data in enumerate(datasets):
        top, bottom = axes[j], axes[len(datasets) + j]
        here = runs.where(data=data)
        epsilons, methods = here.values("epsilon"), here.methods()
        shift = {m: 0.13 * (i - (len(methods) - 1) / 2) for i, m in enumerate(methods)}
        shown, leads = [], []
        for m in methods:
            for i, epsilon in enumerate(epsilons):
                cell = here.where(epsilon=epsilon)
                e = cell.mean(method=m)
                point(top, i + shift[m], e, m)
                shown.append(e.mean)
                lead = cell.lead({"method": m}, {"method": "dp-sgd"})
                point(bottom, i + shift[m], lead, m)
                leads.append(lead.mean)
                paper, base = (paper_accuracy("utility_table", x, data, epsilon) for x in (m, "dp-sgd"))
                if paper is not None:
                    hollow(bottom, i + shift[m], paper - base, m)
                    leads.append(paper - base)
                    if papers_network(here, data):
                        hollow(top, i + shift[m], paper, m)
                        shown.append(paper)
        settle(top, shown, 0.25)
        settle(bottom, leads, 0.25, room=2)
        bottom.axhline(0, color=plots.INK, lw=0.8)
        top.set_title(title(here, data))
        bottom.set_xticks(range(len(epsilons)), [f"ε = {e:g}" for e in epsilons])
    axes[0].set_ylabel("test accuracy, %")
    axes[len(datasets)].set_ylabel("points above DP-SGD")
    legend(figure, runs.methods(), seeds(runs) + "; hollow: the paper")
    return figure


def legend(figure: Figure, methods: list[str], note: str) -> None:
    handles = [plots.matplotlib.lines.Line2D([], [], color=colour(m), marker=plots.MARKERS.get(m, "o"), lw=0,
                                             label=label(m)) for m in methods]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(5, len(methods)), fontsize=8,
                  title=note, title_fontsize=7.5)


def curves(runs: Runs, axis: str, xlabel: str, log: bool = False, peak: bool = False) -> Figure:
    """Accuracy against one axis, one panel a cell, each point a full run with its own sigma."""
    cells = runs.cells()
    figure, axes = plots.new(len(cells), width=max(6.2, 5.4 * len(cells)), height=3.5)
    for ax, (data, epsilon) in zip(axes, cells, strict=True):
        here, ends, shown = runs.where(data=data, epsilon=epsilon), [], []
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
            ends.append((xs[-1], means[-1].mean, label(m), colour(m)))
        if log:
            ax.set_xscale("log")
            ax.set_xticks(here.values(axis), [f"{v:g}" for v in here.values(axis)])
            ax.minorticks_off()
        settle(ax, shown, 0.2, room=2)
        if peak:
            _mark_peak(ax, here)
        end_labels(ax, ends)
        ax.set_title(title(here, data, epsilon))
        ax.set_xlabel(xlabel)
    axes[0].set_ylabel("test accuracy, %")
    figure.suptitle(seeds(runs), fontsize=7.5, x=0.99, ha="right")
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
    ax.annotate(said, (0.02, level), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
                fontsize=7, color=plots.INK)


def dots(runs: Runs, groups: list[tuple[str, dict]], note: str = "", reference: dict | None = None,
         paper: str | None = None) -> Figure:
    """Rows of means with intervals, a panel a cell; `reference` draws differences to it instead."""
    cells = runs.cells()
    figure, axes = plots.new(len(cells), width=max(6.0, 4.2 * len(cells)), height=1.2 + 0.42 * len(groups),
                             sharey=True)
    for ax, (data, epsilon) in zip(axes, cells, strict=True):
        here, shown = runs.where(data=data, epsilon=epsilon), []
        for row, (_, fields) in enumerate(groups):
            e = here.lead(fields, reference) if reference else here.mean(**fields)
            point(ax, row, e, fields["method"], horizontal=True)
            shown.append(e.mean)
            if not e.n and here.diverged(**fields):
                ax.annotate("diverged", (0.02, row), xycoords=("axes fraction", "data"), fontsize=8, va="center")
            theirs = paper and paper_accuracy(paper, fields["method"], data, epsilon)
            base = paper and reference and paper_accuracy(paper, reference["method"], data, epsilon)
            if theirs and base:
                ax.plot([theirs - base], [row], "o", mfc="white", mec=colour(fields["method"]), zorder=2)
                shown.append(theirs - base)
        ax.set_yticks(range(len(groups)), [name for name, _ in groups])
        ax.set_ylim(len(groups) - 0.5, -0.5)
        finite = [v for v in shown if math.isfinite(v)]
        if finite:
            span = max(max(finite) - min(finite), 2.0)
            ax.set_xlim(min(finite) - 0.2 * span, max(finite) + 0.2 * span)
        if reference:
            ax.axvline(0, color=plots.INK, lw=0.8)
        ax.set_title(title(here, data, epsilon))
        ax.set_xlabel(f"points above {label(reference['method'])}" if reference else "test accuracy, %")
    figure.suptitle("; ".join(x for x in (seeds(runs), note) if x), fontsize=7.5, x=0.99, ha="right")
    return figure


def sources(runs: Runs) -> Figure:
    """Each method with each public set, in points above DP-SGD."""
    groups = [(f"{label(m)}, {source}", {"method": m, "public": source})
              for source in runs.values("public") for m in runs.methods() if m != "dp-sgd"]
    return dots(runs, groups, reference={"method": "dp-sgd"})


def arms(runs: Runs, artifact: str) -> Figure:
    """An ablation: every arm in points above DP-NGD, the paper's hollow."""
    groups = [(label(m), {"method": m}) for m in runs.methods() if m != "dp-ngd"]
    return dots(runs, groups, reference={"method": "dp-ngd"}, paper=artifact,
                note="hollow: the paper" if artifact in P and P[artifact]["data"] in runs.values("data") else "")


def floors(runs: Runs) -> Figure:
    """Figure 4: training loss under three floors; beside it the floor and the share of eigenvalues that lie on it."""
    figure, (left, middle, right) = plots.new(3, width=10, height=3.3)
    ends = {left: [], right: []}
    for m in runs.methods():
        records = runs.where(method=m).records
        for ax, series in ((left, [r["train_loss"] for r in records]),
                           (middle, [r["diagnostics"].get("lambda_t", []) for r in records]),
                           (right, [[100 * v for v in r["diagnostics"].get("clamped_share", [])] for r in records])):
            if not any(series):
                continue
            length = max(map(len, series))
            table = np.full((len(series), length), np.nan)
            for row, values in zip(table, series, strict=True):
                row[:len(values)] = [np.nan if v is None else v for v in values]
            mean = np.nanmean(table, 0)
            for row in table:
                ax.plot(range(1, length + 1), row, color=colour(m), lw=0.5, alpha=0.5)
            ax.plot(range(1, length + 1), mean, color=colour(m), lw=1.8)
            if ax in ends:
                ends[ax].append((length, mean[-1], "dynamic" if m == "dp-ngd" else label(m), colour(m)))
    for ax, name in ((left, "training loss"), (middle, "floor λ_t"), (right, "eigenvalues on the floor, %")):
        ax.set_title(name)
        ax.set_xlabel("step")
    left.set_yscale("log")
    middle.set_yscale("log")
    for ax, labels in ends.items():
        _log_safe_labels(ax, labels)
    figure.suptitle(f"thick: mean of the seeds; thin: each of {len(runs.values('seed'))}", fontsize=7.5, x=0.99,
                    ha="right")
    return figure


def _log_safe_labels(ax, ends: list) -> None:
    if ax.get_yscale() == "log":
        for x, y, text, ink in ends:
            ax.annotate(text, (x, y), xytext=(-4, 7), textcoords="offset points", ha="right", color=ink, fontsize=8)
    else:
        end_labels(ax, ends)


def overhead(runs: Runs) -> Figure:
    """Seconds a step by phase; beside it the paper's, on its own scale."""
    cells = runs.cells()
    figure, axes = plots.new(len(cells) + 1, width=4.2 * (len(cells) + 1), height=2.6)
    used = set()
    for ax, (data, epsilon) in zip(axes, cells, strict=False):
        here = runs.where(data=data, epsilon=epsilon)
        for row, m in enumerate(here.methods()):
            phases = [step_phases(r) for r in here.where(method=m).records]
            start = 0.0
            for phase, ink in PHASES.items():
                value = 1e3 * float(np.mean([p.get(phase, 0.0) for p in phases])) if phases else 0.0
                ax.barh(row, value, left=start, color=ink, height=0.6)
                start += value
                used.add(phase)
            ax.annotate(f"{start:.0f} ms", (start, row), xytext=(4, 0), textcoords="offset points", va="center",
                        fontsize=8)
        ax.set_yticks(range(len(here.methods())), [label(m) for m in here.methods()])
        ax.set_title(f"ours, a CPU core: {title(here, data)}", fontsize=9)
        ax.set_xlabel("milliseconds a step")
        ax.margins(x=0.2)
    rows = [r for r in P["overhead"]["rows"] if r[0] == "cifar10"]
    for row, (_, _, m, step, *_) in enumerate(rows):
        axes[-1].barh(row, step, height=0.6, facecolor="none", edgecolor=colour(m), lw=1.4)
        axes[-1].annotate(f"{step:g} s", (step, row), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=8)
    axes[-1].set_yticks(range(len(rows)), [label(r[2]) for r in rows])
    axes[-1].set_title(f"the paper, RTX 3090: {SHORT['cifar10']} (WRN-16-4)", fontsize=9)
    axes[-1].set_xlabel("seconds a step")
    axes[-1].margins(x=0.2)
    figure.legend(handles=[plots.matplotlib.patches.Patch(color=PHASES[p], label=p) for p in PHASES if p in used],
                  loc="outside upper center", ncols=4, fontsize=8)
    return figure


def robustness(runs: Runs, axes_of: dict[str, Runs]) -> Figure:
    """Table 6: the change from the default value, ours filled and the paper's hollow."""
    figure, axes = plots.new(len(axes_of), width=9.5, height=3.2, sharey=True)
    shown = [0.0]
    for ax, (axis, here) in zip(axes, axes_of.items(), strict=True):
        default, paper = runs.default(axis), P["robustness"]["axes"][axis]
        values = sorted({*here.values(axis), *paper["values"]})
        for i, v in enumerate(values):
            if v == default:
                ax.plot([i - 0.12], [0], plots.MARKERS["dp-ngd"], color=colour("dp-ngd"), ms=5.5)
            else:
                e = here.lead({axis: v}, {axis: default}) if v in here.values(axis) else stats.NOTHING
                point(ax, i - 0.12, e, "dp-ngd")
                shown.append(e.mean)
            if v in paper["values"]:
                change = paper["mean"][paper["values"].index(v)] - paper["mean"][paper["values"].index(default)]
                hollow(ax, i + 0.12, change, "dp-ngd")
                shown.append(change)
        ax.axhline(0, color=plots.INK, lw=0.8)
        ax.axhspan(-1, 1, color=plots.FAINT, alpha=0.4, lw=0)
        ax.set_xticks(range(len(values)), [f"{v:g}" + ("\ndefault" if v == default else "") for v in values])
        ax.set_xlim(-0.5, len(values) - 0.5)
        ax.set_title({"T_cur": "T_cur: steps between estimates", "p": "p: exponent", "T1": "T1: warm-up share"}[axis])
    settle(axes[0], shown, 0.3, room=3)
    axes[0].set_ylabel("points above the default")
    figure.suptitle(f"{seeds(runs)}; hollow: the paper, UTKFace; grey: ±1 point", fontsize=7.5, x=0.99, ha="right")
    return figure

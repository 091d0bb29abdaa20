"""The figures of notebooks 01 to 06: Runs -> Figure.

A number of the paper stands hollow beside ours only where both mean the same: accuracies where the network is the
paper's too, differences between two methods where the data set is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpngd import plots
from dpngd.params import published
from dpngd.plots import colour, end_labels, hollow, label, point, settle
from dpngd.rules_ours import RIVALS, at_half_rate
from dpngd.runs import Runs
from dpngd.tables import paper_accuracy

P = published()
Reference = dict | Callable[[Runs], dict]  # what differences are to: fields of runs, or what finds them in a cell
SHORT = {"cifar10": "CIFAR-10", "svhn": "SVHN", "utkface": "UTKFace", "digits": "digits"}


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
    comparable = set(datasets) & set(P["utility_table"]["mean"])
    legend(figure, runs.methods(), seeds(runs) + ("; hollow: the paper" if comparable else ""))
    return figure


def legend(figure: Figure, methods: list[str], note: str) -> None:
    handles = [Line2D([], [], color=colour(m), marker=plots.MARKERS.get(m, "o"), lw=0,
                                             label=label(m)) for m in methods]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(5, len(methods)), fontsize=8,
                  title=note, title_fontsize=7.5, frameon=False)


def curves(runs: Runs, axis: str, xlabel: str, log: bool = False, peak: bool = False) -> Figure:
    """Accuracy against one axis, one panel a cell, each point a full run with its own sigma."""
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
    ax.annotate(said, (0.98, 0.03), xycoords="axes fraction", ha="right", fontsize=7.5, color=plots.INK)


def dots(runs: Runs, groups: list[tuple[str, dict]], note: str = "", reference: Reference | None = None,
         paper: str | None = None, above: str = "") -> Figure:
    """Rows of means with intervals, a panel a cell; `reference` draws differences to it instead, `above` names it."""
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
        short = f"{SHORT.get(data, data)}, ε = {epsilon:g}"
        ax.set_title(title(here, data, epsilon) if len(cells) <= 3 else short, loc="left")
        ax.set_xlabel(f"points above {above or label(base['method'])}" if base else "test accuracy, %")
    figure.suptitle("; ".join(x for x in (seeds(runs), note) if x), fontsize=7.5, x=0.99, ha="right")
    return figure


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


def networks(runs: Runs) -> Figure:
    """Each method on each network, with each number of views K, at each rate that was run there."""
    rows = dict.fromkeys((c.model, c.K, c.method, c.eta) for c in runs.configs)
    return dots(runs, [(f"{model}, K = {K}: {label(m)}, η = {eta:g}", {"model": model, "K": K, "method": m, "eta": eta})
                       for model, K, m, eta in sorted(rows, key=lambda r: (r[0], r[1], r[2] == "dp-ngd", r[3]))])


def rates(runs: Runs) -> Figure:
    """Each method at half and at the whole of its tuned rate."""
    groups = [(f"{label(m)}, η = {eta:g}", {"method": m, "eta": eta})
              for m in runs.methods() for eta in runs.where(method=m).values("eta")]
    return dots(runs, groups)


def arms(runs: Runs, artifact: str) -> Figure:
    """An ablation: every arm in points above DP-NGD, the paper's hollow."""
    groups = [(label(m), {"method": m}) for m in runs.methods() if m != "dp-ngd"]
    return dots(runs, groups, reference={"method": "dp-ngd"}, paper=artifact,
                note="hollow: the paper" if artifact in P and P[artifact]["data"] in runs.values("data") else "")


def releases(runs: Runs) -> Figure:
    """Private curvature by how often it is released, in points above DP-SGD-PT."""
    groups = {}
    for c in runs.configs:
        if c.T_cur is not None:
            count = math.ceil(c.T / c.T_cur)
            groups[f"{label(c.method)}, {count} release{'s' if count > 1 else ''}"] = {"method": c.method,
                                                                                       "T_cur": c.T_cur}
    return dots(runs, list(groups.items()), reference={"method": "dp-sgd-pt"})


def arms_at_half_rate(runs: Runs) -> Figure:
    """What has a rate of its own, in points above DP-NGD at half of what was chosen for it."""
    shared = {(c.data, c.epsilon) for c in runs.configs if c.method in RIVALS}
    here = Runs([c for c in runs.configs if (c.data, c.epsilon) in shared], runs.found)
    groups = [(label(m), {"method": m}) for m in here.methods() if m in RIVALS]
    return dots(here, groups, reference=at_half_rate, above="DP-NGD at half its rate")

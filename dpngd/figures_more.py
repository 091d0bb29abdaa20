"""More figures of the results: the clamping floor (Figure 4), the cost of a step (Table 5), robustness (Table 6)."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpngd import plots, stats
from dpngd.config import METHODS
from dpngd.figures import SHORT, seeds, title
from dpngd.params import published
from dpngd.plots import colour, end_labels, hollow, label, point, settle
from dpngd.rules_ours import round_one
from dpngd.rules_time import side_by_side
from dpngd.runs import Runs, step_phases
from dpngd.tuning import expected_best

P = published()
PHASES = {"gradients": "#0072B2", "whitening": "#D55E00", "curvature": "#E69F00", "rest": "#999999"}
AXES = {"T_cur": "T_cur: steps between estimates", "p": "p: exponent", "T1": "T1: warm-up share"}
PHASE_NAMES = {"whitening": "norms and maps"}


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


def overhead(runs: Runs) -> Figure:
    """Seconds a step by phase; beside it the paper's, on its own scale."""
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
                used.add(phase)
            ax.annotate(f"{start:.0f} ms", (start, row), xytext=(4, 0), textcoords="offset points", va="center",
                        fontsize=8)
        ax.set_yticks(range(len(here.methods())), [label(m) for m in here.methods()])
        ax.set_title(f"ours, a CPU core: {title(here, data)}", fontsize=9, loc="left")
        ax.set_xlabel("milliseconds a step")
        ax.margins(x=0.2)
    rows = [r for r in P["overhead"]["rows"] if r[0] == "cifar10"]
    for row, (_, _, m, step, *_) in enumerate(rows):
        axes[-1].barh(row, step, height=0.6, facecolor="none", edgecolor=colour(m), lw=1.4)
        axes[-1].annotate(f"{step:g} s", (step, row), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=8)
    axes[-1].set_yticks(range(len(rows)), [label(r[2]) for r in rows])
    axes[-1].set_title(f"the paper, RTX 3090: {SHORT['cifar10']} (WRN-16-4)", fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds a step")
    axes[-1].margins(x=0.2)
    figure.legend(handles=[Patch(color=PHASES[p], label=PHASE_NAMES.get(p, p)) for p in PHASES if p in used],
                  loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def robustness(runs: Runs, axes_of: dict[str, Runs]) -> Figure:
    """Table 6: the change from the default value, ours filled and the paper's hollow."""
    figure, axes = plots.new(len(axes_of), width=9.5, height=3.2, sharey=True)
    shown, bars = [0.0], []
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
    figure.suptitle(f"{seeds(runs)}; hollow: the paper, UTKFace; grey: ±1 point", fontsize=7.5, x=0.99, ha="right")
    return figure


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
            ax.plot(range(1, len(best) + 1), best, color=colour(m), lw=1.6, marker=plots.MARKERS.get(m, "o"), ms=3.5)
            ends.append((len(best), best[-1], label(m), colour(m)))
            shown += best
        settle(ax, shown, 0.08, room=2)
        end_labels(ax, ends)
        ax.set_title(title(here, data, epsilon), loc="left")
        ax.set_xlabel("trials")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("expected best validation accuracy, %")
    return figure

"""The canary's figure: the scores of releases with the canary and without it, and how far apart they are for every
subject, beside what sigma allows.

It draws what `Report.to_dict` stores (counts, not scores), so that a stored audit is drawn as a new one is. Needs
matplotlib, and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpngd.audit.statistics import mu_limit
from dpngd.errors import UsageError

BINS = 60
MARGIN = 4.0  # deviations beside the two means


def counts(inside: Sequence[float], outside: Sequence[float], claim: float) -> dict[str, Any]:
    """What is stored of a canary: scores in units of their deviation, counted in BINS bins; `claim` is 1/sigma.

    Scores beyond the bins are counted in the first and the last.
    """
    low, high = -MARGIN, claim + MARGIN

    def count(values: Sequence[float]) -> list[int]:
        found = [0] * BINS
        for v in values:
            found[min(BINS - 1, max(0, math.floor((v - low) / (high - low) * BINS)))] += 1
        return found

    return {"claim": claim, "low": low, "high": high, "in": count(inside), "out": count(outside)}


def distance(c: Mapping[str, Any]) -> tuple[float, float]:
    """How far apart the two means are in units of the deviation that both share, from the counts, and half of its 95%
    interval, which has the errors of the means and of that deviation."""
    width = (c["high"] - c["low"]) / BINS
    means, squares, total = {}, 0.0, 0
    for key in ("in", "out"):
        values = [(c["low"] + (i + 0.5) * width, n) for i, n in enumerate(c[key])]
        count = max(1, sum(c[key]))
        means[key] = sum(n * v for v, n in values) / count
        squares += sum(n * (v - means[key]) ** 2 for v, n in values)
        total += count
    deviation = math.sqrt(squares / total - width**2 / 12) if squares > total * width**2 / 6 else 1.0  # of the bins too
    at = (means["in"] - means["out"]) / deviation
    return at, 1.96 * math.sqrt(4 / total + at**2 / (2 * total))


def limit(c: Mapping[str, Any], level: float) -> float:
    """The distance beyond which the audit fails: there its lower limit at this level is the one that sigma allows."""
    return mu_limit(c["claim"], sum(c["in"]), sum(c["out"]), level)


def draw(canaries: Mapping[str, Mapping[str, Any]], level: float, labels: Mapping[str, str] | None = None) -> Any:
    """A matplotlib figure: above, the scores of one subject with the canary and without it, and two normal curves
    1/sigma apart; below, a row per subject with the distance that was measured over the one that sigma allows, and a
    tick where the audit, whose level is `level`, fails."""
    try:
        from matplotlib.figure import Figure  # late: only the figure needs it
    except ModuleNotFoundError:
        raise UsageError("the figure needs matplotlib: pip install matplotlib") from None
    if not canaries:
        raise UsageError("no canary was scored: audit at least one method, or the Opacus optimizer")
    said = {name: (labels or {}).get(name, name) for name in canaries}
    above, below = 2.0, 0.21 * len(canaries) + 0.5
    figure = Figure(figsize=(7.2, above + below + 1.3), layout="constrained")
    top, rows = figure.subplots(2, 1, height_ratios=(above, below))
    shown = "dp-ngd" if "dp-ngd" in canaries else next(iter(canaries))
    c = canaries[shown]
    width = (c["high"] - c["low"]) / BINS
    middles = [c["low"] + (i + 0.5) * width for i in range(BINS)]
    for key, centre, ink, text in (("out", 0.0, "#999999", "canary not in the batch"),
                                   ("in", c["claim"], "#222222", "canary in the batch")):
        total = max(1, sum(c[key]))
        top.bar(middles, [n / total / width for n in c[key]], width, color=ink, alpha=0.4, label=text)
        top.plot(middles, [math.exp(-((x - centre) ** 2) / 2) / math.sqrt(2 * math.pi) for x in middles], color=ink,
                 lw=1)
    top.set_yticks([])
    top.set_title(f"{said[shown]}: {sum(c['in']):,} + {sum(c['out']):,} releases, σ = {1 / c['claim']:.3f}; curves: "
                  "what σ allows", loc="left", fontsize=9)
    top.set_xlabel("score, in units of its deviation")
    top.legend(loc="upper left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8)
    top.set_ylim(0, 0.62)  # room for the legend above curves that end at 0.4
    for i, found in enumerate(canaries.values()):
        at, half = distance(found)
        rows.errorbar([at / found["claim"]], [i], xerr=[half / found["claim"]], fmt="o", color="#222222", ms=4, lw=1.1,
                      capsize=2)
        rows.plot([limit(found, level) / found["claim"]], [i], "|", color="#222222", ms=11, mew=2)
    rows.axvline(1.0, color="#222222", lw=1, ls=":")
    rows.set_yticks(range(len(canaries)), list(said.values()), fontsize=8)
    rows.set_ylim(len(canaries) - 0.4, -0.6)
    rows.grid(axis="y", visible=False)
    rows.set_title("distance of the two means, with its 95% interval; tick: a dot beyond it fails the audit",
                   loc="left", fontsize=9)
    rows.set_xlabel("measured distance / the largest that σ allows, 1/σ (dotted)")
    for ax in (top, rows):
        ax.spines[["right", "top"]].set_visible(False)
    top.spines["left"].set_visible(False)
    figure.suptitle("Can a release show that one sample was in it?", x=0.008, ha="left", fontsize=10.5,
                    fontweight="bold")
    return figure

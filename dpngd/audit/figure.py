"""The canary's figure: the scores of a release with the canary and without it, beside what sigma allows.

It draws what `Report.to_dict` stores (counts, not scores), so that a stored audit is drawn as a new one is. Needs
matplotlib, and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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


def draw(canaries: Mapping[str, Mapping[str, Any]]) -> Any:
    """A matplotlib figure, a row per subject: scores with the canary and without, two normal curves 1/sigma apart."""
    try:
        from matplotlib.figure import Figure  # late: only the figure needs it
    except ModuleNotFoundError:
        raise UsageError("the figure needs matplotlib: pip install matplotlib") from None
    if not canaries:
        raise UsageError("no canary was scored: audit at least one method, or the Opacus optimizer")
    figure = Figure(figsize=(6, 0.45 * len(canaries) + 1.1), layout="constrained")
    axes = figure.subplots(len(canaries), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, c) in zip(axes, canaries.items(), strict=True):
        width = (c["high"] - c["low"]) / BINS
        middles = [c["low"] + (i + 0.5) * width for i in range(BINS)]
        for key, centre, colour in (("out", 0.0, "#999999"), ("in", c["claim"], "#222222")):
            total = max(1, sum(c[key]))
            ax.bar(middles, [n / total / width for n in c[key]], width, color=colour, alpha=0.4, label=key)
            ax.plot(middles, [math.exp(-((x - centre) ** 2) / 2) / math.sqrt(2 * math.pi) for x in middles],
                    color=colour, lw=1)
        ax.set_yticks([])
        ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        ax.spines[["left", "right", "top"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    axes[-1].set_xlabel("canary's score in units of its deviation; curves: what sigma allows")
    return figure

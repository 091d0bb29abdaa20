"""The figures of notebook 00: trajectories, Theorem 1, the KL-DP duality, the clamping schedule."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from dpngd import plots
from dpngd.clamping import Dynamic
from dpngd.motivation import Valley
from dpngd.plots import OKABE_ITO, colour, label
from dpngd.theory import Theory


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
    floor = Dynamic(lambda_safe, lambda_base, T, T1, p)
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

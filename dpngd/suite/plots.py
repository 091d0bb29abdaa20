"""How every figure looks: one colour per method, error bars with n, the paper's numbers hollow, a stamp.

Colours are Okabe and Ito's, which people with any of the common colour deficiencies can tell apart; markers differ
too, so a grey print still reads.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpngd.methods import METHODS
from dpngd.suite import stats

OKABE_ITO = {"black": "#000000", "orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73", "yellow": "#F0E442",
             "blue": "#0072B2", "vermilion": "#D55E00", "purple": "#CC79A7"}
INK, FAINT, HOLLOW = "#222222", "#D9D9D9", "#666666"
PERCENT = (0.0, 100.0)  # an interval may leave it, an axis of accuracies may not
STYLE = {
    "font.size": 9, "font.family": "DejaVu Sans", "axes.titlesize": 10, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.labelcolor": INK,
    "axes.grid": True, "grid.color": "#EEEEEE", "grid.linewidth": 0.8, "axes.axisbelow": True,
    "figure.facecolor": "white", "figure.dpi": 100, "savefig.dpi": 130, "legend.frameon": False,
    "svg.hashsalt": "dpngd", "svg.fonttype": "none",  # the same data give the same file
}


def colour(method: str) -> str:
    return METHODS[method].colour


def label(method: str) -> str:
    return METHODS[method].label


def new(columns: int = 1, rows: int = 1, *, width: float = 7.2, height: float = 3.4, **kwargs) -> tuple[Figure, list]:
    """A figure that belongs to no window, and its axes as a flat list."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
        for ax in axes.flat:
            ax.tick_params(colors=INK)
        return figure, list(axes.flat)


def bar(e: stats.Estimate) -> np.ndarray | None:
    """The two arms of an error bar; None where one run gives none."""
    return None if not np.isfinite(e.high - e.low) else np.array([[e.mean - e.low], [e.high - e.mean]])


def point(ax: Axes, x: float, e: stats.Estimate, method: str, *, scale: float = 1.0, horizontal: bool = False) -> None:
    """A mean with its 95% interval; nothing where nothing was run."""
    if e.n == 0:
        return
    arms = bar(e)
    arms = None if arms is None else arms * scale
    place = {"x": e.mean * scale, "y": x, "xerr": arms} if horizontal else {"x": x, "y": e.mean * scale, "yerr": arms}
    look = {"fmt": METHODS[method].marker, "color": colour(method), "ms": 5.5, "capsize": 2.5, "lw": 1.2}
    _, caps, bars = ax.errorbar(**place, **look, zorder=3)
    for part in (*caps, *bars):  # two runs have intervals that leave the picture: they must not drown the means
        part.set_alpha(0.45)


def hollow(ax: Axes, x: float, y: float, method: str) -> None:
    """A number of the paper."""
    ax.plot([x], [y], METHODS[method].marker, mfc="white", mec=colour(method), ms=6, mew=1.2, zorder=2, alpha=0.9)


def end_labels(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Direct labels (x, y, text, colour) at the right ends of curves, moved apart so that none hides another."""
    if not ends:
        return
    low, high = ax.get_ylim()
    gap = (high - low) * 0.075
    ends = sorted(ends, key=lambda e: e[1])
    for (x, y, text, ink), at in zip(ends, apart([e[1] for e in ends], gap, high), strict=True):
        ax.annotate(text, (x, y), xytext=(1.02, at), textcoords=("axes fraction", "data"), color=ink, fontsize=8,
                    va="center", annotation_clip=False, arrowprops={"arrowstyle": "-", "color": ink, "lw": 0.4,
                                                                   "shrinkA": 0, "shrinkB": 3})


def apart(heights: list[float], gap: float, top: float) -> list[float]:
    """Heights, given in rising order, moved up until they are `gap` apart, and down again until none is above `top`."""
    placed: list[float] = []
    for y in heights:
        placed.append(max(y, placed[-1] + gap) if placed else y)
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], placed[i + 1] - gap if i + 1 < len(placed) else top)
    return placed


def limits(values: list[float], intervals: list[stats.Estimate], pad: float, room: float) -> tuple[float, float] | None:
    """Limits that show all means and what the intervals add, up to one span more: those of two runs have no end."""
    finite = [v for v in values if np.isfinite(v)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    span = max(high - low, room, 1e-9)
    ends = [v for e in intervals for v in (e.low, e.high) if np.isfinite(v)]
    least, most = min([low, *ends]), max([high, *ends])
    return max(least, low - span) - pad * span / 2, min(most, high + span) + pad * span / 2


def settle(ax: Axes, values: list[float], pad: float = 0.12, room: float = 0.0,
           intervals: list[stats.Estimate] | None = None, within: tuple[float, float] = (-np.inf, np.inf)) -> None:
    """y limits by `limits`, inside `within`; a panel without values says so."""
    found = limits(values, intervals or [], pad, room)
    if found:
        ax.set_ylim(np.clip(found, *within))
    else:
        not_run(ax)


def not_run(ax: Axes) -> None:
    ax.set_yticks([])
    ax.annotate("not run yet", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=HOLLOW)


def stamp(figure: Figure, text: str) -> None:
    figure.text(0.995, 0.004, text, ha="right", va="bottom", fontsize=6, color="#777777")
    figure.get_layout_engine().set(rect=(0, 0.025, 1, 0.975))


def png(figure: Figure) -> bytes:
    return _file(figure, "png", {"Software": None})


def save(figure: Figure, folder: Path, name: str, picture: bytes | None = None) -> None:
    """PNG (`picture`, where it has been drawn already) and SVG, without dates: the same data give the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(picture or png(figure))
    (folder / f"{name}.svg").write_bytes(_file(figure, "svg", {"Date": None, "Creator": None}))


def _file(figure: Figure, kind: str, metadata: dict) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()

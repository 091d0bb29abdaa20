"""How every figure looks: seaborn's white grid, one colour per method, intervals, the paper's numbers hollow, a stamp.

| what | how |
| --- | --- |
| colour and marker | a method, in every figure: METHODS has them (Okabe and Ito's and indigo; arms of DP-NGD: blue) |
| filled | ours, a mean with its 95% interval |
| hollow | the paper's, only beside ours and where both have one scale |
| grey band | differences that count as none (±1 point) |
| ✓ | the claim holds in this cell after Holm's correction; the bars are 95% each |
| arrow with a number | a mean or an interval that ends beyond the axis: the number says where |
| "not run yet" | a row or a panel without a number of ours; a figure without any is `nothing` |

An axis is set by the means and by what their intervals add, up to one span more; those of few seeds beside others of
many add nothing (`limits`). So one wide interval cannot flatten all the others. People with any of the common colour
deficiencies can tell the colours apart, and markers differ too. What a figure draws, it also keeps as numbers
(`Number`): `save` writes them as CSV, and legend, notes and n are made from them.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpngd.methods import METHODS
from dpngd.suite import stats

INK, SOFT, FAINT = "#222222", "#666666", "#E4E4E4"
PERCENT = (0.0, 100.0)  # an interval may leave it, an axis of accuracies may not
WIDTH = 9.0  # inches: the report's column at 120 dots per inch
DPI = 130


@functools.cache
def style() -> dict[str, Any]:
    """The one theme, as matplotlib's settings."""
    import seaborn  # late: half a second that only drawing needs

    ours = {
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
        "axes.titlelocation": "left", "axes.labelcolor": INK, "text.color": INK, "axes.edgecolor": "#888888",
        "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#EBEBEB", "axes.axisbelow": True,
        "xtick.color": INK, "ytick.color": INK, "figure.facecolor": "white", "figure.dpi": 100, "savefig.dpi": DPI,
        "legend.frameon": False, "svg.hashsalt": "dpngd", "svg.fonttype": "none",  # the same data give the same file
    }
    sizes = {"font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9,
             "legend.fontsize": 8.5, "legend.title_fontsize": 8.5, "grid.linewidth": 0.8, "axes.linewidth": 0.8,
             "xtick.major.width": 0.8, "ytick.major.width": 0.8}
    return {**seaborn.axes_style("whitegrid"), **seaborn.plotting_context("paper"), **sizes, **ours}


def shades(ink: str, n: int) -> list[str]:
    """`n` shades of a colour, the darkest first."""
    import seaborn

    return seaborn.light_palette(ink, n + 1).as_hex()[:0:-1]


def colour(method: str) -> str:
    return METHODS[method].colour


def label(method: str) -> str:
    return METHODS[method].label


def themed(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A function that draws a figure, under the theme: sizes of titles and legends are read when these are made. One
    that came out without any number of ours is `nothing`."""
    @functools.wraps(draw)
    def inside(*args: Any, **kwargs: Any) -> Figure:
        with matplotlib.rc_context(style()):
            figure = draw(*args, **kwargs)
            return figure if is_empty(figure) or any(map(ours, figure.axes)) else nothing(figure.dpngd_head)
    return inside


def new(columns: int = 1, rows: int = 1, *, width: float = 7.2, height: float = 3.4, **kwargs) -> tuple[Figure, list]:
    """A figure that belongs to no window, and its axes as a flat list."""
    with matplotlib.rc_context(style()):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
        return figure, list(axes.flat)


# ---- What is told around the panels ----------------------------------------------------------------------------------

def headline(figure: Figure, text: str, methods: Sequence[str] = (), marks: Sequence[Any] = ()) -> None:
    """What the figure shows, above all panels; below it a line with the methods (those that are drawn) and other
    marks."""
    figure.dpngd_head = text
    there = {d.series for ax in figure.axes for d in ours(ax)}
    methods = [m for m in methods if label(m) in there]
    handles = [Line2D([], [], color=colour(m), marker=METHODS[m].marker, lw=0, ms=6.5, label=label(m)) for m in methods]
    handles += marks
    bold = {"size": 10.5, "weight": "bold"}
    if handles:  # as the legend's title: a title of its own would lie under the legend
        figure.legend(handles=handles, loc="outside upper left", ncols=min(8, len(handles)), handletextpad=0.3,
                      columnspacing=1.1, borderaxespad=0.1, borderpad=0.2, title=text, title_fontproperties=bold,
                      alignment="left")
    else:
        figure.suptitle(text, x=0.008, ha="left", fontproperties=bold)


def note(figure: Figure, text: str) -> None:
    """What the marks mean, below all panels; the stamp comes below it."""
    if any(getattr(ax, "dpngd_arrows", False) for ax in figure.axes):
        text += " Arrow: what lies beyond the axis, and where it ends."
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(text, int(width * 17.5), break_on_hyphens=False)  # DP-NGD is one word
    foot = 0.19 + 0.14 * len(lines)
    figure.text(0.008, 0.16 / height, "\n".join(lines), ha="left", va="bottom", fontsize=7.5, color=SOFT,
                linespacing=1.25)
    figure.get_layout_engine().set(rect=(0, foot / height, 1, 1 - foot / height))
    figure.dpngd_foot = foot


def stamp(figure: Figure, text: str) -> None:
    """Which results it was drawn from, in the last line."""
    width, height = figure.get_size_inches()
    if not hasattr(figure, "dpngd_foot"):
        figure.get_layout_engine().set(rect=(0, 0.17 / height, 1, 1 - 0.17 / height))
    size = min(6.0, 125 * width / max(1, len(text)))
    figure.text(1 - 0.03 / width, 0.03 / height, text, ha="right", va="bottom", fontsize=size, color=SOFT)


def papers_mark(text: str = "hollow: the paper") -> Line2D:
    return Line2D([], [], color=SOFT, marker="o", mfc="white", lw=0, ms=6, label=text)


def better(ax: Axes, text: str = "DP-NGD better", up: bool = False) -> None:
    """Which side of a difference is whose, written at the axis."""
    if not ours(ax):
        return
    if up:
        ax.annotate(f"{text} ↑", (0.02, 0.98), xycoords="axes fraction", ha="left", va="top", fontsize=7.5,
                    color=SOFT, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}, zorder=6)
    else:
        ax.annotate(f"{text} →", (1, 1), xycoords="axes fraction", xytext=(0, 3), textcoords="offset points",
                    ha="right", va="bottom", fontsize=7.5, color=SOFT)


def tick(ax: Axes, x: float, y: float) -> None:
    """To the right of a place: the claim holds here."""
    ax.annotate("✓", (x, y), xytext=(5, 0), textcoords="offset points", fontsize=8, color=INK, ha="left", va="center",
                zorder=6)


def none_band(ax: Axes, horizontal: bool = False, margin: float = stats.MARGIN) -> None:
    """Zero, and the differences that count as none, behind those that are drawn."""
    if not ours(ax):
        return
    line, span = (ax.axvline, ax.axvspan) if horizontal else (ax.axhline, ax.axhspan)
    span(-margin, margin, color=FAINT, alpha=0.55, lw=0, zorder=0)
    line(0, color=INK, lw=0.8, zorder=1)


# ---- Means, intervals, the paper's numbers ---------------------------------------------------------------------------

def bar(e: stats.Estimate) -> np.ndarray | None:
    """The two arms of an error bar; None where one run gives none."""
    return None if not np.isfinite(e.high - e.low) else np.array([[e.mean - e.low], [e.high - e.mean]])


class Number(NamedTuple):
    """A number that a panel shows. `at` says in words or as a value of the other axis what stands at its `place`."""

    place: float
    mean: float
    low: float  # the number itself where it has no interval
    high: float
    ink: str  # "" for what `arrows` leaves alone
    series: str
    at: Any
    n: int  # seeds (of shares, runs) behind an estimate, else 0
    paper: bool
    horizontal: bool


def drawn(ax: Axes) -> list[Number]:
    """What was drawn here."""
    if not hasattr(ax, "dpngd_drawn"):
        ax.dpngd_drawn = []
    return ax.dpngd_drawn


def ours(ax: Axes) -> list[Number]:
    return [d for d in drawn(ax) if not d.paper]


def keep(ax: Axes, series: str, at: Iterable[Any], values: Iterable[float], *, ends: Iterable[tuple] | None = None,
         paper: bool = False, horizontal: bool = False) -> None:
    """Keep the numbers of a curve or of bars, which `point` and `hollow` do by themselves."""
    values = list(values)
    for place, value, (low, high) in zip(at, values, ends or zip(values, values, strict=True), strict=True):
        drawn(ax).append(Number(math.nan, value, low, high, "", series, place, 0, paper, horizontal))


def counts(figure: Figure) -> list[int]:
    """The different n of the estimates that were drawn."""
    return sorted({d.n for ax in figure.axes for d in ours(ax) if d.n})


def point(ax: Axes, x: float, e: stats.Estimate, method: str, *, at: Any = None, series: str = "", scale: float = 1.0,
          horizontal: bool = False, **look: Any) -> None:
    """A mean with its 95% interval; nothing where nothing was run. `settle` ends in arrows what leaves the axis."""
    if e.n == 0:
        return
    arms = bar(e)
    arms = None if arms is None else arms * scale
    place = {"x": e.mean * scale, "y": x, "xerr": arms} if horizontal else {"x": x, "y": e.mean * scale, "yerr": arms}
    look = {"fmt": METHODS[method].marker, "color": colour(method), "ms": 5.5, "capsize": 2.5, "lw": 1.3, **look}
    _, caps, bars = ax.errorbar(**place, **look, zorder=3)
    for part in (*caps, *bars):
        part.set_alpha(0.6)
    for cap in caps:
        cap.set_markeredgewidth(1.0)  # a thick mark would thicken them too
    ends = [scale * v for v in (e.low, e.high)] if arms is not None else [scale * e.mean] * 2
    drawn(ax).append(Number(x, scale * e.mean, *ends, look["color"], series or label(method), x if at is None else at,
                            e.n, False, horizontal))


def hollow(ax: Axes, x: float, y: float, method: str, *, at: Any = None, series: str = "", horizontal: bool = False,
           **look: Any) -> None:
    """A number of the paper."""
    ax.plot([x], [y], METHODS[method].marker, **{"mfc": "white", "mec": colour(method), "ms": 6.5, "mew": 1.1,
                                                 "zorder": 2.5, **look})
    place, value = (y, x) if horizontal else (x, y)
    keep(ax, series or label(method), [place if at is None else at], [value], paper=True, horizontal=horizontal)


def limits(values: list[float], intervals: list[stats.Estimate], pad: float, room: float) -> tuple[float, float] | None:
    """Limits that show all means and what their intervals add, up to one span more. Those of fewer than half the seeds
    that others have add nothing: of two runs they have no end."""
    finite = [v for v in values if np.isfinite(v)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    span = max(high - low, room, 1e-9)
    seeds = max((e.n for e in intervals), default=0)
    ends = [v for e in intervals if 2 * e.n > seeds for v in (e.low, e.high) if np.isfinite(v)]
    least, most = min([low, *ends]), max([high, *ends])
    return max(least, low - span) - pad * span / 2, min(most, high + span) + pad * span / 2


def settle(ax: Axes, values: list[float], pad: float = 0.12, room: float = 0.0,
           intervals: list[stats.Estimate] | None = None, within: tuple[float, float] = (-np.inf, np.inf),
           horizontal: bool = False) -> None:
    """The limits of the axis of values by `limits`, inside `within`; what leaves them ends in an arrow with its number.
    A panel without a number of ours says so."""
    found = limits(values, intervals or [], pad, room)
    if found is None or not ours(ax):
        not_run(ax, horizontal)
        return
    (ax.set_xlim if horizontal else ax.set_ylim)(np.clip(found, *within))
    arrows(ax, horizontal)


def arrows(ax: Axes, horizontal: bool = False) -> None:
    """At the edge of the axis, an arrow and the number where the interval ends (or the mean lies)."""
    low, high = ax.get_xlim() if horizontal else ax.get_ylim()
    for at, mean, least, most, ink, *_ in drawn(ax):
        for end, edge, over, sign in ((least, low, least < low, -1), (most, high, most > high, 1)):
            if not ink or not over or not math.isfinite(end):
                continue
            ax.dpngd_arrows = True
            outside = mean < low if sign < 0 else mean > high
            place = (edge, at) if horizontal else (at, edge)
            ax.plot(*place, marker=("<" if sign < 0 else ">") if horizontal else ("v" if sign < 0 else "^"), color=ink,
                    ms=6, zorder=4, clip_on=False)
            text = f"{mean if outside else end:.1f}"
            ax.annotate(text, place, xytext=(-sign * 7, 4) if horizontal else (5, -sign * 2), color=ink, fontsize=7.5,
                        textcoords="offset points", ha=("right" if sign > 0 else "left") if horizontal else "left",
                        va="bottom" if horizontal or sign < 0 else "top", zorder=5, annotation_clip=False)


# ---- Labels at the ends of curves ------------------------------------------------------------------------------------

def end_labels(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Direct labels (x, y, text, colour) at the right ends of curves, moved apart so that none hides another."""
    if not ends:
        return
    low, high = ax.get_ylim()
    height = ax.get_figure().get_size_inches()[1] * ax.get_position().height  # inches, before the layout is settled
    lines = max(text.count("\n") + 1 for _, _, text, _ in ends)
    gap = (high - low) * min(0.3, lines * max(0.075, 0.17 / max(height, 0.5)))
    ends = sorted(ends, key=lambda e: e[1])
    for (x, y, text, ink), at in zip(ends, apart([e[1] for e in ends], gap, high), strict=True):
        ax.annotate(text, (x, y), xytext=(1.02, at), textcoords=("axes fraction", "data"), color=ink, fontsize=8,
                    va="center", annotation_clip=False, arrowprops={"arrowstyle": "-", "color": ink, "lw": 0.4,
                                                                   "shrinkA": 0, "shrinkB": 3})


def apart(heights: list[float], gap: float, top: float) -> list[float]:
    """Heights, given in rising order, moved until they are `gap` apart and none is above `top`: those that are too near
    to one another spread around their middle, so that a label stays beside its curve."""
    groups: list[list[float]] = []  # each [middle, number of labels]
    for y in heights:
        groups.append([min(y, top), 1])
        while True:
            middle, n = groups[-1]
            groups[-1][0] = middle = min(middle, top - (n - 1) * gap / 2)
            if len(groups) < 2 or middle - (n - 1) * gap / 2 >= groups[-2][0] + (groups[-2][1] - 1) * gap / 2 + gap:
                break
            before, m = groups[-2]
            groups[-2:] = [[(before * m + middle * n) / (m + n), m + n]]
    return [middle + (i - (n - 1) / 2) * gap for middle, n in groups for i in range(n)]


# ---- What was not run ------------------------------------------------------------------------------------------------

def not_run(ax: Axes, horizontal: bool = False) -> None:
    """A panel without a number of ours. Its axis of values has no numbers, unless others share it."""
    shared = ax.get_shared_x_axes() if horizontal else ax.get_shared_y_axes()
    if len(shared.get_siblings(ax)) == 1:
        (ax.set_xticks if horizontal else ax.set_yticks)([])
    ax.annotate("not run yet", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=SOFT)


def row_not_run(ax: Axes, y: float) -> None:
    """A row without a number of ours, in a panel that has others."""
    if ours(ax):
        ax.annotate("not run yet", (0.5, y), xycoords=("axes fraction", "data"), ha="center", va="center", fontsize=8,
                    color=SOFT, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})


def nothing(text: str) -> Figure:
    """A figure of results that are not there yet: `is_empty` knows it, and a Study shows a sentence in its place."""
    figure, (ax,) = new(height=1.2)
    headline(figure, text)
    ax.set_axis_off()
    not_run(ax)
    figure.dpngd_empty = True
    return figure


def is_empty(figure: Figure) -> bool:
    return getattr(figure, "dpngd_empty", False)


# ---- Files -----------------------------------------------------------------------------------------------------------

def png(figure: Figure) -> bytes:
    """In 256 colours, which the eye cannot tell from all of them: a third of the bytes, in notebooks and reports."""
    from PIL import Image

    drawn, small = Image.open(io.BytesIO(_file(figure, "png", {"Software": None}))).convert("RGB"), io.BytesIO()
    drawn.quantize(256, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


FILES = ("png", "svg", "csv")


def save(figure: Figure, folder: Path, name: str, picture: bytes | None = None) -> None:
    """PNG (`picture`, where it has been drawn already), SVG, and CSV with the numbers, without dates: the same data
    give the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(picture or png(figure))
    (folder / f"{name}.svg").write_bytes(_file(figure, "svg", {"Date": None, "Creator": None}))
    (folder / f"{name}.csv").write_text(numbers(figure), encoding="utf-8")


def numbers(figure: Figure) -> str:
    """All that the panels show, as CSV: means, curves and the paper's numbers, not the thin lines of single runs. A
    panel has the name of its `set_label`, or its title."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("panel", "series", "whose", "along", "at", "shown", "value", "low", "high", "n"))

    def named(ax: Axes, axis: str) -> str:
        """The label of an axis; panels with one meaning have it once."""
        return next(filter(None, (getattr(a, f"get_{axis}label")() for a in (ax, *figure.axes))), "")

    for ax in figure.axes:
        for d in drawn(ax):
            along, shown = (named(ax, axis) for axis in ("yx" if d.horizontal else "xy"))
            ends = (d.low, d.high) if d.low < d.high else ("", "")
            rows.writerow((ax.get_label() or ax.get_title(loc="left"), d.series, "the paper's" if d.paper else "ours",
                           along, _number(d.at), shown, *map(_number, (d.mean, *ends)), d.n or ""))
    return text.getvalue()


def _number(value: Any) -> str:
    """In digits that every machine agrees on."""
    return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value).replace("\n", " ")


def _file(figure: Figure, kind: str, metadata: dict) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(style()):
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()

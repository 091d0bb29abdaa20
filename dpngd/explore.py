"""Sliders for notebook 00. Under nbval they show the figure of their defaults; in batch they are left out.

In batch (`DPNGD_FIGURES` is set) nobody moves them, and their output areas make papermill's client send messages back
to the kernel while a cell runs; now and then one got lost, and the notebook waited for ever.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable

import ipywidgets as widgets
from IPython.display import Image, display
from matplotlib.figure import Figure

from dpngd import figures_theory, motivation


def show(figure: Figure) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    display(Image(buffer.getvalue()))


def _slider(low: float, high: float, value: float, step: float, text: str) -> widgets.Widget:
    kind = widgets.IntSlider if all(isinstance(v, int) for v in (low, high, value, step)) else widgets.FloatSlider
    return kind(min=low, max=high, value=value, step=step, description=text, continuous_update=False)


def interact(draw: Callable[..., None], **sliders: widgets.Widget) -> None:
    if os.environ.get("DPNGD_FIGURES"):
        print(f"sliders for {', '.join(sliders)}: open this notebook in Jupyter")
    else:
        widgets.interact(draw, **sliders)


def valley() -> None:
    """The valley of the first figure: its shape, the budget, the steps, and DP-NGD's floor."""
    def draw(condition: float, epsilon: float, T: int, rate: float, lambda_safe: float, seed: int) -> None:
        show(figures_theory.trajectories(motivation.valley(condition=condition, epsilon=epsilon, T=T, rate=rate,
                                                           lambda_safe=lambda_safe, seed=seed)))

    interact(draw, condition=_slider(1.0, 200.0, 60.0, 1.0, "condition"),
             epsilon=_slider(0.5, 8.0, 2.0, 0.5, "epsilon"), T=_slider(5, 60, 25, 5, "steps T"),
             rate=_slider(0.2, 3.0, 1.2, 0.1, "eta of SGD"),
             lambda_safe=_slider(0.02, 1.0, 0.12, 0.02, "lambda_safe"), seed=_slider(0, 9, 0, 1, "seed"))


def schedule(lambda_safe: float, lambda_base: float, T: int, T1: float, p: float) -> None:
    """The clamping schedule of equation (dynamic_schedule)."""
    def draw(base_share: float, T1: float, p: float) -> None:
        show(figures_theory.schedule(lambda_safe, lambda_safe * base_share, T, T1, p))

    interact(draw, base_share=_slider(0.05, 1.0, lambda_base / lambda_safe, 0.05, "base/safe"),
             T1=_slider(0.05, 0.5, T1, 0.05, "T1"), p=_slider(1.5, 20.0, p, 0.5, "p"))

"""The paper's Figure 1 from computed trajectories: private training on a loss that two numbers span.

A two-class logistic model without bias has the weights W (2, 2), of which only theta = W_1 - W_0 matters. Its inputs
are badly scaled and correlated, so the loss is a long valley across the axes. Per-sample gradients, K-FAC curvature,
clipping and noise are the package's own; the public inputs are another draw with other labels.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import ipywidgets
import numpy as np
import torch
from IPython.display import Image, display
from matplotlib.figure import Figure
from torch import nn

from dpngd import privacy
from dpngd.clamping import FixedFloor, eta_ngd
from dpngd.curvature import KFAC
from dpngd.geometry import Euclidean
from dpngd.gradients import PerSample
from dpngd.mechanism import GaussianMechanism
from dpngd.natural import Natural
from dpngd.noise import seeded_noise, stream
from dpngd.sampling import PoissonSampler
from dpngd.suite import figures, plots

N, PUBLIC, B = 4000, 200, 400
TURN = math.radians(30)
STEEP, FLAT = ((math.cos(TURN), math.sin(TURN)), (-math.sin(TURN), math.cos(TURN)))  # steep and flat axis
OPTIMUM, START = (0.15, 2.2), (1.0, -2.2)  # in those axes
_AXES = torch.tensor([STEEP, FLAT])


@dataclass(frozen=True)
class Valley:
    """Contours of the loss, its minimum, and the path of theta for each method: (T + 1, 2).

    every     (n, T + 1, 2) by method: as many draws of batches and noise, the first of them in `paths`
    losses    (n, T + 1) by method
    lowest    the loss at the minimum
    """

    axes: tuple[np.ndarray, np.ndarray]
    loss: np.ndarray
    optimum: np.ndarray
    paths: dict[str, np.ndarray]
    losses: dict[str, np.ndarray]
    sigma: float
    every: dict[str, np.ndarray]
    epsilon: float
    lowest: float


def inputs(n: int, condition: float, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(n, 2, generator=generator) * torch.tensor([3.0, 3.0 / math.sqrt(condition)]) @ _AXES


def loss_at(theta: np.ndarray, x: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Mean logistic loss at each row of theta (m, 2)."""
    return np.logaddexp(0.0, -sign * (theta @ x.T)).mean(1)


def valley(*, condition: float = 60.0, epsilon: float = 2.0, T: int = 25, rate: float = 1.2, lambda_safe: float = 0.12,
           C: float = 1.0, seed: int = 0, noise: bool = True, draws: int = 8) -> Valley:
    """Train DP-SGD and DP-NGD from the same start at the same privacy, with the rate that lambda_safe implies; `draws`
    times on the same data, with other batches and noise."""
    x = inputs(N, condition, stream(seed, "toy inputs"))
    truth = torch.tensor(OPTIMUM) @ _AXES
    y = (torch.rand(N, generator=stream(seed, "toy labels")) < torch.sigmoid(x @ truth)).long()
    sigma = privacy.calibrate(epsilon, 1e-5, B / N, T, N=N) if noise else 0.0
    settings = {"dp-sgd": (None, rate), "dp-ngd": ((condition, lambda_safe), eta_ngd(lambda_safe, C, rate, C))}
    every = {method: np.stack([_train(x, y, curvature, eta, T, C, sigma, 1000 * k + seed) for k in range(draws)])
             for method, (curvature, eta) in settings.items()}
    paths = {method: found[0] for method, found in every.items()}
    xn, sign = x.double().numpy(), 2 * y.double().numpy() - 1
    optimum = _minimum(xn, sign)
    points = np.concatenate([*(p.reshape(-1, 2) for p in every.values()), optimum[None]])
    low, high = points.min(0) - 0.4, points.max(0) + 0.4
    axes = tuple(np.linspace(lo, hi, 70) for lo, hi in zip(low, high, strict=True))
    grid = np.stack(np.meshgrid(*axes), -1).reshape(-1, 2)
    subset = slice(None, None, 4)  # contours need no more
    loss = loss_at(grid, xn[subset], sign[subset]).reshape(len(axes[1]), len(axes[0]))
    losses = {m: np.stack([loss_at(path, xn, sign) for path in found]) for m, found in every.items()}
    lowest = float(loss_at(optimum[None], xn, sign)[0])
    return Valley(axes, loss, optimum, paths, losses, sigma, every, epsilon, lowest)


def _train(x, y, curvature: tuple[float, float] | None, eta: float, T: int, C: float, sigma: float,
           seed: int) -> np.ndarray:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        start = torch.tensor(START) @ _AXES
        model.weight.copy_(torch.stack([-start / 2, start / 2]))
    per_sample, mechanism = PerSample(model), GaussianMechanism((C,), sigma, B)
    sampler, draws = PoissonSampler(N, B, stream(seed, "sampling")), seeded_noise(seed)
    geometry, prepare = Euclidean(), lambda t: None
    if curvature is not None:
        public = inputs(PUBLIC, curvature[0], stream(seed, "toy public inputs"))
        natural = Natural(KFAC(model, public, generator=stream(seed, "labels")), FixedFloor(curvature[1]), T_cur=8)
        geometry, prepare = natural.geometry, natural.prepare
    path = [model.weight.detach().clone()]
    for t in range(T):
        prepare(t)
        rows = sampler.draw()
        release = mechanism.release([per_sample(x[rows], y[rows])], geometry, per_sample.zeros(), draws)
        per_sample.add_(release.direction, -eta)
        path.append(model.weight.detach().clone())
    return np.stack([(w[1] - w[0]).double().numpy() for w in path])


def _minimum(x: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Newton's method on the convex loss."""
    theta = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(sign * (x @ theta)))
        gradient = -(sign * p) @ x / len(x)
        theta = theta - np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x / len(x) + 1e-9 * np.eye(2), gradient)
    return theta


def said(found: Valley) -> str:
    """What one sees in the figure of the valley."""
    told = []
    for m, losses in found.losses.items():
        away = np.linalg.norm(found.every[m][:, -1] - found.optimum, axis=1).mean()
        told.append(f"{plots.label(m)}: loss {losses[:, -1].mean():.2f}, {away:.2f} away from θ*")
    draws, T = found.every["dp-ngd"].shape[0], found.every["dp-ngd"].shape[1] - 1
    return f"After {T} steps, means of {draws} draws. {'; '.join(told)}."


# ---- Sliders for notebook 00 -----------------------------------------------------------------------------------------
#
# Under nbval they show the figure of their defaults. In batch (`DPNGD_FIGURES` is set) they are left out: nobody is
# there to move them, and their output areas make papermill's client send messages back to the kernel while a cell runs;
# at times one was lost, and the notebook waited for ever.

def _show(figure: Figure) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    display(Image(buffer.getvalue()))


def _slider(low: float, high: float, value: float, step: float, text: str) -> ipywidgets.Widget:
    kind = ipywidgets.IntSlider if all(isinstance(v, int) for v in (low, high, value, step)) else ipywidgets.FloatSlider
    return kind(min=low, max=high, value=value, step=step, description=text, continuous_update=False,
                style={"description_width": "19em"}, layout={"width": "44em"})


def interact(draw: Callable[..., None], **sliders: ipywidgets.Widget) -> None:
    if os.environ.get("DPNGD_FIGURES"):
        print(f"sliders for {', '.join(sliders)}: open this notebook in Jupyter")
    else:
        ipywidgets.interact(draw, **sliders)


def valley_sliders() -> None:
    """The valley of the first figure: its shape, the budget, the steps, and DP-NGD's floor."""
    def draw(condition: float, epsilon: float, T: int, rate: float, lambda_safe: float, seed: int) -> None:
        _show(figures.trajectories(valley(condition=condition, epsilon=epsilon, T=T, rate=rate,
                                          lambda_safe=lambda_safe, seed=seed)))

    interact(draw, condition=_slider(1.0, 200.0, 60.0, 1.0, "condition number of the valley"),
             epsilon=_slider(0.5, 8.0, 2.0, 0.5, "privacy budget ε"), T=_slider(5, 60, 25, 5, "steps T"),
             rate=_slider(0.2, 3.0, 1.2, 0.1, "learning rate of DP-SGD"),
             lambda_safe=_slider(0.02, 1.0, 0.12, 0.02, "floor λ_safe of DP-NGD"),
             seed=_slider(0, 9, 0, 1, "seed of batches and noise"))


def schedule_sliders(lambda_safe: float, lambda_base: float, T: int, T1: float, p: float, **_: str) -> None:
    """The clamping schedule of equation (dynamic_schedule); what `tables.schedule_of` says of its cell is left out."""
    def draw(base_share: float, T1: float, p: float) -> None:
        _show(figures.schedule(lambda_safe, lambda_safe * base_share, T, T1, p))

    interact(draw, base_share=_slider(0.05, 1.0, lambda_base / lambda_safe, 0.05, "lowest floor λ_base / λ_safe"),
             T1=_slider(0.05, 0.5, T1, 0.05, "share of the warm-up, T1 / T"),
             p=_slider(1.5, 20.0, p, 0.5, "exponent p of the rise"))

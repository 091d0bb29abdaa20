"""Notebook 07: from an Opacus program to DPNGD in one line, where the floor falls, and accuracy against the rate.

Everything is embedded: scikit-learn's 1,797 digits as the private set, public images that are made. So it is the same
under every profile, and takes about a minute.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpngd import images
from dpngd.clamping import RANK_SHARE, eta_ngd, floor_by_rank
from dpngd.curvature import KFAC
from dpngd.data import load_private
from dpngd.noise import stream
from dpngd.opacus import DPNGD
from dpngd.suite import plots
from dpngd.suite.plots import colour, label, point
from dpngd.suite.runs import Runs
from dpngd.suite.stats import Estimate
from dpngd.suite.story import missing
from dpngd.suite.study import Study
from dpngd.suite.sweep import ensure
from dpngd.training import models
from dpngd.training.config import RunConfig
from dpngd.training.recipe import to_float

SHAPE, CLASSES = (1, 8, 8), 10
PUBLIC = 500  # images
SOURCES = {"noise": "1/f noise", "dead-leaves": "dead leaves", "photos": "photographs", "white": "white noise"}
LINES = dict(zip(SOURCES, (("#222222", "-"), ("#222222", "--"), ("#777777", "-"), ("#777777", ":")), strict=True))
# greys: colours are methods in every figure
RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # DP-SGD's; DP-NGD's follow by the paper's equation
B, T = 256, 40
FACTS = ("the wrapped rate has no effect", "the floor is at the rank for every source",
         "natural-looking sources give floors within a factor of 4",
         "a wrong rate costs DP-SGD more than 10 points against no rate")


@dataclass(frozen=True)
class Digits:
    """The private set as a user has it: tensors that the model takes."""

    train: TensorDataset
    x_test: Tensor
    y_test: Tensor

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Share of the test images that are classified rightly."""
        return float((model(self.x_test).argmax(1) == self.y_test).float().mean())


def digits() -> Digits:
    """x (n, 1, 8, 8) float, y (n,): 1,437 to train on, 360 to test on."""
    private = load_private("digits")
    return Digits(TensorDataset(to_float(private.x_train), private.y_train), to_float(private.x_test), private.y_test)


def network(seed: int = 0) -> nn.Module:
    """A small CNN, the same weights for the same seed."""
    weights = stream(seed, "weights")
    return models.build("small", classes=CLASSES, in_channels=SHAPE[0], size=SHAPE[1], generator=weights)


def public_images(source: str, seed: int = 0) -> Tensor:
    """500 images of a source, as the model takes them."""
    if source == "white":
        return torch.randn(PUBLIC, *SHAPE, generator=stream(seed, "public/white"))
    return images.standardised(source, PUBLIC, SHAPE, seed)


@dataclass(frozen=True)
class Spectrum:
    """F of the network at its start on one source of public images."""

    values: np.ndarray  # eigenvalues, largest first
    floor: float  # lambda_safe by rank

    @property
    def above(self) -> int:
        """Directions above the floor."""
        return int((self.values > self.floor).sum())


def spectra(sources: Sequence[str] = tuple(SOURCES), seed: int = 0) -> dict[str, Spectrum]:
    """The spectrum of F and the floor by rank, from each source."""
    found = {}
    for source in sources:
        curvature = KFAC(network(seed), public_images(source, seed), generator=stream(seed, "labels"))()
        values = torch.cat([layer.spectrum().flatten() for layer in curvature]).sort(descending=True).values
        found[source] = Spectrum(values.double().numpy(), floor_by_rank(curvature))
    return found


@plots.themed
def draw_spectra(found: Mapping[str, Spectrum]) -> Figure:
    """Eigenvalues in falling order, and the floor at the rank: the curves differ, the floors hardly do."""
    figure, (ax,) = plots.new(height=3.6)
    n = max(len(s.values) for s in found.values())
    for source, s in found.items():
        shown = s.values[s.values > 1e-6 * s.values[0]]
        ranks = np.unique(np.geomspace(1, len(shown), 200).round().astype(int))  # the axis is logarithmic
        share, shown = 100 * ranks / len(s.values), shown[ranks - 1]
        ink, line = LINES[source]
        ax.plot(share, shown, line, color=ink, lw=1.6, label=f"{SOURCES[source]}: $\\lambda_{{safe}}$ = {s.floor:.2g}")
        ax.plot([100 * RANK_SHARE], [s.floor], "o", color=ink, ms=5)
        plots.keep(ax, SOURCES[source], share, shown)
        plots.keep(ax, f"{SOURCES[source]}, floor by rank", [100 * RANK_SHARE], [s.floor])
    ax.axvline(100 * RANK_SHARE, color=plots.INK, lw=0.8, ls=":")
    ax.annotate(f"{100 * RANK_SHARE:g} % of {n:,} directions", (100 * RANK_SHARE, 1), xytext=(4, -4),
                xycoords=("data", "axes fraction"), textcoords="offset points", va="top", fontsize=8)
    ax.set(xscale="log", yscale="log", xlabel="directions of F, % of all, steepest first", ylabel="eigenvalue")
    ax.legend(fontsize=8, title=f"{PUBLIC} public images")
    plots.headline(figure, "The spectrum of F and where the floor falls: digits, small network")
    plots.note(figure, f"Eigenvalues of K-FAC's F at the network's start, one seed, from {PUBLIC} public images of "
                       f"each source. Dots: the floor by rank; {100 * RANK_SHARE:g} % of the directions lie above it.")
    return figure


def rate_configs(epsilon: float, seeds: Sequence[int], lambda_safe: float) -> list[RunConfig]:
    """DP-SGD at every rate, DP-NGD at the rates that follow by the paper's equation, and DP-NGD with a KL budget once.

    DP-NGD and the third have the same public images (1/f noise) and the same floor rule; C = 1 for the first two.
    """
    from dpngd.suite import profiles

    base = {"data": "digits", "model": "small", "epsilon": epsilon, "B": B, "T": T, "evals": 1}
    natural = {"public": "noise", "public_size": PUBLIC, "T1": 0.1, "p": 10.0, "T_cur": 8}
    free = profiles.load("quick").config("dp-ngd-free", "digits", epsilon, 0)
    configs = []
    for seed in seeds:
        configs.append(free.replace(seed=seed, evals=1, B=B, T=T))
        for eta in RATES:
            configs += [RunConfig.from_dict({**base, "method": "dp-sgd", "C": 1.0, "eta": eta, "seed": seed}),
                        RunConfig.from_dict({**base, **natural, "method": "dp-ngd", "C": 1.0, "seed": seed,
                                             "eta": round(eta_ngd(lambda_safe, 1.0, eta, 1.0), 6),
                                             "lambda_safe": lambda_safe, "lambda_base": lambda_safe / 4})]
    return configs


def run_rates(study: Study, lambda_safe: float) -> Runs:
    """Those runs, for the study's epsilon and seeds: shipped (results/own-data.jsonl) for its defaults, trained where
    they are missing and the study may train. Digits come with scikit-learn, so that everybody can."""
    epsilon = (study.choices["epsilons"] or [4.0])[0]
    seeds = study.choices["seeds"] or [0, 1, 2]
    configs = rate_configs(float(epsilon), seeds, float(f"{lambda_safe:.2g}"))
    if study.train:
        ensure(configs, store=study.store, jobs=study.jobs)
    study.runs["rates"] = Runs.of(configs, map(study.store.get, configs))
    return study.runs["rates"]


def ship() -> str:
    """Train what is missing of the runs that notebook 07 shows, and write results/own-data.jsonl."""
    study = Study("07_your_own_data", train=True)
    study.store.export([r["key"] for r in run_rates(study, spectra(["noise"])["noise"].floor).records])
    return f"results/{study.store.shipped_path.name}"


def rates_said(runs: Runs) -> str:
    """What one sees in the figure of the rates."""
    if not len(runs):
        return f"Nothing yet: {missing(runs)}."
    free, said = runs.mean(method="dp-ngd-free"), []
    for method in ("dp-sgd", "dp-ngd"):
        mine = runs.where(method=method)
        means = {x: mine.mean(eta=eta) for x, eta in zip(RATES, mine.values("eta"), strict=True)}
        best, worst = (f((x for x in RATES if means[x].n), key=lambda x: means[x].mean) for f in (max, min))
        said.append(f"{label(method)} goes from {means[worst].mean:.1f} % (rate {worst:g}) to {means[best].mean:.1f} % "
                    f"(rate {best:g})")
    return f"{'; '.join(said)}. With the KL budget and no rate: {free.text(1)} %."


def possible(e: Estimate) -> Estimate:
    """An interval of accuracies, cut at what accuracies can be."""
    return replace(e, low=max(0.0, e.low), high=min(100.0, e.high)) if math.isfinite(e.high - e.low) else e


@plots.themed
def draw_rates(runs: Runs) -> Figure:
    """Two curves with a peak, and a line without a rate."""
    figure, (ax,) = plots.new(height=3.6)
    bars = []
    for method in ("dp-sgd", "dp-ngd"):
        means = [runs.mean(method=method, eta=eta) for eta in runs.where(method=method).values("eta")]
        means = [possible(e) for e in means]
        bars += means
        kept = [(x, e) for x, e in zip(RATES, means, strict=True) if e.n]
        ax.plot([x for x, _ in kept], [e.mean for _, e in kept], color=colour(method), lw=1.5, label=label(method))
        for x, e in kept:
            point(ax, x, e, method)
    free = possible(runs.mean(method="dp-ngd-free"))
    if free.n:
        ax.axhline(free.mean, color=colour("dp-ngd-free"), lw=1.8, ls="--",
                   label=f"{label('dp-ngd-free')}: a KL budget, no rate")
        plots.keep(ax, label("dp-ngd-free"), ["any rate"], [free.mean], ends=[(free.low, free.high)])
        if math.isfinite(free.high - free.low):
            ax.axhspan(free.low, free.high, color=colour("dp-ngd-free"), alpha=0.15, lw=0)
    ax.set(xscale="log", xlabel="learning rate of DP-SGD (DP-NGD's follows by the equation)", ylabel="test accuracy, %")
    ax.set_xticks(RATES, [f"{r:g}" for r in RATES])
    ax.minorticks_off()
    ends = [e.mean for e in bars] + [free.mean]
    plots.settle(ax, ends, 0.1, room=2, intervals=[*bars, free], within=plots.PERCENT)
    plots.headline(figure, f"Accuracy against the learning rate: digits, ε = {runs.cells()[0][1]:g}, {T} steps")
    ax.legend(fontsize=8, loc="lower left")
    plots.note(figure, f"Mean and 95% interval over {len(runs.values('seed'))} seeds, cut at 0 and 100 % (few seeds "
                       "give wide ones); a diverged run counts as chance. Band: the interval of the line without a "
                       "rate.")
    return figure


def weights_at(rates: Sequence[float], steps: int = 3) -> list[Tensor]:
    """The weights after a few steps of DPNGD in an Opacus program, at each rate of the wrapped SGD, flat."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's, about itself
        return [_weights_at(rate, steps) for rate in rates]


def _weights_at(rate: float, steps: int) -> Tensor:
    data, model, noise = digits(), network(), torch.Generator().manual_seed(0)
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        data_loader=DataLoader(data.train, batch_size=64), noise_multiplier=1.0, max_grad_norm=1.0,
        noise_generator=noise)
    optimizer = DPNGD(optimizer, model, T=steps, shape=SHAPE)
    for t in range(steps):
        x, y = data.train[64 * t : 64 * (t + 1)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def facts(found: Mapping[str, Spectrum], runs: Runs, weights: Sequence[Tensor]) -> dict[str, bool]:
    """What the notebook shows, as yes and no: what holds on every machine."""
    floors = [s.floor for source, s in found.items() if source != "white"]
    share = {s.above / len(s.values) for s in found.values()}
    free, sgd = runs.mean(method="dp-ngd-free"), runs.where(method="dp-sgd")
    worst = min((sgd.mean(eta=eta).mean for eta in sgd.values("eta") if sgd.mean(eta=eta).n), default=math.nan)
    return dict(zip(FACTS, (all(torch.equal(weights[0], w) for w in weights), max(share) <= RANK_SHARE,
                            max(floors) < 4 * min(floors), free.mean - worst > 10), strict=True))


def check_facts(found: Mapping[str, Spectrum], runs: Runs, weights: Sequence[Tensor]) -> None:
    """The facts as words: what nbval compares."""
    for name, holds in facts(found, runs, weights).items():
        print(f"{name}: {'yes' if holds else 'no'}")

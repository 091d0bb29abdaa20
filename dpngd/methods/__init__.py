"""The methods of the paper's tables: what each one is, in one entry, and how it is built around the one mechanism.

    update = -(eta / B) R( sum_i clip_C(L g_i) + sigma C xi )

    name                   releases per step                         noise multiplier calibrated to
    dp-sgd, dp-sgd-pt      gradient sum, sensitivity C               (epsilon, delta)
    adadps                 scaled gradient sum, C                    (epsilon, delta)
    gep                    embedding sum C0 and residual sum C1      (epsilon, delta), noise sqrt(2) larger on each
    dp-ngd and its arms    gradient sum under F~'s power, C          (epsilon, delta)
    dp-ngd-private-f       as dp-ngd; every T_cur steps also         (epsilon, delta) for both, composed by PRV; the
                           K-FAC factors, 1 and curvature_C          share f fixes the ratio of the noises
    dp-ngd-auto            as dp-ngd                                 (epsilon, delta)
    dp-ngd-kl, -free,      as dp-ngd, dp-sgd, adadps or an arm of    (epsilon, delta)
    dp-sgd-kl, adadps-kl,  dp-ngd; C from public images
    dp-ngd-kl's arms

The last ones have no rate: their step is as long as a KL budget says (`dpngd.steps`), which is post-processing.

Adding a method is one entry here (`register`), a builder (one of those here, or a function Setting -> Built), and its
settings in params/. The guarantee of a method is in the docstring of its builder. All are for adding or removing one
sample, under Poisson sampling at rate q = B/N, and all rest on the mechanism's own (see `dpngd.mechanism`).

This module does not import torch: names, labels and fields are needed where nothing is trained.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dpngd.errors import UsageError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from dpngd.gradients import PerSample
    from dpngd.group import Group
    from dpngd.mechanism import GaussianMechanism, Geometry
    from dpngd.noise import Noise
    from dpngd.privacy import Spend
    from dpngd.steps import Steps

PUBLIC = frozenset({"public", "public_size"})
CURVATURE = frozenset({"C", "T_cur"})  # what every DP-NGD reads, whatever its floor
FLOORS = {"dynamic": frozenset({"lambda_safe", "lambda_base", "T1", "p"}), "fixed": frozenset({"lambda_safe"}),
          "auto": frozenset({"floor_rank", "T1", "p"}), "none": frozenset()}
"""The floors of Module 2 (`dpngd.clamping`), and the fields that each reads."""

KL_STEP = frozenset({"kl_budget", "kl_noise", "probe", "clip_ratio"})
"""What a method without a rate reads: its KL budget, and where C comes from."""

# Okabe and Ito's colours, which people with any of the common colour deficiencies can tell apart.
BLACK, SKY, ORANGE, GREEN, BLUE, VERMILION, PURPLE = ("#000000", "#56B4E9", "#E69F00", "#009E73", "#0072B2", "#D55E00",
                                                      "#CC79A7")
INDIGO = "#4B0092"  # not of theirs, and for these people too further from each of them than they are from each other


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method or an ablation arm: everything that is known of it, in one place."""

    name: str
    label: str  # in tables and figures
    about: str  # what it is, in a few words
    uses: frozenset[str]  # all fields of a RunConfig that it reads beyond those of every run
    builder: str | Callable[[Setting], Built]  # a function, or "module:function", imported when it is built
    colour: str = BLUE  # arms share one, which no method of Table 2 has: their labels tell them apart
    marker: str = "o"
    baseline: bool = False  # one of the methods that the paper compares DP-NGD with
    pretrained: bool = False  # starts from weights trained on the public set
    arm_of: str | None = None  # an ablation arm names the method that it varies
    studies: str = ""  # what an arm is about: "floor", "clipping", "labels", "clamping", "private curvature", "KL step"
    left: float | None = None  # power of F~ before clipping; None for a method without F
    right: float | None = None  # power of F~ after the noise
    clamp: str = "product"  # what is clamped: the product spectrum, or each "factor"
    floor: str = "dynamic"  # a key of FLOORS
    labels: str = "sampled"  # of the Fisher matrix (`dpngd.curvature`)
    curvature_share: float = 0.0  # the fraction f of the budget for private curvature: fixes the ratio of the noises
    public_from: tuple[str, ...] = ()  # the only public sets that it takes; any where empty

    @property
    def kl_step(self) -> bool:
        """Whether a KL budget decides how far a step goes."""
        return "kl_budget" in self.uses

    @property
    def finds_rate(self) -> bool:
        """Whether its builder finds eta, from a floor that is known only when a run starts."""
        return "eta_sgd" in self.uses

    @property
    def rate(self) -> bool:
        """Whether a config states its learning rate eta."""
        return not (self.kl_step or self.finds_rate)

    @property
    def public(self) -> bool:
        """Whether the method reads a public set."""
        return "public" in self.uses

    @property
    def second_order(self) -> bool:
        """Whether it uses curvature: its rate then follows from lambda_safe (`clamping.eta_ngd`)."""
        return self.left is not None


METHODS: dict[str, Method] = {}
"""Every method by name, in the order of the tables."""


def register(method: Method) -> Method:
    """Add a method. Its name must be new."""
    if method.name in METHODS:
        raise UsageError(f"a method {method.name!r} is registered already: take another name")
    METHODS[method.name] = method
    return method


def method(name: str) -> Method:
    """The method of this name; an error that suggests one where there is none."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def baselines() -> list[str]:
    return [m.name for m in METHODS.values() if m.baseline]


def arms(*studies: str) -> list[str]:
    """The ablation arms that study one of these."""
    return [m.name for m in METHODS.values() if m.studies in studies]


@dataclass
class Setting:
    """What a builder may use. `draw` gives a Poisson batch of the private set for releases of the method's own."""

    config: Any  # a RunConfig, or anything with the fields that the method reads
    per_sample: PerSample
    spends: list[Spend]  # what the budget pays for, gradients first (`privacy.plan`)
    shape: tuple[int, ...]  # (C, H, W) of an image
    public: Tensor | None = None
    draw: Callable[[], Iterable[tuple[Tensor, Tensor]]] | None = None
    noise: Callable[[str], Noise] | None = None  # by purpose, for releases of the method's own; None: from the seed
    group: Group | None = None  # the processes that train together; None for one process

    @property
    def method(self) -> Method:
        return method(self.config.method)


@dataclass
class Built:
    """A method ready to step: geometry, mechanism, and what to do before the batch of step t is drawn."""

    geometry: Geometry
    mechanism: GaussianMechanism
    prepare: Callable[[int], None] = lambda t: None
    diagnose: Callable[[], dict[str, float]] = dict
    noise_kl: Callable[[], float] | None = None  # the KL divergence that the coming step's noise causes at s = 1
    steps: Steps | None = None  # how far to go; None takes what the config says (`build`)
    held: dict[str, Any] | None = None
    """What `prepare` changes, by name: objects with state_dict and load_state_dict, and generators that it draws from.
    {} for a method that holds nothing; None, where a builder does not say, makes its runs impossible to resume."""


def spends_of(config: Any, q: float, N: int) -> list[Spend]:
    """What the budget of a run pays for (`privacy.plan`, with the method's share). Needs no data, only q and N."""
    from dpngd import privacy  # late: it loads torch by way of Opacus

    share = method(config.method).curvature_share
    return privacy.plan(config.epsilon, config.delta, q, config.T, N, curvature_share=share, T_cur=config.T_cur or 1)


def build(setting: Setting) -> Built:
    """The method that the config names."""
    built = builder_of(setting.method)(setting)
    if built.steps is None:
        built.steps = steps_of(setting)
    if setting.group is not None:
        built.mechanism = replace(built.mechanism, group=setting.group)
    return built


def steps_of(setting: Setting, eta: float | None = None) -> Steps:
    """How far the method goes: the config's rate (or `eta`, which its builder found), with a guard where it has one, or
    its KL budget."""
    from dpngd.steps import PROBE, KLBudget, Probe, Rate

    c, model = setting.config, setting.per_sample.model
    if setting.method.kl_step:
        return KLBudget(c.kl_budget, c.T, Probe(model, setting.public[: c.probe]), c.kl_noise)
    radius = getattr(c, "kl_radius", None)
    return Rate(c.eta if eta is None else eta, radius, None if radius is None else Probe(model, setting.public[:PROBE]))


def builder_of(method: Method) -> Callable[[Setting], Built]:
    """The builder itself; its docstring states the method's guarantee."""
    if not isinstance(method.builder, str):
        return method.builder
    module, _, function = method.builder.partition(":")
    return getattr(importlib.import_module(module), function)


def every(n: int, refresh: Callable[[], None]) -> Callable[[int], None]:
    """A `prepare` that refreshes at steps 0, n, 2n, ..."""
    return lambda t: refresh() if t % n == 0 else None


def _baseline(name: str, label: str, about: str, builder: str, uses: frozenset[str], colour: str, marker: str,
              **more: Any) -> None:
    register(Method(name=name, label=label, about=about, builder=builder, uses=uses, colour=colour, marker=marker,
                    baseline=True, **more))


def _natural(name: str, label: str, about: str, *, floor: str = "dynamic", left: float = -0.5, right: float = -0.5,
             curvature_share: float = 0.0, **more: Any) -> None:
    """DP-NGD, or an arm that differs from it in what is given."""
    private = curvature_share > 0  # curvature from the private set: no public set at all
    register(Method(
        name=name, label=label, about=about, floor=floor, left=left, right=right, curvature_share=curvature_share,
        uses=CURVATURE | FLOORS[floor] | ({"curvature_C"} if private else PUBLIC),
        builder="dpngd.methods.private_curvature:build" if private else "dpngd.methods.dp_ngd:build",
        arm_of=None if name == "dp-ngd" else "dp-ngd", **more))


_baseline("dp-sgd", "DP-SGD", "isotropic first-order baseline", "dpngd.methods.dp_sgd:build", frozenset({"C"}), BLACK,
          "o")
_baseline("dp-sgd-pt", "DP-SGD-PT", "DP-SGD after public pre-training", "dpngd.methods.dp_sgd:build",
          frozenset({"C", "pt_steps", "pt_eta"}) | PUBLIC, SKY, "s", pretrained=True)
_baseline("gep", "GEP", "public gradient subspace and residual", "dpngd.methods.gep:build",
          frozenset({"C0", "C1", "gep_directions", "T_cur"}) | PUBLIC, ORANGE, "^")
_baseline("adadps", "AdaDPS", "diagonal scaling by public moments", "dpngd.methods.adadps:build",
          frozenset({"C", "adadps_e", "T_cur"}) | PUBLIC, GREEN, "D")
_natural("dp-ngd", "DP-NGD", "whitened, dynamic floor, clamped product, sampled labels", colour=VERMILION, marker="P")
_natural("dp-ngd-fixed-floor", "fixed floor", "floor fixed at lambda_safe", floor="fixed", marker="v", studies="floor")
_natural("dp-ngd-no-floor", "no floor", "eigenvalues not clamped", floor="none", marker="X",
         studies="floor")
_natural("dp-ngd-factor-clamp", "factor clamp", "each Kronecker factor clamped, not their product", clamp="factor",
         studies="clamping")
_natural("dp-ngd-pre", "pre-conditioning", "raw gradients clipped, then F^-1", left=0.0, right=-1.0,
         studies="clipping")
_natural("dp-ngd-post", "post-conditioning", "natural gradients F^-1 g clipped", left=-1.0, right=0.0,
         studies="clipping")
_natural("dp-ngd-one-sided", "one-sided", "whitened and clipped, never mapped back (DP-KFC)", right=0.0,
         studies="clipping")
_natural("dp-ngd-labels-exact", "exact Fisher", "Fisher summed over all classes", labels="exact", studies="labels")
_natural("dp-ngd-labels-random", "random labels", "Fisher from uniformly random labels", labels="random",
         studies="labels")
_natural("dp-ngd-private-20", "private 20/80", "private curvature for 20% of the budget", curvature_share=0.2,
         studies="private curvature")
_natural("dp-ngd-private-50", "private 50/50", "private curvature for 50% of the budget", curvature_share=0.5,
         studies="private curvature")
register(Method(
    name="dp-ngd-auto", label="DP-NGD, floor by rank", about="dp-ngd with a floor by rank and eta from it and DP-SGD's "
    "rate: nothing new to tune", marker="8", left=-0.5, right=-0.5, floor="auto",
    builder="dpngd.methods.dp_ngd:build_auto", uses=PUBLIC | CURVATURE | FLOORS["auto"] | {"eta_sgd", "C_sgd"}))
register(Method(
    name="dp-ngd-kl", label="DP-NGD, KL step", about="dp-ngd with a floor by rank and a KL budget: no rate",
    colour=INDIGO, marker=">", left=-0.5, right=-0.5, floor="auto", builder="dpngd.methods.dp_ngd:build_kl",
    uses=PUBLIC | {"T_cur"} | FLOORS["auto"] | KL_STEP))
register(Method(
    name="dp-ngd-free", label="DP-NGD free", about="dp-ngd-kl on public images made here: no rate, no public data",
    colour=PURPLE, marker="*", left=-0.5, right=-0.5, floor="auto", builder="dpngd.methods.dp_ngd:build_kl",
    uses=PUBLIC | {"T_cur"} | FLOORS["auto"] | KL_STEP, public_from=("noise", "dead-leaves")))
register(Method(
    name="dp-sgd-kl", label="DP-SGD, KL step", about="DP-SGD with a KL budget (a control; F only measures the noise)",
    colour=BLACK, marker="<", left=0.0, right=0.0, floor="none", builder="dpngd.methods.dp_ngd:build_kl",
    uses=PUBLIC | {"T_cur"} | KL_STEP))
for _name, _label, _left, _marker, _about in (
        ("dp-ngd-kl-one-sided", "one-sided, KL step", -0.5, "h", "whitened and clipped, never mapped back"),
        ("dp-ngd-kl-post", "post, KL step", -1.0, "d", "natural gradients F^-1 g clipped")):
    register(Method(
        name=_name, label=_label, about=f"{_about}; floor, C and KL budget of dp-ngd-kl", colour=BLUE, marker=_marker,
        left=_left, right=0.0, floor="auto", builder="dpngd.methods.dp_ngd:build_kl", arm_of="dp-ngd-kl",
        studies="KL step", uses=PUBLIC | {"T_cur"} | FLOORS["auto"] | KL_STEP))
register(Method(
    name="adadps-kl", label="AdaDPS, KL step", about="AdaDPS's diagonal; its constant by rank, C and a KL budget",
    colour=GREEN, marker="p", builder="dpngd.methods.adadps:build_kl", arm_of="dp-ngd-kl", studies="KL step",
    uses=PUBLIC | {"T_cur", "floor_rank"} | KL_STEP))

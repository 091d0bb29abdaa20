"""What the tests of the claims share: configs of every artifact, made by hand, and a claim's word on made-up runs.

They are no profile's: whatever params/ says, the rules are tried on the same runs."""

import json
import zlib

import numpy as np

from dpngd.methods import METHODS, arms, baselines
from dpngd.suite import claims
from dpngd.training.config import RunConfig

BY_ID = {c.id: c for c in claims.all_claims()}
SEEDS = range(6)
BASE = {"dp-sgd": 60.0, "dp-sgd-pt": 61.0, "gep": 62.0, "adadps": 63.0, "dp-ngd": 66.0, "dp-ngd-kl": 65.8,
        "dp-ngd-free": 65.9, "dp-sgd-kl": 55.0}
MAIN = (*baselines(), "dp-ngd")
AUTO = [m for m in ("dp-ngd-auto",) if m in METHODS]
OWN = {"C": 1.0, "lambda_safe": 1.0, "lambda_base": 0.25, "T1": 0.1, "p": 10.0, "T_cur": 8, "adadps_e": 1e-3, "C0": 1.0,
       "C1": 0.2, "gep_directions": 100, "pt_steps": 100, "pt_eta": 0.1, "curvature_C": 1.0, "public": "photos",
       "public_size": 500, "floor_rank": 0.003, "kl_budget": 10.0, "kl_noise": 3.0, "probe": 128, "clip_ratio": 0.05,
       "eta_sgd": 2.0, "C_sgd": 1.0}


def config(method, data="utkface", epsilon=2.0, seed=0, **fields):
    own = {n: OWN[n] for n in METHODS[method].uses} | ({"public": "noise"} if METHODS[method].public_from else {})
    rate = {"eta": 1.0} if METHODS[method].rate else {}
    values = {"B": 256, "T": 100, "N": 5000, "model": "small", **rate, **own, **fields}
    return RunConfig(method=method, data=data, epsilon=epsilon, seed=seed, **values)


COMMON = ("T", "K", "augment", "model", "N")


def product(methods, cells, fields=({},), seeds=SEEDS):
    """Every method in every cell with every set of fields that it reads, each once."""
    made = [config(m, d, e, s, **{n: v for n, v in f.items() if n in METHODS[m].uses or n in COMMON})
            for m in methods for d, e in cells for f in fields for s in seeds]
    return list({c.key(): c for c in made}.values())


def one_by_one(**axes):
    return [{axis: v} for axis, values in axes.items() for v in values]


FACE, CELLS, CURVES = [("utkface", 2.0)], [("cifar10", 2.0), ("cifar10", 4.0)], [("cifar10", 1.0), ("svhn", 6.0)]
BUDGETS = (25, 50, 100, 200, 400, 800)
ARTIFACTS = {
    "utility_table": ((*MAIN, "dp-ngd-kl", "dp-ngd-free"), [(d, e) for d in ("cifar10", "svhn") for e in (1., 3., 8.)]),
    "convergence": (MAIN, CURVES, one_by_one(T=BUDGETS)),
    "overhead": (("dp-sgd", "dp-sgd-pt", "dp-ngd"), CURVES, one_by_one(T=BUDGETS)),
    "sample_efficiency": (("dp-sgd-pt", "gep", "adadps", "dp-ngd"), FACE, one_by_one(public_size=(50, 150, 500, 5000))),
    "pretraining": (("dp-sgd-pt",), FACE, [{"public_size": n, "pt_steps": t} for n in (50, 5000) for t in (30, 300)]),
    "sources": (("dp-sgd", "dp-ngd"), FACE, one_by_one(public=("photos", "noise", "dead-leaves"))),
    "ablation_decoupling": (("dp-sgd-pt", "dp-ngd", "dp-ngd-private-20", "dp-ngd-private-50"), CELLS),
    "ablation_clipping": (("dp-ngd", "dp-ngd-post", "dp-ngd-pre"), CELLS),
    "ablation_floor": (("dp-ngd", "dp-ngd-fixed-floor", "dp-ngd-no-floor"), FACE),
    "ablation_ours": (("dp-ngd", "dp-ngd-one-sided", *arms("clamping", "labels"), *AUTO), CELLS),
    "releases": (("dp-sgd-pt", "dp-ngd-private-20", "dp-ngd-private-50"), CELLS[:1], one_by_one(T_cur=(1, 8))),
    "kl_maps": (("dp-sgd", "dp-sgd-kl", "dp-ngd", "dp-ngd-kl", "dp-ngd-free"), CELLS[:1]),
    "between": ((*MAIN, "dp-ngd-free"), CELLS[:1]),
    "mean_choice": (MAIN, CELLS),
    "whole": (("dp-sgd", "dp-ngd", "dp-ngd-free"), [("cifar10", 1.0), ("cifar10", 8.0)], [{"N": 50000}]),
    "views": (("dp-sgd", "dp-ngd"), CELLS[:1], [{"K": 1}, {"K": 4, "augment": True}]),
    "networks": (("dp-sgd", "dp-ngd"), CELLS[:1], one_by_one(model=("small", "wrn-10-1"))),
    "robustness": (("dp-ngd",), FACE, one_by_one(T_cur=(1, 4, 8, 16, 32, 64), p=(2., 5., 10., 15.), T1=(.05, .1, .25))),
}
ARTIFACTS |= {f"{n}_equal": ARTIFACTS[n] for n in ("ablation_decoupling", "ablation_clipping", "ablation_floor")}


def artifact(name, seeds=SEEDS):
    if name == "bound":  # the rate grows, and the floor with it as the equation says, or not
        settings = (1., 1.), (2., 1.), (4., 1.), (8., 1.), (2., 4.), (4., 16.), (8., 64.)
        return [config("dp-ngd", "cifar10", 2.0, s, eta=eta, lambda_safe=floor, lambda_base=floor / 4)
                for eta, floor in settings for s in seeds]
    return product(*ARTIFACTS[name], seeds=seeds)


def wobble(config, size=0.1):
    """What seeds share, 0.3 points from one to the next, and what they do not: noise of `size` points, the same for the
    same config."""
    text = json.dumps(config.canonical(), sort_keys=True) + " wobble"
    return 0.3 * (config.seed - 2.5) + np.random.default_rng(zlib.crc32(text.encode())).normal(0, size)


def table(values, size=0.1):
    return lambda c: values[c.method] + wobble(c, size)


def decide(claim, runs, **kwargs):
    """A claim's row on runs of its artifact, or a mapping of several."""
    sources = runs if isinstance(runs, dict) else {BY_ID[claim].source: runs}
    return claims.decide(BY_ID[claim], sources, **kwargs)


def word(claim, runs):
    return decide(claim, runs)["word"]

"""A small network and settings for every method, for the tests of methods and their channels."""

import torch
from torch import nn

from dpngd.gradients import PerSample
from dpngd.methods import METHODS, Setting, build, spends_of
from dpngd.noise import stream
from dpngd.privacy import Spend
from dpngd.training.config import RunConfig

SHAPE, CLASSES = (1, 6, 6), 4
VALUES = {
    "public": "photos", "public_size": 50, "C": 0.7, "lambda_safe": 0.2, "lambda_base": 0.05, "T1": 0.25, "p": 2.0,
    "T_cur": 3, "adadps_e": 1e-4, "C0": 0.9, "C1": 0.4, "gep_directions": 12, "pt_steps": 5, "pt_eta": 0.05,
    "curvature_C": 0.6, "kl_budget": 2.0, "kl_noise": 1.0, "probe": 16, "floor_rank": 0.02, "clip_ratio": 0.9,
    "eta_sgd": 0.5, "C_sgd": 1.1,
}
"""No two clips are equal, so that a channel clipped to another's is seen."""


def config(method, **changes):
    values = {k: v for k, v in VALUES.items() if k in METHODS[method].uses}
    base = {"data": "digits", "model": "small", "epsilon": 2.0, "B": 8, "T": 4, "seed": 3, "evals": 1}
    if METHODS[method].rate:
        base["eta"] = 0.5
    if METHODS[method].public_from:
        values["public"] = METHODS[method].public_from[0]
    return RunConfig.from_dict({**base, "method": method, **values, **changes})


def network(dtype=torch.float32):
    """Conv with and without bias, norm, linear: every kind of layer. The same weights at every call."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.GroupNorm(2, 4),
                          nn.Conv2d(4, 3, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES))
    g = stream(7, "network")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.4)
    return model.to(dtype)


def images(n, name="images", dtype=torch.float32):
    return torch.randn(n, *SHAPE, generator=stream(n, name)).to(dtype)


def labels(n, name="targets"):
    return torch.randint(CLASSES, (n,), generator=stream(n, name))


def setting(method, *, model=None, sigma=0.0, draw=None, dtype=torch.float32, **changes):
    """A setting with 20 public images, and the noise multiplier given instead of a calibrated one."""
    c = config(method, **changes)
    model = network(dtype) if model is None else model
    calibrated = spends_of(c, 0.05, 160)
    spends = [Spend(s.purpose, s.epsilon, s.delta, sigma, s.every) for s in calibrated]
    return Setting(c, PerSample(model), spends, SHAPE, images(20, "public", dtype), draw)


def method(name, **options):
    return build(setting(name, **options))

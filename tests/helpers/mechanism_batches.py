"""Geometries, and batches with samples of every awkward kind, for the tests of the mechanism."""

import math

import torch

from dpngd.curvature import LayerCurvature
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import SampleGradients
from dpngd.layers.forms import Dense, Factors
from dpngd.noise import stream

# (R, O, I) of the layers: a convolution of two groups, a linear layer, one over time, a norm.
SHAPES = [(2, 3, 4), (1, 3, 5), (1, 4, 4), (1, 1, 6)]
FLOOR = 1e-2
POWERS = {"DP-NGD": (-0.5, -0.5), "pre-conditioning": (0.0, -1.0), "post-conditioning": (-1.0, 0.0),
          "one-sided": (-0.5, 0.0)}
GEOMETRIES = ["DP-SGD", *POWERS]


def factors():
    """A and G of each layer with eigenvalues from 10 to 1e-4: the floor clamps many of their products."""
    g = stream(0, "curvature")

    def covariance(R, n):
        Q = torch.linalg.qr(torch.randn(R, n, n, generator=g, dtype=torch.float64))[0]
        return (Q * torch.logspace(1, -2, n, dtype=torch.float64)) @ Q.mT

    return [(covariance(R, I), covariance(R, O)) for R, O, I in SHAPES]


FACTORS = factors()
CURVATURE = [LayerCurvature.of(A, G) for A, G in FACTORS]
ZEROS = [torch.zeros(shape) for shape in SHAPES]


def geometry_of(name, dtype=torch.float32):
    if name == "DP-SGD":
        return Euclidean()
    geometry = Kronecker(*POWERS[name])
    geometry.set(CURVATURE, FLOOR, dtype)
    return geometry


def flat(blocks):
    return torch.cat([u.double().flatten() for u in blocks])


KINDS = ("plain", "small", "zero", "nan", "inf", "nan in one layer", "steep", "cancelling", "tiny d", "duplicate",
         "1e8", "1e15", "1e18", "1e25", "1e30")


def sample(kind, g):
    """One sample of an adversary who may choose every number: the layers' tensors, factors as (a, d)."""
    def draw(*shape):
        return torch.randn(*shape, generator=g)

    scales = {"small": 1e-3, "zero": 0.0, "nan": math.nan, "inf": math.inf}
    scale = float(kind) if kind[0] == "1" else scales.get(kind, 1.0)
    w, row = scale * draw(1, *SHAPES[0]), scale * draw(1, *SHAPES[3])
    a1, d1, a4, d4 = draw(1, 1, 5), scale * draw(1, 1, 3), draw(1, 4, 4), scale * draw(1, 4, 4)
    if kind == "nan in one layer":
        row[..., 0] = math.nan
    if kind == "steep":  # all of it where F is largest, and large
        (A, G), top = FACTORS[0], []
        for r in range(2):
            top.append(torch.outer(torch.linalg.eigh(G[r])[1][:, -1], torch.linalg.eigh(A[r])[1][:, -1]))
        w, a1, d1, a4, d4, row = 1e6 * torch.stack(top)[None].float(), 0 * a1, 0 * d1, 0 * a4, 0 * d4, 0 * row
    if kind == "cancelling":  # large terms over time that leave almost nothing
        a4 = a4[:, :1] + 1e-7 * draw(1, 4, 4)
        d4 = 1e6 * torch.cat([d4[:, :2], -d4[:, :2]], 1)
        w, a1, row = 0 * w, 0 * a1, 0 * row
    if kind == "tiny d":  # d^2 is below what float32 holds, a^2 just within it
        a1, d1, a4, d4 = 1e18 * a1, 1e-23 * d1, 1e18 * a4, 1e-23 * d4
    return w, a1, d1, a4, d4, row


def batch_of(kinds, seed):
    g = stream(seed, "adversary")
    samples = []
    for kind in kinds:
        samples.append(samples[-1] if kind == "duplicate" and samples else sample(kind, g))
    w, a1, d1, a4, d4, row = (torch.cat(t) for t in zip(*samples, strict=True))
    return SampleGradients([Dense(w[..., :-1], w[..., -1]), Factors(a1, d1), Factors(a4, d4), Dense(row)],
                           torch.arange(len(kinds)).float())

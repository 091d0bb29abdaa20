"""Whitened norms and maps against the dense formula: every floor, steep samples, both clamps, grouped layers."""

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpngd.curvature import KFAC, LayerCurvature
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import PerSample, SampleGradients
from dpngd.layers.conv import Conv2dLayer, ConvFactors
from dpngd.layers.forms import Dense, Factors
from dpngd.noise import stream

FLOORS = ("nothing", "something", "everything")


def covariance(R, n, decades, g):
    """R symmetric matrices with eigenvalues from 1 to 10^-decades, each group's ten times smaller than the last's."""
    Q = torch.linalg.qr(torch.randn(R, n, n, generator=g, dtype=torch.float64))[0]
    values = torch.logspace(0, -decades, n, dtype=torch.float64) * 10.0 ** -torch.arange(R)[:, None]
    M = (Q * values.unsqueeze(-2)) @ Q.mT
    return (M + M.mT) / 2


def steepest(A, G):
    """The direction of the largest eigenvalue of each group, (R, O, I)."""
    u, v = torch.linalg.eigh(G)[1][..., -1], torch.linalg.eigh(A)[1][..., -1]
    return u.unsqueeze(2) * v.unsqueeze(1)


class Layers:
    """Gradients of layers of all forms, their curvature, and the dense gradients in float64."""

    def __init__(self, seed, b=6, decades=3.0, leak=1.0, dtype=torch.float32):
        g = stream(seed, "layers")

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.factors, gradients, self.dense = [], [], []
        for form, R, O, I in (("dense", 1, 4, 7), ("bias", 2, 3, 5), ("row", 1, 1, 6), ("rank one", 1, 5, 8),
                              ("time", 1, 6, 5)):
            A, G = covariance(R, I, decades, g), covariance(R, O, decades, g)
            if form in ("rank one", "time"):
                S = 1 if form == "rank one" else 3
                u, v = torch.linalg.eigh(G)[1][0, :, -1], torch.linalg.eigh(A)[1][0, :, -1]
                d, a = (u + leak * draw(b, S, O)).to(dtype), (v + leak * draw(b, S, I)).to(dtype)
                gradients.append(Factors(a, d))
                self.dense.append((d.double().mT @ a.double())[:, None])
            else:
                w = (steepest(A, G) + leak * draw(b, R, O, I)).to(dtype)
                gradients.append(Dense(w[..., :-1], w[..., -1]) if form == "bias" else Dense(w))
                self.dense.append(w.double())
            self.factors.append((A, G))
        self.gradients = SampleGradients(gradients, torch.zeros(b, dtype=dtype))
        self.curvature = [LayerCurvature.of(A, G) for A, G in self.factors]

    def floor(self, clamps):
        """One that clamps nothing, something or everything."""
        spectrum = torch.cat([F.spectrum().flatten() for F in self.curvature])
        return float({"nothing": spectrum.min() / 2, "something": spectrum.max() * 1e-4,
                      "everything": spectrum.max() * 2}[clamps])

    def power(self, floor, p, clamp="product"):
        """F~^p of each layer, dense."""
        if clamp == "product":
            return [reference.kfac_power(A, G, floor, p) for A, G in self.factors]
        root = floor**0.5
        return [reference.block_diagonal(reference_power(A, root, p), reference_power(G, root, p))
                for A, G in self.factors]

    def norms(self, powers):
        return sum((g.flatten(1) @ M).square().sum(1) for g, M in zip(self.dense, powers, strict=True)).sqrt()


def reference_power(Ms, floor, p):
    return torch.stack([reference.power(M, floor, p) for M in Ms])


def whitened(layers, floor, p, clamp="product", dtype=torch.float32):
    geometry = Kronecker(left=p, right=p, clamp=clamp)
    geometry.set(layers.curvature, floor, dtype)
    norms = geometry.sq_norms(layers.gradients)[0]
    assert norms.shape == (1, len(layers.gradients))
    return geometry, norms[0].double().sqrt()


@pytest.mark.parametrize("clamp", ["product", "factor"])
@pytest.mark.parametrize("p", [-0.5, -1.0])
@pytest.mark.parametrize("clamps", FLOORS)
def test_norms_equal_the_dense_formula(clamps, p, clamp):
    layers = Layers(0)
    floor = layers.floor(clamps)
    _, norms = whitened(layers, floor, p, clamp)
    torch.testing.assert_close(norms, layers.norms(layers.power(floor, p, clamp)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("p", [-0.5, -1.0])
@pytest.mark.parametrize("clamps", FLOORS)
def test_samples_in_the_steepest_directions(clamps, p):
    """What is left of such a norm after the subtraction is far below what float32 keeps, so it must be redone."""
    layers = Layers(1, decades=4.0, leak=1e-5)
    floor = layers.floor(clamps)
    geometry, norms = whitened(layers, floor, p)
    torch.testing.assert_close(norms, layers.norms(layers.power(floor, p)), rtol=1e-5, atol=0)
    assert (geometry.recomputed > 0) == (clamps != "everything")


def test_steep_samples_among_others():
    """Only the steep ones are redone, and each gets its own norm."""
    steep, plain = Layers(2, decades=4.0, leak=1e-5), Layers(2, decades=4.0, leak=1.0)
    order = torch.tensor([0, 7, 1, 2, 8, 9])  # rows of the two, steep ones first
    mixed = []
    for x, y in zip(steep.gradients.layers, plain.gradients.layers, strict=True):
        if isinstance(x, Factors):
            mixed.append(Factors(torch.cat([x.a, y.a])[order], torch.cat([x.d, y.d])[order]))
        else:
            mixed.append(Dense(torch.cat([x.materialise(), y.materialise()])[order]))
    floor = steep.floor("something")
    geometry = Kronecker()
    geometry.set(steep.curvature, floor)
    norms = geometry.sq_norms(SampleGradients(mixed, torch.zeros(6)))[0][0].double().sqrt()
    powers = steep.power(floor, -0.5)
    exact = torch.cat([steep.norms(powers), plain.norms(powers)])[order]
    torch.testing.assert_close(norms, exact, rtol=1e-5, atol=0)
    assert geometry.recomputed == 3


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), decades=st.floats(0, 5), leak=st.floats(0, 6), floor=st.floats(-12, 2),
       p=st.sampled_from([-0.5, -1.0]), clamp=st.sampled_from(["product", "factor"]))
def test_norms_of_drawn_curvature(seed, decades, leak, floor, p, clamp):
    layers = Layers(seed, b=2, decades=decades, leak=10.0**-leak)
    floor = 10.0**floor
    _, norms = whitened(layers, floor, p, clamp)
    torch.testing.assert_close(norms, layers.norms(layers.power(floor, p, clamp)), rtol=1e-5, atol=0)


@pytest.fixture(scope="module")
def wide_curvature():
    """Of a layer with 512 outputs and 513 inputs: its steepest direction, and a spectrum over five decades."""
    g = stream(0, "wide curvature")
    A, G = covariance(1, 513, 3.0, g), 1e3 * covariance(1, 512, 2.0, g)
    return A, G, LayerCurvature.of(A, G)


@pytest.mark.parametrize("leak", [1.0, 1e-5])
@pytest.mark.parametrize("clamps", FLOORS)
@pytest.mark.parametrize("form", [ConvFactors, Dense])
def test_wide_layers(form, clamps, leak, wide_curvature):
    """2^18 parameters: a convolution kept as factors; and a dense one, whose sums are long enough to drift."""
    g = stream(0, "wide")
    A, G, F = wide_curvature
    b, top = 3, steepest(A, G)[0]
    u, v = torch.linalg.svd(top)[0][:, 0], torch.linalg.svd(top)[2][0]
    a = v[:-1, None, None] / v[-1] + leak * torch.randn(b, 512, 1, 2, generator=g, dtype=torch.float64)
    d = u[:, None, None] + leak * torch.randn(b, 512, 1, 2, generator=g, dtype=torch.float64)
    a, d = a.float(), d.float()
    x = Conv2dLayer("conv", nn.Conv2d(512, 512, 1)).gradient(a, d, 1)
    assert isinstance(x, ConvFactors)
    U = torch.nn.functional.pad(a.double().flatten(2).mT, (0, 1), value=1.0)
    dense = d.double().flatten(2) @ U  # (b, O, I)
    if form is Dense:
        dense = dense.float()
        x, dense = Dense(dense[:, None]), dense.double()
    floor = {"nothing": 1e-6, "something": 1.0, "everything": 1e6}[clamps]
    geometry = Kronecker()
    geometry.set([F], floor)
    norms = geometry.sq_norms(SampleGradients([x], torch.zeros(b)))[0][0].double().sqrt()
    rotated = F.Q_G[0].mT @ dense @ F.Q_A[0]
    exact = (rotated.square() / F.spectrum()[0].clamp(min=floor)).flatten(1).sum(1).sqrt()
    torch.testing.assert_close(norms, exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("clamps", FLOORS)
def test_norms_of_a_network_on_its_own_curvature(clamps):
    """All of it together: K-FAC of a network with grouped convolutions and norms, gradients of K = 2 views."""
    g = stream(0, "network")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.GroupNorm(2, 6), nn.Tanh(),
                              nn.Conv2d(6, 4, 2, bias=False), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3)).double()
    x = torch.randn(10, 4, 5, 5, generator=g, dtype=torch.float64)
    y = torch.randint(3, (5,), generator=g)
    kfac = KFAC(model, torch.randn(8, 4, 5, 5, generator=g, dtype=torch.float64), labels="exact")
    factors, curvature = kfac.factors(), kfac()
    spectrum = torch.cat([F.spectrum().flatten() for F in curvature]).sort()[0]
    floor = float({"nothing": 1e-13, "something": spectrum[len(spectrum) // 2 :].median(),
                   "everything": 2 * spectrum[-1]}[clamps])
    geometry = Kronecker()
    geometry.set(curvature, floor, torch.float64)
    norms = geometry.sq_norms(PerSample(model, K=2)(x, y))[0][0].sqrt()
    gradients, _ = reference.per_sample(model, x, y, K=2)
    exact = sum((g.flatten(1) @ reference.kfac_power(A, G, floor, -0.5)).square().sum(1)
                for g, (A, G) in zip(gradients, factors, strict=True)).sqrt()
    torch.testing.assert_close(norms, exact, rtol=1e-6, atol=0)


# ----------------------------------------------------------------------------------------------------- the maps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("clamp", ["product", "factor"])
@pytest.mark.parametrize("clamps", FLOORS)
@pytest.mark.parametrize(("left", "right"), [(-0.5, -0.5), (0, -1.0), (-1.0, 0), (-0.5, 0), (0.5, 1.0)])
def test_maps_equal_the_dense_ones(left, right, clamps, clamp, dtype):
    layers = Layers(3, b=1, dtype=dtype)
    floor = layers.floor(clamps)
    geometry = Kronecker(left, right, clamp)
    geometry.set(layers.curvature, floor, dtype)
    sums = [g[0].to(dtype) for g in layers.dense]
    for ours, p in ((geometry.into([sums])[0], left), (geometry.back([sums]), right)):
        for u, v, M in zip(ours, layers.dense, layers.power(floor, p, clamp), strict=True):
            assert u.dtype == dtype
            exact = (M @ v[0].flatten()).view_as(u)
            assert reference.relative(u[None], exact[None]) < (1e-6 if dtype == torch.float32 else 1e-9)


def test_left_zero_is_euclidean():
    layers = Layers(4)
    geometry, norms = whitened(layers, layers.floor("something"), 0)
    exact = torch.cat([g.flatten(1) for g in layers.dense], 1).norm(dim=1)
    torch.testing.assert_close(norms, exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(Euclidean().sq_norms(layers.gradients)[0][0].double().sqrt(), exact, rtol=1e-6, atol=0)
    sums = [g[0] for g in layers.dense]
    assert geometry.into([sums])[0] is sums
    assert Euclidean().into([sums]) == [sums]
    assert Euclidean().back([sums]) is sums


def test_curvature_of_few_images_has_zeros():
    """Rank-deficient factors: without a floor above them the zeros would divide."""
    g = stream(0, "deficient")
    a, d = torch.randn(3, 6, generator=g, dtype=torch.float64), torch.randn(2, 5, generator=g, dtype=torch.float64)
    A, G = (a.mT @ a)[None], (d.mT @ d)[None]
    u = torch.randn(4, 1, 5, 6, generator=g)
    geometry = Kronecker()
    geometry.set([LayerCurvature.of(A, G)], 1e-3)
    norms = geometry.sq_norms(SampleGradients([Dense(u)], torch.zeros(4)))[0][0].double().sqrt()
    exact = (u.double().flatten(1) @ reference.kfac_power(A, G, 1e-3, -0.5)).norm(dim=1)
    torch.testing.assert_close(norms, exact, rtol=1e-5, atol=0)


def test_share_of_clamped_eigenvalues():
    layers = Layers(5)
    spectrum = torch.cat([F.spectrum().flatten() for F in layers.curvature])
    geometry = Kronecker()
    for clamps in FLOORS:
        floor = layers.floor(clamps)
        geometry.set(layers.curvature, floor)
        assert geometry.clamped_share() == pytest.approx(float((spectrum <= floor).double().mean()))


def test_the_floor_and_the_curvature_of_a_step_are_the_ones_set():
    """`set` keeps what it has for the same inputs, and takes up a change of either."""
    layers, other = Layers(6), Layers(7)
    geometry = Kronecker()
    geometry.set(layers.curvature, 0.1)
    kept = geometry.layers
    geometry.set(layers.curvature, 0.1)
    assert geometry.layers is kept
    geometry.set(layers.curvature, 0.2)
    torch.testing.assert_close(geometry.sq_norms(layers.gradients)[0][0].double().sqrt(),
                               layers.norms(layers.power(0.2, -0.5)), rtol=1e-5, atol=0)
    geometry.set(other.curvature, 0.2)
    torch.testing.assert_close(geometry.sq_norms(layers.gradients)[0][0].double().sqrt(),
                               layers.norms(other.power(0.2, -0.5)), rtol=1e-5, atol=0)

"""The Gaussian mechanism: what one sample can do to the clipped sum, what noise is added, what is counted."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpngd.curvature import LayerCurvature
from dpngd.errors import UsageError
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import PerSample, SampleGradients
from dpngd.layers import Dense, Factors
from dpngd.mechanism import NONE, GaussianMechanism
from dpngd.streams import stream

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


def left_map(name, blocks):
    """L applied to one sample's (R, O, I) blocks, dense and flat, in float64."""
    p = POWERS[name][0] if name in POWERS else 0.0
    return torch.cat([reference.kfac_power(A, G, FLOOR, p) @ u.double().flatten() if p else u.double().flatten()
                      for u, (A, G) in zip(blocks, FACTORS, strict=True)])


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


@pytest.mark.parametrize("name", GEOMETRIES)
@settings(max_examples=40)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), C=st.sampled_from([1e-3, 1.0, 50.0]),
       seed=st.integers(0, 10**6))
def test_no_sample_moves_the_sum_by_more_than_C(name, kinds, C, seed):
    """The guarantee's one premise, in float32, for each sample of the batch and whatever else is in it."""
    batch, geometry, mechanism = batch_of(kinds, seed), geometry_of(name), GaussianMechanism((C,), 1.0, 4)

    def clipped_sum(g):
        return flat(mechanism.clipped_sums([g], geometry, ZEROS).sums[0])

    whole = clipped_sum(batch)
    assert whole.isfinite().all()
    for i in range(len(kinds)):
        without = batch.select(torch.tensor([j for j in range(len(kinds)) if j != i], dtype=torch.long))
        assert (whole - clipped_sum(without)).norm() <= C * (1 + 1e-6), kinds[i]
        alone = batch.select(torch.tensor([i]))
        assert clipped_sum(alone).norm() <= C * (1 + 1e-6), kinds[i]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_clipped_sum_is_the_formula(name):
    """sum_i L g_i min(1, C / ||L g_i||), dense and in float64; some samples are clipped and some are not."""
    kinds = ["plain", "small", "plain", "zero", "small", "1e8", "plain"]
    batch, C = batch_of(kinds, 1), 2.0
    s = GaussianMechanism((C,), 1.0, 4).clipped_sums([batch], geometry_of(name), ZEROS)
    mapped = torch.stack([left_map(name, [layer.select(torch.tensor([i])).materialise()[0] for layer in batch.layers])
                          for i in range(len(kinds))])
    norms = mapped.norm(dim=1)
    assert norms.min() == 0
    assert ((norms > 0) & (norms < C)).any()
    exact = (mapped * (C / norms).clamp(max=1.0)[:, None]).sum(0)
    torch.testing.assert_close(s.norms[0].double(), norms, rtol=1e-5, atol=1e-15)
    assert (flat(s.sums[0]) - exact).norm() < 2e-5 * C * len(kinds)
    assert s.seen == len(kinds)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("kind", ["nan", "inf", "nan in one layer", "1e25"])
def test_a_sample_that_is_not_finite_contributes_exactly_zero_and_is_counted(name, kind):
    mechanism, geometry = GaussianMechanism((1.0,), 0.0, 3), geometry_of(name)
    bad = batch_of(["plain", kind, "plain", kind, "small"], 2)
    only = bad.select(torch.tensor([0, 2, 4]))
    expected = mechanism.release([only], geometry, ZEROS, stream(0, "noise"))
    release = mechanism.release([bad], geometry, ZEROS, stream(0, "noise"))
    torch.testing.assert_close(flat(release.direction), flat(expected.direction), rtol=1e-5, atol=1e-7)
    assert (release.nonfinite, expected.nonfinite) == (2, 0)
    assert release.norms.shape == (1, 3)
    assert release.loss == pytest.approx((0 + 2 + 4) / 3)
    assert flat(release.direction).norm() > 0
    nothing = mechanism.release([bad.select(torch.tensor([1, 3]))], geometry, ZEROS, stream(0, "noise"))
    assert nothing.nonfinite == 2
    assert not flat(nothing.direction).any()
    assert math.isnan(nothing.loss)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(5, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 2), nn.Tanh(),
                             nn.Flatten(), nn.Linear(4, 3)).double()


def test_bad_images_through_a_network_leave_the_others_alone():
    """From pixels: images that are huge, not finite, blank or repeated, in one micro-batch with good ones."""
    persample, g = PerSample(network()), stream(0, "images")
    x = torch.randn(8, 5, 4, 4, generator=g, dtype=torch.float64)
    x[1], x[3], x[4], x[5], x[6] = math.nan, 0.0, 1e30, x[0], x[6] * 1e15
    x[2, 0, 0, 0] = math.inf
    y = torch.tensor([0, 1, 2, 0, 1, 0, 2, 1])
    mechanism, zeros = GaussianMechanism((0.1,), 0.0, 1), persample.zeros()

    def clipped_sum(rows):
        s = mechanism.clipped_sums([persample(x[rows], y[rows])], Euclidean(), zeros)
        return flat(s.sums[0]), s.seen - s.norms.shape[1]

    whole, nonfinite = clipped_sum(list(range(8)))
    assert nonfinite == 2
    torch.testing.assert_close(whole, clipped_sum([0, 3, 4, 5, 6, 7])[0], rtol=1e-10, atol=1e-12)
    for i in range(8):
        rest, _ = clipped_sum([j for j in range(8) if j != i])
        moved = (whole - rest).norm()
        assert moved <= 0.1 * (1 + 1e-6)
        assert (moved > 0) == (i not in (1, 2))


# ------------------------------------------------------------------------------------------------------- noise


class TwoChannels:
    """The gradient twice: in channel 1 as it is, in channel 2 times three. R adds them."""

    fragile = NONE

    def sq_norms(self, g):
        n = g.sq_norms()
        return torch.stack([n, 9 * n])

    def into(self, sums):
        return [sums[0], [3 * u for u in sums[1]]]

    def back(self, releases):
        return [u + v for u, v in zip(*releases, strict=True)]


class Apart(TwoChannels):
    """The same, but R shows the channels side by side."""

    def back(self, releases):
        return [torch.stack(pair) for pair in zip(*releases, strict=True)]


def deviation(values, expected):
    """Distance of a sample's standard deviation from the expected, in its own standard errors."""
    return abs(float(values.std()) / expected - 1) * math.sqrt(2 * values.numel())


@pytest.mark.parametrize("batches", [[], [SampleGradients([Dense(torch.zeros(0, 1, 40, 500))], torch.zeros(0))]],
                         ids=["no micro-batch", "an empty one"])
def test_an_empty_batch_releases_noise_alone(batches):
    sigma, C, B = 1.7, 0.3, 12.0
    mechanism = GaussianMechanism((C,), sigma, B)
    release = mechanism.release(batches, Euclidean(), [torch.zeros(1, 40, 500)], stream(0, "noise"))
    noise = release.direction[0]
    assert deviation(noise, sigma * C / B) < 5
    assert abs(noise.mean()) < 5 * sigma * C / B / math.sqrt(noise.numel())
    assert (release.nonfinite, release.clipped, release.norms.numel()) == (0, 0.0, 0)
    assert math.isnan(release.loss)


def test_noise_is_added_after_L_and_before_R():
    """DP-NGD's noise has the covariance of R, not of R L; entries of the whitened release are white."""
    big = torch.eye(60, dtype=torch.float64)[None]
    for (left, right), std in (((-0.5, -0.5), 0.5), ((-0.5, 0.0), 1.0), ((0.0, -1.0), 0.25)):
        geometry = Kronecker(left, right)
        geometry.set([LayerCurvature.of(4 * big, big)], 1e-3)
        mechanism = GaussianMechanism((1.0,), 1.0, 1.0)
        noise = mechanism.release([], geometry, [torch.zeros(1, 60, 60)], stream(0, "noise")).direction[0]
        assert deviation(noise, std) < 5


def test_two_channels_share_one_budget():
    """Each gets sqrt(2) sigma C_j, and its own clip; one sample moves (s_1/C_1, s_2/C_2) by at most sqrt(2)."""
    clips, sigma = (0.5, 4.0), 1.3
    mechanism = GaussianMechanism(clips, sigma, 2.0)
    assert mechanism.sensitivity == clips
    assert mechanism.noise_std == pytest.approx([sigma * math.sqrt(2) * C for C in clips])
    release = mechanism.release([], Apart(), [torch.zeros(1, 100, 200)], stream(0, "noise")).direction[0]
    for channel, C in zip(release, clips, strict=True):
        assert deviation(channel, sigma * math.sqrt(2) * C / 2.0) < 5
    assert abs(float((release[0] * release[1]).mean() / (release[0].std() * release[1].std()))) < 5 / math.sqrt(20_000)
    batch = batch_of(["plain", "1e8", "nan", "small"], 3)
    s = mechanism.clipped_sums([batch], TwoChannels(), ZEROS)
    assert s.norms.shape == (2, 3)
    torch.testing.assert_close(s.norms[1], 3 * s.norms[0])
    for i in range(4):
        others = batch.select(torch.tensor([j for j in range(4) if j != i]))
        rest = mechanism.clipped_sums([others], TwoChannels(), ZEROS)
        moved = [(flat(s.sums[j]) - flat(rest.sums[j])).norm() / clips[j] for j in range(2)]
        assert all(m <= 1 + 1e-6 for m in moved)
    one = batch.select(torch.tensor([1]))
    big = mechanism.clipped_sums([one], TwoChannels(), ZEROS)
    for j in range(2):
        assert flat(big.sums[j]).norm() == pytest.approx(clips[j], rel=3e-5)


def test_one_channel_has_noise_sigma_C():
    assert GaussianMechanism((2.0,), 1.5, 7).noise_std == (3.0,)
    assert GaussianMechanism((2.0,), 1.5, 7).sensitivity == (2.0,)


def test_division_is_by_the_expected_batch_size():
    """Not by 3, nor by the number of finite ones."""
    batch, geometry = batch_of(["plain", "nan", "plain"], 4), geometry_of("DP-SGD")
    s = GaussianMechanism((1.0,), 0.0, 100.0)
    release = s.release([batch], geometry, ZEROS, stream(0, "noise"))
    expected = flat(s.clipped_sums([batch], geometry, ZEROS).sums[0]) / 100
    torch.testing.assert_close(flat(release.direction), expected, rtol=1e-6, atol=0)


def test_noise_comes_from_the_generator_alone():
    batch, geometry, mechanism = batch_of(["plain"] * 3, 5), geometry_of("DP-NGD"), GaussianMechanism((1.0,), 1.0, 3)
    state = torch.get_rng_state()

    def direction(seed):
        return flat(mechanism.release([batch], geometry, ZEROS, stream(seed, "noise")).direction)

    assert torch.equal(direction(0), direction(0))
    assert not torch.equal(direction(0), direction(1))
    g = stream(0, "noise")
    first, second = (flat(mechanism.release([batch], geometry, ZEROS, g).direction) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_micro_batches_do_not_matter(name):
    kinds = ["plain", "small", "nan", "1e8", "plain", "zero", "plain", "inf", "plain"]
    batch, geometry, mechanism = batch_of(kinds, 6), geometry_of(name), GaussianMechanism((1.0,), 0.8, 5)
    whole = mechanism.release([batch], geometry, ZEROS, stream(0, "noise"))
    for splits in ([1] * 9, [4, 5], [2, 1, 6], [3, 0, 6]):
        parts = torch.arange(9).split(splits)
        release = mechanism.release((batch.select(p) for p in parts), geometry, ZEROS, stream(0, "noise"))
        torch.testing.assert_close(flat(release.direction), flat(whole.direction), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(release.norms, whole.norms, rtol=1e-5, atol=0)
        assert (release.nonfinite, release.clipped) == (whole.nonfinite, whole.clipped) == (2, whole.clipped)
        assert release.loss == pytest.approx(whole.loss)


def test_the_sums_given_for_their_shapes_are_left_alone():
    batch = batch_of(["plain"], 7)
    for zeros, g in ((ZEROS, batch), ([z.double() for z in ZEROS], batch.double())):
        release = GaussianMechanism((1.0,), 0.5, 1).release([g], Euclidean(), zeros, stream(0, "noise"))
        assert not any(z.any() for z in zeros)
        assert {u.dtype for u in release.direction} == {zeros[0].dtype}


def test_diagnostics():
    batch = batch_of(["plain", "zero", "1e8", "small"], 8)
    release = GaussianMechanism((1.0,), 0.0, 4).release([batch], Euclidean(), ZEROS, stream(0, "noise"))
    assert release.clipped == 0.5
    assert release.loss == pytest.approx((0 + 1 + 2 + 3) / 4)


@pytest.mark.parametrize(("arguments", "says"), [
    (((), 1.0, 1), "clipping thresholds are ()"),
    (((0.0,), 1.0, 1), "clipping thresholds are (0.0,): each must be a positive number"),
    (((-1.0,), 1.0, 1), "clipping thresholds"),
    (((1.0, math.nan), 1.0, 1), "clipping thresholds"),
    (((math.inf,), 1.0, 1), "clipping thresholds"),
    (((1.0,), -0.1, 1), "sigma is -0.1: it must be a number >= 0"),
    (((1.0,), math.nan, 1), "sigma is nan"),
    (((1.0,), math.inf, 1), "sigma is inf"),
    (((1.0,), 1.0, 0), "the expected batch size is 0: it must be positive"),
    (((1.0,), 1.0, -5), "the expected batch size"),
    (((1.0,), 1.0, math.nan), "the expected batch size"),
])
def test_settings_that_are_refused(arguments, says):
    with pytest.raises(UsageError) as error:
        GaussianMechanism(*arguments)
    assert says in str(error.value)

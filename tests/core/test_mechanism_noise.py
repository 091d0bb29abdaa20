"""The Gaussian mechanism: its noise, its channels, its division, its settings."""

import math

import pytest
import torch
from mechanism_batches import GEOMETRIES, ZEROS, batch_of, flat, geometry_of

from dpngd.curvature import LayerCurvature
from dpngd.errors import UsageError
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import PerSample, SampleGradients
from dpngd.layers.forms import Dense
from dpngd.mechanism import GaussianMechanism, grid
from dpngd.noise import seeded_noise


class TwoChannels:
    """The gradient twice: in channel 1 as it is, in channel 2 times three. R adds them."""

    def sq_norms(self, g):
        n = g.sq_norms()
        return torch.stack([n, 9 * n]), torch.zeros(len(g), dtype=torch.bool)

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
    release = mechanism.release(batches, Euclidean(), [torch.zeros(1, 40, 500)], seeded_noise(0))
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
        noise = mechanism.release([], geometry, [torch.zeros(1, 60, 60)], seeded_noise(0)).direction[0]
        assert deviation(noise, std) < 5


def test_two_channels_share_one_budget():
    """Each gets sqrt(2) sigma C_j, and its own clip; one sample moves (s_1/C_1, s_2/C_2) by at most sqrt(2)."""
    clips, sigma = (0.5, 4.0), 1.3
    mechanism = GaussianMechanism(clips, sigma, 2.0)
    assert mechanism.sensitivity == clips
    assert mechanism.noise_std == pytest.approx([sigma * math.sqrt(2) * C for C in clips])
    release = mechanism.release([], Apart(), [torch.zeros(1, 100, 200)], seeded_noise(0)).direction[0]
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
    release = s.release([batch], geometry, ZEROS, seeded_noise(0))
    expected = flat(s.clipped_sums([batch], geometry, ZEROS).sums[0]) / 100
    torch.testing.assert_close(flat(release.direction), expected, rtol=1e-6, atol=0)


def test_noise_comes_from_the_generator_alone():
    batch, geometry, mechanism = batch_of(["plain"] * 3, 5), geometry_of("DP-NGD"), GaussianMechanism((1.0,), 1.0, 3)
    state = torch.get_rng_state()

    def direction(seed):
        return flat(mechanism.release([batch], geometry, ZEROS, seeded_noise(seed)).direction)

    assert torch.equal(direction(0), direction(0))
    assert not torch.equal(direction(0), direction(1))
    g = seeded_noise(0)
    first, second = (flat(mechanism.release([batch], geometry, ZEROS, g).direction) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_micro_batches_do_not_matter(name):
    kinds = ["plain", "small", "nan", "1e8", "plain", "zero", "plain", "inf", "plain"]
    batch, geometry, mechanism = batch_of(kinds, 6), geometry_of(name), GaussianMechanism((1.0,), 0.8, 5)
    whole = mechanism.release([batch], geometry, ZEROS, seeded_noise(0))
    for splits in ([1] * 9, [4, 5], [2, 1, 6], [3, 0, 6]):
        parts = torch.arange(9).split(splits)
        release = mechanism.release((batch.select(p) for p in parts), geometry, ZEROS, seeded_noise(0))
        torch.testing.assert_close(flat(release.direction), flat(whole.direction), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(release.norms, whole.norms, rtol=1e-5, atol=0)
        assert (release.nonfinite, release.clipped) == (whole.nonfinite, whole.clipped) == (2, whole.clipped)
        assert release.loss == pytest.approx(whole.loss)


def test_the_sums_given_for_their_shapes_are_left_alone():
    batch = batch_of(["plain"], 7)
    for zeros, g in ((ZEROS, batch), ([z.double() for z in ZEROS], batch.double())):
        release = GaussianMechanism((1.0,), 0.5, 1).release([g], Euclidean(), zeros, seeded_noise(0))
        assert not any(z.any() for z in zeros)
        assert {u.dtype for u in release.direction} == {zeros[0].dtype}


def test_diagnostics():
    batch = batch_of(["plain", "zero", "1e8", "small"], 8)
    release = GaussianMechanism((1.0,), 0.0, 4).release([batch], Euclidean(), ZEROS, seeded_noise(0))
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


def test_a_release_lies_on_its_grid():
    """Whatever the bits of the sum: multiples of a power of two, 2^-20 of the noise or a little less."""
    for std in (1e-6, 0.3, 1.0, 1.9999, 7e5):
        assert 2.0**-21 < grid(std) / std <= 2.0**-20
        assert math.frexp(grid(std))[0] == 0.5
    C, sigma = 0.3, 1.7
    mechanism, batch = GaussianMechanism((C,), sigma, 1.0), batch_of(["plain"] * 3, 9)
    for b, zeros in ((batch, ZEROS), (batch.double(), [z.double() for z in ZEROS])):
        sums = mechanism.clipped_sums([b], Euclidean(), zeros).sums
        noisy = flat(mechanism.add_noise(sums, seeded_noise(0))[0])
        steps = noisy / grid(sigma * C)
        assert torch.equal(steps, steps.round())
        assert steps.abs().max() > 1000
        same = seeded_noise(0)
        unrounded = flat([s.double() + same(s.double(), sigma * C) for s in sums[0]])
        assert (noisy - unrounded).abs().max() <= grid(sigma * C)


def test_noise_is_asked_for_in_float64():
    """So that it is added before it is rounded: rounding the sum is post-processing, rounding the noise is not."""
    asked = []

    def noise(like, std):
        asked.append(like.dtype)
        return torch.zeros_like(like)

    GaussianMechanism((1.0,), 1.0, 1.0).release([], Euclidean(), ZEROS, noise)
    assert set(asked) == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused(dtype):
    with pytest.raises(UsageError, match=f"'0.weight' is {str(dtype)[6:]}.*use float32"):
        PerSample(torch.nn.Sequential(torch.nn.Linear(4, 3)).to(dtype))

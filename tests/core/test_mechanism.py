"""The Gaussian mechanism: no sample moves the clipped sum by more than C, whatever it is."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanism_batches import FACTORS, FLOOR, GEOMETRIES, KINDS, POWERS, ZEROS, batch_of, flat, geometry_of
from torch import nn

from dpngd.geometry import Euclidean
from dpngd.gradients import PerSample
from dpngd.mechanism import GaussianMechanism
from dpngd.noise import seeded_noise, stream


def left_map(name, blocks):
    """L applied to one sample's (R, O, I) blocks, dense and flat, in float64."""
    p = POWERS[name][0] if name in POWERS else 0.0
    return torch.cat([reference.kfac_power(A, G, FLOOR, p) @ u.double().flatten() if p else u.double().flatten()
                      for u, (A, G) in zip(blocks, FACTORS, strict=True)])


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
    expected = mechanism.release([only], geometry, ZEROS, seeded_noise(0))
    release = mechanism.release([bad], geometry, ZEROS, seeded_noise(0))
    torch.testing.assert_close(flat(release.direction), flat(expected.direction), rtol=1e-5, atol=1e-7)
    assert (release.nonfinite, expected.nonfinite) == (2, 0)
    assert release.norms.shape == (1, 3)
    assert release.loss == pytest.approx((0 + 2 + 4) / 3)
    assert flat(release.direction).norm() > 0
    nothing = mechanism.release([bad.select(torch.tensor([1, 3]))], geometry, ZEROS, seeded_noise(0))
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

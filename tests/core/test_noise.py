"""The sources of randomness: streams that use their whole seed, noise with its tail, entropy for releases."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpngd import noise
from dpngd.noise import SecretNoise, SeededNoise, TorchNoise, gaussian, secret_uniform, seeded_noise, stream
from dpngd.sampling import PoissonSampler

LIKE = torch.zeros(100, 1001)
SOURCES = {"seeded": lambda: seeded_noise(0), "secret": SecretNoise,
           "torch": lambda: TorchNoise(torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_noise_is_standard_normal_in_shape_and_dtype(source):
    draw = source()
    for like in (LIKE, LIKE.double(), torch.zeros(3, 1, 7), torch.zeros(()), torch.zeros(0, 4)):
        out = draw(like, 2.0)
        assert (out.shape, out.dtype) == (like.shape, like.dtype)
    x = draw(LIKE.double(), 3.0).flatten() / 3.0
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-6
    assert abs(float((x[1:] * x[:-1]).mean())) < 5 / math.sqrt(len(x))
    assert abs(float((x[: len(x) // 2] * x[len(x) // 2 : 2 * (len(x) // 2)]).mean())) < 5 / math.sqrt(len(x) // 2)
    assert not torch.equal(draw(LIKE, 1.0), draw(LIKE, 1.0))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_noise_is_drawn_in_double_precision(source):
    """A float32 draw has 24 bits of its own; a float64 draw, asked for in float64, has more."""
    x = source()(LIKE.double(), 1.0)
    assert (x != x.float().double()).float().mean() > 0.99


def test_the_tail_reaches_beyond_that_of_float32():
    """The largest radius that 64 bits give, against 5.77 of a 24-bit uniform: at the words that give it."""
    words = torch.tensor([-(2**63), -(2**63) + 2**40, 0, 2**62])  # radius words, then angles 0 and pi/2
    x = gaussian(words)
    assert float(x[0]) == pytest.approx(math.sqrt(2 * 64 * math.log(2)), rel=1e-12) == pytest.approx(9.42, abs=0.01)
    assert float(x[3]) == pytest.approx(math.sqrt(2 * 24 * math.log(2)), rel=1e-6)
    assert gaussian(torch.tensor([2**63 - 1, 0])).abs().max() < 1e-7  # u = 1: no nan
    for k in (1, 3, 511, 513, 2048):  # each word has its radius: float64 has steps of 1024 near -2^63
        r = float(gaussian(torch.tensor([-(2**63) + k, 0]))[0])
        assert r == pytest.approx(math.sqrt(2 * (64 * math.log(2) - math.log(k + 1))), rel=1e-12)


def test_far_draws_are_as_frequent_as_they_should_be():
    """Above 4.5 standard deviations: 6.8 per million."""
    draw = seeded_noise(1)
    count = sum(int((draw(torch.zeros(1_000_000, dtype=torch.float64), 1.0).abs() > 4.5).sum()) for _ in range(5))
    assert 12 <= count <= 60  # expected 34, Poisson: false alarm below 1e-4


def test_all_bits_of_a_seed_count():
    """torch's manual_seed takes 5 and 5 + 2^32 for the same seed."""
    plain = [torch.rand(4, generator=torch.Generator().manual_seed(s)) for s in (5, 5 + 2**32)]
    assert torch.equal(*plain)
    draws = [torch.rand(4, generator=stream(s, "noise")) for s in (5, 5 + 2**32, 5 + 2**80)]
    noises = [SeededNoise(s)(torch.zeros(4), 1.0) for s in (5, 5 + 2**32, 5 + 2**80)]
    for a in range(3):
        for b in range(a):
            assert not torch.equal(draws[a], draws[b])
            assert not torch.equal(noises[a], noises[b])
    assert torch.equal(torch.rand(4, generator=stream(5, "noise")), draws[0])
    assert not torch.equal(torch.rand(4, generator=stream(5, "labels")), draws[0])


def test_two_streams_that_share_their_32_bit_seed_differ(monkeypatch):
    """A stream is more than manual_seed of something: with the same 32 bits in front it still is another one."""
    class Same:
        def __init__(self, data):
            self.data = data

        def digest(self, n):
            rest = np.random.Generator(np.random.Philox(len(self.data))).bytes(n - 8)
            return bytes(8) + rest

    monkeypatch.setattr(noise.hashlib, "shake_256", Same)
    a, b = (torch.rand(4, generator=stream(0, name)) for name in ("x", "xy"))
    assert not torch.equal(a, b)


def test_a_stream_is_uniform():
    u = torch.rand(200_000, dtype=torch.float64, generator=stream(3, "sampling"))
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6


def test_a_secret_stream_is_new_every_time_and_uniform():
    torch.manual_seed(0)
    first, second = noise.secret_stream(), noise.secret_stream()
    u, v = (torch.rand(100_000, dtype=torch.float64, generator=g) for g in (first, second))
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6
    assert abs(float(np.corrcoef(u, v)[0, 1])) < 5 / math.sqrt(len(u))
    assert first.initial_seed() != second.initial_seed()


def test_secret_uniform():
    u = secret_uniform(200_000)
    assert u.dtype == torch.float64
    assert 0 <= float(u.min()) < float(u.max()) < 1
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6


def test_secret_draws_ignore_every_seed():
    def draw():
        torch.manual_seed(0)
        return SecretNoise()(LIKE, 1.0), PoissonSampler(1000, 300, secret_uniform).draw()

    (a, rows), (b, others) = draw(), draw()
    assert not torch.equal(a, b)
    assert rows.tolist() != others.tolist()
    assert abs(len(rows) - 300) < 6 * math.sqrt(1000 * 0.3 * 0.7)

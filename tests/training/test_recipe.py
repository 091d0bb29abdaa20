"""The recipe: sampling at exactly q, views as a slow loop would make them, averages as the recurrence says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dpngd.errors import UsageError
from dpngd.noise import stream
from dpngd.sampling import PoissonSampler
from dpngd.training.recipe import EMA, augment, draw_views, take_views, to_float, views_of

ALARM = 1e-4  # a sound sampler fails a test at this level once in 10,000 seeds; the seed is fixed


@pytest.fixture(scope="module")
def drawn():
    """4,000 batches of a sampler with N = 150, B = 40, as a matrix of inclusions (4000, 150)."""
    sampler = PoissonSampler(150, 40, stream(5, "sampling"))
    included = np.zeros((4000, 150), bool)
    for row in included:
        row[sampler.draw().numpy()] = True
    return included, sampler.q


def test_batch_sizes_are_binomial(drawn):
    included, q = drawn
    assert q == 40 / 150
    sizes = included.sum(1)
    edges = np.arange(25, 55)  # bins with more than 5 expected each, the tails lumped
    binomial = stats.binom(150, q)
    expected = np.diff(np.concatenate([[0], binomial.cdf(edges), [1]])) * len(sizes)
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=len(expected))
    assert expected.min() > 5
    assert stats.chisquare(observed, expected).pvalue > ALARM


def test_every_image_is_included_equally_often_and_independently(drawn):
    included, q = drawn
    counts, n = included.sum(0), len(included)
    assert stats.chi2(150).sf(((counts - n * q) ** 2 / (n * q * (1 - q))).sum()) > ALARM
    z = (included - q) / np.sqrt(q * (1 - q))
    between_images = (z.T @ z)[np.triu_indices(150, 1)] / np.sqrt(n)
    from_step_to_step = (z[1:] * z[:-1]).sum(0) / np.sqrt(n - 1)
    for correlations in (between_images, from_step_to_step):
        assert stats.kstest(correlations, "norm").pvalue > ALARM


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    batches = []
    for seed in (1, 1, 2):
        sampler = PoissonSampler(100, 10, stream(seed, "sampling"))
        batches.append([sampler.draw().tolist() for _ in range(20)])
    assert batches[0] == batches[1] != batches[2]


def test_batches_may_be_empty_and_full():
    sparse = PoissonSampler(4, 1, stream(0, "sampling"))
    assert 0 in {len(sparse.draw()) for _ in range(50)}
    assert PoissonSampler(30, 30, stream(0, "sampling")).draw().tolist() == list(range(30))


@pytest.mark.parametrize(("N", "B"), [(10, 11), (10, 0), (0, 1)])
def test_a_batch_larger_than_the_data_is_refused(N, B):
    with pytest.raises(UsageError, match=f"batch size B is {B} for N = {N} private images"):
        PoissonSampler(N, B, stream(0, "sampling"))


def pictures(b, shape=(3, 32, 32)):
    return torch.randint(0, 256, (b, *shape), dtype=torch.uint8, generator=stream(b, "pictures"))


def slow(x, views, pad):
    """One view after the other, with torch's own padding: what `take_views` must equal."""
    K = len(views) // len(x)
    out = []
    for i, view in enumerate(views.tolist()):
        flip, rest = divmod(view, (2 * pad + 1) ** 2)
        top, left = divmod(rest, 2 * pad + 1)
        image = torch.nn.functional.pad(to_float(x[i // K])[None], (pad,) * 4, mode="reflect")[0]
        image = image.flip(2) if flip else image
        out.append(image[:, top : top + x.shape[2], left : left + x.shape[3]])
    return torch.stack(out)


@pytest.mark.parametrize(
    ("shape", "K", "pad", "flip"),
    [((3, 32, 32), 16, 4, True), ((3, 32, 32), 3, 4, False), ((1, 8, 8), 5, 2, True), ((3, 12, 20), 4, 0, True)],
)
def test_views_equal_those_of_a_slow_loop(shape, K, pad, flip):
    x = pictures(7, shape)
    views = draw_views(7, K, stream(0, "augmentation"), pad=pad, flip=flip)
    fast = take_views(x, views, pad=pad)
    assert fast.shape == (7 * K, *shape)
    assert fast.dtype == torch.float32
    assert torch.equal(fast, slow(x, views, pad))
    assert torch.equal(fast, augment(x, K, stream(0, "augmentation"), pad=pad, flip=flip))


def test_every_view_is_equally_likely():
    views = draw_views(2000, 16, stream(3, "augmentation"))
    counts = torch.bincount(views, minlength=162)
    assert len(counts) == 162  # 9 x 9 places, mirrored or not
    assert stats.chisquare(counts).pvalue > ALARM
    assert draw_views(2000, 16, stream(3, "augmentation"), flip=False).max() == 80


def test_microbatches_change_nothing():
    x = pictures(10)
    views = draw_views(10, 4, stream(0, "augmentation"))
    parts = [take_views(x[i : i + 3], views[4 * i : 4 * (i + 3)]) for i in range(0, 10, 3)]
    assert torch.equal(torch.cat(parts), take_views(x, views))


def test_without_augmentation_there_is_one_plain_view():
    x = pictures(5)
    assert torch.equal(augment(x, 1, stream(0, "augmentation"), pad=0, flip=False), to_float(x))
    assert to_float(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx([-2.0, -1.2, 2.0])


def test_an_empty_batch_has_no_views():
    assert augment(pictures(5)[:0], 16, stream(0, "augmentation")).shape == (0, 3, 32, 32)


def test_wrong_views_are_refused():
    with pytest.raises(UsageError, match="images of 4x4 cannot be padded by 4 pixels"):
        augment(pictures(2, (3, 4, 4)), 2, stream(0, "augmentation"))
    for K, pad in ((0, 4), (1, -1)):
        with pytest.raises(UsageError, match=f"{K} views with padding {pad}"):
            augment(pictures(2), K, stream(0, "augmentation"), pad=pad)


def test_views_suit_the_data():
    assert (views_of("cifar10").pad, views_of("cifar10").flip, views_of("cifar10").count) == (4, True, 162)
    assert (views_of("svhn").pad, views_of("svhn").flip, views_of("svhn").count) == (4, False, 81)
    assert views_of("digits") is None


def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GroupNorm(2, 4))


def step(net, t):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=stream(t, "step")))


def test_the_average_follows_its_recurrence_through_the_warm_up_and_after():
    net = model()
    ema = EMA(net, decay=0.5)  # reached at t = 8
    expected = [p.detach().double() for p in net.parameters()]
    for t in range(20):
        step(net, t)
        ema.update()
        d = min(0.5, (1 + t) / (10 + t))
        expected = [d * e + (1 - d) * p.detach().double() for e, p in zip(expected, net.parameters(), strict=True)]
    for average, value in zip(ema.average, expected, strict=True):
        torch.testing.assert_close(average.double(), value, rtol=1e-5, atol=1e-6)


def test_the_random_start_is_forgotten_in_spite_of_a_decay_of_9999():
    net = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1000.0)
    ema = EMA(net)
    with torch.no_grad():
        net.weight.zero_()
    for _ in range(100):
        ema.update()
    assert abs(float(ema.average[0].detach())) < 1e-6


def test_evaluation_uses_the_average_and_training_goes_on_untouched():
    net = model()
    ema = EMA(net)
    step(net, 0)
    ema.update()
    step(net, 1)
    own = [p.detach().clone() for p in net.parameters()]

    def check(values):
        return all(torch.equal(p, v) for p, v in zip(net.parameters(), values, strict=True))

    with ema.averaged():
        assert check(ema.average)
        assert not check(own)
    assert check(own)
    with pytest.raises(RuntimeError, match="stop"), ema.averaged():
        raise RuntimeError("stop")
    assert check(own)


def test_an_average_goes_on_where_it_was_saved():
    net = model()
    ema, other = EMA(net, decay=0.9), EMA(net, decay=0.9)
    step(net, 0)
    ema.update()
    other.load_state_dict(ema.state_dict())
    step(net, 1)
    ema.update()
    other.update()
    assert other.t == 2
    assert all(torch.equal(a, b) for a, b in zip(ema.average, other.average, strict=True))


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(UsageError, match=f"EMA decay is {decay}"):
        EMA(model(), decay)

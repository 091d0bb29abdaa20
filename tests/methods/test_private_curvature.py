"""Curvature from private data: its two channels, its noise, and what it estimates without noise."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from method_settings import SHAPE, images, labels, network
from test_methods import BATCHES, adversarial

from dpngd.curvature import KFAC, sampled_labels
from dpngd.gradients import PerSample
from dpngd.methods import private_curvature
from dpngd.methods.gep import flatten
from dpngd.methods.private_curvature import Gram, PrivateKFAC
from dpngd.noise import seeded_noise, stream


def private(C=0.6, sigma=0.0, B=9, K=1, model=None):
    ps = PerSample(network() if model is None else model, K=K, check=False)
    return PrivateKFAC(ps, SHAPE, C, sigma, B, labels=stream(1, "labels"), noise=seeded_noise(2))


@given(kinds=BATCHES, size=st.integers(1, 7), K=st.sampled_from([1, 2]))
def test_a_sample_moves_each_channel_by_at_most_its_sensitivity(kinds, size, K):
    """The last sample is left out, so that the labels drawn for the others are the same."""
    views = torch.tensor([1.0, -0.5])[:K].repeat(len(kinds)).view(-1, 1, 1, 1)
    x = adversarial(kinds, torch.float32).repeat_interleave(K, 0) * views
    sums = []
    for n in (len(kinds), len(kinds) - 1):
        noisy = private(K=K)
        assert noisy.mechanism.sensitivity == (1.0, 0.6)
        batches = [(part, None) for part in x[: n * K].split(size * K) if len(part)]
        sums.append(noisy.mechanism.clipped_sums(noisy.contributions(batches), noisy.geometry, noisy.zeros).sums)
    for channel, (a, b) in enumerate(zip(*sums, strict=True)):
        assert float((flatten(a) - flatten(b)).norm()) <= (1.0, 0.6)[channel]


def test_contributions_are_the_factors_of_one_sample():
    """Against a dense computation from each layer's own input and output gradient, by torch alone."""
    model, x = network(), images(5)
    noisy = private(model=model)
    y = sampled_labels(model, x, stream(1, "labels"))
    (g,) = noisy.contributions([(x, labels(5))])
    found = [layer.materialise() for layer in g.layers]
    names = [0, 3, 6, 0, 2, 3, 6]  # A of conv, conv, linear; then G, or the norm's block, of every layer
    for i in range(5):
        kept = {}

        def keep(module, args, out, kept=kept):
            out.retain_grad()
            kept[module] = (args[0].detach(), out)

        handles = [model[k].register_forward_hook(keep) for k in (0, 2, 3, 6)]
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for h in handles:
            h.remove()
        for j, (k, ours) in enumerate(zip(names, found, strict=True)):
            (a, out), module = kept[model[k]], model[k]
            d = out.grad
            if k == 6:
                a, d = torch.cat([a, torch.ones(1, 1)], 1).mT, d.mT
            elif k == 2:
                g_row = torch.cat([p.flatten(1) for p in (module.weight.grad[None], module.bias.grad[None])], 1)
            else:
                a = F.unfold(a, module.kernel_size, stride=module.stride, padding=module.padding)[0]
                a = torch.cat([a, torch.ones(1, a.shape[1])]) if module.bias is not None else a
                d = d[0].flatten(1)
            gradients = g_row.mT if k == 2 else d
            exact = a @ a.mT / a.numel() if j < 3 else gradients @ gradients.mT
            torch.testing.assert_close(ours[i, 0], exact, rtol=1e-4, atol=1e-6)
        model.zero_grad()


def test_without_noise_and_clips_it_is_the_curvature_of_the_batch(monkeypatch):
    monkeypatch.setattr(private_curvature, "CLIP_A", 1e9)
    model, x = network(torch.float64), images(9, dtype=torch.float64)
    y = sampled_labels(model, x, stream(1, "labels"))
    exact = KFAC(model, x, labels="given", y=y)()
    ours = private(C=1e9, model=model)([(x[:4], None), (x[4:], None)])
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.spectrum(), b.spectrum(), rtol=1e-8, atol=1e-10)


def test_views_of_a_sample_are_averaged():
    """K equal views contribute what one does, but for their labels: here there is only one likely label."""
    model, x = network(torch.float64), images(6, dtype=torch.float64)
    with torch.no_grad():
        model[6].weight.mul_(0)
        model[6].bias.copy_(torch.tensor([30.0, 0, 0, 0]))
    sums = []
    for K in (1, 3):
        noisy = private(K=K, model=model)
        g = list(noisy.contributions([(x.repeat_interleave(K, 0), None)]))
        sums.append(flatten(g[0].weighted_sum(torch.ones(6, dtype=torch.float64))))
        assert len(g[0]) == 6
    torch.testing.assert_close(*sums)


def test_released_factors_hold_noise_of_the_stated_size():
    """An empty batch releases noise alone: sqrt(2) sigma C_j / B in each channel."""
    noisy = private(C=0.6, sigma=3.0, B=9)
    noise = seeded_noise(0)
    releases = [noisy.mechanism.release(iter([]), noisy.geometry, noisy.zeros, noise).direction for _ in range(50)]
    for blocks, C in ((slice(None, 3), 1.0), (slice(3, None), 0.6)):
        drawn = torch.cat([flatten(direction[blocks]) for direction in releases])
        assert float(drawn.std()) == pytest.approx(2**0.5 * 3.0 * C / 9, rel=5 / (2 * len(drawn)) ** 0.5)


def test_an_empty_micro_batch_releases_noise_alone():
    """As no batch at all does, and as a batch of samples without the empty one."""
    empty = images(0), labels(0)
    one, two, none = (private(sigma=3.0)(batches) for batches in ([empty], [empty, empty], []))
    for a, b, c in zip(one, two, none, strict=True):
        assert torch.equal(a.lambda_A, c.lambda_A)
        assert torch.equal(b.lambda_G, c.lambda_G)
    x = images(9)
    for a, b in zip(private()([(x, None)]), private()([empty, (x, None), empty]), strict=True):
        assert torch.equal(a.lambda_G, b.lambda_G)


def test_noise_reaches_the_curvature_and_differs_from_release_to_release():
    x = images(9)
    clean, noisy = private()([(x, None)]), private(sigma=3.0)
    first, second = noisy([(x, None)]), noisy([(x, None)])
    for quiet, one, two in zip(clean, first, second, strict=True):
        assert not torch.allclose(one.lambda_A, two.lambda_A)
        assert not torch.allclose(one.lambda_A, quiet.lambda_A, rtol=0.1)
        assert float(one.spectrum().min()) >= 0  # eigenvalues below zero are cut off


def test_scales_that_are_put_back_do_not_depend_on_the_batch():
    """An empty batch, or one of broken images, must not be visible but through the noisy sums."""
    assert private().positions == [9, 1, 4, 1]
    for batch in ([], [(images(2) * float("nan"), None)]):
        empty = private(sigma=1.0)
        scales = [float(c.lambda_A.max()) for c in empty(batch)]
        assert scales == [float(c.lambda_A.max()) for c in private(sigma=1.0)([])]


def test_gram_answers_as_the_dense_matrices_do(rng):
    for n, S in ((5, 3), (3, 7)):
        u, c = torch.randn(4, 2, n, S, generator=rng), torch.rand(4, generator=rng)
        gram, dense = Gram(u), torch.einsum("brns,brms->brnm", u, u)
        torch.testing.assert_close(gram.materialise(), dense)
        torch.testing.assert_close(gram.sq_norms(), dense.square().sum((1, 2, 3)))
        torch.testing.assert_close(gram.weighted_sum(c), torch.einsum("b,brnm->rnm", c, dense))
        torch.testing.assert_close(gram.select(torch.tensor([2, 0])).materialise(), dense[[2, 0]])


def test_the_given_labels_are_not_looked_at():
    x = images(9)
    one, two = (private(sigma=1.0)([(x, y)]) for y in (labels(9), labels(9, "others")))
    assert all(torch.equal(a.lambda_G, b.lambda_G) for a, b in zip(one, two, strict=True))

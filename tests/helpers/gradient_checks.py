"""What the tests of per-sample gradients share: seeded networks, drawn inputs, comparison with torch.func."""

import reference
import torch
import torch.nn.functional as F
from torch import nn

from dpngd.noise import stream

CLASSES = 3


def seeded(build, seed=0):
    """build(), its weights drawn from `seed` and the global generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def sample(shape, b, K, dtype, seed=0, classes=CLASSES):
    g = stream(seed, "inputs")
    return torch.randn(b * K, *shape, generator=g, dtype=dtype), torch.randint(classes, (b,), generator=g)


def check_everything(ours, exact, losses, tolerance, seed=0):
    """Each layer's gradients and all that is asked of them, against torch.func's (b, R, O, I)."""
    g = stream(seed, "directions")
    b = len(losses)
    torch.testing.assert_close(ours.losses, losses, rtol=tolerance, atol=tolerance)
    assert len(ours.layers) == len(exact)
    whole = torch.cat([e.flatten(1) for e in exact], 1)
    assert reference.relative(ours.materialise(), whole) < tolerance
    assert reference.relative(ours.sq_norms()[:, None], whole.square().sum(1, keepdim=True)) < 2 * tolerance
    scale = whole.norm(dim=1)  # a layer's error counts against the sample's gradient: some layers' are all rounding

    def near(value, truth, size=scale):
        error = (value - truth).flatten(1).double().norm(dim=1)
        assert (error <= tolerance * size + 1e-300).all(), error / size

    for layer, e in zip(ours.layers, exact, strict=True):
        R, O, I = e.shape[1:]
        assert layer.materialise().shape == e.shape
        near(layer.materialise(), e)
        near(layer.sq_norms()[:, None], e.square().flatten(1).sum(1)[:, None], 2 * scale**2)
        w = torch.rand(R, O, I, generator=g, dtype=e.dtype)
        near(layer.diagonal_sq_norms(w)[:, None], (e.square() * w).flatten(1).sum(1)[:, None], 2 * scale**2)
        for m, k in ((1, I), (O, 1), (O, I), ((O + 1) // 2, (I + 1) // 2)):
            Q_G = F.normalize(torch.randn(R, O, m, generator=g, dtype=e.dtype), dim=1)
            Q_A = F.normalize(torch.randn(R, I, min(k, 50), generator=g, dtype=e.dtype), dim=1)
            near(layer.project(Q_G, Q_A), torch.einsum("rom,broi,rik->brmk", Q_G, e, Q_A))
        c = torch.rand(b, generator=g, dtype=e.dtype)
        near(layer.weighted_sum(c)[None], torch.einsum("b,broi->roi", c, e)[None], scale.sum())
        keep = torch.tensor([b - 1, 0])
        near(layer.select(keep).materialise(), e[keep], scale[keep])
        near(layer.select(keep).sq_norms()[:, None], e[keep].square().flatten(1).sum(1)[:, None], 2 * scale[keep] ** 2)


def small_net(dtype=torch.float64):
    return seeded(lambda: nn.Sequential(
        nn.Conv2d(5, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, 2),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, CLASSES))).to(dtype)

"""Per-sample gradients: micro-batches, sums, side effects, and norms where float32 is at its limits."""

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import CLASSES, sample, seeded, small_net
from torch import nn

from dpngd.errors import UsageError
from dpngd.gradients import PerSample
from dpngd.layers.conv import Conv2dLayer, ConvFactors
from dpngd.layers.forms import Dense, Factors
from dpngd.noise import stream


@pytest.mark.parametrize("K", [1, 4])
def test_micro_batches_give_the_same_sums(K):
    model = small_net()
    x, y = sample((5, 6, 6), 7, K, torch.float64)
    persample = PerSample(model, K=K)
    c = torch.rand(7, generator=stream(0, "weights"), dtype=torch.float64)
    whole = persample(x, y)
    parts, norms = persample.zeros(), []
    for lo, hi in ((0, 1), (1, 4), (4, 4), (4, 7)):
        g = persample(x[lo * K : hi * K], y[lo:hi])
        assert len(g) == hi - lo
        norms.append(g.sq_norms())
        for total, term in zip(parts, g.weighted_sum(c[lo:hi]), strict=True):
            total += term
    torch.testing.assert_close(torch.cat(norms), whole.sq_norms(), rtol=1e-10, atol=0)
    for ours, expected in zip(parts, whole.weighted_sum(c), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_sums_return_to_the_parameters_they_came_from():
    """to_params against autograd's summed gradient, parameter by parameter; add_ against a plain step."""
    model = seeded(lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2), nn.GroupNorm(3, 6), nn.Conv2d(6, 1, 1), nn.Flatten(), nn.LayerNorm(16),
        nn.Linear(16, 1), nn.Linear(1, CLASSES, bias=False))).double()
    x, y = sample((4, 6, 6), 5, 1, torch.float64)
    persample = PerSample(model)
    total = persample(x, y).weighted_sum(torch.ones(5, dtype=torch.float64))
    assert [t.shape for t in total] == [z.shape for z in persample.zeros()]
    F.cross_entropy(model(x), y, reduction="sum").backward()
    expected = {k: p.grad.clone() for k, p in model.named_parameters()}
    ours = persample.to_params(total)
    assert ours.keys() == expected.keys()
    for name, e in expected.items():
        torch.testing.assert_close(ours[name], e)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    persample.add_(total, -0.5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.5 * expected[name])


class Spare(nn.Module):
    """Its `spare` layer is called but the output ignores it; its `idle` layer is not called at all."""

    def __init__(self):
        super().__init__()
        self.spare, self.idle, self.head = nn.Linear(4, 2), nn.Conv2d(1, 1, 1), nn.Linear(4, CLASSES)

    def forward(self, x):
        self.spare(x)
        return self.head(x)


def test_an_unused_layer_gets_zeros():
    model = seeded(Spare)
    x, y = sample((4,), 3, 1, torch.float32)
    g = PerSample(model)(x, y)
    assert [tuple(layer.materialise().shape) for layer in g.layers] == [(3, 1, 2, 5), (3, 1, 1, 2), (3, 1, 3, 5)]
    assert [bool(layer.materialise().any()) for layer in g.layers] == [False, False, True]
    assert g.sq_norms().gt(0).all()


@pytest.mark.parametrize("training", [True, False])
def test_nothing_else_is_touched(training):
    """Not .grad, requires_grad, modes, weights, inputs, hooks, the grad mode or the global generator."""
    model = small_net().train(training)
    model[3].requires_grad_(False)
    F.cross_entropy(model(sample((5, 6, 6), 2, 1, torch.float64)[0]), torch.tensor([0, 1])).backward()

    def state():
        return ([p.grad if p.grad is None else p.grad.clone() for p in model.parameters()],
                [p.requires_grad for p in model.parameters()], [p.detach().clone() for p in model.parameters()],
                [m.training for m in model.modules()], [len(m._forward_hooks) for m in model.modules()],
                torch.is_grad_enabled(), torch.get_rng_state())

    x, y = sample((5, 6, 6), 3, 1, torch.float64)
    before, x_before = state(), x.clone()
    with torch.no_grad():  # gradients are found even so
        g = PerSample(model)(x, y)
    torch.testing.assert_close(state(), before, rtol=0, atol=0)
    assert torch.equal(x, x_before)
    assert not x.requires_grad
    assert not g.losses.requires_grad
    assert not any(layer.materialise().requires_grad for layer in g.layers)
    assert g.sq_norms().gt(0).all()


def test_hooks_are_removed_after_an_error():
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError):
        PerSample(model, loss=lambda output, y: output.sum(), check=False)(torch.ones(2, 2), torch.tensor([0, 1]))
    assert not model._forward_hooks


def test_empty_micro_batch():
    g = PerSample(small_net())(torch.zeros(0, 5, 6, 6, dtype=torch.float64), torch.zeros(0, dtype=torch.long))
    assert len(g) == 0
    assert g.sq_norms().shape == (0,)
    assert not any(t.any() for t in g.weighted_sum(torch.zeros(0, dtype=torch.float64)))


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("wide", [False, True], ids=["linear over time", "wide convolution"])
def test_norms_of_gradients_whose_positions_cancel(wide, gap):
    """d sums to almost nothing over positions (as before a norm layer) and a hardly varies: the Gram formula for
    ||g||^2 then subtracts nearly all it added."""
    g = stream(0, "cancelling")
    S, I, O, b = 8, 2304, 128, 4
    d = torch.randn(b, S // 2, O, generator=g)
    d = torch.cat([d, -d], 1)
    if wide:
        a = torch.randn(b, 256, 1, 1, generator=g).expand(-1, -1, 4, 6) + gap * torch.randn(b, 256, 4, 6, generator=g)
        layer = Conv2dLayer("conv", nn.Conv2d(256, O, 3, bias=False))
        ours = layer.gradient(a, d.mT.reshape(b, O, 2, 4), 1)
        U = F.unfold(a.double(), 3).mT
    else:
        U = a = torch.randn(b, 1, I, generator=g) + gap * torch.randn(b, S, I, generator=g)
        ours = Factors(a, d)
    assert isinstance(ours, Factors | ConvFactors)
    exact = (d.double().mT @ U.double()).flatten(1).square().sum(1)
    terms = (d.double().square().sum(2) * U.double().square().sum(2)).sum(1)
    assert (exact < 0.1 * terms).all()
    torch.testing.assert_close(ours.sq_norms().double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.terms().double(), terms, rtol=1e-5, atol=0)  # what a sum of g adds up


@pytest.mark.parametrize(("a", "d"), [(4e18, 3e-23), (1e-22, 4e18), (1e10, 1e-25)])
@pytest.mark.parametrize("S", [1, 3])
def test_norms_do_not_underflow(a, d, S):
    """||a||^2 or ||d||^2 below float32's range, their product within it."""
    rows = torch.ones(2, S, 10)
    n = Factors(a * rows[..., :8], d * rows).sq_norms().double().sqrt()
    exact = 80**0.5 * S * a * d
    assert n.tolist() == pytest.approx([exact] * 2, rel=1e-4, abs=1e-14)


def test_norms_of_large_layers_do_not_drift():
    """A layer of WRN-16-4 has 590,000 weights; float32 sums of that length in one run are off by more than 1e-5."""
    w = torch.rand(2, 1, 512, 4096, generator=stream(0, "large"))
    ours, exact = Dense(w), w.double().square()
    torch.testing.assert_close(ours.sq_norms().double(), exact.flatten(1).sum(1), rtol=2e-6, atol=0)
    weighted = (exact * w[0].double()).flatten(1).sum(1)
    torch.testing.assert_close(ours.diagonal_sq_norms(w[0]).double(), weighted, rtol=2e-6, atol=0)

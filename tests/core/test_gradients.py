"""Per-sample gradients, norms and sums against torch.func, layer by layer."""

import pytest
import reference
import torch
from gradient_checks import CLASSES, check_everything, sample, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpngd.curvature import KFAC
from dpngd.geometry import Kronecker
from dpngd.gradients import PerSample
from dpngd.layers.conv import Conv2dLayer, ConvFactors
from dpngd.layers.forms import Dense, Factors
from dpngd.layers.norm import GroupNormLayer
from dpngd.mechanism import GaussianMechanism
from dpngd.noise import stream
from dpngd.training import models


class Time(nn.Module):
    """(n, C, H, W) -> (n, H*W, C): positions become time steps."""

    def forward(self, x):
        return x.flatten(2).mT


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


@st.composite
def convolution(draw, channels, size):
    groups = draw(st.sampled_from([1, 1, 2]) if channels % 2 == 0 else st.just(1))
    out = groups * draw(st.integers(1, 4))
    kernel = tuple(draw(st.integers(1, 3)) if s >= 4 else 1 for s in size)
    dilation = tuple(draw(st.integers(1, 2)) if s >= 5 else 1 for s in size)
    mode = draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"]))
    padding = draw(st.sampled_from(["same", "valid", 0, (1, 0), (0, 1), 1])) if min(size) >= 3 else 0
    stride = 1 if padding == "same" else tuple(draw(st.integers(1, 2)) for _ in size)
    return nn.Conv2d(channels, out, kernel, stride, padding, dilation, groups, draw(st.booleans()), mode)


@st.composite
def networks(draw):
    """A network of covered layers, some of them frozen, and the shape of its input. At least one is trainable."""
    shape = (draw(st.sampled_from([1, 2, 3, 6, 8])), draw(st.integers(4, 7)), draw(st.integers(4, 7)))
    probe, layers = torch.zeros(1, *shape), []
    for _ in range(draw(st.integers(1, 3))):
        layers.append(draw(convolution(probe.shape[1], tuple(probe.shape[2:]))))
        probe = layers[-1](probe)
        # torch refuses to normalise a group of one value.
        divisors = [d for d in range(1, probe.shape[1] + 1) if probe.shape[1] % d == 0 and probe.numel() > d]
        if divisors and draw(st.booleans()):
            layers.append(nn.GroupNorm(draw(st.sampled_from(divisors)), probe.shape[1]))
        layers.append(draw(st.sampled_from([nn.ReLU(inplace=True), nn.Tanh(), nn.ReLU()])))
    if draw(st.booleans()):
        layers += [Time(), nn.LayerNorm(probe.shape[1], bias=draw(st.booleans())),
                   nn.Linear(probe.shape[1], draw(st.integers(1, 30)), bias=draw(st.booleans())), nn.Tanh(), Mean()]
    else:
        layers += [nn.Flatten()]
    probe = nn.Sequential(*layers).float()(torch.zeros(1, *shape))
    layers.append(nn.Linear(probe.shape[1], CLASSES, bias=draw(st.booleans())))
    for layer in layers[:-1]:
        if list(layer.parameters()):
            freeze = draw(st.sampled_from(["none", "none", "none", "all", "bias"]))
            for name, p in layer.named_parameters():
                p.requires_grad_(not (freeze == "all" or name == freeze))
    model = nn.Sequential(*layers)
    with torch.no_grad():
        g = stream(draw(st.integers(0, 10**6)), "weights")
        for p in model.parameters():  # norms too: a scale of 1 and a shift of 0 would hide mistakes
            p.copy_(torch.randn(p.shape, generator=g) * (0.8 if p.dim() == 1 else p[0].numel() ** -0.5))
    return model, shape


@pytest.mark.parametrize("K", [1, 4, 8])
@settings(max_examples=40)
@given(network=networks(), b=st.integers(2, 3), seed=st.integers(0, 10**6))
def test_drawn_networks_equal_torch_func(K, network, b, seed):
    """In float64, where only a wrong formula is off: deep drawn networks lose digits of float32 by themselves."""
    model, shape = network
    model = model.double()
    x, y = sample(shape, b, K, torch.float64, seed)
    ours = PerSample(model, K=K)(x, y)
    check_everything(ours, *reference.per_sample(model, x, y, K), tolerance=1e-9, seed=seed)


@pytest.mark.parametrize("K", [1, 4, 8])
@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_one_drawn_convolution_in_float32(K, data, seed):
    """The precision that training uses, to 1e-5 relative."""
    shape = (data.draw(st.sampled_from([2, 6, 8])), 6, 5)
    conv = data.draw(convolution(shape[0], shape[1:]))
    out = conv(torch.zeros(1, *shape)).flatten(1).shape[1]
    model = seeded(lambda: nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(out, CLASSES)), seed)
    x, y = sample(shape, 3, K, torch.float32, seed)
    check_everything(PerSample(model, K=K)(x, y), *reference.per_sample(model, x, y, K), tolerance=1e-5, seed=seed)


# The strategies of layers.conv, each by a layer that takes it: arguments of Conv2d, (H, W), K, strategy.
STRATEGIES = [
    pytest.param((3, 5, 3), (6, 6), 1, "unfold", id="few input channels"),
    pytest.param((3, 5, 3, 2, 1), (7, 6), 8, "loop", id="few input channels, 8 views"),
    pytest.param((3, 5, 3, 2, 1), (17, 15), 1, "grouped", id="few input channels, many positions"),
    pytest.param((6, 4, (3, 2), 1, (1, 0), (1, 2), 2), (9, 10), 1, "grouped", id="few input channels in two groups"),
    pytest.param((8, 6, 1), (4, 4), 4, "unfold", id="1x1"),
    pytest.param((8, 6, 1, 2), (5, 4), 8, "unfold", id="1x1 with stride, 8 views"),
    pytest.param((12, 64, 3, 1, 1), (5, 5), 1, "unfold", id="many outputs, few positions"),
    pytest.param((12, 128, 3, 2, 1, 1, 2), (5, 5), 1, "unfold", id="many outputs in two groups"),
    pytest.param((8, 6, 3, 2, 1), (6, 5), 8, "grouped", id="8 views"),
    pytest.param((8, 3, 3, 1, 1), (33, 32), 8, "loop", id="8 views, many positions"),
    pytest.param((12, 6, (3, 2), 1, "same", 1, 2), (6, 5), 8, "loop", id="8 views, two groups, same padding"),
    pytest.param((8, 6, 3, 2, 1), (6, 5), 1, "unfold", id="few positions"),
    pytest.param((8, 6, (3, 2), 2, (1, 0), (1, 2)), (6, 5), 4, "unfold", id="few positions, 4 views, dilation"),
    pytest.param((12, 4, 3, 1, "same", 1, 2, True, "reflect"), (6, 5), 4, "loop", id="4 views, groups, reflect"),
    pytest.param((8, 6, 3, 2, 1), (18, 17), 1, "grouped", id="one view"),
    pytest.param((8, 6, 3, 1, 2, 2), (9, 8), 4, "grouped", id="4 views, dilation"),
    pytest.param((12, 4, 3, 1, "same", 1, 2, True, "reflect"), (9, 8), 4, "loop", id="4 views, two groups"),
    pytest.param((256, 128, 3, 1, 1), (3, 3), 1, "factors", id="wide"),
    pytest.param((256, 128, 3, 2, 1, 1, 1, False), (4, 4), 4, "factors", id="wide, 4 views, no bias"),
    pytest.param((256, 128, 3, 1, "same", 1, 1, True, "circular"), (2, 2), 8, "factors", id="wide, 8 views, circular"),
    pytest.param((512, 512, 1), (1, 2), 1, "factors", id="wide 1x1"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("arguments", "size", "K", "strategy"), STRATEGIES)
def test_every_strategy_of_a_convolution(arguments, size, K, strategy, dtype, monkeypatch):
    b = 3
    calls = []

    def spy(name, plain):
        def spied(self, a, d, b, *more):
            calls.append((name, b))
            return plain(self, a, d, b, *more)

        monkeypatch.setattr(Conv2dLayer, name, spied)

    spy("_unfolded", Conv2dLayer._unfolded)
    spy("weight_gradient", Conv2dLayer.weight_gradient)
    conv = seeded(lambda: nn.Conv2d(*arguments))
    out = conv(torch.zeros(1, arguments[0], *size)).flatten(1).shape[1]
    model = seeded(lambda: nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(out, CLASSES))).to(dtype)
    x, y = sample((arguments[0], *size), b, K, dtype)
    ours = PerSample(model, K=K, check=False)(x, y)
    expected = {"unfold": [("_unfolded", b)], "loop": [("weight_gradient", 1)] * b, "grouped": [("weight_gradient", b)],
                "factors": []}
    assert calls == expected[strategy]
    assert type(ours.layers[0]) is (ConvFactors if strategy == "factors" else Dense)
    exact, losses = reference.per_sample(model, x, y, K)
    check_everything(ours, exact, losses, tolerance=1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize(("features", "time", "form"), [((7, 5), None, Factors), ((40, 30), 3, Factors),
                                                        ((3, 2), 6, Dense)])
def test_linear_layers_in_float32(K, features, time, form):
    """Rank one without a time axis; factors or the dense matrix with one, whichever is smaller."""
    I, O = features
    last = Mean() if time else nn.Identity()
    model = seeded(lambda: nn.Sequential(nn.Linear(I, O), nn.Tanh(), last, nn.Linear(O, CLASSES)))
    shape = (time, I) if time else (I,)
    time_steps = K * (time or 1)
    if form is Factors and time_steps * (I + O + 1) > (I + 1) * O and time_steps > 1:
        form = Dense
    x, y = sample(shape, 4, K, torch.float32)
    ours = PerSample(model, K=K)(x, y)
    assert type(ours.layers[0]) is form
    check_everything(ours, *reference.per_sample(model, x, y, K), tolerance=1e-5)


@pytest.mark.parametrize("layer", [nn.LayerNorm((4, 3)), nn.LayerNorm(3, bias=False), nn.GroupNorm(2, 4),
                                   nn.GroupNorm(4, 4)], ids=str)
def test_norms_of_other_input_shapes(layer, rng):
    """Layer norm over several dimensions, group norm over a single axis, with more weight than its start at 1."""
    torch.nn.init.normal_(layer.weight, generator=rng)
    model = seeded(lambda: nn.Sequential(layer, nn.Flatten(), nn.Linear(12, CLASSES)))
    x, y = sample((4, 3), 3, 4, torch.float32)
    check_everything(PerSample(model, K=4)(x, y), *reference.per_sample(model, x, y, 4), tolerance=1e-5)


@pytest.mark.parametrize("name", ["wrn-10-1", "resnet-20", "small"])
def test_the_networks_of_the_paper(name):
    """Float64: in float32 torch.func's own gradients of ResNet-20 differ from the exact ones by more than 1e-5."""
    model = models.build(name, classes=10, size=8).double()
    x, y = sample((3, 8, 8), 2, 2, torch.float64, classes=10)
    exact, losses = reference.per_sample(model, x, y, 2)
    ours = PerSample(model, K=2)(x, y)
    whole = torch.cat([e.flatten(1) for e in exact], 1)
    assert reference.relative(ours.materialise(), whole) < 1e-9
    assert reference.relative(ours.sq_norms()[:, None], whole.square().sum(1)[:, None]) < 1e-9
    torch.testing.assert_close(ours.losses, losses)


def test_no_gradient_is_computed_twice(monkeypatch):
    """A guard against slowness: one `gradient` per layer and micro-batch, whatever a geometry asks of it, none for a
    convolution with few positions, and no group norm whose statistics are computed again."""
    calls, gradient = [], Conv2dLayer.per_sample
    monkeypatch.setattr(Conv2dLayer, "per_sample", lambda self, *a: calls.append(self.name) or gradient(self, *a))
    monkeypatch.setattr(GroupNormLayer, "_moments", lambda *_: pytest.fail("statistics computed again"))
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 3, 2), nn.Tanh(),
                                         nn.Conv2d(6, 64, 2), nn.Flatten(), nn.Linear(64, CLASSES)))
    x, y = sample((3, 7, 7), 4, 1, torch.float32)
    geometry = Kronecker()
    geometry.set(KFAC(model, x, labels="exact")(), 1e-1)
    per_sample = PerSample(model, check=False)
    GaussianMechanism((1.0,), 0.0, 4.0).clipped_sums([per_sample(x, y)], geometry, per_sample.zeros())
    assert geometry.recomputed == 0
    assert calls == ["2", "0"]

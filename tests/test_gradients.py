"""Per-sample gradients against torch.func on drawn networks, every strategy, K views; and what is refused."""

import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpngd import models
from dpngd.convolutions import ConvFactors, ConvSpec
from dpngd.errors import UsageError
from dpngd.gradients import PerSample
from dpngd.layers import Dense, Factors
from dpngd.streams import stream

CLASSES = 3
SAME = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's own, about speed


class Time(nn.Module):
    """(n, C, H, W) -> (n, H*W, C): positions become time steps."""

    def forward(self, x):
        return x.flatten(2).mT


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def seeded(build, seed=0):
    """build(), its weights drawn from `seed` and the global generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def sample(shape, b, K, dtype, seed=0, classes=CLASSES):
    g = stream(seed, "inputs")
    return torch.randn(b * K, *shape, generator=g, dtype=dtype), torch.randint(classes, (b,), generator=g)


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
        if draw(st.booleans()):
            divisors = [d for d in range(1, probe.shape[1] + 1) if probe.shape[1] % d == 0]
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


@SAME
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


@SAME
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


# The strategies of layers.ConvSpec, each by a layer that takes it: arguments of Conv2d, (H, W), K, strategy.
STRATEGIES = [
    pytest.param((3, 5, 3), (6, 6), 1, "unfold", id="few input channels"),
    pytest.param((3, 5, 3, 2, 1), (7, 6), 8, "unfold", id="few input channels, 8 views"),
    pytest.param((8, 6, 1), (4, 4), 4, "unfold", id="1x1"),
    pytest.param((8, 6, 1, 2), (5, 4), 8, "unfold", id="1x1 with stride, 8 views"),
    pytest.param((12, 64, 3, 1, 1), (5, 5), 1, "unfold", id="many outputs, few positions"),
    pytest.param((12, 128, 3, 2, 1, 1, 2), (5, 5), 1, "unfold", id="many outputs in two groups"),
    pytest.param((8, 6, 3, 2, 1), (6, 5), 8, "loop", id="8 views"),
    pytest.param((12, 6, (3, 2), 1, "same", 1, 2), (6, 5), 8, "loop", id="8 views, two groups, same padding"),
    pytest.param((8, 6, 3, 2, 1), (6, 5), 1, "grouped", id="one view"),
    pytest.param((8, 6, 3, 1, 2, 2), (6, 5), 4, "grouped", id="4 views, dilation"),
    pytest.param((12, 4, 3, 1, "same", 1, 2, True, "reflect"), (6, 5), 4, "grouped", id="4 views, groups, reflect"),
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
        def spied(self, a, d, b):
            calls.append((name, b))
            return plain(self, a, d, b)

        monkeypatch.setattr(ConvSpec, name, spied)

    spy("_unfolded", ConvSpec._unfolded)
    spy("weight_gradient", ConvSpec.weight_gradient)
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


def small_net(dtype=torch.float64):
    return seeded(lambda: nn.Sequential(
        nn.Conv2d(5, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, 2),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, CLASSES))).to(dtype)


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
        spec = ConvSpec(nn.Conv2d(256, O, 3, bias=False), False)
        ours = spec.gradient(a, d.mT.reshape(b, O, 2, 4), 1)
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


# ---------------------------------------------------------------------------------------------------- refusals


class Scaled(nn.Module):
    """A bare parameter of a module's own."""

    def __init__(self):
        super().__init__()
        self.gain, self.fc = nn.Parameter(torch.ones(4)), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.fc(self.gain * x)


def shared_weight():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def bias_only():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES))
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(("build", "says"), [
    (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), ["'1'", "BatchNorm2d", "mixes the samples",
                                                                    "GroupNorm"]),
    (lambda: nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)), ["'0'", "BatchNorm1d", "mixes"]),
    (lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 3)), ["SyncBatchNorm", "mixes"]),
    (lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)), ["'0'", "Embedding", "not covered", "requires_grad_"]),
    (Scaled, ["Scaled", "not covered", "requires_grad_(False)"]),
    (lambda: nn.Sequential(nn.Conv1d(4, 4, 1)), ["Conv1d", "not covered"]),
    (shared_weight, ["2.weight", "shared with layer '0'"]),
    (bias_only, ["'0'", "frozen weight and a trainable bias"]),
    (lambda: nn.Sequential(nn.Linear(4, 3)).requires_grad_(False), ["no trainable parameters"]),
])
def test_models_that_are_refused(build, says):
    with pytest.raises(UsageError) as refusal:
        PerSample(build())
    message = str(refusal.value)
    assert all(words in message for words in says), message
    assert "\n" not in message


def test_a_frozen_layer_of_an_uncovered_kind_is_fine():
    model = seeded(Scaled)
    model.gain.requires_grad_(False)
    x, y = sample((4,), 3, 1, torch.float32)
    check_everything(PerSample(model)(x, y), *reference.per_sample(model, x, y), tolerance=1e-5)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


class Tied(Twice):
    """The weight of `body` is used again outside its module: no hook sees that."""

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(torch.tanh(F.linear(h, self.body.weight.t())))


class Centred(Twice):
    """What mixes the samples has no parameters."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, x):
        return self.head(self.mix(torch.tanh(self.body(x))))


class InPlace(Twice):
    """What `body` was given is changed after it."""

    def forward(self, x):
        h = torch.tanh(x)
        z = self.body(h)
        h.mul_(2)
        return self.head(z + h)


MIXES = {
    "mean": lambda h: h - h.mean(0),
    "first": lambda h: h - h[:1],
    "last": lambda h: h + h[-1:],
    "running": lambda h: h.cumsum(0),
}


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize(("build", "says"), [
    (Twice, ["'body'", "called twice", "layer of its own"]),
    (Tied, ["'body.weight'", "do not add up to autograd's", "tying"]),
    *[(lambda mix=mix: Centred(mix), ["mixes samples", "other samples of the batch"]) for mix in MIXES.values()],
    (InPlace, ["'body'", "changed in place", "inplace=False"]),
], ids=["called twice", "tied", *MIXES, "in place"])
def test_models_that_the_first_micro_batch_finds_out(build, says, K):
    x, y = sample((4,), 4, K, torch.float32)
    with pytest.raises(UsageError) as refusal:
        PerSample(seeded(build), K=K)(x, y)
    message = str(refusal.value)
    assert all(words in message for words in says), message
    assert "\n" not in message


def test_mixing_is_found_whatever_comes_first():
    """A row alone is given company; rows that are not finite show nothing, so the next micro-batch is checked."""
    x, y = sample((4,), 4, 1, torch.float32)
    mixing = seeded(lambda: Centred(MIXES["mean"]))
    with pytest.raises(UsageError, match="mixes samples"):
        PerSample(mixing)(x[:1], y[:1])
    persample = PerSample(mixing)
    persample(torch.full((4, 4), torch.nan), y)
    with pytest.raises(UsageError, match="mixes samples"):
        persample(x, y)


def test_a_loss_that_compares_rows_is_refused():
    x, y = sample((4,), 4, 1, torch.float32)

    def contrast(output, y):
        losses = F.cross_entropy(output, y, reduction="none")
        return losses - 0.5 * losses.mean()

    with pytest.raises(UsageError, match="mixes samples"):
        PerSample(seeded(lambda: nn.Linear(4, CLASSES)), loss=contrast)(x, y)


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda output, y: F.cross_entropy(output, y)[None],
                                  lambda output, y: output])
def test_a_loss_must_give_a_value_a_row(loss):
    x, y = sample((4,), 4, 1, torch.float32)
    for check in (True, False):
        with pytest.raises(UsageError, match=r"one value a row \(reduction='none'\)"):
            PerSample(nn.Linear(4, CLASSES), loss=loss, check=check)(x, y)


@pytest.mark.parametrize(("rows", "targets", "K"), [(6, 6, 4), (8, 3, 4), (4, 3, 1), (8, 4, 1)])
def test_rows_that_do_not_make_samples(rows, targets, K):
    with pytest.raises(UsageError, match=f"{rows} views and {targets} targets do not make samples of K={K}"):
        PerSample(nn.Linear(4, CLASSES), K=K)(torch.zeros(rows, 4), torch.zeros(targets, dtype=torch.long))


def test_targets_may_be_given_for_each_view():
    model = seeded(lambda: nn.Linear(4, CLASSES))
    x, y = sample((4,), 3, 4, torch.float32)
    persample = PerSample(model, K=4)
    torch.testing.assert_close(persample(x, y.repeat_interleave(4)).materialise(), persample(x, y).materialise())

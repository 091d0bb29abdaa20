"""The registry of layers: kinds of one's own, registered at run time, go through all that the built-in ones do."""

import pytest
import reference
import torch
import torch.nn.functional as F
from gradient_checks import CLASSES, check_everything, sample, seeded
from torch import nn

from dpngd.curvature import KFAC, sampled_labels
from dpngd.errors import UsageError
from dpngd.geometry import Kronecker
from dpngd.gradients import PerSample
from dpngd.layers import Dense, Layer, RowLayer, forms, register, trainable_layers, unregister
from dpngd.layers.conv import Conv2dLayer
from dpngd.layers.linear import LinearLayer
from dpngd.methods import private_curvature
from dpngd.methods.private_curvature import PrivateKFAC
from dpngd.noise import seeded_noise, stream


class ScaleAndPower(nn.Module):
    """z = gain * x + tilt * x^2 per channel: parameters of other names than weight and bias."""

    def __init__(self, channels):
        super().__init__()
        self.gain, self.tilt = nn.Parameter(torch.randn(channels)), nn.Parameter(torch.randn(channels))

    def forward(self, x):
        return self.gain[:, None] * x + self.tilt[:, None] * x.square()


class ScaleAndPowerLayer(RowLayer):
    """The least that a kind with a gradient of one row has to say."""

    parameters = ("gain", "tilt")

    def __init__(self, name, module):
        super().__init__(name, module)
        self.shape = (1, 1, len(self.trained) * len(module.gain))

    def gradient(self, a, d, K):
        powers = [d * a, d * a.square()][: len(self.trained)]
        rows = [t.unflatten(0, (-1, K)).sum((1, 3)) for t in powers]
        return Dense(torch.cat(rows, 1)[:, None, None])


class Conv(nn.Conv1d):
    """A kind that only the tests register: the exact type of a module counts."""


class ConvLayer(Layer):
    """The least that a kind with positions has to say; gradient and moments are inherited."""

    def __init__(self, name, module):
        super().__init__(name, module)
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise UsageError(f"layer {name!r}: only zero padding of a given width is covered")
        R = module.groups
        self.shape = (R, module.out_channels // R, module.in_channels // R * module.kernel_size[0] + self.bias)

    def columns(self, a, d):
        m, n = self.module, len(d)
        U = F.unfold(a.unsqueeze(2), (1, m.kernel_size[0]), (1, m.dilation[0]), (0, m.padding[0]), (1, m.stride[0]))
        U = U.reshape(n, m.groups, -1, d.shape[-1])
        if self.bias:
            U = F.pad(U, (0, 0, 0, 1), value=1.0)
        return U, d.unflatten(1, (m.groups, -1))


@pytest.fixture(autouse=True)
def kinds():
    register(Conv)(ConvLayer)
    register(ScaleAndPower)(ScaleAndPowerLayer)
    yield
    unregister(Conv, ScaleAndPower)


def network(conv=(2, 4, 3, 2, 1), length=7, **options):
    conv = Conv(*conv, **options)
    out = conv(torch.zeros(1, conv.in_channels, length)).flatten(1).shape[1]
    return nn.Sequential(conv, nn.Tanh(), ScaleAndPower(conv.out_channels), nn.Flatten(), nn.Linear(out, CLASSES))


@pytest.mark.parametrize("freeze", ["", "bias", "tilt"])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"groups": 2, "dilation": 2}], ids=str)
@pytest.mark.parametrize("K", [1, 4])
def test_gradients_of_registered_kinds_equal_torch_func(K, options, freeze):
    model = seeded(lambda: network(**options)).double()
    for name, p in model[:3].named_parameters():
        p.requires_grad_(name.rpartition(".")[2] != freeze)
    x, y = sample((2, 7), 3, K, torch.float64)
    ours = PerSample(model, K=K)(x, y)  # its own check against autograd included
    check_everything(ours, *reference.per_sample(model, x, y, K), tolerance=1e-9)


def test_sums_return_to_the_parameters():
    model = seeded(network).double()
    x, y = sample((2, 7), 5, 1, torch.float64)
    per_sample = PerSample(model)
    ours = per_sample.to_params(per_sample(x, y).weighted_sum(torch.ones(5, dtype=torch.float64)))
    F.cross_entropy(model(x), y, reduction="sum").backward()
    assert ours.keys() == {k for k, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad)


def test_join_is_the_way_from_parameters_to_blocks():
    """What the Opacus optimizer uses: p.grad_sample of every parameter, against the layer's own gradients."""
    model = seeded(lambda: network(groups=2)).double()
    x, y = sample((2, 7), 3, 1, torch.float64)
    per_sample = PerSample(model)
    for layer, g in zip(per_sample.layers, per_sample(x, y).layers, strict=True):
        each = [layer.split(block) for block in g.materialise()]
        joined = layer.join(*[torch.stack([parts[name] for parts in each]) for name in layer.params()])
        torch.testing.assert_close(joined.materialise(), g.materialise(), rtol=0, atol=0)


def test_curvature_of_registered_kinds_is_exact_where_it_must_be():
    """One image and one position for the convolution; any number of images for the single row."""
    model = seeded(lambda: network((2, 4, 3), length=3)).double()
    x, _ = sample((2, 3), 1, 1, torch.float64)
    factors = KFAC(model, x, labels="exact").factors()
    for (A, G), exact in zip(factors, reference.fisher(model, x), strict=True):
        torch.testing.assert_close(reference.block_diagonal(A, G), exact)
    x, _ = sample((2, 3), 7, 1, torch.float64)
    A, G = KFAC(model, x, labels="exact", micro_batch=3).factors()[1]
    torch.testing.assert_close(reference.block_diagonal(A, G), reference.fisher(model, x)[1])


@pytest.mark.parametrize("clamps", [0.4, 0.8])
def test_whitened_norms_of_registered_kinds(clamps):
    model = seeded(lambda: network(groups=2)).double()
    x, y = sample((2, 7), 4, 2, torch.float64)
    kfac = KFAC(model, sample((2, 7), 20, 1, torch.float64, seed=1)[0], labels="exact")
    curvature, factors = kfac(), kfac.factors()
    floor = float(torch.cat([F.spectrum().flatten() for F in curvature]).quantile(clamps))
    geometry = Kronecker()
    geometry.set(curvature, floor, torch.float64)
    norms, _ = geometry.sq_norms(PerSample(model, K=2)(x, y))
    gradients, _ = reference.per_sample(model, x, y, K=2)
    exact = sum((g.flatten(1) @ reference.kfac_power(A, G, floor, -0.5)).square().sum(1)
                for g, (A, G) in zip(gradients, factors, strict=True))
    torch.testing.assert_close(norms[0], exact, rtol=1e-9, atol=0)


def test_private_curvature_of_registered_kinds(monkeypatch):
    """Without noise and clips it is K-FAC of the batch."""
    monkeypatch.setattr(private_curvature, "CLIP_A", 1e9)
    model = seeded(lambda: network(groups=2)).double()
    x, _ = sample((2, 7), 9, 1, torch.float64)
    exact = KFAC(model, x, labels="given", y=sampled_labels(model, x, stream(1, "labels")))()
    noisy = PrivateKFAC(PerSample(model), (2, 7), 1e9, 0.0, 9, labels=stream(1, "labels"), noise=seeded_noise(2))
    assert noisy.positions == [4, 1, 1]
    for ours, expected in zip(noisy([(x[:4], None), (x[4:], None)]), exact, strict=True):
        torch.testing.assert_close(ours.spectrum(), expected.spectrum(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("build", "shape"), [
    (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(54, CLASSES)),
     (4, 6, 5)),
    (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)), (3, 5)),
], ids=["convolution", "linear over time"])
@pytest.mark.parametrize("K", [1, 4])
def test_the_faster_ways_equal_what_follows_from_columns(build, shape, K):
    """Conv2d and Linear override `gradient` and `moments`: the inherited ones say the same."""
    model = seeded(build).double()
    x, y = sample(shape, 3, K, torch.float64)
    fast = PerSample(model, K=K)(x, y)
    unregister(nn.Conv2d, nn.Linear)

    def plain(kind):
        return type("Plain", (kind,), {"gradient": Layer.gradient, "moments": Layer.moments})

    try:
        register(nn.Conv2d)(plain(Conv2dLayer))
        register(nn.Linear)(plain(LinearLayer))
        slow, factors = PerSample(model, K=K)(x, y), KFAC(model, x, labels="exact").factors()
    finally:
        unregister(nn.Conv2d, nn.Linear)
        register(nn.Conv2d)(Conv2dLayer)
        register(nn.Linear)(LinearLayer)
    assert all(type(g) is Dense for g in slow.layers)
    torch.testing.assert_close(slow.materialise(), fast.materialise())
    torch.testing.assert_close(factors, KFAC(model, x, labels="exact").factors())


# ---------------------------------------------------------------------------------------------------- refusals


class Subclass(nn.Linear):
    """Computes something else than its parent."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_kind_is_looked_up_by_its_exact_type():
    with pytest.raises(UsageError, match=r"'0' \(Subclass\) has trainable parameters and is not covered"):
        trainable_layers(nn.Sequential(Subclass(2, 2)))


def test_after_unregistering_it_is_refused_again():
    unregister(Conv)
    with pytest.raises(UsageError, match=r"Conv.*not covered.*Linear.*register a class"):
        trainable_layers(nn.Sequential(Conv(1, 1, 1)))
    register(Conv)(ConvLayer)
    assert type(trainable_layers(Conv(1, 1, 1))[0]) is ConvLayer


def test_a_kind_refuses_what_it_cannot_treat():
    with pytest.raises(UsageError, match="'0': only zero padding"):
        trainable_layers(nn.Sequential(Conv(1, 1, 3, padding="same")))


def test_parameters_that_the_kind_does_not_know_are_refused():
    """They would go untrained without a word."""
    layer = nn.Linear(2, 2)
    layer.gain = nn.Parameter(torch.ones(2))
    with pytest.raises(UsageError, match=r"'0' \(Linear\) has a trainable parameter 'gain'"):
        trainable_layers(nn.Sequential(layer))
    layer.gain.requires_grad_(False)
    assert len(trainable_layers(nn.Sequential(layer))) == 1


def test_mixing_layers_are_refused_whoever_registers_them():
    register(nn.BatchNorm1d)(ScaleAndPowerLayer)
    try:
        with pytest.raises(UsageError, match="mixes the samples"):
            trainable_layers(nn.Sequential(nn.BatchNorm1d(2)))
    finally:
        unregister(nn.BatchNorm1d)


def spread(self, a, d, K):
    """Adds up to autograd's sum, and gives every sample a share of all others."""
    g = ScaleAndPowerLayer.gradient(self, a, d, K).w
    return Dense(g.mean(0, keepdim=True).expand_as(g))


def wrong_views(self, a, d, K):
    """Takes rows i, i + b, ... for the views of sample i."""
    order = torch.arange(len(a)).view(K, -1).T.flatten()
    return ScaleAndPowerLayer.gradient(self, a[order], d[order], K)


@pytest.mark.parametrize(("gradient", "K"), [(spread, 1), (spread, 4), (wrong_views, 4)])
def test_a_class_that_gives_samples_the_gradients_of_others_is_found_out(gradient, K):
    """Clipping would bound the wrong thing: the first micro-batch is checked sample by sample."""
    unregister(ScaleAndPower)
    register(ScaleAndPower)(type("Wrong", (ScaleAndPowerLayer,), {"gradient": gradient}))
    x, y = sample((2, 7), 3, K, torch.float32)
    with pytest.raises(UsageError, match=r"gradient of '2\.gain' is not autograd's.*layer's class is wrong"):
        PerSample(seeded(network), K=K)(x, y)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: register(nn.Linear)(ConvLayer), "Linear already has a layer class, LinearLayer"),
    (lambda: register(nn.Bilinear)(nn.Linear), "takes a subclass of dpngd.layers.Layer"),
    (lambda: register("Bilinear")(ConvLayer), "takes the types of modules"),
    (lambda: unregister(nn.Bilinear), "nothing to unregister"),
])
def test_what_the_registry_refuses(call, says):
    with pytest.raises(UsageError) as refusal:
        call()
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_class_that_says_too_little_is_told_what_is_missing():
    class Nothing(Layer):
        shape = (1, 1, 1)

    with pytest.raises(NotImplementedError, match="Nothing must define `columns`"):
        Nothing("", nn.Linear(1, 1, bias=False)).gradient(torch.ones(1, 1), torch.ones(1, 1), 1)


def test_rows_that_lie_apart_are_copied_together_before_a_product(monkeypatch):
    """oneDNN takes 200 times as long for a view without the bias column: 15 s per step of a CNN on images of 32x32."""
    if forms.ONEDNN is None:
        pytest.skip("this build of torch has no oneDNN")
    strides, kernel = [], forms.ONEDNN
    monkeypatch.setattr(forms, "ONEDNN", lambda x, w, *rest: strides.append(w.stride()) or kernel(x, w, *rest))
    x, wide = torch.randn(5, 7), torch.randn(9, 8)
    for w in (wide[:, :7], wide[::2, :7], wide[:, :7].contiguous(), wide[:, :7].mT.contiguous().mT):
        torch.testing.assert_close(forms.product(x, w), x @ w.mT)
    assert strides == [(7, 1), (7, 1), (7, 1), (1, 9)]

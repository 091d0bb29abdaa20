"""The networks: their size, their weights' only source, and what the per-sample gradients need of them."""

import pytest
import torch
from torch import nn

from dpngd.errors import UsageError
from dpngd.noise import stream
from dpngd.training import models
from dpngd.training.models import networks

EACH = pytest.mark.parametrize("name", ["wrn-16-4", "wrn-10-1", "resnet-20", "small"])


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def images(n: int, *shape: int) -> torch.Tensor:
    return torch.randn(n, *shape, generator=stream(0, "test images"))


@pytest.mark.parametrize(
    ("name", "classes", "in_channels", "parameters"),
    [
        ("wrn-16-4", 10, 3, 2_751_562),  # De et al. (2022) with plain convs and bias
        ("wrn-10-1", 10, 3, 78_586),
        ("resnet-20", 10, 3, 269_722),  # He et al.: 0.27M
        ("resnet-20", 5, 3, 269_722 - 5 * 65),
        ("resnet-56", 10, 3, 853_018),  # He et al.: 0.85M
        ("small", 10, 3, 34_714),
        ("small", 10, 1, 34_714 - 2 * 25 * 16),
    ],
)
def test_parameter_counts(name, classes, in_channels, parameters):
    assert count(models.build(name, classes=classes, in_channels=in_channels)) == parameters


def test_the_small_networks_last_layer_fits_the_size_it_is_built_for():
    assert models.build("small", classes=10, in_channels=1, size=8).head.in_features == 64
    assert models.build("small", classes=10, size=32).head.in_features == 64 * 16


def test_wide_resnet_16_4_by_its_layers():
    """Depth 16: the stem and 12 convs of 3x3 in six blocks, three projections of 1x1, the linear layer."""
    model = models.build("wrn-16-4", classes=10)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [c.kernel_size for c in convs].count((3, 3)) == 13
    assert [(c.in_channels, c.out_channels, c.stride) for c in convs if c.kernel_size == (1, 1)] == [
        (16, 64, (1, 1)), (64, 128, (2, 2)), (128, 256, (2, 2)),
    ]  # fmt: skip
    assert all(c.bias is not None for c in convs)
    assert {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)} == {16}


@EACH
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 33, 30)])
def test_logits_of_each_input_shape(name, shape):
    model = models.build(name, classes=7, in_channels=shape[0])
    logits = model(images(2, *shape))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    # A group norm of one value per group would flatten the features, and the logits of both would be the same.
    assert (logits[0] - logits[1]).abs().max() > 1e-2


@EACH
def test_weights_come_from_the_generator_and_from_nowhere_else(name):
    def weights(seed, global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        model = models.build(name, classes=10, generator=stream(seed, "weights"))
        assert torch.equal(torch.get_rng_state(), before), "the global generator was touched"
        return model.state_dict()

    with torch.random.fork_rng(devices=[]):
        first, again, other = weights(1, 10), weights(1, 11), weights(2, 10)
    assert all(torch.equal(first[k], again[k]) for k in first)
    for k, module_weights in first.items():
        if module_weights.dim() > 1:
            assert not torch.equal(module_weights, other[k]), k
            # Drawn at 1/sqrt(fan_in): the tolerance is five standard errors of a sample deviation.
            n, fan_in = module_weights.numel(), module_weights[0].numel()
            assert module_weights.std() * fan_in**0.5 == pytest.approx(1, abs=5 / (2 * n) ** 0.5), k


def test_biases_start_at_zero_and_norms_at_the_identity():
    for name in ("wrn-10-1", "resnet-20", "small"):
        for module in models.build(name, classes=10).modules():
            if isinstance(module, nn.GroupNorm):
                assert (module.weight == 1).all()
            if getattr(module, "bias", None) is not None:
                assert (module.bias == 0).all()


def test_without_a_generator_the_weights_are_those_of_a_named_stream():
    default, named = (models.build("small", classes=10, generator=g) for g in (None, stream(0, "weights")))
    assert torch.equal(default.head.weight, named.head.weight)


@EACH
def test_no_sample_sees_another(name):
    """The logits of an image are the same alone and in a batch: what gives a sample a gradient of its own."""
    model, x = models.build(name, classes=10), images(4, 3, 32, 32)
    together = model(x)
    alone = torch.cat([model(x[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@EACH
def test_layers_are_covered_called_once_and_keep_their_inputs(name):
    model, calls, inputs = models.build(name, classes=10), {}, {}
    for key, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            assert isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm)

            def hook(module, args, output, key=key):
                calls[key] = calls.get(key, 0) + 1
                inputs[key] = (args[0], args[0].detach().clone(), output, output.detach().clone())

            module.register_forward_hook(hook)
        assert not getattr(module, "inplace", False)
    model(images(2, 3, 32, 32))
    owners = {k.rpartition(".")[0] for k, _ in model.named_parameters()}
    assert calls == dict.fromkeys(owners, 1)
    for key, (x, x_then, y, y_then) in inputs.items():
        assert torch.equal(x, x_then), f"the input of {key} was changed in place"
        assert torch.equal(y, y_then), f"the output of {key} was changed in place"


@EACH
def test_every_parameter_has_a_gradient(name):
    model = models.build(name, classes=10)
    nn.functional.cross_entropy(model(images(8, 3, 32, 32)), torch.arange(8)).backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.abs().max() > 1e-8, key


@EACH
def test_channels_last_gives_the_same_logits_and_keeps_the_format(name):
    model, x = models.build(name, classes=10), images(2, 3, 32, 32)
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    formats = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda m, args, y: formats.append(y.is_contiguous(memory_format=torch.channels_last))
            )
    actual = model(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert all(formats)


def test_option_a_shortcut_thins_the_image_and_adds_zero_channels():
    block = networks.ResidualBlock(2, 4, stride=2)
    nn.init.zeros_(block.norm2.weight)  # the residual branch gives zero, so the block is its shortcut
    x = images(1, 2, 6, 6)
    y = block(x)
    assert torch.equal(y[:, :2], x[:, :, ::2, ::2].relu())
    assert (y[:, 2:] == 0).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrn-16", "unknown model 'wrn-16': did you mean 'wrn-16-4'"),
        ("resnet", "unknown model 'resnet'"),
        ("vgg-16", "unknown model 'vgg-16'"),
        ("wrn-016-4", "unknown model"),
        ("wrn-16-0", "unknown model"),
        ("wrn-15-4", "model 'wrn-15-4': depth 15 is not 6n [+] 4 .* take 16"),
        ("wrn-4-4", "depth 4 .* take 10"),
        ("resnet-18", "depth 18 is not 6n [+] 2 .* take 20"),
        (None, "unknown model None"),
    ],
)
def test_unknown_names_and_depths_are_refused(name, message):
    with pytest.raises(UsageError, match=message):
        models.build(name, classes=10)


@pytest.mark.parametrize("bad", [{"classes": 1}, {"classes": True}, {"classes": 10, "in_channels": 0},
                                 {"classes": 10, "size": 0}, {"classes": 2.5}])  # fmt: skip
def test_impossible_shapes_are_refused(bad):
    with pytest.raises(UsageError, match="must be an integer of at least"):
        models.build("small", **bad)

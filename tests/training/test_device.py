"""The GPU path, as far as a machine without a GPU can show it: no tensor of a step goes through the host.

On a GPU every `.item()`, `bool()` or `.nonzero()` waits for all work that is queued. What a step may wait for is listed
here: two decisions per micro-batch that the guarantee needs (is every sample finite, is a sum fragile), and the numbers
of the record. No tensor is copied to the host at all.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpngd.curvature import KFAC
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import PerSample
from dpngd.layers.conv import Conv2dLayer
from dpngd.mechanism import GaussianMechanism
from dpngd.noise import stream
from dpngd.training import models

WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "item"}
MODELS = ("resnet-20", "wrn-10-1")  # the kinds of networks for which one would take a GPU


class Waits(TorchDispatchMode):
    """Counts the operations for which a GPU's queue would have to be emptied."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        if name in WAITING:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def no_copies(monkeypatch):
    """A tensor that is copied to the host is an error."""

    def copied(self, *args, **kwargs):
        raise AssertionError("a tensor is copied to the host")

    for name in ("cpu", "numpy", "tolist", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, copied)


def network(name):
    return models.build(name, classes=10, in_channels=3, size=32, generator=stream(0, "weights"))


def batch(b=8):
    g = stream(0, "batch")
    return torch.randn(b, 3, 32, 32, generator=g), torch.randint(10, (b,), generator=g)


def geometry_of(name, model):
    if name == "euclidean":
        return Euclidean()
    natural = Kronecker()
    x = torch.randn(60, 3, 32, 32, generator=stream(0, "x"))
    natural.set(KFAC(model, x, generator=stream(0, "labels"))(), 0.01)
    return natural


@pytest.mark.parametrize("name", MODELS)
def test_per_sample_gradients_wait_for_nothing(name, no_copies):
    per_sample = PerSample(network(name), check=False)
    x, y = batch()
    with Waits() as waits:
        per_sample(x, y)
    assert waits.seen == []


@pytest.mark.parametrize("geometry", ["euclidean", "kronecker"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_waits_twice_per_micro_batch_and_copies_nothing(name, geometry, request, monkeypatch):
    monkeypatch.setattr(Conv2dLayer, "by_pixels", lambda *_: False)  # as on a GPU: the next test
    model = network(name)
    maps, mechanism = geometry_of(geometry, model), GaussianMechanism((1.0,), 1.0, 8.0)
    per_sample = PerSample(model, check=False)
    g = stream(0, "noise")
    counts = []
    for n in (1, 2, 4):
        parts = [batch() for _ in range(n)]
        request.getfixturevalue("no_copies")
        with Waits() as waits:
            release = mechanism.release((per_sample(*part) for part in parts), maps, per_sample.zeros(),
                                        lambda like, std: torch.randn(like.shape, generator=g).to(like) * std)
            per_sample.add_(release.direction, -0.1)
        counts.append(len(waits.seen))
    per_micro_batch, rest = counts[1] - counts[0], 2 * counts[0] - counts[1]
    assert counts[2] - counts[1] == 2 * per_micro_batch
    assert per_micro_batch <= 3, "all finite, any fragile, and for Kronecker how many"
    assert rest <= 3, "the loss and the share that was clipped, for the record"


def test_on_other_devices_than_cpus_no_layer_is_chosen_by_pairs_of_pixels():
    layer = Conv2dLayer("conv", torch.nn.Conv2d(64, 64, 3, padding=1))
    assert layer.by_pixels(torch.zeros(1))
    assert not layer.by_pixels(torch.zeros(1, device="meta"))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_norms_and_sums_stay_on_their_device(name):
    """The meta device has shapes and no numbers: what makes a tensor on the CPU, or reads a value, fails there."""
    model = network(name).to("meta")
    per_sample = PerSample(model, check=False)
    x, y = batch()
    gradients = per_sample(x.to("meta"), y.to("meta"))
    norms, fragile = Euclidean().sq_norms(gradients)
    sums = gradients.weighted_sum(norms[0])
    direction = [block / 8 for block in Euclidean().back([sums])]
    per_sample.add_(direction, -0.1)
    for tensor in (gradients.losses, norms, fragile, *sums, *model.parameters()):
        assert tensor.device.type == "meta"
    assert sum(math.prod(s.shape) for s in sums) == sum(p.numel() for p in model.parameters())

"""DP-SGD-PT's start: trained on public images only, with a head of its own for the private task."""

import math

import pytest
import torch
import torch.nn.functional as F

from dpngd.data import load_public
from dpngd.errors import UsageError
from dpngd.noise import stream
from dpngd.training import models
from dpngd.training.pretrain import head_name, pretrained, rotated
from dpngd.training.recipe import to_float

SHAPE = {"in_channels": 1, "size": 8}


def patterns(n, classes):
    """Images of `classes` easy kinds: a bright row each."""
    y = torch.arange(n) % classes
    x = 0.3 * torch.randn(n, 1, 8, 8, generator=stream(0, "patterns"))
    x[torch.arange(n), 0, y] += 2
    return x, y


def start(x, y, *, public_classes=None, steps=60, eta=0.05, classes=10):
    return pretrained("small", x=x, y=y, public_classes=public_classes, classes=classes, steps=steps, eta=eta,
                      weights=stream(1, "weights"), order=stream(1, "pretraining"))


def random_model(classes=10):
    return models.build("small", classes=classes, **SHAPE, generator=stream(1, "weights"))


def probe(model, x, y, steps=60):
    """Accuracy and loss of a linear layer trained on the model's features: how much of the task its body knows."""
    with torch.no_grad():
        features = model.features(x).flatten(1)
    w = torch.zeros(features.shape[1], int(y.max()) + 1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(features @ w, y).backward()
        optimizer.step()
    logits = (features @ w).detach()
    return float((logits.argmax(1) == y).float().mean()), float(F.cross_entropy(logits, y))


def test_with_labels_the_body_learns_the_public_classes():
    x, y = patterns(200, 7)
    model, before = start(x, y, public_classes=7), random_model()
    (accuracy, loss), (random_accuracy, random_loss) = (probe(m, x, y, steps=5) for m in (model, before))
    assert accuracy >= random_accuracy
    assert math.log(7) - loss > 2 * (math.log(7) - random_loss)  # random features tell them apart too, but slower
    assert model(x).shape == (200, 10)  # 7 public classes, 10 private ones: the temporary head is gone


def test_without_labels_the_body_learns_rotations():
    x = to_float(load_public("photos", 200, shape=(1, 8, 8)).x)
    turned, turns = rotated(x, stream(2, "turns"))
    model = start(x, None, steps=150)
    assert probe(model, turned, turns)[0] > max(0.4, probe(random_model(), turned, turns)[0] + 0.02)


@pytest.mark.parametrize("labelled", [True, False])
def test_the_head_is_new_and_the_body_is_not(labelled):
    x, y = patterns(100, 4)
    model, before = start(x, y if labelled else None, public_classes=4), random_model()
    head = head_name(model)
    assert head == "head"
    for name, p in model.named_parameters():
        same = torch.equal(p, dict(before.named_parameters())[name])
        assert same == name.startswith("head."), name  # the head DP-SGD would start with, at the same seed


def test_the_start_is_a_function_of_the_public_images_and_the_seed():
    x, y = patterns(100, 4)
    one, two, other = (start(images, y, public_classes=4, steps=5).state_dict() for images in (x, x.clone(), x + 0.1))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert not torch.equal(one["features.0.weight"], other["features.0.weight"])


def test_turns_are_by_quarters_and_all_four_occur():
    x = torch.arange(64.0).view(1, 1, 8, 8).expand(40, -1, -1, -1)
    images, turns = rotated(x, stream(0, "turns"))
    assert turns.unique().tolist() == [0, 1, 2, 3]
    for image, k in zip(images, turns, strict=True):
        assert torch.equal(image[0], torch.rot90(x[0, 0], int(k)))


def test_pretraining_that_diverges_is_an_error():
    x, y = patterns(100, 4)
    with pytest.raises(UsageError, match=r"pre-training diverged at rate pt_eta = 1e\+30: lower it"):
        start(x, y, public_classes=4, steps=8, eta=1e30)

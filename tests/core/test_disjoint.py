"""Public images that are private ones too are found by content; unlike ones are not."""

import pytest
import torch

from dpngd.data import synthetic
from dpngd.disjoint import overlap
from dpngd.noise import stream

PRIVATE = synthetic.noise(300, (3, 32, 32), stream(0, "private"))
PUBLIC = synthetic.noise(60, (3, 32, 32), stream(1, "public"))


def changed_pixel(x):
    x = x.clone()
    x[:, 17, 4] = 255 - x[:, 17, 4]
    return x


CHANGES = {
    "same": lambda x: x,
    "a changed pixel": changed_pixel,
    "mirrored": lambda x: x.flip(2),
    "shifted": lambda x: torch.roll(x, 1, 2),
    "shifted the other way": lambda x: torch.roll(x, (-1, -1), (1, 2)),
    "mirrored, shifted and a pixel": lambda x: changed_pixel(torch.roll(x.flip(2), (1, -1), (1, 2))),
    "off by one level": lambda x: (x.int() + 1).clamp(max=255).to(torch.uint8),
}


FORMS = {"uint8": lambda x: x, "in [0, 1]": lambda x: x.float() / 255, "normalised": lambda x: x.float() / 63.75 - 2,
         "grey": lambda x: x[:, :1]}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_copies_are_found(change, form):
    public = PUBLIC.clone()
    public[7] = change(PRIVATE[41])
    assert overlap(form(PRIVATE), form(public)) == (41, 7)


@pytest.mark.parametrize("change", ["same", "mirrored", "shifted"])
def test_copies_of_small_images_are_found(change):
    private, public = (x[:, :1, :8, :8].contiguous() for x in (PRIVATE, PUBLIC))
    public[7] = CHANGES[change](private[41])
    assert overlap(private, public) == (41, 7)


def test_unlike_images_are_let_through():
    assert overlap(PRIVATE, PUBLIC) is None
    half = PUBLIC.clone()
    half[3, :, :, :16] = PRIVATE[5, :, :, :16]
    assert overlap(PRIVATE, half) is None


def test_vectors_and_empty_sets():
    g = stream(0, "vectors")
    private, public = torch.randn(100, 20, generator=g), torch.randn(50, 20, generator=g)
    assert overlap(private, public) is None
    public[9] = private[3]
    assert overlap(private, public) == (3, 9)
    assert overlap(private[:0], public) is None

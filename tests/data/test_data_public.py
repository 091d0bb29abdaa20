"""Public sets: sizes, seeds, labels, statistics, and that no private image is among them."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from data_files import images, real_data, split_arrays
from PIL import Image

from dpngd.data import check_disjoint, load_private, load_public
from dpngd.data.images import fit
from dpngd.data.prepared import make, write
from dpngd.data.public import SMALLEST
from dpngd.data.sources import SOURCES
from dpngd.errors import UsageError

MADE = ("photos", "noise", "dead-leaves")


@pytest.fixture
def pools(tmp_path):
    """Small pools of both public sets, and a private set."""
    write(make({"x": images(120, 11), "y": np.arange(120) % 100}, SOURCES["cifar100"].form, "a"), tmp_path)
    write(make({"x": images(90, 12), "y": 999 - np.arange(90)}, SOURCES["imagenet"].form, "b"), tmp_path)
    write(make(split_arrays(200, 40), SOURCES["cifar10"].form, "c"), tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)])
def test_made_sets_are_seeded_nested_and_without_repetition(name, shape):
    small, large, other = (
        load_public(name, size, seed=seed, shape=shape) for size, seed in ((60, 1), (230, 1), (60, 2))
    )
    assert small.x.shape == (60, *shape)
    assert small.x.dtype == torch.uint8
    assert (small.y, small.classes) == (None, None)
    assert torch.equal(small.x, large.x[:60])
    assert not torch.equal(small.x, other.x)
    assert len({image.tobytes() for image in large.x.numpy()}) == 230
    assert small.digest == load_public(name, 60, seed=1, shape=shape).digest != other.digest


def slope(x: torch.Tensor) -> float:
    """The exponent of the amplitude spectrum of grey images: -1 for 1/f, 0 for white noise."""
    grey = x.float().mean(1)
    window = torch.outer(torch.hann_window(32), torch.hann_window(32))
    power = torch.fft.fft2((grey - grey.mean((1, 2), keepdim=True)) * window).abs().square().mean(0)
    f = torch.hypot(torch.fft.fftfreq(32)[:, None], torch.fft.fftfreq(32)[None])
    kept = (f > 2.5 / 32) & (f < 0.4)
    return float(np.polyfit(np.log(f[kept].numpy()), np.log(power[kept].numpy()), 1)[0]) / 2


@pytest.mark.parametrize(
    ("name", "low", "high"), [("noise", -1.1, -0.9), ("dead-leaves", -1.7, -1.2), ("photos", -2, -1)]
)
def test_made_sets_have_the_falling_spectrum_and_the_grey_tint_of_natural_images(name, low, high):
    x = load_public(name, 500).x
    assert low < slope(x) < high
    red, green, blue = x.float().transpose(0, 1).flatten(1)
    assert torch.corrcoef(torch.stack([red, green]))[0, 1] > 0.8
    assert torch.corrcoef(torch.stack([red, blue]))[0, 1] > 0.6
    assert 25 < x.float().std((2, 3)).mean() < 70
    assert (x == 0).float().mean() + (x == 255).float().mean() < 0.15


def test_photos_are_pieces_of_the_photographs():
    from sklearn.datasets import load_sample_images

    photographs = [torch.from_numpy(p.copy()).permute(2, 0, 1) for p in load_sample_images().images]
    windows = [p.unfold(1, 32, 1).unfold(2, 32, 1) for p in photographs]
    found = 0
    for patch in load_public("photos", 50).x[:12]:
        for view in (patch, patch.flip(2)):
            for window in windows:
                corner = torch.nonzero((window[..., 0, 0] == view[:, 0, 0, None, None]).all(0))
                found += sum(bool((window[:, i, j] == view).all()) for i, j in corner.tolist())
    assert 1 <= found < 12  # the rest come from smaller copies of the photographs


@pytest.mark.parametrize("size", [SMALLEST - 1, 5001, 0])
def test_sizes_outside_50_to_5000_are_refused(size):
    with pytest.raises(UsageError, match=f"a public set of {size} images: take from 50 to 5000"):
        load_public("noise", size)


def test_a_pool_is_drawn_without_repetition_and_labels_follow(pools):
    public = load_public("cifar100", 100, root=pools, seed=3)
    assert len(set(public.names)) == 100
    for name, image, label in zip(public.names, public.x.numpy(), public.y.tolist(), strict=True):
        i = int(name.removeprefix("cifar100[").removesuffix("]"))
        np.testing.assert_array_equal(image.transpose(1, 2, 0), images(120, 11)[i])
        assert label == i % 100
    assert load_public("cifar100", 60, root=pools, seed=3).names == public.names[:60]
    assert load_public("cifar100", 60, root=pools, seed=4).names != public.names[:60]
    with pytest.raises(UsageError, match="cifar100 holds 120 images, 121 were asked for"):
        load_public("cifar100", 121, root=pools)


def test_a_mixture_takes_equal_parts_and_keeps_labels_apart(pools):
    public = load_public("cifar100+imagenet", 101, root=pools)
    assert [sum(n.startswith(part) for n in public.names) for part in ("cifar100", "imagenet")] == [51, 50]
    assert public.classes == 1100
    assert public.y[:51].max() < 100 <= public.y[51:].min()
    assert public.y[51:].max() <= 1099
    single = load_public("imagenet", 50, root=pools)
    assert torch.equal(public.y[51:], single.y + 100)
    assert torch.equal(public.x[51:], single.x)
    assert public.source == "a + b"
    unlabelled = load_public("cifar100+noise", 60, root=pools)
    assert (unlabelled.y, unlabelled.classes, len(unlabelled)) == (None, None, 60)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar10", "unknown public data set 'cifar10': did you mean 'cifar100'"),
        ("noise+", "unknown public data set ''"),
        ("noise+noise", "names a part twice"),
        ("folder:", "'folder:' names no path: write folder:PATH"),
        ("folder:does-not-exist", "does-not-exist is not a folder of images"),
    ],
)
def test_names_that_are_none_are_refused(name, message, pools, monkeypatch):
    monkeypatch.chdir(pools)
    with pytest.raises(UsageError, match=message):
        load_public(name, 50, root=pools)


def folder_of_images(place, n=55):
    place.mkdir()
    for i in range(n):
        size = (32, 32) if i % 2 else (50, 40)
        Image.fromarray(images(1, 100 + i, (*size, 3))[0]).save(place / f"{i:02d}.png")
    (place / "notes.txt").write_text("not an image")
    return place


def test_any_folder_of_images_serves(tmp_path):
    place = folder_of_images(tmp_path / "pictures")
    public = load_public(f"folder:{place}", 50, shape=(3, 32, 32))
    assert public.x.shape == (50, 3, 32, 32)
    assert (public.y, public.classes) == (None, None)
    assert str(place) not in f"{public.name} {public.source}", "a record keeps no path"
    with pytest.raises(UsageError, match="unknown public data set"):
        load_public(str(place), 50)
    i, odd = next((i, n) for i, n in enumerate(public.names) if int(n[-6:-4]) % 2)
    np.testing.assert_array_equal(
        public.x[i].numpy().transpose(1, 2, 0), images(1, 100 + int(odd[-6:-4]), (32, 32, 3))[0]
    )
    assert load_public(f"folder:{place}", 50, shape=(1, 8, 8)).x.shape == (50, 1, 8, 8)
    with pytest.raises(UsageError, match="holds 55 images, 56 were asked for"):
        load_public(f"folder:{place}", 56)


def test_an_empty_folder_and_a_damaged_image_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="is empty: there are no images in that folder"):
        load_public(f"folder:{tmp_path / 'empty'}", 50)
    place = folder_of_images(tmp_path / "pictures", 50)
    (place / "07.png").write_bytes((place / "07.png").read_bytes()[:200])
    with pytest.raises(UsageError, match=r"07\.png cannot be read as an image"):
        load_public(f"folder:{place}", 50)


def test_an_image_in_both_sets_is_an_error_that_names_it(pools, tmp_path):
    private = load_private("cifar10", root=pools)
    public = load_public("cifar100", 60, root=pools)
    check_disjoint(private, public)
    for part, name in ((private.x_train, "training"), (private.x_test, "test")):
        x = public.x.clone()
        x[17] = part[31]
        expected = f"{public.names[17]} is also image 31 of the {name} part of cifar10"
        with pytest.raises(UsageError, match=re.escape(expected)):
            check_disjoint(private, dataclasses.replace(public, x=x))
        x[17, :, 3, 3] = 255 - x[17, :, 3, 3]  # one pixel changed, and mirrored
        x[17] = x[17].flip(2)
        with pytest.raises(UsageError, match=re.escape(expected)):
            check_disjoint(private, dataclasses.replace(public, x=x))
    place = folder_of_images(tmp_path / "pictures", 50)
    Image.fromarray(split_arrays(200, 40)["x_train"][5]).save(place / "13.png")
    with pytest.raises(UsageError, match=r"13\.png is also image 5 of the training part"):
        check_disjoint(private, load_public(f"folder:{place}", 50))
    with pytest.raises(UsageError, match=r"private images are \(3, 32, 32\), public ones \(1, 8, 8\)"):
        check_disjoint(private, load_public("noise", 50, shape=(1, 8, 8)))


def test_fit_converts_to_grey_and_resizes_without_shifting():
    x = torch.from_numpy(images(3)).permute(0, 3, 1, 2)
    assert torch.equal(fit(x, (3, 32, 32)), x)
    grey = fit(x, (1, 32, 32))
    for i in range(3):
        pillow = np.asarray(Image.fromarray(images(3)[i]).convert("L")).astype(int)
        assert np.abs(grey[i, 0].numpy().astype(int) - pillow).max() <= 1
    assert torch.equal(fit(grey, (3, 32, 32))[:, 2], grey[:, 0])
    ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(1, 1, 32, 32)
    small = fit(ramp, (1, 8, 8))[0, 0, 0].float()
    expected = torch.arange(8) * 32.0 + 12
    assert (small - expected)[1:-1].abs().max() <= 1


@pytest.mark.shared
@pytest.mark.parametrize(("name", "classes", "each"), [("cifar100", 100, (30, 70)), ("imagenet", 1000, (5, 5))])
def test_the_real_pools_have_their_counts(name, classes, each):
    public = load_public(name, 5000, root=real_data())
    counts = torch.bincount(public.y, minlength=classes)
    assert len(counts) == public.classes == classes
    assert each[0] <= counts.min() <= counts.max() <= each[1]
    assert len({image.tobytes() for image in public.x.numpy()}) == 5000


@pytest.mark.shared
@pytest.mark.parametrize("name", ["svhn", "utkface"])
def test_the_papers_public_set_shares_nothing_with_the_real_private_sets(name):
    private = load_private(name, root=real_data())
    check_disjoint(private, load_public("cifar100+imagenet", 5000, root=real_data()))


@pytest.mark.shared
def test_the_two_cifar100_images_that_are_also_in_cifar10_are_drawn_last():
    root = real_data()
    try:
        private = load_private("cifar10", download=False)
    except UsageError as error:
        pytest.skip(f"CIFAR-10 has not been fetched: {error}")
    for seed in range(3):
        check_disjoint(private, load_public("cifar100", 4998, root=root, seed=seed))
    whole = load_public("cifar100", 5000, root=root)
    assert set(whole.names[-2:]) == {"cifar100[2203]", "cifar100[2224]"}
    with pytest.raises(UsageError, match=r"cifar100\[2224\] is also image 3021 of the training part of cifar10"):
        check_disjoint(private, whole)

"""A user's own images: both forms, the digest in the key, and every way in which a file can be wrong."""

from __future__ import annotations

import io
import struct
import zipfile

import numpy as np
import pytest
import torch
from data_files import images
from PIL import Image

from dpngd.data import load_private, load_public, own
from dpngd.errors import UsageError
from dpngd.suite import profiles
from dpngd.training.train import run

Y = np.arange(90) % 3
X = images(90, 5, (12, 12))
SPLIT = {"x_train": X[:60], "y_train": Y[:60], "x_test": X[60:], "y_test": Y[60:]}


def npz(path, **arrays):
    np.savez(path, **arrays)
    return f"npz:{path}"


def config(data, **changes):
    settings = {"B": 30, "T": 2, "evals": 1, "delta": 1e-3, **changes}
    return profiles.load("quick").config("dp-sgd", data, 2.0, 0, **settings)


def pictures(place, classes=("cat", "dog"), n=15):
    for c, name in enumerate(classes):
        (place / name).mkdir(parents=True)
        for i in range(n):
            Image.fromarray(images(1, 100 * c + i, (40, 30, 3))[0]).save(place / name / f"{i:02d}.png")
    return f"folder:{place}"


def test_a_split_npz_is_taken_as_it_is(tmp_path):
    private = load_private(npz(tmp_path / "a.npz", **SPLIT))
    assert (private.shape, private.classes, private.N) == ((1, 12, 12), 3, 60)
    np.testing.assert_array_equal(private.x_train[:, 0].numpy(), SPLIT["x_train"])
    assert private.y_test.tolist() == SPLIT["y_test"].tolist()
    assert str(tmp_path) not in private.source


def test_one_part_is_cut_90_to_10_the_same_for_every_seed(tmp_path):
    name = npz(tmp_path / "a.npz", x=images(90, 5, (12, 12, 3)), y=Y.astype(np.uint8))
    first, other = (load_private(name, seed=seed) for seed in (0, 1))
    assert (first.N, len(first.x_test), first.shape) == (81, 9, (3, 12, 12))
    assert torch.equal(first.x_test, other.x_test)
    every = {image.tobytes() for part in (first.x_train, first.x_test) for image in part.numpy()}
    assert len(every) == 90
    assert load_private(name, N=40, seed=3).N == 40


def test_a_folder_has_a_class_per_folder_and_a_stated_size(tmp_path):
    name = pictures(tmp_path / "pets")
    (tmp_path / "pets" / ".hidden").mkdir()
    private = load_private(name)
    assert (private.shape, private.classes, private.N, len(private.x_test)) == ((3, 32, 32), 2, 27, 3)
    assert load_private(f"{name}@16x16").shape == (3, 16, 16)


def test_the_key_is_of_the_content_not_of_the_path(tmp_path):
    (tmp_path / "b").mkdir()
    here = config(npz(tmp_path / "a.npz", **SPLIT))
    np.savez_compressed(tmp_path / "b" / "c.npz", **SPLIT)
    assert config(f"npz:{tmp_path / 'b' / 'c.npz'}").key() == here.key()
    assert config(npz(tmp_path / "d.npz", **{**SPLIT, "y_test": SPLIT["y_test"][::-1]})).key() != here.key()
    assert str(tmp_path) not in str(here.canonical())
    one, two = (config(pictures(tmp_path / n)) for n in ("e", "f"))
    assert one.key() == two.key()
    assert config(f"folder:{tmp_path / 'e'}@16x16").key() != one.key()
    (tmp_path / "f" / "cat" / "00.png").rename(tmp_path / "f" / "dog" / "99.png")
    assert config(f"folder:{tmp_path / 'f'}").key() != one.key()


def test_the_key_of_a_public_set_too(tmp_path):
    def public(name):
        return profiles.load("quick").config("dp-ngd", "digits", 2.0, 0, public=name)

    a, b = npz(tmp_path / "a.npz", x=X), npz(tmp_path / "b.npz", x=X)
    assert public(a).key() == public(b).key() != public(npz(tmp_path / "c.npz", x=X[::-1])).key()
    assert public(f"{a}+noise").canonical()["public"] == "npz:+noise"
    changed = public(a).replace(public="noise")
    assert (changed.public_digest, changed.key()) == (None, public("noise").key())


def test_a_run_on_own_data_and_a_file_that_changed_since(tmp_path):
    data, public = npz(tmp_path / "a.npz", **SPLIT), npz(tmp_path / "p.npz", x=images(70, 9, (20, 16, 3)))
    made = profiles.load("quick").config("dp-ngd", data, 2.0, 0, B=30, T=2, evals=1, delta=1e-3, public=public,
                                         public_size=60)
    record = run(made)
    assert record.config == made.canonical()
    assert record.data["private"]["N"] == 60
    assert str(tmp_path) not in str(record.to_dict())
    np.savez(tmp_path / "p.npz", x=X)
    with pytest.raises(UsageError, match="the content has changed since"):
        run(made)


def test_a_record_cannot_be_trained_without_the_path(tmp_path):
    from dpngd.training.config import RunConfig

    stored = RunConfig.from_dict(config(npz(tmp_path / "a.npz", **SPLIT)).canonical())
    with pytest.raises(UsageError, match="'npz:' names no path: write npz:PATH"):
        run(stored)


def test_public_images_are_drawn_without_repetition_and_fitted(tmp_path):
    name = npz(tmp_path / "p.npz", x=images(70, 9, (20, 16, 3)))
    public = load_public(name, 60, shape=(1, 8, 8))
    assert public.x.shape == (60, 1, 8, 8)
    assert len(set(public.names)) == 60
    assert torch.equal(load_public(name, 50, shape=(1, 8, 8)).x, public.x[:50])
    with pytest.raises(UsageError, match="holds 70 images, 71 were asked for"):
        load_public(name, 71)


BAD = [
    ({**SPLIT, "x_train": X[:60].astype(float)}, "x_train is float64, images must be uint8"),
    ({**SPLIT, "x_train": X[:60].reshape(60, -1)}, r"x_train has shape \(60, 144\), it must be \(n, H, W\)"),
    ({**SPLIT, "x_train": np.zeros((60, 12, 12, 2), np.uint8)}, "with C 1 or 3"),
    ({**SPLIT, "x_train": X[:0], "y_train": Y[:0]}, r"x_train has shape \(0, 12, 12\)"),
    ({**SPLIT, "x_train": X[:60, :8]}, "square images"),
    ({**SPLIT, "x_test": X[60:, :8, :8]}, "images of different shapes"),
    ({**SPLIT, "y_train": Y[:59]}, r"y_train has shape \(59,\), x_train holds 60 images"),
    ({**SPLIT, "y_train": Y[:60].astype(float)}, "y_train is float64, labels must be integers"),
    ({**SPLIT, "y_train": Y[:60] - 1}, "y_train has 3 different labels, -1 to 1"),
    ({**SPLIT, "y_train": Y[:60] * 2}, "y_train has 3 different labels, 0 to 4: they must be 0 to k-1"),
    ({**SPLIT, "y_test": Y[60:] + 1}, "y_train has 3 different labels, 0 to 2"),
    ({**SPLIT, "y_train": Y[:60] * 0, "y_test": Y[60:] * 0}, "one class, a classifier needs at least 2"),
    ({k: v for k, v in SPLIT.items() if k != "y_test"}, "no array y_test; it needs x_train, y_train, x_test, y_test"),
    ({"x": X}, "no array y; it needs x_train, y_train, x_test, y_test, or x and y"),
    ({"x": X, "y": np.array([{}] * 90, dtype=object)}, "y is object, labels must be integers"),
    ({"x": X[:4], "y": np.array([0, 1, 0, 1])}, "4 images are too few"),
]


@pytest.mark.parametrize(("arrays", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_arrays_are_refused_in_one_line(tmp_path, arrays, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_private(npz(tmp_path / "a.npz", **arrays))
    assert "\n" not in str(caught.value)


def test_bad_files_are_refused_in_one_line(tmp_path):
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "folder").mkdir()
    for name, message in (("npz:text.npz", "cannot be read as .npz"), ("npz:none.npz", "there is no such file"),
                          ("npz:folder", "is a folder: write folder:"), ("folder:none", "is not a folder of images"),
                          ("folder:folder", "holds 0 folders: put the images into one folder per class")):
        kind, _, path = name.partition(":")
        with pytest.raises(UsageError, match=message):
            load_private(f"{kind}:{tmp_path / path}")
    np.savez(tmp_path / "cut.npz", **SPLIT)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-40])
    with pytest.raises(UsageError, match="cannot be read"):
        load_private(f"npz:{tmp_path / 'cut.npz'}")
    for name in ("npz:", "folder:"):
        for load in (load_private, lambda name: load_public(name, 50)):
            with pytest.raises(UsageError, match="names no path"):
                load(name)
    with pytest.raises(UsageError, match="leave @8x8 out"):
        load_public(f"{pictures(tmp_path / 'pets')}@8x8", 50)
    (tmp_path / "pets" / "empty").mkdir()
    with pytest.raises(UsageError, match="empty is empty: each class needs images"):
        load_private(f"folder:{tmp_path / 'pets'}")


def test_too_large_an_archive_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    name = npz(tmp_path / "a.npz", **SPLIT)
    monkeypatch.setattr(own, "LIMIT", 5000)
    monkeypatch.setattr(own, "load_npz", lambda *a, **k: pytest.fail("unpacked"))
    with pytest.raises(UsageError, match=r"unpacks to 0\.0 GiB, the limit is"):
        load_private(name)


def test_a_header_that_claims_more_than_the_file_holds_is_refused(tmp_path, monkeypatch):
    """numpy would allocate what the header says before it reads."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({10**12}, 8, 8), }}".ljust(117) + "\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + b"1234")
        labels = io.BytesIO()
        np.save(labels, Y)
        archive.writestr("y.npy", labels.getvalue())
    monkeypatch.setattr(own, "load_npz", lambda *a, **k: pytest.fail("unpacked"))
    with pytest.raises(UsageError, match="x claims more than the file holds"):
        load_private(f"npz:{tmp_path / 'a.npz'}")


def test_a_script_in_the_guise_of_a_picture_is_not_run(tmp_path, monkeypatch):
    """Pillow knows EPS by its content and starts Ghostscript for it, whatever the file is called."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: pytest.fail("Ghostscript was started"))
    place = tmp_path / "pets"
    name = pictures(place)
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    (place / "cat" / "00.png").write_bytes(script)
    with pytest.raises(UsageError, match=r"00\.png cannot be read as an image"):
        load_private(name)

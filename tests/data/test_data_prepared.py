"""The prepared form: what is written comes back, what is wrong is refused, nothing is left half-made."""

from __future__ import annotations

import numpy as np
import pytest
from data_files import images, split_arrays

from dpngd.data.prepared import Form, digest, make, read, write
from dpngd.errors import UsageError

FORM = Form("cifar10", "cifar10", "split", 10)


def test_a_written_set_comes_back_with_its_source_and_digest(tmp_path):
    made = make(split_arrays(), FORM, "a test")
    path = write(made, tmp_path / "new")
    back = read(path, FORM)
    assert path == tmp_path / "new" / "cifar10.npz"
    assert (back.source, back.digest, back.path) == ("a test", made.digest, path)
    assert set(back.arrays) == {"x_train", "y_train", "x_test", "y_test"}
    for key, value in back.arrays.items():
        np.testing.assert_array_equal(value, made.arrays[key])
    assert [p.name for p in path.parent.iterdir()] == ["cifar10.npz"]


def test_the_digest_depends_on_pixels_and_labels_not_on_how_labels_are_stored():
    arrays = split_arrays()
    same = {**arrays, "y_train": arrays["y_train"].astype(np.uint8)}
    pixel = {**arrays, "x_test": arrays["x_test"].copy()}
    pixel["x_test"][0, 0, 0, 0] ^= 1
    label = {**arrays, "y_train": arrays["y_train"][::-1]}
    digests = [digest(a, FORM.wanted) for a in (arrays, same, pixel, label)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def _changed(**new):
    return lambda arrays: {**arrays, **new}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_changed(x_train=images(20).astype(np.float32)), "x_train is float32, images must be uint8"),
        (_changed(x_train=images(20).transpose(0, 3, 1, 2)), r"x_train has shape \(20, 3, 32, 32\)"),
        (_changed(x_test=images(10, shape=(28, 28, 3))), r"x_test has shape \(10, 28, 28, 3\)"),
        (_changed(x_test=images(0), y_test=np.zeros(0, int)), "x_test holds no images"),
        (_changed(y_train=np.zeros(20)), "y_train is float64, labels must be integers"),
        (_changed(y_train=np.zeros(19, int)), r"y_train has shape \(19,\), x_train holds 20 images"),
        (_changed(y_train=np.full(20, 10)), "y_train runs from 10 to 10, cifar10 needs 0 to 9"),
        (_changed(y_test=np.full(10, -1)), "y_test runs from -1 to -1"),
        (lambda arrays: {k: v for k, v in arrays.items() if k != "y_test"}, "no array y_test"),
        (_changed(digest=np.array("0" * 64)), "but records 0000000000000000: changed since it was prepared"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path, change, message):
    path = tmp_path / "cifar10.npz"
    np.savez(path, **change(split_arrays()))
    with pytest.raises(UsageError, match=message) as caught:
        read(path, FORM)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 100, 40_000, -10])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_cut_short_is_refused(tmp_path, keep, save):
    path = tmp_path / "cifar10.npz"
    save(path, **split_arrays())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match="damaged or cut short; delete it and fetch again"):
        read(path, FORM)


def test_a_flipped_bit_is_noticed(tmp_path):
    path = write(make(split_arrays(), FORM, "a test"), tmp_path)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"cifar10\.npz"):
        read(path, FORM)


def test_python_objects_are_never_unpickled(tmp_path):
    path = tmp_path / "cifar10.npz"
    np.savez(path, **{**split_arrays(), "y_train": np.array([object()] * 20)})
    with pytest.raises(UsageError, match="cannot be read"):
        read(path, FORM)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write(make(split_arrays(), FORM, "old"), tmp_path)

    def interrupted(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(make(split_arrays(30), FORM, "new"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["cifar10.npz"]
    assert read(path, FORM).source == "old"


def test_faces_need_a_name_for_every_image_and_plausible_ages(tmp_path):
    form = Form("utkface", "utkface", "faces", 5)
    n = 6
    labels = {"age": np.full(n, 30), "gender": np.zeros(n, int), "race": np.full(n, 4)}
    good = {"x": images(n), **labels, "filename": np.array([f"{i}.jpg" for i in range(n)])}
    assert read(write(make(good, form, "a test"), tmp_path), form).arrays["filename"][2] == "2.jpg"
    for wrong, message in (
        ({"filename": good["filename"][:3]}, "filename has shape"),
        ({"age": np.full(n, 2017)}, "age runs from 2017 to 2017, utkface needs 0 to 129"),
        ({"gender": np.full(n, 2)}, "gender runs from 2 to 2, utkface needs 0 to 1"),
    ):
        with pytest.raises(UsageError, match=message):
            make({**good, **wrong}, form, "a test")


def test_a_file_is_read_once_and_again_when_it_was_replaced(tmp_path):
    path = write(make(split_arrays(), FORM, "a test"), tmp_path)
    first = read(path, FORM)
    assert read(path, FORM) is first
    with pytest.raises(ValueError, match="read-only"):
        first.arrays["x_train"][0] = 0
    other = split_arrays()
    other["x_train"] = 255 - other["x_train"]
    write(make(other, FORM, "another"), tmp_path)
    assert read(path, FORM).source == "another"

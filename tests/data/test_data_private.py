"""Private sets: what a run gets, what its seed decides, what it must not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_files import images, real_data, split_arrays

from dpngd.data import load_private
from dpngd.data.originals import read_faces
from dpngd.data.prepared import make, write
from dpngd.data.private import distinct, split_faces
from dpngd.data.sources import SOURCES
from dpngd.errors import UsageError


def rows(x: torch.Tensor) -> set[bytes]:
    return {image.tobytes() for image in x.numpy()}


@pytest.fixture
def cifar(tmp_path):
    """A folder with a small CIFAR-10: 200 training and 40 test images."""
    write(make(split_arrays(200, 40), SOURCES["cifar10"].form, "made"), tmp_path)
    return tmp_path


def faces(n=300, copies=20, seed=0):
    """n different faces and some copies of the first ones, with other labels, shuffled."""
    rng = np.random.default_rng(seed)
    x = images(n, seed)
    x = np.concatenate([x, x[:copies]])
    names = np.array([f"{i:04d}.jpg" for i in range(len(x))])
    age = rng.integers(0, 110, len(x))
    labels = {"age": age, "gender": rng.integers(0, 2, len(x)), "race": rng.integers(0, 5, len(x))}
    mixed = rng.permutation(len(x))
    return {key: value[mixed] for key, value in {"x": x, "filename": names, **labels}.items()}


def test_images_are_channels_first_and_labels_follow_them(cifar):
    data = load_private("cifar10", root=cifar)
    arrays = split_arrays(200, 40)
    assert (data.x_train.dtype, data.y_train.dtype) == (torch.uint8, torch.int64)
    assert (data.N, data.shape, data.classes, data.evaluated_on) == (200, (3, 32, 32), 10, "test")
    assert data.x_train.is_contiguous()
    np.testing.assert_array_equal(data.x_train.numpy().transpose(0, 2, 3, 1), arrays["x_train"])
    np.testing.assert_array_equal(data.y_test.numpy(), arrays["y_test"])
    assert data.source == "made"


def test_a_subset_is_seeded_nested_and_keeps_the_test_set(cifar):
    whole = load_private("cifar10", root=cifar)
    small, again, larger, other = (
        load_private("cifar10", root=cifar, N=n, seed=seed) for n, seed in ((50, 1), (50, 1), (90, 1), (50, 2))
    )
    assert torch.equal(small.x_train, again.x_train)
    assert rows(small.x_train) < rows(larger.x_train) < rows(whole.x_train)
    assert rows(small.x_train) != rows(other.x_train)
    assert len(rows(small.x_train)) == 50
    assert torch.equal(small.x_test, whole.x_test)
    labels = {image.tobytes(): int(y) for image, y in zip(whole.x_train.numpy(), whole.y_train, strict=True)}
    assert [labels[image.tobytes()] for image in small.x_train.numpy()] == small.y_train.tolist()


def test_validation_is_part_of_the_training_set_and_never_of_the_test_set(cifar):
    whole = load_private("cifar10", root=cifar)
    run = load_private("cifar10", root=cifar, N=100, seed=3)
    tuning = load_private("cifar10", root=cifar, N=100, seed=3, validation=0.2)
    assert tuning.evaluated_on == "validation"
    assert (tuning.N, len(tuning.x_test)) == (80, 20)
    assert rows(tuning.x_train) | rows(tuning.x_test) == rows(run.x_train)
    assert not rows(tuning.x_train) & rows(tuning.x_test)
    assert not rows(tuning.x_test) & rows(whole.x_test)
    other = load_private("cifar10", root=cifar, validation=0.2, seed=4)
    assert rows(other.x_test) != rows(load_private("cifar10", root=cifar, validation=0.2, seed=5).x_test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"N": 201}, "N is 201, but cifar10 has 200 training images: take N from 1 to 200"),
        ({"N": 0}, "N is 0"),
        ({"validation": 1.0}, r"validation is 1\.0"),
        ({"validation": -0.1}, r"validation is -0\.1"),
        ({"validation": 0.001}, "leaves one part empty"),
        ({"target": "gender"}, "cifar10 has no target 'gender'"),
        ({"test_share": 0.5}, r"test_share = 0\.5: only for sets that have no official split \(.*digits\), not"),
    ],
)
def test_wrong_arguments_are_refused(cifar, arguments, message):
    with pytest.raises(UsageError, match=message):
        load_private("cifar10", root=cifar, **arguments)


def test_an_unknown_private_set_is_named_and_a_public_one_is_not_private():
    with pytest.raises(UsageError, match="unknown private data set 'cifar100': did you mean 'cifar10'"):
        load_private("cifar100")


def test_digits_are_whole_stratified_and_always_split_alike():
    data, other = load_private("digits"), load_private("digits", seed=7)
    assert (data.N, len(data.x_test), data.shape, data.classes) == (1437, 360, (1, 8, 8), 10)
    assert (int(data.x_train.min()), int(data.x_train.max())) == (0, 255)
    assert len(data.x_train.unique()) == 17
    for y, share in ((data.y_train, 0.8), (data.y_test, 0.2)):
        counts = torch.bincount(y) / (1797 * share)
        assert ((counts - 0.1).abs() < 0.005).all()
    assert torch.equal(data.x_test, other.x_test)
    # The split itself: a change of it would make accuracies incomparable with those stored before.
    assert data.digest == "e192f2c2047799f7383c8996101016c936e92ca70ed287c5f37b7e4e5a0fb0d3"


def test_the_share_of_our_own_test_split_can_be_chosen():
    tenth, half = (split_faces(faces(), test_share=share) for share in (0.1, 0.5))
    small, large = ({i.tobytes() for i in part["x_test"]} for part in (tenth, half))
    assert (len(small), len(large)) == (30, 150)
    assert small < large, "the larger test set has the smaller one"
    assert not large & {i.tobytes() for i in half["x_train"]}
    digits = load_private("digits", test_share=0.5, N=800)
    assert (digits.N, len(digits.x_test)) == (800, 899)
    with pytest.raises(UsageError, match=r"test_share = 1: it is a share of all images, above 0 and below 1"):
        load_private("digits", test_share=1)


def test_distinct_keeps_the_first_of_each_group():
    x = images(5)
    assert distinct(x[[3, 1, 3, 0, 1, 4]]).tolist() == [0, 1, 3, 5]


def test_faces_lose_their_duplicates_before_the_split_and_the_first_name_wins():
    arrays = faces()
    parts = split_faces(arrays, "gender")
    assert (len(parts["x_train"]), len(parts["x_test"])) == (270, 30)
    train, test = ({i.tobytes() for i in parts[f"x_{part}"]} for part in ("train", "test"))
    assert len(train) == 270
    assert len(test) == 30
    assert not train & test
    first = {}
    for i in np.argsort(arrays["filename"]):
        first.setdefault(arrays["x"][i].tobytes(), int(arrays["gender"][i]))
    for part in ("train", "test"):
        assert [first[image.tobytes()] for image in parts[f"x_{part}"]] == parts[f"y_{part}"].tolist()


def test_the_split_of_faces_depends_on_neither_the_target_nor_the_order_of_the_file():
    arrays = faces()
    other = {key: value[::-1] for key, value in arrays.items()}
    tests = [
        {i.tobytes() for i in split_faces(a, target)["x_test"]}
        for a, target in ((arrays, "ethnicity"), (arrays, "age"), (other, "gender"))
    ]
    assert tests[0] == tests[1] == tests[2]


def test_the_targets_of_utkface(tmp_path):
    arrays = faces(copies=0)
    write(make(arrays, SOURCES["utkface"].form, "made"), tmp_path)
    at = {image.transpose(2, 0, 1).tobytes(): i for i, image in enumerate(arrays["x"])}
    wanted = {
        "utkface": (5, arrays["race"]),
        "utkface-gender": (2, arrays["gender"]),
        "utkface-age": (7, np.minimum(arrays["age"] // 10, 6)),
    }
    for seed, (name, (classes, labels)) in enumerate(wanted.items()):
        data = load_private(name, root=tmp_path, seed=seed)
        assert (data.name, data.classes) == (name, classes)
        for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
            assert y.tolist() == [labels[at[image.tobytes()]] for image in x.numpy()]
    same = load_private("utkface", target="age", root=tmp_path)
    assert same.name == "utkface-age"
    assert torch.equal(same.y_test, data.y_test)
    with pytest.raises(UsageError, match="contradict each other"):
        load_private("utkface-age", target="gender", root=tmp_path)
    with pytest.raises(UsageError, match="unknown target of utkface 'race'"):
        load_private("utkface", target="race", root=tmp_path)


@pytest.mark.shared
def test_the_real_svhn_has_its_published_balance():
    data = load_private("svhn", root=real_data())
    assert (data.N, len(data.x_test), data.classes) == (24_000, 5_000, 10)
    published = torch.tensor([4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]) / 73_257
    assert (torch.bincount(data.y_train) / 24_000 - published).abs().max() < 0.005
    means = data.x_train.float().mean((0, 2, 3)) / 255
    np.testing.assert_allclose(means, [0.4377, 0.4438, 0.4728], atol=2e-3)


@pytest.mark.shared
def test_the_real_utkface_has_its_counts():
    data = load_private("utkface", root=real_data())
    assert data.N + len(data.x_test) == 23_314
    assert len(data.x_test) == 2_331
    assert data.N // 4096 == 5  # the paper's steps per epoch
    assert len(rows(data.x_train) | rows(data.x_test)) == 23_314
    races = torch.bincount(torch.cat([data.y_train, data.y_test])) / 23_314
    np.testing.assert_allclose(races, np.array([10078, 4525, 3434, 3975, 1692]) / 23_704, atol=5e-3)


@pytest.mark.shared
def test_the_real_folder_gives_the_pixels_of_the_prepared_file():
    root = real_data()
    arrays, skipped = read_faces(root / "utkface_jpg")
    assert (len(arrays["x"]), len(skipped)) == (57, 3)
    with np.load(root / "utkface.npz") as prepared:
        x, names = prepared["x"], prepared["filename"].tolist()
        labels = {key: prepared[key] for key in ("age", "gender", "race")}
    at = [names.index(name) for name in arrays["filename"]]
    np.testing.assert_array_equal(arrays["x"], x[at])
    for key, values in labels.items():
        np.testing.assert_array_equal(arrays[key], values[at])

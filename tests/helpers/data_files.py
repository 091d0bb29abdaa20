"""Tiny data sets in every layout that the loaders read, and the way to the real ones."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpngd.data.npm import OFFICIAL_SHA1, binary_sha1

Batches = dict[str, tuple[np.ndarray, np.ndarray]]
CHECKOUT = Path(__file__).resolve().parents[2]


def real_data() -> Path:
    """The folder with real images, or a skip that says what is missing."""
    folder = Path(os.environ.get("DPNGD_DATA") or CHECKOUT.parent / "shared" / "data")
    if not (folder / "utkface.npz").exists():
        pytest.skip("no real images: set DPNGD_DATA to a folder with svhn, utkface, cifar100, imagenet32 .npz")
    return folder


def images(n: int, seed: int = 0, shape: tuple[int, ...] = (32, 32, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def split_arrays(n: int = 20, test: int = 10, classes: int = 10) -> dict[str, np.ndarray]:
    return {
        "x_train": images(n, 1), "y_train": np.arange(n) % classes,
        "x_test": images(test, 2), "y_test": np.arange(test) % classes,
    }  # fmt: skip


def batches(n: int = 4) -> Batches:
    """CIFAR-10's six batches with n images each."""
    return {name: (images(n, i), (np.arange(n, dtype=np.uint8) * 3 + i) % 10) for i, name in enumerate(OFFICIAL_SHA1)}


def sums(made: Batches) -> dict[str, str]:
    return {name: binary_sha1(x, y) for name, (x, y) in made.items()}


def binary_batches(folder: Path, made: Batches) -> Path:
    """The batches as `cifar-10-batches-bin/` in `folder`."""
    place = folder / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    for name, (x, y) in made.items():
        planes = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        np.concatenate([y[:, None], planes], axis=1).tofile(place / f"{name}.bin")
    return place


def npm_archive(path: Path, made: Batches, leave_out: str = "", labels: int | None = None) -> Path:
    """The batches laid out as in the npm package, in a gzipped tar."""
    train = [int(y) for name, (_, ys) in made.items() if name != "test_batch" for y in ys]
    files = {
        "train_lables.json": json.dumps(train[:labels]).encode(),
        "test_lables.json": json.dumps(made["test_batch"][1].tolist()).encode(),
    }
    for name, (x, _) in made.items():
        buffer = io.BytesIO()
        Image.fromarray(x.reshape(len(x), 1024, 3)).save(buffer, "PNG")
        files[f"{name}.png"] = buffer.getvalue()
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            if name != leave_out:
                entry = tarfile.TarInfo(f"package/{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return path


def pickled_cifar(
    folder: Path, cls: type, monkeypatch: pytest.MonkeyPatch, made: Batches, label: str = "labels"
) -> str:
    """The batches as torchvision's `cls` reads them (its lists of MD5 sums follow suit), and the archive beside them.

    Returns the archive's MD5.
    """
    place = folder / cls.base_folder
    place.mkdir(parents=True)
    entries = {}
    for name, (x, y) in made.items():
        data = pickle.dumps({"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), label: y.tolist()})
        (place / name).write_bytes(data)
        entries[name] = [name, hashlib.md5(data).hexdigest()]
    meta = pickle.dumps({cls.meta["key"]: [str(i) for i in range(10)]})
    (place / cls.meta["filename"]).write_bytes(meta)
    tests = [name for name in made if name.startswith("test")]
    monkeypatch.setattr(cls, "train_list", [entries[name] for name in made if name not in tests])
    monkeypatch.setattr(cls, "test_list", [entries[name] for name in tests])
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": hashlib.md5(meta).hexdigest()})
    archive = folder / cls.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(place, arcname=cls.base_folder)
    monkeypatch.setattr(cls, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return cls.tgz_md5

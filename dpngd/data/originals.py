"""Data sets from their original files in the layout they are published in.

A reader takes the folder to look in and gives the arrays of the prepared form, or None where its files are absent.
Files that are there and wrong are an error: what a user has put in place is never passed over in silence.
"""

from __future__ import annotations

import contextlib
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from dpngd import progress
from dpngd.data.images import find_images, read_image
from dpngd.data.npm import OFFICIAL_SHA1, assemble
from dpngd.data.prepared import Arrays, load_npz
from dpngd.data.vision import torchvision
from dpngd.errors import UsageError
from dpngd.noise import stream

POOL = 5000  # images kept of a public set: the largest public set of the paper
# class name in torchvision.datasets, what its files are called, its archive
PUBLISHED = {
    "cifar10": ("CIFAR10", ("cifar-10-batches-py",), "cifar-10-python.tar.gz"),
    "cifar100": ("CIFAR100", ("cifar-100-python",), "cifar-100-python.tar.gz"),
    "svhn": ("SVHN", ("train_32x32.mat", "test_32x32.mat"), None),
}
FACE = re.compile(r"(\d{1,3})_([01])_([0-4])_\d+\.jpg(?:\.chip\.jpg)?")
PATIENCE = 30  # seconds without an answer before a download counts as failed


def as_distributed(name: str, folder: Path) -> Arrays | None:
    """CIFAR-10, CIFAR-100 or SVHN from the files (or the archive) that torchvision reads, with its MD5 checks."""
    kind, files, archive = PUBLISHED[name]
    if any((folder / file).exists() for file in files):
        return _read(name, folder, download=False)
    if archive is None or not (folder / archive).exists():
        return None
    vision = torchvision()
    md5 = getattr(vision.datasets, kind).tgz_md5
    if not vision.datasets.utils.check_integrity(folder / archive, md5):
        raise UsageError(f"{folder / archive} does not have MD5 {md5}: damaged or cut short; delete it or get it again")
    with tempfile.TemporaryDirectory() as scratch:  # unpacked elsewhere: `folder` may be read-only
        (Path(scratch) / archive).symlink_to((folder / archive).resolve())
        return _read(name, Path(scratch), download=True)


def download(name: str, folder: Path) -> Arrays:
    """The same through torchvision's download (MD5) under our bar, inside a temporary folder of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch, _patience(), _our_bar(name):
        return _read(name, Path(scratch), download=True)


def _read(name: str, folder: Path, *, download: bool) -> Arrays:
    datasets = torchvision().datasets
    kind = getattr(datasets, PUBLISHED[name][0])
    try:
        if name == "svhn":
            train, test = (kind(folder, split=split, download=download) for split in ("train", "test"))
            return {
                "x_train": train.data.transpose(0, 2, 3, 1), "y_train": train.labels,
                "x_test": test.data.transpose(0, 2, 3, 1), "y_test": test.labels,
            }  # fmt: skip
        test = kind(folder, train=False, download=download)
        if name == "cifar100":  # its first test images, the same pool whichever way they came
            return {"x": test.data[:POOL], "y": np.array(test.targets[:POOL])}
        train = kind(folder, train=True, download=download)
    except RuntimeError as error:  # torchvision's word for a wrong MD5
        raise UsageError(f"{name} in {folder}: files missing or damaged (MD5 differs); get them again") from error
    return {
        "x_train": train.data, "y_train": np.array(train.targets),
        "x_test": test.data, "y_test": np.array(test.targets),
    }  # fmt: skip


def cifar10_binary(folder: Path, sums: dict[str, str] = OFFICIAL_SHA1) -> Arrays | None:
    """CIFAR-10 from the binary batches of `cifar-10-batches-bin/`."""
    place = folder / "cifar-10-batches-bin"
    if not place.is_dir():
        return None
    batches = {}
    for name in sums:
        path = place / f"{name}.bin"
        if not path.exists() or not path.stat().st_size or path.stat().st_size % 3073:
            raise UsageError(f"{path} is missing or cut short (a binary batch is a multiple of 3,073 bytes)")
        records = np.fromfile(path, np.uint8).reshape(-1, 3073)
        x = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        batches[name] = (x, records[:, 0].copy())
    return assemble(batches, sums, str(place))


def read_faces(folder: Path) -> tuple[Arrays, list[str]]:
    """UTKFace from a folder of JPEGs named age_gender_race_date.jpg: its arrays, and the malformed names left out."""
    paths = sorted(folder.glob("*.jpg"), key=lambda path: path.name)
    named = [(path, match) for path in paths if (match := FACE.fullmatch(path.name))]
    skipped = [path.name for path in paths if not FACE.fullmatch(path.name)]
    if not named:
        raise UsageError(f"{folder} holds no JPEG named age_gender_race_date.jpg ({len(skipped)} other names)")
    x = np.stack([read_image(path) for path, _ in progress.over(named, "reading UTKFace", unit="image", leave=False)])
    labels = np.array([[int(group) for group in match.groups()] for _, match in named])
    arrays = {"x": x, "filename": np.array([path.name for path, _ in named])}
    return {**arrays, **dict(zip(("age", "gender", "race"), labels.T, strict=True))}, skipped


def imagenet_npz(folder: Path) -> Arrays | None:
    """The validation part of the published 32x32 ImageNet, `val_data.npz` (data (50000,3072), labels from 1)."""
    for path in (folder / "val_data.npz", folder / "Imagenet32_val_npz" / "val_data.npz"):
        if path.exists():
            break
    else:
        return None
    stored = load_npz(path, ("data", "labels"))
    data, labels = stored.get("data"), stored.get("labels")
    if data is None or labels is None or data.shape != (len(labels), 3072):
        raise UsageError(f"{path} is not the published ImageNet 32x32: it needs data (n, 3072) and labels (n,)")
    pool = _pool(len(data))
    x = np.ascontiguousarray(data[pool].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return {"x": x, "y": labels[pool].astype(np.int64) - 1}


def imagenet_folder(folder: Path) -> Arrays | None:
    """ILSVRC-2012 validation images in `imagenet/val/<class>/`, one folder for each of the 1,000 classes."""
    place = folder / "imagenet" / "val"
    if not place.is_dir():
        return None
    classes = {path.name: i for i, path in enumerate(sorted(path for path in place.iterdir() if path.is_dir()))}
    paths = [path for path in find_images(place) if path.parent.name in classes]
    if len(classes) != 1000 or not paths:
        raise UsageError(f"{place} holds {len(classes)} class folders, {len(paths)} images in them; ImageNet has 1000")
    paths = [paths[i] for i in _pool(len(paths))]
    x = np.stack([read_image(path) for path in progress.over(paths, "reading ImageNet", unit="image", leave=False)])
    return {"x": x, "y": np.array([classes[path.parent.name] for path in paths])}


def _pool(n: int) -> list[int]:
    """Positions of the at most POOL images that are kept of n, the same in every run."""
    return torch.randperm(n, generator=stream(0, "data/pool"))[:POOL].tolist()


@contextlib.contextmanager
def _our_bar(name: str) -> Iterator[None]:
    """torchvision draws a bar of its own, whose carriage returns would fill a log file: ours takes its place."""
    utils = torchvision().datasets.utils
    before = utils.tqdm
    utils.tqdm = lambda total, unit, unit_scale: progress.bar(total, f"downloading {name}", unit=unit, scale=unit_scale)
    try:
        yield
    finally:
        utils.tqdm = before


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """torchvision sets no time limit of its own, and a firewall that drops packets would hold a run for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)

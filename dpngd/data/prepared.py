"""The prepared form of a data set: `<root>/<file>.npz`, checked when read, written whole or not at all.

| layout  | arrays (n images, H x W pixels, C channels)                                                       |
| ------- | -------------------------------------------------------------------------------------------------- |
| split   | x_train (n,H,W,C) uint8, y_train (n,) integer, x_test, y_test likewise                              |
| faces   | x (n,H,W,C) uint8, age, gender, race (n,) integer, filename (n,) string                             |
| pool    | x (n,H,W,C) uint8, y (n,) integer                                                                   |

A file that this project writes also holds `source` (where it came from) and `digest` (SHA-256 of the arrays), and
a digest that differs is an error. Files without them, and with further arrays, are read as they are.
"""

from __future__ import annotations

import functools
import hashlib
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpngd.errors import UsageError
from dpngd.files import write_atomically

Arrays = dict[str, np.ndarray]
AGES = 130  # exclusive bound of a plausible age, so that a column mix-up is noticed

# layout -> image array -> the label arrays that go with it
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "split": {"x_train": ("y_train",), "x_test": ("y_test",)},
    "faces": {"x": ("age", "gender", "race")},
    "pool": {"x": ("y",)},
}


@dataclass(frozen=True)
class Form:
    """What the prepared file of one data set must look like."""

    name: str
    file: str  # the file's name without .npz
    layout: str
    classes: int
    shape: tuple[int, int, int] = (32, 32, 3)  # H, W, C

    def bound(self, label: str) -> int:
        """The exclusive upper bound of the values of a label array."""
        return {"age": AGES, "gender": 2}.get(label, self.classes)

    @property
    def wanted(self) -> list[str]:
        """The arrays of the file, in the order in which they enter the digest."""
        keys = [key for x, labels in LAYOUTS[self.layout].items() for key in (x, *labels)]
        return [*keys, "filename"] if self.layout == "faces" else keys


@dataclass(frozen=True)
class Prepared:
    """A data set in memory: its arrays, where it came from, its digest, its file if it has one."""

    form: Form
    arrays: Arrays
    source: str
    digest: str
    path: Path | None = None


def digest(arrays: Arrays, keys: list[str]) -> str:
    """SHA-256 over the named arrays, the same whatever integer type the labels were stored in."""
    total = hashlib.sha256()
    for key in keys:
        value = arrays[key]
        if value.dtype.kind == "U":
            data = "\n".join(value.tolist()).encode()
        else:
            data = np.ascontiguousarray(value, np.uint8 if value.ndim == 4 else "<i8").data
        total.update(f"{key} {value.shape}\n".encode())
        total.update(data)
    return total.hexdigest()


def check(arrays: Arrays, form: Form, where: str) -> None:
    """Raise if an array is missing or has the wrong dtype, shape or range."""
    if missing := [key for key in form.wanted if key not in arrays]:
        raise UsageError(f"{where}: no array {', '.join(missing)}; {form.name} needs {', '.join(form.wanted)}")
    for x_key, labels in LAYOUTS[form.layout].items():
        x = arrays[x_key]
        if x.dtype != np.uint8:
            raise UsageError(f"{where}: {x_key} is {x.dtype}, images must be uint8 from 0 to 255")
        if x.shape[1:] != form.shape:
            raise UsageError(f"{where}: {x_key} has shape {x.shape}, {form.name} needs (n, *{form.shape}), n first")
        if not len(x):
            raise UsageError(f"{where}: {x_key} holds no images")
        for key in labels:
            y = arrays[key]
            if y.dtype.kind not in "iu":
                raise UsageError(f"{where}: {key} is {y.dtype}, labels must be integers")
            if y.shape != (len(x),):
                raise UsageError(f"{where}: {key} has shape {y.shape}, {x_key} holds {len(x)} images")
            if y.min() < 0 or y.max() >= form.bound(key):
                raise UsageError(
                    f"{where}: {key} runs from {y.min()} to {y.max()}, {form.name} needs 0 to {form.bound(key) - 1}"
                )
    if form.layout == "faces" and arrays["filename"].shape != (len(arrays["x"]),):
        raise UsageError(f"{where}: filename has shape {arrays['filename'].shape}, x holds {len(arrays['x'])} images")


def first_line(error: Exception) -> str:
    """What a library said, without what it said after that."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def make(arrays: Arrays, form: Form, source: str) -> Prepared:
    """Check arrays that came from `source` and give them their digest."""
    check(arrays, form, source)
    return Prepared(form, arrays, source, digest(arrays, form.wanted))


def load_npz(path: Path, keys: Iterable[str], advice: str = "delete it and fetch again") -> Arrays:
    """Those of the named arrays that `path` holds. Python objects in it are never unpickled."""
    try:
        # Opened here, since numpy leaves a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {key: stored[key] for key in keys if key in stored.files}
    except (OSError, ValueError, TypeError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{path} cannot be read ({first_line(error)}): damaged or cut short; {advice}"
        ) from error


def read(path: Path, form: Form) -> Prepared:
    """The prepared set in `path`, checked. A process that does many runs reads and checks an unchanged file once."""
    stat = path.stat()
    return _read(path.absolute(), form, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@functools.lru_cache(maxsize=4)  # the private set and two public ones, and one to spare: some 0.3 GB
def _read(path: Path, form: Form, version: tuple[int, int, int]) -> Prepared:
    """`version` changes with the file, so that a file replaced in between is read again."""
    stored = load_npz(path, [*form.wanted, "source", "digest"])
    recorded = {key: str(stored.pop(key)) for key in ("source", "digest") if key in stored}
    check(stored, form, str(path))
    actual = digest(stored, form.wanted)
    if recorded.get("digest", actual) != actual:
        raise UsageError(
            f"{path} has digest {actual[:16]}, but records {recorded['digest'][:16]}: changed since it was prepared; "
            "delete it and fetch again"
        )
    for array in stored.values():
        array.setflags(write=False)  # shared by all that ask
    return Prepared(form, stored, recorded.get("source", f"prepared file {path.name}"), actual, path)


def write(prepared: Prepared, folder: Path) -> Path:
    """Write `<folder>/<file>.npz`, whole or not at all."""
    path = folder / f"{prepared.form.file}.npz"
    kept = {key: prepared.arrays[key] for key in prepared.form.wanted}
    write_atomically(path, lambda file: np.savez(file, **kept, source=np.array(prepared.source),
                                                 digest=np.array(prepared.digest)))
    return path

"""The data sets by name: what each one is, in one entry.

Adding one is an entry here (`register`) with its loader, and, for a profile, its settings under `data:` in params/. A
set that is read from files also has a `Source` in `dpngd.data.sources`, which says where they are looked for. A user's
own data need no entry: npz:PATH and folder:PATH are read as they are.

This module imports neither torch nor numpy: names are needed where nothing is loaded.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpngd.errors import UsageError, unknown

OWN = ("npz", "folder")  # kinds of a user's own data: npz:PATH, folder:PATH


@dataclass(frozen=True)
class Views:
    """How views are made: by how many pixels an image is padded before it is cropped, and whether it is mirrored."""

    pad: int = 4
    flip: bool = True

    @property
    def count(self) -> int:
        """The number of different views of one image."""
        return (2 * self.pad + 1) ** 2 * (2 if self.flip else 1)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set: everything that is known of it before it is loaded.

    The loader is a function, or "module:function", imported when it is called:
        private          (entry, root, download) -> arrays, classes, source, digest (see `dpngd.data.private`). Where
                         the split is ours, `entry.test_share` is the share that the run asks for
        public, made     (n, (C, H, W), generator) -> n images, uint8
        public, a pool   None: images are drawn from the file
    """

    name: str
    label: str  # in figures
    private: bool
    loader: str | Callable[..., Any] | None = None
    file: str | None = None  # its entry of `sources.SOURCES`; None where no file is needed
    target: str | None = None  # what a set with several labels is classified by
    views: Views | None = None  # the views that keep a label (private sets); None where there are none
    test_share: float | None = None  # share of our own test split; None for an official one
    shape: tuple[int, int, int] = (3, 32, 32)  # (C, H, W) and classes, for estimates before anything is loaded
    classes: int = 10
    about: str = ""  # where images that need no file come from


SETS: dict[str, DataSet] = {}


def register(entry: DataSet) -> DataSet:
    """Add a data set. Its name must be new."""
    if entry.name in SETS:
        raise UsageError(f"a data set {entry.name!r} is registered already: take another name")
    SETS[entry.name] = entry
    return entry


def private_sets() -> list[str]:
    return [s.name for s in SETS.values() if s.private]


def public_sets() -> list[str]:
    return [s.name for s in SETS.values() if not s.private]


def made_sets() -> list[str]:
    """The public sets that need no file."""
    return [s.name for s in SETS.values() if not s.private and s.file is None]


def find(name: str, *, private: bool) -> DataSet:
    """The entry of a private or a public set; an error that suggests one where there is none."""
    names = private_sets() if private else public_sets()
    if name not in names:
        kind = "private data set" if private else "public data set"
        raise unknown(kind, name, [*names, *(f"{own}:PATH" for own in OWN)])
    return SETS[name]


def check_test_share(name: str, share: float) -> None:
    """Refuse a share of the test set where the split is not ours to make."""
    if name not in SETS or SETS[name].test_share is None:
        ours = ", ".join(s.name for s in SETS.values() if s.test_share is not None)
        raise UsageError(f"test_share = {share}: only for sets that have no official split ({ours}), not for "
                         f"{without_path(name)}; leave it out")
    if not 0 < share < 1:
        raise UsageError(f"test_share = {share}: it is a share of all images, above 0 and below 1")


def loader_of(entry: DataSet) -> Callable[..., Any]:
    if not isinstance(entry.loader, str):
        return entry.loader
    module, _, function = entry.loader.partition(":")
    return getattr(importlib.import_module(module), function)


def label(name: str) -> str:
    """How a data set is called in figures; own data keep their name."""
    return SETS[name].label if name in SETS else name


def own_kind(name: str | None) -> str | None:
    """"npz" or "folder" for npz:PATH and folder:PATH, None for the name of a known data set."""
    kind = (name or "").partition(":")
    return kind[0] if kind[1] and kind[0] in OWN else None


def own_parts(name: str) -> tuple[str, str, tuple[int, int]]:
    """(kind, path, (height, width)) of npz:PATH, folder:PATH or folder:PATH@HxW.

    The size is that to which the images of a folder are resized, 32x32 unless stated. A record's config has no path.
    """
    kind, _, path = name.partition(":")
    size = re.fullmatch(r"(.*)@([1-9]\d{0,3})x([1-9]\d{0,3})", path) if kind == "folder" else None
    return (kind, size[1], (int(size[2]), int(size[3]))) if size else (kind, path, (32, 32))


def without_path(name: str) -> str:
    """Own data as a record names them, by kind and size alone; any other name as it is."""
    if own_kind(name) is None:
        return name
    kind, _, (height, width) = own_parts(name)
    return f"{kind}:" if (height, width) == (32, 32) else f"{kind}:@{height}x{width}"


_PRIVATE = "dpngd.data.private"
for _name, _label, _more in (
        ("cifar10", "CIFAR-10", {"loader": f"{_PRIVATE}:from_file", "file": "cifar10", "views": Views()}),
        # A mirrored digit is another digit, or none.
        ("svhn", "SVHN", {"loader": f"{_PRIVATE}:from_file", "file": "svhn", "views": Views(flip=False)}),
        *((f"utkface{suffix}", f"UTKFace{called}",
           {"loader": f"{_PRIVATE}:faces", "file": "utkface", "target": target, "views": Views(),
            "test_share": 0.1, "classes": classes})
          for suffix, called, target, classes in (("", "", "ethnicity", 5), ("-gender", ", gender", "gender", 2),
                                                  ("-age", ", age", "age", 7))),
        # A crop of an 8x8 digit cuts off half of it: no views.
        ("digits", "digits", {"loader": f"{_PRIVATE}:digits", "test_share": 0.2, "shape": (1, 8, 8)})):
    register(DataSet(name=_name, label=_label, private=True, **_more))
for _name, _label, _more in (
        ("cifar100", "CIFAR-100", {"file": "cifar100"}),
        ("imagenet", "ImageNet", {"file": "imagenet"}),
        ("photos", "two photographs", {"loader": "dpngd.data.synthetic:photos",
                                   "about": "photographs embedded in scikit-learn"}),
        ("noise", "1/f noise", {"loader": "dpngd.data.synthetic:noise", "about": "made by dpngd: 1/f noise"}),
        ("dead-leaves", "dead leaves", {"loader": "dpngd.data.synthetic:dead_leaves",
                                        "about": "made by dpngd: dead leaves"})):
    register(DataSet(name=_name, label=_label, private=False, **_more))

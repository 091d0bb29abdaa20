"""The private sets: CIFAR-10, SVHN, UTKFace, the digits of scikit-learn, and a user's own (see `own`).

What is fixed and what a run's seed decides. The test set is the same in every run: the official one, or, where there is
none (UTKFace, digits, own data without a split), a split with a seed of its own; `test_share` sets how large it is. The
run's seed picks the N training images and the validation part.

Privacy. The guarantee is about the images in `x_train`: one image more or less. The sizes N and the test split count
as public. UTKFace's byte-identical duplicates are removed first: otherwise one picture would be in the data twice,
with twice the influence that the guarantee allows for one, and could be on both sides of the split.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dpngd.data import own, sets
from dpngd.data.images import to_nchw
from dpngd.data.prepared import Arrays, Form, make
from dpngd.data.sets import DataSet, own_kind, without_path
from dpngd.data.sources import obtain
from dpngd.errors import UsageError, unknown
from dpngd.noise import stream

SPLIT_SEED = 0  # of the splits that we make: never a run's seed
DECADES = np.array([10, 20, 30, 40, 50, 60])  # upper bounds of the age groups 0-9, 10-19, ..., 50-59, 60 and over
TARGETS = {"ethnicity": 5, "gender": 2, "age": len(DECADES) + 1}


@dataclass(frozen=True)
class Private:
    """A private set ready for a run. Images (n,C,H,W) uint8, labels (n,) int64."""

    name: str
    x_train: Tensor = field(repr=False)
    y_train: Tensor = field(repr=False)
    x_test: Tensor = field(repr=False)
    y_test: Tensor = field(repr=False)
    classes: int
    source: str
    digest: str  # of the whole prepared set, before any subset is taken
    evaluated_on: str = "test"  # what x_test is: "test", or "validation" when a part of the training set replaces it

    @property
    def N(self) -> int:
        return len(self.x_train)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        return tuple(self.x_train.shape[1:])


def load_private(
    name: str,
    *,
    N: int | None = None,
    seed: int = 0,
    validation: float = 0.0,
    test_share: float | None = None,
    target: str | None = None,
    root: str | None = None,
    download: bool = False,
    digest: str | None = None,
) -> Private:
    """The private set `name` (or npz:PATH, folder:PATH), or a seeded subset of N of its training images.

    With `validation` = f, a seeded share f of those N is taken out of the training set and replaces the test set, so
    that tuning never sees the test set; `evaluated_on` says which it is. Subsets of one seed are nested.
    `test_share` is the share of all images that are the test set of UTKFace (0.1 where it is None) and of the digits
    (0.2); the other named sets have an official split. UTKFace's test sets are nested: a larger one has the smaller.
    `target` is what UTKFace is to be classified by: ethnicity (5 classes), gender (2) or age (7 groups).
    Nothing is downloaded unless `download` says so. Own data must have the `digest` that is given.
    """
    entry = None if own_kind(name) else _entry(name, target)
    if not 0 <= validation < 1:
        raise UsageError(f"validation is {validation}: it is a share of the training set, from 0 to below 1")
    if test_share is not None:
        sets.check_test_share(name, test_share)
        entry = replace(entry, test_share=test_share)
    if entry is None:
        own.check_digest([name], digest, labelled=True)
        arrays, digest = own.read(name, labelled=True)
        arrays, source = split(arrays), f"own data, {own_kind(name)}"
        classes, name = int(arrays["y_train"].max()) + 1, without_path(name)  # a record keeps no path
    else:
        arrays, classes, source, digest = sets.loader_of(entry)(entry, root, download)
        name = entry.name
    train, rest = _choose(len(arrays["x_train"]), N, seed, validation, name)
    x, y = to_nchw(arrays["x_train"][train]), _labels(arrays["y_train"][train])
    if validation:
        held = to_nchw(arrays["x_train"][rest]), _labels(arrays["y_train"][rest])
        return Private(name, x, y, *held, classes, source, digest, "validation")
    return Private(name, x, y, to_nchw(arrays["x_test"]), _labels(arrays["y_test"]), classes, source, digest)


def distinct(x: np.ndarray) -> np.ndarray:
    """Positions of the first of each group of byte-identical images in x (n,H,W,C), in order."""
    rows = np.ascontiguousarray(x).reshape(len(x), -1)
    first = np.unique(rows.view(np.dtype((np.void, rows.shape[1]))).ravel(), return_index=True)[1]
    return np.sort(first)


def split_faces(arrays: Arrays, target: str = "ethnicity", test_share: float = 0.1) -> Arrays:
    """UTKFace without its duplicates, cut by the fixed seed. The cut is the same for every target.

    Of images with the same bytes the first by file name stays. Some groups carry conflicting labels; which one is right
    cannot be told from the files.
    """
    order = np.argsort(arrays["filename"], kind="stable")
    order = order[distinct(arrays["x"][order])]
    mixed = torch.randperm(len(order), generator=stream(SPLIT_SEED, "data/utkface/split")).numpy()
    held = round(test_share * len(order))
    parts = {"test": np.sort(order[mixed[:held]]), "train": np.sort(order[mixed[held:]])}
    y = np.digitize(arrays["age"], DECADES) if target == "age" else arrays["race" if target == "ethnicity" else target]
    return {f"{key}_{part}": values[at] for part, at in parts.items() for key, values in (("x", arrays["x"]), ("y", y))}


def split(arrays: Arrays) -> Arrays:
    """Own data as training and test part: as they are, or, where there is one part, cut 90/10 by the fixed seed."""
    if "x" not in arrays:
        return arrays
    n = len(arrays["x"])
    held = round(0.1 * n)
    if not held:
        raise UsageError(f"{n} images are too few to take a tenth as the test set: at least 6 are needed")
    mixed = torch.randperm(n, generator=stream(SPLIT_SEED, "data/own/split")).numpy()
    parts = {"test": np.sort(mixed[:held]), "train": np.sort(mixed[held:])}
    if len(np.unique(arrays["y"][parts["train"]])) < len(np.unique(arrays["y"])):
        raise UsageError("a class has too few images: the fixed 90/10 split leaves none of them for training; add "
                         "images, or give x_train, y_train, x_test, y_test")
    return {f"{key}_{part}": values[at] for part, at in parts.items() for key, values in arrays.items()}


def from_file(entry: DataSet, root: str | None, download: bool) -> tuple[Arrays, int, str, str]:
    """A set with an official split, as its file has it."""
    prepared = obtain(entry.file, root, download=download)
    return prepared.arrays, prepared.form.classes, prepared.source, prepared.digest


def faces(entry: DataSet, root: str | None, download: bool) -> tuple[Arrays, int, str, str]:
    """UTKFace, classified by the entry's target."""
    prepared = obtain(entry.file, root, download=download)
    arrays = split_faces(prepared.arrays, entry.target, entry.test_share)
    return arrays, TARGETS[entry.target], prepared.source, prepared.digest


def digits(entry: DataSet, root: str | None, download: bool) -> tuple[Arrays, int, str, str]:
    """scikit-learn's 1,797 digits, (n,8,8,1), 0..16 stretched to 0..255, cut by the fixed seed, class by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    x = np.rint(data.images * (255 / 16)).astype(np.uint8)[..., None]
    parts = train_test_split(x, data.target, test_size=entry.test_share, stratify=data.target, random_state=SPLIT_SEED)
    arrays = dict(zip(("x_train", "x_test", "y_train", "y_test"), parts, strict=True))
    prepared = make(arrays, Form("digits", "digits", "split", 10, (8, 8, 1)), "embedded in scikit-learn")
    return prepared.arrays, 10, prepared.source, prepared.digest


def _entry(name: str, target: str | None) -> DataSet:
    """The entry of a private set; `target` picks among those of one file."""
    entry = sets.find(name, private=True)
    if target is None or target == entry.target:
        return entry
    same = {s.target: s for s in sets.SETS.values() if s.private and s.file == entry.file and s.target}
    if not same:
        raise UsageError(f"{name} has no target {target!r}: only utkface can be classified by several")
    if target not in same:
        raise unknown(f"target of {entry.file}", target, same)
    if name != entry.file:
        raise UsageError(f"{name} and target {target!r} contradict each other: name one of them")
    return same[target]


def _choose(n: int, N: int | None, seed: int, validation: float, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the training images and of the validation part: of n, N are chosen, then a share of these held."""
    if N is not None and not 1 <= N <= n:
        raise UsageError(f"N is {N}, but {name} has {n} training images: take N from 1 to {n}")
    chosen = torch.arange(n)
    if N is not None:
        chosen = torch.randperm(n, generator=stream(seed, "data/subset"))[:N].sort().values
    held = round(validation * len(chosen))
    if validation and not 1 <= held < len(chosen):
        raise UsageError(f"a validation share of {validation} of {len(chosen)} images leaves one part empty")
    mixed = torch.randperm(len(chosen), generator=stream(seed, "data/validation"))
    train, rest = mixed[held:].sort().values, mixed[:held].sort().values
    return chosen[train].numpy(), chosen[rest].numpy()


def _labels(y: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(y, np.int64))  # a copy: the arrays of a file are shared, and read-only

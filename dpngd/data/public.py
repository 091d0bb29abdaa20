"""The public sets, from which curvature is estimated, and the check that no private image is among them.

A public set costs no privacy only as long as it is public: nothing in it may depend on the private images. So its
images are drawn by the run's seed alone, and `check_disjoint` refuses a set that shares an image with the private one,
exactly or nearly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpngd.data import own, sets, synthetic
from dpngd.data.images import fit, read_image, to_nchw
from dpngd.data.private import Private
from dpngd.data.sets import own_kind, without_path
from dpngd.data.sources import obtain
from dpngd.disjoint import overlap
from dpngd.errors import UsageError
from dpngd.noise import stream

SMALLEST, LARGEST = 50, synthetic.LARGEST
# Two of CIFAR-100's first 5,000 test images are, byte for byte, CIFAR-10 images (test 2203 is its test image 9345, test
# 2224 its training image 3021). They are drawn last, whatever the private set: a choice that looks at no private data.
# SHA-256 of the pixels, (H,W,C).
TWINS = frozenset(
    {
        "6d53f67bc51d1d1d6747990c59ace45abb3edb10806a226d698a142d8eae1d64",
        "8ceb350e8b38b6596e121ecfa443f7a521d4bcc6107a3b1752d52a54604d48ef",
    }
)


@dataclass(frozen=True)
class Public:
    """A public set. x (n,C,H,W) uint8; y (n,) int64, or None where the images carry no labels."""

    name: str
    x: Tensor = field(repr=False)
    y: Tensor | None = field(repr=False)
    classes: int | None
    source: str
    digest: str  # of the images drawn
    names: tuple[str, ...] = field(repr=False)  # what each image is called, for messages

    def __len__(self) -> int:
        return len(self.x)


def load_public(
    name: str,
    size: int,
    *,
    seed: int = 0,
    shape: tuple[int, int, int] = (3, 32, 32),
    root: str | None = None,
    download: bool = False,
    digest: str | None = None,
) -> Public:
    """`size` public images in `shape` (C,H,W), drawn with `seed`; of one seed, smaller sets are parts of larger ones.

    `name` is cifar100, imagenet, photos, noise, dead-leaves, npz:PATH or folder:PATH; `a+b` takes equal parts of each
    (the first ones take what is left over), and moves the labels of the later parts past those of the earlier.
    `cifar100+imagenet` is the paper's. Nothing is downloaded unless `download` says so. Own images must have the
    `digest` that is given.
    """
    if not SMALLEST <= size <= LARGEST:
        raise UsageError(f"a public set of {size} images: take from {SMALLEST} to {LARGEST}")
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1:
        raise UsageError(f"public images of shape {tuple(shape)}: give (C, H, W) with C 1 or 3")
    parts = name.split("+")
    if len(set(parts)) < len(parts):
        raise UsageError(f"the public set {name!r} names a part twice")
    if mine := [part for part in parts if own_kind(part)]:
        own.check_digest(mine, digest, labelled=False)
    counts = [size // len(parts) + (i < size % len(parts)) for i in range(len(parts))]
    loaded = [_part(part, n, seed, shape, root, download) for part, n in zip(parts, counts, strict=True)]
    if len(loaded) == 1:
        return loaded[0]
    x = torch.cat([part.x for part in loaded])
    y, classes = _joint_labels(loaded)
    source, names = " + ".join(part.source for part in loaded), tuple(n for part in loaded for n in part.names)
    return Public("+".join(part.name for part in loaded), x, y, classes, source, _digest(x), names)


def check_disjoint(private: Private, public: Public) -> None:
    """Raise if an image of the public set is in the private one, and name it.

    Found are copies that are the same, changed in a pixel or two, mirrored, or shifted by one pixel (`dpngd.disjoint`,
    which also says what is not found). About 6 s for CIFAR-10 against 5,000 images, a fraction of that for 1,000.
    """
    if private.shape != tuple(public.x.shape[1:]):
        raise UsageError(
            f"private images are {private.shape}, public ones {tuple(public.x.shape[1:])}: make them alike"
        )
    for part, x in (("training", private.x_train), (private.evaluated_on, private.x_test)):
        if (found := overlap(x, public.x)) is not None:
            i, at = found
            raise UsageError(
                f"the public image {public.names[at]} is also image {i} of the {part} part of {private.name} (as it "
                "is, mirrored, shifted by a pixel or changed in one): a public set must not hold private images"
            )


def _part(name: str, n: int, seed: int, shape: tuple[int, int, int], root: str | None, download: bool) -> Public:
    kind = own_kind(name)
    generator = stream(seed, f"public/{kind or name}")
    entry = None if kind else sets.find(name, private=False)
    if entry is not None and entry.file is None:
        x = sets.loader_of(entry)(n, shape, generator)
        return Public(name, x, None, None, entry.about, _digest(x), tuple(f"{name}[{i}]" for i in range(n)))
    if kind == "folder":
        paths = own.public_files(name)
        at = _draw(len(paths), n, name, generator)
        x = fit(to_nchw(np.stack([read_image(paths[i], *shape[1:]) for i in at])), shape)
        names = tuple(str(paths[i]) for i in at)
        return Public(without_path(name), x, None, None, "own images, folder", _digest(x), names)
    if kind == "npz":
        images = own.read(name, labelled=False)[0]["x"]
        at = _draw(len(images), n, name, generator)
        x = fit(to_nchw(images[at]), shape)
        names = tuple(f"{name}[{i}]" for i in at)
        return Public(without_path(name), x, None, None, "own images, npz", _digest(x), names)
    prepared = obtain(entry.file, root, download=download,
                      instead="take --public photos, noise or dead-leaves, which need no download, or ")
    last = {i for i, image in enumerate(prepared.arrays["x"]) if _hash(image).hex() in TWINS}
    at = _draw(len(prepared.arrays["x"]), n, name, generator, last)
    x = fit(to_nchw(prepared.arrays["x"][at]), shape)
    y = torch.from_numpy(prepared.arrays["y"][at].astype(np.int64))
    names = tuple(f"{name}[{i}]" for i in at)
    return Public(name, x, y, prepared.form.classes, prepared.source, _digest(x), names)


def _draw(available: int, n: int, name: str, generator: torch.Generator, last: Set[int] = frozenset()) -> list[int]:
    """n of the positions below `available`, in random order, those in `last` after all others."""
    if n > available:
        raise UsageError(f"{name} holds {available} images, {n} were asked for: take a smaller public set")
    mixed = torch.randperm(available, generator=generator).tolist()
    return sorted(mixed, key=lambda i: i in last)[:n]


def _joint_labels(parts: list[Public]) -> tuple[Tensor | None, int | None]:
    """Labels of all parts, each part's past those before it; none if any part has none."""
    if any(part.y is None for part in parts):
        return None, None
    total, labels = 0, []
    for part in parts:
        labels.append(part.y + total)
        total += part.classes
    return torch.cat(labels), total


def _hash(image: np.ndarray) -> bytes:
    return hashlib.sha256(image.tobytes()).digest()


def _digest(x: Tensor) -> str:
    return hashlib.sha256(f"{tuple(x.shape)}\n".encode() + x.numpy().tobytes()).hexdigest()

"""Reading, resizing and laying out images.

Shapes: a batch is (n, C, H, W), uint8. C is 1 (grey) or 3 (RGB).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dpngd.errors import UsageError
from dpngd.files import write_atomically
from dpngd.images import fit

__all__ = ["find_images", "fit", "montage", "per_class", "read_image", "save_png", "to_nchw"]

# Raster formats only: by its content Pillow would take a file for EPS, whatever its name, and start Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})


def find_images(folder: Path) -> list[Path]:
    """The image files below `folder`, in the order of their names."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of images")
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def read_image(path: Path, height: int = 32, width: int = 32) -> np.ndarray:
    """One file as (height, width, 3) uint8: upright, centre-cropped to the aspect, resized with Lanczos."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} cannot be read as an image (damaged or cut short?): {error}") from error
    return np.asarray(ImageOps.fit(upright, (width, height), Image.Resampling.LANCZOS))


def to_nchw(x: np.ndarray) -> Tensor:
    """(n,H,W,C) numpy to (n,C,H,W) torch."""
    return torch.from_numpy(np.array(x.transpose(0, 3, 1, 2), order="C"))  # a copy: arrays of files are read-only


def montage(x: Tensor, columns: int, zoom: int = 2, gap: int = 2) -> Image.Image:
    """x (n,C,H,W) uint8 as one picture, row by row, each pixel `zoom` wide so that 32x32 images can be looked at.

    torchvision's make_grid does as much, but a montage must not need torchvision, which only downloads need here.
    """
    x = x.expand(-1, 3, -1, -1).repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    n, _, height, width = x.shape
    rows = math.ceil(n / columns)
    sheet = torch.full((3, rows * (height + gap) + gap, columns * (width + gap) + gap), 255, dtype=torch.uint8)
    for i in range(n):
        top, left = gap + i // columns * (height + gap), gap + i % columns * (width + gap)
        sheet[:, top : top + height, left : left + width] = x[i]
    return Image.fromarray(sheet.permute(1, 2, 0).numpy())


def save_png(image: Image.Image, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    try:
        write_atomically(path, lambda file: image.save(file, format="PNG"))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def per_class(y: Tensor, classes: Sequence[int], count: int) -> Tensor:
    """Positions of the first `count` images of each class, class by class: the rows of a montage."""
    return torch.cat([torch.nonzero(y == c).flatten()[:count] for c in classes])

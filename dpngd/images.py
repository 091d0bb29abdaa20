"""Images that need no download: patches of two photographs, and procedural images with natural statistics.

All three give (count, C, H, W) uint8 for `shape` (C,H,W), and the first images of a larger draw with the same generator
seed are the smaller draw, so that public sets of growing size are nested. None depends on any private data.

| name        | what it is                                                                                          |
| ----------- | ---------------------------------------------------------------------------------------------------- |
| photos      | crops of the two photographs that scikit-learn ships, at several scales, half of them mirrored         |
| noise       | random phases under an amplitude spectrum 1/f, the falling spectrum of natural images                  |
| dead-leaves | opaque discs of radius density r^-3 that cover one another: 1/f too, but with edges and occlusion      |
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Generator, Tensor

from dpngd.errors import UsageError, unknown
from dpngd.noise import stream

Shape = tuple[int, int, int]
LARGEST = 5000
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in Pillow's conversion to grey
CHUNK = 100  # images made at a time
CANVAS = 4  # side of the noise that an image is cut from, in image sides
# Columns: brightness, then two weaker opponent colours. Round numbers in the proportion that natural images have.
COLOURS = torch.tensor([[0.90, 0.30, 0.10], [0.90, 0.00, -0.20], [0.90, -0.30, 0.10]])
RADII = (0.05, 0.6)  # smallest and largest disc, as parts of the image's side; never below a pixel and a half
DISCS = 150  # they cover 98 % of an image


@functools.cache
def _photographs() -> Tensor:
    try:
        from sklearn.datasets import load_sample_images  # late: only the photographs need it
    except ImportError as error:
        raise UsageError("the photographs come with scikit-learn: pip install scikit-learn, or take 'noise' or "
                         "'dead-leaves'") from error
    photographs = [torch.from_numpy(image.copy()) for image in load_sample_images().images]
    return torch.stack(photographs).permute(0, 3, 1, 2).contiguous()


def photos(count: int, shape: Shape, generator: Generator) -> Tensor:
    """Patches from a pyramid of the photographs; no position of a scale is taken twice."""
    channels, height, width = shape
    base = _photographs()
    levels = [base]
    while min(levels[-1].shape[2:]) // 2 >= 3 * max(height, width):  # smaller ones would repeat the same few crops
        size = [side // 2 for side in levels[-1].shape[2:]]
        levels.append(fit(base, (base.shape[1], *size)))
    if height > base.shape[2] or width > base.shape[3]:
        raise UsageError(f"the photographs are {base.shape[2]}x{base.shape[3]}: no patch of {height}x{width} fits")
    level = torch.randint(len(levels), (LARGEST,), generator=generator)
    mirror = torch.rand(LARGEST, generator=generator) < 0.5
    out = torch.empty(count, base.shape[1], height, width, dtype=torch.uint8)
    for i, photo in enumerate(levels):
        windows = photo.unfold(2, height, 1).unfold(3, width, 1)  # (2, C, rows, columns, H, W), a view
        n, _, rows, columns = windows.shape[:4]
        here = torch.nonzero(level[:count] == i).flatten()
        place = torch.randperm(n * rows * columns, generator=generator)
        place = place[torch.arange(len(here)) % len(place)]  # wraps only for patches nearly as large as the photograph
        out[here] = windows[place // (rows * columns), :, place // columns % rows, place % columns]
    return fit(torch.where(mirror[:count, None, None, None], out.flip(3), out), (channels, height, width))


def noise(count: int, shape: Shape, generator: Generator) -> Tensor:
    """Crops of Gaussian noise shaped to 1/f, in three channels mixed to the colours of natural images.

    Crops, because an image is a window on a larger scene: most of the energy it sees lies below its lowest frequency,
    as a gradient and a mean of its own, and its left edge does not continue at its right.
    """
    _, height, width = shape
    tall, wide = CANVAS * height, CANVAS * width
    frequency = torch.hypot(torch.fft.fftfreq(tall)[:, None], torch.fft.rfftfreq(wide)[None])
    amplitude = 1 / frequency.clamp(min=1 / max(tall, wide))
    made = []
    for start in range(0, count, CHUNK):
        white = torch.randn(min(CHUNK, LARGEST - start), 3, tall, wide, generator=generator)
        pink = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(tall, wide))
        crop = pink[..., :height, :width] / pink.std()
        made.append(_paint(crop, shape)[: count - start])
    return torch.cat(made)


def dead_leaves(count: int, shape: Shape, generator: Generator) -> Tensor:
    """Discs painted from the front backwards, soft by one pixel at the edge, and one colour behind them all.

    In the plane the radii have density r^-3; of the discs that touch a unit square, r^-3 (1+2r)^2: only they are drawn.
    """
    _, height, width = shape
    side = max(height, width)
    low, high = max(RADII[0], 1.5 / side), RADII[1]
    radii = torch.logspace(math.log10(low), math.log10(high), 4096)
    weight = (radii**-2 * (1 + 2 * radii) ** 2).cumsum(0)  # one power of r less: the grid is logarithmic
    y, x = torch.arange(height).view(1, -1, 1) + 0.5, torch.arange(width).view(1, 1, -1) + 0.5
    made = []
    for start in range(0, count, CHUNK):
        n = min(CHUNK, LARGEST - start)
        picture, open_ = torch.zeros(n, 3, height, width), torch.ones(n, height, width)
        for _ in range(DISCS):
            u, row, column = torch.rand(3, n, 1, 1, generator=generator)
            colour = torch.randn(n, 3, 1, 1, generator=generator)
            radius = side * radii[torch.searchsorted(weight, u * weight[-1])]
            row, column = row * (height + 2 * radius) - radius, column * (width + 2 * radius) - radius
            distance = torch.sqrt((y - row) ** 2 + (x - column) ** 2)
            seen = open_ * (radius - distance + 0.5).clamp(0, 1)
            picture.addcmul_(seen[:, None], colour)
            open_ -= seen
        picture.addcmul_(open_[:, None], torch.randn(n, 3, 1, 1, generator=generator))
        made.append(_paint(picture, shape)[: count - start])
    return torch.cat(made)


def _paint(x: Tensor, shape: Shape) -> Tensor:
    """x (n,3,H,W) of about unit variance as uint8 images around mid-grey, the colours correlated."""
    mixed = torch.einsum("rc,nchw->nrhw", COLOURS, x)
    return fit((127.5 + 60 * mixed).round().clamp(0, 255).to(torch.uint8), shape)


def fit(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """x (n,C,H,W) uint8 in the channels and size of `shape` (C,H,W); unchanged where it already fits."""
    channels, height, width = shape
    if x.shape[1] == 3 and channels == 1:
        grey = (x.float() * torch.tensor(LUMA).view(1, 3, 1, 1)).sum(1, keepdim=True)
        x = grey.round().clamp(0, 255).to(torch.uint8)
    elif x.shape[1] == 1 and channels == 3:
        x = x.expand(-1, 3, -1, -1)
    if x.shape[2:] != (height, width):
        x = torch.nn.functional.interpolate(
            x.float(), size=(height, width), mode="bicubic", antialias=True, align_corners=False
        )
        x = x.round().clamp(0, 255).to(torch.uint8)
    return x.contiguous()


MAKERS = {"noise": noise, "dead-leaves": dead_leaves, "photos": photos}


def standardised(name: str, count: int, shape: Shape, seed: int = 0) -> Tensor:
    """Images `name` as networks usually get them: floats of about zero mean and unit variance, (x/255 - 0.5) / 0.25."""
    if name not in MAKERS:
        raise unknown("images", name, MAKERS)
    if not (isinstance(shape, tuple | list) and len(shape) == 3 and all(isinstance(n, int) and n >= 1 for n in shape)
            and shape[0] in (1, 3)):
        raise UsageError(f"shape is {shape!r}: images are made for (C, H, W) with C 1 or 3, such as (1, 28, 28)")
    return MAKERS[name](count, tuple(shape), stream(seed, f"public/{name}")).float().div_(255).sub_(0.5).div_(0.25)

"""Where randomness comes from: named streams derived from one seed, and the noise of the mechanism.

A run draws from several sources of randomness (weights, sampling, augmentation, noise, public draw, Fisher labels).
Each has a stream of its own, so that changing how much one of them draws leaves the others as they were.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor


class Noise(Protocol):
    """A source of Gaussian noise: what the mechanism takes, so that every caller's noise passes through it."""

    def __call__(self, like: Tensor, std: float) -> Tensor:
        """N(0, std^2 I) of the shape, dtype and device of `like`, independent of every earlier call."""


def derive(seed: int, name: str) -> int:
    """The 63-bit seed of stream `name`: a hash, so that neighbouring seeds give unrelated streams."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, name: str, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator for stream `name` of `seed`. Not cryptographic: see the README."""
    return torch.Generator(device).manual_seed(derive(seed, name))


class SeededNoise:
    """Noise that a seed decides, for research: runs of one seed share it, so that their difference has less variance.

    Whoever knows the seed can compute the noise again and take it off: weights trained with it are no release.
    """

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def __call__(self, like: Tensor, std: float) -> Tensor:
        device = self.generator.device  # drawn where the generator lives: a GPU gets the same numbers
        return std * torch.randn(like.shape, generator=self.generator, dtype=like.dtype, device=device).to(like.device)


def seeded_noise(seed: int, name: str = "noise") -> SeededNoise:
    """The noise of stream `name` of `seed`."""
    return SeededNoise(stream(seed, name))

"""Named random streams derived from one seed.

A run draws from several sources of randomness (weights, sampling, augmentation, noise, public draw,
Fisher labels). Each has a stream of its own, so that changing how much one of them draws leaves the
others as they were.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, name: str) -> int:
    """The 63-bit seed of stream `name`: a hash, so that neighbouring seeds give unrelated streams."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, name: str, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator for stream `name` of `seed`. Not cryptographic: see the README."""
    return torch.Generator(device).manual_seed(derive(seed, name))

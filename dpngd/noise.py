"""Where randomness comes from: named streams of a seed for research, the operating system's entropy for releases.

A run draws from several sources of randomness (weights, sampling, augmentation, noise, public draw, Fisher labels).
Each has a stream of its own, so that changing how much one of them draws leaves the others as they were.

    source                  bits from                                             may be published with the weights
    SeededNoise, stream     SHA-256 or SHAKE-256 of "seed/name": all bits         no: simulation. The noise can be
                            of the seed count                                     computed again from the seed
    TorchNoise              a torch.Generator that the caller gave                no, unless its state stays secret
    SecretNoise,            os.urandom, the operating system's cryptographic      yes: nothing is kept from which the
    secret_uniform          generator (ChaCha20 on Linux)                         noise could be computed again
    secret_stream           the same, as the state of a torch.Generator           yes, for views and labels, not noise

Why os.urandom: it needs no package, keeps no key in this process, and gives 8 bytes per number at about 0.1 s per
million, little beside the gradients of a step. Statistical generators (Mersenne Twister, Philox) are not used for
releases even when seeded with entropy: their output does not hide their state.

Tail. All noise is drawn in float64. float32 draws stop at 5.77 standard deviations (24-bit uniforms), which a
worst-case sample can see at small delta. Here `SeededNoise` (Ziggurat, 53-bit tail) stops at 13.7 standard deviations,
`SecretNoise` and `TorchNoise` (Box-Muller, 64-bit radius) at sqrt(2 ln 2^64) = 9.42. The mechanism adds the sum in
float64 before it rounds to float32, so the cast is post-processing and costs nothing. Cutting the radius of a pair of
draws off at 9.42 is a change of 2^-64 in total variation; for a run of T steps and d parameters that is
tau = T d / 2 * 2^-64, and it adds at most (1 + e^epsilon) tau to delta: 8e-8 for T d = 1e9 at epsilon 8, and for the
Ziggurat less than 1e-28.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Noise(Protocol):
    """A source of Gaussian noise: what the mechanism takes, so that every caller's noise passes through it."""

    def __call__(self, like: Tensor, std: float) -> Tensor:
        """N(0, std^2 I) of the shape, dtype and device of `like`, drawn in float64, independent of every other call."""


WORDS = 624  # of the state of torch's CPU generator, a Mersenne Twister
_HEADER = 24  # bytes of its state before the words: seed, counters


def stream(seed: int, name: str, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator for stream `name` of `seed`, keyed with all bits of both. Not cryptographic.

    `manual_seed` keeps 32 bits of a seed on the CPU: seeds 5 and 5 + 2^32 are the same there. So the generator's whole
    state comes from SHAKE-256 of "seed/name". A GPU's generator takes 64 bits of it.
    """
    digest = hashlib.shake_256(f"{seed}/{name}".encode()).digest(4 * WORDS)
    first = int.from_bytes(digest[:8], "little") >> 1
    generator = torch.Generator(device).manual_seed(first)
    if generator.device.type == "cpu":
        _fill(generator, first, np.frombuffer(digest, np.uint32))
    return generator


def secret_stream(device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator whose whole state is the operating system's entropy, for views and labels of private samples.

    They are drawn in the order of a batch, so that one sample more gives those behind it others. From a seed that
    somebody knows, all these samples would move the sum, not one; drawn in secret they are only further randomness of
    each sample's own gradient, of the same distribution with and without the other. Not for noise, which is seen.
    """
    first = int.from_bytes(os.urandom(8), "little") >> 1
    generator = torch.Generator(device).manual_seed(first)
    if generator.device.type == "cpu":
        _fill(generator, first, np.frombuffer(os.urandom(4 * WORDS), np.uint32))
    return generator


def _fill(generator: torch.Generator, first: int, words: np.ndarray) -> None:
    """Replace the words of a freshly seeded CPU generator by `words` (624,)."""
    state = generator.get_state()
    held = state[_HEADER : _HEADER + 8 * WORDS].view(torch.int64)  # one word in every 8 bytes
    start = first & 0xFFFFFFFF
    if int(held[0]) != start or int(held[1]) != (1812433253 * (start ^ (start >> 30)) + 1) & 0xFFFFFFFF:
        raise RuntimeError("the state of torch's generator is laid out otherwise than in torch 2.6 to 2.13: "
                           "dpngd.noise must follow")
    held.copy_(torch.from_numpy(words.astype(np.int64)))
    generator.set_state(state)


class SeededNoise:
    """Noise that a seed decides, for research: runs of one seed share it, so that their difference has less variance.

    Such a run is a simulation of a private one. Whoever knows the seed can compute the noise again and subtract it, and
    between two runs of one seed it cancels: weights trained with it are no release. The generator is numpy's Philox,
    keyed with 128 bits of SHA-256 of "seed/name".
    """

    def __init__(self, seed: int, name: str = "noise"):
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
        self._generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))

    def __call__(self, like: Tensor, std: float) -> Tensor:
        xi = torch.from_numpy(self._generator.standard_normal(tuple(like.shape)).reshape(like.shape))
        return xi.mul_(std).to(like)  # drawn on the CPU: a GPU gets the same numbers

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as plain numbers."""
        state = self._generator.bit_generator.state
        return {**state, "state": {name: words.tolist() for name, words in state["state"].items()},
                "buffer": state["buffer"].tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        arrays = {name: np.array(words, np.uint64) for name, words in state["state"].items()}
        self._generator.bit_generator.state = {**state, "state": arrays,
                                               "buffer": np.array(state["buffer"], np.uint64)}


def seeded_noise(seed: int, name: str = "noise") -> SeededNoise:
    """The noise of stream `name` of `seed`."""
    return SeededNoise(seed, name)


class SecretNoise:
    """Noise for releases, from the operating system's entropy. It is never recorded and cannot be drawn again."""

    def __call__(self, like: Tensor, std: float) -> Tensor:
        n = like.numel()
        return gaussian(secret_bits(n + n % 2))[:n].view(like.shape).mul_(std).to(like)


class TorchNoise:
    """Noise from a torch generator, with 64 bits per draw. As secret as the generator's state, and no more."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def __call__(self, like: Tensor, std: float) -> Tensor:
        n = like.numel()
        bits = torch.empty(n + n % 2, dtype=torch.int64, device=self.generator.device)
        bits.random_(-(2**63), None, generator=self.generator)
        return gaussian(bits)[:n].view(like.shape).mul_(std).to(like)


def secret_bits(n: int) -> Tensor:
    """n words of 64 random bits, (n,) int64, from os.urandom."""
    return torch.frombuffer(bytearray(os.urandom(8 * n)), dtype=torch.int64) if n else torch.empty(0, dtype=torch.int64)


def secret_uniform(n: int) -> Tensor:
    """n uniform numbers in [0, 1), (n,) float64, on a grid of 2^-53, from os.urandom."""
    return (secret_bits(n) >> 11).double().add_(2.0**52).mul_(2.0**-53)


def gaussian(bits: Tensor) -> Tensor:
    """Box-Muller: n standard normal numbers (n,) float64 from n words (n even) of 64 random bits, int64.

        r cos(theta), r sin(theta),    r = sqrt(-2 ln u),  u in (0, 1] and theta in [-pi, pi) uniform
    """
    bits, angle = bits.view(2, -1)
    # The high and the low word apart, added where small numbers still have all of their digits: near -2^63 a float64
    # has steps of 1024, which would cut the tail off at 2^-55.
    u = ((bits >> 32) + 2**31).double().mul_(2.0**32).add_((bits & 0xFFFFFFFF).double()).add_(1.0).mul_(2.0**-64)
    r = u.log_().mul_(-2).clamp_(min=0).sqrt_()
    angle = angle.double().mul_(math.pi * 2.0**-63)
    return torch.cat([r * angle.cos(), r * angle.sin()])

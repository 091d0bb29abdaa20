"""Poisson sampling: the batches that the accountant assumes.

Neighbouring data sets differ in one sample. Each of the N samples is in a batch independently with probability
q = B/N exactly, so a batch has any size, zero included; the step divides by B, never by that size, which is private.
So is the choice itself: amplification by sampling holds only while nobody else knows who is in a batch. A seeded
source makes a simulation; a release draws with `noise.secret_uniform`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from dpngd.errors import UsageError


class PoissonSampler:
    """Batches in which each of N samples is, independently, with probability exactly q = B/N.

    source   a torch generator, or a function n -> n uniform numbers in [0, 1) in float64 (`noise.secret_uniform`)

    A batch may be empty; the mechanism still adds its noise then.
    """

    def __init__(self, N: int, B: int, source: Generator | Callable[[int], Tensor]) -> None:
        if not 1 <= B <= N:
            raise UsageError(f"batch size B is {B} for N = {N} private images: take B from 1 to N")
        self.N, self.B, self.source = N, B, source
        self.q = B / N

    def draw(self) -> Tensor:
        """Positions (b,) int64 of the samples in the next batch, ascending."""
        # In double precision: single has steps of 2^-24, and would round q up to the next of them.
        if isinstance(self.source, Generator):
            u = torch.rand(self.N, dtype=torch.float64, generator=self.source, device=self.source.device)
        else:
            u = self.source(self.N)
        return torch.nonzero(u < self.q).flatten()

"""Poisson sampling: the batches that the accountant assumes.

Neighbouring data sets differ in one sample. Each of the N samples is in a batch independently with probability
q = B/N exactly, so a batch has any size, zero included; the step divides by B, never by that size, which is private.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from dpngd.errors import UsageError


class PoissonSampler:
    """Batches in which each of N samples is, independently, with probability exactly q = B/N.

    A batch may be empty; the mechanism still adds its noise then.
    """

    def __init__(self, N: int, B: int, generator: Generator) -> None:
        if not 1 <= B <= N:
            raise UsageError(f"batch size B is {B} for N = {N} private images: take B from 1 to N")
        self.N, self.B, self.generator = N, B, generator
        self.q = B / N

    def draw(self) -> Tensor:
        """Positions (b,) int64 of the samples in the next batch, ascending."""
        # In double precision: single has steps of 2^-24, and would round q up to the next of them.
        u = torch.rand(self.N, dtype=torch.float64, generator=self.generator, device=self.generator.device)
        return torch.nonzero(u < self.q).flatten()

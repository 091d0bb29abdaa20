"""The one Gaussian mechanism: the only code through which private gradients leave.

    release_j = L_j sum_i c_ij g_i + sigma sqrt(J) C_j xi_j,    c_ij = min(1, C_j / ||L_j g_i||),   xi_j ~ N(0, I)
    update    = R(release_1, ..., release_J) / B

A geometry supplies the maps: linear L_j (fixed before the batch is drawn), the norms ||L_j g_i||, and R. Because c_ij
is a scalar, L_j is applied once, to the sum.

Guarantee. Let s_j = L_j sum_i c_ij g_i. Adding or removing one sample moves s_j by at most C_j in L2 norm, for any
sample whatever. So (s_1 / C_1, ..., s_J / C_J) moves by at most sqrt(J), and noise of standard deviation
sigma sqrt(J) on it is the Gaussian mechanism with noise multiplier sigma. Under Poisson sampling with rate q, T such
releases compose as `dpngd.privacy` accounts for them. R and everything after it is post-processing.

    edge case                          what happens
    empty batch                        s_j = 0; noise alone is released
    ||L_j g_i|| = 0                    c_ij = 1
    g_i or ||L_j g_i|| not finite      the sample contributes exactly zero, and is counted
    division                           by the expected batch size B, never by the actual one, which is private
    rounding                           c_ij uses C_j (1 - 1e-5): float32 norms are trusted to 1e-5, and samples whose
                                       sums float32 would round by more are summed in float64. s_j is then rounded to
                                       float32, by up to 2^-24 ||s_j|| <= 2^-24 B C_j: for 1,024 equal samples its
                                       distance is 1.00004 C_j, for 16,384 it is 1.0006 C_j
    low bits of the release            the noisy sum is formed in float64 and rounded to multiples of a power of two
                                       near 2^-20 of the noise's standard deviation: they carry nothing of the sum's
    sigma = 0                          nothing is added and nothing rounded: not private, for tests
    several processes                  each clips its share of the batch; the s_j are added up first, then the first
                                       process adds noise, once, and all get what it released (`dpngd.group`)

Floating point. With a real-valued Gaussian, rounding to the grid would be post-processing and the guarantee exact. The
noise is a float64 number, of which some 2^30 fall into each cell of the grid where the noise is likely: the holes in
the support of floating-point noise, by which Mironov (2012) reads a sum off the low bits of a release, are far below
the grid and vanish in it. That is an argument, not a proof: the probabilities of the cells are those of a Gaussian only
as far as the library's logarithm, sine and cosine are accurate (about 2^-50 relative), and the sums s_j themselves are
float32 arithmetic, which ROUNDING covers. A proof would need an exact discrete Gaussian (Canonne et al., 2020).
The tail that the noise lacks, and what that adds to delta, is in `dpngd.noise`.

Norms, clip fractions and counts are returned as diagnostics for research. They are computed from private data and are
NOT covered by the guarantee: do not publish them from a real deployment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dpngd.errors import UsageError
from dpngd.gradients import Blocks, SampleGradients
from dpngd.group import ALONE, Group
from dpngd.noise import Noise

ROUNDING = 1e-5
GRID = 2.0**-20
"""The grid of a release, relative to the standard deviation of its noise: it adds 2^-40 / 12 to the variance."""


class Geometry(Protocol):
    """A pair of linear maps around the mechanism. J is the number of channels; the paper's method has one."""

    def sq_norms(self, g: SampleGradients) -> tuple[Tensor, Tensor]:
        """||L_j g_i||^2, shape (J, b), and which samples are fragile, (b,) bool.

        A fragile sample has terms so much larger than its ||L_j g_i|| that a float32 sum would round away more than
        1e-5 C_j. The mechanism adds such samples up in float64.
        """

    def into(self, sums: list[Blocks]) -> list[Blocks]:
        """L_j applied to the J sums; a channel's result may have any shapes."""

    def back(self, releases: list[Blocks]) -> Blocks:
        """R: from the noisy channels to a direction in parameter space."""


@dataclass(frozen=True)
class Share:
    """What one micro-batch adds to the sums of a batch. Private: nothing in here may be published."""

    terms: list[list[Blocks]]  # for each channel, what is added to its sum, in order
    seen: int
    norms: Tensor  # (J, samples), finite samples only
    losses: Tensor  # (samples,)


Each = Callable[[Callable[[SampleGradients], Share], Iterable[Any]], Iterable[Share]]
"""Applies a function to the gradients of every micro-batch, in order: `map` where they are at hand, or one that also
computes them, on several cores (`training.parallel.Workers.map`)."""


@dataclass(frozen=True)
class Clipped:
    """The clipped sums of a batch, before noise. Private: nothing in here may be published."""

    sums: list[Blocks]
    seen: int
    norms: Tensor  # (J, samples), finite samples only
    losses: Tensor  # (samples,)


@dataclass(frozen=True)
class Release:
    """A private direction (its negative times eta is the update), and diagnostics outside the guarantee."""

    direction: Blocks
    norms: Tensor  # (J, samples): ||L_j g_i|| before clipping, finite samples only
    clipped: float  # share of (sample, channel) pairs that were scaled down
    nonfinite: int  # samples that contributed zero because their gradient was not finite
    loss: float  # mean loss of the finite samples before the step; nan for an empty batch


@dataclass(frozen=True)
class GaussianMechanism:
    """Clip, sum, add noise, divide by B. One clip C_j per channel, noise multiplier sigma, expected batch size B.

    `group` is the processes that have a share of the batch each; B is that of the whole batch.
    """

    clips: tuple[float, ...]
    sigma: float
    B: float
    group: Group = field(default=ALONE, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.clips or not all(math.isfinite(C) and C > 0 for C in self.clips):
            raise UsageError(f"clipping thresholds are {self.clips}: each must be a positive number")
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise UsageError(f"sigma is {self.sigma}: it must be a number >= 0")
        if not (math.isfinite(self.B) and self.B > 0):
            raise UsageError(f"the expected batch size is {self.B}: it must be positive")

    @property
    def sensitivity(self) -> tuple[float, ...]:
        """How far one sample can move each channel's sum, in L2 norm."""
        return self.clips

    @property
    def noise_std(self) -> tuple[float, ...]:
        """Standard deviation of each channel's noise, before the division by B."""
        return tuple(self.sigma * math.sqrt(len(self.clips)) * C for C in self.clips)

    def clipped_sums(self, batches: Iterable[Any], geometry: Geometry, zeros: Blocks, each: Each = map) -> Clipped:
        """s_j of every channel, before noise: what the sensitivity is stated of. `zeros` gives the shapes.

        They, and what else is returned, are of the whole batch on every process. `each` decides where the shares of
        micro-batches are computed; they are added up here, in float64 and in order, so that it changes no bit.
        """
        sums = [[z.to(torch.float64, copy=True) for z in zeros] for _ in self.clips]
        seen, norms, losses = 0, [], []
        for share in each(partial(self.share, geometry=geometry), batches):
            seen += share.seen
            norms.append(share.norms)
            losses.append(share.losses)
            for total, terms in zip(sums, share.terms, strict=True):
                for term in terms:
                    for block, part in zip(total, term, strict=True):
                        block += part
        empty = zeros[0].new_zeros(len(self.clips), 0)
        whole = iter(self.group.sum([block for channel in sums for block in channel]))
        sums = [[next(whole) for _ in channel] for channel in sums]
        sums = [[block.to(zeros[0].dtype) for block in channel] for channel in geometry.into(sums)]
        return Clipped(sums, sum(self.group.all(seen)), self.group.join(torch.cat([empty, *norms], 1), 1),
                       self.group.join(torch.cat([empty[0], *losses]), 0))

    def share(self, g: SampleGradients, geometry: Geometry) -> Share:
        """c_ij and sum_i c_ij g_i of one micro-batch. It depends on g, the fixed geometry and the clips alone."""
        seen, (squares, fragile) = len(g), geometry.sq_norms(g)
        n = squares.sqrt()
        finite = n.isfinite().all(0)
        if not finite.all():  # 0 * nan is nan: such samples are taken out, not weighted by zero
            keep = finite.nonzero()[:, 0]
            g, n, fragile = g.select(keep), n[:, keep], fragile[keep]
        terms: list[list[Blocks]] = [[] for _ in self.clips]
        if len(g):
            for C, own, n_j in zip(self.clips, terms, n, strict=True):
                c = (C * (1 - ROUNDING) / n_j).clamp(max=1.0)
                own += [part.weighted_sum(weights) for part, weights in _parts(g, c, fragile)]
        return Share(terms, seen, n, g.losses)

    def add_noise(self, sums: list[Blocks], noise: Noise) -> list[Blocks]:
        """s_j + sigma sqrt(J) C_j xi_j for every channel, on its grid: from here on nothing is private.

        The first process of a group adds it, to the whole sum, and the others get the result.
        """
        noisy = iter(self.group.once(lambda: [self._noisy(block, std, noise) for channel, std
                                              in zip(sums, self.noise_std, strict=True) for block in channel],
                                     [block for channel in sums for block in channel]))
        return [[next(noisy) for _ in channel] for channel in sums]

    @staticmethod
    def _noisy(block: Tensor, std: float, noise: Noise) -> Tensor:
        """block + noise in float64, rounded to the grid, in the block's dtype."""
        if std == 0:
            return block.clone()
        s, step = block.to(torch.float64, copy=True), grid(std)
        return s.add_(noise(s, std)).div_(step).round_().mul_(step).to(block.dtype)

    def release(self, batches: Iterable[Any], geometry: Geometry, zeros: Blocks, noise: Noise, each: Each = map,
                ) -> Release:
        """One private step from the micro-batches of a Poisson sample; `each` as in `clipped_sums`."""
        s = self.clipped_sums(batches, geometry, zeros, each)
        noisy = self.add_noise(s.sums, noise)
        clips = s.norms.new_tensor(self.clips).unsqueeze(1)
        return Release(
            direction=[block / self.B for block in geometry.back(noisy)],
            norms=s.norms,
            clipped=float((s.norms > clips).float().mean()) if s.norms.numel() else 0.0,
            nonfinite=s.seen - s.norms.shape[1],
            loss=float(s.losses.mean()) if len(s.losses) else math.nan,
        )


def grid(std: float) -> float:
    """The step of the grid for noise of this standard deviation: a power of two, at most 2^-20 std."""
    return GRID * 2.0 ** math.floor(math.log2(std))


def _parts(g: SampleGradients, c: Tensor, fragile: Tensor) -> list[tuple[SampleGradients, Tensor]]:
    """The samples as they are, and the fragile ones apart in float64, each with their weights."""
    if not fragile.any():
        return [(g, c)]
    rows = fragile.nonzero()[:, 0]
    return [(g, c.masked_fill(fragile, 0.0)), (g.select(rows).double(), c[rows].double())]


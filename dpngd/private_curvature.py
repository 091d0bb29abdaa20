"""The ablation that estimates curvature from private data, and pays for it (the paper's Table 3).

Every T_cur steps a Poisson batch is drawn and each of its samples contributes its own K-FAC factors

    A_i = sum_t a_t a_t' / (S I),    G_i = sum_t d_t d_t'

of all layers (S positions, I inputs: constants of the network that bring the factors to one scale). They pass through
the same Gaussian mechanism as gradients do, as two channels: all A_i together clipped to 1, all G_i together to `curvature_C`.
What is released is then made symmetric and its negative eigenvalues set to zero, which is post-processing.

Guarantee: ceil(T / T_cur) releases of the sampled Gaussian mechanism at rate q, calibrated to a fraction of (epsilon,
delta); the gradients get the rest, by basic composition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dpngd.curvature import LayerCurvature
from dpngd.gradients import Blocks, PerSample, SampleGradients, Tape
from dpngd.layers import Dense
from dpngd.mechanism import GaussianMechanism
from dpngd.trainable import Layer

CLIP_A = 1.0


class FactorChannels:
    """Channel 0 holds the A factors, channel 1 the G factors: L_j picks one of them, R returns both."""

    def sq_norms(self, g: SampleGradients) -> Tensor:
        norms = torch.stack([x.sq_norms() for x in g.layers])
        return torch.stack([norms[0::2].sum(0), norms[1::2].sum(0)])

    def into(self, sums: list[Blocks]) -> list[Blocks]:
        return [sums[0][0::2], sums[1][1::2]]

    def back(self, releases: list[Blocks]) -> Blocks:
        return [block for pair in zip(*releases, strict=True) for block in pair]


class PrivateKFAC:
    """Noisy curvature of a private batch: call with the micro-batches (x, y) of a fresh Poisson sample."""

    def __init__(self, per_sample: PerSample, curvature_C: float, sigma: float, B: float, noise: torch.Generator):
        self.per_sample, self.noise = per_sample, noise
        self.mechanism = GaussianMechanism((CLIP_A, curvature_C), sigma, B)

    def __call__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> list[LayerCurvature]:
        layers = self.per_sample.layers
        zeros = [z.new_zeros(R, n, n) for layer, z in zip(layers, self.per_sample.zeros(), strict=True)
                 for R, O, I in [layer.shape] for n in (I, O)]
        release = self.mechanism.release(self._contributions(batches), FactorChannels(), zeros, self.noise)
        blocks = release.direction
        return [LayerCurvature.of(self.positions[id(layer)] * layer.shape[2] * symmetric(A),
                                  symmetric(G) / self.positions[id(layer)])
                for layer, A, G in zip(layers, blocks[0::2], blocks[1::2], strict=True)]

    def _contributions(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[SampleGradients]:
        """(A_i, G_i) of every layer for the samples of each micro-batch, in the clothes of per-sample gradients."""
        self.positions = {id(layer): 1 for layer in self.per_sample.layers}
        for x, y in batches:
            with Tape(self.per_sample.model, self.per_sample.layers, self._factors) as tape:
                losses = self.per_sample.loss(tape.forward(x), y)
                tape.backward(losses)
            found = [f for pair in tape.results for f in pair]
            yield SampleGradients(found, losses.detach())

    def _factors(self, layer: Layer, a: Tensor, d: Tensor) -> tuple[Dense, Dense]:
        R, O, I = layer.shape
        if layer.kind == "norm":  # one row a sample: its exact block, with G = 1
            g = layer.gradient(a, d, 1).materialise()[:, 0]
            return Dense((g.mT @ g).unsqueeze(1) / I), Dense(g.new_ones(len(g), 1, 1, 1))
        if layer.kind == "conv":
            n, (H, W) = len(d), d.shape[2:]
            if layer.conv.pad is not None:
                a = F.pad(a, layer.conv.pad[0], mode=layer.conv.pad[1])
            a = layer.conv.patches(a, H, W).reshape(n, R, -1, H * W)
            d = d.reshape(n, R, O, H * W)
        else:
            a = a.reshape(len(a), 1, -1, a.shape[-1]).mT
            d = d.reshape(len(d), 1, -1, d.shape[-1]).mT
        if layer.bias:
            a = F.pad(a, (0, 0, 0, 1), value=1.0)
        self.positions[id(layer)] = S = a.shape[-1]
        return Dense(a @ a.mT / (S * I)), Dense(d @ d.mT)


def symmetric(M: Tensor) -> Tensor:
    return (M + M.mT) / 2



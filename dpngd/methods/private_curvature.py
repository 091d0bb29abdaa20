"""The ablation that estimates curvature from private data, and pays for it (the paper's Table 3).

Every T_cur steps a Poisson batch is drawn and each of its samples contributes its own K-FAC factors

    A_i = sum_t a_t a_t' / (S I),    G_i = sum_t d_t d_t',    N_i = g g'

    symbol     meaning
    S, I       positions and inputs of the layer: constants of the network that bring all A_i to one scale
    a_t, d_t   as in `curvature`: inputs and output gradients at position t, labels y ~ p_theta
    N_i        of a norm layer, whose gradient g is a single row: its exact block

with K views the mean over the views. They pass through the same Gaussian mechanism as gradients do, as two channels:
all A_i together clipped to 1, all G_i and N_i together to `curvature_C`. What is released is then made symmetric, its
negative eigenvalues are set to zero and the constants are put back, which is post-processing.

Guarantee: ceil(T / T_cur) releases of the sampled Gaussian mechanism at rate q with noise sqrt(2) sigma on A / 1 and on
(G, N) / curvature_C, composed with the gradients' releases in one accountant (`privacy.plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from dpngd.curvature import LayerCurvature, draw_labels, pass_labels
from dpngd.gradients import Blocks, PerSample, SampleGradients, Tape
from dpngd.group import ALONE, Group
from dpngd.layers import Layer
from dpngd.layers.base import views_as_positions
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import Built, Setting
from dpngd.methods.dp_ngd import whitened
from dpngd.noise import Noise, SecretNoise, secret_stream, seeded_noise, stream

CLIP_A = 1.0


def build(setting: Setting) -> Built:
    """DP-NGD with curvature from the private set, paid for with a fraction f of the budget.

    Guarantee: ceil(T / T_cur) releases of two channels (see the module's top) and T releases of the sum of
    F~^-1/2 g, sensitivity C, on independent Poisson batches; PRV's composition of all of them is (epsilon, delta)
    (`privacy.plan`). The curvature is a released quantity, so whitening with it is post-processing.
    """
    c, (_, paid) = setting.config, setting.spends
    private = PerSample(setting.per_sample.model, K=c.K, check=False)
    noise = (setting.noise or partial(seeded_noise, c.seed))("curvature-noise")
    labels = secret_stream() if isinstance(noise, SecretNoise) else stream(c.seed, "labels")  # of private samples
    noisy = PrivateKFAC(private, setting.shape, c.curvature_C, paid.sigma, c.B, labels=labels, noise=noise,
                        group=setting.group or ALONE)
    return whitened(setting, lambda: noisy(setting.draw()), {"labels": labels, "curvature-noise": noise})


class Gram:
    """u_i u_i' of every sample, from u (b, R, n, S): norms and weighted sums without forming b matrices."""

    def __init__(self, u: Tensor):
        self.u = u

    def sq_norms(self) -> Tensor:
        rows, columns = self.u.shape[2:]  # ||u u'|| = ||u'u||: take the smaller product
        product = self.u @ self.u.mT if rows <= columns else self.u.mT @ self.u
        return product.flatten(1).square().sum(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        u = self.u.permute(1, 2, 0, 3)
        return (u * c[:, None]).flatten(2) @ u.flatten(2).mT

    def materialise(self) -> Tensor:
        return self.u @ self.u.mT

    def select(self, keep: Tensor) -> Gram:
        return Gram(self.u[keep])


class FactorChannels:
    """Channel 0 is the first `inputs` blocks (the A factors), channel 1 the others: L_j picks, R puts together."""

    def __init__(self, inputs: int):
        self.inputs = inputs

    def sq_norms(self, g: SampleGradients) -> tuple[Tensor, Tensor]:
        norms = torch.stack([x.sq_norms() for x in g.layers])
        fragile = norms.new_zeros(len(g), dtype=torch.bool)  # u u' has no terms that cancel
        return torch.stack([norms[: self.inputs].sum(0), norms[self.inputs :].sum(0)]), fragile

    def into(self, sums: list[Blocks]) -> list[Blocks]:
        return [sums[0][: self.inputs], sums[1][self.inputs :]]

    def back(self, releases: list[Blocks]) -> Blocks:
        return [*releases[0], *releases[1]]


class PrivateKFAC:
    """Noisy curvature of a private batch: call with the micro-batches (x, y) of a fresh Poisson sample.

    y is not looked at: as for the public Fisher matrix, labels are drawn from the model.
    """

    def __init__(self, per_sample: PerSample, shape: tuple[int, ...], curvature_C: float, sigma: float, B: float, *,
                 labels: torch.Generator, noise: Noise, group: Group = ALONE):
        self.per_sample, self.labels, self.noise = per_sample, labels, noise
        self.mechanism = GaussianMechanism((CLIP_A, curvature_C), sigma, B, group)
        like = next(per_sample.model.parameters())
        blocks = [[like.new_zeros(layer.shape[0], n, n) for layer in per_sample.layers for n in [layer.sides[side]]
                   if n is not None] for side in (0, 1)]
        self.zeros = [*blocks[0], *blocks[1]]
        self.geometry = FactorChannels(len(blocks[0]))
        self.positions = _positions(per_sample, like.new_zeros(1, *shape))

    def __call__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> list[LayerCurvature]:
        release = self.mechanism.release(self.contributions(batches), self.geometry, self.zeros, self.noise)
        return self.assemble(release.direction)

    def assemble(self, blocks: Blocks) -> list[LayerCurvature]:
        """F of every layer from what was released: A and G back on their scales; a single row's block is its A."""
        blocks = [(M + M.mT) / 2 for M in blocks]
        inputs, curvature = iter(blocks[: self.geometry.inputs]), []
        for layer, S, M in zip(self.per_sample.layers, self.positions, blocks[self.geometry.inputs :], strict=True):
            R, O, I = layer.shape
            if layer.sides[0] is None:
                curvature.append(LayerCurvature.of(M, M.new_ones(R, O, O)))
            else:
                curvature.append(LayerCurvature.of(S * I * next(inputs), M / S))
        return curvature

    def contributions(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[SampleGradients]:
        """The factors of the samples of each micro-batch, held as per-sample gradients are; none of an empty one.

        Of several processes each takes every size-th micro-batch, and passes over the labels of the others'.
        """
        K, group = self.per_sample.K, self.mechanism.group
        for i, (x, _) in enumerate(batches):
            if i % group.size != group.rank:
                pass_labels(len(x), self.labels)
                continue
            if not len(x):  # a Poisson batch may be empty, and a network need not take it: noise alone is released
                continue
            with Tape(self.per_sample.model, self.per_sample.layers, self._factors) as tape:
                logits = tape.forward(x)
                losses = self.per_sample.loss(logits, draw_labels(logits.detach(), self.labels))
                tape.backward(losses)
            inputs = [A for A, _ in tape.results if A is not None]
            yield SampleGradients([*inputs, *(G for _, G in tape.results)], losses.detach().view(-1, K).mean(1))

    def _factors(self, layer: Layer, a: Tensor, d: Tensor) -> tuple[Gram | None, Gram]:
        U, D = layer.columns(a, d)
        if U is not None:
            U = U / (U.shape[-1] * layer.shape[2]) ** 0.5
        return None if U is None else self._gram(U), self._gram(D)

    def _gram(self, u: Tensor) -> Gram:
        """The mean over the K views of a sample: they are further positions."""
        K = self.per_sample.K
        return Gram(u if K == 1 else views_as_positions(u, K) / K**0.5)


def _positions(per_sample: PerSample, blank: Tensor) -> list[int]:
    """S of every layer, from a blank image: what is put back on after the release must not depend on the batch."""

    def count(layer: Layer, a: Tensor, d: Tensor) -> int:
        return layer.columns(a, d)[1].shape[-1]

    with Tape(per_sample.model, per_sample.layers, count) as tape:
        tape.backward(tape.forward(blank))
    return tape.results

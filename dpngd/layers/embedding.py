"""Embeddings: a table of V rows of D numbers, from which tokens take rows.

    z_t = W' e_v(t)    v(t) the token at position t, e_v the unit vector of token v, W (V, D)

So an embedding is a linear layer without bias whose inputs are unit vectors, and its block is (1, D, V): W transposed.

    g = sum_t d_t e_v(t)'        at most S of the V columns are not zero
    A = E[ sum_t e_v e_v' ]      diagonal: how often each token occurs per sample
    G = E[ mean_t d_t d_t' ]

The row of padding_idx has no gradient, as in torch: its unit vector is zero here. It gets no noise either, which is
post-processing: the row is the same whatever the data are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.errors import UsageError
from dpngd.layers.base import Layer, register
from dpngd.layers.forms import Dense, weighted_energy

LARGEST = 2**13
"""Rows of a table at most: A and its eigenvectors are V x V matrices in float64, 2.5 GB and 5 s per refresh there."""


@register(nn.Embedding)
class EmbeddingLayer(Layer):
    """Looks up the row of each token: a (n, ...) holds integers, d (n, ..., D) the gradients of the rows taken."""

    def __init__(self, name: str, module: nn.Embedding):
        super().__init__(name, module)
        V, D = module.weight.shape
        self.shape, self.padding = (1, D, V), module.padding_idx
        if module.max_norm is not None:
            raise UsageError(f"layer {name!r} (Embedding) has max_norm, which changes the weights in the forward pass "
                             "by what the samples hold: leave it out")
        if module.sparse:
            raise UsageError(f"layer {name!r} (Embedding) has sparse=True: noise makes every gradient dense, pass "
                             "sparse=False")
        if module.scale_grad_by_freq:
            raise UsageError(f"layer {name!r} (Embedding) has scale_grad_by_freq, which divides by counts over the "
                             "batch and so mixes samples: leave it out")
        if V > LARGEST:
            raise UsageError(f"layer {name!r} (Embedding) has {V} rows: at most {LARGEST} are covered; freeze it with "
                             "requires_grad_(False), or map rare tokens to one")

    def columns(self, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        tokens, d = self._positions(a, d, 1)
        U = F.one_hot(tokens, self.shape[2]).to(d)
        if self.padding is not None:
            U[..., self.padding] = 0
        return U.mT.unsqueeze(1), d.mT.unsqueeze(1)

    def gradient(self, a: Tensor, d: Tensor, K: int) -> Rows:
        return Rows.of(*self._positions(a, d, K), V=self.shape[2])

    def moments(self, a: Tensor, d: Tensor, inputs: bool) -> tuple[Tensor | None, Tensor]:
        tokens, d = self._positions(a, d, 1)
        S, A = d.shape[1], None
        if inputs:
            counts = tokens.flatten().bincount(minlength=self.shape[2]).to(d)
            if self.padding is not None:
                counts[self.padding] = 0
            A = counts.diag().unsqueeze(0)
        d = d.flatten(0, 1)
        return A, (d.mT @ d).unsqueeze(0) / S

    def join(self, *gradients: Tensor) -> Dense:
        """From (b, V, D). Opacus gives the row of padding_idx a gradient, which torch does not."""
        g = gradients[0].mT.unsqueeze(1)
        return Dense(g if self.padding is None else g.index_fill(-1, self._padding(g), 0))

    def _parts(self, block: Tensor) -> list[Tensor]:
        if self.padding is not None:
            block = block.index_fill(-1, self._padding(block), 0)
        return [block.mT]

    def _padding(self, like: Tensor) -> Tensor:
        return torch.tensor([self.padding], device=like.device)

    def _positions(self, a: Tensor, d: Tensor, K: int) -> tuple[Tensor, Tensor]:
        """Tokens (b, S) and d (b, S, D), the views of a sample among its positions; d is 0 at padding."""
        b = len(d) // K
        tokens, d = a.reshape(b, -1).long(), d.reshape(b, -1, d.shape[-1])
        return tokens, d if self.padding is None else d.masked_fill((tokens == self.padding).unsqueeze(-1), 0)


class Rows:
    """Per-sample gradients (b, 1, D, V) that are zero but for the columns of a sample's tokens.

    tokens (b, S) and d (b, S, D): column tokens[i, s] of g_i is d[i, s]. A token occurs once per sample; where a sample
    has fewer than S different ones, d is zero at what is left.
    """

    def __init__(self, tokens: Tensor, d: Tensor, V: int):
        self.tokens, self.d, self.V = tokens, d, V

    @classmethod
    def of(cls, tokens: Tensor, d: Tensor, V: int) -> Rows:
        """From positions: the d of equal tokens of a sample are added up."""
        tokens, order = tokens.sort(dim=1, stable=True)
        d = d.gather(1, order.unsqueeze(-1).expand_as(d))
        place = F.pad((tokens.diff(dim=1) != 0).long().cumsum(1), (1, 0))  # 0, 1, ... for the different tokens
        return cls(torch.zeros_like(tokens).scatter_(1, place, tokens),
                   torch.zeros_like(d).scatter_add_(1, place.unsqueeze(-1).expand_as(d), d), V)

    def sq_norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.d, dim=-1).square().sum(1)

    def terms(self) -> Tensor:
        return self.d.new_zeros(len(self.d))

    def diagonal_sq_norms(self, w: Tensor) -> Tensor:
        return (self.d.square() * w[0].mT.to(self.d)[self.tokens]).flatten(1).sum(1)

    def project(self, Q_G: Tensor, Q_A: Tensor) -> Tensor:
        return ((self.d @ Q_G[0]).mT @ Q_A[0][self.tokens]).unsqueeze(1)

    def projected_energy(self, Q_G: Tensor, Q_A: Tensor, w: Tensor) -> Tensor:
        return weighted_energy(self.project(Q_G, Q_A), w)

    def projected_terms(self) -> Tensor:
        return self.terms()

    def weighted_sum(self, c: Tensor) -> Tensor:
        d = (self.d * c[:, None, None]).flatten(0, 1)
        return d.new_zeros(self.V, d.shape[1]).index_add_(0, self.tokens.flatten(), d).mT.unsqueeze(0)

    def materialise(self) -> Tensor:
        g = self.d.new_zeros(len(self.d), self.V, self.d.shape[2])
        return g.scatter_add_(1, self.tokens.unsqueeze(-1).expand_as(self.d), self.d).mT.unsqueeze(1)

    def select(self, keep: Tensor) -> Rows:
        return Rows(self.tokens[keep], self.d[keep], self.V)

    def double(self) -> Rows:
        return Rows(self.tokens, self.d.double(), self.V)

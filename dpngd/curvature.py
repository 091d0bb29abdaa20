"""Module 1: K-FAC curvature from public data (section 3.1 of the paper).

    F_l = A_l (x) G_l,   A_l = E[ sum_t a_t a_t' ],   G_l = E[ mean_t d_t d_t' ]

    symbol     shape        meaning
    a_t        (I,)         input of the layer at position t, a 1 appended where it has a bias
    d_t        (O,)         gradient of one example's -log p(y|x) with respect to the layer's output at position t
    A, G       (R, I, I), (R, O, O)   R = 1 except for grouped convolutions
    lambda_A   (R, I)       eigenvalues, largest first; Q_A (R, I, I) holds the eigenvectors in its columns

The scale is that of one example's loss (no powers of the batch size, positions counted once), because lambda_safe is an
absolute floor. A norm layer's block is exact: its gradient is a single row g, so A = E[g g'] and G = 1. How a layer of
each kind comes to its a_t and d_t is in `dpngd.layers`.

Labels: the paper's F has y ~ P_theta, and public images need not have labels of the private task at all:
    sampled   y ~ p_theta(. | x), one backward pass
    exact     the expectation over y, one backward pass per class
    random    y uniform over the classes
    given     the labels that came with the images
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.errors import UsageError, unknown
from dpngd.gradients import Tape
from dpngd.layers import Layer, trainable_layers

LABELS = ("sampled", "exact", "random", "given")

IMAGES_AT_ONCE = 125
"""Public images per pass. Not `gradients.MICRO_BATCH`: A and G are sums over passes, so another number would change the
rounding of every recorded result."""


@dataclass(frozen=True)
class LayerCurvature:
    """Eigendecomposition of one layer's F_l, largest eigenvalues first, in float64.

    With `KFAC(span=True)`, eigenvectors of A whose eigenvalue is zero may be left out: lambda_A (R, r), Q_A (R, I, r).
    """

    lambda_A: Tensor
    Q_A: Tensor
    lambda_G: Tensor
    Q_G: Tensor

    @classmethod
    def of(cls, A: Tensor, G: Tensor) -> LayerCurvature:
        return cls(*_eigh(A), *_eigh(G))

    @classmethod
    def of_rows(cls, X: Tensor, G: Tensor, n: int) -> LayerCurvature:
        """For A = X'X / n with fewer rows than columns, X (r, I): the eigenvectors that the rows span.

        X X' = V S V' has the nonzero eigenvalues of X'X, whose eigenvectors are the columns of X'V, normalised. A QR
        makes those orthonormal to rounding also where eigenvalues are small.
        """
        X = X.double()
        values, V = _eigh(X @ X.mT / n)
        keep = int((values > len(X) * torch.finfo(values.dtype).eps * values[0]).sum())
        return cls(values[None, :keep], torch.linalg.qr(X.mT @ V[:, :keep]).Q[None], *_eigh(G))

    def scaled(self, factor: float) -> LayerCurvature:
        """factor * F_l."""
        return LayerCurvature(self.lambda_A, self.Q_A, self.lambda_G * factor, self.Q_G)

    def spectrum(self) -> Tensor:
        """All eigenvalues lambda_G lambda_A of F_l, shape (R, O, I)."""
        lambda_A = F.pad(self.lambda_A, (0, self.Q_A.shape[1] - self.lambda_A.shape[1]))  # those left out are zero
        return self.lambda_G.unsqueeze(-1) * lambda_A.unsqueeze(-2)


def _eigh(M: Tensor) -> tuple[Tensor, Tensor]:
    if not M.isfinite().all():
        raise FloatingPointError("a curvature factor is not finite: training has diverged")
    M = M.double()
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    if M.shape[-1] > 1 and torch.equal(M, diagonal.diag_embed()):  # an embedding's A, which may be large
        values, order = diagonal.sort(dim=-1, descending=True, stable=True)
        return values.clamp(min=0), torch.eye(M.shape[-1]).to(M)[order].mT
    try:
        values, vectors = torch.linalg.eigh(M)
    except torch.linalg.LinAlgError:
        # LAPACK's divide and conquer can give up on a matrix of mostly zero rows (inputs that are always zero). With
        # as much as its own rounding added to the diagonal, it succeeds.
        M = M + torch.finfo(M.dtype).eps * M.abs().amax((-2, -1), keepdim=True) * torch.eye(M.shape[-1]).to(M)
        values, vectors = torch.linalg.eigh(M)
    return values.flip(-1).clamp(min=0), vectors.flip(-1)


class KFAC:
    """Curvature of `model` on public images; call it at theta_t to get every layer's F_l."""

    def __init__(self, model: nn.Module, x: Tensor, *, labels: str = "sampled", y: Tensor | None = None,
                 generator: torch.Generator | None = None, micro_batch: int = IMAGES_AT_ONCE, span: bool = False):
        """`span`: leave out eigenvectors of zero eigenvalues where that saves work (see `LayerCurvature`)."""
        if labels not in LABELS:
            raise unknown("Fisher labels", labels, LABELS)
        if len(x) == 0:
            raise UsageError("the public set is empty: curvature needs at least one image")
        if (labels == "given") != (y is not None):
            raise UsageError("labels='given' and y belong together: pass both or neither")
        if y is not None and len(y) != len(x):
            raise UsageError(f"{len(y)} public labels for {len(x)} images: pass one label per image")
        if labels in ("sampled", "random") and generator is None:
            raise UsageError(f"labels={labels!r} draws labels: pass a generator")
        self.model, self.x, self.y, self.labels = model, x, y, labels
        self.generator, self.micro_batch, self.span = generator, micro_batch, span
        self.layers = trainable_layers(model)

    def __call__(self) -> list[LayerCurvature]:
        return [m.decompose(len(self.x)) for m in self._moments(self.span)]

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """(A, G) of every layer, the mean over the public images."""
        return [m.mean(len(self.x)) for m in self._moments(span=False)]

    def _moments(self, span: bool) -> list[Moments]:
        sums = [Moments(layer, len(self.x) if span else None) for layer in self.layers]
        by_layer = {id(layer): m for layer, m in zip(self.layers, sums, strict=True)}
        for lo in range(0, len(self.x), self.micro_batch):
            x = self.x[lo : lo + self.micro_batch]
            first = True

            def accumulate(layer: Layer, a: Tensor, d: Tensor) -> None:
                by_layer[id(layer)].add(a, d, inputs=first)  # noqa: B023 (called within this iteration)

            with Tape(self.model, self.layers, accumulate) as tape:
                logits = tape.forward(x)
                directions = self._output_gradients(logits.detach(), lo)
                for i, direction in enumerate(directions):
                    first = i == 0
                    tape.backward(logits, direction, retain=i + 1 < len(directions))
        return sums

    def _output_gradients(self, logits: Tensor, lo: int) -> list[Tensor]:
        """Gradients of -log p(y|x) with respect to the logits: p - e_y, times sqrt(p_y) when summed over all y."""
        if logits.dim() != 2:
            raise UsageError(f"the model's output has shape {tuple(logits.shape)}: the Fisher matrix here is a "
                             "classifier's, so it must be (images, classes)")
        if not logits.isfinite().all():
            raise FloatingPointError("the model's output on public images is not finite: training has diverged")
        p = logits.softmax(1)
        n, classes = p.shape
        if self.labels == "exact":
            return [p[:, [c]].sqrt() * (p - F.one_hot(torch.tensor(c, device=p.device), classes))
                    for c in range(classes)]
        if self.labels == "given":
            y = self.y[lo : lo + n]
            if y.min() < 0 or y.max() >= classes:
                worst = int(y.min() if y.min() < 0 else y.max())
                raise UsageError(f"a public label is {worst}, but the model has {classes} classes: use "
                                 "labels='sampled', which needs no labels")
        elif self.labels == "random":
            y = torch.randint(classes, (n,), generator=self.generator).to(p.device)
        else:
            y = torch.multinomial(p.cpu(), 1, generator=self.generator)[:, 0].to(p.device)
        return [p - F.one_hot(y, classes)]


class Moments:
    """Running sums of a layer's moments, and K-FAC's factors from them.

    images   their number, where the inputs themselves may be kept if they are fewer than the columns of A
    """

    def __init__(self, layer: Layer, images: int | None = None):
        self.layer, self.images = layer, images
        self.A: Tensor | None = None
        self.G: Tensor | None = None
        self.rows: list[Tensor] = []

    def add(self, a: Tensor, d: Tensor, inputs: bool) -> None:
        rows = self.layer.input_rows(a) if self.images else None
        if rows is not None and len(rows) * self.images < len(a) * self.layer.shape[2]:
            self.rows += [rows] if inputs else []
            inputs = False
        A, G = self.layer.moments(a, d, inputs)
        self.A, self.G = _plus(self.A, A), _plus(self.G, G)

    def mean(self, n: int) -> tuple[Tensor, Tensor]:
        """(A, G) of n images; zero for a layer that the output does not depend on."""
        return self.layer.kfac(self.A, self.G, n)

    def decompose(self, n: int) -> LayerCurvature:
        """F_l of n images."""
        if self.rows:
            return LayerCurvature.of_rows(torch.cat(self.rows), self.G / n, n)
        return LayerCurvature.of(*self.mean(n))


def _plus(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    if term is None:
        return total
    return term if total is None else total.add_(term)


def draw_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """y ~ softmax(logits), one uniform number per row: neither the parts' sizes nor a nan row changes others."""
    u = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator).to(logits.device)
    return (logits.double().softmax(1).cumsum(1) < u).sum(1).clamp(max=logits.shape[1] - 1)


@torch.no_grad()
def sampled_labels(model: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """y ~ p_theta(. | x), the labels of DP-NGD's Fisher matrix."""
    return draw_labels(torch.cat([model(part) for part in x.split(500)]), generator)

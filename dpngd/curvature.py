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

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import scipy.linalg
import threadpoolctl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.errors import UsageError, unknown
from dpngd.gradients import Tape
from dpngd.group import ALONE, Group
from dpngd.layers import Layer, RowLayer, trainable_layers
from dpngd.layers.forms import product
from dpngd.steps import evaluating

LABELS = ("sampled", "exact", "random", "given")

IMAGES_AT_ONCE = 125
"""Public images per pass, at most. Not `gradients.MICRO_BATCH`: A and G are sums over passes, so another number would
change the rounding of every recorded result."""

FLOATS = 2**25
"""Numbers in the layers' inputs per pass, at most: 128 MiB. WRN-10-1 fills 0.9 of it with IMAGES_AT_ONCE, and WRN-16-4
takes 28 images per pass."""


@dataclass(frozen=True)
class LayerCurvature:
    """Eigendecomposition of one layer's F_l, largest eigenvalues first, in float64.

    With `KFAC(span=True)`, eigenvectors of A may be left out: lambda_A (R, r), Q_A (R, I, r). `rest` (R,) is the sum of
    the eigenvalues of A that were, zero where it is None.
    """

    lambda_A: Tensor
    Q_A: Tensor
    lambda_G: Tensor
    Q_G: Tensor
    rest: Tensor | None = None

    @classmethod
    def of(cls, A: Tensor, G: Tensor, least: float = 0.0) -> LayerCurvature:
        """All of F_l, or of A the eigenvectors only that can lift an eigenvalue of F_l above `least`."""
        lambda_G, Q_G = _eigh(G)
        if least == 0:
            return cls(*_eigh(A), lambda_G, Q_G)
        lambda_A, Q_A = _eigh(A, above(least, lambda_G))
        rest = A.diagonal(dim1=-2, dim2=-1).double().sum(-1) - lambda_A.sum(-1)
        return cls(lambda_A, Q_A, lambda_G, Q_G, rest.clamp(min=0))

    @classmethod
    def of_rows(cls, X: Tensor, G: Tensor, n: int, least: float = 0.0) -> LayerCurvature:
        """For A = X'X / n with fewer rows than columns, X (r, I): the eigenvectors that the rows span.

        X X' = V S V' has the nonzero eigenvalues of X'X, whose eigenvectors are the columns of X'V, normalised. A QR
        makes those orthonormal to rounding also where eigenvalues are small.
        """
        lambda_G, Q_G = _eigh(G)
        gram = (X @ X.mT).double() / n
        values, V = _eigh(gram[None], above(least, lambda_G) if least > 0 else None)
        values, V = values[0], V[0]
        keep = int((values > len(X) * torch.finfo(X.dtype).eps * values[:1]).sum())
        values, V = values[:keep], V[:, :keep]
        rest = (gram.trace() - values.sum()).clamp(min=0) if least > 0 else values.new_zeros(())
        return cls(values[None], torch.linalg.qr(X.double().mT @ V).Q[None], lambda_G, Q_G, rest[None])

    def scaled(self, factor: float) -> LayerCurvature:
        """factor * F_l."""
        return replace(self, lambda_G=self.lambda_G * factor)

    def spectrum(self) -> Tensor:
        """All eigenvalues lambda_G lambda_A of F_l, shape (R, O, I); zero for eigenvectors that were left out."""
        lambda_A = F.pad(self.lambda_A, (0, self.Q_A.shape[1] - self.lambda_A.shape[1]))
        return self.lambda_G.unsqueeze(-1) * lambda_A.unsqueeze(-2)

    def traces(self) -> Tensor:
        """tr F_l of each group, (R,): also of what was left out."""
        lambda_A = self.lambda_A.sum(1)
        return self.lambda_G.sum(1) * (lambda_A if self.rest is None else lambda_A + self.rest)


def above(least: float, lambda_G: Tensor) -> float:
    """The eigenvalue of A at or below which no eigenvalue of F_l is above `least`, in any group."""
    return (1 - 1e-9) * least / max(float(lambda_G[:, 0].max()), torch.finfo(lambda_G.dtype).tiny)


SUBSET = 384
"""Columns from which on a few eigenvectors are found without the others: below, all of them take no longer."""


def _eigh(M: Tensor, least: float | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues of M (R, n, n), largest first, and eigenvectors, in float64; or those above `least` in some group."""
    if not M.isfinite().all():
        raise FloatingPointError("a curvature factor is not finite: training has diverged")
    M, n = M.double(), M.shape[-1]
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    if least is not None and not (diagonal.sum(-1) > least).any():  # the trace bounds every eigenvalue
        return M.new_zeros(len(M), 0), M.new_zeros(len(M), n, 0)
    if n > 1 and torch.equal(M, diagonal.diag_embed()):  # an embedding's A, which may be large
        values, order = diagonal.sort(dim=-1, descending=True, stable=True)
        keep = _count(values, least)
        vectors = M.new_zeros(len(M), n, keep).scatter_(1, order[:, None, :keep], 1.0)
        return values[:, :keep].clamp(min=0), vectors
    if least is not None and len(M) == 1 and n >= SUBSET:
        with contextlib.suppress(scipy.linalg.LinAlgError), scipys_blas().limit(limits=1):
            found = scipy.linalg.eigh(M[0].cpu().numpy(), subset_by_value=(least, math.inf), check_finite=False)
            values, vectors = (torch.from_numpy(t).to(M.device).flip(-1)[None] for t in found)
            return values, torch.linalg.qr(vectors).Q if values.numel() else vectors
    try:
        values, vectors = torch.linalg.eigh(M)
    except torch.linalg.LinAlgError:
        # LAPACK's divide and conquer can give up on a matrix of mostly zero rows (inputs that are always zero). With
        # as much as its own rounding added to the diagonal, it succeeds.
        M = M + torch.finfo(M.dtype).eps * M.abs().amax((-2, -1), keepdim=True) * torch.eye(n).to(M)
        values, vectors = torch.linalg.eigh(M)
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    keep = _count(values, least)
    return values[..., :keep], vectors[..., :keep]


@functools.cache
def scipys_blas() -> threadpoolctl.ThreadpoolController:
    """The BLAS that scipy brings, whose threads torch.set_num_threads does not know of.

    It has one per core of the machine, which spin while they wait for one another: beside other work, eigenvectors of a
    500 x 500 matrix took 20 times as long as on one thread.
    """
    return threadpoolctl.ThreadpoolController().select(internal_api="openblas")


def _count(values: Tensor, least: float | None) -> int:
    """How many of the eigenvalues (R, n), largest first, are kept: those above `least` in some group, or all."""
    return values.shape[-1] if least is None else int((values > least).sum(-1).max())


class KFAC:
    """Curvature of `model` on public images; call it at theta_t to get every layer's F_l."""

    def __init__(self, model: nn.Module, x: Tensor, *, labels: str = "sampled", y: Tensor | None = None,
                 generator: torch.Generator | None = None, micro_batch: int | None = None, span: bool = False,
                 least: float = 0.0, group: Group | None = None):
        """`span`: leave out eigenvectors of zero eigenvalues where that saves work (see `LayerCurvature`), and those
        that lift no eigenvalue of F above `least`. A geometry whose floor is never below it does not need them.

        `micro_batch`: images per pass; by default as many as memory allows for (`images_at_once`).

        `group`: processes that hold the same model and images. They share out the images and, layer by layer, the
        eigendecompositions; all of them get F.
        """
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
        self.generator, self.micro_batch, self.span, self.least = generator, micro_batch, span, least
        self.layers = trainable_layers(model)
        self.group = group or ALONE
        self._of_images: dict[int, Tensor] = {}  # A of layers that see the images themselves: the same at all weights
        self._version = x._version

    def __call__(self) -> list[LayerCurvature]:
        least, n = self.least if self.span else 0.0, len(self.x)
        moments = self._moments(self.span)
        return shared_out(self.group, [m.cost() for m in moments], lambda i: moments[i].decompose(n, least))

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """(A, G) of every layer, the mean over the public images."""
        return [m.mean(len(self.x)) for m in self._moments(span=False)]

    def _sums(self, span: bool) -> list[Moments]:
        return [Moments(layer, len(self.x) if span else None) for layer in self.layers]

    def _moments(self, span: bool) -> list[Moments]:
        if self.micro_batch is None:
            self.micro_batch = images_at_once(self.model, self.layers, self.x, IMAGES_AT_ONCE)
        starts, group = range(0, len(self.x), self.micro_batch), self.group
        mine, failed = starts[group.share(len(starts))], ""
        if self.x._version != self._version:
            self._of_images, self._version = {}, self.x._version
        parts: list[list[Moments]] = []
        seen: set[int] = set()
        try:
            for lo in starts:
                if lo not in mine:
                    self._pass(self.x[lo : lo + self.micro_batch])
                    continue
                if not parts or group.size > 1:  # apart, to be added up in the order of one process
                    parts.append(self._sums(span))
                self._add(parts[-1], lo, seen)
        except FloatingPointError as error:
            if group.size == 1:
                raise
            failed = str(error)
        raise_on_all(group, failed)
        sums = parts[0] if group.size == 1 else added_up(group, parts, self._sums(span))
        seen = set().union(*group.all(seen))
        for i, m in enumerate(sums):
            if i in self._of_images:
                m.A = self._of_images[i]
            elif i in seen and m.A is not None and not isinstance(m.layer, RowLayer):
                self._of_images[i] = m.A
        return sums

    def _add(self, sums: list[Moments], lo: int, seen: set[int]) -> None:
        """Add the moments of the micro-batch that starts at lo; `seen` are the layers that see the images."""
        number = {id(layer): i for i, layer in enumerate(self.layers)}
        x = self.x[lo : lo + self.micro_batch]
        first, here = True, x.data_ptr()

        def accumulate(layer: Layer, a: Tensor | None, d: Tensor) -> None:
            i = number[id(layer)]
            if a is not None and a.data_ptr() == here and a.numel() == x.numel():
                seen.add(i)
            sums[i].add(a, d, inputs=first and i not in self._of_images)

        with Tape(self.model, self.layers, accumulate) as tape:
            logits = tape.forward(x)
            directions = self._output_gradients(logits.detach(), lo)
            for i, direction in enumerate(directions):
                first = i == 0
                tape.backward(logits, direction, retain=i + 1 < len(directions))

    def _pass(self, x: Tensor) -> None:
        """Draw what another process draws for the labels of x: one stream serves all micro-batches in turn."""
        if self.labels in ("sampled", "random"):
            with torch.no_grad():
                logits = self.model(x[:1])
            if self.labels == "sampled":
                torch.multinomial(torch.ones(len(x), logits.shape[1], dtype=logits.dtype), 1, generator=self.generator)
            else:
                torch.randint(logits.shape[1], (len(x),), generator=self.generator)

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

    def cost(self) -> float:
        """Roughly what `decompose` costs, to share it out."""
        R, O, I = self.layer.shape
        return R * (float(O) ** 3 + float(min(I, sum(map(len, self.rows)) or I)) ** 3)

    def decompose(self, n: int, least: float = 0.0) -> LayerCurvature:
        """F_l of n images; with `least`, without eigenvectors that lift none of its eigenvalues above it."""
        if self.rows:
            return LayerCurvature.of_rows(torch.cat(self.rows), self.G / n, n, least)
        return LayerCurvature.of(*self.mean(n), least)


class SteepKFAC(KFAC):
    """F down to a floor: the eigenvectors that a clamped F~ needs, in a fraction of the time that all of F takes.

    floor   the lowest floor of the run; a function, because a loaded checkpoint may change it

    F~ is lambda_t times the identity wherever F is below lambda_t. So only eigenvalues of A above floor / lambda_G[0]
    matter, a few of hundreds; of the rest the trace is kept. Where the time is saved:
    - only the largest eigenvectors are computed (`largest`), orthonormal in float64: F~ needs an orthonormal basis, not
      the last digits of an estimate;
    - where there are fewer images than columns, X X' is decomposed instead of X'X;
    - A of a convolution is estimated from `POSITIONS` positions per image or `ROWS` rows per column, whichever is more:
      neighbouring patches overlap, and images are the independent samples. G is from all positions;
    - the first layer's inputs are the public images: its A is decomposed once;
    - small images are passed through the network all at once.
    """

    def __init__(self, model: nn.Module, x: Tensor, *, floor: Callable[[], float], labels: str = "sampled",
                 generator: torch.Generator | None = None):
        super().__init__(model, x, labels=labels, generator=generator)
        self.floor = floor
        self.micro_batch = images_at_once(model, self.layers, x, most=len(x))
        self._fixed: dict[int, Inputs] = {}

    def __call__(self) -> list[LayerCurvature]:
        floor = self.floor()
        return [m.above(floor) for m in self._moments(span=True)]

    def _sums(self, span: bool) -> list[SteepMoments]:
        return [SteepMoments(layer, self.x, self._fixed) for layer in self.layers]


POSITIONS, ROWS = 8, 8

Eigen = tuple[Tensor, Tensor]
"""Eigenvalues (k,), largest first, and orthonormal eigenvectors (n, k), in float64."""
Inputs = tuple[Tensor, Tensor, float]
"""Those of A, and A's trace."""


@torch.no_grad()
def images_at_once(model: nn.Module, layers: list[Layer], x: Tensor, most: int) -> int:
    """Public images per pass: at most `most`, and so few that the layers' inputs have no more than FLOATS numbers."""
    counts: list[int] = []
    handles = [layer.module.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
               for layer in layers]
    try:
        with evaluating(model):  # in training mode, dropout would draw from the generator of the run
            model(x[:1])
    finally:
        for handle in handles:
            handle.remove()
    return max(1, min(most, len(x), FLOATS // max(1, sum(counts))))


class SteepMoments(Moments):
    """Moments of `SteepKFAC`: A from some positions, and F_l decomposed above a floor only.

    x      the public images
    fixed  what is known of layers whose inputs are the images themselves, by the layer's id
    """

    def __init__(self, layer: Layer, x: Tensor, fixed: dict[int, Inputs]):
        super().__init__(layer, len(x))
        self.memory, self.fixed, self.is_fixed = x.untyped_storage().data_ptr(), fixed, False

    def add(self, a: Tensor | None, d: Tensor, inputs: bool) -> None:
        self.is_fixed = a is not None and a.untyped_storage().data_ptr() == self.memory
        if self.is_fixed and id(self.layer) in self.fixed:
            inputs = False
        elif inputs and a is not None and not self.is_fixed:
            positions = max(POSITIONS, -(-ROWS * self.layer.shape[2] // self.images))
            A = self.layer.sampled_moment(a, d, positions)
            self.A, inputs = _plus(self.A, A), A is None
        super().add(a, d, inputs)

    def above(self, floor: float) -> LayerCurvature:
        """F_l down to `floor`."""
        n, G = self.images, self.G
        if G is None or self.layer.shape[0] > 1:  # a single row of parameters, where G = 1; groups
            A, G = self.layer.kfac(self.A, G, n)
            if len(A) > 1:
                return LayerCurvature.of(A, G)
            self.A = A * n
        else:
            G = G / n
        lambda_G, Q_G = _eigh(G)
        least = floor / max(float(lambda_G[0, 0]), torch.finfo(torch.float64).tiny)
        if self.is_fixed:
            if id(self.layer) not in self.fixed:
                self.fixed[id(self.layer)] = self._inputs(0.0)
            lambda_A, Q_A, trace = self.fixed[id(self.layer)]
            k = int((lambda_A > least).sum())
            lambda_A, Q_A = lambda_A[:k], Q_A[:, :k]
        else:
            lambda_A, Q_A, trace = self._inputs(least)
        rest = lambda_A.new_tensor([max(0.0, trace - float(lambda_A.sum()))])
        return LayerCurvature(lambda_A[None], Q_A[None], lambda_G, Q_G, rest)

    def _inputs(self, least: float) -> Inputs:
        """A's eigenvalues above `least`."""
        if not self.rows:
            M = self.A[0] / self.images
            return *largest(M, least), float(M.trace())
        X = torch.cat(self.rows)  # fewer rows than columns: the eigenvectors of X'X are X'V / ||X'V|| for those of X X'
        M = product(X, X) / self.images
        few = few_largest(M, least)
        if few is not None:
            return few[0], torch.linalg.qr(X.mT.double() @ few[1]).Q, float(M.trace())
        X = X.double()
        values, V = (t[0] for t in _eigh((X @ X.mT / self.images)[None]))
        k = int((values > max(least, len(X) * torch.finfo(values.dtype).eps * float(values[0]))).sum())
        vectors = X.mT @ V[:, :k]
        if k and float(values[k - 1]) > 1e-6 * float(values[0]):  # orthogonal to 2e-16 / 1e-6: no QR is needed
            vectors /= (values[:k] * self.images).sqrt()
        else:
            vectors = torch.linalg.qr(vectors).Q
        return values[:k], vectors, float(M.trace())


BLOCK, DEGREE = 32, 3


def largest(M: Tensor, least: float) -> Eigen:
    """Eigenvalues of M (n, n), positive semidefinite, above `least`, and orthonormal eigenvectors."""
    few = few_largest(M, least)
    if few is not None:
        return few
    values, vectors = (t[0] for t in _eigh(M[None]))
    k = int((values > least).sum())
    return values[:k], vectors[:, :k]


def few_largest(M: Tensor, least: float) -> Eigen | None:
    """The same where M is large, and no more than 32 eigenvalues are above `least`; else None.

    From the span of [M W, M^2 W, M^3 W] for W (n, 32) of Gaussian numbers (block Krylov; Musco and Musco, 2015), in
    float32 but for the small eigenproblem: a tenth of the time of all eigenvectors. On a spectrum that falls by 2 % per
    eigenvalue, values are within 2 %. All eigenvectors in float32 are no alternative: LAPACK's
    divide and conquer returned nan for an A of the small network. (Not scipy's eigsh, which takes about as long in
    float32: the products here are a fixed number, on the matrix's own device.)
    """
    if not M.isfinite().all():
        raise FloatingPointError("a curvature factor is not finite: training has diverged")
    if float(torch.linalg.matrix_norm(M)) <= least:  # the Frobenius norm: no eigenvalue is larger
        return M.new_zeros(0).double(), M.new_zeros(len(M), 0).double()
    if least <= 0 or len(M) < 4 * BLOCK:
        return None
    W, spans = torch.randn(len(M), BLOCK, generator=torch.Generator().manual_seed(0)).to(M), []
    for _ in range(DEGREE):
        W = torch.linalg.qr(M @ W).Q
        spans.append(W)
    Q = torch.linalg.qr(torch.cat(spans, 1)).Q
    values, vectors = (t[0] for t in _eigh((Q.mT @ (M @ Q))[None]))
    if float(values[BLOCK - 1]) > least:
        return None
    k = int((values > least).sum())
    return values[:k], torch.linalg.qr(Q.double() @ vectors[:, :k]).Q


def _plus(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    if term is None:
        return total
    return term if total is None else total.add_(term)


def added_up(group: Group, parts: list[list[Moments]], blank: list[Moments]) -> list[Moments]:
    """The moments of all micro-batches, on every process, into `blank`.

    Sums of float32 depend on their order. They are formed in the order of the micro-batches, from process to process:
    so F has the bits that one process gives it. A process may have had no micro-batch.
    """
    forms = group.all([[None if t is None else (t.shape, t.dtype) for t in (m.A, m.G, *m.rows[:1])]
                       for m in parts[0]] if parts else None)
    form, device = next(f for f in forms if f is not None), blank[0].layer.like.device

    def flat(moments: list[Moments]) -> Tensor:
        return torch.cat([t.flatten() for m in moments for t in (m.A, m.G) if t is not None])

    def fold(total: Tensor) -> Tensor:
        for part in parts:
            total += flat(part)
        return total

    for m, known in zip(blank, form, strict=True):
        m.A, m.G = (None if t is None else torch.zeros(t[0], dtype=t[1], device=device) for t in known[:2])
    totals = group.in_turn(fold, flat(blank))
    at = iter(totals.split([t.numel() for m in blank for t in (m.A, m.G) if t is not None]))
    for i, (m, known) in enumerate(zip(blank, form, strict=True)):
        m.A, m.G = (None if t is None else next(at).view(t.shape) for t in (m.A, m.G))
        if len(known) > 2:
            empty = torch.zeros(0, *known[2][0][1:], dtype=known[2][1], device=device)
            m.rows = [group.join(torch.cat([empty, *(rows for part in parts for rows in part[i].rows)]), 0)]
    return blank


def raise_on_all(group: Group, failed: str) -> None:
    """An error of one process, on all of them: else the others would wait for it."""
    for told in group.all(failed):
        if told:
            raise FloatingPointError(told)


def shared_out(group: Group, costs: list[float], decompose: Callable[[int], LayerCurvature]) -> list[LayerCurvature]:
    """F of every layer, on every process; each decomposes some layers, dealt out from the costliest on."""
    if group.size == 1:
        return [decompose(i) for i in range(len(costs))]
    load, owner = [0.0] * group.size, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]
    mine, failed = [], ""
    try:
        mine = [[t for t in vars(decompose(i)).values() if t is not None]
                for i in range(len(costs)) if owner[i] == group.rank]
    except FloatingPointError as error:
        failed = str(error)
    raise_on_all(group, failed)
    told = group.all([[t.shape for t in layer] for layer in mine])
    like = mine[0][0] if mine else torch.zeros(0, dtype=torch.float64)
    flat = group.join(torch.cat([t.flatten() for layer in mine for t in layer] or [like]), 0)
    tensors = iter(flat.split([math.prod(shape) for layers in told for layer in layers for shape in layer]))
    found = [iter([LayerCurvature(*(next(tensors).view(shape) for shape in layer)) for layer in layers])
             for layers in told]
    return [next(found[owner[i]]) for i in range(len(costs))]


def pass_labels(n: int, generator: torch.Generator) -> None:
    """Draw what `draw_labels` draws for n rows."""
    torch.rand(n, 1, dtype=torch.float64, generator=generator)


def draw_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """y ~ softmax(logits), one uniform number per row: neither the parts' sizes nor a nan row changes others."""
    u = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator).to(logits.device)
    return (logits.double().softmax(1).cumsum(1) < u).sum(1).clamp(max=logits.shape[1] - 1)


@torch.no_grad()
def sampled_labels(model: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """y ~ p_theta(. | x), the labels of DP-NGD's Fisher matrix."""
    return draw_labels(torch.cat([model(part) for part in x.split(500)]), generator)

"""Slow, dense and independent: what the package is tested against. Nothing here calls the code under test.

A layer's parameters are one vector, in the order of its (R, O, I) block: [W | bias] row by row for linear layers and
convolutions (R groups of O outputs); for all others the parameters one after the other, such as scale then shift.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap


def trainable(model):
    """(name, module) of the layers that have a trainable parameter of their own."""
    return [(name, m) for name, m in model.named_modules()
            if any(p.requires_grad for p in m.parameters(recurse=False))]


def block(name, module, tensors):
    """{parameter: (b, *shape)} -> (b, R, O, I), the layout that the package documents."""
    prefix = f"{name}." if name else ""
    own = [tensors[prefix + n] for n, p in module.named_parameters(recurse=False) if p.requires_grad]
    b = len(own[0])
    if isinstance(module, nn.Embedding):  # a linear layer of unit vectors: the table transposed
        return own[0].mT.unsqueeze(1)
    if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
        return torch.cat([t.reshape(b, 1, 1, -1) for t in own], -1)
    R = getattr(module, "groups", 1)
    w, *bias = own
    return torch.cat([w.reshape(b, R, len(module.weight) // R, -1), *[t.reshape(b, R, -1, 1) for t in bias]], -1)


def per_sample(model, x, y, K=1, loss=F.cross_entropy):
    """Per-sample gradients of the mean loss over K views by torch.func: one (b, R, O, I) a layer, and losses (b,)."""
    params = {k: p.detach() for k, p in model.named_parameters()}
    free = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
    b = len(x) // K

    def mean_loss(free, x, y):
        value = loss(functional_call(model, {**params, **free}, (x,)), y.expand(K))
        return value, value

    views = x.detach().clone().unflatten(0, (b, K))
    grads, losses = vmap(grad(mean_loss, has_aux=True), in_dims=(None, 0, 0))(free, views, y)
    return [block(name, m, grads) for name, m in trainable(model)], losses


def fisher(model, x, labels=None):
    """The Fisher matrix of every layer, dense, from the gradients of log p(y|x): an average over x, and over y ~ p
    exactly, or over the given labels (n, draws)."""
    with torch.no_grad():
        p = model(x).softmax(1)
    n, classes = p.shape
    totals = [0.0] * len(trainable(model))
    for c in range(classes):
        weight = p[:, c] if labels is None else (labels == c).to(p).mean(1)
        grads, _ = per_sample(model, x, torch.full((n,), c))
        for i, g in enumerate(grads):
            g = g.flatten(1)
            totals[i] = totals[i] + (g.mT * weight) @ g / n
    return totals


def block_diagonal(A, G):
    """F_l of a layer as one dense matrix over its block's entries: kron(G, A), a block for each of the R groups."""
    return torch.block_diag(*[torch.kron(G_r, A_r) for A_r, G_r in zip(A.double(), G.double(), strict=True)])


def power(F, floor, p):
    """F~^p: a symmetric matrix to the power p with its eigenvalues raised to the floor."""
    values, Q = torch.linalg.eigh(F)
    return (Q * values.clamp(min=floor) ** p) @ Q.mT


def kfac_power(A, G, floor, p):
    """F~^p for F = A (x) G. Eigenvectors come from the factors (those of kron(G, A), whose ties eigh breaks anyhow)."""
    blocks = []
    for A_r, G_r in zip(A.double(), G.double(), strict=True):
        (lA, QA), (lG, QG) = torch.linalg.eigh(A_r), torch.linalg.eigh(G_r)
        Q = torch.kron(QG, QA)
        lam = torch.kron(lG.clamp(min=0), lA.clamp(min=0)).clamp(min=floor)
        blocks.append((Q * lam**p) @ Q.mT)
    return torch.block_diag(*blocks)


def relative(ours, exact):
    """||ours_i - exact_i|| / ||exact_i||, the worst over the first dimension; absolute where exact is zero."""
    ours, exact = ours.double().flatten(1), exact.double().flatten(1)
    scale = exact.norm(dim=1)
    return float(((ours - exact).norm(dim=1) / torch.where(scale > 0, scale, 1.0)).max())

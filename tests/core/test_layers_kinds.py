"""Conv1d, Embedding, instance norm, attention: against torch.func, and K-FAC against the exact Fisher matrix."""

import pytest
import reference
import torch
import torch.nn.functional as F
from gradient_checks import CLASSES, check_everything, sample, seeded
from opacus.layers import DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias
from torch import nn

from dpngd.curvature import KFAC, LayerCurvature
from dpngd.errors import UsageError
from dpngd.geometry import Kronecker
from dpngd.gradients import PerSample
from dpngd.layers import Dense, Layer, trainable_layers
from dpngd.layers.embedding import Rows

DOUBLE = torch.float64


def conv1d(length=7, **options):
    conv = nn.Conv1d(4, 6, **{"kernel_size": 3, **options})
    out = conv(torch.zeros(1, 4, length)).flatten(1).shape[1]
    return nn.Sequential(nn.Conv1d(2, 4, 1), nn.Tanh(), conv, nn.Tanh(), nn.Flatten(), nn.Linear(out, CLASSES))


CONVS = [{}, {"bias": False}, {"groups": 2}, {"groups": 2, "dilation": 2, "padding": 1}, {"stride": 2, "padding": 2},
         {"padding": "same"}, {"padding": "same", "kernel_size": 2, "dilation": 3},
         {"padding": "same", "kernel_size": 4, "padding_mode": "circular"}, {"padding": 2, "padding_mode": "reflect"},
         {"padding": 1, "padding_mode": "replicate", "stride": 2, "groups": 2}, {"padding": "valid", "dilation": 3}]


@pytest.mark.parametrize("options", CONVS, ids=str)
@pytest.mark.parametrize("K", [1, 4])
def test_conv1d(options, K):
    model = seeded(lambda: conv1d(**options)).to(DOUBLE)
    x, y = sample((2, 7), 3, K, DOUBLE)
    check_everything(PerSample(model, K=K)(x, y), *reference.per_sample(model, x, y, K), tolerance=1e-9)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"groups": 2}], ids=str)
def test_conv1d_curvature_is_exact_for_one_image_and_one_position(options):
    model = seeded(lambda: conv1d(length=3, **options)).to(DOUBLE)[2:]
    x, _ = sample((4, 3), 1, 1, DOUBLE)
    factors = KFAC(model, x, labels="exact").factors()
    for (A, G), exact in zip(factors, reference.fisher(model, x), strict=True):
        torch.testing.assert_close(reference.block_diagonal(A, G), torch.block_diag(*groups(exact, G)))


def groups(exact, G):
    """The diagonal blocks of the exact Fisher matrix that K-FAC has: one per group."""
    R, size = len(G), len(exact) // len(G)
    return [exact[r * size : (r + 1) * size, r * size : (r + 1) * size] for r in range(R)]


NORMS = {
    "1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.Tanh(), nn.Flatten(),
                                 nn.Linear(20, CLASSES)), (2, 7)),
    "2d": (lambda: nn.Sequential(nn.InstanceNorm2d(2, affine=True, eps=0.1), nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3),
                                 nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)), (2, 4, 4)),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("shift", [True, False])
def test_instance_norm(name, K, shift):
    build, shape = NORMS[name]
    model = seeded(build).to(DOUBLE)
    for m in model.modules():
        if isinstance(m, nn.InstanceNorm1d | nn.InstanceNorm2d) and m.affine:
            m.weight.data.uniform_(0.5, 2)
            m.bias.requires_grad_(shift)
    x, y = sample(shape, 3, K, DOUBLE)
    check_everything(PerSample(model, K=K)(x, y), *reference.per_sample(model, x, y, K), tolerance=1e-9)
    for i, ((A, G), exact) in enumerate(zip(KFAC(model, x, labels="exact").factors(), reference.fisher(model, x),
                                            strict=True)):
        if isinstance(trainable_layers(model)[i].module, nn.InstanceNorm1d | nn.InstanceNorm2d):
            torch.testing.assert_close(reference.block_diagonal(A, G), exact)


# -- embeddings --------------------------------------------------------------------------------------------------------

V, D, L = 7, 4, 5


class Text(nn.Module):
    """Tokens (n, L) -> classes: the mean of the embeddings, or something that tells positions apart."""

    def __init__(self, padding_idx=None, length=L):
        super().__init__()
        self.emb, self.fc = nn.Embedding(V, D, padding_idx=padding_idx), nn.Linear(D * length, CLASSES)

    def forward(self, x):
        return self.fc(torch.tanh(self.emb(x)).flatten(1))


def tokens(n, length=L, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(V, (n, length), generator=g), torch.randint(CLASSES, (n,), generator=g)


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_embedding(K, padding):
    model = seeded(lambda: Text(padding)).to(DOUBLE)
    x, y = tokens(3 * K)
    x[0] = 2  # one token only: positions add up
    ours = PerSample(model, K=K)(x, y[:3])
    assert isinstance(ours.layers[0], Rows)
    check_everything(ours, *reference.per_sample(model, x, y[:3], K), tolerance=1e-9)
    torch.testing.assert_close(ours.layers[0].double().materialise(), ours.layers[0].materialise())
    empty = PerSample(model, K=K)(x[:0], y[:0])
    assert len(empty) == 0
    assert empty.losses.dtype == DOUBLE


@pytest.mark.parametrize("padding", [None, 3])
def test_embedding_curvature(padding):
    """Exact for one token; A is diagonal with the tokens' frequencies; `moments` is what follows from `columns`."""
    model = seeded(lambda: Text(padding, length=1)).to(DOUBLE)
    A, G = KFAC(model, tokens(1, 1)[0], labels="exact").factors()[0]
    torch.testing.assert_close(reference.block_diagonal(A, G), reference.fisher(model, tokens(1, 1)[0])[0])

    model = seeded(lambda: Text(padding)).to(DOUBLE)
    x, _ = tokens(20)
    A, G = KFAC(model, x, labels="exact", micro_batch=6).factors()[0]
    counts = torch.tensor([0 if v == padding else int((x == v).sum()) for v in range(V)]).to(DOUBLE) / 20
    torch.testing.assert_close(A[0], counts.diag())
    (layer, _), d = trainable_layers(model), torch.randn(20, L, D, dtype=DOUBLE)
    torch.testing.assert_close(layer.moments(x, d, True), Layer.moments(layer, x, d, True))
    torch.testing.assert_close(layer.gradient(x, d, 4).materialise(), Layer.gradient(layer, x, d, 4).materialise())


@pytest.mark.parametrize("clamps", [0.3, 0.8])
def test_whitened_norms_of_an_embedding(clamps):
    model = seeded(lambda: Text(1)).to(DOUBLE)
    x, y = tokens(4)
    kfac = KFAC(model, tokens(30, seed=1)[0], labels="exact")
    curvature, factors = kfac(), kfac.factors()
    floor = float(torch.cat([F.spectrum().flatten() for F in curvature]).quantile(clamps))
    geometry = Kronecker()
    geometry.set(curvature, floor, DOUBLE)
    norms, _ = geometry.sq_norms(PerSample(model)(x, y))
    gradients, _ = reference.per_sample(model, x, y)
    exact = sum((g.flatten(1) @ reference.kfac_power(A, G, floor, -0.5)).square().sum(1)
                for g, (A, G) in zip(gradients, factors, strict=True))
    torch.testing.assert_close(norms[0], exact, rtol=1e-9, atol=0)


def test_the_padding_row_never_moves():
    """Neither by a gradient that Opacus gives it, nor by noise."""
    (layer, _) = trainable_layers(Text(padding_idx=3))
    joined = layer.join(torch.ones(2, V, D))
    assert isinstance(joined, Dense)
    assert joined.materialise().shape == (2, 1, D, V)
    assert joined.materialise()[..., 3].abs().sum() == 0
    assert joined.materialise().sum() == 2 * (V - 1) * D
    table = layer.split(torch.ones(1, D, V))["emb.weight"]
    assert table.shape == (V, D)
    assert table[3].abs().sum() == 0
    assert table.sum() == (V - 1) * D


def test_a_diagonal_factor_needs_no_eigensolver():
    A = torch.tensor([[0.5, 0, 2.0, 0]]).diag_embed()
    G = torch.eye(2).unsqueeze(0)
    F = LayerCurvature.of(A, G)
    torch.testing.assert_close(F.lambda_A, torch.tensor([[2.0, 0.5, 0, 0]], dtype=DOUBLE))
    torch.testing.assert_close(F.Q_A * F.lambda_A.unsqueeze(1) @ F.Q_A.mT, A.double(), rtol=0, atol=0)
    torch.testing.assert_close(F.Q_A.mT @ F.Q_A, torch.eye(4, dtype=DOUBLE).unsqueeze(0), rtol=0, atol=0)


class Positions(Text):
    """The embedding is given positions without a batch."""

    def forward(self, x):
        return self.fc((self.emb(torch.arange(L)) * x.unsqueeze(-1)).flatten(1))


def test_a_layer_that_does_not_see_the_batch_is_refused():
    with pytest.raises(UsageError, match=r"layer 'emb' gives 5 rows for a batch of 9.*expanded to \(batch, time\)"):
        PerSample(Positions())(*tokens(4))


# -- attention ---------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """A classifier of sequences, from Opacus's attention."""

    def __init__(self, add_bias_kv=False):
        super().__init__()
        self.emb, self.pos = nn.Embedding(V, D), nn.Embedding(L, D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = DPMultiheadAttention(D, 2, batch_first=True, add_bias_kv=add_bias_kv)
        self.up, self.down, self.head = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.emb(x) + self.pos(torch.arange(x.shape[1]).expand_as(x))
        z = self.norm1(h)
        h = h + self.attention(z, z, z, need_weights=False)[0]
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        return self.head(h.mean(1))


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("add_bias_kv", [False, True])
def test_a_transformer(K, add_bias_kv):
    model = seeded(lambda: Transformer(add_bias_kv)).to(DOUBLE)
    x, y = tokens(3 * K)
    check_everything(PerSample(model, K=K)(x, y[:3]), *reference.per_sample(model, x, y[:3], K), tolerance=1e-9)
    factors = KFAC(model, x, labels="exact").factors()
    exact = reference.fisher(model, x)
    rows = [i for i, layer in enumerate(trainable_layers(model))
            if isinstance(layer.module, SequenceBias | nn.LayerNorm)]
    assert len(rows) == 2 + 2 * add_bias_kv
    for i in rows:
        torch.testing.assert_close(reference.block_diagonal(*factors[i]), exact[i])


class Appended(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.bias, self.fc = SequenceBias(D, batch_first=batch_first), nn.Linear(D * (L + 1), CLASSES)

    def forward(self, x):
        h = self.bias(x if self.bias.batch_first else x.transpose(0, 1))
        return self.fc(torch.tanh(h if self.bias.batch_first else h.transpose(0, 1)).flatten(1))


@pytest.mark.parametrize("batch_first", [False, True])
def test_sequence_bias_in_both_orders(batch_first):
    model = seeded(lambda: Appended(batch_first)).to(DOUBLE)
    x, y = sample((L, D), 4, 2, DOUBLE)
    check_everything(PerSample(model, K=2)(x, y), *reference.per_sample(model, x, y, 2), tolerance=1e-9)

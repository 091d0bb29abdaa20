"""K-FAC against the brute-force Fisher matrix where it is exact, its scale where it is not; labels; errors."""

import pytest
import reference
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn

from dpngd import curvature
from dpngd.curvature import IMAGES_AT_ONCE, KFAC, LayerCurvature, images_at_once
from dpngd.errors import UsageError
from dpngd.geometry import ClampedLayer, Kronecker
from dpngd.layers import Dense
from dpngd.layers.conv import Conv2dLayer
from dpngd.noise import stream
from dpngd.training import models

CLASSES = 4


def seeded(*layers, dtype=torch.float64):
    model = nn.Sequential(*layers).to(dtype)
    g = stream(0, "weights")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=dtype) * (0.5 if p.dim() == 1 else p[0].numel() ** -0.5))
    return model


def images(n, *shape, dtype=torch.float64):
    return torch.randn(n, *shape, generator=stream(0, "images"), dtype=dtype)


def dense(factors):
    return [reference.block_diagonal(A, G) for A, G in factors]


def close(ours, exact, rtol=1e-9):
    assert len(ours) == len(exact)
    for M, E in zip(ours, exact, strict=True):
        torch.testing.assert_close(M, E, rtol=rtol, atol=rtol * float(E.abs().max()))
        assert E.abs().max() > 0


# ------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_and_one_sample_are_exact(bias):
    """With one input a the Fisher block is a a' (x) E[d d'], whatever lies above the layer."""
    model = seeded(nn.Linear(5, 6, bias), nn.Tanh(), nn.Linear(6, 3, bias), nn.Tanh(), nn.Linear(3, CLASSES, bias))
    x = images(1, 5)
    close(dense(KFAC(model, x, labels="exact").factors()), reference.fisher(model, x))


def test_convolution_with_one_output_position_and_one_sample_is_exact():
    model = seeded(nn.Conv2d(3, 5, 3, padding=(0, 1), stride=4), nn.Tanh(), nn.Conv2d(5, 4, 1), nn.Tanh(), nn.Flatten(),
                   nn.Linear(4, CLASSES))
    x = images(1, 3, 3, 3)
    close(dense(KFAC(model, x, labels="exact").factors()), reference.fisher(model, x))


def test_a_convolution_with_many_positions_is_exact_where_it_must_be():
    """Pins powers of the positions: the image has one pixel, and average pooling gives every position the same d. So
    g = a d', S positions or not, while A sums over positions and G averages."""
    model = seeded(nn.Conv2d(3, 5, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, CLASSES))
    x = torch.zeros(1, 3, 4, 6, dtype=torch.float64)
    x[0, :, 2, 3] = images(3)
    close(dense(KFAC(model, x, labels="exact").factors()), reference.fisher(model, x))


def test_time_steps_count_as_positions_do():
    """The same for a linear layer over time."""
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    model = seeded(nn.Linear(3, 5, bias=False), Mean(), nn.Linear(5, CLASSES))
    x = torch.zeros(1, 7, 3, dtype=torch.float64)
    x[0, 4] = images(3)
    close(dense(KFAC(model, x, labels="exact").factors()), reference.fisher(model, x))


def test_groups_of_a_convolution_are_blocks_of_their_own():
    model = seeded(nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(6, CLASSES))
    x = images(1, 4, 3, 3)
    (A, G), _ = KFAC(model, x, labels="exact").factors()
    assert A.shape == (2, 19, 19)
    assert G.shape == (2, 3, 3)
    exact = reference.fisher(model, x)[0]
    half = len(exact) // 2
    close([torch.kron(G[0], A[0]), torch.kron(G[1], A[1])], [exact[:half, :half], exact[half:, half:]])


@pytest.mark.parametrize("labels", ["exact", "given"])
def test_norm_layers_are_exact_on_any_number_of_images(labels):
    """Their gradient is one row, so A = E[g g'] and G = 1 leave nothing to approximate."""
    model = seeded(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.LayerNorm(16, bias=False),
                   nn.Linear(16, CLASSES))
    x = images(7, 3, 4, 4)
    y = torch.randint(CLASSES, (7,), generator=stream(0, "labels"))
    given = {"y": y} if labels == "given" else {}
    ours = dense(KFAC(model, x, labels=labels, micro_batch=3, **given).factors())
    exact = reference.fisher(model, x, y[:, None] if given else None)
    close([ours[1], ours[2]], [exact[1], exact[2]])


# ------------------------------------------------------------------------------------------------------- scale


def test_scale_on_a_conv_net():
    """tr(A) tr(G) against the trace of the exact Fisher block, on a net where K-FAC only approximates.

    With A or G off by the number of positions S (or by that of the images), the ratio below moves by that factor. Being
    within sqrt(S) on both sides is therefore what tells the right power of S from its neighbours; n > S, so of n too.
    """
    model = seeded(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.Tanh(),
                   nn.Conv2d(12, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(54, CLASSES))
    n = 100
    x = images(n, 3, 8, 8) + images(n, 3, 1, 1)
    factors = KFAC(model, x, labels="exact").factors()
    exact = [float(E.trace()) for E in reference.fisher(model, x)]
    positions = [64, None, 16, 9, 1]  # None: a norm layer, exact
    for (A, G), trace, S in zip(factors, exact, positions, strict=True):
        ratio = float(torch.einsum("rii->", A) * torch.einsum("roo->", G)) / trace
        if S is None:
            assert ratio == pytest.approx(1, rel=1e-9)
        else:
            bound = max(S, 2) ** 0.5
            assert 1 / bound < ratio < bound, (ratio, S)


def patches(conv, x):
    """(R, n*positions, I): what each output position sees, by the convolution itself with unit weights."""
    C = conv.in_channels // conv.groups
    I = C * conv.kernel_size[0] * conv.kernel_size[1]
    probe = nn.Conv2d(C, I, conv.kernel_size, conv.stride, conv.padding, conv.dilation, 1, False, conv.padding_mode)
    probe.weight.data = torch.eye(I, dtype=x.dtype).view(I, C, *conv.kernel_size)
    with torch.no_grad():
        return torch.stack([probe(part).transpose(0, 1).flatten(1).mT for part in x.split(C, 1)])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("conv", [
    (4, 6, 3, 2, 1), (4, 6, (3, 2), 1, "same", 1, 2), (4, 6, 3, 1, 2, 2, 1, False),
    (4, 4, 3, 1, 1, 1, 4, True, "circular"),
    (4, 6, (2, 3), (1, 2), (1, 0), 1, 1, True, "reflect"), (4, 6, 1, 2), (4, 6, 3, 1, "valid"),
], ids=str)  # fmt: skip
def test_input_factor_of_every_kind_of_convolution(conv):
    """A = E[sum_t a_t a_t'] with a 1 appended, G = E[mean_t d_t d_t'], from patches and d found independently."""
    conv = nn.Conv2d(*conv)
    x = images(5, 4, 6, 5)
    out = conv(torch.zeros(1, 4, 6, 5)).flatten(1).shape[1]
    model = seeded(conv, nn.Tanh(), nn.Flatten(), nn.Linear(out, CLASSES))
    y = torch.randint(CLASSES, (5,), generator=stream(0, "labels"))
    (A, G), _ = KFAC(model, x, labels="given", y=y, micro_batch=2).factors()
    a = patches(conv, x)
    if conv.bias is not None:
        a = F.pad(a, (0, 1), value=1.0)
    z = conv(x).detach().requires_grad_()
    d, = torch.autograd.grad(F.cross_entropy(model[1:](z), y, reduction="sum"), z)
    d = d.unflatten(1, (conv.groups, -1)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)  # (R, n*S, O)
    torch.testing.assert_close(A, a.mT @ a / 5)
    torch.testing.assert_close(G, d.mT @ d / len(d[0]))


@pytest.mark.parametrize(("name", "images"), [("small", 125), ("wrn-10-1", 125), ("resnet-20", 89), ("wrn-16-4", 28)])
def test_images_per_pass_follow_the_size_of_the_network(name, images):
    """The small network and WRN-10-1 keep the 125 of the recorded runs, whose rounding depends on it."""
    model = models.build(name, classes=10)
    kfac = KFAC(model, torch.zeros(500, 3, 32, 32), generator=stream(0, "labels"))
    assert images_at_once(model, kfac.layers, kfac.x, IMAGES_AT_ONCE) == images


def test_the_micro_batch_does_not_matter():
    model = seeded(nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES))
    x = images(7, 2, 3, 3)
    whole = KFAC(model, x, labels="exact").factors()
    for size in (1, 3, 7):
        for ours, expected in zip(KFAC(model, x, labels="exact", micro_batch=size).factors(), whole, strict=True):
            torch.testing.assert_close(ours, expected)


# ------------------------------------------------------------------------------------------------------ labels


@pytest.mark.parametrize("labels", ["sampled", "random"])
def test_drawn_labels_tend_to_their_expectation(labels):
    """One image many times over: the mean over M draws is within 5 standard errors of sum_c w_c (p - e_c)(p - e_c)',
    with w = p for labels drawn from the model and uniform for random ones; the other w is far outside."""
    model = seeded(nn.Linear(3, CLASSES))
    M = 20_000
    x = images(1, 3)
    (A, G), = KFAC(model, x.expand(M, 3), labels=labels, generator=stream(1, "labels"), micro_batch=5000).factors()
    with torch.no_grad():
        p = model(x).softmax(1)[0]
    outcomes = torch.stack([torch.outer(v, v) for v in p - torch.eye(CLASSES, dtype=p.dtype)])
    weights = {"sampled": p, "random": torch.full_like(p, 1 / CLASSES)}

    def errors(w):
        mean = torch.einsum("c,cij->ij", w, outcomes)
        variance = torch.einsum("c,cij->ij", w, outcomes**2) - mean**2
        return ((G[0] - mean).abs() / (variance / M).sqrt()).max()

    assert errors(weights.pop(labels)) < 5
    (other,) = weights.values()
    assert errors(other) > 20
    a = F.pad(x[0], (0, 1), value=1.0)
    torch.testing.assert_close(A[0], torch.outer(a, a))


def test_given_labels():
    model = seeded(nn.Linear(3, CLASSES))
    x, y = images(1, 3), torch.tensor([2])
    close(dense(KFAC(model, x, labels="given", y=y).factors()), reference.fisher(model, x, y[:, None]))


def test_draws_come_from_the_generator_alone():
    model = seeded(nn.Linear(3, CLASSES))
    x = images(50, 3)
    state, grad_mode = torch.get_rng_state(), torch.is_grad_enabled()

    def G(seed):
        return KFAC(model, x, generator=stream(seed, "labels")).factors()[0][1]

    assert torch.equal(G(0), G(0))
    assert not torch.equal(G(0), G(1))
    kfac = KFAC(model, x, generator=stream(0, "labels"))
    assert not torch.equal(kfac.factors()[0][1], kfac.factors()[0][1])  # a refresh draws labels of its own
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == grad_mode
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.spare, self.head = nn.Conv2d(1, 2, 1, groups=1), nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(x)


def test_a_layer_without_effect_has_no_curvature():
    (A, G), (A_head, _) = KFAC(Spare(), images(2, 3, dtype=torch.float32), labels="exact").factors()
    assert A.shape == (1, 2, 2)
    assert G.shape == (1, 2, 2)
    assert not A.any()
    assert not G.any()
    assert A_head.any()


# ------------------------------------------------------------------------------------------ eigendecomposition


def test_eigendecomposition_is_of_the_factors_largest_first():
    model = seeded(nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, CLASSES))
    kfac = KFAC(model, images(6, 4, 3, 3), labels="exact")
    for F_l, (A, G) in zip(kfac(), kfac.factors(), strict=True):
        for values, Q, M in ((F_l.lambda_A, F_l.Q_A, A), (F_l.lambda_G, F_l.Q_G, G)):
            torch.testing.assert_close((Q * values.unsqueeze(-2)) @ Q.mT, M)
            assert (values.diff(dim=-1) <= 0).all()
            assert (values >= 0).all()
            assert values.dtype == torch.float64
        assert F_l.spectrum().shape == (len(A), G.shape[1], A.shape[1])
        expected = torch.linalg.eigvalsh(reference.block_diagonal(A, G)).clamp(min=0)
        spectrum = F_l.spectrum().flatten().sort()[0]
        torch.testing.assert_close(spectrum, expected, rtol=1e-9, atol=1e-12 * float(expected.max()))
        torch.testing.assert_close(F_l.scaled(3.0).spectrum(), 3 * F_l.spectrum())


def test_rounding_below_zero_counts_as_zero():
    a = torch.tensor([[1.0, 1e4]])
    A = (a.mT @ a - 1e-3 * torch.eye(2))[None]
    assert LayerCurvature.of(A, torch.eye(1)[None]).lambda_A.min() == 0


# ------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(("arguments", "says"), [
    ({"labels": "sample"}, "unknown Fisher labels 'sample': did you mean 'sampled'"),
    ({"labels": "exact", "x": torch.zeros(0, 3)}, "public set is empty"),
    ({"labels": "given"}, "labels='given' and y belong together"),
    ({"labels": "exact", "y": torch.tensor([0, 1])}, "labels='given' and y belong together"),
    ({"labels": "sampled"}, "labels='sampled' draws labels: pass a generator"),
    ({"labels": "random"}, "labels='random' draws labels: pass a generator"),
    ({"labels": "given", "y": torch.tensor([0, CLASSES])}, "a public label is 4, but the model has 4 classes"),
    ({"labels": "given", "y": torch.tensor([-1, 0])}, "a public label is -1, but the model has 4 classes"),
    ({"labels": "given", "y": torch.tensor([0, 1, 2])}, "3 public labels for 2 images"),
])
def test_errors(arguments, says):
    x = arguments.pop("x", torch.zeros(2, 3))
    with pytest.raises(UsageError) as error:
        KFAC(nn.Linear(3, CLASSES), x, **arguments).factors()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_only_classifiers_have_this_fisher():
    with pytest.raises(UsageError, match=r"output has shape \(2, 5, 4\)"):
        KFAC(nn.Linear(3, CLASSES), torch.zeros(2, 5, 3), labels="exact").factors()


def test_refuses_what_gradients_refuse():
    with pytest.raises(UsageError, match="BatchNorm"):
        KFAC(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, CLASSES)), torch.zeros(2, 3), labels="exact")


def test_eigenvectors_that_lapack_gives_up_on(monkeypatch):
    """Seen on inputs that are nearly all zero, a layer after dead units: one more try, moved by less than rounding."""
    a = torch.zeros(50, 40)
    a[:, :3] = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    M = (a.mT @ a / 50).unsqueeze(0)
    real, calls = torch.linalg.eigh, []

    def gives_up_once(matrix):
        calls.append(matrix)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("failed to converge")
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", gives_up_once)
    values, Q = curvature._eigh(M)
    assert len(calls) == 2
    torch.testing.assert_close(Q @ torch.diag_embed(values) @ Q.mT, M.double(), rtol=0, atol=1e-14)
    assert values.min() >= 0
    assert (values[0, 3:] < 1e-14 * values.max()).all()


@pytest.mark.parametrize("repeated", [False, True], ids=["independent images", "one image twice"])
def test_curvature_in_the_span_of_few_images(repeated):
    """A head with more inputs than images: the eigenvectors of zero are left out, and whitening does not change."""
    model = seeded(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, CLASSES))
    x = images(6, 40)
    x = torch.cat([x, x[:1]]) if repeated else x
    full, span = (KFAC(model, x, labels="exact", span=span)() for span in (False, True))
    for F_l, S_l, rank in zip(full, span, (6, 6), strict=True):
        assert S_l.Q_A.shape[1:] == (F_l.Q_A.shape[1], rank)
        torch.testing.assert_close(S_l.lambda_A, F_l.lambda_A[:, :rank], rtol=1e-9, atol=0)
        torch.testing.assert_close(S_l.spectrum(), F_l.spectrum(), rtol=1e-9, atol=1e-12)
        u = torch.randn(2, *F_l.spectrum().shape, generator=stream(0, "u"), dtype=torch.float64)
        for floor in (1e-1, 1e-3, 1e-6):
            exact, ours = (ClampedLayer.of(c, floor, "product", torch.float64) for c in (F_l, S_l))
            assert not ours.whole
            for power in (-0.5, -1.0):
                torch.testing.assert_close(ours.apply(u, power), exact.apply(u, power), rtol=1e-8, atol=1e-8)
                torch.testing.assert_close(ours.sq_norms(Dense(u), power)[0], exact.sq_norms(Dense(u), power)[0])


def test_one_eigendecomposition_per_factor_and_refresh(monkeypatch):
    """A guard against slowness: each factor is decomposed once, the head's in the span of its few images."""
    sizes, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: sizes.append(M.shape[-1]) or eigh(M))
    model = seeded(nn.Conv2d(1, 2, 3), nn.GroupNorm(2, 2), nn.Flatten(), nn.Linear(32, CLASSES))
    KFAC(model, images(5, 1, 6, 6), labels="exact", span=True)()
    assert sorted(sizes) == sorted([10, 2, 4, 1, 5, CLASSES])


@pytest.mark.parametrize("least", [1e-4, 1e-2, 1.0, 1e6])
@pytest.mark.parametrize("subset", [2, 10**6], ids=["some by LAPACK", "all, then cut"])
def test_eigenvectors_that_no_floor_lifts_are_left_out(subset, least, monkeypatch):
    """What whitens, clips and measures the noise is the same for every floor that is not below `least`."""
    monkeypatch.setattr(curvature, "SUBSET", subset)
    model = seeded(nn.Conv2d(3, 4, 3, groups=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 6, 2, groups=2),
                   nn.Flatten(), nn.Linear(54, CLASSES))
    x = images(7, 3, 6, 6)
    full, cut = KFAC(model, x, labels="exact")(), KFAC(model, x, labels="exact", span=True, least=least)()
    for floor in (least, 3 * least):
        exact, ours = Kronecker(), Kronecker()
        exact.set(full, floor, torch.float64)
        ours.set(cut, floor, torch.float64)
        u = [torch.randn(F_l.spectrum().shape, generator=stream(0, "u"), dtype=torch.float64) for F_l in full]
        for a, b in zip(ours.back([u]), exact.back([u]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
        assert ours.noise_energy() == pytest.approx(exact.noise_energy(), rel=1e-8)
        assert ours.clamped_share() == exact.clamped_share()
    for F_l, S_l in zip(full, cut, strict=True):
        torch.testing.assert_close(S_l.traces(), F_l.spectrum().sum((1, 2)), rtol=1e-8, atol=1e-12)
        assert S_l.Q_A.shape[2] == int((F_l.lambda_A * F_l.lambda_G[:, :1].max() > least).sum(1).max())


def test_scipys_blas_has_one_thread_for_eigenvectors_and_its_own_number_afterwards(monkeypatch):
    """Its threads spin beside torch's; and their number would change the rounding of a run."""
    def threads():
        return [library["num_threads"] for library in curvature.scipys_blas().info()]

    before, during, eigh = threads(), [], scipy.linalg.eigh
    monkeypatch.setattr(scipy.linalg, "eigh", lambda *a, **k: during.append(threads()) or eigh(*a, **k))
    monkeypatch.setattr(curvature, "SUBSET", 2)
    model = seeded(nn.Flatten(), nn.Linear(9, CLASSES))
    KFAC(model, images(50, 1, 3, 3), labels="exact", span=True, least=1e-3)()
    assert during
    assert before
    assert all(n == 1 for now in during for n in now)
    assert threads() == before


def test_the_images_own_factor_is_computed_once(monkeypatch):
    """A of a layer that sees the public images does not change with the weights; of later layers it does."""
    calls, moments = [], Conv2dLayer.second_moment
    monkeypatch.setattr(Conv2dLayer, "second_moment", lambda self, *a: calls.append(self.name) or moments(self, *a))
    model = seeded(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, CLASSES))
    x = images(5, 3, 6, 6)
    kfac = KFAC(model, x, labels="exact", micro_batch=3)
    first = kfac.factors()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    again, fresh = kfac.factors(), KFAC(model, x, labels="exact", micro_batch=3).factors()
    for (A, G), (expected_A, expected_G) in zip(again, fresh, strict=True):
        assert torch.equal(A, expected_A)
        assert torch.equal(G, expected_G)
    assert torch.equal(first[0][0], again[0][0])
    assert calls == ["2", "0"] * 2 + ["2"] * 2 + ["2", "0"] * 2
    x.mul_(2)  # in place: what was kept is of other images
    torch.testing.assert_close(kfac.factors()[0][0], KFAC(model, x, labels="exact", micro_batch=3).factors()[0][0],
                               rtol=0, atol=0)


def test_the_largest_of_a_diagonal():
    """An embedding's A is diagonal, which has a short cut of its own."""
    values, vectors = curvature.largest(torch.diag(torch.tensor([0.5, 3.0, 0.0, 2.0])), 0.4)
    assert values.tolist() == [3.0, 2.0, 0.5]
    assert vectors.tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]

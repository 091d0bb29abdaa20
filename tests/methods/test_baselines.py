"""AdaDPS and GEP as geometries: their maps, the cases in which they are DP-SGD, GEP's basis."""

import itertools

import pytest
import torch
from method_settings import images, labels, network
from torch import nn

from dpngd.curvature import draw_labels, sampled_labels
from dpngd.errors import UsageError
from dpngd.geometry import Euclidean
from dpngd.gradients import PerSample, SampleGradients, micro_batches
from dpngd.layers.forms import Dense, Factors
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import gep
from dpngd.methods.adadps import Diagonal, second_moment
from dpngd.methods.gep import Subspace, basis_bytes, check_memory, flatten, principal_basis, shares, unflatten
from dpngd.noise import seeded_noise, stream

HUGE = 1e9


@pytest.fixture
def ps():
    return PerSample(network(), check=False)


def direction(ps, geometry, clips, sigma=0.0, n=12):
    mechanism = GaussianMechanism(clips, sigma, B=8)
    batches = micro_batches(ps, images(n, "private"), labels(n), 5)
    return flatten(mechanism.release(batches, geometry, ps.zeros(), seeded_noise(0)).direction)


def orthonormal(rows, columns, name):
    return torch.linalg.qr(torch.randn(rows, columns, generator=stream(0, name))).Q


def subspace(ps, ks):
    """A subspace with random bases of ks directions for parts of the vector."""
    geometry, d = Subspace(ps.zeros()), sum(z.numel() for z in ps.zeros())
    edges = [round(j * d / len(ks)) for j in range(len(ks) + 1)]
    bounds = list(itertools.pairwise(edges))
    sizes = [(hi - lo, min(k, hi - lo)) for (lo, hi), k in zip(bounds, ks, strict=True)]
    geometry.set(bounds, [orthonormal(n, k, f"basis{j}") for j, (n, k) in enumerate(sizes)])
    return geometry


def test_gep_with_a_full_basis_and_no_clipping_is_dp_sgd(ps):
    plain, full = direction(ps, Euclidean(), (HUGE,)), subspace(ps, (HUGE, HUGE, HUGE))
    torch.testing.assert_close(direction(ps, full, (HUGE, HUGE)), plain, rtol=1e-4, atol=1e-5)


def test_gep_with_a_full_basis_clips_as_dp_sgd_does(ps):
    """The residual is nothing, and a rotation keeps norms."""
    plain = direction(ps, Euclidean(), (0.3,))
    torch.testing.assert_close(direction(ps, subspace(ps, (HUGE,)), (0.3, 1e-6)), plain, rtol=1e-4, atol=1e-5)


def test_geps_noise_is_isotropic_in_the_subspace_and_in_the_whole(ps):
    """V e + r: within V the noise of both channels, outside that of the residual alone."""
    geometry = subspace(ps, (10,))
    (V,) = geometry.bases
    noise = _noise(geometry, 400, 2.0, 0.5)
    draws = torch.stack([flatten(geometry.back([[e], unflatten(r, ps.zeros())])) for e, r in noise])
    inside = draws @ V
    outside = draws - inside @ V.mT
    assert float(inside.square().mean()) == pytest.approx(2.0**2 + 0.5**2, rel=0.1)
    d, k = V.shape
    assert float(outside.square().sum(1).mean()) == pytest.approx(0.5**2 * (d - k), rel=0.1)


def _noise(geometry, n, e, r):
    g = stream(0, "channels")
    d, k = geometry.bases[0].shape
    return [(e * torch.randn(k, generator=g), r * torch.randn(d, generator=g)) for _ in range(n)]


def test_geps_norms_are_those_of_the_two_parts(ps):
    geometry = subspace(ps, (7, 9))
    (g,) = micro_batches(ps, images(12), labels(12))
    flat = g.materialise().double()
    inside = geometry.lift(geometry.embed(flat))
    exact = torch.stack([inside.square().sum(1), (flat - inside).square().sum(1)])
    torch.testing.assert_close(geometry.sq_norms(g)[0].double(), exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize("share", [0.2, 0.05, 0.02])
def test_geps_norms_hold_where_little_is_left_of_the_subtraction(ps, share):
    """||g||^2 - ||V'g||^2 in float32 would be off by some 1e-7 / share^2."""
    geometry, zeros = subspace(ps, (40,)), ps.zeros()
    random = torch.randn(50, sum(z.numel() for z in zeros), generator=stream(0, "near"), dtype=torch.float64)
    inside = geometry.lift(geometry.embed(random))
    outside = random - inside
    flat = inside / inside.norm(dim=1, keepdim=True) + share * outside / outside.norm(dim=1, keepdim=True)
    flat = (100 * flat).float()
    parts = flat.split([z.numel() for z in zeros], 1)
    g = SampleGradients([Dense(p.view(50, *z.shape)) for p, z in zip(parts, zeros, strict=True)], torch.zeros(50))
    residual = flat.double() - geometry.lift(geometry.embed(flat.double()))
    torch.testing.assert_close(geometry.sq_norms(g)[0][1].double(), residual.square().sum(1), rtol=1e-5, atol=0)


def test_a_gradient_that_lies_in_one_channel_is_summed_in_float64(ps):
    """The other channel's weight is huge: what float32 rounds off in the sum would be as large as C."""
    geometry, zeros = subspace(ps, (40,)), ps.zeros()
    flat = torch.cat([geometry.lift(torch.ones(1, 40)), torch.ones(1, sum(z.numel() for z in zeros))])
    parts = flat.split([z.numel() for z in zeros], 1)
    g = SampleGradients([Dense(p.view(2, *z.shape)) for p, z in zip(parts, zeros, strict=True)], torch.zeros(2))
    assert geometry.sq_norms(g)[1].tolist() == [True, False]


@pytest.mark.parametrize("make", [lambda zeros: diagonal(zeros), lambda zeros: subspace_of(zeros)])
def test_norms_and_sums_hold_where_positions_cancel(make):
    """A linear layer over 6 positions whose terms are 1e5 times what is left of them."""
    zeros = [torch.zeros(1, 7, 8)]
    geometry, rng = make(zeros), stream(0, "cancel")
    a = torch.randn(5, 3, 8, generator=rng).repeat(1, 2, 1)
    d = torch.randn(5, 3, 7, generator=rng)
    d = torch.cat([d, -d * (1 + 1e-5 * torch.randn(5, 3, 1, generator=rng))], 1)
    g = SampleGradients([Factors(a, d)], torch.zeros(5))
    flat = (d.double().mT @ a.double()).flatten(1)
    exact = [flatten(geometry.into([[row.view(1, 7, 8)]] * len(geometry.sq_norms(g)[0]))[0]).norm() for row in flat]
    squares, fragile = geometry.sq_norms(g)
    assert squares[0].sqrt().tolist() == pytest.approx([float(n) for n in exact], rel=1e-5)
    assert fragile.all()


def diagonal(zeros):
    geometry = Diagonal(1e-3)
    geometry.set([torch.rand(z.shape, generator=stream(0, "moments")) for z in zeros])
    return geometry


def subspace_of(zeros):
    geometry = Subspace(zeros)
    geometry.set([(0, 56)], [orthonormal(56, 20, "cancel")])
    return geometry


def test_adadps_with_a_constant_second_moment_is_dp_sgd_up_to_a_scalar(ps):
    """D = 1/a: clipping at C is DP-SGD's clipping at C/a, noise included."""
    geometry, v, e = Diagonal(0.5), 2.25, 0.5
    geometry.set([torch.full_like(z, v) for z in ps.zeros()])
    a = 1 / (v**0.5 + e)
    for sigma in (0.0, 1.0):
        ours, plain = direction(ps, geometry, (0.3,), sigma), direction(ps, Euclidean(), (0.3 / a,), sigma)
        torch.testing.assert_close(ours, a * plain, rtol=1e-4, atol=1e-6)


def test_second_moment_is_the_mean_square(ps):
    x, y = images(20, "public"), labels(20)
    flat = torch.cat([g.materialise() for g in micro_batches(ps, x, y)])
    torch.testing.assert_close(flatten(second_moment(ps, x, y)), flat.square().mean(0))


def test_directions_are_shared_out_by_the_roots_of_the_groups_and_capped():
    assert [k for *_, k in shares(3000, 500, 90)] == [30, 30, 30]
    assert [k for *_, k in shares(3000, 20, 1000)] == [20, 20, 20]  # no more than public samples
    assert [k for *_, k in shares(12, 500, 1000)] == [4, 4, 4]  # nor than parameters
    bounds = [(lo, hi) for lo, hi, _ in shares(100, 5, 9)]
    assert bounds == [(0, 33), (33, 67), (67, 100)]


def test_basis_is_orthonormal_and_spans_the_principal_directions(ps):
    x, y = images(20, "public"), labels(20)
    bounds, bases = principal_basis(ps, x, y, 15)
    G = torch.cat([g.materialise() for g in micro_batches(ps, x, y)])
    for (lo, hi), V in zip(bounds, bases, strict=True):
        torch.testing.assert_close(V.mT @ V, torch.eye(5), rtol=0, atol=1e-5)
        part = G[:, lo:hi]
        kept, best = (part @ V).square().sum(), torch.linalg.svdvals(part)[:5].square().sum()
        assert float(kept) == pytest.approx(float(best), rel=1e-3)  # no 5 directions hold more energy than these


def test_basis_is_orthonormal_even_for_equal_public_images(ps):
    """Gradients of rank 1: the rest of the basis is arbitrary, but must still be one."""
    x, y = images(1).expand(20, -1, -1, -1), labels(1).expand(20)
    for V in principal_basis(ps, x, y, 15)[1]:
        torch.testing.assert_close(V.mT @ V, torch.eye(5), rtol=0, atol=1e-5)


def test_a_basis_that_does_not_fit_is_an_error_before_it_is_made(monkeypatch):
    assert basis_bytes(2_751_562, 500, 1000) > 8 * 2**30
    free = type("Memory", (), {"available": 4 * 2**30})
    monkeypatch.setattr(gep.psutil, "virtual_memory", lambda: free)
    check_memory(24_000, 500, 300)
    with pytest.raises(UsageError, match=r"GEP's basis of 500 public gradients of 2,751,562 .* 4.0 GiB are free: take"):
        check_memory(2_751_562, 500, 1000)


def test_labels_are_drawn_from_the_model():
    logits = torch.tensor([[0.0, 1.0, -2.0]]).expand(20000, -1)
    drawn = draw_labels(logits, stream(0, "labels"))
    share = torch.bincount(drawn, minlength=3) / 20000
    torch.testing.assert_close(share, logits[0].softmax(0), rtol=0, atol=0.012)


def test_labels_do_not_depend_on_the_parts_and_a_nan_row_harms_no_other(ps):
    x = images(30, "public")
    whole = sampled_labels(ps.model, x, stream(0, "labels"))
    g = stream(0, "labels")
    assert torch.equal(whole, torch.cat([sampled_labels(ps.model, part, g) for part in x.split(7)]))
    x = x.clone()
    x[4] = float("nan")
    spoilt = sampled_labels(ps.model, x, stream(0, "labels"))
    assert torch.equal(spoilt[5:], whole[5:])
    assert 0 <= int(spoilt[4]) < 4


def test_blocks_survive_flattening():
    zeros = PerSample(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), check=False).zeros()
    flat = torch.arange(float(sum(z.numel() for z in zeros)))
    assert torch.equal(flatten(unflatten(flat, zeros)), flat)


@pytest.mark.parametrize("decay", [0.9, 0.97, 0.99])
def test_few_of_many_directions_are_those_of_the_full_decomposition(decay):
    g = torch.Generator().manual_seed(1)
    U, W = (torch.linalg.qr(torch.randn(rows, 300, generator=g)).Q for rows in (300, 900))
    G = (U * decay ** torch.arange(300)) @ W.mT
    few, every = gep.gram_vectors(G, 30), gep.gram_vectors(G, 300)[:, -30:]
    torch.testing.assert_close((few * every).sum(0).abs(), torch.ones(30), atol=1e-4, rtol=0)
    torch.testing.assert_close(few.mT @ few, torch.eye(30), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dependent", [False, True])
def test_a_basis_is_orthonormal_to_rounding(dependent):
    """Columns of very different lengths, nearly orthogonal (Cholesky), or one twice and one zero (QR)."""
    X = torch.linalg.qr(torch.randn(400, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    X = (X + 1e-2 * X[:, :1]) * torch.logspace(-6, 6, 12, dtype=torch.float64)
    if dependent:
        X[:, 3], X[:, 4] = X[:, 5], 0
    V = gep.orthonormal(X)
    torch.testing.assert_close(V.mT @ V, torch.eye(12, dtype=torch.float64), atol=1e-12, rtol=0)
    columns = X / X.norm(dim=0).clamp(min=1e-300)
    torch.testing.assert_close(V @ (V.mT @ columns), columns, atol=1e-10, rtol=0)  # they span what was given

"""Every method: its channels' sensitivity, its formula, its budget."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_settings import config, images, labels, method, network, setting
from reference import kfac_power, per_sample

from dpngd.curvature import KFAC, sampled_labels
from dpngd.errors import UsageError
from dpngd.gradients import PerSample, SampleGradients, micro_batches
from dpngd.layers.forms import Dense
from dpngd.methods import METHODS, arms, build, builder_of, spends_of
from dpngd.methods.gep import flatten
from dpngd.noise import seeded_noise, stream
from dpngd.privacy import composed

HUGE = 1e12
PUBLIC_ARMS = [m for m in METHODS if m.startswith("dp-ngd") and METHODS[m].rate and not METHODS[m].curvature_share]
NO_RATE = [m for m in METHODS if METHODS[m].kl_step and METHODS[m].second_order]
KINDS = ["plain", "zero", "nan", "inf", "duplicate", "1e-20", "1e3", "1e8", "1e18", "1e30"]
BATCHES = st.lists(st.sampled_from(KINDS), min_size=1, max_size=7)


def clips(name):
    c = config(name)
    if not METHODS[name].rate:  # C is found from public images: the test of that is below
        return prepared(name)[0].mechanism.clips
    return (c.C0, c.C1) if name == "gep" else (c.C,)


def dtype_of(name):
    """Without a floor float32's rounding is amplified a million times: its guarantee is one of exact arithmetic."""
    return torch.float64 if name == "dp-ngd-no-floor" else torch.float32


@functools.cache
def prepared(name):
    """The method with its geometry fixed at step 0."""
    model = network(dtype_of(name))
    m = method(name, model=model, draw=lambda: iter([(images(8, "private"), labels(8))]), dtype=dtype_of(name))
    m.prepare(0)
    return m, PerSample(model, check=False)


def moved(mechanism, geometry, zeros, gradients, without):
    """How far each channel moves in L2 norm when the samples in `without` are left out."""
    whole, rest = (mechanism.clipped_sums(g, geometry, zeros).sums for g in (gradients, without))
    return [float((flatten(a).double() - flatten(b).double()).norm()) for a, b in zip(whole, rest, strict=True)]


def adversarial(kinds, dtype):
    """Images of which some are huge, blank, not numbers, or the one before again."""
    x = images(len(kinds), "adversarial", dtype)
    for i, kind in enumerate(kinds):
        if kind == "duplicate":
            x[i] = x[i - 1]
        elif kind != "plain":
            x[i] *= 0.0 if kind == "zero" else float(kind)
    return x


@pytest.mark.parametrize("name", METHODS)
@given(kinds=BATCHES, removed=st.integers(0, 6), size=st.integers(1, 7))
def test_a_sample_moves_each_channel_by_at_most_its_sensitivity(name, kinds, removed, size):
    m, ps = prepared(name)
    assert m.mechanism.sensitivity == clips(name)
    n = len(kinds)
    x, y, keep = adversarial(kinds, dtype_of(name)), labels(n), torch.arange(n) != removed % n
    both = [micro_batches(ps, x[rows], y[rows], size) for rows in (torch.ones_like(keep), keep)]
    for distance, C in zip(moved(m.mechanism, m.geometry, ps.zeros(), *both), clips(name), strict=True):
        assert distance <= C


@functools.cache
def directions(name):
    """Unit gradients (rows) that lie as unluckily as they can: along the geometry's own axes, near them, anywhere."""
    m, ps = prepared(name)
    zeros = ps.zeros()
    d = sum(z.numel() for z in zeros)
    public = torch.cat([g.materialise() for g in micro_batches(ps, images(20, "public", zeros[0].dtype), labels(20))])
    g = stream(0, "directions")
    random = torch.randn(4, d, generator=g).to(zeros[0])
    rows = [random, public[:4], torch.eye(d)[[0, d // 2, d - 1]].to(zeros[0])]
    if name == "gep":
        inside = m.geometry.lift(m.geometry.embed(random.double()))
        outside = random.double() - inside
        rows += [(inside + t * outside).float() for t in (0, 1e-7, 1e-3, 0.02, 0.05)]
        rows += [(outside + t * inside).float() for t in (0, 1e-7, 1e-3, 0.02, 0.05)]
    if hasattr(m.geometry, "curvature"):
        ends = []
        for at in (0, -1):
            blocks = [torch.einsum("ro,ri->roi", F.Q_G[..., at], F.Q_A[..., at] if F.Q_A.shape[2] else  # all left out
                                   F.Q_A.new_ones(F.Q_A.shape[:2])) for F in m.geometry.curvature]
            ends.append(flatten(blocks).unsqueeze(0).to(zeros[0]))
        rows += [*ends, ends[0] + 1e-6 * ends[1]]
    rows = torch.cat(rows)
    return rows / rows.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("name", METHODS)
@given(picks=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([1e-30, 1e-6, 0.3, 5.0, 1e4, 1e12])), min_size=1,
                      max_size=6))
def test_gradients_along_the_geometrys_axes_are_clipped_too(name, picks):
    """Norms are computed by subtraction and in float32: here what is left of it is as little as possible."""
    m, ps = prepared(name)
    zeros, units = ps.zeros(), directions(name)
    flat = torch.stack([scale * units[i % len(units)] for i, scale in picks])

    def batch(rows):
        parts = rows.split([z.numel() for z in zeros], 1)
        layers = [Dense(part.view(len(rows), *z.shape)) for part, z in zip(parts, zeros, strict=True)]
        return iter([SampleGradients(layers, rows.new_zeros(len(rows)))])

    distances = moved(m.mechanism, m.geometry, zeros, batch(flat), batch(flat[:-1]))
    for distance, C in zip(distances, clips(name), strict=True):
        assert distance <= C


def update(name, x, y, **options):
    """What one step adds to the weights, flat, and the dense per-sample gradients it is made from."""
    model = network(torch.float64)
    s = setting(name, model=model, dtype=torch.float64, **options)
    m = build(s)
    m.prepare(0)
    batches = micro_batches(s.per_sample, x, y, 5)
    release = m.mechanism.release(batches, m.geometry, s.per_sample.zeros(), seeded_noise(0))
    g, _ = per_sample(network(torch.float64), x, y)
    return -s.config.eta * flatten(release.direction), torch.cat([part.flatten(1) for part in g], 1)


def dense_powers(name, powers, floor, clamp="product"):
    """F~^p over all parameters as dense matrices, from factors that KFAC's own tests are about."""
    model, kind = network(torch.float64), {"dp-ngd-labels-exact": "exact", "dp-ngd-labels-random": "random"}
    label = kind.get(name, "sampled")
    generator = None if label == "exact" else stream(3, "labels")
    factors = KFAC(model, images(20, "public", torch.float64), labels=label, generator=generator).factors()
    out = []
    for p in powers:
        if clamp == "factor":
            root = math.sqrt(floor)
            blocks = [torch.kron(power(G[0], root, p), power(A[0], root, p)) for A, G in factors]
        else:
            blocks = [kfac_power(A, G, floor, p) for A, G in factors]
        out.append(torch.block_diag(*blocks))
    return out


def power(M, floor, p):
    values, Q = torch.linalg.eigh(M)
    return (Q * values.clamp(min=floor) ** p) @ Q.mT


FLOORS = {"dp-ngd-no-floor": 1e-12}
POWERS = {"dp-ngd-pre": (0, -1), "dp-ngd-post": (-1, 0), "dp-ngd-one-sided": (-0.5, 0)}


@pytest.mark.parametrize("name", PUBLIC_ARMS)
@pytest.mark.parametrize("C", [HUGE, 0.7])
def test_update_of_dp_ngd_and_its_arms_is_their_formula(name, C):
    """-(eta/B) R sum_i clip_C(L g_i) with dense L and R: so pre, post and one-sided differ by their maps alone."""
    x, y = images(9, "private", torch.float64), labels(9)
    ours, g = update(name, x, y, C=C)
    left, right = POWERS.get(name, (-0.5, -0.5))
    clamp = "factor" if name == "dp-ngd-factor-clamp" else "product"
    L, R = dense_powers(name, (left, right), FLOORS.get(name, 0.2), clamp)
    whitened = g @ L
    c = (C * (1 - 1e-5) / whitened.norm(dim=1)).clamp(max=1)
    assert C == HUGE or (c < 1).any()
    exact = -(0.5 / 8) * R @ (c[:, None] * whitened).sum(0)
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


def dense_power(F, floor, p):
    """F~^p over all parameters from what was estimated."""
    blocks = []
    for layer in F:
        pairs = ((layer.lambda_A, layer.Q_A), (layer.lambda_G, layer.Q_G))
        A, G = ((Q[0] * values[0]) @ Q[0].mT for values, Q in pairs)
        blocks.append(kfac_power(A[None], G[None], floor, p))
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("ratio", [0.001, 0.9])
@pytest.mark.parametrize("name", NO_RATE)
def test_without_a_rate_floor_and_clip_are_those_of_the_public_images_and_the_release_is_the_formula(name, ratio):
    model, public = network(torch.float64), images(20, "public", torch.float64)
    s = setting(name, model=model, dtype=torch.float64, clip_ratio=ratio)
    m = build(s)
    m.prepare(0)
    F = m.geometry.curvature
    expected = KFAC(network(torch.float64), public, generator=stream(3, "labels"))()
    assert all(torch.equal(a.spectrum(), b.spectrum()) for a, b in zip(F, expected, strict=True))
    spectrum = torch.cat([layer.spectrum().flatten() for layer in F]).sort(descending=True).values
    whitening = METHODS[name].left
    floor = float(spectrum[int(0.02 * len(spectrum))]) if whitening else 1e-12
    assert m.geometry.lambda_t == pytest.approx(floor)
    L = dense_power(F, floor, whitening)
    y = sampled_labels(model, public, stream(3, "clip"))
    norms = (torch.cat([part.flatten(1) for part in per_sample(model, public, y)[0]], 1) @ L).norm(dim=1)
    C = ratio * float(norms.median())
    assert m.mechanism.clips == pytest.approx((C,), rel=1e-6)

    x, y = images(9, "private", torch.float64), labels(9)
    g = torch.cat([part.flatten(1) for part in per_sample(model, x, y)[0]], 1) @ L
    c = (C * (1 - 1e-5) / g.norm(dim=1)).clamp(max=1)
    assert (c < 1).all() if ratio < 0.01 else (c < 1).any()
    exact = dense_power(F, floor, METHODS[name].right) @ (c[:, None] * g).sum(0) / 8
    zeros = s.per_sample.zeros()
    release = m.mechanism.release(iter([s.per_sample(x, y)]), m.geometry, zeros, seeded_noise(0))
    torch.testing.assert_close(flatten(release.direction), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


def test_the_rate_follows_from_the_floor_by_rank_and_dp_sgds():
    """dp-ngd-auto is dp-ngd at the floor that F has at the start: the same release, and eta from the equation."""
    s = setting("dp-ngd-auto", dtype=torch.float64)
    m = build(s)
    F = KFAC(network(torch.float64), images(20, "public", torch.float64), generator=stream(3, "labels"))()
    spectrum = torch.cat([layer.spectrum().flatten() for layer in F]).sort(descending=True).values
    floor = float(spectrum[int(0.02 * len(spectrum))])
    eta = 0.5 * 1.1 * math.sqrt(floor) / 0.7  # eta_sgd C_sgd sqrt(lambda_safe) / C
    assert m.steps.eta == pytest.approx(eta, rel=1e-9)
    assert m.mechanism.clips == (0.7,)
    same = build(setting("dp-ngd", dtype=torch.float64, lambda_safe=floor, lambda_base=floor / 4, eta=eta))
    x, y = images(9, "private", torch.float64), labels(9)
    for t in range(4):
        m.prepare(t)
        same.prepare(t)
        assert m.geometry.lambda_t == pytest.approx(same.geometry.lambda_t)
        releases = [b.mechanism.release(iter([s.per_sample(x, y)]), b.geometry, s.per_sample.zeros(), seeded_noise(t))
                    for b in (m, same)]
        torch.testing.assert_close(*[flatten(r.direction) for r in releases])
    assert m.diagnose()["eta"] == m.steps.eta
    guarded = build(setting("dp-ngd-auto", kl_radius=0.1))
    assert guarded.steps.kl_radius == 0.1


@pytest.mark.parametrize("name", NO_RATE)
def test_the_noises_own_kl_is_half_its_variance_times_the_trace(name):
    """E[u' F u] / 2 for u = R xi sigma C / B, with F as estimated, and R from its clamped eigenvalues; dense."""
    m = method(name, sigma=1.5, dtype=torch.float64, model=network(torch.float64))
    for t in (0, 2):
        m.prepare(t)
        F = m.geometry.curvature
        R = dense_power(F, m.geometry.lambda_t, METHODS[name].right)
        trace = float((R @ dense_power(F, 1e-300, 1) @ R).trace())
        assert m.noise_kl() == pytest.approx((1.5 * m.mechanism.clips[0] / 8) ** 2 / 2 * trace, rel=1e-6)


def test_adadps_without_a_rate_is_the_formula_with_constants_of_the_public_images():
    """L = 1 / (sqrt(v) + e), R = I; e the root of v at the rank, C the median norm times the ratio; noise tr(F)."""
    model, public = network(torch.float64), images(20, "public", torch.float64)
    s = setting("adadps-kl", model=model, sigma=1.5, dtype=torch.float64, clip_ratio=0.9)
    m = build(s)
    drawn = stream(3, "labels")

    def rows(x, y):
        return torch.cat([part.flatten(1) for part in per_sample(model, x, y)[0]], 1)

    first, second = (rows(public, sampled_labels(model, public, drawn)).square().mean(0) for _ in range(2))
    e = first.sort(descending=True).values[int(0.02 * len(first))].sqrt()
    norms = (rows(public, sampled_labels(model, public, stream(3, "clip"))) / (first.sqrt() + e)).norm(dim=1)
    C = 0.9 * float(norms.median())
    assert m.mechanism.clips == pytest.approx((C,), rel=1e-6)
    m.prepare(0)
    torch.testing.assert_close(flatten(m.geometry.scale), 1 / (second.sqrt() + e))
    assert m.noise_kl() == pytest.approx((1.5 * C / 8) ** 2 / 2 * float(second.sum()), rel=1e-6)


def test_the_floor_falls_and_rises_with_t():
    m = method("dp-ngd")
    seen = []
    for t in range(4):
        m.prepare(t)
        seen.append(m.diagnose()["lambda_t"])
    assert seen == pytest.approx([0.2, 0.05, 0.05 + 0.15 / 9, 0.05 + 0.15 * 4 / 9])  # T1 = 1 step, p = 2, T = 4


def test_curvature_is_refreshed_every_T_cur_steps():
    s = setting("dp-ngd")
    m = build(s)
    seen = []
    for t in range(4):
        m.prepare(t)
        seen.append(m.geometry.curvature)  # replaced, never changed in place
        s.per_sample.add_([z + 0.01 for z in s.per_sample.zeros()])
    assert seen[0] is seen[1] is seen[2]
    assert not torch.equal(seen[2][0].spectrum(), seen[3][0].spectrum())


def test_update_of_dp_sgd_is_its_formula():
    x, y = images(9, "private", torch.float64), labels(9)
    for name in ("dp-sgd", "dp-sgd-pt"):
        for C in (HUGE, 0.3):
            ours, g = update(name, x, y, C=C)
            c = (C * (1 - 1e-5) / g.norm(dim=1)).clamp(max=1)
            torch.testing.assert_close(ours, -(0.5 / 8) * (c[:, None] * g).sum(0))


def test_update_of_adadps_is_its_formula():
    """g / (sqrt(E[g^2]) + e) with the public images' own labels y ~ p_theta, then clipped; not mapped back."""
    x, y = images(9, "private", torch.float64), labels(9)
    model, public = network(torch.float64), images(20, "public", torch.float64)
    drawn = sampled_labels(model, public, stream(3, "labels"))
    v = torch.cat([part.flatten(1) for part in per_sample(model, public, drawn)[0]], 1).square().mean(0)
    for C in (HUGE, 0.7):
        ours, g = update("adadps", x, y, C=C)
        scaled = g / (v.sqrt() + 1e-4)
        c = (C * (1 - 1e-5) / scaled.norm(dim=1)).clamp(max=1)
        torch.testing.assert_close(ours, -(0.5 / 8) * (c[:, None] * scaled).sum(0))


def test_update_of_gep_is_its_formula():
    """Embedding and residual of the principal subspaces of three thirds of the vector, each with its own clip."""
    x, y = images(9, "private", torch.float64), labels(9)
    model, public = network(torch.float64), images(20, "public", torch.float64)
    drawn = torch.randint(4, (20,), generator=stream(3, "labels"))
    G = torch.cat([part.flatten(1) for part in per_sample(model, public, drawn)[0]], 1)
    d = G.shape[1]
    edges = [0, round(d / 3), round(2 * d / 3), d]
    V = torch.block_diag(*[torch.linalg.svd(G[:, lo:hi], full_matrices=False).Vh[:4].mT
                           for lo, hi in itertools.pairwise(edges)])
    for C0, C1 in ((HUGE, HUGE), (0.9, 0.4)):
        ours, g = update("gep", x, y, C0=C0, C1=C1)
        e, r = g @ V, g - g @ V @ V.mT
        c0, c1 = ((C * (1 - 1e-5) / t.norm(dim=1)).clamp(max=1)[:, None] for C, t in ((C0, e), (C1, r)))
        exact = -(0.5 / 8) * (V @ (c0 * e).sum(0) + (c1 * r).sum(0))
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))
        if C0 == HUGE:  # nothing clipped: whatever the basis, both channels together are the gradient
            torch.testing.assert_close(ours, -(0.5 / 8) * g.sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", arms("private curvature"))
def test_private_curvature_takes_the_place_of_the_public_one(name):
    """Without noise and clips on the gradients, the update is F~^-1 g with the F that was released."""
    x, y = images(9, "private", torch.float64), labels(9)
    model = network(torch.float64)
    s = setting(name, model=model, dtype=torch.float64, C=HUGE, draw=lambda: iter([(x, y)]))
    s.public = None
    m = build(s)
    m.prepare(0)
    release = m.mechanism.release(iter([s.per_sample(x, y)]), m.geometry, s.per_sample.zeros(), seeded_noise(0))
    g = torch.cat([part.flatten(1) for part in per_sample(model, x, y)[0]], 1)
    inverse = []
    for F in m.geometry.curvature:
        A, G = ((Q[0] * values[0]) @ Q[0].mT for values, Q in ((F.lambda_A, F.Q_A), (F.lambda_G, F.Q_G)))
        inverse.append(kfac_power(A[None], G[None], 0.2, -1))
    exact = torch.block_diag(*inverse) @ g.sum(0) / 8
    torch.testing.assert_close(flatten(release.direction), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("name", METHODS)
def test_noise_is_sigma_times_each_sensitivity_and_sqrt_2_larger_for_two_channels(name):
    m = method(name, sigma=1.5, draw=lambda: iter([]))
    root = math.sqrt(len(clips(name)))
    assert m.mechanism.noise_std == pytest.approx([1.5 * root * C for C in clips(name)])


@pytest.mark.parametrize("name", METHODS)
def test_budget_is_spent_to_the_last_hundredth(name):
    c = config(name, T=30, T_cur=4) if "T_cur" in METHODS[name].uses else config(name, T=30)
    spends = spends_of(c, 0.05, 160)
    assert sum(s.epsilon for s in spends) == pytest.approx(2.0)
    assert sum(s.epsilon for s in spends) <= 2.0
    assert sum(s.delta for s in spends) <= 1e-5
    assert 2.0 - 0.001 <= composed(spends, 0.05, 30, 1e-5) <= 2.0
    purposes = ["gradients", "curvature"] if METHODS[name].curvature_share else ["gradients"]
    assert [s.purpose for s in spends] == purposes


def test_private_arms_pay_their_share_for_a_release_every_T_cur_steps():
    for name in arms("private curvature"):
        share = METHODS[name].curvature_share
        gradients, curvature = spends_of(config(name, T=30, T_cur=4), 0.05, 160)
        assert (gradients.releases(30), curvature.releases(30), curvature.releases(9)) == (30, 8, 3)
        assert curvature.epsilon == pytest.approx(share * 2.0)
        assert gradients.sigma > spends_of(config("dp-ngd", T=30, T_cur=4), 0.05, 160)[0].sigma


def test_impossible_budgets_are_errors():
    with pytest.raises(UsageError, match=r"delta=0.01 must be below 1/N"):
        spends_of(config("dp-sgd", delta=0.01), 0.05, 160)
    with pytest.raises(UsageError, match="must be at most 200"):
        spends_of(config("dp-sgd", epsilon=1e6), 0.05, 160)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_builder_that_states_its_guarantee(name):
    text = builder_of(METHODS[name]).__doc__
    assert "Guarantee: " in text
    assert "sensitivity" in text


def test_methods_look_at_the_private_batch_only_through_the_mechanism():
    """A public method never draws a batch of its own."""
    def draw():
        raise AssertionError("drew a private batch")

    for name in METHODS:
        m = method(name, draw=draw)
        if METHODS[name].curvature_share:
            with pytest.raises(AssertionError, match="drew"):
                m.prepare(0)
        else:
            m.prepare(0)

"""The paper's claims, on the code that trains: Theorem 1, KL-DP duality, the safety bound, the schedule, the limits.

Monte Carlo tolerances are 5 standard errors of the M draws behind them, from the exact variances: for a mean
sqrt(S_ii / M), for a covariance sqrt((S_ii S_jj + S_ij^2) / M), for a mean square from its own spread.
"""

import itertools
import math

import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpngd import clamping
from dpngd.clamping import DynamicFloor, FixedFloor, NoFloor
from dpngd.curvature import KFAC, LayerCurvature
from dpngd.errors import UsageError
from dpngd.geometry import Euclidean, Kronecker
from dpngd.gradients import PerSample, SampleGradients
from dpngd.layers.forms import Dense
from dpngd.mechanism import GaussianMechanism
from dpngd.methods import METHODS
from dpngd.noise import seeded_noise, stream
from dpngd.suite import theory
from dpngd.suite.profiles import load

CLASSES = 3


def flat(blocks):
    return torch.cat([u.double().flatten() for u in blocks])


@pytest.fixture(scope="module")
def setting():
    """A small network in float64, a private batch, its gradients by torch.func, K-FAC's F on public images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 2, 2), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(),
                              nn.Linear(8, CLASSES)).double()
    g = stream(0, "theory")
    x = torch.randn(5, 2, 3, 3, generator=g, dtype=torch.float64)
    y = torch.randint(CLASSES, (5,), generator=g)
    kfac = KFAC(model, torch.randn(20, 2, 3, 3, generator=g, dtype=torch.float64), labels="exact")
    persample = PerSample(model)
    gradients = torch.cat([e.flatten(1) for e in reference.per_sample(model, x, y)[0]], 1)
    dense = torch.block_diag(*[reference.block_diagonal(A, G) for A, G in kfac.factors()])
    return persample(x, y), persample.zeros(), kfac(), dense, gradients


def dp_ngd(curvature, floor):
    geometry = Kronecker()
    geometry.set(curvature, floor, torch.float64)
    return geometry


# -------------------------------------------------------------------------------------------------- Theorem 1


def test_theorem_1(setting):
    """E[update] = -eta/B sum_i c_i F~^-1 g_i and Cov(update) = (eta sigma C / B)^2 F~^-1, by M draws of the noise."""
    batch, zeros, curvature, dense, gradients = setting
    eta, C, sigma, B, M = 0.7, 6.0, 0.9, 4.0, 4000
    floor = float(torch.linalg.eigvalsh(dense).median())
    geometry, mechanism, noise = dp_ngd(curvature, floor), GaussianMechanism((C,), sigma, B), seeded_noise(0)
    updates = -eta * torch.stack([flat(mechanism.release([batch], geometry, zeros, noise).direction) for _ in range(M)])

    inverse, root = reference.power(dense, floor, -1), reference.power(dense, floor, -0.5)
    norms = (gradients @ root).norm(dim=1)
    assert norms.min() < C < norms.max()  # some samples are clipped, some are not
    mean = -eta / B * ((C / norms).clamp(max=1.0)[:, None] * (gradients @ inverse)).sum(0)
    covariance = (eta * sigma * C / B) ** 2 * inverse

    spread = covariance.diagonal().sqrt()
    slack = 2e-5 * mean.norm()  # the mechanism clips to C (1 - 1e-5)
    assert ((updates.mean(0) - mean).abs() <= 5 * spread / math.sqrt(M) + slack).all()
    error = ((covariance**2 + torch.outer(spread, spread) ** 2) / M).sqrt()
    assert ((updates.mT.cov() - covariance).abs() <= 5 * error).all()
    # The test resolves what it claims: the covariances of DP-SGD and of F^-2 are far outside.
    for wrong in (torch.eye(len(inverse), dtype=inverse.dtype), inverse @ inverse):
        wrong = wrong * (eta * sigma * C / B) ** 2
        assert ((updates.mT.cov() - wrong).abs() > 20 * error).any()


def test_the_whitened_norm_is_the_mahalanobis_norm(setting):
    """||F~^-1/2 g|| = sqrt(g' F~^-1 g)."""
    batch, _, curvature, dense, gradients = setting
    norms = dp_ngd(curvature, 1e-3).sq_norms(batch)[0][0].sqrt()
    inverse = reference.power(dense, 1e-3, -1)
    torch.testing.assert_close(norms, torch.einsum("bi,ij,bj->b", gradients, inverse, gradients).sqrt())


# ------------------------------------------------------------------------------------------------ KL-DP duality


@pytest.mark.parametrize("C", [0.5, 1e6])
def test_duality_of_clipping_and_kl(setting, C):
    """One sample's step d has d' F~ d / 2 = eta^2 ||g_bar||^2 / 2 <= eta^2 C^2 / 2, with equality if clipped."""
    batch, zeros, curvature, dense, gradients = setting
    eta, floor = 0.3, 1e-3
    geometry, mechanism = dp_ngd(curvature, floor), GaussianMechanism((C,), 0.0, 1.0)
    clamped = reference.power(dense, floor, 1)
    root = reference.power(dense, floor, -0.5)
    for i in range(len(batch)):
        one = batch.select(torch.tensor([i]))
        step = -eta * flat(mechanism.release([one], geometry, zeros, seeded_noise(0)).direction)
        quadratic = float(step @ clamped @ step) / 2
        norm = min(C, float((root @ gradients[i]).norm()))
        assert quadratic == pytest.approx(eta**2 * norm**2 / 2, rel=5e-5)
        assert quadratic <= eta**2 * C**2 / 2


def test_true_kl_of_a_softmax_model_stays_within_the_trust_region():
    """KL(P_theta || P_theta+step) on the input where F was measured: a third-order error away from eta^2 C^2 / 2.

    For one input and exact labels K-FAC is the Fisher matrix, and the gradient of that input lies in its range, so the
    bound is met with equality as eta -> 0 when the sample is clipped.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(4, CLASSES).double()
    x = torch.randn(1, 4, generator=stream(0, "x"), dtype=torch.float64)
    persample, curvature = PerSample(model), KFAC(model, x, labels="exact")()
    batch, C = persample(x, torch.tensor([1])), 0.5
    geometry = dp_ngd(curvature, 1e-6)
    assert geometry.sq_norms(batch)[0].sqrt() > C
    mechanism = GaussianMechanism((C,), 0.0, 1.0)
    direction = mechanism.release([batch], geometry, persample.zeros(), seeded_noise(0)).direction
    log_p = F.log_softmax(model(x).detach(), 1)
    excess = []
    for eta in (0.1, 0.01, 0.001):
        moved = persample.to_params([-eta * u for u in direction])
        log_q = F.log_softmax(F.linear(x, model.weight + moved["weight"], model.bias + moved["bias"]).detach(), 1)
        kl = float((log_p.exp() * (log_p - log_q)).sum())
        excess.append(kl / (eta**2 * C**2 / 2) - 1)
        assert abs(excess[-1]) < 2 * eta + 5e-5
    assert abs(excess[0]) > abs(excess[1])


# ------------------------------------------------------------------------------------------------- lambda_safe


def expected_square(curvature, batch, zeros, floor, eta, C, sigma, B, M=400):
    """(mean, standard error) of ||update||^2 over M draws."""
    geometry, mechanism, noise = dp_ngd(curvature, floor), GaussianMechanism((C,), sigma, B), seeded_noise(0)
    squares = torch.stack([(eta * flat(mechanism.release([batch], geometry, zeros, noise).direction)).square().sum()
                           for _ in range(M)])
    return float(squares.mean()), float(squares.std()) / math.sqrt(M)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3], ids=["flat", "as measured", "steep"])
def test_steps_at_lambda_safe_are_no_longer_than_dp_sgds_bound(setting, scale):
    """E||update||^2 <= eta_sgd^2 C_sgd^2 (1 + d sigma^2 / B^2) at the floor lambda_safe, however flat the curvature;
    met within the noise when all of it lies at the floor, and broken by a floor four times lower."""
    batch, zeros, curvature, _, gradients = setting
    curvature = [layer.scaled(scale) for layer in curvature]
    eta_sgd, C_sgd, C_ngd, sigma, lam = 0.5, 0.4, 1.5, 0.8, 0.25
    B, d = float(len(batch)), gradients.shape[1]  # as many samples as expected: their clipped mean is at most C
    eta = clamping.eta_ngd(lam, C_ngd, eta_sgd, C_sgd)
    assert clamping.lambda_safe(eta, C_ngd, eta_sgd, C_sgd) == pytest.approx(lam)
    bound = eta_sgd**2 * C_sgd**2 * (1 + d * sigma**2 / B**2)
    mean, error = expected_square(curvature, batch, zeros, lam, eta, C_ngd, sigma, B)
    assert mean <= bound + 5 * error
    if scale == 1e-6:
        same = batch.select(torch.zeros(len(batch), dtype=torch.long))  # one direction: the clipped mean has length C
        mean, error = expected_square(curvature, same, zeros, lam, eta, 0.01, sigma, B)
        bound_small = bound * (0.01 / C_ngd) ** 2
        assert abs(mean - bound_small) <= 5 * error
        mean, error = expected_square(curvature, batch, zeros, lam / 4, eta, C_ngd, sigma, B)
        assert mean > bound + 5 * error


@pytest.mark.parametrize("arguments", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, math.nan, 1), (1, 1, 1, math.inf)])
def test_lambda_safe_needs_positive_numbers(arguments):
    with pytest.raises(UsageError, match="must be a positive number"):
        clamping.lambda_safe(*arguments)


# ---------------------------------------------------------------------------------------------------- schedule

positive = st.floats(1e-6, 1e3)


@given(base=positive, factor=st.floats(1, 1e4), T=st.integers(1, 5000), T1=st.floats(0.01, 0.9), p=st.floats(1, 20),
       fractions=st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_schedule(base, factor, T, T1, p, fractions):
    """lambda_safe at 0, lambda_base at T_1, lambda_safe at T; falling, then rising; linear, then a power."""
    safe = base * factor
    schedule = DynamicFloor(safe, base, T, T1, p)
    T_1 = T1 * T
    assert schedule(0) == pytest.approx(safe)
    assert schedule(T_1) == pytest.approx(base)
    assert schedule(T_1 * (1 - 1e-12)) == pytest.approx(base, abs=1e-9 * safe)  # no jump
    assert schedule(T) == pytest.approx(safe)
    assert schedule(T_1 / 4) == pytest.approx(safe - (safe - base) / 4)
    assert schedule((T_1 + T) / 2) == pytest.approx(base + (safe - base) * 0.5**p)
    down, up = ([schedule(a + (b - a) * f) for f in sorted(fractions)] for a, b in ((0, T_1 * (1 - 1e-9)), (T_1, T)))
    rounding = 1e-12 * safe
    assert all(a >= b - rounding for a, b in itertools.pairwise(down))
    assert all(a <= b + rounding for a, b in itertools.pairwise(up))
    assert all(base - rounding <= value <= safe + rounding for value in down + up)


def test_the_plateau_lies_near_lambda_base():
    """p = 10: at the middle of training the floor is within 1 % of lambda_base (of the drop)."""
    schedule = DynamicFloor(1.0, 0.25, 100)
    assert schedule(50) - 0.25 < 0.01 * 0.75
    assert schedule(90) > 0.4


@pytest.mark.parametrize(("arguments", "says"), [
    ((1.0, 2.0, 10), "lambda_base 2 is above lambda_safe 1"), ((0.0, 0.0, 10), "lambda_safe is 0.0"),
    ((1.0, -1.0, 10), "lambda_base is -1.0"), ((1.0, 0.5, 0), "T >= 1"), ((1.0, 0.5, 10, 0.0), "0 < T1 < 1"),
    ((1.0, 0.5, 10, 1.0), "0 < T1 < 1"), ((1.0, 0.5, 10, 0.1, 0.5), "p >= 1"),
    ((math.nan, 0.5, 10), "lambda_safe is nan"),
])
def test_schedules_that_are_refused(arguments, says):
    with pytest.raises(UsageError) as error:
        DynamicFloor(*arguments)
    assert says in str(error.value)


def test_fixed_floor():
    assert [FixedFloor(0.3)(t) for t in (0, 5, 1e6)] == [0.3] * 3
    with pytest.raises(UsageError, match="lambda_safe is -1"):
        FixedFloor(-1.0)


# ------------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(("sigma", "limit"), [(0.0, 1e-12), (0.7, 2**-19)])
def test_dp_ngd_becomes_dp_sgd_as_the_floor_grows(setting, sigma, limit):
    """With eta_ngd C_ngd = eta_sgd C_sgd sqrt(lambda) and C_ngd sqrt(lambda) = C_sgd, the steps differ while some
    eigenvalue lies above the floor, and are the same once none does, given the same noise, to the grid of the release
    (2^-20 of the noise's standard deviation at most)."""
    batch, zeros, curvature, dense, gradients = setting
    eta_sgd, B = 0.5, 4.0
    C_sgd = float(gradients.norm(dim=1).median())  # some samples are clipped, some are not
    sgd = GaussianMechanism((C_sgd,), sigma, B).release([batch], Euclidean(), zeros, seeded_noise(0))
    largest = float(torch.linalg.eigvalsh(dense).max())
    distances = []
    for lam in (largest * 1e-4, largest * 1e-2, largest * 1.001, largest * 1e4, largest * 1e12):
        C_ngd = C_sgd / math.sqrt(lam)
        eta = clamping.eta_ngd(lam, C_ngd, eta_sgd, C_sgd)
        mechanism = GaussianMechanism((C_ngd,), sigma, B)
        ngd = mechanism.release([batch], dp_ngd(curvature, lam), zeros, seeded_noise(0))
        difference = eta * flat(ngd.direction) - eta_sgd * flat(sgd.direction)
        distances.append(float(difference.norm() / (eta_sgd * flat(sgd.direction)).norm()))
    assert distances[0] > distances[1] > 1e-3
    assert max(distances[2:]) < limit


@pytest.mark.parametrize(("sigma", "steps"), [(0.0, 1e-12), (1.0, 2**-20)])
def test_with_every_sample_clipped_the_two_clips_are_free(setting, sigma, steps):
    """eta_ngd C_ngd = eta_sgd C_sgd sqrt(lambda) alone is enough then: only the direction of a sample matters."""
    batch, zeros, curvature, dense, _ = setting
    eta_sgd, C_sgd, C_ngd, lam = 0.5, 1e-3, 1e-5, 2 * float(torch.linalg.eigvalsh(dense).max())
    sgd = GaussianMechanism((C_sgd,), sigma, 4.0).release([batch], Euclidean(), zeros, seeded_noise(0))
    ngd = GaussianMechanism((C_ngd,), sigma, 4.0).release([batch], dp_ngd(curvature, lam), zeros, seeded_noise(0))
    assert sgd.clipped == ngd.clipped == 1.0
    eta = clamping.eta_ngd(lam, C_ngd, eta_sgd, C_sgd)
    grid = eta_sgd * C_sgd / 4.0 * steps  # one step of the grid in each of the two releases, at most
    torch.testing.assert_close(eta * flat(ngd.direction), eta_sgd * flat(sgd.direction), rtol=1e-9, atol=grid)


def test_no_floor_is_the_unclamped_curvature():
    """Full-rank curvature is used as it is at every step; what has no curvature counts as `tiny`, and stays finite."""
    g = stream(0, "full rank")
    a, d = (torch.randn(30, n, generator=g, dtype=torch.float64) for n in (4, 3))
    A, G = (a.mT @ a / 30)[None], (d.mT @ d / 30)[None]
    floor = NoFloor()(0)
    assert floor == NoFloor()(10**6) == 1e-12
    u = torch.randn(5, 1, 3, 4, generator=g)
    geometry = Kronecker()
    geometry.set([LayerCurvature.of(A, G)], floor)
    dense = torch.kron(G[0], A[0])
    exact = torch.linalg.solve(dense, u.double().flatten(1).mT).mT
    norms = geometry.sq_norms(SampleGradients([Dense(u)], torch.zeros(5)))[0][0].double()
    torch.testing.assert_close(norms, (u.double().flatten(1) * exact).sum(1), rtol=1e-5, atol=0)
    assert geometry.clamped_share() == 0
    geometry.set([LayerCurvature.of(0 * A, G)], floor)
    norms = geometry.sq_norms(SampleGradients([Dense(u)], torch.zeros(5)))[0][0].double()
    torch.testing.assert_close(norms, u.double().flatten(1).square().sum(1) * 1e12, rtol=1e-5, atol=0)
    assert geometry.clamped_share() == 1


def test_the_noise_of_every_cell_and_method_is_known_before_a_run():
    """Also of methods that find their clipping threshold when they start."""
    profile = load("quick")
    rows = theory.privacy_rows(profile, epsilons=[4], seeds=[0])
    assert {r["method"]: r["S"] is None for r in rows} == {
        m: METHODS[m].kl_step for m in profile.artifact("utility_table")["methods"]}
    assert len({r["sigma"] for r in rows}) == 1, "at one T, all methods have one noise"

"""How far to go: a KL budget is met, never exceeded by half, capped by the noise, and depends on public things."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpngd import steps
from dpngd.clamping import DynamicFloor, dynamic_floor, floor_by_rank
from dpngd.curvature import KFAC, LayerCurvature
from dpngd.errors import UsageError
from dpngd.geometry import Kronecker
from dpngd.gradients import PerSample
from dpngd.mechanism import GaussianMechanism
from dpngd.noise import seeded_noise, stream
from dpngd.steps import KLBudget, Probe, Rate, Step, search
from dpngd.training import models


def network(seed=0):
    return models.build("small", classes=10, in_channels=1, size=8, generator=stream(seed, "weights"))


def images(n=32, name="probe"):
    return torch.randn(n, 1, 8, 8, generator=stream(n, name))


def direction(model, name="direction", scale=1.0):
    g = stream(0, name)
    return {k: scale * torch.randn(p.shape, generator=g) for k, p in model.named_parameters()}


@torch.no_grad()
def moved_kl(model, d, s, x):
    """KL(p_theta || p_{theta - s d}) by the definition, on a copy that was really moved."""
    other = copy.deepcopy(model)
    for name, p in other.named_parameters():
        p -= s * d[name]
    p, q = model(x).double().softmax(1), other(x).double().softmax(1)
    return float((p * (p / q).log()).sum(1).mean())


def move(model, d, s):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p -= s * d[name]


# ---- The floor by rank ----------------------------------------------------------------------------------------------

@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4),
       st.floats(0.001, 0.999))
def test_floor_by_rank_is_that_of_the_dense_matrix(shapes, share):
    """Brute force: eigenvalues of the block-diagonal Kronecker products themselves."""
    g = stream(len(shapes), "factors")
    factors = []
    for R, O, I in shapes:
        a, d = torch.randn(R, I, I + 1, generator=g).double(), torch.randn(R, O, O + 1, generator=g).double()
        factors.append((a @ a.mT, d @ d.mT))
    found = floor_by_rank([LayerCurvature.of(A, G) for A, G in factors], share)
    dense = torch.block_diag(*[torch.kron(G[r], A[r]) for A, G in factors for r in range(len(A))])
    values = torch.linalg.eigvalsh(dense).flip(0)
    assert found == pytest.approx(float(values[min(max(1, int(share * len(values))), len(values) - 1)]), rel=1e-6)
    assert int((values > found * (1 + 1e-9)).sum()) <= max(1, share * len(values))


def test_floor_by_rank_on_a_network_leaves_three_in_a_thousand_above():
    F = KFAC(network(), images(64), generator=stream(0, "labels"))()
    floor, spectrum = floor_by_rank(F), torch.cat([layer.spectrum().flatten() for layer in F])
    assert int((spectrum > floor).sum()) == int(0.003 * len(spectrum)) > 50
    assert floor_by_rank([layer.scaled(7.0) for layer in F]) == pytest.approx(7 * floor)
    auto = dynamic_floor("auto", 40, curvature=lambda: F)
    assert auto == DynamicFloor(floor, floor / 4, 40)


@pytest.mark.parametrize(("value", "message"), [("aut", "lambda_safe is 'aut': it must be a positive number, or 'auto"),
                                                (0.0, "lambda_safe is 0.0"), (float("nan"), "lambda_safe is nan")])
def test_a_floor_is_a_number_or_auto(value, message):
    with pytest.raises(UsageError, match=message):
        dynamic_floor(value, 10, curvature=lambda: pytest.fail("the curvature is not needed to see this"))


# ---- The search -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kappa", [1e-4, 0.025, 0.25])
def test_every_step_meets_kappa_on_a_real_network(kappa, scale):
    """Ten steps along directions of any scale: KL within 20 %, as measured on weights that were moved."""
    model, x = network(), images()
    rule = KLBudget(10 * kappa, 10, Probe(model, x), K_noise=None)
    assert rule.kappa == pytest.approx(kappa)
    for t in range(10):
        d = direction(model, f"d{t}", scale)
        step = rule(d)
        assert step.passes <= 3 + (t == 0)
        kl = moved_kl(model, d, step.s, x)
        assert step.kl == pytest.approx(kl, rel=1e-3, abs=1e-9)
        assert 0.8 * kappa <= kl <= 1.2 * kappa
        move(model, d, step.s)


@given(st.lists(st.floats(-6, 6), min_size=2, max_size=4), st.sampled_from([1e-4, 0.05, 1.0]))
def test_no_step_is_longer_than_one_and_a_half_kappa(scales, kappa):
    """Directions whose scale jumps by up to 12 orders of magnitude: three passes may not suffice, but never exceed."""
    model, x = network(), images(16)
    rule = KLBudget(kappa, 1, Probe(model, x), K_noise=None)
    for t, power in enumerate(scales):
        d = direction(model, f"d{t}", 10.0**power)
        step = rule(d)
        assert step.passes <= 3 + (t == 0)
        assert moved_kl(model, d, step.s, x) <= 1.5 * kappa
        assert rule.start > 0


@given(st.floats(0.3, 4.0), st.floats(-4, 4), st.floats(1e-3, 1e3))
def test_search_on_any_power_of_s(power, start, scale):
    """KL = (s / scale)^power: the sqrt rule is exact at 2; elsewhere what is returned is close or is too short."""
    kappa = 0.1
    step = search(lambda s: (s / scale) ** power, 10.0**start, kappa)
    if power >= 1:  # convex, as the fallback assumes
        assert (step.s / scale) ** power <= 1.5 * kappa * (1 + 1e-9)
    if not math.isnan(step.kl):
        assert step.kl <= 1.5 * kappa


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 3.0])
def test_search_finds_kappa_from_ten_times_too_long_or_short(power):
    for start in (0.1, 0.5, 2.0, 10.0):
        step = search(lambda s: 0.1 * s**power, start, 0.1)
        assert step.kl == pytest.approx(0.1, rel=0.2)
        assert step.passes <= (2 if power == 2 else 3)


def test_search_scales_down_untested_and_never_up():
    seen = []
    step = search(lambda s: seen.append(s) or 1e-6, 1.0, 0.1)
    assert seen == [1.0, 10.0, 100.0]
    assert step.s == 100.0, "too short a step is taken as it was tried"
    step = search(lambda s: 4.0, 1.0, 1.0)  # whatever is tried, it is too long
    assert step.s == pytest.approx(0.5 * 0.25 * 0.25)
    assert math.isnan(step.kl)
    assert search(lambda s: math.inf, 1.0, 1.0).s == 0


def test_predictions_that_overflow_are_no_step():
    model, x = network(), images()
    rule = KLBudget(1.0, 10, Probe(model, x), K_noise=None)
    rule.load_state_dict({"s": 1e38})
    d = direction(model, scale=1e3)
    step = rule(d)
    assert moved_kl(model, d, step.s, x) <= 0.15
    assert rule.start < 1e37
    with pytest.raises(FloatingPointError, match="the release is not finite"):
        rule({k: v * math.inf for k, v in d.items()})


def test_the_noise_caps_the_step():
    model, x = network(), images()
    rule, free = KLBudget(1.0, 10, Probe(model, x), K_noise=0.3), KLBudget(1.0, 10, Probe(model, x), K_noise=None)
    d = direction(model)
    loose = rule(d, lambda: 1e-9)
    assert loose.s == pytest.approx(free(d).s)
    noise = 2 * 0.03 / loose.s**2  # twice what is allowed at that s
    tight = rule(d, lambda: noise)
    assert tight.s == pytest.approx(loose.s / math.sqrt(2))
    assert tight.s**2 * noise == pytest.approx(0.3 / 10)
    assert tight.kl < loose.kl
    assert rule(d, lambda: 0.0).s > tight.s
    with pytest.raises(UsageError, match="pass K_noise=None"):
        rule(d)


def test_the_noises_kl_is_what_noise_does_to_predictions():
    """noise(s) against the KL that drawn noise really causes, mean over draws, at a small s; F from the same images.

    K-FAC leaves out how layers act together, so this is a check of units and powers, not of digits.
    """
    model, x = network(), images(64)
    ps, geometry = PerSample(model), Kronecker()
    F = KFAC(model, x, labels="exact")()
    geometry.set(F, floor_by_rank(F))
    mechanism = GaussianMechanism((0.5,), 2.0, B=50)
    probe, noise, s = Probe(model, x), seeded_noise(0), 0.02
    zero = [z.unsqueeze(0)[0] for z in ps.zeros()]
    drawn = []
    for _ in range(20):
        d = [block / mechanism.B for block in geometry.back(mechanism.add_noise([zero], noise))]
        drawn.append(probe.along(ps.to_params(d))(s))
    told = s**2 * (mechanism.noise_std[0] / mechanism.B) ** 2 / 2 * geometry.noise_energy()
    assert 0.5 < sum(drawn) / len(drawn) / told < 2


def test_a_direction_of_zeros_goes_nowhere_and_changes_nothing():
    model = network()
    rule = KLBudget(1.0, 10, Probe(model, images()), K_noise=None)
    s = rule(direction(model)).s
    assert rule(direction(model, scale=0.0)) == Step(s, 0.0)
    assert rule.start == s
    assert KLBudget(1.0, 10, Probe(model, images()), K_noise=None)(direction(model, scale=0.0)).s == 0


# ---- What it depends on ---------------------------------------------------------------------------------------------

def test_s_depends_on_the_release_and_on_public_things_only():
    """Two private sets, one release: the same s, bit for bit. The rule is given nothing that could tell them apart."""
    lengths = []
    for private in ("one", "two"):
        model = network()
        ps = PerSample(model)
        ps(images(8, private), torch.arange(8))  # what private gradients leave behind must not matter
        rule = KLBudget(1.0, 10, Probe(model, images()), K_noise=3.0)
        lengths.append([rule(direction(model, f"d{t}"), lambda: 1e-3) for t in range(3)])
    assert lengths[0] == lengths[1]


def test_measuring_leaves_the_model_as_it_was_and_ignores_dropout():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.5), nn.ReLU(), nn.Linear(20, 10))
    model[2].eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    rule = KLBudget(1.0, 10, Probe(model, images()), K_noise=None)
    model.train()
    model[3].eval()
    first = rule(direction(model))
    again = KLBudget(1.0, 10, Probe(model, images()), K_noise=None)(direction(model))
    assert first == again
    assert [m.training for m in model] == [True, True, True, False, True]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


def test_a_saved_rule_goes_on_from_its_last_step():
    model, x = network(), images()
    whole, parts = (KLBudget(1.0, 10, Probe(model, x), K_noise=None) for _ in range(2))
    whole(direction(model, "a"))
    parts(direction(model, "a"))
    other = KLBudget(1.0, 10, Probe(model, x), K_noise=None)
    other.load_state_dict(parts.state_dict())
    assert other(direction(model, "b")) == whole(direction(model, "b"))
    with pytest.raises(UsageError, match="s of a saved KL budget is -1"):
        other.load_state_dict({"s": -1.0})
    Rate(0.1).load_state_dict(Rate(0.1).state_dict())


# ---- A rate, and its guard ------------------------------------------------------------------------------------------

def test_a_rate_is_a_rate():
    rate = Rate(0.3)
    assert rate({}).s == 0.3
    assert rate.diagnose() == {}


@pytest.mark.parametrize("factor", [0.1, 0.9, 3.0, 1e3])
def test_a_guard_shortens_only_what_is_too_long(factor):
    model, x = network(), images()
    d, probe = direction(model), Probe(model, x)
    right = KLBudget(0.1, 1, probe, K_noise=None)(d).s
    step = Rate(factor * right, kl_radius=0.1, probe=probe)(d)
    assert step.s <= factor * right
    assert moved_kl(model, d, step.s, x) <= 1.5 * 0.1
    if factor < 0.9:
        assert step.s == factor * right
        assert step.passes == 1
    if factor == 3.0:
        assert 0.8 * 0.1 <= step.kl <= 1.2 * 0.1


# ---- Bad input ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("make", "message"), [
    (lambda m, p: KLBudget(0.0, 10, p()), "the KL budget K is 0.0: it must be a positive number"),
    (lambda m, p: KLBudget(-1, 10, p()), "the KL budget K is -1"),
    (lambda m, p: KLBudget(float("nan"), 10, p()), "the KL budget K is nan"),
    (lambda m, p: KLBudget("10", 10, p()), "the KL budget K is '10'"),
    (lambda m, p: KLBudget(10, 10, p(), K_noise=0), "the noise's KL budget K_noise is 0"),
    (lambda m, p: KLBudget(10, 0, p()), "T is 0: a KL budget is divided among T >= 1 steps"),
    (lambda m, p: KLBudget(10, 2.5, p()), "T is 2.5"),
    (lambda m, p: Probe(m, images(15)), "the probe has 15 images: .* at least 16"),
    (lambda m, p: Probe(m, torch.zeros(16, 3, 8, 8)), r"public images of shape \(3, 8, 8\) do not fit the model"),
    (lambda m, p: Probe(nn.Conv2d(1, 2, 3), images()), r"has shape \(2, 2, 6, 6\): .* needs \(images, classes\)"),
    (lambda m, p: Rate(0.0), "eta is 0.0"),
    (lambda m, p: Rate(0.1, kl_radius=0.1), "kl_radius needs a probe"),
    (lambda m, p: Rate(0.1, kl_radius=-1.0, probe=p()), "kl_radius is -1.0"),
])
def test_bad_input_is_one_line_at_construction(make, message):
    model = network()
    with pytest.raises(UsageError, match=message) as caught:
        make(model, lambda: Probe(model, images()))
    assert "\n" not in str(caught.value)


def test_the_constants_are_those_of_the_documentation():
    assert (steps.PASSES, steps.WITHIN, steps.MOST, steps.PROBE, steps.SMALLEST_PROBE) == (3, 0.2, 1.5, 128, 16)

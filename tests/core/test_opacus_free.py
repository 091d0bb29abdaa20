"""DPNGD with nothing to tune: made images, the floor by rank, a KL budget; and the guard for those who keep a rate."""

import copy
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpngd import images as made
from dpngd.clamping import floor_by_rank
from dpngd.curvature import KFAC, SteepKFAC
from dpngd.errors import UsageError
from dpngd.natural import FALL
from dpngd.noise import stream
from dpngd.opacus import DPNGD

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus warns about itself in many places
N, B, SHAPE = 64, 16, (1, 8, 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
                         nn.Linear(8 * 4, 5))


DATA = TensorDataset(torch.randn(N, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 5)
X, Y = DATA[:B]


def private(lr=0.5, sigma=1.0, C=1.0, inside=torch.optim.SGD, **options):
    model = network()
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=inside(model.parameters(), lr=lr, **options),
        data_loader=DataLoader(DATA, batch_size=B), noise_multiplier=sigma, max_grad_norm=C,
        noise_generator=torch.Generator().manual_seed(7))
    return engine, model, optimizer, loader


def free(T=6, shape=SHAPE, **settings):
    """(model, optimizer) of the one line that a DP-SGD program changes."""
    inside = {k: settings.pop(k) for k in ("lr", "sigma", "C", "inside", "momentum", "weight_decay") if k in settings}
    _, model, optimizer, _ = private(**inside)
    return model, DPNGD(optimizer, model, T=T, shape=shape, **settings)


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@torch.no_grad()
def kl(model, before, x):
    p, q = before(x).double().softmax(1), model(x).double().softmax(1)
    return float((p * (p / q).log()).sum(1).mean())


def test_the_rate_has_no_effect():
    ends = []
    for lr in (0.1, 1.0, 10.0):
        model, optimizer = free(lr=lr)
        for _ in range(3):
            step(model, optimizer)
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], flat(network()))


def test_make_privates_clip_has_no_effect_either_unless_it_is_kept():
    ends = []
    for C, ratio in ((0.1, 0.05), (5.0, 0.05), (0.1, None), (5.0, None)):
        model, optimizer = free(C=C, clip_ratio=ratio)
        assert (optimizer.max_grad_norm == C) == (ratio is None)
        step(model, optimizer)
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[2], ends[3])


def test_every_step_is_kappa_on_the_probe_and_capped_by_the_noise():
    """On images made afresh: what the optimizer measures is what a user would."""
    model, optimizer = free(kl_budget=0.6, kl_noise=None, probe=64)
    probe = made.standardised("noise", 64, SHAPE)
    for _ in range(6):
        before = copy.deepcopy(model._module)
        step(model, optimizer)
        assert 0.8 * 0.1 <= kl(model._module, before, probe) <= 1.2 * 0.1
    model, optimizer = free(kl_budget=0.6, kl_noise=1e-4)
    step(model, optimizer)
    s = optimizer.steps.last.s
    assert s**2 * optimizer._noise_kl() == pytest.approx(1e-4 / 6)
    assert optimizer.steps.last.kl < 0.8 * 0.1


def test_the_noises_kl_is_in_the_units_of_the_step():
    """With F whitened in units of lambda_safe: sigma and C enter squared, B by its inverse."""
    energies = {}
    for sigma, C in ((1.0, 1.0), (3.0, 1.0), (1.0, 2.0)):
        _, optimizer = free(sigma=sigma, C=C, clip_ratio=None)
        optimizer.natural.prepare(0)
        energies[sigma, C] = optimizer._noise_kl()
        spectrum = torch.cat([f.spectrum().flatten() for f in optimizer.natural.F]) * optimizer.floor.lambda_safe
        lam = optimizer.floor.lambda_safe
        expected = (sigma * C / B) ** 2 / 2 * lam * float((spectrum / spectrum.clamp(min=lam)).sum())
        assert energies[sigma, C] == pytest.approx(expected)


@pytest.mark.parametrize("public", [None, "noise", "dead-leaves", "photos"])
def test_public_images_are_made_for_the_shape(public):
    model, optimizer = free(public=public)
    assert optimizer.kfac.x.shape == (250, *SHAPE)
    assert torch.equal(optimizer.kfac.x, made.standardised(public or "noise", 250, SHAPE))
    assert abs(float(optimizer.kfac.x.mean())) < 0.5
    assert 0.4 < float(optimizer.kfac.x.std()) < 1.6
    step(model, optimizer)


def test_the_floor_is_found_by_rank_and_c_from_the_median_norm():
    _, optimizer = free()
    F0 = KFAC(network(), made.standardised("noise", 250, SHAPE), generator=stream(0, "labels"))()
    assert optimizer.floor.lambda_safe == pytest.approx(floor_by_rank(F0), rel=1e-6)
    assert optimizer.floor.lambda_base == optimizer.floor.lambda_safe / 4
    assert free(clip_ratio=0.5)[1].max_grad_norm == pytest.approx(10 * optimizer.max_grad_norm)


def grown(**settings):
    """The share of directions above the floor before and after the head's weights, and with them F, have grown."""
    model, optimizer = free(T_cur=1, **settings)
    shares = []
    for scale in (1, 30):
        with torch.no_grad():
            optimizer.layers[-1].module.weight.mul_(scale)
        step(model, optimizer)
        spectrum = torch.cat([f.spectrum().flatten() for f in optimizer.natural.F])
        shares.append(float((spectrum > (1 + 1e-9) * optimizer.natural.geometry.lambda_t).float().mean()))  # not itself
    return optimizer, shares


def test_the_floor_rises_where_the_curvature_outgrows_it():
    _, (before, after) = grown(most=None)
    assert before < 0.05 < 0.1 < after, "a floor that stays is outgrown"
    optimizer, (_, after) = grown(most=0.05)
    assert after <= 0.05
    assert "; raised, since F has grown)" in optimizer.summary()
    assert optimizer.natural.diagnose()["lambda_t"] == pytest.approx(optimizer.natural.raised)
    assert optimizer.natural.raised > optimizer.floor(1)
    optimizer, (_, after) = grown(most=0.05, lambda_safe=optimizer.floor.lambda_safe, kl_budget=10.0)
    assert after > 0.05, "a floor that is given stays"
    assert "raised" not in optimizer.summary()


def test_above_a_raised_floor_the_estimate_is_complete():
    """It stops at half of the last raised floor, and the floor falls by no more: what is above it is all there."""
    model, optimizer = free(T_cur=1, most=0.05)
    natural, base, lowest = optimizer.natural, optimizer.floor.lambda_base, []
    step(model, optimizer)
    for scale in (30, 1, 1 / 30, 1):
        with torch.no_grad():
            optimizer.layers[-1].module.weight.mul_(scale)
        lowest.append(natural.reaches(base))
        state, was = optimizer.kfac.generator.get_state(), natural.raised
        natural.refresh()
        assert natural.raised >= FALL * was
        optimizer.kfac.generator.set_state(state)
        with optimizer._hooks_off():
            deep = SteepKFAC(optimizer.kfac.model, optimizer.kfac.x, floor=lambda: base / 100,
                             generator=optimizer.kfac.generator)()
        there, everything = (torch.cat([f.spectrum().flatten() for f in F]) for F in (natural.F, deep))
        there = there * natural.unit
        torch.testing.assert_close(there[there > lowest[-1]].sort().values,
                                   everything[everything > lowest[-1]].sort().values, rtol=0.03, atol=0)
        assert (there > 0).sum() < (everything > 0).sum()
    assert lowest[0] == base < lowest[1]
    assert lowest[3] < lowest[2], "it falls again"


def test_a_resumed_run_is_the_uninterrupted_one():
    """Floor and C are those of theta_0, also for an optimizer that is constructed at later weights."""
    model, optimizer = free(T_cur=1)
    for _ in range(2):
        step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.generator.get_state()))
    step(model, optimizer)

    _, again, inner, _ = private()
    again.load_state_dict(saved[0])
    resumed = DPNGD(inner, again, T=6, shape=SHAPE, T_cur=1)
    assert resumed.floor != optimizer.floor
    assert resumed.max_grad_norm != optimizer.max_grad_norm
    resumed.load_state_dict(saved[1])
    resumed.generator.set_state(saved[2])
    step(again, resumed)
    assert torch.equal(flat(again), flat(model))
    assert resumed.steps.last == optimizer.steps.last
    _, other, inner, _ = private()
    with pytest.raises(UsageError, match="differ in kl_budget or kl_radius"):
        DPNGD(inner, other, T=6, shape=SHAPE, kl_budget=None).load_state_dict(saved[1])


def test_with_a_memory_manager_one_step_per_logical_batch():
    _, model, inner, loader = private()
    optimizer = DPNGD(inner, model, T=len(loader), shape=SHAPE)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as small:
        for x, y in small:
            step(model, optimizer, x, y)
    assert optimizer.t == len(loader)


def test_the_same_budget_is_spent():
    spent = []
    for natural in (False, True):
        engine, model, optimizer, loader = private()
        if natural:
            optimizer = DPNGD(optimizer, model, T=len(loader), shape=SHAPE)
        for x, y in loader:
            step(model, optimizer, x, y)
        spent.append(engine.accountant.history)
    assert spent[0] == spent[1] != []


@pytest.mark.parametrize("inside", [{"inside": torch.optim.Adam}, {"momentum": 0.9}, {"weight_decay": 0.1}])
def test_another_optimizer_inside_is_refused_with_a_hint_and_works_with_the_guard(inside):
    with pytest.raises(UsageError, match=r"plain torch\.optim\.SGD.*kl_radius"):
        free(**inside)
    model, optimizer = free(kl_radius=1e-3, lr=3.0, **inside)
    probe = made.standardised("noise", 128, SHAPE)
    for _ in range(3):
        before = copy.deepcopy(model._module)
        step(model, optimizer)
        assert kl(model._module, before, probe) <= 1.5e-3
        assert optimizer.steps.last.s < 1


def test_a_guard_that_never_binds_changes_nothing():
    ends = []
    for settings in ({"kl_budget": None}, {"kl_radius": 1e6}):
        model, optimizer = free(momentum=0.9, **settings)
        for _ in range(3):
            step(model, optimizer)
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_a_rate_with_the_floor_by_rank_is_a_rate():
    """kl_budget=None keeps DP-SGD's rate and clip; a number for the floor does too, as before."""
    _, optimizer = free(kl_budget=None)
    assert optimizer.steps is None
    assert optimizer.max_grad_norm == 1.0
    _, other = free(lambda_safe=optimizer.floor.lambda_safe)
    assert other.steps is None
    assert other.floor == optimizer.floor


def test_summary():
    model, optimizer = free()
    text = optimizer.summary()
    assert "0 of 6, 6 left" in text
    assert "kappa = 1.667; no step yet" in text
    step(model, optimizer)
    text = optimizer.summary()
    above = [int(n) for n in re.findall(r"^  \S+ +(\d+) of \d+$", text, re.M)]
    assert len(above) == 3
    assert f"above the floor     {sum(above)} of " in text
    assert "1 of 6, 5 left" in text
    assert re.search(r"s = \S+, KL \S+ against kappa = 1.667", text)
    assert re.search(r"clipped .*outside the guarantee", text)
    assert "against kappa = 1.667 (the noise's share ended it)" in text
    model, optimizer = free(kl_noise=None)
    step(model, optimizer)
    assert "share ended it" not in optimizer.summary()
    assert "the wrapped optimizer's" in free(kl_budget=None)[1].summary()
    assert "kl_radius = 0.1; no step yet" in free(kl_radius=0.1)[1].summary()


@pytest.mark.parametrize(("floor", "message"), [(1e9, "above every eigenvalue of F: this is DP-SGD"),
                                                (1e-30, "under every eigenvalue of F")])
def test_a_floor_that_clamps_all_or_nothing_is_warned_of_once(floor, message):
    model, optimizer = free(lambda_safe=floor)
    with pytest.warns(UserWarning, match=message):
        step(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lambda_safe")
        step(model, optimizer)
        step(*free())


@pytest.mark.parametrize(("settings", "message"), [
    ({"kl_budget": 0.0}, "the KL budget K is 0.0"),
    ({"kl_budget": -1}, "the KL budget K is -1"),
    ({"kl_budget": "ten"}, "kl_budget is 'ten': it must be a positive number, 'auto' or None"),
    ({"kl_noise": 0}, "kl_noise is 0: it must be a positive number, or None"),
    ({"kl_noise": "3"}, "kl_noise is '3': it must be a number"),
    ({"probe": 8}, "the probe has 8 images: .* at least 16"),
    *(({"kl_budget": None, **wrong}, f"{name} is|has 8") for wrong, name in (
        ({"kl_noise": -1}, "kl_noise"), ({"probe": 8}, "probe"), ({"most": 2}, "most"))),  # also where they do nothing
    ({"seed": "x"}, "seed is 'x': it must be a whole number"),
    ({"seed": -1}, "seed is -1"),
    ({"kl_budget": 10, "kl_radius": 0.1}, "kl_budget and kl_radius exclude one another"),
    ({"kl_radius": -0.1}, "kl_radius is -0.1"),
    ({"most": 0}, "most is 0: it must be above 0 and below 1"),
    ({"most": "few"}, "most is 'few': it must be above 0 and below 1"),
    ({"lambda_safe": "aut"}, "lambda_safe is 'aut': it must be a positive number, or 'auto'"),
    ({"clip_ratio": 0}, "clip_ratio is 0"),
    ({"shape": None}, r"pass shape=\(C, H, W\)"),
    ({"shape": (8, 8)}, r"shape is \(8, 8\): images are made for \(C, H, W\)"),
    ({"shape": (2, 8, 8)}, r"shape is \(2, 8, 8\)"),
    ({"shape": (3, 8, 8)}, r"public images of shape \(3, 8, 8\)"),
    ({"public": "nois"}, "unknown images 'nois': did you mean 'noise'"),
    ({"public": torch.zeros(60, *SHAPE)}, "shape is for images that are made"),
    ({"T": 0}, "T is 0"),
    ({"T": 2.5}, "T is 2.5: it must be a whole number"),
    ({"T": "6"}, "T is '6'"),
    ({"T_cur": 0}, "T_cur is 0"),
    ({"T_cur": 2.5}, "T_cur is 2.5"),
    ({"T1": "x"}, "T1 is 'x': it must be a number"),
    ({"probe": -5}, "probe is -5"),
    ({"probe": 16.5}, "probe is 16.5"),
    ({"lambda_safe": None}, "lambda_safe is None: it must be a positive number, or 'auto'"),
    ({"lambda_safe": True}, "lambda_safe is True"),
    ({"clip_ratio": True}, "clip_ratio is True"),
    ({"shape": (1, 16, 16)}, r"public images of shape \(1, 16, 16\)"),
    ({"public": 5, "shape": None}, "public is 5: pass a tensor"),
    ({"public": {"a": 1}, "shape": None}, "batches of str: a batch must be a tensor of images"),
    ({"private": 3}, "private is a int: pass the private data set"),
])
def test_bad_input_is_one_line_at_construction(settings, message):
    with pytest.raises(UsageError, match=message) as caught:
        free(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"kl_budget": None}])
@pytest.mark.parametrize("last", [nn.Linear(64, 1), nn.Unflatten(1, (4, 16))], ids=["one number", "a map"])
def test_a_model_that_does_not_classify_is_refused(last, settings):
    """Of one output, or of a label per pixel, there is no softmax over classes per image."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), last)
    model, optimizer, _ = PrivacyEngine(accountant="prv").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=DataLoader(DATA, batch_size=B),
        noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.raises(UsageError, match=r"has shape \(2, .*: DPNGD is for classification") as caught:
        DPNGD(optimizer, model, T=6, shape=SHAPE, **settings)
    assert "\n" not in str(caught.value)


def test_gradients_are_laid_out_as_their_parameters():
    model, optimizer = free()
    step(model, optimizer)
    assert all(p.grad.stride() == p.stride() for p in model.parameters())


PROGRAM = """
import torch, torch.nn.functional as F
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dpngd.opacus import DPNGD
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
data = TensorDataset(torch.randn(64, 1, 8, 8), torch.arange(64) % 3)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=DataLoader(data, batch_size=16),
    noise_multiplier=1.0, max_grad_norm=1.0)
optimizer = DPNGD(optimizer, model, T=10, shape=(1, 8, 8), T_cur=1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_a_users_program_gets_no_warnings_but_those_of_opacus():
    """Passes over public images, with Opacus's hooks on the model, and what becomes p.grad: torch has words on both."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "Secure RNG turned off" in run.stderr, "warnings are shown"
    assert "dpngd" not in run.stderr.replace(str(Path(torch.__file__).parents[1]), "")
    assert "layout contract" not in run.stderr


def test_s_is_the_same_for_the_same_release_from_other_private_data():
    """Two private batches, noise and clip such that the release is equal: none at all, and empty batches."""
    lengths = []
    for x in (X[:0], DATA[B : 2 * B][0][:0]):
        model, optimizer = free()
        for _ in range(2):
            step(model, optimizer, x, Y[:0])
        lengths.append(optimizer.steps.last)
    assert lengths[0] == lengths[1]
    assert math.isfinite(lengths[0].s)

"""What makes the DPNGD loop nearly as fast as Opacus's own: each short cut gives what the long way gives."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule, PrivacyEngine
from opacus.grad_sample import register_grad_sampler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpngd import opacus
from dpngd.clamping import floor_by_rank
from dpngd.curvature import KFAC, SteepKFAC, few_largest, largest
from dpngd.errors import UsageError
from dpngd.geometry import Kronecker
from dpngd.gradients import PerSample
from dpngd.layers import Dense, Factors, trainable_layers
from dpngd.noise import stream
from dpngd.opacus import DPNGD, Deferred, GradSample, LastingBudget, LastingProbe, Sampler, Whitening
from dpngd.steps import Probe

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus warns about itself in many places
B, CLASSES = 12, 5


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def conv(*args, **options):
    return nn.Sequential(nn.Conv2d(*args, **options), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Linear(4 * args[1], CLASSES))


MODELS = {
    "small": (lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(),
                                    nn.Conv2d(8, 32, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES)),
              (1, 8, 8)),
    "stride": (lambda: conv(3, 6, 5, stride=2, padding=2, bias=False), (3, 11, 11)),
    "dilation": (lambda: conv(3, 6, 3, dilation=2), (3, 9, 9)),
    "groups": (lambda: conv(4, 8, 3, groups=2, padding=1), (4, 6, 6)),
    "same": (lambda: conv(3, 6, (2, 4), padding="same"), (3, 7, 7)),
    "pixels": (lambda: conv(3, 64, 1), (3, 4, 4)),
    "one position": (lambda: nn.Sequential(nn.Conv2d(3, 16, 6), nn.Flatten(), nn.Linear(16, CLASSES)), (3, 6, 6)),
    "layers": (lambda: nn.Sequential(nn.Linear(7, 9, bias=False), nn.Tanh(), nn.Linear(9, CLASSES)), (7,)),
    "sequence": (lambda: nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Tanh(), nn.Flatten(),
                                       nn.Linear(27, CLASSES)), (3, 7)),
}


def made(name, reduction="mean"):
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return GradSampleModule(build(), loss_reduction=reduction), draw(B, *shape), torch.arange(B) % CLASSES


def samples(module, x, y, reduction="mean"):
    for p in module.parameters():
        p.grad = p.grad_sample = None
    F.cross_entropy(module(x), y, reduction=reduction).backward()
    return {name: p.grad_sample for name, p in module.named_parameters()}


# -- per-sample gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_samplers_give_opacus_gradients(name, reduction):
    module, x, y = made(name, reduction)
    theirs = samples(module, x, y, reduction)
    Sampler.install(module, trainable_layers(module._module))
    ours = samples(module, x, y, reduction)
    assert any(isinstance(g, Deferred) for g in ours.values())
    for p, g in theirs.items():
        assert ours[p].shape == g.shape
        torch.testing.assert_close(ours[p] * 1, g, rtol=1e-4, atol=1e-6, msg=p)


@pytest.mark.parametrize("name", MODELS)
def test_what_the_optimizer_takes_is_what_is_in_grad_sample(name):
    module, x, y = made(name)
    layers = trainable_layers(module._module)
    Sampler.install(module, layers)
    samples(module, x, y)
    for layer in layers:
        held = [p.grad_sample for p in layer.params().values()]
        taken = opacus.gradient_of(layer, held).materialise()
        looked_at = opacus.gradient_of(layer, [g * 1 for g in held]).materialise()
        torch.testing.assert_close(taken, looked_at, rtol=1e-5, atol=1e-7)


CHANGES = {"in place": lambda g: g.mul_(3), "in place, a part": lambda g: g[2:4].zero_(),
           "data": lambda g: g.data.mul_(3), "numpy": lambda g: g.detach().numpy().__imul__(3)}


@pytest.mark.parametrize("change", CHANGES)
def test_who_changes_grad_sample_gets_what_is_in_it(change):
    """A deferred gradient is computed at the first look, and from then on it is what counts."""
    module, x, y = made("layers")
    layers = trainable_layers(module._module)
    Sampler.install(module, layers)
    samples(module, x, y)
    layer = layers[1]
    held = [p.grad_sample for p in layer.params().values()]
    before = opacus.gradient_of(layer, held)
    assert isinstance(before, Factors)
    expected = before.materialise().clone()
    for g in held:
        CHANGES[change](g)
    after = opacus.gradient_of(layer, held).materialise()
    if change == "in place, a part":
        expected[2:4] = 0
    else:
        expected *= 3
    torch.testing.assert_close(after, expected)


def test_one_parameter_that_was_changed_is_enough():
    module, x, y = made("layers")
    layers = trainable_layers(module._module)
    Sampler.install(module, layers)
    samples(module, x, y)
    weight, bias = (p.grad_sample for p in layers[1].params().values())
    bias.zero_()
    g = opacus.gradient_of(layers[1], [weight, bias])
    assert isinstance(g, Dense)
    assert not g.bias.any()
    assert g.w.any()


@pytest.mark.parametrize("name", ["layers", "sequence", "one position"])
def test_a_batch_that_is_overwritten_after_the_backward_pass_does_not_matter(name):
    module, x, y = made(name)
    layers = trainable_layers(module._module)
    theirs = samples(module, x.clone(), y)
    Sampler.install(module, layers)
    buffer = x.clone()
    samples(module, buffer, y)
    buffer.fill_(1e9)
    for layer in layers:
        g = opacus.gradient_of(layer, [p.grad_sample for p in layer.params().values()])
        exact = layer.join(*[theirs["_module." + p] for p in layer.params()])
        torch.testing.assert_close(g.materialise(), exact.materialise(), rtol=1e-4, atol=1e-6)


def test_accumulated_batches_are_one_after_the_other():
    module, x, y = made("layers")
    Sampler.install(module, trainable_layers(module._module))
    whole = {p: g * 1 for p, g in samples(module, x, y, "mean").items()}
    for p in module.parameters():
        p.grad_sample = None
    for part in (slice(0, 5), slice(5, B)):
        F.cross_entropy(module(x[part]), y[part]).backward()
    for name, p in module.named_parameters():
        assert isinstance(p.grad_sample, list)
        torch.testing.assert_close(torch.cat(p.grad_sample), whole[name], rtol=1e-4, atol=1e-6)


def test_a_users_own_sampler_stays():
    class Own(nn.Linear):
        pass

    try:
        @register_grad_sampler(Own)
        def own(layer, activations, backprops):
            return {layer.weight: torch.einsum("ni,nj->nij", backprops, activations[0])}

        module = GradSampleModule(nn.Sequential(Own(3, 4, bias=False), nn.Linear(4, 2)))
        Sampler.install(module, trainable_layers(nn.Sequential(nn.Linear(4, 2))))
        assert module.GRAD_SAMPLERS[Own] is own
        assert isinstance(module.GRAD_SAMPLERS[nn.Linear], Sampler)
        assert GradSampleModule.GRAD_SAMPLERS[nn.Linear].__module__.startswith("opacus.")
    finally:
        for registry in (GradSampleModule.GRAD_SAMPLERS,):
            registry.pop(Own, None)


def test_copies_of_the_model_have_opacus_samplers():
    module, x, y = made("small")
    Sampler.install(module, trainable_layers(module._module))
    samples(module, x, y)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.GRAD_SAMPLERS[nn.Conv2d] is GradSampleModule.GRAD_SAMPLERS[nn.Conv2d]
        torch.testing.assert_close(twin.eval()(x), module(x))


def test_other_modes_keep_their_own():
    module = GradSampleModule(nn.Sequential(nn.Linear(3, 4)), force_functorch=True)
    Sampler.install(module, trainable_layers(module._module))
    assert module.GRAD_SAMPLERS is GradSampleModule.GRAD_SAMPLERS


# -- whitened norms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("R", "O", "I", "m", "k", "taps"), [(1, 6, 20, 5, 3, 4), (1, 3, 20, 2, 9, 1),
                                                             (1, 6, 8, 6, 8, 1), (2, 4, 6, 3, 2, 1)])
def test_projections_do_not_depend_on_their_order(R, O, I, m, k, taps, bias):
    g = Dense(draw(B, R, O, I), draw(B, R, O, seed=2) if bias else None, taps)
    Q_G, Q_A, w = draw(R, O, m, seed=3), draw(R, I + bias, k, seed=4), draw(R, m, k, seed=5)
    fast = GradSample(g.w, g.bias, g.taps).projected_energy(Q_G, Q_A, w)
    torch.testing.assert_close(fast, g.projected_energy(Q_G, Q_A, w), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-7])
def test_norms_in_steep_directions_are_exact(size):
    """Gradients along the steepest eigenvector but for `size` of them: float32 loses their norm, float64 does not."""
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)), draw(40, 1, 6, 6)
    F_ = [f.scaled(1e4) for f in KFAC(model, x, labels="exact")()]
    steep = F_[0].Q_G[:, :, :1] @ F_[0].Q_A[:, :, :1].mT
    g = (steep + size * draw(B, 1, CLASSES, 37).double()).float()
    gradients = [GradSample(g[..., :-1].contiguous(), g[..., -1].contiguous())]
    norms = {}
    for kind in (Whitening, Kronecker):
        geometry = kind()
        geometry.set(F_, 1e-3)
        norms[kind] = geometry.sq_norms(opacus.SampleGradients(gradients, torch.zeros(B)))[0][0]
        assert geometry.recomputed == (0 if size == 1.0 else B)
    exact = geometry.layers[0].exact_sq_norms(gradients[0], -0.5)
    torch.testing.assert_close(norms[Whitening].double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(norms[Whitening], norms[Kronecker], rtol=1e-5, atol=0)


# -- curvature ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.003, 0.05, 0.15])
@pytest.mark.parametrize("name", MODELS)
def test_steep_curvature_is_the_curvature_above_the_floor(name, share):
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build(), draw(60, *shape)
    full = KFAC(model, x, labels="exact")()
    floor = floor_by_rank(full, share)
    steep = SteepKFAC(model, x, labels="exact", floor=lambda: floor)
    for found in (steep(), steep()):  # the second time with what is known of the first layer
        above = Kronecker()
        above.set(found, floor)
        exact = Kronecker()
        exact.set(full, floor)
        for F_, S in zip(full, found, strict=True):
            all_of, kept = F_.spectrum().sort(descending=True), S.spectrum()
            expected = all_of.values.flatten()
            expected = expected[expected > floor * 1.001].sort().values
            there = kept.flatten()[kept.flatten() > floor * 1.001].sort().values
            torch.testing.assert_close(there, expected, rtol=2e-3, atol=0)
            assert float(S.traces().sum()) == pytest.approx(float(F_.spectrum().sum()), rel=1e-4)
            for Q in (S.Q_A, S.Q_G):
                torch.testing.assert_close(Q.mT @ Q, torch.eye(Q.shape[2]).to(Q).expand(len(Q), -1, -1),
                                           rtol=0, atol=1e-9)
        assert above.noise_energy() == pytest.approx(exact.noise_energy(), rel=1e-3)
        u = [draw(*layer.shape, seed=9) for layer in steep.layers]
        for there, here in zip(above.into([u])[0], exact.into([u])[0], strict=True):
            torch.testing.assert_close(there, here, rtol=2e-2, atol=2e-3 * float(here.abs().max()))


def test_a_floor_above_everything_leaves_nothing_and_below_everything_all():
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)), draw(80, 1, 6, 6)
    for floor, kept in ((1e9, 0), (1e-30, 37)):
        (found,) = SteepKFAC(model, x, labels="exact", floor=lambda floor=floor: floor)()
        assert found.lambda_A.shape == (1, kept)
        geometry = Kronecker()
        geometry.set([found], floor)
        assert geometry.layers[0].Lam.shape[2] == kept


def test_sampled_positions_estimate_the_moment_of_all():
    torch.manual_seed(0)
    layer = trainable_layers(nn.Conv2d(2, 3, 3, stride=2, padding=1))[0]
    a, d = F.interpolate(draw(400, 2, 4, 4), 16, mode="bilinear"), draw(400, 3, 8, 8)
    exact, some = layer.moments(a, d, True)[0], layer.sampled_moment(a, d, 8)
    assert float((some - exact).norm() / exact.norm()) < 0.05
    assert float(some[0, -1, -1]) == float(exact[0, -1, -1]) == 400 * 64
    assert layer.sampled_moment(a, d, 40) is None
    flat = torch.ones(400, 2, 17, 17)  # without padding every patch of it is the same one
    layer = trainable_layers(nn.Conv2d(2, 3, 3, stride=2, dilation=(1, 2)))[0]
    d = layer.module(flat).detach()
    torch.testing.assert_close(layer.sampled_moment(flat, d, 8), layer.moments(flat, d, True)[0])


def test_few_and_many_eigenvalues():
    Q = torch.linalg.qr(draw(300, 300).double()).Q
    values = 0.95 ** torch.arange(300).double()
    M = ((Q * values) @ Q.mT).float()
    for k in (0, 1, 20, 100):
        least = 2.0 if k == 0 else float(values[k - 1] + values[k]) / 2
        few = few_largest(M, least)
        assert (few is None) == (k > 32)
        found, vectors = largest(M, least)
        assert len(found) == vectors.shape[1] == k
        torch.testing.assert_close(found, values[:k], rtol=1e-4, atol=0)
        torch.testing.assert_close((Q[:, :k].mT @ vectors).square().sum(), torch.tensor(float(k)).double(), rtol=1e-3,
                                   atol=1e-9)
    with pytest.raises(FloatingPointError, match="not finite"):
        few_largest(M * torch.nan, 1.0)


# -- the length of a step -------------------------------------------------------------------------------------------


def free(T=12, **settings):
    module, x, y = made("small")
    model = module._module
    module.remove_hooks()
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=1.0, noise_multiplier=2.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=B), noise_generator=torch.Generator().manual_seed(3))
    return model, DPNGD(optimizer, model, T=T, shape=(1, 8, 8), **settings), x, y


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_predictions_are_kept_until_the_weights_change(monkeypatch):
    model, optimizer, x, y = free()
    passes = []
    plain = Probe._log_p
    monkeypatch.setattr(Probe, "_log_p", lambda self, weights: passes.append(bool(weights)) or plain(self, weights))
    step(model, optimizer, x, y)
    assert passes[0] is False  # at theta_0
    passes.clear()
    step(model, optimizer, x, y)
    assert False not in passes, "the predictions of the last trial are those of the weights"
    passes.clear()
    with torch.no_grad():
        next(model.parameters()).data.mul_(1.01)  # no version counter sees it
    step(model, optimizer, x, y)
    assert passes[0] is False


def test_kept_predictions_are_those_of_the_weights():
    model, optimizer, x, y = free()
    for _ in range(3):
        step(model, optimizer, x, y)
        probe = optimizer.steps.probe
        torch.testing.assert_close(probe._log_p({}), Probe._log_p(probe, {}), rtol=1e-6, atol=1e-6)


def test_a_step_that_the_noise_ends_takes_one_pass():
    model, optimizer, x, y = free(kl_noise=0.01)
    for i in range(6):
        step(model, optimizer, x, y)
        last, limit = optimizer.steps.last, optimizer.steps.limit(optimizer._noise_kl())
        assert last.s <= limit * (1 + 1e-9)
        if i:
            assert (last.passes, last.s) == (1, pytest.approx(limit))
    assert isinstance(optimizer.steps, LastingBudget)
    assert isinstance(optimizer.steps.probe, LastingProbe)


# -- the whole step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"lambda_safe": 0.05, "kl_budget": None}], ids=["free", "rate"])
def test_a_step_is_that_of_the_long_way(settings, monkeypatch):
    """Several steps with all short cuts, and with none of them: the same weights."""
    ends = []
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(Sampler, "install", lambda *a: None)
            monkeypatch.setattr(opacus, "GradSample", Dense)
            monkeypatch.setattr(opacus, "Whitening", Kronecker)
            monkeypatch.setattr(opacus, "LastingProbe", Probe)
            monkeypatch.setattr(opacus, "SteepKFAC", lambda *a, floor, **k: KFAC(*a, **k))
        model, optimizer, x, y = free(T_cur=2, labels="exact", **settings)
        for _ in range(5):
            step(model, optimizer, x, y)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=5e-3, atol=2e-3)
    start = torch.cat([p.detach().flatten() for p in made("small")[0].parameters()])
    assert float((ends[0] - ends[1]).norm()) < 2e-3 * float((ends[1] - start).norm())


def test_hooks_without_a_wrapper_and_the_bare_model():
    for wrapped in (True, False):
        model, x, y = made("small")
        model.remove_hooks()
        model = model._module
        hooks, optimizer, _ = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=1.0,
            noise_multiplier=1.0, data_loader=DataLoader(TensorDataset(x, y), batch_size=B), wrap_model=wrapped)
        with pytest.raises(UsageError, match="pass what make_private returned"):
            DPNGD(optimizer, model, draw(60, 1, 8, 8), T=3)
        optimizer = DPNGD(optimizer, hooks, draw(60, 1, 8, 8), T=3)
        for _ in range(3):
            step(model, optimizer, x, y)
        assert optimizer.t == 3


def test_public_gradients_agree_with_the_samplers():
    """PerSample and Opacus's hooks with our samplers: one gradient."""
    model, optimizer, x, y = free()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    ours = optimizer._gradients().materialise()
    with optimizer._hooks_off():
        exact = PerSample(model._module)(x, y).materialise()
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-6)


def test_seeds_decide_labels_of_refreshes():
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)), draw(60, 1, 6, 6)
    found = [SteepKFAC(model, x, generator=stream(s, "labels"), floor=lambda: 1e-3)()[0].lambda_G for s in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    with warnings.catch_warnings(), pytest.raises(UsageError, match="draws labels"):
        SteepKFAC(model, x, floor=lambda: 1e-3)

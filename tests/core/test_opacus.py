"""DPNGD on Opacus's engine, and our DP-SGD against Opacus's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpngd.errors import UsageError
from dpngd.geometry import Euclidean
from dpngd.gradients import PerSample
from dpngd.mechanism import GaussianMechanism
from dpngd.opacus import DPNGD

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus warns about itself in many places
N, B = 64, 16


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
                         nn.Linear(8 * 4, 5))


def images(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


DATA = TensorDataset(images(N, 1), torch.arange(N) % 5)
PUBLIC = images(20, 2)


def private(sigma: float = 1.0, C: float = 1.0, lr: float = 0.5, seed: int = 7, **options):
    """What make_private returns, with a noise generator of its own."""
    model = network()
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), data_loader=DataLoader(DATA, batch_size=B),
        noise_multiplier=sigma, max_grad_norm=C, noise_generator=torch.Generator().manual_seed(seed), **options)
    return engine, model, optimizer, loader


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


X, Y = DATA[:B]


def test_our_dp_sgd_is_opacus_step_given_the_same_noise():
    _, model, optimizer, _ = private(sigma=0.7)
    start = network()
    step(model, optimizer, X, Y)

    per_sample = PerSample(start)
    generator = torch.Generator().manual_seed(7)  # Opacus draws parameter by parameter: put its draws into blocks
    blocks = []
    for layer in per_sample.layers:
        draws = [torch.normal(0, 1, (1, *p.shape), generator=generator) for p in layer.params().values()]
        blocks.append(layer.join(*draws).materialise()[0])
    drawn = iter(blocks)
    ours = GaussianMechanism((1.0,), 0.7, B).release([per_sample(X, Y)], Euclidean(), per_sample.zeros(),
                                                     lambda like, std: std * next(drawn))
    per_sample.add_(ours.direction, -0.5)
    torch.testing.assert_close(flat(start), flat(model), rtol=2e-5, atol=2e-6)
    assert ours.clipped > 0  # clipping took part


def test_a_high_floor_is_dp_sgd_exactly():
    """Without noise, which is drawn in blocks here and parameter by parameter there."""
    _, sgd_model, sgd, _ = private(sigma=0.0)
    _, model, optimizer, _ = private(sigma=0.0)
    optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=1e9, lambda_base=1e9, T=10)
    for _ in range(3):
        step(sgd_model, sgd, X, Y)
        step(model, optimizer, X, Y)
    torch.testing.assert_close(flat(model), flat(sgd_model), rtol=1e-4, atol=1e-5)


def test_a_low_floor_is_not_dp_sgd():
    _, sgd_model, sgd, _ = private(sigma=0.0)
    _, model, optimizer, _ = private(sigma=0.0)
    optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=1e-3, T=10)
    step(sgd_model, sgd, X, Y)
    step(model, optimizer, X, Y)
    assert (flat(model) - flat(sgd_model)).norm() > 1e-2 * (flat(sgd_model) - flat(network())).norm()


def test_same_accounting():
    engines = []
    for natural in (False, True):
        engine, model, optimizer, loader = private()
        if natural:
            optimizer = DPNGD(optimizer, model, DataLoader(TensorDataset(PUBLIC), batch_size=8), lambda_safe=0.3, T=8)
        for x, y in [batch for _ in range(2) for batch in loader]:
            step(model, optimizer, x, y)
        engines.append(engine)
    assert engines[1].accountant.history == engines[0].accountant.history != []
    assert engines[1].get_epsilon(1e-3) == engines[0].get_epsilon(1e-3) > 0


def test_noise_has_the_stated_covariance_scale():
    """At a floor that clamps everything the noise is DP-SGD's: std lr * sigma * C / B on every parameter."""
    _, model, optimizer, _ = private(sigma=3.0, lr=1.0)
    optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=1e9, lambda_base=1e9, T=400)
    empty = X[:0], Y[:0]
    moves = []
    for _ in range(200):
        before = flat(model)
        step(model, optimizer, *empty)
        moves.append(flat(model) - before)
    std = torch.cat(moves).std()
    n = 200 * len(moves[0])
    assert std == pytest.approx(3.0 / B, rel=5 / (2 * n) ** 0.5)


def test_memory_manager_gives_the_same_step():
    results = []
    for physical in (B, 5):
        _, model, optimizer, loader = private(sigma=0.0, poisson_sampling=False)
        optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=0.1, T=10)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as batches:
            for x, y in batches:
                step(model, optimizer, x, y)
        assert optimizer.t == N // B
        results.append(flat(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_a_poisoned_sample_contributes_nothing():
    moved = []
    for poison in (False, True):
        _, model, optimizer, _ = private(sigma=0.0)
        optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=0.1, T=10)
        x, y = X[:8].clone(), Y[:8]
        if poison:
            x, y = torch.cat([x, torch.full_like(x[:1], float("nan"))]), torch.cat([y, y[:1]])
            # the mean loss scales per-sample gradients back by the batch size, so the other samples are unchanged
        step(model, optimizer, x, y)
        moved.append(flat(model))
        assert optimizer.nonfinite == int(poison)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-6)


def test_resuming_goes_on_with_the_schedule():
    _, model, optimizer, _ = private()
    optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=0.3, T=10)
    for _ in range(4):
        step(model, optimizer, X, Y)
    state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    _, model2, plain, _ = private()
    model2.load_state_dict(weights)
    resumed = DPNGD(plain, model2, PUBLIC, lambda_safe=0.3, T=10)
    resumed.load_state_dict(state)
    assert resumed.t == 4
    with pytest.raises(UsageError, match="not saved by a DPNGD"):
        resumed.load_state_dict(torch.optim.SGD(model2.parameters(), lr=1).state_dict())


def test_public_images_do_not_enter_the_gradients():
    _, model, optimizer, _ = private(sigma=0.0)
    optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=0.1, T=10)
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    before = [p.grad_sample.clone() for p in model.parameters()]
    optimizer.natural.prepare(0)
    assert all(torch.equal(b, p.grad_sample) for b, p in zip(before, model.parameters(), strict=True))
    assert model.hooks_enabled


def test_refusals():
    _, model, optimizer, _ = private(grad_sample_mode="hooks", clipping="per_layer", C=[1.0] * 6)
    with pytest.raises(UsageError, match="clipping='flat'"):
        DPNGD(optimizer, model, PUBLIC, lambda_safe=0.1, T=10)
    _, model, optimizer, _ = private()
    with pytest.raises(UsageError, match="public loader is empty"):
        DPNGD(optimizer, model, [], lambda_safe=0.1, T=10)
    with pytest.raises(UsageError, match="T_cur"):
        DPNGD(optimizer, model, PUBLIC, lambda_safe=0.1, T=10, T_cur=0)
    with pytest.raises(UsageError, match="lambda_safe"):
        DPNGD(optimizer, model, PUBLIC, lambda_safe=0.0, T=10)
    other = network(1)
    with pytest.raises(UsageError, match="module's trainable parameters"):
        DPNGD(optimizer, other, PUBLIC, lambda_safe=0.1, T=10)

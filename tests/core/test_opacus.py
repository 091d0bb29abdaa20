"""DPNGD on Opacus's engine, and our DP-SGD against Opacus's."""

import contextlib
import copy
import sys

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
PUBLIC = images(60, 2)


def private(sigma: float = 1.0, C: float = 1.0, lr: float = 0.5, seed: int = 7, workers: int = 0, model=None,
            **options):
    """What make_private returns, with a noise generator of its own."""
    model = model or network()
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data_loader=DataLoader(DATA, batch_size=B, num_workers=workers), noise_multiplier=sigma, max_grad_norm=C,
        noise_generator=torch.Generator().manual_seed(seed), **options)
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


# -- interrupted and abandoned steps: the sums of a step never reach another one ------------------------------------


def natural(sigma: float = 0.0, T: int = 50, **options):
    _, model, optimizer, loader = private(sigma=sigma, **options)
    return model, DPNGD(optimizer, model, PUBLIC, lambda_safe=0.1, T=T, labels="exact"), loader


@contextlib.contextmanager
def interrupted_at(k: int):
    """Raise KeyboardInterrupt at the k-th call, of Python or of C, that the files of the optimizer make; count them."""
    watched = ("dpngd/opacus.py", "dpngd/mechanism.py", "dpngd/noise.py", "optimizers/optimizer.py")
    seen = [0]

    def watch(frame, event, argument):
        if event in ("call", "c_call") and frame.f_code.co_filename.endswith(watched):
            seen[0] += 1
            if seen[0] == k:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("zeroed", [True, False])
def test_a_step_interrupted_anywhere_leaves_nothing_behind(zeroed):
    """At every call that a step makes: the next step moves the weights as a first one does."""
    model, optimizer, _ = natural()
    start = copy.deepcopy(model.state_dict())
    optimizer.natural.refresh()
    optimizer.t = 1  # F is not computed again at this step
    with interrupted_at(-1) as calls:
        step(model, optimizer, X, Y)
    clean = flat(model)
    assert calls[0] > 60
    for k in range(1, calls[0] + 1):
        model.load_state_dict(start)
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.t = 1
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(k):  # the last calls were those of zero_grad
            optimizer.step()
        model.load_state_dict(start)
        optimizer.t = 1
        if zeroed:
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
        refused = None
        try:
            optimizer.step()
        except ValueError as refusal:  # the same gradients a second time: refused once they have been looked at
            refused = str(refusal)
        if refused:
            assert not zeroed
            assert "Gradients haven't been cleared" in refused
        else:
            torch.testing.assert_close(flat(model), clean, rtol=1e-5, atol=1e-7)


def test_a_step_is_counted_before_its_noise_is_drawn(monkeypatch):
    """Interrupted in between, it costs budget and releases nothing; the other way round a release would be free."""
    engine, model, optimizer, _ = private()
    optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=0.1, T=10)
    monkeypatch.setattr(GaussianMechanism, "add_noise", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, X, Y)
    assert [steps for *_, steps in engine.accountant.history] == [1]
    assert torch.equal(flat(model), flat(network()))


def only(x, y):
    """Where a fresh optimizer goes with this one batch."""
    model, optimizer, _ = natural()
    step(model, optimizer, x, y)
    return flat(model)


def test_an_abandoned_virtual_batch_is_dropped_by_the_next_pass():
    model, optimizer, loader = natural(poisson_sampling=False)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as batches:
        for x, y in batches:
            step(model, optimizer, x, y)
            break
    assert torch.equal(flat(model), flat(network()))  # a skipped step: sums only
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=B, optimizer=optimizer) as batches:
        for x, y in batches:
            step(model, optimizer, x, y)
            break
    torch.testing.assert_close(flat(model), only(x, y), rtol=1e-5, atol=1e-7)


def test_an_abandoned_virtual_batch_is_dropped_by_a_plain_step_too():
    model, optimizer, loader = natural(poisson_sampling=False)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as batches:
        for x, y in batches:
            step(model, optimizer, x, y)
            break
    step(model, optimizer, X, Y)
    torch.testing.assert_close(flat(model), only(X, Y), rtol=1e-5, atol=1e-7)


def test_abandon_drops_a_virtual_batch_of_ones_own():
    model, optimizer, _ = natural()
    optimizer.signal_skip_step(True)
    step(model, optimizer, X, Y)
    optimizer.abandon()
    step(model, optimizer, X[:8], Y[:8])
    torch.testing.assert_close(flat(model), only(X[:8], Y[:8]), rtol=1e-5, atol=1e-7)


def one_pass(model, optimizer, loader, bad, at):
    """A pass in which physical batch `at` is given to `bad` instead of the step."""
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as batches:
        for i, (x, y) in enumerate(batches):
            (bad if i == at else step)(model, optimizer, x, y)


def interrupted(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with interrupted_at(20), contextlib.suppress(KeyboardInterrupt):
        optimizer.step()


@pytest.mark.parametrize(("bad", "says"), [(lambda *a: None, "did not come to its step"),
                                           (interrupted, "was interrupted")], ids=["no step", "interrupted"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_pass_out_of_order_ends(bad, says, at):
    """A flag would be taken for that of the next batch, and logical batches would overlap; the next pass is fine."""
    model, optimizer, loader = natural(poisson_sampling=False)
    with pytest.raises(UsageError, match=says):
        one_pass(model, optimizer, loader, bad, at)
    assert torch.equal(flat(model), flat(network()))
    one_pass(model, optimizer, loader, step, 0)
    assert optimizer.t == N // B


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_that_reads_ahead(workers):
    """Flags of batches that its workers have read ahead wait beside that of the batch at hand."""
    weights = []
    for n in (0, workers):
        model, optimizer, loader = natural(poisson_sampling=False, workers=n)
        one_pass(model, optimizer, loader, step, 0)
        assert optimizer.t == N // B
        weights.append(flat(model))
    assert torch.equal(*weights)
    physical = N // B * 4  # of 16 samples, in four parts
    for at in (0, physical - 3, physical - 2):  # also where the sampler has no more to read
        model, optimizer, loader = natural(poisson_sampling=False, workers=workers)
        with pytest.raises(UsageError, match="did not come to its step"):
            one_pass(model, optimizer, loader, lambda *a: None, at)


def test_flags_that_were_read_ahead_are_not_taken_for_those_of_another_loader():
    """Four plain batches would be one release, clipped four times."""
    model, optimizer, loader = natural(poisson_sampling=False, workers=1)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as batches:
        for i, (x, y) in enumerate(batches):
            if i == 4:
                break
            step(model, optimizer, x, y)
    before = flat(model)
    with pytest.raises(UsageError, match=r"optimizer\.abandon\(\)"):
        step(model, optimizer, X, Y)
    assert torch.equal(flat(model), before)
    optimizer.abandon()
    t = optimizer.t
    step(model, optimizer, X, Y)
    assert optimizer.t == t + 1, "a step of its own"


@pytest.mark.parametrize("late", ["frozen", "unfrozen"])
def test_what_trains_is_fixed_at_construction(late):
    """A layer that is unfrozen later would move by its raw gradient; one that is frozen may keep an old batch's."""
    _, model, optimizer, _ = private()
    first = model._module[0]
    first.requires_grad_(late == "frozen")
    optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=1.0, T=5)
    if late == "unfrozen":
        step(model, optimizer, X, Y)
    before = flat(model)
    first.requires_grad_(late != "frozen")
    with pytest.raises(UsageError, match=r"(0.weight was frozen|was unfrozen or added) after DPNGD was constructed"):
        step(model, optimizer, X, Y)
    assert torch.equal(flat(model), before)


def test_a_batch_that_was_never_stepped_leaves_nothing_behind():
    _, model, optimizer, _ = private()
    optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=1.0, T=5)
    F.cross_entropy(model(X), Y).backward()
    model._module[0].requires_grad_(False)
    optimizer.zero_grad()
    assert all(p.grad_sample is None for p in model.parameters())


AUTOCAST = r"bfloat16, whose rounding .* train without autocast"


@pytest.mark.parametrize("where", ["forward pass", "whole step"])
def test_autocast_is_refused(where):
    """1.34 C and 1.85 C: a bfloat16 gradient is rounded otherwise in another batch, and so are norms and sums."""
    model, optimizer, _ = natural()
    before = flat(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(X), Y)
        if where == "whole step":
            loss.backward()
            with pytest.raises(UsageError, match=AUTOCAST):
                optimizer.step()
    if where == "forward pass":
        loss.backward()
        with pytest.raises(UsageError, match=AUTOCAST):
            optimizer.step()
    assert torch.equal(flat(model), before)


def test_a_step_inside_autocast_is_that_of_outside():
    weights = []
    for inside in (False, True):
        model, optimizer, _ = natural()
        F.cross_entropy(model(X), Y).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            optimizer.step()
        weights.append(flat(model))
    assert torch.equal(*weights)


class Centred(nn.Module):
    """Mixes samples, in training mode only."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


def test_evaluation_mode_at_construction_hides_nothing():
    torch.manual_seed(0)
    for kind, says in ((Centred(), "changes with the other samples"), (None, "are not autograd's")):
        conv = nn.Conv2d(1, 4, 3, padding=1, padding_mode="zeros" if kind else "circular")
        _, model, optimizer, _ = private(model=nn.Sequential(kind or nn.Identity(), conv, nn.Flatten(),
                                                             nn.Linear(256, 5)))
        model.eval()
        with pytest.raises(UsageError, match=says):
            DPNGD(optimizer, model, PUBLIC, lambda_safe=1.0, T=5)
        assert not any(m.training for m in model.modules()), "as it was"


@pytest.mark.parametrize("name", ["max_grad_norm", "noise_multiplier"])
def test_numbers_may_not_change_inside_a_logical_batch(name):
    model, optimizer, _ = natural(sigma=1.0)
    optimizer.signal_skip_step(True)
    step(model, optimizer, X, Y)
    setattr(optimizer, name, 0.5)
    with pytest.raises(UsageError, match=r"changed from \(1.0, 1.0\) to .* inside a logical batch"):
        step(model, optimizer, X, Y)
    step(model, optimizer, X, Y)  # between two it may
    assert optimizer.t == 1


# -- noise, steps, what is inside --------------------------------------------------------------------------------------


def moves(optimizer, model, n=3):
    found = []
    for _ in range(n):
        before = flat(model)
        step(model, optimizer, X[:0], Y[:0])
        found.append(flat(model) - before)
    return torch.cat(found)


def test_without_a_generator_noise_is_secret():
    """Neither torch's global generator nor its seed has a part in it."""
    drawn = []
    for _ in range(2):
        model = network()
        engine = PrivacyEngine(accountant="prv")
        model, optimizer, _ = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0,
            max_grad_norm=1.0, data_loader=DataLoader(DATA, batch_size=B))
        optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=1e9, lambda_base=1e9, T=10)
        torch.manual_seed(0)
        state = torch.get_rng_state()
        drawn.append(moves(optimizer, model))
        assert torch.equal(torch.get_rng_state(), state)
    assert abs(torch.corrcoef(torch.stack(drawn))[0, 1]) < 0.2
    assert drawn[0].std() == pytest.approx(1 / B, rel=0.2)


def test_a_given_generator_decides_the_noise():
    drawn = [moves(*reversed(natural(sigma=1.0, seed=seed)[:2])) for seed in (7, 7, 8)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_noise_of_this_path_is_drawn_in_double_precision(monkeypatch):
    asked = []
    monkeypatch.setattr("dpngd.opacus.TorchNoise", lambda generator: lambda like, std: asked.append(like.dtype) or like)
    model, optimizer, _ = natural(sigma=1.0)
    step(model, optimizer, X, Y)
    assert set(asked) == {torch.float64}


def test_steps_past_T_are_an_error_until_T_is_raised():
    model, optimizer, _ = natural(T=2)
    for _ in range(2):
        step(model, optimizer, X, Y)
    with pytest.raises(UsageError, match=r"step 3 of a run of T = 2 steps: .* set optimizer.T"):
        step(model, optimizer, X, Y)
    optimizer.T = 3
    step(model, optimizer, X, Y)
    assert (optimizer.t, optimizer.T) == (3, 3)
    with pytest.raises(UsageError, match="step 4"):
        step(model, optimizer, X, Y)


@pytest.mark.parametrize("inside", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
                                    lambda p: torch.optim.Adam(p, lr=1e-2)], ids=["momentum", "Adam"])
def test_what_the_wrapped_optimizer_does_is_post_processing(inside):
    """It is given the release as p.grad, and nothing else of the batch: the same one outside gives the same weights."""
    model = network()
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, _ = engine.make_private(
        module=model, optimizer=inside(model.parameters()), data_loader=DataLoader(DATA, batch_size=B),
        noise_multiplier=1.0, max_grad_norm=1.0, noise_generator=torch.Generator().manual_seed(0))
    optimizer = DPNGD(optimizer, model, PUBLIC, lambda_safe=0.3, T=10)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    twin = network()
    outside = inside(twin.parameters())
    rates = torch.optim.lr_scheduler.StepLR(outside, 2, gamma=0.1)
    for _ in range(5):
        step(model, optimizer, X, Y)
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        outside.step()
        schedule.step()
        rates.step()
        torch.testing.assert_close(flat(twin), flat(model), rtol=1e-6, atol=1e-8)
    assert optimizer.param_groups[0]["lr"] == outside.param_groups[0]["lr"] < inside(twin.parameters()).defaults["lr"]
    assert sum(steps for *_, steps in engine.accountant.history) == 5


# -- the public images -------------------------------------------------------------------------------------------------


def copied(change):
    x = PUBLIC.clone()
    x[11] = change(DATA.tensors[0][5])
    return x


def test_private_images_are_refused_as_public():
    _, model, optimizer, loader = private()

    def build(public, **options):
        return DPNGD(optimizer, model, public, lambda_safe=0.1, T=10, **options)

    for public, told in ((loader, None), (DataLoader(DATA, batch_size=8), DATA), (DATA.tensors[0], DATA),
                         (DataLoader(DATA, batch_size=8), loader), (DATA.tensors[0], DATA.tensors[0])):
        with pytest.raises(UsageError, match="public is the private data"):
            build(public, private=told)
    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return DATA[i]

    for change in (lambda x: x, lambda x: x.flip(2), lambda x: torch.roll(x, 1, 1)):
        for told in (DATA, loader, DATA.tensors[0], Pairs()):
            with pytest.raises(UsageError, match="public image 11 is also private image 5"):
                build(copied(change), private=told)
    build(PUBLIC, private=DATA)
    with pytest.raises(UsageError, match=r"public images reach .* and private ones .*: normalise both in the same way"):
        build(PUBLIC * 64, private=DATA)
    with pytest.raises(UsageError, match=r"public images are \(1, 8, 8\), private ones \(1, 6, 6\)"):
        build(PUBLIC, private=DATA.tensors[0][:, :, :6, :6])


@pytest.mark.parametrize(("public", "says"), [
    (PUBLIC[:49], "there are 49 public images: curvature needs at least 50"),
    ((PUBLIC * 50 + 100).to(torch.uint8), "public images are uint8: pass floats"),
    (((PUBLIC * 50 + 100).clamp(0, 255)).round(), "public images are whole numbers up to .*: pass them as the model"),
    (torch.cat([PUBLIC, torch.full_like(PUBLIC[:1], torch.inf)]), "not finite"),
    (PUBLIC[:, :, :6], r"cannot take public images of shape \(1, 6, 8\)"),
    (PUBLIC.expand(-1, 3, -1, -1), r"cannot take public images of shape \(3, 8, 8\)"),
], ids=["few", "uint8", "bytes as floats", "inf", "height", "channels"])
def test_public_images_are_checked_at_once(public, says):
    _, model, optimizer, _ = private()
    with pytest.raises(UsageError, match=says) as refusal:
        DPNGD(optimizer, model, public, lambda_safe=0.1, T=10)
    assert "\n" not in str(refusal.value)


class Mixing(nn.Module):
    """Subtracts the mean over the batch: no per-sample gradient exists."""

    def __init__(self):
        super().__init__()
        self.dropout, self.fc = nn.Dropout(1e-9), nn.Linear(64, 5)

    def forward(self, x):
        h = self.dropout(x.flatten(1))
        return self.fc(h - h.mean(0)) if len(h) else self.fc(h)


HALF = torch.bfloat16


@pytest.mark.parametrize(("build", "says"), [(Mixing, "mixes samples"), (lambda: network().to(HALF), "is bfloat16")],
                         ids=["mixing", "half precision"])
def test_models_without_a_guarantee_are_refused(build, says):
    model = build()
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=DataLoader(DATA, batch_size=B),
        noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.raises(UsageError, match=says):
        DPNGD(optimizer, model, PUBLIC, lambda_safe=0.1, T=10)


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

"""DPNGD in the programs that Opacus's users write: every way to per-sample gradients, every kind of layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.layers import DPMultiheadAttention
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpngd.curvature import KFAC
from dpngd.errors import UsageError
from dpngd.geometry import Kronecker
from dpngd.gradients import PerSample
from dpngd.mechanism import GaussianMechanism
from dpngd.opacus import DPNGD, check_opacus

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus warns about itself in many places
N, B, V, D, L, CLASSES = 64, 16, 11, 8, 6, 4
MODES = ("hooks", "functorch", "ew")


class Transformer(nn.Module):
    """A classifier of sequences of tokens (n, L); token 0 is padding."""

    def __init__(self, add_bias_kv=False):
        super().__init__()
        self.emb, self.pos = nn.Embedding(V, D, padding_idx=0), nn.Embedding(L, D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = DPMultiheadAttention(D, 2, batch_first=True, add_bias_kv=add_bias_kv)
        self.up, self.down, self.head = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.emb(x) + self.pos(torch.arange(x.shape[1]).expand_as(x))
        z = self.norm1(h)
        h = h + self.attention(z, z, z, need_weights=False)[0]
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        return self.head(h.mean(1))


class Bag(nn.Module):
    """The mean of the embeddings: it takes empty batches too."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(V, D, padding_idx=0), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.emb(x)).mean(1))


def signal_network():
    return nn.Sequential(nn.Conv1d(2, 6, 3, padding=1), nn.InstanceNorm1d(6, affine=True),
                         nn.ReLU(), nn.Conv1d(6, 8, 3, stride=2, dilation=2, groups=2), nn.ReLU(), nn.Flatten(),
                         nn.Linear(40, CLASSES))


def image_network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Flatten(),
                         nn.Linear(64, CLASSES))


def conv_network():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
                         nn.Conv2d(4, 8, 3, padding=1, stride=2, groups=2), nn.ReLU(), nn.Conv2d(8, 32, 2, dilation=2),
                         nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES))


def sequence_network():
    return nn.Sequential(nn.Linear(3, D), nn.Tanh(), nn.LayerNorm(D), nn.Linear(D, D), nn.Flatten(),
                         nn.Linear(D * L, CLASSES))


def random(kind, n, seed):
    g = torch.Generator().manual_seed(seed)
    if kind == "tokens":
        return torch.randint(V, (n, L), generator=g)
    return torch.randn(n, *{"signals": (2, 13), "images": (1, 6, 6), "sequences": (L, 3)}[kind], generator=g)


PROGRAMS = {"transformer": (Transformer, "tokens"), "bag": (Bag, "tokens"), "signals": (signal_network, "signals"),
            "images": (image_network, "images"), "convolutions": (conv_network, "images"),
            "sequences": (sequence_network, "sequences")}


def program(name="transformer", sigma=0.0, inside=None, freeze=None, build=None, **options):
    """(engine, model, what make_private returned, loader, public data) of a program."""
    made, kind = PROGRAMS[name]
    torch.manual_seed(0)
    model = (build or made)()
    if freeze is not None:
        freeze(model)
    x = random(kind, N, 1)
    data = TensorDataset(x, torch.arange(N) % CLASSES)
    engine = PrivacyEngine(accountant="prv")
    inside = inside or (lambda m: torch.optim.SGD(m.parameters(), lr=0.5))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=inside(model), data_loader=DataLoader(data, batch_size=B), noise_multiplier=sigma,
        max_grad_norm=1.0, noise_generator=torch.Generator().manual_seed(3), **options)
    return engine, model, optimizer, loader, random(kind, 60, 2)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batch(loader, n=B):
    return loader.dataset[:n]


# -- budgets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_a_target_epsilon_is_spent_as_by_dp_sgd(accountant):
    """make_private_with_epsilon, whatever the accountant: the noise and the steps that it counts are DP-SGD's."""
    counted = []
    for natural in (False, True):
        torch.manual_seed(0)
        data, model = TensorDataset(random("images", N, 1), torch.arange(N) % CLASSES), conv_network()
        engine = PrivacyEngine(accountant=accountant)
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(data, batch_size=B), target_epsilon=8.0, target_delta=1e-3, epochs=2,
            max_grad_norm=1.0)
        if natural:
            optimizer = DPNGD(optimizer, model, random("images", 60, 2), T=2 * len(loader))
        for x, y in (rows for _ in range(2) for rows in loader):
            step(model, optimizer, x, y)
        counted.append((engine.accountant.history, engine.get_epsilon(1e-3)))
    assert counted[0] == counted[1]
    assert 0 < counted[1][1] <= 8.0 + 0.01, "Opacus searches its noise to within 0.01"


# -- ways to per-sample gradients, kinds of layers -----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_is_that_of_our_own_gradients(name, mode):
    """Opacus's per-sample gradients through `join`, against PerSample's through the same mechanism."""
    _, model, optimizer, loader, public = program(name, grad_sample_mode=mode)
    torch.manual_seed(0)
    twin = PROGRAMS[name][0]()  # the same weights, without Opacus's hooks
    assert torch.equal(flat(twin), flat(model))
    optimizer = DPNGD(optimizer, model, public, lambda_safe=0.1, T=10, labels="exact")
    x, y = batch(loader)
    step(model, optimizer, x, y)

    per_sample, geometry = PerSample(twin), Kronecker()
    geometry.set([F.scaled(10.0) for F in KFAC(twin, public, labels="exact")()],
                 optimizer.floor(0) / 0.1)
    ours = GaussianMechanism((1.0,), 0.0, B).release([per_sample(x, y)], geometry, per_sample.zeros(), None)
    assert ours.clipped > 0
    before = flat(twin)
    per_sample.add_(ours.direction, -0.5)
    moved = (flat(twin) - before).norm()
    assert moved > 0
    assert (flat(model) - flat(twin)).norm() < 1e-3 * moved


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_trains_with_nothing_to_tune(name):
    """A few noisy steps of the default mode over the engine's own loader, from public data of the same form."""
    engine, model, optimizer, loader, public = program(name, sigma=1.0)
    optimizer = DPNGD(optimizer, model, public, T=2 * len(loader), private=loader)
    before = flat(model)
    for x, y in [b for _ in range(2) for b in loader]:
        step(model, optimizer, x, y)
    assert flat(model).isfinite().all()
    assert not torch.equal(flat(model), before)
    assert engine.get_epsilon(1e-5) > 0
    assert f"{2 * len(loader)} of {2 * len(loader)}" in optimizer.summary()


def test_a_transformer_learns():
    """Which of the tokens 1 to 4 occurs in a sequence, without noise: from chance to most of them."""
    torch.manual_seed(0)
    x = torch.randint(CLASSES + 1, V, (256, L))
    y = torch.randint(CLASSES, (256,))
    x[torch.arange(256), torch.randint(L, (256,))] = y + 1
    model = Transformer()
    model, optimizer, loader = PrivacyEngine(accountant="prv").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=64), poisson_sampling=False)
    optimizer = DPNGD(optimizer, model, torch.randint(1, V, (200, L)), T=60, kl_noise=None)
    for x_b, y_b in [b for _ in range(15) for b in loader]:
        step(model, optimizer, x_b, y_b)
    assert (model(x).argmax(1) == y).float().mean() > 0.6  # chance is 0.25


def test_an_empty_batch_of_tokens_is_noise_alone():
    """Opacus gives the embedding one row of zeros then, and other layers none."""
    _, model, optimizer, loader, public = program("bag", sigma=1.0)
    optimizer = DPNGD(optimizer, model, public, T=10)
    padding = model._module.emb.weight[0].detach().clone()
    before = flat(model)
    step(model, optimizer, *(t[:0] for t in batch(loader)))
    assert not torch.equal(flat(model), before)
    assert optimizer.seen == 0
    step(model, optimizer, *batch(loader))
    assert optimizer.seen == B
    assert torch.equal(model._module.emb.weight[0], padding)  # no noise on the row of padding_idx


# -- what surrounds the optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_memory_manager_gives_the_same_steps(mode):
    results = []
    for physical in (B, 5):
        _, model, optimizer, loader, public = program(poisson_sampling=False, grad_sample_mode=mode)
        optimizer = DPNGD(optimizer, model, public, lambda_safe=0.1, T=10)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as batches:
            for x, y in batches:
                step(model, optimizer, x, y)
        assert optimizer.t == N // B
        results.append(flat(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-5)


def test_schedulers_of_noise_and_clipping_reach_the_mechanism_and_the_accountant():
    engine, model, optimizer, loader, public = program("bag", sigma=2.0)
    optimizer = DPNGD(optimizer, model, public, lambda_safe=0.1, T=10)
    noise, clip = ExponentialNoise(optimizer, gamma=0.5), ExponentialGradClip(optimizer, gamma=0.9)
    used = []
    for _ in range(3):
        used.append((optimizer.noise_multiplier, optimizer.max_grad_norm))
        step(model, optimizer, *batch(loader))
        noise.step()
        clip.step()
    assert [sigma for sigma, _ in used] == pytest.approx([2.0, 1.0, 0.5])
    assert [C for _, C in used] == pytest.approx([1.0, 0.9, 0.81])
    assert [(sigma, steps) for sigma, _, steps in engine.accountant.history] == [(2.0, 1), (1.0, 1), (0.5, 1)]


def test_a_scheduler_of_the_rate_that_was_made_before_wrapping():
    """It holds the wrapped optimizer, whose parameter groups DPNGD shares."""
    _, model, optimizer, loader, public = program("bag")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.original_optimizer, 1, gamma=0.0)
    optimizer = DPNGD(optimizer, model, public, lambda_safe=0.1, T=10)
    start = flat(model)
    step(model, optimizer, *batch(loader))
    schedule.step()
    after = flat(model)
    assert not torch.equal(start, after)
    step(model, optimizer, *batch(loader))  # at rate 0
    assert torch.equal(flat(model), after)


@pytest.mark.parametrize("inside", [torch.optim.SGD, torch.optim.Adam])
def test_parameter_groups_keep_their_rates(inside):
    """A group at rate 0 stays; the other one moves as with one group, but for its rate."""

    def groups(m):
        return inside([{"params": list(m.emb.parameters()), "lr": 0.0}, {"params": list(m.head.parameters())}], lr=0.1)

    _, model, optimizer, loader, public = program("bag", inside=groups)
    optimizer = DPNGD(optimizer, model, public, T=10, kl_budget=None)
    assert len(optimizer.param_groups) == 2
    start = copy.deepcopy(model._module.state_dict())
    for _ in range(3):
        step(model, optimizer, *batch(loader))
    now = model._module.state_dict()
    assert torch.equal(now["emb.weight"], start["emb.weight"])
    assert not torch.equal(now["head.weight"], start["head.weight"])


@pytest.mark.parametrize("inside", [lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
                                    lambda m: torch.optim.Adam(m.parameters(), lr=1e-2)], ids=["momentum", "Adam"])
def test_momentum_and_adam_inside_with_a_floor_by_rank(inside):
    _, model, optimizer, loader, public = program(inside=inside, sigma=1.0)
    optimizer = DPNGD(optimizer, model, public, T=10, kl_budget=None)
    twin = copy.deepcopy(model._module)
    outside = inside(twin)
    for _ in range(3):
        step(model, optimizer, *batch(loader))
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        outside.step()
        torch.testing.assert_close(flat(twin), flat(model), rtol=1e-6, atol=1e-8)
    with pytest.raises(UsageError, match="kl_budget=None"):
        DPNGD(*reversed(program(inside=inside)[1:3]), public, T=10)


def head_only(model):
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("head"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given", ["all", "trainable"])
def test_only_a_head_trains(mode, given):
    """The optimizer may be given all parameters, or those that train; the body stays, whatever it is made of."""

    def inside(m):
        return torch.optim.SGD([p for p in m.parameters() if given == "all" or p.requires_grad], lr=0.5)

    _, model, optimizer, loader, public = program(inside=inside, freeze=head_only, grad_sample_mode=mode,
                                                  build=lambda: Transformer(add_bias_kv=True), sigma=1.0)
    optimizer = DPNGD(optimizer, model, public, T=10)
    assert [layer.name for layer in optimizer.layers] == ["head"]
    start = {name: p.clone() for name, p in model._module.state_dict().items()}
    for _ in range(3):
        step(model, optimizer, *batch(loader))
    moved = {name for name, p in model._module.state_dict().items() if not torch.equal(p, start[name])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize("options", [{}, {"lambda_safe": 0.1}, {"kl_budget": None, "kl_radius": 0.01}], ids=str)
def test_checkpoints_of_the_engine(options, tmp_path):
    """Six steps are three, a checkpoint, and three in a new process' objects: weights, budget and schedule."""

    def start():
        engine, model, optimizer, loader, public = program("signals", poisson_sampling=False)
        return engine, model, DPNGD(optimizer, model, public, T=6, T_cur=3, **options), list(loader)

    def go(model, optimizer, batches):
        for x, y in batches:
            step(model, optimizer, x, y)

    engine, model, optimizer, batches = start()
    go(model, optimizer, batches[:3])
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    go(model, optimizer, (batches * 2)[3:6])

    again, resumed, other, _ = start()
    other_start = flat(resumed)
    again.load_checkpoint(path=tmp_path / "run.pt", module=resumed, optimizer=other)
    assert other.t == 3
    assert not torch.equal(flat(resumed), other_start)
    go(resumed, other, (batches * 2)[3:6])
    torch.testing.assert_close(flat(resumed), flat(model), rtol=1e-5, atol=1e-7)
    assert again.accountant.history == engine.accountant.history
    with pytest.raises(UsageError, match="T = 6"):
        go(resumed, other, batches[:1])


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_sequence_bias_with_the_batch_second_is_refused():
    """Opacus takes its first axis, time, for the batch: its per-sample gradients would be wrong."""
    _, model, optimizer, _, public = program(build=lambda: Transformer(add_bias_kv=True))
    with pytest.raises(UsageError, match=r"'attention.seq_bias_k' \(SequenceBias\).*add_bias_kv=False"):
        DPNGD(optimizer, model, public, T=10)


@pytest.mark.parametrize("kind", ["signals", "images"])
def test_gradients_of_opacus_that_are_not_autograds_are_refused(kind):
    """Its hooks pad by zeros whatever padding_mode says; functorch does not."""

    def build():
        if kind == "signals":
            return nn.Sequential(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(26, 4))
        return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(72, 4))

    _, model, optimizer, _, public = program(kind, build=build)
    with pytest.raises(UsageError, match=r"gradients of layer '0' \(Conv.d\) are not autograd's.*functorch"):
        DPNGD(optimizer, model, public, T=10)
    assert all(p.grad_sample is None and p.grad is None for p in model.parameters())
    _, model, optimizer, loader, public = program(kind, build=build, grad_sample_mode="functorch")
    step(model, DPNGD(optimizer, model, public, T=10), *batch(loader))


def test_the_comparison_with_opacus_leaves_no_trace():
    """Gradients of a batch that came before and dropout's generator are as without it."""

    def build():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    _, model, optimizer, loader, public = program("images", build=build)
    optimizer = DPNGD(optimizer, model, public, T=10)
    x, y = batch(loader)
    F.cross_entropy(model(x), y).backward()
    held = [(p.grad.clone(), p.grad_sample.clone()) for p in model.parameters()]
    state = torch.get_rng_state()
    check_opacus(model, optimizer.layers, public, optimizer._hooks_off)
    assert torch.equal(torch.get_rng_state(), state)
    for p, (grad, samples) in zip(model.parameters(), held, strict=True):
        assert torch.equal(p.grad, grad)
        assert torch.equal(p.grad_sample, samples)


def test_batch_first_false_is_refused():
    _, model, optimizer, _, public = program("sequences", batch_first=False)
    with pytest.raises(UsageError, match="batch_first=True"):
        DPNGD(optimizer, model, public, T=10)


def test_ghost_mode_is_refused():
    model = Bag()
    made = PrivacyEngine(accountant="prv").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(random("tokens", N, 1), torch.zeros(N).long()), batch_size=B),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost")
    with pytest.raises(UsageError, match="'hooks', 'functorch' or 'ew'"):
        DPNGD(made[1], made[0], random("tokens", 60, 2), T=10)


def test_gradients_that_do_not_belong_to_the_same_samples_are_refused():
    _, model, optimizer, loader, public = program("bag")
    optimizer = DPNGD(optimizer, model, public, T=10)
    optimizer.zero_grad()
    x, y = batch(loader)
    F.cross_entropy(model(x), y).backward()
    weight = model._module.head.weight
    weight.grad_sample = weight.grad_sample[:-1]
    with pytest.raises(UsageError, match=r"16 per-sample gradients of 'emb.weight' and 15 of 'head.weight'"):
        optimizer.step()


def test_private_tokens_are_refused_as_public():
    _, model, optimizer, loader, public = program("bag")
    public[7] = loader.dataset.tensors[0][3]
    with pytest.raises(UsageError, match="public sequence 7 is also private sequence 3"):
        DPNGD(optimizer, model, public, T=10, private=loader)
    with pytest.raises(UsageError, match=r"cannot take public images of shape \(6,\)"):
        DPNGD(optimizer, model, public + V, T=10)

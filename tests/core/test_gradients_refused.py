"""Models and losses without per-sample gradients are refused, in one line that says what to do."""

import pytest
import reference
import torch
import torch.nn.functional as F
from gradient_checks import CLASSES, check_everything, sample, seeded
from torch import nn

from dpngd.errors import UsageError
from dpngd.gradients import PerSample


class Scaled(nn.Module):
    """A bare parameter of a module's own."""

    def __init__(self):
        super().__init__()
        self.gain, self.fc = nn.Parameter(torch.ones(4)), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.fc(self.gain * x)


def shared_weight():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def bias_only():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES))
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(("build", "says"), [
    (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), ["'1'", "BatchNorm2d", "mixes the samples",
                                                                    "GroupNorm"]),
    (lambda: nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)), ["'0'", "BatchNorm1d", "mixes"]),
    (lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 3)), ["SyncBatchNorm", "mixes"]),
    (lambda: nn.Sequential(nn.Bilinear(5, 4, 3)), ["'0'", "Bilinear", "not covered", "requires_grad_"]),
    (lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=1.0)), ["'0'", "max_norm", "leave it out"]),
    (lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True)), ["'0'", "sparse=True", "sparse=False"]),
    (lambda: nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True)), ["'0'", "scale_grad_by_freq", "mixes"]),
    (lambda: nn.Sequential(nn.Embedding(9000, 1)), ["'0'", "9000 rows", "at most 8192"]),
    (lambda: nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
     ["'0'", "InstanceNorm1d", "running statistics", "track_running_stats=False"]),
    (lambda: nn.Sequential(nn.MultiheadAttention(4, 2)), ["'0'", "MultiheadAttention", "not covered"]),
    (lambda: nn.Sequential(nn.LSTM(4, 2)), ["'0'", "LSTM", "not covered"]),
    (Scaled, ["Scaled", "not covered", "requires_grad_(False)"]),
    (lambda: nn.Sequential(nn.Conv3d(4, 4, 1)), ["Conv3d", "not covered"]),
    (shared_weight, ["2.weight", "shared with layer '0'"]),
    (bias_only, ["'0'", "frozen weight and a trainable bias"]),
    (lambda: nn.Sequential(nn.Linear(4, 3)).requires_grad_(False), ["no trainable parameters"]),
])
def test_models_that_are_refused(build, says):
    with pytest.raises(UsageError) as refusal:
        PerSample(build())
    message = str(refusal.value)
    assert all(words in message for words in says), message
    assert "\n" not in message


def test_a_frozen_layer_of_an_uncovered_kind_is_fine():
    model = seeded(Scaled)
    model.gain.requires_grad_(False)
    x, y = sample((4,), 3, 1, torch.float32)
    check_everything(PerSample(model)(x, y), *reference.per_sample(model, x, y), tolerance=1e-5)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


class Tied(Twice):
    """The weight of `body` is used again outside its module: no hook sees that."""

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(torch.tanh(F.linear(h, self.body.weight.t())))


class Centred(Twice):
    """What mixes the samples has no parameters."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, x):
        return self.head(self.mix(torch.tanh(self.body(x))))


class InPlace(Twice):
    """What `body` was given is changed after it."""

    def forward(self, x):
        h = torch.tanh(x)
        z = self.body(h)
        h.mul_(2)
        return self.head(z + h)


MIXES = {
    "mean": lambda h: h - h.mean(0),
    "first": lambda h: h - h[:1],
    "last": lambda h: h + h[-1:],
    "running": lambda h: h.cumsum(0),
}


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize(("build", "says"), [
    (Twice, ["'body'", "called twice", "layer of its own"]),
    (Tied, ["'body.weight'", "is not autograd's", "tying"]),
    *[(lambda mix=mix: Centred(mix), ["mixes samples", "other samples of the batch"]) for mix in MIXES.values()],
    (InPlace, ["'body'", "changed in place", "inplace=False"]),
], ids=["called twice", "tied", *MIXES, "in place"])
def test_models_that_the_first_micro_batch_finds_out(build, says, K):
    x, y = sample((4,), 4, K, torch.float32)
    with pytest.raises(UsageError) as refusal:
        PerSample(seeded(build), K=K)(x, y)
    message = str(refusal.value)
    assert all(words in message for words in says), message
    assert "\n" not in message


def test_mixing_is_found_whatever_comes_first():
    """A row alone gets another beside it; rows that are not finite show nothing, so the next micro-batch is checked."""
    x, y = sample((4,), 4, 1, torch.float32)
    mixing = seeded(lambda: Centred(MIXES["mean"]))
    with pytest.raises(UsageError, match="mixes samples"):
        PerSample(mixing)(x[:1], y[:1])
    persample = PerSample(mixing)
    persample(torch.full((4, 4), torch.nan), y)
    with pytest.raises(UsageError, match="mixes samples"):
        persample(x, y)


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_mixing_is_found_behind_dropout(mix, K):
    """Dropout is off when outputs are compared, and on again afterwards."""
    x, y = sample((4,), 4, K, torch.float32)
    model = seeded(lambda: nn.Sequential(nn.Dropout(1e-9), Centred(mix)))
    with pytest.raises(UsageError, match="mixes samples"):
        PerSample(model, K=K)(x, y)
    assert model[0].training


class Mixed(nn.Module):
    """A linear layer behind an operation over the batch."""

    def __init__(self, mix):
        super().__init__()
        self.mix, self.fc = mix, nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.fc(self.mix(x))


@pytest.mark.parametrize("strength", [1e-2, 1e-4, 1e-5])
def test_weak_mixing_is_found_by_an_outlier(strength):
    """Among ordinary samples it is below the comparison's tolerance; one large sample of an adversary shows it."""
    x, y = sample((4,), 4, 1, torch.float32)
    with pytest.raises(UsageError, match="mixes samples"):
        PerSample(seeded(lambda: Mixed(lambda h: h + strength * h.sum(0))))(x, y)


def test_mixing_of_some_rows_only_is_found():
    """Rows beyond the second: a check of two samples cannot see them."""
    def mix(h):
        return torch.cat([h[:3], h[3:] + h[:1]]) if len(h) > 3 else h

    x, y = sample((4,), 8, 1, torch.float32)
    with pytest.raises(UsageError, match="mixes samples"):
        PerSample(seeded(lambda: Centred(mix)))(x, y)


def test_mixing_that_overflows_is_no_excuse():
    x, y = sample((4,), 8, 1, torch.float32)
    with pytest.raises(UsageError, match="mixes samples"):
        PerSample(seeded(lambda: Mixed(lambda h: h + 0 * h.square().exp().mean(0))))(x, y)


@pytest.mark.parametrize("layer", [lambda: nn.InstanceNorm2d(2, track_running_stats=True),
                                   lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True)])
def test_a_forward_pass_that_changes_a_buffer_is_refused(layer):
    """Running statistics are exact means of private batches; after the refusal they are as they were."""
    x, y = sample((1, 4, 4), 8, 1, torch.float32)
    model = seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 1), layer(), nn.Flatten(), nn.Linear(32, CLASSES)))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"changes the buffer '1\.(running_mean|num_batches_tracked)'|InstanceNorm"):
        PerSample(model)(x, y)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_buffers_that_stay_are_fine():
    x, y = sample((4,), 8, 1, torch.float32)
    model = seeded(lambda: nn.Sequential(nn.Linear(4, CLASSES)))
    model.register_buffer("kept", torch.ones(3))
    PerSample(model)(x, y)


@pytest.mark.parametrize("K", [1, 4])
def test_dropout_alone_is_fine(K):
    x, y = sample((4,), 4, K, torch.float32)
    PerSample(seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))), K=K)(x, y)


def test_a_loss_that_compares_rows_is_refused():
    x, y = sample((4,), 4, 1, torch.float32)

    def contrast(output, y):
        losses = F.cross_entropy(output, y, reduction="none")
        return losses - 0.5 * losses.mean()

    with pytest.raises(UsageError, match="mixes samples"):
        PerSample(seeded(lambda: nn.Linear(4, CLASSES)), loss=contrast)(x, y)


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda output, y: F.cross_entropy(output, y)[None],
                                  lambda output, y: output])
def test_a_loss_must_give_one_value_per_row(loss):
    x, y = sample((4,), 4, 1, torch.float32)
    for check in (True, False):
        with pytest.raises(UsageError, match=r"one value per row \(reduction='none'\)"):
            PerSample(nn.Linear(4, CLASSES), loss=loss, check=check)(x, y)


@pytest.mark.parametrize(("rows", "targets", "K"), [(6, 6, 4), (8, 3, 4), (4, 3, 1), (8, 4, 1)])
def test_rows_that_do_not_make_samples(rows, targets, K):
    with pytest.raises(UsageError, match=f"{rows} views and {targets} targets do not make samples of K={K}"):
        PerSample(nn.Linear(4, CLASSES), K=K)(torch.zeros(rows, 4), torch.zeros(targets, dtype=torch.long))


def test_targets_may_be_given_for_each_view():
    model = seeded(lambda: nn.Linear(4, CLASSES))
    x, y = sample((4,), 3, 4, torch.float32)
    persample = PerSample(model, K=4)
    torch.testing.assert_close(persample(x, y.repeat_interleave(4)).materialise(), persample(x, y).materialise())

"""Release mode: secret noise and batches, and nothing in OUT that the guarantee does not cover."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dpngd.errors import UsageError
from dpngd.methods import private_curvature
from dpngd.suite import profiles
from dpngd.training import command, models
from dpngd.training import train as training
from dpngd.training.release import card_of, release
from dpngd.training.train import Trained, run, train

QUICK = profiles.load("quick")
METHODS = ("dp-sgd", "dp-ngd", "gep", "dp-ngd-private-50")


def config(method="dp-sgd", seed=0, **changes):
    public = {} if method in ("dp-sgd", "dp-ngd-private-50") else {"public_size": 50}
    return QUICK.config(method, "digits", 4.0, seed, **{"T": 3, "evals": 1, **public, **changes})


def weights(trained: Trained) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trained.model.parameters()])


def test_a_seeded_run_is_marked_as_a_simulation():
    record = run(config())
    assert record.privacy["simulation"] is True
    assert record.train_loss
    assert torch.equal(weights(train(config())), weights(train(config())))
    with pytest.raises(UsageError, match="is a simulation"):
        card_of(config(), record)


def test_noise_is_one_of_two():
    with pytest.raises(UsageError, match="unknown noise 'secure': did you mean 'secret'"):
        run(config(), noise="secure")


@pytest.mark.parametrize("method", METHODS)
def test_secret_runs_share_neither_noise_nor_batches(method, monkeypatch):
    """No stream of the seed is asked for sampling, noise, views or labels of private samples; two runs of one config
    part at the first step."""
    asked = []
    real = training.stream
    for module in (training, private_curvature):
        monkeypatch.setattr(module, "stream", lambda seed, name: asked.append(name) or real(seed, name))
    monkeypatch.setattr("dpngd.noise.SeededNoise", None)  # no seeded noise, in whatever module
    first, second = (train(config(method), noise="secret") for _ in range(2))
    assert not [name for name in asked if any(word in name for word in ("sampling", "noise", "augment", "labels"))]
    assert "weights" in asked, "the streams were watched"
    assert (weights(first) != weights(second)).float().mean() > 0.9
    assert first.record.privacy["simulation"] is False


def test_secret_views_are_no_function_of_the_seed():
    """With seeded views one sample more gives all those behind it other views: the sum moves by more than C."""
    private, _ = training.load(config())
    for secret in (False, True):
        first, second = (training.Batches(private, config(), secret=secret).augmentation for _ in range(2))
        assert torch.equal(torch.rand(9, generator=first), torch.rand(9, generator=second)) is not secret


def test_a_secret_record_says_nothing_of_the_private_data():
    record = run(config("dp-ngd"), noise="secret")
    assert (record.accuracy, record.evaluations, record.train_loss, record.diagnostics) == (None, [], [], {})
    assert "correct" not in record.to_dict()
    assert "digest" not in record.data["private"]
    assert record.steps == 3
    said = []
    run(config(), noise="secret", progress=lambda step, loss, epsilon: said.append(loss))
    assert all(loss != loss for loss in said)


def test_a_secret_run_does_not_stop_by_a_loss(monkeypatch):
    """A batch whose loss is infinite ends a seeded run; that would tell of the batch."""
    real = training.Batches.draw

    def poisoned(self):
        for x, y in real(self):
            yield torch.full_like(x, torch.inf), y

    monkeypatch.setattr(training.Batches, "draw", poisoned)
    assert run(config()).steps < 3
    record = run(config(), noise="secret")
    assert (record.status, record.steps) == ("ok", 3)


def keys(value, path=""):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from keys(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, path)
    else:
        yield path[1:]


ALLOWED = {
    "format", "made_by", "model.name", "model.classes", "model.parameters", "model.input", "model.weights",
    "method.name", "method.label", "method.about", "private_data.name", "public_data", "public_data.name",
    "public_data.size", "public_data.source", *(f"privacy.{name}" for name in (
        "epsilon", "delta", "accountant", "epsilon_rdp", "neighbours", "sampling", "q", "B", "T", "sigma",
        "releases.purpose", "releases.sigma", "releases.releases", "noise", "covers", "does_not_cover"))}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written(method, tmp_path):
    c = config(method)
    card = release(c, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "card.json", "weights.safetensors"}
    assert json.loads((tmp_path / "out" / "card.json").read_text()) == card
    assert set(keys(card)) <= ALLOWED
    p = card["privacy"]
    assert 0 < p["epsilon"] <= 4.0
    assert (p["T"], p["B"], card["method"]["name"]) == (3, c.B, method)
    text = (tmp_path / "out" / "README.md").read_text()
    assert f"{p['sigma']:.6g}" in text
    for word in ("loss", "norm ", "clipped", "digest", "seed", "accuracy"):
        assert word not in text.replace("GroupNorm", "").lower()
        assert word not in json.dumps(card).lower()
    held = load_file(tmp_path / "out" / "weights.safetensors")
    model = models.build(c.model, classes=10, in_channels=1, size=8)
    model.load_state_dict(held)
    assert all(value.isfinite().all() for value in held.values())


def test_two_releases_differ_and_the_place_must_be_new(tmp_path):
    for name in "ab":
        release(config(), tmp_path / name)
    first, second = ((tmp_path / name / "weights.safetensors").read_bytes() for name in "ab")
    assert first != second
    with pytest.raises(UsageError, match="exists already"):
        release(config(), tmp_path / "a")
    with pytest.raises(UsageError, match="there is no folder"):
        release(config(), tmp_path / "none" / "a")


def test_a_place_is_taken_before_the_budget_is_spent(tmp_path, monkeypatch):
    """Two processes, one folder: the second would replace weights of which somebody has read the card."""
    from dpngd.training import release as module

    monkeypatch.setattr("dpngd.training.train.train", lambda *a, **k: pytest.fail("trained"))
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(module, "check_place", lambda out: None)  # both looked at the same time
    (tmp_path / "out" / ".unfinished").touch()
    with pytest.raises(UsageError, match="out cannot be used for a release"):
        release(config(), tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="the release has no name"):
        release(config(), "")

    def interrupted(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr("dpngd.training.train.train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        release(config(), tmp_path / "new")
    assert not (tmp_path / "new").exists(), "nothing is left"


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    with pytest.raises(UsageError, match=r"the weights are not finite after step .* of 3: nothing was written"):
        release(config(eta=1e38, C=1e6), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_line(tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--method", "dp-sgd", "--T", "2", "--evals", "1", "--quiet"]
    assert command.main([*options, "--release", str(out)]) == 0
    said = capsys.readouterr()
    assert "weights.safetensors" in said.out
    assert "epsilon" in said.out
    assert "accuracy" not in said.out + said.err
    with pytest.raises(UsageError, match="exists already"):
        command.main([*options, "--release", str(out)])
    assert command.main(options) == 0
    assert "a simulation" in capsys.readouterr().out

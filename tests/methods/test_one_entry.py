"""A method, a network and a data set are defined once: one added at run time is trained and drawn like the others."""

import numpy as np
import pytest
from torch import nn

from dpngd import methods
from dpngd.data import sets
from dpngd.errors import UsageError
from dpngd.geometry import Euclidean
from dpngd.mechanism import GaussianMechanism
from dpngd.suite import command, cost, figures
from dpngd.suite.runs import Runs
from dpngd.training import models
from dpngd.training.config import RunConfig
from dpngd.training.train import run


class Halved(Euclidean):
    """L = I, R = I / 2."""

    def back(self, releases):
        return [block / 2 for block in super().back(releases)]


def build(setting):
    """Guarantee: that of DP-SGD; halving comes after the noise."""
    return methods.Built(Halved(), GaussianMechanism((setting.config.C,), setting.spends[0].sigma, setting.config.B))


@pytest.fixture
def halved():
    entry = methods.register(methods.Method(name="halved", label="Halved", about="DP-SGD at half its rate",
                                            uses=frozenset({"C"}), builder=build, colour="#123456", marker="*",
                                            baseline=True))
    yield entry
    del methods.METHODS["halved"]


def digits(method, seed=0, **changes):
    return RunConfig.from_dict({"method": method, "data": "digits", "model": "small", "epsilon": 4.0, "B": 64, "T": 3,
                                "eta": 2.0, "seed": seed, "C": 1.0, "evals": 1, **changes})


def test_a_method_added_at_run_time_trains_is_timed_and_drawn(halved, capsys):
    half, whole = run(digits("halved")), run(digits("dp-sgd", eta=1.0))
    assert half.status == "ok"
    assert half.train_loss == pytest.approx(whole.train_loss, rel=1e-5)  # half the map is half the rate
    assert half.privacy["sigma"] == whole.privacy["sigma"]

    assert command.bench(["--models", "small", "--batch", "4", "--repeats", "1", "--public", "60", "--threads", "1",
                       "--no-memory", "--quiet", "--contenders", "halved", "dp-sgd"]) == 0
    assert "halved" in capsys.readouterr().out
    assert cost.flops_of(digits("halved")) > 0.9 * cost.flops_of(digits("dp-sgd"))

    records = [half.to_dict(), run(digits("dp-sgd")).to_dict()]
    configs = [digits("halved"), digits("dp-sgd")]
    runs = Runs.of(configs, records)
    assert runs.baselines() == ["dp-sgd", "halved"]
    drawn = figures.utility(runs)
    assert "Halved" in [text.get_text() for text in drawn.legends[0].get_texts()]


def test_a_name_is_registered_once_and_an_unknown_one_is_an_error(halved):
    with pytest.raises(UsageError, match="'halved' is registered already"):
        methods.register(halved)
    with pytest.raises(UsageError, match="unknown method 'halve': did you mean 'halved'"):
        digits("halve")


def test_a_network_added_at_run_time_trains(monkeypatch):
    def line(numbers, classes, in_channels, size):
        return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * size * size, numbers[0]), nn.ReLU(),
                             nn.Linear(numbers[0], classes))

    monkeypatch.setattr(models, "FAMILIES", [*models.FAMILIES, models.Family(r"line-(\d+)", ("line-16",), line)])
    record = run(digits("dp-sgd", model="line-16"))
    assert record.status == "ok"
    assert record.parameters == 64 * 16 + 16 + 16 * 10 + 10


def test_a_data_set_added_at_run_time_trains(monkeypatch):
    def halves(entry, root, download):
        rng = np.random.default_rng(0)
        y = rng.integers(0, 2, 240)
        x = (rng.integers(0, 100, (240, 8, 8, 1)) + 100 * y[:, None, None, None]).astype(np.uint8)
        arrays = {"x_train": x[:200], "y_train": y[:200], "x_test": x[200:], "y_test": y[200:]}
        return arrays, 2, "made by a test", "0"

    monkeypatch.setattr(sets, "SETS", dict(sets.SETS))
    sets.register(sets.DataSet(name="halves", label="Halves", private=True, loader=halves))
    record = run(digits("dp-sgd", data="halves", B=32, T=10))
    assert record.data["private"]["N"] == 200
    assert record.accuracy > 0.9
    assert figures.title(Runs.of([digits("dp-sgd", data="halves")], []), "halves").startswith("Halves")
    with pytest.raises(UsageError, match="unknown private data set 'halve': did you mean 'halves'"):
        digits("dp-sgd", data="halve")

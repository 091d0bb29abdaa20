"""`dpngd show`: where a config's values come from, the spectrum of F, the methods."""

import json

import pytest
import torch

from dpngd.clamping import floor_by_rank
from dpngd.curvature import LayerCurvature
from dpngd.errors import UsageError
from dpngd.methods import METHODS
from dpngd.suite import command, profiles
from dpngd.training.config import RunConfig


def shown(capsys, *argv):
    assert command.show([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_config_is_the_profiles_and_every_value_has_its_origin(capsys):
    found = shown(capsys, "config", "--profile", "quick", "--method", "dp-ngd", "--data", "digits", "--epsilon", "2",
                  "--T_cur", "4")
    config = profiles.load("quick").config("dp-ngd", "digits", 2.0, 0, T_cur=4)
    assert {name: row["value"] for name, row in found["fields"].items()} == config.canonical()
    assert found["key"] == config.key()
    origin = {name: row["origin"] for name, row in found["fields"].items()}
    assert origin["T_cur"] == origin["data"] == "given"
    assert origin["seed"] == "default of dpngd train"
    assert origin["B"] == "params/quick.yaml (defaults.B)"
    assert origin["delta"] == "params/paper.yaml (defaults.delta)"
    assert origin["C"] == "params/quick.yaml (methods.dp-ngd.C)"
    assert origin["lambda_safe"] == origin["T"] == "tuned (params/tuned/quick.yaml)"
    assert origin["eta"] == "equation (section 3.3)"
    assert origin["lambda_base"].endswith("params/paper.yaml (methods.dp-ngd.lambda_base_ratio)")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_resolves_to_its_config(method):
    config, origins = profiles.load("quick").resolve(method, "digits", 4.0, 1, B=100)
    assert config == profiles.load("quick").config(method, "digits", 4.0, 1, B=100)
    assert set(origins) == set(config.canonical())
    assert origins["B"] == "given"


def test_what_follows_from_another_value_is_the_equations():
    origins = profiles.load("paper").resolve("dp-ngd", "cifar10", 2.0, 0)[1]
    assert origins["lambda_safe"] == "equation (section 3.3)"  # the paper states eta
    assert profiles.load("quick").resolve("dp-ngd-pre", "digits", 4.0, 0)[1]["C"] == "equation (section 3.3)"
    pre = profiles.load("quick").resolve("dp-ngd-pre", "digits", 4.0, 0)[1]
    assert pre["eta"] == "equation (section 3.3), times 0.5, tuned (params/tuned/quick.yaml)"
    broken = profiles.load("quick").resolve("dp-ngd", "digits", 4.0, 0, rate=2.0)[1]
    assert broken["eta"] == "equation (section 3.3), times 2, given"


def test_dp_sgds_rate_is_tuned_or_stated():
    quick = profiles.load("quick")
    assert quick.resolve("dp-sgd", "digits", 4.0, 0)[1]["eta"] == "tuned (params/tuned/quick.yaml)"
    other = quick.resolve("dp-sgd", "digits", 4.0, 0, T=20)[1]["eta"]
    assert other == "tuned (params/tuned/quick.yaml), at T = 20 from 40"
    assert quick.resolve("dp-ngd-auto", "digits", 4.0, 0)[1]["eta_sgd"] == "tuned (params/tuned/quick.yaml)"
    assert profiles.untuned("quick").resolve("dp-sgd", "digits", 4.0, 0)[1]["eta"] == (
        "params/quick.yaml (methods.dp-sgd.eta)")
    assert profiles.untuned("cpu").resolve("dp-sgd", "utkface", 4.0, 0)[1]["test_share"] == (
        "params/cpu.yaml (data.utkface.test_share)")


def test_the_text_has_a_line_per_value(capsys):
    assert command.show(["config", "--method", "dp-sgd"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["method", "dp-sgd", "given"]
    assert lines[-1].split()[0] == "key"


def test_methods_are_the_registrys(capsys):
    found = shown(capsys, "methods")["methods"]
    assert {name: set(row["fields"]) for name, row in found.items()} == {n: set(s.uses) for n, s in METHODS.items()}
    command.show(["methods"])
    assert "dp-ngd-one-sided" in capsys.readouterr().out


def test_the_curvature_counts_every_direction_once(capsys):
    argv = ["curvature", "--model", "small", "--public", "noise", "--public-size", "60", "--data", "digits",
            "--lambda-safe", "0.3"]
    found = shown(capsys, *argv)
    layers = found["layers"]
    every = layers.pop("all")
    assert found["shape"] == [1, 8, 8]
    assert every["directions"] == 24_314 == sum(row["directions"] for row in layers.values())
    for row in (every, *layers.values()):
        assert sum(row["per_decade"].values()) + row["below"] == row["directions"]
    assert every["above_floor"] == int(0.003 * 24_314)
    assert every["largest"] == max(row["largest"] for row in layers.values()) > found["floor_by_rank"] > 0
    assert (found["above_lambda_safe"] > every["above_floor"]) == (found["floor_by_rank"] > 0.3)
    command.show(argv)
    text = capsys.readouterr().out
    assert f"floor by rank: lambda_safe = {found['floor_by_rank']:.4g} (0.3 % of 24,314 directions" in text
    assert "above your lambda_safe = 0.3" in text


def test_the_curvature_of_a_named_set_needs_no_images_of_it(capsys):
    found = shown(capsys, "curvature", "--data", "utkface-age", "--public-size", "50")
    assert (found["shape"], found["classes"]) == ([3, 32, 32], 7)
    with pytest.raises(UsageError, match="--data gives shape and classes"):
        command.show(["curvature", "--data", "digits", "--shape", "1", "8", "8"])
    with pytest.raises(UsageError, match="unknown private data set 'digit'"):
        command.show(["curvature", "--data", "digit"])


def diagonal(*values):
    """A layer whose F has these eigenvalues."""
    return LayerCurvature.of(torch.diag(torch.tensor(values)).unsqueeze(0), torch.ones(1, 1, 1))


def test_the_floor_by_rank_leaves_its_share_above_it_and_scales_with_F():
    values = torch.arange(1.0, 1001.0)
    F = [diagonal(*values[::2].tolist()), diagonal(*values[1::2].tolist())]
    assert floor_by_rank(F) == pytest.approx(997.0)  # 3 of 1,000 are above
    assert floor_by_rank(F, share=0.5) == pytest.approx(500.0)
    assert floor_by_rank([layer.scaled(7.0) for layer in F]) == pytest.approx(7 * 997.0)
    assert floor_by_rank([diagonal(3.0, 2.0)]) == pytest.approx(2.0)  # at least one is above
    with pytest.raises(UsageError, match="share is 1"):
        floor_by_rank(F, share=1)
    with pytest.raises(UsageError, match="only 1 of 1000 directions have curvature"):
        floor_by_rank([diagonal(1.0, *[0.0] * 999)])


def test_own_data_take_the_settings_of_the_profiles_first_data_set(tmp_path):
    config = profiles.load("cpu").config("dp-sgd", "npz:x.npz", 2.0, 0, data_digest="ab" * 16)
    like = profiles.load("cpu").config("dp-sgd", "cifar10", 2.0, 0)
    assert config.canonical() == {**{k: v for k, v in like.canonical().items() if k != "N"}, "data": "npz:",
                                  "data_digest": "ab" * 16}
    assert RunConfig.from_dict(config.canonical()).key() == config.key()

"""What the paper's setting would cost: flops that follow the code, and a schedule that keeps to its order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpngd.data import load_private, sets
from dpngd.errors import UsageError
from dpngd.methods import METHODS
from dpngd.suite import command, cost, profiles, study

SMALL = {"model": "small", "K": 1, "shape": (1, 8, 8), "classes": 10}


def config(method, **changes):
    return profiles.load("quick").config(method, "digits", 2.0, 0, **changes)


def test_a_plain_networks_flops_are_those_of_its_layers():
    """The small network on an 8x8 digit: per view, forward (2 flops per multiplication), the gradients with respect to
    all outputs but the first layer's, and the weight gradients."""
    forward = 2 * (16 * 16 * 25 + 4 * 32 * 144 + 1 * 64 * 288 + 640)
    first = 2 * 16 * 16 * 25
    plain = 3 * forward - first
    assert plain <= cost.measured("dp-sgd", **SMALL).per_view <= 1.4 * plain  # norms and clipping beside it


def test_whitening_adds_to_a_view_and_a_refresh_to_a_run():
    plain, natural = cost.measured("dp-sgd", **SMALL), cost.measured("dp-ngd", **SMALL)
    assert natural.per_view > plain.per_view
    assert natural.per_image > 0 == plain.per_image
    sides = (25, 16, 32, 144, 32, 64, 288, 64, 128, 65, 10)
    assert natural.per_refresh == pytest.approx(cost.EIGEN * sum(n**3 for n in sides), rel=0.2)


def test_a_run_is_linear_in_its_steps_and_batch():
    one = cost.flops_of(config("dp-ngd", T=8, B=100, T_cur=8))
    assert cost.flops_of(config("dp-ngd", T=16, B=100, T_cur=8)) == pytest.approx(2 * one)
    f = cost.measured("dp-ngd", **SMALL)
    more = cost.flops_of(config("dp-ngd", T=8, B=200, T_cur=8))
    assert more - one == pytest.approx(8 * 100 * f.per_view)


def test_every_method_has_a_cost():
    found = {name: cost.base_of(name) for name in METHODS}
    assert set(found.values()) == {"dp-sgd", "gep", "adadps", "dp-ngd", "adadps-kl"}
    assert (found["dp-sgd-pt"], found["dp-sgd-kl"], found["dp-ngd-pre"]) == ("dp-sgd", "dp-ngd", "dp-ngd")


@pytest.mark.parametrize("name", ["digits", "utkface"])
def test_shape_and_classes_of_a_set_are_those_of_its_images(name):
    """Estimates read them from the set's entry, before anything is loaded."""
    try:
        private = load_private(name, download=False)
    except UsageError as absent:
        pytest.skip(str(absent))
    assert (private.shape, private.classes) == (sets.SETS[name].shape, sets.SETS[name].classes)


@given(hours=st.lists(st.floats(0.1, 10), min_size=1, max_size=30), workers=st.integers(1, 8))
def test_a_schedule_is_within_the_known_bounds(hours, workers):
    found = cost.makespan(hours, workers)
    least = max(max(hours), sum(hours) / workers)
    assert least * (1 - 1e-9) <= found <= least * (4 / 3 + 1e-9) + 1e-9  # Graham, for the longest first
    assert cost.makespan(hours, 1) == pytest.approx(sum(hours))


def test_the_search_comes_before_what_uses_it():
    profile = profiles.load("paper")
    wanted = {"06_hyperparameter_robustness": study.configs("06_hyperparameter_robustness", profile)}
    search, results = cost.stages(wanted)
    assert {c.validation for c in search} == {0.1}
    assert {c.validation for c in results} == {0.0}


def test_the_list_of_the_paper_profile_has_its_gpu_hours(capsys, monkeypatch):
    monkeypatch.setattr(cost, "measured", lambda *a: cost.Flops(2.4e9, 4e7, 3.2e9, 4e11))
    assert command.run(["--profile", "paper", "--list", "--only", "02", "--workers", "4",
                        "-p", "methods=[dp-ngd]", "-p", "datasets=[cifar10]", "-p", "seeds=[0]"]) == 0
    said = capsys.readouterr().out
    steps = 120 + 240 + 360 + 480 + 600 + 840 + 1080
    flops = steps * (4096 * 16 * 2.4e9 + 4e7) + steps / 8 * (500 * 3.2e9 + 4e11)
    hours = flops / (35.6e12 * 0.3) / 3600
    row = next(line.split() for line in said.splitlines() if line.startswith("convergence") and "." not in line)
    assert row[1:3] == ["7", f"{steps:,}"]
    assert float(row[4]) == pytest.approx(hours, abs=1)
    longest = hours * 1080 / steps
    assert f"critical path, with as many GPUs as runs: {longest:.1f} hours" in said
    assert f"1 GPU: {hours / 24:,.1f} days" in said
    assert "4 GPUs: " in said

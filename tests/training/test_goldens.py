"""Numbers of short quick-profile runs, trained afresh: a method that breaks moves them, another machine does not.

Measured at 20 steps, epsilon 4, 50 public images, two seeds. Rounding of another machine moves an accuracy by a few
test images of 360 (0.3 points each); the tolerances are wider than that and narrower than what separates the methods.
"""

import pytest

from dpngd.suite import profiles
from dpngd.training.train import run

QUICK = profiles.load("quick")
GOLDEN = {  # accuracy in percent, and mean training loss of the last five steps: means over seeds 0 and 1
    "dp-sgd": (82.5, 0.897),
    "dp-sgd-pt": (84.4, 0.605),
    "gep": (82.4, 0.855),
    "adadps": (81.2, 0.735),
    "dp-ngd": (88.3, 0.371),
}
POINTS, LOSS = 3.0, 0.08
# DP-SGD-PT with 10 steps of pre-training: its 100 on 50 images blow up the rounding (a loss of 0.50 or 0.63), 10 do not
# (0.558, and 0.554 with other kernels; that of every other method moves by 0.012 at most).
# DP-SGD at a quarter of its tuned rate: at the whole one a change of sigma by 1e-7 moves the loss by 0.1.
# Rates and values are given, not those that the profile tuned: a search that is run again must not move these numbers.
CHANGES = {"dp-sgd": {"eta": 1.0}, "dp-sgd-pt": {"eta": 4.0, "pt_steps": 10, "public_size": 50},
           "gep": {"eta": 1.41421, "C0": 1.0, "C1": 1.0, "public_size": 50},
           "adadps": {"eta": 2.0, "adadps_e": 0.01, "public_size": 50},
           "dp-ngd": {"lambda_safe": 0.3, "eta": 1.09545, "public_size": 50}}


@pytest.fixture(scope="module")
def reached():
    found = {}
    for method in GOLDEN:
        records = [run(QUICK.config(method, "digits", 4.0, seed, T=20, **CHANGES[method])) for seed in (0, 1)]
        found[method] = (sum(100 * r.accuracy for r in records) / 2,
                         sum(sum(r.train_loss[-5:]) / 5 for r in records) / 2, records[0].privacy)
    return found


@pytest.mark.parametrize("method", GOLDEN)
def test_accuracy_and_loss(method, reached):
    accuracy, loss, _ = reached[method]
    assert accuracy == pytest.approx(GOLDEN[method][0], abs=POINTS)
    assert loss == pytest.approx(GOLDEN[method][1], abs=LOSS)


@pytest.mark.parametrize("method", GOLDEN)
def test_privacy(method, reached):
    privacy = reached[method][2]
    assert privacy["sigma"] == pytest.approx(1.2626, abs=2e-3)
    assert 3.99 <= privacy["epsilon_prv"] <= 4.0


def test_dp_ngd_is_ahead_at_few_steps(reached):
    """By 0.1 nats or more against the baselines; the tolerances above would bridge half of it."""
    assert all(reached["dp-ngd"][1] < reached[m][1] - 0.05 for m in GOLDEN if m != "dp-ngd")

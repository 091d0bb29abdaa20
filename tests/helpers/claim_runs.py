"""What the tests of the claims share: accuracies with known answers, and a claim's verdict on them."""

from dpngd.methods import METHODS
from dpngd.suite import claims, profiles

QUICK = profiles.load("quick")
BY_ID = {c.id: c for c in claims.all_claims()}
BASE = {"dp-sgd": 60.0, "dp-sgd-pt": 61.0, "gep": 62.0, "adadps": 63.0, "dp-ngd": 66.0}
SEEDS = [0, 1, 2]


def artifact(name, **given):
    return QUICK.configs(name, seeds=SEEDS, **given)


def wobble(config):
    """A difference between seeds that methods do not quite share, so that intervals have a length."""
    return 0.3 * config.seed + 0.05 * ((config.seed + 2 * list(METHODS).index(config.method)) % 3)


def table(values):
    return lambda c: values[c.method] + wobble(c)


def word(claim, runs):
    return claims.decide(BY_ID[claim], {BY_ID[claim].source: runs})["verdict"]


ORDER = {"dp-ngd": 70, "dp-ngd-post": 66, "dp-ngd-pre": 62, "dp-sgd-pt": 65, "dp-ngd-private-20": 56,
         "dp-ngd-private-50": 54, "dp-ngd-fixed-floor": 68, "dp-ngd-one-sided": 66, "dp-ngd-factor-clamp": 70,
         "dp-ngd-labels-exact": 70, "dp-ngd-labels-random": 70, "dp-ngd-no-floor": 10}

"""Records made up for tests: the form of a real one, with the accuracy, losses and seconds that a test wants."""

import base64

import numpy as np

from dpngd.suite.runs import Runs

CLASSES = 10


def packed(right):
    """Booleans as a record keeps them."""
    right = np.asarray(right, dtype=bool)
    return {"n": len(right), "bits": base64.b64encode(np.packbits(right).tobytes()).decode()}


def record(config, accuracy, *, seconds=None, losses=None, status="ok", correct=None, evaluated_on="test"):
    """`correct`, booleans by image, decides the accuracy where it is given."""
    losses = losses or [2.0 - t / config.T for t in range(config.T)]
    seconds = seconds or {"gradients": 0.1 * config.T, "whitening": 0.05 * config.T, "setup": 1.0, "evaluation": 1.0}
    sigma = 1.0 + config.T / 100
    found = {
        "key": config.key(), "config": config.canonical(), "status": status, "steps": len(losses),
        "accuracy": accuracy, "train_loss": losses, "evaluations": [], "evaluated_on": evaluated_on,
        "privacy": {"sigma": sigma, "epsilon_prv": config.epsilon, "epsilon_rdp": 1.1 * config.epsilon,
                    "q": config.B / (config.N or 50000), "delta": config.delta,
                    "parts": [{"purpose": "gradients", "sigma": sigma, "releases": config.T}]},
        "diagnostics": {"clipped": 0.7, "along": [{"step": 1, "lambda_t": 0.3, "clamped_share": 0.9},
                                                {"step": config.T, "lambda_t": 0.1, "clamped_share": 0.8}]},
        "data": {"private": {"name": config.data, "N": config.N, "classes": CLASSES}},
        "seconds": {**seconds, "total": sum(seconds.values())}, "where": {"cpu": "a core", "device": "cpu"},
        "parameters": 10,
    }
    if correct is not None:
        found |= {"accuracy": float(np.mean(correct)), "correct": packed(correct)}
    return found


def runs_of(configs, accuracy, **kwargs):
    """Runs of all configs; `accuracy(config)` in percent, None for a diverged run, missing where it raises KeyError."""
    records = []
    for config in configs:
        try:
            value = accuracy(config)
        except KeyError:
            records.append(None)
            continue
        extra = {k: v(config) for k, v in kwargs.items()}
        records.append(record(config, None if value is None else value / 100,
                              status="diverged" if value is None else "ok", **extra))
    return Runs.of(configs, records)

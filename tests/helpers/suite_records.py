"""Records made up for tests: the form of a real one, with the accuracy, losses and seconds that a test wants."""

from dpngd.suite.runs import Runs


def record(config, accuracy, *, seconds=None, losses=None, status="ok"):
    losses = losses or [2.0 - t / config.T for t in range(config.T)]
    seconds = seconds or {"gradients": 0.1 * config.T, "whitening": 0.05 * config.T, "setup": 1.0, "evaluation": 1.0}
    return {
        "key": config.key(), "config": config.canonical(), "status": status, "steps": len(losses),
        "accuracy": accuracy, "train_loss": losses, "evaluations": [], "evaluated_on": "test",
        "privacy": {"sigma": 1.0 + config.T / 100, "epsilon_prv": config.epsilon, "epsilon_rdp": 1.1 * config.epsilon},
        "diagnostics": {"along": [{"step": 1, "lambda_t": 0.3, "clamped_share": 0.9},
                                  {"step": config.T, "lambda_t": 0.1, "clamped_share": 0.8}]},
        "seconds": {**seconds, "total": sum(seconds.values())}, "where": {"cpu": "a core", "device": "cpu"},
        "parameters": 10,
    }


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

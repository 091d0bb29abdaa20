"""Runs for test_sweep.py. They are called in worker processes, found by name as dpngd.training.train.run is."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dpngd.errors import UsageError
from dpngd.training.config import RunConfig


def config(seed=0):
    return RunConfig(method="dp-sgd", data="digits", model="small", epsilon=2, B=256, T=40, eta=1, C=1, seed=seed)


def configs(n):
    return [config(seed) for seed in range(n)]


def note(config):
    with open(os.environ["SWEEP_LOG"], "a") as file:
        file.write(f"{config.seed} {os.getpid()} {os.environ.get('OMP_NUM_THREADS')}\n")


def good(config):
    note(config)
    print("noise on stdout must not matter")
    return {"status": "ok", "accuracy": config.seed / 10}


def large(config):
    """A record of 20 KB."""
    note(config)
    return {"status": "ok", "accuracy": 0.5, "words": "x" * 20_000}


def slow(config):
    note(config)
    time.sleep(0.4)
    return {"status": "ok", "accuracy": config.seed / 10}


def together(config):
    """Ends only after a second process has started a run too, however long that takes to start."""
    note(config)
    deadline = time.monotonic() + 300
    while len({line.split()[1] for line in Path(os.environ["SWEEP_LOG"]).read_text().splitlines()}
              - {str(os.getppid())}) < 2:
        if time.monotonic() > deadline:
            raise RuntimeError("no second process came")
        time.sleep(0.02)
    return {"status": "ok", "accuracy": config.seed / 10}


def endless(config):
    note(config)
    time.sleep(3600)


def odd_seeds_fail(config):
    note(config)
    if config.seed % 2:
        raise UsageError("no data for odd seeds\nwith details")
    return {"status": "ok"}


def seed_1_is_killed_and_3_exits(config):
    note(config)
    if config.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.seed == 3:
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    return {"status": "ok"}


def not_a_record(config):
    return 3


@dataclass
class Result:
    status: str
    threads: int


def dataclass_with_threads(config):
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # as a careless run might: the next one must not inherit it
    return Result("diverged", threads)


def killed_once_and_3_fails(config):
    """Seed 1 waits to be killed, the first time."""
    note(config)
    if config.seed == 3:
        raise RuntimeError("no luck")
    if config.seed == 1:
        lines = Path(os.environ["SWEEP_LOG"]).read_text().splitlines()
        if sum(line.startswith("1 ") for line in lines) == 1:
            time.sleep(3600)
    return {"status": "ok", "accuracy": config.seed / 10}

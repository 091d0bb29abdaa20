"""Several processes, one release: does the noise of their common sum have the standard deviation sigma C?

    python -m dpngd.audit.distributed OUT METHOD RELEASES SEED FAULT      one of the processes; `check` starts them

The two faults of distributed noise: every process adds its own (sigma C sqrt(n): too much), or the noise stays on one
process (none on the others, whose weights are then no release at all).
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpngd.audit.checks import CANARY_EPSILON, Result, _variance
from dpngd.audit.subject import Session, Subject, flat, images, targets
from dpngd.group import ALONE, Group, Processes, connected

SIZE, RELEASES, MICRO = 3, 200, 2
SECONDS = 600.0


class EachAddsNoise(Processes):
    """Fault: every process draws noise for its part, and the parts are added up."""

    def once(self, make: Callable[[], list[Tensor]], like: list[Tensor]) -> list[Tensor]:
        noise = self.sum([made - s for made, s in zip(make(), like, strict=True)])
        return [s + xi for s, xi in zip(like, noise, strict=True)]


class OnlyTheFirst(Processes):
    """Fault: what the first process released is not passed on."""

    def once(self, make: Callable[[], list[Tensor]], like: list[Tensor]) -> list[Tensor]:
        return make() if self.rank == 0 else like


FAULTS = {"none": Processes, "each": EachAddsNoise, "first": OnlyTheFirst}


def start(method: str, seed: int, group: Group, rank: int = 0) -> tuple[Session, list]:
    """A run of the method at q = 1 whose mechanism belongs to the group, and this process's share of its batch.

    Each process has a stream of noise of its own: in a release no two processes could draw the same.
    """
    x, y = images(8, "company", seed), targets(8, "company", seed)
    run = Subject(method).start(x, y, epsilon=CANARY_EPSILON, T=1, q=1.0, seed=seed)
    run.noise = run.subject.noise(seed + 1000 * rank)
    run.built.prepare(0)
    run.built.mechanism = dataclasses.replace(run.built.mechanism, group=group)
    batches = run.gradients(run.x, run.y, MICRO)
    return run, batches[group.share(len(batches))]


def one_process(out: Path, method: str, releases: int, seed: int, fault: str) -> None:
    """What one of the processes sees: the sums before noise, and what it takes for the release."""
    torch.set_num_threads(1)
    with connected():
        group = FAULTS[fault]()
        run, mine = start(method, seed, group, group.rank)
        sums, noisy = [], []
        for _ in range(releases):
            seen = run.release(mine)
            sums.append(torch.cat([flat(channel) for channel in seen.sums]).numpy())
            noisy.append(torch.cat([flat(channel) for channel in seen.noisy]).numpy())
        np.savez(out / f"{group.rank}.npz", sums=np.stack(sums), noisy=np.stack(noisy))


def check(method: str = "dp-ngd", seed: int = 0, releases: int = RELEASES, fault: str = "none") -> list[Result]:
    """The sum of three processes is that of one, its noise is sigma C on every process, and all have the same release.

    Measured: `releases` releases of one batch, of which each process has a share, in processes of torch.distributed.
    Power: 3 % of the noise with 30,000 numbers; sqrt(n) or none on a process is far beyond that. Any bit in which two
    processes differ.
    """
    name = f"{method}, {SIZE} processes"
    with tempfile.TemporaryDirectory() as folder:
        ranks = _ran(Path(folder), method, releases, seed, fault)
    run, whole = start(method, seed, ALONE)
    exact = np.concatenate([s.numpy() for s in run.sums(whole)])
    stds = np.concatenate([np.full(len(s), std) for s, std in zip(run.sums(whole), run.stds(), strict=True)])
    off = max(float(np.abs(rank["sums"] - exact).max() / np.abs(exact).max()) for rank in ranks)
    lines = [Result(name, "distributed sum", f"{off:.1e} of it off the sum of one process", "1e-05", off <= 1e-5,
                    "a sample left out or counted twice")]
    lines += [_variance(name, f"distributed noise, {i}", (rank["noisy"] - exact) / stds)
              for i, rank in enumerate(ranks)]
    same = all(np.array_equal(rank["noisy"], ranks[0]["noisy"]) for rank in ranks)
    return [*lines, Result(name, "distributed release", f"{'the same' if same else 'different'} on all processes",
                           "the same", same, "any bit")]


def _ran(out: Path, method: str, releases: int, seed: int, fault: str) -> list[dict[str, np.ndarray]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
           "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    command = [sys.executable, "-W", "ignore", "-m", "dpngd.audit.distributed", str(out), method, str(releases),
               str(seed), fault]
    processes = [subprocess.Popen(command, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
                 for rank in range(SIZE)]
    try:
        for process in processes:
            said = process.communicate(timeout=SECONDS)[1]
            if process.returncode:
                raise RuntimeError(f"a process of the distributed audit ended: {said[-500:]}")
    finally:
        for process in processes:
            process.kill()
    return [dict(np.load(out / f"{rank}.npz")) for rank in range(SIZE)]


if __name__ == "__main__":
    one_process(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])

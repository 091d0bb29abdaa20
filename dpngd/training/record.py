"""The record of a run: its config, what it spent, what it reached, and where it ran."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

PACKAGES = ("torch", "torchvision", "opacus", "numpy", "scikit-learn")
NOT_FACTS = ("seconds", "where")
"""Fields that differ from one run of a config to the next: the rest repeats bit for bit on one machine."""


@dataclass(frozen=True)
class Record:
    """What a run leaves. Accuracies and losses are of averaged (EMA) and of training weights, as named.

    Losses, norms, clip fractions, accuracies and digests are computed from private data and are not covered by the
    privacy guarantee: they are here because the private data of a reproduction are public benchmarks. privacy's
    `simulation` says that a seed decided batches and noise: the noise can be computed again from this record and
    cancels between runs of one seed, so that the weights of such a run are no release.
    """

    key: str
    config: dict
    status: str  # "ok", or "diverged": after `steps` steps its weights, its loss or its curvature were not finite
    steps: int
    accuracy: float | None  # of the averaged weights after the last step; None when diverged
    evaluations: list[dict]  # step, accuracy and loss of the averaged weights on the evaluated part
    train_loss: list[float | None]  # of each batch before its step; None where it is not finite, or the batch empty
    evaluated_on: str  # "test" or "validation"
    privacy: dict  # simulation, q, T, B, delta, sigma, sensitivity and noise by channel, epsilon (prv, rdp), its parts
    diagnostics: dict  # clip fraction, norm quantiles, clamped share, lambda_t, weight norm, non-finite samples
    data: dict  # N, classes, source and digest of the private and the public set
    parameters: int
    correct: dict | None = None  # which of the evaluated images the averaged weights had right at the end (`packed`)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase (see `log`), and in all
    where: dict = field(default_factory=dict)  # versions, hardware, commit

    def to_dict(self) -> dict:
        """As plain values. A run without a last evaluation, and every release, has no `correct`."""
        values = asdict(self)
        if self.correct is None:
            del values["correct"]
        return values

    def facts(self) -> dict:
        """What must be the same when the run is repeated."""
        return {k: v for k, v in self.to_dict().items() if k not in NOT_FACTS}


def packed(correct: np.ndarray) -> dict:
    """Booleans (n,) as a record holds them: {"n": n, "bits": base64 of numpy.packbits}."""
    return {"n": len(correct), "bits": base64.b64encode(np.packbits(correct).tobytes()).decode()}


def unpacked(correct: Mapping[str, Any]) -> np.ndarray:
    """The booleans (n,) again, in the fixed order of the evaluated set."""
    bits = np.frombuffer(base64.b64decode(correct["bits"]), np.uint8)
    return np.unpackbits(bits, count=correct["n"]).astype(bool)


def where() -> dict:
    """Versions, hardware and commit of this process."""
    import torch  # late: redrawing stored runs needs `commit`, but no torch

    return {
        "python": platform.python_version(),
        **versions(),
        "cpu": cpu(), "rounding": rounding(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1), "system": platform.system(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": commit(),
    }


def versions() -> dict[str, str]:
    """Of those of PACKAGES that are installed: a run needs no torchvision unless it downloads."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def cpu() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def rounding() -> str:
    """How this machine's libraries round: a digest of a few products, convolutions and eigenvectors.

    The name of a processor does not tell: two that are both called "AMD EPYC" may have other vector units, and then
    other kernels, and another last bit. Machines with the same digest are taken to repeat a run bit for bit.
    """
    import torch
    import torch.nn.functional as F

    from dpngd.training.parallel import alone

    source = torch.Generator().manual_seed(0)
    x, kernel, A = (torch.randn(shape, generator=source) for shape in ((8, 3, 32, 32), (16, 3, 5, 5), (300, 300)))
    with alone(), torch.enable_grad():
        kernel.requires_grad_()
        out = F.group_norm(F.conv2d(x, kernel, stride=2, padding=2), 4).relu()
        loss = F.cross_entropy(out.flatten(1), torch.arange(8))
        (slope,) = torch.autograd.grad(loss, kernel)
        products = A @ A.mT, torch.bmm(x[:, 0], x[:, 1]), A.exp().sum(0)
        eigen = torch.linalg.eigh(products[0].double())
    digest = hashlib.sha256()
    for t in (out, loss, slope, *products, *eigen):
        digest.update(t.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


@functools.cache
def commit() -> str:
    """The commit of the code that runs, with '+' when the work tree differs from it; 'unknown' outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "--", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")

"""Where the milliseconds of a DP-SGD step and of a refresh of F go, part by part, as docs/speed-limits.md shows them;
and how fast one core copies. On a quiet machine:

    OMP_NUM_THREADS=1 python tests/helpers/step_phases.py small
"""

import collections
import functools
import itertools
import sys
import time

import torch
import torch.nn.functional as F

from dpngd.curvature import KFAC
from dpngd.geometry import Euclidean
from dpngd.gradients import PerSample, Tape
from dpngd.layers import forms
from dpngd.layers.conv import Conv2dLayer, ConvFactors
from dpngd.layers.forms import Dense, Factors
from dpngd.mechanism import GaussianMechanism
from dpngd.noise import seeded_noise, stream
from dpngd.training import models
from dpngd.training.parallel import keep_freed_memory

B, STEPS = 256, 30
PARTS = [(Tape, "forward"), (Tape, "backward"), (Conv2dLayer, "gradient"), (GaussianMechanism, "clipped_sums"),
         (GaussianMechanism, "add_noise"), *((form, name) for form in (Dense, Factors, ConvFactors)
                                             for name in ("sq_norms", "weighted_sum"))]


def timed(seconds, owner, name):
    """Add the seconds of a method to `seconds`; parts that call others hold theirs too."""
    method = vars(owner)[name]

    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        start = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            seconds[f"{owner.__name__}.{name} {getattr(self, 'name', '')}".strip()] += time.perf_counter() - start

    setattr(owner, name, wrapped)


def mean_ms(action):
    for _ in range(10):
        action()
    start = time.perf_counter()
    for _ in range(STEPS):
        action()
    return 1e3 * (time.perf_counter() - start) / STEPS


def main(network):
    torch.set_num_threads(1)
    keep_freed_memory(1)
    model = models.build(network, classes=10, in_channels=3, size=32, generator=stream(0, "phases"))
    x, y = torch.randn(B, 3, 32, 32, generator=stream(0, "x")), torch.arange(B) % 10
    plain = mean_ms(lambda: F.cross_entropy(model(x), y).backward())
    model.zero_grad()
    per_sample, mechanism = PerSample(model), GaussianMechanism((1.0,), 1.0, float(B))

    def step():
        release = mechanism.release([per_sample(x, y)], Euclidean(), per_sample.zeros(), seeded_noise(0))
        per_sample.add_(release.direction, -1e-4)

    print(f"{network}, {B} samples, one thread: plain pass {plain:.1f} ms, DP-SGD {mean_ms(step):.1f} ms")
    seconds = collections.Counter()
    for owner, name in PARTS:
        timed(seconds, owner, name)
    step()
    seconds.clear()
    for _ in range(STEPS):
        step()
    for part, total in seconds.most_common():
        print(f"  {part:36}{1e3 * total / STEPS:7.2f} ms")
    refresh(model)
    copies()
    rows_apart()


def refresh(model, n=500, least=0.025):
    """Passes over public images, the moments A and G beside them, and eigenvectors, in CPU time."""
    x = torch.randn(n, 3, 32, 32, generator=stream(0, "public"))
    kfac = KFAC(model, x, generator=stream(0, "labels"), span=True, least=least)
    kfac()
    at = [time.process_time()]
    moments = kfac._moments(True)
    at.append(time.process_time())
    for m in moments:
        m.decompose(n, least)
    at.append(time.process_time())
    for part in x.split(kfac.micro_batch):
        with Tape(model, kfac.layers, lambda *_: None) as tape:
            logits = tape.forward(part)
            tape.backward(logits, torch.ones_like(logits), retain=False)
    at.append(time.process_time())
    both, eigenvectors, passes = (1e3 * (b - a) for a, b in itertools.pairwise(at))
    print(f"a refresh of {n} images: passes {passes:.0f} ms, A and G {both - passes:.0f}, "
          f"eigenvectors {eigenvectors:.0f}")


def copies():
    """GB/s read and written by one core, by the size of what is copied."""
    for mb in (4, 8, 16, 64):
        a, seconds = torch.ones(mb * 2**18), []
        b = torch.empty_like(a)
        for _ in range(STEPS):
            start = time.perf_counter()
            b.copy_(a)
            seconds.append(time.perf_counter() - start)
        print(f"copying {mb} MiB: {2 * mb * 2**20 / sorted(seconds)[STEPS // 3] / 1e9:.0f} GB/s")


def rows_apart():
    """oneDNN's product with 16,256 rows of 400 numbers that lie together, and that lie 401 apart, in CPU time."""
    x, wide = torch.randn(17, 400), torch.randn(16_256, 401)
    for what, w in (("together", wide[:, :400].contiguous()), ("401 apart", wide[:, :400])):
        start = time.process_time()
        forms.ONEDNN(x, w, None, "none", [], "")
        print(f"a product with rows {what}: {1e3 * (time.process_time() - start):.0f} ms")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["small"]))

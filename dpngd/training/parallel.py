"""Per-sample gradients on several cores: micro-batches side by side, each on one core.

Small networks gain little from two threads inside every operation; two micro-batches at a time keep both cores busy
(`dpngd bench` shows by how much). Each worker thread has a replica of the model that shares its parameters' memory,
since a pass registers hooks on the modules. Results come in order, and are those of one thread, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import queue
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from dpngd.gradients import PerSample, SampleGradients
from dpngd.training.log import Clock

Batch = Iterable[tuple[Tensor, Tensor]]


def replica(model: nn.Module) -> nn.Module:
    """A copy of the modules on the very same parameters and buffers: an update of one is an update of both."""
    shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo=shared)  # what the memo holds is not copied


class Workers:
    """Works on the micro-batches of a step on `threads` cores; with one thread, a plain loop."""

    def __init__(self, per_sample: PerSample, threads: int):
        self.per_sample, self.threads = per_sample, threads
        keep_freed_memory()
        self._free: queue.SimpleQueue[PerSample] = queue.SimpleQueue()
        if threads > 1:
            self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
            for _ in range(threads):
                model = replica(per_sample.model)
                self._free.put(PerSample(model, per_sample.loss, per_sample.K, check=False))

    def gradients(self, batch: Batch, clock: Clock | None = None) -> Iterator[SampleGradients]:
        """The gradients of each micro-batch (x, y), in order. At most threads + 1 of them are held at a time.

        The time until each is there, the drawing of its batch included, counts as the clock's phase "gradients".
        """
        results = self._gradients(batch)
        while True:
            with clock.phase("gradients") if clock else contextlib.nullcontext():
                g = next(results, None)
            if g is None:
                return
            yield g

    def _gradients(self, batch: Batch) -> Iterator[SampleGradients]:
        if self.threads == 1:
            yield from (self.per_sample(x, y) for x, y in batch)
            return
        waiting: deque[Future[SampleGradients]] = deque()
        with alone():
            for x, y in batch:
                if not self.per_sample.checked:  # the replicas have no check of their own
                    yield self.per_sample(x, y)
                    continue
                waiting.append(self._pool.submit(self._one, x, y))
                if len(waiting) > self.threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _one(self, x: Tensor, y: Tensor) -> SampleGradients:
        per_sample = self._free.get()
        try:
            return per_sample(x, y)
        finally:
            self._free.put(per_sample)


KEPT = 2**28


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep up to KEPT bytes that were freed, and take blocks below that size from them.

    By default glibc hands large blocks back at once and gets them again, zeroed page by page: a tenth of a step on
    WRN-10-1. Process-wide, once; on other C libraries nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc's malloc.h
            mallopt(parameter, KEPT)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """This thread on one core while the workers have the others: threads that wait by spinning would slow them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

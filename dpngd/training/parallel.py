"""Per-sample gradients on several cores: micro-batches side by side, each on one core.

Small networks gain little from two threads inside every operation; two micro-batches at a time keep both cores busy
(`dpngd bench` shows by how much). What the mechanism does with a micro-batch (norms, clipping, weighted sums) is done
by the same worker. Each worker thread has a replica of the model that shares its parameters' memory, since a pass
registers hooks on the modules. Results come in order, and are those of one thread, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

from dpngd.gradients import PerSample, SampleGradients
from dpngd.training.log import Clock

Batch = Iterable[tuple[Tensor, Tensor]]
T = TypeVar("T")


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

    def map(self, f: Callable[[SampleGradients], T], batch: Batch, clock: Clock | None = None) -> Iterator[T]:
        """f of the gradients of each micro-batch (x, y), in order, on the core that computed them.

        At most threads + 1 results are held at a time. The time until gradients are there, the drawing of their batch
        included, counts as the clock's phase "gradients"; with several threads so does f's.
        """
        results = self._results(f, batch)
        while True:
            with clock.phase("gradients") if clock else contextlib.nullcontext():
                found = next(results, None)
            if found is None:
                return
            yield found()

    def gradients(self, batch: Batch) -> Iterator[SampleGradients]:
        """The gradients of each micro-batch (x, y), in order."""
        return self.map(lambda g: g, batch)

    def _results(self, f: Callable[[SampleGradients], T], batch: Batch) -> Iterator[Callable[[], T]]:
        """The results as functions to call: with one thread f is left to the caller, with several it is done."""
        if self.threads == 1:
            yield from (functools.partial(f, self.per_sample(x, y)) for x, y in batch)
            return
        with self.alone():
            for result in self._side_by_side(f, batch):
                yield functools.partial(_itself, result)

    def _side_by_side(self, f: Callable[[SampleGradients], T], batch: Batch) -> Iterator[T]:
        waiting: deque[Future[T]] = deque()
        for x, y in batch:
            if not self.per_sample.checked:  # the replicas have no check of their own
                yield f(self.per_sample(x, y))
                continue
            waiting.append(self._pool.submit(self._one, f, x, y))
            if len(waiting) > self.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _one(self, f: Callable[[SampleGradients], T], x: Tensor, y: Tensor) -> T:
        per_sample = self._free.get()
        try:
            return f(per_sample(x, y))
        finally:
            self._free.put(per_sample)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread on one core, where the workers have the others: for a whole private step.

        A thread of OpenMP that has had work spins for some 10 ms before it sleeps. What the mechanism and the update
        do is little, and on one core it takes no longer than a handover; on two, the workers of the next step would
        find one of them taken.
        """
        return alone() if self.threads > 1 else contextlib.nullcontext()


def _itself(result: T) -> T:
    return result


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

"""Per-sample gradients on several cores: micro-batches side by side, each on one core.

Small networks gain little from two threads inside every operation; two micro-batches at a time keep both cores busy
(`dpngd bench` shows by how much). What the mechanism does with a micro-batch (norms, clipping, weighted sums) is done
by the same worker. Each worker thread has a replica of the model that shares its parameters' memory, since a pass
registers hooks on the modules. Results come in order, and for the same micro-batches they are those of one thread, bit
for bit.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import queue
import threading
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
        keep_freed_memory(threads)
        self._free: queue.SimpleQueue[PerSample] = queue.SimpleQueue()
        if threads > 1:
            self._pool = worker_threads(threads, os.getpid())
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


@functools.cache
def worker_threads(threads: int, process: int) -> ThreadPoolExecutor:
    """The workers of this process, the same ones for every run in it. A forked process has none, and makes its own.

    They start here, one after the other: the C library deals its sets of blocks out in turn (`keep_freed_memory`), and
    a thread that starts between two of them would leave both with the same one.
    """
    shares: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for share in shares_of_cores(threads):
        shares.put(share)
    pool, all_there = ThreadPoolExecutor(threads, "dpngd", _begin, (shares,)), threading.Barrier(threads)
    list(pool.map(lambda _: all_there.wait(), range(threads)))
    return pool


def shares_of_cores(threads: int) -> list[set[int]]:
    """Cores for each of `threads` workers, no core twice; none where there are too few, or none can be chosen."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cores[i::threads]) for i in range(threads)] if len(cores) >= threads else []


def _begin(shares: queue.SimpleQueue[set[int]]) -> None:
    """A worker's first act: operations on one core, and cores of its own.

    Workers wake each other, at the interpreter's lock. Linux wakes a thread near the one that woke it, so that after
    a pause of a few ms two of them shared one core while the other had nothing to do.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(queue.Empty, OSError):
        os.sched_setaffinity(0, shares.get_nowait())  # 0: this thread


def _itself(result: T) -> T:
    return result


KEPT, BLOCK = 2**31 - 1, 2**28
HEAP = 2**26
"""glibc holds the blocks of threads in heaps of this size. It gives an empty one back unless so much was asked for at
the top of each: WRN-10-1 then got 55 MB per step again, page by page."""


@functools.cache
def keep_freed_memory(threads: int) -> None:
    """Let the C library keep up to KEPT bytes that were freed, and take blocks below BLOCK bytes from them, in as many
    sets of blocks as there are workers.

    By default glibc hands large blocks back at once and gets them again, zeroed page by page: a tenth of a step on
    WRN-10-1. And every thread would keep blocks of its own, the main thread too, which waits while the workers work:
    a third more memory with two workers. Fewer sets of blocks than workers would have them take turns with the
    contents of each other's caches: a quarter more time. Process-wide; on other C libraries nothing happens.
    """
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8  # glibc's malloc.h
    values = {M_TRIM_THRESHOLD: KEPT, M_MMAP_THRESHOLD: BLOCK, M_ARENA_MAX: threads, M_TOP_PAD: HEAP}
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in values.items():
            mallopt(parameter, value)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """This thread on one core while the workers have the others: threads that wait by spinning would slow them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

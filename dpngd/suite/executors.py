"""Where the tasks of a sweep run: in this process, in workers on this machine, or elsewhere.

A task is a picklable function of a config: it stores what it computes, returns an Outcome, and never raises. An
executor whose workers cannot reach the store (`dpngd.suite.cluster`) takes a task apart: it claims a run in the task's
`store`, has it computed elsewhere, and stores the record itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from dpngd.training.config import RunConfig

GRACE = 5.0  # seconds a worker that closed its output has to end by itself, so that its exit code is its own
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# glibc gives the memory of every large tensor back to the system and faults it in again a moment later: a quarter of
# the time of a small network's gradients. Workers keep theirs; nothing is computed differently.
KEEP_PAGES = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**32))


@dataclass(frozen=True)
class Outcome:
    """How a task ended: "stored", "busy" (another process is computing the run), "failed", or "full" (the disk)."""

    status: str
    error: str = ""  # one line
    details: str = ""  # the traceback, or what the worker last wrote


class Task(Protocol):
    """One run of a sweep (`dpngd.suite.sweep.Work`)."""

    store: Any
    run: Any
    every: Any

    def __call__(self, config: RunConfig) -> Outcome:
        """Claim it, compute it, store it."""


def failed(error: Exception) -> Outcome:
    """The outcome of a task that raised: one line, and the traceback. A full disk is no fault of the run's."""
    line = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return Outcome("full", line, traceback.format_exc())
        cause = cause.__cause__ or cause.__context__
    return Outcome("failed", line, traceback.format_exc())


Outcomes = Generator[tuple[RunConfig, Outcome], None, None]


class Executor(Protocol):
    """Applies a picklable task to every config and yields each outcome as it comes, in any order.

    The generator is closed early when a sweep is interrupted: what still runs then should be stopped.
    """

    def run(self, task: Task, configs: Sequence[RunConfig]) -> Outcomes: ...


class Inline:
    """Runs the tasks one after the other in this process, with whatever threads it has."""

    def run(self, task: Task, configs: Sequence[RunConfig]) -> Outcomes:
        for config in configs:
            yield config, task(config)


class LocalProcesses:
    """Runs the tasks in worker processes of one thread each.

    Workers are fresh interpreters that speak over pipes, neither forks nor multiprocessing: that works from
    notebooks, from scripts without a main guard and beside threads, and each has thread limits of its own.
    A worker that dies (killed, out of memory) fails its own run only, and is replaced. Workers end with the
    process that started them, even when that was by kill -9: they see the end of their input.
    """

    def __init__(self, jobs: int):
        self.jobs = jobs

    def run(self, task: Task, configs: Sequence[RunConfig]) -> Outcomes:
        todo: queue.SimpleQueue[RunConfig] = queue.SimpleQueue()
        for config in configs:
            todo.put(config)
        done: queue.SimpleQueue[tuple[RunConfig, Outcome]] = queue.SimpleQueue()
        workers = [_Worker(task, todo, done) for _ in range(min(self.jobs, len(configs)))]
        try:
            for worker in workers:
                worker.start()
            for _ in configs:
                yield done.get()
        finally:
            for worker in workers:
                worker.stop()
            for worker in workers:
                worker.join()


class _Worker(threading.Thread):
    """The parent's side of a worker process: feeds it configs one by one, and starts another if it dies."""

    def __init__(self, task: Task, todo: queue.SimpleQueue, done: queue.SimpleQueue):
        super().__init__(daemon=True)
        self.task, self.todo, self.done = task, todo, done
        self.process: subprocess.Popen | None = None
        self.stopped = False
        self.lock = threading.Lock()  # so that no process is started after stop()

    def run(self) -> None:
        with tempfile.TemporaryFile() as log:
            while not self.stopped:
                try:
                    config = self.todo.get_nowait()
                except queue.Empty:
                    break
                outcome = self._outcome(config, log)
                left = self._take_all() if outcome.status == "full" else []
                for each in (config, *left):
                    self.done.put((each, outcome))
            self.stop()

    def _take_all(self) -> list[RunConfig]:
        """What nobody has begun: on a full disk it would be computed in vain."""
        left = []
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self.todo.get_nowait())
        return left

    def _outcome(self, config: RunConfig, log: IO[bytes]) -> Outcome:
        try:
            with self.lock:
                if self.stopped:
                    return Outcome("failed", "stopped")
                if self.process is None:
                    self.process = self._spawn(log)
                process = self.process
            pickle.dump(config, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            with self.lock:
                code = self._end(GRACE)
        except Exception as error:  # a task that cannot be sent
            with self.lock:
                self._end()
            return Outcome("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
        last = log.read().decode(errors="replace").strip()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        line = f": {last.splitlines()[-1]}" if last and code >= 0 else ""
        return Outcome("failed", f"its worker process died ({how}){line}", last)

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen:
        task = pickle.dumps(self.task)  # before there is a process that would have to be ended
        process = subprocess.Popen(
            [sys.executable, "-c", "from dpngd.suite.executors import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **KEEP_PAGES, **THREADS,
                 "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops its workers
        )
        process.stdin.write(task)
        return process

    def stop(self) -> None:
        """End the worker now, whatever it computes: the store takes whole records only."""
        with self.lock:
            self.stopped = True
            self._end()

    def _end(self, grace: float = 0.0) -> int:
        """End the process and return its exit code; the caller holds the lock."""
        process, self.process = self.process, None
        if process is None:
            return 0
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        return code


def serve() -> None:
    """A worker process: reads a task and then configs from its input, writes their outcomes to its output."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a run prints must not get between the outcomes
    inbox: queue.SimpleQueue[RunConfig] = queue.SimpleQueue()
    task = pickle.load(source)

    def listen() -> None:
        with contextlib.suppress(EOFError):
            while True:
                inbox.put(pickle.load(source))
        os._exit(0)  # the parent has ended: what is being computed has no use

    threading.Thread(target=listen, daemon=True).start()
    while True:
        config = inbox.get()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        pickle.dump(task(config), sink)
        sink.flush()

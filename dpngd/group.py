"""The processes that train one model together: what they exchange, and nothing else.

    group = connect()            ALONE, or the processes that `torchrun` started
    group.share(n)               which of the n micro-batches of a batch this process works on
    group.sum(blocks)            the sum over the processes, on all of them
    group.once(make, like)       tensors that the first process makes, on all of them

A step on several processes is the step of one, of the same Poisson batch: the first process draws the batch, each
process clips and sums its share, the sums are added up, and the first process adds noise, once, to the whole sum
(`dpngd.mechanism`). So sampling, sensitivity and noise are those of one process, and so is the guarantee. Results
differ by the rounding of float64 sums.

The exact sums pass between the processes. They are private: the network between the processes is trusted as the
processes are.

`Alone` does nothing at all: a run on one process has the same bits with it and without.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpngd.errors import UsageError

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # for a process that answers nothing; one that has ended is noticed at once


class Lost(RuntimeError):
    """Another process of the run has ended, so this one cannot go on. One line."""


class Told(Lost):
    """The same, and torchrun told this process to end."""


class Group(Protocol):
    """What the processes of a run exchange. Every process makes the same calls in the same order."""

    rank: int
    size: int

    def share(self, n: int) -> slice:
        """Which of n things, in their order, this process works on. The shares are a partition."""

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors of the same shapes on every process -> their sums, on every process."""

    def in_turn(self, fold: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
        """fold of the last process after ... after fold of the first one, applied to `start`; on every process.

        For sums whose bits must not depend on the number of processes.
        """

    def join(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all processes in the order of their ranks, as one tensor; they may differ in size along dim."""

    def all(self, value: T) -> list[T]:
        """The values of all processes, by rank. For small things: they are pickled."""

    def first(self, make: Callable[[], T]) -> T:
        """What `make` gives on the first process; called there only. Its exceptions are raised on all of them."""

    def once(self, make: Callable[[], list[Tensor]], like: list[Tensor]) -> list[Tensor]:
        """The same for tensors of the shapes of `like`, which go from device to device."""


class Alone:
    """One process: nothing to exchange."""

    rank, size = 0, 1

    def share(self, n: int) -> slice:
        return slice(0, n)

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def in_turn(self, fold: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
        return fold(start)

    def join(self, part: Tensor, dim: int) -> Tensor:
        return part

    def all(self, value: T) -> list[T]:
        return [value]

    def first(self, make: Callable[[], T]) -> T:
        return make()

    def once(self, make: Callable[[], list[Tensor]], like: list[Tensor]) -> list[Tensor]:
        return make()


ALONE: Group = Alone()


class Processes:
    """The processes of torch.distributed's default group: gloo between CPUs, nccl between GPUs."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def share(self, n: int) -> slice:
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        if not tensors:
            return tensors
        flat = torch.cat([t.reshape(-1) for t in tensors])  # one message
        with self._heard():
            dist.all_reduce(flat)
        return _like(flat, tensors)

    def in_turn(self, fold: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
        with self._heard():
            if self.rank:
                dist.recv(start, src=self.rank - 1)
        total = fold(start)
        with self._heard():
            if self.rank + 1 < self.size:
                dist.send(total, dst=self.rank + 1)
            dist.broadcast(total, src=self.size - 1)
        return total

    def join(self, part: Tensor, dim: int) -> Tensor:
        sizes = self.all(part.shape[dim])
        rows = part.movedim(dim, 0)
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        with self._heard():
            dist.all_gather(parts, padded)
        return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)]).movedim(0, dim)

    def all(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with self._heard():
            dist.all_gather_object(values, value)
        return values

    def first(self, make: Callable[[], T]) -> T:
        told: list[Any] = [None]
        if self.rank == 0:
            try:
                told = [(make(), None)]
            except Exception as error:
                told = [(None, error)]
        with self._heard():
            dist.broadcast_object_list(told)
        value, error = told[0]
        if error is not None:
            raise error
        return value

    def once(self, make: Callable[[], list[Tensor]], like: list[Tensor]) -> list[Tensor]:
        made = make() if self.rank == 0 else like
        flat = torch.cat([t.reshape(-1) for t in made])
        with self._heard():
            dist.broadcast(flat, src=0)
        return _like(flat, like)

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """A message that fails: the other side is not there any more."""
        try:
            yield
        except Lost:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise Lost(f"process {self.rank} of {self.size} ends: another process of the run has ended, or cannot be "
                       f"reached ({str(error).splitlines()[0][:120]}); start the run again") from None


def _like(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [part.view(t.shape).to(t.dtype) for part, t in zip(flat.split([t.numel() for t in like]), like, strict=True)]


@contextlib.contextmanager
def connected(ends: bool = False) -> Iterator[Group]:
    """The processes that `torchrun` started together with this one, or ALONE where it did not.

        torchrun --nproc-per-node 4 -m dpngd train ...

    Within the block SIGTERM, with which torchrun ends the processes that are left when one dies, is a Told. Processes
    of one machine speak over its loopback network: the sums that they exchange are private, and nobody can listen.
    `ends` says that the process ends with the block, by `os._exit`: its connections are left to the system.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UsageError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {missing[0]} is not set: start several "
                         "processes with torchrun, or unset WORLD_SIZE")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1"):
        for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
        group = Processes()
        yield group
        try:
            group.all(None)  # nobody leaves before all have what they need
        except Told:
            raise
        except Lost:
            pass  # the work is done, and another one left first; if it died, torchrun says so
    finally:
        signal.signal(signal.SIGTERM, before)
        if dist.is_initialized() and sys.exc_info()[0] is None and not ends:
            dist.destroy_process_group()


def _terminated(number: int, frame: object) -> NoReturn:
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    raise Told(f"process {rank} of {size} ends: it was told to, since another process of the run has ended; start the "
               "run again")


def check_same(group: Group, what: dict[str, Any]) -> None:
    """An error on every process where some differ in what they are about to do."""
    for rank, other in enumerate(group.all(what)):
        for name, value in what.items():
            if other.get(name) != value:
                raise UsageError(f"process {rank} of the run has another {name} ({other.get(name)}) than process "
                                 f"{group.rank} ({value}): start all of them with the same command, data and version")

"""Checkpoints inside a run: everything that a run holds between two steps, so that a killed run goes on.

    DIR/run.checkpoint    one line of JSON (whose it is, the step, a checksum), then the state as `torch.save` writes it

`dpngd train ... --checkpoint DIR --every n` writes one after every n steps and after the last; the same command started
again goes on from it. After kill -9 at any moment the resumed run has the facts of an uninterrupted one, bit for bit.

    part                    what of it
    weights, average        the parameters; their average and its number of updates
    batches, noise, labels  the position of every random stream, those of private curvature included
    steps                   where the next step search starts
    the method's own        F, AdaDPS's scale or GEP's basis: all that lasts from one refresh to the next (`Built.held`)
    log, clock              losses, norms, evaluations, diagnostics; seconds by phase

What is a function of the config and of the data (schedules, sigma, the probe, a floor and a clip that are found at
theta_0) is computed again. The step number is the count of releases: those up to it are in the weights.

A checkpoint is used only for the run that wrote it: the same config (its key), data (their digests), version of dpngd
and of its records, and arithmetic (`record.rounding`, device). Any other, or a damaged one, is refused in one line. It
is written whole or not at all (`files.write_atomically`): after a crash there is the old one or the new one.

Randomness. A step is wholly in a checkpoint, or is done again from the state before it: the same batch, the same
weights, the same noise, so the same release. No noise meets two different sums. This holds because a seed decides the
run, which is a simulation; a checkpoint holds its losses and the states of its generators, and is no release either.
Of a run on several processes the first one keeps the checkpoint; all go on from it, in the same number.

Releases (noise="secret") have no checkpoints. Their noise cannot be drawn again, so a step that was lost would be
repeated with fresh noise on a fresh batch: one more look at the private data than the T that sigma is calibrated for,
as many more as the run is killed, and whoever kills it may have seen what it wrote. `train` refuses the combination.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dpngd
from dpngd.errors import UsageError
from dpngd.files import write_atomically
from dpngd.group import ALONE, Group
from dpngd.training.config import RECORD_VERSION, RunConfig
from dpngd.training.record import rounding

FORMAT = 1
NAME = "run.checkpoint"
log = logging.getLogger("dpngd.checkpoint")


class Unusable(Exception):
    """A checkpoint that cannot be used, and why."""


class Checkpoint:
    """The checkpoint of one run, in a folder of its own; one process at a time uses it.

    every       steps from one to the next; there is also one after the last step
    automatic   of a sweep, not asked for by name: one that cannot be used is named in a warning and the run starts from
                the beginning, where else it is an error
    """

    def __init__(self, folder: str | Path, every: int, *, automatic: bool = False):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"a checkpoint every {every!r} steps: must be a whole number from 1")
        self.path, self.every, self.automatic = Path(folder) / NAME, every, automatic
        self.held: Mapping[str, Any] | None = None

    def resume(self, config: RunConfig, held: Mapping[str, Any] | None, device: torch.device,
               data: Sequence[str], group: Group = ALONE) -> int:
        """Put `held` into the state of the checkpoint; the number of steps done, 0 where there is no checkpoint.

        held   everything that changes along the run: objects with state_dict and load_state_dict, or torch generators.
               None where the method does not say what it holds
        data   digests of the private and the public set
        group  the processes of the run: the first one reads and writes, all of them go on from what it read
        """
        self.held, self.T, self.group = held, config.T, group
        self.whose = {"format": FORMAT, "dpngd": dpngd.__version__, "record": RECORD_VERSION, "key": config.key(),
                      "run": config.label(), "data": list(data), "arithmetic": f"{rounding()} {device.type}",
                      "processes": group.size}
        if held is None:
            if self.automatic:
                return 0
            raise UsageError(f"{config.method} cannot be resumed: its builder does not say what it holds between steps "
                             "(Built.held); leave the checkpoint out")
        group.first(self._prepare)
        try:
            step, states = group.first(self._read)
            if states.keys() != held.keys():
                raise Unusable("is of another version of dpngd (its parts differ)")
        except FileNotFoundError:
            return 0
        except Unusable as refused:
            if not self.automatic:
                raise UsageError(f"{self.path} {refused}: name another folder, or remove it to start again") from None
            log.warning("%s %s: the run starts again", self.path, refused)
            return 0
        for name, part in held.items():
            if isinstance(part, torch.Generator):
                part.set_state(states[name])
            else:
                part.load_state_dict(states[name])
        return step

    def after(self, step: int) -> None:
        """Write the state after `step` steps, if it is due."""
        if self.held is None or self.group.rank or (step % self.every and step != self.T):
            return
        buffer = io.BytesIO()
        torch.save({name: part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
                    for name, part in self.held.items()}, buffer)
        header = {**self.whose, "step": step}
        line = json.dumps({**header, "checksum": _checksum(header, buffer.getbuffer())}).encode() + b"\n"
        try:
            write_atomically(self.path, lambda file: (file.write(line), file.write(buffer.getbuffer())))
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written after step {step} ({error.strerror}): make room and start "
                             "again, from the checkpoint before") from None

    def _prepare(self) -> None:
        """Make the folder, and remove what a process that was killed while writing left there."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path.parent).close()  # not only after the first `every` steps
        except OSError as error:
            raise UsageError(f"{self.path.parent} cannot hold checkpoints ({error.strerror}): name a folder") from None
        lock = os.open(self.path.parent, os.O_RDONLY)  # the kernel's lock on the folder: free once the process ended
        weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.path.parent} holds the checkpoint of a run that is going on: name another "
                             "folder") from None
        for path in self.path.parent.glob(".tmp-*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > 60:  # a younger one may be of a process that is still there
                    path.unlink()

    def _read(self) -> tuple[int, dict[str, Any]]:
        """The step and the states of the checkpoint; raises Unusable."""
        line, _, state = self.path.read_bytes().partition(b"\n")
        try:
            header = json.loads(line)
            checksum = header.pop("checksum")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Unusable("is damaged (it has no header)") from None
        if checksum != _checksum(header, state):
            raise Unusable("is damaged (its checksum differs)")
        for names, what in ((("format", "dpngd", "record"), "is of another version of dpngd"),
                            (("key",), f"is of another run, {header.get('run')}"), (("data",), "is of other data"),
                            (("arithmetic",), "is of a machine that rounds differently"),
                            (("processes",), "is of a run on another number of processes")):
            if any(header.get(name) != self.whose[name] for name in names):
                raise Unusable(what)
        return header["step"], torch.load(io.BytesIO(state), weights_only=True)


def _checksum(header: Mapping[str, Any], state: bytes | memoryview) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(state)
    return digest.hexdigest()

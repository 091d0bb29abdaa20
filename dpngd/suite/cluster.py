"""Sweeps on a Ray cluster: a task is one run on some node, and its record comes back to be stored here.

    ray start --head --port 6379                      on one machine
    ray start --address HEAD:6379                     on each other one
    dpngd run --profile paper --executor ray          on any of them; --address ray://HEAD:10001 from elsewhere

    this process          the sweep: planning, store, progress (`dpngd.suite.sweep`). It does not import ray
    the driver            a process of its own on this machine, connected to the cluster: claims runs, sends them out,
                          stores their records. Ray ends a driver that has lost its cluster: then another is started,
                          for as long as PATIENCE, and what was not stored is sent out again
    workers               Ray's, on the nodes: compute a config, return its record. No shared folder is needed

Every node needs the same dpngd and the data (found as `dpngd data status` says, or sent by `ship`): both are checked on
every node before the first run, since a node without them would fail one run after the other. A worker that dies is
replaced and its run is started again, up to RETRIES times. A long run goes on from its checkpoint, which lies in
DPNGD_CHECKPOINTS of the node, or in its folder for temporary files; name a shared folder there if nodes may vanish.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import hashlib
import importlib.util
import os
import pickle
import platform
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dpngd
from dpngd import progress
from dpngd.errors import UsageError
from dpngd.files import write_atomically
from dpngd.suite import paths
from dpngd.suite.executors import GRACE, Outcome, Outcomes, Task, failed
from dpngd.suite.store import Store
from dpngd.training.config import RECORD_VERSION, RunConfig

RETRIES = 5  # of a run whose worker or node is lost
PATIENCE = 1800.0  # seconds that a lost cluster has to come back
AGAIN = 5.0  # seconds between two attempts to reach it
SILENCE = 300.0  # seconds without a word from the driver, after which it is taken to hang
ANSWER = 600.0  # seconds that the nodes have to answer, their first imports included
ATTEMPTS = 5  # to hear from all nodes
GREETINGS = 3  # at a ray:// address: its proxy gives the server that it starts for us 30 s, which a busy head exceeds
REACH = 10.0  # seconds that a host has to accept a connection
CLAIMS = 400  # runs that are out at a time, at most: each holds a lock file open
BEAT = 1.0  # seconds between two looks at the cluster
PACKAGES = ("torch", "numpy", "opacus", "scikit-learn")


class Ray:
    """Runs the tasks on a Ray cluster.

    address     "auto" (the cluster of this machine), HOST:PORT, ray://HOST:PORT from outside, or "local" (a cluster of
                this machine alone, for as long as the sweep lasts)
    cpus, gpus  what one run takes; fractions of a GPU share it
    ship        send data sets that a node lacks from here to its data folder
    """

    def __init__(self, address: str = "auto", *, cpus: float = 1.0, gpus: float = 0.0, ship: bool = False):
        check_installed()
        for name, value, least in (("cpus", cpus, 0.01), ("gpus", gpus, 0.0)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e6:
                raise UsageError(f"resources: {name} is {value!r}: a run takes a number of them from {least:g}")
        self.address, self.cpus, self.gpus, self.ship = address, cpus, gpus, ship

    def run(self, task: Task, configs: Sequence[RunConfig]) -> Outcomes:
        left = {config.key(): config for config in configs}
        lost: float | None = None  # since when there is no cluster
        known = False  # whether it was there at all
        while left:
            why = "its driver ended"
            with contextlib.closing(_driver(self, task, list(left.values()))) as messages:
                for kind, what in messages:
                    if kind == "outcome":
                        key, outcome = what
                        yield left.pop(key), outcome
                    elif kind == "refused" or (kind == "unreachable" and not known):
                        raise UsageError(what)
                    elif kind in ("unreachable", "ended"):
                        why = what
                    if kind in ("outcome", "beat"):
                        known, lost = True, None
            if not left:
                return
            if not known:
                raise UsageError(f"the Ray cluster at {self.address} cannot be used: {why}")
            lost = lost or time.monotonic()
            if time.monotonic() - lost > PATIENCE:
                raise UsageError(f"the Ray cluster at {self.address} was lost and has not come back within "
                                 f"{PATIENCE / 60:.0f} minutes: {len(left)} runs are left, the others are stored; "
                                 "start the cluster and the same command again")
            progress.say(f"the Ray cluster at {self.address} is lost ({why}): {len(left)} runs are left; trying again")
            time.sleep(AGAIN)


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("ray is not installed, which runs a sweep on a cluster: in a checkout, pip install "
                         "'.[cluster]'")


# ---- The driver, seen from the sweep ---------------------------------------------------------------------------------


def _driver(ray: Ray, task: Task, configs: list[RunConfig]) -> Iterator[tuple[str, Any]]:
    """Start a driver and yield what it says: ("beat", None), ("outcome", (key, Outcome)), ("unreachable", line) or
    ("refused", line), and at the end ("ended", line)."""
    job = pickle.dumps((ray, task, configs))
    # Ray would keep a token for a cluster of its own in ~/.ray, where a later `ray start --head` finds it and wants it
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if ray.address == "local" else {}
    said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "from dpngd.suite.cluster import serve_node; serve_node()"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, start_new_session=True,  # Ctrl-C reaches this process alone
            env={"RAY_gcs_rpc_server_reconnect_timeout_s": "30", "RAY_USAGE_STATS_ENABLED": "0", **own, **os.environ,
                 "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)})

        def listen() -> None:
            with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
                while True:
                    said.put(pickle.load(process.stdout))
            said.put(("end", None))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            with contextlib.suppress(OSError):
                process.stdin.write(job)
                process.stdin.flush()
            while True:
                try:
                    kind, what = said.get(timeout=SILENCE)
                except queue.Empty:
                    yield "ended", f"its driver was silent for {SILENCE:.0f} s"
                    return
                if kind == "end":
                    break
                yield kind, what
            code = process.wait()
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
            words = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            yield "ended", f"its driver ended with code {code}" + (f": {words[-1][:200]}" if words else "")
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()  # it then cancels what is out, and ends
            try:
                process.wait(3 * GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            listener.join()
            process.stdout.close()


# ---- The driver ------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The cluster cannot take this sweep, and why: one line."""


def serve_node() -> None:
    """The driver's process: reads its job, speaks to the cluster, tells the sweep what happens."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ray prints must not get between the messages
    ray, task, configs = pickle.load(source)

    def tell(kind: str, what: Any = None) -> None:
        pickle.dump((kind, what), sink)
        sink.flush()

    def listen() -> None:
        source.read()  # ends when the sweep does, or wants this to end
        _thread.interrupt_main()
        time.sleep(2 * GRACE)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        Driver(ray, task, tell).run(configs)
    except Refused as refused:
        tell("refused", str(refused))
    except ConnectionError as error:
        tell("unreachable", str(error).splitlines()[0])
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    sink.close()
    os._exit(0)  # without ray's own farewells, which may wait for a cluster that is gone


@dataclass
class Out:
    """A run that is out: its config, and the claim on it."""

    config: RunConfig
    claim: contextlib.ExitStack


class Driver:
    """Sends runs out and stores what comes back."""

    def __init__(self, options: Ray, task: Task, tell: Any):
        self.options, self.task, self.tell = options, task, tell
        self.out: dict[Any, Out] = {}
        self.full = False  # the disk of the store: nothing more is sent out

    def run(self, configs: Sequence[RunConfig]) -> None:
        import ray

        self.ray = ray
        self._connect()
        try:
            self._inspect(configs)
            self._sweep(deque(configs))
        finally:
            for ref in self.out:
                with contextlib.suppress(Exception):
                    ray.cancel(ref, force=True)
            with contextlib.suppress(Exception):
                ray.shutdown()

    def _connect(self) -> None:
        address = self.options.address
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host:
            try:
                socket.create_connection((host, int(port)), timeout=REACH).close()
            except (OSError, ValueError) as error:
                raise ConnectionError(f"nothing answers at {address} ({error}): start a cluster there with `ray start "
                                      "--head`, or give its --address") from None
        if address.startswith("ray://") and importlib.util.find_spec("grpc") is None:
            raise Refused(f"{address} needs grpc, which is not installed: in a checkout, pip install '.[cluster]'")
        for left in reversed(range(GREETINGS if address.startswith("ray://") else 1)):
            with contextlib.nullcontext() if not left else contextlib.suppress(ConnectionError, TimeoutError):
                self._init(address)
                return
            with contextlib.suppress(Exception):
                self.ray.shutdown()
            time.sleep(AGAIN)

    def _init(self, address: str) -> None:
        try:
            self.ray.init(address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, TimeoutError) as error:
            raise ConnectionError(f"no Ray cluster answers at {address} ({_line(error)}): start one with `ray start "
                                  "--head`, or give its --address") from None
        except RuntimeError as error:  # another version of ray or of Python
            raise Refused(f"the cluster at {address} cannot be used ({_line(error)}): install the same versions of ray "
                          "and of Python there and here") from None

    # -- The nodes: versions and data

    def _nodes(self) -> list[dict]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _slots(self) -> int:
        """Runs that the cluster can compute at a time."""
        return sum(slots(node["Resources"], self.options) for node in self._nodes())

    def _inspect(self, configs: Sequence[RunConfig]) -> None:
        """Refuse a cluster on which runs would fail, before any does."""
        samples = list({(c.data, c.public): c for c in configs}.values()) if self.task.run is None else []
        for _ in range(ATTEMPTS):
            nodes = [node for node in self._nodes() if slots(node["Resources"], self.options)]
            if not nodes:
                raise Refused(f"no node of the cluster has {self.options.cpus:g} CPUs and {self.options.gpus:g} GPUs, "
                              "which one run takes: lower `resources` of the profile, or add nodes")
            answers = self._ask(nodes, look, samples)
            if not any(answer.get("error") for answer in answers.values()):
                break
            time.sleep(AGAIN)  # a node that has just gone is listed for a few seconds more
        lacking = [node for node in nodes if answers[node["NodeID"]].get("lacks")]
        if lacking and self.options.ship:
            files = {name: self.ray.put(path.read_bytes()) for name, path in files_of(samples).items()}
            self._ask(lacking, receive, files)
            answers |= self._ask(lacking, look, samples)
        for node in nodes:
            told = answers[node["NodeID"]]
            name = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            if told.get("error"):
                raise Refused(f"{name} cannot compute runs: {told['error']}; install the same dpngd there")
            if other := differing(told["versions"]):
                raise Refused(f"{name} has {other}: install the same versions on every node")
            if told["lacks"]:
                raise Refused(f"{name} lacks the data: {told['lacks']}; or pass --ship-data")

    def _ask(self, nodes: list[dict], question: Any, argument: Any) -> dict[str, dict]:
        """What each node answers, by its id; {"error": line} where it cannot."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        remote = self.ray.remote(num_cpus=0, max_retries=RETRIES)(question)
        refs = {node["NodeID"]: remote.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote(argument)
                for node in nodes}
        waiting, deadline = list(refs.values()), time.monotonic() + ANSWER
        while waiting and time.monotonic() < deadline:
            waiting = self.ray.wait(waiting, num_returns=len(waiting), timeout=BEAT)[1]
            self.tell("beat")
        answers = {}
        for node, ref in refs.items():
            try:
                answers[node] = self.ray.get(ref, timeout=0)
            except Exception as error:
                answers[node] = {"error": _line(error)}
        return answers

    # -- The runs

    def _sweep(self, todo: deque[RunConfig]) -> None:
        task, home, cpus = self.task, self.ray.get_runtime_context().get_node_id(), self.options.cpus
        remote = self.ray.remote(num_cpus=cpus, num_gpus=self.options.gpus, max_retries=RETRIES)(compute_on_node)
        shared = self.ray.put((task.run, dict(task.every), task.store.profile, versions(), max(1, int(cpus))))
        looked, room = 0.0, 0
        while (todo and not self.full) or self.out:
            if time.monotonic() - looked > BEAT:
                if home not in {node["NodeID"] for node in self._nodes()}:
                    raise ConnectionError("the cluster was restarted")
                looked, room = time.monotonic(), min(2 * self._slots() + 2, CLAIMS)
                self.tell("beat")
            while todo and len(self.out) < room and not self.full:
                self._send(todo.popleft(), remote, shared)
            if self.out:
                for ref in self.ray.wait(list(self.out), timeout=BEAT)[0]:
                    self._take(ref)
            elif todo and not self.full:
                time.sleep(BEAT)  # no node at the moment
        for config in todo:
            self.tell("outcome", (config.key(), Outcome("full", "the disk of the store is full")))

    def _send(self, config: RunConfig, remote: Any, shared: Any) -> None:
        claim = contextlib.ExitStack()
        try:
            mine = claim.enter_context(self.task.store.claim(config.key()))
            stored = mine and self.task.store.get(config) is not None
        except Exception as error:
            claim.close()
            self.tell("outcome", (config.key(), failed(error)))
            return
        if stored or not mine:
            claim.close()
            self.tell("outcome", (config.key(), Outcome("stored" if stored else "busy")))
            return
        self.out[remote.remote(shared, config)] = Out(config, claim)

    def _take(self, ref: Any) -> None:
        out = self.out.pop(ref)
        with out.claim:
            try:
                answer = self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                outcome = Outcome("failed", f"its worker was lost {RETRIES + 1} times, or could not start: "
                                            f"{_line(error)}", str(error))
            else:
                outcome = answer if isinstance(answer, Outcome) else self._store(out.config, answer)
        self.tell("outcome", (out.config.key(), outcome))

    def _store(self, config: RunConfig, record: Mapping[str, Any]) -> Outcome:
        try:
            self.task.store.put(config, record)
            return Outcome("stored")
        except Exception as error:
            outcome = failed(error)
            self.full = outcome.status == "full"
            return outcome


def slots(resources: Mapping[str, float], options: Ray) -> int:
    """Runs that a node with these resources can compute at a time."""
    by_kind = [resources.get(kind, 0.0) / each for kind, each in (("CPU", options.cpus), ("GPU", options.gpus)) if each]
    return int(min(by_kind) + 1e-9)


def _line(error: Exception) -> str:
    """The last line of what ray says: its own traceback comes before."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


# ---- On a node -------------------------------------------------------------------------------------------------------


@functools.cache
def versions() -> dict[str, str]:
    """What must be the same on all nodes for runs to be the same: versions, and a digest of dpngd's own code."""
    import importlib.metadata

    code = hashlib.sha256()
    for path in sorted(paths.PACKAGE.rglob("*.py")):
        code.update(path.read_bytes())
    found = {"dpngd": dpngd.__version__, "record": str(RECORD_VERSION), "Python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "code of dpngd": code.hexdigest()[:12]}


def differing(theirs: Mapping[str, str], ours: Mapping[str, str] | None = None) -> str:
    """The first version that differs, in words; "" where none does."""
    ours = versions() if ours is None else ours
    return next((f"{name} {theirs.get(name)}, and {value} is here" for name, value in ours.items()
                 if theirs.get(name) != value), "")


def look(samples: Sequence[RunConfig]) -> dict[str, Any]:
    """What a node has: its versions, and of data that it lacks the error."""
    lacks = ""
    for config in samples:
        from dpngd.training.train import load

        try:
            load(config)
        except UsageError as error:
            lacks = str(error)
            break
    return {"versions": versions(), "lacks": lacks}


def files_of(samples: Sequence[RunConfig]) -> dict[str, Path]:
    """The prepared files of the named data sets of some runs, as they are here."""
    from dpngd.data import sets
    from dpngd.data.sources import obtain

    names = dict.fromkeys(name for c in samples for name in (c.data, *(c.public or "").split("+")) if name in sets.SETS)
    files = dict.fromkeys(sets.SETS[name].file for name in names if sets.SETS[name].file)
    return {path.name: path for path in (obtain(file, download=False).path for file in files) if path is not None}


def receive(files: Mapping[str, Any]) -> dict[str, Any]:
    """Write files that were sent into the node's data folder."""
    import ray

    from dpngd.data.sources import folders, writable

    folder = writable(folders())
    if folder is None:
        return {"error": "it has no data folder that can be written to: set DPNGD_DATA to one"}
    for name, ref in files.items():
        write_atomically(folder / name, ray.get(ref))
    return {}


def compute_on_node(shared: tuple, config: RunConfig) -> Mapping[str, Any] | Outcome:
    """A run on a node: its record, or why there is none."""
    run, every, profile, expected, threads = shared
    name = socket.gethostname()
    try:
        if other := differing(versions(), expected):
            raise UsageError(f"it has {other}; install the same versions on every node")
        from dpngd.suite.sweep import Work

        if run is None:
            import torch

            torch.set_num_threads(threads)
        place = Path(os.environ.get("DPNGD_CHECKPOINTS") or
                     Path(tempfile.gettempdir()) / f"dpngd-checkpoints-{os.getuid()}")
        here = Store(profile, root=place, read_shipped=False)
        work = Work(here, run, every)
        if config.key() not in every:
            return work.compute(config)
        with here.claim(config.key()) as mine:  # another sweep may compute the same run on this node
            record = work.compute(config, here.checkpoint(config.key()) if mine else None)
            if mine:
                work.forget(config)
            return record
    except Exception as error:
        return Outcome("failed", f"on node {name}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
                       traceback.format_exc())

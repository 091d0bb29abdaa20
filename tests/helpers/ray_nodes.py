"""A Ray cluster on this machine for test_cluster.py: nodes in processes of their own, which can be killed."""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; sys.exit(main())"]
HOST = "127.0.0.2"
"""Ray takes 127.0.0.1 for this machine's name in its network, and looks for the cluster at that address. With any other
address of the loopback network all that is said stays on it, whatever network there is, or comes and goes."""
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""Where a token lies in ~/.ray (any `ray.init` of a local cluster leaves one), a head asks for it, and a node that was
not told of it is turned away for good: so both are told."""
START = 240  # seconds that one `ray start` has
PATIENCE = 900  # seconds for a head and its first node, or for one more node, however often they are started


def free_port():
    """One below those that Linux hands out by itself, so that it is still free after a restart, and above those that
    Ray's client proxy takes (23,000 to 23,999)."""
    while True:
        port = random.SystemRandom().randrange(24_000, 32_000)
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port


class NoStart(pytest.skip.Exception):
    """Ray does not start here, with its own last words; a test that hears of it is skipped."""


class Node:
    """`ray start` with these options, in a session of its own, and all that it starts.

    path    what comes first where Python looks for modules; env is for the environment
    """

    def __init__(self, *options, path=HELPERS, **env):
        own = {"PYTHONPATH": os.pathsep.join(map(str, (path, ROOT, HELPERS))), "OMP_NUM_THREADS": "1", **OPEN,
               "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # else 15: last of all busy processes
        self.log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (kill closes it)
        self.process = subprocess.Popen(
            [*RAY, "start", "--block", "--num-cpus=1", "--num-gpus=0", "--min-worker-port=0", "--max-worker-port=0",
             "--object-store-memory=100000000", "--include-log-monitor=false", f"--node-ip-address={HOST}", *options],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env={**os.environ, **own, **env},
            start_new_session=True)
        deadline = time.monotonic() + START
        while "Ray runtime started" not in self.said():
            if self.process.poll() is not None or time.monotonic() > deadline:
                words = self.last_words()
                self.kill()
                raise NoStart(words)
            time.sleep(0.2)

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def last_words(self):
        """The errors among what it said, or else its last line: ray ends some of them with an empty one."""
        lines = [line.strip() for line in self.said().splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return ((errors or lines)[-1:] or ["it said nothing"])[0][:300]

    def alive(self):
        return self.process.poll() is None

    def kill(self):
        """All of its session: what `ray start` started, and what that started."""
        family = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self.process.pid:
                    family.append(process)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=60)
        self.log.close()


class Cluster:
    """A head and further nodes.

    Ray gives its own helpers 15 s to start and a node 30 s to be known, whatever else the machine does. So what fails
    is tried again, and a head that ended after all is replaced, until PATIENCE is over.
    """

    def __init__(self, **env):
        self.folders, self.nodes, self.env = [], [], env
        self.port = self.client = self.head = None
        self._until_it_starts(self._head_and_node)

    def _until_it_starts(self, start):
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return start()
            except NoStart as error:
                if time.monotonic() > deadline:
                    self.close()
                    raise NoStart(f"ray does not start here, tried for {PATIENCE} s: {error.msg}") from None

    def _head_and_node(self):
        """With ports of their own each time: a head that ended may leave others waiting at its port."""
        self.port, self.client = free_port(), free_port()
        self.head = self._head()
        try:
            self.add()
        except NoStart as error:
            died = "" if self.head.alive() else f"; and its head ended: {self.head.last_words()}"
            self.head.kill()
            raise NoStart(f"{error.msg}{died}") from None

    def _head(self):
        self.folders.append(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short: sockets lie in it
        return Node("--head", f"--port={self.port}", f"--ray-client-server-port={self.client}",
                    "--include-dashboard=false", "--no-monitor", f"--temp-dir={self.folders[-1]}", **self.env)

    @property
    def address(self):
        return f"{HOST}:{self.port}"

    def add(self, **options):
        self.nodes.append(Node(f"--address={self.address}", **{**self.env, **options}))
        return self.nodes[-1]

    def add_another(self, **options):
        """Beside a head that is known to work."""
        return self._until_it_starts(lambda: self.add(**options))

    def mend(self):
        """A head and one node, both alive, whatever happened to them before."""
        for node in [node for node in self.nodes if not node.alive()]:
            self.remove(node)
        if not self.head.alive():
            self.stop()
            self._until_it_starts(self._head_and_node)
        elif not self.nodes:
            self.add_another()

    def remove(self, node):
        self.nodes.remove(node)
        node.kill()

    def restart_head(self):
        self.head.kill()
        for node in list(self.nodes):  # they end with it, some time later
            self.remove(node)
        self.head = self._until_it_starts(self._head)

    def stop(self):
        for node in [*self.nodes, self.head]:
            if node is not None and not node.log.closed:
                node.kill()
        self.nodes.clear()

    def close(self):
        self.stop()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

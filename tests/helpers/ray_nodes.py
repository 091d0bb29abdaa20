"""A Ray cluster on this machine for test_cluster.py: nodes in processes of their own, which can be killed."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; sys.exit(main())"]
LIMIT = 600
TRIES = 10


def free_port():
    """One below those that Linux hands out by itself, so that it is still free after a restart."""
    while True:
        port = random.SystemRandom().randrange(21_000, 32_000)
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port


class TooBusy(RuntimeError):
    """No node started, in TRIES attempts."""


class Node:
    """One `ray start --block`; `kill` ends it and all that it started, at once."""

    def __init__(self, *options, path=HELPERS, **env):
        own = {"PYTHONPATH": os.pathsep.join(map(str, (path, ROOT, HELPERS))), "OMP_NUM_THREADS": "1",
               "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # else 15: last of all busy processes
        self.options, self.env = options, {**os.environ, **own, **env}
        for _ in range(TRIES):
            if self._start():
                return
        raise TooBusy(self.words.splitlines()[-1])

    def _start(self):
        """Ray gives its own helpers 15 s to start, and on a busy machine they may need more: then once more."""
        self.log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (kill closes it)
        self.process = subprocess.Popen(
            [*RAY, "start", "--block", "--num-cpus=1", "--num-gpus=0", "--min-worker-port=0", "--max-worker-port=0",
             "--object-store-memory=100000000", "--include-log-monitor=false", *self.options], stdout=self.log,
            stderr=self.log, env=self.env, start_new_session=True)
        deadline = time.monotonic() + LIMIT
        while "Ray runtime started" not in self.said():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.words = self.said()
                self.kill()
                return False
            time.sleep(0.2)
        return True

    def said(self):
        self.log.seek(0)
        return self.log.read()

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
    """A head and further nodes."""

    def __init__(self, **env):
        self.port, self.client, self.folders, self.nodes, self.env = free_port(), free_port(), [], [], env
        self.head = self._head()

    def _head(self):
        self.folders.append(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short: sockets lie in it
        return Node("--head", f"--port={self.port}", f"--ray-client-server-port={self.client}",
                    "--include-dashboard=false", "--no-monitor", f"--temp-dir={self.folders[-1]}", **self.env)

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def add(self, **options):
        self.nodes.append(Node(f"--address={self.address}", **{**self.env, **options}))
        return self.nodes[-1]

    def remove(self, node):
        self.nodes.remove(node)
        node.kill()

    def restart_head(self):
        self.head.kill()
        for node in list(self.nodes):  # they end with it, some time later
            self.remove(node)
        self.head = self._head()

    def close(self):
        for node in [*self.nodes, self.head]:
            node.kill()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

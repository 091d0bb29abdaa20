"""Sweeps on a real Ray cluster of two nodes on this machine: the same records, and nothing lost when something dies.

Skipped where ray is not installed, but for what must be said there, or does not start: then with its own last words.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from data_files import split_arrays
from ray_nodes import HOST, OPEN, Cluster
from sweep_runs import config, configs, good, killed_once_and_3_fails, slow

from dpngd.errors import UsageError
from dpngd.suite import cluster, command, profiles
from dpngd.suite.cluster import Ray, differing, slots, versions
from dpngd.suite.store import Store
from dpngd.suite.sweep import SweepError, ensure

HELPERS = Path(__file__).parents[1] / "helpers"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None,
                               reason="ray is not installed: pip install '.[cluster]'")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_LOG", str(tmp_path / "log"))
    return Store("quick", root=tmp_path / "store", results=tmp_path / "results")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Where runs on the nodes write: the nodes have the environment with which they were started."""
    return tmp_path_factory.mktemp("nodes") / "log"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder with a small SVHN."""
    folder = tmp_path_factory.mktemp("data")
    np.savez(folder / "svhn.npz", **split_arrays(60, 20))
    return folder


@pytest.fixture(scope="module")
def cluster_of_two(log, data):
    """A head and a second node, each in a process of its own."""
    found = Cluster(SWEEP_LOG=str(log), DPNGD_DATA=str(data))
    yield found
    found.close()


@pytest.fixture
def nodes(cluster_of_two, monkeypatch):
    for name, value in OPEN.items():
        monkeypatch.setenv(name, value)  # for drivers
    cluster_of_two.mend()
    return cluster_of_two


@pytest.fixture
def ray(nodes, monkeypatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    monkeypatch.setattr(cluster, "AGAIN", 1.0)
    return Ray(nodes.address)


def started(log):
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def wait_for(condition, seconds=600.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- What needs no cluster -----------------------------------------------------------------------------------------


def test_without_ray(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name, *a))
    with pytest.raises(UsageError, match=r"ray is not installed.*pip install '\.\[cluster\]'"):
        command.run(["--executor", "ray"])


@pytest.mark.parametrize(("options", "message"), [
    (["--executor", "rya"], "invalid choice: 'rya'"),
    (["--address", "auto"], "--address is of a Ray cluster: give --executor ray too"),
    (["--ship-data"], "--ship-data is for a Ray cluster: give --executor ray too"),
])
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(UsageError, match=message):
        command.run(options)


@needs_ray
@pytest.mark.parametrize("resources", [{"cpus": 0}, {"cpus": True}, {"gpus": -1}, {"cpus": "2"}])
def test_impossible_resources(resources):
    with pytest.raises(UsageError, match="a run takes a number of them from"):
        Ray(**resources)


@needs_ray
def test_the_options_reach_the_executor():
    args = command.run_arguments(["--profile", "paper", "--executor", "ray", "--address", "h:1", "--ship-data"])
    made = args.executor
    assert (made.address, made.ship) == ("h:1", True)
    stated = profiles.load("paper").settings["resources"]
    assert (made.cpus, made.gpus) == (stated["cpus"], stated["gpus"])
    assert command.run_arguments(["--profile", "quick"]).executor is None


@needs_ray
def test_slots_of_a_node():
    assert slots({"CPU": 8.0, "GPU": 2.0}, Ray(cpus=2, gpus=0.5)) == 4
    assert slots({"CPU": 7.0}, Ray(cpus=2)) == 3
    assert slots({"CPU": 64.0}, Ray(cpus=1, gpus=1)) == 0
    assert slots({"CPU": 0.3 * 3, "GPU": 1.0}, Ray(cpus=0.3, gpus=0.1)) == 3


def test_versions_that_differ_are_named():
    assert differing(versions()) == ""
    assert differing({**versions(), "torch": "1.0"}).startswith("torch 1.0, and ")
    assert "code of dpngd" in versions()


@needs_ray
def test_an_address_that_nobody_answers_at(store):
    with pytest.raises(UsageError, match=r"nothing answers at 127\.0\.0\.1:1 .*ray start --head") as error:
        ensure(configs(1), store=store, run=good, executor=Ray("127.0.0.1:1"))
    assert "\n" not in str(error.value)
    assert not any(store.folder.glob("*.json"))
    assert not any(store.folder.glob("*.lock"))


# ---- On the cluster -------------------------------------------------------------------------------------------------


@needs_ray
def test_twenty_runs_give_the_records_of_the_process_executor_bit_for_bit(store, tmp_path, ray):
    quick = profiles.load("quick")
    wanted = [quick.config(method, "digits", 2.0, seed, T=2, B=64, evals=1)
              for method in ("dp-sgd", "dp-ngd") for seed in range(10)]
    there = ensure(wanted, store=store, executor=ray)
    here = ensure(wanted, store=Store("quick", root=tmp_path / "other", results=tmp_path / "results"), jobs=2)
    for one, other in zip(there, here, strict=True):
        assert {k: v for k, v in one.items() if k not in ("seconds", "where")} == {
            k: v for k, v in other.items() if k not in ("seconds", "where")}
    assert one["where"]["threads"] == 1


@needs_ray
def test_a_worker_that_is_killed_loses_nothing_and_a_failing_run_is_reported(store, log, nodes, monkeypatch):
    """From outside, by ray://. Seed 1 waits to be killed, by its pid, the first time; seed 3 fails. Another sweep, in
    processes of this machine, shares the store."""
    log.unlink(missing_ok=True)
    other = subprocess.Popen([sys.executable, "-c", SHARED, str(store.folder.parent), str(store.shipped_path.parent)],
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SWEEP_LOG": str(log)})
    killer = subprocess.Popen([sys.executable, "-c", KILL, str(log)])
    try:
        with pytest.raises(SweepError) as caught:
            ensure(configs(8), store=store, run=killed_once_and_3_fails, executor=Ray(f"ray://{HOST}:{nodes.client}"))
        assert killer.wait(60) == 0
        assert other.wait(600) == 0
    finally:
        for process in (killer, other):
            process.kill()
    (failure,) = caught.value.failures
    assert failure[0].seed == 3
    assert failure[1].error.endswith("RuntimeError: no luck")
    assert "on node " in failure[1].error
    seeds = [int(line[0]) for line in started(log)]
    assert seeds.count(1) == 2
    assert all(seeds.count(seed) == 1 for seed in (0, 2, 4, 5, 6, 7, 20, 21)), seeds
    assert all(store.get(c) for c in [*configs(8), config(20), config(21)] if c.seed != 3)
    assert not any(store.folder.glob("*.lock"))


SHARED = """
import sys
from sweep_runs import config, configs, slow
from dpngd.suite.store import Store
from dpngd.suite.sweep import ensure
store = Store("quick", root=sys.argv[1], results=sys.argv[2])
ensure([config(20), config(21), *configs(8)[4:]], store=store, jobs=2, run=slow)
"""
KILL = """
import os, signal, sys, time
from pathlib import Path
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    lines = Path(sys.argv[1]).read_text().splitlines() if Path(sys.argv[1]).exists() else []
    found = [line.split() for line in lines if line.split()[0] == "1"]
    if found:
        time.sleep(0.5)
        os.kill(int(found[0][1]), signal.SIGKILL)
        sys.exit(0)
    time.sleep(0.05)
sys.exit(1)
"""


@needs_ray
def test_ctrl_c_cancels_what_is_out(store, log, nodes, tmp_path):
    log.unlink(missing_ok=True)
    script = tmp_path / "sweep.py"
    script.write_text(f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(HELPERS)!r})
import sweep_runs
from dpngd.suite.cluster import Ray
from dpngd.suite.store import Store
from dpngd.suite.sweep import ensure
store = Store("quick", root={str(store.folder.parent)!r}, results={str(store.shipped_path.parent)!r})
ensure(sweep_runs.configs(5), store=store, run=sweep_runs.endless, executor=Ray({nodes.address!r}))
""")
    sweep = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(started(log)) == 2 or sweep.poll() is not None)
        assert sweep.poll() is None, sweep.stderr.read()
        workers = [int(line[1]) for line in started(log)]
        assert store.claimed(config(0).key())
    finally:
        sweep.send_signal(signal.SIGINT)
        said = sweep.communicate(timeout=600)[1]
    assert "KeyboardInterrupt" in said
    wait_for(lambda: not any(map(alive, workers)))
    assert not any(store.claimed(c.key()) for c in configs(5))


@needs_ray
def test_a_node_with_another_version_is_refused(store, nodes, ray, tmp_path):
    """A node on which importlib finds another torch."""
    other = tmp_path / "site" / "torch-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    node = nodes.add_another(path=tmp_path / "site")
    try:
        with pytest.raises(UsageError, match=r"node .* has torch 1\.0, and .* is here: install the same") as error:
            ensure(configs(2), store=store, run=good, executor=ray)
        assert "\n" not in str(error.value)
        assert not any(store.folder.glob("*.json"))
    finally:
        nodes.remove(node)


@needs_ray
def test_a_node_without_the_data_is_refused_or_gets_them(store, nodes, ray, data, tmp_path, monkeypatch):
    there = tmp_path / "nothing"
    there.mkdir()
    monkeypatch.setenv("DPNGD_DATA", str(data))
    wanted = [config().replace(data="svhn", B=20, T=1, evals=1)]
    node = nodes.add_another(DPNGD_DATA=str(there))
    try:
        with pytest.raises(UsageError, match="lacks the data: svhn") as error:
            ensure(wanted, store=store, executor=ray)
        assert "\n" not in str(error.value)
        assert "--ship-data" in str(error.value)
        (record,) = ensure(wanted, store=store, executor=Ray(nodes.address, ship=True))
        assert record["data"]["private"]["N"] == 60
        assert (there / "svhn.npz").read_bytes() == (data / "svhn.npz").read_bytes()
    finally:
        nodes.remove(node)


@needs_ray
def test_the_head_is_killed_and_started_again_and_the_sweep_goes_on(store, log, nodes, ray, capfd):
    log.unlink(missing_ok=True)
    done = []

    class Watching:
        """The executor, with the head killed and started again after the third run."""

        def run(self, task, wanted):
            for outcome in ray.run(task, wanted):
                done.append(outcome[0].seed)
                yield outcome
                if len(done) == 3:
                    nodes.restart_head()

    records = ensure(configs(12), store=store, run=slow, executor=Watching())
    assert [r["accuracy"] for r in records] == [seed / 10 for seed in range(12)]
    assert sorted(done) == list(range(12)), "each once"
    assert "is lost" in capfd.readouterr().err
    assert not any(store.folder.glob("*.lock"))

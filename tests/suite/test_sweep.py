"""Sweeps: only what is missing is computed; failures, crashes, interrupts and a second sweep lose nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient
from sweep_runs import (
    config,
    configs,
    dataclass_with_threads,
    good,
    large,
    not_a_record,
    odd_seeds_fail,
    seed_1_is_killed_and_3_exits,
    together,
)

from dpngd.errors import UsageError
from dpngd.suite import bench, sweep
from dpngd.suite.executors import Outcome
from dpngd.suite.profiles import load
from dpngd.suite.store import Store
from dpngd.suite.sweep import SweepError, ensure, shard
from dpngd.training.checkpoint import Checkpoint
from dpngd.training.train import run

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # which workers must not take over
    return Store("quick", root=tmp_path / "store", results=tmp_path / "results")


def started(store, folder=None):
    """The seeds of the runs that were started, in order, with the process and its thread limit."""
    log = (folder or store.folder.parent.parent) / "log"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("jobs", [1, 2])
def test_missing_runs_are_computed_once_and_come_in_order(store, jobs, capfd):
    wanted = [config(3), config(0), config(3), config(1)]
    records = ensure(wanted, store=store, jobs=jobs, run=good)
    assert [r["accuracy"] for r in records] == [0.3, 0.0, 0.3, 0.1]
    assert sorted(int(line[0]) for line in started(store)) == [0, 1, 3]
    assert "runs: 3 of 3" in capfd.readouterr().err

    assert ensure(wanted, store=store, jobs=jobs, run=good) == records
    assert len(started(store)) == 3, "nothing is computed twice"
    assert capfd.readouterr().err == "", "no progress bar where there is nothing to do"

    ensure([*wanted, config(5)], store=store, jobs=jobs, run=good)
    assert [line[0] for line in started(store)[3:]] == ["5"]


def test_methods_take_turns():
    quick = load("quick")
    runs = quick.configs("convergence", methods=["dp-sgd-pt", "adadps"]) + quick.configs("sources", methods=["dp-sgd"])
    turned = sweep.in_turns(runs)
    assert sorted(c.key() for c in turned) == sorted(c.key() for c in runs)
    assert [c.method for c in turned[:6]] == ["dp-sgd-pt", "adadps", "dp-sgd"] * 2
    assert [c for c in turned if c.method == "adadps"] == [c for c in runs if c.method == "adadps"]


def test_one_job_stays_in_this_process_and_more_are_workers_of_one_thread(store):
    ensure(configs(1), store=store, jobs=1, run=good)
    assert started(store)[0][1] == str(os.getpid())
    ensure(configs(3)[1:], store=store, jobs=2, run=together)
    workers = started(store)[1:]
    assert len({pid for _, pid, _ in workers}) == 2
    assert str(os.getpid()) not in {pid for _, pid, _ in workers}
    assert {threads for *_, threads in workers} == {"1"}


@pytest.mark.parametrize(("hours", "jobs", "processes", "expected"), [
    (1.0, 2, 1, sweep.Inline), (1.0, 2, 2, sweep.LocalProcesses), (0.1, 2, 1, sweep.LocalProcesses),
    (1.0, 3, 1, sweep.LocalProcesses), (1.0, 1, 2, sweep.Inline)])
def test_a_long_sweep_on_all_cores_uses_them_as_was_faster(hours, jobs, processes, expected, monkeypatch):
    """Short sweeps, other numbers of jobs and a run function of the caller's are not worth or open to a measurement."""
    asked = []
    monkeypatch.setattr(sweep.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(bench, "layout", lambda n: asked.append(n) or bench.Layout(processes, n // processes))
    made = sweep._executor([config(0), config(1)], jobs, lambda c: 1800 * hours)
    assert isinstance(made, expected)
    assert asked == ([2] if hours == 1.0 and jobs == 2 else [])
    assert isinstance(sweep._executor([config(0)], jobs, None), sweep.Inline if jobs == 1 else sweep.LocalProcesses)


def test_a_dataclass_is_a_record_and_torch_has_one_thread(store):
    records = ensure(configs(3), store=store, jobs=2, run=dataclass_with_threads)
    assert [r["threads"] for r in records] == [1, 1, 1]
    assert records[0]["status"] == "diverged"


@pytest.mark.parametrize("jobs", [1, 2])
def test_failures_are_listed_at_the_end_and_the_rest_is_stored(store, jobs):
    with pytest.raises(SweepError) as caught:
        ensure(configs(5), store=store, jobs=jobs, run=odd_seeds_fail)
    assert {c.seed for c, _ in caught.value.failures} == {1, 3}
    assert all("odd_seeds_fail" in outcome.details for _, outcome in caught.value.failures)
    first, cause = str(caught.value).splitlines()
    assert first == "2 of 5 runs failed, the others are stored:"
    assert cause.endswith("and 1 more: UsageError: no data for odd seeds")
    assert [store.get(c) is not None for c in configs(5)] == [True, False, True, False, True]

    ensure(configs(5), store=store, jobs=jobs, run=good)
    assert sorted(line[0] for line in started(store)[5:]) == ["1", "3"], "only what failed is tried again"


def test_a_worker_that_dies_fails_its_own_run_only(store):
    with pytest.raises(SweepError) as caught:
        ensure(configs(6), store=store, jobs=2, run=seed_1_is_killed_and_3_exits)
    errors = {c.seed: outcome.error for c, outcome in caught.value.failures}
    assert errors == {
        1: "its worker process died (signal SIGKILL)",
        3: "its worker process died (exit code 7): last words",
    }
    assert [store.get(c) is not None for c in configs(6)] == [True, False, True, False, True, True]
    assert not any(store.claimed(c.key()) for c in configs(6))


def test_what_is_not_a_record_is_a_failure(store):
    with pytest.raises(SweepError, match="run returned a int, not a record"):
        ensure(configs(1), store=store, jobs=1, run=not_a_record)


def test_a_run_that_cannot_be_sent_is_refused_or_listed(store, monkeypatch):
    with pytest.raises(SweepError, match=r"1 of 1 runs failed.*\n.*(?i:pickle)"):
        ensure(configs(1), store=store, jobs=2, run=lambda config: {"status": "ok"})
    monkeypatch.setattr(good, "__module__", "__main__")
    with pytest.raises(UsageError, match="put it in a module"):
        ensure(configs(1), store=store, jobs=2, run=good)


@pytest.mark.parametrize("jobs", [0, -1, 1.5, True, "2"])
def test_bad_numbers_of_jobs(store, jobs):
    with pytest.raises(UsageError, match="jobs = "):
        ensure(configs(1), store=store, jobs=jobs, run=good)


def test_no_configs_no_records(store):
    assert ensure([], store=store) == []


def test_a_damaged_entry_is_computed_again(store):
    ensure(configs(2), store=store, jobs=1, run=good)
    path = store.path(config(1).key())
    path.write_text(path.read_text().replace("0.1", "0.9"))
    assert ensure(configs(2), store=store, jobs=1, run=good)[1]["accuracy"] == 0.1
    assert path.with_name(path.name + ".damaged").exists()
    assert len(started(store)) == 3


def test_shipped_records_need_no_run(store):
    ensure(configs(2), store=store, jobs=1, run=good)
    store.export()
    store.clear()
    again = Store("quick", root=store.folder.parent, results=store.shipped_path.parent)
    assert [r["accuracy"] for r in ensure(configs(2), store=again, run=not_a_record)] == [0.0, 0.1]


class Backwards:
    """An executor of another kind: it sees tasks and configs only."""

    def run(self, task, configs):
        for config_ in reversed(configs):
            yield config_, task(config_)


class Lies:
    def run(self, task, configs):
        for config_ in configs:
            yield config_, Outcome("stored")


def test_another_executor_can_take_the_place_of_the_processes(store):
    records = ensure(configs(3), store=store, run=good, executor=Backwards())
    assert [r["accuracy"] for r in records] == [0.0, 0.1, 0.2]
    assert [line[0] for line in started(store)] == ["2", "1", "0"]


def test_an_executor_is_not_believed_without_the_record(store):
    with pytest.raises(RuntimeError, match="its record cannot be read"):
        ensure(configs(1), store=store, run=good, executor=Lies())


def code(store, call):
    """Python text that makes the same store and then does `call`, with no main guard."""
    return f"""
import sys; sys.path.insert(0, {str(HELPERS)!r})
import sweep_runs as runs
from dpngd.suite.store import Store
from dpngd.suite.sweep import ensure
store = Store("quick", root={str(store.folder.parent)!r}, results={str(store.shipped_path.parent)!r})
{call}
"""


def script(store, run, n, jobs=2):
    """A sweep in a process of its own, which Ctrl-C ends even where the tests were started in the background."""
    path = store.folder.parent.parent / f"{run}.py"
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    path.write_text(heed + code(store, f"ensure(runs.configs({n}), store=store, jobs={jobs}, run=runs.{run})"))
    return subprocess.Popen([sys.executable, path], stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds=300.0):
    """Wait for something that comes at once on a quiet machine; the limit is for one that is slow and busy."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid):
    """Whether a process runs: not gone, and not a zombie that nobody has collected."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_two_sweeps_over_the_same_runs_share_them(store):
    sweeps = [script(store, "slow", 6, jobs=jobs) for jobs in (1, 2)]
    for process in sweeps:
        error = process.communicate()[1]
        assert process.returncode == 0, error
    assert sorted(int(line[0]) for line in started(store)) == list(range(6))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_sweep_leaves_no_workers_and_goes_on_where_it_was(store, how):
    ensure(configs(1), store=store, jobs=1, run=good)
    process = script(store, "endless", 4)
    try:
        wait_for(lambda: len(started(store)) == 3)
        workers = [int(pid) for _, pid, _ in started(store)[1:]]
        assert all(map(alive, workers))
        assert store.claimed(config(1).key())
    finally:
        process.send_signal(how)
        error = process.communicate()[1]
    assert process.returncode != 0
    assert how == signal.SIGKILL or "KeyboardInterrupt" in error
    wait_for(lambda: not any(map(alive, workers)))
    records = ensure(configs(4), store=store, jobs=2, run=good)
    assert [r["accuracy"] for r in records] == [0.0, 0.1, 0.2, 0.3]
    assert [line[0] for line in started(store)].count("0") == 1


def test_a_run_that_another_process_drops_is_taken_over(store, monkeypatch):
    monkeypatch.setattr(sweep, "POLL", 0.05)
    claim = store.claim(config(0).key())
    assert claim.__enter__()


    def drop():
        """Another process gives the run up, once this one has found it taken and done the other run."""
        wait_for(lambda: len(started(store)) == 1)
        claim.__exit__(None, None, None)

    other = threading.Thread(target=drop)
    other.start()
    records = ensure(configs(2), store=store, jobs=1, run=good)
    other.join()
    assert [r["accuracy"] for r in records] == [0.0, 0.1]
    assert [line[0] for line in started(store)] == ["1", "0"]


def test_it_works_in_a_notebook_kernel(store):
    call = "print([r['accuracy'] for r in ensure(runs.configs(3), store=store, jobs=2, run=runs.good)])"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code(store, call))])
    NotebookClient(notebook, kernel_name="python3", timeout=900).execute()
    printed = "".join(o.text for o in notebook.cells[0].outputs if o.get("name") == "stdout")
    assert json.loads(printed) == [0.0, 0.1, 0.2]
    assert len(started(store)) == 3


# ---- Parts of a plan -------------------------------------------------------------------------------------------------


@given(seeds=st.lists(st.integers(0, 500), max_size=40), n=st.integers(1, 12), order=st.randoms(use_true_random=False))
def test_shards_are_a_partition_whatever_the_order(seeds, n, order):
    plan = [config(seed) for seed in seeds]
    parts = [shard(plan, f"{i}/{n}") for i in range(1, n + 1)]
    keys = [c.key() for part in parts for c in part]
    assert sorted(keys) == sorted({c.key() for c in plan}), "every run once"
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    shuffled = order.sample(plan, len(plan))
    assert [{c.key() for c in shard(shuffled, f"{i}/{n}")} for i in range(1, n + 1)] == [
        {c.key() for c in part} for part in parts]


def test_shards_do_not_depend_on_what_is_stored(store):
    plan = configs(9)
    before = shard(plan, "2/4")
    for c in plan[:5]:
        store.put(c, {"status": "ok"})
    ensure(before, store=store, jobs=1, run=good)
    assert shard(plan, "2/4") == before
    assert {c.key() for c in plan[5:] if store.get(c)} == {c.key() for c in before} & {c.key() for c in plan[5:]}


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "1/0", "-1/4", "1/4/2", "a/b", " 1/4", ""])
def test_a_shard_that_is_none(part):
    with pytest.raises(UsageError, match="write i/n with i from 1 to n, for example 2/8"):
        shard(configs(3), part)


# ---- Long runs keep a checkpoint -------------------------------------------------------------------------------------


def test_only_long_runs_keep_checkpoints_and_about_every_five_minutes():
    steps = sweep.checkpoint_steps(configs(3), lambda c: (599.0, 1200.0, 1e6)[c.seed])
    assert steps == {config(1).key(): 10, config(2).key(): 1}  # of 40 steps of 30 s, and of 7 hours


def test_a_long_run_goes_on_from_its_checkpoint_which_goes_once_it_is_stored(store):
    long = config().replace(T=3, B=64, evals=1)
    folder = store.checkpoint(long.key())
    before = run(long, checkpoint=Checkpoint(folder, 1))  # killed after its last step, before it was stored
    (record,) = ensure([long], store=store, jobs=1, seconds=lambda c: 1e4)
    assert record["seconds"]["gradients"] == before.seconds["gradients"], "no step was done again"
    assert record["train_loss"] == before.train_loss
    assert not folder.exists()
    assert sorted(path.name for path in store.folder.iterdir()) == [f"{long.key()}.json"]


def test_a_short_run_keeps_none(store, monkeypatch):
    monkeypatch.setattr(Checkpoint, "__init__", lambda *a, **k: pytest.fail("a checkpoint"))
    short = config().replace(T=2, B=64, evals=1)
    (record,) = ensure([short], store=store, jobs=1, seconds=lambda c: 1.0)
    assert record["steps"] == 2


def test_refreshing_forgets_runs_half_done(store):
    folder = store.checkpoint(config().key())
    folder.mkdir(parents=True)
    (folder / "run.checkpoint").write_bytes(b"state")
    store.clear()
    assert not folder.exists()


# ---- A full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 KB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here: that takes root")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_full_disk_ends_the_sweep_in_one_line_and_loses_nothing(small_disk, tmp_path, monkeypatch, jobs):
    monkeypatch.setenv("SWEEP_LOG", str(tmp_path / "log"))
    store = Store("quick", root=small_disk, results=tmp_path / "results")
    with pytest.raises(UsageError, match=r"the disk of the store .* is full: \d+ of 40 runs were stored") as error:
        ensure(configs(40), store=store, jobs=jobs, run=large)
    assert "\n" not in str(error.value)
    stored = [c.seed for c in configs(40) if store.get(c)]
    assert 0 < len(stored) < 40
    assert store.damaged == {}, "what is there is whole"
    begun = len(started(store, tmp_path))
    assert len(stored) <= begun <= len(stored) + jobs, "one for each worker that found the disk full, and no more"
    assert not any(store.claimed(c.key()) for c in configs(40))
    (small_disk / "filler").write_bytes(bytes((os.statvfs(small_disk).f_bavail - 2) * os.statvfs(small_disk).f_bsize))
    with pytest.raises(UsageError, match=r"cannot be written to \(No space left on device\)"):
        ensure(configs(40), store=store, jobs=jobs, run=large)
    assert len(started(store, tmp_path)) == begun, "none is started on a disk that is full"
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)  # make room
    assert [r["accuracy"] for r in ensure(configs(40), store=store, jobs=jobs, run=good)] == [
        0.5 if c.seed in stored else c.seed / 10 for c in configs(40)]

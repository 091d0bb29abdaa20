"""One run on several processes: the same batch, noise once, the same numbers; and what happens when one dies."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import group_runs
import psutil
import pytest
import torch

from dpngd import group
from dpngd.errors import UsageError
from dpngd.group import ALONE, Processes, connected
from dpngd.training.checkpoint import Checkpoint
from dpngd.training.train import Batches, load, train

HELPER = Path(group_runs.__file__)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT = 600  # seconds, for a slow machine with busy cores; only a hang reaches it
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


TASKS = {2: ("runs", "resumed", "different", "diverged", "secret"), 3: ("runs", "factors")}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """By number of processes: the folder that they wrote to, and what each has to say of each task of group_runs.py."""
    found = {}
    for n, tasks in TASKS.items():
        out = tmp_path_factory.mktemp(f"processes{n}")
        done = subprocess.run([*TORCHRUN, "--nproc-per-node", str(n), HELPER, out, *tasks], capture_output=True,
                              text=True, timeout=LIMIT, env=ENV)
        assert done.returncode == 0, done.stderr
        found[n] = out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(n)]
    return found


@pytest.mark.parametrize("n", TASKS)
def test_the_numbers_are_those_of_one_process(said, n):
    ranks = [rank["runs"] for rank in said[n][1]]
    assert all(rank == ranks[0] for rank in ranks), "every process ends with the same weights and record"
    for method in group_runs.METHODS:
        one, several = group_runs.told(train(group_runs.config(method))), ranks[0][method]
        assert several["facts"]["steps"] == group_runs.STEPS
        assert several["facts"]["train_loss"] == pytest.approx(one["facts"]["train_loss"], abs=1e-4), method
        assert several["facts"]["privacy"] == one["facts"]["privacy"]
        assert several["facts"]["diagnostics"]["clipped"] == pytest.approx(
            one["facts"]["diagnostics"]["clipped"], abs=2e-3)


def test_a_run_that_is_left_goes_on_as_if_it_had_not_been(said):
    out, ranks = said[2]
    one, other = (rank["resumed"] for rank in ranks)
    assert one == other
    assert one["steps"] == [5, 6, 7, 8]
    assert one["again"] == one["whole"]
    with pytest.raises(UsageError, match="is of a run on another number of processes"):
        train(group_runs.config("dp-ngd", T=8, T_cur=3), checkpoint=Checkpoint(out / "state", 2))


def test_the_curvature_is_shared_out(said):
    out, ranks = said[3]
    for name, one in group_runs.factors(ALONE, out).items():
        counts = [rank["factors"][name]["decomposed"] for rank in ranks]
        assert sum(counts) == one["decomposed"] == 7
        assert min(counts) > 0
        for layer, same in zip(ranks[0]["factors"][name]["F"], one["F"], strict=True):
            for M, own in zip(layer, same, strict=True):
                M, own = torch.tensor(M), torch.tensor(own)
                assert (M - own).norm() <= 1e-6 * own.norm() + 1e-12


def test_what_goes_wrong_on_one_process_is_an_error_on_all(said):
    one, other = said[2][1]
    assert "process 1 of the run has another config" in one["different"]["error"]
    assert "process 0 of the run has another config" in other["different"]["error"]
    assert "not finite" in one["diverged"]["error"]
    assert one["diverged"] == other["diverged"]


def test_a_release_is_written_once(said):
    out, (one, other) = said[2]
    assert one["secret"] == other["secret"]
    assert sorted(p.name for p in (out / "release").iterdir()) == ["README.md", "card.json", "weights.safetensors"]


# ---- The command --------------------------------------------------------------------------------------------------


def wait_for(condition):
    deadline = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def test_a_process_that_dies_ends_the_run_with_one_line_on_every_other(tmp_path):
    """The command as people start it; its second process of three is killed in the middle."""
    command = [*TORCHRUN, "--nproc-per-node", "3", "-m", "dpngd", "train", "--method", "dp-sgd", "--T", "5000", "--B",
               "256", "--evals", "1", "--checkpoint", str(tmp_path / "state"), "--every", "2"]
    with (tmp_path / "said").open("w+") as said:
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=ENV, cwd=tmp_path)
        try:
            wait_for(lambda: (tmp_path / "state" / "run.checkpoint").exists() or run.poll() is not None)
            assert run.poll() is None, (tmp_path / "said").read_text()
            workers = {p.environ().get("RANK"): p for p in psutil.Process(run.pid).children()}
            workers["1"].send_signal(signal.SIGKILL)
            assert run.wait(LIMIT) != 0
        finally:
            run.kill()
        said.seek(0)
        lines = [line for line in said.read().splitlines() if "error: process" in line]
    for rank in (0, 2):
        own = [line for line in lines if f"error: process {rank} of 3 ends: " in line]
        assert len(own) == 1, lines
        assert "another process of the run has ended" in own[0]
        assert own[0].endswith("start the run again")


def test_the_command_speaks_once(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "dpngd", "train", "--method", "dp-sgd", "--T", "2", "--B",
               "256", "--evals", "1", "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=ENV, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2, "one record, not two"


# ---- One process --------------------------------------------------------------------------------------------------


def test_one_process_exchanges_nothing(monkeypatch):
    monkeypatch.setattr(group.dist, "init_process_group", lambda *a, **k: pytest.fail("no group"))
    with connected() as found:
        assert found is ALONE
    blocks = [torch.ones(2)]
    assert ALONE.sum(blocks) is blocks
    assert ALONE.join(blocks[0], 0) is blocks[0]
    assert ALONE.all(3) == [3]
    assert range(7)[ALONE.share(7)] == range(7)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 64])
def test_shares_are_a_partition(n, monkeypatch):
    monkeypatch.setattr(group.dist, "get_world_size", lambda: 3)
    parts = []
    for rank in range(3):
        monkeypatch.setattr(group.dist, "get_rank", lambda rank=rank: rank)
        parts.append(list(range(n))[Processes().share(n)])
    assert list(itertools.chain(*parts)) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_several_processes_without_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="RANK is not set: start several processes with torchrun"), connected():
        pass


class Left(Processes):
    """The last exchange of a run fails: another process has left first, or torchrun ends this one."""

    error = group.Lost("the other one has left")

    def __init__(self):
        self.rank, self.size = 0, 2

    def all(self, value):
        raise self.error


@pytest.mark.parametrize("told", [False, True])
def test_who_leaves_last_has_lost_nothing(monkeypatch, told):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is undone
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(group.dist, "init_process_group", lambda *a, **k: None)
    monkeypatch.setattr(group, "Processes", Left)
    monkeypatch.setattr(Left, "error", group.Told("ends") if told else Left.error)
    with pytest.raises(group.Told) if told else contextlib.nullcontext(), connected():
        work = "done"
    assert work == "done"
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0"), "private sums stay on this machine"


class Second:
    """The second of two processes, as far as drawing a batch goes."""

    rank, size = 1, 2

    def first(self, make):
        return make()

    def share(self, n):
        return slice(n // 2, n)


def test_a_share_is_whole_micro_batches_of_the_same_batch():
    config = group_runs.config("dp-sgd")
    private, _ = load(config)
    whole = list(Batches(private, config, views=64).draw())
    mine = list(Batches(private, config, views=64, group=Second()).draw())
    assert len(mine) == len(whole) - len(whole) // 2
    for (x, y), (x2, y2) in zip(whole[len(whole) // 2 :], mine, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
    assert len(list(Batches(private, config, views=64, group=Second()).draw_whole())) == len(whole)

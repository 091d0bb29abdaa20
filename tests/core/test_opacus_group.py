"""DPNGD around Opacus's DistributedDPOptimizer: two processes take the steps of one."""

import os
import subprocess
import sys

import opacus_group
import pytest
import torch

from dpngd.group import ALONE


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("opacus")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           opacus_group.__file__, out], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return [torch.load(out / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", opacus_group.MODES)
def test_two_processes_take_the_steps_of_one(ranks, mode):
    one, (first, second) = opacus_group.steps(mode, ALONE), (rank[mode] for rank in ranks)
    assert torch.equal(first["weights"], second["weights"])
    torch.testing.assert_close(first["weights"], one["weights"], rtol=1e-4, atol=1e-5)
    assert (first["seen"], second["seen"]) == (one["seen"] // 2, one["seen"] // 2)
    assert first["B"] == one["B"] == opacus_group.B
    assert first["history"] == one["history"] == [(1.0, pytest.approx(0.2), opacus_group.STEPS)]

"""`dpngd bench --opacus`: whole programs through Opacus, DPNGD's loop against DP-SGD's."""

import pytest
import torch

from dpngd.suite import bench

pytestmark = pytest.mark.filterwarnings("ignore")


def test_whole_runs_are_timed_block_by_block(monkeypatch):
    monkeypatch.setattr(bench, "LOOP_BLOCKS", 2)
    monkeypatch.setattr(bench, "LOOP_STEPS", 2)
    threads = torch.get_num_threads()
    loops = bench.opacus_loops(runs=1)
    assert torch.get_num_threads() == threads
    assert set(loops) == set(bench.PROGRAMS)
    text = "\n".join(bench.loops_text(loops))
    for name, row in loops.items():
        assert set(row["ms_per_step"]) == set(bench.LOOPS)
        assert set(row["over_dp_sgd"]) == set(row["construction_seconds"]) == {"dpngd", "dpngd-rate"}
        assert all(len(blocks) == 2 and min(blocks) > 0 for blocks in row["blocks"].values())
        for c, ratio in row["over_dp_sgd"].items():
            assert ratio == pytest.approx(row["ms_per_step"][c] / row["ms_per_step"]["dp-sgd"])
            assert all(0 < share < 1 for share in row["above"][c])
            assert f"{ratio:.2f}" in text
        assert name in text


def test_the_programs_are_what_they_are_called():
    sizes = {name: sum(p.numel() for p in bench.program(name)[0].parameters()) for name in bench.PROGRAMS}
    assert sizes == {"digits": 24_314, "cnn-28": 28_938, "cnn-32": 34_538}
    assert bench.program("cnn-28")[1].shape[1:] == (1, 28, 28)
    assert bench.program("cnn-32")[1].shape[1:] == (3, 32, 32)


def test_a_loop_of_dpngd_ends_with_its_last_block(monkeypatch):
    monkeypatch.setattr(bench, "LOOP_STEPS", 2)
    block, built, optimizer = bench.opacus_loop("digits", {}, blocks=2)
    block()
    block()
    assert (optimizer.t, optimizer.T, optimizer.natural.T_cur) == (4, 4, 2)
    assert built > 0

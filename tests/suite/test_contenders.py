"""The benchmark runs: every contender steps, and one that cannot says why."""

import json
import re

import pytest
import torch

from dpngd.errors import UsageError
from dpngd.suite import bench, command
from dpngd.suite.bench import DEFAULT_CONTENDERS, NotApplicable

FAST = ["--models", "small", "--batch", "6", "--repeats", "2", "--public", "60", "--threads", "1", "--no-memory",
        "--quiet"]


def small(K=1):
    return bench.make_bench("small", 6, K, 60, 0.025, 16)


def test_every_contender_is_timed_by_default_and_has_a_ratio(capsys):
    assert command.bench([*FAST, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["models"]["small"]["contenders"]
    assert set(rows) == set(DEFAULT_CONTENDERS)
    assert report["models"]["small"]["skipped"] == {}
    for name, row in rows.items():
        assert row["q1"] <= row["median"] <= row["q3"]
        assert row["median"] > 0
        assert ("refresh" in row) == (name in ("adadps", "gep", "dp-ngd"))
    ratio = report["ratio"]["small"]
    for name in ("adadps", "gep", "dp_ngd"):
        assert ratio[f"{name}_over_dp_sgd"] == pytest.approx(
            rows[name.replace("_", "-")]["median"] / rows["dp-sgd"]["median"])


def test_a_refresh_is_amortised_over_T_cur_steps_of_the_given_batch(capsys):
    command.bench([*FAST, "--contenders", "gep", "--t-cur", "2", "--amortise-batch", "12", "--json"])
    row = json.loads(capsys.readouterr().out)["models"]["small"]["contenders"]["gep"]
    assert row["curvature"] == pytest.approx(row["refresh"] * 6 / (2 * 12))


def test_what_cannot_run_is_left_out_and_the_table_says_why(monkeypatch, capsys):
    monkeypatch.setattr(bench, "GEP_GIB", 1e-3)
    assert command.bench([*FAST, "--contenders", "gep", "opacus-ghost", "dp-sgd", "--K", "2"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^gep {15}not run: its basis needs 0\.\d GiB, more than the benchmark's 0\.001$", text, re.M)
    assert "opacus-ghost      not run: ghost clipping keeps no per-view gradients to average" in text
    assert "dp-sgd  " in text


def test_gep_does_not_fit_the_papers_network():
    big = bench.make_bench("wrn-16-4", 1, 1, 500, 0.025, 16)
    with pytest.raises(NotApplicable, match=r"its basis needs 15\.\d GiB"):
        bench.contender("gep")(big)


@pytest.mark.parametrize("name", ["dp-sgd", "adadps", "gep", "dp-ngd"])
@pytest.mark.parametrize("K", [1, 2])
def test_a_step_changes_the_contenders_own_model_only(name, K, monkeypatch):
    """Each has its copy: contenders that take turns must not train each other's network."""
    made = []
    plain = bench.PerSample

    def watched(model, *args, **kwargs):
        made.append(model)
        return plain(model, *args, **kwargs)

    monkeypatch.setattr(bench, "PerSample", watched)
    here = small(K)
    before = [p.detach().clone() for p in here.model.parameters()]
    contender = bench.contender(name)(here)
    own = [p.detach().clone() for p in made[-1].parameters()]
    contender.step()
    if contender.refresh:
        contender.refresh()
        contender.step()
    assert all(torch.equal(p, b) for p, b in zip(here.model.parameters(), before, strict=True))
    assert any(not torch.equal(p, b) for p, b in zip(made[-1].parameters(), own, strict=True))


def test_unknown_contenders_and_impossible_numbers_are_errors():
    with pytest.raises(UsageError, match="unknown contender 'adadp': did you mean 'adadps'"):
        command.bench(["--contenders", "adadp"])
    with pytest.raises(UsageError, match="--public is 0"):
        command.bench([*FAST[:6], "--public", "0"])


def test_peak_memory_of_gep_is_measured_in_a_process_of_its_own(capsys):
    command.bench([*FAST[:-2], "--quiet", "--contenders", "gep", "--json"])
    assert json.loads(capsys.readouterr().out)["models"]["small"]["contenders"]["gep"]["peak_mib"] > 0


def test_opacus_loops_scaling_and_what_is_done_once(monkeypatch, capsys):
    """All options at once, with sweeps of two values each: every number is there, in the JSON and in the table."""
    sweeps = {"batch": (2, 4), "width": (1, 2), "public": (50, 60), "K": (1, 2), "t_cur": (1, 2)}
    monkeypatch.setattr(bench, "SWEEPS", sweeps)
    arguments = ["--quick", "--opacus", "--scaling", "--batch", "6", "--repeats", "1", "--public", "60",
                 "--threads", "1", "--quiet"]
    reports = []
    table = bench.bench_text
    monkeypatch.setattr(bench, "bench_text", lambda report: reports.append(report) or table(report))
    assert command.bench(arguments) == 0
    text, (report,) = capsys.readouterr().out, reports
    rows = report["models"]["small"]["contenders"]
    assert set(rows) == {*bench.QUICK_CONTENDERS, "opacus-dpngd"}
    assert report["ratio"]["small"]["opacus_dpngd_over_opacus_hooks"] == pytest.approx(
        rows["opacus-dpngd"]["median"] / rows["opacus-hooks"]["median"])
    assert "opacus_dpngd_over_dp_sgd" not in report["ratio"]["small"]
    assert set(report["scaling"]) == set(bench.SWEEPS)
    assert all(f"{what}: exponent" in text for what in bench.SWEEPS)
    assert set(report["once"]["runs_per_hour"]) == {"dp-sgd", "gep", "dp-ngd"}
    assert report["once"]["calibrate"] > 0
    assert report["once"]["start"] > 0
    assert "runs per hour: dp-sgd" in text


def test_the_exponent_of_a_power_is_found():
    assert bench.exponent((1, 2, 8), (3.0, 3 * 2**0.7, 3 * 8**0.7)) == pytest.approx(0.7)

"""The benchmark runs: every contender steps, and one that cannot says why."""

import json
import re

import pytest
import torch

from dpngd.curvature import KFAC
from dpngd.errors import UsageError
from dpngd.noise import stream
from dpngd.suite import bench, command, pages
from dpngd.suite.bench import DEFAULT_CONTENDERS, NotApplicable

FAST = ["--models", "small", "--batch", "6", "--repeats", "2", "--public", "60", "--threads", "1", "--no-memory",
        "--quiet"]


def small(K=1):
    return bench.make_bench("small", 6, K, 60, 0.025, 16)


# gc.collect() in the benchmark also collects files that earlier tests of this process left open
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
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


@pytest.fixture
def two_cores(monkeypatch):
    """A machine of two cores whose pace is known, and a `cpu` profile of a few short methods."""
    methods = {"dp-sgd": {"T": 2}, "gep": {"T": 2, "gep_directions": 20}, "dp-ngd": {"T": 2, "T_cur": 8},
               "dp-ngd-pre": {"T": None}}
    monkeypatch.setattr(bench.params, "settings", lambda name: {"defaults": {"B": 6}, "methods": methods})
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(bench, "paces", lambda cores: {"1x1": 10.0, "2x1": 16.0, "1x2": 13.0})
    return methods


def test_opacus_loops_scaling_and_what_is_done_once(two_cores, monkeypatch, capsys, tmp_path):
    """All options at once, with sweeps of two values each: every number is there, in the JSON and in the table."""
    sweeps = {"batch": (2, 4), "width": (1, 2), "public": (50, 60), "K": (1, 2), "t_cur": (1, 2)}
    monkeypatch.setattr(bench, "SWEEPS", sweeps)
    monkeypatch.setattr(bench, "LOOP_BLOCKS", 1)
    arguments = ["--quick", "--opacus", "--scaling", "--batch", "6", "--repeats", "1", "--public", "60",
                 "--threads", "1", "--quiet", "--figures", str(tmp_path)]
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
    assert set(report["once"]["runs_per_hour"]) == set(two_cores)
    assert report["once"]["calibrate"] > 0
    assert report["once"]["start"] > 0
    assert "runs per hour on all cores: dp-sgd" in text
    assert "samples per second, processes x threads: 1x1 10, 2x1 16, 1x2 13" in text
    assert report["cores"] == 2
    assert min(report["load"], report["load_after"]) >= 0
    assert {path.name for path in tmp_path.iterdir()} == {"scaling.csv", "scaling.png", "scaling.svg"}
    assert all(bench.SCALED[what] in (tmp_path / "scaling.svg").read_text() for what in bench.SWEEPS)


def test_runs_per_hour_count_start_steps_refreshes_and_what_runs_take_from_each_other(two_cores, monkeypatch):
    """1.6 runs at a time, each of 4 s to start, 2 steps of a second, and for those with a refresh one of another."""
    monkeypatch.setattr(bench, "seconds_of", lambda step, clock="wall": 1.0)
    found = bench.runs_per_hour(2, 4.0, bench.paces(2))
    assert found["dp-sgd"] == pytest.approx(1.6 * 3600 / 6)
    assert found["dp-ngd"] == found["dp-ngd-pre"] == found["gep"] == pytest.approx(1.6 * 3600 / 7)


def test_everything_in_one_command(two_cores, monkeypatch, capsys):
    """--full adds the same table with one thread, from a process of its own, and the goals."""
    monkeypatch.setattr(bench, "SWEEPS", {"batch": (2, 4)})
    monkeypatch.setattr(bench, "once", lambda threads: {"calibrate": 1.0, "start": 1.0})
    loops = {"ms_per_step": {"dp-sgd": 2.0, "dpngd": 3.0}, "over_dp_sgd": {"dpngd": 1.5}}
    monkeypatch.setattr(bench, "opacus_loops", lambda runs: {"digits": loops})
    assert command.bench([*FAST, "--full", "--json", "--contenders", "plain", "dp-sgd", "--clock", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["one_thread"]) == {"models", "ratio", "load", "load_after"}
    assert set(report["one_thread"]["ratio"]["small"]) == set(report["ratio"]["small"]) == {"dp_sgd_over_plain"}
    assert report["goals"]["dp_sgd_over_plain"]["small"] == 1.4
    assert report["clock"] == "cpu"
    page = pages.measured_part(report)
    found = report["ratio"]["small"]["dp_sgd_over_plain"]
    assert f"| DP-SGD / training without privacy | small | {found:.2f} | ≤ 1.4 |" in page
    assert "| batch | 2, 4 |" in page
    assert f"| {report['scaling']['batch']['exponent']:.2f} |" in page
    assert f"| gep | {report['once']['runs_per_hour']['gep']:.0f} |" in page
    assert "| digits | dpngd | 3.0 | 1.50 |" in page
    assert "| digits | dp-sgd | 2.0 | 1.00 |" in page
    short = " ".join(pages.short_part(report).split())
    assert f"(small): a step of DP-SGD takes {found:.2f} times a step without privacy." in short
    assert "a step of DPNGD takes 1.50 times Opacus's DP-SGD." in short
    assert "Of the 1 goals" in short


def test_a_report_without_goals_is_not_shown_as_measured():
    assert pages.measured_part(None) == pages.measured_part({"ratio": {}})
    assert pages.measured_part(None).startswith("Not measured yet")
    assert pages.short_part(None) == pages.short_part({"ratio": {}})


def test_the_floor_is_that_of_a_runs_plateau():
    """By rank: 0.3 % of the directions lie above four times it."""
    made = bench.make_bench("small", 2, 1, 60, None, None)
    F = KFAC(made.model, made.public, generator=stream(0, "labels"))()
    spectrum = torch.cat([layer.spectrum().flatten() for layer in F])
    share = 0.003 * len(spectrum)
    assert int((spectrum > 4.001 * made.floor).sum()) <= share <= int((spectrum > 3.9 * made.floor).sum())


@pytest.mark.parametrize(("both", "one", "expected"), [
    (20.0, 12.0, (2, 1)), (12.0, 20.0, (1, 2)), (20.0, 20.5, (2, 1))])
def test_cores_are_used_as_was_faster(both, one, expected, monkeypatch):
    monkeypatch.setattr(bench, "paces", lambda cores: {"1x1": 10.0, "2x1": both, "1x2": one})
    assert bench.layout.__wrapped__(2) == bench.Layout(*expected)
    assert bench.layout.__wrapped__(1) == bench.Layout(1, 1)


def test_a_pace_is_measured_in_processes_of_their_own():
    found = bench.paces(1, seconds=0.05)
    assert set(found) == {"1x1"}
    assert found["1x1"] > 0


def test_processes_side_by_side_add_up(monkeypatch):
    started = []

    class Popen:
        returncode = 0

        def __init__(self, command, env, **_):
            started.append((command[command.index("--threads") + 1], env["OMP_NUM_THREADS"]))

        def communicate(self):
            return "10.5\n", None

    monkeypatch.setattr(bench.subprocess, "Popen", Popen)
    assert bench.paces(2) == {"1x1": 10.5, "2x1": 21.0, "1x2": 10.5}
    assert started == [("1", "1"), ("1", "1"), ("1", "1"), ("2", "2")]


@pytest.mark.parametrize(("options", "message"), [
    (["--quick", "--full"], "--quick beside --full"), (["--figures", "x"], "give --scaling or --full"),
    (["--floor", "-1"], "--floor is -1.0"),
    (["--floor", "none"], "--floor: invalid floor value: 'none'")])
def test_options_that_do_not_go_together_are_errors(options, message):
    with pytest.raises(UsageError, match=message):
        command.bench(options)


def test_the_exponent_of_a_power_is_found():
    assert bench.exponent((1, 2, 8), (3.0, 3 * 2**0.7, 3 * 8**0.7)) == pytest.approx(0.7)


def test_the_reports_table_has_goals_and_the_papers_ratios_beside_ours(tmp_path, monkeypatch):
    from dpngd.suite import study, tables

    ratio = {"small": {"dp_sgd_over_plain": 1.5, "opacus_over_dp_sgd": 2.1, "dp_ngd_over_dp_sgd": 1.2}}
    report = {"ratio": ratio, "threads": 2, "goals": bench.GOALS,
              "one_thread": {"ratio": {"small": {"dp_sgd_over_plain": 1.4}}}}
    (tmp_path / "bench.json").write_text(json.dumps(report))
    monkeypatch.setattr(study.paths, "BENCH", tmp_path / "bench.json")
    rows = study.bench_table().set_index("ratio")
    plain, opacus, ngd = rows.iloc
    assert (plain["2 threads"], plain["1 thread"], plain["goal"]) == ("1.50", "1.40", "≤ 1.4")
    assert plain["reached"] == "with 1 thread"
    assert (opacus["2 threads"], opacus["1 thread"], opacus["goal"], opacus["reached"]) == ("2.10", "-", "≥ 2", "yes")
    assert ngd["the paper (RTX 3090)"] == "2.69 and 2.93"
    assert set(tables.RATIOS) == set(bench.GOALS), "a ratio with a goal is shown, and the other way round"

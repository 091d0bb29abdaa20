"""run_all: errors before work, each notebook in a process of its own, failures collected, one exit code."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys

import nbformat
import pytest

from dpngd.errors import UsageError
from dpngd.suite import command, paths, profiles, report, run, study, tuning
from dpngd.suite import execute as execution
from dpngd.suite.execute import KERNEL, clean, execute, read_notebook
from dpngd.suite.store import Store


def notebook(folder, *sources):
    """A notebook file whose cells are `sources`, after the suite's parameters."""
    first = nbformat.v4.new_code_cell('profile = "quick"\ntrain = True', metadata={"tags": ["parameters"]})
    cells = [first, *map(nbformat.v4.new_code_cell, sources)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL), folder / "x.ipynb")
    return folder


LIMIT = 900.0  # seconds: far more than a notebook here takes on a slow machine with busy cores; only a hang reaches it

LEAVE = """import json, os, pathlib
_ = pathlib.Path(os.environ["DPNGD_FIGURES"], "x.json").write_text(json.dumps(train))"""


@pytest.mark.parametrize(("argv", "message"), [
    (["--profile", "quik"], "unknown profile 'quik': did you mean 'quick'? valid are cpu, paper, quick"),
    (["--only", "17"], "unknown notebook '17': "),
    (["--only", "utility"], "valid are 00_geometry, 01_utility_table"),
    (["--param", "epsilon=[1]"], "unknown parameter 'epsilon': did you mean 'epsilons'? valid are datasets, epsilons"),
    (["--param", "epsilons"], "write it as name=value"),
    (["--param", "train=false"], "there is an option for it, --train"),
    (["--param", "seeds=3"], "seeds = 3: give a list"),
    (["--param", "datasets=[cifar10]"], "the profile quick has no settings for cifar10, only for digits"),
    (["--param", "methods=[dp-sdg]"], "unknown method 'dp-sdg': did you mean 'dp-sgd'?"),
    (["--jobs", "0"], "--jobs is 0"),
    (["--timeout", "0"], "--timeout is 0"),
    (["--shard", "3/2"], "shard '3/2': write i/n with i from 1 to n"),
    (["--shard", "1/2", "--refresh"], "--refresh beside --shard: --refresh is of all runs"),
    (["--shard", "1/2", "--export"], "--export beside --shard"),
])
def test_usage_errors_come_before_any_work(argv, message, monkeypatch):
    monkeypatch.setattr(run, "train_missing", lambda *a: pytest.fail("trained"))
    with pytest.raises(UsageError) as error:
        command.run(argv)
    assert message in str(error.value)


def test_the_exit_code_of_a_usage_error_is_2():
    command = [sys.executable, paths.ROOT / "run_all.py", "--profile", "nope"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: unknown profile 'nope': valid are cpu, paper, quick\n"


def test_notebooks_by_name_number_or_file():
    for name in ("03", "3", "03_public_sample_efficiency", "notebooks/03_public_sample_efficiency.ipynb"):
        assert run.notebook_name(name) == "03_public_sample_efficiency"


def test_custom_parameters_do_not_overwrite_the_profiles_figures():
    assert run.check(command.run_arguments(["-p", "epsilons=[2]"])).output.name == "quick-custom"
    assert run.check(command.run_arguments([])).output == paths.ROOT / "figures" / "quick"


def test_a_notebook_runs_with_its_parameters_and_leaves_a_clean_copy(tmp_path):
    source = notebook(tmp_path, "print(profile, train)", "import sys\nprint('bar', file=sys.stderr)", LEAVE)
    out = tmp_path / "out"
    outcome = execute("x", {"profile": "cpu", "train": False}, out, timeout=LIMIT, source=source)
    assert outcome.error == ""
    assert 20 < outcome.peak_mb < 2000
    assert json.loads((out / "x.json").read_text()) is False
    done = read_notebook(out / "x.ipynb")
    said = [o.text for c in done.cells if c.cell_type == "code" for o in c.outputs]
    assert said == ["cpu False\n"], "progress bars are not kept"
    text = (out / "x.ipynb").read_text()
    assert "start_time" not in text
    assert "papermill" not in json.dumps(done.metadata)


def test_a_failing_notebook_says_why(tmp_path):
    outcome = execute("x", {}, tmp_path / "out", timeout=LIMIT, source=notebook(tmp_path, "raise KeyError('lost')"))
    assert outcome.error == "KeyError: 'lost'"


def test_a_notebook_that_hangs_is_ended(tmp_path):
    source = notebook(tmp_path, "import time; time.sleep(3600)")
    outcome = execute("x", {}, tmp_path / "out", timeout=6, source=source)
    assert outcome.error == "it took longer than the limit of 6 seconds"
    assert outcome.seconds < 600, "ended by the limit, not by itself"


def test_a_notebook_that_stands_still_is_started_again(tmp_path, monkeypatch, capsys):
    """The first time it waits for ever, as after a lost message; the second time it does its work.

    How long a kernel takes to start, and how little of a busy processor it gets meanwhile, must not matter: the real
    readings count from the moment at which the notebook waits, and before it every look sees more work."""
    flag, counter, waiting = tmp_path / "been-here", itertools.count(), []
    processor = execution.processor

    def reading(process):
        waiting[:] = waiting or [process.pid]  # the first of the two
        return processor(process) if flag.exists() and process.pid == waiting[0] else 10.0 * next(counter)

    monkeypatch.setattr(execution, "processor", reading)
    monkeypatch.setattr(execution, "STALL", 3.0)
    code = (f"import os, time, pathlib\nflag = pathlib.Path({str(flag)!r})\n"
            "if not flag.exists():\n    flag.touch(); time.sleep(3600)\n"
            "pathlib.Path(os.environ['DPNGD_FIGURES'], 'x.json').write_text('{}')")
    outcome = execute("x", {}, tmp_path / "out", timeout=LIMIT, source=notebook(tmp_path, code))
    assert outcome.error == ""
    assert "x: it stood still" in capsys.readouterr().err


def test_a_notebook_without_an_entry_has_failed_even_if_an_old_one_lies_there(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "x.json").write_text("{}")
    outcome = execute("x", {}, out, timeout=LIMIT, source=notebook(tmp_path, "1"))
    assert "left no entry" in outcome.error
    assert (out / "x.json").read_text() == "{}", "the report keeps what it had"


def test_a_refresh_forgets_only_what_it_can_train_again(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "STORE", tmp_path / "store")
    monkeypatch.setenv("DPNGD_REFRESH", "")  # the command sets it: it is put back afterwards
    monkeypatch.setattr(run, "missing_data", lambda names: sorted(names))
    store = Store("cpu", read_shipped=False)
    kept = profiles.load("cpu").configs("utility_table")[:3]
    for config in kept:
        store.put(config, {"status": "ok", "accuracy": 0.5})
    with pytest.raises(UsageError, match=r"--refresh: .*svhn.* not found, so these runs could not be trained again"):
        command.run(["--profile", "cpu", "--refresh", "--only", "01", "-p", "datasets=[svhn]"])
    assert all(Store("cpu", read_shipped=False).get(config) for config in kept)


def test_failures_are_collected_and_make_the_exit_code_1(tmp_path, monkeypatch, capsys):
    ran = []

    def fake(name, parameters, folder, **kwargs):
        ran.append(name)
        if name == "05_wallclock_overhead":
            return run.Execution(name, 1.0, 2.0, "KeyError: 'lost'")
        folder.mkdir(exist_ok=True)
        entry = {"notebook": name, "claims": [], "figures": [], "tables": [], "stamp": "abc",
                 "compute": {"runs": 0, "seconds": 0, "keys": [], "hardware": []}}
        (folder / f"{name}.json").write_text(json.dumps(entry))
        return run.Execution(name, 1.0, 2.0)

    monkeypatch.setattr(run, "execute", fake)
    monkeypatch.setattr(run, "train_missing", lambda *a: ["2 of 9 runs failed, the others are stored:"])
    code = command.run(["--only", "05", "06", "--output", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert code == 1
    assert ran == ["05_wallclock_overhead", "06_hyperparameter_robustness"]
    assert "FAILED 05_wallclock_overhead: KeyError: 'lost'" in said.err
    assert "2 of 9 runs failed" in said.err
    assert said.err.startswith("profile quick: "), "the first line says what will happen"
    assert "2 notebooks into " in said.err.splitlines()[0]
    assert "notebooks: 2 of 2" in said.err
    assert re.search(r"\n2 notebooks in [\d.]+ minutes; open .*index\.html\n$", said.out), "the last, where to look"
    assert "06_hyperparameter_robustness" in said.out


def test_a_shard_trains_its_part_and_no_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "STORE", tmp_path / "store")
    monkeypatch.setenv("DPNGD_REFRESH", "1")  # as if nothing were shipped
    monkeypatch.setattr(run, "run_notebooks", lambda *a: pytest.fail("a notebook"))
    trained = []

    def ensure(configs, *, store, jobs, seconds):
        for c in configs:
            assert seconds(c) > 0
            trained.append(c.key())
            store.put(c, {"status": "ok"})

    monkeypatch.setattr(run.sweep, "ensure", ensure)
    for part in ("1/3", "2/3", "3/3"):
        assert command.run(["--only", "01", "02", "--shard", part]) == 0
        assert f"shard {part}: " in capsys.readouterr().out
    profile = profiles.load("quick")
    plan = run.runs_of({name: study.configs(name, profile) for name in ("01_utility_table", "02_convergence_curves")})
    assert sorted(trained) == sorted(c.key() for c in plan)


def test_the_listing_of_a_shard_is_of_its_runs(tmp_path, monkeypatch, capsys):
    counts = []
    for part in ([], ["--shard", "1/2"], ["--shard", "2/2"]):
        assert command.run(["--only", "01", "--list", *part]) == 0
        counts.append(int(capsys.readouterr().out.splitlines()[-1].split()[0]))
    assert counts[0] == counts[1] + counts[2] > 0


def test_runs_that_do_not_exist_are_not_run(tmp_path, monkeypatch):
    """The cpu profile with nothing stored: every table and figure is drawn, and every claim about runs says so."""
    monkeypatch.setenv("DPNGD_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("DPNGD_REFRESH", "1")  # as if nothing were shipped
    out = tmp_path / "out"
    for name in ("01_utility_table", "05_wallclock_overhead", "06_hyperparameter_robustness"):
        outcome = execute(name, {"profile": "cpu", "train": False}, out, timeout=LIMIT)
        assert outcome.error == ""
        entry = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        assert {c["word"] for c in entry["claims"] if c["id"] != "step-cost-bench"} == {"not run"}
    assert "not run" in (out / "01_utility_table.ipynb").read_text(encoding="utf-8")


def test_shipped_results_are_redrawn_without_data_and_without_training(tmp_path, monkeypatch):
    """What a fresh clone does with `--profile cpu`, one notebook of it: the claims come out as they are committed."""
    if not Store("cpu").shipped_path.exists() or report.current("cpu")["stamp"] == report.NO_RUNS:
        pytest.skip("no results are shipped, or figures/cpu is of another edition")
    monkeypatch.setenv("DPNGD_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("DPNGD_DATA", str(tmp_path / "no-data"))
    name = "03_public_sample_efficiency"
    assert execute(name, {"profile": "cpu", "train": False}, tmp_path / "out", timeout=LIMIT).error == ""
    entry = json.loads((tmp_path / "out" / f"{name}.json").read_text(encoding="utf-8"))
    for file in (f"{name}.json", *(table["csv"] for table in entry["tables"])):
        drawn, shipped = ((folder / file).read_bytes() for folder in (tmp_path / "out", paths.FIGURES / "cpu"))
        assert drawn == shipped, f"{file}: a redraw gives the same bytes, whatever the state of the work tree"
    assert not (tmp_path / "no-data").exists()


def test_export_ships_what_the_profile_asks_for_and_nothing_else(tmp_path):
    profile, store = profiles.load("quick"), Store("quick", root=tmp_path / "store", results=tmp_path / "results")
    with pytest.raises(UsageError, match="quick has no runs to ship"):
        run.export(profile, store)
    wanted = profile.configs("utility_table")[:2]
    earlier = dataclasses.replace(wanted[0], eta=0.123)
    for config in (*wanted, earlier):
        store.put(config, {"accuracy": 0.5, "status": "ok"})
    assert "results/quick.jsonl: 2 of" in run.export(profile, store)
    assert set(Store("quick", root=tmp_path / "x", results=tmp_path / "results").shipped) == {c.key() for c in wanted}


def test_export_ships_the_trials_of_a_search_that_is_not_complete(tmp_path):
    """Those of its second round follow from the first's, and no file names them yet."""
    profile, store = profiles.untuned("cpu"), Store("cpu", root=tmp_path / "store", results=tmp_path / "results")
    first = tuning.search_plan("cpu", store.get).missing
    for config in first:
        store.put(config, {"accuracy": config.eta / 100, "status": "ok", "train_loss": [1.0]})
    second = tuning.search_plan("cpu", store.get).missing[0]
    assert second.key() not in {c.key() for c in profile.all_configs()}
    store.put(second, {"accuracy": 0.5, "status": "ok", "train_loss": [1.0]})
    run.export(profile, store)
    shipped = Store("cpu", root=tmp_path / "x", results=tmp_path / "results").shipped
    assert set(shipped) == {c.key() for c in (*first, second)}


def test_the_list_of_the_paper_profile(tmp_path):
    profile = profiles.load("paper")
    wanted = {"02_convergence_curves": study.configs("02_convergence_curves", profile, seeds=[0], epsilons=[1.0],
                                                     datasets=["cifar10"])}
    text = run.listing(profile, wanted, Store("paper", root=tmp_path))
    rows = [line.split() for line in text.splitlines() if line.startswith("dp-ngd ")]
    assert [r[4] for r in rows] == ["120", "240", "360", "480", "600", "840", "1080"]
    sigma = {r[4]: float(r[7]) for r in rows}
    assert sigma["840"] == pytest.approx(9.06, abs=0.05)  # an independent PRV calibration
    assert sigma["120"] < sigma["360"] < sigma["1080"]
    seconds = (2 * 2.2e-4 + 5.8e-4) * 65536 * (120 + 240 + 360 + 480 + 600 + 840 + 1080) + 21 * 60
    assert f"{seconds / 3600:.3g} core-hours on NVIDIA RTX 3090 (estimated); 0 done" in text
    assert "not tuned yet on cifar10: rates and T are where the tuning starts" in text


def test_the_list_has_a_line_per_artifact_in_the_order_of_a_sweep(tmp_path):
    profile, store = profiles.load("quick"), Store("quick", root=tmp_path / "store", results=tmp_path / "results")
    for config in profile.configs("ablation_clipping"):
        store.put(config, {"status": "ok"})
    wanted = {name: study.configs(name, profile) for name in study.ARTIFACTS}
    lines = run.listing(profile, wanted, store).splitlines()
    rows = [line.split() for line in lines[3:3 + len(profile.artifacts)]]
    assert [r[0] for r in rows] == profile.artifacts, "every artifact is shown by some notebook"
    clipping = rows[profile.artifacts.index("ablation_clipping")]
    assert clipping[1:4] == ["04_ablations", "9", "9"]
    assert float(clipping[4]) > float(clipping[5]) == 0, "nothing of it is left"
    assert "not tuned yet" not in "\n".join(lines)


def test_results_are_not_trained_before_the_search(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "STORE", tmp_path / "store")
    monkeypatch.setattr(run.sweep, "ensure", lambda *a, **k: pytest.fail("trained"))
    with pytest.raises(UsageError, match="paper is not tuned yet on cifar10, svhn, utkface: run `dpngd tune paper`"):
        command.run(["--profile", "paper", "--only", "01", "--train"])
    with pytest.raises(UsageError, match="paper is not tuned yet on svhn: run"):
        command.run(["--profile", "paper", "--only", "01", "--shard", "1/2", "-p", "datasets=[svhn]"])
    assert not (tmp_path / "store").exists()
    assert run.not_searched(profiles.load("quick"), profiles.load("quick").all_configs()) == []


def test_a_long_plan_is_trained_artifact_by_artifact(monkeypatch):
    profile = profiles.load("quick")
    runs = profile.all_configs()
    assert run.in_order(runs, profile) == [runs]
    monkeypatch.setattr(run, "LONG_PLAN", 1.0)
    parts = run.in_order(runs[::-1], profile)
    assert [c for part in parts for c in part] == runs, "each once, in the profile's order"
    assert [c.key() for c in parts[1]] == [c.key() for c in profile.configs("utility_table")]


def test_clean_keeps_results_and_drops_times_and_widgets():
    cell = {"cell_type": "code", "metadata": {"tags": ["a"], "papermill": {"duration": 1}},
            "outputs": [{"output_type": "stream", "name": "stderr", "text": "bar"},
                        {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}},
                        {"output_type": "display_data", "data": {"image/png": "x"}}]}
    book = {"metadata": {"papermill": {}, "widgets": {}, "kernelspec": {"name": "python3"}}, "cells": [cell]}
    clean(book)
    assert book["metadata"] == {"kernelspec": {"name": "python3"}}
    assert cell["metadata"] == {"tags": ["a"]}
    assert [list(o["data"]) for o in cell["outputs"]] == [["image/png"]]

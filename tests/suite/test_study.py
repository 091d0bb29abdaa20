"""What a reader may change in a notebook: a mistake is one line, before anything is run; figures name their results."""

import dataclasses
import re
import types

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from store_runs import RECORD, config

from dpngd.errors import UsageError
from dpngd.suite import study, tables
from dpngd.suite.store import Store
from dpngd.training.config import RECORD_VERSION


@pytest.mark.parametrize(("given", "message"), [
    ({"profile": "quik"}, "unknown profile 'quik': did you mean 'quick'?"),
    ({"methods": ["dp-nqd"]}, "methods: unknown method 'dp-nqd': did you mean 'dp-ngd'?"),
    ({"methods": "dp-ngd"}, "methods = 'dp-ngd': give a list of names, or None for the profile's"),
    ({"methods": []}, "methods = []: give a list"),
    ({"methods": [1]}, "methods = [1]: 1 is not one of the names that it takes"),
    ({"datasets": ["digit"]}, "datasets: unknown dataset 'digit': did you mean 'digits'?"),
    ({"epsilons": 2}, "epsilons = 2: give a list of numbers"),
    ({"epsilons": ["2"]}, "epsilons = ['2']: '2' is not one of the numbers"),
    ({"epsilons": [0]}, "epsilon = 0: must be in (0, inf)"),
    ({"seeds": [0.5]}, "seeds = [0.5]: 0.5 is not one of the whole numbers"),
    ({"seeds": [True]}, "seeds = [True]: True is not one of the whole numbers"),
    ({"train": "no"}, "train = 'no': must be True or False"),
    ({"jobs": 0}, "jobs = 0: must be a whole number from 1"),
    ({"jobs": 1.5}, "jobs = 1.5: must be a whole number from 1"),
])
@pytest.mark.parametrize("notebook", ["00_geometry", "01_utility_table"])
def test_a_mistake_in_the_parameters_is_found_before_any_run(notebook, given, message):
    if notebook == "00_geometry" and given == {"epsilons": [0]}:
        pytest.skip("it trains nothing: its epsilons are looked at where their sigmas are computed")
    with pytest.raises(UsageError) as error:
        study.Study(notebook, **given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_bad_number_of_jobs_in_the_environment(monkeypatch):
    monkeypatch.setenv("DPNGD_JOBS", "two")
    with pytest.raises(UsageError, match="DPNGD_JOBS is 'two'"):
        study.Study("00_geometry")
    monkeypatch.setenv("DPNGD_JOBS", "3")
    assert study.Study("00_geometry").jobs == 3


def test_a_typo_in_a_notebook_shows_one_line():
    code = "from dpngd.suite.study import Study\nStudy('01_utility_table', 'quick', methods=['dp-nqd'])"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, kernel_name="python3", timeout=900, allow_errors=True).execute()
    (output,) = notebook.cells[0].outputs
    assert output.ename == "UsageError"
    (line,) = output.traceback
    assert line.startswith("UsageError: methods: unknown method 'dp-nqd': did you mean 'dp-ngd'? valid are ")
    assert "\n" not in line


def test_the_stamp_is_that_of_the_results(tmp_path):
    """The same records give the same stamp, whatever the work tree; another result gives another one."""
    def store():
        return Store("quick", root=tmp_path / "store", results=tmp_path / "results")

    def stamp(*seeds):
        return study.results_stamp("quick", store(), [config(s).key() for s in seeds])

    for seed in (0, 1):
        store().put(config(seed), {**RECORD, "where": {"commit": f"abc{seed}+"}})
    head = "dpngd, profile quick"
    assert stamp() == head
    assert stamp(0, 1) == f"{head}, 2 runs trained here at abc0+, abc1+, record version {RECORD_VERSION}"
    store().export([config(0).key()])
    first = stamp(0)
    assert re.fullmatch(rf"{re.escape(head)}, results/quick\.jsonl [0-9a-f]{{10}} trained at abc0\+, "
                        rf"record version {RECORD_VERSION}", first)
    assert stamp(0) == first
    assert "and 1 runs trained here at abc1+" in stamp(0, 1)
    store().put(dataclasses.replace(config(0)), {**RECORD, "accuracy": 0.123})
    store().export([config(0).key()])
    assert stamp(0) != first


def test_an_example_is_a_typical_run():
    runs = [types.SimpleNamespace(T=T, public_size=n) for n in (50, 500) for T in (25, 400, 800)]
    chosen = study.typical(runs, 500)
    assert (chosen.T, chosen.public_size) == (400, 500)
    assert study.typical(runs[2::3], None).T == 800, "none has 400 steps or fewer"


def test_values_of_an_axis_are_plain_and_in_order():
    table = pd.DataFrame([{"method": m, "name": m, "data": "cifar10", "epsilon": 1.0, "T_cur": T, "accuracy": 50.0,
                           "sd": 1.0, "low": 49.0, "high": 51.0, "n": 8, "diverged": 0, "not_run": 0, "paper": None}
                          for m, T in (("A", 1000.0), ("A", 8.0), ("B", None))])
    shown = tables.shown(table, "T_cur")
    assert list(shown["steps between refreshes"]) == ["8", "once", "none"]
    assert set(shown["data set"]) == {"CIFAR-10"}
    assert tables.seeds_counted(table) == "n = 8 seeds"

"""The notebook files keep to their form, and show what the shipped results say (nbval executes them: `make test`)."""

import ast
import copy
import itertools
import json
import re

import nbformat
import pytest

from dpngd.errors import UsageError
from dpngd.suite import claims, execute, own_data, paths, report, study

PATHS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
FILES = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
OF_CLAIMS = pytest.mark.parametrize("path", [p for p in PATHS if claims.of_notebook(p.stem)], ids=lambda p: p.stem)


def code(path):
    return [c for c in execute.read_notebook(path).cells if c.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


def text(cell):
    """All that a code cell shows in words."""
    data = [o.get("data", {}) for o in cell.outputs]
    return "".join([o.get("text", "") for o in cell.outputs]
                   + [d.get("text/html", "") + d.get("text/markdown", "") for d in data])


def test_the_suite_and_the_folder_have_the_same_notebooks():
    assert [p.stem for p in PATHS] == list(study.ARTIFACTS)


@FILES
def test_every_cell_has_been_executed_in_order_and_what_is_compared_has_an_output(path):
    cells = code(path)
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    checked = [c for c in cells if execute.CHECK in tags(c)]
    assert len(checked) >= 2
    assert all(c.outputs for c in checked), "nbval compares nothing where the file has no output"
    silent = [c for c in cells if not c.outputs]
    assert all(execute.PARAMETERS in tags(c) or "import" in c.source for c in silent)


@FILES
def test_the_files_are_small_and_have_no_times_and_no_machine(path):
    whole = path.read_text(encoding="utf-8")
    assert len(whole.encode()) < execute.MOST_BYTES
    assert not re.search(r"iopub|start_time|papermill|\d\d:\d\d:\d\d|\"stderr\"", whole)
    words = re.sub(r'"image/png": "[^"]*"', "", whole)
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root|usr|var)/", words)
    assert str(paths.ROOT) not in words


@FILES
def test_no_output_is_an_error(path):
    assert all(o.output_type != "error" for c in code(path) for o in c.outputs)


@OF_CLAIMS
def test_every_claim_is_told_once_where_its_figure_is(path):
    told = [node.value for cell in code(path) for call in ast.walk(ast.parse(cell.source))
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "study.claim" for node in call.args]
    assert sorted(told) == sorted(c.id for c in claims.of_notebook(path.stem))


@OF_CLAIMS
def test_the_stored_verdicts_are_those_of_the_report(path):
    """Who redraws figures/cpu also stores the notebooks again: make results."""
    rows = {row["id"]: row for row in report.current("cpu")["claims"] if row["notebook"] == path.stem}
    (verdicts,) = [c for c in code(path) if c.source == "study.verdicts()"]
    shown = re.findall(r"<tr><td[^>]*>(.*?)</td>.*?<td[^>]*><b[^>]*>\S (.*?)</b></td></tr>", text(verdicts))
    assert dict(shown) == {row["sentence"]: claims.worded(row) for row in rows.values()}


@FILES
def test_the_stored_outputs_are_of_the_results_that_the_report_has(path):
    entry = json.loads((paths.FIGURES / "cpu" / f"{path.stem}.json").read_text(encoding="utf-8"))
    assert text(code(path)[-1]).startswith(f"{entry['stamp']}; "), "make results"


@FILES
def test_parameters_are_the_suites_and_default_to_the_shipped_results(path):
    given = execute.parameters(execute.read_notebook(path))
    assert tuple(given) == study.PARAMETERS
    assert given.pop("profile") == "cpu"
    assert given.pop("train") is False
    assert set(given.values()) == {None}
    (cell,) = execute.tagged(execute.read_notebook(path), execute.PARAMETERS)
    assert all("#" in line for line in cell.source.splitlines()), "the valid values beside each name"


@FILES
def test_notebooks_are_thin(path):
    cells = code(path)
    assert len(cells) <= 24
    for cell in cells:
        names = [type(node) for node in ast.walk(ast.parse(cell.source))]
        assert not {ast.FunctionDef, ast.ClassDef, ast.Lambda} & set(names), "what deserves a name lives in dpngd"
        assert cell.source.count("\n") < 15


@FILES
def test_question_and_equation_come_first_and_provenance_last(path):
    cells = execute.read_notebook(path).cells
    assert cells[0].cell_type == "markdown"
    assert "**Question" in cells[0].source
    assert "$$" in cells[0].source
    assert cells[-1].source == "study.provenance()"
    prose = [c.source for c in cells if c.cell_type == "markdown"]
    for heading in ("## Parameters", "## One run", "## What was learned", "## Provenance"):
        assert sum(p.startswith(heading) for p in prose) == 1, heading
    for before, after in itertools.pairwise(cells):
        if "study.figure(" in after.source and after.cell_type == "code":
            assert before.cell_type == "markdown" or "study." in before.source, "prose says what to look for"


@FILES
def test_prose_types_no_verdict(path):
    """What is found follows from the records: it is made by dpngd.suite.story, in outputs."""
    prose = " ".join(c.source for c in execute.read_notebook(path).cells if c.cell_type == "markdown")
    assert not re.search(r"\b(reproduced|refuted|equivalent|inconclusive)\b", prose)


def test_the_facts_of_notebook_07_hold():
    (cell,) = [c for c in code(paths.NOTEBOOKS / "07_your_own_data.ipynb") if "check_facts" in c.source]
    assert text(cell).splitlines() == [f"{fact}: yes" for fact in own_data.FACTS]


# ---- Storing and checking --------------------------------------------------------------------------------------------

def sample():
    """A notebook of a markdown cell, a checked cell with words and a picture, and a live one."""
    shown = nbformat.v4.new_output("display_data", {"text/html": "<b>1</b>", "image/png": "abc"})
    checked = nbformat.v4.new_code_cell("a", metadata={"tags": [execute.CHECK]}, outputs=[shown], execution_count=1)
    said = nbformat.v4.new_output("stream", name="stdout", text="0.12\n")
    live = nbformat.v4.new_code_cell("b", metadata={"tags": [execute.LIVE]}, outputs=[said], execution_count=2)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# x"), checked, live])


def test_a_check_sees_other_words_and_not_other_pixels_or_live_digits():
    stored, fresh = sample(), sample()
    fresh.cells[1].outputs[0].data["image/png"] = "abd"
    fresh.cells[2].outputs[0].text = "0.13\n"
    assert execute.changed_cells(stored, fresh) == []
    fresh.cells[1].outputs[0].data["text/html"] = "<b>2</b>"
    assert execute.changed_cells(stored, fresh) == [1]
    fresh = sample()
    fresh.cells[2].outputs = []
    assert execute.changed_cells(stored, fresh) == [2]
    fresh = sample()
    fresh.cells[1].execution_count = None
    assert execute.changed_cells(stored, fresh) == [1]


def test_storing_keeps_outputs_and_nothing_that_changes():
    stored, ran = sample(), sample()
    for cell in stored.cells[1:]:
        cell.outputs, cell.execution_count = [], None
    for i, cell in enumerate(ran.cells):
        cell.metadata["execution"] = {"iopub.execute_input": "2026"}
        if cell.cell_type == "code":
            cell.execution_count = i
            cell.outputs.append(nbformat.v4.new_output("stream", name="stderr", text="bar\n"))
    ran.metadata["papermill"] = {"start_time": "2026"}
    execute.keep_outputs(stored, copy.deepcopy(ran))
    assert execute.changed_cells(stored, sample()) == []
    assert not re.search("iopub|papermill|stderr", nbformat.writes(stored))


def fake_execution(change):
    """`execute` that leaves a notebook as it is stored, with `change` done to it."""
    def run(name, parameters, folder, *, timeout, env):
        assert parameters == {}
        folder.mkdir(parents=True)
        notebook = execute.read_notebook(paths.NOTEBOOKS / f"{name}.ipynb")
        change(notebook)
        nbformat.write(notebook, folder / f"{name}.ipynb")
        return execute.Execution(name, 1.0, 2.0)
    return run


def break_words(notebook):
    execute.tagged(notebook, execute.CHECK)[-1].outputs[0]["text"] = "other results\n"


def grow(notebook):
    execute.tagged(notebook, execute.CHECK)[-1].outputs[0]["text"] = "x" * execute.MOST_BYTES


@pytest.mark.parametrize(("change", "code", "said"), [
    (lambda notebook: None, 0, "05_wallclock_overhead.ipynb: up to date"),
    (break_words, 1, "not up to date in code cells"), (grow, 1, "more than 1,000,000")])
def test_check_says_what_is_not_up_to_date_and_writes_nothing(monkeypatch, capsys, change, code, said):
    before = {path: path.read_bytes() for path in PATHS}
    monkeypatch.setattr(execute, "execute", fake_execution(change))
    assert execute.restore(["05_wallclock_overhead"], check=True) == code
    assert said in capsys.readouterr().out
    assert {path: path.read_bytes() for path in PATHS} == before


def test_storing_reads_no_store_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path, raising=False)
    source = PATHS[0].read_text(encoding="utf-8")
    (tmp_path / PATHS[0].name).write_text(source, encoding="utf-8")
    seen = []

    def run(name, parameters, folder, *, timeout, env):
        seen.append(env["DPNGD_STORE"])
        return fake_execution(lambda notebook: None)(name, parameters, folder, timeout=timeout, env=env)

    monkeypatch.setattr(execute, "execute", run)
    assert execute.restore() == 0
    assert (tmp_path / PATHS[0].name).read_text(encoding="utf-8") == source, "stored again: the same bytes"
    assert seen != [str(paths.STORE)]


def test_a_notebook_without_parameters_is_refused():
    with pytest.raises(UsageError, match="one cell tagged 'parameters', not 0"):
        execute.parameters(nbformat.v4.new_notebook())


def test_an_unknown_notebook_is_an_error_with_the_names():
    with pytest.raises(UsageError, match=r"unknown notebook '01_utility'.*00_geometry"):
        execute.restore(["01_utility"])



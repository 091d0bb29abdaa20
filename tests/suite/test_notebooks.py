"""The notebook files keep to their form, so that nbval has something to compare (nbval itself: `make test`)."""

import ast
import re

import nbformat
import pytest

from dpngd.errors import UsageError
from dpngd.suite import claims, execute, own_data, paths, profiles, study

PATHS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
FILES = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)


def code(path):
    return [c for c in execute.read_notebook(path).cells if c.cell_type == "code"]


def printed(cell):
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")


def test_the_suite_and_the_folder_have_the_same_notebooks():
    assert [p.stem for p in PATHS] == list(study.ARTIFACTS)


@FILES
def test_check_cells_have_a_count_and_an_output(path):
    checks = execute.tagged(execute.read_notebook(path), execute.CHECK)
    assert len(checks) == 2, "describe() and check()"
    for cell in checks:
        assert cell.execution_count is not None
        assert printed(cell).strip()
        assert all(o.output_type == "stream" and o.name == "stdout" for o in cell.outputs), "words only"


@FILES
def test_the_check_cell_names_every_claim_of_the_notebook(path):
    last = execute.tagged(execute.read_notebook(path), execute.CHECK)[-1]
    words = dict(line.split(": ") for line in printed(last).splitlines())
    named = [c.id for c in claims.of_notebook(path.stem)]
    assert list(words) == (named or list(own_data.FACTS))  # notebook 07 makes no claim of the paper's: it shows facts
    shown = study.configs(path.stem, profiles.load("quick"))
    for claim in claims.of_notebook(path.stem):
        asked = {c.method for name in claim.source.split("+") for c in shown.get(name, [])}
        missing = claim.source not in claims.MEASURED and not asked.issuperset(claim.methods or asked or {"none"})
        if words[claim.id] == "not run":
            assert missing or claim.id == "subset", "quick asks for its runs, or has no larger set"
        else:
            assert words[claim.id] == ("holds" if claim.steady else "demonstration only"), "quick decides nothing"
    assert not re.search(r"\d\.\d", printed(last)), "raw numbers differ from one machine to the next"


@FILES
def test_other_cells_are_stored_empty(path):
    for cell in code(path):
        if execute.CHECK not in cell.metadata.get("tags", []):
            assert cell.outputs == []
            assert cell.execution_count is None


@FILES
def test_parameters_are_the_suites_and_default_to_quick(path):
    given = execute.parameters(execute.read_notebook(path))
    assert tuple(given) == study.PARAMETERS
    assert given.pop("profile") == "quick"
    assert given.pop("train") is True
    assert set(given.values()) == {None}


@FILES
def test_notebooks_are_thin(path):
    cells = code(path)
    assert len(cells) <= 10
    for cell in cells:
        names = [type(node) for node in ast.walk(ast.parse(cell.source))]
        assert not {ast.FunctionDef, ast.ClassDef, ast.Lambda} & set(names), "what deserves a name lives in dpngd"
        assert cell.source.count("\n") < 15


@FILES
def test_the_claim_comes_first_and_provenance_last(path):
    cells = execute.read_notebook(path).cells
    assert cells[0].cell_type == "markdown"
    assert "Claims" in cells[0].source
    assert "$$" in cells[0].source
    assert cells[-1].source == "study.provenance()"


@FILES
def test_no_machine_is_named(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root|usr|var)/", text)
    assert str(paths.ROOT) not in text


def test_a_stripped_check_cell_would_be_seen(tmp_path):
    notebook = execute.read_notebook(PATHS[0])
    execute.tagged(notebook, execute.CHECK)[0].execution_count = None
    nbformat.write(notebook, tmp_path / "x.ipynb")
    with pytest.raises(AssertionError):
        test_check_cells_have_a_count_and_an_output(tmp_path / "x.ipynb")


def test_storing_keeps_check_outputs_only():
    notebook = execute.read_notebook(PATHS[0])
    before = printed(execute.tagged(notebook, execute.CHECK)[0])
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = 7
            cell.metadata["execution"] = {"iopub.execute_input": "2026"}
            cell.outputs = [*cell.outputs, nbformat.v4.new_output("stream", name="stdout", text="more\n")]
    execute.store_checked(notebook)
    kept = [c for c in notebook.cells if c.cell_type == "code" and c.outputs]
    assert kept == execute.tagged(notebook, execute.CHECK)
    assert before in printed(kept[0])
    assert "iopub" not in nbformat.writes(notebook)


def test_a_notebook_without_parameters_is_refused():
    with pytest.raises(UsageError, match="one cell tagged 'parameters', not 0"):
        execute.parameters(nbformat.v4.new_notebook())


def test_an_unknown_notebook_is_an_error_with_the_names():
    with pytest.raises(UsageError, match=r"unknown notebook '01_utility'.*00_geometry"):
        execute.restore(["01_utility"])

"""The notebook files: their parameters and check cells, and how a changed check cell gets its output.

nbval compares a cell's output only where the file has one, with an execution count; so check cells keep theirs and all
others are stored empty. `python -m dpngd.notebooks [NAME ...]` executes notebooks with their defaults and stores
them so.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import nbformat

from dpngd.errors import UsageError, exit_code, unknown
from dpngd.execute import NOTEBOOKS

CHECK, PARAMETERS = "nbval-check-output", "parameters"
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
          "language_info": {"name": "python"}}


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def tagged(notebook: nbformat.NotebookNode, tag: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def parameters(notebook: nbformat.NotebookNode) -> dict[str, object]:
    """Names and defaults of the parameters cell."""
    cells = tagged(notebook, PARAMETERS)
    if len(cells) != 1:
        raise UsageError(f"a notebook needs one cell tagged {PARAMETERS!r}, not {len(cells)}")
    return {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(cells[0].source).body
            if isinstance(node, ast.Assign)}


def store_checked(notebook: nbformat.NotebookNode) -> None:
    """Keep the outputs of check cells, and nothing else that an execution leaves."""
    notebook.metadata = nbformat.from_dict(KERNEL)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            tags = cell.metadata.get("tags", [])
            cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
            if CHECK not in tags:
                cell.outputs, cell.execution_count = [], None


def main(argv: list[str] | None = None) -> int:
    from nbclient import NotebookClient

    paths = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    names = (sys.argv[1:] if argv is None else argv) or list(paths)
    for name in names:
        if name not in paths:
            raise unknown("notebook", name, paths)
        notebook = read(paths[name])
        NotebookClient(notebook, timeout=1800, kernel_name="python3",
                       resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
        store_checked(notebook)
        nbformat.write(notebook, paths[name])
        print(paths[name].name)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))

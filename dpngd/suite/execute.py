"""One notebook in a process of its own, by papermill: parameters, time limit, peak memory, a clean copy of the result.

`python -m dpngd.suite.execute SOURCE TARGET PARAMETERS` is that process. Papermill changes directories for its whole
process, hence a process per notebook; it only warns of unknown parameters, hence `run.check` checks their names before.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil

from dpngd import progress
from dpngd.errors import UsageError, unknown
from dpngd.files import write_atomically
from dpngd.suite import paths
from dpngd.suite.executors import THREADS

WATCH_EVERY = 0.25  # seconds between two looks at the memory
STALL = 90.0  # seconds in which a notebook and all it started may use no processor: a lost message, not work
IDLE = 0.5  # seconds of processor that waiting itself may take in that time
STALLED = f"it stood still for {STALL:g} seconds"


@dataclass(frozen=True)
class Execution:
    """How a notebook ended; `error` is empty where it ended well."""

    notebook: str
    seconds: float
    peak_mb: float
    error: str = ""


def execute(notebook: str, parameters: Mapping[str, Any], folder: Path, *, timeout: float, html: bool = False,
            source: Path | None = None, tries: int = 2, env: Mapping[str, str] | None = None) -> Execution:
    """Run a notebook (of notebooks/, or of `source`) into folder/<notebook>.ipynb, its figures and tables beside it;
    `env` is added to its environment.

    A kernel and its client can wait for each other for ever (a message lost between them). One that stalls is started
    again; what was trained is stored."""
    source = source or paths.NOTEBOOKS
    outcome = _execute(notebook, parameters, folder, timeout, html, source, env or {})
    while outcome.error == STALLED and (tries := tries - 1):
        progress.say(f"{notebook}: {STALLED}; once more")
        outcome = _execute(notebook, parameters, folder, timeout, html, source, env or {})
    return outcome


def version_of(path: Path) -> tuple[int, int] | None:
    """What tells two versions of a file apart that are each written as a whole; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _execute(notebook: str, parameters: Mapping[str, Any], folder: Path, timeout: float, html: bool,
             source: Path, more: Mapping[str, str]) -> Execution:
    folder.mkdir(parents=True, exist_ok=True)
    entry = folder / f"{notebook}.json"
    before = version_of(entry)  # an old entry must not pass for this run's, and stays where this run fails
    started, peak = time.perf_counter(), 0.0
    env = {**os.environ, **THREADS, "DPNGD_FIGURES": str(folder.resolve()), "PYTHONPATH": str(paths.ROOT),
           "PYDEVD_DISABLE_FILE_VALIDATION": "1", **more}
    command = [sys.executable, "-m", "dpngd.suite.execute", source / f"{notebook}.ipynb", folder / f"{notebook}.ipynb",
               json.dumps(dict(parameters)), *(["--html"] if html else [])]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(list(map(str, command)), env=env, stdout=log, stderr=subprocess.STDOUT,
                                   cwd=paths.ROOT)
        watched, error = psutil.Process(process.pid), ""
        moved, used = started, 0.0
        try:
            while process.poll() is None:
                peak = max(peak, resident(watched))
                if time.perf_counter() - started > timeout:
                    error = f"it took longer than the limit of {timeout:g} seconds"
                    break
                now = time.perf_counter()
                if abs((busy := processor(watched)) - used) > IDLE:  # less, when one of its processes ended
                    moved, used = now, busy
                elif now - moved > STALL:
                    error = STALLED
                    break
                time.sleep(WATCH_EVERY)
        finally:  # also on Ctrl-C: no kernel outlives its notebook
            stop(watched)
            process.wait()
        if not error and process.returncode:
            log.seek(0)
            error = last_line(log.read().decode(errors="replace")) or f"exit code {process.returncode}"
    if not error and version_of(entry) in (None, before):
        error = "it left no entry for the report: its last cell must call study.provenance()"
    return Execution(notebook, time.perf_counter() - started, peak / 2**20, error)


def resident(process: psutil.Process) -> float:
    """Bytes of a process and all that it started."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for p in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += p.memory_info().rss
    return total


def processor(process: psutil.Process) -> float:
    """Seconds of processor that a process and all that it started have used; those that ended count as nothing."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for p in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = p.cpu_times()
                total += times.user + times.system
    return total


def stop(process: psutil.Process) -> None:
    """End a process and its children; nothing happens where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
        for p in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()


def last_line(text: str) -> str:
    """What a traceback ends with; papermill puts the cell's own error last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def clean(notebook: dict) -> None:
    """Take out what changes with every execution: times, progress bars, widget state."""
    notebook["metadata"] = {k: v for k, v in notebook["metadata"].items() if k in ("kernelspec", "language_info")}
    for cell in notebook["cells"]:
        cell["metadata"] = {k: v for k, v in cell["metadata"].items() if k == "tags"}
        if cell["cell_type"] == "code":
            cell["outputs"] = [o for o in cell["outputs"] if o.get("name") != "stderr"
                               and "application/vnd.jupyter.widget-view+json" not in o.get("data", {})]


def in_this_process(source: str, target: str, parameters: str, *flags: str) -> None:
    """Execute one notebook by papermill, here: `execute` starts a process for it."""
    import papermill

    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.ipynb"
        papermill.execute_notebook(source, result, json.loads(parameters), kernel_name="python3", progress_bar=False,
                                   cwd=str(Path(source).parent), log_output=False)
        notebook = nbformat.read(result, as_version=4)
    clean(notebook)
    nbformat.validate(notebook)
    write_atomically(Path(target), nbformat.writes(notebook) + "\n")
    if "--html" in flags:
        from nbconvert import HTMLExporter

        page, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook)
        write_atomically(Path(target).with_suffix(".html"), page)


# ---- The notebook files: which cells are parameters, which are compared, and what a stored notebook keeps ------------

CHECK, PARAMETERS, LIVE = "nbval-check-output", "parameters", "live"
"""Tags of cells: compared by nbval, parameters, and numbers that are measured live (other digits on other machines)."""
MOST_BYTES = 1_000_000  # of a notebook with its outputs: code hosts show no larger ones
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
          "language_info": {"name": "python"}}


def read_notebook(path: Path) -> nbformat.NotebookNode:
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


def keep_outputs(notebook: nbformat.NotebookNode, executed: nbformat.NotebookNode) -> None:
    """Put the outputs of an execution into the cells of a notebook, and nothing that changes from one to the next."""
    clean(executed)
    notebook.metadata = nbformat.from_dict(KERNEL)
    for cell, ran in zip(notebook.cells, executed.cells, strict=True):
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = cell.execution_count


def told_outputs(cell: nbformat.NotebookNode) -> list[Any]:
    """What a code cell shows, without its pictures; of a cell with numbers measured live, what kinds of output."""
    shown = []
    for o in cell.outputs:
        data = {"text": o.text} if o.output_type == "stream" else dict(o.get("data", {}))
        kinds = {kind: None if kind.startswith("image/") else text for kind, text in data.items()}
        shown.append(sorted(kinds) if LIVE in cell.metadata.get("tags", []) else kinds)
    return shown


def changed_cells(stored: nbformat.NotebookNode, fresh: nbformat.NotebookNode) -> list[int]:
    """The cells (from 1, as Jupyter counts code) that show something else than an execution shows now."""
    pairs = zip((c for c in stored.cells if c.cell_type == "code"), (c for c in fresh.cells if c.cell_type == "code"),
                strict=True)
    return [i for i, (old, new) in enumerate(pairs, start=1)
            if told_outputs(old) != told_outputs(new) or old.execution_count != new.execution_count]


def restore(names: Sequence[str] = (), *, check: bool = False, jobs: int | None = None) -> int:
    """Execute notebooks (all, unless named) with their default parameters, and store their outputs in the files.

    They show shipped results (results/) alone: what this machine has in its own store is not read. With `check` nothing
    is written, and a notebook whose stored outputs differ is named; pictures are not compared, since another machine
    draws other bytes, but each has its results' stamp in its text. The exit code is 1 where one differs or failed."""
    files = {path.stem: path for path in sorted(paths.NOTEBOOKS.glob("*.ipynb"))}
    for name in names:
        if name not in files:
            raise unknown("notebook", name, files)
    names, bad = list(names or files), 0
    progress.say(f"{len(names)} notebooks from results/, nothing is trained: about half a minute each")
    with (tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs or min(2, os.cpu_count() or 1)) as pool,
          progress.bar(len(names), "notebooks", unit="notebook") as bar):
        def one(name: str) -> Execution:
            outcome = execute(name, {}, Path(scratch) / name, timeout=1800,
                              env={"DPNGD_STORE": str(Path(scratch) / "no store"), "DPNGD_REFRESH": ""})
            bar.update()
            return outcome

        for outcome in list(pool.map(one, names)):
            path, said = files[outcome.notebook], outcome.error
            if not said:
                stored, fresh = read_notebook(path), read_notebook(path)
                keep_outputs(fresh, read_notebook(Path(scratch) / path.stem / path.name))
                text = nbformat.writes(fresh) + "\n"
                if len(text.encode()) > MOST_BYTES:
                    said = f"{len(text.encode()):,} bytes with its outputs, more than {MOST_BYTES:,}"
                elif check and (cells := changed_cells(stored, fresh)):
                    said = f"not up to date in code cells {', '.join(map(str, cells))}: run dpngd report --notebooks"
                elif not check:
                    write_atomically(path, text)
            bad += bool(said)
            print(f"{path.name}: {said or ('up to date' if check else 'stored')}")
    return 1 if bad else 0


if __name__ == "__main__":
    in_this_process(*sys.argv[1:])

"""The notebooks in JupyterLab, as a reader opens them: Run All, move a slider, mistype a parameter.

The notebooks are copies, so that nothing of the checkout is saved over; runs come from the checkout's store, and those
that are missing are trained.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from dpngd.suite import paths

NOTEBOOKS = sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))
EACH = pytest.mark.parametrize("notebook", NOTEBOOKS)
LIMIT = 1500.0  # seconds for a notebook whose runs are not stored; only a hang reaches it
SETTINGS = {  # no questions about news, every cell drawn, not only those in view, and no test finds another's outputs
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}
READY = """() => {
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.context?.isReady && panel.sessionContext?.session?.kernel?.status === 'idle'}"""
CELLS = """() => window.jupyterapp.shell.currentWidget.content.widgets.filter(w => w.model.type === 'code').map(w => ({
    source: w.model.sharedModel.getSource(), count: w.model.executionCount, outputs: w.model.outputs.toJSON(),
    parameters: (w.model.getMetadata('tags') ?? []).includes('parameters')}))"""
PICTURES = "cell => [...cell.querySelectorAll('img')].map(i => i.src)"
MISTYPE = """([at, source]) => window.jupyterapp.shell.currentWidget.content.widgets.filter(
    w => w.model.type === 'code')[at].model.sharedModel.setSource(source)"""


@pytest.fixture(scope="session")
def lab(browser, tmp_path_factory):
    """A JupyterLab of our own: a function from the name of a notebook to its address."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(paths.NOTEBOOKS, folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for name, values in SETTINGS.items():
        file = folder / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    env = {**os.environ, "PYTHONPATH": str(paths.ROOT), "JUPYTER_CONFIG_DIR": str(folder / "config"),
           "JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
           "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "OMP_NUM_THREADS": "1"}
    env.pop("DPNGD_FIGURES", None)
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
               "--ServerApp.port=0", "--IdentityProvider.token=browser-test", "--LabApp.expose_app_in_browser=True",
               f"--ServerApp.root_dir={folder / 'notebooks'}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        deadline = time.monotonic() + 300
        while not (started := list((folder / "runtime").glob("jpserver-*.json"))):
            assert server.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "JupyterLab did not start: " + (folder / "log").read_text()[-2000:]
            time.sleep(0.2)
        url = json.loads(started[0].read_text())["url"]
        yield lambda notebook: f"{url}lab/tree/{notebook}.ipynb?token=browser-test&reset"
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def opened(lab, open_page):
    """A function that opens a notebook and waits for its kernel."""
    def one(notebook):
        page = open_page(lab(notebook), width=1400, height=1000)
        page.set_default_timeout(LIMIT * 1000)
        page.wait_for_function(READY)
        return page

    return one


def run_all(page):
    """Run > Run All Cells; the cells as they are when all have run, or the first has failed."""
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function("""() => {
        const panel = window.jupyterapp.shell.currentWidget;
        return panel.sessionContext.session.kernel.status === 'idle' &&
            !panel.content.widgets.some(w => w.model.type === 'code' && w.model.executionState === 'running')}""")
    return page.evaluate(CELLS)


def errors(cells):
    return [o for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]


@EACH
def test_run_all_ends_without_an_error(opened, notebook):
    cells = run_all(opened(notebook))
    assert errors(cells) == []
    counts = [cell["count"] for cell in cells if cell["source"].strip()]
    assert counts == sorted(counts), "run from top to bottom"
    assert None not in counts
    shown = [o for cell in cells for o in cell["outputs"] if "data" in o]
    assert any("image/png" in o["data"] or "text/html" in o["data"] for o in shown), "it shows something"


@EACH
def test_a_typo_in_the_parameters_is_one_line(opened, notebook):
    page = opened(notebook)
    before = page.evaluate(CELLS)
    (at,) = [i for i, cell in enumerate(before) if cell["parameters"]]
    name, value = re.search(r'^(\w+) = "(\w+)"', before[at]["source"], re.M).groups()
    wrong = value[:2] + value[3:]  # quick -> quck, cpu -> cp
    page.evaluate(MISTYPE, [at, before[at]["source"].replace(f'{name} = "{value}"', f'{name} = "{wrong}"', 1)])
    (error,) = errors(run_all(page))
    (line,) = "\n".join(error["traceback"]).strip().splitlines()
    assert f"'{wrong}'" in line
    assert value in line, "it says what is meant or valid"
    kinds = ", ".join(f'.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.{kind}"]'
                      for kind in ("stderr", "error"))
    drawn = page.locator(kinds, has_text=f"'{wrong}'").first
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(drawn, "the reader sees it").to_be_visible(timeout=30_000)  # drawn after the kernel is idle
    assert "Traceback" not in drawn.inner_text()


def test_every_slider_that_is_moved_changes_the_picture(opened):
    with_sliders = [n for n in NOTEBOOKS
                    if "slider" in (paths.NOTEBOOKS / f"{n}.ipynb").read_text(encoding="utf-8").lower()]
    assert with_sliders, "a notebook has sliders"
    for notebook in with_sliders:
        page = opened(notebook)
        assert errors(run_all(page)) == []
        cells = page.locator(".jp-CodeCell", has=page.locator(".noUi-handle"))
        cells.first.wait_for()
        for cell in cells.all():
            cell.locator("img").first.wait_for()
            for handle in cell.locator(".noUi-handle").all():
                before = cell.evaluate(PICTURES)
                handle.scroll_into_view_if_needed()
                handle.focus()
                at_the_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
                handle.press("ArrowLeft" if at_the_end else "ArrowRight")
                page.wait_for_function(f"([cell, before]) => {{ const now = ({PICTURES})(cell); return "
                                       "now.length === before.length && now.some((src, i) => src !== before[i]) }",
                                       arg=[cell.element_handle(), before], timeout=120_000)

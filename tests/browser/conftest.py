"""A real browser: Chromium (Debian's, or the one that DPNGD_CHROMIUM names) driven by Playwright. Without it, all of
this folder is skipped with a reason; `.ci/run` installs it."""

import os
import shutil
import subprocess
import tarfile

import pytest

FLAGS = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")
AXE = "axe-core@4.14.0"


def chromium():
    """The browser's path, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("DPNGD_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: requirements.txt")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on the PATH: `apt-get install chromium`, or set DPNGD_CHROMIUM to its path")
    with playwright.sync_playwright() as driver:
        root = ("--no-sandbox",) if os.geteuid() == 0 else ()  # Chromium's sandbox does not start for root
        found = driver.chromium.launch(executable_path=path, args=[*FLAGS, *root])
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """A function that opens an address: width and colour scheme of the reader's screen may be given.

    What the page writes to its console as an error, and requests that fail, are in `page.complaints`.
    """
    contexts = []

    def opened(address, width=1280, height=900, scheme="light", **options):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.complaints = []
        page.on("console", lambda m: page.complaints.append(m.text) if m.type == "error" else None)
        page.on("requestfailed", lambda r: page.complaints.append(f"{r.url[:200]}: {r.failure}"))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """The source of axe-core, through the npm client as it is configured."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm client on the PATH to get axe-core with")
    folder = tmp_path_factory.mktemp("axe")
    got = subprocess.run([npm, "pack", AXE, "--silent"], cwd=folder, capture_output=True, text=True, timeout=300)
    archives = list(folder.glob("*.tgz"))
    if got.returncode or not archives:
        pytest.skip(f"npm cannot get {AXE}: {(got.stderr or 'no message').strip().splitlines()[-1][:200]}")
    with tarfile.open(archives[0]) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()

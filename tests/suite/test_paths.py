"""The suite's files: one module knows where they are, none is read at import, and what needs a checkout says so."""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from dpngd.errors import UsageError
from dpngd.suite import paths
from dpngd.suite.params import published
from dpngd.suite.store import Store

SUITE = sorted((paths.ROOT / "dpngd" / "suite").glob("*.py"))

IMPORT_ALL = """
import importlib, json, os, sys
read = []
def hook(event, args):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], str):
        read.append(os.path.abspath(args[0]))
sys.addaudithook(hook)
for name in sys.argv[2:]:
    importlib.import_module(name)
inside = [p for p in read if p.startswith(sys.argv[1] + os.sep) and "__pycache__" not in p
          and "site-packages" not in p and ".egg-info" not in p]
print(json.dumps([p for p in inside if not p.endswith((".py", ".pyc")) and os.path.isfile(p)]))
"""


def test_no_module_reads_a_file_at_import():
    names = [f"dpngd.suite.{path.stem}" for path in SUITE if path.stem != "__init__"]
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, paths.ROOT, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_every_path_is_there():
    for name in paths.IN_CHECKOUT:
        if name in ("BENCH", "AUDIT", "SELF_TEST"):
            assert getattr(paths, name).is_file(), name
        elif name != "STORE":
            assert getattr(paths, name).is_dir(), name
    assert (paths.TEMPLATES / "report.html.j2").is_file()
    with pytest.raises(AttributeError, match="no attribute 'PARAM'"):
        _ = paths.PARAM


def test_without_a_checkout_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "checkout", lambda: None)
    monkeypatch.delenv("DPNGD_STORE", raising=False)
    published.cache_clear()
    for call in (lambda: Store("cpu"), published, lambda: paths.NOTEBOOKS):
        with pytest.raises(UsageError, match=r"^this needs a checkout of dpngd \(its [.\w]+\): clone") as error:
            call()
        assert "\n" not in str(error.value)
    Store("cpu", root=tmp_path, results=tmp_path)  # what needs no file of the checkout works


def test_the_store_can_be_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("DPNGD_STORE", str(tmp_path / "mine"))
    assert Store("cpu").folder == tmp_path / "mine" / "cpu"
    monkeypatch.delenv("DPNGD_STORE")
    assert Store("cpu").folder == paths.ROOT / ".store" / "cpu"


def test_no_two_things_of_the_suite_have_one_name():
    found = defaultdict(list)
    for path in SUITE:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            else:
                names = [node.target.id] if isinstance(node, ast.AnnAssign) else []
            for name in names:
                if not name.startswith("_"):
                    found[name].append(path.stem)
    twice = {name: where for name, where in found.items() if len(where) > 1}
    assert set(twice) <= {"main"}, twice  # the entry points of commands


def test_only_one_module_computes_paths():
    for path in SUITE:
        if path.stem != "paths":
            assert "__file__" not in path.read_text(encoding="utf-8"), Path(path).name

"""`dpngd <command>`: one table, help and usage errors without torch, interrupts, and what needs a checkout."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

import dpngd
from dpngd.__main__ import COMMANDS, main
from dpngd.errors import UsageError
from dpngd.suite import command, paths
from dpngd.suite.store import Store

WATCHED = """
import sys
from dpngd.__main__ import main
from dpngd.errors import exit_code
try:
    code = exit_code(lambda: main({argv!r}))
except SystemExit as stop:
    code = stop.code
loaded = [name for name in ("torch", "numpy", "pandas", "yaml") if name in sys.modules]
print("CODE", code, *loaded)
"""


def watched(argv):
    """Exit code, what was loaded of torch, numpy, pandas, yaml, and stderr, of a command in a fresh process."""
    done = subprocess.run([sys.executable, "-c", WATCHED.format(argv=argv)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(paths.ROOT)})
    code, *loaded = re.search(r"^CODE (.*)$", done.stdout, re.M)[1].split()
    return int(code), set(loaded), done.stderr


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), ["data", "show"], ["show", "config"],
                                   ["show", "curvature"], ["show", "methods"]], ids=" ".join)
def test_help_loads_nothing(words):
    assert watched([*words, "--help"]) == (0, set(), "")


@pytest.mark.parametrize(("argv", "message"), [
    ([], "no command: give one of train, data"),
    (["trian"], "unknown command 'trian': did you mean 'train'?"),
    (["--versoin"], "unknown option '--versoin': did you mean '--version'?"),
    (["train", "--method", "dp-ngdd"], "did you mean 'dp-ngd'?"),
    (["train", "--metod", "dp-ngd"], "did you mean '--method'?"),
    (["train", "--T", "many"], "argument --T: invalid int value: 'many'"),
    (["train", "--epsilon", "-1"], "epsilon = -1.0: must be in (0, inf)"),
    (["train", "--data", "npz:not-here.npz"], "not-here.npz: there is no such file"),
    (["run", "--profile", "quik"], "did you mean 'quick'?"),
    (["run", "--jobs", "0"], "--jobs is 0"),
    (["tune", "quik"], "did you mean 'quick'?"),
    (["bench", "--repeats", "0"], "--repeats is 0"),
    (["bench", "--repeat", "3"], "did you mean '--repeats'?"),
    (["report"], "name a profile"),
    (["report", "quick", "--json", "--markdown"], "not allowed with argument"),
    (["report", "quick", "--notebooks"], "unexpected argument 'quick'"),
    (["spotcheck", "cpu", "--jobs", "0"], "--jobs is 0"),
    (["data", "status", "--jsn"], "did you mean '--json'?"),
    (["data", "show", "noise", "--out", "x.jpg"], "end the name in .png"),
    (["show", "config", "--method", "gpe"], "did you mean 'gep'?"),
    (["show", "curvature", "--classes", "1"], "--classes is 1"),
])
def test_usage_errors_are_one_line_and_need_no_torch(argv, message):
    code, loaded, err = watched(argv)
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not loaded & {"torch", "pandas"}


def test_show_config_and_methods_need_no_torch():
    assert watched(["show", "methods"])[:2] == (0, set())
    assert watched(["show", "config"])[:2] == (0, {"yaml"})


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dpngd {dpngd.__version__}\n"


def test_an_interrupt_during_the_imports_is_one_word(tmp_path):
    """A package that takes for ever to import stands in for torch; it says when its import has begun."""
    heed = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a job in the background was told to ignore it
    (tmp_path / "torch.py").write_text(f"import pathlib, signal, time\n{heed}\n"
                                       f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(600)\n")
    process = subprocess.Popen([sys.executable, "-m", "dpngd", "train"], stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{paths.ROOT}"})
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (130, "interrupted\n")


def test_a_package_that_is_not_installed_is_named():
    code = "import sys; sys.modules['yaml'] = None; sys.argv[1:] = ['tune', 'quick', '--show']\n" \
           "from dpngd.__main__ import entry; sys.exit(entry())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(paths.ROOT)})
    assert (done.returncode, done.stderr) == (
        2, "error: dpngd tune needs the package 'yaml': in a checkout, pip install '.[suite]'\n")


@pytest.mark.parametrize("argv", [["run"], ["tune", "quick"], ["report", "quick"], ["spotcheck", "cpu"]], ids=" ".join)
def test_what_needs_a_checkout_says_so(argv, tmp_path, monkeypatch):
    monkeypatch.setattr("dpngd.files.checkout", lambda: None)
    monkeypatch.setattr("dpngd.suite.profiles.load", lambda name: pytest.fail("went on"))
    with pytest.raises(UsageError, match=f"dpngd {argv[0]} needs a checkout of the repository"):
        main(argv)


def test_a_store_that_cannot_be_written_to_is_an_error_before_any_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be used: .*file is not a folder; set DPNGD_STORE to one"):
        Store("quick", root=tmp_path / "file")
    monkeypatch.setenv("DPNGD_STORE", "/proc/nowhere")
    monkeypatch.setattr("dpngd.suite.sweep._until_done", lambda *a: pytest.fail("trained"))
    with pytest.raises(UsageError, match="cannot be written to"):
        command.run(["--only", "02", "--train"])


def test_failed_runs_are_lines_and_exit_code_1(capsys):
    from dpngd.suite.executors import Outcome
    from dpngd.suite.profiles import load
    from dpngd.suite.sweep import SweepError

    def sweep():
        raise SweepError([(load("quick").config("dp-sgd", "digits", 4, 0), Outcome("failed", "OSError: no"))], 3)

    assert command.swept(sweep) == 1
    assert "1 of 3 runs failed" in capsys.readouterr().err

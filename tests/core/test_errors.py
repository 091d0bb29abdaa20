"""Exit codes and messages that every command line shares."""

import subprocess
import sys

import pytest

from dpngd.errors import UsageError, exit_code, unknown


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    def main():
        raise UsageError("eta is -1: it must be positive")

    assert exit_code(main) == 2
    assert capsys.readouterr().err == "error: eta is -1: it must be positive\n"


def test_other_errors_are_not_hidden():
    def main():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        exit_code(main)


def test_success_is_0_and_codes_pass_through():
    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: 1) == 1


def test_the_nearest_name_is_suggested():
    assert "did you mean 'dp-ngd'?" in str(unknown("method", "dp-ngdd", ["dp-sgd", "dp-ngd"]))
    assert "did you mean" not in str(unknown("method", "zzz", ["dp-sgd"]))


def test_a_reader_that_goes_away_is_no_traceback():
    code = ("from dpngd.errors import exit_code\n"
            "def main():\n    for i in range(10**6): print(i)\n"
            "raise SystemExit(exit_code(main))")
    done = subprocess.run(f"{sys.executable} -c '{code}' | head -1", shell=True, capture_output=True, text=True)
    assert done.stdout == "0\n"
    assert done.stderr == ""

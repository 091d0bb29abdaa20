"""What the README shows is run, not believed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpngd.__main__ import COMMANDS
from dpngd.suite import profiles
from dpngd.suite.report import markdown

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_opacus_example_runs_and_learns():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    accuracy, epsilon = map(float, re.fullmatch(r"accuracy (\S+) at epsilon (\S+)", done.stdout.strip()).groups())
    assert accuracy > 0.75  # chance is 0.1
    assert epsilon <= 4.0


def test_the_commands_it_names_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"figures", "test"} <= set(re.findall(r"^ {4}make ([a-z]+)", README, re.M)) <= targets
    named = {tuple(words.split()) for words in re.findall(r"(?:bin/|`)dpngd ([a-z]+(?: (?:status|fetch|show|config|"
                                                           r"curvature|methods)\b)?)", README)}
    assert {words[0] for words in named} == set(COMMANDS), "the README names every command, and no other"
    for words in named:
        done = subprocess.run([sys.executable, "-m", "dpngd", *words, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
    assert "python -m dpngd." not in README, "modules are no commands"


def test_the_number_of_the_papers_runs_is_counted():
    (runs,) = re.findall(r"for the paper: ([\d,]+) runs", README)
    assert int(runs.replace(",", "")) == len(profiles.load("paper").all_configs())


def test_the_files_it_names_exist():
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_claims_table_is_that_of_the_shipped_report():
    assert re.findall(r"<!-- claims:(\w+) -->", README) == ["cpu"], "what is drawn live is not shown as a result"
    table = re.search(r"<!-- claims:cpu -->\n(.*?)\n<!-- /claims -->", README, re.S)[1]
    assert table == markdown(json.loads((ROOT / "figures" / "cpu" / "claims.json").read_text(encoding="utf-8")))


def test_it_shows_no_file_that_git_does_not_keep():
    shown = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    ignored = subprocess.run(["git", "check-ignore", *shown], cwd=ROOT, capture_output=True, text=True)
    if ignored.returncode == 128:
        pytest.skip("not a git checkout")
    assert ignored.stdout == ""

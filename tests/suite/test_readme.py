"""What only the README has: its numbers and its table. Blocks and links of all pages: `test_pages`."""

import re
from pathlib import Path

from dpngd.suite import profiles

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_number_of_the_papers_runs_is_counted():
    (runs,) = re.findall(r"for the paper: ([\d,]+) runs", README)
    assert int(runs.replace(",", "")) == len(profiles.load("paper").all_configs())


def test_it_shows_the_two_commands():
    assert {"figures", "test"} <= set(re.findall(r"^ *make ([a-z]+)", README, re.M))

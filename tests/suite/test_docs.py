"""The blocks of docs/optimizer.md run, one after the other, as a reader would run them."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Seconds that each block took, and what all of them printed."""
    timed = "\n".join(["import time; START = time.monotonic()",
                       *[f"{code}\nprint('took', time.monotonic() - START)" for code in BLOCKS]])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", timed], capture_output=True, text=True, timeout=300,
                          cwd=tmp_path_factory.mktemp("docs"))
    assert done.returncode == 0, done.stderr
    at = [0.0, *map(float, re.findall(r"^took (\S+)", done.stdout, re.M))]
    return [b - a for a, b in itertools.pairwise(at)], done.stdout


def test_every_block_runs_in_under_a_minute(ran):
    assert len(ran[0]) == len(BLOCKS) == 4
    assert max(ran[0]) < 60


def test_the_first_one_learns(ran):
    assert float(re.search(r"accuracy (\S+), epsilon", ran[1])[1]) > 0.6  # chance is 0.25

"""The programs by which a review showed holes in the guarantee are tests; docs/audit.md says which."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from mechanism_batches import ZEROS

from dpngd.geometry import Euclidean
from dpngd.gradients import SampleGradients
from dpngd.layers import Dense
from dpngd.mechanism import GaussianMechanism
from dpngd.noise import SecretNoise, seeded_noise, stream

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## What a review of the first edition found", 1)[1].split("\n## ")[0]
TABLE = SECTION.split("### In both editions", 1)[1]
NAMED = sorted(set(re.findall(r"`((?:core|methods|training|data|suite|audit)/\w+\.py)::(\w+)`", SECTION)))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_what_the_table_names_is_a_test(file, test):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test():
    rows = [line for line in SECTION.split("### In both editions")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 13
    assert all("::test_" in row for row in rows)


FIRST = "9162348"  # the last commit of the first edition


def shown(place, where):
    """What the review's programs say of the edition at `place`, by hole: whether it is open, and what was seen."""
    done = subprocess.run([sys.executable, ROOT / "tests" / "helpers" / "review_programs.py", "--json"], cwd=where,
                          env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return {row["hole"]: row for row in json.loads(done.stdout[done.stdout.index("[\n"):])}


def test_every_program_of_the_review_finds_its_hole_closed(tmp_path):
    found = shown(ROOT, tmp_path)
    assert [hole for hole, row in found.items() if row["open"]] == []
    assert set(found) == set(re.findall(r"^\| ([^|]+?) \|", TABLE, re.M)) - {"hole", "---"}


def test_the_same_programs_find_every_hole_open_in_the_first_edition(tmp_path):
    """They can fail, then: the edition of before the review is taken from the repository's history."""
    archive = subprocess.run(["git", "archive", FIRST, "dpngd", "params"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        pytest.skip(f"the history of this checkout has no {FIRST} (a shallow clone?)")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(tmp_path / "first", filter="data")
    found = shown(tmp_path / "first", tmp_path)
    assert len(found) >= 17
    assert [hole for hole, row in found.items() if not row["open"]] == []


def released(noise, scale=1.0):
    """What leaves for one batch of a sample, with this noise."""
    g = stream(0, "review")
    layers = [Dense(scale * torch.randn(1, *z.shape, generator=g)) for z in ZEROS]
    m = GaussianMechanism((1.0,), 3.0, 1.0)
    out = m.release([SampleGradients(layers, torch.zeros(1))], Euclidean(), ZEROS, noise)
    return torch.cat([b.flatten() for b in out.direction]), m


def test_the_noise_of_a_simulation_can_be_subtracted_and_that_of_a_release_cannot():
    """Record and weights give the sum to rounding; between two runs of one seed the noise cancels."""
    empty = [torch.zeros_like(z, dtype=torch.float64) for z in ZEROS]
    for source, told in ((lambda: seeded_noise(5), True), (SecretNoise, False)):
        noisy, m = released(source())
        again = source()
        known = torch.cat([again(z, m.noise_std[0]).flatten() for z in empty]).float()
        left = float((noisy - known).norm())
        assert (left <= 1.0 + 1e-3) is told, "the clipped sum, of norm 1 at most, and nothing else"
        difference = released(source(), scale=-1.0)[0] - noisy
        assert (float(difference.norm()) <= 2.0 + 1e-3) is told

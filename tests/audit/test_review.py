"""The programs by which a review showed holes in the guarantee are tests; docs/audit.md says which."""

import ast
import re
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
SECTION = TEXT.split("## The review's programs", 1)[1].split("\n## ")[0]
NAMED = sorted(set(re.findall(r"`((?:core|methods|training|data|suite|audit)/\w+\.py)::(\w+)`", SECTION)))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_what_the_table_names_is_a_test(file, test):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test():
    rows = [line for line in SECTION.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 13
    assert all("::test_" in row for row in rows)


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

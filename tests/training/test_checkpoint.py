"""A run that is interrupted goes on from its checkpoint and ends as if nothing had been; others' are refused."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dpngd
from dpngd.errors import UsageError, exit_code
from dpngd.methods import METHODS, Built, Setting, build
from dpngd.noise import SeededNoise
from dpngd.suite import profiles
from dpngd.training import checkpoint as module
from dpngd.training import train
from dpngd.training.checkpoint import NAME, Checkpoint
from dpngd.training.command import main
from dpngd.training.train import run

QUICK = profiles.load("quick")
FAST = {"T": 7, "B": 64, "evals": 3}
SMALL = {"public_size": 60, "probe": 16, "gep_directions": 20, "pt_steps": 5, "T_cur": 3}
HELPERS = Path(__file__).parents[1] / "helpers"


def config(method, **changes):
    small = {k: v for k, v in SMALL.items() if k in METHODS[method].uses}
    return QUICK.config(method, "digits", 2.0, 0, **{**FAST, **small, **changes})


class Interrupted(Exception):
    pass


def interrupted_after(steps):
    def progress(step, loss, epsilon):
        if step == steps:
            raise Interrupted

    return progress


def header(folder):
    return json.loads((folder / NAME).read_bytes().partition(b"\n")[0])


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(method, tmp_path):
    """Interrupted between two refreshes (after steps 2 and 5, with F, a basis or moments of steps 0 and 3), and once
    more in a step that is done again: the facts are the same bit for bit."""
    wanted = config(method, augment=False)
    whole = run(wanted)
    for steps in (3, 4, 6):
        if steps < whole.steps:
            with pytest.raises(Interrupted):
                run(wanted, progress=interrupted_after(steps), checkpoint=Checkpoint(tmp_path, 1))
            assert header(tmp_path)["step"] == steps - 1
    seen = []
    resumed = run(wanted, progress=lambda step, *_: seen.append(step), checkpoint=Checkpoint(tmp_path, 1))
    assert resumed.facts() == whole.facts()
    assert seen[0] == (6 if whole.steps > 6 else whole.steps)

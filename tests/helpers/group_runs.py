"""For test_group.py: what several processes do together.

    torchrun --nproc-per-node n group_runs.py OUT TASK...      each writes what it has to say to OUT/<rank>.json
"""

import contextlib
import hashlib
import json
import sys
from pathlib import Path

import torch

from dpngd import curvature
from dpngd.curvature import KFAC
from dpngd.errors import UsageError
from dpngd.group import connected
from dpngd.noise import stream
from dpngd.suite import profiles
from dpngd.training import models
from dpngd.training.checkpoint import Checkpoint
from dpngd.training.release import release
from dpngd.training.train import train

METHODS = ("dp-sgd", "dp-ngd", "dp-ngd-private-20", "dp-ngd-free")
STEPS = 20


def config(method, **changes):
    """20 steps of batches of 400: four micro-batches."""
    return profiles.load("quick").config(method, "digits", 2.0, 0, **{"T": STEPS, "B": 400, "evals": 2, **changes})


def digest(model):
    return hashlib.sha256(b"".join(w.numpy().tobytes() for w in model.state_dict().values())).hexdigest()


def told(trained):
    return {"facts": trained.record.facts(), "weights": digest(trained.model)}


def runs(group, out):
    return {method: told(train(config(method), group=group)) for method in METHODS}


class Stop(Exception):
    pass


def resumed(group, out):
    """A run that all processes leave in step 5 and then take up again, and one that nobody leaves."""

    def leave(step, *_):
        if step == 5:
            raise Stop

    wanted = config("dp-ngd", T=8, T_cur=3)
    with contextlib.suppress(Stop):
        train(wanted, group=group, checkpoint=Checkpoint(out / "state", 2), progress=leave)
    steps = []
    again = train(wanted, group=group, checkpoint=Checkpoint(out / "state", 2),
                  progress=lambda step, *_: steps.append(step))
    return {"steps": steps, "again": told(again), "whole": told(train(wanted, group=group))}


def different(group, out):
    """Each process has a seed of its own."""
    try:
        train(config("dp-sgd", T=2).replace(seed=group.rank), group=group)
    except UsageError as error:
        return {"error": str(error)}


def diverged(group, out):
    """Public images that overflow, all of them with the last process."""
    model = models.build("small", classes=10, in_channels=1, size=8, generator=stream(0, "weights"))
    x = torch.randn(300, 1, 8, 8, generator=stream(0, "x"))
    x[-1] = torch.inf
    try:
        KFAC(model, x, generator=stream(0, "labels"), group=group)()
    except FloatingPointError as error:
        return {"error": str(error)}


def factors(group, out):
    """How many layers each process decomposes; F itself, dense, from the first."""
    model = models.build("small", classes=10, in_channels=1, size=8, generator=stream(0, "weights"))
    x = torch.randn(300, 1, 8, 8, generator=stream(0, "x"))
    found = {}
    for span in (False, True):
        for labels in ("sampled", "random", "exact"):
            counted, whole = [], curvature.Moments.decompose

            def decompose(self, *args, counted=counted, whole=whole):
                counted.append(1)
                return whole(self, *args)

            curvature.Moments.decompose = decompose
            generator = None if labels == "exact" else stream(1, "labels")
            F = KFAC(model, x, labels=labels, generator=generator, span=span, group=group)()
            curvature.Moments.decompose = whole
            dense = [[((Q * v[:, None]) @ Q.mT).flatten().tolist() for Q, v in
                      ((layer.Q_A, layer.lambda_A), (layer.Q_G, layer.lambda_G))] for layer in F]
            found[f"{labels} {span}"] = {"decomposed": len(counted), "F": dense if group.rank == 0 else None}
    return found


def secret(group, out):
    card = release(config("dp-sgd", T=3), out / "release", group=group)
    return {"epsilon": card["privacy"]["epsilon"]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    with connected() as group:
        result = {task: globals()[task](group, out) for task in sys.argv[2:]}
        (out / f"{group.rank}.json").write_text(json.dumps(result))

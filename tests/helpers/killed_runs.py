"""For test_checkpoint.py: one run in a process that is killed (kill -9) at random moments, and started again each time.

    python killed_runs.py FOLDER SEED METHOD T    prints {"killed_after": [steps], "facts": ..., "whole": ...}

The processes are forks of one that has done the imports and the whole run: they start at once, with sigma and data at
hand.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from dpngd.suite import profiles
from dpngd.training.checkpoint import NAME, Checkpoint
from dpngd.training.train import run

KILLS = 5


def step_of(path):
    """The step of a checkpoint; 0 where there is none yet."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return json.loads(file.readline())["step"]


def start(config, folder):
    pid = os.fork()
    if pid:
        return pid
    try:
        record = run(config, checkpoint=Checkpoint(folder, 2))
        (folder / "facts.json").write_text(json.dumps(record.facts()))
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def main(folder, seed, method, T):
    torch.set_num_threads(1)
    config = profiles.load("quick").config(method, "digits", 2.0, 0, T=T, B=64, evals=3, public_size=60, T_cur=3)
    whole = run(config)
    dice, killed = random.Random(seed), []
    # A random step in each fifth of the run (none in the last steps: the process must still be there), and a random
    # moment after it: inside a step, a refresh or the writing of a checkpoint.
    for i in range(KILLS):
        goal = dice.randrange(i * (T - 8) // KILLS, (i + 1) * (T - 8) // KILLS)
        pid = start(config, folder)
        while step_of(folder / NAME) < goal:
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it ended before it was killed"
        killed.append(step_of(folder / NAME))
    assert os.waitpid(start(config, folder), 0)[1] == 0
    facts = json.loads((folder / "facts.json").read_text())
    print(json.dumps({"killed_after": killed, "facts": facts, "whole": whole.facts()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

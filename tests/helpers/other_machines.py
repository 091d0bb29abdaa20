"""How far do results move on another machine? The same runs with other kernels, and with two threads.

Processors differ in their vector units, for which PyTorch, oneDNN and MKL have kernels of their own that round
otherwise. Their environment variables choose the kernels of an older processor, so one machine can play several:

    PYTHONPATH=.:tests/helpers python tests/helpers/other_machines.py        # 20 runs, 3 minutes of one core

The runs are of the profile `cpu` before its tuning: UTKFace, epsilon 1, 100 steps, on 1,050 validation images, with a
seed that nothing else has. It prints, for each, the points by which its accuracy moved and the images that changed.
`dpngd.suite.spotcheck` takes its tolerance from them.
"""

import json
import os
import subprocess
import sys

METHODS = ("dp-sgd", "dp-ngd", "dp-ngd-free", "gep")
MACHINES = {
    "as it is": {},
    "PyTorch's AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "PyTorch's plain, oneDNN's SSE4.1": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "PyTorch's AVX2, MKL's for any processor": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"},
    "two threads": {"OMP_NUM_THREADS": "2"},
}


def results():
    """In this process: a line per method."""
    from dpngd.suite import profiles
    from dpngd.training.train import run

    for method in METHODS:
        config = profiles.untuned("cpu").config(method, "utkface", 1, 3000, T=100, validation=0.1, evals=1)
        facts = run(config).facts()
        print(json.dumps({"accuracy": facts["accuracy"], "correct": facts["correct"], "privacy": facts["privacy"],
                          "facts": json.dumps(facts, sort_keys=True)}))


def main():
    from dpngd.training.record import unpacked

    base = []
    print(f"{'machine':42}{'method':14}{'points':>8}{'images':>8}  facts")
    for name, variables in MACHINES.items():
        env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        command = [sys.executable, __file__, "--here"]
        done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        base = base or found
        for method, old, new in zip(METHODS, base, found, strict=True):
            changed = int((unpacked(old["correct"]) != unpacked(new["correct"])).sum())
            said = "the same to the last bit" if old["facts"] == new["facts"] else \
                "privacy too" if old["privacy"] != new["privacy"] else "differ"
            points = 100 * (new["accuracy"] - old["accuracy"])
            print(f"{name:42}{method:14}{points:+8.2f}{changed:8}  {said}", flush=True)


if __name__ == "__main__":
    results() if "--here" in sys.argv else main()

"""Made-up results of a whole profile, to draw every figure and the report without a real run. None of it is shipped.

The numbers have the form of real ones: accuracies that rise with epsilon and steps, methods some points apart, seeds
and test images that both scatter, losses, floors, phases of a step. `write` puts them into a results folder, `draw`
runs the cells of the notebooks on them as `run_all.py` would:

    PYTHONPATH=.:tests/helpers python tests/helpers/made_results.py ../made --profile cpu
"""

import argparse
import json
import math
import os
import zlib
from pathlib import Path

import numpy as np
from suite_records import record

from dpngd.suite import paths, profiles, report, store, study

IMAGES = 1500
LEVEL = {"cifar10": 44.0, "svhn": 74.0, "utkface": 55.0, "digits": 88.0}
SLOPE = {"cifar10": 4.5, "svhn": 3.5, "utkface": 4.0, "digits": 2.0}  # points per factor e of epsilon
AHEAD = {"dp-sgd": 0.0, "dp-sgd-pt": 0.6, "gep": 0.9, "adadps": 1.4, "dp-ngd": 3.6, "dp-ngd-kl": 3.3,
         "dp-ngd-free": 3.1, "dp-ngd-auto": 3.2, "dp-sgd-kl": -6.0, "dp-ngd-fixed-floor": 3.0, "dp-ngd-pre": -2.0,
         "dp-ngd-post": 1.0, "dp-ngd-one-sided": 2.2, "dp-ngd-private-20": -1.5, "dp-ngd-private-50": -2.5,
         "dp-ngd-factor-clamp": 3.5, "dp-ngd-labels-exact": 3.7, "dp-ngd-labels-random": 3.3}
PEAK = {"dp-ngd": 120, "dp-ngd-free": 90, "dp-ngd-kl": 90}  # steps; the others' is 300


def random(config, salt):
    text = json.dumps(config.canonical(), sort_keys=True) + salt
    return np.random.default_rng(zlib.crc32(text.encode()))


def shared(text):
    return np.random.default_rng(zlib.crc32(text.encode()))


BROKEN = {}  # key of a run of the artifact `bound` -> the factor by which it breaks the safety equation


def accuracy(config):
    """In percent."""
    a = LEVEL.get(config.data, 60.0) + SLOPE.get(config.data, 3.0) * math.log(config.epsilon)
    a += AHEAD.get(config.method, 0.0) / config.epsilon**0.25
    a -= 1.6 * abs(math.log(config.T / PEAK.get(config.method, 300))) ** 1.5
    if config.method in ("dp-sgd-pt", "gep", "adadps"):
        a += 0.8 * math.log10(config.public_size / 500)
    if config.method == "dp-sgd-pt" and config.pt_steps:
        a -= 0.5 * abs(math.log10(config.pt_steps / (30 if config.public_size < 500 else 300)))
    if config.method.startswith("dp-ngd-private"):
        a -= 2.5 * math.log10(max(1.0, 200 / (config.T_cur or 8)))
    if config.method == "dp-ngd" and config.T_cur and config.T_cur > 8:
        a -= 0.5 * math.log2(config.T_cur / 8)
    if config.public in ("noise", "dead-leaves"):
        a -= 0.3
    if config.model == "wrn-10-1":
        a += 3.0
    if config.K == 4:
        a += 2.0
    if (config.N or 0) >= 40000 or config.N is None:
        a += 6.0
    return a - 4.0 * math.log2(BROKEN.get(config.key(), 1.0))


def made(config):
    """A record of a config."""
    draw = random(config, "made")
    if config.method == "dp-ngd-no-floor" or (BROKEN.get(config.key(), 1.0) > 4 and draw.random() < 0.8):
        losses = [2.3 * 8.0**t for t in range(6)]
        return record(config, None, status="diverged", losses=losses)
    wanted = accuracy(config) + shared(f"{config.data} {config.seed}").normal(0, 0.5) + draw.normal(0, 0.35)
    tuned = config.seed >= 1000
    hard = shared(config.data).random(IMAGES) * 100  # the same images are hard for everyone
    right = None if tuned else hard + draw.normal(0, 12, IMAGES) < wanted
    t = np.arange(config.T)
    pace = 60.0 if config.method.startswith("dp-ngd") else 110.0
    end = 0.4 + 0.02 * (70 - wanted) + (0.06 if "fixed" in config.method else 0.0)
    losses = list(end + (2.3 - end) * np.exp(-t / pace) + draw.normal(0, 0.05, config.T))
    phases = {"gradients": 0.041, "mechanism": 0.012, "rest": 0.004}
    if "ngd" in config.method:
        phases |= {"whitening": 0.011, "curvature": 0.006}
    if config.method == "gep":
        phases |= {"curvature": 0.052}
    seconds = {n: v * config.T * (1 + 0.05 * draw.random()) for n, v in phases.items()}
    seconds |= {"setup": 1.0, "evaluation": 1.5}
    r = record(config, None if right is not None else wanted / 100, correct=right, losses=losses, seconds=seconds,
               evaluated_on="validation" if tuned else "test")
    if config.lambda_safe:
        looks = np.linspace(1, config.T, 20).astype(int)
        shape = [max(0.0, 1 - s / (0.1 * config.T)) + (s / config.T) ** 10 for s in looks]
        fixed = "fixed" in config.method
        low = config.lambda_base or config.lambda_safe / 4
        r["diagnostics"]["along"] = [
            {"step": int(s), "lambda_t": config.lambda_safe if fixed else low + (config.lambda_safe - low) * min(k, 1),
             "clamped_share": 0.995 if fixed else 0.97 + 0.02 * min(1.0, k) + 0.002 * draw.random()}
            for s, k in zip(looks, shape, strict=True)]
    r["where"] = {"cpu": "a made-up core", "device": "cpu", "commit": "made-up"}
    return r


def write(profile, folder, keep=lambda config: True):
    """results/<profile>.jsonl of all artifacts of a profile, or of the runs that `keep` keeps; returns their number."""
    from dpngd.suite.rules import broken_bounds
    from dpngd.suite.runs import Runs

    settings, configs = profiles.load(profile), {}
    if "bound" in settings.artifacts:
        runs = Runs(settings.configs("bound"), {})
        for factor, (fields, _) in broken_bounds(runs).items():
            BROKEN.update({c.key(): factor for c in runs.where(**fields).configs if factor > 1})
    for artifact in settings.artifacts:
        configs |= {c.key(): c for c in settings.configs(artifact) if keep(c)}
    folder.mkdir(parents=True, exist_ok=True)
    lines = [store.encode(store.jsonable(made(c), "record")) for _, c in sorted(configs.items())]
    (folder / f"{profile}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def draw(profile, out, notebooks=None):
    """What the notebooks leave in `out`, drawn from the results that `paths.RESULTS` names; nothing is trained."""
    os.environ["DPNGD_FIGURES"] = str(out)
    try:
        for notebook in notebooks or [n for n in study.ARTIFACTS if n != "07_your_own_data"]:
            cells = json.loads((paths.NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
            space = {}
            for cell in (c for c in cells if c["cell_type"] == "code"):
                exec("".join(cell["source"]), space)
                if "parameters" in cell["metadata"].get("tags", []):
                    space |= {"profile": profile, "train": False}
    finally:
        del os.environ["DPNGD_FIGURES"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("--profile", default="cpu")
    p.add_argument("--notebooks", nargs="*")
    p.add_argument("--share", type=float, default=1.0, help="keep this share of the runs")
    p.add_argument("--report-only", action="store_true")
    args = p.parse_args()
    results = args.folder / "results"
    paths.RESULTS, paths.STORE = results, args.folder / "store"
    if not (results / f"{args.profile}.jsonl").exists():
        write(args.profile, results, lambda c: random(c, "keep").random() < args.share)
    if not args.report_only:
        draw(args.profile, args.folder / args.profile, args.notebooks)
    print(report.write_report(args.profile, args.folder / args.profile))


if __name__ == "__main__":
    main()

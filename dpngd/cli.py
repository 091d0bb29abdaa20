"""The command line of one run: `python -m dpngd.train`. Every field of RunConfig is an option of the same name."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import torch
from tqdm import tqdm

from dpngd import privacy
from dpngd.clamping import eta_ngd
from dpngd.config import FIELDS, METHODS, RunConfig
from dpngd.errors import unknown
from dpngd.record import Record
from dpngd.train import run

# What a first run on the embedded digits needs; anything can be overridden.
DEFAULTS = {"method": "dp-ngd", "data": "digits", "model": "small", "epsilon": 2.0, "B": 256, "T": 40, "seed": 0}
METHOD_DEFAULTS = {
    "public": "photos", "public_size": 500, "C": 1.0, "lambda_safe": 0.3, "T1": 0.1, "p": 10.0, "T_cur": 8,
    "adadps_e": 1e-3, "C0": 1.0, "C1": 0.5, "gep_directions": 300, "pt_steps": 200, "pt_eta": 0.05,
    "curvature_C": 0.1,
}
ETA_SGD = 2.0


def parse(argv: list[str] | None) -> tuple[RunConfig, argparse.Namespace]:
    p = argparse.ArgumentParser(prog="python -m dpngd.train", description="One private training run.",
                                formatter_class=argparse.RawDescriptionHelpFormatter,
                                epilog="methods:\n" + "\n".join(f"  {n:22}{s.about}" for n, s in METHODS.items()))
    for name, f in FIELDS.items():
        kind = f.type.removesuffix(" | None")
        note = f.metadata["doc"].replace("%", "%%")
        if kind == "bool":
            p.add_argument(f"--{name}", action="store_true", default=None, help=note)
        else:
            p.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, metavar=kind,
                           type={"int": int, "float": float, "str": str}[kind], help=note)
    p.add_argument("--threads", type=int, help="torch threads")
    p.add_argument("--json", action="store_true", help="print the whole record as JSON")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    args = p.parse_args(argv)
    given = {k: v for k, v in vars(args).items() if k in FIELDS and v is not None}
    return with_defaults(given), args


def with_defaults(given: dict) -> RunConfig:
    """The config that the given options name, the rest filled in for the method."""
    values = {**DEFAULTS, **given}
    if values["method"] not in METHODS:
        raise unknown("method", values["method"], METHODS)
    uses = METHODS[values["method"]].uses
    values = {**{k: v for k, v in METHOD_DEFAULTS.items() if k in uses}, **values}
    if "lambda_base" in uses:
        values.setdefault("lambda_base", values["lambda_safe"] / 4)
    if "eta" not in values:
        floor = values.get("lambda_safe")
        values["eta"] = eta_ngd(floor, values["C"], ETA_SGD, 1.0) if floor else ETA_SGD
    return RunConfig.from_dict(values)


def summary(record: Record) -> str:
    """A short table for people."""
    c, p, s = record.config, record.privacy, record.seconds
    per_step = s["total"] / max(1, record.steps)
    phases = ", ".join(f"{k} {v:.1f}" for k, v in sorted(s.items(), key=lambda kv: -kv[1]) if k != "total")
    reached = "diverged at step " + str(record.steps) if record.accuracy is None else f"{100 * record.accuracy:.2f} %"
    rows = [
        ("run", f"{c['method']} on {c['data']} (N = {p['N']}), {c['model']}, {record.parameters:,} parameters"),
        (f"{record.evaluated_on} accuracy", reached),
        ("privacy", f"epsilon {p['epsilon_prv']:.3f} (PRV), {p['epsilon_rdp']:.3f} (RDP) at delta {p['delta']:g}"),
        ("", f"sigma {p['sigma']:.3f}, q {p['q']:.5f}, T {p['T']}"),
        *[("", f"{part['purpose']}: epsilon {part['epsilon_prv']:.3f} in {part['releases']} releases")
          for part in p["parts"] if len(p["parts"]) > 1],
        ("clipped samples", f"{100 * record.diagnostics['clipped']:.0f} %"),
        ("seconds", f"{s['total']:.1f} ({1e3 * per_step:.0f} ms a step): {phases}"),
        ("key", record.key),
    ]
    return "\n".join(f"{name:20}{value}" for name, value in rows)


def train_main(argv: list[str] | None = None) -> int:
    config, args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    with tqdm(total=config.T, file=sys.stderr, disable=args.quiet, unit="step") as bar:
        marks = {round(config.T * i / 10) for i in range(1, 11)}
        shown = {}

        def progress(step: int, now: dict) -> None:
            shown["loss"] = f"{now['loss']:.3f}"
            if step in marks:  # an accountant takes a moment: ten times a run
                shown["epsilon"] = f"{privacy.spent(now['sigma'], now['q'], step, config.delta):.3f}"
            bar.set_postfix(shown)
            bar.update()

        record = run(config, progress=progress)
    print(json.dumps(dataclasses.asdict(record)) if args.json else summary(record))
    return 0

"""The command line of one run: `python -m dpngd.train`. Every field of RunConfig is an option of the same name."""

from __future__ import annotations

import argparse
import json
import sys

import torch
from tqdm import tqdm

from dpngd.errors import Parser, UsageError, unknown
from dpngd.methods import METHODS
from dpngd.suite import profiles
from dpngd.training.config import FIELDS, RunConfig
from dpngd.training.record import Record
from dpngd.training.train import run

CELL = {"method": "dp-ngd", "data": "digits", "epsilon": 2.0, "seed": 0}
"""What a run is of when nothing is said; every other setting is the profile's for that method and data set."""
KINDS = {"int": int, "float": float, "str": str}


def parse(argv: list[str] | None) -> tuple[RunConfig, argparse.Namespace]:
    p = Parser(prog="python -m dpngd.train", description="One private training run.", allow_abbrev=False,
               formatter_class=argparse.RawDescriptionHelpFormatter,
               epilog="methods:\n" + "\n".join(f"  {n:22}{s.about}" for n, s in METHODS.items()))
    for name, f in FIELDS.items():
        kind = f.type.removesuffix(" | None")
        note = f.metadata["doc"].replace("%", "%%")
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        if kind == "bool":
            p.add_argument(*spellings, dest=name, action="store_true", default=None, help=note)
        else:
            p.add_argument(*spellings, dest=name, metavar=kind, type=KINDS[kind], help=note)
    p.add_argument("--profile", help="params/<profile>.yaml gives what is not said (quick for digits, else cpu)")
    p.add_argument("--threads", metavar="int", type=int, help="torch threads")
    p.add_argument("--json", action="store_true", help="print the whole record as JSON")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    args, other = p.parse_known_args(argv)
    if other:
        if not other[0].startswith("-"):
            raise UsageError(f"unexpected argument {other[0]!r}: options start with --")
        raise unknown("option", other[0].partition("=")[0], [a.option_strings[0] for a in p._actions])
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads is {args.threads}: it must be at least 1")
    given = {k: v for k, v in vars(args).items() if k in FIELDS and v is not None}
    return with_defaults(given, args.profile), args


def with_defaults(given: dict, profile: str | None = None) -> RunConfig:
    """The config that the given options name, the rest as the profile has it: what follows from an option (a rate from
    a floor, say) follows from the given one."""
    cell = {name: given.get(name, value) for name, value in CELL.items()}
    rest = {name: value for name, value in given.items() if name not in CELL}
    name = profile or ("quick" if cell["data"] == "digits" else "cpu")
    return profiles.load(name).config(*cell.values(), **rest)


def summary(record: Record) -> str:
    """A short table for people."""
    c, p, s, d = record.config, record.privacy, record.seconds, record.diagnostics
    phases = ", ".join(f"{k} {v:.1f}" for k, v in sorted(s.items(), key=lambda kv: -kv[1]) if k != "total")
    stepping = 1e3 * (s["total"] - s["setup"] - s.get("evaluation", 0)) / max(1, record.steps)
    reached = f"diverged at step {record.steps}" if record.accuracy is None else f"{100 * record.accuracy:.2f} %"
    last = next((x for x in reversed(record.train_loss) if x is not None), float("nan"))
    channels = zip(p["noise_std"], p["sensitivity"], strict=True)
    noise = ", ".join(f"{std:.3g} on sensitivity {C:g}" for std, C in channels)
    rows = [
        ("run", f"{c['method']} on {c['data']} (N = {record.data['private']['N']}), {c['model']}, "
                f"{record.parameters:,} parameters"),
        (f"{record.evaluated_on} accuracy", reached),
        ("training loss", f"{last:.4g} at the end, {d['largest_loss'] or 0:.4g} at most"),
        ("privacy", f"epsilon {p['epsilon_prv']:.3f} (PRV), {p['epsilon_rdp']:.3f} (RDP) at delta {p['delta']:g}"),
        *[("", f"{part['purpose']}: epsilon {part['epsilon_prv']:.3f}, sigma {part['sigma']:.3f}, "
               f"{part['releases']} releases") for part in p["parts"] if len(p["parts"]) > 1],
        ("", f"sigma {p['sigma']:.3f}, q {p['q']:.5f}, T {p['T']}; noise {noise}"),
        ("clipped", f"{100 * d['clipped']:.0f} % of the samples; {d['nonfinite_samples']} not finite"),
        *[("clamped", f"{100 * row['clamped_share']:.1f} % of the eigenvalues at the end")
          for row in d["along"][-1:] if "clamped_share" in row],
        ("seconds", f"{s['total']:.1f} ({stepping:.0f} ms a step): {phases}"),
        ("key", record.key),
    ]
    return "\n".join(f"{name:20}{value}" for name, value in rows)


def train_main(argv: list[str] | None = None) -> int:
    config, args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    with tqdm(total=config.T, file=sys.stderr, disable=args.quiet, unit="step") as bar:
        marks = {round(config.T * i / 10) for i in range(1, 11)} | {1}
        shown = {}

        def progress(step: int, loss: float, epsilon) -> None:
            shown["loss"] = f"{loss:.3f}"
            if step in marks and not args.quiet:  # an accountant takes a moment: ten times a run
                shown["epsilon"] = f"{epsilon():.3f}"
            bar.set_postfix(shown)
            bar.update()

        record = run(config, progress=progress)
    print(json.dumps(record.to_dict(), allow_nan=False) if args.json else summary(record))
    return 0

"""`dpngd train`: one run. Every field of RunConfig is an option of the same name.

torch is imported after the options have been checked: a wrong one is an error within a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from typing import TYPE_CHECKING

from dpngd import progress
from dpngd.errors import Parser, UsageError
from dpngd.methods import METHODS
from dpngd.training.config import DIGESTS, FIELDS, RunConfig

if TYPE_CHECKING:
    from dpngd.group import Group
    from dpngd.training.record import Record

CELL = {"method": "dp-ngd", "data": "digits", "epsilon": 2.0, "seed": 0}
"""What a run is of when nothing is given; every other setting is the profile's for that method and data set."""
EVERY = 50
KINDS = {"int": int, "float": float, "str": str}


def parse(argv: list[str] | None) -> tuple[RunConfig, argparse.Namespace]:
    """The config that the options name, and the options."""
    p = Parser(prog="dpngd train", description="One private training run. It is a simulation: the seed "
               "decides batches and noise, so that runs can be compared and repeated, and its weights must not be "
               "published. --release trains with secret noise and writes weights that may be.",
               formatter_class=argparse.RawDescriptionHelpFormatter,
               epilog="methods:\n" + "\n".join(f"  {n:22}{s.about}" for n, s in METHODS.items()))
    add_fields(p)
    p.add_argument("--threads", metavar="int", type=int, help="torch threads")
    p.add_argument("--release", metavar="OUT", help="train with secret noise and batches, and write weights and model "
                   "card into the new folder OUT; nothing else is told of the private data, no accuracy either")
    p.add_argument("--checkpoint", metavar="DIR", help="keep the run's state in DIR: the same command started again "
                   "goes on from there")
    p.add_argument("--every", metavar="int", type=int, help=f"steps from one checkpoint to the next (default {EVERY})")
    p.add_argument("--json", action="store_true", help="print the whole record as JSON (of a release, its card)")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    args = p.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads is {args.threads}: it must be at least 1")
    check_checkpoint(args)
    config = with_defaults(given(args), args.profile)
    if args.release is not None:
        from dpngd.training.release import check_place

        check_place(args.release)
    return config, args


def check_checkpoint(args: argparse.Namespace) -> None:
    """--checkpoint and --every, before anything is computed."""
    if args.checkpoint is None:
        if args.every is not None:
            raise UsageError("--every is for checkpoints: give --checkpoint DIR too")
    elif args.release is not None:
        raise UsageError("--checkpoint beside --release: a release's noise cannot be drawn again, so a resumed run "
                         "would spend more than its budget; leave --checkpoint out")
    elif args.every is not None and args.every < 1:
        raise UsageError(f"--every is {args.every}: it must be at least 1")


def add_fields(p: Parser) -> None:
    """Declare an option per field of RunConfig, and --profile, from which the other fields come."""
    for name, f in FIELDS.items():
        if name in DIGESTS:
            continue
        kind = f.type.removesuffix(" | None")
        note = f.metadata["doc"].replace("%", "%%")
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        if kind == "bool":
            p.add_argument(*spellings, dest=name, action="store_true", default=None, help=note)
        else:
            p.add_argument(*spellings, dest=name, metavar=kind, type=KINDS[kind], help=note)
    p.add_argument("--profile", help="params/<profile>.yaml gives what is not given here (quick for digits, else cpu)")


def given(args: argparse.Namespace) -> dict:
    """The fields of RunConfig that were given."""
    return {k: v for k, v in vars(args).items() if k in FIELDS and v is not None}


def with_defaults(given: dict, profile: str | None = None) -> RunConfig:
    """The config that the given options name, the rest as the profile has it: what follows from an option (a rate from
    a floor, say) follows from the given one."""
    return resolve(given, profile)[0]


def resolve(given: dict, profile: str | None = None) -> tuple[RunConfig, dict[str, str]]:
    """The same config, and for each value where it comes from."""
    from dpngd.suite import profiles

    cell = {name: given.get(name, value) for name, value in CELL.items()}
    rest = {name: value for name, value in given.items() if name not in CELL}
    name = profile or ("quick" if cell["data"] == "digits" else "cpu")
    config, origins = profiles.load(name).resolve(*cell.values(), **rest)
    if "gep_directions" in given and config.gep_directions > config.public_size:
        raise UsageError(f"gep_directions = {config.gep_directions}: GEP's directions are of public gradients, so at "
                         f"most public_size = {config.public_size}")
    return config, origins | {n: "default of dpngd train" for n in CELL if n not in given}


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
        ("", "a simulation: a seed decided batches and noise (--release for weights to publish)"),
        ("privacy", f"epsilon {p['epsilon_prv']:.3f} (PRV), {p['epsilon_rdp']:.3f} (RDP) at delta {p['delta']:g}"),
        *[("", f"{part['purpose']}: epsilon {part['epsilon_prv']:.3f}, sigma {part['sigma']:.3f}, "
               f"{part['releases']} releases") for part in p["parts"] if len(p["parts"]) > 1],
        ("", f"sigma {p['sigma']:.3f}, q {p['q']:.5f}, T {p['T']}; noise {noise}"),
        ("clipped", f"{100 * d['clipped']:.0f} % of the samples; {d['nonfinite_samples']} not finite"),
        *[("clamped", f"{100 * row['clamped_share']:.1f} % of the eigenvalues at the end")
          for row in d["along"][-1:] if "clamped_share" in row],
        ("seconds", f"{s['total']:.1f} ({stepping:.0f} ms per step): {phases}"),
        ("key", record.key),
        ("more", "nothing was written; --json prints the whole record, docs/glossary.md names its symbols"),
    ]
    return "\n".join(f"{name:20}{value}" for name, value in rows)


def released(card: dict, out: str) -> str:
    """What was released, in two lines."""
    p = card["privacy"]
    return (f"released: {out}/weights.safetensors, card.json, README.md\n"
            f"privacy: epsilon {p['epsilon']:.3f} at delta {p['delta']:g} ({p['accountant']}), sigma {p['sigma']:.3f}, "
            f"q {p['q']:.5f}, T {p['T']}")


def main(argv: list[str] | None = None) -> int:
    config, args = parse(argv)
    from dpngd.group import Lost, connected  # late: see the module's docstring

    try:
        with connected(ends="TORCHELASTIC_RUN_ID" in os.environ) as group:  # see dpngd.__main__
            return train(config, args, group)
    except Lost as lost:
        progress.say(f"error: {lost}")
        return 1


def train(config: RunConfig, args: argparse.Namespace, group: Group) -> int:
    """Do what the options say; of a group of processes, the first one speaks."""
    import torch

    from dpngd.training.train import run

    if args.threads:
        torch.set_num_threads(args.threads)
    args.quiet = args.quiet or group.rank > 0
    marks = {round(config.T * i / 10) for i in range(1, 11)} | {1}
    shown, told, began, bars = [], {}, [], contextlib.ExitStack()

    def follow(step: int, loss: float, epsilon) -> None:
        if not args.release:  # a loss is private
            told["loss"] = f"{loss:.3f}"
        if step in marks and not args.quiet:  # an accountant takes a moment: ten times per run
            told["epsilon"] = f"{epsilon():.3f}"
        if not shown:  # with the second step, whose time is known: what is wrong before is one line, without a bar
            began.append(time.perf_counter())
            if step < config.T and len(began) < 2:
                return
            if not args.quiet:
                left = (config.T - step) * (began[-1] - began[0])
                progress.say(f"{config.method} on {config.data}: {config.T} steps of about {config.B} images, epsilon "
                             f"{config.epsilon:g}; about {progress.span(left)} left")
            shown.append(bars.enter_context(progress.bar(config.T, "steps", unit="step", initial=step - 1,
                                                         quiet=args.quiet)))
        shown[0].set_postfix(told)
        shown[0].update()

    if args.release:
        from dpngd.training.release import release

        with bars:
            card = release(config, args.release, progress=follow, group=group)
        tell(group, json.dumps(card, allow_nan=False) if args.json else released(card, args.release))
        return 0
    checkpoint = None
    if args.checkpoint is not None:
        from dpngd.training.checkpoint import Checkpoint

        checkpoint = Checkpoint(args.checkpoint, args.every or EVERY)
    with bars:
        record = run(config, progress=follow, checkpoint=checkpoint, group=group)
    tell(group, json.dumps(record.to_dict(), allow_nan=False) if args.json else summary(record))
    return 0


def tell(group: Group, text: str) -> None:
    if group.rank == 0:
        print(text)

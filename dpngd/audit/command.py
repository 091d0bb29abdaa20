"""`dpngd audit`: tests the promise of every method and of the Opacus optimizer, on the code as installed.

torch is imported after the options have been checked: a wrong one is an error within a second.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import dpngd
from dpngd import progress
from dpngd.errors import Parser, UsageError
from dpngd.methods import METHODS, method

METHOD, OPACUS, LEAK = 12.0, 20.0, 1.5  # seconds on one core: a method, the Opacus optimizer, a planted leak
DESCRIPTION = """Does a private run keep its promise? One line per test: pass or FAIL, what was measured, the limit, and
how small a leak the test sees. Without options: all methods and the Opacus optimizer. Exit code 1 on a failure."""


def declare(p: argparse.ArgumentParser) -> None:
    """Declare the options of `dpngd audit`."""
    p.add_argument("--method", nargs="+", action="extend", metavar="M", help="these methods only (default: all)")
    p.add_argument("--opacus", action="store_true", help="the Opacus optimizer only, or beside --method")
    p.add_argument("--release", type=Path, metavar="OUT", help="what `dpngd train --release OUT` wrote")
    p.add_argument("--self-test", action="store_true", help="plant leaks, each with a clean control: all must be found")
    p.add_argument("--seconds", type=float, metavar="S",
                   help="aim at this time: fewer releases, less power (a method needs some 6 s at least)")
    p.add_argument("--seed", type=int, default=0, help="seed of what the audit draws (default 0)")
    p.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="methods at a time (default 2)")
    p.add_argument("--json", action="store_true",
                   help="print all of it as JSON: as results/audit.json it is in the report")
    p.add_argument("--figure", type=Path, metavar="FILE", help="draw the canary's scores (needs matplotlib)")


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(prog="dpngd audit", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    declare(p)
    args = p.parse_args(argv)
    for name in args.method or []:
        method(name)  # an unknown name is an error
    if args.seconds is not None and not args.seconds > 0:
        raise UsageError(f"--seconds is {args.seconds:g}: it must be above 0")
    if args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}: it must be at least 1")
    if not 0 <= args.seed < 2**53:  # a method's own seed is 1000 times as large, and must be below 2^63
        raise UsageError(f"--seed is {args.seed}: it must be from 0 to below 2**53")
    if args.figure is not None and not args.figure.absolute().parent.is_dir():
        raise UsageError(f"--figure {args.figure}: there is no folder {args.figure.parent}, make it first")
    if args.release is not None and not args.release.is_dir():
        raise UsageError(f"--release {args.release} is not a folder: give the one that `dpngd train --release` wrote")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    import warnings  # late: see the module's docstring

    import torch

    warnings.filterwarnings("ignore", module="opacus|torch")  # they warn about themselves
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of Opacus's hooks, in our lines
    torch.set_num_threads(1)
    return _self_test(args) if args.self_test else _audit(args)


def _audit(args: argparse.Namespace) -> int:
    from dpngd import audit

    def show(line: object) -> None:
        if not args.json:
            print(line.line(), flush=True)

    everything = not (args.method or args.opacus or args.release)
    names = list(METHODS) if everything else args.method or []
    report, left = audit.Report(), args.seconds
    progress.say(outlook(args, len(names), everything or args.opacus))
    if args.release is not None:
        report.add(audit.audit_release(args.release, show))
    if everything or args.opacus:
        share = None if left is None else left / (1 + len(names) / args.jobs)
        report.add(audit.audit_opacus(seconds=share, show=show))
        left = None if left is None else max(1.0, left - report.seconds)
    if names:
        report.add(audit.audit_methods(names, seed=args.seed, seconds=left, jobs=args.jobs, show=show))
    summary = report.summary()
    if args.json:
        print(json.dumps(report.to_dict(), indent=1, allow_nan=False))
    else:
        print(summary)
        progress.say("docs/audit.md says what each test sees, and what none of them does")
    if args.figure is not None:
        report.figure(args.figure)
        progress.say(f"wrote {args.figure}")
    return 0 if report.passed else 1


def outlook(args: argparse.Namespace, methods: int, opacus: bool) -> str:
    """What will be audited, and for about how long."""
    parts = {f"the release {args.release}": args.release is not None, "the Opacus optimizer": opacus,
             f"methods ({methods}, {args.jobs} at a time)": methods}
    seconds = args.seconds or OPACUS * opacus + METHOD * (methods > 0) * (1 + methods / args.jobs)
    return f"auditing {', '.join(name for name, there in parts.items() if there)}: about {progress.span(seconds)}"


def _self_test(args: argparse.Namespace) -> int:
    from dpngd.audit.leaks import leaks
    from dpngd.audit.report import code, outcome_dict, self_test

    planted = len(leaks())
    progress.say(f"{planted} planted leaks, each beside a clean control: about {progress.span(LEAK * planted)}")
    outcomes = self_test(lambda o: None if args.json else print(o.line(), flush=True))
    missed = [o for o in outcomes if not o.passed]
    if args.json:
        print(json.dumps({"version": dpngd.__version__, "commit": code(), "passed": not missed,
                          "seconds": round(sum(o.seconds for o in outcomes), 1),
                          "leaks": [outcome_dict(o) for o in outcomes]}, indent=1, allow_nan=False))
    else:
        print(f"{len(outcomes) - len(missed)} of {len(outcomes)} planted leaks found, with their controls clean. "
              f"{sum(o.seconds for o in outcomes):.0f} s")
    return 1 if missed else 0

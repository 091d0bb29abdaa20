"""The arguments of the suite's commands: `dpngd run, tune, bench, report, show, spotcheck`.

Each function parses its arguments, checks what needs no work to check, and imports the module that does the work after
that: `--help` and most errors load neither torch nor pandas.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dpngd.errors import Parser, UsageError

if TYPE_CHECKING:
    from dpngd.suite.executors import Executor

SHARD = ("train part I of N of the missing runs and nothing else (1/8 to 8/8 on eight machines); once all parts are "
         "done, the command without it goes on")
PROFILE = "a profile, params/<profile>.yaml: quick, cpu or paper, or one of your own"


def run(argv: list[str] | None = None, prog: str = "dpngd run") -> int:
    args = run_arguments(argv, prog)
    from dpngd.suite.run import main

    return main(args)


def run_arguments(argv: list[str] | None = None, prog: str = "dpngd run") -> argparse.Namespace:
    """The options of `dpngd run` and run_all.py, with the profile loaded."""
    p = Parser(prog=prog, description="Every table and figure of the paper, ours beside it.")
    p.add_argument("--profile", default="quick", help=f"{PROFILE} (default quick)")
    p.add_argument("--only", nargs="+", metavar="NOTEBOOK", help="some notebooks only, by name or number")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs and notebooks at a time (default: the cores)")
    p.add_argument("--shard", metavar="I/N", help=SHARD)
    p.add_argument("--executor", choices=["processes", "ray"], default="processes",
                   help="where runs are trained: in processes here (default), or on a Ray cluster (docs/scale.md)")
    p.add_argument("--address", metavar="A", help="the Ray cluster: auto (default: the one that this machine is part "
                                                  "of), HOST:PORT, or ray://HOST:10001 from outside")
    p.add_argument("--ship-data", action="store_true", help="send data sets that a node of the cluster lacks to it")
    p.add_argument("--workers", type=int, default=8, metavar="N", help="with --list: also the days on N devices (8)")
    p.add_argument("--train", action="store_true", help="train missing runs even where the profile ships results")
    p.add_argument("--refresh", action="store_true", help="forget stored and shipped runs, and train all of them")
    p.add_argument("--list", action="store_true", help="show runs, sigmas, steps and hours; train nothing")
    p.add_argument("--export", action="store_true", help="ship the runs there are: write results/<profile>.jsonl")
    p.add_argument("--html", action="store_true", help="also write each executed notebook as HTML")
    p.add_argument("--timeout", type=float, default=1200.0, metavar="SECONDS", help="limit per notebook (default 1200)")
    p.add_argument("-p", "--param", action="append", default=[], metavar="NAME=VALUE",
                   help="a notebook parameter (methods, datasets, epsilons or seeds) as YAML, such as epsilons=[2,4]; "
                        "writes to figures/<profile>-custom/")
    p.add_argument("--output", type=Path, help=argparse.SUPPRESS)  # for tests
    args = p.parse_args(argv)
    need_checkout(prog)
    at_least_1("--jobs", args.jobs)
    at_least_1("--workers", args.workers)
    check_shard(args.shard)
    if args.executor == "processes":
        if args.address is not None:
            raise UsageError("--address is of a Ray cluster: give --executor ray too")
        if args.ship_data:
            raise UsageError("--ship-data is for a Ray cluster: give --executor ray too")
    else:
        from dpngd.suite.cluster import check_installed

        check_installed()
    for option in ("refresh", "export"):
        if args.shard and getattr(args, option):
            raise UsageError(f"--{option} beside --shard: --{option} is of all runs; give it alone, before or after "
                             "the shards")
    if not args.timeout > 0:
        raise UsageError(f"--timeout is {args.timeout:g}: it must be above 0 seconds")
    from dpngd.suite import profiles

    args.profile = profiles.load(args.profile)
    args.executor = executor_of(args)
    return args


def executor_of(args: argparse.Namespace) -> Executor | None:
    """The cluster that was asked for; None for processes of this machine."""
    if args.executor == "processes":
        return None
    from dpngd.suite.cluster import Ray

    return Ray(args.address or os.environ.get("RAY_ADDRESS") or "auto", ship=args.ship_data,
               **args.profile.settings["resources"])


def tune(argv: list[str] | None = None) -> int:
    p = Parser(prog="dpngd tune", description="The grid search of a profile: run the trials that are missing, write "
                                              "what won to params/tuned/<profile>.yaml.")
    p.add_argument("profile", help=PROFILE)
    p.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    p.add_argument("--shard", metavar="I/N", help=SHARD)
    p.add_argument("--gate", action="store_true", help="the gate instead: find N and B at which epsilon matters to "
                                                       "DP-SGD, write params/tuned/<profile>-gate.yaml")
    p.add_argument("--show", action="store_true", help="run and write nothing, show what won so far")
    p.add_argument("--only", nargs="+", metavar="SEARCH",
                   help="some searches only: tuning (the profile's own networks), tuning_networks (another one), "
                        "tuning_between (an epsilon between those of the first); by default each begins when the one "
                        "before is complete")
    args = p.parse_args(argv)
    need_checkout("dpngd tune")
    at_least_1("--jobs", args.jobs)
    check_shard(args.shard)
    if args.shard and args.show:
        raise UsageError("--show beside --shard: a shard trains, and --show does not; give one of them")
    from dpngd.suite import profiles

    profiles.untuned(args.profile)  # what was chosen for other settings does not matter here: it is chosen again
    from dpngd.suite.tuning import main

    return swept(lambda: main(args))


def floor(text: str) -> float | None:
    """--floor: a number, or None for "auto"."""
    return None if text == "auto" else float(text)


def bench(argv: list[str] | None = None) -> int:
    p = Parser(prog="dpngd bench", description="Seconds per training step, every contender interleaved in one run.")
    p.add_argument("--models", nargs="+", metavar="MODEL", help="default: small wrn-10-1 resnet-20 wrn-16-4")
    p.add_argument("--quick", action="store_true",
                   help="within a minute: the small network, 5 rounds, the contenders of the goals, no memory")
    p.add_argument("--opacus", action="store_true",
                   help="also Opacus's loop with DPNGD, against its own DP-SGD loop: whole runs of three programs")
    p.add_argument("--scaling", action="store_true",
                   help="also how cost grows with batch, width, public images, T_cur and K; seconds to calibrate and "
                        "to start; runs per hour of each method; processes against threads")
    p.add_argument("--full", action="store_true",
                   help="--scaling, --opacus, and all networks again with one thread: what results/bench.json holds")
    p.add_argument("--figures", type=Path, metavar="FOLDER", help="draw how cost grows there (scaling.png and .svg)")
    p.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                   help="what counts: seconds of the wall (default), or of this process, on a machine with other work")
    p.add_argument("--contenders", nargs="+", metavar="NAME",
                   help="plain, opacus-hooks, a method, ... (default: all; an unknown name lists them)")
    p.add_argument("--batch", type=int, help="samples per step (default 256; of wrn-16-4, memory is that of 64)")
    p.add_argument("--K", type=int, default=1, help="views per sample (augmentation multiplicity)")
    p.add_argument("--repeats", type=int, default=9, help="rounds (default 9)")
    p.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    p.add_argument("--public", type=int, default=500, help="public images per curvature refresh (default 500)")
    p.add_argument("--t-cur", type=int, default=8, help="steps between refreshes (default 8)")
    p.add_argument("--amortise-batch", type=int, default=1024,
                   help="samples per step when amortising the refresh (default 1024)")
    p.add_argument("--floor", type=floor, default=0.025,
                   help="lambda_t at which DP-NGD is timed (default 0.025); auto: by rank, as on a run's plateau")
    p.add_argument("--micro-batch", type=int, help="views worked on at once, ours (default: as in training)")
    p.add_argument("--no-memory", action="store_true", help="skip the memory measurement")
    p.add_argument("--load", action="store_true", help="instead: 1,000 tiny runs through each executor, and a store of "
                                                       "20,000 records")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.add_argument("--peak-of", help=argparse.SUPPRESS)
    p.add_argument("--pace", type=float, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.quick and args.full:
        raise UsageError("--quick beside --full: one is a minute and the other everything; give one of them")
    if args.figures and not (args.scaling or args.full):
        raise UsageError("--figures draws how cost grows: give --scaling or --full too")
    for name, value in vars(args).items():
        if isinstance(value, int) and not isinstance(value, bool):
            at_least_1(f"--{name.replace('_', '-')}", value)
    if args.floor is not None and not args.floor > 0:
        raise UsageError(f"--floor is {args.floor}: it must be positive")
    if args.load:
        from dpngd.suite.load import main
    else:
        from dpngd.suite.bench import main

    return main(args)


def report(argv: list[str] | None = None) -> int:
    p = Parser(prog="dpngd report", description="Write figures/<profile>/index.html and claims.json again, from what "
                                                "the notebooks left there.")
    p.add_argument("profile", nargs="?", help=PROFILE)
    instead = p.add_mutually_exclusive_group()
    instead.add_argument("--markdown", action="store_true", help="print the claims table instead, and write nothing")
    instead.add_argument("--docs", action="store_true", help="write docs/claims.md instead")
    instead.add_argument("--json", action="store_true", help="print the claims as JSON instead, and write nothing")
    instead.add_argument("--notebooks", nargs="*", metavar="NAME",
                         help="instead execute the notebooks (all, or those named) on the shipped results, and store "
                              "their outputs in notebooks/")
    p.add_argument("--check", action="store_true", help="with --notebooks: store nothing, say which are not up to date")
    args = p.parse_args(argv)
    if args.check and args.notebooks is None:
        raise UsageError("--check is of the notebooks: give --notebooks too")
    need_checkout("dpngd report")
    if args.notebooks is None:
        if args.profile is None:
            raise UsageError("name a profile, for example: dpngd report quick")
        from dpngd.suite import profiles

        profiles.load(args.profile)
    elif args.profile is not None:
        raise UsageError(f"unexpected argument {args.profile!r}: --notebooks runs with each notebook's own profile")
    from dpngd.suite.report import main

    return main(args)


def spotcheck(argv: list[str] | None = None) -> int:
    p = Parser(prog="dpngd spotcheck", description="Train some shipped runs of a profile again, and compare.")
    p.add_argument("profile", help=PROFILE)
    p.add_argument("--runs", type=int, default=5, help="how many (default 5)")
    p.add_argument("--seed", type=int, default=0, help="which ones (default 0)")
    p.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    args = p.parse_args(argv)
    need_checkout("dpngd spotcheck")
    at_least_1("--jobs", args.jobs)
    from dpngd.suite import profiles

    profiles.load(args.profile)
    from dpngd.suite.spotcheck import main

    return swept(lambda: main(args))


def show(argv: list[str] | None = None) -> int:
    from dpngd.training.command import add_fields

    p = Parser(prog="dpngd show", description="What a run is made of, before it is run.")
    commands = p.add_subparsers(dest="command", required=True, metavar="config|curvature|methods")
    config = commands.add_parser("config", help="the config of a run as resolved, and where each value comes from")
    add_fields(config)
    curvature = commands.add_parser("curvature", help="the spectrum of F at theta_0, and the floor that it suggests")
    curvature.add_argument("--model", default="small", help="network (default small)")
    curvature.add_argument("--public", default="noise", help="public images, as of `dpngd train` (default noise)")
    curvature.add_argument("--public-size", type=int, default=500, help="how many (default 500)")
    curvature.add_argument("--data", help="take the shape and the classes of this private set; its images are not used")
    curvature.add_argument("--shape", nargs=3, type=int, metavar=("C", "H", "W"), help="or this one (default 3 32 32)")
    curvature.add_argument("--classes", type=int, help="classes (default 10)")
    curvature.add_argument("--lambda-safe", type=float, help="a floor of yours to compare: directions above it")
    curvature.add_argument("--seed", type=int, default=0, help="of weights, public images and labels (default 0)")
    methods = commands.add_parser("methods", help="the methods: what each is and the fields that it reads")
    for command in (config, curvature, methods):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    args = p.parse_args(argv)
    from dpngd.suite.show import main

    return main(args)


def need_checkout(command: str) -> None:
    """Raise where the package was installed without the files of the repository."""
    from dpngd.files import checkout

    if checkout() is None:
        raise UsageError(f"{command} needs a checkout of the repository (its params/, notebooks/ and results/), and "
                         "this dpngd was installed without one: clone it and `pip install --editable .` there")


def at_least_1(option: str, value: int | None) -> None:
    if value is None or value < 1:
        raise UsageError(f"{option} is {value}: it must be at least 1")


def check_shard(part: str | None) -> None:
    """An error for a --shard that is not I/N."""
    if part is not None:
        from dpngd.suite.sweep import shard_numbers

        shard_numbers(part)


def swept(main: Callable[[], int]) -> int:
    """Run `main`; runs that failed are named on stderr, one line each, and the exit code is 1."""
    from dpngd.suite.sweep import SweepError

    try:
        return main()
    except SweepError as error:
        print(error, file=sys.stderr)
        return 1

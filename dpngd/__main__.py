"""`dpngd <command>` = `python -m dpngd <command>`: the one command line.

A command is a function `main(argv)` of a module that imports only argparse and the like: it declares its arguments,
checks them, and imports what does the work (torch, pandas, ...) after that. So `--help` and most errors answer at once.
To add a command, write such a module and name it in COMMANDS.
"""

from __future__ import annotations

import os
import sys

COMMANDS = {
    "train": ("dpngd.training.command:main", "train", "train once with one method, print accuracy and privacy spent"),
    "data": ("dpngd.data.command:main", "train", "data sets: status, fetch, show"),
    "show": ("dpngd.suite.command:show", "suite", "a config and its origins, the spectrum of F, the methods"),
    "run": ("dpngd.suite.command:run", "suite", "train what a profile lacks, run its notebooks, write the report"),
    "tune": ("dpngd.suite.command:tune", "suite", "the grid search of a profile"),
    "bench": ("dpngd.suite.command:bench", "suite", "seconds per training step of every method, and of Opacus"),
    "report": ("dpngd.suite.command:report", "suite", "write a profile's report page again, or print its claims"),
    "spotcheck": ("dpngd.suite.command:spotcheck", "suite", "train some shipped runs again and compare"),
    "audit": ("dpngd.audit.command:main", "train", "test the promise of every method; plant leaks and find them"),
}
"""Command -> (module:function, the extra of the package that it needs, what it does)."""

USAGE = """usage: dpngd <command> [options]

Differentially private natural gradient descent, and the suite that reproduces its paper.

commands:
{commands}

options:
  -h, --help            show this message; `dpngd <command> --help` explains a command
  --version             show the version

Bad input is one line on stderr and exit code 2."""


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (or else the command line) names, and return its exit code."""
    from dpngd.errors import UsageError, unknown

    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        raise UsageError(f"no command: give one of {', '.join(COMMANDS)}; `dpngd --help` explains them")
    name, rest = argv[0], argv[1:]
    if name in ("-h", "--help"):
        print(USAGE.format(commands="\n".join(f"  {n:22}{about}" for n, (_, _, about) in COMMANDS.items())))
        return 0
    if name == "--version":
        import dpngd

        print(f"dpngd {dpngd.__version__}")
        return 0
    if name not in COMMANDS:
        raise unknown("option" if name.startswith("-") else "command", name,
                      ["--help", "--version"] if name.startswith("-") else COMMANDS)
    import importlib

    (module, _, function), extra = COMMANDS[name][0].partition(":"), COMMANDS[name][1]
    try:
        return getattr(importlib.import_module(module), function)(rest)
    except ModuleNotFoundError as error:
        if (error.name or "dpngd").partition(".")[0] == "dpngd":
            raise
        raise UsageError(f"dpngd {name} needs the package {error.name!r}: in a checkout, pip install "
                         f"'.[{extra}]'") from None


def entry() -> int:
    """The console script. Also an interrupt during the imports is one word, not a traceback."""
    try:
        from dpngd.errors import exit_code

        code = exit_code(main)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # One of several processes, under torchrun. Its work is done and all is written; taking down the threads of
        # their connections now and then ends in an abort, which torchrun would report as a failed run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(entry())

"""One kind of error for what the caller can mend, and the exit code that goes with it."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn


class UsageError(ValueError):
    """Bad input. The message is one line: what is wrong, where, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows of it: that line, not the calls that led to it."""
        return [f"{type(self).__name__}: {self}"]


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def unknown(kind: str, name: object, valid: Iterable[str]) -> UsageError:
    """An error for a name that is not one of `valid`, with the nearest valid one suggested."""
    valid = sorted(valid)
    near = difflib.get_close_matches(str(name), valid, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {kind} {name!r}: {hint}valid are {', '.join(valid)}")


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a command line's `main`: bad input is one line on stderr and exit code 2, never a traceback."""
    try:
        return main() or 0
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader went away (`... | head`): not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the final flush has somewhere to go
        return 141

"""One kind of error for what the caller can correct, one parser, and the exit code that goes with them."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn


class UsageError(ValueError):
    """Bad input. The message is one line: what is wrong, where, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows of it: that line, not the calls that led to it."""
        return [f"{type(self).__name__}: {self}"]


class Parser(argparse.ArgumentParser):
    """Parses a command line; what is wrong with it is a UsageError of one line, with the nearest option suggested.

    No option may be abbreviated: an abbreviation that is unique today may not be tomorrow.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        found, other = self.parse_known_args(args, namespace)
        if not other:
            return found
        if not other[0].startswith("-"):
            raise UsageError(f"unexpected argument {other[0]!r}: options start with --")
        raise unknown("option", other[0].partition("=")[0], self._options())

    def _options(self) -> Iterator[str]:
        """The options of this parser and of its subcommands, each in its first spelling."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._options()
            elif action.option_strings and action.help != argparse.SUPPRESS:
                yield action.option_strings[0]


def unknown(kind: str, name: object, valid: Iterable[str]) -> UsageError:
    """An error for a name that is not one of `valid`, with the nearest valid one suggested."""
    valid = sorted(set(valid))
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
    except OSError as error:  # a full disk, a folder that is read-only, a folder where a file should be
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}; make room there, or name a place that can be read and written",
              file=sys.stderr)
        return 2

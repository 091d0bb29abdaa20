"""Progress of long commands: a bar on a terminal and in Jupyter, plain lines in a log file.

    say("quick: 120 runs to train, about 4 minutes")          the first line: what will happen, and for how long
    with bar(120, "runs", unit="run") as shown:               a bar with the time left
        shown.update()
    say("open figures/quick/index.html")                      the last line: where to look

All of it goes to stderr, so that stdout holds results only. On a terminal and in Jupyter the bar is tqdm's. Where
stderr is a file or a pipe it is `Lines`: a line every EVERY seconds and one at the end, without carriage returns. So it
is where tqdm (of the extra `train`) is not installed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TextIO, TypeVar

EVERY = 30.0  # seconds from one line of a log to the next
T = TypeVar("T")


class Bar(Protocol):
    """What tqdm's bar and `Lines` have in common."""

    n: float

    def __enter__(self) -> Bar: ...
    def __exit__(self, *error: object) -> object: ...
    def update(self, n: float = 1) -> object: ...
    def set_postfix(self, ordered_dict: dict[str, Any] | None = None, **values: Any) -> None: ...
    def set_postfix_str(self, text: str = "") -> None: ...


def say(line: str) -> None:
    """Write one line to stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def bar(total: float | None, what: str, *, unit: str = "", initial: float = 0, scale: bool = False, leave: bool = True,
        quiet: bool = False) -> Bar:
    """Return a bar of `total` units (None: unknown), to be used in a `with` statement.

    scale: count in thousands and millions of the unit (bytes). leave: keep it when done. quiet: show nothing.
    """
    file = sys.stderr
    if not quiet and is_live(file):
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            return tqdm(total=total, desc=what, unit=unit or "it", initial=initial, unit_scale=scale, leave=leave,
                        file=file, smoothing=0.1, dynamic_ncols=True)
    return Lines(total, what, unit=unit, initial=initial, scale=scale, leave=leave, file=None if quiet else file)


def over(items: Iterable[T], what: str, **options: Any) -> Iterator[T]:
    """Iterate over `items` under a bar; the options are those of `bar`."""
    items = list(items)
    with bar(len(items), what, **options) as shown:
        for item in items:
            yield item
            shown.update()


def is_live(file: TextIO) -> bool:
    """Whether a line of `file` can be drawn again: a terminal, or the output of a notebook's cell."""
    return file.isatty() or type(file).__module__.startswith("ipykernel")


class Lines:
    """A bar for log files: whole lines, one every EVERY seconds whether or not something moved, and one at the end."""

    def __init__(self, total: float | None, what: str, *, unit: str = "", initial: float = 0, scale: bool = False,
                 leave: bool = True, file: TextIO | None = None):
        self.total, self.what, self.unit, self.scale, self.leave, self.file = total, what, unit, scale, leave, file
        self.n, self.initial, self.postfix, self.said = initial, initial, "", 0
        self.started = time.monotonic()
        self.closed = threading.Event()

    def __enter__(self) -> Lines:
        if self.file is not None:
            threading.Thread(target=self._beat, daemon=True, name=f"progress of {self.what}").start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        if self.leave or self.said:
            self.write()

    def update(self, n: float = 1) -> None:
        self.n += n

    def set_postfix(self, ordered_dict: dict[str, Any] | None = None, **values: Any) -> None:
        self.postfix = ", ".join(f"{name} {value}" for name, value in {**(ordered_dict or {}), **values}.items())

    def set_postfix_str(self, text: str = "") -> None:
        self.postfix = text

    def line(self) -> str:
        """What a log shows: `runs: 12 of 40, 0:31 so far, about 1:12 left; failed 1`."""
        gone, done = time.monotonic() - self.started, self.n - self.initial
        left = total = ""
        if self.total is not None:
            total = f" of {self._count(self.total)}"
            left = f", about {clock(gone / done * (self.total - self.n))} left" if done and self.n < self.total else ""
        count = self._count(self.n) + total
        return f"{self.what}: {count}, {clock(gone)} so far{left}" + (f"; {self.postfix}" if self.postfix else "")

    def write(self) -> None:
        if self.file is not None:
            self.said += 1
            print(self.line(), file=self.file, flush=True)

    def _beat(self) -> None:
        while not self.closed.wait(EVERY):
            self.write()

    def _count(self, n: float) -> str:
        if not self.scale:
            return f"{n:,}"
        size, prefix = next(((s, p) for s, p in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if n >= s), (1.0, ""))
        return f"{n / size:.4g} {prefix}{self.unit}"


def outlook(total: int, seconds: Iterable[float], workers: int, what: str = "runs") -> str:
    """Say how many of `total` runs are to be trained, and for how long: `seconds` has the expected time of each."""
    times = list(seconds)
    if not times:
        return f"{total} {what}, none to train"
    return (f"{len(times)} of {total} {what} to train, about {span(sum(times) / min(workers, len(times)))} with "
            f"{workers} worker{'s' if workers > 1 else ''}")


def clock(seconds: float) -> str:
    """Write seconds as m:ss or h:mm:ss."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def span(seconds: float) -> str:
    """Write an estimate in words: 40 seconds, 3 minutes, 1.5 hours, 4 days."""
    for size, word, digits in ((172_800, "days", 0), (5400, "hours", 1), (90, "minutes", 0)):
        if seconds >= size:
            unit = {"days": 86_400, "hours": 3600, "minutes": 60}[word]
            return f"{seconds / unit:.{digits}f} {word}"
    return f"{max(1, round(seconds))} seconds"

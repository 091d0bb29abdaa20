"""Files and what may be put into them: whole or not at all, and numbers that JSON can hold. Standard library only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from dpngd.errors import UsageError


def write_atomically(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file so that a reader, a crash or a power cut sees the old or the new one, no third.

    `content` is text (written as UTF-8), bytes, or a function that writes to the open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name itself is data of the folder
    finally:
        os.close(folder)


def read_json(path: Path, remedy: str) -> Any:
    """What a JSON file holds; a UsageError where it is damaged or cut short."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path.parent.name}/{path.name} is damaged or cut short ({error}): {remedy}") from None


def finite_or_none(value: float | None) -> float | None:
    """The number, or None for NaN and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def checkout() -> Path | None:
    """The folder of the git checkout (or unpacked source) that this package runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "params").is_dir() else None

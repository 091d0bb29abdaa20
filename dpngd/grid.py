"""Grids of a search as params/*.yaml writes them: axes, blocks of axes, and the points that they stand for."""

from __future__ import annotations

import itertools
from typing import Any

from dpngd.errors import UsageError

Grid = dict[str, list] | list[dict[str, list]]
"""A table of axis: [values], or several such blocks."""


def place(data: str, model: str | None = None) -> str:
    """Where the winners of a search stand: under the data set, or under it and the network."""
    return f"{data}/{model}" if model else data


def blocks(grid: Grid) -> list[dict[str, list]]:
    """A grid as its blocks: one table of axes, or several, where one number of steps is searched more widely."""
    found = grid if isinstance(grid, list) else [grid]
    if not all(isinstance(block, dict) and all(isinstance(v, list) and v for v in block.values()) for block in found):
        raise UsageError(f"grid {grid!r}: must be a table of axis: [values], or a list of such tables")
    return found


def points(grid: Grid) -> list[dict[str, Any]]:
    """All combinations of each block of a grid, as what each sets; one that two blocks have counts once."""
    found: list[dict[str, Any]] = []
    for block in blocks(grid):
        for values in itertools.product(*block.values()):
            point: dict[str, Any] = {}
            for axis, value in zip(block, values, strict=True):
                point |= joint(axis, value)
            if point not in found:
                found.append(point)
    return found


def joint(name: str, value: Any) -> dict[str, Any]:
    """The changes that one value of an axis stands for; an axis like C0+C1 sets several fields together."""
    parts = name.split("+")
    if len(parts) == 1:
        return {name: value}
    if not isinstance(value, list) or len(value) != len(parts):
        raise UsageError(f"{name}: {value!r} must be a list of {len(parts)} values")
    return dict(zip(parts, value, strict=True))

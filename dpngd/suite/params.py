"""params/*.yaml: reading them, laying one over another, and looking up the value of a cell.

`paper.yaml` is complete. Any other profile overrides some of it, and a key that is not in paper.yaml is an error;
`published.yaml` holds the paper's numbers, `deviations.yaml` what it leaves open and what we take. What `dpngd tune`
writes:

    tuned/<profile>.yaml          what the search chose: DP-SGD's rate by data set, epsilon and T (`eta_sgd`), and for
                                  every method by data set and epsilon its T, its own values and, but for DP-NGD, `rate`
    tuned/<profile>-trials.yaml   the trials that followed from earlier ones: the second round, and the finalists
    tuned/<profile>-gate.yaml     what the gate measured, and the N and B that passed
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import yaml

from dpngd.errors import UsageError, unknown
from dpngd.suite import paths

DEPTH = {"defaults": 1, "data": 2, "methods": 2, "artifacts": 2, "gate": 1, "tuning": 1, "tuning_networks": 1,
         "tuning_between": 1, "cost": 1, "resources": 1}  # below, values are whole
SEARCHES = ("tuning", "tuning_networks", "tuning_between")
"""The grid searches: on the profile's networks, on another one, and at an epsilon between those of the first."""


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error; plain YAML would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_params(name: str) -> dict[str, Any]:
    """params/<name>.yaml as plain values."""
    path = paths.PARAMS / f"{name}.yaml"
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (ValueError, TypeError, RecursionError) as error:  # not UTF-8, a date that is none, a list as a key
        raise UsageError(f"{path.name} cannot be read ({error}): correct it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path.name}{where}: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path.name} must hold keys and values")
    return values


def profile_names() -> list[str]:
    """The profiles there are."""
    return sorted(path.stem for path in paths.PARAMS.glob("*.yaml") if path.stem not in ("published", "deviations"))


@functools.cache
def published() -> dict[str, Any]:
    """The paper's own numbers (params/published.yaml)."""
    return read_params("published")


def deviations() -> list[dict[str, str]]:
    """What the paper leaves open and what we take (params/deviations.yaml): topic, open, take, why, perhaps switch."""
    return read_params("deviations")["rows"]


def settings(name: str) -> dict[str, Any]:
    """The settings of a profile: paper.yaml under the profile's overrides."""
    if name not in profile_names():
        raise unknown("profile", name, profile_names())
    paper = read_params("paper")
    merged = paper if name == "paper" else merge(paper, read_params(name), f"{name}.yaml")
    return {**merged, "tuned": written(name), "trials": written(name, "-trials"), "gated": written(name, "-gate")}


def written(name: str, which: str = "") -> dict[str, Any]:
    """What `dpngd tune` left in params/tuned/<name><which>.yaml; nothing where it was not run."""
    file = f"tuned/{name}{which}"
    return read_params(file) if (paths.PARAMS / f"{file}.yaml").exists() else {}


def digest(settings: Mapping[str, Any]) -> str:
    """Of the grid and of every setting that its trials take: what a search chose is good for these alone.

    Not in it: seeds and cells of tables, methods that are not searched for, costs. They may change after the tuning.
    """
    searches = [search for search in SEARCHES if settings[search]["cells"] or not settings[search].get("apart")]
    methods = {m for search in searches for m in settings[search]["grid"]}
    cells = {d for search in searches for d in settings[search]["cells"]}
    taken = {"defaults": settings["defaults"], "data": {d: settings["data"][d] for d in sorted(cells)},
             "methods": {m: settings["methods"][m] for m in sorted(methods)}, **{s: settings[s] for s in searches}}
    return hashlib.sha256(json.dumps(_plain(taken), sort_keys=True).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """With every key a text: YAML has epsilons as keys, which JSON would not sort beside names."""
    if isinstance(value, Mapping):
        return {f"{k:g}" if isinstance(k, int | float) else str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def merge(base: Mapping, over: Mapping, file: str, path: tuple[str, ...] = (), depth: int | None = None) -> dict:
    """`base` with the values of `over`. Sections are merged key by key, a setting inside them is replaced whole."""
    merged = dict(base)
    for key, value in over.items():
        place = (*path, str(key))
        if key not in base:
            raise UsageError(f"{file}: {unknown('key', '.'.join(place), ['.'.join((*path, k)) for k in base])}")
        below = DEPTH.get(key, 0) if depth is None else depth - 1
        if below > 0:
            if not isinstance(value, Mapping):
                raise UsageError(f"{file}: {'.'.join(place)} must be a section, not {value!r}")
            value = merge(base[key], value, file, place, below)
        merged[key] = value
    return merged


def states(over: Mapping, place: tuple[str, ...]) -> bool:
    """Whether a profile's own file (not paper.yaml under it) has the setting at this place."""
    for key in place:
        if not isinstance(over, Mapping) or key not in over:
            return False
        over = over[key]
    return True


def pick(value: Any, data: str, epsilon: float, name: str, method: str) -> Any:
    """A setting in one cell: itself, or its entry for the data set, and in that the nearest epsilon's."""
    if isinstance(value, Mapping):
        if data not in value:
            raise UsageError(f"{name} of {method} is not stated for {data}, only for {', '.join(value)}")
        value = value[data]
        if isinstance(value, Mapping):
            value = nearest(value, epsilon)
    return value


def nearest(table: Mapping[float, Any], epsilon: float) -> Any:
    """The entry of the nearest epsilon on a log scale; of two as near, the smaller's."""
    return table[min(table, key=lambda stated: (abs(math.log(stated / epsilon)), stated))]


def interpolated(table: Mapping[int, float], T: int) -> float:
    """A rate at T from a table by T: log-log between two of its rows, and its first or last row outside of them."""
    rows = sorted(table)
    if rows[0] >= T or rows[-1] <= T:
        return table[min(max(T, rows[0]), rows[-1])]
    high = next(t for t in rows if t >= T)
    low = rows[rows.index(high) - 1]
    share = math.log(T / low) / math.log(high / low)
    return table[low] ** (1 - share) * table[high] ** share


def number(value: float) -> float:
    """A derived number to 6 digits: readable, and the same on every machine."""
    return float(f"{value:.6g}")

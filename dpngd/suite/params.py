"""params/*.yaml: reading them, laying one over another, and looking up the value of a cell.

`paper.yaml` is complete. Any other profile overrides some of it, and a key that is not in paper.yaml is an error;
`published.yaml` holds the paper's numbers, and `tuned/<profile>.yaml` what its grid search chose, from the settings in
`tuned/<profile>-finalists.yaml`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import yaml

from dpngd.errors import UsageError, unknown
from dpngd.suite import paths

DEPTH = {"defaults": 1, "data": 2, "methods": 2, "artifacts": 2, "tuning": 1, "tuning_networks": 1,
         "cost": 1}  # below, values are whole


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
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path.name}{where}: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path.name} must hold keys and values")
    return values


def profile_names() -> list[str]:
    """The profiles there are."""
    return sorted(path.stem for path in paths.PARAMS.glob("*.yaml") if path.stem != "published")


@functools.cache
def published() -> dict[str, Any]:
    """The paper's own numbers (params/published.yaml)."""
    return read_params("published")


def settings(name: str) -> dict[str, Any]:
    """The settings of a profile: paper.yaml under the profile's overrides."""
    if name not in profile_names():
        raise unknown("profile", name, profile_names())
    paper = read_params("paper")
    merged = paper if name == "paper" else merge(paper, read_params(name), f"{name}.yaml")
    return {**merged, "tuned": stored_winners(name), "finalists": stored_finalists(name)}


def stored_winners(name: str) -> dict[str, Any]:
    """What the profile's grid search chose, by method and data set; nothing where it was not run."""
    return _written(f"tuned/{name}")


def stored_finalists(name: str) -> dict[str, Any]:
    """The best settings of the search's first round, best first, by method and data set."""
    return _written(f"tuned/{name}-finalists")


def _written(name: str) -> dict[str, Any]:
    return read_params(name) if (paths.PARAMS / f"{name}.yaml").exists() else {}


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
            value = value[min(value, key=lambda stated: (abs(math.log(stated / epsilon)), stated))]
    return value


def number(value: float) -> float:
    """A derived number to 6 digits: readable, and the same on every machine."""
    return float(f"{value:.6g}")

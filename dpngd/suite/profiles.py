"""Profiles: params/*.yaml -> the RunConfigs behind each table and figure.

All configs of a profile come from `Profile.config`, so two figures that need the same run ask for the same key.

The Euclidean step rule (section 3.3 of the paper, for every method; see the comment in paper.yaml):

    eta * S * lambda_safe^-r = eta_sgd * C_sgd

| symbol | meaning |
| --- | --- |
| S | the largest norm of a clipped sample: C, or sqrt(C0^2 + C1^2) for GEP |
| l, r | powers of F^-1 before the clipping and in the map back (the method's `left` and `right`, negated) |
| eta_sgd, C_sgd | rate and clipping threshold of DP-SGD in the same cell |

On top of that come the winners of the profile's own grid search, `settings["tuned"]` (params/tuned/<profile>.yaml,
written by `dpngd.tuning`): a factor `rate` on that eta, a factor `T` on the steps, and the method's own parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpngd import clamping
from dpngd.data.sets import own_kind
from dpngd.errors import UsageError, unknown
from dpngd.methods import METHODS
from dpngd.suite import params
from dpngd.suite.params import number, pick, profile_names
from dpngd.training.config import DIGESTS, FIELDS, METHOD_FIELDS, RunConfig, in_interval

__all__ = ["Profile", "load", "profile_names"]

_CELL = ("method", "data", "epsilon", "seed")
_COMMON = tuple(n for n in FIELDS if n not in (*METHOD_FIELDS, *DIGESTS, *_CELL, "eta"))
SHAPES = {"methods": list, "cells": dict, "vary": dict, "seeds": list | None, "grid": dict, "arms": dict,
          "repeat": dict}
SEARCHES = ("tuning", "tuning_networks")  # the grid searches: on the profile's networks, and on another one
Names = Sequence[str] | None
Place = tuple[str, ...]
"""Where a setting is stated, as keys of the settings: ("methods", "dp-ngd", "T")."""
Origin = tuple[str | Place, ...]
"""Where a value comes from, in words and places, for `Profile.resolve`."""
GIVEN, EQUATION, TUNED, DEFAULT = "given", "equation (section 3.3)", "tuned", "default of RunConfig"


def load(name: str) -> Profile:
    """The profile `name`: paper, cpu, quick, or another params/<name>.yaml."""
    return Profile(name, params.settings(name))


@dataclass(frozen=True)
class Profile:
    """A named set of settings, and the runs that follow from it."""

    name: str
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.seeds, list) or not self.seeds:
            raise UsageError(f"{self.name}: seeds = {self.seeds!r} must be a list")
        for name, section in {**self.settings["artifacts"], **{s: self.settings[s] for s in SEARCHES}}.items():
            self._check(name, section)
        chosen = [(m, where, axes) for m, by_place in self.settings["tuned"].items()
                  for where, axes in by_place.items()]
        chosen += [(m, where, axes) for m, by_place in self.settings["finalists"].items()
                   for where, best in by_place.items() for axes in best]
        for method, where, axes in chosen:
            for kind, name, valid in (("method", method, METHODS),
                                      ("data set", where.partition("/")[0], self.settings["data"]),
                                      *(("field", n, [*FIELDS, "rate"]) for n in axes)):
                if name not in valid:
                    raise UsageError(f"tuned/{self.name}.yaml: {unknown(kind, name, valid)}")
        searches = [self.settings[s] for s in SEARCHES]
        reused = {seed for s in searches for seed in (*s["seeds"], *s["repeat"]["seeds"])} & set(self.seeds)
        if reused:
            raise UsageError(f"{self.name}: seed {min(reused)} is used for tuning and for results")

    def _check(self, name: str, section: dict[str, Any]) -> None:
        """Forms and names in the section of an artifact: a name that nothing reads would change nothing, silently."""
        for key, kind in SHAPES.items():
            if key in section and not isinstance(section[key], kind):
                raise UsageError(f"{self.name}: {name}.{key} = {section[key]!r} has the wrong form")
        grids = (block for grid in section.get("grid", {}).values() for block in blocks(grid))
        axes = [section.get("vary", {}), *grids]
        used = {
            "method": [*section.get("methods", []), *section.get("grid", {})],
            "data set": section["cells"],
            "field": [part for axis in axes for joint in axis for part in joint.split("+")],
        }
        valid = {"method": METHODS, "data set": self.settings["data"], "field": [*FIELDS, "rate"]}
        for kind, given in used.items():
            for item in given:
                if item not in valid[kind]:
                    raise UsageError(f"{self.name}: {name}: {unknown(kind, item, valid[kind])}")

    @property
    def about(self) -> str:
        return self.settings["about"]

    @property
    def seeds(self) -> list[int]:
        return self.settings["seeds"]

    @property
    def artifacts(self) -> list[str]:
        """The names that `configs` takes."""
        return [*self.settings["artifacts"], *(s for s in SEARCHES if self.settings[s]["grid"])]

    def artifact(self, name: str) -> dict[str, Any]:
        """The section of a table or figure: methods, cells, vary, seeds."""
        if name not in self.artifacts:
            raise unknown("artifact", name, self.artifacts)
        if name in SEARCHES:
            return {"methods": list(self.settings[name]["grid"]), "vary": {}, **self.settings[name]}
        return self.settings["artifacts"][name]

    def setting(self, name: str, method: str, data: str, epsilon: float) -> Any:
        """A value by the first of method, the method it is an arm of, data set and defaults that has one."""
        return self._find(name, method, data, epsilon)[0]

    def _find(self, name: str, method: str, data: str, epsilon: float) -> tuple[Any, Place]:
        """The same with the place that states it; (None, ()) where none does."""
        places: list[Place] = [("methods", method), ("data", data), ("defaults",)]
        if METHODS[method].arm_of:
            places.insert(1, ("methods", METHODS[method].arm_of))
        for place in places:
            section = functools.reduce(dict.__getitem__, place, self.settings)
            value = pick(section.get(name), data, epsilon, name, method)
            if value is not None:
                return value, (*place, name)
        return None, ()

    def config(self, method: str, data: str, epsilon: float, seed: int, **changes: Any) -> RunConfig:
        """The run of one cell. `changes` are fields of the config, or `rate`, a factor on the learning rate."""
        return self._checked(method, data, epsilon, seed, changes)[0]

    def resolve(self, method: str, data: str, epsilon: float, seed: int, **changes: Any,
                ) -> tuple[RunConfig, dict[str, str]]:
        """The same run, and for each of its values where it comes from: given, a file of params/, the search's winners
        (tuned), the equation of the module's docstring, or the default of RunConfig."""
        config, origins = self._checked(method, data, epsilon, seed, changes)
        stated = {} if self.name == "paper" else params.read_params(self.name)

        def spell(part: str | Place) -> str:
            if isinstance(part, tuple):
                return f"params/{self.name if params.states(stated, part) else 'paper'}.yaml ({'.'.join(part)})"
            return f"tuned (params/tuned/{self.name}.yaml)" if part == TUNED else part

        return config, {n: ", ".join(map(spell, origins.get(n) or (DEFAULT,))) for n in config.canonical()}

    def _checked(self, method: str, data: str, epsilon: float, seed: int, changes: dict[str, Any],
                 ) -> tuple[RunConfig, dict[str, Origin]]:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if data not in self.settings["data"] and own_kind(data) is None:
            raise unknown("data set", data, [*self.settings["data"], "npz:PATH", "folder:PATH"])
        for name in changes:
            if name not in FIELDS and name != "rate":
                raise unknown("field", name, [*FIELDS, "rate"])
        tuned = self.tuned(method, self.like(data), changes.get("model"))
        return self._resolve(method, data, epsilon, seed, tuned, changes)

    def like(self, data: str) -> str:
        """The data set whose settings a run takes: itself, or for a user's own data the profile's first."""
        return data if own_kind(data) is None else next(iter(self.settings["artifacts"]["utility_table"]["cells"]))

    def tuned(self, method: str, data: str, model: str | None = None) -> dict[str, Any]:
        """What the grid search chose: `rate` and `T`, which are factors, and the method's own parameters.

        An arm of DP-NGD has DP-NGD's, and its own rate is a factor on that. A network that was searched for itself
        has what was chosen for it, any other one what was chosen on the data set.
        """
        winners = self.settings["tuned"].get(method, {})
        base = self.tuned(METHODS[method].arm_of, data, model) if METHODS[method].arm_of else {}
        own = winners.get(place(data, model)) or winners.get(data, {})
        return {**base, **own, "rate": base.get("rate", 1.0) * own.get("rate", 1.0)}

    def _resolve(self, method: str, data: str, epsilon: float, seed: int, tuned: dict, changes: dict,
                 ) -> tuple[RunConfig, dict[str, Origin]]:
        """Every value of a run with its origin, the later ones before the earlier: settings, tuned, equation, given."""
        if not in_interval(epsilon, "(0, inf)"):
            raise UsageError(f"epsilon = {epsilon!r}: must be in (0, inf)")
        cell = {"method": method, "data": data, "epsilon": epsilon, "seed": seed}
        changes = {n: v for n, v in changes.items() if v is not None}  # null in a list of values: as it is elsewhere
        rate = tuned.get("rate", 1.0) * changes.pop("rate", 1.0)
        wanted = (*_COMMON, *METHODS[method].uses)
        own = {n: v for n, v in tuned.items() if n not in ("rate", "T")}
        like = self.like(data)
        stated = {n: self._find(n, method, like, epsilon) for n in wanted if n != "N" or like == data}
        values = {n: value for n, (value, _) in stated.items()}
        origins: dict[str, Origin] = {n: (place,) for n, (_, place) in stated.items() if place}
        if "T" in tuned:
            values["T"] = max(1, round(tuned["T"] * values["T"]))
            origins["T"] = (*origins["T"], f"times {tuned['T']:g}", TUNED) if tuned["T"] != 1 else origins["T"]
        values |= {n: v for n, v in own.items() if n in wanted} | changes
        derived = {}
        if METHODS[method].rate:  # a method with a KL budget has none: everything about it is stated
            derive = self._whitened if METHODS[method].second_order else self._plain
            derived = derive(values, method, like, epsilon, own | changes)
            eta, origin = derived["eta"]
            derived["eta"] = number(eta * rate), (*origin, *((f"times {rate:g}", TUNED) if rate != 1 else ()))
        derived = {n: d for n, d in derived.items() if n not in changes and n in (*wanted, "eta")}
        values |= {n: value for n, (value, _) in derived.items()}
        origins |= {n: origin for n, (_, origin) in derived.items()} | dict.fromkeys(own, (TUNED,))
        origins |= dict.fromkeys(DIGESTS, ("content of the files",)) | dict.fromkeys((*cell, *changes), (GIVEN,))
        if "evals" not in changes and values["evals"] > values["T"]:
            values["evals"], origins["evals"] = values["T"], (*origins["evals"], "at most T")
        return RunConfig.from_dict({**values, **cell}), origins

    def _sgd(self, method: str, data: str, epsilon: float) -> tuple[float, float]:
        """eta_sgd and C_sgd: rate and clipping threshold of DP-SGD in this cell, whose product bounds its step."""
        eta = self.setting("eta_sgd", method, data, epsilon) or self.setting("eta", "dp-sgd", data, epsilon)
        return eta, self.setting("C", "dp-sgd", data, epsilon)

    def _plain(self, values: dict, method: str, data: str, epsilon: float, changes: dict,
               ) -> dict[str, tuple[float, Origin]]:
        """eta of a first-order method: as stated, or by the rule with r = 0."""
        eta, place = self._find("eta", method, data, epsilon)
        S = values["C"] if "C" in values else math.hypot(values["C0"], values["C1"])
        if eta is not None:
            return {"eta": (eta, (place,))}
        return {"eta": (math.prod(self._sgd(method, data, epsilon)) / S, (EQUATION,))}

    def _whitened(self, values: dict, method: str, data: str, epsilon: float, changes: dict,
                  ) -> dict[str, tuple[float, Origin]]:
        """eta, C, lambda_safe and lambda_base of DP-NGD and its arms, by the equation, from eta or lambda_safe."""
        find = functools.partial(self._find, data=data, epsilon=epsilon)
        eta, (safe, place) = find("eta", "dp-ngd")[0], find("lambda_safe", "dp-ngd")
        C, C_place = find("C", "dp-ngd")
        if (eta is None) == (safe is None):
            raise UsageError(f"{self.name}: dp-ngd must state eta or lambda_safe, the other one follows from it")
        if safe is None:
            safe, place = clamping.lambda_safe(eta, C, *self._sgd("dp-ngd", data, epsilon)), EQUATION
        for value, origin in (find("lambda_safe", method), (changes.get("lambda_safe"), GIVEN)):
            safe, place = (value, origin) if value else (safe, place)
        entry = METHODS[method]
        stated = pick(self.settings["methods"][method]["C"], data, epsilon, "C", method)
        if changes.get("C") or stated:
            C, C_place = changes.get("C") or stated, ("methods", method, "C")
        elif entry.left != -0.5:
            C, C_place = C * safe ** (0.5 + entry.left), EQUATION
        ratio, ratio_place = find("lambda_base_ratio", "dp-ngd")
        return {
            "eta": (clamping.eta_ngd(safe, C, *self._sgd(method, data, epsilon), right=entry.right), (EQUATION,)),
            "C": (number(C), (C_place,)),
            "lambda_safe": (number(safe), (place,)),
            "lambda_base": (number(safe * ratio), ("lambda_safe times lambda_base_ratio", ratio_place)),
        }

    def configs(
        self,
        artifact: str,
        *,
        methods: Names = None,
        datasets: Names = None,
        epsilons: Sequence[float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[RunConfig]:
        """The runs behind a table or figure, each once. What is given replaces the profile's choice."""
        section = self.artifact(artifact)
        given = {"methods": methods, "datasets": datasets, "epsilons": epsilons, "seeds": seeds}
        for name, value in given.items():
            if value is not None and (isinstance(value, str) or not isinstance(value, Sequence) or not value):
                raise UsageError(f"{name} = {value!r}: give a list, or None for the profile's")
        shown = dict.fromkeys(d for a in self.settings["artifacts"].values() for d in a["cells"])
        if other := [d for d in datasets or () if d in self.settings["data"] and d not in shown]:
            raise UsageError(f"datasets = {list(datasets)}: the profile {self.name} has no settings for {other[0]}, "
                             f"only for {', '.join(shown)}; take another profile")
        stated = section["cells"]
        every = sorted({e for row in stated.values() for e in row})
        cells = {d: epsilons or stated.get(d, every) for d in (datasets or stated)}
        found: dict[str, RunConfig] = {}
        for method in methods or section["methods"]:
            for data, row in cells.items():
                for epsilon, seed in itertools.product(row, seeds or section["seeds"] or self.seeds):
                    for config in self._runs(artifact, section, method, data, epsilon, seed):
                        found.setdefault(config.key(), config)
        return list(found.values())

    def _runs(
        self, artifact: str, section: dict, method: str, data: str, epsilon: float, seed: int
    ) -> Iterable[RunConfig]:
        if artifact in SEARCHES:
            yield from (config for _, config in self.trials(method, data, epsilon, seed, artifact))
            for _, configs in self.repeats(method, data, epsilon, artifact):
                yield from configs
        else:
            for changes in self._variants(artifact, section, method, data, epsilon):
                yield self.config(method, data, epsilon, seed, **changes)

    def _variants(self, artifact: str, section: dict, method: str, data: str, epsilon: float) -> Iterable[dict]:
        """The changes to a cell's settings that an artifact asks for."""
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        reads = {*_COMMON, *METHODS[method].uses, "eta", "rate"}
        for name, values in section["vary"].items() or [("", ())]:
            if not reads & set(name.split("+")):
                yield {}  # a method without that field runs as it is
                continue
            for value in pick(values, data, epsilon, f"{name} of {artifact}", method):
                yield {n: v for n, v in joint(name, value).items() if n in reads}

    def trials(
        self, method: str, data: str, epsilon: float, seed: int, search: str = "tuning"
    ) -> list[tuple[dict[str, Any], RunConfig]]:
        """The grid search of a method: what each trial sets `rate`, `T` and its own parameters to, and its run.

        `rate` and `T` are factors on the settings before any tuning. An arm starts from what was chosen for its
        method: it has no trials before that, and only on the data sets that `arms` names for it.
        """
        section, base, arm_of = self.settings[search], {}, METHODS[method].arm_of
        if method not in section["grid"]:
            raise unknown("method in the tuning grid", method, section["grid"])
        if arm_of:
            if data not in section["arms"].get(method, []) or data not in self.settings["tuned"].get(arm_of, {}):
                return []
            base = self.tuned(arm_of, data)
        return [(axes, self._trial(section, method, data, epsilon, seed, base, axes))
                for axes in points(section["grid"][method])]

    def _trial(self, section: dict, method: str, data: str, epsilon: float, seed: int, base: dict, axes: dict,
               ) -> RunConfig:
        tuned = {**base, **axes, "rate": base.get("rate", 1.0) * axes.get("rate", 1.0)}
        changes = {n: section[n] for n in ("validation", "evals", "model")}
        return self._resolve(method, data, epsilon, seed, tuned, changes)[0]

    def repeats(
        self, method: str, data: str, epsilon: float, search: str = "tuning"
    ) -> list[tuple[dict[str, Any], list[RunConfig]]]:
        """The second round: the best settings of the first one (`settings["finalists"]`), once more with other seeds.

        A setting that was best with one seed may be lucky, or on the brink of instability.
        """
        section, arm_of = self.settings[search], METHODS[method].arm_of
        base = self.tuned(arm_of, data) if arm_of else {}
        finalists = self.settings["finalists"].get(method, {}).get(place(data, section["model"]), [])
        return [(axes, [self._trial(section, method, data, epsilon, seed, base, axes)
                        for seed in section["repeat"]["seeds"]]) for axes in finalists]

    def all_configs(self) -> list[RunConfig]:
        """Every run of the profile, each once."""
        configs = (config for name in self.artifacts for config in self.configs(name))
        return list({config.key(): config for config in configs}.values())

    def seconds(self, config: RunConfig) -> float:
        """How long a run is expected to take on the profile's device."""
        order = "second_order" if METHODS[config.method].second_order else "first_order"
        return config.T * pick(self.settings["cost"][order], config.data, config.epsilon, order, config.method)


# ---- Grids of a search as params/*.yaml writes them: axes, blocks of axes, and their points --------

Grid = dict[str, list] | list[dict[str, list]]
"""A table of axis: [values], or several such blocks."""


def place(data: str, model: str | None = None) -> str:
    """The place of a search's winners: under the data set, or under it and the network."""
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
    """The changes that one value of an axis means; an axis like C0+C1 sets several fields together."""
    parts = name.split("+")
    if len(parts) == 1:
        return {name: value}
    if not isinstance(value, list) or len(value) != len(parts):
        raise UsageError(f"{name}: {value!r} must be a list of {len(parts)} values")
    return dict(zip(parts, value, strict=True))

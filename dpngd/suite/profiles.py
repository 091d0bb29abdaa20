"""Profiles: params/*.yaml -> the RunConfigs behind each table and figure.

All configs of a profile come from `Profile.config`, so two figures that need the same run ask for the same key.

Every rate comes from one equation (section 3.3 of the paper, for every method; `clamping.eta_ngd`):

    eta * S * lambda_safe^r = rate * eta_sgd * C_sgd

| symbol | meaning |
| --- | --- |
| S | the largest norm of a clipped sample: C, or sqrt(C0^2 + C1^2) for GEP |
| r | the power of F in the map back (the method's `right`): -1/2 for DP-NGD, 0 where nothing is mapped back |
| eta_sgd, C_sgd | rate of DP-SGD, tuned at this epsilon and this T, and its clipping threshold |
| rate | a factor that the search chose for a baseline or for an arm of DP-NGD; for DP-NGD itself it is 1 |

What the profile's grid search chose is in `settings["tuned"]` (params/tuned/<profile>.yaml, written by `dpngd.tuning`):
DP-SGD's rates by T, and by method its steps T, its own values and its `rate`. An epsilon takes what was chosen at the
nearer one on a log scale. Where T is another one than was chosen, eta_sgd is that of this T: between two T's at which
DP-SGD was tuned by log-log interpolation. So every method's rate moves with DP-SGD's. With fewer steps than were chosen
the factor `rate` is 1: it corrects eta_sgd at the T that it was found at, and was too large at smaller ones
(docs/protocol.md, log, 2026-11-19).

Two changes are factors, not fields. `rate` multiplies eta alone, in place of the chosen one: for DP-NGD it breaks the
equation, and only the artifact `bound` may ask for that. `scale` multiplies eta and, squared, the floors: it keeps it.
Two more say which settings a run takes: `search` names a search that keeps its winners apart from all others, and
`choice: mean` asks for the finalist with the best mean, in place of the one that the search's rule chose.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpngd import clamping
from dpngd.data.sets import own_kind
from dpngd.errors import UsageError, unknown
from dpngd.methods import METHODS
from dpngd.suite import params
from dpngd.suite.params import SEARCHES, number, pick, profile_names
from dpngd.training.config import DIGESTS, FIELDS, METHOD_FIELDS, RunConfig, in_interval

__all__ = ["Profile", "load", "profile_names"]

_CELL = ("method", "data", "epsilon", "seed")
_COMMON = tuple(n for n in FIELDS if n not in (*METHOD_FIELDS, *DIGESTS, *_CELL, "eta"))
FACTORS = ("rate", "scale", "lambda_base_ratio")  # what a change may name beside the fields of RunConfig
SEARCH = "search"  # and the search that it takes its settings from
CHOICE = "choice"  # and how these were chosen among the search's finalists: one of CHOSEN_BY, else by the search's rule
CHOSEN_BY = {"mean": "by_mean"}  # the best mean; where params/tuned/<profile>.yaml has what was chosen so
NAMES = (*FIELDS, *FACTORS, SEARCH, CHOICE)
GATE = "gate"
FIXED = (GATE, *SEARCHES)  # artifacts that are the profile's own: fewer methods or cells would not be a fair search
SHAPES = {"methods": list, "cells": dict, "vary": dict, "seeds": list | None, "grid": dict, "arms": dict, "curve": dict,
          "finalists": dict, "second": int, "fixed": list, "N": dict, "B": list, "rates": list, "points": dict}
BREAKS = "bound"  # the artifact that studies what happens where the equation is broken
Names = Sequence[str] | None
Place = tuple[str, ...]
"""Where a setting is stated, as keys of the settings: ("methods", "dp-ngd", "T")."""
Origin = tuple[str | Place, ...]
"""Where a value comes from, in words and places, for `Profile.resolve`."""
Sgd = Callable[[str], dict[str, tuple[float, Origin]]]
"""Method -> eta_sgd and C_sgd of its equation."""
Trial = tuple[dict[str, Any], RunConfig]
"""What a trial of a search sets, and its run."""
GIVEN, EQUATION, TUNED, DEFAULT = "given", "equation (section 3.3)", "tuned", "default of RunConfig"


def load(name: str) -> Profile:
    """The profile `name`: paper, cpu, quick, or another params/<name>.yaml, with what its search chose.

    Values that were chosen for other settings than the profile has now are refused.
    """
    settings = params.settings(name)
    for which in ("tuned", "trials"):
        stored = settings[which].get("digest")
        if settings[which] and stored != params.digest(settings):
            file = f"tuned/{name}{'' if which == 'tuned' else '-trials'}.yaml"
            raise UsageError(f"{file} was chosen for other settings or another grid than params/{name}.yaml has now: "
                             f"undo that change, or run `dpngd tune {name}` again")
    return Profile(name, settings)


def untuned(name: str) -> Profile:
    """The profile as stated, without what a search chose: where a search starts."""
    return Profile(name, {**params.settings(name), "tuned": {}, "trials": {}})


@dataclass(frozen=True)
class Profile:
    """A named set of settings, and the runs that follow from it."""

    name: str
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.seeds, list) or not self.seeds:
            raise UsageError(f"{self.name}: seeds = {self.seeds!r} must be a list")
        for name, section in {**self.settings["artifacts"], **{s: self.settings[s] for s in FIXED}}.items():
            self._check(name, section)
        self._check_chosen()
        shown = {s: name for name, a in self.settings["artifacts"].items() for s in a["seeds"] or ()}
        shown |= dict.fromkeys(self.seeds, "results")
        for search in FIXED:
            section = self.settings[search]
            for seed in (*section["seeds"], *section.get("finalists", {}).get("seeds", [])):
                if seed in shown:
                    raise UsageError(f"{self.name}: seed {seed} is used for tuning and for {shown[seed]}")
        for where, seeds in (("seeds", self.seeds), *((f"{n}.seeds", a["seeds"] or [])
                                                      for n, a in self.settings["artifacts"].items())):
            check_once(f"{self.name}: {where}", seeds)

    def _check(self, name: str, section: dict[str, Any]) -> None:
        """Forms and names in the section of an artifact: a name that nothing reads would change nothing, silently."""
        for key, kind in SHAPES.items():
            if key in section and not isinstance(section[key], kind):
                raise UsageError(f"{self.name}: {name}.{key} = {section[key]!r} has the wrong form")
        grids = {m: blocks(grid) for m, grid in section.get("grid", {}).items()}
        axes = [section.get("vary", {}), *itertools.chain(*grids.values())]
        used = {
            "method": [*section.get("methods", []), *grids, *section.get("arms", {})],
            "data set": [*section["cells"], *section.get("curve", {})],
            "field": [part for axis in axes for joint in axis for part in joint.split("+")],
        }
        valid = {"method": METHODS, "data set": self.settings["data"], "field": NAMES}
        for kind, given in used.items():
            for item in given:
                if item not in valid[kind]:
                    raise UsageError(f"{self.name}: {name}: {unknown(kind, item, valid[kind])}")
        for part in ("N", "points") if name == GATE else ():
            for data in section["cells"]:
                if data not in section[part]:
                    raise UsageError(f"{self.name}: gate.{part} is not stated for {data}")
        for search in section.get("vary", {}).get(SEARCH, []):
            if search not in SEARCHES or not self.settings[search].get("apart"):
                apart = [s for s in SEARCHES if self.settings[s].get("apart")]
                raise UsageError(f"{self.name}: {name}.vary.{SEARCH}: {unknown('search', search, apart)}")
        for choice in section.get("vary", {}).get(CHOICE, []):
            if choice not in CHOSEN_BY:
                raise UsageError(f"{self.name}: {name}.vary.{CHOICE}: {unknown('choice', choice, CHOSEN_BY)}")
        for block in grids.get("dp-ngd", []):
            for axis in {"rate", "eta"} & set(block):
                raise UsageError(f"{self.name}: {name}.grid.dp-ngd.{axis}: {BROKEN}")
        if "dp-ngd" in section.get("methods", []) and name != BREAKS:
            for axis, row in section["vary"].items():
                named = set(axis.split("+"))
                if "eta" in named or ("rate" in named and any(joint(axis, v)["rate"] != 1 for v in row)):
                    raise UsageError(f"{self.name}: {name}.vary.{axis}: {BROKEN}")

    def _check_chosen(self) -> None:
        """Names in what a search chose, and that it keeps the equation."""
        tuned, later = self.settings["tuned"], self.settings["trials"]
        file = f"tuned/{self.name}.yaml"
        for name, (table, parts) in {"": (tuned, ("digest", "eta_sgd", "methods", *CHOSEN_BY.values())),
                                     "-trials": (later, ("digest", "second", "finalists"))}.items():
            for part in table:
                if part not in parts:
                    raise UsageError(f"tuned/{self.name}{name}.yaml: {unknown('key', part, parts)}")
        chosen = [(m, where, e, axes) for part in ("methods", *CHOSEN_BY.values())
                  for m, by_place in tuned.get(part, {}).items()
                  for where, by_epsilon in by_place.items() for e, axes in _by_epsilon(by_epsilon, file, m, where)]
        chosen += [(m, where, e, axes) for part in ("second", "finalists")
                   for m, by_place in later.get(part, {}).items() for where, by_epsilon in by_place.items()
                   for e, rows in _by_epsilon(by_epsilon, file, m, where) for axes in rows]
        chosen += [("dp-sgd", where, e, {}) for where, by_epsilon in tuned.get("eta_sgd", {}).items()
                   for e, _ in _by_epsilon(by_epsilon, file, "eta_sgd", where)]
        for method, where, epsilon, axes in chosen:
            for kind, name, valid in (("method", method, METHODS),
                                      ("data set", where.partition("/")[0], self.settings["data"]),
                                      *(("field", n, NAMES) for n in axes)):
                if name not in valid:
                    raise UsageError(f"{file}: {unknown(kind, name, valid)}")
            if method == "dp-ngd" and {"rate", "eta"} & set(axes):
                raise UsageError(f"{file}: dp-ngd {where} epsilon {epsilon:g}: {BROKEN}")
            for name in {"eta_sgd", "lambda_base"} & set(axes):
                raise UsageError(f"{file}: {method} {where} epsilon {epsilon:g}: {name} is no choice of a search: it "
                                 f"follows from eta_sgd at the top of the file and lambda_base_ratio; remove it")
        for where, by_epsilon in tuned.get("methods", {}).get("dp-sgd", {}).items():
            for epsilon, axes in by_epsilon.items():
                if "T" in axes and axes["T"] not in tuned.get("eta_sgd", {}).get(where, {}).get(epsilon, {}):
                    raise UsageError(f"{file}: dp-sgd {where} epsilon {epsilon:g}: eta_sgd has no rate at its T = "
                                     f"{axes['T']}; run `dpngd tune {self.name}` again")

    @property
    def about(self) -> str:
        return self.settings["about"]

    @property
    def seeds(self) -> list[int]:
        return self.settings["seeds"]

    @property
    def artifacts(self) -> list[str]:
        """The names that `configs` takes, in the order of a sweep: the gate, the searches, then the results. A search
        that stands apart is among them once it has chosen: before that its trials follow from each other, and
        `dpngd tune` makes them."""
        searches = [s for s in SEARCHES if self.settings[s]["grid"] and (
            self.decided(s) or not self.settings[s].get("apart"))]
        results = [name for name, section in self.settings["artifacts"].items() if section["cells"]]
        return [*([GATE] if self.settings[GATE]["cells"] else []), *searches, *results]

    def artifact(self, name: str) -> dict[str, Any]:
        """The section of a table or figure: methods, cells, vary, seeds."""
        if name not in self.artifacts:
            raise unknown("artifact", name, self.artifacts)
        if name == GATE:
            return {"methods": ["dp-sgd"], "vary": {}, **self.settings[name]}
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
        """The run of one cell. `changes` are fields of the config, FACTORS, SEARCH or CHOICE."""
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
            if name not in NAMES:
                raise unknown("field", name, NAMES)
        if not in_interval(epsilon, "(0, inf)"):
            raise UsageError(f"epsilon = {epsilon!r}: must be in (0, inf)")
        search, choice = changes.get(SEARCH), changes.get(CHOICE)
        if choice is not None and choice not in CHOSEN_BY:
            raise unknown("choice", choice, CHOSEN_BY)
        kept = self.kept(search) if search else changes.get("model")
        changes = {n: v for n, v in changes.items() if n not in (SEARCH, CHOICE)}
        tuned = self.tuned(method, self.like(data), epsilon, kept, choice)
        return self._resolve(method, data, epsilon, seed, tuned, changes, kept)

    def like(self, data: str) -> str:
        """The data set whose settings a run takes: itself, or for a user's own data the profile's first."""
        return data if own_kind(data) is None else next(iter(self.settings["artifacts"]["utility_table"]["cells"]))

    def kept(self, search: str) -> str | None:
        """The name under which a search's winners are kept, beside those of the data set: its own where it stands
        apart, else that of its network; None for the profile's main search."""
        return self.settings[search].get("apart") or self.settings[search]["model"]

    def decided(self, search: str, only: str | None = None) -> bool:
        """Whether a search has chosen in each of its cells, or in those of one data set `only`."""
        chosen = self.settings["tuned"].get("eta_sgd", {})
        return all(epsilon in chosen.get(place(data, self.kept(search)), {})
                   for data, row in self.settings[search]["cells"].items() for epsilon in row if only in (None, data))

    def waits(self, method: str, data: str, model: str | None) -> bool:
        """Whether a network has a search of its own for this method, which has not chosen yet: runs of it would take
        what was chosen on another network. Before anything is tuned, no run waits: they are counted as stated."""
        own = [s for s in SEARCHES if self.settings[s]["model"] and self.settings[s]["model"] == model]
        return bool(self.settings["tuned"]) and any(
            method in self.settings[s]["grid"] and place(data, model) not in
            self.settings["tuned"].get("methods", {}).get(method, {}) for s in own if data in self.settings[s]["cells"])

    def tuned(self, method: str, data: str, epsilon: float, kept: str | None = None, choice: str | None = None,
              ) -> dict[str, Any]:
        """What the search chose at the nearer epsilon: T, the method's own values, and `rate`, a factor.

        An arm of DP-NGD has DP-NGD's values, and a rate of its own. A method that takes its rate from DP-SGD's has
        DP-SGD's T. `kept` is a network, or a search that stands apart (`kept`): a network that was searched for itself
        has what was chosen for it, any other one what was chosen on the data set. With a `choice`, a method that has
        finalists of its own takes the one that it names; DP-SGD, whose rates all others follow, keeps its own.
        """
        by_place = self.settings["tuned"].get("methods", {}).get(method, {})
        if choice:
            by_place = self.settings["tuned"].get(CHOSEN_BY[choice], {}).get(method, by_place)
        by_epsilon = by_place.get(place(data, kept)) or by_place.get(data) or {}
        own = params.nearest(by_epsilon, epsilon) if by_epsilon else {}
        entry = METHODS[method]
        start = entry.arm_of or ("dp-sgd" if entry.finds_rate else None)
        return {**(self.tuned(start, data, epsilon, kept) if start else {}), **own}

    def eta_sgd(self, data: str, epsilon: float, T: int, kept: str | None = None) -> tuple[float, Origin]:
        """DP-SGD's rate at this epsilon and T, and where it comes from: as tuned, else as stated."""
        tables = self.settings["tuned"].get("eta_sgd", {})
        by_epsilon = tables.get(place(data, kept)) or tables.get(data)
        if not by_epsilon:
            eta, where = self._find("eta", "dp-sgd", data, epsilon)
            return eta, (where,)
        table = params.nearest(by_epsilon, epsilon)
        if T in table:
            return table[T], (TUNED,)
        return number(params.interpolated(table, T)), (TUNED, f"at T = {T} from {', '.join(map(str, sorted(table)))}")

    def _resolve(self, method: str, data: str, epsilon: float, seed: int, tuned: dict, changes: dict,
                 kept: str | None = None) -> tuple[RunConfig, dict[str, Origin]]:
        """Every value of a run with its origin, the later ones before the earlier: settings, tuned, equation, given."""
        entry, like = METHODS[method], self.like(data)
        cell = {"method": method, "data": data, "epsilon": epsilon, "seed": seed}
        changes = {n: v for n, v in changes.items() if v is not None}  # null in a list of values: as it is elsewhere
        factors = {n: changes.pop(n) for n in FACTORS if n in changes}
        if "lambda_safe" in changes and "scale" in factors:
            changes["lambda_safe"] = number(changes["lambda_safe"] * factors.pop("scale") ** 2)
        wanted = (*_COMMON, *entry.uses)
        stated = {n: self._find(n, method, like, epsilon) for n in wanted if n != "N" or like == data}
        own = {n: v for n, v in tuned.items() if n in wanted}
        values = {n: value for n, (value, _) in stated.items()} | own | changes
        origins: dict[str, Origin] = {n: (where,) for n, (_, where) in stated.items() if where}
        origins |= dict.fromkeys(own, (TUNED,))
        sgd = functools.partial(self._sgd, data=like, epsilon=epsilon, T=values["T"], kept=kept)
        derived: dict[str, tuple[float, Origin]] = {}
        if entry.finds_rate:  # the floor is found when the run starts, and then eta
            derived = sgd(method)
        elif entry.rate:  # a method with a KL budget has none: everything about it is stated
            if entry.second_order:
                derived = self._whitened(method, like, epsilon, sgd, {**tuned, **changes, **factors}, changes)
            else:
                derived = {"eta": self._plain(method, like, epsilon, sgd, values)}
            fewer = values["T"] < tuned.get("T", values["T"])
            rate = factors.get("rate", 1.0 if fewer else tuned.get("rate", 1.0))
            eta, origin = derived["eta"]
            chosen = GIVEN if "rate" in factors else TUNED
            derived["eta"] = number(eta * rate), (*origin, *((f"times {rate:g}", chosen) if rate != 1 else ()))
            if "eta" in tuned:  # a trial of DP-SGD
                derived["eta"] = tuned["eta"], (TUNED,)
        derived = {n: d for n, d in derived.items() if n not in changes and n in (*wanted, "eta")}
        values |= {n: value for n, (value, _) in derived.items()}
        origins |= {n: origin for n, (_, origin) in derived.items()}
        origins |= dict.fromkeys(DIGESTS, ("content of the files",)) | dict.fromkeys((*cell, *changes), (GIVEN,))
        if "evals" not in changes and values["evals"] > values["T"]:
            values["evals"], origins["evals"] = values["T"], (*origins["evals"], "at most T")
        return RunConfig.from_dict({**values, **cell}), origins

    def _sgd(self, method: str, data: str, epsilon: float, T: int, kept: str | None,
             ) -> dict[str, tuple[float, Origin]]:
        """eta_sgd and C_sgd of the equation, with their origins; a method may state an eta_sgd of its own."""
        stated, where = self._find("eta_sgd", method, data, epsilon)
        C_sgd, C_place = self._find("C", "dp-sgd", data, epsilon)
        eta = self.eta_sgd(data, epsilon, T, kept) if stated is None else (stated, (where,))
        return {"eta_sgd": eta, "C_sgd": (C_sgd, (C_place,))}

    def _plain(self, method: str, data: str, epsilon: float, sgd: Sgd, values: Mapping[str, Any],
               ) -> tuple[float, Origin]:
        """eta of a first-order method: DP-SGD's own, or as stated, or by the equation with r = 0."""
        if method == "dp-sgd":
            return sgd(method)["eta_sgd"]
        eta, where = self._find("eta", method, data, epsilon)
        if eta is not None:
            return eta, (where,)
        eta_sgd, C_sgd = (value for value, _ in sgd(method).values())
        return clamping.eta_ngd(1.0, largest_norm(values), eta_sgd, C_sgd, right=0.0), (EQUATION,)

    def _whitened(self, method: str, data: str, epsilon: float, sgd: Sgd, chosen: Mapping[str, Any],
                  changes: Mapping[str, Any]) -> dict[str, tuple[float, Origin]]:
        """eta, C, lambda_safe and lambda_base of DP-NGD and its arms, by the equation, from eta or lambda_safe."""
        find = functools.partial(self._find, data=data, epsilon=epsilon)
        eta, (safe, safe_place) = find("eta", "dp-ngd")[0], find("lambda_safe", "dp-ngd")
        C, C_place = find("C", "dp-ngd")
        if (eta is None) == (safe is None):
            raise UsageError(f"{self.name}: dp-ngd must state eta or lambda_safe, the other one follows from it")
        if safe is None:
            safe, safe_place = clamping.lambda_safe(eta, C, *(value for value, _ in sgd("dp-ngd").values())), EQUATION
        if (stated := find("lambda_safe", method))[0] is not None:
            safe, safe_place = stated
        if "lambda_safe" in chosen:
            safe, safe_place = chosen["lambda_safe"], GIVEN if "lambda_safe" in changes else TUNED
        origin: Origin = (safe_place,)
        if chosen.get("scale", 1.0) != 1:
            safe, origin = safe * chosen["scale"] ** 2, (safe_place, f"times {chosen['scale']:g} squared", GIVEN)
        entry = METHODS[method]
        own = pick(self.settings["methods"][method]["C"], data, epsilon, "C", method)
        if changes.get("C") or own:
            C, C_place = changes.get("C") or own, ("methods", method, "C")
        elif entry.left != -0.5:
            C, C_place = C * safe ** (0.5 + entry.left), EQUATION
        ratio, ratio_place = find("lambda_base_ratio", "dp-ngd")
        if "lambda_base_ratio" in chosen:
            ratio, ratio_place = chosen["lambda_base_ratio"], TUNED
        eta_sgd, C_sgd = (value for value, _ in sgd(method).values())
        return {
            "eta": (clamping.eta_ngd(safe, C, eta_sgd, C_sgd, right=entry.right), (EQUATION,)),
            "C": (number(C), (C_place,)),
            "lambda_safe": (number(safe), origin),
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
        check_once("seeds", seeds or ())
        shown = dict.fromkeys(d for a in self.settings["artifacts"].values() for d in a["cells"])
        if other := [d for d in datasets or () if d in self.settings["data"] and d not in shown]:
            raise UsageError(f"datasets = {list(datasets)}: the profile {self.name} has no settings for {other[0]}, "
                             f"only for {', '.join(shown)}; take another profile")
        stated = section["cells"]
        every = sorted({e for row in stated.values() for e in row})
        cells = {d: epsilons or stated.get(d, every) for d in (datasets or stated)}
        found: dict[str, RunConfig] = {}
        if artifact == GATE:
            return [c for data in cells for N, B in self.gate_path(data) for c in self.gate_runs(data, N, B)]
        for method in methods or section["methods"]:
            for data, row in cells.items():
                for epsilon in row:
                    for config in self._runs(artifact, section, method, data, epsilon, seeds):
                        found.setdefault(config.key(), config)
        return list(found.values())

    def _runs(self, artifact: str, section: dict, method: str, data: str, epsilon: float, seeds: Sequence[int] | None,
              ) -> Iterable[RunConfig]:
        if artifact in SEARCHES:
            for trials in (self.trials, self.second):
                yield from (config for _, config in trials(method, data, epsilon, artifact))
            for _, configs in self.repeats(method, data, epsilon, artifact):
                yield from configs
            return
        for seed in seeds or section["seeds"] or self.seeds:
            for changes in self._variants(artifact, section, method, data, epsilon):
                yield self.config(method, data, epsilon, seed, **changes)

    def _variants(self, artifact: str, section: dict, method: str, data: str, epsilon: float) -> Iterable[dict]:
        """The changes to a cell's settings that an artifact asks for."""
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        reads = {*_COMMON, *METHODS[method].uses, *(("eta", *FACTORS) if METHODS[method].rate else ())}
        for name, values in section["vary"].items() or [("", ())]:
            if name == SEARCH:  # no runs at settings that nobody has chosen yet
                searched = [search for search in values if method in self.settings[search]["grid"]]
                yield from ({SEARCH: s} for s in searched if self.decided(s, data)) if searched else [{}]
                continue
            if name == CHOICE:
                yield from ({CHOICE: choice} for choice in values if self.decided(SEARCHES[0], data))
                continue
            if not reads & set(name.split("+")):
                yield {}  # a method without that field runs as it is
                continue
            for value in pick(values, data, epsilon, f"{name} of {artifact}", method):
                changes = {n: v for n, v in joint(name, value).items() if n in reads}
                if not self.waits(method, data, changes.get("model")):
                    yield changes

    # ---- The search: what `dpngd.tuning` runs ------------------------------------------------------------------------

    def trials(self, method: str, data: str, epsilon: float, search: str = "tuning") -> list[Trial]:
        """Round one of a method's search: all combinations of its grid, with the first seed.

        `rate` is a factor on what the equation gives with DP-SGD's tuned rate at that T. DP-SGD's own axis is eta, and
        it is also searched at the T's that `curve` names. An arm takes DP-NGD's T and floor, on the data sets that
        `arms` names. Before DP-SGD (for an arm: DP-NGD) is tuned, these are the trials at what is stated: for counting.
        """
        section = self.settings[search]
        if method not in section["grid"]:
            raise unknown("method in the tuning grid", method, section["grid"])
        if METHODS[method].arm_of and data not in section["arms"].get(method, []):
            return []
        found = points(section["grid"][method])
        if method == "dp-sgd":
            rates = dict.fromkeys(axes["eta"] for axes in found)
            found += [{"eta": eta, "T": T} for T in section["curve"].get(data, {}).get(epsilon, []) for eta in rates]
        return self.runs_at(method, data, epsilon, found, section["seeds"][0], search)

    def second(self, method: str, data: str, epsilon: float, search: str = "tuning") -> list[Trial]:
        """Round two: beyond the edges of the grid, or around its best trial (`settings["trials"]`)."""
        return self.runs_at(method, data, epsilon, self._later("second", method, data, epsilon, search),
                            self.settings[search]["seeds"][0], search)

    def repeats(self, method: str, data: str, epsilon: float, search: str = "tuning",
                ) -> list[tuple[dict[str, Any], list[RunConfig]]]:
        """Round three: the finalists of the first two, once more with other seeds.

        A setting that was best with one seed may be lucky, or on the brink of instability.
        """
        return [(axes, [self.runs_at(method, data, epsilon, [axes], seed, search)[0][1]
                        for seed in self.settings[search]["finalists"]["seeds"]])
                for axes in self._later("finalists", method, data, epsilon, search)]

    def _later(self, part: str, method: str, data: str, epsilon: float, search: str) -> list[dict[str, Any]]:
        by_place = self.settings["trials"].get(part, {}).get(method, {})
        return by_place.get(place(data, self.kept(search)), {}).get(epsilon, [])

    def runs_at(self, method: str, data: str, epsilon: float, axes: Iterable[dict[str, Any]], seed: int, search: str,
                ) -> list[Trial]:
        """The runs of a search at these settings, on the validation part."""
        section, arm_of, kept = self.settings[search], METHODS[method].arm_of, self.kept(search)
        base = self.tuned(arm_of, data, epsilon, kept) if arm_of else {}
        changes = {n: section[n] for n in ("validation", "evals", "model")}
        return [(a, self._resolve(method, data, epsilon, seed, {**base, **a}, changes, kept)[0]) for a in axes]

    def later_trials(self) -> int:
        """How many trials follow from others, over all searches, where none of them is known yet."""
        total = 0
        for search in SEARCHES:
            section = self.settings[search]
            for method, (data, row) in itertools.product(section["grid"], section["cells"].items()):
                for epsilon in row:
                    first = self.trials(method, data, epsilon, search)
                    steps = {c.T for _, c in first} if method == "dp-sgd" else {None}
                    own = len({axes.get("T") for axes in points(section["grid"][method])}) if method == "dp-sgd" else 1
                    second = 0 if METHODS[method].arm_of else section["second"] // own * len(steps)
                    finalists = min(len(first), section["finalists"]["per_T"] * len(steps) if method == "dp-sgd" else
                                    section["finalists"]["best"])
                    total += second * bool(first) + finalists * len(section["finalists"]["seeds"])
        return total

    # ---- The gate: in which setting epsilon matters to DP-SGD --------------------------------------------------------

    def gate_path(self, data: str) -> list[tuple[int, int]]:
        """The (N, B) that the gate tried on a data set, or before it was run all that it might try."""
        section, tried = self.settings[GATE], self.settings["gated"].get(data, {}).get("tried")
        if tried:
            return [(row["N"], row["B"]) for row in tried]
        return list(itertools.product(section["N"][data], section["B"]))

    def gate_runs(self, data: str, N: int, B: int) -> list[RunConfig]:
        """DP-SGD at the gate's epsilons, rates and seeds, on the validation part."""
        s = self.settings[GATE]
        return [self._resolve("dp-sgd", data, epsilon, seed, {}, {
                    "N": N, "B": B, "T": s["T"], "eta": eta, "validation": s["validation"], "evals": 1})[0]
                for epsilon in s["cells"][data] for eta in s["rates"] for seed in s["seeds"]]

    def all_configs(self) -> list[RunConfig]:
        """Every run of the profile, each once."""
        configs = (config for name in self.artifacts for config in self.configs(name))
        return list({config.key(): config for config in configs}.values())

    def seconds(self, config: RunConfig) -> float:
        """How long a run is expected to take on the profile's device: start, samples, and public estimates."""
        cost, entry = self.settings["cost"], METHODS[config.method]
        if config.model not in cost["per_sample"]:
            raise UsageError(f"{self.name}: cost.per_sample: {unknown('network', config.model, cost['per_sample'])}")
        measured = cost["per_sample"][config.model]
        order = "second_order" if entry.second_order else "first_order"
        kind = config.method if config.method in measured else order
        samples = config.T * config.B * config.K * measured[kind]
        refreshes = math.ceil(config.T / config.T_cur) if config.T_cur and kind != "first_order" else 0
        return cost["start"] + samples + refreshes * cost["refresh"][config.model] * (config.public_size or 500) / 500


BROKEN = ("breaks the equation of section 3.3 (eta of dp-ngd follows from lambda_safe and DP-SGD's tuned rate; only "
          f"the artifact {BREAKS} studies another one): give lambda_safe instead")


def _by_epsilon(table: Any, file: str, *where: str) -> list[tuple[float, Any]]:
    """The rows of a table by epsilon; an error of one line where it has another form."""
    if not isinstance(table, Mapping) or not all(isinstance(e, int | float) and e > 0 for e in table):
        raise UsageError(f"{file}: {' '.join(where)}: must be a table by epsilon, not {table!r}")
    return list(table.items())


def check_once(where: str, seeds: Sequence[int]) -> None:
    """Refuse a seed that is given twice: it would count as two runs."""
    for i, seed in enumerate(seeds):
        if seed in list(seeds)[:i]:
            raise UsageError(f"{where}: seed {seed} is given twice; a run counts once, leave one out")


def largest_norm(values: Mapping[str, Any]) -> float:
    """S of the equation: the largest norm of a clipped sample."""
    return math.hypot(values["C0"], values["C1"]) if values.get("C") is None else values["C"]


# ---- Grids of a search as params/*.yaml writes them: axes, blocks of axes, and their points --------

Grid = dict[str, list] | list[dict[str, list]]
"""A table of axis: [values], or several such blocks."""


def place(data: str, kept: str | None = None) -> str:
    """The place of a search's winners: under the data set, or under it and a name (`Profile.kept`)."""
    return f"{data}/{kept}" if kept else data


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

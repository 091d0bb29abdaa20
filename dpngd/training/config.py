"""RunConfig: the one description of a run, checked before anything is computed.

A run is a pure function of its config, and its record is stored under the config's key, so a config holds
numbers and names only. What makes two methods different in structure (which space is clipped, what the Fisher
labels are, how the budget is split) belongs to the method's name; its entry in `dpngd.methods` says which fields it
reads. A field that its method does not read must stay None: otherwise one and the same run would have several keys.

It is a dataclass with checks of our own, not a pydantic model: `--help` and errors then answer at once without that
package, and a message names the field, its interval and what to do in one line.

A user's own data are named by a path, `npz:PATH` or `folder:PATH`. A key must not depend on where a file lies, and must
depend on what is in it: so the config also holds a digest of the content, and the canonical form has the digest and no
path. The configs of named data sets have no digest, and their keys are what they were before own data existed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpngd.data import sets
from dpngd.data.sets import own_kind, own_parts, without_path
from dpngd.errors import UsageError, unknown
from dpngd.methods import METHODS
from dpngd.methods import method as method_of
from dpngd.training import models

RECORD_VERSION = 2  # part of every key: raise it when the meaning of a config or of its record changes

DIGESTS = ("data_digest", "public_digest")


def _field(doc: str, within: str | None = None, default: Any = dataclasses.MISSING) -> Any:
    """A documented field; `within` is the interval of its allowed values, in the usual notation."""
    return dataclasses.field(default=default, metadata={"doc": doc, "within": within})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. Ints are taken for float fields (and stored as floats); nothing else is converted."""

    method: str = _field("name of the method or ablation arm")
    data: str = _field("private data set; npz:PATH and folder:PATH are your own")
    model: str = _field("network")
    epsilon: float = _field("privacy budget of the whole run", "(0, inf)")
    delta: float = _field("delta of the (epsilon, delta) guarantee", "(0, 1)", 1e-5)
    B: int = _field("expected batch size; Poisson sampling at exactly q = B/N", "[1, inf)")
    T: int = _field("training steps", "[1, inf)")
    K: int = _field("augmentation multiplicity: views averaged into one sample's gradient", "[1, inf)", 1)
    eta: float | None = _field("learning rate, constant; none for a method with a KL budget", "(0, inf)", None)
    seed: int = _field("seed of all random streams of the run", "[0, inf)")
    N: int | None = _field("size of the seeded private subset; None is the whole set", "[1, inf)", None)
    validation: float = _field("share of the private set that replaces the test set (tuning)", "[0, 1)", 0.0)
    test_share: float | None = _field("share of all images that are the test set, where a set has no official split "
                                      "(utkface, digits); None is the set's own", "(0, 1)", None)
    augment: bool = _field("random crops and flips, as the data set allows", None, False)
    ema: float = _field("decay of the weight average, warmed up as min(ema, (1+t)/(10+t))", "[0, 1)", 0.9999)
    evals: int = _field("evaluations, spread evenly over the run; the last is after step T", "[1, inf)", 5)
    public: str | None = _field("public set, also npz:PATH or folder:PATH; a+b takes equal parts of both", None, None)
    public_size: int | None = _field("number of public images", "[50, 5000]", None)
    C: float | None = _field("clipping threshold, in the space in which the method clips", "(0, inf)", None)
    lambda_safe: float | None = _field("clamping floor from the Euclidean safety bound", "(0, inf)", None)
    lambda_base: float | None = _field("floor of the middle phase, below lambda_safe", "(0, inf)", None)
    T1: float | None = _field("warm-up of the clamping schedule as a fraction of T", "(0, 1)", None)
    p: float | None = _field("exponent of the clamping schedule's tail", "(1, inf)", None)
    T_cur: int | None = _field("steps between two public estimates (curvature, moments, basis)", "[1, inf)", None)
    adadps_e: float | None = _field("AdaDPS: constant beside the root of the moment", "(0, inf)", None)
    C0: float | None = _field("GEP: clipping threshold of the embedding", "(0, inf)", None)
    C1: float | None = _field("GEP: clipping threshold of the residual", "(0, inf)", None)
    gep_directions: int | None = _field("GEP: directions of the public subspace in all", "[1, inf)", None)
    pt_steps: int | None = _field("DP-SGD-PT: steps of pre-training on the public set", "[1, inf)", None)
    pt_eta: float | None = _field("DP-SGD-PT: learning rate of pre-training", "(0, inf)", None)
    curvature_C: float | None = _field("private curvature: clip of a sample's contribution", "(0, inf)", None)
    kl_budget: float | None = _field("KL budget K in nats: each step moves the predictions by K / T", "(0, inf)", None)
    kl_noise: float | None = _field("nats of it that may be noise, in all; a huge value for no bound", "(0, inf)", None)
    probe: int | None = _field("public images on which a step's KL divergence is measured", "[16, 5000]", None)
    floor_rank: float | None = _field("share of all directions above lambda_safe, which it sets", "(0, 1)", None)
    clip_ratio: float | None = _field("C over the median norm of public gradients at the start, in the clipped space; "
                                      "0.001 normalises nearly every sample", "(0, inf)", None)
    kl_radius: float | None = _field("guard beside eta: steps with a larger KL are shortened", "(0, inf)", None)
    eta_sgd: float | None = _field("DP-SGD's rate, from which eta follows once lambda_safe is known", "(0, inf)", None)
    C_sgd: float | None = _field("DP-SGD's clipping threshold beside eta_sgd", "(0, inf)", None)
    data_digest: str | None = _field("own data: digest of their content, found when not given", None, None)
    public_digest: str | None = _field("own public images: digest of their content, found when not given", None, None)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _typed(f, getattr(self, f.name)))
        method_of(self.method)  # an unknown name is an error
        if own_kind(self.data) is None:
            sets.find(self.data, private=True)  # an unknown name is an error
        if self.test_share is not None:
            sets.check_test_share(self.data, self.test_share)
        models.find(self.model)  # an unknown name, or an impossible depth, is an error
        self._check_used()
        if self.public is not None:
            _check_public(self.public)
            allowed = METHODS[self.method].public_from
            if allowed and not set(self.public.split("+")) <= set(allowed):
                raise UsageError(f"public = {self.public!r}: {self.method} makes its public images itself ("
                                 f"{' or '.join(allowed)}); take dp-ngd-kl for another public set")
        self._check_sizes()
        self._find_digests()

    def _check_used(self) -> None:
        """The method's fields are set, and no other method's."""
        entry, uses = METHODS[self.method], METHODS[self.method].uses
        if entry.rate and self.eta is None:
            raise UsageError("eta = None: must be float, not NoneType")
        if entry.finds_rate and self.eta is not None:
            raise UsageError(f"eta = {self.eta!r} beside eta_sgd: {self.method} finds its floor when it starts, and "
                             "eta follows from it; leave it out")
        for name in ("eta", "kl_radius") if entry.kl_step else ():
            if getattr(self, name) is not None:
                raise UsageError(f"{name} = {getattr(self, name)!r} beside kl_budget: {self.method} has no rate, its "
                                 "KL budget decides how far a step goes; leave it out")
        if self.kl_radius is not None and not entry.public:
            raise UsageError(f"kl_radius = {self.kl_radius!r}: {self.method} has no public images to measure a step's "
                             "KL divergence on, leave it out")
        for name in METHOD_FIELDS:
            value = getattr(self, name)
            if name in uses and value is None:
                raise UsageError(f"{self.method} needs {name} ({FIELDS[name].metadata['doc']})")
            if name not in uses and value is not None:
                raise UsageError(f"{name} = {value!r}: {self.method} does not use it, leave it out")

    def _check_sizes(self) -> None:
        """Values that are possible each alone but not together."""
        if self.N is not None:
            left = self.N - round(self.N * self.validation)
            if left < self.B:
                raise UsageError(f"B = {self.B} is more than the {left} private training samples: lower B")
            if self.delta * self.N >= 1:
                raise UsageError(f"delta = {self.delta} must be below 1/N = {1 / self.N:.3g}")
        if self.evals > self.T:
            raise UsageError(f"evals = {self.evals} is more than the T = {self.T} steps of the run")
        if self.K > 1 and not self.augment:
            raise UsageError(f"K = {self.K} without augment would average equal views: set augment or K = 1")
        if self.lambda_base is not None and self.lambda_base > self.lambda_safe:
            raise UsageError(f"lambda_base = {self.lambda_base} is above lambda_safe = {self.lambda_safe}")
        if self.probe is not None and self.probe > self.public_size:
            raise UsageError(f"probe = {self.probe} is more than the {self.public_size} public images: lower it")

    def _find_digests(self) -> None:
        """The digest of own data beside their path; none beside the name of a known data set."""
        for name, field in zip(("data", "public"), DIGESTS, strict=True):
            value, digest = getattr(self, name), getattr(self, field)
            parts = [part for part in (value or "").split("+" if name == "public" else "\0") if own_kind(part)]
            if not parts:
                if digest is not None:
                    raise UsageError(f"{field} = {digest!r}: {name} = {value!r} needs none, leave it out")
            elif digest is None:
                from dpngd.data import own  # late: named data sets need no numpy here

                object.__setattr__(self, field, own.digest(parts, labelled=name == "data"))
            elif not re.fullmatch(r"[0-9a-f]{16,64}", digest):
                raise UsageError(f"{field} = {digest!r}: must be 16 to 64 hexadecimal digits")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """A config from plain values; an unknown or a missing field is an error that names it."""
        for name in values:
            if name not in FIELDS:
                raise unknown("field", name, FIELDS)
        entry = METHODS.get(str(values.get("method")))
        rate = {"eta"} if entry is None or entry.rate else set()
        missing = [n for n, f in FIELDS.items()
                   if (f.default is dataclasses.MISSING or n in rate) and n not in values]
        if missing:
            raise UsageError(f"a run needs {', '.join(missing)}")
        return cls(**values)

    def replace(self, **changes: Any) -> RunConfig:
        """This config with some fields changed, checked again. A digest goes with the data that it is of."""
        for name, digest in zip(("data", "public"), DIGESTS, strict=True):
            if name in changes:
                changes = {digest: None, **changes}
        return self.from_dict({**dataclasses.asdict(self), **changes})

    def canonical(self) -> dict[str, Any]:
        """The config as plain values, without the fields that are None and without paths: what is hashed, stored."""
        values = {name: value for name in FIELDS if (value := getattr(self, name)) is not None}
        if self.data_digest:
            values["data"] = without_path(self.data)
        if self.public_digest:
            values["public"] = "+".join(map(without_path, self.public.split("+")))
        return values

    def key(self) -> str:
        """The name of the run's record: a hash of every field and of RECORD_VERSION. Computed once: tables of many runs
        ask for it again and again."""
        version, key = self.__dict__.get("_key", (None, ""))
        if version != RECORD_VERSION:
            key = key_of(self.canonical())
            object.__setattr__(self, "_key", (RECORD_VERSION, key))
        return key

    def label(self) -> str:
        """One line for progress bars and failures."""
        return f"{self.method} {self.data} eps={self.epsilon:g} T={self.T} seed={self.seed} [{self.key()}]"


def key_of(canonical: Mapping[str, Any]) -> str:
    """The key of a run whose config is this one, as a record has it."""
    text = json.dumps({"record": RECORD_VERSION, **canonical}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


FIELDS = {f.name: f for f in dataclasses.fields(RunConfig)}
METHOD_FIELDS = tuple(n for n in FIELDS if any(n in m.uses for m in METHODS.values()))
"""Fields that only some methods read."""


def _typed(f: dataclasses.Field, value: Any) -> Any:
    """The value in the field's type, inside its interval. Neither a bool nor 3.0 is an int here."""
    kind, optional = f.type.removesuffix(" | None"), f.type.endswith("| None")
    if value is None and optional:
        return None
    is_bool = isinstance(value, bool)
    if kind == "int" and isinstance(value, numbers.Integral) and not is_bool:
        value = int(value)
        if abs(value) >= 2**63:
            raise UsageError(f"{f.name} = {value}: must be below 2**63")
    elif kind == "float" and isinstance(value, numbers.Real) and not is_bool:
        value = float(value) if abs(value) < 2**1023 or value != value else math.inf
    elif not ((kind == "bool" and is_bool) or (kind == "str" and isinstance(value, str))):
        raise UsageError(f"{f.name} = {value!r}: must be {kind}, not {type(value).__name__}")
    within = f.metadata["within"]
    if within and not in_interval(value, within):
        raise UsageError(f"{f.name} = {value!r}: must be in {within}")
    return value


def in_interval(value: float, interval: str) -> bool:
    """Whether a number lies in an interval like "[0, 1)" or "(0, inf)"; NaN lies in none."""
    low, high = (float(part) for part in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


def _check_public(name: str) -> None:
    parts = name.split("+")
    for part in parts:
        if own_kind(part) is None:
            sets.find(part, private=False)
    named = [part for part in parts if own_kind(part) is None or own_parts(part)[1]]
    if len(set(named)) < len(named):
        raise UsageError(f"public set {name!r} names a set twice")

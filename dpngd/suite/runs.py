"""Records as a table to ask: which accuracy has this method in this cell, seed by seed and test image by test image.

Accuracies are in percent, as in the paper. A diverged run, or one without an accuracy, scores chance (1 / classes), on
every image alike: it is counted (`diverged`) and never left out. A seed counts once: a selection in which two runs have
the same seed is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpngd.errors import UsageError
from dpngd.methods import METHODS
from dpngd.suite import stats
from dpngd.training.config import RunConfig
from dpngd.training.record import unpacked

Cell = tuple[str, float]  # data set, epsilon
Terms = Iterable[tuple[float, Mapping[str, Any]]]
"""A contrast: the weight c_k of each cell k, and the fields of its runs."""


_key = functools.lru_cache(maxsize=None)(RunConfig.key)
"""A config's key, hashed once: the rules ask for the same runs again and again, with each seed left out."""


@dataclass(frozen=True)
class Score:
    """What a run reached: its accuracy in percent, and 100 or 0 for each test image that it kept, else None."""

    accuracy: float
    images: np.ndarray | None
    asked: tuple  # what was evaluated: scores with the same are of the same images in the same order
    lost: bool  # diverged, or without an accuracy: scores chance


def score(config: RunConfig, record: Mapping[str, Any]) -> Score:
    """The accuracy of a record and its images, which must agree."""
    kept = record.get("correct")
    # A validation part is drawn by the run's seed: its images are in the spread over seeds already.
    asked = (config.data, getattr(config, "test_share", None), kept["n"] if kept else None) \
        if record["evaluated_on"] == "test" else ()
    if record["status"] == "diverged" or record["accuracy"] is None:
        return Score(100.0 / record["data"]["private"]["classes"], None, asked, True)
    if not kept or not asked:
        return Score(100.0 * record["accuracy"], None, asked, False)
    right = unpacked(kept)
    if abs(right.mean() - record["accuracy"]) > 1e-6:
        raise UsageError(f"record {record['key']}: its accuracy is {record['accuracy']:.6g}, its images say "
                         f"{right.mean():.6g}: the record is damaged; train that run again")
    return Score(100.0 * record["accuracy"], 100.0 * right, asked, False)


@dataclass(frozen=True)
class Runs:
    """What an artifact asks for (`configs`) and the records that there are of it."""

    configs: Sequence[RunConfig]
    found: Mapping[str, dict] = field(repr=False)  # key -> record

    @classmethod
    def of(cls, configs: Iterable[RunConfig], records: Iterable[dict | None]) -> Runs:
        configs = list(configs)
        return cls(configs, {r["key"]: r for r in records if r is not None})

    def __len__(self) -> int:
        return sum(_key(c) in self.found for c in self.configs)

    def __add__(self, other: Runs) -> Runs:
        """Both, each run once."""
        return Runs(list({_key(c): c for c in (*self.configs, *other.configs)}.values()), {**self.found, **other.found})

    def where(self, **fields: Any) -> Runs:
        """Those whose config has these values; a list means any of its values."""
        def fits(config: RunConfig) -> bool:
            return all(getattr(config, n) in v if isinstance(v, list | tuple) else getattr(config, n) == v
                       for n, v in fields.items())
        return Runs([c for c in self.configs if fits(c)], self.found)

    def without(self, seed: int) -> Runs:
        """All but the runs of one seed, which are no longer planned either."""
        return Runs([c for c in self.configs if c.seed != seed], self.found)

    @property
    def records(self) -> list[dict]:
        return [self.found[_key(c)] for c in self.configs if _key(c) in self.found]

    @property
    def missing(self) -> list[RunConfig]:
        return [c for c in self.configs if _key(c) not in self.found]

    def values(self, name: str) -> list:
        """The distinct values of a config field, in their order (numbers by size, names as the profile has them)."""
        seen = dict.fromkeys(getattr(c, name) for c in self.configs if getattr(c, name) is not None)
        return list(seen) if any(isinstance(v, str) for v in seen) else sorted(seen)

    def cells(self) -> list[Cell]:
        return list(dict.fromkeys((c.data, c.epsilon) for c in self.configs))

    def methods(self) -> list[str]:
        """In the order of the tables."""
        return [m for m in METHODS if m in self.values("method")]

    def baselines(self) -> list[str]:
        return [m for m in self.methods() if METHODS[m].baseline]

    def each(self) -> Iterator[tuple[RunConfig, dict]]:
        for config in self.configs:
            if _key(config) in self.found:
                yield config, self.found[_key(config)]

    def scores(self, **fields: Any) -> dict[int, Score]:
        """Seed -> score, of runs that differ in their seed alone."""
        found: dict[int, Score] = {}
        for config, record in self.where(**fields).each():
            if config.seed in found:
                said = ", ".join(f"{n}={v}" for n, v in fields.items()) or "all runs"
                raise UsageError(f"seed {config.seed} is counted twice in {said} ({config.method}, {config.data}, "
                                 f"ε={config.epsilon:g}): select runs that differ in their seed alone")
            found[config.seed] = score(config, record)
        return found

    def by_seed(self, **fields: Any) -> dict[int, float]:
        """Seed -> accuracy in percent, chance for a run that diverged."""
        return {seed: s.accuracy for seed, s in self.scores(**fields).items()}

    def accuracies(self, **fields: Any) -> list[float]:
        """Accuracy in percent of every run, chance for one that diverged; settings and seeds one after the other."""
        return [score(c, r).accuracy for c, r in self.where(**fields).each()]

    def contrast(self, terms: Terms) -> stats.Contrast:
        """sum_k c_k accuracy_k by seed, over the seeds that every cell has, with what the test images add."""
        weighted = [(c, self.scores(**fields)) for c, fields in terms]
        seeds = sorted(set.intersection(*(set(scores) for _, scores in weighted))) if weighted else []
        values = {s: sum(c * scores[s].accuracy for c, scores in weighted) for s in seeds}
        used = [scores[s] for _, scores in weighted for s in seeds]
        lost = any(s.lost for s in used)
        kept = {s.asked for s in used if not s.lost}
        (asked,) = kept if len(kept) == 1 else ((),)
        kind = "mean" if len(weighted) == 1 else "difference"
        if not asked or asked[-1] is None:
            return stats.Contrast(values, lost=lost, kind=kind)
        images = asked[-1]
        table = np.zeros((len(seeds), images))
        for c, scores in weighted:
            for row, s in zip(table, seeds, strict=True):
                row += c * (scores[s].accuracy if scores[s].lost else scores[s].images)
        return stats.Contrast(values, stats.image_part(table), images, lost, kind)

    def mean(self, **fields: Any) -> stats.Estimate:
        return self.contrast([(1.0, fields)]).estimate()

    def diverged(self, **fields: Any) -> int:
        return sum(r["status"] == "diverged" for r in self.where(**fields).records)

    def lead(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> stats.Estimate:
        """Accuracy of the runs `a` less that of the runs `b`, in points."""
        return self.contrast([(1.0, a), (-1.0, b)]).estimate()

    def best(self, candidates: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The candidate with the highest mean accuracy; None where none was run."""
        scored = [(sum(found.values()) / len(found), -i, dict(c)) for i, c in enumerate(candidates)
                  if (found := self.by_seed(**c))]
        return max(scored, key=lambda s: s[:2])[2] if scored else None

    def default(self, name: str, method: str = "dp-ngd") -> Any:
        """The value that a method has where an artifact varies other fields: the most frequent one."""
        values = [getattr(c, name) for c in self.where(method=method).configs]
        return max(dict.fromkeys(values), key=values.count)


NOT_STEPS = ("total", "setup", "evaluation")  # phases that happen once per run, or only to draw its curve


def step_phases(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds per step by phase."""
    return {name: s / max(1, record["steps"]) for name, s in record["seconds"].items() if name not in NOT_STEPS}


def seconds_per_step(record: Mapping[str, Any]) -> float:
    return sum(step_phases(record).values())

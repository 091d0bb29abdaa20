"""Records as a table to ask: which accuracy has this method in this cell, seed by seed.

Accuracies are in percent, as in the paper. A diverged run has no accuracy: it is counted (`diverged`), never averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpngd.methods import METHODS
from dpngd.suite import stats
from dpngd.training.config import RunConfig

Cell = tuple[str, float]  # data set, epsilon


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
        return sum(c.key() in self.found for c in self.configs)

    def __add__(self, other: Runs) -> Runs:
        """Both, each run once."""
        return Runs(list({c.key(): c for c in (*self.configs, *other.configs)}.values()), {**self.found, **other.found})

    def where(self, **fields: Any) -> Runs:
        """Those whose config has these values; a list means any of its values."""
        def fits(config: RunConfig) -> bool:
            return all(getattr(config, n) in v if isinstance(v, list | tuple) else getattr(config, n) == v
                       for n, v in fields.items())
        return Runs([c for c in self.configs if fits(c)], self.found)

    @property
    def records(self) -> list[dict]:
        return [self.found[c.key()] for c in self.configs if c.key() in self.found]

    @property
    def missing(self) -> list[RunConfig]:
        return [c for c in self.configs if c.key() not in self.found]

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
            if config.key() in self.found:
                yield config, self.found[config.key()]

    def by_seed(self, **fields: Any) -> dict[int, float]:
        """Seed -> accuracy in percent, of the runs that ended well."""
        return {c.seed: 100 * r["accuracy"] for c, r in self.where(**fields).each() if r["accuracy"] is not None}

    def accuracies(self, **fields: Any) -> list[float]:
        """Accuracy in percent of every run that ended well, one seed after the other."""
        return [100 * r["accuracy"] for r in self.where(**fields).records if r["accuracy"] is not None]

    def mean(self, **fields: Any) -> stats.Estimate:
        return stats.mean(list(self.by_seed(**fields).values()))

    def diverged(self, **fields: Any) -> int:
        return sum(r["status"] == "diverged" for r in self.where(**fields).records)

    def lead(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> stats.Estimate:
        """Accuracy of the runs `a` less that of the runs `b`, in points."""
        return stats.difference(self.by_seed(**a), self.by_seed(**b))

    def best(self, candidates: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The candidate with the highest mean accuracy; None where none was run."""
        scored = [(self.mean(**c).mean, i, dict(c)) for i, c in enumerate(candidates) if self.by_seed(**c)]
        return max(scored, key=lambda s: (s[0], -s[1]))[2] if scored else None

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

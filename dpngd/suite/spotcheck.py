"""Do shipped results come out again? Some runs of results/<profile>.jsonl, drawn at random, are trained again.

    dpngd spotcheck cpu --runs 5

On the machine that made them, a run repeats bit for bit: every loss, norm and accuracy must be the same. On another
one rounding differs, and with it the accuracy by a little; what must not change there is a verdict, decided once with
the shipped runs and once with the new ones in their places. Exit code 1 where that fails.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from typing import Any

from dpngd.errors import Parser, UsageError, exit_code
from dpngd.suite import claims, profiles, sweep
from dpngd.suite.runs import Runs
from dpngd.suite.store import Store
from dpngd.training import record
from dpngd.training.config import RunConfig

MACHINE = ("rounding", "torch", "numpy", "device")  # what makes two machines the same to a bit: see `record.rounding`


def draw(store: Store, runs: int, seed: int) -> list[dict]:
    """`runs` of the shipped records, the same ones for the same seed."""
    if not store.shipped_path.exists():
        raise UsageError(f"{store.profile} ships no results (no {store.shipped_path.name}): nothing to check")
    shipped = store.shipped
    if not 1 <= runs <= len(shipped):
        raise UsageError(f"--runs is {runs}: take from 1 to the {len(shipped)} that are shipped")
    return [shipped[key] for key in random.Random(seed).sample(sorted(shipped), runs)]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The fields in which two records of one config differ, clocks and machine apart."""
    return [k for k in old if k not in record.NOT_FACTS and old[k] != new.get(k)]


def verdicts(profile: profiles.Profile, records: Mapping[str, dict]) -> dict[str, str]:
    """Claim -> verdict from these records by key; claims on clocks and on theory do not depend on them."""
    sources = {}
    for artifact in profile.artifacts:
        configs = profile.configs(artifact)
        sources[artifact] = Runs.of(configs, (records.get(c.key()) for c in configs))
    return {claim.id: claims.decide(claim, sources)["verdict"] for claim in claims.all_claims()
            if claim.source != "theory" and not claim.timed}


def check(store: Store, runs: int, seed: int, jobs: int) -> bool:
    """Whether the drawn runs, trained again, are the same (on the same machine), and leave every verdict as it is."""
    drawn, profile = draw(store, runs, seed), store.profile
    configs = [RunConfig.from_dict(r["config"]) for r in drawn]
    with tempfile.TemporaryDirectory() as scratch:
        new = sweep.ensure(configs, store=Store(profile, root=scratch, read_shipped=False), jobs=jobs)
    good = True
    for config, old, again in zip(configs, drawn, new, strict=True):
        here = all(k in old["where"] and old["where"][k] == again["where"].get(k) for k in MACHINE)
        differ = differences(old, again)
        good &= not (here and differ)
        said = "the same to the last bit" if not differ else f"differs in {', '.join(differ)}" + (
            "" if here else " (another machine)")
        print(f"{config.label()}: accuracy {percent(old)} shipped, {percent(again)} now; {said}")
    before = verdicts(profiles.load(profile), store.shipped)
    after = verdicts(profiles.load(profile), {**store.shipped, **{r["key"]: r for r in new}})
    changed = [f"{name} from {before[name]!r} to {after[name]!r}" for name in before if before[name] != after[name]]
    print(f"verdicts changed: {'; '.join(changed) or 'none'}")
    return good and not changed


def percent(r: Mapping[str, Any]) -> str:
    return "none (diverged)" if r["accuracy"] is None else f"{100 * r['accuracy']:.2f}%"


def main(argv: list[str] | None = None) -> int:
    p = Parser(prog="python -m dpngd.spotcheck", description="Train some shipped runs anew and compare.",
               allow_abbrev=False)
    p.add_argument("profile", help=f"one of {', '.join(profiles.profile_names())}")
    p.add_argument("--runs", type=int, default=5, help="how many (default 5)")
    p.add_argument("--seed", type=int, default=0, help="which ones (default 0)")
    p.add_argument("--jobs", type=int, default=2, help="runs at once (default 2)")
    args = p.parse_args(argv)
    profiles.load(args.profile)
    return 0 if check(Store(args.profile), args.runs, args.seed, args.jobs) else 1


if __name__ == "__main__":
    raise SystemExit(exit_code(main))

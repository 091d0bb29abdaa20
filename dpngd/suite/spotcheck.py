"""Do shipped results come out again? Some runs of results/<profile>.jsonl, drawn at random, are trained again.

    dpngd spotcheck cpu --runs 5

    what                          must be
    images                        those of the shipped run, where they come from files (of SVHN and ImageNet there is
                                  more than one version)
    privacy, key, config          exactly the same, on every machine (`dpngd.privacy` rounds what it finds). Where a
                                  method finds C on public images, C and C sigma within 0.1 %: C is then measured
    accuracy, status, steps       within 3 points, the same status: a record cannot excuse itself by naming a machine
    every other fact              the same to the last bit on the machine that made the record with as many threads,
                                  free elsewhere, where rounding differs
    verdicts                      the same, decided once with the shipped runs and once with the new in their places

Exit code 1 where that fails. The tolerance is measured (tests/helpers/other_machines.py: the same runs with the kernels
of three older processors and with two threads, UTKFace, 100 steps, 1,050 validation images). DP-SGD, DP-NGD and
dp-ngd-free moved by at most 0.19 points in twelve runs, GEP by 0.00, +0.57, -1.14 and -0.57, with up to 72 images
changed: the basis of a subspace is where rounding grows most. Three points are four times GEP's root mean square, 0.70.
C of dp-ngd-free moved by 3e-6 of itself. On a real other processor eight runs moved by 0.68 points at most
(docs/running.md).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from dpngd import progress
from dpngd.errors import UsageError
from dpngd.suite import claims, profiles, sweep
from dpngd.suite.runs import Runs
from dpngd.suite.store import Store
from dpngd.training import record
from dpngd.training.config import RunConfig

POINTS = 0.03
"""How far the accuracy of a run may be from the shipped one on another machine."""
EXACT = ("key", "config")
MEASURED, C_WITHIN = ("sensitivity", "noise_std"), 1e-3  # of privacy, where C is found on public images; relatively
OTHER_IMAGES = "images (not those of the shipped run: docs/data.md)"
MACHINE = ("rounding", "torch", "numpy", "device", "threads")
"""What makes two machines the same to a bit: see `record.rounding`. With several threads eigenvectors round otherwise,
and micro-batches are smaller."""


def draw(store: Store, runs: int, seed: int) -> list[dict]:
    """`runs` of the shipped records whose data are here, the same ones for the same seed."""
    if not store.shipped_path.exists():
        raise UsageError(f"{store.profile} ships no results (no {store.shipped_path.name}): nothing to check")
    shipped = store.shipped
    missing = missing_data(set().union(*(needs(r["config"]) for r in shipped.values())))
    here = [key for key in sorted(shipped) if not needs(shipped[key]["config"]) & set(missing)]
    if not here:
        raise UsageError(f"none of the {len(shipped)} shipped runs can be trained here: {', '.join(missing)} not "
                         f"found; `dpngd data fetch NAME` gets one or says how; or set DPNGD_DATA")
    if not 1 <= runs <= len(here):
        left_out = f" (others need {', '.join(missing)}, not found)" if missing else ""
        raise UsageError(f"--runs is {runs}: take from 1 to the {len(here)} that are shipped{left_out}")
    if missing:
        print(f"{len(here)} of {len(shipped)} shipped runs can be trained here; the others need {', '.join(missing)}",
              file=sys.stderr)
    return [shipped[key] for key in random.Random(seed).sample(here, runs)]


def needs(config: Mapping[str, Any]) -> set[str]:
    """The data sets of a run that need files."""
    from dpngd.data.sources import SOURCES

    return {config["data"].partition("-")[0], *config.get("public", "").split("+")} & set(SOURCES)


def missing_data(names: Iterable[str]) -> list[str]:
    """Those of the data sets that cannot be read here without a download."""
    from dpngd.data.sources import obtain

    missing = []
    for name in sorted(names):
        try:
            obtain(name, download=False)
        except UsageError:
            missing.append(name)
    return missing


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The fields in which two records of one config differ, clocks and machine apart."""
    return [k for k in old if k not in record.NOT_FACTS and old[k] != new.get(k)]


def exact(facts: Mapping[str, Any], name: str) -> str:
    """A field as text, in which two records agree only if every number has the same digits and the same type."""
    return json.dumps(facts.get(name), sort_keys=True)


def privacy_repeats(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two records spend the same: to the last digit, but for a C that a method finds on public images."""
    if exact(old, "privacy") == exact(new, "privacy"):
        return True
    if "clip_ratio" not in new["config"]:
        return False
    parts = [{k: v for k, v in r["privacy"].items() if k not in MEASURED} for r in (old, new)]
    C, std = (old["privacy"].get(name, []) for name in MEASURED)
    close = all(len(old["privacy"].get(name, [])) == len(new["privacy"][name])
                and all(math.isclose(*pair, rel_tol=C_WITHIN)
                        for pair in zip(old["privacy"][name], new["privacy"][name], strict=True)) for name in MEASURED)
    return exact({"": parts[0]}, "") == exact({"": parts[1]}, "") and close and all(
        math.isclose(s, c * new["privacy"]["sigma"], rel_tol=1e-9) for c, s in zip(C, std, strict=True))


def same_images(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two runs of one config saw the same files. (Made images may round differently on other machines.)"""
    config, from_files = old["config"], needs(old["config"])
    names = {"private": config["data"].partition("-")[0], "public": config.get("public", "")}
    return all(old["data"][which]["digest"] == new["data"][which]["digest"] for which in names
               if which in old["data"] and set(names[which].split("+")) <= from_files)


def wrong(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The fields in which a record differs by more than another machine can make it."""
    found = [k for k in EXACT if exact(old, k) != exact(new, k)] + ([] if privacy_repeats(old, new) else ["privacy"])
    if old["status"] != new["status"] or old["accuracy"] is None or new["accuracy"] is None:
        return found + [k for k in ("status", "accuracy") if old[k] != new[k]]
    return found + (["accuracy"] if abs(old["accuracy"] - new["accuracy"]) > POINTS else [])


def verdicts(profile: profiles.Profile, records: Mapping[str, dict]) -> dict[str, str]:
    """Claim -> verdict from these records by key; claims on clocks and on theory do not depend on them."""
    sources = {}
    for artifact in profile.artifacts:
        configs = profile.configs(artifact)
        sources[artifact] = Runs.of(configs, (records.get(c.key()) for c in configs))
    gated = profile.settings["gated"]
    return {claim.id: claims.decide(claim, sources, gated=gated)["word"] for claim in claims.all_claims()
            if claim.source != "theory" and not claim.timed}


def train_again(store: Store, runs: int, seed: int, jobs: int) -> dict[str, Any]:
    """The drawn runs, trained again: `good` where each is the same, as the module's table says, and verdicts stay."""
    drawn, profile = draw(store, runs, seed), store.profile
    configs = [RunConfig.from_dict(r["config"]) for r in drawn]
    progress.say("spotcheck: " + progress.outlook(len(configs), map(profiles.load(profile).seconds, configs), jobs))
    with tempfile.TemporaryDirectory() as scratch:
        new = sweep.ensure(configs, store=Store(profile, root=scratch, read_shipped=False), jobs=jobs)
    rows = []
    for config, old, again in zip(configs, drawn, new, strict=True):
        here = all(k in old["where"] and old["where"][k] == again["where"].get(k) for k in MACHINE)
        bad = wrong(old, again) + ([] if same_images(old, again) else [OTHER_IMAGES])
        rows.append({"run": config.label(), "key": config.key(), "shipped": old["accuracy"], "now": again["accuracy"],
                     "differs_in": differences(old, again), "wrong": bad, "same_machine": here})
    before = verdicts(profiles.load(profile), store.shipped)
    after = verdicts(profiles.load(profile), {**store.shipped, **{r["key"]: r for r in new}})
    changed = [f"{name} from {before[name]!r} to {after[name]!r}" for name in before if before[name] != after[name]]
    good = not changed and not any(row["wrong"] or (row["same_machine"] and row["differs_in"]) for row in rows)
    return {"profile": profile, "good": good, "runs": rows, "verdicts_changed": changed}


def table(found: Mapping[str, Any]) -> str:
    """One line per run, and one for the verdicts."""
    lines = []
    for row in found["runs"]:
        said = "the same to the last bit"
        if row["differs_in"]:
            said = f"differs in {', '.join(row['differs_in'])}" + ("" if row["same_machine"] else
                                                                    " (another machine, or other threads)")
        if row["wrong"]:
            said += f"; WRONG, on any machine: {', '.join(row['wrong'])}"
        lines.append(f"{row['run']}: accuracy {percent(row['shipped'])} shipped, {percent(row['now'])} now; {said}")
    return "\n".join([*lines, f"verdicts changed: {'; '.join(found['verdicts_changed']) or 'none'}"])


def percent(accuracy: float | None) -> str:
    return "none (diverged)" if accuracy is None else f"{100 * accuracy:.2f}%"


def main(args: argparse.Namespace) -> int:
    """Check, and print a line per run or one JSON object; the exit code is 1 where something differs."""
    found = train_again(Store(args.profile), args.runs, args.seed, args.jobs)
    print(json.dumps(found, indent=1, ensure_ascii=False) if args.json else table(found))
    return 0 if found["good"] else 1

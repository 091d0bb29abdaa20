"""`dpngd bench`: seconds per training step, every contender interleaved in one run.

Machines are noisy, so what counts is ratios of medians from rounds in which every contender takes its turn. The cost
of a curvature refresh is measured apart and amortised: a step on b samples carries b / (T_cur * amortise_batch) of it.
Peak memory is measured in a fresh process per contender.

    dpngd bench --full --json > new.json && mv new.json results/bench.json

is all that the report shows and docs/speed.md explains: every network with all cores' threads and with one, memory, how
cost grows, and what a machine does in an hour. On a machine that others use as well, `--clock cpu --threads 1` counts
the process's own seconds.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
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
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd import methods, progress
from dpngd.clamping import BASE_RATIO, floor_by_rank
from dpngd.curvature import KFAC
from dpngd.errors import unknown
from dpngd.gradients import PerSample, micro_batch_size, pieces, views_at_once
from dpngd.methods import METHODS, Setting
from dpngd.methods.gep import basis_bytes
from dpngd.noise import seeded_noise, stream
from dpngd.privacy import Spend, calibrate
from dpngd.suite import params
from dpngd.suite.executors import KEEP_PAGES
from dpngd.training import models, record
from dpngd.training.config import RunConfig
from dpngd.training.parallel import Workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_MODELS = ("small", "wrn-10-1", "resnet-20", "wrn-16-4")
BATCH = 256  # samples per step: what happens once per step, such as the noise, is shared by them
MEMORY_BATCH = {"wrn-16-4": 64}
"""Samples whose memory is compared, where that is fewer: Opacus would hold 256 gradients of this network in 6 GiB."""
QUICK_CONTENDERS = ("plain", "opacus-hooks", "dp-sgd", "gep", "dp-ngd")
OPACUS = ("opacus-hooks", "opacus-functorch", "opacus-ghost")


def make_bench(model: str, batch: int, K: int, public: int, floor: float | None, micro_batch: int | None) -> Bench:
    """Random images: a step's time depends on shapes, and on the floor through the rank it leaves."""
    g = stream(0, "bench")
    net = models.build(model, classes=10, generator=g)
    x = torch.randn(batch * K, 3, 32, 32, generator=g)
    y = torch.randint(10, (batch,), generator=g)
    images = torch.randn(public, 3, 32, 32, generator=g)
    return Bench(net, x, y, K, images, plateau(net, images) if floor is None else floor, micro_batch)


def plateau(model: nn.Module, images: Tensor) -> float:
    """The floor on which a run spends most of its steps: lambda_base, a quarter of the floor by rank at theta_0."""
    return BASE_RATIO * floor_by_rank(KFAC(model, images, generator=stream(0, "labels"), span=True)())


REST = 0.03
"""Seconds before each step: OpenMP's threads still spin for some 10 ms after the last contender's."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""What counts as a second: that of the wall, or of this process on its cores, which other processes disturb less."""


def seconds_of(step: Callable[[], object], clock: str = "wall") -> float:
    start = CLOCKS[clock]()
    step()
    return CLOCKS[clock]() - start


def time_contenders(name: str, args: argparse.Namespace) -> dict:
    """Medians and quartiles for one model; contenders take turns in every round."""
    batch = args.batch or BATCH
    bench = make_bench(name, batch, args.K, args.public, args.floor, args.micro_batch)
    took = functools.partial(seconds_of, clock=args.clock)
    running: dict[str, Contender] = {}
    skipped: dict[str, str] = {}
    for c in args.contenders:
        try:
            running[c] = contender(c)(bench)
        except NotApplicable as reason:
            skipped[c] = str(reason)
    warm = sum(seconds_of(made.step) for made in running.values())  # first calls allocate, and check the model
    if not args.quiet:
        progress.say(f"{name}: {args.repeats} rounds of {len(running)} contenders, {batch} samples per step, about "
                     f"{progress.span(args.repeats * warm)}" + ("" if args.no_memory else "; then their memory"))
    seconds: dict[str, list[float]] = {c: [] for c in running}
    refresh: dict[str, list[float]] = {c: [] for c, r in running.items() if r.refresh}
    turns = [(r, c) for r in range(args.repeats) for c in running]
    for r, c in progress.over(turns, f"{name}, steps", unit="step", quiet=args.quiet):
        gc.collect()
        time.sleep(REST)
        seconds[c].append(took(running[c].step))
        if c in refresh and r % max(1, args.repeats // 3) == 0:
            refresh[c].append(took(running[c].refresh))
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
        for c in progress.over(rows, f"{name}, memory", unit="contender", quiet=args.quiet):
            rows[c]["peak_mib"] = peak_memory(c, name, args.batch or MEMORY_BATCH.get(name, BATCH), bench.floor, args)
    return {"batch": batch, "floor": bench.floor, "contenders": rows, "skipped": skipped}


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
    peak = {c: row["peak_mib"] for c, row in rows.items() if "peak_mib" in row}
    if {"dp-ngd", "opacus-hooks"} <= peak.keys():
        out["dp_ngd_memory_over_opacus"] = peak["dp-ngd"] / peak["opacus-hooks"]
    if "opacus-dpngd" in median and "opacus-hooks" in median:
        out["opacus_dpngd_over_opacus_hooks"] = median["opacus-dpngd"] / median["opacus-hooks"]
    return out


# ---- How cost grows --------------------------------------------------------------------------------------------------

SWEEPS = {"batch": (64, 128, 256, 512), "width": (1, 2, 4), "public": (125, 250, 500, 1000), "K": (1, 2, 4, 8),
          "t_cur": (1, 4, 16, 64)}
"""What is varied, and its values: samples per step, the w of wrn-10-w, public images per refresh, views per sample, and
steps between refreshes. The rest is a DP-NGD step of the small network on 128 samples with 500 public images."""
T_CUR = 8


def scaling(repeats: int, floor: float | None, micro_batch: int | None, clock: str) -> dict:
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
            best = min(seconds_of(timed, clock) for _ in range(repeats))
            if what == "t_cur":
                best += min(seconds_of(made.refresh, clock) for _ in range(repeats)) / v
            seconds.append(best)
        out[what] = {"values": list(values), "seconds": seconds, "exponent": exponent(values, seconds)}
    return out


def exponent(values: Sequence[float], seconds: Sequence[float]) -> float:
    """e of seconds ~ value^e, by least squares in logarithms."""
    return statistics.linear_regression([math.log(v) for v in values], [math.log(s) for s in seconds]).slope


SCALED = {"batch": "samples per step", "width": "w of WRN-10-w, 32 samples", "public": "public images per refresh",
        "K": "views per sample", "t_cur": "steps between refreshes (T_cur)"}


def scaling_figure(report: dict) -> Figure:
    """One panel per sweep of `scaling`, in logarithms, with the fitted power."""
    from dpngd.suite import plots

    sweeps = report["scaling"]
    figure, axes = plots.new(columns=3, rows=-(-len(sweeps) // 3), width=8.4, height=2.6 * -(-len(sweeps) // 3))
    for ax, (what, row) in zip(axes, sweeps.items(), strict=False):
        values, ms = row["values"], [1e3 * t for t in row["seconds"]]
        centre = math.exp(statistics.fmean(math.log(t / v ** row["exponent"]) for t, v in zip(ms, values, strict=True)))
        ax.plot(values, [centre * v ** row["exponent"] for v in values], "--", color="0.55", lw=1)
        ax.plot(values, ms, "o-", color=plots.colour("dp-ngd"), ms=4.5, lw=1.4)
        plots.keep(ax, plots.label("dp-ngd"), values, ms)
        ax.set(xscale="log", yscale="log", xlabel=SCALED[what])
        ax.set_ylabel("ms per refresh" if what == "public" else "ms per step")
        ax.set_title(f"power {row['exponent']:.2f}")
        ax.set_xticks(values, [str(v) for v in values])
        ax.minorticks_off()
    for ax in axes[len(sweeps):]:
        ax.set_axis_off()
    plots.stamp(figure, f"DP-NGD; {report['threads']} threads, {report['cpu']}, load {report['load']:.1f}")
    return figure


START = ("train", "--method", "dp-sgd", "--data", "digits", "--epsilon", "2", "--B", "64", "--eta", "1", "--T", "1",
         "--evals", "1", "--quiet")


def once(threads: int) -> dict:
    """Seconds to calibrate sigma, and from the shell to the end of a run of one step on the digits."""
    command = [sys.executable, "-m", "dpngd", *START, "--threads", str(threads)]
    return {
        "calibrate": seconds_of(lambda: calibrate(2.0, 1e-5, 1024 / 50_000, 100)),
        "start": seconds_of(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)),
    }


@dataclass(frozen=True)
class Layout:
    """How the cores of a machine are shared out: processes side by side, and threads in each."""

    processes: int
    threads: int


def paces(cores: int, seconds: float = 4.0) -> dict[str, float]:
    """Samples per second of DP-NGD on the small network, by how cores are used: "2x1" is two processes of one thread
    each, "1x2" one process with two threads, "1x1" one process of one thread, alone."""
    return {f"{layout.processes}x{layout.threads}": pace_of(layout, "small", "dp-ngd", seconds)
            for layout in dict.fromkeys([Layout(1, 1), Layout(cores, 1), Layout(1, cores)])}


def pace_of(layout: Layout, model: str, contender: str, seconds: float, batch: int = 512) -> float:
    """Samples per second of all processes of a layout together. They keep freed memory, as workers of a sweep do."""
    command = [sys.executable, "-m", "dpngd", "bench", "--models", model, "--contenders", contender, "--quiet",
               "--threads", str(layout.threads), "--pace", str(seconds), "--batch", str(batch)]
    env = {**os.environ, **KEEP_PAGES, "OMP_NUM_THREADS": str(layout.threads)}
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(layout.processes)]
    out = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"measuring the pace of {layout} failed: the processes say why above")
    return sum(map(float, out))


def own_pace(args: argparse.Namespace) -> float:
    """Samples per second of this process over `args.pace` seconds of steps of `args.batch` samples, with a refresh for
    every 8 steps of 1,024 samples."""
    made = contender(args.contenders[0])(make_bench(args.models[0], args.batch, 1, 500, 1.0, None))
    made.step()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < args.pace:
        if made.refresh and steps % (T_CUR * 1024 // args.batch) == 0:
            made.refresh()
        made.step()
        steps += 1
    return args.batch * steps / (time.perf_counter() - start)


@functools.cache
def layout(cores: int) -> Layout:
    """The faster way to use the cores for many runs, by a measurement of some 20 seconds, once per process.

    A process per core wins a tie: it needs no more than one core at a time, and its runs end one by one.
    """
    if cores == 1:
        return Layout(1, 1)
    pace = paces(cores)
    return Layout(1, cores) if pace[f"1x{cores}"] > 1.05 * pace[f"{cores}x1"] else Layout(cores, 1)


def runs_per_hour(cores: int, start: float, pace: dict[str, float], repeats: int = 3) -> dict[str, float]:
    """Whole runs per hour of each method of the `cpu` profile, a process of one thread on every core.

    A run is its start, T steps of B samples and a refresh every T_cur of them, timed alone on one thread; what runs
    side by side take from each other is the pace of all processes against that of one. Evaluation is not counted.
    """
    settings = params.settings("cpu")
    at_once = pace[f"{cores}x1"] / pace["1x1"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = {}
    try:
        bench = make_bench("small", settings["defaults"]["B"], 1, 500, None, None)
        for name, own in settings["methods"].items():
            T = own["T"] or settings["methods"]["dp-ngd"]["T"]  # an arm of DP-NGD takes its steps
            made = private(name, own.get("gep_directions") or GEP_DIRECTIONS)(bench)
            made.step()
            step = min(seconds_of(made.step) for _ in range(repeats))
            refresh = min(seconds_of(made.refresh) for _ in range(repeats)) if made.refresh else 0.0
            refreshes = math.ceil(T / (own.get("T_cur") or T_CUR))
            out[name] = 3600 * at_once / (start + T * step + refreshes * refresh)
    finally:
        torch.set_num_threads(threads)
    return out


def peak_memory(name: str, model: str, batch: int, floor: float, args: argparse.Namespace) -> float:
    """MiB that one step (and a refresh) adds to a fresh process that already holds the model and the data."""
    options = ["--models", model, "--batch", batch, "--K", args.K, "--public", args.public, "--floor", floor,
               "--threads", args.threads, "--peak-of", name]
    if args.micro_batch:
        options += ["--micro-batch", args.micro_batch]
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
    if "one_thread" in report:
        lines += ["", "one thread"]
        lines += [f"  {name:12}{k:32}{v:6.2f}" for name, found in report["one_thread"]["ratio"].items()
                  for k, v in found.items()]
    for what, row in report.get("scaling", {}).items():
        points = ", ".join(f"{v} {1e3 * s:.0f} ms" for v, s in zip(row["values"], row["seconds"], strict=True))
        lines += ["", f"{what}: exponent {row['exponent']:.2f} ({points})"]
    lines += loops_text(report.get("opacus", {})) if "opacus" in report else []
    if "once" in report:
        once = report["once"]
        lines += ["", f"calibrate sigma {once['calibrate']:.1f} s, start (train --T 1) {once['start']:.1f} s",
                  "runs per hour on all cores: " + ", ".join(f"{c} {n:.0f}" for c, n in once["runs_per_hour"].items()),
                  "samples per second, processes x threads: "
                  + ", ".join(f"{k} {v:.0f}" for k, v in once["pace"].items())]
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Time what the options of `command.bench` name, and print the table or the JSON."""
    cores = os.cpu_count() or 1
    args.scaling = args.scaling or args.full
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
    torch.set_num_threads(args.threads)
    if args.peak_of or args.pace:
        print(own_peak(args.peak_of, args) if args.peak_of else own_pace(args))
        return 0
    load = os.getloadavg()[0]
    if not args.quiet:
        progress.say(f"timing one training step of {len(args.contenders)} contenders on {', '.join(args.models)}; each "
                     "network says how long it takes once it has warmed up")
    results = {name: time_contenders(name, args) for name in args.models}
    report = {
        "models": results,
        "ratio": {name: ratios(r["contenders"]) for name, r in results.items()},
        **{k: getattr(args, k) for k in ("K", "threads", "public", "t_cur", "amortise_batch", "floor", "repeats")},
        "clock": args.clock, "cpu": record.cpu(), "cores": cores, "torch": torch.__version__, "load": load,
        "commit": record.commit(), "date": datetime.date.today().isoformat(),
        "micro_batch": args.micro_batch, "goals": GOALS,
    }
    if args.opacus or args.full:
        report["opacus"] = opacus_loops(min(args.repeats, 3))
    if args.scaling:
        report["scaling"] = scaling(min(args.repeats, 5), args.floor, args.micro_batch, args.clock)
        report["once"] = once(args.threads)
        pace = report["once"]["pace"] = paces(cores)
        report["once"]["runs_per_hour"] = runs_per_hour(cores, report["once"]["start"], pace, min(args.repeats, 3))
    if args.full:
        report["one_thread"] = one_thread(args)
    report["load_after"] = os.getloadavg()[0]
    if args.figures:
        from dpngd.suite import plots

        plots.save(scaling_figure(report), args.figures, "scaling")
    print(json.dumps(report, indent=1) if args.json else bench_text(report))
    return 0


def one_thread(args: argparse.Namespace) -> dict:
    """The same networks and contenders with one thread: `models` and `ratio`. In a process of its own."""
    options = ["--models", *args.models, "--contenders", *args.contenders, "--K", args.K, "--public", args.public,
               "--t-cur", args.t_cur, "--amortise-batch", args.amortise_batch, "--repeats", args.repeats,
               "--threads", 1, "--clock", args.clock, "--no-memory", "--json"]
    options += ["--floor", "auto" if args.floor is None else args.floor]
    options += [x for option, value in (("--batch", args.batch), ("--micro-batch", args.micro_batch)) if value
                for x in (option, value)]
    command = [sys.executable, "-m", "dpngd", "bench", *map(str, options), *(["--quiet"] if args.quiet else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError("timing with one thread failed: the process says why above")
    report = json.loads(done.stdout)
    return {key: report[key] for key in ("models", "ratio", "load", "load_after")}


GOALS = {
    "dp_sgd_over_plain": {"small": 1.4, "wrn-10-1": 1.15, "resnet-20": 1.15, "wrn-16-4": 1.2},
    "opacus_over_dp_sgd": {"small": 2.0, "wrn-10-1": 2.0, "resnet-20": 2.0, "wrn-16-4": 1.8},
    "dp_ngd_over_dp_sgd": {"small": 1.15, "wrn-10-1": 1.08, "resnet-20": 1.08, "wrn-16-4": 1.08},
    "gep_over_dp_sgd": {"small": 2.0, "wrn-10-1": 2.0, "resnet-20": 2.0},
    "dp_ngd_memory_over_opacus": {"small": 0.5, "wrn-10-1": 0.5, "resnet-20": 0.6, "wrn-16-4": 0.6},
}
"""What was aimed at: at most this, but for opacus_over_dp_sgd, which is at least this."""


# ---- What the benchmark times: one training step of each contender, on the same model, batch and public images -------

Action = Callable[[], None]
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
    micro_batch: int | None

    @property
    def B(self) -> int:
        return len(self.y)

    def targets(self) -> Tensor:
        return self.y.repeat_interleave(self.K)


@dataclass
class Contender:
    """`step` is done every iteration, `refresh` once every T_cur of them (its time is amortised)."""

    step: Action
    refresh: Action | None = None


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


# ---- Whole programs through Opacus: the DPNGD loop against Opacus's own DP-SGD loop ----------------------------------

PROGRAMS = ("digits", "cnn-28", "cnn-32")
"""README's example, and a CNN without normalisation on the same digits at 28x28, and in colour at 32x32: its second
convolution has 64 positions, and so another way to its gradients."""
LOOPS: dict[str, dict | None] = {"dp-sgd": None, "dpngd": {}, "dpngd-rate": {"kl_budget": None}}
"""What is wrapped around the optimizer: nothing, DPNGD as in README, DPNGD that keeps the wrapped optimizer's step."""
LOOP_BLOCKS, LOOP_STEPS = 5, 8
"""A run is so many blocks of T_cur steps: 40 steps, as many epochs as in README."""


def program(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """(model, x, y) of one of PROGRAMS."""
    from dpngd.data import load_private
    from dpngd.training.recipe import to_float

    digits = load_private("digits")
    x = to_float(digits.x_train)
    if name == "digits":
        return models.build("small", classes=10, in_channels=1, size=8, generator=stream(0, "bench")), x, digits.y_train
    channels, size = {"cnn-28": (1, 28), "cnn-32": (3, 32)}[name]
    x = F.interpolate(x, size=size, mode="bilinear").expand(-1, channels, -1, -1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cnn(channels, size), x.contiguous(), digits.y_train


def cnn(channels: int, size: int) -> nn.Module:
    """A network as in many first programs: two convolutions and a linear layer, without normalisation."""
    return nn.Sequential(nn.Conv2d(channels, 16, 5, stride=2, padding=2), nn.ReLU(),
                         nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU(), nn.Flatten(),
                         nn.Linear(32 * math.ceil(size / 4) ** 2, 10))


def opacus_loop(name: str, wrap: dict | None, blocks: int) -> tuple[Action, float, object]:
    """(one block of steps of an Opacus program, seconds to construct DPNGD, the optimizer)."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    from dpngd.opacus import DPNGD

    model, x, y = program(name)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=1.0, noise_multiplier=1.6,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=256))
    start = time.process_time()
    if wrap is not None:
        optimizer = DPNGD(optimizer, model, T=blocks * LOOP_STEPS, T_cur=LOOP_STEPS, shape=tuple(x.shape[1:]), **wrap)
    built = time.process_time() - start
    batches = (batch for _ in iter(int, 1) for batch in loader)

    def block() -> None:
        for _, (x, y) in zip(range(LOOP_STEPS), batches, strict=False):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return block, built, optimizer


def opacus_loops(runs: int) -> dict:
    """Milliseconds per step of whole runs, one thread, and their ratio to DP-SGD's; everything but construction counts.

    The contenders take turns block by block, and a block counts with its shortest time among the runs (CPU time, which
    other processes disturb least). `above` is the share of directions above the floor in each block: what whitening
    costs grows with it.
    """
    threads, blocks, out = torch.get_num_threads(), LOOP_BLOCKS, {}
    torch.set_num_threads(1)
    try:
        for name in PROGRAMS:
            times = {c: [[] for _ in range(blocks)] for c in LOOPS}
            above: dict[str, list[float]] = {}
            construction: dict[str, float] = {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opacus_loop(name, {}, 1)[0]()  # first calls allocate
                for _ in range(runs):
                    made = {c: opacus_loop(name, wrap, blocks) for c, wrap in LOOPS.items()}
                    construction |= {c: built for c, (_, built, _) in made.items() if LOOPS[c] is not None}
                    above = {c: [] for c in construction}
                    for i in range(blocks):
                        for c, (block, _, optimizer) in made.items():
                            start = time.process_time()
                            block()
                            times[c][i].append(1e3 * (time.process_time() - start) / LOOP_STEPS)
                            if c in above:
                                above[c].append(1 - optimizer.natural.geometry.clamped_share())
            ms = {c: statistics.mean(min(block) for block in blocks_) for c, blocks_ in times.items()}
            out[name] = {"ms_per_step": ms, "over_dp_sgd": {c: ms[c] / ms["dp-sgd"] for c in construction},
                         "construction_seconds": construction, "above": above,
                         "blocks": {c: [min(block) for block in blocks_] for c, blocks_ in times.items()}}
    finally:
        torch.set_num_threads(threads)
    return out


def loops_text(loops: dict) -> list[str]:
    lines = ["", "whole runs through Opacus, one thread: ms per step, refresh and probe passes included"]
    for name, row in loops.items():
        lines += [f"{name:18}{'ms/step':>9}{'/ dp-sgd':>10}{'construction':>14}  share above the floor, by block"]
        for c, ms in row["ms_per_step"].items():
            if c not in row["over_dp_sgd"]:
                lines.append(f"{c:18}{ms:9.1f}{1:10.2f}{'-':>14}")
                continue
            shares = " ".join(f"{100 * a:.1f}" for a in row["above"][c])
            lines.append(f"{c:18}{ms:9.1f}{row['over_dp_sgd'][c]:10.2f}{row['construction_seconds'][c]:12.2f} s  "
                         f"{shares} %")
    return lines


def private(name: str, gep_directions: int = GEP_DIRECTIONS) -> Callable[[Bench], Contender]:
    """Ours: a step of a registered method; the refresh is its public estimate (curvature, moments, basis)."""

    def build(bench: Bench) -> Contender:
        config = settings_of(name, bench, gep_directions)
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
        views = bench.micro_batch or views_at_once(per_sample.model, tuple(bench.x.shape[1:]),
                                                    workers.threads)
        views = bench.K * micro_batch_size(bench.K, views, samples=bench.B, threads=workers.threads)
        built = methods.build(Setting(config, per_sample, spends, tuple(bench.x.shape[1:]), bench.public,
                                      lambda: pieces(bench.x, bench.y, bench.K, views)))
        noise = seeded_noise(0)

        def step() -> None:
            with workers.alone():
                release = built.mechanism.release(pieces(bench.x, bench.y, bench.K, views), built.geometry,
                                                  per_sample.zeros(), noise, workers.map)
                s = built.steps(per_sample.to_params(release.direction), built.noise_kl).s
                per_sample.add_(release.direction, -s)

        def refresh() -> None:
            built.prepare(0)

        refresh()
        return Contender(step, refresh if "T_cur" in METHODS[name].uses else None)

    return build


def settings_of(name: str, bench: Bench, gep_directions: int = GEP_DIRECTIONS) -> RunConfig:
    """A config for the clock: what a step costs depends on shapes, and on the floor through the rank that it leaves."""
    values = {"C": 1.0, "C0": 10.0, "C1": 2.0, "gep_directions": gep_directions, "adadps_e": 1e-5, "T_cur": 1,
              "lambda_safe": bench.floor, "lambda_base": bench.floor, "T1": 0.1, "p": 10.0, "curvature_C": 1.0,
              "public": "noise", "public_size": len(bench.public), "pt_steps": 1, "pt_eta": 0.1,
              "kl_budget": 1e-3, "kl_noise": 1e-3, "probe": min(128, len(bench.public)), "floor_rank": 0.003,
              "clip_ratio": 0.1, "eta": 1e-6, "eta_sgd": 1e-6, "C_sgd": 1.0}
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

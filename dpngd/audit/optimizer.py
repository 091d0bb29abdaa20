"""The audit of an Opacus optimizer on a user's own module: `DPNGD`, or Opacus's own DPOptimizer.

Steps are taken as a user takes them (zero_grad, forward, backward, step), with the update itself switched off, so that
all of them are at the present weights. What the audit changes (weights, buffers, generator, schedule, accountant) is
put back at the end. Dropout is off while it runs: its random masks would hide what one sample does.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from opacus.optimizers import DPOptimizer
from scipy import optimize
from torch import Tensor, nn

from dpngd.audit import checks, estimators
from dpngd.audit import statistics as st
from dpngd.audit.checks import LEVEL, RELEASES, SMALLEST, Releases, Result, Z
from dpngd.audit.subject import DELTA, Seen, flat
from dpngd.errors import UsageError
from dpngd.gradients import Blocks
from dpngd.mechanism import GaussianMechanism
from dpngd.noise import Noise, stream

NUMBERS = 400_000  # noise values that the chi-square looks at
COMPANY = 8


class Harness:
    """Steps of an optimizer on chosen samples, and what its mechanism did in each."""

    def __init__(self, optimizer: DPOptimizer, model: nn.Module, x: Tensor, y: Tensor, loss: Callable, name: str):
        if not isinstance(optimizer, DPOptimizer):
            raise UsageError(f"optimizer is a {type(optimizer).__name__}: audit what make_private returned, or a DPNGD "
                             "around it")
        if len(x) != len(y) or len(x) < COMPANY + 1:
            raise UsageError(f"{len(x)} samples and {len(y)} targets: the audit needs at least {COMPANY + 1} of each")
        self.optimizer, self.model, self.loss, self.name = optimizer, model, loss, name
        self.x, self.y = x, y
        self.hooks = 0
        self.seen: list[Seen] = []
        self.interrupt: str | None = None
        self.loader: Any = None
        self.start = 0  # the schedule's step while the audit runs

    def step(self, x: Tensor, y: Tensor) -> Seen | None:
        """One step as a user takes it; None for a virtual step, which releases nothing."""
        before = len(self.seen)
        if hasattr(self.optimizer, "t"):  # the floor is a function of t: every step of the audit is the same one
            self.optimizer.t = self.start
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()
        return self.seen[-1] if len(self.seen) > before else None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The optimizer with its update off, its mechanism watched; all as before at the end."""
        o, model = self.optimizer, self.model
        weights = [(p, p.detach().clone()) for p in [*model.parameters(), *model.buffers()]]
        dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
        kept = {k: getattr(o, k) for k in ("t", "nonfinite", "step_hook", "noise_multiplier") if hasattr(o, k)}
        generator = None if o.generator is None else o.generator.get_state()
        natural = getattr(o, "natural", None)
        curvature = None if natural is None else (natural.estimate, natural.F)
        self.start = kept.get("t", 0)
        with contextlib.ExitStack() as stack:
            stack.callback(self._put_back, weights, kept, generator, curvature, dropouts)
            stack.enter_context(torch.random.fork_rng())
            for m in dropouts:
                m.eval()
            if natural is not None:  # sampled labels differ between refreshes: neighbours must see one F
                F_now = natural.estimate()
                natural.estimate = lambda: F_now
                natural.F = None
            o.step_hook = self._hook
            stack.enter_context(self._watch())
            yield

    def _put_back(self, weights: list, kept: dict, generator: Tensor | None, curvature: tuple | None,
                  dropouts: list[nn.Module]) -> None:
        o = self.optimizer
        with torch.no_grad():
            for p, value in weights:
                p.copy_(value)
        o._step_skip_queue.clear()
        o._is_last_step_skipped = False
        if hasattr(o, "_sums"):
            o._sums = None
        o.zero_grad()
        for name, value in kept.items():
            setattr(o, name, value)
        if generator is not None:
            o.generator.set_state(generator)
        if curvature is not None:
            o.natural.estimate, o.natural.F = curvature
        for m in dropouts:
            m.train()

    def _hook(self, *_: Any) -> None:
        self.hooks += 1

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """Watch what goes into the noise and comes out: in our mechanism, or else in Opacus's add_noise."""
        o, seen = self.optimizer, self.seen
        add, own, update = GaussianMechanism.add_noise, o.add_noise, o.original_optimizer.step

        def mechanism(m: GaussianMechanism, sums: list[Blocks], noise: Noise) -> list[Blocks]:
            if self.interrupt == "before the noise":
                raise KeyboardInterrupt
            noisy = add(m, sums, noise)
            if self.interrupt == "in the noise":
                raise KeyboardInterrupt
            seen.append(Seen(m, [[b.clone() for b in c] for c in sums], [[b.clone() for b in c] for c in noisy]))
            return noisy

        def opacus() -> None:
            before = len(seen)
            sums = [p.summed_grad.clone() for p in o.params] if _plain(o) else None
            if sums is not None and self.interrupt == "before the noise":
                raise KeyboardInterrupt
            own()
            if len(seen) == before and sums is not None:
                m = GaussianMechanism((o.max_grad_norm,), o.noise_multiplier, 1.0)
                seen.append(Seen(m, [sums], [[p.grad.clone() for p in o.params]]))
            if self.interrupt == "after the noise":
                raise KeyboardInterrupt

        GaussianMechanism.add_noise = mechanism
        o.add_noise = opacus
        o.original_optimizer.step = lambda *_, **__: None
        try:
            yield
        finally:
            GaussianMechanism.add_noise = add
            del o.add_noise
            o.original_optimizer.step = update

    def others(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Samples to add: of the given ones, and, for images, of every size and of no number."""
        x, y = self.x[COMPANY:], self.y[COMPANY:]
        for i in range(min(4, len(x))):
            yield f"sample {i}", x[i : i + 1], y[i : i + 1]
        if not x.is_floating_point():
            return
        for power in (-4, 1, 2, 4, 8, 15, 25, 37):
            yield f"1e{power}", (x[:1] * 10.0**power), y[:1]
        yield "zero", x[:1] * 0, y[:1]
        for value in (math.nan, math.inf):
            spoiled = x[:1].clone()
            spoiled.view(-1)[spoiled.numel() // 2] = value
            yield str(value), spoiled, y[:1]
        yield "opposite", -30 * x[:1], y[-1:]


def _plain(o: DPOptimizer) -> bool:
    """Whether Opacus's own sums are in use."""
    return all(getattr(p, "summed_grad", None) is not None for p in o.params)


def run(optimizer: DPOptimizer, model: nn.Module, x: Tensor, y: Tensor, *, loss: Callable = F.cross_entropy,
        public: Tensor | None = None, loader: Any = None, name: str = "Opacus optimizer", n: int = RELEASES,
        release: bool = False, deadline: float | None = None,
        keep: Callable[[Releases], None] = lambda r: None) -> list[Result]:
    """All tests of an optimizer, on samples x (at least 9), y: those of a method, and the state that it keeps."""
    bench = Harness(optimizer, model, x, y, loss, name)
    lines: list[Result] = []

    def check(test: str, function: Callable[[], list[Result]]) -> None:
        def alone() -> list[Result]:
            with bench.held():
                return function()

        lines.extend(checks.with_seconds(name, test, alone))

    def releases() -> list[Result]:
        r = draw(bench, n, deadline)
        keep(r)
        return [*checks.noise(r), *checks.canary(r), *checks.independence(r)]

    check("sensitivity", lambda: sensitivity(bench))
    check("releases", releases)
    check("state", lambda: state(bench))
    check("interrupts", lambda: interrupts(bench))
    check("virtual steps", lambda: virtual(bench))
    check("resume", lambda: resume(bench))
    check("end to end", lambda: end_to_end(bench))
    lines += checks.with_seconds(name, "public images", lambda: public_images(bench, public))
    lines += checks.with_seconds(name, "noise source", lambda: source(bench, release))
    if loader is not None:
        lines += checks.with_seconds(name, "inclusion", lambda: inclusion(name, loader))
    return lines


def sensitivity(b: Harness) -> list[Result]:
    """Adding one sample moves the clipped sum by at most max_grad_norm. As `checks.sensitivity`, through autograd."""
    worst, where, pairs = 0.0, "", 0
    for size in (1, COMPANY):
        company = b.x[:size], b.y[:size]
        before = b.step(*company)
        for name, x, y in b.others():
            after = b.step(torch.cat([company[0], x]), torch.cat([company[1], y]))
            distance = checks._distance([flat(c) for c in before.sums], [flat(c) for c in after.sums],
                                        after.mechanism.clips)
            pairs += 1
            if distance > worst:
                worst, where = distance, f"{name} beside {size}"
    return [Result(b.name, "sensitivity", f"{worst:.6f} C ({where}; {pairs} pairs)", "1 C", worst <= 1.0,
                   "any excess over C")]


def draw(b: Harness, n: int, deadline: float | None) -> Releases:
    """Releases with and without a canary, as `checks.draw_releases`; a large module needs fewer for the noise."""
    C, sigma = b.optimizer.max_grad_norm, b.optimizer.noise_multiplier
    std = sigma * C
    out = b.x[:COMPANY], b.y[:COMPANY]
    base = flat(b.step(*out).sums[0])
    best, batch, delta = -1.0, None, None
    for _, x, y in b.others():
        joined = torch.cat([out[0], x]), torch.cat([out[1], y])
        moved = flat(b.step(*joined).sums[0]) - base
        size = float(moved.norm())
        if math.isfinite(size) and size > best:
            best, batch, delta = size, joined, moved
    rows, scores, empty = [], ([], []), []
    hold = max(1, math.ceil(NUMBERS / len(base)))  # releases whose noise is kept
    for i in range(2 * n):
        if deadline is not None and i % 32 == 0 and i >= 2 * SMALLEST and time.monotonic() > deadline:
            break
        seen = b.step(*(batch if i % 2 else out))
        scores[i % 2].append(float((flat(seen.noisy[0]) - base) @ delta) / std**2)
        if i < max(hold, 16):
            rows.append((seen.noise()[0] / std).numpy())
    for _ in range(max(8, min(200, hold // 4))):
        seen = b.step(b.x[:0], b.y[:0])
        empty.append([block.detach().double().flatten().numpy() / std for block in seen.noisy[0]])
    return Releases(b.name, sigma, np.array(scores[1]), np.array(scores[0]), [np.stack(rows)], empty, 0.0, best / std)


def state(b: Harness) -> list[Result]:
    """A step changes no buffer: running statistics would carry exact batch means into the saved model."""
    before = {k: v.detach().clone() for k, v in b.model.named_buffers()}
    b.step(b.x[:COMPANY], b.y[:COMPANY])
    changed = [k for k, v in b.model.named_buffers() if not torch.equal(v, before[k])]
    return [Result(b.name, "buffers", f"{len(changed)} of {len(before)} change in a step{': ' if changed else ''}"
                   f"{', '.join(changed[:3])}", "0", not changed, "any bit")]


POINTS = ("before the noise", "in the noise", "after the noise")


def interrupts(b: Harness) -> list[Result]:
    """A step that is interrupted leaves nothing for the next one: its samples would count twice.

    KeyboardInterrupt at three points of a step, then zero_grad and a step. Its sums must be those of a fresh step.
    """
    clean = flat(b.step(b.x[:COMPANY], b.y[:COMPANY]).sums[0])
    worst, where = 0.0, "no point"
    for point in POINTS:
        b.interrupt = point
        with contextlib.suppress(KeyboardInterrupt):
            b.step(b.x[1 : COMPANY + 1], b.y[1 : COMPANY + 1])
        b.interrupt = None
        after = flat(b.step(b.x[:COMPANY], b.y[:COMPANY]).sums[0])
        distance = float((after - clean).norm()) / b.optimizer.max_grad_norm
        if not distance <= worst:
            worst, where = distance, point
    return [Result(b.name, "interrupted step", f"the next sums move by {worst:.2g} C (interrupt {where})", "1e-05 C",
                   worst <= 1e-5, "any sample left over")]


def virtual(b: Harness) -> list[Result]:
    """Two physical batches make one logical step: the same sums, one release, one entry in the accountant."""
    whole = flat(b.step(b.x[:COMPANY], b.y[:COMPANY]).sums[0])
    hooks, half = b.hooks, COMPANY // 2
    b.optimizer.signal_skip_step(True)
    first = b.step(b.x[:half], b.y[:half])
    b.optimizer.signal_skip_step(False)
    second = b.step(b.x[half:COMPANY], b.y[half:COMPANY])
    distance = float((flat(second.sums[0]) - whole).norm()) / b.optimizer.max_grad_norm
    counted = b.hooks - hooks
    good = first is None and counted == 1 and distance <= 1e-4
    return [Result(b.name, "virtual steps", f"sums differ by {distance:.1e} C, {counted} step(s) counted, "
                   f"{(first is not None) + 1} release(s)", "1e-04 C, 1 and 1", good, "any sample lost or doubled")]


def resume(b: Harness, n: int = 12) -> list[Result]:
    """The noise after a state_dict and load_state_dict is new. Power: a repeated vector."""
    rows = []
    for _ in range(2):
        rows += [(b.step(b.x[:0], b.y[:0]).noise()[0] / b.optimizer.max_grad_norm).numpy() for _ in range(n)]
        b.optimizer.load_state_dict(b.optimizer.state_dict())
    lines = checks._correlations(b.name, "resume", np.stack(rows), lags=(1, n))
    return [line for line in lines if line.test.endswith("any two")]


COINS = 96  # samples of the end-to-end test, each in the set by a fair coin


def end_to_end(b: Harness, T: int = 8) -> list[Result]:
    """A lower bound of epsilon from one run of T steps on samples that are in by a fair coin, as `checks.end_to_end`.

    The run is at the present weights, of whole batches (q = 1), with the noise multiplier at which T steps spend
    `checks.END`: at the user's own, of a larger epsilon, no number of samples that is at hand would refute it. The
    samples are those given, at most COINS. A lower bound only. Power: a run without noise, from 80 samples on (50 with
    our own estimator).
    """
    epsilon, delta = checks.END["epsilon"], checks.END["delta"]
    m = min(COINS, len(b.x))
    x, y = b.x[:m], b.y[:m]
    coins = torch.rand(m, generator=stream(0, "audit/coins")) < 0.5
    mu = optimize.brentq(lambda mu: st.gdp_delta(mu, epsilon) - delta, 1e-3, 1.0)
    b.optimizer.noise_multiplier = sigma = math.sqrt(T) / mu
    std = sigma * b.optimizer.max_grad_norm
    G = torch.stack([flat(b.step(x[i : i + 1], y[i : i + 1]).sums[0]) for i in range(m)]) / std
    noisy = sum(flat(b.step(x[coins], y[coins]).noisy[0]) for _ in range(T)) / std
    scores = torch.linalg.solve(G @ G.mT + checks.ATTACK**2 * torch.eye(m, dtype=G.dtype), G @ noisy)
    low, how = estimators.from_one_run(scores.numpy(), coins.numpy(), delta, LEVEL)
    best, _ = estimators.from_one_run(coins.numpy() + np.arange(m) / (2 * m), coins.numpy(), delta, LEVEL)
    return [Result(b.name, "end to end", f"epsilon >= {low:.2f} ({how})", f"{epsilon:g}", low <= epsilon,
                   "missing noise" if best > epsilon else f"nothing: {m} samples are too few, give 80 or more", LEVEL)]


def public_images(b: Harness, public: Tensor | None) -> list[Result]:
    """No public image is one of the given private samples: curvature from them would be a release nobody pays for.

    Power: equal images, and images that differ by less than 2 % of their spread on average.
    """
    kfac = getattr(b.optimizer, "kfac", None)
    public = kfac.x if public is None and kfac is not None else public
    if public is None:
        return []
    a, c = public.detach().flatten(1).float(), b.x.detach().flatten(1).float()
    if a.shape[1] != c.shape[1]:
        raise UsageError(f"public images have {a.shape[1]} values and private ones {c.shape[1]}: pass both as the "
                         "model gets them")
    spread = float(c.std()) * math.sqrt(c.shape[1])
    near = (torch.cdist(a, c) < 0.02 * spread).any(1)
    return [Result(b.name, "public images", f"{int(near.sum())} of {len(a)} are among the {len(c)} private ones given",
                   "0", not near.any(), "equal or nearly equal images")]


def source(b: Harness, release: bool) -> list[Result]:
    """Where the noise comes from: the caller's generator can be seeded, so weights trained with it are no release."""
    seeded = b.optimizer.generator is not None and not b.optimizer.secure_mode
    what = "the caller's generator (research: its noise can be computed again)" if seeded else "Opacus's or our default"
    return [Result(b.name, "noise source", what, "not a seeded generator" if release else "any (research)",
                   not (seeded and release), "a generator of the caller's")]


def inclusion(name: str, loader: Any, decisions: int = 200_000) -> list[Result]:
    """Each sample is in a batch with probability 1 / len(loader), as the accountant takes it. Power as for a method."""
    sampler = getattr(loader, "batch_sampler", None)
    N, steps = len(loader.dataset), len(loader)
    q = getattr(sampler, "sample_rate", 1 / steps)
    total = batches = 0
    sizes = []
    while batches * N < decisions:
        for batch in sampler:
            total, batches = total + len(batch), batches + 1
            sizes.append(len(batch))
    p, variance = st.count_p(total, batches * N, q), N * q * (1 - q)
    fourth = 3 * variance**2 + variance * (1 - 6 * q * (1 - q))
    z = (float(np.mean((np.array(sizes) - N * q) ** 2)) - variance) / math.sqrt((fourth - variance**2) / batches)
    return [Result(name, "inclusion rate", f"{total / (batches * N):.5f} over {batches * N:,} draws",
                   f"q = {q:.5f}, p >= {LEVEL:.0e}", p >= LEVEL,
                   f"q off by {100 * (Z + 2.33) * math.sqrt((1 - q) / q / batches / N):.1f} %", LEVEL),
            Result(name, "batch size", f"variance {float(np.var(sizes)):.2f}", f"{variance:.2f}, |z| <= {Z:.1f}",
                   abs(z) <= Z, "batches of a fixed size", LEVEL)]


def spent(history: list[tuple[float, float, int]], epsilon: float, delta: float = DELTA,
          name: str = "Opacus optimizer") -> Result:
    """An accountant's history [(sigma, q, steps), ...] of one q spends at most the epsilon that it reports."""
    rates = {q for _, q, _ in history}
    if len(rates) != 1:
        raise UsageError(f"the history has {len(rates)} sampling rates: the audit composes releases of one rate")
    low, high = st.sampled_epsilon([(s, n) for s, _, n in history], rates.pop(), delta)
    return Result(name, "accounting", f"epsilon {low:.3f} to {high:.3f}", f"{epsilon:.3f} at delta {delta:g}",
                  low <= epsilon, "0.5 % of epsilon")

"""The tests of the audit, one function each. A function takes a subject and returns its lines (`Result`).

Each docstring says what is measured, against which limit, and how small a leak is found with probability 0.99
(the power). Deterministic tests have no level: they cannot raise a false alarm on correct code. The others share
`FALSE_ALARM` by Bonferroni over `TESTS`, both fixed here, before anything is measured.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from dpngd import methods
from dpngd.audit import estimators
from dpngd.audit import statistics as st
from dpngd.audit.subject import DELTA, VALUES, Seen, Session, Subject, flat, images, targets, watched
from dpngd.errors import UsageError
from dpngd.gradients import SampleGradients
from dpngd.layers.forms import Dense
from dpngd.noise import stream

FALSE_ALARM = 0.005  # of a whole audit of correct code
TESTS = 500  # statistical tests that an audit may make; all methods and the Opacus optimizer make about 250
LEVEL = FALSE_ALARM / TESTS  # of each of them
Z = float(special.ndtri(1 - LEVEL / 2))
RELEASES = 2000  # with the canary, and as many without
SMALLEST = 200
CANARY_EPSILON = 20.0  # one release at q = 1: a large mu shows small relative shortfalls (see `canary`)


@dataclass(frozen=True)
class Result:
    """One line: what was measured, the limit, whether it is kept, and how small a leak the test sees."""

    subject: str
    test: str
    measured: str
    limit: str
    passed: bool
    power: str = "exact"
    level: float | None = None  # None: deterministic
    seconds: float = 0.0  # of CPU time

    def line(self) -> str:
        return (f"{'pass' if self.passed else 'FAIL'}  {self.subject:22} {self.test:22} {self.measured}; limit "
                f"{self.limit}; sees {self.power}")

    def to_dict(self) -> dict:
        return {**asdict(self), "passed": bool(self.passed)}  # numpy has a bool of its own, which JSON does not take


def refused(subject: Subject | str, test: str, error: Exception) -> Result:
    """The product itself refuses: no release, and a failure of the audit, since nothing could be measured."""
    name = subject if isinstance(subject, str) else subject.method
    return Result(name, test, f"refused: {error}", "a run", False, "what the product refuses")


# ---- Sensitivity.


def adversaries(seed: int = 0) -> Iterator[tuple[str, Tensor, int]]:
    """Images of somebody who may choose every pixel, with a label each."""
    base = images(6, "adversaries", seed)
    for power in (-6, -2, 0, 1, 2, 4, 8, 15, 25, 37):
        yield f"1e{power}", base[0] * 10.0**power, power % 4
    yield "zero", base[1] * 0, 1
    yield "constant", torch.ones_like(base[1]) * 50, 2
    yield "one pixel", torch.zeros_like(base[1]).index_fill(2, torch.tensor([2]), 1e3), 3
    for value in (math.nan, math.inf):
        spoiled = base[2].clone()
        spoiled[0, 3, 3] = value
        yield str(value), spoiled, 0
    yield "opposite", -30 * base[0], 1


def gradient_adversaries(run: Session, seed: int = 0) -> Iterator[tuple[str, SampleGradients]]:
    """Gradients that no image need have: along what L stretches and shrinks most, and of every size."""
    zeros, g = run.per_sample.zeros(), stream(seed, "audit/gradients")
    dtype = zeros[0].dtype

    def sample(blocks: list[Tensor], scale: float) -> SampleGradients:
        return SampleGradients([Dense((scale * b)[None].to(dtype)) for b in blocks], zeros[0].new_zeros(1))

    noise = [torch.randn(z.shape, generator=g, dtype=torch.float64) for z in zeros]
    shapes = [z.shape for z in zeros]
    stretched = noise
    for _ in range(8):  # power iteration; L is symmetric or a projection, channel 0 maps to the same shapes or fewer
        image = run.built.geometry.into([stretched for _ in run.built.mechanism.clips])[-1]
        if [b.shape for b in image] != shapes:
            break
        size = float(flat(image).norm())
        stretched = [b.double() / size for b in image]
    public = run.gradients(images(1, "steep", seed).to(dtype) * 5, torch.tensor([1]))[0]
    steep = [layer.materialise()[0].double() for layer in public.layers]
    for name, blocks in (("random", noise), ("stretched", stretched), ("steep", steep)):
        for scale in (1e-12, 1.0, 1e6, 1e15, 1e25):
            yield f"{name} gradient {scale:g}", sample(blocks, scale)


def distances(run: Session, K: int) -> Iterator[tuple[float, str]]:
    """||s_j(D + sample) - s_j(D)|| / C_j of every adversary in several companies, the largest over the channels."""
    clips = run.built.mechanism.clips
    for size, micro in ((0, 64), (1, 64), (7, 64), (20, 8)):
        rows = torch.arange(size)
        company = run.rows(rows)
        before = run.sums(run.gradients(*company, micro))
        for name, image, label in adversaries():
            views = torch.stack([image if k == 0 else image.flip(-1) * (1 + k) for k in range(K)]).to(run.x.dtype)
            for front in (False, True):
                parts = [(views, torch.tensor([label])), company]
                joined = [torch.cat(t) for t in zip(*(parts if front else parts[::-1]), strict=True)]
                yield _distance(before, run.sums(run.gradients(*joined, micro)), clips), f"{name} beside {size}"
        if size == 7 and K == 1:
            company_g = run.gradients(*company, micro)
            for name, g in gradient_adversaries(run):
                yield _distance(before, run.sums([*company_g, g]), clips), f"{name} beside {size}"
    duplicate = torch.tensor([0, 1, 1, 1, 2])
    yield _distance(run.sums(run.gradients(*run.rows(duplicate[:-2]))),
                    run.sums(run.gradients(*run.rows(duplicate[:-1]))), clips), "duplicate"


def _distance(before: list[Tensor], after: list[Tensor], clips: tuple[float, ...]) -> float:
    worst = max(float((b - a).norm()) / C for a, b, C in zip(before, after, clips, strict=True))
    return worst if math.isfinite(worst) else math.inf


def sensitivity(subject: Subject, seed: int = 0) -> list[Result]:
    """Adding or removing one sample moves channel j's sum by at most C_j.

    Measured: the largest distance over pairs of batches that differ in one sample, which an adversary chooses (images
    of 16 kinds, gradients of 15, K = 1 and 2 views, 4 companies, first and last place). Limit: C exactly; without a
    floor the guarantee is of exact arithmetic, so `dp-ngd-no-floor` is measured in float64.
    Power: any excess over C by one of these samples; rounding alone stays below the mechanism's margin of 1e-5 C.
    """
    worst, where, pairs = 0.0, "", 0
    entry = methods.method(subject.method)
    exact = entry.floor == "none" and bool(entry.left)
    own = subject.but(network=lambda: subject.network().double()) if exact else subject
    for K in (1, 2):
        x, y = images(20 * K, "company", seed), targets(20, "company", seed)
        run = own.start(x, y, epsilon=CANARY_EPSILON, T=1, q=1.0, K=K, seed=seed)
        run.built.prepare(0)
        for distance, name in distances(run, K):
            pairs += 1
            if distance > worst:
                worst, where = distance, f"{name}, K = {K}"
    note = " in float64" if exact else ""
    return [Result(subject.method, "sensitivity", f"{worst:.6f} C ({where}; {pairs} pairs{note})", "1 C",
                   worst <= 1.0, "any excess over C"),
            *_own_sensitivity(own, seed)]


def _own_sensitivity(subject: Subject, seed: int) -> list[Result]:
    """The same for releases that the method makes on its own (private curvature): with and without the last sample."""
    worst, clips, pairs = 0.0, None, 0
    company = images(7, "company", seed), targets(7, "company", seed)
    for _, image, label in adversaries(seed):
        pair = []
        for joined in (company, (torch.cat([company[0], image[None]]), torch.cat([company[1], torch.tensor([label])]))):
            run = subject.start(*joined, epsilon=CANARY_EPSILON, T=1, q=1.0, seed=seed, B=8)
            with watched() as seen:
                run.built.prepare(0)
            if not seen:
                return []
            pair.append([flat(channel) for channel in seen[0].sums])
            clips = seen[0].mechanism.clips
        pairs += 1
        worst = max(worst, _distance(pair[0], pair[1], clips))
    return [Result(subject.method, "sensitivity, curvature", f"{worst:.6f} C ({pairs} pairs)", "1 C", worst <= 1.0,
                   "any excess over C")]


# ---- Noise, canary, independence: all from the same releases.


@dataclass
class Releases:
    """Releases of one batch with and without a canary, at fixed weights and q = 1."""

    name: str
    sigma: float
    scores_in: np.ndarray
    scores_out: np.ndarray
    noise: list[np.ndarray]  # by channel, (releases, coordinates), in units of what the guarantee asks for
    empty: list[list[np.ndarray]]  # noise of releases of no sample at all, block by block
    direction_error: float
    mu: float  # the canary's exact distance, sqrt(sum_j ||Delta_j||^2 / std_j^2)


def draw_releases(subject: Subject, n: int = RELEASES, seed: int = 0, deadline: float | None = None) -> Releases:
    """2 n releases of one batch, in turn with and without a canary, and n / 4 of an empty batch.

    The canary is the adversary whose sample moves the sums most. Its score is the log-likelihood ratio of the noisy
    channels up to constants, sum_j <noisy_j - s_j, Delta_j> / std_j^2: no test of one release is stronger.
    """
    x, y = images(8, "company", seed), targets(8, "company", seed)
    run = subject.start(x, y, epsilon=CANARY_EPSILON, T=1, q=1.0, seed=seed)
    run.built.prepare(0)
    stds = run.stds()
    out = run.gradients(run.x, run.y)
    base = run.sums(out)
    best, batch, delta = -1.0, None, None
    for _, image, label in adversaries(seed):
        with_canary = run.gradients(torch.cat([run.x, image[None].to(run.x.dtype)]),
                                    torch.cat([run.y, torch.tensor([label])]))
        moved = [a - b for a, b in zip(run.sums(with_canary), base, strict=True)]
        size = math.sqrt(sum(float(m.square().sum()) / s**2 for m, s in zip(moved, stds, strict=True)))
        if math.isfinite(size) and size > best:
            best, batch, delta = size, with_canary, moved
    scores: tuple[list, list] = ([], [])
    noise: list[list[np.ndarray]] = [[] for _ in stds]
    error = 0.0
    for i in range(2 * n):
        if deadline is not None and i % 64 == 0 and i >= 2 * SMALLEST and time.monotonic() > deadline:
            break
        seen = run.release(batch if i % 2 else out)
        scores[i % 2].append(sum(float((flat(channel) - b) @ m) / s**2 for channel, b, m, s in
                                 zip(seen.noisy, base, delta, stds, strict=True)))
        for channel, values, s in zip(noise, seen.noise(), stds, strict=True):
            channel.append((values / s).numpy())
        if i < 8:
            error = max(error, _direction_error(run, seen))
    empty = []
    for _ in range(max(50, len(scores[0]) // 4)):
        seen = run.release([])
        empty.append([b.double().flatten().numpy() / s for channel, s in zip(seen.noisy, stds, strict=True)
                      for b in channel])
    return Releases(subject.method, run.spends[0].sigma, np.array(scores[1]), np.array(scores[0]),
                    [np.stack(c) for c in noise], empty, error, best)


def _direction_error(run: Session, seen: Seen) -> float:
    """How far the direction is from R(noisy) / B: the rest of the step must be this function and nothing else."""
    expected = flat(run.built.geometry.back(seen.noisy)) / run.config.B
    error = float((flat(seen.direction) - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf


def post_processing(r: Releases) -> list[Result]:
    """The direction is R(noisy channels) / B and nothing else. Power: any other function, from 1e-6 relative."""
    return [Result(r.name, "post-processing", f"direction differs from R(noisy)/B by {r.direction_error:.1e}",
                   "1e-06", r.direction_error <= 1e-6, "any other divisor")]


def noise(r: Releases) -> list[Result]:
    """The noise has standard deviation sigma sqrt(J) C_j in every channel, normal tails, and no grid of 24 bits.

    Variance: chi-square over all coordinates of all releases, per channel, on both sides. Tail: how many of them exceed
    3 and 4 standard deviations, and the largest. Grid: see `statistics.grid_distance`.
    Power: a shortfall of 0.6 % with 600,000 numbers, and of 1.1 % with the 180,000 of the smallest channel; a tail cut
    below 4.3 standard deviations by the largest number, and single precision's at 5.77 by the grid.
    """
    variances = [_variance(r.name, "noise" if len(r.noise) == 1 else f"noise, channel {j}", z)
                 for j, z in enumerate(r.noise)]
    return [*variances, *_tail(r.name, np.concatenate([z.ravel() for z in r.noise])), _grid(r.name, r.empty)]


def _variance(name: str, test: str, z: np.ndarray) -> Result:
    ratio = float(np.sqrt(np.mean(np.square(z, dtype=np.float64))))
    score = st.variance_z(z)
    return Result(name, test, f"{ratio:.4f} sigma C over {z.size:,} numbers (z = {score:.1f})", f"1, |z| <= {Z:.1f}",
                  abs(score) <= Z, f"{100 * st.shortfall_power(z.size, LEVEL):.1f} % short", LEVEL)


def _tail(name: str, z: np.ndarray) -> list[Result]:
    n, size = z.size, np.abs(z)
    lines = []
    for level in (3, 4):
        p = 2 * float(special.ndtr(-level))
        k = int((size > level).sum())
        seen = (Z + 2.33) / math.sqrt(n * p)
        lines.append(Result(name, f"tail beyond {level}", f"{k} of {n:,} (expected {n * p:.0f})", f"p >= {LEVEL:.0e}",
                            st.count_p(k, n, p) >= LEVEL,
                            f"{100 * seen:.0f} % of them {'missing or ' if seen < 1 else ''}too many", LEVEL))
    largest = float(size.max()) if np.isfinite(size).all() else math.inf
    # The cut that the maximum shows: the value that n numbers exceed but for LEVEL/2.
    cut = float(-special.ndtri(-math.log(LEVEL / 2) / n / 2))
    lines.append(Result(name, "largest", f"{largest:.2f} sigma C of {n:,}", f"p >= {LEVEL:.0e}",
                        st.max_p(largest, n) >= LEVEL, f"a tail cut below {cut:.1f}", LEVEL))
    return lines


def _grid(name: str, empty: list[list[np.ndarray]]) -> Result:
    blocks = [b for draw in empty for b in draw]
    distance, pairs = st.grid_distance(blocks)
    spread = math.sqrt(1 / 48 / max(1, pairs))
    z = (0.25 - distance) / spread if pairs else 0.0
    limit = float(special.ndtri(1 - LEVEL / len(st.LAYOUTS)))
    return Result(name, "float32 tail", f"radii {distance:.3f} from 24-bit steps over {pairs} pairs of "
                  f"{sum(b.size for b in blocks):,} numbers", f"{0.25 - limit * spread:.3f} at least", z <= limit,
                  "noise drawn in float32", LEVEL)


def canary(r: Releases) -> list[Result]:
    """Nobody can tell a canary from one release better than a Gaussian mechanism with sigma allows.

    Measured: the lower limit of mu, the distance of the scores with and without the canary (noncentral t); and without
    any assumption the lower limit of epsilon by Clopper-Pearson. Limits: 1/sigma and its epsilon at delta.
    Power: with 2,000 scores on each side and sigma = 0.29 a mu that is 10 % too large; missing sqrt(2) of a second
    channel is 41 %. Clopper-Pearson sees only gross leaks (epsilon above 5), since few scores bound few rates.
    """
    name, sigma = r.name, r.sigma
    mu, low = st.mu_lower(r.scores_in, r.scores_out, LEVEL)
    n, claim = min(len(r.scores_in), len(r.scores_out)), 1 / sigma
    epsilon, how = estimators.from_scores(r.scores_in, r.scores_out, DELTA, LEVEL)
    allowed = st.gdp_epsilon(claim, DELTA)
    return [
        Result(name, "canary, mu", f"mu >= {low:.3f} (estimate {mu:.3f}, exact {r.mu:.3f}) from {n} + {n} scores",
               f"1/sigma = {claim:.3f}", low <= claim and r.mu <= claim * (1 + 1e-9),
               f"mu {100 * (st.mu_power(claim, n, LEVEL) / claim - 1):.0f} % too large", LEVEL),
        Result(name, "canary, epsilon", f"epsilon >= {epsilon:.2f} ({how})", f"{allowed:.2f}",
               epsilon <= allowed, "gross leaks only", LEVEL),
    ]


def independence(r: Releases) -> list[Result]:
    """The noise of a release tells nothing of the noise of another.

    Measured: the correlation of releases at distance 1, 2 and 3, over all coordinates, and the largest of any two
    releases. Power: a correlation of 0.009 at these distances (600,000 numbers), and any repeated vector.
    """
    z = np.concatenate(r.noise, axis=1)
    return _correlations(r.name, "independence", z)


def _correlations(name: str, test: str, z: np.ndarray, lags: tuple[int, ...] = (1, 2, 3)) -> list[Result]:
    n, d = z.shape
    scores = {lag: float((z[:-lag] * z[lag:]).sum()) / math.sqrt((n - lag) * d) for lag in lags}
    lag = max(scores, key=lambda k: abs(scores[k]))
    limit = float(special.ndtri(1 - LEVEL / 2 / len(lags)))
    seen = (limit + 2.33) / math.sqrt((n - lag) * d)
    some = z[:: max(1, n // 400)][:400]  # any two of at most 400 releases
    unit = some / np.linalg.norm(some, axis=1, keepdims=True)
    products = np.abs(np.triu(unit @ unit.T, 1))
    pairs = len(some) * (len(some) - 1) // 2
    # The cosine of two independent normal vectors: its square is Beta(1/2, (d - 1) / 2).
    bound = math.sqrt(float(stats.beta.isf(LEVEL / pairs, 0.5, (d - 1) / 2))) if d > 1 else 1.0
    return [
        Result(name, test, f"correlation {scores[lag] / math.sqrt((n - lag) * d):+.5f} at distance {lag}",
               f"|z| <= {limit:.1f}, z = {scores[lag]:.1f}", bool(abs(scores[lag]) <= limit), f"correlation {seen:.3f}",
               LEVEL),
        Result(name, f"{test}, any two", f"largest cosine {float(products.max()):.3f} of {pairs:,} pairs",
               f"{bound:.3f}", bool(products.max() <= bound), "a repeated vector", LEVEL),
    ]


def own_noise(subject: Subject, n: int, seed: int = 0) -> list[Result]:
    """The noise of releases that the method makes on its own (private curvature), as in `noise`."""
    x, y = images(8, "company", seed), targets(8, "company", seed)
    run = subject.start(x, y, epsilon=CANARY_EPSILON, T=2 * n, q=1.0, seed=seed, T_cur=1)
    channels: list[list[np.ndarray]] = []
    for t in range(n):
        with watched() as seen:
            run.built.prepare(t)
        if not seen:
            return []
        for s in seen:
            J = len(s.mechanism.clips)
            channels = channels or [[] for _ in range(J)]
            for channel, values, C in zip(channels, s.noise(), s.mechanism.clips, strict=True):
                channel.append((values / (run.spends[1].sigma * math.sqrt(J) * C)).numpy())
    z = [np.stack(c) for c in channels]
    return [*[_variance(subject.method, f"noise, curvature {j}", c) for j, c in enumerate(z)],
            *_correlations(subject.method, "independence, curvature", np.concatenate(z, 1))]


def across_runs(subjects: list[Subject], name: str, n: int = 24, seed: int = 0) -> list[Result]:
    """Runs of one seed share no noise: in a release it comes from the operating system, not from the seed.

    Measured: releases of no sample, n for each run, with two runs for each method and epsilon, all of the same seed;
    the correlation of the same step in different runs, and the largest of any two releases. Also variance and grid.
    Power: any repeated vector; a correlation of 0.05 between runs.
    """
    rows, empty = [], []
    for subject in subjects:
        for epsilon in (4.0, CANARY_EPSILON):
            for _ in range(2):
                x, y = images(8, "company", seed), targets(8, "company", seed)
                run = subject.start(x, y, epsilon=epsilon, T=1, q=1.0, seed=seed)
                run.built.prepare(0)
                (std,) = run.stds()
                for _ in range(n):
                    noisy = run.release([]).noisy[0]
                    empty.append([b.double().flatten().numpy() / std for b in noisy])
                    rows.append(flat(noisy).numpy() / std)
    z = np.stack(rows)
    return [_variance(name, "noise", z), _grid(name, empty),
            *_correlations(name, "independence of runs", z, lags=(n, 2 * n, 4 * n))]


# ---- Accounting.

RUN = {"epsilon": 4.0, "T": 12, "q": 0.25}
"""The run whose accounting is looked at: 64 samples, batches of 16."""


def accounting(subject: Subject, seed: int = 0) -> list[Result]:
    """What a run spends by its sigma, q and T is at most the epsilon that it was given.

    Measured: the releases of a whole run, counted by the spy with the sigma of each; the epsilon of all of them
    together at the sampler's q, by a privacy loss distribution of the audit's own. Its optimistic end is compared: it
    is below the true epsilon, so a failure is certain. Power: 0.5 % of epsilon, one release more than paid for.
    """
    x, y = images(64, "accounting", seed), targets(64, "accounting", seed)
    run = subject.start(x, y, seed=seed, T_cur=4, **RUN)
    T = run.config.T
    with watched() as own:
        for t in range(T):
            run.step(t)
    extra = [s for s in own if s.mechanism is not run.built.mechanism]
    counted = {"gradients": len(own) - len(extra) or T}  # a mechanism with a release of its own is not in `own`
    parts = [(run.built.mechanism.sigma, counted["gradients"])]
    if extra:
        counted["curvature"] = len(extra)
        parts.append((extra[0].mechanism.sigma, len(extra)))
    paid = {s.purpose: s.releases(T) for s in run.spends}
    sigmas = sorted(s.sigma for s in run.spends) == sorted(sigma for sigma, _ in parts)
    low, high = st.sampled_epsilon(parts, run.q, DELTA)
    return [
        Result(subject.method, "accounting", f"epsilon {low:.3f} to {high:.3f} of " +
               " + ".join(f"{n} releases at sigma {s:.3f}" for s, n in parts) + f", q {run.q:g}",
               f"{run.config.epsilon:g} at delta {DELTA:g}", low <= run.config.epsilon, "0.5 % of epsilon"),
        Result(subject.method, "releases", f"{counted}, {run.draws} draws beyond the gradients' batches",
               f"{paid}, at the planned sigmas", counted == paid and sigmas and run.draws == len(extra),
               "one release more than paid for"),
    ]


def inclusion(subject: Subject, seed: int = 0, draws: int = 4000, *, source: Any = None,
              name: str = "sampler") -> list[Result]:
    """Each sample is in a batch with probability q, independently of the others and of earlier batches.

    Measured: all inclusions (binomial), each sample's (chi-square), the variance of the batch size, and how often a
    sample is in two batches that follow one another. Power: q off by 2.3 %, one sample's by 30 %, batches of a fixed
    size, shuffled epochs.
    """
    N, B = 64, 16
    sampler = subject.sampler(N, B, stream(seed, "audit/inclusion") if source is None else source)
    taken = np.zeros((draws, N), dtype=bool)
    for row in taken:
        row[sampler.draw().numpy()] = True
    q, n = B / N, draws * N
    total = int(taken.sum())
    chi = float(((taken.sum(0) - draws * q) ** 2).sum()) / (draws * q * (1 - q))
    p_each = 2 * min(stats.chi2.cdf(chi, N), stats.chi2.sf(chi, N))
    sizes = taken.sum(1)
    p_total = st.count_p(total, n, q)
    # The batch size is binomial; with 4,000 of them its mean square deviation is normal to a good approximation.
    variance = N * q * (1 - q)
    fourth = 3 * variance**2 + variance * (1 - 6 * q * (1 - q))  # E (b - Nq)^4 of a binomial
    z_size = (float(((sizes - N * q) ** 2).mean()) - variance) / math.sqrt((fourth - variance**2) / draws)
    both = int((taken[0::2] & taken[1::2]).sum())
    p_both = st.count_p(both, n // 2, q * q)
    return [
        Result(name, "inclusion rate", f"{total / n:.5f} over {n:,} draws", f"q = {q:g}, p >= {LEVEL:.0e}",
               p_total >= LEVEL, f"q off by {100 * (Z + 2.33) * math.sqrt((1 - q) / q / n):.1f} %", LEVEL),
        Result(name, "inclusion, each", f"chi-square {chi:.0f} of {N} samples", f"p >= {LEVEL:.0e}",
               bool(p_each >= LEVEL), "one sample's rate off by 30 %", LEVEL),
        Result(name, "batch size", f"variance {float(sizes.var()):.2f}", f"{variance:.2f}, |z| <= {Z:.1f}",
               abs(z_size) <= Z, "batches of a fixed size", LEVEL),
        Result(name, "inclusion, in turn", f"{both} of {n // 2:,} in two batches in a row",
               f"{n // 2 * q * q:.0f}, p >= {LEVEL:.0e}", p_both >= LEVEL, "shuffled epochs", LEVEL),
    ]


# ---- State.


def state(subject: Subject, seed: int = 0) -> list[Result]:
    """Nothing but the releases carries private data from one step to the next.

    Two runs on unrelated private sets of 12 and of 9 samples, with the same noise, and with the exact sums of every
    release replaced by zeros. All that is left must agree bit for bit: L and R on a probe, the direction, the weights,
    the buffers. Power: any bit. (A divisor or a floor from the batch, curvature from private images, running
    statistics, a public set that is the private one.) Diagnostics are not compared: they are outside the guarantee.
    """
    traces, names = [], []
    for name, n in (("one", 12), ("other", 9)):
        x, y = images(n, f"state/{name}", seed), targets(n, f"state/{name}", seed)
        run = subject.start(x, y, epsilon=CANARY_EPSILON, T=4, q=1.0, seed=seed, T_cur=2, B=10)
        probe = [torch.randn(z.shape, generator=stream(0, "audit/probe"), dtype=torch.float64).to(z.dtype)
                 for z in run.per_sample.zeros()]
        trace: list[tuple[str, Tensor]] = []
        with watched(censor=True):
            for t in range(4):
                run.step(t, torch.arange(n), censor=True)
                mapped = run.built.geometry.into([[b.double() for b in probe] for _ in run.built.mechanism.clips])
                trace += [(f"L at step {t}", flat(channel)) for channel in mapped]
                trace += [(f"weights after step {t}", flat(list(run.model.parameters())))]
                trace += [(f"buffer {k}", b.detach().double().flatten()) for k, b in run.model.named_buffers()]
        traces.append(trace)
    for (name, a), (_, b) in zip(*traces, strict=True):
        if not torch.equal(a, b):
            names.append(name)
    found = f"{len(names)} of {len(traces[0])} values differ" + (f": {', '.join(dict.fromkeys(names[:3]))}"
                                                                 if names else "")
    return [Result(subject.method, "state", found, "0", not names, "any bit")]


# ---- The training loop.

LOOP = {"data": "digits", "model": "small", "epsilon": 4.0, "N": 200, "B": 40, "T": 6, "evals": 1}
"""A run of `dpngd.training` on scikit-learn's digits with made-up public images: nothing is downloaded."""


def loop(method: str, seed: int = 0) -> list[Result]:
    """The training loop itself releases what its record says: T releases, the stated noise, new in each step.

    Measured: every release of one `dpngd.training.train.run` (24,314 parameters), seen by the spy: how many, their
    noise in units of sigma sqrt(J) C_j, its correlation between steps; and the record's own sigma, q and T through the
    audit's accountant. Power: one release too many, 1.2 % of the noise, a correlation of 0.02, 0.5 % of epsilon.
    Needs scikit-learn (the extra `train`); without it there are no lines.
    """
    ran = _train(method, seed)
    if ran is None:
        return []
    seen, record, config = ran
    p = record.privacy
    kinds: dict[float, list[Seen]] = {}
    for s in seen:
        kinds.setdefault(s.mechanism.sigma, []).append(s)
    counted = sorted((sigma, len(group)) for sigma, group in kinds.items())
    stated = sorted((part["sigma"], part["releases"]) for part in p["parts"])
    low, high = st.sampled_epsilon(stated, p["q"], p["delta"])
    z = np.stack([_unit(s, p["sigma"]) for s in kinds[p["sigma"]]])
    return [
        Result(method, "loop, releases", f"{[n for _, n in counted]} at the recorded sigmas",
               f"{[n for _, n in stated]}", counted == stated, "one release more than recorded"),
        Result(method, "loop, record", f"epsilon {low:.3f} to {high:.3f} of the recorded sigma, q {p['q']:g} and T",
               f"{p['epsilon_prv']:.3f} recorded, {config.epsilon:g} given",
               low <= p["epsilon_prv"] <= config.epsilon + 1e-9, "0.5 % of epsilon"),
        _variance(method, "loop, noise", z), *_correlations(method, "loop, independence", z, lags=(1, 2)),
    ]


def _train(method: str, seed: int, note: list[Seen] | None = None,
           **options: Any) -> tuple[list[Seen], Any, Any] | None:
    """Every release of a training run, its record and its config; None without the packages that training needs.

    `note` gets the releases too, also those of a run that is interrupted.
    """
    try:
        train, config_of = (importlib.import_module(f"dpngd.training.{m}") for m in ("train", "config"))
        own = {k: VALUES[k] for k in methods.method(method).uses}
        config = config_of.RunConfig.from_dict(
            {**LOOP, "method": method, "seed": seed, **own, **({"public": "noise"} if "public" in own else {}),
             **({"eta": 0.1} if methods.method(method).rate else {})})
        with watched() as seen:
            try:
                record = train.run(config, **options)
            finally:
                if note is not None:
                    note.extend(seen)
    except ModuleNotFoundError as error:
        if (error.name or "dpngd").startswith("dpngd"):
            raise
        return None
    return seen, record, config


def _unit(seen: Seen, sigma: float) -> np.ndarray:
    """The noise of a release in units of sigma sqrt(J) C_j, all channels in a row."""
    J = len(seen.mechanism.clips)
    return np.concatenate([(values / (sigma * math.sqrt(J) * C)).numpy()
                           for values, C in zip(seen.noise(), seen.mechanism.clips, strict=True)])


def release_loop(seed: int = 0) -> list[Result]:
    """Training runs of one seed in release mode share no noise, across runs, methods and kinds of releases.

    Measured: two runs of dp-sgd and two of private curvature with noise="secret", all of one seed; the correlation of
    any two releases of equal size. Power: a repeated vector, or a correlation of 0.03.
    """
    kinds: dict[int, list[np.ndarray]] = {}
    for method in ("dp-sgd", "dp-sgd", "dp-ngd-private-20", "dp-ngd-private-20"):
        ran = _train(method, seed, noise="secret")
        if ran is None:
            return []
        for s in ran[0]:
            z = _unit(s, s.mechanism.sigma)
            kinds.setdefault(len(z), []).append(z)
    lines = []
    for rows, what in zip(kinds.values(), ("gradients", "curvature"), strict=True):
        z = np.stack(rows)
        lines += [_variance("release mode", f"loop, {what}", z),
                  _correlations("release mode", f"loop, {what}", z, lags=(1,))[1]]
    return lines


def resume_loop(seed: int = 0) -> list[Result]:
    """A training run that is interrupted and goes on from its checkpoint: no noise meets two different sums.

    Measured: all releases of a run of 6 steps with a checkpoint after every second, interrupted after its third step,
    and of the process that goes on. A step that is done again must be the same release bit for bit; any two other
    releases must be independent, and there must be as many as recorded. Power: one repeated vector, one release more.
    """
    lines = []
    for method in ("dp-sgd", "dp-ngd-private-20"):
        with tempfile.TemporaryDirectory() as folder:
            ran = _resumed(method, seed, folder)
        if ran is None:
            return []
        seen, record = ran
        again = leaked = pairs = 0
        largest, limit, counts = 0.0, 1.0, []
        for sigma in dict.fromkeys(s.mechanism.sigma for s in seen):
            group = [s for s in seen if s.mechanism.sigma == sigma]
            z = np.stack([_unit(s, sigma) for s in group])
            unit = z / np.linalg.norm(z, axis=1, keepdims=True)
            limit = math.sqrt(float(stats.beta.isf(LEVEL / 200, 0.5, (z.shape[1] - 1) / 2)))  # fewer than 200 pairs
            first: list[int] = []  # releases that are not a repetition
            for i, s in enumerate(group):
                like = [j for j in first if abs(float(unit[i] @ unit[j])) > limit]
                if like and all(_equal(s, group[j]) for j in like):
                    again += 1
                    continue
                leaked += bool(like)
                pairs, largest = pairs + len(first), max([largest, *(abs(float(unit[i] @ unit[j])) for j in first)])
                first.append(i)
            counts.append((sigma, len(first)))
        stated = sorted((part["sigma"], part["releases"]) for part in record.privacy["parts"])
        lines.append(Result(
            "training loop", f"resume, {method}", f"{again} releases done again alike, {leaked} with other sums, "
            f"{[n for _, n in sorted(counts)]} in all; largest cosine {largest:.3f} of {pairs} pairs",
            f"{limit:.3f}, 0 with other sums, {[n for _, n in stated]}", not leaked and sorted(counts) == stated,
            "a repeated vector", LEVEL))
    return lines


def _resumed(method: str, seed: int, folder: str) -> tuple[list[Seen], Any] | None:
    """All releases of a run that was interrupted after step 3 and of the one that went on; the record of the latter."""
    def stop(step: int, *_: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt

    seen: list[Seen] = []
    for progress in (stop, None):
        try:
            checkpoint = importlib.import_module("dpngd.training.checkpoint").Checkpoint(folder, 2)
        except ModuleNotFoundError as error:
            if (error.name or "dpngd").startswith("dpngd"):
                raise
            return None
        with contextlib.suppress(KeyboardInterrupt):
            ran = _train(method, seed, note=seen, checkpoint=checkpoint, progress=progress)
    return None if ran is None else (seen, ran[1])


def _equal(a: Seen, b: Seen) -> bool:
    return all(torch.equal(x, y) for one, two in ((a.sums, b.sums), (a.noisy, b.noisy))
               for x, y in zip(map(flat, one), map(flat, two), strict=True))


# ---- End to end.


END = {"epsilon": 0.5, "delta": 1e-7, "T": 8, "q": 0.5}
"""The run that is attacked from end to end. At delta = 1e-5 not even 48 right guesses of 48 would refute an epsilon."""
ATTACK = 1e-3  # the share of the claimed noise that the attack is made for


def end_to_end(subject: Subject, seed: int = 0, m: int = 96) -> list[Result]:
    """A lower bound of epsilon from one whole run: m samples, each in the set by a fair coin (Steinke et al., 2023).

    The attacker knows the samples and their clipped gradients G (m, d) at the released weights of each step. A sample's
    score is the sum over the steps of its coefficient in the regression of the release on all of them,
    (G G' + a^2 I)^-1 G noisy, in units of the claimed noise, with a = ATTACK. The highest are guessed in, the lowest
    out (`estimators.from_one_run`). Limit: the run's epsilon. A lower bound only: nothing is concluded from a small
    one. Power: a run without noise (48 of 48 guesses are right then, epsilon >= 1.3).
    """
    x, y = 4 * images(m, "coins", seed), targets(m, "coins", seed)
    run = subject.start(x, y, seed=seed, T_cur=2, **END)
    coins = torch.rand(m, generator=stream(seed, "audit/coins")) < 0.5
    scores = torch.zeros(m, dtype=torch.float64)
    stds = run.stds()
    for t in range(END["T"]):
        run.built.prepare(t)
        alone = [run.sums([g.select(torch.tensor([i]))]) for g in run.gradients(run.x, run.y) for i in range(len(g))]
        G = torch.stack([torch.cat([channel / s for channel, s in zip(sums, stds, strict=True)]) for sums in alone])
        rows = run.sampler.draw()
        rows = rows[coins[rows]]
        seen = run.release(run.gradients(*run.rows(rows)) if len(rows) else [])
        noisy = torch.cat([flat(channel) / s for channel, s in zip(seen.noisy, stds, strict=True)])
        scores += torch.linalg.solve(G @ G.mT + ATTACK**2 * torch.eye(m, dtype=G.dtype), G @ noisy)
        run.move(seen)
    low, how = estimators.from_one_run(scores.numpy(), coins.numpy(), END["delta"], LEVEL)
    return [Result(subject.method, "end to end", f"epsilon >= {low:.2f} ({how})", f"{END['epsilon']:g}",
                   low <= END["epsilon"], "missing noise", LEVEL)]


# ---- All of them.


def with_seconds(subject: Subject | str, test: str, check: Callable[[], list[Result]]) -> list[Result]:
    """The lines of a check with their seconds of CPU time; a refusal by the product is a line too."""
    start = time.process_time()
    try:
        lines = check()
    except UsageError as error:
        lines = [refused(subject, test, error)]
    seconds = (time.process_time() - start) / max(1, len(lines))
    return [Result(**{**asdict(line), "seconds": round(seconds, 3)}) for line in lines]


def of_releases(subject: Subject, n: int, seed: int, deadline: float | None = None,
                keep: Callable[[Releases], None] = lambda r: None) -> list[Result]:
    """The tests that share one set of releases."""
    r = draw_releases(subject, n, seed, deadline)
    keep(r)
    return [*post_processing(r), *noise(r), *canary(r), *independence(r)]

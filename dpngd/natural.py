"""Algorithm 2 of the paper, Modules 1 and 2: the natural geometry, fixed before each batch is drawn.

    Module 1   F <- K-FAC(public images; theta_t)                  every T_cur steps
    Module 2   F~ <- F with its eigenvalues clamped at lambda_t    every step; higher where F outgrew it (`most`)
    Module 3   the private step in F~'s geometry                   (`dpngd.mechanism`)

    for t in range(T):
        natural.prepare(t)
        release = mechanism.release(gradients, natural.geometry, zeros, noise)
        theta <- theta - s * release.direction                     s: a rate or a KL budget (`dpngd.steps`)

Guarantee: `prepare` sees public images, weights that were released before, and t. None of them costs privacy. Where the
estimate comes from private data (`dpngd.methods.private_curvature`), the estimate itself is a release that is paid for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from dpngd.clamping import Floor, check_share, ranked
from dpngd.curvature import LayerCurvature, sampled_labels
from dpngd.errors import UsageError
from dpngd.geometry import Kronecker
from dpngd.gradients import PerSample, micro_batches
from dpngd.mechanism import Geometry

Estimator = Callable[[], list[LayerCurvature]]
"""F of every layer at the present weights: `curvature.KFAC`, or a noisy one."""
FALL = 0.5
"""A raised floor falls to this share of itself at most, at a refresh: so far down the estimate has to know F."""


class Natural:
    """The geometry L = F~^left, R = F~^right along a run.

    estimate   F at the present weights (Module 1)
    floor      lambda_t as a function of t (Module 2)
    T_cur      steps between two estimates
    unit       F and lambda_t are divided by it. The Opacus optimizer whitens by F / lambda_safe, see there
    start      F at theta_0 where it was estimated before, to find the floor: the first refresh takes it
    most       share of all directions that may be above the floor. Where more of F is, because F has grown since the
               floor was chosen, the floor rises to the eigenvalue of that rank until the next refresh. None: it never
               does
    """

    def __init__(self, estimate: Estimator, floor: Floor, T_cur: int, *, geometry: Kronecker | None = None,
                 unit: float = 1.0, dtype: torch.dtype = torch.float32, start: list[LayerCurvature] | None = None,
                 most: float | None = None):
        if T_cur < 1:
            raise UsageError(f"T_cur is {T_cur}: the curvature is refreshed every T_cur >= 1 steps")
        if most is not None:
            check_share("most", most)
        self.estimate, self.floor, self.T_cur = estimate, floor, T_cur
        self.geometry = Kronecker() if geometry is None else geometry
        self.unit, self.dtype, self.most = unit, dtype, most
        self.F: list[LayerCurvature] | None = None
        self.raised = 0.0  # the eigenvalue of F, in its own units, that only `most` of all directions exceed
        self._start = start

    def prepare(self, t: int) -> None:
        """Fix F~ for step t; call it before the step's first batch is looked at."""
        if self.F is None or t % self.T_cur == 0:
            self.refresh()
        self.geometry.set(self.F, max(self.floor(t), self.raised) / self.unit, self.dtype)

    def refresh(self) -> None:
        """Module 1: estimate F now, and the level below which it may not be left."""
        F, self._start = self._start or self.estimate(), None
        if self.most is not None:
            spectrum = torch.cat([layer.spectrum().flatten() for layer in F])
            self.raised = max(ranked(spectrum, self.most), FALL * self.raised)
        self.F = F if self.unit == 1 else [layer.scaled(1 / self.unit) for layer in F]

    def reaches(self, lowest: float) -> float:
        """How far down an estimate has to know F: to `lowest`, the schedule's lowest floor, or to a raised one."""
        return max(lowest, FALL * self.raised)

    def noise_energy(self) -> float:
        """tr(R F R) with F in its own units: see `Kronecker.noise_energy`. Public, as F is."""
        return self.unit * self.geometry.noise_energy()

    def diagnose(self) -> dict[str, float]:
        """The floor and the share of eigenvalues on it. Public, as F is."""
        return {"lambda_t": self.geometry.lambda_t * self.unit, "clamped_share": self.geometry.clamped_share()}

    def state_dict(self) -> dict[str, Any]:
        """F and its raised floor: all that lasts from one step to the next. F~ follows from them and t."""
        return {"F": None if self.F is None else [vars(layer) for layer in self.F], "raised": self.raised}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.F = None if state["F"] is None else [LayerCurvature(**layer) for layer in state["F"]]
        self.raised = state.get("raised", 0.0)
        self._start = None


def public_clip(per_sample: PerSample, geometry: Geometry, x: Tensor, ratio: float, labels: Generator) -> float:
    """C from public images x: `ratio` times the median of ||L g_i|| at the present weights, with labels y ~ p_theta.

    Where the step's length comes from a KL budget, C scales d, and s undoes it: C decides only which samples are
    clipped. At 1 about half of them are at the start, and fewer later, as gradients shrink. A small ratio normalises:
    at 0.001, min(1, C / ||L g_i||) is C / ||L g_i|| for all samples but those that are classified with near certainty.
    The sensitivity is C for every ratio: the mechanism is the same.
    """
    y = sampled_labels(per_sample.model, x, labels)
    norms = torch.cat([geometry.sq_norms(g)[0][0].sqrt() for g in micro_batches(per_sample, x, y)]).double()
    norms = norms[norms.isfinite() & (norms > 0)]
    if not len(norms):
        raise UsageError("no public image has a gradient that is finite and not zero: C cannot be found from them")
    return ratio * float(norms.median())

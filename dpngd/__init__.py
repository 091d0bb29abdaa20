"""DP-NGD: private natural-gradient descent, and the suite that reproduces its paper.

The names below are the optimizer. They are imported when first used (PEP 562), so that `import dpngd` and every
`--help` answer without loading torch.

    for Opacus users      DPNGD
    the pieces            PerSample (per-sample gradients), KFAC (curvature of public images),
                          Kronecker and Euclidean (geometries), GaussianMechanism (clip, sum, noise)
    the floor             DynamicFloor, lambda_safe, eta_ngd, floor_by_rank
    how far to go         Rate, KLBudget, Probe
    the privacy           calibrate (sigma for a budget), spent (budget of a sigma)
    errors                UsageError

`dpngd.training`, `dpngd.data` and `dpngd.suite` are built on these, never the other way round.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_HOMES = {
    "DPNGD": "dpngd.opacus",
    "PerSample": "dpngd.gradients",
    "KFAC": "dpngd.curvature",
    "Kronecker": "dpngd.geometry",
    "Euclidean": "dpngd.geometry",
    "GaussianMechanism": "dpngd.mechanism",
    "DynamicFloor": "dpngd.clamping",
    "lambda_safe": "dpngd.clamping",
    "eta_ngd": "dpngd.clamping",
    "floor_by_rank": "dpngd.clamping",
    "Rate": "dpngd.steps",
    "KLBudget": "dpngd.steps",
    "Probe": "dpngd.steps",
    "calibrate": "dpngd.privacy",
    "spent": "dpngd.privacy",
    "UsageError": "dpngd.errors",
}

if TYPE_CHECKING:  # for editors and type checkers, which do not call __getattr__
    from dpngd.clamping import DynamicFloor, eta_ngd, floor_by_rank, lambda_safe
    from dpngd.curvature import KFAC
    from dpngd.errors import UsageError
    from dpngd.geometry import Euclidean, Kronecker
    from dpngd.gradients import PerSample
    from dpngd.mechanism import GaussianMechanism
    from dpngd.opacus import DPNGD
    from dpngd.privacy import calibrate, spent
    from dpngd.steps import KLBudget, Probe, Rate

__all__ = ["DPNGD", "KFAC", "DynamicFloor", "Euclidean", "GaussianMechanism", "KLBudget", "Kronecker", "PerSample",
           "Probe", "Rate", "UsageError", "calibrate", "eta_ngd", "floor_by_rank", "lambda_safe", "spent"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dpngd' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

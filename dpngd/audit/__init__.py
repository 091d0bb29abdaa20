"""Does a private run keep its promise? Tests of every method and of the Opacus optimizer, on the code as installed.

    audit(optimizer, model, x, y)    a user's own module under `DPNGD` or Opacus's DPOptimizer
    audit_methods(names)             the methods of `dpngd.methods`
    audit_opacus()                   the Opacus optimizer on the audit's small network
    audit_release(folder)            what `dpngd train --release` left
    self_test()                      planted leaks, each with its clean control

Each returns lines of the form: what was measured, the limit, pass or fail, and how small a leak the test sees.
`dpngd audit` prints them. How the tests work is in `dpngd.audit.checks`; what they cannot see is in docs/audit.md.
Names are imported when first used, so that `dpngd audit --help` answers without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpngd.audit.report import Report, audit, audit_methods, audit_opacus, audit_release, self_test

__all__ = ["Report", "audit", "audit_methods", "audit_opacus", "audit_release", "self_test"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'dpngd.audit' has no attribute {name!r}")
    return getattr(importlib.import_module("dpngd.audit.report"), name)

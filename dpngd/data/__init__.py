"""Private and public images: where they come from, how they are split, and the check that the two never overlap.

The names load their modules, and with them torch, when they are first asked for (PEP 562): `dpngd.data.own` and
`dpngd.data.command` are of use without it.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {"Private": "private", "load_private": "private",
            "Public": "public", "check_disjoint": "public", "load_public": "public"}
__all__ = ["Private", "Public", "check_disjoint", "load_private", "load_public"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

"""Where the suite's files are: the one module that knows the layout of a checkout.

| name | folder or file |
| --- | --- |
| ROOT | the checkout |
| PARAMS | params/: profiles, published numbers, what the searches chose |
| RESULTS, BENCH | results/: shipped records; results/bench.json |
| AUDIT, SELF_TEST | results/audit.json, results/audit-self-test.json: what `dpngd audit --json` printed |
| FIGURES | figures/<profile>/: what run_all.py draws |
| NOTEBOOKS | notebooks/ |
| STORE | .store/, or what DPNGD_STORE names: records computed here |
| PACKAGE, TEMPLATES | dpngd/ itself; templates/ beside this module |

Use them as `paths.PARAMS`, when the file is needed: a name is looked up then, not at import. A package installed from a
wheel has TEMPLATES and its own copy of PARAMS (and STORE, where DPNGD_STORE is set); every other name raises a
UsageError that says so.
"""

from __future__ import annotations

import os
from pathlib import Path

from dpngd.errors import UsageError
from dpngd.files import checkout

PACKAGE = Path(__file__).resolve().parents[1]
TEMPLATES = PACKAGE / "suite" / "templates"
IN_CHECKOUT = {"ROOT": ".", "PARAMS": "params", "RESULTS": "results", "BENCH": "results/bench.json",
               "AUDIT": "results/audit.json", "SELF_TEST": "results/audit-self-test.json",
               "FIGURES": "figures", "NOTEBOOKS": "notebooks", "STORE": ".store"}


def __getattr__(name: str) -> Path:
    if name not in IN_CHECKOUT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "STORE" and (given := os.environ.get("DPNGD_STORE")):
        return Path(given).absolute()
    root = checkout()
    packaged = PACKAGE / "params"
    if root is None and name == "PARAMS" and packaged.is_dir():
        return packaged
    if root is None:
        raise UsageError(f"this needs a checkout of dpngd (its {IN_CHECKOUT[name]}): clone the repository and run it "
                         "there; the installed package alone has the optimizer, training and data")
    return root / IN_CHECKOUT[name]

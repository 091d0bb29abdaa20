"""torchvision, also where its build does not match torch's.

A CUDA build of torchvision beside a CPU build of torch cannot load its compiled operators, and its import then
fails on the two operators (`nms`, `qnms`) whose shapes it declares. Nothing here uses them: data sets and
transforms are Python. So after that one failure the two are declared, without an implementation, and the import is
repeated. With matching builds the first import succeeds and nothing else happens.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a Library takes its operators with it when it is collected


def torchvision() -> ModuleType:
    """The torchvision package, with `torchvision.datasets` imported."""
    try:
        return _import()
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared:
            raise
    for name in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # what the failed import left half-made
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared.append(library)
    return _import()


def _import() -> ModuleType:
    importlib.import_module("torchvision.datasets")
    return sys.modules["torchvision"]

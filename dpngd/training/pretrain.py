"""DP-SGD-PT: start from weights that were trained on the public set.

Guarantee: nothing here sees a private image, so the start is a constant to the mechanism and costs no privacy.

With labels, the task is their classification under a temporary head; without, it is telling by how many quarter turns
an image was rotated. The body is kept, the head for the private task starts from random weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpngd.errors import UsageError
from dpngd.training import models

MOMENTUM = 0.9
BATCH = 64


def pretrained(name: str, *, x: Tensor, y: Tensor | None, public_classes: int | None, classes: int, steps: int,
               eta: float, weights: torch.Generator, order: torch.Generator) -> nn.Module:
    """A model for `classes` classes whose body was trained on the public images x (n, C, H, W), labels y or None."""
    shape = {"in_channels": x.shape[1], "size": x.shape[-1]}
    model = models.build(name, classes=classes, **shape, generator=weights)
    teacher = models.build(name, classes=public_classes if y is not None else 4, **shape, generator=weights)
    teacher, y = teacher.to(x.device), None if y is None else y.to(x.device)
    optimizer = torch.optim.SGD(teacher.parameters(), lr=eta, momentum=MOMENTUM)
    for _ in range(steps):
        rows = torch.randint(len(x), (min(BATCH, len(x)),), generator=order)
        images, targets = (x[rows], y[rows]) if y is not None else rotated(x[rows], order)
        optimizer.zero_grad()
        F.cross_entropy(teacher(images), targets).backward()
        optimizer.step()
    if not all(p.isfinite().all() for p in teacher.parameters()):
        raise UsageError(f"pre-training diverged at rate pt_eta = {eta}: lower it")
    head = head_name(model)
    body = {k: v for k, v in teacher.state_dict().items() if not k.startswith(f"{head}.")}
    model.to(x.device).load_state_dict({**model.state_dict(), **body})
    return model


def rotated(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each image turned by a random number of quarter turns, which is its label."""
    turns = torch.randint(4, (len(x),), generator=generator)
    images = torch.stack([torch.rot90(image, int(k), (1, 2)) for image, k in zip(x, turns, strict=True)])
    return images, turns.to(x.device)


def head_name(model: nn.Module) -> str:
    """The name of the last linear layer."""
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1]

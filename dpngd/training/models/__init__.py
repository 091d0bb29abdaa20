"""The networks by name: one entry per family says how a name is read and which class it builds.

A name is checked without loading torch; `build` loads it. Adding a network is one entry of FAMILIES and its class in
`dpngd.training.models.networks`, or anywhere else.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpngd.errors import UsageError, unknown

if TYPE_CHECKING:
    import torch
    from torch import nn

NETWORKS = "dpngd.training.models.networks"


@dataclass(frozen=True)
class Family:
    """Networks of one kind. The numbers in a name are the groups of `pattern`: its depth first, if it has one.

    The builder is a function (numbers, classes, in_channels, size) -> nn.Module, or "module:function".
    """

    pattern: str
    examples: tuple[str, ...]  # for messages: other numbers work too
    builder: str | Callable[..., nn.Module]
    extra: int | None = None  # a depth must be 6n + extra: three groups of n blocks of two convs

    def numbers(self, name: str) -> list[int] | None:
        """The numbers in a name, or None where it is no name of this family."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        found = [int(group) for group in match.groups()]
        if self.extra is not None:
            n, rest = divmod(found[0] - self.extra, 6)
            if rest or n < 1:
                near = 6 * max(1, round((found[0] - self.extra) / 6)) + self.extra
                raise UsageError(f"model {name!r}: depth {found[0]} is not 6n + {self.extra} with n >= 1, take {near}")
        return found


FAMILIES: list[Family] = [
    Family(r"resnet-([1-9]\d*)", ("resnet-20",), f"{NETWORKS}:resnet", extra=2),
    Family(r"small", ("small",), f"{NETWORKS}:small"),
    Family(r"wrn-([1-9]\d*)-([1-9]\d*)", ("wrn-10-1", "wrn-16-4"), f"{NETWORKS}:wide_resnet", extra=4),
]


def find(name: str) -> tuple[Family, list[int]]:
    """The family of a network and the numbers in its name; an unknown name or an impossible depth is an error."""
    for family in FAMILIES:
        numbers = family.numbers(str(name))
        if numbers is not None:
            return family, numbers
    raise unknown("model", name, [example for family in FAMILIES for example in family.examples])


def build(name: str, *, classes: int, in_channels: int = 3, size: int = 32, generator: torch.Generator | None = None,
          ) -> nn.Module:
    """The network `name` on the CPU, its weights drawn from `generator` and from nothing else.

    `size` is the side of the images that the network is meant for. Only `small` depends on it, by the
    inputs of its last layer: 64 ceil(size / 8)^2. It takes images of other sizes too, whose last feature
    map is pooled to that grid (repeated, if smaller). Without a generator the weights are those of
    `stream(0, "weights")`.
    """
    for what, value, least in (("classes", classes, 2), ("in_channels", in_channels, 1), ("size", size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{what}={value!r} of model {name!r} must be an integer of at least {least}")
    family, numbers = find(name)
    import torch  # late: a name can be checked without it

    from dpngd.noise import stream
    from dpngd.training.models.networks import initialise

    generator = stream(0, "weights") if generator is None else generator
    if generator.device.type != "cpu":
        raise UsageError(f"model {name!r} needs a CPU generator, not one on {generator.device}")
    builder = family.builder
    if isinstance(builder, str):
        module, _, function = builder.partition(":")
        builder = getattr(importlib.import_module(module), function)
    # PyTorch's constructors draw from the global generator: put its state back, and overwrite what they drew.
    with torch.random.fork_rng(devices=[]):
        model = builder(numbers, classes, in_channels, size)
    initialise(model, generator)
    return model

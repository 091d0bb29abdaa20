"""Networks without batch statistics: WRN-D-K, ResNet-D and the small CPU network.

Every layer with parameters is a `Conv2d`, a `GroupNorm` or a `Linear`, is called once in a forward pass and
mixes no samples, so that each sample has a gradient of its own. ReLU is never in place: the input of a
layer is what its per-sample gradient is made of. All networks map images (n, in_channels, H, W) to logits
(n, classes).

| name | layout | parameters (3 channels, 10 classes) |
| --- | --- | --- |
| `wrn-D-K`, D = 6n + 4 | 3x3 of 16, three groups of n blocks, 16K, 32K, 64K wide | `wrn-16-4`: 2,751,562 |
| `resnet-D`, D = 6n + 2 | 3x3 of 16, three groups of n blocks, 16, 32, 64 wide | `resnet-20`: 269,722 |
| `small` | 5x5 of 16, 3x3 of 32, 3x3 of 64, each of stride 2 | 34,714 |

Choices:

- WRN follows De et al. (2022): ReLU, then group norm, then conv; the first block of a group has a
  projection with a norm of its own. Its convs have a bias, which the ReLU behind it keeps from vanishing in
  the norm. Their weight standardisation is left out: what a conv applies would no longer be its parameter,
  a case that the per-sample gradients have no rule for. So it has 2,751,562 parameters where theirs, with a
  gain a channel, has 2,753,818.
- ResNet follows He et al. (2016, section 4.2) with batch norm replaced: conv, group norm, ReLU, and
  parameter-free shortcuts (their option A, which they use on CIFAR: every second pixel, zeros for the new
  channels). Its convs have no bias, as theirs: before a group norm of one channel per group it has no effect,
  and would only get noise.
- The small network has no conv bias for the same reason, and a linear layer on its whole last feature map.
- Group norm takes 16 groups, or gcd(16, width).
- Weights are N(0, 1/fan_in), biases 0, norms the identity. In `resnet` and `small` the norm behind each
  conv makes the output independent of that scale; in `wrn` the input of a conv is normalised, so 1/fan_in
  keeps its variance.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def small(numbers: list[int], classes: int, in_channels: int, size: int) -> nn.Module:
    return Small(classes, in_channels, grid=math.ceil(size / 8))


def resnet(numbers: list[int], classes: int, in_channels: int, size: int) -> nn.Module:
    return ResNet((numbers[0] - 2) // 6, classes, in_channels)


def wide_resnet(numbers: list[int], classes: int, in_channels: int, size: int) -> nn.Module:
    depth, width = numbers
    return WideResNet((depth - 4) // 6, width, classes, in_channels)


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every weight from N(0, 1 / fan_in); biases are zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            module.weight.normal_(0.0, fan_in**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(16, channels), channels)


def conv(c_in: int, c_out: int, kernel: int, stride: int = 1, *, bias: bool) -> nn.Conv2d:
    """A conv with the padding that gives ceil(H / stride) rows."""
    return nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, bias=bias)


class WideBlock(nn.Module):
    """y = conv(norm(relu(conv(norm(relu(x)))))) + skip; skip is x, or conv1x1(norm(relu(x))) to project."""

    def __init__(self, c_in: int, c_out: int, stride: int, project: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(c_in), conv(c_in, c_out, 3, stride, bias=True)
        self.norm2, self.conv2 = norm(c_out), conv(c_out, c_out, 3, bias=True)
        self.skip = nn.Sequential(norm(c_in), conv(c_in, c_out, 1, stride, bias=True)) if project else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(x)
        skip = x if self.skip is None else self.skip(h)
        return self.conv2(self.norm2(F.relu(self.conv1(self.norm1(h))))) + skip


class WideResNet(nn.Module):
    def __init__(self, n: int, width: int, classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem = conv(in_channels, 16, 3, bias=True)
        blocks, c_in = [], 16
        for c_out, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for i in range(n):
                first = i == 0
                blocks.append(WideBlock(c_in, c_out, stride if first else 1, project=first))
                c_in = c_out
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm(c_in)
        self.head = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.head(self.norm(F.relu(x)).mean((2, 3)))


class ResidualBlock(nn.Module):
    """y = relu(norm(conv(relu(norm(conv(x))))) + skip); skip is x, thinned and zero-padded to fit."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(c_in, c_out, 3, stride, bias=False), norm(c_out)
        self.conv2, self.norm2 = conv(c_out, c_out, 3, bias=False), norm(c_out)
        self.stride, self.new_channels = stride, c_out - c_in

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            x = F.pad(x, (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(y + x)


class ResNet(nn.Module):
    def __init__(self, n: int, classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem, self.norm = conv(in_channels, 16, 3, bias=False), norm(16)
        blocks, c_in = [], 16
        for c_out, stride in ((16, 1), (32, 2), (64, 2)):
            for i in range(n):
                blocks.append(ResidualBlock(c_in, c_out, stride if i == 0 else 1))
                c_in = c_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Small(nn.Module):
    """Three convs of stride 2, each with norm and ReLU; a linear layer on their (64, grid, grid) output."""

    def __init__(self, classes: int, in_channels: int, grid: int) -> None:
        super().__init__()
        layers, c_in = [], in_channels
        for c_out, kernel in ((16, 5), (32, 3), (64, 3)):
            layers += [conv(c_in, c_out, kernel, 2, bias=False), norm(c_out), nn.ReLU()]
            c_in = c_out
        self.features = nn.Sequential(*layers)
        self.grid = (grid, grid)
        self.head = nn.Linear(c_in * grid * grid, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        if x.shape[2:] != self.grid:
            x = F.adaptive_avg_pool2d(x, self.grid)
        return self.head(x.flatten(1))

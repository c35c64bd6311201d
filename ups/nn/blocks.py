"""Convolutions and residual blocks on grids of one to three axes, each periodic or not.

Letters: B batch, W channels (width), G the axes of the grid, E condition.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EPS = 1e-6


def rms_norm(x_BWG: Tensor) -> Tensor:
    """Divide by the root mean square over channels, at every place by itself."""
    return x_BWG * torch.rsqrt(x_BWG.square().mean(dim=1, keepdim=True) + _EPS)


def pad_axes(x_BWG: Tensor, *, periodic: tuple[bool, ...], width: int) -> Tensor:
    """Extend every axis by `width` places at both ends: periodic ones by themselves, others by zeros."""
    for axis, wraps in enumerate(periodic, start=2):
        if wraps:
            ends = x_BWG.narrow(axis, x_BWG.shape[axis] - width, width), x_BWG.narrow(axis, 0, width)
            x_BWG = torch.cat([ends[0], x_BWG, ends[1]], dim=axis)
        else:
            behind = (x_BWG.ndim - 1 - axis) * 2  # `pad` counts pairs from the last axis
            x_BWG = nn.functional.pad(x_BWG, [0] * behind + [width, width])
    return x_BWG


class GridConv(nn.Module):
    """Convolution with three places per axis that keeps the grid; circular along periodic axes.

    Args:
        in_width: Channels in.
        out_width: Channels out.
        periodic: Whether each axis is.
    """

    def __init__(self, in_width: int, out_width: int, *, periodic: tuple[bool, ...]) -> None:
        super().__init__()
        self.periodic = periodic
        self.conv = _CONVOLUTIONS[len(periodic) - 1](in_width, out_width, kernel_size=3)

    def forward(self, x_BWG: Tensor) -> Tensor:
        """(B, in_width, G) to (B, out_width, G)."""
        return self.conv(pad_axes(x_BWG, periodic=self.periodic, width=1))


def pointwise(in_width: int, out_width: int, *, ndim: int) -> nn.Module:
    """Linear layer over the channels of every place."""
    return _CONVOLUTIONS[ndim - 1](in_width, out_width, kernel_size=1)


class ResidualBlock(nn.Module):
    """x + MLP(conv(norm(x))), scaled and shifted by the condition; a condition has no effect at first.

    Args:
        width: Channels W.
        condition_width: Channels E of the condition.
        periodic: Whether each axis is.
    """

    def __init__(self, width: int, *, condition_width: int, periodic: tuple[bool, ...]) -> None:
        super().__init__()
        self.modulation = nn.Linear(condition_width, 2 * width)
        self.conv = GridConv(width, width, periodic=periodic)
        self.out = pointwise(width, width, ndim=len(periodic))
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x_BWG: Tensor, condition_BE: Tensor) -> Tensor:
        """(B, W, G) to the same shape."""
        places = (1,) * (x_BWG.ndim - 2)
        scale, shift = self.modulation(condition_BE).unflatten(1, (2, -1, *places)).unbind(1)
        inner = rms_norm(x_BWG) * (1 + scale) + shift
        return x_BWG + self.out(nn.functional.gelu(self.conv(inner)))

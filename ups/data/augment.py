"""Augmentation by symmetries of the equations: the result could as well be a solution.

Letters: B batch, X the axes of the grid, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tasks whose equation is the same for -u(-x): the velocity changes its sign with the axis.
_ODD_REFLECTION = frozenset({"burgers1d"})


def augment(
    values_BXC: Tensor, *, task: str, periodic: tuple[bool, ...], generator: torch.Generator
) -> Tensor:
    """Shift every frame along its periodic axes by a random number of points, and reflect half of them.

    Args:
        values_BXC: Frames in physical units, shape (B, X..., C).
        task: Decides about reflections.
        periodic: Whether each axis is.
        generator: Source of randomness; on the CPU.

    Returns:
        New frames of the same shape.
    """
    for axis, wraps in enumerate(periodic, start=1):
        if wraps:
            num_points = values_BXC.shape[axis]
            shift_B = torch.randint(num_points, (len(values_BXC),), generator=generator)
            values_BXC = shift_frames(values_BXC, shift_B.to(values_BXC.device), axis=axis)
    if task in _ODD_REFLECTION:
        chosen_B = torch.rand(len(values_BXC), generator=generator).to(values_BXC.device) < 0.5
        chosen = chosen_B.reshape(-1, *(1,) * (values_BXC.ndim - 1))
        values_BXC = torch.where(chosen, -values_BXC.flip(1), values_BXC)
    return values_BXC


def shift_frames(values_BXC: Tensor, shift_B: Tensor, *, axis: int) -> Tensor:
    """Roll each frame along an axis by its own number of points."""
    num_points = values_BXC.shape[axis]
    shape = [1] * values_BXC.ndim
    shape[0], shape[axis] = len(values_BXC), num_points
    index = (torch.arange(num_points, device=values_BXC.device) - shift_B[:, None]) % num_points
    return values_BXC.gather(axis, index.reshape(shape).expand_as(values_BXC))

"""Augmentation by symmetries of the equations: the result could as well be a solution.

Letters: B batch, T time steps, X the axes of the grid, C channels.
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
        Frames of the same shape; new ones, or `values_BXC` itself where the task has no symmetry of these.
    """
    values_BXC = shift_periodic(values_BXC, periodic, first_axis=1, generator=generator)
    if task in _ODD_REFLECTION:
        chosen_B = torch.rand(len(values_BXC), generator=generator).to(values_BXC.device) < 0.5
        chosen = chosen_B.reshape(-1, *(1,) * (values_BXC.ndim - 1))
        values_BXC = torch.where(chosen, -values_BXC.flip(1), values_BXC)
    return values_BXC


def augment_trajectories(
    values_BTXC: Tensor, *, task: str, periodic: tuple[bool, ...], generator: torch.Generator
) -> Tensor:
    """As `augment`, all frames of a trajectory alike.

    Args:
        values_BTXC: Trajectories, or windows of them, in physical units, shape (B, T, X..., C).
        task: Decides about reflections.
        periodic: Whether each axis of the grid is.
        generator: Source of randomness; on the CPU.

    Returns:
        Trajectories of the same shape; they share the memory of `values_BTXC` where nothing is changed.
    """
    # Time steps are channels meanwhile, so that all of a trajectory share their shift.
    values_BXTC = values_BTXC.movedim(1, -2)
    changed = augment(values_BXTC.flatten(-2), task=task, periodic=periodic, generator=generator)
    return changed.unflatten(-1, values_BXTC.shape[-2:]).movedim(-2, 1)


def shift_periodic(
    values: Tensor, periodic: tuple[bool, ...], *, first_axis: int, generator: torch.Generator
) -> Tensor:
    """Roll each item of a batch along its periodic axes by a random number of points.

    Args:
        values: Shape (B, ...).
        periodic: Whether each axis of the grid is.
        first_axis: Where the axes of the grid begin in `values`.
        generator: Source of randomness; on the CPU.

    Returns:
        New values of the same shape; `values` itself where no axis is periodic.
    """
    for axis, wraps in enumerate(periodic, start=first_axis):
        if wraps:
            shift_B = torch.randint(values.shape[axis], (len(values),), generator=generator)
            values = shift_frames(values, shift_B.to(values.device), axis=axis)
    return values


def shift_frames(values: Tensor, shift_B: Tensor, *, axis: int) -> Tensor:
    """Roll each item along an axis by its own number of points."""
    num_points = values.shape[axis]
    shape = [1] * values.ndim
    shape[0], shape[axis] = len(values), num_points
    index = (torch.arange(num_points, device=values.device) - shift_B[:, None]) % num_points
    return values.gather(axis, index.reshape(shape).expand_as(values))

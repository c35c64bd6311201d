"""Conserved quantities of fields, their drift, the projection back onto them; divergence of a velocity.

Letters: B batch, X the axes of the grid, C channels, Q quantities, N axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def densities(fields_BXC: Tensor, quantities: Sequence[str], channels: Sequence[str]) -> Tensor:
    """Each quantity at every point: a channel, or a product of channels.

    Args:
        fields_BXC: Physical units, shape (B, X..., C).
        quantities: Such as "density" and "density*Vx".
        channels: Names of the C channels.

    Returns:
        Shape (B, X..., Q).
    """
    factors = [[channels.index(name) for name in quantity.split("*")] for quantity in quantities]
    return torch.stack([fields_BXC[..., each].prod(-1) for each in factors], dim=-1)


def grid_mean(fields_BXC: Tensor) -> Tensor:
    """Mean over the grid, shape (B, C)."""
    return fields_BXC.flatten(1, -2).mean(1)


def drift(
    fields_BXC: Tensor, reference_BXC: Tensor, quantities: Sequence[str], channels: Sequence[str]
) -> Tensor:
    """Change of each quantity's mean over its root mean square in the reference, shape (B, Q)."""
    now_BXQ = densities(fields_BXC, quantities, channels)
    then_BXQ = densities(reference_BXC, quantities, channels)
    scale_BQ = grid_mean(then_BXQ.square()).sqrt() + torch.finfo(then_BXQ.dtype).tiny
    return (grid_mean(now_BXQ) - grid_mean(then_BXQ)) / scale_BQ


def project_means(
    fields_BXC: Tensor, reference_BXC: Tensor, quantities: Sequence[str], channels: Sequence[str]
) -> Tensor:
    """The nearest fields, in mean square, whose conserved channels have the reference's mean.

    That is a constant added to each of them. Products of channels are left as they are.

    Returns:
        Shape (B, X..., C), new.
    """
    single = torch.tensor([name in quantities for name in channels], device=fields_BXC.device)
    change_BC = (grid_mean(reference_BXC) - grid_mean(fields_BXC)) * single
    return fields_BXC + change_BC.reshape(len(change_BC), *(1,) * (fields_BXC.ndim - 2), -1)


def divergence(velocity_BXN: Tensor, *, lengths: Sequence[float], periodic: Sequence[bool]) -> Tensor:
    """Divergence by central differences, second order, at the points that have both neighbours.

    Args:
        velocity_BXN: Components in the order of the axes of the grid, shape (B, X..., N).
        lengths: Length of the domain along each axis.
        periodic: Whether each axis is; of others the first and the last point are left out.

    Returns:
        Shape (B, X...), smaller by 2 along axes that aren't periodic.
    """
    total = torch.zeros_like(velocity_BXN[..., 0])
    for axis, length in enumerate(lengths, start=1):
        component, spacing = velocity_BXN[..., axis - 1], length / velocity_BXN.shape[axis]
        total = total + (component.roll(-1, axis) - component.roll(1, axis)) / (2 * spacing)
    for axis, wraps in enumerate(periodic, start=1):
        if not wraps:
            total = total.narrow(axis, 1, total.shape[axis] - 2)
    return total

"""Fields on a grid at arbitrary points, by cubic interpolation; to the bit what the grid holds at its points.

Letters: B batch, X the axes of the grid, N their number, C channels, Q queries' batch (1 or B), P query
points, S places of a stencil.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

_PLACES = 4  # of a cubic along an axis
_ROUNDING = 4.0  # roundings that a query may be off a point of the grid and still be that point


@dataclass(frozen=True)
class Stencil:
    """Points of one axis around each query, and their Lagrange weights.

    Attributes:
        index: Numbers of the points, shape (Q, P, S).
        weight: Adds up to 1, shape (Q, P, S).
    """

    index: Tensor
    weight: Tensor


def interpolate(values_BXC: Tensor, query_QPN: Tensor, *, periodic: tuple[bool, ...]) -> Tensor:
    """Lagrange interpolation by four points along each axis: continuous, exact for cubic polynomials.

    Args:
        values_BXC: Values at the centres of the grid's cells, shape (B, X..., C).
        query_QPN: Points as fractions of the domain, shape (1, P, N) for all frames or (B, P, N).
        periodic: Whether each axis is; along others the stencil stays inside.

    Returns:
        Shape (B, P, C), dtype of `values_BXC`.
    """
    points = values_BXC.shape[1:-1]
    stencils = [
        axis_stencil(query_QPN[..., axis], num=num, wraps=wraps)
        for axis, (num, wraps) in enumerate(zip(points, periodic, strict=True))
    ]
    flat_BXC = values_BXC.flatten(1, -2)
    total = values_BXC.new_zeros(len(values_BXC), query_QPN.shape[1], values_BXC.shape[-1])
    for places in itertools.product(*(range(stencil.index.shape[-1]) for stencil in stencils)):
        index, weight = torch.zeros_like(stencils[0].index[..., 0]), torch.ones_like(query_QPN[..., 0])
        for stencil, place, num in zip(stencils, places, points, strict=True):
            index = index * num + stencil.index[..., place]
            weight = weight * stencil.weight[..., place]
        total = total + take_rows(flat_BXC, index) * weight.to(total.dtype).unsqueeze(-1)
    return total


def resampled(values_BXC: Tensor, points: tuple[int, ...], *, periodic: tuple[bool, ...]) -> Tensor:
    """The same fields at the centres of another number of cells, by the same cubics, an axis at a time.

    Args:
        values_BXC: Shape (B, X..., C).
        points: Wanted along each axis.
        periodic: Whether each axis is.

    Returns:
        Shape (B, *points, C); `values_BXC` itself where it has these points.
    """
    for axis, (num, wraps) in enumerate(zip(points, periodic, strict=True), start=1):
        if values_BXC.shape[axis] == num:
            continue
        query = (torch.arange(num, dtype=torch.float64, device=values_BXC.device) + 0.5) / num
        stencil = axis_stencil(query[None], num=values_BXC.shape[axis], wraps=wraps)
        around = values_BXC.movedim(axis, -1)[..., stencil.index[0]]
        values_BXC = (around * stencil.weight[0].to(around.dtype)).sum(-1).movedim(-1, axis)
    return values_BXC


def axis_stencil(query_QP: Tensor, *, num: int, wraps: bool) -> Stencil:
    """The four points of an axis around each query, or all of an axis that has fewer and ends."""
    position = query_QP * num - 0.5
    nearest = position.round()
    rounding = _ROUNDING * torch.finfo(position.dtype).eps * (position.abs() + num)
    position = torch.where((position - nearest).abs() <= rounding, nearest, position)
    first, size = position.floor() - (_PLACES // 2 - 1), _PLACES
    if not wraps:
        size = min(_PLACES, num)
        first = first.clamp(0, num - size)
    steps = torch.arange(size, device=query_QP.device)
    index = first.long().unsqueeze(-1) + steps
    offset = (position - first).unsqueeze(-1)
    weights = []
    for place in range(size):
        others = steps[steps != place]
        weights.append(((offset - others) / (place - others)).prod(-1))
    return Stencil(index.remainder(num) if wraps else index, torch.stack(weights, dim=-1))


def take_rows(values_BXC: Tensor, index_QP: Tensor) -> Tensor:
    """Rows by number, those of all frames (Q = 1) or of each; shape (B, P, C)."""
    if len(index_QP) == 1:
        return values_BXC.index_select(1, index_QP[0])
    rows = torch.arange(len(values_BXC), device=values_BXC.device)[:, None]
    return values_BXC[rows, index_QP]

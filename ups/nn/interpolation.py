"""Fields on a grid at arbitrary points, by cubic interpolation; to the bit what the grid holds at its points.

Letters: B batch, X the axes of the grid, N their number, C channels, Q queries' batch (1 or B), P query
points, S places of a stencil.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_PLACES = 4  # of a cubic along an axis
_ROUNDING = 4.0  # roundings that a query may be off a point of the grid and still be that point


@dataclass(frozen=True)
class Stencil:
    """Points of one axis around each query, and their Lagrange weights.

    Attributes:
        index: Numbers of the points, S tensors of shape (Q, P).
        weight: Adds up to 1, S tensors of shape (Q, P).
    """

    index: list[Tensor]
    weight: list[Tensor]


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
    first, *others = [
        axis_stencil(query_QPN[..., axis], num=num, wraps=wraps)
        for axis, (num, wraps) in enumerate(zip(points, periodic, strict=True))
    ]
    places = list(zip(first.index, first.weight, strict=True))
    for stencil, num in zip(others, points[1:], strict=True):
        places = [
            (index * num + next_index, weight * next_weight)
            for index, weight in places
            for next_index, next_weight in zip(stencil.index, stencil.weight, strict=True)
        ]
    flat_BXC = values_BXC.flatten(1, -2)
    total: Tensor | None = None
    for index, weight in places:
        term = take_rows(flat_BXC, index) * weight.to(values_BXC.dtype).unsqueeze(-1)
        total = term if total is None else total + term
    assert total is not None
    return total


def resampled(values_BXC: Tensor, points: tuple[int, ...], *, periodic: tuple[bool, ...]) -> Tensor:
    """The same fields at the centres of another number of cells, by the same cubics, an axis at a time.

    Args:
        values_BXC: Shape (B, X..., C).
        points: Wanted along each axis.

    Returns:
        Shape (B, *points, C); `values_BXC` itself where it has these points.
    """
    for axis, (num, wraps) in enumerate(zip(points, periodic, strict=True), start=1):
        if values_BXC.shape[axis] == num:
            continue
        query = (torch.arange(num, dtype=torch.float64, device=values_BXC.device) + 0.5) / num
        stencil = axis_stencil(query[None], num=values_BXC.shape[axis], wraps=wraps)
        behind = (1,) * (values_BXC.ndim - 1 - axis)
        terms = [
            values_BXC.index_select(axis, index[0]) * weight[0].to(values_BXC.dtype).reshape(-1, *behind)
            for index, weight in zip(stencil.index, stencil.weight, strict=True)
        ]
        values_BXC = functools.reduce(torch.add, terms)
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
    number, offset = first.long(), position - first
    index = [number + place for place in range(size)]
    offsets = [offset - place for place in range(size)]
    weights = []
    for place in range(size):
        others = [other for other in range(size) if other != place]
        above = [offsets[other] for other in others] or [torch.ones_like(offset)]
        weights.append(functools.reduce(torch.mul, above) / math.prod([place - other for other in others]))
    return Stencil([some.remainder(num) for some in index] if wraps else index, weights)


def take_rows(values_BXC: Tensor, index_QP: Tensor) -> Tensor:
    """Rows by number, those of all frames (Q = 1) or of each; shape (B, P, C)."""
    if len(index_QP) == 1:
        return values_BXC.index_select(1, index_QP[0])
    rows = torch.arange(len(values_BXC), device=values_BXC.device)[:, None]
    return values_BXC[rows, index_QP]

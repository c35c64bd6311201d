"""Linear maps of fields and tokens: bases of patches, cubic interpolation, a token and its neighbours.

The cell of a token holds some points of the grid with all channels: P values. An orthonormal basis of the
training split's cells makes D coefficients of them, in one unit for all D: the decoder then has one singular
value, so an error of a token is an error of the field as large, whichever direction it has. Whitening would
undo that. Between points of a grid fields are interpolated by cubics, at its points to the bit what it
holds.

Letters: B batch, X the axes of the grid, N their number, C channels, L tokens, D channels of a token, P
values of a cell or query points, Q queries' batch (1 or B), S places of a stencil, A axes of the token grid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ups.grid import GridSpec, TokenGrid
from ups.nn.layers import cut_cells, join_cells, pad_axis, without_autocast

Basis = Literal["pca", "none"]


def num_cell_values(cut: TokenGrid, num_channels: int) -> int:
    """P, the values of a token's cell."""
    return math.prod(cut.points_per_token) * num_channels


class PatchBasis(nn.Module):
    """z = (x - mean) V / scale for the cell x of each token, and back; buffers, so saved and never trained.

    Args:
        grid: Where the fields lie.
        cut: How it is cut into the cells of tokens.
        num_channels: C of the array.
        latent_dim: D. What it exceeds P by is zero, and without effect.
    """

    mean: Tensor  # (P,)
    vectors: Tensor  # V, (P, D): orthonormal columns
    scale: Tensor  # root mean square of the coefficients, ()
    rest: Tensor  # root mean square of what V leaves out of a value, (): the unit of what is trained on top

    def __init__(self, grid: GridSpec, *, cut: TokenGrid, num_channels: int, latent_dim: int) -> None:
        super().__init__()
        self._points, self._periodic, self._cell = grid.points, grid.periodic, cut.points_per_token
        num_values = num_cell_values(cut, num_channels)
        self._channels = num_channels
        self.register_buffer("mean", torch.zeros(num_values))
        self.register_buffer("vectors", torch.eye(num_values, latent_dim))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("rest", torch.ones(()))

    def project(self, values_BXC: Tensor) -> Tensor:
        """Normalised fields (B, X..., C) to tokens (B, L, D)."""
        with without_autocast(values_BXC.device):  # bfloat16 would make a lossless basis lose
            cells_BLP = cut_cells(values_BXC.to(self.mean.dtype), self._cell).flatten(2)
            return (cells_BLP - self.mean) @ (self.vectors / self.scale)

    def restore(self, tokens_BLD: Tensor) -> Tensor:
        """Tokens (B, L, D) to normalised fields on the grid, (B, X..., C)."""
        with without_autocast(tokens_BLD.device):
            cells_BLP = tokens_BLD.to(self.mean.dtype) @ (self.vectors.T * self.scale) + self.mean
            cells = cells_BLP.unflatten(2, (-1, self._channels))
            return join_cells(cells, self._cell, points=self._points)

    def restore_at(self, tokens_BLD: Tensor, query_QPN: Tensor) -> Tensor:
        """As `restore`, interpolated at points (Q, P, N), fractions of the domain; shape (B, P, C)."""
        return interpolate(self.restore(tokens_BLD), query_QPN, periodic=self._periodic)


class ChannelMap(nn.Module):
    """One matrix for the channels of every token; the identity until it is measured, never trained.

    Args:
        dim: D.
    """

    matrix: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(dim))

    def forward(self, tokens_BLD: Tensor) -> Tensor:
        """(B, L, D) to the same shape."""
        with without_autocast(tokens_BLD.device):
            return tokens_BLD.to(self.matrix.dtype) @ self.matrix.T


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


def with_neighbours(tokens_BLD: Tensor, grid: Sequence[int], periodic: Sequence[bool]) -> Tensor:
    """Each token, then those before and behind it along each axis; zeros beyond walls.

    Args:
        tokens_BLD: In the order of their grid.
        grid: Tokens along each axis.
    Returns:
        Shape (B, L, N).
    """
    tokens = tokens_BLD.unflatten(1, tuple(grid))
    parts = [tokens]
    for axis, (length, wraps) in enumerate(zip(grid, periodic, strict=True), start=1):
        padded = pad_axis(tokens, axis=axis, wraps=wraps, width=1)
        parts += [padded.narrow(axis, first, length) for first in (0, 2)]
    return torch.cat(parts, dim=-1).flatten(1, len(grid))


class NeighbourMap(nn.Module):
    """The same linear map of every token and its neighbours, zero at first; measured, not trained.

    Args:
        dim: D.
        grid: Tokens along each axis.
    """

    weight: Tensor  # (N, D)

    def __init__(self, dim: int, *, grid: Sequence[int], periodic: Sequence[bool]) -> None:
        super().__init__()
        self.grid, self.periodic = tuple(grid), tuple(periodic)
        self.register_buffer("weight", torch.zeros((1 + 2 * len(self.grid)) * dim, dim))

    def forward(self, tokens_BLD: Tensor) -> Tensor:
        """(B, L, D) to the same shape, float32."""
        return with_neighbours(tokens_BLD.float(), self.grid, self.periodic) @ self.weight

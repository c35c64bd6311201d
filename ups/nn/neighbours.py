"""A linear map of tokens and those beside them: what takes off the seams that patches leave.

Letters: B batch, L tokens, D channels of a token, A axes of the token grid, N = (1 + 2 A) D.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.nn.layers import pad_axis


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

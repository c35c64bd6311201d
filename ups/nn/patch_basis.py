"""`PatchBasis` and `ChannelMap`: linear maps between fields and tokens, measured instead of trained.

The cell of a token holds some points of the grid with all channels: P values. An orthonormal basis of the
training split's cells makes D coefficients of them, in one unit for all D: the decoder then has one singular
value, so an error of a token is an error of the field as large, whichever direction it has. Whitening would
undo that. Letters: B batch, X the axes of the grid, C channels, L tokens, D channels of a token, P values of
a cell, Q queries' batch, N axes.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ups.grid import GridSpec, TokenGrid
from ups.nn.interpolation import interpolate
from ups.nn.layers import cut_cells, join_cells, without_autocast

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

"""`GridEncoder`: fields on a regular grid to latent tokens, by a linear basis of patches and a network.

Letters: B batch, X the axes of the grid, C channels, G the axes of the patches or tokens, W width, L latent
tokens, D latent channels, E condition.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ups.errors import ShapeError
from ups.grid import FIELDS, GridSpec, TokenGrid
from ups.nn.layers import (
    Condition,
    ConditionEmbedding,
    GroupPooling,
    ResidualBlock,
    boundary_features,
    num_boundary_features,
    pointwise,
    rms_norm,
    zero_init,
)
from ups.nn.patches import Basis, ChannelMap, PatchBasis


class GridEncoder(nn.Module):
    """Coefficients of each token's patch in a linear basis, plus what a network adds to them.

    The network: patches by pixel-unshuffle, residual blocks over the patches, pooling, residual blocks over
    the tokens. On top of a basis it starts at zero, in the unit of what the basis leaves out.

    Along periodic axes it commutes with shifts by whole tokens: nothing knows an absolute position there.
    Along other axes the distance to the boundary is an input. Every layer is built here, none on first use.

    Args:
        grid: What it encodes.
        cut: Patches and tokens, from `cut_grid`.
        latent_dim: D.
        width: W.
        depth: Residual blocks before, and as many after, the pooling.
        num_heads: Heads of the pooling; divides W.
        num_tasks: Tasks that share it.
        num_parameters: Parameters of the equations.
        basis: "pca" for a `PatchBasis` of each array, which has to be measured; "none" for the network alone.
        residual: Whether there is a network.
        isometry: Whether what a network gives goes through a `ChannelMap` of each array at the end.
    """

    def __init__(
        self,
        grid: GridSpec,
        *,
        cut: TokenGrid,
        latent_dim: int,
        width: int,
        depth: int,
        num_heads: int,
        num_tasks: int = 1,
        num_parameters: int = 0,
        basis: Basis = "none",
        residual: bool = True,
        isometry: bool = False,
    ) -> None:
        super().__init__()
        assert residual or basis != "none"
        self.grid, self.cut, self.has_network = grid, cut, residual
        self.basis, self.to_isometry = nn.ModuleDict(), nn.ModuleDict()
        for array, num in grid.channels:
            if basis == "pca":
                self.basis[array] = PatchBasis(grid, cut=cut, num_channels=num, latent_dim=latent_dim)
            if isometry and residual:  # a basis alone is isometric
                self.to_isometry[array] = ChannelMap(latent_dim)
        if not residual:
            return
        patch_values = cut.patch_size**grid.ndim
        self.patch_in = nn.ModuleDict(
            {array: pointwise(patch_values * num, width, ndim=grid.ndim) for array, num in grid.channels}
        )
        num_ends = num_boundary_features(grid.periodic)
        self.boundary_in = pointwise(num_ends, width, ndim=grid.ndim) if num_ends else None
        self.condition = ConditionEmbedding(
            num_tasks=num_tasks, arrays=grid.arrays, num_parameters=num_parameters, width=width
        )
        self.patch_blocks = _blocks(width, depth, grid)
        self.pooling = GroupPooling(width, groups=cut.groups, tokens=cut.tokens, num_heads=num_heads)
        self.token_blocks = _blocks(width, depth, grid)
        self.out = pointwise(width, latent_dim, ndim=grid.ndim)
        if basis != "none":
            zero_init(self.out)
        # A function of the geometry alone, so it isn't part of the weights.
        self.register_buffer("ends", _patch_ends(grid, cut), persistent=False)

    def forward(self, values_BXC: Tensor, condition: Condition, *, array: str = FIELDS) -> Tensor:
        """Encode frames.

        Args:
            values_BXC: Frames of one array, normalised, shape (B, *grid.points, C).
            condition: Their conditions.
            array: Which array of the grid they are.

        Returns:
            Latent tokens, ordered as the tokens lie in space (last axis fastest), shape (B, L, D).

        Raises:
            ShapeError: If the frames aren't on the grid.
        """
        if not torch.compiler.is_compiling():
            self._check_on_grid(values_BXC, array)
        tokens_BLD: Tensor | None = None
        if self.has_network:
            tokens_BLD = self._network(values_BXC, condition, array)
        if array in self.basis:
            basis = self.basis_of(array)
            linear_BLD = basis.project(values_BXC)
            more_BLD = 0.0 if tokens_BLD is None else basis.rest / basis.scale * tokens_BLD
            tokens_BLD = linear_BLD + more_BLD
        assert tokens_BLD is not None
        return self.to_isometry[array](tokens_BLD) if array in self.to_isometry else tokens_BLD

    def basis_of(self, array: str) -> PatchBasis:
        """The basis of an array's patches."""
        basis = self.basis[array]
        assert isinstance(basis, PatchBasis)
        return basis

    def _network(self, values_BXC: Tensor, condition: Condition, array: str) -> Tensor:
        condition_BE = self.condition(condition, array=array)
        x_BWG = self.patch_in[array](pixel_unshuffle(values_BXC, patch_size=self.cut.patch_size))
        if self.boundary_in is not None:
            x_BWG = x_BWG + self.boundary_in(self.ends)
        for block in self.patch_blocks:
            x_BWG = block(x_BWG, condition_BE)
        x_BWG = self.pooling(x_BWG)
        for block in self.token_blocks:
            x_BWG = block(x_BWG, condition_BE)
        return self.out(rms_norm(x_BWG)).flatten(2).transpose(1, 2)

    def _check_on_grid(self, values_BXC: Tensor, array: str) -> None:
        channels = dict(self.grid.channels)
        if array not in channels:
            raise ShapeError(f"no array {array!r}", expected=f"one of {', '.join(channels)}")
        expected = (*self.grid.points, channels[array])
        if tuple(values_BXC.shape[1:]) != expected:
            shown = ", ".join(map(str, expected))
            raise ShapeError(array, expected=f"(B, {shown})", found=tuple(values_BXC.shape))


def pixel_unshuffle(values_BXC: Tensor, *, patch_size: int) -> Tensor:
    """Put the points of every patch beside each other as channels.

    Args:
        values_BXC: Shape (B, X..., C), X multiples of `patch_size`.
        patch_size: Points of a patch along each axis.

    Returns:
        Shape (B, patch_size**N * C, X / patch_size...).
    """
    ndim = values_BXC.ndim - 2
    sizes = [size for num in values_BXC.shape[1:-1] for size in (num // patch_size, patch_size)]
    split = values_BXC.reshape(values_BXC.shape[0], *sizes, values_BXC.shape[-1])
    patch_axes = [1 + 2 * axis for axis in range(ndim)]
    point_axes = [2 + 2 * axis for axis in range(ndim)]
    return split.permute(0, *point_axes, 1 + 2 * ndim, *patch_axes).flatten(1, ndim + 1)


def _blocks(width: int, depth: int, grid: GridSpec) -> nn.ModuleList:
    return nn.ModuleList(
        ResidualBlock(width, condition_width=width, periodic=grid.periodic) for _ in range(depth)
    )


def _patch_ends(grid: GridSpec, cut: TokenGrid) -> Tensor:
    """Boundary features at the centres of the patches, shape (1, F, patches)."""
    centres = torch.meshgrid(*(torch.arange(num) + 0.5 for num in cut.patches), indexing="ij")
    positions = torch.stack(centres, dim=-1)
    features = boundary_features(positions, cells=cut.patches, periodic=grid.periodic)
    return features.movedim(-1, 0).unsqueeze(0)

"""The latent operator: from the latent state at one time to the state a time step later.

Blocks over latent tokens in a U-shape with skip connections, conditioned on time step, PDE parameters,
boundary types, task and whether it is steady. What mixes the tokens is chosen by level
(`ups.models.operator_blocks`); with attention it is PDE-Transformer (Holzschuh et al. 2025, adaLN-Zero of
Peebles and Xie 2023). The output layer starts at zero, so an untrained operator is the identity: persistence.

Letters: B batch, L tokens, D channels of a latent token, W width, A axes, E condition, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.errors import ShapeError
from ups.grid import PERIODIC
from ups.models.operator_blocks import make_level, normed
from ups.models.operator_size import NORMALISED, OperatorSize, TokenAxis
from ups.nn.layers import (
    BOUNDARY_TYPES,
    Coarser,
    Condition,
    ConditionEmbedding,
    Finer,
    boundary_features,
    boundary_flags,
    halved_axes,
    num_boundary_features,
)

_STATE = "latent"
_DT_FEATURES = 16


class StepEmbedding(nn.Module):
    """Time step, boundary types, steadiness, parameters and task as one vector of E channels.

    Args:
        num_tasks: Tasks of the model.
        ranges: Least and largest value of each of the P parameters in the training data.
        num_axes: A.
        width: E.
    """

    def __init__(
        self, *, num_tasks: int, ranges: Sequence[tuple[float, float]], num_axes: int, width: int
    ) -> None:
        super().__init__()
        self.condition = ConditionEmbedding(
            num_tasks=num_tasks, arrays=(_STATE,), num_parameters=len(ranges), width=width, ranges=ranges
        )
        self.step = nn.Linear(_DT_FEATURES + num_axes * len(BOUNDARY_TYPES) + 1, width)
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, condition: Condition, dt_B: Tensor, *, boundary: Sequence[str], steady: bool) -> Tensor:
        """Shape (B, E)."""
        flags = dt_B.new_tensor([*boundary_flags(boundary), float(steady)]).expand(len(dt_B), -1)
        features = torch.cat([_waves(dt_B), flags], dim=1).to(self.step.weight.dtype)
        embedded: Tensor = self.mlp(self.condition(condition, array=_STATE) + self.step(features))
        return embedded


class WallEmbedding(nn.Module):
    """Adds to every token what its distance to the ends of the axes is; nothing at first.

    Args:
        axes: The token grid.
        width: W.
    """

    def __init__(self, axes: Sequence[TokenAxis], *, width: int) -> None:
        super().__init__()
        num_features = num_boundary_features((False,))
        self.along = nn.ModuleDict(
            {
                str(number): nn.Linear(num_features, width, bias=False)
                for number, axis in enumerate(axes)
                if axis.has_ends
            }
        )
        for weight in self.along.parameters():
            nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, *, periodic: Sequence[bool]) -> Tensor:
        """(B, *grid, W) to the same shape."""
        for name, layer in self.along.items():
            axis = int(name)
            length = tokens.shape[1 + axis]
            if not periodic[axis]:
                centres = torch.arange(length, device=tokens.device, dtype=tokens.dtype) + 0.5
                features = boundary_features(centres[:, None], cells=(length,), periodic=(False,))
                behind = (1,) * (tokens.ndim - 3 - axis)
                tokens = tokens + layer(features).reshape(length, *behind, -1)
        return tokens


class LatentOperator(nn.Module):
    """z_{t+dt} = z_t + G(z_t; dt, parameters, boundary, task).

    Args:
        latent_dim: D.
        num_tasks: Tasks of the model.
        ranges: Least and largest value of each of the P parameters in the training data.
        size: Architecture.
        axes: The token grids that it is for; others of as many axes are allowed.
    """

    def __init__(
        self,
        latent_dim: int,
        *,
        num_tasks: int,
        ranges: Sequence[tuple[float, float]],
        size: OperatorSize,
        axes: tuple[TokenAxis, ...],
    ) -> None:
        super().__init__()
        self.latent_dim, self.num_axes = latent_dim, len(axes)
        widths = [size.width * 2**level for level in range(len(size.depths))]
        self.embed = StepEmbedding(num_tasks=num_tasks, ranges=ranges, num_axes=len(axes), width=size.width)
        self.into = nn.Linear(latent_dim, size.width)
        self.walls = WallEmbedding(axes, width=size.width)
        self.down = nn.ModuleList(make_level(size, level, axes) for level in range(len(widths)))
        self.up = nn.ModuleList(make_level(size, level, axes) for level in range(len(widths) - 1))
        self.coarser = nn.ModuleList(Coarser(width, num_axes=len(axes)) for width in widths[:-1])
        self.finer = nn.ModuleList(Finer(width, num_axes=len(axes)) for width in widths[:-1])
        self.join = nn.ModuleList(nn.Linear(2 * width, width) for width in widths[:-1])
        self.is_normed = size.has_norm or size.mixer(0) in NORMALISED
        self.out = nn.Linear(size.width, latent_dim)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(
        self,
        latent_BLD: Tensor,
        *,
        dt_B: Tensor,
        condition: Condition,
        grid: tuple[int, ...],
        boundary: tuple[str, ...],
        steady: bool = False,
    ) -> Tensor:
        """Advance the latent state by one time step.

        Args:
            latent_BLD: Latent tokens in the order of their grid, normalised, shape (B, L, D).
            dt_B: Physical time from one frame to the next, in the units of the data, shape (B,).
            condition: Task and PDE parameters.
            grid: Tokens along each axis, no more axes than the operator's; their product is L.
            boundary: Boundary type of each axis as stores name it. Mixing wraps around where it is periodic;
                the condition tells those of `BOUNDARY_TYPES` apart.
            steady: Whether the step is from the input of a steady problem to its solution.
        Returns:
            The state at t + dt, same shape; a new tensor.
        Raises:
            ShapeError: If the tokens don't fill the grid, or it has another number of boundaries.
        """
        if not torch.compiler.is_compiling():
            self._check_shape(latent_BLD, grid, boundary)
        missing = self.num_axes - len(grid)
        grid, boundary = (*grid, *(1,) * missing), (*boundary, *(PERIODIC,) * missing)
        periodic = tuple(kind == PERIODIC for kind in boundary)
        condition_BE = self.embed(condition, dt_B, boundary=boundary, steady=steady)
        tokens = self.walls(self.into(latent_BLD.unflatten(1, grid)), periodic=periodic)
        tokens = self._u_shape(tokens, condition_BE, periodic)
        change: Tensor = self.out(normed(tokens) if self.is_normed else tokens)
        return latent_BLD + change.flatten(1, self.num_axes)

    def _u_shape(self, tokens: Tensor, condition_BE: Tensor, periodic: tuple[bool, ...]) -> Tensor:
        skips, halved = [], []
        for level, blocks in enumerate(self.down):
            tokens = _through(blocks, tokens, condition_BE, periodic)  # type: ignore[arg-type]  # a ModuleList
            if level < len(self.coarser):
                skips.append(tokens)
                halved.append(halved_axes(tuple(tokens.shape[1:-1])))
                tokens = self.coarser[level](tokens, axes=halved[-1])
        for level in reversed(range(len(self.up))):
            tokens = self.finer[level](tokens, axes=halved[level])
            tokens = self.join[level](torch.cat([tokens, skips[level]], dim=-1))
            tokens = _through(self.up[level], tokens, condition_BE, periodic)  # type: ignore[arg-type]
        return tokens

    def _check_shape(self, latent_BLD: Tensor, grid: tuple[int, ...], boundary: tuple[str, ...]) -> None:
        if len(boundary) != len(grid):
            raise ShapeError(f"boundary types of a grid of {grid}", expected=len(grid), found=len(boundary))
        expected = (len(latent_BLD), math.prod(grid), self.latent_dim)
        if len(grid) > self.num_axes or tuple(latent_BLD.shape) != expected:
            raise ShapeError(
                f"latent tokens of a grid of {grid}", expected=expected, found=tuple(latent_BLD.shape)
            )


def _through(
    blocks: nn.ModuleList, tokens: Tensor, condition_BE: Tensor, periodic: tuple[bool, ...]
) -> Tensor:
    for block in blocks:
        tokens = block(tokens, condition_BE, periodic=periodic)
    return tokens


def _waves(dt_B: Tensor) -> Tensor:
    """Sines and cosines of the time step's logarithm, shape (B, `_DT_FEATURES`)."""
    frequencies = 0.25 * 2.0 ** torch.arange(_DT_FEATURES // 2, device=dt_B.device)
    angles = dt_B.float().log()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)

"""The latent operator: from the latent state at one time to the state a time step later.

PDE-Transformer (Holzschuh et al. 2025) over latent tokens: U-shape with skip connections, attention in
shifted windows, adaLN-Zero conditioning (Peebles and Xie 2023) on time step, PDE parameters, boundary types,
task and whether it is steady. The output layer starts at zero, so an untrained operator is the identity:
persistence.

Letters: B batch, L tokens, D channels of a latent token, W width, A axes, E condition, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.errors import ShapeError
from ups.grid import PERIODIC
from ups.nn.layers import (
    BOUNDARY_TYPES,
    Coarser,
    Condition,
    ConditionEmbedding,
    Finer,
    boundary_flags,
    halved_axes,
)
from ups.nn.shifted_window import MAX_WINDOW, ShiftedWindowAttention

MAX_AXES = 2  # a 1D token grid is a 2D one whose second axis has length 1
_STATE = "latent"
_DT_FEATURES = 16


@dataclass(frozen=True)
class OperatorSize:
    """Architecture.

    Attributes:
        width: W of the finest level, doubled at each coarser one.
        depths: Blocks of each level, finest first; the last is the bottom of the U.
        num_heads: Attention heads of the finest level, doubled at each coarser one.
        window: Tokens of a window along an axis, at most.
        mlp_ratio: Hidden over outer channels of the MLPs.
        drop_path: Share of residual branches that training drops.
        dropout: Share of hidden channels of the MLPs that training drops.
    """

    width: int = 96
    depths: tuple[int, ...] = (2, 2, 2)
    num_heads: int = 4
    window: int = MAX_WINDOW
    mlp_ratio: float = 4.0
    drop_path: float = 0.0
    dropout: float = 0.0


# Parameter counts of S, B and L are of the order of the paper's 33, 130 and 518 million.
SIZES = {
    "tiny": OperatorSize(width=64, depths=(2, 2), num_heads=4),
    "small": OperatorSize(width=96, depths=(2, 2, 2), num_heads=4),
    "S": OperatorSize(width=128, depths=(2, 4, 6), num_heads=4),
    "B": OperatorSize(width=256, depths=(2, 4, 6), num_heads=8),
    "L": OperatorSize(width=512, depths=(2, 4, 6), num_heads=16),
}


class OperatorBlock(nn.Module):
    """Attention and MLP, each normalised, modulated by the condition, and gated from zero (adaLN-Zero).

    Args:
        width: W.
        num_heads: Attention heads.
        condition_width: E.
        is_shifted: Whether windows are shifted.
        size: The rest of the architecture.
    """

    def __init__(
        self, width: int, *, num_heads: int, condition_width: int, is_shifted: bool, size: OperatorSize
    ) -> None:
        super().__init__()
        self.drop_path = size.drop_path
        self.attention = ShiftedWindowAttention(
            width, num_heads=num_heads, num_axes=MAX_AXES, is_shifted=is_shifted, largest=size.window
        )
        hidden = int(width * size.mlp_ratio)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(size.dropout), nn.Linear(hidden, width)
        )
        self.modulation = nn.Linear(condition_width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, tokens: Tensor, condition_BE: Tensor, *, periodic: Sequence[bool]) -> Tensor:
        """(B, *grid, W) to the same shape."""
        places = (1,) * (tokens.ndim - 2)
        parts = self.modulation(condition_BE).unflatten(1, (6, *places, -1)).unbind(1)
        scale_1, shift_1, gate_1, scale_2, shift_2, gate_2 = parts
        mixed = self.attention(_normed(tokens) * (1 + scale_1) + shift_1, periodic=periodic)
        tokens = tokens + gate_1 * self._dropped(mixed)
        return tokens + gate_2 * self._dropped(self.mlp(_normed(tokens) * (1 + scale_2) + shift_2))

    def _dropped(self, branch: Tensor) -> Tensor:
        """The branch without some of the batch's samples while training (stochastic depth)."""
        if not self.training or not self.drop_path:
            return branch
        keep = 1 - self.drop_path
        mask = branch.new_empty(len(branch), *(1,) * (branch.ndim - 1)).bernoulli_(keep)
        return branch * mask / keep


class StepEmbedding(nn.Module):
    """Time step, boundary types, steadiness, parameters and task as one vector of E channels.

    Args:
        num_tasks: Tasks of the model.
        num_parameters: P.
        width: E.
    """

    def __init__(self, *, num_tasks: int, num_parameters: int, width: int) -> None:
        super().__init__()
        self.condition = ConditionEmbedding(
            num_tasks=num_tasks, arrays=(_STATE,), num_parameters=num_parameters, width=width
        )
        self.step = nn.Linear(_DT_FEATURES + MAX_AXES * len(BOUNDARY_TYPES) + 1, width)
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, condition: Condition, dt_B: Tensor, *, boundary: Sequence[str], steady: bool) -> Tensor:
        """Shape (B, E)."""
        flags = dt_B.new_tensor([*boundary_flags(boundary), float(steady)]).expand(len(dt_B), -1)
        features = torch.cat([_waves(dt_B), flags], dim=1).to(self.step.weight.dtype)
        embedded: Tensor = self.mlp(self.condition(condition, array=_STATE) + self.step(features))
        return embedded


class LatentOperator(nn.Module):
    """z_{t+dt} = z_t + G(z_t; dt, parameters, boundary, task).

    Args:
        latent_dim: D.
        num_tasks: Tasks of the model.
        num_parameters: P.
        size: Architecture.
    """

    def __init__(self, latent_dim: int, *, num_tasks: int, num_parameters: int, size: OperatorSize) -> None:
        super().__init__()
        self.latent_dim = latent_dim
        widths = [size.width * 2**level for level in range(len(size.depths))]
        self.embed = StepEmbedding(num_tasks=num_tasks, num_parameters=num_parameters, width=size.width)
        self.into = nn.Linear(latent_dim, size.width)
        self.down = nn.ModuleList(_level(size, level) for level in range(len(widths)))
        self.up = nn.ModuleList(_level(size, level) for level in range(len(widths) - 1))
        self.coarser = nn.ModuleList(Coarser(width, num_axes=MAX_AXES) for width in widths[:-1])
        self.finer = nn.ModuleList(Finer(width, num_axes=MAX_AXES) for width in widths[:-1])
        self.join = nn.ModuleList(nn.Linear(2 * width, width) for width in widths[:-1])
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
            grid: Tokens along each axis, one or two; their product is L.
            boundary: Boundary type of each axis as stores name it. Windows wrap around where it is periodic;
                the condition tells those of `BOUNDARY_TYPES` apart.
            steady: Whether the step is from the input of a steady problem to its solution.
        Returns:
            The state at t + dt, same shape; a new tensor.
        Raises:
            ShapeError: If the tokens don't fill the grid, or it has another number of boundaries.
        """
        if not torch.compiler.is_compiling():
            self._check_shape(latent_BLD, grid, boundary)
        missing = MAX_AXES - len(grid)
        grid, boundary = (*grid, *(1,) * missing), (*boundary, *(PERIODIC,) * missing)
        periodic = tuple(kind == PERIODIC for kind in boundary)
        condition_BE = self.embed(condition, dt_B, boundary=boundary, steady=steady)
        tokens = self.into(latent_BLD.unflatten(1, grid))
        change: Tensor = self.out(_normed(self._u_shape(tokens, condition_BE, periodic)))
        return latent_BLD + change.flatten(1, MAX_AXES)

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
        if len(grid) > MAX_AXES or tuple(latent_BLD.shape) != expected:
            raise ShapeError(
                f"latent tokens of a grid of {grid}", expected=expected, found=tuple(latent_BLD.shape)
            )


def _level(size: OperatorSize, level: int) -> nn.ModuleList:
    """The blocks of one level: windows as they are and shifted, in turns."""
    return nn.ModuleList(
        OperatorBlock(
            size.width * 2**level,
            num_heads=size.num_heads * 2**level,
            condition_width=size.width,
            is_shifted=bool(number % 2),
            size=size,
        )
        for number in range(size.depths[level])
    )


def _through(
    blocks: nn.ModuleList, tokens: Tensor, condition_BE: Tensor, periodic: tuple[bool, ...]
) -> Tensor:
    for block in blocks:
        tokens = block(tokens, condition_BE, periodic=periodic)
    return tokens


def _normed(tokens: Tensor) -> Tensor:
    """Layer norm without parameters of its own: the condition scales and shifts."""
    return F.layer_norm(tokens, tokens.shape[-1:])


def _waves(dt_B: Tensor) -> Tensor:
    """Sines and cosines of the time step's logarithm, shape (B, `_DT_FEATURES`)."""
    frequencies = 0.25 * 2.0 ** torch.arange(_DT_FEATURES // 2, device=dt_B.device)
    angles = dt_B.float().log()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)

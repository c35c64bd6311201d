"""The latent operator: from the latent state at one time to the state a time step later.

Blocks over latent tokens in a U-shape with skip connections, conditioned on time step, PDE parameters,
boundary types, task and whether it is steady (`ups.models.u_shape`). What mixes the tokens is chosen by level
(`ups.models.operator_blocks`); with attention it is PDE-Transformer (Holzschuh et al. 2025, adaLN-Zero of
Peebles and Xie 2023). The output layer starts at zero, so an untrained operator is the identity: persistence.
What is computed is the change of a state; of a steady task it is the solution, which lacks its input's jumps.

Letters: B batch, L tokens, D channels of a latent token, W width, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ups.models.operator_size import TOKEN_UNET, OperatorSize, TokenAxis
from ups.models.operators import operators
from ups.models.token_geometry import TokenGeometry
from ups.models.u_shape import StepEmbedding, TokenUNet
from ups.nn.layers import Condition


class StepConditions(NamedTuple):
    """What conditions say to a step; all steps of a rollout share them.

    Attributes:
        parts: Scales, shifts and gates of all blocks beside each other, shape (B, all of them).
        walls: What is added to every token for its distance to the walls, (1, *grid, W); None without walls.
    """

    parts: Tensor
    walls: Tensor | None


@operators(TOKEN_UNET)
class LatentOperator(TokenUNet):
    """z_{t+dt} = z_t + G(z_t; dt, parameters, boundary, task); of a steady task the solution is G alone.

    A step has two halves: `conditions`, which all steps of a rollout share, and `advance`.

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
        embed = StepEmbedding(num_tasks=num_tasks, ranges=ranges, num_axes=len(axes), width=size.width)
        super().__init__(embed, (latent_dim, latent_dim), size=size, axes=axes)
        self.adds_input = size.adds_input
        self.register_load_state_dict_pre_hook(_join_modulations)

    def conditions(self, condition: Condition, dt_B: Tensor, geometry: TokenGeometry) -> StepConditions:
        """What a step takes besides the state.

        Args:
            condition: Task and PDE parameters.
            dt_B: Physical time from one frame to the next, in the units of the data, shape (B,).
            geometry: Of the token grid, on the operator's device.
        """
        return StepConditions(self.modulation(self.embed(condition, dt_B, geometry)), self.walls(geometry))

    def advance(self, latent_BLD: Tensor, conditions: StepConditions, geometry: TokenGeometry) -> Tensor:
        """Advance the latent state by one time step.

        Args:
            latent_BLD: Latent tokens in the order of their grid, normalised, shape (B, L, D).
            conditions: As `conditions` gives them.
            geometry: Of the token grid, as `conditions` was given it.
        Returns:
            The state at t + dt, or the solution; same shape, a new tensor.
        Raises:
            ShapeError: If the tokens don't fill the grid.
        """
        computed_BLD = self.computed(latent_BLD, conditions.parts, conditions.walls, geometry)
        return computed_BLD if geometry.steady and not self.adds_input else latent_BLD + computed_BLD

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
        """One time step on a grid that needn't have been used before: `geometry`, `conditions`, `advance`."""
        geometry = self.geometry(grid, boundary, steady=steady).to(latent_BLD.device)
        return self.advance(latent_BLD, self.conditions(condition, dt_B, geometry), geometry)


def _join_modulations(operator: nn.Module, tensors: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Take weights of before 2026-11, when every block had a modulation of its own."""
    assert isinstance(operator, LatentOperator)
    for kind in ("weight", "bias"):
        names = [f"{prefix}{name}.modulation.{kind}" for name, _ in operator.blocks()]
        if all(name in tensors for name in names):
            tensors[f"{prefix}modulation.{kind}"] = torch.cat([tensors.pop(name) for name in names])

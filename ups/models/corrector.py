"""A conditional velocity of states: of an operator's residual, or of steady solutions.

What flows from noise to data are states x, latents or patches of fields, in units in which data have a
standard deviation of about 1. Given beside it are states on the same tokens, such as the state before and
what the operator predicts, and the flow time, the physical time step, parameters, boundary types and task.
The network is the operator's (`TokenUNet`) and predicts the datum r, where the flow ends (Li and He 2025,
arXiv:2511.13720); the velocity is (r - x) / (1 - t), and it is the velocity that is trained. Its output
starts at zero: a flow along an untrained velocity ends at 0 whatever the noise, so an untrained corrector
corrects nothing.

The same network serves a student of one to four steps: `velocity` at t = 0 is its only step, or the first.

Letters: B batch, L tokens, D channels of a token, W width, E = W condition, S states given, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ups.diffusion.paths import velocity_of_datum
from ups.models.latent_operator import StepEmbedding, TokenUNet
from ups.models.operator_blocks import TokenGeometry
from ups.models.operator_size import OperatorSize, TokenAxis
from ups.nn.layers import Condition, zero_init

_TIME_WAVES = 6


class FlowConditions(NamedTuple):
    """What all evaluations of one flow share.

    Attributes:
        embedded: Time step, parameters, boundary types and task, shape (B, E).
        walls: What is added to every token for its distance to the walls, (1, *grid, W); None without walls.
    """

    embedded: Tensor
    walls: Tensor | None


class FlowTimeEmbedding(nn.Module):
    """The flow time beside the condition, as one vector of E channels.

    Args:
        width: E.
    """

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(2 * _TIME_WAVES, width), nn.SiLU(), nn.Linear(width, width))
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        frequencies = math.pi / 2 * 2.0 ** torch.arange(_TIME_WAVES)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, embedded_BE: Tensor, t_B: Tensor) -> Tensor:
        """Shape (B, E)."""
        angles = t_B.float()[:, None] * self.frequencies
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        joined: Tensor = self.mlp(embedded_BE + self.time(waves.to(embedded_BE.dtype)))
        return joined


class VelocityNetwork(TokenUNet):
    """v(x, t | given states, dt, parameters, boundary, task) = (r(x, t | ...) - x) / (1 - t).

    A call has two halves: `conditions`, which all evaluations of a flow share, and `velocity`.

    Args:
        state_dim: D.
        num_given: S, states that it is given beside x: 2 of a corrector, 1 of a prior of steady solutions.
        num_tasks: Tasks of the model.
        ranges: Least and largest value of each of the P parameters in the training data.
        size: Architecture.
        axes: The token grids that it is for; others of as many axes are allowed.
    """

    def __init__(
        self,
        state_dim: int,
        *,
        num_given: int,
        num_tasks: int,
        ranges: Sequence[tuple[float, float]],
        size: OperatorSize,
        axes: tuple[TokenAxis, ...],
    ) -> None:
        embed = StepEmbedding(num_tasks=num_tasks, ranges=ranges, num_axes=len(axes), width=size.width)
        super().__init__(embed, ((1 + num_given) * state_dim, state_dim), size=size, axes=axes)
        self.flow_time = FlowTimeEmbedding(size.width)
        # A linear guess of the datum, by flow time: x itself near the end, which blocks needn't learn then.
        self.skip = nn.Linear(size.width, state_dim)
        zero_init(self.skip)

    def conditions(self, condition: Condition, dt_B: Tensor, geometry: TokenGeometry) -> FlowConditions:
        """What a flow is under besides the states it is given.

        Args:
            condition: Task and PDE parameters.
            dt_B: Physical time from the state before to the one that flows, shape (B,); 1 of a steady task.
            geometry: Of the token grid, on the network's device.
        """
        return FlowConditions(self.embed(condition, dt_B, geometry), self.walls(geometry))

    def velocity(
        self,
        x_BLD: Tensor,
        t_B: Tensor,
        given: Sequence[Tensor],
        conditions: FlowConditions,
        geometry: TokenGeometry,
    ) -> Tensor:
        """The velocity at points of flows.

        Args:
            x_BLD: States on their way from noise to data, shape (B, L, D).
            t_B: Flow time, at most `ups.diffusion.paths.LAST_TIME`, float32, shape (B,).
            given: S states, each of shape (B, L, D), normalised.
            conditions: As `conditions` gives them.
            geometry: Of the token grid, as `conditions` was given it.
        Returns:
            Shape (B, L, D), float32 also under autocast.
        Raises:
            ShapeError: If the tokens don't fill the grid.
        """
        datum_BLD = self.datum(x_BLD, t_B, given, conditions, geometry)
        return velocity_of_datum(x_BLD, datum_BLD, t_B)

    def datum(
        self,
        x_BLD: Tensor,
        t_B: Tensor,
        given: Sequence[Tensor],
        conditions: FlowConditions,
        geometry: TokenGeometry,
    ) -> Tensor:
        """The estimate of where flows end, E[r | x], float32; arguments are those of `velocity`."""
        embedded_BE = self.flow_time(conditions.embedded, t_B)
        tokens = torch.cat([x_BLD, *given], dim=-1)
        computed = self.computed(tokens, self.modulation(embedded_BE), conditions.walls, geometry)
        # In float32: near the end of a flow, what is rounded here is multiplied by 1 / (1 - t).
        return torch.addcmul(computed.float(), self.skip(embedded_BE)[:, None].float(), x_BLD)

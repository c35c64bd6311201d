"""The latent operator: from the latent state at one time to the state a time step later.

Blocks over latent tokens (`ups.models.operator_blocks`) in a U-shape with skip connections, at levels that
halve the token grid, conditioned on time step, PDE parameters, boundary types, task and whether it is
steady. `TokenUNet` is shared with generative models. With attention it is PDE-Transformer (Holzschuh et al.
2025, adaLN-Zero of Peebles and Xie 2023). The output layer starts at zero, so an untrained operator is the
identity: persistence. What is computed is the change of a state; of a steady task it is the solution, which
lacks its input's jumps.

Letters: B batch, L tokens, D and C channels of a token, W width, A axes, E condition, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.errors import ShapeError
from ups.grid import PERIODIC, halved_axes
from ups.models.operator_blocks import Block, LevelGeometry, TokenGeometry, make_level, normed
from ups.models.operator_size import NORMALISED, TOKEN_UNET, OperatorSize, TokenAxis
from ups.models.operators import operators
from ups.nn.layers import (
    BOUNDARY_TYPES,
    Coarser,
    Condition,
    ConditionEmbedding,
    Finer,
    num_boundary_features,
    zero_init,
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

    frequencies: Tensor

    def __init__(
        self, *, num_tasks: int, ranges: Sequence[tuple[float, float]], num_axes: int, width: int
    ) -> None:
        super().__init__()
        self.condition = ConditionEmbedding(
            num_tasks=num_tasks, arrays=(_STATE,), num_parameters=len(ranges), width=width, ranges=ranges
        )
        self.step = nn.Linear(_DT_FEATURES + num_axes * len(BOUNDARY_TYPES) + 1, width)
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        frequencies = 0.25 * 2.0 ** torch.arange(_DT_FEATURES // 2)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, condition: Condition, dt_B: Tensor, geometry: TokenGeometry) -> Tensor:
        """Shape (B, E)."""
        flags = geometry.flags.to(dt_B.dtype).expand(len(dt_B), -1)
        features = torch.cat([self._waves(dt_B), flags], dim=1).to(self.step.weight.dtype)
        embedded: Tensor = self.mlp(self.condition(condition, array=_STATE) + self.step(features))
        return embedded

    def _waves(self, dt_B: Tensor) -> Tensor:
        """Sines and cosines of the time step's logarithm, shape (B, `_DT_FEATURES`)."""
        angles = dt_B.float().log()[:, None] * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class WallEmbedding(nn.Module):
    """What every token learns of its distance to the ends of the axes; nothing at first.

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

    def forward(self, geometry: TokenGeometry) -> Tensor | None:
        """Shape (1, *grid, W), axes without walls of length 1; None where there are no walls."""
        total: Tensor | None = None
        for name, layer in self.along.items():
            axis = int(name)
            features = geometry.walls(axis)
            if features is not None:
                (weight,) = layer.parameters()
                before, behind = (1,) * axis, (1,) * (len(geometry.grid) - 1 - axis)
                added = layer(features.to(weight.dtype)).reshape(1, *before, -1, *behind, len(weight))
                total = added if total is None else total + added
        return total


class Modulation(nn.Linear):
    """Scales, shifts and gates of all blocks from the condition, by one product; without effect at first.

    Args:
        width: E.
        kinds: What each block is given, with the number of its channels: see `operator_blocks`.
    """

    neutral: Tensor  # 1 for what is multiplied by, else 0

    def __init__(self, width: int, kinds: Sequence[tuple[str, int]]) -> None:
        self.sizes = [num for _, num in kinds]
        super().__init__(width, sum(self.sizes))
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        neutral = torch.cat([torch.full((num,), float(kind == "scale")) for kind, num in kinds])
        self.register_buffer("neutral", neutral, persistent=False)

    def forward(self, condition_BE: Tensor) -> Tensor:
        """Shape (B, all channels)."""
        return F.linear(condition_BE, self.weight, self.bias + self.neutral)

    def parts(self, all_of_them: Tensor, *, ndim: int) -> list[Tensor]:
        """Those of the blocks one after the other, each of shape (B, 1.., channels)."""
        places = (1,) * ndim
        return [part.reshape(len(part), *places, -1) for part in all_of_them.split(self.sizes, dim=1)]


class TokenUNet(nn.Module):
    """Tokens of a grid to as many tokens, conditioned; zero at first.

    Args:
        embed: Makes a condition of E = W channels; it is called by the models that derive from this.
        dims: Channels of a token given, and of one computed.
        size: Architecture.
        axes: The token grids that it is for; others of as many axes are allowed.
    """

    def __init__(
        self, embed: nn.Module, dims: tuple[int, int], *, size: OperatorSize, axes: tuple[TokenAxis, ...]
    ) -> None:
        super().__init__()
        self.dims, self.num_axes = dims, len(axes)
        widths = [size.width * 2**level for level in range(len(size.depths))]
        mixers = [size.mixer(level) for level in range(len(widths))]
        self._windows = [size.window if mixer in NORMALISED else None for mixer in mixers]
        self.embed = embed
        self.into = nn.Linear(dims[0], size.width)
        self.walls = WallEmbedding(axes, width=size.width)
        self.down = nn.ModuleList(make_level(size, level, axes) for level in range(len(widths)))
        self.up = nn.ModuleList(make_level(size, level, axes) for level in range(len(widths) - 1))
        self.coarser = nn.ModuleList(Coarser(width, num_axes=len(axes)) for width in widths[:-1])
        self.finer = nn.ModuleList(Finer(width, num_axes=len(axes)) for width in widths[:-1])
        self.join = nn.ModuleList(nn.Linear(2 * width, width) for width in widths[:-1])
        self.modulation = Modulation(
            size.width, [(kind, block.width) for _, block in self.blocks() for kind in block.kinds]
        )
        self.is_normed = size.has_norm or size.mixer(0) in NORMALISED
        self.out = nn.Linear(size.width, dims[1])
        zero_init(self.out)

    def geometry(self, grid: tuple[int, ...], boundary: tuple[str, ...], *, steady: bool) -> TokenGeometry:
        """What it has to know of a token grid; on the CPU.

        Args:
            grid: Tokens along each axis, no more axes than the model's.
            boundary: Boundary type of each axis as stores name it. Mixing wraps around where it is periodic;
                the condition tells those of `BOUNDARY_TYPES` apart.
            steady: Whether the step is from the input of a steady problem to its solution.
        Raises:
            ShapeError: If there is another number of boundaries than of axes, or there are too many axes.
        """
        if len(boundary) != len(grid):
            raise ShapeError(f"boundary types of a grid of {grid}", expected=len(grid), found=len(boundary))
        if len(grid) > self.num_axes:
            expected = f"at most {self.num_axes}"
            raise ShapeError(f"axes of a grid of {grid}", expected=expected, found=len(grid))
        missing = self.num_axes - len(grid)
        grid, boundary = (*grid, *(1,) * missing), (*boundary, *(PERIODIC,) * missing)
        return TokenGeometry(grid, boundary, steady=steady, windows=self._windows)

    def uses_all_weights(self, geometry: TokenGeometry) -> bool:
        """Whether a step on a token grid needs every weight; those of other tasks aside."""
        grid, is_used = geometry.grid, True
        for _ in self.coarser:
            halved = halved_axes(grid)
            is_used = is_used and len(halved) == len(grid)
            grid = tuple(length // 2 if axis in halved else length for axis, length in enumerate(grid))
        return is_used and all(geometry.walls(int(axis)) is not None for axis in self.walls.along)

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """The blocks in the order in which a step goes through them, with their names."""
        for way, numbers in (("down", range(len(self.down))), ("up", reversed(range(len(self.up))))):
            for number in numbers:
                for place, block in getattr(self, way)[number].named_children():
                    assert isinstance(block, Block)
                    yield f"{way}.{number}.{place}", block

    def computed(
        self, tokens_BLC: Tensor, parts: Tensor, walls: Tensor | None, geometry: TokenGeometry
    ) -> Tensor:
        """Through the U.

        Args:
            tokens_BLC: In the order of their grid.
            parts: Scales, shifts and gates of all blocks, as `modulation` gives them.
            walls: As `walls` gives it.
            geometry: Of the token grid.
        Returns:
            Shape (B, L, channels computed).
        Raises:
            ShapeError: If the tokens don't fill the grid.
        """
        if not torch.compiler.is_compiling():
            self._check_shape(tokens_BLC, geometry.grid)
        tokens = self.into(tokens_BLC.unflatten(1, geometry.grid))
        if walls is not None:
            tokens = tokens + walls
        tokens = self._u_shape(tokens, parts, geometry)
        out: Tensor = self.out(normed(tokens) if self.is_normed else tokens)
        return out.flatten(1, self.num_axes)

    def _u_shape(self, tokens: Tensor, all_parts: Tensor, geometry: TokenGeometry) -> Tensor:
        parts = iter(self.modulation.parts(all_parts, ndim=self.num_axes))
        skips, halved = [], []
        for number, blocks in enumerate(self.down):
            tokens = _through(blocks, tokens, parts, geometry.levels[number])  # type: ignore[arg-type]
            if number < len(self.coarser):
                skips.append(tokens)
                halved.append(halved_axes(tuple(tokens.shape[1:-1])))
                tokens = self.coarser[number](tokens, axes=halved[-1])
        for number in reversed(range(len(self.up))):
            tokens = self.finer[number](tokens, axes=halved[number])
            tokens = self.join[number](torch.cat([tokens, skips[number]], dim=-1))
            tokens = _through(self.up[number], tokens, parts, geometry.levels[number])  # type: ignore[arg-type]
        return tokens

    def _check_shape(self, tokens_BLC: Tensor, grid: tuple[int, ...]) -> None:
        expected = (len(tokens_BLC), math.prod(grid), self.dims[0])
        if tuple(tokens_BLC.shape) != expected:
            raise ShapeError(
                f"latent tokens of a grid of {grid}", expected=expected, found=tuple(tokens_BLC.shape)
            )


def _through(blocks: nn.ModuleList, tokens: Tensor, parts: Iterator[Tensor], level: LevelGeometry) -> Tensor:
    for block in blocks:
        assert isinstance(block, Block)
        tokens = block(tokens, [next(parts) for _ in block.kinds], level)
    return tokens


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

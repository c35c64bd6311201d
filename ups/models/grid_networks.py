"""Networks on the points of a grid: FNO, U-Net, and neuraloperator's FNO to check ours against.

They are the baselines of every table, there on the fields of one task, and operators under `operator.name`,
on tokens of states. Our own short forms of Li et al. 2021 (Fourier neural operator, arXiv:2010.08895) and
Ronneberger et al. 2015 (U-Net, arXiv:1505.04597); `docs/guides/evaluate.md` says how they differ from
PDEBench's. They compute the change from one frame to the next, or of a steady task the whole solution, and
start at zero. Letters: B batch, L tokens, D channels of a token, C channels of the field, W width, G the axes
of the grid.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.errors import ConfigError, check_installed
from ups.grid import PERIODIC
from ups.models.operator_size import GROUPS, FnoConfig, UnetConfig, check_axes
from ups.models.operators import States, Step, operators
from ups.nn.activation_checkpointing import Recomputing, recomputed
from ups.nn.layers import GridConv, pointwise
from ups.nn.spectral import SpectralConv


class FieldNetwork(Recomputing):
    """What all baselines share: what a point is given, and what becomes of the output.

    Args:
        channels: C.
        num_parameters: P, numbers that are given to every point beside the field.
        periodic: Whether each axis is; along the others every point has its coordinate as an input.
        predicts_change: Whether the output is added to the field.

    Raises:
        ConfigError: For more than two axes.
    """

    Config: type[FnoConfig | UnetConfig] = FnoConfig

    def __init__(
        self, channels: int, *, num_parameters: int, periodic: tuple[bool, ...], predicts_change: bool = True
    ) -> None:
        super().__init__()
        self.ndim = len(periodic)
        check_axes(periodic)
        self.periodic, self.predicts_change = periodic, predicts_change
        self.num_given = channels + num_parameters + sum(not wraps for wraps in periodic)

    @classmethod
    def on_tokens(cls, config: FnoConfig | UnetConfig, states: States) -> OnTokens:
        """The network on the token grids of states, as `operator.name` calls it."""
        grids = list(states.tokens.values())
        if len({len(grid) for grid in grids}) > 1:
            found = " and ".join(" x ".join(map(str, grid)) for grid in grids)
            raise ConfigError(
                "operator.name", kind="several_axes", expected="tasks of as many axes", found=found
            )
        sizes = [config.on(grid, key="operator.config") for grid in grids]
        size = {name: min(one[name] for one in sizes) for name in sizes[0]}
        periodic = tuple(
            all(kinds[axis] == PERIODIC for kinds in states.boundary.values())
            for axis in range(len(grids[0]))
        )
        return OnTokens(cls(states.dim, num_parameters=len(states.ranges), periodic=periodic, **size))

    def forward(self, field_BCG: Tensor, parameters_BP: Tensor) -> Tensor:
        """The field one time step later, or the solution.

        Args:
            field_BCG: Normalised field, shape (B, C, *grid).
            parameters_BP: Normalised parameters, shape (B, P).
        """
        coordinates = coordinates_of(tuple(field_BCG.shape[2:]), self.periodic).to(field_BCG)
        return self.advance(field_BCG, beside_fields(parameters_BP, coordinates))

    def advance(self, field_BCG: Tensor, beside: Tensor) -> Tensor:
        """As `forward`, from what `beside_fields` gives, which all steps of a rollout share."""
        out_BCG = self.compute(torch.cat([field_BCG, beside], dim=1))
        return field_BCG + out_BCG if self.predicts_change else out_BCG

    def compute(self, given_BXG: Tensor) -> Tensor:
        """The output from what every point is given, shape (B, C, *grid)."""
        raise NotImplementedError


class OnTokens(nn.Module):
    """A network of fields as an operator: the points of its grid are the tokens of a state.

    Args:
        network: Of D channels.
    """

    def __init__(self, network: FieldNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, state_BLD: Tensor, step: Step) -> Tensor:
        """The change of the state, or the solution; same shape."""
        field_BDG = state_BLD.transpose(1, 2).unflatten(2, step.grid)
        coordinates = coordinates_of(step.grid, self.network.periodic).to(field_BDG)
        beside = beside_fields(step.parameters.to(field_BDG), coordinates)
        return self.network.compute(torch.cat([field_BDG, beside], dim=1)).flatten(2).transpose(1, 2)


@operators("fno")
class FourierNeuralOperator(FieldNetwork):
    """FNO: layers of spectral and pointwise convolution.

    Unlike the paper's, every layer has a residual connection and an activation, the last one too. Along axes
    that aren't periodic the lifted field is continued by zeros, an eighth of its length.

    Args:
        channels: C.
        width: W.
        modes: Fourier modes along each axis.
        depth: Layers.
        shared: See `FieldNetwork`.
    """

    def __init__(
        self, channels: int, *, width: int = 32, modes: int = 16, depth: int = 4, **shared: Any
    ) -> None:
        super().__init__(channels, **shared)
        ndim = self.ndim
        self.lift = pointwise(self.num_given, width, ndim=ndim)
        self.spectral = nn.ModuleList(SpectralConv(width, modes=(modes,) * ndim) for _ in range(depth))
        self.local = nn.ModuleList(pointwise(width, width, ndim=ndim) for _ in range(depth))
        self.out = nn.Sequential(
            pointwise(width, 4 * width, ndim=ndim),
            nn.GELU(),
            zeroed(pointwise(4 * width, channels, ndim=ndim)),
        )

    def compute(self, given_BXG: Tensor) -> Tensor:
        """See `FieldNetwork.compute`."""
        x_BWG = padded(self.lift(given_BXG), self.periodic)
        for number in range(len(self.local)):
            x_BWG = self._layer(x_BWG, number)
        return self._output(cut_to(x_BWG, given_BXG.shape[2:]))

    @recomputed
    def _layer(self, x_BWG: Tensor, number: int) -> Tensor:
        return x_BWG + F.gelu(self.spectral[number](x_BWG) + self.local[number](x_BWG))

    @recomputed
    def _output(self, x_BWG: Tensor) -> Tensor:
        out: Tensor = self.out(x_BWG)
        return out


class ConvBlock(Recomputing):
    """Two convolutions with group norm."""

    def __init__(self, in_width: int, out_width: int, *, periodic: tuple[bool, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            GridConv(in_width, out_width, periodic=periodic),
            nn.GroupNorm(GROUPS, out_width),
            nn.GELU(),
            GridConv(out_width, out_width, periodic=periodic),
            nn.GroupNorm(GROUPS, out_width),
            nn.GELU(),
        )

    @recomputed
    def forward(self, x_BWG: Tensor) -> Tensor:
        """(B, in_width, G) to (B, out_width, G)."""
        out: Tensor = self.layers(x_BWG)
        return out


@operators("unet")
class UNet(FieldNetwork):
    """U-Net: levels of half the resolution and twice the width, joined by skip connections.

    Args:
        channels: C.
        width: W of the finest level.
        levels: Resolutions; the grid is a multiple of 2^(levels - 1) along every axis.
        shared: See `FieldNetwork`.
    """

    Config = UnetConfig

    def __init__(self, channels: int, *, width: int = 24, levels: int = 4, **shared: Any) -> None:
        super().__init__(channels, **shared)
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            ConvBlock(before, after, periodic=self.periodic)
            for before, after in zip([self.num_given, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            ConvBlock(fine + coarse, fine, periodic=self.periodic)
            for fine, coarse in itertools.pairwise(widths)
        )
        self.pool = (nn.AvgPool1d, nn.AvgPool2d)[self.ndim - 1](2)
        self.out = zeroed(pointwise(width, channels, ndim=self.ndim))

    def compute(self, given_BXG: Tensor) -> Tensor:
        """See `FieldNetwork.compute`."""
        x_BWG, skips = given_BXG, list[Tensor]()
        for level, block in enumerate(self.down):
            x_BWG = block(self.pool(x_BWG) if level else x_BWG)
            skips.append(x_BWG)
        skips.pop()
        for block in reversed(self.up):
            finer = F.interpolate(x_BWG, scale_factor=2.0, mode="nearest")
            x_BWG = block(torch.cat([skips.pop(), finer], dim=1))
        out: Tensor = self.out(x_BWG)
        return out


@operators("fno_neuraloperator")
class NeuraloperatorFNO(FieldNetwork):
    """neuraloperator's FNO; axes that aren't periodic are treated as in our own.

    On two axes version 2.0.0 moves the spectrum by one mode where the first has an odd length, the zeros
    behind it counted (mended later: pull request 688 of neuraloperator), so grids should be even there.

    Args:
        channels: C.
        width: W.
        modes: Fourier modes along each axis, as in our own FNO.
        depth: Layers.
        shared: See `FieldNetwork`.

    Raises:
        MissingExtraError: If the package isn't installed.
    """

    def __init__(
        self, channels: int, *, width: int = 32, modes: int = 16, depth: int = 4, **shared: Any
    ) -> None:
        super().__init__(channels, **shared)
        check_installed("neuralop", extra="neuraloperator")
        from neuralop.models import FNO

        fno = FNO(
            n_modes=neuraloperator_modes(modes, ndim=self.ndim),
            in_channels=self.num_given,
            out_channels=channels,
            hidden_channels=width,
            n_layers=depth,
            positional_embedding=None,
        )
        # Its parts, not itself: the arguments of its constructor would be among the weights of a checkpoint.
        self.lift, self.layers, self.out = fno.lifting, fno.fno_blocks, fno.projection
        zeroed(self.out.fcs[-1])

    def compute(self, given_BXG: Tensor) -> Tensor:
        """See `FieldNetwork.compute`."""
        x_BWG = padded(self.lift(given_BXG), self.periodic)
        for number in range(self.layers.n_layers):
            x_BWG = self._layer(x_BWG, number)
        return self._output(cut_to(x_BWG, given_BXG.shape[2:]))

    @recomputed
    def _layer(self, x_BWG: Tensor, number: int) -> Tensor:
        after: Tensor = self.layers(x_BWG, number)
        return after

    @recomputed
    def _output(self, x_BWG: Tensor) -> Tensor:
        out: Tensor = self.out(x_BWG)
        return out


def neuraloperator_modes(modes: int, *, ndim: int) -> tuple[int, ...]:
    """`n_modes` of neuraloperator's layers that keep what `SpectralConv(modes=(modes,) * ndim)` keeps.

    It counts modes of both signs; of the last axis, where one sign suffices, it keeps n // 2 + 1.
    """
    return (*(2 * modes,) * (ndim - 1), 2 * (modes - 1))


def coordinates_of(grid: tuple[int, ...], periodic: tuple[bool, ...]) -> Tensor:
    """Coordinates in -1..1 along each axis with ends, shape (number of these, *grid)."""
    parts = [torch.zeros(0, *grid)]
    for axis, (length, wraps) in enumerate(zip(grid, periodic, strict=True)):
        if not wraps:
            shape = [1] * (len(grid) + 1)
            shape[1 + axis] = length
            parts.append(torch.linspace(-1, 1, length).reshape(shape).expand(1, *grid))
    return torch.cat(parts)


def beside_fields(parameters_BP: Tensor, coordinates: Tensor) -> Tensor:
    """What every point is given beside the field: parameters and coordinates, shape (B, numbers, *grid)."""
    num, grid = len(parameters_BP), coordinates.shape[1:]
    given = parameters_BP[(..., *(None,) * len(grid))].expand(-1, -1, *grid)
    return torch.cat([given, coordinates.expand(num, *coordinates.shape)], dim=1)


def padded(x_BWG: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """With zeros behind the axes that aren't periodic, an eighth of their length."""
    grid = x_BWG.shape[2:]
    behind = [0 if wraps else length // 8 for length, wraps in zip(grid, periodic, strict=True)]
    places = [number for room in reversed(behind) for number in (0, room)]
    return F.pad(x_BWG, places) if any(behind) else x_BWG


def cut_to(x_BWG: Tensor, grid: torch.Size) -> Tensor:
    """Without what `padded` added to a grid."""
    if x_BWG.shape[2:] == grid:
        return x_BWG
    return x_BWG[(slice(None), slice(None), *(slice(length) for length in grid))]


def zeroed(layer: nn.Module) -> nn.Module:
    """The same layer, all its weights set to zero."""
    for weight in layer.parameters():
        nn.init.zeros_(weight)
    return layer

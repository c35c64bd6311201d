"""Layers: convolutions and residual blocks on grids, conditioning, patches, walls, pooling, levels.

Grids have one to three axes, each periodic or not. Patching loses nothing: the points of a patch become the
channels of a token, and a linear layer over them is a patch embedding. Attention pooling makes a token of
each group of neighbouring patches; within groups it keeps the order of the tokens in space and, along
periodic axes, commutes with shifts by whole groups. Token grids of U-shaped models are halved by axis, so one
model serves one and two axes; an axis that is too short stays.

Letters: B batch, W channels (width), X and G the axes of a grid, A axes, C channels of the field, L tokens, D
channels of a token, E condition, P parameters, K boundary types or channels of a head, M patches of a group,
H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ups.grid import PERIODIC, UNKNOWN_BOUNDARY
from ups.nn.activation_checkpointing import Recomputing, recomputed

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EPS = 1e-6

# PDEBench's smallest parameters are viscosities of 1e-8.
_SMALLEST = 1e-8
_LOG_RANGE = 8.0
_FEATURES = 3
# The ends of a parameter's range have features of this size: with 1, viscosities between and beyond those of
# the training were predicted worse (docs/results/log.md).
_END = 0.3
# Boundary types as stores name them: PDEBench's, then The Well's, whose two ends of an axis may differ. A
# checkpoint's weights are in this order. Names that aren't here share the last place.
BOUNDARY_TYPES = (
    *(PERIODIC, "neumann", "dirichlet", "dirichlet_cauchy", "outflow"),
    *("wall", "open", "wall_open", "open_wall"),
    UNKNOWN_BOUNDARY,
)
_DECAY_LENGTHS = (1.0, 4.0)  # in tokens or patches: the layer at the boundary, and its surroundings
_OWN_PATCH_BIAS = 2.0


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, autocast rounds nothing."""
    if device.type == "meta":  # has no autocast to switch off
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def rms_norm(x_BWG: Tensor) -> Tensor:
    """Divide by the root mean square over channels, at every place by itself."""
    return x_BWG * torch.rsqrt(x_BWG.square().mean(dim=1, keepdim=True) + _EPS)


def pad_axis(x: Tensor, *, axis: int, wraps: bool, width: int) -> Tensor:
    """Extend an axis by `width` places at both ends: by itself where it is periodic, else by zeros."""
    if not wraps:
        behind = (x.ndim - 1 - axis) * 2  # `pad` counts pairs from the last axis
        return nn.functional.pad(x, [0] * behind + [width, width])
    before, after = x.narrow(axis, x.shape[axis] - width, width), x.narrow(axis, 0, width)
    return torch.cat([before, x, after], dim=axis)


def pad_axes(x_BWG: Tensor, *, periodic: tuple[bool, ...], width: int) -> Tensor:
    """Extend every axis by `width` places at both ends: periodic ones by themselves, others by zeros."""
    for axis, wraps in enumerate(periodic, start=2):
        x_BWG = pad_axis(x_BWG, axis=axis, wraps=wraps, width=width)
    return x_BWG


class GridConv(nn.Module):
    """Convolution with three places per axis that keeps the grid; circular along periodic axes."""

    def __init__(self, in_width: int, out_width: int, *, periodic: tuple[bool, ...]) -> None:
        super().__init__()
        self.periodic = periodic
        self.conv = _CONVOLUTIONS[len(periodic) - 1](in_width, out_width, kernel_size=3)

    def forward(self, x_BWG: Tensor) -> Tensor:
        """(B, in_width, G) to (B, out_width, G)."""
        return self.conv(pad_axes(x_BWG, periodic=self.periodic, width=1))


def pointwise(in_width: int, out_width: int, *, ndim: int) -> nn.Module:
    """Linear layer over the channels of every place."""
    return _CONVOLUTIONS[ndim - 1](in_width, out_width, kernel_size=1)


def zero_init(layer: nn.Module) -> None:
    """Let a layer give zero at first."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


class ResidualBlock(Recomputing):
    """x + MLP(conv(norm(x))), scaled and shifted by the condition; a condition has no effect at first.

    Args:
        width: Channels W.
        condition_width: Channels E of the condition.
    """

    def __init__(self, width: int, *, condition_width: int, periodic: tuple[bool, ...]) -> None:
        super().__init__()
        self.modulation = nn.Linear(condition_width, 2 * width)
        self.conv = GridConv(width, width, periodic=periodic)
        self.out = pointwise(width, width, ndim=len(periodic))
        zero_init(self.modulation)

    @recomputed
    def forward(self, x_BWG: Tensor, condition_BE: Tensor) -> Tensor:
        """(B, W, G) to the same shape."""
        places = (1,) * (x_BWG.ndim - 2)
        scale, shift = self.modulation(condition_BE).unflatten(1, (2, -1, *places)).unbind(1)
        inner = rms_norm(x_BWG) * (1 + scale) + shift
        return x_BWG + self.out(nn.functional.gelu(self.conv(inner)))


def boundary_flags(boundary: Sequence[str]) -> list[float]:
    """One-hot code of the boundary type of each axis, one axis after another, A K numbers."""
    known = [kind if kind in BOUNDARY_TYPES else UNKNOWN_BOUNDARY for kind in boundary]
    return [float(kind == one) for kind in known for one in BOUNDARY_TYPES]


@dataclass(frozen=True)
class Condition:
    """Conditions of a batch.

    Attributes:
        task: Number of the task among those of the model; or one for each sample, int64, shape (B,).
        parameters: Parameters in the model's order, float32, NaN where a task has none of that name,
            shape (B, P).
    """

    task: int | Tensor
    parameters: Tensor


class ConditionEmbedding(nn.Module):
    """Condition to a vector of E channels.

    Args:
        num_tasks: Tasks of the model.
        arrays: Names of the arrays; each has an embedding (field type).
        num_parameters: P.
        width: E.
        ranges: Least and largest value of each parameter in the training data, whose features become -0.3
            and 0.3; without, features are those of any data, which three viscosities hardly change.
    """

    def __init__(
        self,
        *,
        num_tasks: int,
        arrays: tuple[str, ...],
        num_parameters: int,
        width: int,
        ranges: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        super().__init__()
        self.task = nn.Embedding(num_tasks, width)
        self.array = nn.ParameterDict({name: nn.Parameter(0.02 * torch.randn(width)) for name in arrays})
        self.parameters_in = nn.Linear(max(1, _FEATURES * num_parameters), width)
        self.mlp = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.ends: Tensor | None  # of every parameter: (2, P)
        self.register_buffer(
            "ends", None if ranges is None else torch.tensor(ranges, dtype=torch.float32).reshape(-1, 2).T
        )

    def forward(self, condition: Condition, *, array: str) -> Tensor:
        """Embed the condition of frames of one array; float32, shape (B, E)."""
        features = _parameter_features(condition.parameters, self.ends).to(self.parameters_in.weight.dtype)
        if features.shape[1] == 0:
            features = features.new_zeros(len(features), 1)
        kind = self.task.weight[condition.task] + self.array[array]
        embedded: Tensor = self.mlp(self.parameters_in(features) + kind)
        return embedded


def _parameter_features(parameters_BP: Tensor, ends_2P: Tensor | None) -> Tensor:
    """Whether it is there, its signed logarithm, and its value squashed; shape (B, 3 P).

    The last two are moved and scaled so that the ends of a given range have `_END` and its negative.
    """
    there = torch.isfinite(parameters_BP)
    value = parameters_BP.nan_to_num(0.0, posinf=0.0, neginf=0.0)
    features = [there.to(value.dtype)]
    for scaled in (_logarithm, _squashed):
        feature = scaled(value)
        if ends_2P is not None:
            low, high = scaled(ends_2P)
            half = ((high - low) / 2).masked_fill(high <= low, 1.0)
            feature = (_END * (feature - (low + high) / 2) / half).masked_fill(~there, 0.0)
        features.append(feature)
    return torch.cat(features, dim=1)


def _logarithm(value: Tensor) -> Tensor:
    return value.sign() * torch.log10(1 + value.abs() / _SMALLEST) / _LOG_RANGE


def _squashed(value: Tensor) -> Tensor:
    return value / (1 + value.abs())


def cut_cells(values_BXC: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """(B, X..., C) to (B, L, M, C): L cells of M places, `sizes` along each axis; last axis fastest."""
    axes = len(sizes)
    pairs = zip(values_BXC.shape[1:-1], sizes, strict=True)
    split = [number for length, size in pairs for number in (length // size, size)]
    cells = values_BXC.reshape(len(values_BXC), *split, values_BXC.shape[-1])
    order = [0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1]
    return cells.permute(order).flatten(1, axes).flatten(2, 1 + axes)


def join_cells(cells_BLMC: Tensor, sizes: tuple[int, ...], *, points: tuple[int, ...]) -> Tensor:
    """The inverse of `cut_cells`: (B, L, M, C) to (B, *points, C)."""
    num, axes = len(cells_BLMC), len(points)
    counts = [length // size for length, size in zip(points, sizes, strict=True)]
    cells = cells_BLMC.reshape(num, *counts, *sizes, cells_BLMC.shape[-1])
    order = [0, *(place for axis in range(axes) for place in (1 + axis, 1 + axes + axis)), 1 + 2 * axes]
    return cells.permute(order).reshape(num, *points, -1)


def patchify(values_BXC: Tensor, *, patch_size: int) -> Tensor:
    """Shape (B, X..., C) to (B, L, patch_size^axes * C), tokens as they lie in space, last axis fastest."""
    return cut_cells(values_BXC, (patch_size,) * (values_BXC.ndim - 2)).flatten(2)


def unpatchify(tokens_BLD: Tensor, *, points: tuple[int, ...], patch_size: int) -> Tensor:
    """The inverse of `patchify`: (B, L, D) to (B, *points, C)."""
    sizes = (patch_size,) * len(points)
    return join_cells(tokens_BLD.unflatten(2, (math.prod(sizes), -1)), sizes, points=points)


def num_boundary_features(periodic: tuple[bool, ...]) -> int:
    """F, the number of features of one place."""
    return 2 * len(_DECAY_LENGTHS) * sum(not wraps for wraps in periodic)


def boundary_features(position_PN: Tensor, *, cells: tuple[int, ...], periodic: tuple[bool, ...]) -> Tensor:
    """Exponentials of the distance to the lower and the upper end of every axis that has ends.

    Args:
        position_PN: Positions in cells, from 0 to `cells` along each axis, shape (..., N).
        cells: Length of each axis in cells.

    Returns:
        Shape (..., F), in 0..1, dtype of `position_PN`.
    """
    features = []
    for axis, wraps in enumerate(periodic):
        if not wraps:
            below = position_PN[..., axis]
            for distance in (below, cells[axis] - below):
                features += [torch.exp(-distance / length) for length in _DECAY_LENGTHS]
    return torch.stack(features, dim=-1) if features else position_PN[..., :0]


class GroupPooling(Recomputing):
    """Pool groups of patches; each head starts out looking at another patch of the group.

    Args:
        width: W.
        groups: Patches of a group along each axis.
        tokens: Tokens along each axis.
        num_heads: H; divides W.
    """

    def __init__(
        self, width: int, *, groups: tuple[int, ...], tokens: tuple[int, ...], num_heads: int
    ) -> None:
        super().__init__()
        self.groups, self.tokens, self.num_heads = groups, tokens, num_heads
        num_patches = math.prod(groups)
        self.seed = nn.Parameter(0.02 * torch.randn(num_heads, width // num_heads))
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.place = nn.Parameter(0.02 * torch.randn(num_patches, width))
        heads, patches = torch.arange(num_heads), torch.arange(num_patches)
        own = heads[:, None] % num_patches == patches
        self.bias = nn.Parameter(_OWN_PATCH_BIAS * own.float())

    @recomputed
    def forward(self, x_BWG: Tensor) -> Tensor:
        """(B, W, patches) to (B, W, tokens)."""
        x_BLMW = cut_cells(x_BWG.movedim(1, -1), self.groups)
        keys = (self.keys(x_BLMW) + self.place).unflatten(-1, (self.num_heads, -1))
        values = (self.values(x_BLMW) + self.place).unflatten(-1, (self.num_heads, -1))
        scores_BLMH = torch.einsum("blmhk,hk->blmh", keys, self.seed) / math.sqrt(self.seed.shape[1])
        weights_BLMH = (scores_BLMH + self.bias.T).softmax(dim=2)
        pooled_BLW = torch.einsum("blmh,blmhk->blhk", weights_BLMH, values).flatten(2)
        tokens_BLW = x_BLMW.mean(dim=2) + self.out(pooled_BLW)
        return tokens_BLW.transpose(1, 2).unflatten(2, self.tokens)


class Coarser(nn.Module):
    """Neighbouring tokens become one, axis by axis; the width doubles.

    Args:
        width: W of the finer grid.
        num_axes: A.
    """

    def __init__(self, width: int, *, num_axes: int) -> None:
        super().__init__()
        self.merge = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(num_axes))
        self.widen = nn.Linear(width, 2 * width)

    def forward(self, tokens: Tensor, *, axes: tuple[int, ...]) -> Tensor:
        """(B, *grid, W) to (B, *coarser grid, 2 W), halved along `axes`."""
        for axis in axes:
            pairs = tokens.unflatten(1 + axis, (-1, 2)).movedim(2 + axis, -2)
            tokens = self.merge[axis](pairs.flatten(-2))
        widened: Tensor = self.widen(tokens)
        return widened


class Finer(nn.Module):
    """The opposite of `Coarser`: every token becomes two, axis by axis; the width halves.

    Args:
        width: W of the finer grid.
        num_axes: A.
    """

    def __init__(self, width: int, *, num_axes: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(2 * width, width)
        self.split = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(num_axes))

    def forward(self, tokens: Tensor, *, axes: tuple[int, ...]) -> Tensor:
        """(B, *coarser grid, 2 W) to (B, *grid, W), doubled along `axes`."""
        tokens = self.narrow(tokens)
        for axis in reversed(axes):
            pairs = self.split[axis](tokens).unflatten(-1, (2, -1)).movedim(-2, 2 + axis)
            tokens = pairs.flatten(1 + axis, 2 + axis)
        return tokens

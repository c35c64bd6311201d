"""Blocks of the latent operator, by what mixes their tokens: Fourier modes, convolution, attention.

A block is given the tokens, what the condition says to it and what is known of the grid, and keeps the
shape. `TokenGeometry` is what is known: boundary codes, walls, windows. All of it is a function of the grid,
so it is made once for a task and no step makes it again; it isn't part of the weights. Letters: B batch, W
width, A axes of the token grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.grid import PERIODIC, halved_axes
from ups.models.operator_size import Mixer, OperatorSize, TokenAxis
from ups.nn.activation_checkpointing import Recomputing, recomputed
from ups.nn.layers import boundary_features, boundary_flags, pad_axis
from ups.nn.shifted_window import ShiftedWindowAttention, Windows
from ups.nn.spectral import SpectralConv, num_modes, padding_behind

_KERNEL = 5  # tokens along an axis
# Parameters of a spectral layer grow with the modes of all axes and the square of the width. So at most so
# many modes are taken along each axis, and so many channels mixed by one matrix, for 1, 2 and 3 axes.
_MOST_MODES = (64, 16, 8)
_MOST_MIXED = (64, 64, 16)


@dataclass(frozen=True)
class BlockPosition:
    """Where in the U a block is.

    Attributes:
        width: W.
        num_heads: Attention heads.
        axes: The token grid, at its largest.
        is_shifted: Whether its windows are shifted.
    """

    width: int
    num_heads: int
    axes: tuple[TokenAxis, ...]
    is_shifted: bool


class SpectralMixer(nn.Module):
    """Spectral convolution over the token grid; axes with ends are continued by zeros.

    Args:
        place: Where it is.
        modes: Modes along each axis; None for all, up to `_MOST_MODES`.
        padding: Zeros behind an axis with ends, over its length.
    """

    def __init__(self, place: BlockPosition, *, modes: int | None, padding: float) -> None:
        super().__init__()
        self.padding = padding
        ndim = len(place.axes)
        lengths = tuple(axis.length for axis in place.axes)
        behind = padding_behind(lengths, tuple(not axis.has_ends for axis in place.axes), share=padding)
        whole = tuple(num + room for num, room in zip(lengths, reversed(behind[1::2]), strict=True))
        most = modes or _MOST_MODES[ndim - 1]
        self.conv = SpectralConv(
            place.width,
            modes=tuple(min(num, most) for num in num_modes(whole)),
            groups=_num_groups(place.width, _MOST_MIXED[ndim - 1]),
        )

    def forward(self, tokens: Tensor, *, periodic: Sequence[bool]) -> Tensor:
        """(B, *grid, W) to the same shape."""
        x_BWG = tokens.movedim(-1, 1)
        grid = x_BWG.shape[2:]
        behind = padding_behind(grid, tuple(periodic), share=self.padding)
        if not any(behind):
            return self.conv(x_BWG).movedim(1, -1)
        x_BWG = self.conv(F.pad(x_BWG, behind))
        return x_BWG[(slice(None), slice(None), *map(slice, grid))].movedim(1, -1)


class ConvolutionMixer(nn.Module):
    """Sum of convolutions with five tokens along each axis, circular on periodic ones, else with zeros."""

    def __init__(self, place: BlockPosition) -> None:
        super().__init__()
        self.along = nn.ModuleList(
            nn.Linear(_KERNEL * place.width, place.width, bias=False) for _ in place.axes
        )

    def forward(self, tokens: Tensor, *, periodic: Sequence[bool]) -> Tensor:
        """(B, *grid, W) to the same shape; an axis of one token has nothing to mix."""
        parts = []
        for axis, (layer, wraps) in enumerate(zip(self.along, periodic, strict=True), start=1):
            if tokens.shape[axis] > 1:
                padded = pad_axis(tokens, axis=axis, wraps=wraps, width=_KERNEL // 2)
                parts.append(layer(padded.unfold(axis, _KERNEL, 1).flatten(-2)))
        return sum(parts[1:], start=parts[0]) if parts else torch.zeros_like(tokens)


class Block(Recomputing):
    """What blocks share: parts of the condition, and stochastic depth.

    Attributes:
        width: W.
        kinds: What each vector of W numbers is that the condition gives: a scale around 1, a shift or a gate.
    """

    kinds: tuple[str, ...]

    def __init__(self, place: BlockPosition, *, drop_path: float) -> None:
        super().__init__()
        self.width, self.drop_path = place.width, drop_path

    def dropped(self, branch: Tensor) -> Tensor:
        """The branch without some of the batch's samples while training (stochastic depth)."""
        if not self.training or not self.drop_path:
            return branch
        keep = 1 - self.drop_path
        mask = branch.new_empty(len(branch), *(1,) * (branch.ndim - 1)).bernoulli_(keep)
        return branch * mask / keep


class MixingBlock(Block):
    """x + GELU(mix(h) + linear(h)), h = x (1 + s) + b with s and b from the condition."""

    kinds = ("scale", "shift")

    def __init__(self, place: BlockPosition, mixer: nn.Module, size: OperatorSize) -> None:
        super().__init__(place, drop_path=size.drop_path)
        self.mixer = mixer
        self.linear = nn.Linear(place.width, place.width)
        self.has_norm = size.has_norm

    @recomputed
    def forward(self, tokens: Tensor, parts: Sequence[Tensor], level: LevelGeometry) -> Tensor:
        """(B, *grid, W) to the same shape; `parts` are those of `kinds`, each (B, 1.., W)."""
        scale, shift = parts
        given = torch.addcmul(shift, normed(tokens) if self.has_norm else tokens, scale)
        mixed = self.mixer(given, periodic=level.periodic) + self.linear(given)
        return tokens + self.dropped(F.gelu(mixed))


class AttentionBlock(Block):
    """Mixing and MLP, each normalised, modulated by the condition, and gated from zero (adaLN-Zero).

    Args:
        place: Where it is.
        mixers: Mix the same tokens beside each other: attention, and whatever else.
        size: The rest of the architecture.
    """

    kinds = ("scale", "shift", "gate", "scale", "shift", "gate")

    def __init__(self, place: BlockPosition, mixers: Sequence[nn.Module], size: OperatorSize) -> None:
        super().__init__(place, drop_path=size.drop_path)
        self.mixers = nn.ModuleList(mixers)
        hidden = int(place.width * size.mlp_ratio)
        self.mlp = nn.Sequential(
            nn.Linear(place.width, hidden),
            nn.GELU(),
            nn.Dropout(size.dropout),
            nn.Linear(hidden, place.width),
        )

    def forward(self, tokens: Tensor, parts: Sequence[Tensor], level: LevelGeometry) -> Tensor:
        """(B, *grid, W) to the same shape; `parts` are those of `kinds`, each (B, 1.., W)."""
        return self._transformed(self._mixed(tokens, parts[:3], level), parts[3:])

    # Apart, so that the backward pass holds what one of them makes, not both.
    @recomputed
    def _mixed(self, tokens: Tensor, parts: Sequence[Tensor], level: LevelGeometry) -> Tensor:
        scale, shift, gate = parts
        given = torch.addcmul(shift, normed(tokens), scale)
        attention, *others = self.mixers
        mixed = attention(given, level.windows)
        for mixer in others:
            mixed = mixed + mixer(given, periodic=level.periodic)
        return torch.addcmul(tokens, gate, self.dropped(mixed))

    @recomputed
    def _transformed(self, tokens: Tensor, parts: Sequence[Tensor]) -> Tensor:
        scale, shift, gate = parts
        changed = self.mlp(torch.addcmul(shift, normed(tokens), scale))
        return torch.addcmul(tokens, gate, self.dropped(changed))


def _attention(place: BlockPosition, size: OperatorSize) -> nn.Module:
    return ShiftedWindowAttention(
        place.width, num_heads=place.num_heads, num_axes=len(place.axes), is_shifted=place.is_shifted
    )


def _spectral(place: BlockPosition, size: OperatorSize) -> nn.Module:
    return SpectralMixer(place, modes=size.modes, padding=size.padding)


BLOCKS: Mapping[Mixer, Callable[[BlockPosition, OperatorSize], nn.Module]] = {
    "spectral": lambda place, size: MixingBlock(place, _spectral(place, size), size),
    "convolution": lambda place, size: MixingBlock(place, ConvolutionMixer(place), size),
    "attention": lambda place, size: AttentionBlock(place, [_attention(place, size)], size),
    "hybrid": lambda place, size: AttentionBlock(
        place, [_attention(place, size), _spectral(place, size)], size
    ),
}


def make_level(size: OperatorSize, level: int, axes: tuple[TokenAxis, ...]) -> nn.ModuleList:
    """The blocks of one level: windows as they are and shifted, in turns."""
    for _ in range(level):
        axes = tuple(axis.halved() for axis in axes)
    make = BLOCKS[size.mixer(level)]
    places = (
        BlockPosition(size.width * 2**level, size.num_heads * 2**level, axes, is_shifted=bool(number % 2))
        for number in range(size.depths[level])
    )
    return nn.ModuleList(make(place, size) for place in places)


def normed(tokens: Tensor) -> Tensor:
    """Layer norm without parameters of its own: the condition scales and shifts."""
    return F.layer_norm(tokens, tokens.shape[-1:])


def _num_groups(width: int, most: int) -> int:
    """The fewest groups of channels, each of at most so many."""
    return next(num for num in range(1, width + 1) if width % num == 0 and width // num <= most)


Grid = tuple[int, ...]


class LevelGeometry(nn.Module):
    """A token grid at one level of the U.

    Args:
        grid: Tokens along each axis.
        largest: Tokens of an attention window along an axis, at most; None without attention.

    Attributes:
        periodic: As given.
        windows: Of attention; None without.
    """

    windows: Windows | None

    def __init__(self, grid: Grid, periodic: tuple[bool, ...], *, largest: int | None) -> None:
        super().__init__()
        self.periodic = periodic
        self.windows = None if largest is None else Windows(grid, periodic, largest=largest)


class TokenGeometry(nn.Module):
    """The token grid of a task.

    Args:
        grid: Tokens along each axis.
        boundary: Boundary type of each axis as stores name it.
        steady: Whether a step is from the input of a steady problem to its solution.
        windows: Largest attention window of each level, finest first; None of a level without attention.

    Attributes:
        grid: As given.
        boundary: As given.
        steady: As given.
        levels: The grid as it is at each level.
    """

    flags: Tensor  # boundary types, one-hot by axis, and steadiness; (1, A K + 1)

    def __init__(
        self, grid: Grid, boundary: Sequence[str], *, steady: bool, windows: Sequence[int | None]
    ) -> None:
        super().__init__()
        self.grid, self.boundary, self.steady = grid, tuple(boundary), steady
        self.register_buffer(
            "flags", torch.tensor([[*boundary_flags(boundary), float(steady)]]), persistent=False
        )
        periodic = tuple(kind == PERIODIC for kind in boundary)
        for axis, (length, wraps) in enumerate(zip(grid, periodic, strict=True)):
            if not wraps:
                self.register_buffer(_wall(axis), wall_features(length), persistent=False)
        self.levels = nn.ModuleList()
        for largest in windows:
            self.levels.append(LevelGeometry(grid, periodic, largest=largest))
            halved = halved_axes(grid)
            grid = tuple(length // 2 if axis in halved else length for axis, length in enumerate(grid))

    def walls(self, axis: int) -> Tensor | None:
        """Features of the distance to both ends of an axis, shape (tokens along it, F); None if periodic."""
        return self._buffers.get(_wall(axis))


def wall_features(length: int) -> Tensor:
    """Boundary features at the centres of the tokens of an axis, shape (length, F)."""
    centres = torch.arange(length) + 0.5
    return boundary_features(centres[:, None], cells=(length,), periodic=(False,))


def _wall(axis: int) -> str:
    return f"wall{axis}"

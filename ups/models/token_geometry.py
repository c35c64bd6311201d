"""What an operator has to know of a token grid: boundary codes, walls, windows.

All of it is a function of the grid, so it is made once for a task and no step makes it again; it isn't part
of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.grid import PERIODIC
from ups.nn.layers import boundary_features, boundary_flags
from ups.nn.shifted_window import Windows
from ups.nn.token_axes import halved_axes

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

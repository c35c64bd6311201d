"""Coarser and finer token grids, for U-shaped models.

Each axis is halved by itself, so one model serves token grids of one and of two axes; an axis that is too
short stays. Letters: B batch, W width, A axes.
"""

from __future__ import annotations

from torch import Tensor, nn

MIN_TOKENS = 8  # along an axis that is still halved


def halved_axes(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of a token grid that are long and even enough to be halved."""
    return tuple(axis for axis, length in enumerate(grid) if length >= MIN_TOKENS and length % 2 == 0)


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

"""Axes of token grids: which are halved from one level to the next, and how long windows along them are.

No tensors, no torch: sizes are checked before anything is built.
"""

from __future__ import annotations

MIN_TOKENS = 8  # along an axis that is still halved
MAX_WINDOW = 8  # tokens along an axis, as in PDE-Transformer
_MIN_WINDOW = 4  # a grid that divides only into smaller windows is one window


def halved_axes(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of a token grid that are long and even enough to be halved."""
    return tuple(axis for axis, length in enumerate(grid) if length >= MIN_TOKENS and length % 2 == 0)


def window_size(length: int, *, largest: int = MAX_WINDOW) -> int:
    """Tokens of a window along an axis: the largest divisor up to `largest`, or all where that is tiny."""
    if length <= largest:
        return length
    size = next(size for size in range(largest, 0, -1) if length % size == 0)
    return size if size >= min(_MIN_WINDOW, largest) else length

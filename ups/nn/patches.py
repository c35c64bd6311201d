"""Fields as tokens and back without loss: the points of a patch become the channels of a token.

A linear layer over such tokens is a patch embedding. Letters: B batch, X the axes of the grid, C channels,
L tokens, D channels of a token.
"""

from __future__ import annotations

from torch import Tensor


def patchify(values_BXC: Tensor, *, patch_size: int) -> Tensor:
    """Shape (B, X..., C) to (B, L, patch_size^axes * C), tokens as they lie in space, last axis fastest."""
    axes = values_BXC.ndim - 2
    split = [size for points in values_BXC.shape[1:-1] for size in (points // patch_size, patch_size)]
    cells = values_BXC.reshape(len(values_BXC), *split, values_BXC.shape[-1])
    order = [0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1]
    return cells.permute(order).flatten(axes + 1).flatten(1, axes)


def unpatchify(tokens_BLD: Tensor, *, points: tuple[int, ...], patch_size: int) -> Tensor:
    """The inverse of `patchify`: (B, L, D) to (B, *points, C)."""
    axes = len(points)
    patches = [num // patch_size for num in points]
    cells = tokens_BLD.reshape(len(tokens_BLD), *patches, *(patch_size,) * axes, -1)
    order = [0, *(place for axis in range(axes) for place in (1 + axis, 1 + axes + axis)), 1 + 2 * axes]
    return cells.permute(order).reshape(len(tokens_BLD), *points, -1)

"""Attention within windows of a token grid, shifted in every other block.

Letters: B batch, N tokens of a window, H heads, D width, A axes of the grid.
Sources: Liu et al. 2021 and 2022 (Swin, Swin v2: shifted windows, log-spaced continuous position bias, cosine
attention); Holzschuh et al. 2025 (PDE-Transformer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.nn.layers import cut_cells, join_cells

MAX_WINDOW = 8  # tokens along an axis, as in PDE-Transformer
_MIN_WINDOW = 4  # a grid that divides only into smaller windows is one window
_MASKED = -1e4  # exp of it is 0 in every precision, and float16 holds it
_MAX_LOG_SCALE = math.log(100.0)
_BIAS_WIDTH = 64

Grid = tuple[int, ...]


def window_size(length: int, *, largest: int = MAX_WINDOW) -> int:
    """Tokens of a window along an axis: the largest divisor up to `largest`, or all where that is tiny."""
    if length <= largest:
        return length
    size = next(size for size in range(largest, 0, -1) if length % size == 0)
    return size if size >= min(_MIN_WINDOW, largest) else length


def partition_windows(tokens: Tensor, window: Grid) -> Tensor:
    """Cut a grid into windows.

    Args:
        tokens: Shape (B, *grid, D), the grid a multiple of the window on every axis.
        window: Tokens along every axis, A numbers.
    Returns:
        Shape (B * number of windows, N, D).
    """
    return cut_cells(tokens, window).flatten(0, 1)


def merge_windows(windows: Tensor, window: Grid, grid: Grid) -> Tensor:
    """The inverse of `partition_windows`: shape (B, *grid, D)."""
    num_windows = math.prod(grid) // math.prod(window)
    return join_cells(windows.unflatten(0, (-1, num_windows)), window, points=grid)


def window_mask(
    grid: Grid, window: Grid, shift: Grid, periodic: Sequence[bool], device: torch.device
) -> Tensor:
    """Which pairs of tokens of a shifted window may see each other.

    On a periodic axis the roll is what the field does; on another one the window that wraps around the edge
    holds two pieces that don't touch.

    Returns:
        Shape (number of windows, N, N), bool.
    """
    piece = torch.zeros((1, *grid, 1), device=device)
    for axis, (length, step) in enumerate(zip(grid, shift, strict=True)):
        if step and not periodic[axis]:
            wrapped = torch.arange(length, device=device) >= length - step  # what the roll brings around
            shape = [1] * (len(grid) + 2)
            shape[axis + 1] = length
            piece = piece + wrapped.reshape(shape) * 2**axis
    pieces = partition_windows(piece, window)
    return pieces == pieces.transpose(1, 2)


class RelativeBias(nn.Module):
    """Bias of a pair of tokens from their log-spaced offset (Swin v2, eq. 4).

    On a periodic axis that is one window the offset is the shorter way around, so the bias doesn't know where
    the axis begins.

    Args:
        num_axes: A.
        num_heads: H.
    """

    def __init__(self, num_axes: int, num_heads: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(num_axes, _BIAS_WIDTH), nn.GELU(), nn.Linear(_BIAS_WIDTH, num_heads, bias=False)
        )

    def forward(self, window: Grid, circular: Sequence[bool]) -> Tensor:
        """The bias of a window's pairs, shape (H, N, N)."""
        weight: Tensor = self.mlp[0].weight  # type: ignore[assignment]  # torch says: of any module
        offsets = relative_offsets(window, circular, weight.device)
        scaled = torch.sign(offsets) * torch.log2(1 + offsets.abs()) / math.log2(1 + MAX_WINDOW)
        bias: Tensor = self.mlp(scaled.to(weight.dtype))
        return 16 * torch.sigmoid(bias).permute(2, 0, 1)  # bounded, as in Swin v2


def relative_offsets(window: Grid, circular: Sequence[bool], device: torch.device) -> Tensor:
    """Offsets from every token of a window to every other, in tokens, shape (N, N, A)."""
    places = torch.cartesian_prod(*(torch.arange(size, device=device) for size in window))
    places = places.reshape(-1, len(window))
    offsets = (places[:, None] - places[None]).float()
    for axis, (size, is_circular) in enumerate(zip(window, circular, strict=True)):
        if is_circular:  # halfway around both ways are equally long: its offset counts as 0 plus the distance
            wrapped = (offsets[..., axis] + size // 2) % size - size // 2
            offsets[..., axis] = torch.where(wrapped.abs() * 2 == size, wrapped.abs(), wrapped)
    return offsets


class ShiftedWindowAttention(nn.Module):
    """Self-attention among the tokens of each window, with normalised queries and keys.

    Args:
        width: D.
        num_heads: H; divides D.
        num_axes: A.
        is_shifted: Whether windows are moved by half their size.
        largest: Tokens of a window along an axis, at most.
    """

    def __init__(
        self, width: int, *, num_heads: int, num_axes: int, is_shifted: bool, largest: int = MAX_WINDOW
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_shifted = is_shifted
        self.largest = largest
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = RelativeBias(num_axes, num_heads)
        self.log_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10.0)))

    def forward(self, tokens: Tensor, *, periodic: Sequence[bool]) -> Tensor:
        """Mix tokens.

        Args:
            tokens: Shape (B, *grid, D).
            periodic: Which axes of the grid are periodic, A booleans.
        Returns:
            Same shape, a new tensor.
        """
        grid = tuple(tokens.shape[1:-1])
        window = tuple(window_size(length, largest=self.largest) for length in grid)
        shift = self._shift(grid, window)
        axes = tuple(range(1, len(grid) + 1))
        if any(shift):
            tokens = tokens.roll([-step for step in shift], axes)
        circular = [
            is_it and size == length for is_it, size, length in zip(periodic, window, grid, strict=True)
        ]
        mask = None
        if any(step and not is_it for step, is_it in zip(shift, periodic, strict=True)):
            mask = window_mask(grid, window, shift, periodic, tokens.device)
        mixed = self._attend(partition_windows(tokens, window), self.bias(window, circular), mask)
        tokens = merge_windows(mixed, window, grid)
        return tokens.roll(shift, axes) if any(shift) else tokens

    def _shift(self, grid: Grid, window: Grid) -> Grid:
        """Half a window where an axis has several; nothing where it is one."""
        pairs = zip(grid, window, strict=True)
        return tuple(size // 2 if self.is_shifted and size < length else 0 for length, size in pairs)

    def _attend(self, windows: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of every window by itself, shape (windows, N, D)."""
        num, size, width = windows.shape
        heads = self.qkv(windows).reshape(num, size, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        scale = self.log_scale.clamp(max=_MAX_LOG_SCALE).exp()
        query, key = F.normalize(query, dim=-1) * scale, F.normalize(key, dim=-1)
        bias = bias.to(query.dtype)[None]
        if mask is not None:
            hidden = torch.where(mask, 0.0, _MASKED).to(query.dtype)
            bias = bias + hidden[:, None].repeat(num // len(mask), 1, 1, 1)
        mixed = F.scaled_dot_product_attention(query, key.to(query.dtype), value, attn_mask=bias, scale=1.0)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(num, size, width))
        return out

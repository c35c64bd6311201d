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


def window_mask(grid: Grid, window: Grid, shift: Grid, periodic: Sequence[bool]) -> Tensor:
    """Which pairs of tokens of a shifted window may see each other.

    On a periodic axis the roll is what the field does; on another one the window that wraps around the edge
    holds two pieces that don't touch.

    Returns:
        Shape (number of windows, N, N), bool.
    """
    piece = torch.zeros(1, *grid, 1)
    for axis, (length, step) in enumerate(zip(grid, shift, strict=True)):
        if step and not periodic[axis]:
            wrapped = torch.arange(length) >= length - step  # what the roll brings around
            shape = [1] * (len(grid) + 2)
            shape[axis + 1] = length
            piece = piece + wrapped.reshape(shape) * 2**axis
    pieces = partition_windows(piece, window)
    return pieces == pieces.transpose(1, 2)


def relative_offsets(window: Grid, circular: Sequence[bool]) -> Tensor:
    """Offsets from every token of a window to every other, in tokens, shape (N, N, A)."""
    places = torch.cartesian_prod(*(torch.arange(size) for size in window))
    places = places.reshape(-1, len(window))
    offsets = (places[:, None] - places[None]).float()
    for axis, (size, is_circular) in enumerate(zip(window, circular, strict=True)):
        if is_circular:  # halfway around both ways are equally long: its offset counts as 0 plus the distance
            wrapped = (offsets[..., axis] + size // 2) % size - size // 2
            offsets[..., axis] = torch.where(wrapped.abs() * 2 == size, wrapped.abs(), wrapped)
    return offsets


class Windows(nn.Module):
    """The windows of a token grid: a function of the grid alone, so buffers that aren't saved.

    Args:
        grid: Tokens along each axis.
        periodic: Whether each axis is.
        largest: Tokens of a window along an axis, at most.

    Attributes:
        window: Tokens of a window along each axis.
        shift: How far windows are moved where they are shifted: half a window along an axis that has several.
    """

    offsets: Tensor  # of a window's pairs, log-spaced; the shorter way around a periodic axis of one window
    mask: Tensor | None  # added to the scores of shifted windows, (1, number of windows, 1, N, N)

    def __init__(self, grid: Grid, periodic: Sequence[bool], *, largest: int = MAX_WINDOW) -> None:
        super().__init__()
        self.window = window = tuple(window_size(length, largest=largest) for length in grid)
        pairs = list(zip(grid, window, strict=True))
        self.shift = tuple(size // 2 if size < length else 0 for length, size in pairs)
        circular = [wraps and size == length for wraps, (length, size) in zip(periodic, pairs, strict=True)]
        offsets = relative_offsets(window, circular)
        scaled = torch.sign(offsets) * torch.log2(1 + offsets.abs()) / math.log2(1 + MAX_WINDOW)
        self.register_buffer("offsets", scaled, persistent=False)
        mask = None
        if any(step and not wraps for step, wraps in zip(self.shift, periodic, strict=True)):
            sees = window_mask(grid, window, self.shift, periodic)
            mask = torch.where(sees, 0.0, _MASKED)[None, :, None]
        self.register_buffer("mask", mask, persistent=False)


class RelativeBias(nn.Module):
    """Bias of a pair of tokens from their log-spaced offset (Swin v2, eq. 4).

    Args:
        num_axes: A.
        num_heads: H.
    """

    def __init__(self, num_axes: int, num_heads: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(num_axes, _BIAS_WIDTH), nn.GELU(), nn.Linear(_BIAS_WIDTH, num_heads, bias=False)
        )

    def forward(self, offsets: Tensor) -> Tensor:
        """The bias of a window's pairs, shape (H, N, N), from `Windows.offsets`."""
        weight: Tensor = self.mlp[0].weight  # type: ignore[assignment]  # torch says: of any module
        bias: Tensor = self.mlp(offsets.to(weight.dtype))
        return 16 * torch.sigmoid(bias).permute(2, 0, 1)  # bounded, as in Swin v2


class ShiftedWindowAttention(nn.Module):
    """Self-attention among the tokens of each window, with normalised queries and keys.

    Args:
        width: D.
        num_heads: H; divides D.
        num_axes: A.
        is_shifted: Whether windows are moved by half their size.
    """

    def __init__(self, width: int, *, num_heads: int, num_axes: int, is_shifted: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_shifted = is_shifted
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = RelativeBias(num_axes, num_heads)
        self.log_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10.0)))

    def forward(self, tokens: Tensor, windows: Windows) -> Tensor:
        """Mix tokens.

        Args:
            tokens: Shape (B, *grid, D).
            windows: Of this grid.
        Returns:
            Same shape, a new tensor.
        """
        grid, window = tuple(tokens.shape[1:-1]), windows.window
        axes, is_moved = tuple(range(1, len(grid) + 1)), self.is_shifted and any(windows.shift)
        if is_moved:
            tokens = tokens.roll([-step for step in windows.shift], axes)
        bias, mask = self.bias(windows.offsets), windows.mask if is_moved else None
        mixed = self._attend(partition_windows(tokens, window), bias, mask)
        tokens = merge_windows(mixed, window, grid)
        return tokens.roll(windows.shift, axes) if is_moved else tokens

    def _attend(self, windows: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of every window by itself, shape (windows, N, D).

        Windows that differ in their masks stand beside each other as heads do, so that one mask serves the
        whole batch.
        """
        num, size, width = windows.shape
        apart = 1 if mask is None else mask.shape[1]
        heads = self.qkv(windows).reshape(num // apart, apart, size, 3, self.num_heads, -1)
        query, key, value = heads.permute(3, 0, 1, 4, 2, 5).flatten(2, 3).unbind()
        scale = self.log_scale.clamp(max=_MAX_LOG_SCALE).exp().repeat(apart, 1, 1)
        query, key = F.normalize(query, dim=-1) * scale, F.normalize(key, dim=-1)
        bias = bias.to(query.dtype)[None]
        if mask is not None:
            bias = (bias + mask.to(query.dtype)).flatten(1, 2)
        mixed = F.scaled_dot_product_attention(query, key.to(query.dtype), value, attn_mask=bias, scale=1.0)
        mixed = mixed.unflatten(1, (apart, self.num_heads)).permute(0, 1, 3, 2, 4)
        out: Tensor = self.out(mixed.reshape(num, size, width))
        return out

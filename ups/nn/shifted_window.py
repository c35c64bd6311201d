"""Attention within windows of a token grid, shifted in every other block.

By FlexAttention all windows of a grid stand one after the other in a sequence, in which a token sees those
of its own window; blocks of pairs that no window holds aren't computed. PyTorch has no backward pass of it
on a CPU.

Letters: B batch, N tokens of a window, H heads, K channels of a head, D width, L tokens of the grid, A its
axes.
Sources: Liu et al. 2021 and 2022 (Swin, Swin v2: shifted windows, log-spaced continuous position bias,
cosine attention); Holzschuh et al. 2025 (PDE-Transformer); Dong et al. 2024 (FlexAttention,
arXiv:2412.05496).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ups.errors import ShapeError
from ups.grid import MAX_WINDOW, window_size
from ups.nn.layers import cut_cells, join_cells

Attention = Literal["sdpa", "flex"]

_MASKED = -1e4  # exp of it is 0 in every precision, and float16 holds it
_MAX_LOG_SCALE = math.log(100.0)
_BIAS_WIDTH = 64
_MOST_TOKENS = 1 << 14  # of a window, whose pairs have a bias each
_LEAST_LENGTH = 1e-12  # of a vector that is normalised, as `F.normalize` has it

Grid = tuple[int, ...]


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


def window_pieces(grid: Grid, window: Grid, shift: Grid, periodic: Sequence[bool]) -> Tensor:
    """To which piece of its shifted window each token belongs; only those of one piece see each other.

    On a periodic axis the roll is what the field does; on another one the window that wraps around the edge
    holds two pieces that don't touch.

    Returns:
        Numbers, float32, shape (number of windows, N).
    """
    piece = torch.zeros(1, *grid, 1)
    for axis, (length, step) in enumerate(zip(grid, shift, strict=True)):
        if step and not periodic[axis]:
            wrapped = torch.arange(length) >= length - step  # what the roll brings around
            shape = [1] * (len(grid) + 2)
            shape[axis + 1] = length
            piece = piece + wrapped.reshape(shape) * 2**axis
    return partition_windows(piece, window)[..., 0]


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
        largest: Tokens of a window along an axis, at most.

    Attributes:
        window: Tokens of a window along each axis.
        shift: How far windows are moved where they are shifted: half a window along an axis that has several.
        block_masks: Of windows as they are and shifted, once `make_block_masks` was called.
    """

    offsets: Tensor  # of a window's pairs, log-spaced; the shorter way around a periodic axis of one window
    mask: Tensor | None  # added to the scores of shifted windows, (1, number of windows, 1, N, N)

    def __init__(self, grid: Grid, periodic: Sequence[bool], *, largest: int = MAX_WINDOW) -> None:
        super().__init__()
        self.window = window = tuple(window_size(length, largest=largest) for length in grid)
        if math.prod(window) > _MOST_TOKENS:
            raise ShapeError(f"tokens of an attention window {window}", expected=f"at most {_MOST_TOKENS:,}")
        pairs = list(zip(grid, window, strict=True))
        self.shift = tuple(size // 2 if size < length else 0 for length, size in pairs)
        circular = [wraps and size == length for wraps, (length, size) in zip(periodic, pairs, strict=True)]
        offsets = relative_offsets(window, circular)
        scaled = torch.sign(offsets) * torch.log2(1 + offsets.abs()) / math.log2(1 + MAX_WINDOW)
        self.register_buffer("offsets", scaled, persistent=False)
        mask = None
        if any(step and not wraps for step, wraps in zip(self.shift, periodic, strict=True)):
            pieces = window_pieces(grid, window, self.shift, periodic)
            sees = pieces[:, :, None] == pieces[:, None]
            mask = torch.where(sees, 0.0, _MASKED)[None, :, None]
        self.register_buffer("mask", mask, persistent=False)
        self._grid, self._periodic = grid, tuple(periodic)
        self.block_masks = dict[bool, BlockMask]()

    def make_block_masks(self) -> None:
        """Make what FlexAttention takes, on the device on which the windows are."""
        for is_moved in (False, True):
            shift = self.shift if is_moved else (0,) * len(self.shift)
            pieces = window_pieces(self._grid, self.window, shift, self._periodic).to(self.offsets.device)
            self.block_masks[is_moved] = window_block_mask(pieces.flatten(), math.prod(self.window))


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

    Attributes:
        kernel: What computes it, see `set_attention`.
    """

    kernel: Attention = "sdpa"

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
        bias, cut = self.bias(windows.offsets), partition_windows(tokens, window)
        if self.kernel == "flex":
            mixed = self._attend_flex(cut, bias, windows.block_masks[is_moved], num=len(tokens))
        else:
            mixed = self._attend(cut, bias, windows.mask if is_moved else None)
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
        query, key = self._normalised(query, key, times=apart)
        bias = bias.to(query.dtype)[None]
        if mask is not None:
            bias = (bias + mask.to(query.dtype)).flatten(1, 2)
        mixed = biased_attention(query, key, value, bias=bias)
        mixed = mixed.unflatten(1, (apart, self.num_heads)).permute(0, 1, 3, 2, 4)
        out: Tensor = self.out(mixed.reshape(num, size, width))
        return out

    def _attend_flex(self, windows: Tensor, bias: Tensor, mask: BlockMask, *, num: int) -> Tensor:
        """As `_attend`, of a batch of so many grids; the windows of each are one sequence."""
        heads = self.qkv(windows).reshape(num, -1, 3, self.num_heads, windows.shape[-1] // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        query, key = self._normalised(query, key)
        mixed = flex_window_attention(
            query, key, value.to(query.dtype), bias_HNN=bias.to(query.dtype), mask=mask
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(windows.shape))
        return out

    def _normalised(self, query: Tensor, key: Tensor, *, times: int = 1) -> tuple[Tensor, Tensor]:
        """Both normalised, queries scaled; `times` windows stand beside each other as heads."""
        scale = self.log_scale.clamp(max=_MAX_LOG_SCALE).exp().repeat(times, 1, 1)
        query, key = query * (scale / _length(query)), key * _length(key).reciprocal()
        return query, key.to(query.dtype)


def set_attention(model: nn.Module, kernel: Attention) -> None:
    """Say what computes the attention of all parts of a model; weights and results are the same.

    Args:
        model: On its device.
        kernel: "sdpa", PyTorch's `scaled_dot_product_attention`, or "flex", its FlexAttention, which a CPU
            has no backward pass of.
    """
    for module in model.modules():
        if isinstance(module, ShiftedWindowAttention):
            module.kernel = kernel
        if isinstance(module, Windows) and kernel == "flex":
            module.make_block_masks()


@contextmanager
def with_sdpa(model: nn.Module) -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` computes all attention."""
    layers = [module for module in model.modules() if isinstance(module, ShiftedWindowAttention)]
    before = [layer.kernel for layer in layers]
    for layer in layers:
        layer.kernel = "sdpa"
    try:
        yield
    finally:
        for layer, kernel in zip(layers, before, strict=True):
            layer.kernel = kernel


def _length(vectors: Tensor) -> Tensor:
    """(..., K) to (..., 1). Multiplying by its inverse takes less than dividing as `F.normalize` does."""
    return torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(_LEAST_LENGTH)


def biased_attention(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor) -> Tensor:
    """Softmax attention with a bias that is trained, all (..., N, K).

    On the CPU no kernel takes such a bias. There PyTorch's own decomposition also scales, and looks for rows
    without any pair, which windows don't have: that takes a tenth of a step.
    """
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
    return (query @ key.transpose(-2, -1) + bias).softmax(dim=-1) @ value


MIN_HEAD_CHANNELS = 16  # of the kernel on a GPU


def window_block_mask(pieces_L: Tensor, size: int) -> BlockMask:
    """Which tokens of the sequence see each other: those of one piece of one window.

    Args:
        pieces_L: Number of each token's piece in its window, in the order of the sequence, shape (L,); on the
            device on which the mask is wanted.
        size: N.
    """

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query // size == key // size) & (pieces_L[query] == pieces_L[key])

    num = len(pieces_L)
    return create_block_mask(sees, None, None, num, num, device=str(pieces_L.device))


def flex_window_attention(
    query: Tensor, key: Tensor, value: Tensor, *, bias_HNN: Tensor, mask: BlockMask
) -> Tensor:
    """Attention of every window by itself.

    Args:
        query: Already scaled, shape (B, H, L, K).
        key: Same shape.
        value: Same shape.
        bias_HNN: Added to the scores of a window's pairs; it gets gradients.
        mask: Of `window_block_mask`, on the same device.
    Returns:
        Same shape, a new tensor.
    """
    size = bias_HNN.shape[-1]

    def biased(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias_HNN[head, query % size, key % size]

    is_called_alone = query.is_cuda and not torch.compiler.is_compiling()
    attend: Any = _kernel() if is_called_alone else flex_attention
    mixed: Tensor = attend(query, key, value, score_mod=biased, block_mask=mask, scale=1.0)
    return mixed


@cache
def _kernel() -> Callable[..., Any]:
    """Compiled: uncompiled it would hold the scores of all pairs of the grid."""
    return torch.compile(flex_attention, dynamic=False)

"""FlexAttention for the windows of a token grid: one sequence, a block mask, and a bias of the scores.

All windows of a grid stand one after the other in a sequence, in which a token sees those of its own window.
Blocks of pairs that no window holds aren't computed. PyTorch has no backward pass of it on a CPU.

Letters: B batch, H heads, L tokens of the grid, K channels of a head, N tokens of a window.
Source: Dong et al. 2024 (arXiv:2412.05496).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

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

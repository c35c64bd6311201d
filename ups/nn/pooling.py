"""Attention pooling of patches into tokens: every group of neighbouring patches becomes one token.

Pooling within groups keeps the order of the tokens in space and, along periodic axes, commutes with shifts by
whole groups. Letters: B batch, W width, L tokens, M patches of a group, H heads, K channels of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_OWN_PATCH_BIAS = 2.0


class GroupPooling(nn.Module):
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

    def forward(self, x_BWG: Tensor) -> Tensor:
        """(B, W, patches) to (B, W, tokens)."""
        x_BLMW = self._grouped(x_BWG)
        keys = (self.keys(x_BLMW) + self.place).unflatten(-1, (self.num_heads, -1))
        values = (self.values(x_BLMW) + self.place).unflatten(-1, (self.num_heads, -1))
        scores_BLMH = torch.einsum("blmhk,hk->blmh", keys, self.seed) / math.sqrt(self.seed.shape[1])
        weights_BLMH = (scores_BLMH + self.bias.T).softmax(dim=2)
        pooled_BLW = torch.einsum("blmh,blmhk->blhk", weights_BLMH, values).flatten(2)
        tokens_BLW = x_BLMW.mean(dim=2) + self.out(pooled_BLW)
        return tokens_BLW.transpose(1, 2).unflatten(2, self.tokens)

    def _grouped(self, x_BWG: Tensor) -> Tensor:
        ndim = len(self.groups)
        sizes = [size for pair in zip(self.tokens, self.groups, strict=True) for size in pair]
        split = x_BWG.reshape(*x_BWG.shape[:2], *sizes)
        token_axes = [2 + 2 * axis for axis in range(ndim)]
        group_axes = [3 + 2 * axis for axis in range(ndim)]
        ordered = split.permute(0, *token_axes, *group_axes, 1)
        return ordered.flatten(1, ndim).flatten(2, 1 + ndim)

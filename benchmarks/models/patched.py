"""Operators that no configuration makes, for ablations.

One sees every point before and after its patches; one adds the input of a steady task to its solution, as all
did until 2026-11-23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor, nn

from ups.models.latent_operator import LatentOperator
from ups.models.operator_size import TokenAxis
from ups.nn.layers import GridConv, patchify, unpatchify, zero_init

CHANNELS = 8


class _Lift(nn.Module):
    """Patches of one channel to embedded tokens, by a convolution at full resolution in between."""

    def __init__(self, dim: int, width: int, axes: tuple[TokenAxis, ...]) -> None:
        super().__init__()
        self.patch = _patch_size(dim, axes)
        self.lift = GridConv(1, CHANNELS, periodic=tuple(not axis.has_ends for axis in axes))
        self.embed = nn.Linear(CHANNELS * dim, width)

    def forward(self, patches: Tensor) -> Tensor:
        """(B, *grid, D) to (B, *grid, W)."""
        points = tuple(num * self.patch for num in patches.shape[1:-1])
        flat = patches.flatten(1, -2)
        values = unpatchify(flat, points=points, patch_size=self.patch).movedim(-1, 1)
        lifted = F.gelu(self.lift(values)).movedim(1, -1)
        tokens = patchify(lifted, patch_size=self.patch).unflatten(1, patches.shape[1:-1])
        embedded: Tensor = self.embed(tokens)
        return embedded


class _Lower(nn.Module):
    """The way back: tokens to several channels at every point, mixed there by a convolution."""

    def __init__(self, dim: int, width: int, axes: tuple[TokenAxis, ...]) -> None:
        super().__init__()
        self.patch = _patch_size(dim, axes)
        self.spread = nn.Linear(width, CHANNELS * dim)
        self.lower = GridConv(CHANNELS, 1, periodic=tuple(not axis.has_ends for axis in axes))
        zero_init(self.lower)

    @property
    def weight(self) -> Tensor:
        """A weight, whose device is the operator's."""
        return self.spread.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, *grid, W) to (B, *grid, D)."""
        points = tuple(num * self.patch for num in tokens.shape[1:-1])
        flat = self.spread(tokens).flatten(1, -2)
        values = unpatchify(flat, points=points, patch_size=self.patch).movedim(-1, 1)
        lowered = self.lower(F.gelu(values)).movedim(1, -1)
        return patchify(lowered, patch_size=self.patch).unflatten(1, tokens.shape[1:-1])


def full_resolution_lift() -> AbstractContextManager[None]:
    """Inside, operators on patches of fields of one channel are made with such a lift, and loaded."""

    def changed(self: LatentOperator, latent_dim: int, **options: Any) -> None:
        width, axes = options["size"].width, options["axes"]
        self.into = _Lift(latent_dim, width, axes)  # type: ignore[assignment]
        self.out = _Lower(latent_dim, width, axes)  # type: ignore[assignment]

    return _made_and(changed)


def with_input_added() -> AbstractContextManager[None]:
    """Inside, operators of steady tasks add the input to what they compute."""

    def changed(self: LatentOperator, latent_dim: int, **options: Any) -> None:
        self.adds_input = True

    return _made_and(changed)


@contextmanager
def _made_and(changed: Callable[..., None]) -> Iterator[None]:
    """Inside, operators are changed once they are made."""
    made = LatentOperator.__init__

    def init(self: LatentOperator, latent_dim: int, **options: Any) -> None:
        made(self, latent_dim, **options)
        changed(self, latent_dim, **options)

    with mock.patch.object(LatentOperator, "__init__", init):
        yield


def _patch_size(dim: int, axes: tuple[TokenAxis, ...]) -> int:
    return round(dim ** (1 / len(axes)))

"""Spectral convolution: a linear layer on the Fourier modes of a grid (Li et al. 2021, arXiv:2010.08895).

The transform is normalised "forward", so a mode's coefficient doesn't depend on the number of points, and a
layer is the same operator at every resolution. Letters: B batch, W channels, G the axes of the grid, K kept
modes, I and O channels of a group going in and coming out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.nn.layers import without_autocast


class SpectralConv(nn.Module):
    """Every kept mode's W coefficients are multiplied by a complex matrix of its own; others become zero.

    The matrix of a mode is block-diagonal where there are several groups. Weights are real and imaginary
    parts side by side: one real matrix product for both, which optimisers and FLOP counters know.

    Args:
        width: W.
        modes: Modes kept along each axis: so many of either sign, 0 and the positive ones together; along the
            last axis so many from 0 on, since a real field's negative ones follow. A grid that has fewer
            uses those it has.
        groups: Number of groups of channels that aren't mixed with each other; divides W.
    """

    def __init__(self, width: int, *, modes: tuple[int, ...], groups: int = 1) -> None:
        super().__init__()
        self.modes, self.groups = modes, groups
        each = width // groups
        kept = (*(2 * num for num in modes[:-1]), modes[-1])
        scale = math.sqrt(width * each)  # a mode's power is multiplied by about 2 / W
        self.weight = nn.Parameter(torch.randn(*kept, groups, each, 2, each) / scale)

    def forward(self, x_BWG: Tensor) -> Tensor:
        """Same shape and dtype; computed in float32, or float64 where it is given that, under AMP too."""
        grid = x_BWG.shape[2:]
        axes = tuple(range(2, x_BWG.ndim))
        with without_autocast(x_BWG.device):
            values_BWG = x_BWG if x_BWG.dtype == torch.float64 else x_BWG.float()
            spectrum = torch.fft.rfftn(values_BWG.contiguous(), dim=axes, norm="forward")
            low_BWK, weight = self._kept(spectrum)
            real, imag = self._mixed(low_BWK, weight)
            if len(grid) > 1:
                mixed_BWK = torch.complex(real, imag).reshape(low_BWK.shape)
                real, imag = torch.view_as_real(_inverse(mixed_BWK, grid[:-1])).unbind(-1)
            ends = torch.stack([real, _without_ends(imag, grid[-1])], dim=-1)
            low_BWK = torch.view_as_complex(ends).reshape(*x_BWG.shape[:-1], -1)
            return torch.fft.irfft(low_BWK, n=grid[-1], norm="forward").to(x_BWG.dtype)

    def _kept(self, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest modes, as many as the spectrum has, and their weights."""
        weight: Tensor = self.weight
        for axis, num in enumerate(self.modes[:-1]):
            length = spectrum.shape[2 + axis]
            ends = min(num, (length + 1) // 2), min(num, length // 2)
            spectrum, weight = _ends(spectrum, 2 + axis, ends), _ends(weight, axis, ends)
        num, last = min(self.modes[-1], spectrum.shape[-1]), len(self.modes) - 1
        return _ends(spectrum, spectrum.ndim - 1, (num, 0)), _ends(weight, last, (num, 0))

    def _mixed(self, low_BWK: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(a + ib)(u + iv) = (au - bv) + i(av + bu), for all modes by one batched product.

        Returns:
            Real and imaginary parts, views of shape (B, groups, W / groups, number of modes).
        """
        batch, width = low_BWK.shape[:2]
        num, each = low_BWK.shape[2:].numel(), width // self.groups
        parts = torch.view_as_real(low_BWK).reshape(batch, self.groups, each, num, 2)
        rows = parts.permute(3, 1, 4, 0, 2).reshape(num * self.groups, 2 * batch, each)
        products = torch.bmm(rows, weight.reshape(num * self.groups, each, 2 * each).to(rows.dtype))
        of_real, of_imag = products.reshape(num, self.groups, 2, batch, 2, each).unbind(2)
        (au, av), (bu, bv) = of_real.unbind(3), of_imag.unbind(3)
        return (au - bv).permute(2, 1, 3, 0), (bu + av).permute(2, 1, 3, 0)


def _inverse(low_BWK: Tensor, lengths: torch.Size) -> Tensor:
    """The transform back along all axes but the last, whose other modes are zero."""
    for axis, length in enumerate(lengths, start=2):
        kept = low_BWK.shape[axis]
        if kept < length:
            positive, negative = low_BWK.tensor_split([(kept + 1) // 2], dim=axis)
            behind = [0, 0] * (low_BWK.ndim - 1 - axis)
            low_BWK = torch.cat([F.pad(positive, [*behind, 0, length - kept]), negative], dim=axis)
    return torch.fft.ifftn(low_BWK, dim=tuple(range(2, low_BWK.ndim - 1)), norm="forward")


def _without_ends(imag: Tensor, length: int) -> Tensor:
    """Imaginary parts without those of modes 0 and length / 2 of the last axis, which a real field hasn't.

    The inverse transform ignores them on a CPU; on a GPU nothing is promised about such input.
    """
    num = imag.shape[-1]
    behind = int(num > 1 and 2 * (num - 1) == length)
    return F.pad(imag.narrow(-1, 1, num - 1 - behind), (1, behind))


def _ends(values: Tensor, axis: int, ends: tuple[int, int]) -> Tensor:
    """So many places from the front and from the back of an axis."""
    front, back = ends
    length = values.shape[axis]
    if front + back == length:
        return values
    if not back:
        return values.narrow(axis, 0, front)
    parts = [values.narrow(axis, 0, front), values.narrow(axis, length - back, back)]
    return torch.cat(parts, dim=axis)


def num_modes(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """All modes of a grid, as `SpectralConv` counts them."""
    return (*((length + 1) // 2 for length in lengths[:-1]), lengths[-1] // 2 + 1)


def padding_behind(grid: tuple[int, ...], periodic: tuple[bool, ...], *, share: float) -> list[int]:
    """Places to add behind every axis that isn't periodic, a share of its length, in the order of `F.pad`."""
    behind = [0 if wraps else math.ceil(share * num) for num, wraps in zip(grid, periodic, strict=True)]
    return [number for room in reversed(behind) for number in (0, room)]

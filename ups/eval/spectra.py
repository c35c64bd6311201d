"""Energy of fields by wave number, in radial shells: of all wave vectors, or of those that PDEBench sums.

Letters: B samples, T time steps, X the axes of the grid, C channels, K shells.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shell_energy(field: Tensor) -> Tensor:
    """|FFT|^2 by wave number.

    In one dimension of the wave numbers 0..N/2, each once. Else shell k sums all wave vectors whose length
    rounded down is k, with components of both signs, for k up to half the points of the shortest axis.

    Args:
        field: Shape (B, T, X..., C), float64.

    Returns:
        Shape (B, T, K, C); a new tensor.
    """
    points = field.shape[2:-1]
    if len(points) == 1:
        return torch.fft.rfft(field, dim=2).abs().square()
    half, numbers = _half_spectrum(field)
    # Along the last axis numbers of one sign are there, each for its twin too but 0 and n/2, which have none.
    last = numbers[-1]
    twins = torch.where((last == 0) | (2 * last == points[-1]), 1.0, 2.0).to(half.dtype)
    return _sum_shells(half * twins, numbers, num_shells=min(points) // 2 + 1)


def compat_shell_energy(field: Tensor) -> Tensor:
    """As `shell_energy`, of what PDEBench's evaluation sums in two and three dimensions.

    These are wave vectors without a negative component, about a quarter of all in two dimensions and an
    eighth in three, and the last shell is left out. In one dimension it is the same.

    Args:
        field: Shape (B, T, X..., C), float64.

    Returns:
        Shape (B, T, K, C), one shell fewer than `shell_energy` has in two and three dimensions; a new tensor.
    """
    points = field.shape[2:-1]
    if len(points) == 1:
        return shell_energy(field)
    half, numbers = _half_spectrum(field)
    counted = torch.stack(torch.meshgrid(*numbers, indexing="ij")).amin(0) >= 0
    return _sum_shells(half * counted, numbers, num_shells=min(points) // 2)


def _half_spectrum(field: Tensor) -> tuple[Tensor, list[Tensor]]:
    """|FFT|^2 with numbers 0..n/2 of the last axis, shape (B, T, C, X...), and the numbers of each axis."""
    fields_BTCX = field.movedim(-1, 2).contiguous()
    half = torch.fft.rfftn(fields_BTCX, dim=tuple(range(3, fields_BTCX.ndim))).abs().square()
    like = {"device": half.device, "dtype": half.dtype}
    numbers = [torch.fft.fftfreq(n, d=1 / n, **like) for n in field.shape[2:-2]]
    return half, [*numbers, torch.arange(half.shape[-1], **like)]


def _sum_shells(energy: Tensor, numbers: list[Tensor], *, num_shells: int) -> Tensor:
    """Sum (B, T, C, X...) over the wave vectors of each shell, shape (B, T, K, C)."""
    length = torch.stack(torch.meshgrid(*numbers, indexing="ij")).square().sum(0).sqrt()
    shell = length.flatten().floor().long()
    kept = shell < num_shells
    shells_BTCK = energy.new_zeros(*energy.shape[:3], num_shells)
    shells_BTCK.index_add_(3, shell[kept], energy.flatten(3)[..., kept])
    return shells_BTCK.movedim(3, 2)

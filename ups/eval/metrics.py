"""Errors of predicted fields by sample, time step and channel, and the energy of fields by wave number.

Functions take predictions p and truths y, both (B, T, X..., C) in physical units and float64. Energies are
in radial shells: of all wave vectors, or of those that PDEBench sums. `trajectory_errors` makes PDEBench's
metrics of them. Letters: B samples, T time steps, X the axes of the grid, C channels, K wave numbers or
shells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.distributed.ranks import Ranks
from ups.errors import ConfigError

# Wave numbers (periods of the domain) of the bands of fRMSE: first included, last not.
BANDS = {"low": (0, 4), "mid": (4, 12), "high": (12, None)}
# Of VRMSE, as in The Well (Ohana et al. 2024): fields without variance have a finite error.
_VARIANCE_EPS = 1e-7


def nrmse_per_sample(prediction: Tensor, truth: Tensor) -> Tensor:
    """sqrt(mean_X (p - y)^2) / sqrt(mean_X y^2), shape (B, T, C); infinite or NaN where the truth is zero."""
    return root_mean_square(prediction - truth) / root_mean_square(truth)


def is_zero(truth: Tensor) -> Tensor:
    """Where the truth is zero throughout, so that no relative error is defined, shape (B, T, C)."""
    return root_mean_square(truth) == 0


def means_of_defined(errors: Tensor, undefined: Tensor, *axes: int) -> npt.NDArray[np.float64]:
    """Means over axes beside each other of the errors that are defined; masked where there are none."""
    if not undefined.any():
        return errors.flatten(axes[0], axes[-1]).mean(axes[0]).numpy()
    means: npt.NDArray[np.float64] = np.ma.MaskedArray(errors.numpy(), undefined.numpy()).mean(axis=axes)
    return means


class DefinedErrors:
    """nRMSE of frames and channels whose truth isn't zero throughout, found by several ranks.

    An error that isn't finite for another reason, such as a prediction that is NaN, stays.
    """

    def __init__(self) -> None:
        self._items: list[Tensor] = []
        self._errors: list[Tensor] = []
        self._defined: list[Tensor] = []

    def add(self, prediction: Tensor, truth: Tensor, *, items: Tensor) -> None:
        """Take in a batch, with its samples' numbers, int64, shape (B,)."""
        self._items.append(items)
        self._errors.append(nrmse_per_sample(prediction, truth))
        self._defined.append(~is_zero(truth))

    def joined(self, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """Errors, and which are defined, both (N, T, C), by numbers that go up; a collective."""
        items = torch.cat(self._items)
        errors, defined = (ranks.joined(items, torch.cat(some)) for some in (self._errors, self._defined))
        return errors, defined


def mean_of_defined(errors: Tensor, *, task: str, channels: Sequence[str]) -> float:
    """Mean of errors that are defined.

    Raises:
        ConfigError: Kind "zero_truth", if nothing is left to average.
    """
    if not len(errors):
        raise ConfigError(
            f"the true frames of {task} are zero throughout, so there is no relative error",
            kind="zero_truth",
            expected=f"another value in channel {' or '.join(channels)}",
            hint="look into the validation samples, or take others with data.split_fractions",
        )
    return errors.mean().item()


def brmse_per_sample(prediction: Tensor, truth: Tensor, *, is_compat: bool = False) -> Tensor:
    """Root mean square over the points at the ends of the axes, shape (B, T, C).

    Each point counts once; `is_compat` counts those on edges and corners once for every axis that ends there,
    as PDEBench does.
    """
    points = truth.shape[2:-1]
    num_ends = torch.zeros(points, dtype=torch.int64, device=truth.device)
    for axis, length in enumerate(points):
        for end in {0, length - 1}:
            num_ends.select(axis, end).add_(1)
    at_end = num_ends.flatten() > 0
    square = (prediction - truth).flatten(2, -2)[:, :, at_end].square()
    if not is_compat:
        return square.mean(2).sqrt()
    weight = num_ends.flatten()[at_end, None]
    return ((square * weight).sum(2) / weight.sum()).sqrt()


def vrmse_per_sample(prediction: Tensor, truth: Tensor) -> Tensor:
    """sqrt(mean_X (p - y)^2 / (var_X y + 1e-7)), shape (B, T, C)."""
    space = _space(truth)
    variance = truth.var(space, correction=0)
    return ((prediction - truth).square().mean(space) / (variance + _VARIANCE_EPS)).sqrt()


def relative_l2(prediction: Tensor, truth: Tensor) -> Tensor:
    """||p - y|| / ||y|| over time, space and channels, per sample, shape (B,)."""
    return (prediction - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)


def correlation(prediction: Tensor, truth: Tensor) -> Tensor:
    """Pearson correlation over space, averaged over channels, shape (B, T); 0 where one has no variance."""
    space = _space(truth)
    p, y = (field - field.mean(space, keepdim=True) for field in (prediction, truth))
    scale = (p.square().sum(space) * y.square().sum(space)).sqrt()
    return torch.where(scale > 0, (p * y).sum(space) / scale.clamp(min=1e-300), 0.0).mean(-1)


def summary(errors: Mapping[str, Tensor]) -> dict[str, float]:
    """Means over time steps and channels, as plain numbers (`max_error`: the maximum)."""
    return {
        name: (error.max() if name == "max_error" else error.mean()).item() for name, error in errors.items()
    }


def root_mean_square(field: Tensor) -> Tensor:
    """sqrt(mean_X field^2), shape (B, T, C)."""
    return field.square().mean(_space(field)).sqrt()


def _space(field: Tensor) -> tuple[int, ...]:
    return tuple(range(2, field.ndim - 1))


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

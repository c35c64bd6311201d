"""What the metrics need of every trajectory, so that a split goes through in batches and can be resampled.

PDEBench's metrics follow their definitions (Takamoto et al. 2022, arXiv:2210.07182, appendix B). Letters:
B trajectories, T time steps, X the axes of the grid, K wave numbers, C channels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.errors import ShapeError
from ups.eval import metrics
from ups.eval.metrics import compat_shell_energy, shell_energy

_LEAST_CORRELATION = 0.8  # of a prediction that still follows the truth
Errors = dict[str, Tensor]


@dataclass(frozen=True)
class TrajectoryErrors:
    """Errors of trajectories; float64, on the CPU.

    Attributes:
        rmse: Root mean square of the error over space, shape (B, T, C).
        nrmse: The same over the root mean square of the truth, shape (B, T, C).
        vrmse: The same over the truth's standard deviation in space, shape (B, T, C).
        brmse: Root mean square over the points at the ends of the axes, shape (B, T, C).
        max_error: Largest |p - y| in space, shape (B, T, C).
        mean_error: Mean of p - y over space, shape (B, T, C).
        drift: |mean_X p(t) - mean_X y(0)| over the root mean square of y(0), shape (B, T, C); y(0) is given.
        shells: |FFT(p - y)|^2 by wave number, scaled so that its root is what fRMSE averages, (B, T, K, C).
        relative_l2: Over time, space and channels, shape (B,).
        correlation: Pearson's, over space, shape (B, T).
        undefined: Where the truth is zero throughout, so that `nrmse` isn't defined, shape (B, T, C).
        starts_at_zero: Where y(0) is, so that `drift` isn't, shape (B, T, C).
        compat_brmse: `brmse` as PDEBench counts points; None in one dimension, where that is the same.
        compat_shells: `shells` as PDEBench sums them; None in one dimension.
    """

    rmse: Tensor
    nrmse: Tensor
    vrmse: Tensor
    brmse: Tensor
    max_error: Tensor
    mean_error: Tensor
    drift: Tensor
    shells: Tensor
    relative_l2: Tensor
    correlation: Tensor
    undefined: Tensor
    starts_at_zero: Tensor
    compat_brmse: Tensor | None = None
    compat_shells: Tensor | None = None

    def __len__(self) -> int:
        return len(self.relative_l2)

    def __getitem__(self, rows: slice) -> TrajectoryErrors:
        """Some of the trajectories."""
        return TrajectoryErrors(**{name: value[rows] for name, value in self._present().items()})

    def means(self, name: str, *axes: int) -> npt.NDArray[np.float64]:
        """Means of an error by trajectory, time step and channel over some of these, where it is defined."""
        errors: Tensor = getattr(self, name)
        undefined = {"nrmse": self.undefined, "drift": self.starts_at_zero}
        return metrics.means_of_defined(errors, undefined.get(name, torch.tensor(False)), *axes)

    def pdebench(self) -> Errors:
        """PDEBench's metrics over all trajectories, each (T, C); a band without wave numbers is NaN.

        frmse of a band is mean_K sqrt(mean_B |FFT(p) - FFT(y)|^2) / N * L; in two and three dimensions |.|^2
        is summed over radial shells first, and N, the points, and L, the lengths, are products over the axes.
        """
        return self._pdebench(self.brmse, self.shells)

    def pdebench_compat(self, batch_size: int) -> Errors:
        """PDEBench's metrics as its own evaluation has them: values of batches, in order, then their mean.

        In two and three dimensions it counts edges and corners otherwise, see `metrics.brmse_per_sample`, and
        sums fewer wave vectors, see `metrics.compat_shell_energy`: with all of them frmse is larger, for
        white noise 1.6 to 2 times in two dimensions and 2 to 2.8 times in three. crmse, frmse and max_error
        depend on the batch size, and a last, smaller batch counts as much as the others.
        """
        firsts = range(0, len(self), batch_size)
        batches = [self[first : first + batch_size]._compat() for first in firsts]
        return {name: torch.stack([errors[name] for errors in batches]).mean(0) for name in batches[0]}

    def _compat(self) -> Errors:
        if self.compat_brmse is None or self.compat_shells is None:
            return self.pdebench()
        return self._pdebench(self.compat_brmse, self.compat_shells)

    def _present(self) -> dict[str, Tensor]:
        """All attributes that aren't None, by name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def _pdebench(self, brmse_BTC: Tensor, shells_BTKC: Tensor) -> Errors:
        amplitude_KTC = shells_BTKC.mean(0).sqrt().movedim(1, 0)
        bands = {f"frmse_{name}": amplitude_KTC[slice(*ends)].mean(0) for name, ends in metrics.BANDS.items()}
        return {
            "rmse": self.rmse.mean(0),
            "nrmse": self.nrmse.mean(0),
            "crmse": self.mean_error.square().mean(0).sqrt(),
            "max_error": self.max_error.amax(0),
            "brmse": brmse_BTC.mean(0),
            **bands,
        }

    def correlation_time(self, t: Tensor) -> Tensor:
        """Time until the correlation first falls below 0.8, shape (B,), float64; the last time if never.

        Args:
            t: Time of each step since the start of the prediction, shape (T,).
        """
        below = ~(self.correlation >= _LEAST_CORRELATION)
        first = torch.where(below.any(1), below.int().argmax(1), len(t) - 1)
        return t.double()[first]


def measure(
    prediction: Tensor,
    truth: Tensor,
    *,
    given: Tensor | None = None,
    lengths: Sequence[float] | None = None,
) -> TrajectoryErrors:
    """Measure predicted trajectories.

    Args:
        prediction: Shape (B, T, X..., C), physical units, on any device.
        truth: The same shape.
        given: The state that the prediction started from, shape (B, X..., C), if it is one of the same kind
            as the truth; else the drift is counted from the first frame of the truth.
        lengths: Length of the domain along each axis; 1 by default.

    Raises:
        ShapeError: If the shapes differ or have no grid.
    """
    if prediction.shape != truth.shape:
        raise ShapeError("prediction", expected=tuple(truth.shape), found=tuple(prediction.shape))
    if truth.ndim < 4:
        raise ShapeError("fields", expected="(B, T, X..., C)", found=tuple(truth.shape))
    prediction, truth = prediction.double().cpu(), truth.double().cpu()
    start = truth[:, :1] if given is None else given.double().cpu().unsqueeze(1)
    error, space = prediction - truth, tuple(range(2, truth.ndim - 1))
    points = truth.shape[2:-1]
    scale = math.prod(lengths or [1.0] * len(points)) / math.prod(points)
    is_line = len(points) == 1
    return TrajectoryErrors(
        rmse=metrics.root_mean_square(error),
        nrmse=metrics.nrmse_per_sample(prediction, truth),
        vrmse=metrics.vrmse_per_sample(prediction, truth),
        brmse=metrics.brmse_per_sample(prediction, truth),
        max_error=error.abs().amax(space),
        mean_error=error.mean(space),
        drift=(prediction.mean(space) - start.mean(space)).abs() / metrics.root_mean_square(start),
        shells=shell_energy(error) * scale**2,
        relative_l2=metrics.relative_l2(prediction, truth),
        correlation=metrics.correlation(prediction, truth),
        undefined=metrics.is_zero(truth),
        starts_at_zero=metrics.is_zero(start).expand(-1, truth.shape[1], -1),
        compat_brmse=None if is_line else metrics.brmse_per_sample(prediction, truth, is_compat=True),
        compat_shells=None if is_line else compat_shell_energy(error) * scale**2,
    )


def join(parts: Sequence[TrajectoryErrors]) -> TrajectoryErrors:
    """Errors of all trajectories from those of batches."""
    names = parts[0]._present()
    return TrajectoryErrors(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

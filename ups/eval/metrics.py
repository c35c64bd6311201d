"""Errors of predicted fields, per time step and channel: PDEBench's metrics and others in common use.

PDEBench's are implemented from their definitions (Takamoto et al. 2022, arXiv:2210.07182, appendix B). All
computation is in float64. Letters: B samples, T time steps, X the axes of the grid, N their points, C
channels, K wave numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ups.errors import ConfigError, ShapeError

# Wave numbers (periods of the domain) of the bands of fRMSE: first included, last not.
BANDS = {"low": (0, 4), "mid": (4, 12), "high": (12, None)}
# Of VRMSE, as in The Well (Ohana et al. 2024): fields without variance have a finite error.
_VARIANCE_EPS = 1e-7

Errors = dict[str, Tensor]


def pdebench(prediction: Tensor, truth: Tensor, *, lengths: Sequence[float] | None = None) -> Errors:
    """PDEBench's metrics over all samples at once.

    Args:
        prediction: Shape (B, T, X..., C), physical units.
        truth: The same shape.
        lengths: Length of the domain along each axis; 1 by default.

    Returns:
        `rmse`, `nrmse`, `crmse`, `max_error`, `brmse`, `frmse_low`, `frmse_mid`, `frmse_high`, each float64,
        shape (T, C); a band without wave numbers is NaN.

    Raises:
        ShapeError: If the shapes differ or have no grid.
    """
    prediction, truth = _checked(prediction, truth)
    bands = {f"frmse_{name}": error for name, error in frmse(prediction, truth, lengths=lengths).items()}
    return {
        "rmse": rmse(prediction, truth),
        "nrmse": nrmse(prediction, truth),
        "crmse": crmse(prediction, truth),
        "max_error": max_error(prediction, truth),
        "brmse": brmse(prediction, truth),
        **bands,
    }


def pdebench_compat(batch_size: int) -> Callable[..., Errors]:
    """PDEBench's metrics averaged as its own evaluation does: values of batches, then their mean.

    In one dimension that is what PDEBench reports; in two and three brmse and frmse are other numbers, see
    `brmse_per_sample` and `frmse`.

    Where the mean over samples stands inside a square root or is a maximum (crmse, frmse, max_error), that
    depends on the batch size; and a last, smaller batch counts as much as the others.

    Args:
        batch_size: Samples of a batch, in order.

    Returns:
        A function with the arguments and result of `pdebench`.
    """

    def averaged(prediction: Tensor, truth: Tensor, *, lengths: Sequence[float] | None = None) -> Errors:
        batches = zip(prediction.split(batch_size), truth.split(batch_size), strict=True)
        values = [pdebench(p, y, lengths=lengths) for p, y in batches]
        return {name: torch.stack([errors[name] for errors in values]).mean(0) for name in values[0]}

    return averaged


def rmse(prediction: Tensor, truth: Tensor) -> Tensor:
    """mean_B sqrt(mean_X (p - y)^2), shape (T, C)."""
    return root_mean_square(prediction - truth).mean(0)


def nrmse(prediction: Tensor, truth: Tensor) -> Tensor:
    """mean_B of sqrt(mean_X (p - y)^2) / sqrt(mean_X y^2), shape (T, C)."""
    return nrmse_per_sample(prediction, truth).mean(0)


def nrmse_per_sample(prediction: Tensor, truth: Tensor) -> Tensor:
    """sqrt(mean_X (p - y)^2) / sqrt(mean_X y^2), shape (B, T, C); infinite or NaN where the truth is zero."""
    return root_mean_square(prediction - truth) / root_mean_square(truth)


def defined_nrmse(prediction: Tensor, truth: Tensor) -> Tensor:
    """nRMSE of frames and channels whose truth isn't zero throughout, one after another, at most B T C.

    An error that isn't finite for another reason, such as a prediction that is NaN, stays.
    """
    scale = root_mean_square(truth)
    return (root_mean_square(prediction - truth) / scale)[scale != 0]


def mean_of_defined(errors: Sequence[Tensor], *, task: str, channels: Sequence[str]) -> float:
    """Mean of what `defined_nrmse` gave.

    Args:
        errors: Of some batches, each of one axis.
        task: Name of the task, for people.
        channels: Names of its channels, for people.

    Raises:
        ConfigError: Kind "zero_truth", if nothing is left to average.
    """
    joined = torch.cat(list(errors))
    if not len(joined):
        raise ConfigError(
            f"the true frames of {task} are zero throughout, so there is no relative error",
            kind="zero_truth",
            expected=f"another value in channel {' or '.join(channels)}",
            hint="look into the validation samples, or take others with data.split_fractions",
        )
    return joined.mean().item()


def crmse(prediction: Tensor, truth: Tensor) -> Tensor:
    """sqrt(mean_B (sum_X p - sum_X y)^2) / N: the error of what is conserved; shape (T, C)."""
    return (prediction - truth).mean(_space(truth)).square().mean(0).sqrt()


def max_error(prediction: Tensor, truth: Tensor) -> Tensor:
    """Largest |p - y| of all samples and points, shape (T, C)."""
    return (prediction - truth).abs().amax((0, *_space(truth)))


def brmse(prediction: Tensor, truth: Tensor) -> Tensor:
    """mean_B of the root mean square over the points at the ends of the axes, shape (T, C)."""
    return brmse_per_sample(prediction, truth).mean(0)


def brmse_per_sample(prediction: Tensor, truth: Tensor) -> Tensor:
    """Root mean square over the points at the ends of the axes, shape (B, T, C).

    Each point counts once; PDEBench counts those on edges and corners once for every axis that ends there.
    """
    points = truth.shape[2:-1]
    at_end = torch.zeros(points, dtype=torch.bool, device=truth.device)
    for axis in range(len(points)):
        at_end.select(axis, 0).fill_(True)
        at_end.select(axis, -1).fill_(True)
    difference = (prediction - truth).flatten(2, -2)[:, :, at_end.flatten()]
    return difference.square().mean(2).sqrt()


def frmse(prediction: Tensor, truth: Tensor, *, lengths: Sequence[float] | None = None) -> Errors:
    """Error by band of wave numbers: mean_K sqrt(mean_B |FFT(p) - FFT(y)|^2) / N * L, each (T, C).

    In two and three dimensions |.|^2 is summed over radial shells first: shell k has all wave vectors whose
    length rounded down is k, with components of both signs, for k up to half the points of the shortest axis;
    N and L are products over the axes. PDEBench sums only those without a negative component, about a quarter
    in two dimensions and an eighth in three, and leaves the last shell out. So ours are larger, for white
    noise 1.6 to 2 times in two dimensions and 2 to 2.8 times in three, and can't be compared digit by digit
    with its columns; in one dimension they can.
    """
    points = truth.shape[2:-1]
    scale = math.prod(lengths or [1.0] * len(points)) / math.prod(points)
    amplitude_KTC = shell_energy(prediction - truth).mean(0).sqrt().movedim(1, 0) * scale
    return {name: amplitude_KTC[slice(*ends)].mean(0) for name, ends in BANDS.items()}


def shell_energy(field: Tensor) -> Tensor:
    """|FFT|^2 by wave number, shape (B, T, K, C).

    In one dimension of the wave numbers 0..N/2, each once; else summed over radial shells of all wave
    numbers, up to half the points of the shortest axis.
    """
    points = field.shape[2:-1]
    if len(points) == 1:
        return torch.fft.rfft(field, dim=2).abs().square()
    fields_BTCX = field.movedim(-1, 2).contiguous()
    half = torch.fft.rfftn(fields_BTCX, dim=tuple(range(3, fields_BTCX.ndim))).abs().square()
    # Along the last axis numbers of one sign are there, each for its twin too but 0 and n/2, which have none.
    numbers = [torch.fft.fftfreq(n, d=1 / n, device=field.device, dtype=field.dtype) for n in points[:-1]]
    last = torch.arange(half.shape[-1], device=field.device, dtype=field.dtype)
    twins = torch.where((last == 0) | (2 * last == points[-1]), 1.0, 2.0).to(half.dtype)
    energy_BTCP = (half * twins).flatten(3)
    grid = torch.meshgrid(*numbers, last, indexing="ij")
    shell = torch.stack(grid).square().sum(0).sqrt().flatten().floor().long()
    num_shells = min(points) // 2 + 1
    kept = shell < num_shells
    shells_BTCK = energy_BTCP.new_zeros(*energy_BTCP.shape[:3], num_shells)
    shells_BTCK.index_add_(3, shell[kept], energy_BTCP[..., kept])
    return shells_BTCK.movedim(3, 2)


def vrmse(prediction: Tensor, truth: Tensor) -> Tensor:
    """mean_B sqrt(mean_X (p - y)^2 / (var_X y + 1e-7)), shape (T, C): 1 for predicting the frame's mean."""
    return vrmse_per_sample(prediction, truth).mean(0)


def vrmse_per_sample(prediction: Tensor, truth: Tensor) -> Tensor:
    """sqrt(mean_X (p - y)^2 / (var_X y + 1e-7)), shape (B, T, C)."""
    prediction, truth = _checked(prediction, truth)
    space = _space(truth)
    variance = truth.var(space, correction=0)
    return ((prediction - truth).square().mean(space) / (variance + _VARIANCE_EPS)).sqrt()


def relative_l2(prediction: Tensor, truth: Tensor) -> Tensor:
    """||p - y|| / ||y|| over time, space and channels, per sample, shape (B,)."""
    prediction, truth = _checked(prediction, truth)
    return (prediction - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)


def correlation(prediction: Tensor, truth: Tensor) -> Tensor:
    """Pearson correlation over space, averaged over channels, shape (B, T); 0 where one has no variance."""
    prediction, truth = _checked(prediction, truth)
    space = _space(truth)
    p, y = (field - field.mean(space, keepdim=True) for field in (prediction, truth))
    scale = (p.square().sum(space) * y.square().sum(space)).sqrt()
    return torch.where(scale > 0, (p * y).sum(space) / scale.clamp(min=1e-300), 0.0).mean(-1)


def correlation_time(prediction: Tensor, truth: Tensor, *, t: Tensor, threshold: float = 0.8) -> Tensor:
    """Time until the correlation first falls below a threshold, per sample.

    Args:
        prediction: Shape (B, T, X..., C).
        truth: The same shape.
        t: Time of each step since the start of the prediction, shape (T,).
        threshold: Correlation.

    Returns:
        Shape (B,), float64; the last time where it never falls below.
    """
    return first_time_below(correlation(prediction, truth), t=t, threshold=threshold)


def first_time_below(correlation_BT: Tensor, *, t: Tensor, threshold: float) -> Tensor:
    """Time of the first step whose correlation is below a threshold, (B,); the last time if none is."""
    below = ~(correlation_BT >= threshold)
    first = torch.where(below.any(1), below.int().argmax(1), len(t) - 1)
    return t.double()[first]


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


def _checked(prediction: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    if prediction.shape != truth.shape:
        raise ShapeError("prediction", expected=tuple(truth.shape), found=tuple(prediction.shape))
    if truth.ndim < 4:
        raise ShapeError("fields", expected="(B, T, X..., C)", found=tuple(truth.shape))
    return prediction.double(), truth.double()

"""Errors of predicted fields by trajectory, time step and channel, and the metrics of reports that they make.

Functions take predictions p and truths y, both (B, T, X..., C) in physical units and float64. PDEBench's
metrics follow their definitions (Takamoto et al. 2022, arXiv:2210.07182, appendix B). A metric of one's own
is a function under `@register_metric`, named by `evaluation.metrics`. Letters: B trajectories, T time steps,
X the axes of the grid, C channels, K wave numbers or shells, N means over trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.config.after_training import own_name
from ups.distributed.ranks import Ranks
from ups.errors import ConfigError, ShapeError
from ups.eval.intervals import Values
from ups.eval.scores import Metric
from ups.registry import Registry

# Wave numbers (periods of the domain) of the bands of fRMSE: first included, last not.
BANDS = {"low": (0, 4), "mid": (4, 12), "high": (12, None)}
COMPAT_BATCH_SIZE = 50  # of PDEBench's own evaluation
# Of VRMSE, as in The Well (Ohana et al. 2024): fields without variance have a finite error.
_VARIANCE_EPS = 1e-7
_LEAST_CORRELATION = 0.8  # of a prediction that still follows the truth

Errors = dict[str, Tensor]  # of trajectories, by name: what `measure` gives


def measure(
    prediction: Tensor,
    truth: Tensor,
    *,
    given: Tensor | None = None,
    t: npt.NDArray[np.float64] | None = None,
    lengths: Sequence[float] | None = None,
) -> Errors:
    """Measure predicted trajectories; everything is float64, on the CPU.

    Args:
        prediction: Shape (B, T, X..., C), physical units, on any device.
        truth: The same shape.
        given: The state that the prediction started from, shape (B, X..., C), if it is one of the same kind
            as the truth; else the drift is counted from the first frame of the truth.
        t: Time of each step since the start of the prediction, shape (T,); by default they are counted.
        lengths: Length of the domain along each axis; 1 by default.

    Returns:
        (B, T, C): `rmse`, `nrmse`, `vrmse`, `brmse` (over the ends of the axes), `max_error` (in space),
        `mean_error` (p - y, over space), `drift` (of the mean, from that of the given state, over its root
        mean square), and where `undefined` the truth, `starts_at_zero` the given state is zero throughout.
        (B, T): `correlation`. (B,): `relative_l2`, `correlation_time`. (B, T, K, C): `shells`, |FFT(p - y)|^2
        by wave number, scaled so that its root is what fRMSE averages. In two and three dimensions
        `compat_brmse` and `compat_shells`, too.
    """
    if prediction.shape != truth.shape:
        raise ShapeError("prediction", expected=tuple(truth.shape), found=tuple(prediction.shape))
    if truth.ndim < 4:
        raise ShapeError("fields", expected="(B, T, X..., C)", found=tuple(truth.shape))
    prediction, truth = prediction.double().cpu(), truth.double().cpu()
    start = truth[:, :1] if given is None else given.double().cpu().unsqueeze(1)
    error, space, points = prediction - truth, tuple(range(2, truth.ndim - 1)), truth.shape[2:-1]
    scale = math.prod(lengths or [1.0] * len(points)) / math.prod(points)
    agreement = correlation(prediction, truth)
    # The time until it first falls below; the last one if it never does.
    times = torch.arange(1.0, truth.shape[1] + 1).double() if t is None else torch.from_numpy(t).double()
    below = ~(agreement >= _LEAST_CORRELATION)
    first = torch.where(below.any(1), below.int().argmax(1), len(times) - 1)
    errors = {
        "rmse": root_mean_square(error),
        "nrmse": nrmse_per_sample(prediction, truth),
        "vrmse": (error.square().mean(space) / (truth.var(space, correction=0) + _VARIANCE_EPS)).sqrt(),
        "brmse": brmse_per_sample(error),
        "max_error": error.abs().amax(space),
        "mean_error": error.mean(space),
        "drift": (prediction.mean(space) - start.mean(space)).abs() / root_mean_square(start),
        "shells": shell_energy(error) * scale**2,
        "relative_l2": error.flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1),
        "correlation": agreement,
        "correlation_time": times[first],
        "undefined": is_zero(truth),
        "starts_at_zero": is_zero(start).expand(-1, truth.shape[1], -1),
    }
    if len(points) > 1:
        errors["compat_brmse"] = brmse_per_sample(error, is_compat=True)
        errors["compat_shells"] = compat_shell_energy(error) * scale**2
    return errors


def join(parts: Sequence[Errors]) -> Errors:
    """Join the errors of batches to those of all trajectories."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# --- metrics of a report -------------------------------------------------------------------------------


def masked(values: Tensor, undefined: Tensor) -> npt.NDArray[np.float64]:
    """Numbers, masked where they aren't defined, if they are undefined anywhere."""
    array: npt.NDArray[np.float64] = values.numpy()
    return np.ma.MaskedArray(array, undefined.numpy()) if undefined.any() else array


def root_of_means(means: Values) -> Values:
    """Roots of means over trajectories, (N, T, ...), and their mean at every step, (N, T)."""
    return np.asarray(np.sqrt(means).reshape(*means.shape[:2], -1).mean(2))


def _band(first: int, last: int | None) -> Callable[[Errors], Tensor | None]:
    return lambda errors: errors["shells"][:, :, first:last] if errors["shells"].shape[2] > first else None


# What has a meaning where tokens are in the place of points, too.
LATENT_METRICS = (
    Metric("nrmse", lambda errors: masked(errors["nrmse"], errors["undefined"]), title="nRMSE"),
    Metric("vrmse", itemgetter("vrmse"), title="VRMSE"),
    Metric(
        "relative_l2",
        lambda errors: masked(errors["relative_l2"], errors["undefined"].flatten(1).all(1)),
        title="relative L2",
    ),
    Metric(
        "correlation_time",
        itemgetter("correlation_time"),
        better="more",
        title="time until correlation < 0.8",
    ),
    Metric("correlation", itemgetter("correlation"), over_steps=None, is_positive=False),
)
FIELD_METRICS = (
    *LATENT_METRICS,
    # What doesn't move doesn't drift, and nothing says how far the largest of all errors is from that of
    # others.
    Metric(
        "drift",
        lambda errors: masked(errors["drift"], errors["starts_at_zero"]),
        over_steps="last",
        better=None,
        title="drift of the mean at the end",
    ),
    Metric("rmse", itemgetter("rmse")),
    Metric("crmse", lambda errors: errors["mean_error"].square(), root_of_means),
    Metric("max_error", itemgetter("max_error"), over_steps="largest", better=None),
    Metric("brmse", itemgetter("brmse")),
    *(Metric(f"frmse_{name}", _band(*ends), root_of_means) for name, ends in BANDS.items()),
)


def pdebench(errors: Errors, *, is_compat: bool = False) -> Errors:
    """PDEBench's metrics over all trajectories, each (T, C); a band without wave numbers is NaN.

    frmse of a band is mean_K sqrt(mean_B |FFT(p) - FFT(y)|^2) / N * L; in two and three dimensions |.|^2 is
    summed over radial shells first, and N, the points, and L, the lengths, are products over the axes.
    """
    prefix = "compat_" if is_compat and "compat_shells" in errors else ""
    amplitude_KTC = errors[f"{prefix}shells"].mean(0).sqrt().movedim(1, 0)
    return {
        "rmse": errors["rmse"].mean(0),
        "nrmse": errors["nrmse"].mean(0),
        "crmse": errors["mean_error"].square().mean(0).sqrt(),
        "max_error": errors["max_error"].amax(0),
        "brmse": errors[f"{prefix}brmse"].mean(0),
        **{f"frmse_{name}": amplitude_KTC[slice(*ends)].mean(0) for name, ends in BANDS.items()},
    }


def pdebench_compat(errors: Errors, batch_size: int = COMPAT_BATCH_SIZE) -> dict[str, float]:
    """PDEBench's metrics as its own evaluation has them: values of batches, in order, then their mean.

    In two and three dimensions it counts edges and corners otherwise, see `brmse_per_sample`, and sums fewer
    wave vectors, see `compat_shell_energy`: with all of them frmse is larger, for white noise 1.6 to 2 times
    in two dimensions and 2 to 2.8 times in three. crmse, frmse and max_error depend on the batch size, and a
    last, smaller batch counts as much as the others.
    """
    parts = [
        pdebench(
            {name: values[first : first + batch_size] for name, values in errors.items()}, is_compat=True
        )
        for first in range(0, len(errors["rmse"]), batch_size)
    ]
    means = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    return summary(means)


def summary(errors: Errors) -> dict[str, float]:
    """Means over time steps and channels, as plain numbers (`max_error`: the maximum)."""
    return {
        name: (error.max() if name == "max_error" else error.mean()).item() for name, error in errors.items()
    }


# --- metrics of one's own --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MetricContext:
    """What a metric of one's own is told besides predicted and true fields.

    Attributes:
        task: Name of the task.
        channels: Names of the channels.
        given: The state that predictions start from, physical units, shape (B, X..., C).
        parameters: Of the equation by name, each (B,).
        t: Time of each predicted frame since the given one, shape (T,).
        lengths: Of the domain along each axis.
    """

    task: str
    channels: Sequence[str]
    given: Tensor
    parameters: Mapping[str, Tensor]
    t: npt.NDArray[np.float64]
    lengths: Sequence[float]


OwnMetric = Callable[[Tensor, Tensor, MetricContext], Tensor]

# Decorates a metric of one's own, `@register_metric("peak")`, which reports have if `evaluation.metrics`
# names it. It is called with predicted and true fields, float64, (B, T, X..., C) in physical units, and a
# `MetricContext`, and returns numbers (B,), (B, T) or (B, T, C); a report has their mean. Less is better,
# unless the function has an attribute `better` that is "more", or None.
register_metric: Registry[OwnMetric] = Registry("metric", key="evaluation.metrics")


def own_metrics(names: Sequence[str]) -> dict[str, OwnMetric]:
    """Find metrics of one's own by their names in a report, importing the modules that they are in.

    Args:
        names: As `evaluation.metrics` says them: registered names, or module:function. Those that every
            report has are passed over.
    """
    common = {metric.name for metric in FIELD_METRICS}
    functions: dict[str, OwnMetric] = {}
    for entry in names:
        if entry in common:
            continue
        name = own_name(entry)
        if name in functions or name in common:
            raise ConfigError(
                f"evaluation.metrics = {entry}",
                kind="metric_name",
                expected="another name than that of any other metric",
                found=name,
            )
        functions[name] = register_metric.find(entry)
    return functions


def measure_own(
    own: Mapping[str, OwnMetric], prediction: Tensor, truth: Tensor, context: MetricContext
) -> Errors:
    """Measure a batch by metrics of one's own."""
    prediction, truth = prediction.double().cpu(), truth.double().cpu()
    num, steps, channels = len(truth), truth.shape[1], truth.shape[-1]
    errors = {}
    for name, function in own.items():
        values = torch.as_tensor(function(prediction, truth, context)).double()
        if tuple(values.shape) not in {(num,), (num, steps), (num, steps, channels)}:
            expected = f"({num},), ({num}, {steps}) or ({num}, {steps}, {channels})"
            raise ShapeError(f"metric {name}", expected=expected, found=tuple(values.shape))
        errors[f"own/{name}"] = values
    return errors


def as_metric(name: str, function: OwnMetric) -> Metric:
    """A metric of one's own as a column of a report."""
    return Metric(
        name,
        itemgetter(f"own/{name}"),
        better=getattr(function, "better", "less"),
        title=name,
        is_positive=False,
    )


# --- errors that are defined, by several ranks -----------------------------------------------------------


class DefinedErrors:
    """nRMSE of frames and channels whose truth isn't zero throughout, measured by several ranks.

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
        errors, are_defined = (
            ranks.joined(items, torch.cat(parts)) for parts in (self._errors, self._defined)
        )
        return errors, are_defined


def mean_of_defined(errors: Tensor, *, task: str, channels: Sequence[str]) -> float:
    """Average errors that are defined."""
    if not len(errors):
        raise ConfigError(
            f"the true frames of {task} are zero throughout, so there is no relative error",
            kind="zero_truth",
            expected=f"another value in channel {' or '.join(channels)}",
            hint="look into the validation samples, or take others with data.split_fractions",
        )
    return errors.mean().item()


# --- formulas ------------------------------------------------------------------------------------------


def root_mean_square(field_BTXC: Tensor) -> Tensor:
    """sqrt(mean_X field^2), shape (B, T, C)."""
    return field_BTXC.square().mean(tuple(range(2, field_BTXC.ndim - 1))).sqrt()


def nrmse_per_sample(prediction: Tensor, truth: Tensor) -> Tensor:
    """sqrt(mean_X (p - y)^2) / sqrt(mean_X y^2), shape (B, T, C); infinite or NaN where the truth is zero."""
    return root_mean_square(prediction - truth) / root_mean_square(truth)


def is_zero(truth: Tensor) -> Tensor:
    """Tell where the truth is zero throughout, so that no relative error is defined, shape (B, T, C)."""
    return root_mean_square(truth) == 0


def brmse_per_sample(error: Tensor, *, is_compat: bool = False) -> Tensor:
    """Root mean square over the points at the ends of the axes, shape (B, T, C).

    Each point counts once; `is_compat` counts those on edges and corners once for every axis that ends there,
    as PDEBench does.
    """
    points = error.shape[2:-1]
    num_ends = torch.zeros(points, dtype=torch.int64, device=error.device)
    for axis, length in enumerate(points):
        for end in {0, length - 1}:
            num_ends.select(axis, end).add_(1)
    at_end = num_ends.flatten() > 0
    square = error.flatten(2, -2)[:, :, at_end].square()
    if not is_compat:
        return square.mean(2).sqrt()
    weight = num_ends.flatten()[at_end, None]
    return ((square * weight).sum(2) / weight.sum()).sqrt()


def correlation(prediction: Tensor, truth: Tensor) -> Tensor:
    """Pearson correlation over space, averaged over channels, shape (B, T); 0 where one has no variance."""
    space = tuple(range(2, truth.ndim - 1))
    p, y = (field - field.mean(space, keepdim=True) for field in (prediction, truth))
    scale = (p.square().sum(space) * y.square().sum(space)).sqrt()
    return torch.where(scale > 0, (p * y).sum(space) / scale.clamp(min=1e-300), 0.0).mean(-1)


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

"""Metrics of a report: what each is made of, and its number with an interval for every row.

What was measured of a row is one table of numbers by training seed, trajectory and time step (and by channel,
wave number, ... where a metric needs them). A metric says which numbers it takes and what it makes of their
means over trajectories. So one bootstrap (`ups.eval.intervals`) draws the trajectories of all rows and
metrics alike, and every row is compared with the first one in pairs.

Letters: B trajectories, T time steps, N means over trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ups.eval.intervals import Interval, Paired, Resampled, Resamples, Values, compare

OverSteps = Literal["mean", "pooled", "last", "largest"]


@dataclass(frozen=True)
class Metric:
    """A column of a report.

    Attributes:
        name: In reports, configurations and gates.
        numbers: Takes what was measured of a row with one training seed, and gives numbers (B, T, ...), or
            (B,) where there are none by time step; masked numbers are left out of means. None leaves the
            metric out.
        statistic: Maps means over trajectories, (N, T, ...), to (N, T); without one the metric is their mean.
        over_steps: How time steps become one number. "mean": of the steps' values, "pooled": the statistic of
            means over the steps, too, "last": that of the last step, "largest": of all trajectories, which
            has no interval, as a bootstrap says nothing about a maximum (Bickel and Freedman 1981). None: by
            step alone.
        better: What is better, "less" or "more"; None if neither is, so that no row is ahead.
        title: Of its column in the first table of a report; metrics without one stand in a table of their
            own.
        is_positive: Whether it can't be negative, as errors are.
    """

    name: str
    numbers: Callable[[Any], Tensor | npt.NDArray[Any] | None]
    statistic: Callable[[Values], Values] | None = None
    over_steps: OverSteps | None = "mean"
    better: Literal["less", "more"] | None = "less"
    title: str | None = None
    is_positive: bool = True


@dataclass(frozen=True)
class Scores:
    """The metrics of one row.

    Attributes:
        metrics: Over all predicted time steps and channels, by name.
        by_step: The same by time step, each of length T.
        by_seed: The metrics of each training seed.
        pdebench_compat: PDEBench's metrics as its own evaluation averages them, in batches of 50.
        resampled: The metrics in every resample, for `paired`.
        about: What the metrics are, as far as they are more than names of errors.
    """

    metrics: Mapping[str, Interval]
    by_step: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    by_seed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pdebench_compat: Mapping[str, float] = field(default_factory=dict)
    resampled: Mapping[str, Resampled] = field(default_factory=dict, repr=False, compare=False)
    about: Mapping[str, Metric] = field(default_factory=dict, repr=False, compare=False)

    def better(self, name: str) -> Literal["less", "more"] | None:
        """What is better of a metric."""
        return self.about[name].better if name in self.about else "less"

    def paired(self, first: Scores) -> dict[str, Paired]:
        """Compare this row with the table's first one, by metric; both from the same `Resamples`."""
        return {
            name: compare(mine, first.resampled[name], is_more_better=self.better(name) == "more")
            for name, mine in self.resampled.items()
            if name in first.resampled and self.better(name) is not None
        }


def score(
    measured: Sequence[Any], metrics: Sequence[Metric], *, resamples: Resamples, row: str = ""
) -> Scores:
    """Turn what was measured of a row into metrics with 95 % intervals; each is the mean over its seeds.

    Args:
        measured: Of all trajectories of the split, by training seed.
        metrics: In the order of the report.
        resamples: Of the split; all rows of a table share them.
        row: Name of the row, whose seeds are drawn by themselves; not needed for one seed.
    """
    overall: dict[str, Interval] = {}
    by_step: dict[str, list[Interval]] = {}
    resampled: dict[str, Resampled] = {}
    for metric in metrics:
        numbers = [metric.numbers(one) for one in measured]
        if numbers[0] is None:
            continue
        values: list[Any] = [one.numpy() if isinstance(one, Tensor) else one for one in numbers]
        if metric.over_steps == "largest":
            overall[metric.name] = Interval(float(np.mean([one.max() for one in values])))
            continue
        steps, whole = _resampled(metric, measured, values, resamples, row)
        if steps is not None:
            by_step[metric.name] = steps.intervals(is_positive=metric.is_positive)
        if whole is not None:
            resampled[metric.name] = whole
            overall[metric.name] = whole.interval(is_positive=metric.is_positive)
    by_seed = {name: [value.mean] for name, value in overall.items()}
    if len(measured) > 1:
        nothing = Resamples(len(values[0]), num_resamples=0)
        alone = [score([one], metrics, resamples=nothing).metrics for one in measured]
        by_seed = {name: [each[name].mean for each in alone] for name in overall}
    about = {metric.name: metric for metric in metrics}
    return Scores(overall, by_step, by_seed, {}, resampled, about)


def _resampled(
    metric: Metric, measured: Sequence[Any], values: Sequence[Any], resamples: Resamples, row: str
) -> tuple[Resampled | None, Resampled | None]:
    """A metric by time step, T numbers, and over all of them, one."""
    draw = partial(resamples.of, row=row)
    if values[0].ndim == 1:
        return None, draw([one[:, None] for one in values])
    if metric.statistic is None:
        steps = draw([mean_from(one, 2) for one in values])
        whole = draw([mean_from(one, 1)[:, None] for one in values])
    else:
        steps = draw([_flat(one) for one in values], _of_means(metric.statistic, values[0].shape[1:]))
        whole = steps.mean()
        if metric.over_steps == "pooled":
            pooled = [np.asarray(metric.numbers(one.pooled())) for one in measured]
            whole = draw([_flat(one) for one in pooled], _of_means(metric.statistic, pooled[0].shape[1:]))
    if metric.over_steps == "last":
        whole = steps.columns(slice(-1, None))
    return steps, None if metric.over_steps is None else whole


def _of_means(statistic: Callable[[Values], Values], shape: tuple[int, ...]) -> Callable[[Values], Values]:
    """The statistic of means that lie flat, (N, F) for (N, *shape)."""
    return lambda means_NF: statistic(means_NF.reshape(len(means_NF), *shape))


def _flat(values: Any) -> Any:
    return values.reshape(len(values), -1)


def mean_from(values: Any, first: int) -> Any:
    """Mean over all axes from `first` on, of what isn't masked; masked where nothing is left."""
    axes = tuple(range(first, values.ndim))
    if not axes or not np.ma.isMaskedArray(values):
        return values.mean(axis=axes) if axes else values
    # A masked array's own mean would mask a prediction's NaN, too.
    num = (~np.ma.getmaskarray(values)).sum(axis=axes)
    return np.ma.MaskedArray(np.ma.filled(values, 0.0).sum(axis=axes) / np.maximum(num, 1), num == 0)

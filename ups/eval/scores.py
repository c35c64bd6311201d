"""Numbers of a row: every metric with its interval, over the whole rollout and by time step.

Letters: B trajectories, T time steps, C channels, N means over trajectories, F numbers of each mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ups.eval import metrics
from ups.eval.intervals import Interval, Paired, Resampled, Resamples, Values, compare
from ups.eval.trajectory_errors import TrajectoryErrors

# PDEBench's own evaluation takes batches of 50.
COMPAT_BATCH_SIZE = 50
# What has a meaning where tokens are in the place of points.
LATENT_METRICS = ("nrmse", "vrmse", "relative_l2", "correlation", "correlation_time")
MORE_IS_BETTER = frozenset({"correlation_time"})
# What doesn't move doesn't drift; and nothing says how far the largest of all errors is from that of others.
# Spread isn't good by itself, and the energy of a band is best where it is the truth's.
NO_CONTEST = frozenset({"drift", "max_error", "spread", "spread_skill", "band_low", "band_mid", "band_high"})
_PER_STEP = ("nrmse", "vrmse", "rmse", "brmse")  # of every trajectory, time step and channel a number
_ORDER = (
    *("nrmse", "vrmse", "relative_l2", "correlation_time", "drift"),
    *("rmse", "crmse", "max_error", "brmse", "frmse_low", "frmse_mid", "frmse_high"),
)


@dataclass(frozen=True)
class Scores:
    """Errors of one model or baseline.

    Attributes:
        metrics: Over all predicted time steps and channels, by name.
        by_step: The same by time step, each of length T.
        by_seed: The metrics of each training seed.
        pdebench_compat: PDEBench's metrics as its own evaluation averages them, in batches of 50.
        resampled: The metrics in every resample, for `paired`; not of `max_error`.
    """

    metrics: Mapping[str, Interval]
    by_step: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    by_seed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pdebench_compat: Mapping[str, float] = field(default_factory=dict)
    resampled: Mapping[str, Resampled] = field(default_factory=dict, repr=False, compare=False)

    def of(self, names: Collection[str]) -> Scores:
        """Some of the metrics, without those that PDEBench averages."""
        return Scores(
            metrics={name: value for name, value in self.metrics.items() if name in names},
            by_step={name: steps for name, steps in self.by_step.items() if name in names},
            by_seed={name: values for name, values in self.by_seed.items() if name in names},
            resampled={name: value for name, value in self.resampled.items() if name in names},
        )

    def paired(self, first: Scores) -> dict[str, Paired]:
        """This row beside the table's first one, by metric; both from the same `Resamples`."""
        return {
            name: compare(mine, first.resampled[name], is_more_better=name in MORE_IS_BETTER)
            for name, mine in self.resampled.items()
            if name in first.resampled and name not in NO_CONTEST
        }


def score(errors: Sequence[TrajectoryErrors], *, t: Tensor, resamples: Resamples, row: str = "") -> Scores:
    """Turn errors of trajectories into numbers with 95 % intervals.

    Args:
        errors: Of all trajectories of the split, by training seed.
        t: Time of each predicted frame since the given one, shape (T,).
        resamples: Of the split; all rows of a table share them.
        row: Name of the row; not needed for one seed.

    Returns:
        Metrics `nrmse`, `vrmse`, `relative_l2`, `correlation_time`, `drift` (of the last step), `rmse`,
        `crmse`, `max_error`, `brmse`, `frmse_low`, `frmse_mid`, `frmse_high`; no band without wave numbers.
        Each is the mean of its values for the seeds.
    """
    overall = _means(errors, t, resamples, row)
    by_step = _means_by_step(errors, resamples, row)
    roots = _roots(errors, resamples, row)
    resampled = overall | {name: steps.mean() for name, steps in roots.items()}
    drift = by_step["drift"].intervals(is_positive=True)[-1]
    # Of a largest value a bootstrap says nothing (Bickel and Freedman 1981), so it has no interval.
    largest = Interval(float(np.mean([each.max_error.max().item() for each in errors])))
    found = {name: value.interval(is_positive=True) for name, value in resampled.items()}
    found |= {"drift": drift, "max_error": largest}
    return Scores(
        metrics={name: found[name] for name in _ORDER if name in found},
        by_step={
            name: steps.intervals(is_positive=name != "correlation")
            for name, steps in (by_step | roots).items()
        },
        by_seed=_by_seed(errors, t, found),
        pdebench_compat=_compat(errors, found),
        resampled=resampled,
    )


def _means(
    errors: Sequence[TrajectoryErrors], t: Tensor, resamples: Resamples, row: str
) -> dict[str, Resampled]:
    """The metrics that are means over trajectories, of one number each."""
    numbers = {name: [each.means(name, 1, 2) for each in errors] for name in _PER_STEP}
    numbers["relative_l2"] = [
        metrics.means_of_defined(each.relative_l2[:, None], each.undefined.all(2).all(1)[:, None], 1)
        for each in errors
    ]
    numbers["correlation_time"] = [each.correlation_time(t).numpy() for each in errors]
    return {
        name: resamples.of([values_B[:, None] for values_B in by_seed], row=row)
        for name, by_seed in numbers.items()
    }


def _means_by_step(
    errors: Sequence[TrajectoryErrors], resamples: Resamples, row: str
) -> dict[str, Resampled]:
    """The same by time step, and what is only of time steps: numbers (T,)."""
    steps = {name: [each.means(name, 2) for each in errors] for name in (*_PER_STEP, "drift")}
    steps["correlation"] = [each.correlation.numpy() for each in errors]
    return {name: resamples.of(values, row=row) for name, values in steps.items()}


def _roots(errors: Sequence[TrajectoryErrors], resamples: Resamples, row: str) -> dict[str, Resampled]:
    """The metrics whose mean over trajectories stands inside a square root, by time step (T,)."""
    num_steps, num_wave_numbers = errors[0].shells.shape[1:3]
    bands = {name: ends for name, ends in metrics.BANDS.items() if ends[0] < num_wave_numbers}

    def of_squares(square_NF: Values) -> Values:
        return np.sqrt(square_NF.reshape(len(square_NF), num_steps, -1)).mean(2)

    def of_shells(energy_NF: Values) -> Values:
        amplitude = np.sqrt(energy_NF.reshape(len(energy_NF), num_steps, num_wave_numbers, -1))
        return np.concatenate([amplitude[:, :, slice(*ends)].mean((2, 3)) for ends in bands.values()], axis=1)

    squares = [each.mean_error.square().flatten(1).numpy() for each in errors]
    shells = [each.shells.flatten(1).numpy() for each in errors]
    found = {"crmse": resamples.of(squares, of_squares, row=row)}
    all_bands = resamples.of(shells, of_shells, row=row)
    for number, name in enumerate(bands):
        columns = slice(number * num_steps, (number + 1) * num_steps)
        found[f"frmse_{name}"] = all_bands.columns(columns)
    return found


def _by_seed(
    errors: Sequence[TrajectoryErrors], t: Tensor, found: Mapping[str, Interval]
) -> dict[str, list[float]]:
    """Each metric of each seed alone."""
    if len(errors) == 1:
        return {name: [value.mean] for name, value in found.items()}
    nothing = Resamples(len(errors[0]), num_resamples=0)
    alone = [score([each], t=t, resamples=nothing).metrics for each in errors]
    return {name: [metrics[name].mean for metrics in alone] for name in found}


def _compat(errors: Sequence[TrajectoryErrors], found: Mapping[str, Interval]) -> dict[str, float]:
    """PDEBench's averages, mean over seeds."""
    each = [metrics.summary(one.pdebench_compat(COMPAT_BATCH_SIZE)) for one in errors]
    return {name: float(np.mean([values[name] for values in each])) for name in each[0] if name in found}

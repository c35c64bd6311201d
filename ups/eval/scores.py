"""The numbers of one row: every metric with its interval, over the whole rollout and by time step.

Letters: B trajectories, T time steps, K wave numbers, C channels, R resamples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ups.eval import metrics
from ups.eval.intervals import Interval, Resamples
from ups.eval.trajectory_errors import TrajectoryErrors

# PDEBench's own evaluation takes batches of 50.
COMPAT_BATCH_SIZE = 50
# What has a meaning where tokens are in the place of points.
LATENT_METRICS = ("nrmse", "vrmse", "relative_l2", "correlation", "correlation_time")

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Errors of one model or baseline.

    Attributes:
        metrics: Over all predicted time steps and channels, by name.
        by_step: The same by time step, each of length T.
        pdebench_compat: PDEBench's metrics as its own evaluation averages them, in batches of 50.
    """

    metrics: Mapping[str, Interval]
    by_step: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    pdebench_compat: Mapping[str, float] = field(default_factory=dict)

    def of(self, names: Collection[str]) -> Scores:
        """Some of the metrics, without those that PDEBench averages."""
        metrics = {name: value for name, value in self.metrics.items() if name in names}
        return Scores(metrics, {name: steps for name, steps in self.by_step.items() if name in names})


def score(errors: TrajectoryErrors, *, t: Tensor, seed: int = 0) -> Scores:
    """Turn errors of trajectories into numbers with 95 % intervals.

    Args:
        errors: Of all trajectories of the split.
        t: Time of each predicted frame since the given one, shape (T,).
        seed: Of the resampling; rows of one table share it, so they are resampled alike.

    Returns:
        Metrics `nrmse`, `vrmse`, `relative_l2`, `correlation_time`, `drift` (of the last step), `rmse`,
        `crmse`, `max_error`, `brmse`, `frmse_low`, `frmse_mid`, `frmse_high`; no band without wave numbers.
    """
    resamples = Resamples(len(errors), seed=seed)
    means = {"nrmse": errors.nrmse, "vrmse": errors.vrmse, "rmse": errors.rmse, "brmse": errors.brmse}
    by_step = {name: resamples.of_means(value.mean(2).numpy()) for name, value in means.items()}
    by_step["drift"] = resamples.of_means(errors.drift.mean(2).numpy())
    by_step["correlation"] = resamples.of_means(errors.correlation.numpy())
    of_roots = _of_roots(errors, resamples)
    found = {
        **{name: resamples.of_mean(value.flatten(1).mean(1).numpy()) for name, value in means.items()},
        "relative_l2": resamples.of_mean(errors.relative_l2.numpy()),
        "correlation_time": resamples.of_mean(errors.correlation_time(t).numpy()),
        "drift": by_step["drift"][-1],
        "max_error": resamples.of_maximum(errors.max_error.flatten(1).amax(1).numpy()),
        **{name: _overall(steps, resamples) for name, steps in of_roots.items()},
    }
    for name, steps in of_roots.items():
        by_step[name] = [resamples.interval(float(value), resampled) for value, resampled in steps]
    compat = metrics.summary(errors.pdebench_compat(COMPAT_BATCH_SIZE))
    return Scores(
        metrics={name: found[name] for name in _ORDER if name in found},
        by_step=by_step,
        pdebench_compat={name: value for name, value in compat.items() if name in found},
    )


_ORDER = (
    *("nrmse", "vrmse", "relative_l2", "correlation_time", "drift"),
    *("rmse", "crmse", "max_error", "brmse", "frmse_low", "frmse_mid", "frmse_high"),
)

_Steps = list[tuple[float, Values]]  # of each time step: the statistic, and its values in every resample (R,)


def _of_roots(errors: TrajectoryErrors, resamples: Resamples) -> dict[str, _Steps]:
    """The metrics whose mean over trajectories stands inside a square root."""
    num_wave_numbers = errors.shells.shape[2]
    bands = {name: ends for name, ends in metrics.BANDS.items() if ends[0] < num_wave_numbers}
    exact = errors.pdebench()
    steps: dict[str, _Steps] = {name: [] for name in ("crmse", *(f"frmse_{band}" for band in bands))}
    for step in range(errors.rmse.shape[1]):  # one by one: all resamples of all shells may not fit
        square_BC = errors.mean_error[:, step].square().numpy()
        resampled = np.sqrt(resamples.means(square_BC)).mean(1)
        steps["crmse"].append((exact["crmse"][step].mean().item(), resampled))
        shells_BKC = errors.shells[:, step].numpy()
        roots = np.sqrt(resamples.means(shells_BKC.reshape(len(errors), -1)))
        amplitude_RKC = roots.reshape(-1, *shells_BKC.shape[1:])
        for band, ends in bands.items():
            value = exact[f"frmse_{band}"][step].mean().item()
            steps[f"frmse_{band}"].append((value, amplitude_RKC[:, slice(*ends)].mean((1, 2))))
    return steps


def _overall(steps: _Steps, resamples: Resamples) -> Interval:
    values, resampled = zip(*steps, strict=True)
    return resamples.interval(float(np.mean(values)), np.mean(resampled, axis=0))

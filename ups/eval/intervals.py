"""Confidence intervals over trajectories, by the bootstrap.

Trajectories are drawn with replacement and their time steps stay together; ends are percentiles of the
resampled statistic (Efron 1979). Letters: B trajectories, F numbers of each, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A statistic and where it lies with the given confidence.

    Attributes:
        mean: Mean over the trajectories, or another statistic of them.
        low: Lower end.
        high: Upper end.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


class Resamples:
    """Which trajectories each resample draws, the same for all statistics of a split.

    Args:
        num_trajectories: B > 0.
        num_resamples: R.
        seed: The same gives the same intervals.
        confidence: Share of the resampled statistics that lie inside.
    """

    def __init__(
        self,
        num_trajectories: int,
        *,
        num_resamples: int = NUM_RESAMPLES,
        seed: int = 0,
        confidence: float = CONFIDENCE,
    ) -> None:
        shares = np.full(num_trajectories, 1 / num_trajectories)
        drawn = np.random.default_rng(seed).multinomial(num_trajectories, shares, size=num_resamples)
        self._weights_RB = drawn / num_trajectories
        tail = (1 - confidence) / 2
        self._tails = (tail, 1 - tail)

    def means(self, values_BF: npt.ArrayLike) -> Values:
        """Means of every resample, shape (R, F); NaN where a trajectory's number isn't finite."""
        values = np.asarray(values_BF, np.float64)
        with np.errstate(invalid="ignore"):
            return np.asarray(self._weights_RB @ values)

    def interval(self, statistic: float, resampled_R: Values) -> Interval:
        """The interval of a statistic by its values in every resample, shape (R,)."""
        with np.errstate(invalid="ignore"):
            low, high = np.quantile(resampled_R, self._tails)
        return Interval(float(statistic), float(low), float(high))

    def of_mean(self, values_B: npt.ArrayLike) -> Interval:
        """Interval of the mean of one number a trajectory, shape (B,)."""
        values = np.asarray(values_B, np.float64)
        return self.interval(float(values.mean()), self.means(values[:, None])[:, 0])

    def of_means(self, values_BF: npt.ArrayLike) -> list[Interval]:
        """Interval of each column's mean."""
        values = np.asarray(values_BF, np.float64)
        columns = self.means(values).T
        return [self.interval(mean, column) for mean, column in zip(values.mean(0), columns, strict=True)]

    def of_maximum(self, values_B: npt.ArrayLike) -> Interval:
        """Of the largest value; resamples never find a larger one, so the high end is the value itself."""
        values = np.asarray(values_B, np.float64)
        drawn = np.where(self._weights_RB > 0, values, -np.inf)
        return self.interval(float(values.max()), drawn.max(axis=1))


def bootstrap(
    values: npt.ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Interval of a mean: one number a trajectory, shape (B,), B > 0; NaN throughout if a value is."""
    numbers = np.asarray(values, np.float64)
    resamples = Resamples(len(numbers), num_resamples=num_resamples, seed=seed, confidence=confidence)
    return resamples.of_mean(numbers)

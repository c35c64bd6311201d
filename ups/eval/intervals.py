"""Confidence intervals of a mean over trajectories, by the bootstrap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A mean and where it lies with the given confidence.

    Attributes:
        mean: Mean over the trajectories.
        low: Lower end.
        high: Upper end.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def bootstrap(
    values: npt.ArrayLike, *, confidence: float = 0.95, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile bootstrap of the mean: trajectories are drawn with replacement, time steps stay together.

    Args:
        values: One number a trajectory, shape (B,), B > 0.
        confidence: Share of resampled means that lie inside.
        num_resamples: How often trajectories are drawn.
        seed: The same gives the same interval.
    Returns:
        The interval; NaN throughout if a value is.
    Source: Efron 1979.
    """
    numbers = np.asarray(values, np.float64)
    random = np.random.default_rng(seed)
    drawn = random.integers(0, len(numbers), (num_resamples, len(numbers)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(numbers[drawn].mean(axis=1), [tail, 1 - tail])
    return Interval(float(numbers.mean()), float(low), float(high))

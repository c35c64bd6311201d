"""Normalisation statistics: mean and standard deviation per array and channel, of the training split only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ups.data.fields import FIELDS, Fields
from ups.errors import ConfigError

_FRAMES_AT_ONCE = 256
# A channel that doesn't vary is only shifted.
_LEAST_STD = 1e-12


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each channel of one array, over samples, time steps and points."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to_json(self) -> dict[str, list[float]]:
        """JSON values, for `Statistics(**values)`."""
        return {"mean": list(self.mean), "std": list(self.std)}


def measure_statistics(fields: Fields) -> dict[str, Statistics]:
    """Measure the statistics of every array; call it with the training split, never another.

    Returns:
        By name of the array.

    Raises:
        ConfigError: Kind "not_finite", if the fields hold NaN or infinity.
    """
    return {array: _measure(fields, array) for array in fields.info.grid.arrays}


def _measure(fields: Fields, array: str) -> Statistics:
    samples, steps = frame_items(fields, array)
    total = square = np.zeros(())
    num_values = 0
    # Sums of differences from a value of the data: exact enough however far the mean is from zero.
    origin = fields.read(array, samples[:1], steps[:1]).reshape(-1, dict(fields.info.grid.channels)[array])
    shift_C = origin.astype(np.float64).mean(0)
    for first in range(0, len(samples), _FRAMES_AT_ONCE):
        some = slice(first, first + _FRAMES_AT_ONCE)
        values = fields.read(array, samples[some], steps[some]).astype(np.float64) - shift_C
        over = tuple(range(values.ndim - 1))
        total = total + values.sum(over)
        square = square + (values * values).sum(over)
        num_values += values[..., 0].size
    mean_C = total / num_values
    std_C = np.sqrt(np.maximum(square / num_values - mean_C**2, 0.0))
    if not np.isfinite(std_C).all():
        raise ConfigError(
            f"the statistics of {array!r} of {fields.info.task} aren't finite",
            kind="not_finite",
            hint="data.on_nan=fail names the sample",
        )
    std_C = np.where(std_C > _LEAST_STD, std_C, 1.0)
    return Statistics(tuple((mean_C + shift_C).tolist()), tuple(std_C.tolist()))


def frame_items(fields: Fields, array: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All frames of an array in order: their samples and time steps; a constant field has one a sample."""
    counts = fields.num_steps if array == FIELDS else np.ones_like(fields.num_steps)
    samples = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return samples, np.arange(len(samples)) - first

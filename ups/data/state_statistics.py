"""Normalisation statistics of an operator's states, by channel, of the training split only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ups.data.fields import FIELDS
from ups.data.normalize import Statistics
from ups.data.task_windows import TaskWindows
from ups.errors import ConfigError

_MAX_NBYTES = 256 << 20  # of states that are looked at, in float32: trajectories evenly spread over the split
_BATCH_NBYTES = 16 << 20
INPUT = "input"  # key of a steady task's input
_LEAST_STD = 1e-6  # a channel that doesn't vary is only shifted


def measure_state_statistics(windows: TaskWindows) -> dict[str, Statistics]:
    """Mean and standard deviation of every channel of a task's states.

    Returns:
        For the states themselves under "fields", for a steady task's input under `INPUT`.

    Raises:
        ConfigError: Kind "not_finite", if the store holds NaN or infinity.
    """
    arrays = {FIELDS: windows.state}
    if windows.input_array is not None:
        arrays[INPUT] = windows.input_array
    return {key: _measure(windows, name) for key, name in arrays.items()}


def _measure(windows: TaskWindows, name: str) -> Statistics:
    shape = windows.store.arrays[name].shape[1:]
    nbytes = 4 * int(np.prod(shape))
    num = max(1, min(windows.num_samples, _MAX_NBYTES // nbytes))
    samples = ((np.arange(num) + 0.5) * windows.num_samples / num).astype(np.int64)
    size = max(1, _BATCH_NBYTES // nbytes)
    total = square = np.zeros(())
    count = 0
    for first in range(0, num, size):
        values_NC = _values(windows, name, samples[first : first + size])
        total, square = total + values_NC.sum(0), square + np.square(values_NC).sum(0)
        count += len(values_NC)
    mean_C = total / max(1, count)
    std_C = np.sqrt(np.maximum(square / max(1, count) - np.square(mean_C), 0.0))
    if not np.isfinite(std_C).all():
        raise ConfigError(
            f"the statistics of {name!r} aren't finite", kind="not_finite", path=windows.store.path
        )
    std_C = np.where(std_C > _LEAST_STD, std_C, 1.0)
    return Statistics(tuple(mean_C.tolist()), tuple(std_C.tolist()))


def _values(windows: TaskWindows, name: str, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """All states of samples as rows, shape (values, C); frames that aren't valid are left out."""
    values = windows.store.gather(samples, [name])[name].astype(np.float64)
    channels = windows.store.arrays[windows.state].shape[-1]
    if name == windows.state:
        values = values[windows.valid_frames(samples)]
    return values.reshape(-1, channels)

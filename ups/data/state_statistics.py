"""Normalisation statistics of an operator's states, by channel, of the training split only."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ups.data.batching import evenly_spread
from ups.data.field_statistics import LEAST_STD, Statistics, channel_statistics
from ups.data.task_windows import TaskWindows
from ups.errors import ConfigError
from ups.grid import FIELDS, LATENT

_MAX_NBYTES = 256 << 20  # of states that are looked at, in float32: trajectories evenly spread over the split
_BATCH_NBYTES = 16 << 20
INPUT = "input"  # key of a steady task's input
LEAST_STD_OF_LATENTS = 1e-6  # they are of order 1, and computed in float32


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
    return {key: _measure_states(windows, name) for key, name in arrays.items()}


def _measure_states(windows: TaskWindows, name: str) -> Statistics:
    shape = windows.store.arrays[name].shape[1:]
    nbytes = 4 * int(np.prod(shape))
    samples = evenly_spread(windows.num_samples, max(1, _MAX_NBYTES // nbytes))
    size = max(1, _BATCH_NBYTES // nbytes)
    found = channel_statistics(
        (_values(windows, name, samples[first : first + size]) for first in range(0, len(samples), size)),
        least_std=LEAST_STD_OF_LATENTS if windows.state == LATENT else LEAST_STD,
    )
    if not np.isfinite(found.std).all():
        bad = np.flatnonzero(~np.isfinite(found.std))
        raise ConfigError(
            f"the statistics of {name!r} aren't finite",
            kind="not_finite",
            path=windows.store.path,
            found=f"NaN or infinity in channel {', '.join(map(str, bad))} of {len(found.std)}",
            hint="mend what it was made from and build it again; data.on_nan=fail refuses such samples",
        )
    return found


def _values(windows: TaskWindows, name: str, samples: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """All states of samples, shape (states, points, C); frames that aren't valid are left out."""
    values = windows.store.gather(samples, [name])[name]
    *points, channels = windows.store.arrays[windows.state].shape[2:]
    if name == windows.state:
        values = values[windows.valid_frames(samples)]
    return values.reshape(-1, int(np.prod(points)), channels)

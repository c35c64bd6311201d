"""Normalisation statistics: mean and standard deviation per array and channel, of the training split only.

Normalisation statistics of an operator's states, by channel, of the training split only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.data.fields import Fields, evenly_spread
from ups.data.windows import EncodedWindows, Windows
from ups.errors import ConfigError
from ups.grid import FIELDS, LATENT

_FRAMES_AT_ONCE = 256

LEAST_STD = 1e-12  # a channel that doesn't vary is only shifted


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
    """
    return {array: _measure_fields(fields, array) for array in fields.info.grid.arrays}


def channel_statistics(
    batches: Iterable[npt.NDArray[Any]], *, least_std: float = LEAST_STD, constant_std: float = 1.0
) -> Statistics:
    """Mean and standard deviation of every channel.

    Args:
        batches: The values in batches (..., C), not all empty.
        least_std: A channel that varies less doesn't vary; times its values where those are above 1.
        constant_std: Given as the deviation of such a channel.
    Returns:
        Of every channel; NaN where values aren't finite.
    """
    shift_C: npt.NDArray[np.float64] | None = None
    total = square = np.zeros(())
    num_values = 0
    for batch in batches:
        if not batch.size:
            continue
        if shift_C is None:
            # Sums of differences from a value of the data: exact enough however far the mean is from zero.
            shift_C = batch[0].reshape(-1, batch.shape[-1]).astype(np.float64).mean(0)
        values = batch.astype(np.float64) - shift_C
        over = tuple(range(values.ndim - 1))
        total = total + values.sum(over)
        square = square + (values * values).sum(over)
        num_values += values[..., 0].size
    assert shift_C is not None, "no values"
    mean_C = total / num_values
    std_C = np.sqrt(np.maximum(square / num_values - mean_C**2, 0.0))
    is_constant = std_C <= least_std * np.maximum(1.0, np.abs(shift_C))
    std_C = np.where(is_constant, constant_std, std_C)
    return Statistics(tuple((mean_C + shift_C).tolist()), tuple(std_C.tolist()))


def latent_statistics(batches: Iterable[npt.NDArray[Any]]) -> Statistics:
    """As `channel_statistics`, of latents: each channel's mean, and one deviation for all.

    A channel that varies little moves the field little: in units of its own its errors would count as much as
    any other's, and the decoder's singular values would no longer agree.
    """
    found = channel_statistics(batches, least_std=LEAST_STD_OF_LATENTS, constant_std=0.0)
    std_C = np.array(found.std)
    varying = std_C[std_C != 0]  # NaN stays
    std = float(np.sqrt(np.square(varying).mean())) if len(varying) else 1.0
    return Statistics(found.mean, (std,) * len(std_C))


def _measure_fields(fields: Fields, array: str) -> Statistics:
    samples, steps = frame_items(fields, array)
    batches = (slice(first, first + _FRAMES_AT_ONCE) for first in range(0, len(samples), _FRAMES_AT_ONCE))
    found = channel_statistics(fields.read(array, samples[some], steps[some]) for some in batches)
    if not np.isfinite(found.std).all():
        raise ConfigError(
            f"the statistics of {array!r} of {fields.info.task} aren't finite",
            kind="not_finite",
            path=fields.origin,
            found=f"NaN or infinity in {_first_not_finite(fields, array)}",
            hint="mend the source and build its store again; data.on_nan=fail refuses such samples",
        )
    return found


def _first_not_finite(fields: Fields, array: str) -> str:
    """Where the first such value is, for people."""
    for sample, step in zip(*frame_items(fields, array), strict=True):
        if not np.isfinite(fields.read(array, np.array([sample]), np.array([step]))).all():
            return f"sample {sample} of the split, time step {step}"
    return "none of its frames"  # but in their sum


def frame_items(fields: Fields, array: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All frames of an array in order: their samples and time steps; a constant field has one a sample."""
    counts = fields.num_steps if array == FIELDS else np.ones_like(fields.num_steps)
    samples = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return samples, np.arange(len(samples)) - first


def spread_frames(fields: Fields, array: str, num: int) -> npt.NDArray[np.int64]:
    """Numbers of some frames of `frame_items` that stand for all, over samples and time steps alike.

    Frames at equal distances may all be of one time step; so the steps are gone through in turn.

    Returns:
        At most `num` different numbers, going up.
    """
    counts = fields.num_steps if array == FIELDS else np.ones_like(fields.num_steps)
    if num >= counts.sum():
        return np.arange(counts.sum())
    turns = np.arange(num)
    samples = turns * len(counts) // num
    first = np.cumsum(counts) - counts
    _, begins, number, each = np.unique(samples, return_index=True, return_inverse=True, return_counts=True)
    own = counts[samples].clip(min=1)
    steps = (turns - begins[number]) * own // each[number] + number
    items = first[samples] + steps % own
    return np.unique(items[counts[samples] > 0])


_MAX_NBYTES = 256 << 20  # of states that are looked at, in float32: trajectories evenly spread over the split

_BATCH_NBYTES = 16 << 20

INPUT = "input"  # key of a steady task's input

LEAST_STD_OF_LATENTS = 1e-6  # they are of order 1, and computed in float32


def measure_state_statistics(windows: Windows) -> dict[str, Statistics]:
    """Mean and standard deviation of every channel of a task's states; of latents one deviation for all.

    Returns:
        For the states themselves under "fields", for a steady task's input under `INPUT`.
    """
    arrays = {FIELDS: windows.state}
    if windows.input_array is not None:
        arrays[INPUT] = windows.input_array
    return {key: _measure_states(windows, name) for key, name in arrays.items()}


def _measure_states(windows: Windows, name: str) -> Statistics:
    shape = windows.store.arrays[name].shape[1:]
    nbytes = 4 * int(np.prod(shape))
    samples = evenly_spread(windows.num_samples, max(1, _MAX_NBYTES // nbytes))
    size = max(1, _BATCH_NBYTES // nbytes)
    is_latent = windows.state == LATENT or isinstance(windows, EncodedWindows)
    measure = latent_statistics if is_latent else channel_statistics
    found = measure(
        _values(windows, name, samples[first : first + size]) for first in range(0, len(samples), size)
    )
    if not np.isfinite((found.mean, found.std)).all():
        bad = np.flatnonzero(~np.isfinite(found.mean))
        raise ConfigError(
            f"the statistics of {name!r} aren't finite",
            kind="not_finite",
            path=windows.fields.origin,
            found=f"NaN or infinity in channel {', '.join(map(str, bad))} of {len(found.std)}",
            hint="mend what it was made from and build it again; data.on_nan=fail refuses such samples",
        )
    return found


def _values(windows: Windows, name: str, samples: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """All states of samples, shape (states, points, C); frames that aren't valid are left out."""
    values = windows.whole(samples, name)
    if name == windows.state:
        values = values[windows.valid_frames(samples)]
    return values.reshape(-1, *values.shape[-2:])

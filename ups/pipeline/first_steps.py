"""What a few time steps of a file or a store hold, the first among them: NaN and Inf, range, mean, std.

A request runs in a reader process, which is ended where a file doesn't answer in time. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ups_store.sources import Selection

if TYPE_CHECKING:
    from ups_store.sources import Task

NUM_SAMPLES = 8  # of a file, spread evenly
_MOST_BYTES = 64 << 20  # that are read of a file


@dataclass(frozen=True)
class Values:
    """Values of one channel, or of an array without channels.

    Attributes:
        name: Of the channel, or the array.
        minimum: Of the finite values; NaN if there is none.
        maximum: Likewise.
        mean: Likewise.
        std: Likewise.
        num_nan: How many are NaN.
        num_inf: How many are infinite.
    """

    name: str
    minimum: float
    maximum: float
    mean: float
    std: float
    num_nan: int
    num_inf: int

    @classmethod
    def of(cls, name: str, values: npt.NDArray[Any]) -> Values:
        """Of an array of any real dtype."""
        flat = values.reshape(-1).astype(np.float64)
        finite = flat[np.isfinite(flat)]
        num_nan = int(np.isnan(flat).sum())
        least, most, mean, std = (
            (finite.min(), finite.max(), finite.mean(), finite.std()) if finite.size else (np.nan,) * 4
        )
        num_inf = flat.size - finite.size - num_nan
        return cls(name, float(least), float(most), float(mean), float(std), num_nan, num_inf)

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor Inf."""
        return self.num_nan + self.num_inf == 0

    def __str__(self) -> str:
        bad = "" if self.is_finite else f", {self.num_nan} NaN, {self.num_inf} Inf"
        ends = f"{self.minimum:.4g}..{self.maximum:.4g}"
        return f"{self.name} {ends}, mean {self.mean:.4g}, std {self.std:.4g}{bad}"


@dataclass(frozen=True)
class FirstStepsRequest:
    """Open a file and look at the first, middle and last time steps of some samples (`ups_store.sources`).

    Attributes:
        path: The file.
        task: What it is meant to be.
        follow: Folder below which other files may lie that it takes data from.
    """

    path: Path
    task: Task
    follow: Path | None = None
    subject = "the first time steps"
    first_sample = None

    def run(self, reader: Any) -> tuple[int, tuple[Values, ...]]:
        """Read how many samples the file has, and the values of every channel."""
        place: dict[str, Any] = {"task": self.task, "follow": self.follow}
        with reader.opened(self.path, selection=Selection(), **place) as source:
            num_times = source.info.arrays["fields"].shape[0]
        with reader.opened(self.path, selection=Selection(reduce_time=every(num_times)), **place) as source:
            info = source.info
            nbytes = sum(array.dtype.itemsize * math.prod(array.shape) for array in info.arrays.values())
            reader.doing("reading")
            arrays = source.read(spread(info.num_samples, max(1, _MOST_BYTES // max(1, nbytes))))
        values = [each for name in arrays for each in by_channel(name, arrays[name], info.channels)]
        return info.num_samples, tuple(values)


def every(num_times: int) -> int:
    """Every how many-th time step is the first, one in the middle, and nearly or just the last."""
    return max(1, (num_times - 1) // 2)


def spread(num_samples: int, most: int = NUM_SAMPLES) -> list[int]:
    """Numbers of a few samples, the first and the last among them."""
    num = min(num_samples, most, NUM_SAMPLES)
    numbers: list[int] = np.unique(np.linspace(0, num_samples - 1, num).astype(np.int64)).tolist()
    return numbers


def by_channel(name: str, values: npt.NDArray[Any], channels: Sequence[str]) -> list[Values]:
    """Values of an array by channel, where it has those that are named."""
    if name == "fields" and values.ndim and values.shape[-1] == len(channels):
        return [Values.of(channel, values[..., number]) for number, channel in enumerate(channels)]
    return [Values.of(name, values)]

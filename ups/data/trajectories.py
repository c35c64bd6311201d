"""Trajectories of a split as an evaluation takes them: the state that is given, and the frames after it.

Letters: N trajectories, B of a batch, T predicted time steps, X the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.data.fields import STEP_TOLERANCE, Fields, FieldsInfo
from ups.data.splits import open_fields
from ups.errors import ConfigError
from ups.grid import FIELDS
from ups_store.build import BuildConfig

_BATCH_NBYTES = 64 << 20  # of predicted frames in float32; metrics need several times as much


@dataclass(frozen=True)
class TrajectoryBatch:
    """Trajectories side by side.

    Attributes:
        samples: Their numbers in the split, int64, shape (B,).
        given: The state that a prediction starts from, physical units, float32, shape (B, X..., C): the first
            frame; of a steady task the constant field that decides the solution.
        truth: The frames to be predicted, physical units, float32, shape (B, T, X..., C).
        parameters: By name, float64, each (B,).
    """

    samples: npt.NDArray[np.int64]
    given: Tensor
    truth: Tensor
    parameters: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.samples)


class Trajectories:
    """Trajectories of one task and split.

    Args:
        fields: Where they are.
        stored_t: Time of every stored time step; None where the source has none, then steps are counted.
        stride: Stored time steps from one frame to the next.
        horizon: Frames to be predicted; by default as many as every trajectory has.
        max_trajectories: At most so many of them, spread evenly over the split.

    Attributes:
        info: What the fields are.
        origin: Where they come from, for people.
        fields: Where they are.
        horizon: T.
        t: Time of each predicted frame since the given one, float64, shape (T,).
        dt: Time from one frame to the next; None of a steady task.
        given_array: Name of the array that is given.

    Raises:
        ConfigError: Kinds "empty_split", "horizon", "uneven_times", "no_input".
    """

    def __init__(
        self,
        fields: Fields,
        *,
        stored_t: npt.NDArray[np.float64] | None,
        stride: int = 1,
        horizon: int | None = None,
        max_trajectories: int | None = None,
    ) -> None:
        self.info, self.origin, self.fields, self._stride = fields.info, fields.origin, fields, stride
        self._samples = _spread(len(fields.num_steps), max_trajectories)
        self.given_array = given_array(fields.info)
        longest = 1 if self.info.steady else (int(fields.num_steps.min()) - 1) // stride
        self.horizon = _checked_horizon(horizon, longest, fields, stride)
        times = _frame_times(stored_t, stride, self.horizon, fields.info)
        self.t = times[1:] - times[0]
        self.dt = None if self.info.steady else float(self.t[-1] / self.horizon)

    def __len__(self) -> int:
        return len(self._samples)

    def batches(self, batch_size: int | None = None) -> Iterator[TrajectoryBatch]:
        """All trajectories in order; by default as many at a time as take about 64 MiB."""
        size = batch_size or self._default_batch_size()
        for first in range(0, len(self), size):
            yield self.read(np.arange(first, min(first + size, len(self))))

    def read(self, numbers: npt.NDArray[np.int64]) -> TrajectoryBatch:
        """Trajectories of these numbers, from 0 on, shape (B,)."""
        samples = self._samples[numbers]
        first = int(not self.info.steady)
        frames = [
            self.fields.read(FIELDS, samples, np.full(len(samples), step * self._stride))
            for step in range(first, self.horizon + first)
        ]
        given = self.fields.read(self.given_array, samples, np.zeros(len(samples), np.int64))
        parameters = self.fields.parameters(samples)
        return TrajectoryBatch(
            samples,
            torch.from_numpy(given),
            torch.from_numpy(np.stack(frames, axis=1)),
            {name: torch.from_numpy(values) for name, values in parameters.items()},
        )

    def _default_batch_size(self) -> int:
        nbytes = 4 * self.horizon * self.info.grid.num_values(FIELDS)
        return max(1, min(len(self), _BATCH_NBYTES // nbytes))


def open_trajectories(
    config: BuildConfig,
    task: str,
    split: str,
    *,
    source: Any = "auto",
    stride: int = 1,
    horizon: int | None = None,
    max_trajectories: int | None = None,
) -> Trajectories:
    """Open the trajectories of a task and split.

    Args:
        config: Which samples of which files, and where field stores lie.
        split: "train", "val", "dev" or "test"; "val" and "dev" as in `ups.data.splits.part_of_split`.
        source: As in `open_fields`.
        stride: Stored time steps from one frame to the next.
        horizon: Frames to be predicted.
        max_trajectories: As `Trajectories`.

    Raises:
        ConfigError: As `open_fields` and `Trajectories`.
        ups_store.StoreError: If the store or the HDF5 files can't be read.
    """
    fields = open_fields(config, task, split, source=source)
    return Trajectories(
        fields,
        stored_t=times_of(fields),
        stride=stride,
        horizon=horizon,
        max_trajectories=max_trajectories,
    )


def times_of(fields: Fields) -> npt.NDArray[np.float64] | None:
    """Time of every stored time step that all samples have, shape (T,); None where the source has none.

    Where samples have times of their own, it is the time since the first step.

    Raises:
        ConfigError: Kind "uneven_times", if the samples' time steps differ.
    """
    times = fields.times()
    if times is None or times.ndim == 1:
        return times
    times = times[:, : fields.num_steps.min()] - times[:, :1]  # what follows are no frames of some
    if not np.allclose(times, times[0], rtol=STEP_TOLERANCE, atol=0):
        steps = np.diff(times, axis=1)
        raise ConfigError(
            f"the trajectories of {fields.info.task} don't go on in the same time steps",
            kind="uneven_times",
            path=fields.origin,
            expected="one step length for all of a split, as they are rolled out and compared step by step",
            found=f"steps of {steps.min():.4g} to {steps.max():.4g}",
            hint="build a store of the samples of each step length: choose their files with data.files",
        )
    return np.asarray(times[0])


def given_array(info: FieldsInfo) -> str:
    """Name of the array that a prediction starts from.

    Raises:
        ConfigError: Kind "no_input", if a steady task has no constant field or several.
    """
    if not info.steady:
        return FIELDS
    constant = [name for name in info.grid.arrays if name != FIELDS]
    if len(constant) != 1:
        raise ConfigError(
            f"{info.task} is steady, so one constant field has to decide its solution",
            kind="no_input",
            expected="1 constant field",
            found=", ".join(constant) or "none",
        )
    return constant[0]


def _spread(num: int, most: int | None) -> npt.NDArray[np.int64]:
    """Numbers of the trajectories that are taken: all, or as many as are wanted, the first and last too."""
    if most is None or most >= num:
        return np.arange(num)
    return np.linspace(0, num - 1, most).round().astype(np.int64)


def _checked_horizon(horizon: int | None, longest: int, fields: Fields, stride: int) -> int:
    name = fields.info.task
    if len(fields.num_steps) == 0:
        raise ConfigError(f"{name} has no samples to evaluate", kind="empty_split", path=fields.origin)
    wanted = max(1, longest) if horizon is None else horizon
    expected = f"1 to {longest} steps" if longest > 1 else "1 step"
    if not 1 <= wanted <= longest:
        raise ConfigError(
            f"a rollout of {'1 step' if wanted == 1 else f'{wanted} steps'} doesn't fit into the trajectories"
            f" of {name}",
            kind="horizon",
            path=fields.origin,
            expected=expected if longest >= 1 else "a smaller training.stride",
            found=f"{int(fields.num_steps.min())} stored time steps, every {stride}. taken",
        )
    return wanted


def _frame_times(
    stored_t: npt.NDArray[np.float64] | None, stride: int, horizon: int, info: FieldsInfo
) -> npt.NDArray[np.float64]:
    """Times of the given frame and of the predicted ones, shape (T + 1,), evenly spaced."""
    if info.steady:
        return np.zeros(2)
    counted = np.arange(horizon + 1.0) * stride
    times = counted if stored_t is None else stored_t[::stride][: horizon + 1]
    steps = np.diff(times)
    if len(times) <= horizon or not np.allclose(steps, steps[0], rtol=STEP_TOLERANCE, atol=0):
        raise ConfigError(
            f"the time steps of {info.task} are not of one length",
            kind="uneven_times",
            expected=f"{horizon + 1} evenly spaced times",
            found=f"{len(times)} times, steps of {steps.min():.4g} to {steps.max():.4g}",
        )
    return times

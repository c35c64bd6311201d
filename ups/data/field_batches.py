"""Batches of fields: random frames of one task and array, and random windows for baselines.

Letters: B batch, K steps of a window, X the axes of the grid, C channels, P parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.data.augment import Symmetries, augment
from ups.data.batches import TaskBatch, TrainingData, random_order
from ups.data.fields import Fields
from ups.data.statistics import frame_items, spread_frames
from ups.data.trajectories import Trajectories
from ups.data.windows import WindowBatch, parameter_table
from ups.distributed.ranks import ALONE, Ranks
from ups.errors import ConfigError
from ups.grid import FIELDS
from ups_store.torch import Window, WindowIndex


class FieldWindowSource:
    """Windows of one task's fields, wherever they lie; a source of `ups_store.torch.Loader`.

    They are those that an operator is trained on, of its field store, in the same order.

    Args:
        trajectories: Of the training split.
        horizon: K, steps of a window; 1 for a steady task, whose windows are pairs of input and solution.
        stride: Stored time steps from one frame to the next.
        parameters: Names of the parameters, in the order that batches give them.

    Raises:
        ConfigError: Kind "horizon", if no trajectory is as long as a window.
    """

    num_tensors = 1
    stores = ()

    def __init__(
        self, trajectories: Trajectories, *, horizon: int, stride: int, parameters: tuple[str, ...]
    ) -> None:
        self._fields, self._given_array = trajectories.fields, trajectories.given_array
        self._dt, self._parameters = trajectories.dt or 1.0, parameters
        self._is_steady, self._stride = trajectories.info.steady, stride
        self._offsets = [stride * step for step in range(1 if self._is_steady else horizon + 1)]
        self._index = WindowIndex(Window(horizon=horizon, stride=stride), self._fields.num_steps)
        self.sizes = [len(self._fields.num_steps) if self._is_steady else len(self._index)]
        if self.sizes == [0]:
            raise ConfigError(
                f"trajectories of {self._fields.info.task} are too short to train on",
                kind="horizon",
                path=self._fields.origin,
                expected=f"more than {self._offsets[-1]} stored time steps",
                found=int(self._fields.num_steps.max()),
            )

    def fetch(
        self, number: int, items: npt.NDArray[np.int64], *, epoch: int, allocate: object
    ) -> WindowBatch:
        """Windows of these numbers; see `ups_store.torch.StoreDataset.fetch`."""
        samples, starts = self._places(items)
        read = self._fields.read
        frames = [read(FIELDS, samples, starts + offset) for offset in self._offsets]
        if self._is_steady:
            frames.insert(0, read(self._given_array, samples, starts))
        table = parameter_table(self._fields.parameters(samples), self._parameters, len(items))
        dt = torch.full((len(items),), self._dt)
        return WindowBatch(self._fields.info.task, torch.from_numpy(np.stack(frames, axis=1)), table, dt)

    def _places(self, items: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Samples and first time steps."""
        return (items, np.zeros_like(items)) if self._is_steady else self._index.locate(items, epoch=0)


def field_window_data(
    source: FieldWindowSource, *, global_batch_size: int, seed: int
) -> TrainingData[FieldWindowSource]:
    """Batches of random windows; a pass takes each window once, but those that don't fill a last batch.

    Which those are is another choice every time. All batches are of one size, so that every step costs the
    same; where there are too few windows for one batch, that is all of them.

    Args:
        source: The windows.
        global_batch_size: Windows of a batch, over all ranks.
        seed: Seed of the order, and of what is drawn for each batch.
    """
    drop_last = source.sizes[0] >= global_batch_size
    order = random_order(source.sizes, global_batch_size=global_batch_size, seed=seed, drop_last=drop_last)
    return TrainingData(source, order, seed=seed)


@dataclass(frozen=True)
class FrameBatch(TaskBatch):
    """Frames of one array of one task; also see `TaskBatch`.

    Attributes:
        array: "fields", or a constant field.
        values: Physical units, float32, shape (B, X..., C).
        parameters: Parameters in the order that was asked for, NaN where the task has none of that name,
            float32, shape (B, P).
        steps: Stored time step of each frame, int64, shape (B,); 0 of constant fields.
        items: Number of each frame among all of its array, int64, shape (B,).
        points: Numbers of the grid's points that the decoder is asked at, int64, shape (points,), the same
            for all frames; None where it isn't trained on.
    """

    array: str
    values: Tensor
    parameters: Tensor
    steps: Tensor
    items: Tensor
    points: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class _Stream:
    """All frames of one array of one task."""

    fields: Fields
    array: str
    samples: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]


class FrameSource:
    """Frames of all arrays of all tasks, each array a source of `ups_store.torch.Loader`.

    Args:
        fields: Training fields by task.
        parameters: Names of the parameters, in the order that batches give them.
    """

    num_tensors = 1
    stores = ()

    def __init__(self, fields: Mapping[str, Fields], *, parameters: tuple[str, ...] = ()) -> None:
        self._streams, self._parameters = _streams(fields), parameters
        self.sizes = [len(stream.samples) for stream in self._streams]

    def fetch(self, number: int, items: npt.NDArray[np.int64], *, epoch: int, allocate: object) -> FrameBatch:
        """Frames of these numbers of an array; see `ups_store.torch.StoreDataset.fetch`."""
        return _read(self._streams[number], items, self._parameters)


def frame_data(
    fields: Mapping[str, Fields],
    *,
    global_batch_size: int,
    seed: int,
    parameters: tuple[str, ...] = (),
) -> TrainingData[FrameSource]:
    """Batches of random frames, each of one task and array.

    In a pass every frame comes at most once, tasks and arrays mixed. All batches are of one size, so that no
    frame weighs more than another and a compiled model sees one shape: frames that don't fill a last batch
    are left out of the pass, other ones every time. Where an array has too few for one batch, no array's
    are left out.

    Args:
        fields: Training fields by task.
        global_batch_size: Frames of a batch, over all ranks.
        seed: Seed of the order, and of what is drawn for each batch.
        parameters: Names of the parameters, in the order that batches give them.
    """
    source = FrameSource(fields, parameters=parameters)
    drop_last = min(source.sizes) >= global_batch_size
    order = random_order(source.sizes, global_batch_size=global_batch_size, seed=seed, drop_last=drop_last)
    return TrainingData(source, order, seed=seed)


def augmented(batch: FrameBatch, symmetries: Symmetries) -> FrameBatch:
    """With its frames shifted and reflected at random."""
    return dataclasses.replace(batch, values=augment(batch.values, symmetries, draws=batch.draws))


def spread_batches(
    fields: Mapping[str, Fields],
    *,
    batch_size: int,
    max_frames: int,
    parameters: tuple[str, ...] = (),
    ranks: Ranks = ALONE,
) -> Iterator[FrameBatch]:
    """Frames for validation, spread over samples and time steps, in order.

    Args:
        fields: By task.
        batch_size: Frames of a batch, at most.
        max_frames: Of each array of each task, over all ranks.
        parameters: Names of the parameters, in the order that batches give them.
        ranks: Processes that look at them together: this rank's `share`, in as many batches as on any other.
    """
    for stream in _streams(fields):
        items = ranks.share(spread_frames(stream.fields, stream.array, max_frames))
        for first in range(0, len(items), batch_size):
            yield _read(stream, items[first : first + batch_size], parameters)


def _streams(fields: Mapping[str, Fields]) -> list[_Stream]:
    return [
        _Stream(some, array, *frame_items(some, array))
        for some in fields.values()
        for array in some.info.grid.arrays
    ]


def _read(stream: _Stream, items: npt.NDArray[np.int64], parameters: tuple[str, ...]) -> FrameBatch:
    samples, steps = stream.samples[items], stream.steps[items]
    values = stream.fields.read(stream.array, samples, steps)
    return FrameBatch(
        stream.fields.info.task,
        stream.array,
        torch.from_numpy(values),
        parameter_table(stream.fields.parameters(samples), parameters, len(items)),
        torch.from_numpy(steps),
        torch.from_numpy(items),
    )

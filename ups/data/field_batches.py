"""Batches of fields: random frames of one task and array, and random windows for baselines.

Letters: B batch, K frames after the first, X the axes of the grid, C channels, P parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.data.augment import Draws, augment, augment_trajectories
from ups.data.batches import TaskBatch, TrainingData, random_order
from ups.data.fields import Fields
from ups.data.statistics import frame_items
from ups.data.trajectories import given_array
from ups.data.windows import evenly_spread, parameter_table
from ups.errors import ConfigError
from ups.grid import FIELDS


@dataclass(frozen=True)
class FieldWindow:
    """Windows side by side.

    Attributes:
        given: Physical units, float32, shape (B, X..., C): the first frame; of a steady task its input.
        truth: The frames after it, or the solution, shape (B, K, X..., C).
        parameters: By name, float64, each (B,).
    """

    given: Tensor
    truth: Tensor
    parameters: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.given)


class FieldWindows:
    """Windows of a training split, drawn with replacement, without end.

    Args:
        fields: Training fields of one task.
        batch_size: B.
        stride: Stored time steps from one frame to the next.
        seed: Of the choice and the augmentation.
        augmented: Whether windows are shifted and reflected at random, all frames of one alike; those of
            steady tasks, whose input is another field, never are.

    Raises:
        ConfigError: Kind "horizon", if no trajectory has two frames.
    """

    def __init__(
        self, fields: Fields, *, batch_size: int, stride: int = 1, seed: int = 0, augmented: bool = True
    ) -> None:
        self._fields, self._batch_size, self._stride, self._seed = fields, batch_size, stride, seed
        self._steady, self._given_array = fields.info.steady, given_array(fields.info)
        self._augmented = augmented and not self._steady
        self.longest = 1 if self._steady else (int(fields.num_steps.max()) - 1) // stride
        if self.longest < 1:
            raise ConfigError(
                f"trajectories of {fields.info.task} are too short to train on",
                kind="horizon",
                path=fields.origin,
                expected=f"more than {stride} stored time steps",
                found=int(fields.num_steps.max()),
            )

    def batch(self, number: int, *, steps: int = 1) -> FieldWindow:
        """The batch of a number, with K = `steps` at most; fewer where no trajectory is as long."""
        steps = min(steps, self.longest)
        seeds = np.random.SeedSequence([self._seed, number])
        samples, starts = self._draw(np.random.default_rng(seeds), steps)
        parameters = self._fields.parameters(samples)
        given, truth = self._read(samples, starts, steps)
        if self._augmented:
            draws = Draws.of_batch(len(given), seed=int(seeds.generate_state(1)[0]))
            given, truth = self._augment(given, truth, draws)
        return FieldWindow(
            given, truth, {name: torch.from_numpy(column) for name, column in parameters.items()}
        )

    def _read(
        self, samples: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], steps: int
    ) -> tuple[Tensor, Tensor]:
        """What is given, (B, X..., C), and what follows, (B, K, X..., C)."""
        given = self._fields.read(self._given_array, samples, starts)
        offsets = [0] if self._steady else [step * self._stride for step in range(1, steps + 1)]
        frames = [self._fields.read(FIELDS, samples, starts + offset) for offset in offsets]
        return torch.from_numpy(given), torch.from_numpy(np.stack(frames, axis=1))

    def _draw(
        self, rng: np.random.Generator, steps: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Samples and first time steps, all windows of the split being equally likely."""
        if self._steady:
            samples = rng.integers(len(self._fields.num_steps), size=self._batch_size)
            return samples, np.zeros_like(samples)
        ends = np.cumsum(np.maximum(self._fields.num_steps - steps * self._stride, 0))
        chosen = rng.integers(ends[-1], size=self._batch_size)
        samples = np.searchsorted(ends, chosen, side="right")
        return samples, chosen - np.where(samples > 0, ends[samples - 1], 0)

    def _augment(self, given: Tensor, truth: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        frames, info = torch.cat([given.unsqueeze(1), truth], dim=1), self._fields.info
        moved = augment_trajectories(frames, task=info.task, periodic=info.grid.periodic, draws=draws)
        return moved[:, 0], moved[:, 1:]


@dataclass(frozen=True)
class FrameBatch(TaskBatch):
    """Frames of one array of one task; also see `TaskBatch`.

    Attributes:
        array: "fields", or a constant field.
        values: Physical units, float32, shape (B, X..., C).
        parameters: Parameters in the order that was asked for, NaN where the task has none of that name,
            float32, shape (B, P).
    """

    array: str
    values: Tensor
    parameters: Tensor

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


def augmented(batch: FrameBatch, *, periodic: tuple[bool, ...]) -> FrameBatch:
    """With its frames shifted and reflected at random."""
    values = augment(batch.values, task=batch.task, periodic=periodic, draws=batch.draws)
    return dataclasses.replace(batch, values=values)


def spread_batches(
    fields: Mapping[str, Fields], *, batch_size: int, max_frames: int, parameters: tuple[str, ...] = ()
) -> Iterator[FrameBatch]:
    """Frames for validation: at most `max_frames` of each array of each task, evenly spread, in order."""
    for stream in _streams(fields):
        items = evenly_spread(len(stream.samples), max_frames)
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
    )

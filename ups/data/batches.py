"""What every stage trains on: batches of one task, which one `ups_store.torch.Loader` makes.

Batch i is a function of (seed, i) alone, so the data position of a run is a number. Each rank has its own
rows of a batch; what is drawn at random for them doesn't depend on the number of ranks. Letters: B batch, K
steps of a window, L tokens, D channels of a token, X the axes of the grid, C channels, P parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ups.data.augment import Draws, Symmetries, augment, augment_trajectories, shift_periodic
from ups.data.fields import Fields, Items
from ups.data.statistics import frame_items, spread_frames
from ups.data.stores import Store
from ups.data.windows import EncodedWindows, Windows, parameter_table
from ups.distributed.ranks import ALONE, Ranks
from ups.laws import Laws, laws_of
from ups.trained.specs import SimulatedTask
from ups_store.torch import Allocate, BatchSource, DataOrder, Loader, Order, Step, map_tensors, ranks_of_torch

__all__ = ["DataOrder", "Loader"]  # of ups_store.torch; the others go without saying

if TYPE_CHECKING:
    from ups.config import RunConfig, StageConfig

_GENERATOR = 2  # purpose of random numbers

_NO_DRAWS = Draws(torch.Generator(), 0, 0, 0)


@dataclass(frozen=True)
class TaskBatch:
    """This rank's rows of a batch.

    Attributes:
        task: Name of the task.
        draws: Random numbers for these rows, a function of the batch's number.
        share: Share of the whole batch that these rows are, 0 to 1.
    """

    task: str
    draws: Draws = field(default=_NO_DRAWS, kw_only=True)
    share: float = field(default=1.0, kw_only=True)

    @property
    def num_rows(self) -> int:
        """Rows of the whole batch, over all ranks."""
        return self.draws.num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def split(self, num: int) -> list[Self]:
        """Parts of neighbouring rows, whose shares add up to that of all of them.

        Where there are fewer rows than parts, the last row is repeated, with a share of 0: so every rank has
        as many parts as the others.
        """
        rows = {len(value) for value in vars(self).values() if isinstance(value, Tensor)}
        (total,) = rows
        size = -(-total // num)
        ends = [(min(part * size, total), min((part + 1) * size, total)) for part in range(num)]
        return [self._rows(first, last, (last - first) / total) for first, last in ends]

    def repeated(self, num: int) -> Self:
        """Each row so many times, one after the other."""
        return self if num == 1 else map_tensors(self, lambda tensor: tensor.repeat_interleave(num, dim=0))

    def _rows(self, first: int, last: int, share: float) -> Self:
        first = min(first, last - 1)  # of an empty part
        part = map_tensors(self, lambda tensor: tensor[first:last])
        return dataclasses.replace(part, share=self.share * share)

    def of_step(self, step: Step, *, seed: int) -> Self:
        """With what is drawn for a step; rows that only fill up a batch are left out.

        A rank all of whose rows only fill it up keeps one, of share 0: so it takes part in every collective.
        """
        num = len(step.items) if step.mask is None else int(step.mask.sum())
        kept = max(1, num)
        batch = self if kept == len(step.items) else map_tensors(self, lambda tensor: tensor[:kept])
        generator = torch.Generator().manual_seed(seed)
        draws = Draws(generator, max(step.num_rows, step.first + kept), step.first, kept)
        return dataclasses.replace(batch, draws=draws, share=num / step.num_rows)


Source = TypeVar("Source", bound=BatchSource)


class TrainingData(Generic[Source]):
    """A source of batches, and their order.

    Args:
        source: Gives the rows of a step as a `TaskBatch`.
        order: Which rows each step takes.
        seed: Of what is drawn for each batch.
    """

    def __init__(self, source: Source, order: Order, *, seed: int) -> None:
        self.source, self.order, self._seed = source, order, seed

    def loader(
        self,
        config: RunConfig,
        device: torch.device,
        *,
        prepare: Callable[[Any, int], Any] = lambda batch, number: batch,
    ) -> Loader:
        """What makes the batches ahead of their use, as `training.prefetch_factor` says.

        Args:
            device: Where batches are used.
            prepare: Called with every batch and its number, perhaps by another thread.
        """
        ahead, pinned = config.training.prefetch_factor, config.training.pin_memory
        num_steps, seed = self.order.num_steps, self._seed

        def transform(batch: TaskBatch, step: Step) -> Any:
            number = step.epoch * num_steps + step.number
            return prepare(batch.of_step(step, seed=seed_of(seed, _GENERATOR, number)), number)

        return Loader(
            self.source,
            self.order,
            num_workers=min(1, ahead),
            prefetch_factor=ahead or None,
            batch_transform=transform,
            across_epochs=True,
            device=device if pinned and device.type == "cuda" else None,
        )


def batch_size_of(settings: StageConfig) -> int:
    """Count the rows of a whole batch over all ranks that train together now."""
    return settings.rows_over(ranks_of_torch()[1])


def rows_of_rank(settings: StageConfig) -> int:
    """Rows of a batch that a rank has, at most."""
    return -(-batch_size_of(settings) // ranks_of_torch()[1])


def random_order(
    sizes: Sequence[int], *, global_batch_size: int, seed: int, drop_last: bool = False
) -> DataOrder:
    """All items of all sources in every pass, mixed; the last batch of a source may be shorter, or dropped.

    Several ranks are given items to fill it up, which `TaskBatch.of_step` leaves out again.
    """
    rank, world_size = ranks_of_torch()
    return DataOrder(
        sizes,
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle=True,
        drop_last=drop_last,
        pad_last=world_size > 1 and not drop_last,
        rank=rank,
        world_size=world_size,
    )


def endless(loader: Loader, number: int) -> Iterator[Any]:
    """The batches from a number on, counted from the first of the first pass."""
    epoch, position = divmod(number, len(loader))
    consumed = position * loader.order.global_batch_size
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "consumed": consumed})
    while True:
        yield from loader


def seed_of(*numbers: int) -> int:
    """One seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


# --- windows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowBatch(TaskBatch):
    """Windows of one task; also see `TaskBatch`.

    Attributes:
        states: As stored, not normalised, float32: latents (B, K + 1, L, D), or fields (B, K + 1, X..., C).
            Of a steady task input and solution, K = 1.
        parameters: And boundary values, in the order that was asked for, NaN where the task has none of that
            name, float32, shape (B, P).
        dt: Physical time of one step, float32, shape (B,); 1 for a steady task.
        pushed: Steps that go before without gradients (`training.pushforward`).
        items: Numbers of the windows, int64, shape (B,), where they are yet to be encoded; else None.
    """

    states: Tensor
    parameters: Tensor
    dt: Tensor
    pushed: int = field(default=0, kw_only=True)
    items: Tensor | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.states)


class WindowSource:
    """Windows of several tasks, each a source of `ups_store.torch.Loader`.

    Args:
        tasks: Windows by task.
        parameters: Names of the parameters, in the order that batches give them.
    """

    num_tensors = 1

    def __init__(self, tasks: Mapping[str, Windows], *, parameters: tuple[str, ...] = ()) -> None:
        self.tasks, self.parameters, self._names = tasks, parameters, tuple(tasks)

    @property
    def stores(self) -> Sequence[Store]:
        """Where the windows lie."""
        return [windows.store for windows in self.tasks.values()]

    def num_frames(self) -> dict[str, int]:
        """Frames of each task that windows are taken of: of a steady task its solutions."""
        return {task: int(windows.num_steps.sum()) for task, windows in self.tasks.items()}

    def fetch(self, number: int, items: Items, *, epoch: int, allocate: Allocate) -> WindowBatch:
        """Read windows of these numbers of a task; see `ups_store.torch.StoreDataset.fetch`."""
        task = self._names[number]
        windows = self.tasks[task]
        read = windows.read(items, allocate=allocate)
        table = parameter_table(read.parameters, self.parameters, len(items))
        batch = WindowBatch(task, read.states, table, torch.from_numpy(read.dt.astype(np.float32)))
        if isinstance(windows, EncodedWindows):
            return dataclasses.replace(batch, items=torch.from_numpy(items))
        return batch

    def encoded(self, batch: WindowBatch) -> WindowBatch:
        """Make latents of windows of fields that `items` still are the numbers of."""
        windows = self.tasks[batch.task]
        if batch.items is None or not isinstance(windows, EncodedWindows):
            return batch
        columns = {name: batch.parameters[:, at].numpy() for at, name in enumerate(self.parameters)}
        states = windows.encoded(batch.states, columns, batch.items.numpy())
        return dataclasses.replace(batch, states=states, items=None)


def window_data(
    windows: Mapping[str, Windows],
    *,
    global_batch_size: int,
    seed: int,
    parameters: tuple[str, ...],
    drops_last: bool = False,
) -> TrainingData[WindowSource]:
    """Batches of random windows, one task each; a pass takes each window once.

    Args:
        drops_last: Whether all batches are of one size, so that every step costs the same: windows that don't
            fill a last one are left out of the pass, other ones every time. Where there are too few for one
            batch, that is all of them.
    """
    source = WindowSource(windows, parameters=parameters)
    sizes = [len(some) for some in windows.values()]
    drop_last = drops_last and min(sizes) >= global_batch_size
    order = random_order(sizes, global_batch_size=global_batch_size, seed=seed, drop_last=drop_last)
    return TrainingData(source, order, seed=seed)


def augment_windows(
    batch: WindowBatch, *, symmetries: Symmetries, tokens: tuple[int, ...], is_latent: bool
) -> WindowBatch:
    """Shift every window, and reflect half of them if they are fields, where that may be.

    Latents are shifted by whole tokens, with which encoder and decoder commute.

    Args:
        tokens: Tokens along each axis.
        is_latent: Whether the states are latents, not fields.
    """
    if not is_latent:
        moved = augment_trajectories(batch.states, symmetries, draws=batch.draws)
        return dataclasses.replace(batch, states=moved)
    states = batch.states.unflatten(2, tokens)
    states = shift_periodic(states, symmetries.shifts, first_axis=2, draws=batch.draws)
    return dataclasses.replace(batch, states=states.flatten(2, 1 + len(tokens)))


def augment_windows_of(
    task: SimulatedTask, batch: WindowBatch, *, laws: Mapping[str, Laws], is_latent: bool = False
) -> WindowBatch:
    """As `augment_windows`, by what is known of the windows' task, and by a configuration's own laws."""
    symmetries = Symmetries.of(
        laws_of(batch.task, laws),
        periodic=task.grid.periodic,
        conditions=task.parameters,
        has_source=not task.steady and len(task.grid.arrays) > 1,
    )
    return augment_windows(batch, symmetries=symmetries, tokens=task.tokens, is_latent=is_latent)


@dataclass(frozen=True)
class SolutionBatch(WindowBatch):
    """Inputs and solutions of a steady task, with what a generative model draws for each.

    Attributes:
        noise: Standard normal, float32, shape (B, L, D); 0 of a regression.
        tau: Of the configured distribution, float32, shape (B,), in 0..1; 0 of a regression.
        observed: Where the input is known, bool, shape (B, X...); None for everywhere.
    """

    noise: Tensor
    tau: Tensor
    observed: Tensor | None


# --- frames -------------------------------------------------------------------------------------------


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
    samples: Items
    steps: Items


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

    def fetch(self, number: int, items: Items, *, epoch: int, allocate: object) -> FrameBatch:
        """Frames of these numbers of an array; see `ups_store.torch.StoreDataset.fetch`."""
        return _read(self._streams[number], items, self._parameters)


def frame_data(
    fields: Mapping[str, Fields], *, global_batch_size: int, seed: int, parameters: tuple[str, ...] = ()
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


def _read(stream: _Stream, items: Items, parameters: tuple[str, ...]) -> FrameBatch:
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

"""What every stage trains on: batches of one task, which one `ups_store.torch.Loader` makes.

Batch i is a function of (seed, i) alone, so the data position of a run is a number. Each rank has its own
rows of a batch; what is drawn at random for them doesn't depend on the number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ups.data.augment import Draws
from ups_store.torch import BatchSource, DataOrder, Loader, Order, Step, map_tensors, ranks_of_torch

__all__ = [
    "DataOrder",
    "Loader",
    "TaskBatch",
    "TrainingData",
    "batch_size_of",
    "endless",
    "random_order",
    "rows_of_rank",
    "seed_of",
]

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
        close: Ends what works for the source in the background; may be called twice.
    """

    def __init__(
        self, source: Source, order: Order, *, seed: int, close: Callable[[], None] = lambda: None
    ) -> None:
        self.source, self.order, self.close = source, order, close
        self._seed = seed

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
            num_workers=min(
                1, ahead
            ),  # what waits for trajectories that are being encoded has to come in order
            prefetch_factor=ahead or None,
            batch_transform=transform,
            across_epochs=isinstance(self.order, DataOrder),
            device=device if pinned and device.type == "cuda" else None,
        )


def batch_size_of(settings: StageConfig) -> int:
    """Rows of a whole batch over all ranks, from either of a stage's two batch sizes."""
    if settings.global_batch_size is not None:
        return settings.global_batch_size
    assert settings.batch_size is not None  # one of both is taken from `training`
    return settings.batch_size * ranks_of_torch()[1]


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

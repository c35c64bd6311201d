"""`StoreBatchSampler`: the agreed order for torch's own `DataLoader`, stores apart per batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from ups_store.errors import ConfigError
from ups_store.read.items import in_words
from ups_store.read.order import DataOrder
from ups_store.read.ranks import RankedOrder

_CALLERS = 8  # from a sampler through Accelerate's to what makes a loop's iterator


class StoreBatchSampler(Sampler[list[int]]):
    """Batches of items of a `StoreDataset`, each from one store: `DataLoader(dataset, batch_sampler=...)`.

    Without it a `DataLoader` mixes stores in a batch, which only works where their arrays have equal shapes.
    Every iteration is the next epoch, also after one that was abandoned, unless the loop had no batch of that
    yet; after `load_state_dict` it is the rest of the epoch that was saved. The order is that of
    `make_loader`; with `pad_last` nothing marks the rows that fill up a batch.

    It shares samples among the ranks itself. Accelerate does so once more with a sampler that it prepares,
    which is an error unless that was made with `rank=0, world_size=1`.

    `state_dict` counts the batches that were taken from here. A `DataLoader` takes some before the loop needs
    them; torchdata's `StatefulDataLoader` knows that, and its own state has this one as it was.

    Args:
        order: Which items each step takes, as numbers within a store; a `RankedOrder` where its ranks aren't
            known yet.
        first: Number of each store's first item in the dataset.
        sampler_options: None; Lightning passes some where it would put a sampler in place of this one.

    Raises:
        ConfigError: If Lightning makes it anew; kind "sampler".
    """

    def __init__(
        self, order: DataOrder | RankedOrder, first: list[int] | None = None, **sampler_options: Any
    ) -> None:
        if sampler_options or first is None:
            raise ConfigError(
                "another sampler can't be put in place of this one, which shares samples among the ranks",
                kind="sampler",
                found=f"{type(order).__name__}, {', '.join(sampler_options)}",
                hint="with Lightning give `fit` the loader of make_loader, or say "
                "Trainer(use_distributed_sampler=False)",
            )
        self._ranked = order if isinstance(order, RankedOrder) else None
        self._order: Any = order.order if isinstance(order, RankedOrder) else order
        self._first = first
        self._is_abandoned = False
        self._taken_ahead_of: int | None = None  # items consumed before the workers of a loop were given some

    @property
    def order(self) -> DataOrder:
        """Which items each step takes, and how many have been taken."""
        if self._ranked is not None:
            self._order = self._ranked.current()
        assert isinstance(self._order, DataOrder)
        return self._order

    @property
    def batch_size(self) -> int:
        """Items of a batch on this rank."""
        return self.order.global_batch_size // self.order.world_size

    @property
    def drop_last(self) -> bool:
        """Whether batches that aren't full are left out."""
        return self.order.drop_last

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks."""
        return self.order.num_steps

    def __repr__(self) -> str:
        order = self.order
        steps = f"{order.num_steps:,} of {order.global_batch_size:,} items over all ranks"
        position = f"epoch {order.epoch}, {order.consumed:,} items consumed"
        facts = {"steps": steps, "shuffle": order.shuffle, "seed": order.seed, "position": position}
        return in_words("StoreBatchSampler", facts)

    def __iter__(self) -> Iterator[list[int]]:
        if self._ranked is not None:
            self._ranked.begin()
        order = self.order
        if self._is_abandoned:
            self.set_epoch(order.epoch + 1)
        elif self._taken_ahead_of is not None:
            order.consumed = self._taken_ahead_of
        self._taken_ahead_of = order.consumed
        for step in order.steps():
            if not self._is_abandoned:  # by whom it is asked for, until a loop is given a batch
                self._is_abandoned = not _is_asked_ahead(order.world_size)
            order.consumed = (step.number + 1) * order.global_batch_size
            yield (step.items + self._first[step.source]).tolist()
        self.set_epoch(order.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """What has been taken from here so far, as `Loader.state_dict`; equal on all ranks."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration give the batches that followed when `state_dict` was called.

        Raises:
            ConfigError: As `Loader.load_state_dict`.
        """
        self.order.load_state_dict(state)
        self._is_abandoned, self._taken_ahead_of = False, None

    def set_epoch(self, epoch: int, *, consumed: int = 0) -> None:
        """Have the next iteration be epoch number `epoch`.

        Args:
            epoch: Its number.
            consumed: Items of it that the training loop has had, over all ranks: steps times the global batch
                size.
        Raises:
            ConfigError: If the order can't stand there.
        """
        self.load_state_dict({**self.order.state_dict(), "epoch": epoch, "consumed": consumed})


def _is_asked_ahead(world_size: int) -> bool:
    """Look at who asks for a batch: the loop, or a `DataLoader` for its workers before the loop asks for one.

    Wrappers that want such a loader's state have it begin, and drop what began.

    Raises:
        ConfigError: If Accelerate shares batches among processes that share their samples already.
    """
    frame = sys._getframe(1).f_back
    for _ in range(_CALLERS):
        if frame is None:
            return False
        caller: Any = frame.f_locals.get("self")
        if type(caller).__name__ == "BatchSamplerShard" and caller.num_processes > 1 < world_size:
            raise ConfigError(
                "Accelerate would share once more what the ranks share already, so most samples never come",
                kind="world_size",
                expected="`rank=0, world_size=1` in make_batch_sampler",
                found=f"world_size {world_size}, and {caller.num_processes} processes",
                hint="or prepare the loader of make_loader, which Accelerate takes as it is",
            )
        if frame.f_code.co_name == "_reset" and "dataloader" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False

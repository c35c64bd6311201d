"""`StoreBatchSampler`: the agreed order for torch's own `DataLoader`, stores apart per batch.

`shuffle="auto"`: random access where it is free, blocks of neighbours where samples come from a disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

from ups_store.errors import ConfigError
from ups_store.read.order import DataOrder, Shuffle
from ups_store.system.memory import available_bytes
from ups_store.torch.dataset import StoreDataset, in_words
from ups_store.torch.mixed import MixedDataset

RESIDENT_SHARE = 0.99  # from here on nothing worth mentioning is read from the disk

logger = logging.getLogger(__name__)


class StoreBatchSampler(Sampler[list[int]]):
    """Batches of items of a `StoreDataset`, each from one store: `DataLoader(dataset, batch_sampler=...)`.

    Without it a `DataLoader` mixes stores in a batch, which only works where their arrays have equal shapes.
    Every iteration is the next epoch, also after one that was abandoned; after `load_state_dict` it is the
    rest of the epoch that was saved. The order is that of `make_loader`; with `pad_last` nothing marks the
    rows that fill up a batch.

    `state_dict` counts the batches that were taken from here. A `DataLoader` takes some before the loop needs
    them; torchdata's `StatefulDataLoader` knows that, and its own state has this one as it was.

    Args:
        order: Which items each step takes, as numbers within a store.
        first: Number of each store's first item in the dataset.

    Attributes:
        order: As given, and how many items have been taken.
        batch_size: Items of a batch on this rank.
        drop_last: Whether batches that aren't full are left out.
    """

    def __init__(self, order: DataOrder, first: list[int]) -> None:
        self.order = order
        self.batch_size, self.drop_last = order.global_batch_size // order.world_size, order.drop_last
        self._first = first
        self._is_abandoned = False

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
        if self._is_abandoned:
            self.set_epoch(self.order.epoch + 1)
        for step in self.order.steps():
            self.order.consumed = (step.number + 1) * self.order.global_batch_size
            self._is_abandoned = True
            yield (step.items + self._first[step.source]).tolist()
        self.set_epoch(self.order.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """What has been taken from here so far, as `Loader.state_dict`; equal on all ranks."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration give the batches that followed when `state_dict` was called.

        Raises:
            ConfigError: As `Loader.load_state_dict`.
        """
        self.order.load_state_dict(state)
        self._is_abandoned = False

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


@dataclass(frozen=True)
class ShuffleChoice:
    """What "auto" chose.

    Attributes:
        shuffle: True or "block".
        reason: Why, with the numbers.
    """

    shuffle: Shuffle
    reason: str


def choose_shuffle(dataset: StoreDataset | MixedDataset, *, world_size: int) -> ShuffleChoice:
    """Decide between a full shuffle and one in blocks, alike on all ranks.

    Args:
        dataset: Where the samples come from.
        world_size: Processes that share a batch; more than one must be able to talk to each other.
    Returns:
        "block" if any rank needs it: a store is larger than the memory, or lies on a network file system, and
        isn't in RAM already; or windows are cut out of packed samples, which aren't in RAM decoded.
    Raises:
        ConfigError: If there are several ranks and torch.distributed isn't initialised: they might differ.
    """
    choice = _choose_here(dataset)
    if world_size > 1:
        choice = _agree(choice)
    logger.info("shuffle: %s: %s", choice.shuffle, choice.reason)
    return choice


def _choose_here(dataset: StoreDataset | MixedDataset) -> ShuffleChoice:
    stores = [source.store for source in dataset.sources]
    nbytes, available = sum(store.nbytes for store in stores), available_bytes()
    resident = sum(store.residency() * store.nbytes for store in stores) / nbytes
    sizes = f"{nbytes:,} bytes of stores, {resident:.0%} resident, {available:,} bytes of RAM available"
    if any(source.decodes_windows for source in dataset.sources):
        return ShuffleChoice("block", f"windows of one sample are decoded together ({sizes})")
    if resident >= RESIDENT_SHARE:
        return ShuffleChoice(True, f"all in RAM ({sizes})")
    networks = sorted({store.network for store in stores if store.network})
    if networks:
        return ShuffleChoice("block", f"on {', '.join(networks)} ({sizes})")
    if nbytes > available:
        return ShuffleChoice("block", f"larger than RAM ({sizes})")
    return ShuffleChoice(True, f"fits into RAM ({sizes})")


def _agree(mine: ShuffleChoice) -> ShuffleChoice:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ConfigError(
            'shuffle="auto" with several ranks',
            kind="shuffle",
            expected="torch.distributed to be initialised, so that the ranks can agree",
            hint='initialise it, or say True or "block"',
        )
    found: list[ShuffleChoice] = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return next((choice for choice in found if choice.shuffle == "block"), found[0])

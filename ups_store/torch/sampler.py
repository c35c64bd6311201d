"""`StoreBatchSampler`: the agreed order for torch's own `DataLoader`, stores apart per batch.

`shuffle="auto"`: random access where it is free, blocks of neighbours where samples come from a disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from ups_store.errors import ConfigError
from ups_store.read.order import DataOrder, Shuffle
from ups_store.system.memory import available_bytes
from ups_store.torch.dataset import StoreDataset


class StoreBatchSampler(Sampler[list[int]]):
    """Batches of items of a `StoreDataset`, each from one store: `DataLoader(dataset, batch_sampler=...)`.

    Without it a `DataLoader` mixes stores in a batch, which only works where their arrays have equal shapes.
    Every iteration is the next epoch. The order is that of `make_loader`.

    A last batch that isn't full is shorter for a single rank; several ranks fill it up with items from the
    epoch's beginning, as `DistributedSampler` does, so that they have equally many steps.

    Args:
        order: Which items each step takes, as numbers within a store.
        first: Number of each store's first item in the dataset.
    """

    def __init__(self, order: DataOrder, first: list[int]) -> None:
        self.order = order
        self._first = first

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks."""
        return self.order.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.order.steps():
            items = step.items + self._first[step.source]
            if step.mask is not None and self.order.world_size == 1:
                items = items[step.mask]
            yield items.tolist()
        self.set_epoch(self.order.epoch + 1)

    def set_epoch(self, epoch: int, *, consumed: int = 0) -> None:
        """Have the next iteration be epoch number `epoch`.

        Args:
            epoch: Its number.
            consumed: Items of it that the training loop has had, over all ranks: steps * batch size. Only the
                loop knows: a `DataLoader` takes batches from here before it needs them.
        Raises:
            ConfigError: If the order can't stand there.
        """
        self.order.load_state_dict({"seed": self.order.seed, "epoch": epoch, "consumed": consumed})


RESIDENT_SHARE = 0.99  # from here on nothing worth mentioning is read from the disk

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShuffleChoice:
    """What "auto" chose.

    Attributes:
        shuffle: True or "block".
        reason: Why, with the numbers.
    """

    shuffle: Shuffle
    reason: str


def choose_shuffle(dataset: StoreDataset, *, world_size: int) -> ShuffleChoice:
    """Decide between a full shuffle and one in blocks, alike on all ranks.

    Args:
        dataset: Where the samples come from.
        world_size: Processes that share a batch; more than one must be able to talk to each other.
    Returns:
        "block" if any rank needs it: a store is larger than the memory, or lies on a network file system, and
        isn't in RAM already.
    Raises:
        ConfigError: If there are several ranks and torch.distributed isn't initialised: they might differ.
    """
    choice = _choose_here(dataset)
    if world_size > 1:
        choice = _agree(choice)
    logger.info("shuffle: %s: %s", choice.shuffle, choice.reason)
    return choice


def _choose_here(dataset: StoreDataset) -> ShuffleChoice:
    stores = [source.store for source in dataset.sources]
    nbytes, available = sum(store.nbytes for store in stores), available_bytes()
    resident = sum(store.residency() * store.nbytes for store in stores) / nbytes
    sizes = f"{nbytes:,} bytes of stores, {resident:.0%} resident, {available:,} bytes of RAM available"
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

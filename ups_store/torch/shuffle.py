"""`shuffle="auto"`: random access where it is free, blocks of neighbours where samples come from a disk."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ups_store.errors import ConfigError
from ups_store.read.order import Shuffle
from ups_store.system.memory import available_bytes
from ups_store.torch.dataset import StoreDataset

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

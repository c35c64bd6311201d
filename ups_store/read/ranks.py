"""The order of this process among others: which rank it is, whether all have one order, which shuffle."""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

import numpy as np

from ups_store.errors import ConfigError
from ups_store.read.base import AnyStore
from ups_store.read.order import DataOrder, MixedOrder, Shuffle, expect
from ups_store.system.memory import available_bytes

BLOCK_BYTES = 4 << 20  # read at once with shuffle="block": a disk's seek or a network's round trip disappears
MAX_BLOCK_SIZE = 4096
RESIDENT_SHARE = 0.99  # from here on nothing worth mentioning is read from the disk
_AGREED = ("world_size", "sizes", "weights", "num_steps", "drop_last", "pad_last")

logger = logging.getLogger(__name__)


class Ranks:
    """Number of this process and of all that share a step, as given, or by RANK and WORLD_SIZE."""

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self._given = rank, world_size

    def current(self) -> tuple[int, int]:
        """Give both as they are now."""
        rank, world_size = self._given
        if rank is not None and world_size is not None:
            return rank, world_size
        ranks = self.found()
        return ranks[0] if rank is None else rank, ranks[1] if world_size is None else world_size

    def found(self) -> tuple[int, int]:
        """Find both where they aren't given."""
        if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return 0, 1
        numbers = []
        for name in ("RANK", "WORLD_SIZE"):
            try:
                numbers.append(int(os.environ[name]))
            except ValueError as error:
                problem, actual = f"environment variable {name}", repr(os.environ[name])
                raise ConfigError(problem, kind="rank", expected="a whole number", found=actual) from error
        return numbers[0], numbers[1]

    def compare(self, mine: dict[str, Any]) -> dict[str, Any] | None:
        """Give the settings of the order that another rank began with, if they differ and can be compared."""
        return None

    def agree(self, choice: tuple[Shuffle, str]) -> list[tuple[Shuffle, str]]:
        """Give the choices of all ranks."""
        raise ConfigError(
            'shuffle="auto" with several ranks',
            kind="shuffle",
            expected="torch.distributed to be initialised, so that the ranks can agree",
            hint='initialise it and use ups_store.torch, or say True or "block"',
        )


class RankedOrder:
    """A dataset's order for this process, whose ranks are read anew until the first step is asked for.

    Args:
        dataset: Has `sources` and `make_order`, of which there are options.
        ranks: Tell which process this is.
    """

    def __init__(
        self,
        dataset: Any,
        ranks: Ranks,
        *,
        batch_size: int | None,
        global_batch_size: int | None,
        shuffle: Shuffle | Literal["auto"],
        **options: Any,
    ) -> None:
        expect(
            "shuffle", shuffle in (True, False, "block", "auto"), "True, False, 'block' or 'auto'", shuffle
        )
        fits = (batch_size is None) != (global_batch_size is None)
        actual = "neither" if batch_size is None else "both"
        expect("batch_size", fits, "batch_size (per rank) or global_batch_size", actual)
        if batch_size is not None:
            expect("batch_size", is_number(batch_size, 1), "a whole number of at least 1", batch_size)
        item_nbytes = max(source.sample_nbytes for source in dataset.sources)
        options["block_size"] = min(MAX_BLOCK_SIZE, max(1, BLOCK_BYTES // max(1, item_nbytes)))
        self._dataset, self._ranks, self._shuffle, self._options = dataset, ranks, shuffle, options
        self._batch_size, self._global_batch_size = batch_size, global_batch_size
        self._has_begun = False
        self._order = self._make(*ranks.current())

    def _make(self, rank: int, world_size: int) -> DataOrder | MixedOrder:
        size: Any = self._global_batch_size if self._batch_size is None else self._batch_size * world_size
        is_auto = self._shuffle == "auto"
        order: DataOrder | MixedOrder = self._dataset.make_order(
            global_batch_size=size,
            shuffle=choose_shuffle(self._dataset, self._ranks, world_size) if is_auto else self._shuffle,
            keeps_shuffle=is_auto,
            rank=rank,
            world_size=world_size,
            **self._options,
        )
        return order

    def current(self) -> DataOrder | MixedOrder:
        """Give the order, by the ranks that there are; from the first step on as it is."""
        order = self._order
        if not self._has_begun and (ranks := self._ranks.current()) != (order.rank, order.world_size):
            if order.consumed:
                self._check_ranks()
            self._order = self._make(*ranks)
            self._order.epoch = order.epoch
        return self._order

    def begin(self) -> None:
        """Begin an iteration over the order's steps; refuse one that isn't that of the other ranks."""
        order = self.current()
        self._check_ranks()
        if self._has_begun:
            return
        if order.world_size > 1 and self._ranks.found() == (order.rank, order.world_size):
            self._compare(order)
        self._has_begun = True

    def _compare(self, order: DataOrder | MixedOrder) -> None:
        ours = {name: getattr(order, name, None) for name in _AGREED} | order.state_dict()
        theirs = self._ranks.compare(ours)
        if theirs is not None:  # such as of a seed of this rank's own
            differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
            raise ConfigError(
                f"rank {order.rank} has another order than another rank: "
                "samples would come twice, others never",
                kind="ranks_differ",
                expected=", ".join(f"{name} {theirs.get(name)!r}" for name in differing),
                found=", ".join(f"{name} {ours.get(name)!r}" for name in differing),
                hint="give all ranks the same arguments and state, in the same order; "
                "a loader that only one of them iterates over takes rank=0, world_size=1",
            )

    def _check_ranks(self) -> None:
        rank, world_size = self._ranks.current()
        if (rank, world_size) != (self._order.rank, self._order.world_size):
            raise ConfigError(
                "the ranks aren't those that the order began with",
                kind="world_size",
                expected=f"rank {self._order.rank} of {self._order.world_size}",
                found=f"rank {rank} of {world_size}",
                hint="make a new one once torch.distributed is initialised, "
                "or give it `rank` and `world_size`",
            )


def choose_shuffle(dataset: Any, ranks: Ranks, world_size: int) -> Shuffle:
    """Decide between a full shuffle and one in blocks, alike on all ranks, and log why.

    "block" if any rank needs it: a store is larger than the memory, or lies on a network file system, and
    isn't in RAM already; or windows are cut out of packed samples, which aren't in RAM decoded.
    """
    stores: list[AnyStore] = [source.store for source in dataset.sources]
    nbytes, available = sum(store.nbytes for store in stores), available_bytes()
    resident = sum(store.residency() * store.nbytes for store in stores) / nbytes
    networks = sorted({store.network for store in stores if store.network})
    shuffle: Shuffle = "block"
    if any(source.decodes_windows for source in dataset.sources):
        reason = "windows of one sample are decoded together"
    elif resident >= RESIDENT_SHARE:
        shuffle, reason = True, "all in RAM"
    elif networks:
        reason = f"on {', '.join(networks)}"
    elif nbytes > available:
        reason = "larger than RAM"
    else:
        shuffle, reason = True, "fits into RAM"
    reason += f" ({nbytes:,} bytes of stores, {resident:.0%} resident, {available:,} bytes of RAM available)"
    if world_size > 1:
        choices = ranks.agree((shuffle, reason))
        shuffle, reason = next((choice for choice in choices if choice[0] == "block"), choices[0])
    logger.info("shuffle: %s: %s", shuffle, reason)
    return shuffle


def is_number(value: object, least: int) -> bool:
    """Check for a whole number of at least so much."""
    return isinstance(value, int | np.integer) and bool(value >= least)

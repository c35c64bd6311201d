"""The order of this process among others: which rank it is, whether all have one order, which shuffle."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
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
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _variable("RANK"), _variable("WORLD_SIZE")
        return 0, 1

    def compare(self, mine: dict[str, Any]) -> dict[str, Any] | None:
        """Give the settings of the order that another rank began with, if they can be compared."""
        return None

    def agree(self, choice: tuple[Shuffle, str]) -> list[tuple[Shuffle, str]]:
        """Give the choices of all ranks."""
        raise ConfigError(
            'shuffle="auto" with several ranks',
            kind="shuffle",
            expected="torch.distributed to be initialised, so that the ranks can agree",
            hint='initialise it and use ups_store.torch, or say True or "block"',
        )


def _variable(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError as error:
        problem, found = f"environment variable {name}", repr(os.environ[name])
        raise ConfigError(problem, kind="rank", expected="a whole number", found=found) from error


class RankedOrder:
    """An order of this process, whose ranks are read anew until the first step is asked for."""

    def __init__(self, make: Callable[[int, int], DataOrder | MixedOrder], ranks: Ranks) -> None:
        self._make, self._ranks = make, ranks
        self.order = make(*ranks.current())
        self._has_begun = False

    def current(self) -> DataOrder | MixedOrder:
        """Give the order, by the ranks that there are; from the first step on as it is."""
        if self._has_begun:
            return self.order
        ranks = self._ranks.current()
        if ranks != (self.order.rank, self.order.world_size):
            if self.order.consumed:
                raise self._changed(ranks)
            epoch = self.order.epoch
            self.order = self._make(*ranks)
            self.order.epoch = epoch
        return self.order

    def begin(self) -> None:
        """Begin an iteration over the order's steps."""
        order, ranks = self.current(), self._ranks.current()
        if ranks != (order.rank, order.world_size):
            raise self._changed(ranks)
        if not self._has_begun:
            self._compare(order)
            self._has_begun = True

    def _changed(self, ranks: tuple[int, int]) -> ConfigError:
        order = self.order
        return ConfigError(
            "the ranks aren't those that the order began with",
            kind="world_size",
            expected=f"rank {order.rank} of {order.world_size}",
            found=f"rank {ranks[0]} of {ranks[1]}",
            hint="make a new one once torch.distributed is initialised, or give it `rank` and `world_size`",
        )

    def _compare(self, order: DataOrder | MixedOrder) -> None:
        """Refuse an order that isn't that of the other ranks, such as one of a seed of this rank's own."""
        if order.world_size == 1 or self._ranks.found() != (order.rank, order.world_size):
            return
        settings: dict[str, Any] = {name: getattr(order, name, None) for name in _AGREED}
        ours = settings | order.state_dict()
        theirs = self._ranks.compare(ours)
        if theirs is None:
            return
        differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        raise ConfigError(
            f"rank {order.rank} has another order than another rank: samples would come twice, others never",
            kind="ranks_differ",
            expected=", ".join(f"{name} {theirs.get(name)!r}" for name in differing),
            found=", ".join(f"{name} {ours.get(name)!r}" for name in differing),
            hint="give all ranks the same arguments and state, in the same order; "
            "a loader that only one of them iterates over takes rank=0, world_size=1",
        )


def ranked_order(
    dataset: Any,
    ranks: Ranks,
    *,
    batch_size: int | None,
    global_batch_size: int | None,
    shuffle: Shuffle | Literal["auto"],
    **options: Any,
) -> RankedOrder:
    """Check the arguments about a dataset's order, and make it; options are those of `dataset.make_order`."""
    expect("shuffle", shuffle in (True, False, "block", "auto"), "True, False, 'block' or 'auto'", shuffle)
    fits = (batch_size is None) != (global_batch_size is None)
    found = "neither" if batch_size is None else "both"
    expect("batch_size", fits, "batch_size (per rank) or global_batch_size", found)
    if batch_size is not None:
        expect("batch_size", is_number(batch_size, 1), "a whole number of at least 1", batch_size)
    item_nbytes = max(source.sample_nbytes for source in dataset.sources)
    options["block_size"] = min(MAX_BLOCK_SIZE, max(1, BLOCK_BYTES // max(1, item_nbytes)))
    sizes = batch_size, global_batch_size
    return RankedOrder(functools.partial(_order_of_rank, dataset, ranks, sizes, shuffle, options), ranks)


def _order_of_rank(
    dataset: Any,
    ranks: Ranks,
    sizes: tuple[int | None, int | None],
    shuffle: Shuffle | Literal["auto"],
    options: Mapping[str, Any],
    rank: int,
    world_size: int,
) -> DataOrder | MixedOrder:
    order: DataOrder | MixedOrder = dataset.make_order(
        global_batch_size=sizes[1] if sizes[0] is None else sizes[0] * world_size,
        shuffle=choose_shuffle(dataset, ranks, world_size=world_size) if shuffle == "auto" else shuffle,
        keeps_shuffle=shuffle == "auto",
        rank=rank,
        world_size=world_size,
        **options,
    )
    return order


def choose_shuffle(dataset: Any, ranks: Ranks, *, world_size: int) -> Shuffle:
    """Decide between a full shuffle and one in blocks, alike on all ranks, and log why.

    "block" if any rank needs it: a store is larger than the memory, or lies on a network file system, and
    isn't in RAM already; or windows are cut out of packed samples, which aren't in RAM decoded.
    """
    choice = _choose_here(dataset.sources)
    if world_size > 1:
        choices = ranks.agree(choice)
        choice = next((choice for choice in choices if choice[0] == "block"), choices[0])
    logger.info("shuffle: %s: %s", *choice)
    return choice[0]


def _choose_here(sources: Sequence[Any]) -> tuple[Shuffle, str]:
    stores: list[AnyStore] = [source.store for source in sources]
    nbytes, available = sum(store.nbytes for store in stores), available_bytes()
    resident = sum(store.residency() * store.nbytes for store in stores) / nbytes
    sizes = f"{nbytes:,} bytes of stores, {resident:.0%} resident, {available:,} bytes of RAM available"
    if any(source.decodes_windows for source in sources):
        return "block", f"windows of one sample are decoded together ({sizes})"
    if resident >= RESIDENT_SHARE:
        return True, f"all in RAM ({sizes})"
    networks = sorted({store.network for store in stores if store.network})
    if networks:
        return "block", f"on {', '.join(networks)} ({sizes})"
    if nbytes > available:
        return "block", f"larger than RAM ({sizes})"
    return True, f"fits into RAM ({sizes})"


def is_number(value: object, least: int) -> bool:
    """Check for a whole number of at least so much."""
    return isinstance(value, int | np.integer) and bool(value >= least)

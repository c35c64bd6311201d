"""Ranks: which share of each step this process takes, and whether all of them mean the same order.

`RankedOrder`: its ranks are read at its first step, as loaders are often made before the ranks are.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import torch

from ups_store.errors import ConfigError
from ups_store.read.mixed_order import MixedOrder
from ups_store.read.order import DataOrder

_AGREED = ("world_size", "sizes", "weights", "num_steps", "drop_last", "pad_last")

_shared_orders = itertools.count()  # ranks begin with their orders one after the other, all alike


def ranks_of_torch(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Number of this process and of all: what isn't given, as torch.distributed says, once it is initialised.

    Before, or without it, as the variables RANK and WORLD_SIZE say, which `torchrun` sets; else 0 and 1.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    ranks = 0, 1
    if has_group():
        ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        ranks = _variable("RANK"), _variable("WORLD_SIZE")
    return ranks[0] if rank is None else rank, ranks[1] if world_size is None else world_size


def _variable(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError as error:
        problem, found = f"environment variable {name}", repr(os.environ[name])
        raise ConfigError(problem, kind="rank", expected="a whole number", found=found) from error


def has_group() -> bool:
    """Whether torch.distributed is initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class RankedOrder:
    """An order of this process, whose ranks are read anew until the first step is asked for.

    Args:
        make: Makes the order of a rank among so many.
        rank: As given; None for what `ranks_of_torch` says.
        world_size: Likewise.

    Attributes:
        order: As it is now.
    """

    def __init__(
        self, make: Callable[[int, int], DataOrder | MixedOrder], rank: int | None, world_size: int | None
    ) -> None:
        self._make, self._given = make, (rank, world_size)
        self.order = make(*ranks_of_torch(rank, world_size))
        self._has_begun = False

    def current(self) -> DataOrder | MixedOrder:
        """The order, by the ranks that there are; from the first step on as it is."""
        if self._has_begun:
            return self.order
        ranks = ranks_of_torch(*self._given)
        if ranks != (self.order.rank, self.order.world_size):
            if self.order.consumed:
                raise self._changed(ranks)
            epoch = self.order.epoch
            self.order = self._make(*ranks)
            self.order.epoch = epoch
        return self.order

    def begin(self) -> DataOrder | MixedOrder:
        """The order, for an iteration over its steps.

        Raises:
            ConfigError: If there are other ranks than when the first one began, or a rank has another order.
        """
        order, ranks = self.current(), ranks_of_torch(*self._given)
        if ranks != (order.rank, order.world_size):
            raise self._changed(ranks)
        if not self._has_begun:
            _compare(order)
            self._has_begun = True
        return order

    def _changed(self, ranks: tuple[int, int]) -> ConfigError:
        order = self.order
        return ConfigError(
            "the ranks aren't those that the order began with",
            kind="world_size",
            expected=f"rank {order.rank} of {order.world_size}",
            found=f"rank {ranks[0]} of {ranks[1]}",
            hint="make a new one once torch.distributed is initialised, or give it `rank` and `world_size`",
        )


def _compare(order: DataOrder | MixedOrder) -> None:
    """Refuse an order that isn't that of the other ranks, such as one of a seed of this rank's own.

    The first rank to come leaves what its order depends on, the others compare: no rank waits for another.
    """
    if order.world_size == 1 or not has_group() or ranks_of_torch() != (order.rank, order.world_size):
        return
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    if store is None:  # backends that need none
        return
    settings: dict[str, Any] = {name: getattr(order, name, None) for name in _AGREED}
    mine = json.dumps(settings | order.state_dict())
    first = store.compare_set(f"ups_store/order/{next(_shared_orders)}", "", mine).decode()
    if first == mine:
        return
    theirs, ours = json.loads(first), json.loads(mine)
    differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    raise ConfigError(
        f"rank {order.rank} has another order than another rank, so samples would come twice, others never",
        kind="ranks_differ",
        expected=", ".join(f"{name} {theirs.get(name)!r}" for name in differing),
        found=", ".join(f"{name} {ours.get(name)!r}" for name in differing),
        hint="give all ranks the same arguments and state, in the same order; "
        "a loader that only one of them iterates over takes rank=0, world_size=1",
    )

"""What batches are made of: which items of a pass, evenly spread ones, their parameters, seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def count_batches(num_items: int, batch_size: int) -> int:
    """The fewest batches of at most `batch_size` that hold all items; at least 1."""
    return max(1, -(-num_items // batch_size))


def batch_ends(num_items: int, num_batches: int) -> npt.NDArray[np.int64]:
    """Where batches end that hold all items, shape (num_batches,); the last ones may be one longer."""
    size, num_longer = divmod(num_items, num_batches)
    return np.cumsum([size] * (num_batches - num_longer) + [size + 1] * num_longer, dtype=np.int64)


def evenly_spread(num_items: int, num: int) -> npt.NDArray[np.int64]:
    """Numbers of some items that stand for all: the middles of `num` equal parts of them.

    Args:
        num_items: How many there are, numbered from 0.
        num: How many are wanted, >= 1.

    Returns:
        min(num, num_items) different numbers, going up, new, int64.
    """
    num = min(num, num_items)
    return ((np.arange(num) + 0.5) * num_items / num).astype(np.int64)


def parameter_table(known: Mapping[str, npt.ArrayLike], names: Sequence[str], num: int) -> Tensor:
    """Parameters of the equation as models take them.

    Args:
        known: Parameters that a task has, by name, each (B,), on the CPU.
        names: Those that are asked for, in order.
        num: B.

    Returns:
        New, float32, shape (B, P); NaN where the task has none of that name.
    """
    table = np.full((num, len(names)), np.nan, np.float32)
    for column, name in enumerate(names):
        if name in known:
            table[:, column] = known[name]
    return torch.from_numpy(table)


def seed_of(*numbers: int) -> int:
    """One seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])

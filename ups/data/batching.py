"""How a pass is cut into batches, and seeds of what is random in them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def count_batches(num_items: int, batch_size: int) -> int:
    """The fewest batches of at most `batch_size` that hold all items; at least 1."""
    return max(1, -(-num_items // batch_size))


def batch_ends(num_items: int, num_batches: int) -> npt.NDArray[np.int64]:
    """Where batches end that hold all items, shape (num_batches,); the last ones may be one longer."""
    size, num_longer = divmod(num_items, num_batches)
    return np.cumsum([size] * (num_batches - num_longer) + [size + 1] * num_longer, dtype=np.int64)


def seed_of(*numbers: int) -> int:
    """One seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])

"""Runs: pieces of equal length, each contiguous in memory or a file, and how they are copied into a batch.

Two ways, by length; which is faster where was measured (`docs/performance.md`): one index over overlapping
items, whose copy of the copy stays in the cache, and one `np.concatenate` of views.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LONG_RUN_BYTES = 8192  # from here on copying twice costs more than a view per run
BLOCK_BYTES = 64 << 10  # of what is copied twice: stays in the cache, and malloc keeps such memory
_TABLE_BLOCK = 16384  # elements; their indices too stay in the cache

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Runs:
    """Runs in the order of the batch.

    Attributes:
        firsts: First byte of each, counted from where the memory begins, int64, shape (n,).
        nbytes: Bytes of each.
    """

    firsts: npt.NDArray[np.int64]
    nbytes: int


def copy_runs(memory: Memory, dtype: np.dtype[Any], runs: Runs, out: npt.NDArray[Any]) -> None:
    """Copy runs one behind the other.

    Args:
        memory: What they lie in.
        dtype: Dtype of their elements.
        runs: At least one, none empty.
        out: C-contiguous, as many elements; converted to if it has another dtype.
    """
    if runs.nbytes < LONG_RUN_BYTES:
        _copy_twice(memory, dtype, runs, out)
        return
    if out.dtype == dtype:  # plain bytes: NumPy doesn't know that bfloat16 can be moved as it is
        out, dtype = out.reshape(-1).view(np.uint8), np.dtype(np.uint8)
    length, itemsize = runs.nbytes // dtype.itemsize, dtype.itemsize
    views = np.ndarray((len(memory) - runs.nbytes + 1, length), dtype, memory, 0, (1, itemsize))
    if out.dtype == dtype:
        np.concatenate([views[first] for first in runs.firsts.tolist()], out=out)
        return
    for row, first in zip(out.reshape(-1, length), runs.firsts.tolist(), strict=True):
        cast_into(views[first], row)


def _copy_twice(memory: Memory, dtype: np.dtype[Any], runs: Runs, out: npt.NDArray[Any]) -> None:
    items = items_of(memory, runs.nbytes)
    step = max(1, BLOCK_BYTES // runs.nbytes)
    blocks = [slice(first, first + step) for first in range(0, len(runs.firsts), step)]
    if out.dtype == dtype:
        target = out.reshape(-1).view(items.dtype)
        for block in blocks:
            target[block] = items[runs.firsts[block]]
        return
    rows = out.reshape(len(runs.firsts), -1)
    for block in blocks:
        picked = items[runs.firsts[block]].view(dtype)
        cast_into(picked.reshape(-1, rows.shape[1]), rows[block])


def items_of(memory: Memory, nbytes: int) -> npt.NDArray[np.void]:
    """Every run of the memory as one item, by its first byte; they overlap."""
    return np.ndarray((len(memory) - nbytes + 1,), f"V{nbytes}", memory, 0, (1,))


def cast_into(values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Copy `values` into `out` of the same shape, converted to its dtype."""
    if values.dtype != np.float16 or out.dtype != np.float32 or not out.flags.c_contiguous:
        out[...] = values
        return
    # NumPy converts one number at a time; a table of all there are takes a third of the time.
    bits, target = values.reshape(-1).view(np.uint16), out.reshape(-1)
    for first in range(0, len(bits), _TABLE_BLOCK):
        part = slice(first, first + _TABLE_BLOCK)
        _float16_values().take(bits[part], out=target[part], mode="clip")


@functools.cache
def _float16_values() -> npt.NDArray[np.float32]:
    """Every float16 number as float32, by its bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)

"""Runs: pieces of equal length, each contiguous in memory or a file, copied into a batch and checked.

`_runs.c` copies them by one call that lets go of the interpreter lock. Where it couldn't be compiled NumPy
copies, more slowly (`docs/results/performance.md`): short runs by one index over overlapping items, whose
second copy comes out of the cache, long ones by one `np.concatenate` of views.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.system.memory import last_cache_bytes

Memory = npt.NDArray[np.uint8]


compiled: ModuleType | None
try:
    compiled = importlib.import_module("ups_store._runs")  # its functions are described in `_runs.c`
except ImportError:  # no C compiler, or no headers of Python, when it was installed
    compiled = None

MIN_STREAMED_BYTES, MAX_STREAMED_BYTES = 4 << 20, 16 << 20  # what was measured (`docs/format/rationale.md`)


def streamed_bytes() -> int:
    """Return from which size on the last cache doesn't hold a batch: a loader has about four at a time."""
    return min(max(last_cache_bytes() // 4, MIN_STREAMED_BYTES), MAX_STREAMED_BYTES)


if compiled is not None:
    compiled.stream_from(streamed_bytes())

LONG_RUN_BYTES = 8192  # from here on copying twice costs more than a view per run
BLOCK_BYTES = 64 << 10  # of what is copied twice: stays in the cache, and malloc keeps such memory
_TABLE_BLOCK = 16384  # elements; their indices too stay in the cache


@dataclass(frozen=True)
class Runs:
    """Runs in the order of the batch: their first bytes in the memory, shape (n,), and the length of each."""

    firsts: npt.NDArray[np.int64]
    nbytes: int


def copy_runs(memory: Memory, dtype: np.dtype[Any], runs: Runs, out: npt.NDArray[Any]) -> None:
    """Copy runs of elements of `dtype`, at least one and none empty, one behind the other.

    `out` is C-contiguous and has as many elements, which are converted if it has another dtype.
    """
    if out.dtype == dtype:
        _copy_bytes(memory, runs, out.reshape(-1).view(np.uint8))
        return
    rows = out.reshape(len(runs.firsts), -1)
    if runs.nbytes >= LONG_RUN_BYTES:
        for row, first in zip(rows, runs.firsts.tolist(), strict=True):
            cast_into(np.ndarray(row.shape, dtype, memory, first), row)
        return
    for block in _blocks(runs):  # what is copied is converted while it lies in the cache
        part = Runs(runs.firsts[block], runs.nbytes)
        copied = np.empty(len(part.firsts) * runs.nbytes, np.uint8)
        _copy_bytes(memory, part, copied)
        cast_into(copied.view(dtype).reshape(-1, rows.shape[1]), rows[block])


def _copy_bytes(memory: Memory, runs: Runs, out: Memory) -> None:
    if compiled is not None:
        compiled.copy(memory, runs.firsts, runs.nbytes, out)
    elif runs.nbytes < LONG_RUN_BYTES:
        items = items_of(memory, runs.nbytes)
        target = out.view(items.dtype)
        for block in _blocks(runs):
            target[block] = items[runs.firsts[block]]
    else:
        nbytes = runs.nbytes
        np.concatenate([memory[first : first + nbytes] for first in runs.firsts.tolist()], out=out)


def damaged_slots(slots: Memory, nbytes: int) -> npt.NDArray[np.bool_] | None:
    """Mark slots whose payload has another CRC-32C than the one behind it, or that don't end in zeros.

    Slots are contiguous, shape (n, stride), with payloads of `nbytes`. None where there is no compiled code,
    or no instruction, for it.
    """
    marks = np.empty(len(slots), np.bool_)
    is_done = compiled is not None and compiled.damaged(slots, slots.shape[1], nbytes, marks)
    return marks if is_done else None


def seal_slots(memory: Memory, runs: Runs, slots: Memory) -> bool:
    """Copy runs to the beginnings of slots, and put the CRC-32C of each behind it, in one pass.

    Memory and slots, shape (n, stride), are contiguous; what is behind a checksum stays. False if nothing is
    done, for there is no compiled code, or no instruction, for it.
    """
    arguments = (memory, runs.firsts, runs.nbytes, slots, slots.shape[1])
    return compiled is not None and bool(compiled.seal(*arguments))


def _blocks(runs: Runs) -> list[slice]:
    step = max(1, BLOCK_BYTES // runs.nbytes)
    return [slice(first, first + step) for first in range(0, len(runs.firsts), step)]


def items_of(memory: Memory, nbytes: int) -> npt.NDArray[np.void]:
    """View every run of the memory as one item, by its first byte; they overlap."""
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
    """Return every float16 number as float32, by its bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)

"""Batches by read calls instead of a mapping: for network file systems, and files that others may cut.

A read that finds less than it should is an error here, where touching a mapping would end the process.
Neighbours are read together, and several reads are under way at once: each may wait for a disk or a server.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import TruncatedError
from ups_store.format.layout import ArrayLayout
from ups_store.format.metadata import dtype_of
from ups_store.gather import Samples, Window, runs_of
from ups_store.runs import Runs, items_of
from ups_store.system import files
from ups_store.system.mappings import page_aligned
from ups_store.system.parallel import for_each

READS_IN_FLIGHT = 8
_MAX_GAP_BYTES = 64 << 10  # between runs: less is read along, sooner than another request is answered
_READ_BYTES = 4 << 20  # of neighbours together


def read_samples(
    fd: int,
    array: ArrayLayout,
    samples: Samples,
    window: Window | None,
    out: npt.NDArray[Any],
    *,
    path: Path,
    num_threads: int = READS_IN_FLIGHT,
) -> None:
    """Read samples of one array, or windows of them, into `out`; `SampledArray` copies them from a mapping.

    Args:
        fd: The file.
        array: The array's layout.
        samples: Sample numbers, all valid, shape (B,), int64.
        window: Window over time, or None.
        out: Output, shape (B, ...); converted to if it has another dtype.
        path: For messages.
        num_threads: Reads that are under way at once.
    Raises:
        TruncatedError: If the file is shorter than when it was opened.
    """
    if not out.size:
        return
    runs, dtype = runs_of(array, samples, window), dtype_of(array.meta.dtype)
    target = out if out.flags.c_contiguous else np.empty(out.shape, dtype)
    rows = target.reshape(len(runs.firsts), -1)
    order = np.argsort(runs.firsts, kind="stable")
    firsts = array.offset + runs.firsts[order]

    def read(block: slice) -> None:
        _read_block(fd, Runs(firsts[block], runs.nbytes), dtype, rows, order[block], path)

    for_each(read, _blocks(firsts, runs.nbytes), num_threads=num_threads)
    if target is not out:
        out[...] = target


def _blocks(firsts: npt.NDArray[np.int64], nbytes: int) -> list[slice]:
    """Which of the sorted runs are read together."""
    is_far = np.diff(firsts) > nbytes + _MAX_GAP_BYTES
    neighbourhood = np.concatenate(([0], np.flatnonzero(is_far) + 1))
    since = firsts - np.repeat(firsts[neighbourhood], np.diff([*neighbourhood, len(firsts)]))
    is_next = is_far | (np.diff(since // _READ_BYTES) != 0)
    edges = [0, *(np.flatnonzero(is_next) + 1).tolist(), len(firsts)]
    return [slice(first, end) for first, end in itertools.pairwise(edges)]


def _read_block(
    fd: int, runs: Runs, dtype: np.dtype[Any], rows: npt.NDArray[Any], numbers: Samples, path: Path
) -> None:
    """Read sorted runs by one call into the rows of these numbers."""
    first, end = int(runs.firsts[0]), int(runs.firsts[-1]) + runs.nbytes
    if len(numbers) == 1 and rows.dtype == dtype:
        _fill(fd, first, rows[numbers[0]], path)
        return
    block = page_aligned(end - first)
    _fill(fd, first, block, path)
    picked = items_of(block, runs.nbytes)[runs.firsts - first]
    rows[numbers] = picked.view(dtype).reshape(len(numbers), -1)


def read_constant(fd: int, array: ArrayLayout, *, path: Path) -> npt.NDArray[Any]:
    """Read a whole array without slots into new memory."""
    whole = np.empty(array.meta.shape, dtype_of(array.meta.dtype))
    _fill(fd, array.offset, whole, path)
    return whole


def read_bytes(fd: int, first: int, nbytes: int, *, path: Path) -> bytes:
    """Read bytes of the file; `TruncatedError` if they aren't all there."""
    raw = files.read_at(fd, first, nbytes)
    if len(raw) < nbytes:
        raise cut(path, first + nbytes, first + len(raw))
    return raw


def cut(path: Path, expected: int, found: int) -> TruncatedError:
    """The error for a file that became shorter while it was open."""
    return TruncatedError(
        "another program cut the file while it was open",
        path=path,
        kind="truncated_while_open",
        clause="6.11",
        expected=f"at least {expected} bytes",
        found=found,
        hint="open it again; a store is replaced by renaming, never changed in place",
    )


def _fill(fd: int, first: int, target: npt.NDArray[Any], path: Path) -> None:
    memory = target.reshape(-1).view(np.uint8).data
    got = files.read_into(fd, first, memory)
    if got < len(memory):
        raise cut(path, first + len(memory), first + got)

"""Batches by read calls instead of a mapping: for network file systems, and files that others may cut.

A read that finds less than it should is an error here, where touching a mapping would end the process.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store import files
from ups_store.errors import TruncatedError
from ups_store.gather import Samples, Window, copy_windows
from ups_store.layout import ArrayLayout
from ups_store.metadata import dtype_of

_DENSE_BYTES = 1 << 20  # of small samples that one call may read to pick a few of them


def read_samples(
    fd: int,
    array: ArrayLayout,
    samples: Samples,
    window: Window | None,
    out: npt.NDArray[Any],
    *,
    path: Path,
) -> None:
    """Read samples of one array, or windows of them, into `out`; the plain twin is `gather_array`.

    Args:
        fd: The file.
        array: The array's layout.
        samples: Sample numbers, all valid, shape (B,), int64.
        window: Window over time, or None.
        out: Output, shape (B, ...), of the array's dtype.
        path: For messages.
    Raises:
        TruncatedError: If the file is shorter than when it was opened.
    """
    if not out.size:
        return
    first, num = int(samples.min()), int(np.ptp(samples)) + 1
    if not array.meta.is_sharded and num * array.stride <= max(_DENSE_BYTES, 4 * len(samples) * array.stride):
        block = _read_array(fd, array, array.slot(first)[0], (num, *array.meta.sample_shape), path)
        _copy(block, samples - first, window, out)
        return
    for row, sample in enumerate(samples.tolist()):
        _read_row(fd, array, sample, _only(window, row), out[row : row + 1], path)


def read_constant(fd: int, array: ArrayLayout, *, path: Path) -> npt.NDArray[Any]:
    """Read a whole array without slots into new memory."""
    return _read_array(fd, array, array.offset, array.meta.shape, path)


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


def _only(window: Window | None, row: int) -> Window | None:
    if window is None:
        return None
    return Window(window.axis, window.start[row : row + 1], window.length, window.stride)


def _read_row(
    fd: int, array: ArrayLayout, sample: int, window: Window | None, out: npt.NDArray[Any], path: Path
) -> None:
    """One sample, or one window, into `out`, shape (1, ...)."""
    first, shape = array.slot(sample)[0], array.meta.sample_shape
    if window is None and out.flags.c_contiguous:
        _fill(fd, first, out, path)
        return
    if window is not None and window.axis == 0:  # its steps lie together: nothing else is read
        start, num_steps = int(window.start[0]), (window.length - 1) * window.stride + 1
        first += start * math.prod(shape[1:]) * out.itemsize
        shape, window = (
            (num_steps, *shape[1:]),
            Window(0, np.zeros(1, np.int64), window.length, window.stride),
        )
    _copy(_read_array(fd, array, first, (1, *shape), path), np.zeros(1, np.int64), window, out)


def _copy(block: npt.NDArray[Any], rows: Samples, window: Window | None, out: npt.NDArray[Any]) -> None:
    if window is None:
        out[...] = block[rows]
    else:
        copy_windows(block, rows, window, out)


def _read_array(
    fd: int, array: ArrayLayout, first: int, shape: tuple[int, ...], path: Path
) -> npt.NDArray[Any]:
    block = np.empty(shape, dtype_of(array.meta.dtype))
    _fill(fd, first, block, path)
    return block


def _fill(fd: int, first: int, target: npt.NDArray[Any], path: Path) -> None:
    memory = target.reshape(-1).view(np.uint8).data
    got = files.read_into(fd, first, memory)
    if got < len(memory):
        raise cut(path, first + len(memory), first + got)

"""Reading samples out of one dataset: in bounded hyperslabs, reduced and with their axes put in order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import h5py
import numpy as np

from ups_store.ingest.info import Selection

BLOCK_BYTES = 64 * 2**20  # of one hyperslab: a published file has up to 88 GB, one NS_incom sample 3.1 GB


@dataclass(frozen=True)
class _Region:
    """A hyperslab of whole frames: which samples and time steps of the dataset, and where they go."""

    samples: slice
    times: slice  # with the stride of the selection
    rows: slice
    frames: slice


def read_samples(
    out: np.ndarray, dataset: h5py.Dataset, *, axes: str, to_axes: str, first: int, selection: Selection
) -> None:
    """Read `len(out)` consecutive samples.

    Args:
        out: Where they go, shape (samples, ...) in the order of `to_axes` after reduction; any strides.
        dataset: Dataset with the axes `axes`, sample and time leading.
        axes: Its axes as letters, in stored order. Without "s" it is one sample.
        to_axes: Axes of `out` as letters, "s" first; those that the dataset lacks have length 1 in `out`.
        first: Number of the first sample in the dataset.
        selection: Strides in space and time.
    """
    for region in _regions(dataset, axes, first, len(out), selection.reduce_time):
        block = _read_region(dataset, axes, region, selection)
        target = out[region.rows, region.frames] if "t" in to_axes else out[region.rows]
        target[...] = _in_order(block, axes, to_axes)


def _regions(dataset: h5py.Dataset, axes: str, first: int, count: int, stride: int) -> Iterator[_Region]:
    """Cut samples `first .. first + count` into hyperslabs of about `BLOCK_BYTES` at most."""
    shape = dict(zip(axes, dataset.shape, strict=True))
    num_times = shape.get("t", 1)
    frame_bytes = dataset.dtype.itemsize * math.prod(n for axis, n in shape.items() if axis not in "st")
    samples_per_block = max(1, BLOCK_BYTES // (frame_bytes * num_times))
    times_per_block = num_times
    if frame_bytes * num_times > BLOCK_BYTES:
        # Whole chunks at a time, or each would be decoded more than once.
        chunk = dataset.chunks[axes.index("t")] if dataset.chunks and "t" in axes else 1
        times_per_block = chunk * max(1, BLOCK_BYTES // (frame_bytes * chunk))
    for row in range(0, count, samples_per_block):
        rows = slice(row, min(row + samples_per_block, count))
        samples = slice(first + rows.start, first + rows.stop)
        for time in range(0, num_times, times_per_block):
            stop = min(time + times_per_block, num_times)
            start = -(-time // stride) * stride  # the first selected step from `time` on
            if start < stop:
                frames = slice(start // stride, -(-stop // stride))
                yield _Region(samples, slice(start, stop, stride), rows, frames)


def _read_region(dataset: h5py.Dataset, axes: str, region: _Region, selection: Selection) -> np.ndarray:
    """One hyperslab, reduced, axes in stored order."""
    # HDF5 skips time steps of a contiguous dataset twice as fast as it reads them, but takes 5 times as
    # long to skip within chunks, and longer than numpy to skip points of a row.
    is_chunked = dataset.chunks is not None
    times = slice(region.times.start, region.times.stop, 1 if is_chunked else region.times.step)
    stored = {"s": region.samples, "t": times}
    block: np.ndarray = dataset[tuple(stored.get(axis, slice(None)) for axis in axes)]
    steps = {axis: selection.step(axis) for axis in axes}
    if not is_chunked:
        steps["t"] = 1
    return block[tuple(slice(None, None, steps[axis]) for axis in axes)]


def _in_order(block: np.ndarray, axes: str, to_axes: str) -> np.ndarray:
    """`block` with its axes in the order of `to_axes`, and an axis of length 1 for each that it lacks."""
    order = [axes.index(axis) for axis in to_axes if axis in axes]
    ordered: np.ndarray = block.transpose(order)
    return ordered[tuple(slice(None) if axis in axes else None for axis in to_axes)]

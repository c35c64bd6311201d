"""Reading samples out of one dataset: in bounded hyperslabs, reduced and with their axes put in order.

Samples that lie in a file as they will in the store go to their place in one copy.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ups_store.sources.casting import CastLoss, cast_into
from ups_store.sources.cf import CfEncoding
from ups_store.sources.contents import Selection
from ups_store.sources.hdf5 import h5py
from ups_store.sources.source_files import BLOCK_BYTES
from ups_store.system import files, memory
from ups_store.system.runs import Runs, copy_runs

_READ_AT_ONCE = 8 << 20  # after each the reader says that it gets on
_MAPPED_AT_ONCE = 64 << 20  # counts as the reader's memory meanwhile
_MAPPED_FROM = 4 << 20  # less is never copied past the caches


@dataclass(frozen=True)
class _Region:
    """A hyperslab of whole frames: which samples and time steps of the dataset, and where they go."""

    samples: slice
    times: slice  # with the stride of the selection
    rows: slice
    frames: slice


def read_samples(
    out: np.ndarray,
    dataset: h5py.Dataset,
    *,
    axes: str,
    to_axes: str,
    first: int,
    selection: Selection,
    extent: DatasetExtent | None = None,
    encoding: CfEncoding | None = None,
    progress: Callable[[], None] = lambda: None,
) -> CastLoss:
    """Read `len(out)` consecutive samples, each chunk of the dataset once if they are whole chunks.

    Args:
        out: Where they go, shape (samples, ...) in the order of `to_axes` after reduction; any strides, and
            any floating dtype, to which they are cast.
        dataset: Dataset with the axes `axes`.
        axes: Its axes as letters, in stored order. Without "s" it is one sample.
        to_axes: Axes of `out` as letters, "s" first; those that the dataset lacks have length 1 in `out`.
        first: Number of the first sample in the dataset.
        selection: Strides in space and time.
        extent: Where the dataset lies in its file; None where HDF5 is needed to read it.
        encoding: How its numbers are encoded.
        progress: Called after every part of it.
    """
    loss = CastLoss()
    if extent and not encoding and extent.fits(out, axes=axes, to_axes=to_axes, selection=selection):
        extent.read_into(out, first=first * extent.sample_nbytes(axes), progress=progress)
        return loss
    for region in _regions(dataset, axes, first, len(out), selection.reduce_time):
        block = _read_region(dataset, axes, region, selection)
        if encoding:
            block = encoding.decode(block)
        target = out[region.rows, region.frames] if "t" in to_axes else out[region.rows]
        block = _in_order(block, axes, to_axes)
        loss += cast_into(target, block, channel_axes=sum(axis in "ckd" for axis in to_axes))
        progress()
    return loss


def chunk_length(dataset: h5py.Dataset, axes: str, axis: str) -> int:
    """Length of the dataset's chunks along an axis; 1 if it has no chunks, or no such axis."""
    return dataset.chunks[axes.index(axis)] if dataset.chunks and axis in axes else 1


def _regions(dataset: h5py.Dataset, axes: str, first: int, count: int, stride: int) -> Iterator[_Region]:
    """Cut samples `first .. first + count` into hyperslabs of about `BLOCK_BYTES`, of whole chunks.

    A hyperslab that covers a part of a chunk would have all of it decoded, and the next one again.
    """
    shape = dict(zip(axes, dataset.shape, strict=True))
    num_times = shape.get("t", 1)
    frame_bytes = dataset.dtype.itemsize * math.prod(n for axis, n in shape.items() if axis not in "st")
    samples_per_chunk = chunk_length(dataset, axes, "s")
    times_per_chunk = chunk_length(dataset, axes, "t")
    samples_per_block = _whole(BLOCK_BYTES // (frame_bytes * num_times), samples_per_chunk)
    times_per_block = num_times
    if samples_per_chunk * frame_bytes * num_times > BLOCK_BYTES:
        times_per_block = _whole(BLOCK_BYTES // (frame_bytes * samples_per_chunk), times_per_chunk)
    for samples in _aligned(first, first + count, samples_per_block):
        rows = slice(samples.start - first, samples.stop - first)
        for times in _aligned(0, num_times, times_per_block):
            start = -(-times.start // stride) * stride  # the first selected step from here on
            if start < times.stop:
                frames = slice(start // stride, -(-times.stop // stride))
                yield _Region(samples, slice(start, times.stop, stride), rows, frames)


def _whole(num: int, per_chunk: int) -> int:
    """`num` rounded down to whole chunks, at least one."""
    return max(1, num // per_chunk) * per_chunk


def _aligned(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cut a range at the multiples of `size`."""
    while start < stop:
        end = min(start // size * size + size, stop)
        yield slice(start, end)
        start = end


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


@dataclass(frozen=True)
class DatasetExtent:
    """Where the bytes of a dataset lie in its file, in one piece and as they are in memory.

    Attributes:
        fd: Descriptor of the file, which belongs to HDF5.
        offset: The dataset's first byte.
        shape: The dataset's.
        dtype: Likewise.
        is_mapped: Whether what lies in the page cache is copied out of a mapping. Whoever cuts the file in
            the milliseconds that this takes ends the process by SIGBUS: for reader processes only.
    """

    fd: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    is_mapped: bool = False

    def sample_nbytes(self, axes: str) -> int:
        """Bytes of one sample where the dataset's axes are `axes`."""
        return self.dtype.itemsize * math.prod(self.shape[axes.startswith("s") :])

    def fits(self, out: np.ndarray, *, axes: str, to_axes: str, selection: Selection) -> bool:
        """Whether samples lie here as they will in `out`, so that one copy of all bytes moves them.

        Args:
            out: Where samples are meant to go, with the axes `to_axes`.
            axes: Letters of the stored axes, see `contents`.
            to_axes: Letters of the axes of `out`, "s" first.
            selection: Strides in space and time.
        """
        is_in_order = axes == "".join(axis for axis in to_axes if axis in axes)
        is_whole = all(selection.step(axis) == 1 for axis in axes)
        if not (is_in_order and is_whole and out.flags.c_contiguous and out.dtype == self.dtype):
            return False
        # Else the same values go to several places along an axis that the dataset lacks.
        return out.nbytes <= (len(out) if "s" in axes else 1) * self.sample_nbytes(axes)

    def read_into(self, out: np.ndarray, *, first: int, progress: Callable[[], None]) -> None:
        """Read bytes of the dataset.

        Args:
            out: Where they go, C-contiguous.
            first: The first one, counted from the dataset's.
            progress: Called after every few MiB.

        Raises:
            OSError: As the file system says, or if the file ends before.
        """
        view = out.data.cast("B")
        for done in range(0, len(view), _MAPPED_AT_ONCE):
            part, start = view[done : done + _MAPPED_AT_ONCE], self.offset + first + done
            if self.is_mapped and _copy_cached(self.fd, start, part):
                progress()
            else:
                _read(self.fd, start, part, progress)


def _read(fd: int, first: int, out: memoryview, progress: Callable[[], None]) -> None:
    for done in range(0, len(out), _READ_AT_ONCE):
        piece = out[done : done + _READ_AT_ONCE]
        if files.read_into(fd, first + done, piece) < len(piece):
            raise OSError("the file ends before its data does")
        progress()


def _copy_cached(fd: int, first: int, out: memoryview) -> bool:
    """Copy a part of a file out of a mapping; False, and nothing copied, where a call reads it as fast.

    That is what isn't in the page cache: a mapping reads ahead less, and a disk's error would have no name.
    """
    if len(out) < _MAPPED_FROM or not files.in_page_cache(fd, first, len(out)):
        return False
    shift = first % mmap.PAGESIZE
    try:
        mapping = memory.map_read_only(fd, shift + len(out), first=first - shift)
    except (OSError, ValueError):  # too little address space, or the file was cut
        return False
    source, runs = np.frombuffer(mapping, np.uint8), Runs(np.array([shift]), len(out))
    copy_runs(source, source.dtype, runs, np.frombuffer(out, np.uint8))
    return True


def extent_of(dataset: h5py.Dataset, *, is_mapped: bool = False) -> DatasetExtent | None:
    """Where a dataset lies, unless HDF5 is needed to read it; asking takes half a millisecond.

    Args:
        dataset: The dataset; its file stays open as long as the extent is used.
        is_mapped: See `DatasetExtent`.
    """
    if dataset.file.driver != "sec2" or dataset.id.get_create_plist().get_layout() != h5py.h5d.CONTIGUOUS:
        return None
    if dataset.external or dataset.id.get_storage_size() != dataset.nbytes:  # not allocated: it is all fill
        return None
    offset = dataset.id.get_offset()
    if offset is None:
        return None
    return DatasetExtent(dataset.file.id.get_vfd_handle(), offset, dataset.shape, dataset.dtype, is_mapped)

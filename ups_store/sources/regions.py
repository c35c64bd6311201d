"""Reading samples out of one dataset: in bounded hyperslabs, reduced and with their axes put in order.

Samples that lie in a file as they will in the store go to their place in one copy.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ups_store.sources.cf_encoding import CfEncoding
from ups_store.sources.contents import Selection
from ups_store.sources.hdf5 import h5py
from ups_store.sources.source_files import BLOCK_BYTES
from ups_store.sources.values import CastLoss, cast_values
from ups_store.system import files, memory
from ups_store.system.runs import Runs, copy_runs

_READ_AT_ONCE = 8 << 20  # after each the reader says that it gets on
_MAPPED_AT_ONCE = 64 << 20  # counts as the reader's memory meanwhile
_MAPPED_FROM = 4 << 20  # less is never copied past the caches


def read_hyperslabs(
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

    They go to `out`, shape (samples, ...) in the order of `to_axes` after reduction, of any strides and any
    floating dtype, to which they are cast. A dataset without "s" in its `axes` is one sample; axes that it
    lacks have length 1 in `out`. Without an `extent` HDF5 reads; `progress` is called after every few MiB.
    """
    if extent and not encoding and extent.fits(out, axes=axes, to_axes=to_axes, selection=selection):
        extent.read_into(out, first=first * extent.sample_nbytes(axes), progress=progress)
        return CastLoss()
    loss, channel_axes = CastLoss(), sum(axis in "ckd" for axis in to_axes)
    # HDF5 skips time steps of a contiguous dataset twice as fast as it reads them, but takes 5 times as
    # long to skip within chunks, and longer than numpy to skip points of a row.
    skips_times = dataset.chunks is None
    steps = {axis: 1 if axis == "t" and skips_times else selection.step(axis) for axis in axes}
    order = [axes.index(axis) for axis in to_axes if axis in axes]
    for samples, times in _slabs(dataset, axes, first, len(out), selection.reduce_time):
        stored = {"s": samples, "t": times if skips_times else slice(times.start, times.stop)}
        block: np.ndarray = dataset[tuple(stored.get(axis, slice(None)) for axis in axes)]
        block = block[tuple(slice(None, None, steps[axis]) for axis in axes)]
        if encoding:
            block = encoding.decode(block)
        target = out[samples.start - first : samples.stop - first]
        if "t" in to_axes:
            target = target[:, times.start // times.step : -(-times.stop // times.step)]
        # In the order of `to_axes`, and with an axis of length 1 for each that it lacks.
        ordered = block.transpose(order)[tuple(slice(None) if axis in axes else None for axis in to_axes)]
        loss += cast_values(target, ordered, channel_axes=channel_axes)
        progress()
    return loss


def chunk_length(dataset: h5py.Dataset, axes: str, axis: str) -> int:
    """Return the length of the dataset's chunks along an axis; 1 if it has no chunks, or no such axis."""
    return dataset.chunks[axes.index(axis)] if dataset.chunks and axis in axes else 1


def _slabs(
    dataset: h5py.Dataset, axes: str, first: int, count: int, stride: int
) -> Iterator[tuple[slice, slice]]:
    """Cut samples `first .. first + count` into hyperslabs of about `BLOCK_BYTES`, of whole chunks.

    A hyperslab that covers a part of a chunk would have all of it decoded, and the next one again. Times have
    the stride of the selection.
    """
    shape = dict(zip(axes, dataset.shape, strict=True))
    num_times = shape.get("t", 1)
    frame_bytes = dataset.dtype.itemsize * math.prod(n for axis, n in shape.items() if axis not in "st")
    samples_per_chunk, times_per_chunk = (chunk_length(dataset, axes, axis) for axis in "st")
    samples_per_block = _whole_chunks(BLOCK_BYTES // (frame_bytes * num_times), samples_per_chunk)
    times_per_block = num_times
    if samples_per_chunk * frame_bytes * num_times > BLOCK_BYTES:
        times_per_block = _whole_chunks(BLOCK_BYTES // (frame_bytes * samples_per_chunk), times_per_chunk)
    for samples in _aligned(first, first + count, samples_per_block):
        for times in _aligned(0, num_times, times_per_block):
            start = -(-times.start // stride) * stride  # the first selected step from here on
            if start < times.stop:
                yield samples, slice(start, times.stop, stride)


def _whole_chunks(num: int, per_chunk: int) -> int:
    """Round down to whole chunks, at least one."""
    return max(1, num // per_chunk) * per_chunk


def _aligned(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cut a range at the multiples of `size`."""
    while start < stop:
        end = min(start // size * size + size, stop)
        yield slice(start, end)
        start = end


@dataclass(frozen=True)
class DatasetExtent:
    """Where the bytes of a dataset lie in its file, as they are in memory and without gaps."""

    fd: int  # of the file, which belongs to HDF5
    offset: int  # the dataset's first byte
    shape: tuple[int, ...]
    dtype: np.dtype
    # Whether what lies in the page cache is copied out of a mapping. Whoever cuts the file in the
    # milliseconds that this takes ends the process by SIGBUS: for reader processes only.
    is_mapped: bool = False

    @classmethod
    def of(cls, dataset: h5py.Dataset, *, is_mapped: bool = False) -> DatasetExtent | None:
        """Find where a dataset lies, unless HDF5 is needed to read it; asking takes half a millisecond.

        Its file has to stay open as long as the extent is used.
        """
        layout = dataset.id.get_create_plist().get_layout()
        if dataset.file.driver != "sec2" or layout != h5py.h5d.CONTIGUOUS or dataset.external:
            return None
        if dataset.id.get_storage_size() != dataset.nbytes:  # not allocated: it is all fill
            return None
        offset = dataset.id.get_offset()
        if offset is None:
            return None
        return cls(dataset.file.id.get_vfd_handle(), offset, dataset.shape, dataset.dtype, is_mapped)

    def sample_nbytes(self, axes: str) -> int:
        """Return the bytes of one sample where the dataset's axes are `axes`."""
        return self.dtype.itemsize * math.prod(self.shape[axes.startswith("s") :])

    def fits(self, out: np.ndarray, *, axes: str, to_axes: str, selection: Selection) -> bool:
        """Tell whether samples lie here as they will in `out`, so that one copy of all bytes moves them."""
        is_in_order = axes == "".join(axis for axis in to_axes if axis in axes)
        is_whole = all(selection.step(axis) == 1 for axis in axes)
        if not (is_in_order and is_whole and out.flags.c_contiguous and out.dtype == self.dtype):
            return False
        # Else the same values go to several places along an axis that the dataset lacks.
        return out.nbytes <= (len(out) if "s" in axes else 1) * self.sample_nbytes(axes)

    def read_into(self, out: np.ndarray, *, first: int, progress: Callable[[], None]) -> None:
        """Read bytes of the dataset from its byte `first` on; `progress` is called after every few MiB."""
        view = out.data.cast("B")
        for done in range(0, len(view), _MAPPED_AT_ONCE):
            block, start = view[done : done + _MAPPED_AT_ONCE], self.offset + first + done
            if self.is_mapped and _copy_cached(self.fd, start, block):
                progress()
                continue
            for read in range(0, len(block), _READ_AT_ONCE):
                target = block[read : read + _READ_AT_ONCE]
                if files.read_into(self.fd, start + read, target) < len(target):
                    raise OSError("the file ends before its data does")
                progress()


def _copy_cached(fd: int, first: int, out: memoryview) -> bool:
    """Copy bytes of a file out of a mapping; False, and nothing copied, where a call reads them as fast.

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

"""The fast path: samples that lie in a file as they will in the store go to their place in one copy."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import h5py
import numpy as np
from h5py import h5d

from ups_store.ingest.info import Selection
from ups_store.read.runs import Runs, copy_runs
from ups_store.system import files, mappings

_READ_AT_ONCE = 8 << 20  # after each the reader says that it gets on
_MAPPED_AT_ONCE = 64 << 20  # counts as the reader's memory meanwhile
_MAPPED_FROM = 4 << 20  # less is never copied past the caches


@dataclass(frozen=True)
class Place:
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

    def read_into(self, out: np.ndarray, *, first: int, got_on: Callable[[], None]) -> None:
        """Read bytes of the dataset.

        Args:
            out: Where they go, C-contiguous.
            first: The first one, counted from the dataset's.
            got_on: Called after every few MiB.

        Raises:
            OSError: As the file system says, or if the file ends before.
        """
        view = out.data.cast("B")
        for done in range(0, len(view), _MAPPED_AT_ONCE):
            part, start = view[done : done + _MAPPED_AT_ONCE], self.offset + first + done
            if self.is_mapped and _copy_cached(self.fd, start, part):
                got_on()
            else:
                _read(self.fd, start, part, got_on)


def _read(fd: int, first: int, out: memoryview, got_on: Callable[[], None]) -> None:
    for done in range(0, len(out), _READ_AT_ONCE):
        piece = out[done : done + _READ_AT_ONCE]
        if files.read_into(fd, first + done, piece) < len(piece):
            raise OSError("the file ends before its data does")
        got_on()


def _copy_cached(fd: int, first: int, out: memoryview) -> bool:
    """Copy a part of a file out of a mapping; False, and nothing copied, where a call reads it as fast.

    That is what isn't in the page cache: a mapping reads ahead less, and a disk's error would have no name.
    """
    if len(out) < _MAPPED_FROM or not files.in_page_cache(fd, first, len(out)):
        return False
    shift = first % mmap.PAGESIZE
    try:
        mapping = mappings.map_read_only(fd, shift + len(out), first=first - shift)
    except (OSError, ValueError):  # too little address space, or the file was cut
        return False
    source, runs = np.frombuffer(mapping, np.uint8), Runs(np.array([shift]), len(out))
    copy_runs(source, source.dtype, runs, np.frombuffer(out, np.uint8))
    return True


def place_of(dataset: h5py.Dataset, *, is_mapped: bool = False) -> Place | None:
    """Where a dataset lies, unless HDF5 is needed to read it; asking takes half a millisecond.

    Args:
        dataset: The dataset; its file stays open as long as the place is used.
        is_mapped: See `Place`.
    """
    if dataset.file.driver != "sec2" or dataset.id.get_create_plist().get_layout() != h5d.CONTIGUOUS:
        return None
    if dataset.external or dataset.id.get_storage_size() != dataset.nbytes:  # not allocated: it is all fill
        return None
    offset = dataset.id.get_offset()
    if offset is None:
        return None
    return Place(dataset.file.id.get_vfd_handle(), offset, dataset.shape, dataset.dtype, is_mapped)

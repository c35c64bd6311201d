"""The fast path: samples that lie in a file as they will in the store go to their place in one copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import h5py
import numpy as np
from h5py import h5d

from ups_store import files
from ups_store.ingest.info import Selection

_PIECE_BYTES = 8 << 20  # read at once; after each the reader says that it gets on


@dataclass(frozen=True)
class Place:
    """Where the bytes of a dataset lie in its file, in one piece and as they are in memory.

    Attributes:
        fd: Descriptor of the file, which belongs to HDF5.
        offset: The dataset's first byte.
        shape: The dataset's.
        dtype: Likewise.
    """

    fd: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

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

        Not through a mapping, which is a few percent faster: there a disk's error, or a file that is cut,
        would be the end of the process instead of an error with a name.

        Args:
            out: Where they go, C-contiguous.
            first: The first one, counted from the dataset's.
            got_on: Called after every few MiB.

        Raises:
            OSError: As the file system says, or if the file ends before.
        """
        view = out.data.cast("B")
        start = self.offset + first
        for done in range(0, len(view), _PIECE_BYTES):
            piece = view[done : done + _PIECE_BYTES]
            if files.read_into(self.fd, start + done, piece) < len(piece):
                raise OSError("the file ends before its data does")
            got_on()


def place_of(dataset: h5py.Dataset) -> Place | None:
    """Where a dataset lies, unless HDF5 is needed to read it; asking takes half a millisecond.

    Args:
        dataset: The dataset; its file stays open as long as the place is used.
    """
    if dataset.file.driver != "sec2" or dataset.id.get_create_plist().get_layout() != h5d.CONTIGUOUS:
        return None
    if dataset.external or dataset.id.get_storage_size() != dataset.nbytes:  # not allocated: it is all fill
        return None
    offset = dataset.id.get_offset()
    if offset is None:
        return None
    return Place(dataset.file.id.get_vfd_handle(), offset, dataset.shape, dataset.dtype)

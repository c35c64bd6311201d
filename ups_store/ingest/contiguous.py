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
class RawSamples:
    """Where the samples of one dataset lie, one after the other.

    Attributes:
        fd: Descriptor of the file, which belongs to HDF5.
        offset: First byte of sample 0 in the file.
        sample_nbytes: Length of a sample.
    """

    fd: int
    offset: int
    sample_nbytes: int

    def read_into(self, out: np.ndarray, *, first: int, got_on: Callable[[], None]) -> None:
        """Read consecutive samples.

        Args:
            out: Where they go: C-contiguous, shape (samples, ...), of the dataset's dtype.
            first: Number of the first one in the dataset.
            got_on: Called after every few MiB.

        Raises:
            OSError: As the file system says, or if the file ends before.
        """
        view = out.data.cast("B")
        start = self.offset + first * self.sample_nbytes
        for done in range(0, len(view), _PIECE_BYTES):
            piece = view[done : done + _PIECE_BYTES]
            if files.read_into(self.fd, start + done, piece) < len(piece):
                raise OSError("the file ends before its data does")
            got_on()


def raw_samples(
    dataset: h5py.Dataset, out: np.ndarray, *, axes: str, to_axes: str, selection: Selection
) -> RawSamples | None:
    """Where samples can be read from without HDF5, or None if it has something to do: decode, cast, reorder.

    Args:
        dataset: A dataset with the axes `axes`.
        out: Where its samples are meant to go, with the axes `to_axes`.
        axes: Letters of the stored axes, see `contents`.
        to_axes: Letters of the axes of `out`, "s" first.
        selection: Strides in space and time.
    """
    is_in_order = axes == "".join(axis for axis in to_axes if axis in axes)
    is_whole = all(selection.step(axis) == 1 for axis in axes)
    if not (is_in_order and is_whole and out.flags.c_contiguous and out.dtype == dataset.dtype):
        return None
    if out.size > (len(out) if "s" in axes else 1) * math.prod(dataset.shape[axes.startswith("s") :]):
        return None  # the same values go to several places along an axis that the dataset lacks
    offset = _offset(dataset)
    if offset is None:
        return None
    per_sample = dataset.shape[axes.startswith("s") :]
    return RawSamples(
        dataset.file.id.get_vfd_handle(), offset, dataset.dtype.itemsize * math.prod(per_sample)
    )


def _offset(dataset: h5py.Dataset) -> int | None:
    """Where the bytes of a dataset lie in its file, if they lie there in one piece."""
    if dataset.file.driver != "sec2" or dataset.id.get_create_plist().get_layout() != h5d.CONTIGUOUS:
        return None
    if dataset.external or dataset.id.get_storage_size() != dataset.nbytes:  # not allocated: it is all fill
        return None
    return dataset.id.get_offset()  # type: ignore[no-any-return]  # h5py has no types

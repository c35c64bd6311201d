"""`SampledArray`: one array of an open store as what batches are copied from (spec 7.5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.gather import Samples, Window, batch_shape, runs_of
from ups_store.layout import ArrayLayout
from ups_store.metadata import dtype_of
from ups_store.output import MAX_ITEM_BYTES, check_output, new_output, slots_of
from ups_store.parallel import for_each, parts_of
from ups_store.pread import READS_IN_FLIGHT, read_samples
from ups_store.runs import BLOCK_BYTES, cast_into, copy_runs
from ups_store.store_file import StoreFile


class SampledArray:
    """An array with a sample axis; what every batch needs of it is worked out once.

    Attributes:
        layout: Its layout.
    """

    def __init__(self, layout: ArrayLayout, file: StoreFile) -> None:
        self.layout = layout
        self._file = file
        self._dtype = dtype_of(layout.meta.dtype)
        self._sample_shape = layout.meta.sample_shape
        self._is_read = file.access == "pread" or layout.entry is None
        if not self._is_read:
            nbytes = layout.meta.shape[0] * layout.stride
            self._memory = np.ndarray((nbytes,), np.uint8, file.mapping(), layout.offset)
            has_slots = layout.stride <= MAX_ITEM_BYTES
            self._slots = self._memory.view(f"V{layout.stride}") if has_slots else None

    def gather(
        self,
        samples: Samples,
        window: Window | None,
        out: npt.NDArray[Any] | None,
        *,
        num_threads: int | None = None,
    ) -> npt.NDArray[Any]:
        """Copy samples, or windows of them, into `out`, by default into new memory.

        Args:
            samples: Sample numbers, all valid, shape (B,), int64.
            window: Window over time, or None.
            out: Output, shape (B, ...); converted to if it has another dtype.
            num_threads: Threads that copy a part of the batch each, or reads under way at once.
        Returns:
            `out`, or the new memory, which the caller owns.
        Raises:
            SpecError: If `out` can't take the batch.
            TruncatedError: If a read finds the file cut.
        """
        shape = (len(samples), *self._sample_shape)
        if window is not None:
            shape = batch_shape(self.layout.meta, len(samples), window)
        if out is None:
            out = new_output(self.layout, shape, is_whole=window is None)
        else:
            check_output(self.layout.meta.name, self._dtype, shape, out)
        if not out.size:
            return out
        if self._is_read:
            num_reads = READS_IN_FLIGHT if num_threads is None else num_threads
            path = self._file.path
            read_samples(self._file.fd, self.layout, samples, window, out, path=path, num_threads=num_reads)
        elif num_threads is None or num_threads == 1:
            self._copy(samples, window, out, self._slots_of(out, window))
        else:
            self._copy_in_threads(samples, window, out, num_threads)
        return out

    def _slots_of(self, out: npt.NDArray[Any], window: Window | None) -> npt.NDArray[np.void] | None:
        """The output as items as large as a slot; None where it doesn't consist of such."""
        if window is not None or self._slots is None:
            return None
        if not self.layout.meta.is_sharded:  # sample behind sample, as in the output
            is_same = out.flags.c_contiguous and out.dtype == self._dtype
            return out.reshape(-1).view(self._slots.dtype) if is_same else None
        return slots_of(out, self._slots.dtype)

    def _copy(
        self,
        samples: Samples,
        window: Window | None,
        out: npt.NDArray[Any],
        slots: npt.NDArray[np.void] | None,
    ) -> None:
        if slots is not None and self._slots is not None:
            self._slots.take(samples, out=slots, mode="clip")  # checked before
        elif out.flags.c_contiguous:
            copy_runs(self._memory, self._dtype, runs_of(self.layout, samples, window), out)
        else:
            self._copy_in_blocks(samples, window, out)

    def _copy_in_blocks(self, samples: Samples, window: Window | None, out: npt.NDArray[Any]) -> None:
        num_rows = max(1, BLOCK_BYTES // (out.nbytes // len(out)))
        for first in range(0, len(out), num_rows):
            rows = slice(first, first + num_rows)
            block = np.empty(out[rows].shape, self._dtype)
            part = None if window is None else window.of(rows)
            copy_runs(self._memory, self._dtype, runs_of(self.layout, samples[rows], part), block)
            cast_into(block, out[rows])

    def _copy_in_threads(
        self, samples: Samples, window: Window | None, out: npt.NDArray[Any], num_threads: int
    ) -> None:
        slots = self._slots_of(out, window)

        def copy(rows: slice) -> None:
            part = None if window is None else window.of(rows)
            self._copy(samples[rows], part, out[rows], None if slots is None else slots[rows])

        for_each(copy, parts_of(len(samples), num_threads), num_threads=num_threads)

"""`SampledArray`: one array of an open store as what batches are copied from (spec 7.5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.format.layout import ArrayLayout
from ups_store.format.metadata import dtype_of
from ups_store.read.gather import (
    TIME_DIM,
    Pattern,
    Samples,
    TimeWindow,
    batch_shape,
    check_output,
    runs_of,
    whole_pattern,
    window_pattern,
)
from ups_store.read.store_file import READS_IN_FLIGHT, StoreFile, read_samples
from ups_store.system import runs
from ups_store.system.parallel import for_each, parts_of
from ups_store.system.runs import BLOCK_BYTES, cast_into, copy_runs

MAX_PATTERNS = 64  # that are kept of an array: a loop uses a few lengths and strides


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
        self._whole = whole_pattern(layout.meta)
        self._patterns: dict[tuple[int, int], Pattern] = {}  # of windows, by length and stride
        self._is_timed = TIME_DIM in layout.meta.dims

    def gather_usual(
        self,
        indices: object,
        start: object,
        length: int | None,
        stride: int,
        out: npt.NDArray[Any] | None,
        checked: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[Any] | None:
        """The usual `gather`, checked and copied by one call of compiled code.

        With small samples the checks in Python would take longer than the copy.

        Args:
            indices: Sample numbers.
            start: First time step per sample, or None.
            length: Number of time steps; None for whole samples.
            stride: Time steps from one to the next.
            out: Output; new memory by default.
            checked: See `TouchChecks.flags`.
        Returns:
            The output; None, with nothing of use copied, where anything is unusual, or wrong: ask `gather`.
        """
        if runs.compiled is None or self._is_read or type(indices) is not np.ndarray or indices.ndim != 1:
            return None
        pattern = self._pattern(length, stride) if self._is_timed else self._whole
        if pattern is None:
            return None
        shape = (len(indices), *pattern.shape)
        if out is None:
            out = np.empty(shape, self._dtype)
        elif type(out) is not np.ndarray or out.dtype != self._dtype or out.shape != shape:
            return None
        is_copied = runs.compiled.gather(
            self._memory,
            self.layout.meta.shape[0],
            self.layout.stride,
            pattern.num_starts,
            pattern.step_nbytes,
            pattern.within,
            pattern.run_nbytes,
            indices,
            start if self._is_timed else None,
            out,
            checked,
            self.layout.meta.sample_nbytes,
        )
        return out if is_copied else None

    def _pattern(self, length: int | None, stride: int) -> Pattern | None:
        """The pattern of whole samples or windows; None where no window is that long."""
        if length is None:
            return self._whole
        known = self._patterns.get((length, stride))
        if known is not None:
            return known
        num_steps = self.layout.meta.shape[self.layout.meta.dims.index(TIME_DIM)]
        if length < 1 or stride < 1 or (length - 1) * stride >= num_steps:
            return None
        # A single step has no next one, and its stride may be any number.
        pattern = window_pattern(self.layout.meta, length, stride if length > 1 else 1)
        if len(self._patterns) < MAX_PATTERNS:
            self._patterns[length, stride] = pattern
        return pattern

    def gather(
        self,
        samples: Samples,
        window: TimeWindow | None,
        out: npt.NDArray[Any] | None,
        *,
        num_threads: int | None = None,
    ) -> npt.NDArray[Any]:
        """Copy samples, or windows of them, into `out`, by default into new memory.

        Args:
            samples: Sample numbers, all valid, shape (B,), int64.
            window: TimeWindow over time, or None.
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
            out = np.empty(shape, self._dtype)
        else:
            check_output(self.layout.meta.name, self._dtype, shape, out)
        if not out.size:
            return out
        if self._is_read:
            num_reads = READS_IN_FLIGHT if num_threads is None else num_threads
            path, descriptor = self._file.path, self._file.descriptor  # held, see there
            read_samples(descriptor.fd, self.layout, samples, window, out, path=path, num_threads=num_reads)
        elif num_threads is None or num_threads == 1:
            self._copy(samples, window, out)
        else:
            self._copy_in_threads(samples, window, out, num_threads)
        return out

    def _copy(self, samples: Samples, window: TimeWindow | None, out: npt.NDArray[Any]) -> None:
        if out.flags.c_contiguous:
            copy_runs(self._memory, self._dtype, runs_of(self.layout, samples, window), out)
        else:
            self._copy_in_blocks(samples, window, out)

    def _copy_in_blocks(self, samples: Samples, window: TimeWindow | None, out: npt.NDArray[Any]) -> None:
        num_rows = max(1, BLOCK_BYTES // (out.nbytes // len(out)))
        for first in range(0, len(out), num_rows):
            rows = slice(first, first + num_rows)
            block = np.empty(out[rows].shape, self._dtype)
            part = None if window is None else window.of(rows)
            copy_runs(self._memory, self._dtype, runs_of(self.layout, samples[rows], part), block)
            cast_into(block, out[rows])

    def _copy_in_threads(
        self, samples: Samples, window: TimeWindow | None, out: npt.NDArray[Any], num_threads: int
    ) -> None:
        def copy(rows: slice) -> None:
            part = None if window is None else window.of(rows)
            self._copy(samples[rows], part, out[rows])

        for_each(copy, parts_of(len(samples), num_threads), num_threads=num_threads)

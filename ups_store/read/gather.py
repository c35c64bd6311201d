"""What a batch is made of, and how it is copied: samples, or windows over their time (spec 7.5).

The arguments of `gather` become checked values of one dtype here: sample numbers, windows, and the memory
that the batch goes to. `SampledArray` copies out of a mapping, or reads: neighbours together, and several
reads under way at once, since each may wait for a disk or a server.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import SampleIndexError, SpecError
from ups_store.format.layout import ArrayLayout
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.read.store_file import StoreFile, read_rows
from ups_store.system import runs
from ups_store.system.memory import page_aligned
from ups_store.system.parallel import for_each, parts_of
from ups_store.system.runs import BLOCK_BYTES, Runs, cast_into, copy_runs, items_of

TIME_DIM = "time"
READS_IN_FLIGHT = 8
MAX_PATTERNS = 64  # that are kept of an array: a loop uses a few lengths and strides

Samples: TypeAlias = npt.NDArray[np.int64]

Indices: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

_MAX_GAP_BYTES = 64 << 10  # between runs: less is read along, sooner than another request is answered
_READ_BYTES = 4 << 20  # of neighbours together
_INT64 = np.dtype(np.int64)
_LARGEST = np.iinfo(np.int64).max


def names_of(names: Sequence[str] | bytes) -> tuple[str, ...]:
    """Give the names of arrays; SpecError for one that isn't in a list: it would be taken for its letters."""
    if isinstance(names, str | bytes):
        name = names.decode(errors="replace") if isinstance(names, bytes) else str(names)
        hint = f"write [{name!r}]"
        raise SpecError("one name", kind="names", expected="a list of names", found=repr(names), hint=hint)
    return tuple(names)


@dataclass(frozen=True)
class TimeWindow:
    """A window over time."""

    axis: int  # the time axis, counted without the sample axis
    start: Samples  # first time step per sample, shape (B,), int64
    length: int  # number of time steps
    stride: int  # time steps from one to the next; 1 where there is no next

    def of(self, rows: slice) -> TimeWindow:
        """Give the window for some of the samples."""
        return replace(self, start=self.start[rows])

    def steps(self, row: int) -> tuple[slice, ...]:
        """Index that cuts the window out of one sample."""
        first = int(self.start[row])
        last = first + (self.length - 1) * self.stride
        return (*[slice(None)] * self.axis, slice(first, last + 1, self.stride))


class BatchArguments(NamedTuple):
    """The arguments of `gather` about windows over time, memory and threads, as they were given."""

    start: int | Indices | None
    length: int | None
    stride: int
    out: Mapping[str, Any] | None
    num_threads: int | None

    @property
    def is_window(self) -> bool:
        """Tell whether windows are asked for, not whole samples."""
        return self.start is not None or self.length is not None or self.stride != 1


def window_of(meta: ArrayMeta, num: int, arguments: BatchArguments) -> TimeWindow | None:
    """Compute the window that `gather`'s arguments mean for one array; None for whole samples."""
    if TIME_DIM not in meta.dims or not arguments.is_window:
        return None
    start, length, stride = arguments[:3]
    axis = meta.dims.index(TIME_DIM) - 1
    num_steps = meta.shape[axis + 1]
    first = int64_of(0 if start is None else start)
    if first is None or first.shape not in ((), (num,)):
        expected = f"an integer, or {num} of them"
        raise SpecError("window start", kind="window", array=meta.name, expected=expected, found=start)
    if not _is_count(stride) or not (length is None or _is_count(length)):
        actual = f"length={length}, stride={stride}"
        raise SpecError(
            "window", kind="window", array=meta.name, expected="length and stride >= 1", found=actual
        )
    steps, last = _extent(
        num_steps, largest_unsigned(first if first.ndim else first.reshape(1)), length, stride
    )
    if not steps or last >= num_steps:
        exact = [int(value) for value in np.asarray(first if start is None else start, object).reshape(-1)]
        _, last = _extent(num_steps, max(exact), length, stride)
        raise SampleIndexError(
            "window reaches outside the time steps",
            kind="window",
            array=meta.name,
            expected=f"steps 0..{num_steps - 1}",
            found=f"{min(exact)}..{max(last, *exact)}",
        )
    starts = first if first.shape else np.full(num, first)
    return TimeWindow(axis, starts, steps, int(stride) if steps > 1 else 1)


def _extent(num_steps: int, first: int, length: int | None, stride: int) -> tuple[int, int]:
    """Give the number of time steps of a window, and its last one."""
    steps = max(0, -(-(num_steps - first) // int(stride))) if length is None else int(length)
    return steps, first + (steps - 1) * int(stride)


def check_effect(arrays: Sequence[ArrayMeta], arguments: BatchArguments, *, path: Path) -> None:
    """Refuse arguments of `gather` that would have no effect on any of the arrays: they are mistakes."""
    if arguments.is_window and not any(TIME_DIM in meta.dims for meta in arrays):
        raise SpecError("window", kind="window", path=path, expected="an array with dimension 'time'")
    out = arguments.out
    if out is None:
        return
    names = [meta.name for meta in arrays]
    unknown = [name for name in out if name not in names] if isinstance(out, Mapping) else type(out)
    if unknown:
        expected = f"arrays by name, of {', '.join(names)}"
        raise SpecError("out", kind="out", path=path, expected=expected, found=unknown)


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= 1


def batch_shape(meta: ArrayMeta, num: int, window: TimeWindow | None) -> tuple[int, ...]:
    """Compute the shape of a batch of `num` samples or windows."""
    shape = meta.sample_shape
    if window is None:
        return (num, *shape)
    return (num, *shape[: window.axis], window.length, *shape[window.axis + 1 :])


@dataclass(frozen=True)
class Pattern:
    """The runs that every sample, or every window of one length and stride, consists of."""

    shape: tuple[int, ...]  # shape of a sample, or window
    num_starts: int  # time steps at which a window may begin; 1 for whole samples
    step_nbytes: int  # from one time step to the next; 0 for whole samples
    within: npt.NDArray[np.int64]  # first byte of each run, counted from the first one's, int64, shape (k,)
    run_nbytes: int  # bytes of each


def window_pattern(meta: ArrayMeta, length: int, stride: int) -> Pattern:
    """Give the pattern of windows over time."""
    shape, axis = meta.sample_shape, meta.dims.index(TIME_DIM) - 1
    num_before, num_steps = math.prod(shape[:axis]), shape[axis]
    step_nbytes = math.prod(shape[axis + 1 :]) * dtype_of(meta.dtype).itemsize
    steps_per_run = length if stride == 1 else 1
    before = np.arange(num_before) * (num_steps * step_nbytes)
    within = before[:, None] + np.arange(length // steps_per_run) * (stride * step_nbytes)
    return Pattern(
        shape=(*shape[:axis], length, *shape[axis + 1 :]),
        num_starts=num_steps - (length - 1) * stride,
        step_nbytes=step_nbytes,
        within=within.reshape(-1),
        run_nbytes=steps_per_run * step_nbytes,
    )


def runs_of(array: ArrayLayout, samples: Samples, window: TimeWindow | None) -> Runs:
    """Compute where samples or windows lie, from the first byte of the array on, in the batch's order."""
    firsts = samples * array.stride
    if window is None:
        return Runs(firsts, array.meta.sample_nbytes)
    pattern = window_pattern(array.meta, window.length, window.stride)
    firsts += window.start * pattern.step_nbytes
    return Runs((firsts[:, None] + pattern.within).reshape(-1), pattern.run_nbytes)


def check_output(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], out: Any) -> None:
    """Fail unless a batch can be written to `out`, converted if need be."""
    if not isinstance(out, np.ndarray):
        actual = type(out).__name__
        raise SpecError("out", kind="out", array=name, expected="an ndarray", found=actual)
    if out.shape == shape and out.flags.writeable:
        if out.dtype == dtype or np.can_cast(dtype, out.dtype, "safe"):
            return
        # By asking for another floating-point dtype the caller accepts rounding, and nothing else.
        if all(numbers.kind == "f" or numbers.name == "bfloat16" for numbers in (dtype, out.dtype)):
            return
    hint = "floating-point numbers convert to any floating-point dtype, others where nothing can be lost"
    raise SpecError(
        "out",
        kind="out",
        array=name,
        expected=f"writeable {dtype} {shape}",
        found=f"{'writeable' if out.flags.writeable else 'read-only'} {out.dtype} {out.shape}",
        hint=None if out.dtype == dtype else hint,
    )


def check_indices(indices: Indices | slice, num_samples: int, *, path: Path) -> Samples:
    """Sample numbers as int64, shape (B,), counted from 0; no copy of what is that already."""
    if isinstance(indices, slice):
        try:
            return np.arange(*indices.indices(num_samples))
        except (TypeError, ValueError) as error:  # its ends are no integers, or its step is 0
            expected = "a slice of integers"
            raise SpecError("indices", kind="index", path=path, expected=expected, found=indices) from error
    samples = int64_of(indices)
    if samples is None or samples.ndim != 1:
        array = np.asarray(indices)
        actual = f"{array.dtype} {array.shape}"
        hint = "of a mask np.flatnonzero(mask)" if array.dtype == bool else None
        expected = "integers, shape (B,)"
        raise SpecError("indices", kind="index", path=path, expected=expected, found=actual, hint=hint)
    if not samples.size or largest_unsigned(samples) < num_samples:
        return samples
    outside = np.flatnonzero((samples < -num_samples) | (samples >= num_samples))
    if outside.size:
        expected = f"-{num_samples} <= index < {num_samples}" if num_samples else "none: it has no samples"
        wrong = int(np.asarray(indices, object)[outside[0]])
        raise SampleIndexError("no such sample", path=path, expected=expected, found=wrong)
    return np.where(samples < 0, samples + num_samples, samples)


def int64_of(values: Any) -> npt.NDArray[np.int64] | None:
    """The values as int64, the largest there is where they are outside of it; None if one is no integer."""
    raw = np.asarray(values)
    if raw.dtype is _INT64:
        return raw
    if raw.dtype.kind == "u":
        raw = np.minimum(raw, np.uint64(_LARGEST))
    if raw.dtype.kind in "iu" or not raw.size:
        return raw.astype(np.int64)
    exact = np.asarray(values, object)  # of [2**63, 2] NumPy makes floating-point numbers
    values = exact.reshape(-1).tolist()
    if not all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in values):
        return None
    return np.where((exact >= -_LARGEST) & (exact <= _LARGEST), exact, _LARGEST).astype(np.int64)


def largest_unsigned(values: npt.NDArray[np.int64]) -> int:
    """The largest value of shape (B,), 0 of none; 2**63 and more if one is negative: one pass tells both."""
    if not values.size:
        return 0
    unsigned = values.view(np.uint64)
    return int(unsigned[unsigned.argmax()])  # half the time of `max`, which for a batch is most of the call


def pick(whole: npt.NDArray[Any], samples: Samples, window: TimeWindow | None, out: npt.NDArray[Any]) -> None:
    """Copy samples, or windows of them, out of an array in memory."""
    is_plain = out.dtype == whole.dtype and out.flags.c_contiguous and out.size > 0
    if window is None and is_plain:
        whole.take(samples, axis=0, out=out, mode="clip")
        return
    if window is not None and window.axis == 0 and is_plain:
        firsts = samples * whole.shape[1] + window.start
        frames = (firsts[:, None] + np.arange(window.length) * window.stride).reshape(-1)
        shape = whole.shape[2:]
        flat = whole.reshape(-1, *shape)
        flat.take(frames, axis=0, out=out.reshape(-1, *shape), mode="clip")
        return
    for row, sample in enumerate(samples.tolist()):
        values = whole[sample]
        cast_into(values if window is None else values[window.steps(row)], out[row, ...])


def batch_memory(
    meta: ArrayMeta, shape: tuple[int, ...], out: Mapping[str, npt.NDArray[Any]] | None
) -> npt.NDArray[Any]:
    """Find the memory for the batch of one array: what of `out` is meant for it, checked, else new."""
    target, dtype = None if out is None else out.get(meta.name), dtype_of(meta.dtype)
    if target is None:
        return np.empty(shape, dtype)
    check_output(meta.name, dtype, shape, target)
    return target


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
        one_run, nbytes = np.zeros(1, np.int64), layout.meta.sample_nbytes
        self._whole = Pattern(self._sample_shape, 1, 0, one_run, nbytes)
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
        """Do the usual `gather`, checked and copied by one call of compiled code.

        With small samples the checks in Python would take longer than the copy.
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
        """Give the pattern of whole samples or windows; None where no window is that long."""
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
        self, samples: Samples, window: TimeWindow | None, arguments: BatchArguments
    ) -> npt.NDArray[Any]:
        """Copy samples, or windows of them, into what is meant for them, else new memory."""
        meta, num_threads = self.layout.meta, arguments.num_threads
        out = batch_memory(meta, batch_shape(meta, len(samples), window), arguments.out)
        if not out.size:
            return out
        if self._is_read:
            num_reads = READS_IN_FLIGHT if num_threads is None else num_threads
            path, descriptor = self._file.path, self._file.descriptor  # held, see there
            read_samples(descriptor.fd, self.layout, samples, window, out, path=path, num_threads=num_reads)
        elif num_threads is None or num_threads == 1:
            self._copy(samples, window, out)
        else:

            def copy(rows: slice) -> None:
                self._copy(samples[rows], None if window is None else window.of(rows), out[rows])

            for_each(copy, parts_of(len(samples), num_threads), num_threads=num_threads)
        return out

    def _copy(self, samples: Samples, window: TimeWindow | None, out: npt.NDArray[Any]) -> None:
        if out.flags.c_contiguous:
            copy_runs(self._memory, self._dtype, runs_of(self.layout, samples, window), out)
            return
        num_rows = max(1, BLOCK_BYTES // (out.nbytes // len(out)))
        for first in range(0, len(out), num_rows):  # a block at a time by way of the cache
            rows = slice(first, first + num_rows)
            block = np.empty(out[rows].shape, self._dtype)
            part = None if window is None else window.of(rows)
            copy_runs(self._memory, self._dtype, runs_of(self.layout, samples[rows], part), block)
            cast_into(block, out[rows])


def read_samples(
    fd: int,
    array: ArrayLayout,
    samples: Samples,
    window: TimeWindow | None,
    out: npt.NDArray[Any],
    *,
    path: Path,
    num_threads: int = READS_IN_FLIGHT,
) -> None:
    """Read samples of one array, all valid, or windows of them, into `out`, converted if need be."""
    if not out.size:
        return
    extents, dtype = runs_of(array, samples, window), dtype_of(array.meta.dtype)
    target = out if out.flags.c_contiguous else np.empty(out.shape, dtype)
    rows = target.reshape(len(extents.firsts), -1)
    order = np.argsort(extents.firsts, kind="stable")
    firsts, nbytes = array.offset + extents.firsts[order], extents.nbytes

    def read(block: slice) -> None:
        """Read sorted runs by one call into their rows."""
        first, end, numbers = int(firsts[block][0]), int(firsts[block][-1]) + nbytes, order[block]
        if len(numbers) == 1 and rows.dtype == dtype:
            read_rows(fd, first, rows[numbers[0]], path=path)
            return
        memory = page_aligned(end - first)
        read_rows(fd, first, memory, path=path)
        picked = items_of(memory, nbytes)[firsts[block] - first]
        rows[numbers] = picked.view(dtype).reshape(len(numbers), -1)

    # Neighbours are read together, a few MiB at a time.
    is_far = np.diff(firsts) > nbytes + _MAX_GAP_BYTES
    neighbourhood = np.concatenate(([0], np.flatnonzero(is_far) + 1))
    since = firsts - np.repeat(firsts[neighbourhood], np.diff([*neighbourhood, len(firsts)]))
    is_next = is_far | (np.diff(since // _READ_BYTES) != 0)
    edges = [0, *(np.flatnonzero(is_next) + 1).tolist(), len(firsts)]
    blocks = [slice(first, end) for first, end in itertools.pairwise(edges)]
    for_each(read, blocks, num_threads=num_threads)
    if target is not out:
        out[...] = target

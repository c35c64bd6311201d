"""What a batch is made of: samples, or windows over their time, and where their bytes lie (spec 7.5).

The arguments of `gather` become checked values of one dtype here: sample numbers, windows, and the memory
that the batch goes to.
"""

from __future__ import annotations

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
from ups_store.system.runs import Runs, cast_into

TIME_DIM = "time"

Samples: TypeAlias = npt.NDArray[np.int64]

Indices: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

_INTEGERS = (int, np.integer)
_INT64 = np.dtype(np.int64)
_LARGEST = np.iinfo(np.int64).max


def names_of(names: Sequence[str] | bytes) -> tuple[str, ...]:
    """Names of arrays; SpecError for one that isn't in a list: it would be taken for its letters."""
    if isinstance(names, str | bytes):
        name = names.decode(errors="replace") if isinstance(names, bytes) else str(names)
        hint = f"write [{name!r}]"
        raise SpecError("one name", kind="names", expected="a list of names", found=repr(names), hint=hint)
    return tuple(names)


@dataclass(frozen=True)
class TimeWindow:
    """A window over time.

    Attributes:
        axis: The time axis, counted without the sample axis.
        start: First time step per sample, shape (B,), int64.
        length: Number of time steps.
        stride: Time steps from one to the next; 1 where there is no next.
    """

    axis: int
    start: Samples
    length: int
    stride: int

    def of(self, rows: slice) -> TimeWindow:
        """The window for some of the samples."""
        return replace(self, start=self.start[rows])

    def steps(self, row: int) -> tuple[slice, ...]:
        """Index that cuts the window out of one sample."""
        first = int(self.start[row])
        last = first + (self.length - 1) * self.stride
        return (*[slice(None)] * self.axis, slice(first, last + 1, self.stride))


class WindowArguments(NamedTuple):
    """The arguments of `gather` about windows over time, as they were given."""

    start: int | Indices | None
    length: int | None
    stride: int

    @property
    def is_any(self) -> bool:
        """Whether windows are asked for, not whole samples."""
        return self.start is not None or self.length is not None or self.stride != 1


def window_of(meta: ArrayMeta, num: int, asked: WindowArguments) -> TimeWindow | None:
    """The window that `gather`'s arguments mean for one array; None for whole samples.

    Raises:
        SampleIndexError: If it reaches past the last time step.
        SpecError: If it has no time step, or `start` isn't one number or one per sample.
    """
    if TIME_DIM not in meta.dims or not asked.is_any:
        return None
    start, length, stride = asked
    axis = meta.dims.index(TIME_DIM) - 1
    num_steps = meta.shape[axis + 1]
    first = int64_of(0 if start is None else start)
    if first is None or first.shape not in ((), (num,)):
        expected = f"an integer, or {num} of them"
        raise SpecError("window start", kind="window", array=meta.name, expected=expected, found=start)
    if not _is_count(stride) or not (length is None or _is_count(length)):
        found = f"length={length}, stride={stride}"
        raise SpecError(
            "window", kind="window", array=meta.name, expected="length and stride >= 1", found=found
        )
    steps, last = _extent(num_steps, largest(first if first.ndim else first.reshape(1)), length, stride)
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
    """Number of time steps of a window, and its last one."""
    steps = max(0, -(-(num_steps - first) // int(stride))) if length is None else int(length)
    return steps, first + (steps - 1) * int(stride)


def check_effect(
    arrays: Sequence[ArrayMeta], is_window: bool, out: Mapping[str, Any] | None, *, path: Path
) -> None:
    """Refuse arguments of `gather` that would have no effect on any of the arrays: they are mistakes."""
    if is_window and not any(TIME_DIM in meta.dims for meta in arrays):
        raise SpecError("window", kind="window", path=path, expected="an array with dimension 'time'")
    if out is None:
        return
    names = [meta.name for meta in arrays]
    unknown = [name for name in out if name not in names] if isinstance(out, Mapping) else type(out)
    if unknown:
        expected = f"arrays by name, of {', '.join(names)}"
        raise SpecError("out", kind="out", path=path, expected=expected, found=unknown)


def _is_count(value: object) -> bool:
    return isinstance(value, _INTEGERS) and int(value) >= 1


def batch_shape(meta: ArrayMeta, num: int, window: TimeWindow | None) -> tuple[int, ...]:
    """Shape of a batch of `num` samples or windows."""
    shape = meta.sample_shape
    if window is None:
        return (num, *shape)
    return (num, *shape[: window.axis], window.length, *shape[window.axis + 1 :])


@dataclass(frozen=True)
class Pattern:
    """The runs that every sample, or every window of one length and stride, consists of.

    Attributes:
        shape: Shape of a sample, or window.
        num_starts: Time steps at which a window may begin; 1 for whole samples.
        step_nbytes: From one time step to the next; 0 for whole samples.
        within: First byte of each run, counted from the first one's, int64, shape (k,).
        run_nbytes: Bytes of each.
    """

    shape: tuple[int, ...]
    num_starts: int
    step_nbytes: int
    within: npt.NDArray[np.int64]
    run_nbytes: int


def whole_pattern(meta: ArrayMeta) -> Pattern:
    """The pattern of whole samples: a run each."""
    return Pattern(meta.sample_shape, 1, 0, np.zeros(1, np.int64), meta.sample_nbytes)


def window_pattern(meta: ArrayMeta, length: int, stride: int) -> Pattern:
    """The pattern of windows over time.

    Args:
        meta: An array with a time axis.
        length: Number of time steps.
        stride: Time steps from one to the next.
    """
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
    """Where samples or windows lie, counted from the array's first byte, in the order of the batch."""
    firsts = samples * array.stride
    if window is None:
        return Runs(firsts, array.meta.sample_nbytes)
    pattern = window_pattern(array.meta, window.length, window.stride)
    firsts += window.start * pattern.step_nbytes
    return Runs((firsts[:, None] + pattern.within).reshape(-1), pattern.run_nbytes)


def check_output(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], out: Any) -> None:
    """Fail unless a batch can be written to `out`, converted if need be.

    Args:
        name: The array's name, for messages.
        dtype: Its dtype.
        shape: Shape of the batch, (B, ...).
        out: What the caller gave.
    Raises:
        SpecError: For another shape, read-only memory, or a dtype that doesn't hold the array's numbers.
    """
    if not isinstance(out, np.ndarray):
        found = type(out).__name__
        raise SpecError("out", kind="out", array=name, expected="an ndarray", found=found)
    is_same = out.dtype == dtype
    if out.shape == shape and out.flags.writeable and (is_same or _holds(out.dtype, dtype)):
        return
    hint = "floating-point numbers convert to any floating-point dtype, others where nothing can be lost"
    raise SpecError(
        "out",
        kind="out",
        array=name,
        expected=f"writeable {dtype} {shape}",
        found=f"{'writeable' if out.flags.writeable else 'read-only'} {out.dtype} {out.shape}",
        hint=None if is_same else hint,
    )


def _holds(dtype: np.dtype[Any], values: np.dtype[Any]) -> bool:
    """Whether an output may be of `dtype`: by asking for it the caller accepts rounding, nothing else."""
    return np.can_cast(values, dtype, "safe") or (_is_floating(values) and _is_floating(dtype))


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def check_indices(indices: Indices | slice, num_samples: int, *, path: Path) -> Samples:
    """Sample numbers as int64, shape (B,), counted from 0; no copy of what is that already.

    Args:
        indices: Numbers, negative ones from the end, or a slice; both as NumPy takes them.
        num_samples: N.
        path: For messages.
    Raises:
        SampleIndexError: Unless all are in -N..N - 1.
        SpecError: If they aren't integers (masks aren't), or not of shape (B,).
    """
    if isinstance(indices, slice):
        return _numbers_of(indices, num_samples, path)
    samples = int64_of(indices)
    if samples is None or samples.ndim != 1:
        given = np.asarray(indices)
        found = f"{given.dtype} {given.shape}"
        hint = "of a mask np.flatnonzero(mask)" if given.dtype == bool else None
        expected = "integers, shape (B,)"
        raise SpecError("indices", kind="index", path=path, expected=expected, found=found, hint=hint)
    if not samples.size or largest(samples) < num_samples:
        return samples
    outside = np.flatnonzero((samples < -num_samples) | (samples >= num_samples))
    if outside.size:
        expected = f"-{num_samples} <= index < {num_samples}" if num_samples else "none: it has no samples"
        wrong = int(np.asarray(indices, object)[outside[0]])
        raise SampleIndexError("no such sample", path=path, expected=expected, found=wrong)
    return np.where(samples < 0, samples + num_samples, samples)


def _numbers_of(samples: slice, num_samples: int, path: Path) -> Samples:
    try:
        return np.arange(*samples.indices(num_samples))
    except (TypeError, ValueError) as error:  # its ends are no integers, or its step is 0
        expected = "a slice of integers"
        raise SpecError("indices", kind="index", path=path, expected=expected, found=samples) from error


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
    if not all(_is_integer(value) for value in exact.reshape(-1).tolist()):
        return None
    return np.where((exact >= -_LARGEST) & (exact <= _LARGEST), exact, _LARGEST).astype(np.int64)


def largest(values: npt.NDArray[np.int64]) -> int:
    """The largest value of shape (B,), 0 of none; 2**63 and more if one is negative: one pass tells both."""
    if not values.size:
        return 0
    unsigned = values.view(np.uint64)
    return int(unsigned[unsigned.argmax()])  # half the time of `max`, which for a batch is most of the call


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def pick(whole: npt.NDArray[Any], samples: Samples, window: TimeWindow | None, out: npt.NDArray[Any]) -> None:
    """Copy samples, or windows of them, out of an array in memory.

    Args:
        whole: The array, shape (N, ...).
        samples: Sample numbers, all valid, shape (B,), int64.
        window: Over time, or None.
        out: Output, shape (B, ...); converted to if it has another dtype.
    """
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


def target_of(
    meta: ArrayMeta, shape: tuple[int, ...], out: Mapping[str, npt.NDArray[Any]] | None
) -> npt.NDArray[Any]:
    """Where the batch of one array goes: what of `out` is meant for it, checked, else new memory."""
    target, dtype = None if out is None else out.get(meta.name), dtype_of(meta.dtype)
    if target is None:
        return np.empty(shape, dtype)
    check_output(meta.name, dtype, shape, target)
    return target

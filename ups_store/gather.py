"""Batches: samples, or windows of them, copied from the mapped array into an output (spec 7.5).

Three ways, chosen by how array and output lie; which is fastest when was measured (`docs/performance.md`):
one `take` of whole slots into a buffer of slots, one `take` of samples that lie without gaps, and a loop of
plain memory copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SampleIndexError, SpecError
from ups_store.layout import ArrayLayout
from ups_store.metadata import ArrayMeta, dtype_of

TIME_DIM = "time"
MAX_ITEM_BYTES = 2**31 - 1  # NumPy's limit for one item

Samples = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """A window over time.

    Attributes:
        axis: The time axis, counted without the sample axis.
        start: First time step per sample, shape (B,), int64.
        length: Number of time steps.
        stride: Time steps from one to the next.
    """

    axis: int
    start: Samples
    length: int
    stride: int


class _SlotBuffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Output memory of ours, shape (B, slot bytes): the bytes behind a sample's payload are nobody's.

    Attributes:
        payloads: The array that `gather` returned over it; views of that are like any foreign memory.
    """

    payloads: weakref.ref[npt.NDArray[Any]]


def window_of(
    meta: ArrayMeta,
    num: int,
    *,
    start: int | Sequence[int] | npt.NDArray[np.integer[Any]] | None,
    length: int | None,
    stride: int,
) -> Window | None:
    """The window that `gather`'s arguments mean for one array; None for whole samples.

    Raises:
        SampleIndexError: If it reaches past the last time step.
        SpecError: If it has no time step, or `start` isn't one number or one per sample.
    """
    if TIME_DIM not in meta.dims or (start is None and length is None and stride == 1):
        return None
    axis = meta.dims.index(TIME_DIM) - 1
    num_steps = meta.sample_shape[axis]
    raw = np.asarray(0 if start is None else start)
    if (raw.size and raw.dtype.kind not in "iu") or raw.shape not in ((), (num,)):
        expected = f"an integer, or {num} of them"
        raise SpecError("window start", kind="window", array=meta.name, expected=expected, found=start)
    first = np.broadcast_to(raw.astype(np.int64), (num,))
    earliest, latest = (int(first.min()), int(first.max())) if num else (0, 0)
    if not _is_count(stride) or not (length is None or _is_count(length)):
        found = f"length={length}, stride={stride}"
        raise SpecError(
            "window", kind="window", array=meta.name, expected="length and stride >= 1", found=found
        )
    steps = max(0, -(-(num_steps - latest) // stride)) if length is None else length
    last = latest + (steps - 1) * stride
    if earliest < 0 or not steps or last >= num_steps:
        raise SampleIndexError(
            "window reaches outside the time steps",
            kind="window",
            array=meta.name,
            expected=f"steps 0..{num_steps - 1}",
            found=f"{earliest}..{max(last, latest)}",
        )
    return Window(axis, first, steps, stride)


def gather_array(
    array: ArrayLayout,
    memory: Any,
    view: npt.NDArray[Any],
    samples: Samples,
    window: Window | None,
    out: npt.NDArray[Any],
) -> None:
    """Copy samples of one array into `out`.

    Args:
        array: The array's layout.
        memory: The mapped file, as a buffer.
        view: The mapped array, shape (N, ...).
        samples: Sample numbers, all valid, shape (B,), int64.
        window: Window over time, or None.
        out: Output that `output_for` made or checked, shape (B, ...).
    """
    if not out.size:
        return
    if window is not None:
        copy_windows(view, samples, window, out)
    elif (slots := _slots_of(out, array.stride)) is not None:
        _items(array, memory, array.stride).take(samples, out=slots, mode="clip")  # checked before
    elif not out.flags.c_contiguous:
        for row, sample in enumerate(samples.tolist()):
            out[row, ...] = view[sample]
    elif array.meta.is_sharded:
        _copy_bytes(array, memory, samples, _bytes_of(out))
    else:
        items = np.ndarray((len(samples),), f"V{array.stride}", _bytes_of(out))
        _items(array, memory, array.stride).take(samples, out=items, mode="clip")


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= 1


def output_for(
    array: ArrayLayout, num: int, window: Window | None, out: npt.NDArray[Any] | None
) -> npt.NDArray[Any]:
    """`out` if `num` samples or windows of the array fit into it, new memory for None, else `SpecError`.

    New memory has room for slots behind the scenes, which makes its reuse fastest.
    """
    dtype, shape = dtype_of(array.meta.dtype), (num, *_shape_of(array.meta, window))
    if out is None:
        return _new_output(array, dtype, shape, has_slots=window is None)
    if not isinstance(out, np.ndarray):
        raise SpecError(
            "out", kind="out", array=array.meta.name, expected="an ndarray", found=type(out).__name__
        )
    if out.shape != shape or out.dtype != dtype or not out.flags.writeable:
        expected = f"writeable {dtype} {shape}"
        found = f"{'writeable' if out.flags.writeable else 'read-only'} {out.dtype} {out.shape}"
        raise SpecError("out", kind="out", array=array.meta.name, expected=expected, found=found)
    return out


def _shape_of(meta: ArrayMeta, window: Window | None) -> tuple[int, ...]:
    shape = meta.sample_shape
    return shape if window is None else (*shape[: window.axis], window.length, *shape[window.axis + 1 :])


def _new_output(
    array: ArrayLayout, dtype: np.dtype[Any], shape: tuple[int, ...], *, has_slots: bool
) -> npt.NDArray[Any]:
    if not has_slots or not array.meta.is_sharded or array.stride > MAX_ITEM_BYTES:
        return np.empty(shape, dtype)
    buffer = _SlotBuffer((shape[0], array.stride), np.uint8)
    inner = np.empty(shape[1:], dtype).strides
    payloads = np.ndarray(shape, dtype, buffer, 0, (array.stride, *inner))
    buffer.payloads = weakref.ref(payloads)
    return payloads


def _slots_of(out: npt.NDArray[Any], stride: int) -> npt.NDArray[np.void] | None:
    """The slots behind `out` if this module made it for such slots, else None."""
    buffer = out.base
    if isinstance(buffer, _SlotBuffer) and buffer.shape[1] == stride and buffer.payloads() is out:
        return np.ndarray(buffer.shape[:1], f"V{stride}", buffer)
    return None


def _items(array: ArrayLayout, memory: Any, nbytes: int) -> npt.NDArray[np.void]:
    """The samples as items of `nbytes` raw bytes, shape (N,), over the mapped file."""
    return np.ndarray((array.meta.shape[0],), f"V{nbytes}", memory, array.offset, (array.stride,))


def _bytes_of(out: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return out.reshape(len(out), -1).view(np.uint8)


def _copy_bytes(array: ArrayLayout, memory: Any, samples: Samples, rows: npt.NDArray[np.uint8]) -> None:
    # Slices of memoryviews copy with one memmove each and half the overhead of NumPy's assignment; `take`
    # would first copy an array that has gaps, and indexing with `samples` copies twice.
    source, target, nbytes = memoryview(memory), rows.data.cast("B"), array.meta.sample_nbytes
    firsts = (array.offset + samples * array.stride).tolist()
    for at, first in zip(range(0, len(target), nbytes), firsts, strict=True):
        target[at : at + nbytes] = source[first : first + nbytes]


def copy_windows(view: npt.NDArray[Any], samples: Samples, window: Window, out: npt.NDArray[Any]) -> None:
    """Copy one window per sample out of `view`, shape (N, ...), into `out`, shape (B, ...)."""
    before = (slice(None),) * window.axis
    span = (window.length - 1) * window.stride + 1
    for row, (sample, first) in enumerate(zip(samples.tolist(), window.start.tolist(), strict=True)):
        out[row, ...] = view[(sample, *before, slice(first, first + span, window.stride))]

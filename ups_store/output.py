"""Where a batch goes: memory that `gather` makes or is given."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.layout import ArrayLayout
from ups_store.metadata import dtype_of

MAX_ITEM_BYTES = 2**31 - 1  # NumPy's limit for one item


class _SlotBuffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Output memory of ours, shape (B, slot bytes): the bytes behind a sample's payload are nobody's.

    Attributes:
        payloads: The array that `gather` returned over it; views of that are like any foreign memory.
    """

    payloads: weakref.ref[npt.NDArray[Any]]


def new_output(array: ArrayLayout, shape: tuple[int, ...], *, is_whole: bool) -> npt.NDArray[Any]:
    """New memory for a batch of shape (B, ...), of the array's dtype.

    For whole samples there is room for slots behind the scenes, which makes its reuse fastest.
    """
    dtype = dtype_of(array.meta.dtype)
    if not is_whole or not array.meta.is_sharded or array.stride > MAX_ITEM_BYTES:
        return np.empty(shape, dtype)
    buffer = _SlotBuffer((shape[0], array.stride), np.uint8)
    inner = np.empty(shape[1:], dtype).strides
    payloads = np.ndarray(shape, dtype, buffer, 0, (array.stride, *inner))
    buffer.payloads = weakref.ref(payloads)
    return payloads


def slots_of(out: npt.NDArray[Any], slot: np.dtype[np.void]) -> npt.NDArray[np.void] | None:
    """The slots behind `out`, shape (B,), if `new_output` made it with slots of this size, else None."""
    buffer = out.base
    if isinstance(buffer, _SlotBuffer) and buffer.payloads() is out and buffer.shape[1] == slot.itemsize:
        return np.ndarray(buffer.shape[:1], slot, buffer)
    return None


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

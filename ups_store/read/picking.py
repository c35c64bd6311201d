"""Batches out of what lies in memory as single arrays: of stores that aren't mapped, such as packed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.read.gather import Samples, TimeWindow, check_output
from ups_store.system.runs import cast_into


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

"""Sample numbers: what callers give, checked and as one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import SampleIndexError, SpecError

_INT64 = np.dtype(np.int64)

Indices: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


def check_indices(indices: Indices, num_samples: int, *, path: Path) -> npt.NDArray[np.int64]:
    """Sample numbers as int64, shape (B,); no copy of what is int64 already.

    Raises:
        SampleIndexError: Unless all are in 0..num_samples - 1.
        SpecError: If they aren't integers, or not of shape (B,).
    """
    samples = int64_of(indices)
    if samples is None or samples.ndim != 1:
        given = np.asarray(indices)
        found = f"{given.dtype} {given.shape}"
        raise SpecError("indices", kind="index", expected="integers, shape (B,)", found=found)
    if samples.size and largest(samples) >= num_samples:
        wrong = np.flatnonzero((samples < 0) | (samples >= num_samples))[0]
        expected, found = f"0 <= index < {num_samples}", np.asarray(indices, object)[wrong]
        raise SampleIndexError("no such sample", path=path, expected=expected, found=int(found))
    return samples


def int64_of(values: Any) -> npt.NDArray[np.int64] | None:
    """The values as int64, negative where they are too large for it; None if one is no integer."""
    raw = np.asarray(values)
    if raw.dtype is _INT64:
        return raw
    if raw.dtype.kind in "iu" or not raw.size:
        return raw.astype(np.int64)
    exact = np.asarray(values, object)  # of [2**63, 2] NumPy makes floating-point numbers
    if not all(_is_integer(value) for value in exact.reshape(-1).tolist()):
        return None
    return np.where((exact >= 0) & (exact < 2**63), exact, -1).astype(np.int64)


def largest(values: npt.NDArray[np.int64]) -> int:
    """The largest value of shape (B,), 0 of none; 2**63 and more if one is negative: one pass tells both."""
    if not values.size:
        return 0
    unsigned = values.view(np.uint64)
    return int(unsigned[unsigned.argmax()])  # half the time of `max`, which for a batch is most of the call


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)

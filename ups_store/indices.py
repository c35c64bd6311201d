"""Sample numbers: what callers give, checked and as one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import SampleIndexError, SpecError

Indices: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


def check_indices(indices: Indices, num_samples: int, *, path: Path) -> npt.NDArray[np.int64]:
    """Sample numbers as int64, shape (B,); no copy of what is int64 already.

    Raises:
        SampleIndexError: Unless all are in 0..num_samples - 1.
        SpecError: If they aren't integers, or not of shape (B,).
    """
    raw = integers_of(indices)
    if raw is None or raw.ndim != 1:
        given = np.asarray(indices)
        found = f"{given.dtype} {given.shape}"
        raise SpecError("indices", kind="index", expected="integers, shape (B,)", found=found)
    # As unsigned numbers the negative ones are huge: one pass instead of two.
    if raw.size and (raw.dtype == object or _largest_unsigned(raw) >= num_samples):
        wrong = raw[(raw < 0) | (raw >= num_samples)]
        if len(wrong):
            expected = f"0 <= index < {num_samples}"
            raise SampleIndexError("no such sample", path=path, expected=expected, found=int(wrong[0]))
    return raw.astype(np.int64, copy=False)


def integers_of(values: Any) -> npt.NDArray[Any] | None:
    """The values as an array, of Python integers where some are beyond 64 bits; None if one is no integer."""
    raw = np.asarray(values)
    if raw.dtype.kind in "iu" or not raw.size:
        return raw
    exact = np.asarray(values, object)  # of [2**63, 2] NumPy makes floating-point numbers
    return exact if all(_is_integer(value) for value in exact.reshape(-1).tolist()) else None


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _largest_unsigned(raw: npt.NDArray[Any]) -> int:
    return int(np.maximum.reduce(raw.astype(np.int64, copy=False).view(np.uint64)))

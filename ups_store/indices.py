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
    raw = np.asarray(indices)
    if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
        found = f"{raw.dtype} {raw.shape}"
        if raw.ndim == 1 and raw.dtype == object and all(isinstance(value, int) for value in raw):
            raise _outside(max(raw, key=abs), num_samples, path)  # beyond 64 bits
        raise SpecError("indices", kind="index", expected="integers, shape (B,)", found=found)
    # As unsigned numbers the negative ones are huge: one pass instead of two. uint64 beyond int64 wraps to
    # negative numbers, which wrap back.
    samples = raw.astype(np.int64, copy=False)
    if raw.size and np.maximum.reduce(samples.view(np.uint64)) >= num_samples:
        raise _outside(raw[(raw < 0) | (raw >= num_samples)][0], num_samples, path)
    return samples


def _outside(found: Any, num_samples: int, path: Path) -> SampleIndexError:
    expected = f"0 <= index < {num_samples}"
    return SampleIndexError("no such sample", path=path, expected=expected, found=int(found))

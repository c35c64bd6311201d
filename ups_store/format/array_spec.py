"""`ArraySpec`: what an array of a store holds, as callers and stores describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ArraySpec:
    """What an array with a sample axis will hold.

    Args:
        shape: Whole shape, the number of samples N first.
        dtype: Anything that NumPy takes as a dtype, or "bfloat16".
        dims: Dimension names, "sample" first; made from the array's name where not given.
        attrs: Zarr attributes of the array, JSON values; not part of the identity.
    """

    shape: Sequence[int]
    dtype: Any
    dims: Sequence[str] | None = None
    attrs: Mapping[str, Any] | None = None

"""`ArraySpec`: what an array of a store holds, as callers and stores describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ArraySpec:
    """What an array with a sample axis will hold.

    Of a *ragged* array every sample has its own number of rows: `ArraySpec((N, None, 3), "float32",
    lengths=[...])` holds `lengths[i]` points of 3 coordinates for sample i.

    Args:
        shape: Whole shape, the number of samples N first; None as the second one for a ragged array. Where
            samples are counted later, N is None, too.
        dtype: Anything that NumPy takes as a dtype, or "bfloat16".
        dims: Dimension names, "sample" first; made from the array's name where not given.
        attrs: Zarr attributes of the array, JSON values; not part of the identity.
        lengths: Of a ragged array the number of rows of each sample, shape (N,); of text that of its bytes.
        encoding: Of a ragged array of uint8 what its bytes are: "utf-8" for samples that are `str`, "bytes".
    """

    shape: Sequence[Any]
    dtype: Any
    dims: Sequence[str] | None = None
    attrs: Mapping[str, Any] | None = None
    lengths: Sequence[int] | npt.NDArray[np.integer[Any]] | None = field(default=None, compare=False)
    encoding: Literal["utf-8", "bytes"] | None = None

    @property
    def is_ragged(self) -> bool:
        """Whether every sample has its own number of rows."""
        return len(self.shape) > 1 and self.shape[1] is None

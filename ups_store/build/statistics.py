"""Statistics of what a build wrote: range and non-finite values per array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


class Statistics:
    """Running minimum, maximum and counts of NaN and Inf, by array."""

    def __init__(self) -> None:
        self._by_array: dict[str, dict[str, float]] = {}

    def add(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take in a batch of samples by array; numbers of any real dtype, shape (M, ...)."""
        for name, array in arrays.items():
            values = array if array.dtype.kind == "f" else array.astype(np.float32)
            finite = np.isfinite(values)
            num_finite = int(np.count_nonzero(finite))
            num_nan = int(np.count_nonzero(np.isnan(values))) if num_finite < values.size else 0
            seen = values if num_finite == values.size else values[finite]
            old = self._by_array.setdefault(name, {"min": np.inf, "max": -np.inf, "num_nan": 0, "num_inf": 0})
            old["min"] = min(old["min"], float(seen.min(initial=np.inf)))
            old["max"] = max(old["max"], float(seen.max(initial=-np.inf)))
            old["num_nan"] += num_nan
            old["num_inf"] += values.size - num_finite - num_nan

    def to_json(self) -> dict[str, dict[str, float | None]]:
        """By array; minimum and maximum are None where there was no finite value."""
        return {
            name: {key: value if np.isfinite(value) else None for key, value in numbers.items()}
            for name, numbers in self._by_array.items()
        }

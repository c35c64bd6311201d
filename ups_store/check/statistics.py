"""Statistics of arrays, taken a batch at a time: range, mean, and how many values aren't finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.sources.values import ValueRange


@dataclass(frozen=True)
class ArrayStatistics:
    """Statistics of one array; None where no value is finite, and of a mean that wasn't asked for."""

    minimum: float | None
    maximum: float | None
    mean: float | None
    num_nan: int
    num_inf: int


class Statistics:
    """Running statistics by array.

    Args:
        with_mean: Whether to take means too, which takes another pass over the values, as float64.
    """

    def __init__(self, *, with_mean: bool = False) -> None:
        self._with_mean = with_mean
        self._ranges: dict[str, ValueRange] = {}
        self._sums: dict[str, float] = {}
        self._num_values: dict[str, int] = {}

    def add(
        self, arrays: Mapping[str, npt.NDArray[Any]], *, ranges: Mapping[str, ValueRange] | None = None
    ) -> None:
        """Take in a batch of samples by array.

        Args:
            arrays: Numbers of any real dtype, shape (M, ...).
            ranges: The ranges of those arrays for which a reader has found them already.
        """
        known = ranges or {}
        for name, array in arrays.items():
            total = 0.0
            if self._with_mean:
                values = array.astype(np.float64)
                with np.errstate(over="ignore"):
                    total = float(values[np.isfinite(values)].sum())
            self._take(name, known[name] if name in known else ValueRange.of(array), array.size, total)

    def join(self, other: Statistics) -> None:
        """Take in what another one found of other samples."""
        for name, values in other._ranges.items():
            self._take(name, values, other._num_values[name], other._sums[name])

    def _take(self, name: str, values: ValueRange, num: int, total: float) -> None:
        self._ranges[name] = ValueRange.join([self._ranges.get(name, ValueRange()), values])
        self._num_values[name] = self._num_values.get(name, 0) + num
        self._sums[name] = self._sums.get(name, 0.0) + total

    def by_array(self) -> dict[str, ArrayStatistics]:
        """What was found so far."""
        statistics = {}
        for name, values in self._ranges.items():
            num_finite = self._num_values[name] - values.num_nan - values.num_inf
            low, high = (values.minimum, values.maximum) if num_finite else (None, None)
            has_mean = self._with_mean and num_finite and math.isfinite(self._sums[name])
            mean = self._sums[name] / num_finite if has_mean else None
            statistics[name] = ArrayStatistics(low, high, mean, values.num_nan, values.num_inf)
        return statistics

    def to_json(self) -> dict[str, dict[str, Any]]:
        """What was found so far as JSON values; "mean" only where means are taken.

        "num_underflow" and "num_overflow" are what casts made 0 and infinite, where a given range says so;
        "num_flat", by channel, what they can't tell apart, left out where there is nothing.
        """
        document: dict[str, dict[str, Any]] = {}
        for name, array in self.by_array().items():
            values = self._ranges[name]
            document[name] = {"min": array.minimum, "max": array.maximum}
            if self._with_mean:
                document[name]["mean"] = array.mean
            counts = ("num_nan", "num_inf", "num_underflow", "num_overflow")
            document[name] |= {key: getattr(values, key) for key in counts}
            if values.num_flat:
                document[name]["num_flat"] = list(values.num_flat)
        return document

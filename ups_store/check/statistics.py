"""Statistics of arrays, taken a batch at a time: range, mean, and how many values aren't finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.sources.value_range import ValueRange


@dataclass(frozen=True)
class ArrayStatistics:
    """Statistics of one array.

    Attributes:
        minimum: Smallest finite value; None if there is none, as for the next two.
        maximum: Largest finite value.
        mean: Mean of the finite values; None also where it wasn't asked for or their sum overflows float64.
        num_nan: Number of NaN.
        num_inf: Number of positive and negative infinities.
    """

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
            found = known[name] if name in known else ValueRange.of(array)
            self._ranges[name] = ValueRange.join([self._ranges.get(name, ValueRange()), found])
            self._num_values[name] = self._num_values.get(name, 0) + array.size
            if self._with_mean:
                self._sums[name] = self._sums.get(name, 0.0) + _finite_sum(array)

    def join(self, other: Statistics) -> None:
        """Take in what another one found of other samples."""
        for name, found in other._ranges.items():
            self._ranges[name] = ValueRange.join([self._ranges.get(name, ValueRange()), found])
            self._num_values[name] = self._num_values.get(name, 0) + other._num_values[name]
            if self._with_mean:
                self._sums[name] = self._sums.get(name, 0.0) + other._sums[name]

    def by_array(self) -> dict[str, ArrayStatistics]:
        """What was found so far."""
        return {name: self._of(name) for name in self._ranges}

    def _of(self, name: str) -> ArrayStatistics:
        found = self._ranges[name]
        num_finite = self._num_values[name] - found.num_nan - found.num_inf
        return ArrayStatistics(
            found.minimum if num_finite else None,
            found.maximum if num_finite else None,
            _mean(self._sums.get(name), num_finite),
            found.num_nan,
            found.num_inf,
        )

    def to_json(self) -> dict[str, dict[str, float | None]]:
        """What was found so far as JSON values; "mean" only where means are taken.

        "num_underflow" and "num_overflow" are what casts made 0 and infinite, where a given range says so;
        "num_flat", by channel, what they can't tell apart, left out where there is nothing.
        """
        return {name: self._values(name, found) for name, found in self.by_array().items()}

    def _values(self, name: str, found: ArrayStatistics) -> dict[str, float | None]:
        mean = {"mean": found.mean} if self._with_mean else {}
        cast = {key: getattr(self._ranges[name], key) for key in ("num_underflow", "num_overflow")}
        counts = {"num_nan": found.num_nan, "num_inf": found.num_inf, **cast}
        if flat := self._ranges[name].num_flat:
            counts["num_flat"] = list(flat)
        return {"min": found.minimum, "max": found.maximum, **mean, **counts}


def _finite_sum(array: npt.NDArray[Any]) -> float:
    values = array.astype(np.float64)
    with np.errstate(over="ignore"):
        return float(values[np.isfinite(values)].sum())


def _mean(total: float | None, num_finite: int) -> float | None:
    return total / num_finite if total is not None and num_finite and math.isfinite(total) else None

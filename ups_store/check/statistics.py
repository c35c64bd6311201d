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
    """Running statistics by array; means, too, if asked for, by another pass over the values, as float64."""

    def __init__(self, *, with_mean: bool = False) -> None:
        self._with_mean = with_mean
        self._arrays: dict[str, tuple[ValueRange, int, float]] = {}  # range, number and sum of values

    def add(
        self, arrays: Mapping[str, npt.NDArray[Any]], *, ranges: Mapping[str, ValueRange] | None = None
    ) -> None:
        """Take in a batch of samples by array, of any real dtype; `ranges` are known already."""
        for name, array in arrays.items():
            total = 0.0
            if self._with_mean:
                values = array.astype(np.float64)
                with np.errstate(over="ignore"):
                    total = float(values[np.isfinite(values)].sum())
            known = (ranges or {}).get(name)
            self._take(name, ValueRange.of(array) if known is None else known, array.size, total)

    def join(self, other: Statistics) -> None:
        """Take in what another one found of other samples."""
        for name, array in other._arrays.items():
            self._take(name, *array)

    def _take(self, name: str, values: ValueRange, num: int, total: float) -> None:
        before, num_before, total_before = self._arrays.get(name, (ValueRange(), 0, 0.0))
        self._arrays[name] = ValueRange.join([before, values]), num_before + num, total_before + total

    def by_array(self) -> dict[str, ArrayStatistics]:
        """Return what was found so far."""
        statistics = {}
        for name, (values, num, total) in self._arrays.items():
            num_finite = num - values.num_nan - values.num_inf
            low, high = (values.minimum, values.maximum) if num_finite else (None, None)
            has_mean = self._with_mean and num_finite and math.isfinite(total)
            mean = total / num_finite if has_mean else None
            statistics[name] = ArrayStatistics(low, high, mean, values.num_nan, values.num_inf)
        return statistics

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the same as JSON values; "mean" only where means are taken.

        "num_underflow" and "num_overflow" are what casts made 0 and infinite, where a given range says so;
        "num_flat", by channel, what they can't tell apart, left out where there is nothing.
        """
        document: dict[str, dict[str, Any]] = {}
        for name, array in self.by_array().items():
            values = self._arrays[name][0]
            document[name] = {"min": array.minimum, "max": array.maximum}
            document[name] |= {"mean": array.mean} if self._with_mean else {}
            counts = ("num_nan", "num_inf", "num_underflow", "num_overflow")
            document[name] |= {key: getattr(values, key) for key in counts}
            document[name] |= {"num_flat": list(values.num_flat)} if values.num_flat else {}
        return document

"""The range of an array's values, and how many of them aren't finite: two passes over what is in cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

_BLOCK_BYTES = 1 << 20  # the second pass finds them in the processor's cache


@dataclass(frozen=True)
class ValueRange:
    """Range of the finite values and counts of the others.

    Attributes:
        minimum: Smallest finite value; inf if there is none.
        maximum: Largest finite value; -inf if there is none.
        num_nan: Number of NaN.
        num_inf: Number of positive and negative infinities.
        num_underflow: Values other than 0 that a cast made 0; known only to what casts.
        num_overflow: Finite values that a cast made infinite, likewise.
        num_flat: By channel, values that a cast can't tell apart, likewise; empty where there are none.
    """

    minimum: float = np.inf
    maximum: float = -np.inf
    num_nan: int = 0
    num_inf: int = 0
    num_underflow: int = 0
    num_overflow: int = 0
    num_flat: tuple[int, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor Inf."""
        return self.num_nan + self.num_inf == 0

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Self:
        """The range of an array of any real dtype."""
        values = array.reshape(-1)
        size = max(1, _BLOCK_BYTES // array.itemsize)
        return cls.join(cls._of_block(values[i : i + size]) for i in range(0, len(values), size))

    @classmethod
    def _of_block(cls, block: npt.NDArray[Any]) -> Self:
        # NumPy takes five times as long over float16 as it is
        values = block if block.dtype.kind == "f" and block.itemsize >= 4 else block.astype(np.float32)
        with np.errstate(invalid="ignore"):
            low, high = float(values.min()), float(values.max())  # NaN if there is one among them
        if np.isfinite(low) and np.isfinite(high):
            return cls(low, high)
        finite = values[np.isfinite(values)]
        num_nan = int(np.count_nonzero(np.isnan(values)))
        return cls(
            float(finite.min(initial=np.inf)),
            float(finite.max(initial=-np.inf)),
            num_nan,
            values.size - finite.size - num_nan,
        )

    @classmethod
    def join(cls, ranges: Iterable[ValueRange]) -> Self:
        """The range of all values of several arrays."""
        parts = list(ranges)
        return cls(
            min((part.minimum for part in parts), default=np.inf),
            max((part.maximum for part in parts), default=-np.inf),
            sum(part.num_nan for part in parts),
            sum(part.num_inf for part in parts),
            sum(part.num_underflow for part in parts),
            sum(part.num_overflow for part in parts),
            added(*(part.num_flat for part in parts)),
        )


def added(*counts: tuple[int, ...]) -> tuple[int, ...]:
    """Sums of counts by channel; empty if all are 0."""
    total = tuple(map(sum, itertools.zip_longest(*counts, fillvalue=0)))
    return total if any(total) else ()

"""Ranges of values, and casts that say what they lose.

A cast may make values zero, infinite, or indistinct. The processor's flags say whether it could have lost
anything, and only then values are counted. Casts to bfloat16 raise none, so there values are counted each
time: of float32 what is below 4.6e-41 becomes zero, and what is above 3.39e38 infinite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

_BLOCK_BYTES = 1 << 20  # a second pass over it finds it in the processor's cache
_STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}  # from 1 to the next number
_INF_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # without the sign


@dataclass(frozen=True)
class ValueRange:
    """Range of the finite values and counts of the others; what a cast lost is known only to what casts."""

    minimum: float = np.inf  # inf if there is no finite value
    maximum: float = -np.inf  # likewise
    num_nan: int = 0
    num_inf: int = 0  # of either sign
    num_underflow: int = 0  # values other than 0 that a cast made 0
    num_overflow: int = 0  # finite values that a cast made infinite
    num_flat: tuple[int, ...] = ()  # by channel, values that a cast can't tell apart; empty if none

    @property
    def is_finite(self) -> bool:
        """Tell whether there is neither NaN nor Inf."""
        return self.num_nan + self.num_inf == 0

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Self:
        """Return the range of an array of any real dtype."""
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
        low, high = float(finite.min(initial=np.inf)), float(finite.max(initial=-np.inf))
        return cls(low, high, num_nan, values.size - finite.size - num_nan)

    @classmethod
    def join(cls, ranges: Iterable[ValueRange]) -> Self:
        """Return the range of all values of several arrays."""
        ranges = list(ranges)
        return cls(
            min((r.minimum for r in ranges), default=np.inf),
            max((r.maximum for r in ranges), default=-np.inf),
            sum(r.num_nan for r in ranges),
            sum(r.num_inf for r in ranges),
            sum(r.num_underflow for r in ranges),
            sum(r.num_overflow for r in ranges),
            _added(*(r.num_flat for r in ranges)),
        )


@dataclass(frozen=True)
class CastLoss:
    """What a cast made of values."""

    num_zero: int = 0  # values other than 0 that became 0
    num_inf: int = 0  # finite values that became infinite
    low: float = np.inf  # least and largest_finite finite value of what was cast together with those
    high: float = -np.inf
    num_flat: tuple[int, ...] = ()  # by channel, values of samples that vary by less than a step of the dtype

    def __add__(self, other: CastLoss) -> CastLoss:
        return CastLoss(
            self.num_zero + other.num_zero,
            self.num_inf + other.num_inf,
            min(self.low, other.low),
            max(self.high, other.high),
            _added(self.num_flat, other.num_flat),
        )


def _added(*counts: tuple[int, ...]) -> tuple[int, ...]:
    """Add counts by channel; nothing if all are 0."""
    total = tuple(map(sum, itertools.zip_longest(*counts, fillvalue=0)))
    return total if any(total) else ()


def cast_values(out: npt.NDArray[Any], values: npt.NDArray[Any], *, channel_axes: int = 0) -> CastLoss:
    """Copy values of any real dtype to where they go, cast to the dtype and broadcast to the shape there.

    Samples are along the first axis of `out`; `channel_axes` of the last are of channels, 0: where variation
    isn't looked for.
    """
    raised: set[str] = set()
    with np.errstate(over="call", under="call", invalid="ignore", call=lambda flag, _: raised.add(flag)):
        np.copyto(out, values, casting="unsafe")
    is_float = values.dtype.kind == "f"
    if out.dtype.name == "bfloat16" and is_float and values.dtype.itemsize > 2:
        raised = {"underflow", "overflow"}
    num_repeats = out.size // values.size if values.size else 0
    num_zero = num_inf = 0
    if "underflow" in raised and (num := _count(out, 0.0)):
        num_zero = num - _count(values, 0.0) * num_repeats
    if "overflow" in raised and (num := _count(out, np.inf)):
        num_inf = num - _count(values, np.inf) * num_repeats
    num_flat: tuple[int, ...] = ()
    if channel_axes and is_float and values.dtype.itemsize > out.dtype.itemsize and values.size:
        within = tuple(range(1, values.ndim - channel_axes))
        low, high = values.min(within).astype(np.float64), values.max(within).astype(np.float64)
        _, exponents = np.frexp(np.maximum(np.abs(low), np.abs(high)))
        with np.errstate(invalid="ignore"):  # of infinities
            is_flat = (low < high) & (high - low < np.ldexp(_STEPS[out.dtype.name], exponents - 1))
        num_within = math.prod(values.shape[axis] for axis in within)
        num_flat = tuple((is_flat.sum(0).ravel() * num_within).tolist())
    if not num_inf:
        return CastLoss(num_zero, num_flat=num_flat)
    finite = ValueRange.of(values)
    return CastLoss(num_zero, num_inf, finite.minimum, finite.maximum, num_flat)


def _count(values: npt.NDArray[Any], number: float) -> int:
    """Count plus or minus a number, 0 or infinity."""
    bits = _INF_BITS.get(values.dtype.name)
    if bits is None:
        return int(np.count_nonzero(np.abs(values) == number if number else values == 0))
    stored = values.view(np.uint16) << 1  # NumPy takes several times as long over the numbers
    if number:
        return int(np.count_nonzero(stored == bits << 1))
    return stored.size - int(np.count_nonzero(stored))


def largest_finite(dtype: npt.DTypeLike) -> float:
    """Return the largest_finite finite number of a floating dtype."""
    name = np.dtype(dtype).name
    return 3.3895313892515355e38 if name == "bfloat16" else float(np.finfo(name).max)


def holding(low: float, high: float) -> str:
    """Name the narrowest dtype with float32's precision or more that holds values of a range."""
    return "float32" if max(abs(low), abs(high)) <= largest_finite(np.float32) else "float64"

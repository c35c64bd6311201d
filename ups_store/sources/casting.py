"""Casts that say what they lose: values that became zero, or infinite, or can't be told apart.

The processor's flags say whether a cast could have lost anything, and only then values are counted. Casts to
bfloat16 raise none, so there values are counted each time: of float32 what is below 4.6e-41 becomes zero, and
what is above 3.39e38 infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.sources.value_range import ValueRange, added

_STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}  # from 1 to the next number
_INF_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # without the sign


@dataclass(frozen=True)
class CastLoss:
    """What a cast made of values.

    Attributes:
        num_zero: Values other than 0 that became 0.
        num_inf: Finite values that became infinite.
        low: Least finite value of what was cast together with those that became infinite.
        high: Largest one.
        num_flat: By channel, values of samples in which it varies by less than the step between two numbers.
    """

    num_zero: int = 0
    num_inf: int = 0
    low: float = np.inf
    high: float = -np.inf
    num_flat: tuple[int, ...] = ()

    def __add__(self, other: CastLoss) -> CastLoss:
        return CastLoss(
            self.num_zero + other.num_zero,
            self.num_inf + other.num_inf,
            min(self.low, other.low),
            max(self.high, other.high),
            added(self.num_flat, other.num_flat),
        )


def cast_into(out: npt.NDArray[Any], values: npt.NDArray[Any], *, channel_axes: int = 0) -> CastLoss:
    """Copy values to where they go, cast to the dtype that is there.

    Args:
        out: Where they go, samples along the first axis; any strides.
        values: Of any real dtype, of a shape that broadcasts to that of `out`.
        channel_axes: How many of the last axes are of channels; 0: where variation isn't looked for.
    """
    raised: set[str] = set()

    def note(what: str, _: int) -> None:
        raised.add(what)

    with np.errstate(over="call", under="call", invalid="ignore", call=note):
        np.copyto(out, values, casting="unsafe")
    if out.dtype.name == "bfloat16" and values.dtype.kind == "f" and values.dtype.itemsize > 2:
        raised = {"underflow", "overflow"}
    num_zero = _difference(out, values, 0.0) if "underflow" in raised else 0
    num_inf = _difference(out, values, np.inf) if "overflow" in raised else 0
    num_flat = _num_flat(out.dtype, values, channel_axes) if channel_axes else ()
    if not num_inf:
        return CastLoss(num_zero, num_flat=num_flat)
    found = ValueRange.of(values)
    return CastLoss(num_zero, num_inf, found.minimum, found.maximum, num_flat)


def _num_flat(dtype: np.dtype[Any], values: npt.NDArray[Any], channel_axes: int) -> tuple[int, ...]:
    """See `CastLoss.num_flat`; nothing where the dtype isn't narrower than that of the values."""
    if values.dtype.kind != "f" or values.dtype.itemsize <= dtype.itemsize or not values.size:
        return ()
    within = tuple(range(1, values.ndim - channel_axes))
    low, high = values.min(within).astype(np.float64), values.max(within).astype(np.float64)
    _, exponents = np.frexp(np.maximum(np.abs(low), np.abs(high)))
    with np.errstate(invalid="ignore"):  # of infinities
        is_flat = (low < high) & (high - low < np.ldexp(_STEPS[dtype.name], exponents - 1))
    num_within = math.prod(values.shape[axis] for axis in within)
    counts: list[int] = (is_flat.sum(0).ravel() * num_within).tolist()
    return tuple(counts)


def _difference(out: npt.NDArray[Any], values: npt.NDArray[Any], number: float) -> int:
    """How many more of `out` are plus or minus a number, 0 or infinity, than there were."""
    num = _count(out, number)
    return num and num - _count(values, number) * (out.size // values.size)


def _count(values: npt.NDArray[Any], number: float) -> int:
    bits = _INF_BITS.get(values.dtype.name)
    if bits is None:
        return int(np.count_nonzero(np.abs(values) == number if number else values == 0))
    stored = values.view(np.uint16) << 1  # NumPy takes several times as long over the numbers
    return (
        int(np.count_nonzero(stored == bits << 1)) if number else stored.size - int(np.count_nonzero(stored))
    )


def largest(dtype: npt.DTypeLike) -> float:
    """The largest finite number of a floating dtype."""
    name = np.dtype(dtype).name
    return 3.3895313892515355e38 if name == "bfloat16" else float(np.finfo(name).max)


def holding(low: float, high: float) -> str:
    """The narrowest dtype with float32's precision or more that holds values of a range."""
    return "float32" if max(abs(low), abs(high)) <= largest(np.float32) else "float64"

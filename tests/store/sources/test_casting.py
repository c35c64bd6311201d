"""Casts that count what they lose, against counting it directly."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups_store.sources.values import CastLoss, cast_values, holding, largest_finite

NUMBERS = st.one_of(
    st.floats(width=64, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1e-9, -1e-50, 6e-8, 65504.0, 65519.0, 65520.0, -1e39, 1e-46]),
    st.sampled_from([2.0**-149, 4.5e-41, 4.7e-41, 3.38e38, 3.4e38, -3.4e38]),
)


def counted(out: npt.NDArray[Any], values: npt.NDArray[Any]) -> tuple[int, int]:
    wide = out.astype(np.float64)
    zero, inf = (wide == 0) & (values != 0), np.isinf(wide) & np.isfinite(values)
    return int(zero.sum()), int(inf.sum())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *[("f8", "f2"), ("f8", "f4"), ("f4", "f2"), (">f4", "f2"), ("f4", "f8")],
        *[(source, ml_dtypes.bfloat16) for source in ("f8", "f4", ">f4", "f2", "i4")],
    ],
)
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=40))
def test_losses_are_those_that_are_counted_directly(source: str, target: Any, numbers: list[float]) -> None:
    if source == "i4":
        numbers = [0.0 if not abs(number) < 2**31 else number for number in numbers]
    values = np.array(numbers).astype(source)
    out = np.empty((len(values), 3), target)[:, 1]
    loss = cast_values(out, values)
    assert (loss.num_zero, loss.num_inf) == counted(out, values)
    np.testing.assert_array_equal(out.astype(np.float64), values.astype(target).astype(np.float64))
    if loss.num_inf:
        finite = values[np.isfinite(values)]
        assert (loss.low, loss.high) == (finite.min(), finite.max())


def test_values_that_go_to_several_places_count_at_each() -> None:
    assert cast_values(np.empty((4, 3), np.float16), np.array([[1e-9], [1], [0], [2]])).num_zero == 3


def test_losses_add_up() -> None:
    total = CastLoss(1) + CastLoss(2, 3, -5.0, 7.0) + CastLoss(0, 1, -6.0, 2.0)
    assert total == CastLoss(3, 4, -6.0, 7.0)


def test_largest_numbers_are_those_of_the_dtypes() -> None:
    assert largest_finite("float16") == 65504
    assert largest_finite(ml_dtypes.bfloat16) == float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    assert (holding(-1e6, 3.0), holding(0.0, 1e39)) == ("float32", "float64")

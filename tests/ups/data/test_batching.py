"""Cutting a pass into batches; items that stand for all."""

from __future__ import annotations

import numpy as np
import pytest

from ups.data.on_demand.order import batch_ends, count_batches
from ups.data.windows import evenly_spread


@pytest.mark.parametrize(
    ("num_items", "batch_size", "expected"),
    [(63, 32, [31, 32]), (64, 32, [32, 32]), (65, 32, [21, 22, 22]), (3, 32, [3]), (0, 4, [0])],
)
def test_batches_hold_all_items_and_none_is_too_large(
    num_items: int, batch_size: int, expected: list[int]
) -> None:
    ends = batch_ends(num_items, count_batches(num_items, batch_size))
    assert np.diff(ends, prepend=0).tolist() == expected


@pytest.mark.parametrize(
    ("num_items", "num", "expected"),
    [(9, 3, [1, 4, 7]), (10, 4, [1, 3, 6, 8]), (10, 1, [5]), (3, 8, [0, 1, 2]), (1, 1, [0])],
)
def test_spread_items_are_the_middles_of_equal_parts(num_items: int, num: int, expected: list[int]) -> None:
    assert evenly_spread(num_items, num).tolist() == expected


def test_spread_items_are_different_however_many_are_wanted() -> None:
    for num in range(1, 200):
        assert len(np.unique(evenly_spread(199, num))) == num

"""Cutting a pass into batches."""

from __future__ import annotations

import numpy as np
import pytest

from ups.data.batching import batch_ends, count_batches


@pytest.mark.parametrize(
    ("num_items", "batch_size", "expected"),
    [(63, 32, [31, 32]), (64, 32, [32, 32]), (65, 32, [21, 22, 22]), (3, 32, [3]), (0, 4, [0])],
)
def test_batches_hold_all_items_and_none_is_too_large(
    num_items: int, batch_size: int, expected: list[int]
) -> None:
    ends = batch_ends(num_items, count_batches(num_items, batch_size))
    assert np.diff(ends, prepend=0).tolist() == expected

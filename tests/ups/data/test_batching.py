"""Items and frames that stand for all."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ups.data.fields import evenly_spread
from ups.data.statistics import frame_items, spread_frames


@pytest.mark.parametrize(
    ("num_items", "num", "expected"),
    [(9, 3, [1, 4, 7]), (10, 4, [1, 3, 6, 8]), (10, 1, [5]), (3, 8, [0, 1, 2]), (1, 1, [0])],
)
def test_spread_items_are_the_middles_of_equal_parts(num_items: int, num: int, expected: list[int]) -> None:
    assert evenly_spread(num_items, num).tolist() == expected


def test_spread_items_are_different_however_many_are_wanted() -> None:
    for num in range(1, 200):
        assert len(np.unique(evenly_spread(199, num))) == num


def spread_over(counts: list[int], num: int) -> list[tuple[int, int]]:
    fields = SimpleNamespace(num_steps=np.array(counts))
    samples, steps = frame_items(fields, "fields")  # type: ignore[arg-type]
    items = spread_frames(fields, "fields", num)  # type: ignore[arg-type]
    assert (np.diff(items) > 0).all()
    return list(zip(samples[items].tolist(), steps[items].tolist(), strict=True))


def test_spread_frames_are_of_all_samples_and_all_time_steps() -> None:
    for num in (8, 12, 20, 31):
        chosen = spread_over([4] * 8, num)
        assert len(chosen) == num
        assert {sample for sample, _ in chosen} == set(range(8))
        assert {step for _, step in chosen} == set(range(4))
    assert len(spread_over([4] * 8, 32)) == len(spread_over([4] * 8, 99)) == 32


def test_spread_frames_of_trajectories_of_several_lengths_are_valid() -> None:
    chosen = spread_over([1, 5, 0, 2], 6)
    assert {sample for sample, _ in chosen} == {0, 1, 3}
    assert all(step < [1, 5, 0, 2][sample] for sample, step in chosen)

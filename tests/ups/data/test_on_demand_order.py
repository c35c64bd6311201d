"""The order of a first pass: every window once, from trajectories that have come."""

from __future__ import annotations

import numpy as np
import pytest
from ups.data.on_demand.order import (
    FIRST_AHEAD,
    Arrivals,
    PassDraws,
    WindowBuffer,
    arrival_stretches,
    most_ahead,
)


def make_buffer(
    num: int, *, num_windows: int, num_batches: int, ahead: int = 20, seed: int = 3
) -> WindowBuffer:
    arrival = np.concatenate(arrival_stretches(num, group=1, num_spread=5, length=5, seed=1))
    return WindowBuffer(arrival, num_windows=num_windows, num_batches=num_batches, ahead=ahead, seed=seed)


@pytest.mark.parametrize(
    ("num", "group", "length"), [(103, 1, 10), (103, 5, 10), (7, 5, 10), (1, 1, 1), (40, 40, 40)]
)
def test_stretches_hold_every_trajectory_once(num: int, group: int, length: int) -> None:
    stretches = arrival_stretches(num, group=group, num_spread=2, length=length, seed=0)
    np.testing.assert_array_equal(np.sort(np.concatenate(stretches)), np.arange(num))
    assert all(len(stretch) and (np.diff(stretch) > 0).all() for stretch in stretches)
    groups = [set((stretch // group).tolist()) for stretch in stretches]
    assert sum(map(len, groups)) == len(set().union(*groups))  # no group is encoded twice


def test_first_stretch_is_spread_and_the_others_are_mixed() -> None:
    first, *rest = arrival_stretches(1000, group=2, num_spread=10, length=20, seed=0)
    assert np.ptp(first) > 900
    assert np.diff(first).max() < 110
    order = [int(stretch[0]) for stretch in rest]
    assert order != sorted(order)
    assert all(np.ptp(stretch) < 20 for stretch in rest)


def test_stretches_are_a_function_of_the_seed() -> None:
    first, again, other = (
        np.concatenate(arrival_stretches(90, group=2, num_spread=2, length=4, seed=seed))
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("num", "num_windows", "num_batches"), [(50, 7, 11), (1, 3, 1), (40, 1, 4), (9, 20, 180), (200, 13, 81)]
)
def test_buffer_draws_every_window_once_from_trajectories_that_came(
    num: int, num_windows: int, num_batches: int
) -> None:
    buffer = make_buffer(num, num_windows=num_windows, num_batches=num_batches)
    arrival = np.concatenate(arrival_stretches(num, group=1, num_spread=5, length=5, seed=1))
    seen: list[int] = []
    sizes: list[int] = []
    for _ in range(num_batches):
        items = buffer.draw()
        assert np.isin(items // num_windows, arrival[: buffer.num_arrived]).all()
        seen += items.tolist()
        sizes.append(len(items))
    assert sorted(seen) == list(range(num * num_windows))
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[0] <= 1


def test_first_batch_needs_the_first_trajectories_only() -> None:
    buffer = make_buffer(1000, num_windows=40, num_batches=1250)
    buffer.draw()
    assert buffer.num_arrived == FIRST_AHEAD + 1


def test_buffer_never_asks_for_more_than_ahead() -> None:
    buffer = make_buffer(300, num_windows=4, num_batches=100, ahead=20)
    for number in range(1, 101):
        buffer.draw()
        assert buffer.num_arrived <= min(300, number * 12 // 4 + 20)


def test_draws_are_a_function_of_the_seed() -> None:
    first, again, other = (make_buffer(60, num_windows=5, num_batches=10, seed=seed) for seed in (3, 3, 4))
    draws = [np.concatenate([buffer.draw() for _ in range(10)]) for buffer in (first, again, other)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


def test_batches_mix_trajectories() -> None:
    buffer = make_buffer(400, num_windows=40, num_batches=500, ahead=most_ahead(400))
    mixed = [len(np.unique(buffer.draw() // 40)) for _ in range(500)]
    assert np.mean(mixed[100:400]) > 20  # of 32 windows; from one trajectory after the other it would be 1


def test_drawn_up_trajectories_are_told() -> None:
    buffer = make_buffer(8, num_windows=2, num_batches=4, ahead=8)
    drawn = [buffer.draw() for _ in range(3)]
    used_up = np.bincount(np.concatenate(drawn) // 2, minlength=8) == 2
    assert used_up.any()
    np.testing.assert_array_equal(buffer.is_used_up(np.arange(8)), used_up)


def make_draws(*, seed: int = 0, which: int = 0) -> PassDraws:
    arrivals = {
        name: Arrivals(
            arrival_stretches(num, group=2, num_spread=3, length=6, seed=number), windows, batches, 16
        )
        for number, (name, num, windows, batches) in enumerate([("a", 30, 5, 9), ("b", 11, 8, 5)])
    }
    return PassDraws(arrivals, seed=seed, which=which)


def test_pass_mixes_tasks_and_draws_every_window_of_each_once() -> None:
    whole = make_draws()
    draws = [whole.draw() for _ in range(14)]
    tasks = [draw.task for draw in draws]
    assert sorted(tasks) == ["a"] * 9 + ["b"] * 5
    assert tasks != sorted(tasks)
    for name, num in (("a", 150), ("b", 88)):
        items = np.concatenate([draw.items for draw in draws if draw.task == name])
        np.testing.assert_array_equal(np.sort(items), np.arange(num))


@pytest.mark.parametrize("position", [0, 1, 7, 13])
def test_pass_that_is_continued_draws_what_an_undisturbed_one_draws(position: int) -> None:
    whole, continued = make_draws(), make_draws()
    expected = [whole.draw() for _ in range(14)][position]
    continued.skip_to(position)
    found = continued.draw()
    assert found.task == expected.task
    np.testing.assert_array_equal(found.items, expected.items)


@pytest.mark.parametrize("change", [{"seed": 1}, {"which": 1}])
def test_other_seeds_and_passes_draw_otherwise(change: dict[str, int]) -> None:
    draws = [make_draws(), make_draws(**change)]
    items = [[one.draw().items.tolist() for _ in range(14)] for one in draws]
    assert items[0] != items[1]

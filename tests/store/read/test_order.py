"""Data order: permutations that are computed where they are asked for, and the steps made of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from ups_store.errors import ConfigError
from ups_store.read import order as permutation
from ups_store.read.order import BlockPermutation, DataOrder, Permutation, Step

SHUFFLES = (True, False, "block")

GOLDEN_10 = [4, 9, 6, 5, 7, 0, 3, 2, 1, 8]
GOLDEN_BLOCKS = [275, 747, 426, 278, 420, 458, 455, 39, 529, 850]
GOLDEN_LAST_BLOCKS = [692, 953, 689, 829, 688, 690, 830, 832, 687, 828]
GOLDEN_MILLION = [760934, 485881, 663965, 126670, 876384]
GOLDEN_STEPS = [(1, [64, 35, 55, 10]), (0, [729, 690, 563, 998]), (1, [68, 14, 56, 5])]

sizes = st.one_of(st.integers(1, 40), st.integers(1, 5000))
keys = st.integers(0, (1 << 64) - 1)


def items_of(order: DataOrder) -> list[list[int]]:
    """Items of the steps that are left in the epoch; padding left out."""
    return [
        step.items.tolist() if step.mask is None else step.items[step.mask].tolist() for step in order.steps()
    ]


def global_steps(size: int, world_size: int, **options: Any) -> list[list[Step]]:
    """Every step of an epoch, on every rank."""
    ranks = [
        DataOrder([size], rank=rank, world_size=world_size, **options).steps() for rank in range(world_size)
    ]
    return [list(steps) for steps in zip(*ranks, strict=True)]


@given(size=sizes, key=keys)
def test_permutation_of_every_position_gives_every_item_once(size: int, key: int) -> None:
    found = Permutation(size, key)(np.arange(size))
    assert np.array_equal(np.sort(found), np.arange(size))


@given(
    size=st.integers(1, 3000),
    key=keys,
    block_size=st.integers(1, 70),
    blocks_per_window=st.integers(1, 12),
    tweak=st.integers(0, 5),
)
def test_block_permutation_of_every_position_gives_every_item_once(
    size: int, key: int, block_size: int, blocks_per_window: int, tweak: int
) -> None:
    shuffled = BlockPermutation(size, key, block_size=block_size, blocks_per_window=blocks_per_window)
    found = shuffled(np.arange(size), tweak)
    assert np.array_equal(np.sort(found), np.arange(size))


def test_permutation_gives_the_same_numbers_as_when_the_format_of_states_was_fixed() -> None:
    """Saved states must continue with the same data, on every machine and with every NumPy."""
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == GOLDEN_10
    assert Permutation(10**6, 42, 3)(np.arange(5)).tolist() == GOLDEN_MILLION
    blocks = BlockPermutation(1000, 42, 3, block_size=7, blocks_per_window=5)
    assert blocks(np.arange(30, 40)).tolist() == GOLDEN_BLOCKS
    assert blocks(np.arange(990, 1000), 2).tolist() == GOLDEN_LAST_BLOCKS
    order = DataOrder([1000, 70], shuffle=True, global_batch_size=4, seed=7, weights=[1, 1])
    assert [(step.source, step.items.tolist()) for step in itertools.islice(order.steps(), 3)] == GOLDEN_STEPS


@pytest.mark.parametrize("size", [2, 5])
def test_permutations_of_a_few_items_are_equally_frequent(size: int) -> None:
    num_orders = len(list(itertools.permutations(range(size))))
    trials = 300 * num_orders
    positions, tweaks = np.tile(np.arange(size), trials), np.repeat(np.arange(trials), size)
    found = Permutation(size, 1)(positions, tweaks).reshape(trials, size)
    _, counts = np.unique(found @ (size ** np.arange(size)), return_counts=True)
    assert len(counts) == num_orders
    assert stats.chisquare(counts).pvalue > 1e-3


def test_block_shuffle_reads_few_places_at_a_time() -> None:
    """A window of 8 blocks holds items of at most 9 places of the store, and not in their order."""
    shuffled = BlockPermutation(10_000, 1, block_size=50, blocks_per_window=8)
    window = shuffled(np.arange(400, 800))
    places = np.count_nonzero(np.diff(np.sort(window)) > 1) + 1
    assert places <= 9
    assert np.count_nonzero(np.abs(np.diff(window)) == 1) < 20


@given(
    size=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 1 << 32),
    shuffle=st.sampled_from(SHUFFLES),
)
def test_epoch_without_drop_last_takes_every_item_once(
    size: int, batch_size: int, seed: int, shuffle: Any
) -> None:
    order = DataOrder([size], global_batch_size=batch_size, seed=seed, shuffle=shuffle, block_size=7)
    steps = items_of(order)
    assert len(steps) == order.num_steps == -(-size // batch_size)
    assert sorted(itertools.chain(*steps)) == list(range(size))


@given(
    per_rank=st.integers(1, 6),
    world_size=st.integers(1, 5),
    size=st.integers(30, 200),
    shuffle=st.sampled_from(SHUFFLES),
    last=st.sampled_from(["short", "drop_last", "pad_last"]),
)
def test_steps_hold_the_same_samples_whatever_the_world_size(
    per_rank: int, world_size: int, size: int, shuffle: Any, last: str
) -> None:
    batch_size = per_rank * world_size
    assume(last != "short" or (size - 1) % batch_size + 1 >= world_size)
    options: dict[str, Any] = {"global_batch_size": batch_size, "shuffle": shuffle, "seed": 3}
    if last != "short":
        options[last] = True
    alone = [steps[0] for steps in global_steps(size, 1, **options)]
    together = global_steps(size, world_size, **options)
    assert len(alone) == len(together)
    for one, ranks in zip(alone, together, strict=True):
        assert one.items.tolist() == [item for step in ranks for item in step.items.tolist()]
        if one.mask is not None:
            assert one.mask.tolist() == [value for step in ranks for value in step.mask.tolist()]


def test_partial_last_batch_is_dropped_or_padded_from_the_beginning_of_the_epoch() -> None:
    padded = list(DataOrder([10], global_batch_size=4, shuffle=True, pad_last=True).steps())
    assert [step.mask.tolist() for step in padded if step.mask is not None][-1] == [True, True, False, False]
    assert padded[-1].items[2:].tolist() == padded[0].items[:2].tolist()
    dropped = list(DataOrder([10], global_batch_size=4, shuffle=True, drop_last=True).steps())
    assert [step.items.tolist() for step in dropped] == [step.items.tolist() for step in padded[:2]]
    assert all(step.mask is None for step in dropped)


@pytest.mark.parametrize(("world_size", "shares"), [(1, [7]), (2, [3, 4]), (3, [2, 2, 3]), (4, [1, 2, 2, 2])])
def test_last_batch_is_shorter_and_divided_as_evenly_as_possible(world_size: int, shares: list[int]) -> None:
    ranks = [
        list(DataOrder([19], global_batch_size=12, rank=rank, world_size=world_size).steps())
        for rank in range(world_size)
    ]
    assert [len(steps) for steps in ranks] == [2] * world_size
    lasts = [steps[-1] for steps in ranks]
    assert [len(step.items) for step in lasts] == shares
    assert [item for step in lasts for item in step.items.tolist()] == list(range(12, 19))
    assert [(step.first, step.num_rows, step.mask) for step in lasts] == [
        (sum(shares[:rank]), 7, None) for rank in range(world_size)
    ]


def test_last_batch_that_not_every_rank_has_an_item_of_is_an_error_that_names_both_ways_out() -> None:
    options: dict[str, Any] = {"global_batch_size": 4, "rank": 0, "world_size": 4}
    with pytest.raises(ConfigError) as caught:
        DataOrder([40, 10], **options)
    assert (caught.value.kind, caught.value.found) == ("drop_last", 2)
    first = str(caught.value).splitlines()[0]
    assert "2 items for 4 ranks: drop_last=True leaves it out, pad_last=True fills it up" in first
    assert DataOrder([40, 10], drop_last=True, **options).num_steps == 12
    assert DataOrder([40, 10], pad_last=True, **options).num_steps == 13


@given(
    shuffle=st.sampled_from(SHUFFLES),
    consumed=st.integers(0, 40),
    epoch=st.integers(0, 3),
    weights=st.sampled_from([None, [1.0, 5.0]]),
)
def test_resumed_order_continues_with_the_same_items(
    shuffle: Any, consumed: int, epoch: int, weights: list[float] | None
) -> None:
    options: dict[str, Any] = {"global_batch_size": 6, "shuffle": shuffle, "weights": weights}
    order = DataOrder([90, 61], seed=11, **options)
    order.epoch = epoch
    everything = [(step.number, step.source, step.items.tolist()) for step in order.steps()]
    taken = min(consumed, len(everything))
    order.consumed = taken * 6
    resumed = DataOrder([90, 61], seed=11, **options)
    resumed.load_state_dict(order.state_dict())
    rest = [(step.number, step.source, step.items.tolist()) for step in resumed.steps()]
    assert rest == everything[taken:]


@pytest.mark.parametrize(
    ("saved", "own", "name"),
    [
        ({"shuffle": False}, {"shuffle": True}, "shuffle"),
        ({"shuffle": True}, {"shuffle": False}, "shuffle"),
        ({"shuffle": "block"}, {"shuffle": True}, "shuffle"),
        ({"shuffle": False}, {"shuffle": True, "keeps_shuffle": True}, "shuffle"),
        ({"seed": 3}, {"seed": 4}, "seed"),
        ({"shuffle": "block", "block_size": 8}, {"shuffle": "block", "block_size": 9}, "block_size"),
        (
            {"shuffle": "block", "blocks_per_window": 2},
            {"shuffle": "block", "blocks_per_window": 3},
            "blocks_per_window",
        ),
    ],
)
def test_state_of_another_order_is_refused_with_both_named(
    saved: dict[str, Any], own: dict[str, Any], name: str
) -> None:
    state = DataOrder([100], global_batch_size=10, **saved).state_dict()
    order = DataOrder([100], global_batch_size=10, **own)
    with pytest.raises(ConfigError) as caught:
        order.load_state_dict(state)
    assert (caught.value.kind, caught.value.found) == ("state", saved[name])
    assert caught.value.expected == repr(own[name])
    assert f"another {name.replace('_', ' ')}" in str(caught.value)


def test_several_sources_are_taken_once_each_and_never_mixed_in_a_step() -> None:
    order = DataOrder([40, 25, 9], global_batch_size=5, shuffle=True)
    steps = list(order.steps())
    for source, size in enumerate(order.sizes):
        items = [step.items for step in steps if step.source == source]
        assert np.sort(np.concatenate(items)).tolist() == list(range(size))
    sources = [step.source for step in steps]
    assert sources != sorted(sources)


def test_weights_set_the_shares_of_steps_and_repeat_small_sources_in_new_orders() -> None:
    order = DataOrder([8000, 80], global_batch_size=8, shuffle=True, weights=[1, 3])
    steps = list(order.steps())
    assert len(steps) == order.num_steps == 1010
    of_small = [step.items.tolist() for step in steps if step.source == 1]
    assert len(of_small) == round(1010 * 3 / 4)
    passes = [list(itertools.chain(*of_small[k : k + 10])) for k in range(0, 750, 10)]
    assert all(sorted(one) == list(range(80)) for one in passes)
    assert len(set(map(tuple, passes))) == len(passes)


@pytest.mark.parametrize(
    "state",
    [
        {"consumed": None},
        {"global_batch_size": None},
        {"global_batch_size": 16},
        {"consumed": 5},
        {"consumed": 112},
        {"consumed": -8},
        {"epoch": -1},
        {"seed": -1},
    ],
)
def test_load_state_dict_refuses_what_no_such_order_has_saved(state: dict[str, int | None]) -> None:
    order = DataOrder([100], global_batch_size=8)
    changed = {**order.state_dict(), **state}
    with pytest.raises(ConfigError) as caught:
        order.load_state_dict({key: value for key, value in changed.items() if value is not None})
    assert caught.value.kind == "state"
    assert (order.seed, order.epoch, order.consumed) == (0, 0, 0)


@settings(max_examples=40)
@given(
    size=st.integers(1, 3000),
    block_size=st.integers(1, 9),
    calls=st.lists(st.tuples(st.integers(0, 2999), st.integers(1, 500), st.integers(0, 1)), max_size=6),
)
def test_order_of_blocks_does_not_depend_on_what_was_asked_before(
    size: int, block_size: int, calls: list[tuple[int, int, int]]
) -> None:
    options = {"block_size": block_size, "blocks_per_window": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "BLOCKS_AHEAD", 20)
        used = BlockPermutation(size, 5, **options)
        for first, num, tweak in calls:
            positions = np.arange(first % size, min(size, first % size + num))
            assert np.array_equal(
                used(positions, tweak), BlockPermutation(size, 5, **options)(positions, tweak)
            )


def test_state_of_an_older_version_without_shuffle_is_refused_and_says_what_to_add() -> None:
    order = DataOrder([100], global_batch_size=10)
    with pytest.raises(ConfigError, match="the state lacks shuffle") as caught:
        order.load_state_dict({"seed": 0, "epoch": 0, "consumed": 0, "global_batch_size": 10})
    assert caught.value.kind == "state"

"""Mixed order: shares in every batch, every item once in a pass, the same for any ranks and from any step."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups_store.errors import ConfigError
from ups_store.read.order import MixedOrder

SIZES = (50, 7, 23)
WEIGHTS = (5.0, 1.0, 2.5)
FIRSTS = np.cumsum([0, *SIZES])


def make(**options: Any) -> MixedOrder:
    return MixedOrder(SIZES, **{"global_batch_size": 12, "weights": WEIGHTS, "shuffle": True, **options})


def items_of(order: MixedOrder, epoch: int = 0) -> list[list[int]]:
    return [step.items.tolist() for step in order.steps(epoch)]


def sources_of(items: Any) -> np.ndarray:
    return np.searchsorted(FIRSTS, items, side="right") - 1


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    data=st.data(),
    batch=st.integers(1, 30),
    epoch_size=st.integers(1, 400),
)
def test_every_batch_and_every_epoch_hold_the_shares(
    sizes: list[int], data: st.DataObject, batch: int, epoch_size: int
) -> None:
    """A batch to less than a row of each source, an epoch to a row and what rounding to 2**-32 adds."""
    weights = data.draw(st.lists(st.floats(0.01, 10), min_size=len(sizes), max_size=len(sizes)))
    order = MixedOrder(sizes, global_batch_size=batch, weights=weights, epoch_size=epoch_size)
    shares = np.array(weights) / sum(weights)
    counts = order._counts(np.arange(order.num_steps))
    assert (counts >= 0).all()
    assert (counts.sum(1) == batch).all()
    assert (np.abs(counts - batch * shares) < 1 + 1e-6).all()
    assert (np.abs(counts.sum(0) - order.num_steps * batch * shares) < 1 + 1e-3).all()
    assert counts.sum(0).tolist() == order.counts.tolist()


@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_a_source_is_read_through_over_epochs_before_an_item_comes_again(shuffle: Any) -> None:
    order = make(shuffle=shuffle, epoch_size=36, block_size=4, blocks_per_window=3)
    drawn = np.concatenate([np.ravel(items_of(order, epoch)) for epoch in range(20)])
    for source, size in enumerate(SIZES):
        mine = drawn[sources_of(drawn) == source] - FIRSTS[source]
        passes = [mine[i : i + size].tolist() for i in range(0, len(mine) - size + 1, size)]
        assert len(passes) > 2
        assert all(sorted(one) == list(range(size)) for one in passes)
        is_shuffled = passes[0] != passes[1] and passes[0] != list(range(size))
        assert is_shuffled is (shuffle is not False)


@pytest.mark.parametrize("shuffle", [False, True, "block"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_ranks_share_the_rows_of_one_process_and_each_has_the_mix(shuffle: Any, world_size: int) -> None:
    whole = items_of(make(shuffle=shuffle), 1)
    ranks = [
        items_of(make(shuffle=shuffle, rank=rank, world_size=world_size), 1) for rank in range(world_size)
    ]
    together = [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert together == whole
    for rows in itertools.chain(*ranks):
        found = np.bincount(sources_of(rows), minlength=3)
        assert (np.abs(found - len(rows) * np.array(WEIGHTS) / sum(WEIGHTS)) < 2).all()


def test_state_goes_on_from_any_step_also_on_other_ranks_and_as_json() -> None:
    order = make(epoch_size=100)
    assert order.num_steps == 9
    for begin in (1, 4, 9):
        order.epoch, order.consumed = 3, begin * 12
        state = json.loads(json.dumps(order.state_dict()))
        other = make(epoch_size=100, rank=1, world_size=2)
        other.load_state_dict(state)
        assert [step.items.tolist() for step in other.steps()] == [
            row[6:] for row in items_of(make(epoch_size=100), 3)[begin:]
        ]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"weights": (1, 2)}, "weights"),
        ({"weights": (1, 2, 0)}, "weights"),
        ({"weights": (1, 2, float("nan"))}, "weights"),
        ({"epoch_size": 0}, "epoch_size"),
        ({"epoch_size": 0.5}, "epoch_size"),
        ({"epoch_size": 11, "drop_last": True}, "epoch_size"),
        ({"epoch_size": 12 << 31}, "epoch_size"),
        ({"world_size": 5}, "batch_size"),
        ({"seed": -1}, "seed"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused_by_name(options: dict[str, Any], kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert caught.value.kind == kind


@pytest.mark.parametrize(("name", "value"), [("weights", (1, 1, 1)), ("epoch_size", 24), ("seed", 5)])
def test_state_of_another_mix_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", " ")) as caught:
        make().load_state_dict(make(**{name: value}).state_dict())
    assert caught.value.kind == "state"

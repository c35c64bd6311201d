"""Shares of the ranks, and what they found, joined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.distributed.ranks import Ranks

ITEMS = np.array([3, 4, 9, 12, 20])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_shares_have_one_length_and_hold_every_item(world_size: int) -> None:
    shares = [Ranks(rank, world_size).share(ITEMS) for rank in range(world_size)]
    assert {len(share) for share in shares} == {-(-len(ITEMS) // world_size)}
    assert np.unique(np.concatenate(shares)).tolist() == ITEMS.tolist()
    assert all((np.diff(share) >= 0).all() for share in shares)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_joined_values_are_those_of_every_item_once(world_size: int) -> None:
    numbers = [torch.from_numpy(Ranks(rank, world_size).share(ITEMS)) for rank in range(world_size)]
    values = [torch.stack([number * 2.0, -number], dim=1) for number in numbers]

    class Gathering(Ranks):
        def gather(self, values: Tensor) -> Tensor:
            return torch.stack(found.pop(0))

    found = [numbers, values]
    joined = Gathering(0, world_size).joined(numbers[0], values[0])
    assert joined.tolist() == [[2.0 * item, -item] for item in ITEMS]


def test_process_that_is_alone_joins_its_own() -> None:
    numbers = torch.from_numpy(Ranks().share(ITEMS))
    assert Ranks().joined(numbers, numbers * 1.5).tolist() == [1.5 * item for item in ITEMS]

"""`make_batch_sampler`: several stores of different shapes, and ranks, with torch's own DataLoader."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import MakeStore
from torch.utils.data import DataLoader

from ups_store.torch import StoreDataset, make_batch_sampler, make_loader

SIZES = {"burgers1d": (30, 3), "advection1d": (13, 5)}  # samples, values per sample
workers = pytest.mark.filterwarnings(  # of Python 3.12 on, about every fork; of torch, about small machines
    "ignore:.*fork.*:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)


@pytest.fixture
def paths(make_store: MakeStore) -> list[Path]:
    """Two stores of different shapes; all values of one are its sample's width."""
    return [
        make_store({"a": np.full((size, width), width)}, name=f"{task}.zarr.zip", identity={"task": task})
        for task, (size, width) in SIZES.items()
    ]


def indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


@workers
@pytest.mark.multi_process
@pytest.mark.parametrize("context", [None, "fork"])
def test_stores_of_different_shapes_are_never_mixed_in_a_batch(
    paths: list[Path], context: str | None
) -> None:
    dataset = StoreDataset(paths)
    sampler = make_batch_sampler(dataset, batch_size=4, shuffle=True, seed=2)
    options = {"num_workers": 2, "multiprocessing_context": context} if context else {}
    batches = list(DataLoader(dataset, batch_sampler=sampler, **options))
    assert len(batches) == len(sampler) == 12
    for batch in batches:
        width = SIZES[batch["task"]][1]
        assert (batch["a"] == width).all()
        assert batch["a"].shape[1] == width
    assert sorted(itertools.chain(*indices(batches))) == list(range(43))


def test_order_is_that_of_the_loader(paths: list[Path]) -> None:
    dataset = StoreDataset(paths)
    options: dict[str, Any] = {
        "batch_size": 4,
        "shuffle": True,
        "seed": 5,
        "drop_last": True,
        "weights": [1, 2],
    }
    sampler, loader = make_batch_sampler(dataset, **options), make_loader(dataset, **options)
    for _ in range(2):
        assert list(sampler) == indices(loader)


def test_epoch_goes_on_where_the_loop_stopped(paths: list[Path]) -> None:
    dataset = StoreDataset(paths)
    sampler = make_batch_sampler(dataset, batch_size=4, shuffle=True)
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1]
    resumed = make_batch_sampler(dataset, batch_size=4, shuffle=True)
    resumed.set_epoch(1, consumed=5 * 4)
    assert list(resumed) == epochs[1][5:]
    assert list(resumed) == epochs[2]

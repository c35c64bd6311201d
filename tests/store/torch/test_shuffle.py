"""`shuffle="auto"`: which of full and block shuffle is chosen, why, and that a resumed run keeps it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_stores import MakeStore

from ups_store import Store
from ups_store.errors import ConfigError
from ups_store.read import ranks as loading
from ups_store.torch import StoreDataset, make_loader


@pytest.fixture
def dataset(make_store: MakeStore) -> StoreDataset:
    return StoreDataset(make_store({"a": np.arange(40.0)[:, None] + np.zeros(1000)}))


def pretend(monkeypatch: pytest.MonkeyPatch, *, available: int, resident: float = 0.0) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda: available)
    monkeypatch.setattr(Store, "residency", lambda self: resident)


@pytest.mark.parametrize(
    ("machine", "shuffle", "reason"),
    [
        ({"available": 10**9}, True, "fits into RAM"),
        ({"available": 10**5}, "block", "larger than RAM"),
        ({"available": 10**5, "resident": 1.0}, True, "all in RAM"),
    ],
)
def test_auto_takes_blocks_for_what_is_larger_than_memory_and_says_why(
    dataset: StoreDataset,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machine: dict[str, Any],
    shuffle: Any,
    reason: str,
) -> None:
    pretend(monkeypatch, **machine)
    with caplog.at_level(logging.INFO, "ups_store"):
        loader = make_loader(dataset, batch_size=4, shuffle="auto")
    assert loader.order.shuffle == shuffle
    (line,) = [record.getMessage() for record in caplog.records if "shuffle" in record.getMessage()]
    nbytes = dataset.sources[0].store.nbytes
    for part in (reason, f"{nbytes:,} bytes of stores", f"{machine['available']:,} bytes of RAM available"):
        assert part in line


def test_auto_takes_blocks_on_a_network_file_system(
    dataset: StoreDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, available=10**9)
    monkeypatch.setattr(dataset.sources[0].store, "network", "nfs")
    with caplog.at_level(logging.INFO, "ups_store"):
        assert make_loader(dataset, batch_size=4, shuffle="auto").order.shuffle == "block"
    assert "shuffle: block: on nfs" in caplog.text


def test_resumed_run_keeps_what_auto_chose_elsewhere(
    dataset: StoreDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": "auto"}
    pretend(monkeypatch, available=10**5)
    loader = make_loader(dataset, **options)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    expected = [batch["index"].tolist() for batch in batches]
    pretend(monkeypatch, available=10**9)
    resumed = make_loader(dataset, **options)
    assert resumed.order.shuffle is True
    resumed.load_state_dict(state)
    assert [batch["index"].tolist() for batch in resumed] == expected


def test_auto_on_ranks_that_cannot_talk_is_refused(dataset: StoreDataset) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loader(dataset, batch_size=4, shuffle="auto", rank=0, world_size=2)
    assert caught.value.kind == "shuffle"


def _rank(rank: int, path: str, rendezvous: str, found: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    loading.available_bytes = lambda: (10**9, 10**5)[rank]
    Store.residency = lambda self: 0.0  # type: ignore[method-assign]
    loader = make_loader(StoreDataset(path), batch_size=4, shuffle="auto")
    found.put((rank, loader.order.shuffle, [batch["index"].tolist() for batch in loader]))
    torch.distributed.destroy_process_group()


@pytest.mark.multi_process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_ranks_agree_on_blocks_when_one_of_them_needs_them(dataset: StoreDataset, tmp_path: Path) -> None:
    """With torch.distributed's own processes: ranks of different memory would read different orders."""
    context = torch.multiprocessing.get_context("fork")  # a new interpreter imports torch for seconds
    found = context.SimpleQueue()
    arguments = (str(dataset.sources[0].store.path), f"file://{tmp_path / 'rendezvous'}", found)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    results = sorted(found.get() for _ in ranks)
    for process in ranks:
        process.join()
    assert [shuffle for _, shuffle, _ in results] == ["block", "block"]
    taken = [index for _, _, steps in results for step in steps for index in step]
    assert sorted(taken) == list(range(40))

"""Batches on their way to a device, which a thread stands for; on a real one with the marker `gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from simulated_cuda import SimulatedCuda, simulated_cuda
from small_stores import MakeStore

from ups_store.torch import Loader, StoreDataset, make_loader
from ups_store.torch.device import DeviceFeed

N, BATCH = 24, 4
NUM_STEPS = N // BATCH


@pytest.fixture
def dataset(make_store: MakeStore) -> StoreDataset:
    """Sample i holds the number i + 1: none is what memory holds that nothing was copied to."""
    return StoreDataset(make_store({"a": np.arange(1, N + 1, dtype=np.float32)[:, None] + np.zeros(64)}))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    with simulated_cuda(monkeypatch) as cuda:
        yield cuda


def loader_to_device(dataset: StoreDataset) -> Loader:
    return make_loader(dataset, batch_size=BATCH, num_workers=1, device="cuda")


def assert_is_step(number: int, values: torch.Tensor) -> None:
    first = BATCH * number + 1
    assert values[:, 0].tolist() == list(range(first, first + BATCH))


def test_loop_never_waits_for_the_device_while_a_step_takes_as_long_as_a_copy(
    dataset: StoreDataset, cuda: SimulatedCuda
) -> None:
    loader = loader_to_device(dataset)
    for number, batch in enumerate(loader):
        assert_is_step(number, batch["a"])
        if number + 1 < NUM_STEPS:
            cuda.has_time_for_a_copy()  # of the next batch, while this one is computed with
    assert cuda.stalls == [True] + [False] * (NUM_STEPS - 1)  # the first batch has no step before it


def test_loop_that_is_faster_than_the_device_waits_and_has_the_right_batches(
    dataset: StoreDataset, cuda: SimulatedCuda
) -> None:
    for number, batch in enumerate(loader_to_device(dataset)):
        assert_is_step(number, batch["a"])
    assert cuda.stalls == [True] * NUM_STEPS


def test_batches_come_from_page_locked_memory_and_are_kept_for_the_stream_of_the_loop(
    dataset: StoreDataset, cuda: SimulatedCuda
) -> None:
    for batch in loader_to_device(dataset):
        assert {batch["a"].data_ptr(), batch["index"].data_ptr()} <= cuda.kept
    assert cuda.num_pinned == NUM_STEPS


@pytest.mark.gpu
def test_copy_to_a_real_device_overtakes_what_the_loop_computes() -> None:
    feed = DeviceFeed(torch.device("cuda"))
    source = feed.allocate((1 << 20,), torch.float32).fill_(1)
    assert source.is_pinned()
    feed.send({"a": source})[1].synchronize()  # what the first copy takes besides is no part of it
    torch.cuda._sleep(10**10)  # cycles, seconds of work for the stream of the loop
    computed = torch.cuda.current_stream().record_event()
    there, copied = feed.send({"a": source})
    copied.synchronize()
    assert not computed.query()
    feed.receive(there, copied)
    assert there["a"].sum().item() == 1 << 20

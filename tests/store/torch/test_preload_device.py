"""Preloading to a device and to page-locked memory: gathers there give what the store gathers.

The CPU stands for the device where none is there: the same code, without streams. What needs CUDA is marked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_stores import DIMS, MakeStore, mixed_constants, mixed_values
from torch import Tensor

import ups_store
from ups_store import ArrayNotFoundError, DeviceError, MemoryLimitError, SampleIndexError, SpecError, Store
from ups_store.read import preload
from ups_store.torch import DeviceStore
from ups_store.torch import device as staging

VALUES = {
    **mixed_values(24),
    "inner": np.random.default_rng(1).standard_normal((24, 3, 5, 2)).astype(np.float16),
    "count": np.arange(24 * 5, dtype=np.uint16).reshape(24, 5),
}
ALL_DIMS = {**DIMS, "inner": ("sample", "level", "time", "side"), "count": ("sample", "time")}
CHOSEN = [5, 0, 23, 5]
WINDOWS: list[dict[str, Any]] = [
    {},
    {"start": [0, 2, 1, 3], "length": 2},
    {"start": [0, 2, 1, 0], "length": 2, "stride": 2},
]


@pytest.fixture
def path(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store that is moved in several steps of several pieces."""
    for module in (preload, staging):
        monkeypatch.setattr(module, "STEP_BYTES", 1 << 15)
    monkeypatch.setattr(preload, "PIECE_BYTES", 1 << 13)
    return make_store(VALUES, constants=mixed_constants(), dims=ALL_DIMS)


@pytest.fixture
def store(path: Path) -> Store:
    return ups_store.open(path)


def assert_same(found: dict[str, Tensor], expected: dict[str, Any]) -> None:
    """Names, shapes, dtypes and bits agree, and nobody else has the memory."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        tensor = found[name].cpu()
        assert (tuple(tensor.shape), tensor.dtype) == (values.shape, getattr(torch, values.dtype.name)), name
        assert tensor.is_contiguous(), name
        if values.size:
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == values.tobytes(), name


def on_device(store: Store, **options: Any) -> DeviceStore:
    found = store.preload("device", **{"device": "cpu", **options}).on_device
    assert isinstance(found, DeviceStore)
    return found


@pytest.mark.parametrize("window", WINDOWS)
def test_gather_on_the_device_equals_gather_of_the_store(store: Store, window: dict[str, Any]) -> None:
    there = on_device(store)
    assert_same(there.gather(CHOSEN, **window), store.gather(CHOSEN, **window))


def test_report_and_progress_count_what_was_moved(store: Store) -> None:
    steps: list[int] = []
    report = store.preload("device", device="cpu", progress=steps.append)
    there = report.on_device
    assert (report.mode, report.nbytes) == ("device", there.nbytes)
    assert sum(steps) == there.nbytes
    assert f"{there.nbytes:,} bytes needed" in report.why
    assert (len(there), there.samples, there.device) == (24, range(24), torch.device("cpu"))
    assert "range(0, 24) on cpu" in repr(there)
    assert not store._file.is_copy  # the store itself stays as it is


def test_shard_keeps_the_numbers_of_the_store(store: Store) -> None:
    there = on_device(store, samples=range(6, 12))
    assert there.nbytes < on_device(store).nbytes
    assert_same(there.gather([11, 6], start=2, length=2), store.gather([11, 6], start=2, length=2))
    for outside in (5, 12, -1):
        with pytest.raises(SampleIndexError):
            there.gather([6, outside])


def test_wrong_requests_are_refused_as_by_the_store(store: Store) -> None:
    there = on_device(store)
    with pytest.raises(ArrayNotFoundError, match="'y'"):
        there.gather([0], ["y"])
    with pytest.raises(SpecError, match="no sample axis"):
        there.gather([0], ["x"])
    with pytest.raises(SpecError, match="`out`"):
        there.gather([0], out={"nu": np.zeros(1)})
    with pytest.raises(SpecError, match="dimension 'time'"):
        there.gather([0], ["nu"], length=1)
    with pytest.raises(SampleIndexError):
        there.gather([0], start=4, length=2)
    with pytest.raises(SpecError):
        there.gather([0.5])  # type: ignore[list-item]


@pytest.mark.parametrize("device", ["cuda:99", "meta", "no device"])
def test_device_that_is_not_there_is_an_error(store: Store, device: str) -> None:
    with pytest.raises(DeviceError) as caught:
        store.preload("device", device=device)
    assert (caught.value.kind, caught.value.expected) == ("no_device", device)


def test_auto_goes_on_without_a_device_and_says_so(store: Store) -> None:
    report = store.preload("auto", device="cuda:99")
    assert report.mode == "page-cache"
    assert report.why.count("refused (no such device to preload to") == 1


def test_samples_larger_than_the_device_are_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "available_bytes", lambda: 100)
    with pytest.raises(MemoryLimitError) as caught:
        on_device(store)
    assert (caught.value.kind, caught.value.available_bytes) == ("memory", 100)


def test_refusal_of_the_allocator_is_an_error_of_ours(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    staging_memory = torch.empty

    def empty(size: int, **options: Any) -> Tensor:
        if "device" in options:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return staging_memory(size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MemoryLimitError, match="in pieces"):
        on_device(store)


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
def test_cuda_gathers_the_same(path: Path, window: dict[str, Any]) -> None:
    with ups_store.open(path) as plain, ups_store.open(path) as store:
        report = store.preload("device")
        assert (report.mode, report.on_device.device) == ("device", torch.device("cuda", 0))
        batch = report.on_device.gather(CHOSEN, **window)
        assert all(tensor.is_cuda for tensor in batch.values())
        assert_same(batch, plain.gather(CHOSEN, **window))
        on_cuda = report.on_device.gather(torch.tensor(CHOSEN, device="cuda"), **window)
        assert_same(on_cuda, plain.gather(CHOSEN, **window))


@pytest.mark.gpu
def test_cuda_without_room_gives_way_to_the_page_cache(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert store.preload("auto", device="cuda").mode == "page-cache"

"""Preloading to a device and to page-locked memory: gathers there give what the store gathers.

The CPU stands for the device where none is there: the same code, without streams. What needs CUDA is marked.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_stores import DIMS, MakeStore, mixed_constants, mixed_values, samples_of
from torch import Tensor

import ups_store
from ups_store import ArrayNotFoundError, DeviceError, MemoryLimitError, SampleIndexError, SpecError, Store
from ups_store.read import page_cache, preload
from ups_store.system import mappings
from ups_store.torch import DeviceStore, pinned
from ups_store.torch import device as staging
from ups_store.torch.memory import as_tensor, writable

VALUES = {
    **mixed_values(24),
    "inner": np.random.default_rng(1).standard_normal((24, 3, 5, 2)).astype(np.float16),
    "count": np.arange(24 * 5, dtype=np.uint16).reshape(24, 5),
}
ALL_DIMS = {**DIMS, "inner": ("sample", "level", "time", "side"), "count": ("sample", "time")}
CHOSEN = [5, 0, 23, 5]
WINDOWS: list[dict[str, Any]] = [
    {},
    {"start": 1, "length": 3},
    {"start": [0, 2, 1, 3], "length": 2},
    {"start": [0, 2, 1, 0], "length": 2, "stride": 2},
    {"stride": 3},
    {"start": 4},
]


@pytest.fixture
def path(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store that is moved in several steps of several pieces."""
    for module in (page_cache, staging):
        monkeypatch.setattr(module, "STEP_BYTES", 1 << 15)
    monkeypatch.setattr(page_cache, "PIECE_BYTES", 1 << 13)
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


@pytest.mark.parametrize("indices", [torch.tensor([3, 1]), np.array([3, 1], np.uint8), (3, 1)])
def test_indices_may_be_any_integers(store: Store, indices: Any) -> None:
    assert_same(on_device(store).gather(indices, ["nu"]), samples_of({"nu": VALUES["nu"]}, [3, 1]))


def test_empty_batch_has_the_shapes_of_a_batch(store: Store) -> None:
    assert_same(on_device(store).gather([]), store.gather([]))


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


def test_gathered_values_outlive_store_and_device_store(store: Store) -> None:
    batch = on_device(store).gather(CHOSEN)
    store.close()
    assert_same(batch, samples_of(VALUES, CHOSEN))


@pytest.mark.parametrize("mode", ["device", "pinned"])
@pytest.mark.parametrize("device", ["cuda:99", "meta", "no device"])
def test_device_that_is_not_there_is_an_error(store: Store, mode: Any, device: str) -> None:
    with pytest.raises(DeviceError) as caught:
        store.preload(mode, device=device)
    assert (caught.value.kind, caught.value.expected) == ("no_device", device)


def test_pinned_memory_is_for_cuda_only(store: Store) -> None:
    with pytest.raises(DeviceError, match="only CUDA"):
        store.preload("pinned", device="cpu")


def test_auto_goes_on_without_a_device_and_says_so(store: Store) -> None:
    report = store.preload("auto", device="cuda:99")
    assert report.mode == "page-cache"
    assert report.why.count("refused (no such device to preload to") == 2


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


class FakeRuntime:
    """Stands for the CUDA runtime: takes or refuses registrations."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 3  # portable, mapped
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def fake_cuda(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    """A runtime without a device: kernels of the CPU read the page-locked memory of `store`."""
    runtime = FakeRuntime(0)
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(pinned, "find_device", lambda job: device)
    monkeypatch.setattr(pinned, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    view = lambda memory, device, path: torch.frombuffer(memory, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(pinned, "device_view", view)
    yield runtime
    store.close()
    gc.collect()
    assert not runtime.registered


@pytest.mark.parametrize("window", WINDOWS)
def test_page_locked_store_gathers_the_same(
    store: Store, fake_cuda: FakeRuntime, window: dict[str, Any]
) -> None:
    report = store.preload("pinned")
    expected = ups_store.open(store.path).gather(CHOSEN, **window)
    assert_same(report.on_device.gather(CHOSEN, **window), expected)
    assert fake_cuda.registered == {mappings.address(store._file.mapping()): store.nbytes}
    for name, values in store.gather(CHOSEN, **window).items():
        assert values.tobytes() == expected[name].tobytes()


def test_page_locked_memory_is_released_when_nobody_has_it(store: Store, fake_cuda: FakeRuntime) -> None:
    there = store.preload("pinned").on_device
    store.close()
    gc.collect()
    assert fake_cuda.registered  # by whom gathers on the device
    del there
    gc.collect()
    assert not fake_cuda.registered


def test_refused_page_lock_is_an_error_and_auto_goes_on(
    store: Store, fake_cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.code = 2
    monkeypatch.setattr(torch, "zeros", lambda *arguments, **options: None)
    with pytest.raises(DeviceError) as caught:
        store.preload("pinned")
    assert (caught.value.kind, caught.value.found) == ("pin", "cudaHostRegister error 2")
    assert not store._file.is_copy
    report = store.preload("auto", device="cuda:99")
    assert report.mode == "page-cache"
    assert "pinned refused (CUDA refuses to page-lock the store: cudaHostRegister error 2)" in report.why


def test_view_that_would_be_a_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = mappings.new_memory(4096, kind=pinned.PageLocked)
    memory.address = mappings.address(memory)
    interface = pinned._DeviceView(memory).__cuda_array_interface__
    assert (interface["shape"], interface["data"]) == ((4096,), (memory.address, False))
    monkeypatch.setattr(torch, "as_tensor", lambda view, device: torch.zeros(4096, dtype=torch.uint8))
    with pytest.raises(DeviceError, match="can't read"):
        pinned.device_view(memory, torch.device("cpu"), path="a.zarr.zip")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["device", "pinned"])
@pytest.mark.parametrize("window", WINDOWS)
def test_cuda_gathers_the_same(path: Path, mode: Any, window: dict[str, Any]) -> None:
    with ups_store.open(path) as plain, ups_store.open(path) as store:
        report = store.preload(mode)
        assert (report.mode, report.on_device.device) == (mode, torch.device("cuda", 0))
        batch = report.on_device.gather(CHOSEN, **window)
        assert all(tensor.is_cuda for tensor in batch.values())
        assert_same(batch, plain.gather(CHOSEN, **window))
        on_cuda = report.on_device.gather(torch.tensor(CHOSEN, device="cuda"), **window)
        assert_same(on_cuda, plain.gather(CHOSEN, **window))


@pytest.mark.gpu
def test_cuda_moves_a_shard(store: Store) -> None:
    there = on_device(store, device="cuda", samples=range(6, 12))
    assert_same(there.gather([11, 6]), store.gather([11, 6]))


@pytest.mark.gpu
def test_cuda_page_locks_the_views_of_the_store(store: Store) -> None:
    there = store.preload("pinned").on_device
    assert as_tensor(writable(store["fields"])).is_pinned()
    rows = there._arrays["fields"].memory
    assert rows.is_cuda  # one address for both
    assert rows.data_ptr() == store["fields"].ctypes.data


@pytest.mark.gpu
def test_cuda_lets_go_of_page_locked_memory(path: Path) -> None:
    for _ in range(3):
        with ups_store.open(path) as store:
            batch = store.preload("pinned").on_device.gather(CHOSEN)
        gc.collect()
        assert_same(batch, samples_of(VALUES, CHOSEN))
    assert torch.zeros(8, device="cuda").sum().item() == 0  # no error was left behind


@pytest.mark.gpu
def test_cuda_without_room_gives_way_to_page_locked_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    report = store.preload("auto", device="cuda")
    assert report.mode == "pinned"
    assert report.why.startswith("device refused (the store doesn't fit into cuda:0 memory")

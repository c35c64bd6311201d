"""`Store.preload` into the page cache and into a copy of this process; `residency`; refusals."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from preload_processes import evict, mapped_bytes
from small_stores import MakeStore, assert_same_bits, begin, build, mixed_constants, mixed_values, samples_of

import ups_store
from ups_store import (
    MemoryLimitError,
    NotCommittedError,
    ReadError,
    SpecError,
    Store,
    StoreReplacedError,
    TruncatedError,
)
from ups_store.read import preload
from ups_store.system import files, memory

VALUES = mixed_values(64)
CHOSEN = [5, 0, 63, 5]
IN_RAM = pytest.mark.parametrize("mode", ["page-cache", "copy"])


@pytest.fixture
def path(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store that is read in several steps of several pieces."""
    monkeypatch.setattr(preload, "STEP_BYTES", 1 << 16)
    monkeypatch.setattr(preload, "PIECE_BYTES", 1 << 14)
    return make_store(VALUES, constants=mixed_constants())


@pytest.fixture
def store(path: Path) -> Store:
    return ups_store.open(path)


@IN_RAM
@pytest.mark.parametrize("access", ["map", "pread"])
def test_preloaded_store_holds_the_same_values(path: Path, mode: Any, access: Any) -> None:
    with ups_store.open(path, access=access) as store:
        report = store.preload(mode)
        assert (report.mode, report.nbytes, report.on_device) == (mode, store.nbytes, None)
        assert_same_bits(store.gather(CHOSEN), samples_of(VALUES, CHOSEN))
        assert_same_bits({name: store[name] for name in store.arrays}, VALUES)
        assert_same_bits(dict(store.constants), mixed_constants())
        assert store.residency() == 1.0


@IN_RAM
def test_interrupt_between_two_steps_leaves_the_store_as_it_was(store: Store, mode: Any) -> None:
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.preload(mode, progress=interrupt)
    assert not store._file.is_copy
    assert_same_bits(store.gather(CHOSEN), samples_of(VALUES, CHOSEN))


def test_page_cache_brings_an_evicted_file_into_ram(path: Path) -> None:
    evict(path)
    with ups_store.open(path) as store:
        if store.residency() > 0.5:
            pytest.skip("this file system keeps its pages")
        report = store.preload("page-cache")
        assert f"{store.nbytes:,} bytes needed" in report.why
        assert store.residency() == 1.0
        assert mapped_bytes(path.name, "Rss") >= store.nbytes  # in this process's page table too


def test_page_cache_needs_no_room_for_what_is_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.preload("page-cache")
    monkeypatch.setattr(preload, "available_bytes", lambda: 0)
    assert "page-cache: 0 bytes needed, 0 bytes" in store.preload("page-cache").why


def test_copy_lies_in_memory_of_the_process_and_needs_no_file(path: Path) -> None:
    store = ups_store.open(path, access="pread")
    store.preload("copy")
    os.truncate(path, 0)
    assert store.access == "map"
    assert_same_bits(store.gather(CHOSEN), samples_of(VALUES, CHOSEN))
    assert_same_bits(store.sample(7), {name: value[7] for name, value in VALUES.items()})


def test_pickled_store_with_a_private_copy_opens_the_file(path: Path) -> None:
    store = ups_store.open(path, access="pread")
    store.preload("copy")
    other = pickle.loads(pickle.dumps(store))
    assert (other.access, other._file.is_copy) == ("pread", False)


@IN_RAM
def test_store_larger_than_the_memory_is_refused(
    path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    evict(path)
    monkeypatch.setattr(memory, "resident_nbytes", lambda *arguments: 0)
    with ups_store.open(path) as store:
        available = int(store.nbytes / 0.9) - 10  # the margin is missing
        monkeypatch.setattr(preload, "available_bytes", lambda: available)
        with pytest.raises(MemoryLimitError) as caught:
            store.preload(mode)
        assert store.preload(mode, margin=0.0).mode == mode
    error = caught.value
    assert (error.kind, error.path) == ("memory", str(path))
    assert (error.needed_bytes, error.available_bytes) == (store.nbytes, available)
    assert f"expected {store.nbytes:,} bytes and a margin of 10%, found {available:,} available" in str(error)


def test_auto_takes_a_copy_only_if_it_may_be_shared_and_fits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.preload()
    monkeypatch.setattr(memory, "address_space_left", lambda: 1000)
    report = store.preload(shared=True)
    assert report.mode == "page-cache"
    assert report.why.startswith("copy refused (the store doesn't fit into RAM")
    assert "1,000 available" in report.why
    monkeypatch.undo()
    assert store.preload(shared=True).mode == "copy"


def test_auto_leaves_a_store_mapped_that_fits_nowhere(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_nbytes", lambda *arguments: 0)
    monkeypatch.setattr(preload, "available_bytes", lambda: 4096)
    report = store.preload()
    assert (report.mode, report.nbytes) == ("mapped", 0)
    assert "page-cache refused" in report.why
    assert "4,096 available" in report.why


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"mode": "ram"}, "mode"),
        ({"mode": "copy", "device": "cuda"}, "device"),
        ({"mode": "copy", "samples": range(2)}, "samples"),
        ({"mode": "page-cache", "shared": True}, "shared"),
        ({"mode": "pinned"}, "mode"),
        ({"lock": True}, "lock"),
        ({"margin": 1.0}, "margin"),
        ({"num_threads": 0}, "num_threads"),
        ({"mode": "device", "samples": range(0, 8, 2)}, "samples"),
        ({"mode": "device", "samples": range(60, 65)}, "samples"),
    ],
)
def test_argument_without_meaning_or_effect_is_refused(store: Store, options: Any, kind: str) -> None:
    with pytest.raises(SpecError) as caught:
        store.preload(**options)
    assert caught.value.kind == kind


def test_shared_copy_where_there_are_no_files_in_memory_is_an_error_and_auto_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    report = store.preload(shared=True)
    assert report.mode == "page-cache"
    assert report.why.startswith("copy refused (no copy that processes share")
    with pytest.raises(SpecError, match="page-cache") as caught:
        store.preload("copy", shared=True)
    assert caught.value.kind == "unsupported"


def test_plan_says_what_a_preload_would_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "available_bytes", lambda: 1000)
    assert ups_store.forecast_preload(900) == (
        "page-cache",
        "page-cache: 900 bytes needed, 1,000 bytes of RAM available",
    )
    mode, why = ups_store.forecast_preload(901)
    assert (mode, why.startswith("page-cache refused")) == ("mapped", True)
    with pytest.raises(MemoryLimitError):
        ups_store.forecast_preload(901, "copy")


def test_store_under_construction_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.zarr.zip"
    with begin(path, VALUES) as writer:
        writer.commit_many(range(2), samples_of(VALUES, [0, 1]))
        with ups_store.open(path, partial=True) as store, pytest.raises(NotCommittedError):
            store.preload()


def test_replaced_file_is_refused_and_old_data_stay(path: Path, store: Store, tmp_path: Path) -> None:
    build(tmp_path / "other.zarr.zip", mixed_values(3, seed=1)).replace(path)
    with pytest.raises(StoreReplacedError):
        store.preload()
    assert_same_bits(store.gather(CHOSEN), samples_of(VALUES, CHOSEN))


@IN_RAM
def test_file_that_is_cut_meanwhile_is_an_error(
    path: Path, store: Store, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = files.read_into

    def read_and_cut(fd: int, offset: int, target: memoryview) -> int:
        got = read_into(fd, offset, target)
        os.truncate(path, 8192)
        return got

    monkeypatch.setattr(files, "read_into", read_and_cut)
    with pytest.raises(TruncatedError) as caught:
        store.preload(mode, num_threads=1)
    assert caught.value.kind == "truncated_while_open"


def test_populating_a_cut_file_is_an_error(path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the length and the system call are two moments."""
    monkeypatch.setattr(type(store._file), "check_length", lambda self: os.truncate(path, 8192))
    with pytest.raises(TruncatedError):
        store.preload("page-cache")


def test_failure_of_the_system_is_passed_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(memory, "populate", fail)
    with pytest.raises(OSError, match="Input/output"):
        store.preload("page-cache")
    monkeypatch.setattr(files, "read_into", fail)
    with pytest.raises(ReadError, match="input/output"):
        store.preload("copy")

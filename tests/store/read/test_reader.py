"""Reading finished stores: views of the mapping, what stays valid for how long, typed refusals."""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import (
    MakeStore,
    assert_same_bits,
    build,
    mixed_constants,
    mixed_values,
)

import ups_store
from ups_store import (
    FormatError,
    MemoryLimitError,
    Store,
    StoreClosedError,
    StoreReplacedError,
    TruncatedError,
)
from ups_store.system import files, memory

VALUES = mixed_values()


@pytest.fixture
def path(make_store: MakeStore) -> Path:
    return make_store(attrs={"encoder": "grid"})


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with ups_store.open(path) as store:
        yield store


# --- views --------------------------------------------------------------------------------------------


def test_arrays_are_read_only_views_of_the_mapped_file(store: Store) -> None:
    mapped = np.frombuffer(store._file.mapping(), np.uint8)
    for name in ("fields", "latent", "mask", "nu", "x", "t"):
        view = store[name]
        assert np.shares_memory(view, mapped)
        assert store[name] is view
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0


@pytest.mark.parametrize("num_values", [1024, 1500, (1 << 18) + 3])
def test_samples_are_contiguous_and_aligned(make_store: MakeStore, num_values: int) -> None:
    """64 bytes, and whole pages from 1 MiB a sample on (spec 5.3)."""
    values = {"fields": np.arange(3 * num_values, dtype=np.float32).reshape(3, num_values)}
    path = make_store(values, dims={})
    with ups_store.open(path) as store:
        for sample in store["fields"]:
            assert sample.flags.c_contiguous
            assert sample.ctypes.data % (64 if sample.nbytes < 1 << 20 else 4096) == 0
        assert store["fields"].ctypes.data % 4096 == 0


def test_memory_changed_in_the_mapping_never_reaches_the_file(store: Store, path: Path) -> None:
    before = path.read_bytes()
    memory = np.frombuffer(store._file.mapping(), np.uint8)
    memory[:] = 0
    assert not store["fields"].any()
    assert path.read_bytes() == before
    assert store.verify().ok


def test_opening_reads_no_more_of_a_larger_store(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at, num_bytes = files.read_at, []

    def counting(fd: int, offset: int, nbytes: int) -> bytes:
        num_bytes.append(nbytes)
        return read_at(fd, offset, nbytes)

    totals = []
    for num_samples in (10, 1000):
        path = make_store({"nu": np.zeros(num_samples), "u": np.zeros((num_samples, 512))}, dims={})
        monkeypatch.setattr(files, "read_at", counting)
        ups_store.open(path).close()
        monkeypatch.undo()
        totals.append((len(num_bytes), sum(num_bytes)))
        num_bytes.clear()
    assert totals[1][0] == totals[0][0]
    assert totals[1][1] < totals[0][1] + 8192  # alignment padding in the directory, not the 4 MB of samples


# --- what a store tells -------------------------------------------------------------------------------


@pytest.mark.parametrize("access", ["map", "pread"])
def test_cut_file_is_told_by_check_length(path: Path, access: Any) -> None:
    with ups_store.open(path, access=access) as store:
        store.check_length()
        with path.open("r+b") as file:
            file.truncate(store.nbytes - 1)
        with pytest.raises(TruncatedError) as caught:
            store.check_length()
        assert (caught.value.kind, caught.value.found) == ("truncated_while_open", store.nbytes - 1)
    with pytest.raises(StoreClosedError):
        store.check_length()


# --- what is refused ----------------------------------------------------------------------------------


def test_failed_open_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "bad.zarr.zip").write_bytes(bytes(5000))
    (tmp_path / "worse.zarr.zip.building").write_bytes(bytes(5000))
    before = os.listdir("/proc/self/fd")
    for name in ("bad.zarr.zip", "worse.zarr.zip"):
        with pytest.raises(FormatError):
            ups_store.open(tmp_path / name, partial=True)
    assert {*os.listdir("/proc/self/fd")} <= {*before}


# --- closing, replacing -------------------------------------------------------------------------------


def test_views_outlive_the_store_and_its_file(path: Path) -> None:
    with ups_store.open(path) as store:
        fields, nu = store["fields"], store.sample(2)["nu"]
    path.unlink()
    assert fields.tobytes() == VALUES["fields"].tobytes()
    assert nu == VALUES["nu"][2]


def test_mapping_goes_with_the_last_view(path: Path) -> None:
    store = ups_store.open(path)
    view = store["fields"]
    store.close()
    assert str(path) in Path("/proc/self/maps").read_text()
    del view
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_open_store_keeps_the_old_content_after_a_replacement(path: Path, store: Store) -> None:
    build(path, mixed_values(seed=1), constants=mixed_constants())
    assert_same_bits(store.gather(range(4)), VALUES)
    with ups_store.open(path) as new:
        assert_same_bits(new.gather(range(4)), mixed_values(seed=1))
        assert new.fingerprint != store.fingerprint
        assert new.config_hash == store.config_hash


# --- other processes and threads ------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["values", "identity"])
def test_pickled_store_refuses_a_file_of_other_content(store: Store, path: Path, change: str) -> None:
    pickled = pickle.dumps(store)
    if change == "values":
        build(path, mixed_values(seed=1), constants=mixed_constants(), attrs={"encoder": "grid"})
    else:
        build(path, VALUES, constants=mixed_constants(), identity={"other": 1})
    with pytest.raises(StoreReplacedError) as caught:
        pickle.loads(pickled)
    assert caught.value.path == str(path)
    with ups_store.open(path) as new:
        assert caught.value.found == new.fingerprint


def total_of(store: Store) -> float:
    return float(store.gather([3, 0], ["fields"])["fields"].sum())


def total_in_forked_child(store: Store) -> float:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, repr(total_of(store)).encode())
        os._exit(0)
    os.wait()
    return float(os.read(reading, 100))


@pytest.mark.multi_process
def test_store_works_in_spawned_and_forked_children(store: Store) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for work in (total_of, total_in_forked_child):
            assert pool.submit(work, store).result(timeout=60) == total_of(store)


def test_threads_read_the_same_from_one_store(store: Store) -> None:
    def read(seed: int) -> bool:
        order = np.random.default_rng(seed).integers(0, 4, 50)
        batch = store.gather(order)
        samples = [store.sample(int(i)) for i in order]
        return all(
            batch[name].tobytes() == VALUES[name][order].tobytes()
            and np.array([sample[name] for sample in samples]).tobytes() == batch[name].tobytes()
            for name in VALUES
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(40)))


@pytest.mark.parametrize("left", [None, 4096])
def test_store_that_may_not_be_mapped_says_what_helps(
    path: Path, monkeypatch: pytest.MonkeyPatch, left: int | None
) -> None:
    def refuse(fd: int, nbytes: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(memory, "map_private", refuse)
    monkeypatch.setattr(memory, "address_space_left", lambda: left)
    with pytest.raises(MemoryLimitError, match='access="pread"') as caught:
        ups_store.open(path)
    error = caught.value
    assert (error.path, error.kind, error.needed_bytes) == (str(path), "address_space", path.stat().st_size)
    assert error.available_bytes == (left or 0)
    with ups_store.open(path, access="pread") as store:
        assert len(store.sample(0))
        with pytest.raises(MemoryLimitError):
            store["fields"]


def test_pickled_store_opens_a_rebuilt_file_of_the_same_content(store: Store, path: Path) -> None:
    pickled = pickle.dumps(store)
    build(path, VALUES, constants=mixed_constants(), attrs={"encoder": "grid"})
    pickle.loads(pickled).close()

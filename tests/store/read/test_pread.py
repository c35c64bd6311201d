"""Reading by read calls against reading from the mapping: the same bits, everywhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import (
    MakeStore,
    assert_same_bits,
    mixed_constants,
    mixed_values,
    sample_of,
    samples_of,
)

import ups_store
from ups_store import StoreClosedError, TruncatedError
from ups_store.check.info import describe
from ups_store.read import gather
from ups_store.system import files, memory

VALUES = mixed_values(7)


@pytest.fixture
def path(make_store: MakeStore) -> Path:
    return make_store(VALUES, constants=mixed_constants())


@pytest.fixture
def stores(path: Path) -> Iterator[tuple[ups_store.Store, ups_store.Store]]:
    with ups_store.open(path, access="map") as mapped, ups_store.open(path, access="pread") as read:
        yield mapped, read


Stores = tuple[ups_store.Store, ups_store.Store]


@pytest.mark.parametrize("max_gap_bytes", [-1, gather._MAX_GAP_BYTES], ids=["rows", "blocks"])
@pytest.mark.parametrize("indices", [[5, 0, 6, 2], [3, 3, 0, 1], []])
@pytest.mark.parametrize("window", [{}, {"start": 1, "length": 2, "stride": 2}, {"start": "each"}])
def test_pread_gathers_the_same_bits_as_the_map(
    stores: Stores,
    monkeypatch: pytest.MonkeyPatch,
    indices: list[int],
    window: Any,
    max_gap_bytes: int,
) -> None:
    monkeypatch.setattr(gather, "_MAX_GAP_BYTES", max_gap_bytes)
    mapped, read = stores
    if window.get("start") == "each":
        window = {"start": [*range(len(indices))], "length": 2}
    found = read.gather(indices, **window)
    assert_same_bits(found, mapped.gather(indices, **window))


Reads = list[tuple[int, int]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Offset and bytes of every read call."""
    done: Reads = []
    read_into = files.read_into
    monkeypatch.setattr(
        files, "read_into", lambda fd, at, m: done.append((at, len(m))) or read_into(fd, at, m)
    )
    return done


def test_neighbours_are_read_by_one_call(stores: Stores, reads: Reads) -> None:
    """In whatever order, repeats included; what lies between them is read along."""
    _, read = stores
    layout = read._catalog.layout.arrays["fields"]
    read.gather([5, 2, 5, 1, 3], ["fields"])
    assert reads == [(layout.slot(1)[0], 4 * layout.stride + layout.meta.sample_nbytes)]


def test_several_reads_are_under_way_at_once(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_MAX_GAP_BYTES", -1)
    together = threading.Barrier(4)
    read_into = files.read_into

    def waiting(fd: int, offset: int, target: memoryview) -> int:
        together.wait(timeout=30)
        return read_into(fd, offset, target)

    monkeypatch.setattr(files, "read_into", waiting)
    found = stores[1].gather([6, 0, 3, 1], ["fields"], num_threads=4)
    assert_same_bits(found, samples_of({"fields": VALUES["fields"]}, [6, 0, 3, 1]))


@pytest.mark.parametrize("make", [np.empty, lambda *a: np.empty(*a, order="F")], ids=["rows", "columns"])
def test_pread_fills_the_given_output(stores: Stores, make: Callable[..., Any]) -> None:
    out = {name: make((3, *value.shape[1:]), value.dtype) for name, value in VALUES.items()}
    found = stores[1].gather([4, 4, 1], out=out)
    assert all(found[name] is out[name] for name in out)
    assert_same_bits(found, samples_of(VALUES, [4, 4, 1]))


def test_pread_samples_arrays_and_constants_are_the_same_and_read_only(stores: Stores) -> None:
    mapped, read = stores
    assert_same_bits(read.sample(5), sample_of(VALUES, 5))
    assert_same_bits(read.constants, mapped.constants)
    assert_same_bits({name: read[name] for name in VALUES}, VALUES)
    everything = [*read.sample(5).values(), *read.constants.values(), *(read[name] for name in VALUES)]
    assert not any(value.flags.writeable for value in everything)


def test_pread_store_maps_nothing_until_a_whole_array_is_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[int] = []
    map_private = memory.map_private
    monkeypatch.setattr(memory, "map_private", lambda fd, n: mapped.append(n) or map_private(fd, n))
    with ups_store.open(path, access="pread") as store:
        store.gather([0, 1])
        store.sample(2)
        assert store.constants
        assert not mapped
        store["nu"]
        assert mapped == [store.nbytes]


def test_closed_or_forgotten_pread_store_keeps_no_descriptor(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = ups_store.open(path, access="pread")
    store.gather([0])
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(StoreClosedError):
        store.gather([0])
    forgotten = ups_store.open(path, access="pread")
    del forgotten
    assert len(os.listdir("/proc/self/fd")) == before


def test_short_read_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ups_store.open(path, access="pread") as store:
        monkeypatch.setattr(files, "size", lambda fd: store.nbytes)  # cut between the check and the read
        with path.open("r+b") as file:
            file.truncate(4200)
        for work in (lambda: store.gather([0]), lambda: store.sample(0), lambda: store.constants):
            with pytest.raises(TruncatedError) as caught:
                work()
            assert caught.value.kind == "truncated_while_open"


# --- network file systems -------------------------------------------------------------------------------


def pretend_network(monkeypatch: pytest.MonkeyPatch, magic: int) -> None:
    """Have `fstatfs` report a file system."""

    libc = files.libc()

    class Libc:
        mincore = libc.mincore

        @staticmethod
        def fstatfs(fd: Any, status: Any) -> int:
            status[:8] = magic.to_bytes(8, "little")
            return 0

    monkeypatch.setattr(files, "libc", Libc)


@pytest.mark.parametrize(("magic", "name"), [(0x6969, "nfs"), (0xFE534D42, "smb2")])
def test_network_file_system_is_read_by_pread(
    path: Path, monkeypatch: pytest.MonkeyPatch, magic: int, name: str
) -> None:
    pretend_network(monkeypatch, magic)
    assert files.is_network(path)
    assert files.is_network(path.parent)
    with ups_store.open(path) as store:
        assert (store.access, store.network) == ("pread", name)
    with ups_store.open(path, access="map") as store:
        assert (store.access, store.network) == ("map", name)


def test_local_file_system_is_mapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_network(monkeypatch, 0xEF53)  # ext4
    assert not files.is_network(path)
    with ups_store.open(path) as store:
        assert (store.access, store.network) == ("map", None)
        described = describe(store)
    assert (described.reads, described.network) == ("map", None)

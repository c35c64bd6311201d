"""`verify="touch"`: damage is found when its sample is first used, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import MakeStore, assert_same_bits, begin, mixed_constants, mixed_values, samples_of

import ups_store
from ups_store import CorruptChunkError
from ups_store.read import store_file
from ups_store.read.recovery import building_path

VALUES = mixed_values()
ACCESS = pytest.mark.parametrize("access", ["map", "pread"])


@pytest.fixture
def path(make_store: MakeStore) -> Path:
    return make_store()


def damage(path: Path, array: str, sample: int | None = None) -> tuple[int, int]:
    """Change a byte of a payload; returns the extent of its chunk."""
    with ups_store.open(path, partial=True) as store:
        layout = store._catalog.layout.arrays[array]
    slot = sample if layout.meta.is_sharded and sample is not None else 0
    nbytes = layout.meta.sample_nbytes if layout.meta.is_sharded else layout.meta.nbytes
    first = layout.slot(slot)[0]
    with path.open("r+b") as file:
        file.seek(first + nbytes - 1)
        last = file.read(1)[0]
        file.seek(first + nbytes - 1)
        file.write(bytes([last ^ 0x40]))
    return first, first + nbytes + 4


@ACCESS
@pytest.mark.parametrize("use", ["gather", "window", "sample"])
def test_damaged_sample_is_reported_when_it_is_used(path: Path, access: Any, use: str) -> None:
    extent = damage(path, "fields", 2)
    with ups_store.open(path, access=access, verify="touch") as store:
        uses = {
            "gather": lambda sample: store.gather([sample]),
            "window": lambda sample: store.gather([sample], start=0, length=1),
            "sample": store.sample,
        }
        for sample in (0, 1, 3):
            uses[use](sample)
        for _ in range(2):  # it stays damaged
            with pytest.raises(CorruptChunkError) as caught:
                uses[use](2)
    error = caught.value
    assert (error.array, error.sample, error.byte_range, error.clause) == ("fields", 2, extent, "5.2")


@ACCESS
@pytest.mark.parametrize("array", ["nu"])
def test_damaged_small_array_is_reported_by_every_sample(path: Path, access: Any, array: str) -> None:
    extent = damage(path, array)
    with ups_store.open(path, access=access, verify="touch") as store:
        for use in (lambda: store.gather([0], [array]), lambda: store.sample(3), lambda: store[array]):
            with pytest.raises(CorruptChunkError) as caught:
                use()
            assert (caught.value.array, caught.value.byte_range) == (array, extent)
        store.gather([0], ["fields"])


@ACCESS
def test_damaged_constant_is_reported(path: Path, access: Any) -> None:
    damage(path, "x")
    with ups_store.open(path, access=access, verify="touch") as store:
        with pytest.raises(CorruptChunkError):
            store["x"]
        with pytest.raises(CorruptChunkError):
            _ = store.constants
        assert_same_bits(store.sample(0), {name: value[0] for name, value in VALUES.items()})


def test_each_chunk_is_checked_once_by_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `access="pread"`, where nothing is mapped that compiled code could check."""
    checked: list[int] = []
    crc32c = store_file.crc32c
    monkeypatch.setattr(
        store_file, "crc32c", lambda data, start: checked.append(len(data)) or crc32c(data, start)
    )
    with ups_store.open(path, access="pread", verify="touch") as store:
        store.gather([1, 1, 2], ["fields", "nu"])
        assert checked == [5120, 5120, 32]
        store.gather([2, 1], ["fields", "nu"])
        store.sample(1)
        assert checked == [5120, 5120, 32, 5 * 3 * 2 * 2 * 4, 64 * 4]
        store.gather([0, 1, 2, 3], ["fields"])
        assert checked[5:] == [5120, 5120]


@pytest.mark.parametrize("window", [{}, {"start": np.array([1, 0, 0, 1, 1]), "length": 1}])
@pytest.mark.parametrize("before", [[], [3], [0, 3]])
def test_compiled_code_checks_what_it_copies_once(path: Path, before: list[int], window: Any) -> None:
    """Sound samples are right and marked, whether all are new, some, or none; damage is never passed over."""
    samples = np.array([3, 0, 0, 1, 3])
    with ups_store.open(path, verify="touch") as store, ups_store.open(path) as unchecked:
        for gather in (store.gather, unchecked.gather):
            gather(np.array([*before, 3]), ["fields"])  # what every call needs is worked out by the first
        flags = store._checks.flags(store._layout("fields"))  # type: ignore[union-attr]
        flags[:] = False
        flags[before] = True
        for _ in range(2):
            expected = unchecked.gather(samples, ["fields"], **window)
            assert_same_bits(store.gather(samples, ["fields"], **window), expected)
            assert flags.tolist() == [True, True, False, True]
    damage(path, "fields", 2)
    with ups_store.open(path, verify="touch") as store:
        store.gather(samples, ["fields"])
        for _ in range(2):
            with pytest.raises(CorruptChunkError) as caught:
                store.gather(np.array([1, 3, 2, 0]), ["fields"])
            assert caught.value.sample == 2


def test_chunk_larger_than_a_block_is_checked_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "_BLOCK_BYTES", 1000)
    with ups_store.open(path, verify="touch") as store:
        store.gather([0])
    damage(path, "fields", 0)
    with ups_store.open(path, verify="touch") as store, pytest.raises(CorruptChunkError):
        store.gather([0])


def test_unfinished_store_is_checked_where_checksums_are_written(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with begin(path, VALUES, constants=mixed_constants()) as writer:
        writer.commit_many([1, 2], samples_of(VALUES, [1, 2]))
        damage(building_path(path), "fields", 2)
        with ups_store.open(path, partial=True, verify="touch") as store:
            assert_same_bits(store.gather([1]), samples_of(VALUES, [1]))
            assert np.array_equal(store["x"], mixed_constants()["x"])
            with pytest.raises(CorruptChunkError):
                store.gather([2])

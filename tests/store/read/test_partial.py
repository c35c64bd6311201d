"""`open(partial=True)`: what can be read of a store that is being built."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_stores import (
    all_arrays,
    assert_same_bits,
    begin,
    build,
    complete,
    mixed_constants,
    mixed_values,
    samples_of,
)

import ups_store
from ups_store import (
    NotCommittedError,
    StoreClosedError,
    StoreNotFoundError,
    StoreReplacedError,
    StoreWriter,
)

VALUES = mixed_values()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


@pytest.fixture
def writer(path: Path) -> Iterator[StoreWriter]:
    with begin(path, VALUES, constants=mixed_constants()) as writer:
        writer.commit_many([1, 3], samples_of(VALUES, [1, 3]))
        yield writer


def test_partial_open_without_any_file_is_not_found(path: Path) -> None:
    for where in (path, path.with_name(f"{path.name}.building")):
        with pytest.raises(StoreNotFoundError) as caught:
            ups_store.open(where, partial=True)
        assert "being built" not in caught.value.hint


@pytest.mark.parametrize("suffix", ["", ".building"])
def test_partial_store_reads_what_is_committed(path: Path, writer: StoreWriter, suffix: str) -> None:
    with ups_store.open(f"{path}{suffix}", partial=True) as store:
        assert store.path == path
        assert store.committed.tolist() == [False, True, False, True]
        assert_same_bits(store.gather([3, 1]), samples_of(VALUES, [3, 1]))
        assert store.sample(3)["fields"].tobytes() == VALUES["fields"][3].tobytes()
        assert_same_bits(store.constants, mixed_constants())
        assert store["x"].tolist() == mixed_constants()["x"].tolist()
        assert 0 <= store.residency() <= 1


def test_partial_store_refuses_what_is_not_committed(path: Path, writer: StoreWriter) -> None:
    with ups_store.open(path, partial=True) as store:
        for call in (lambda: store.sample(2), lambda: store.gather([1, 2, 0])):
            with pytest.raises(NotCommittedError) as caught:
                call()
            assert (caught.value.sample, caught.value.path) == (2, str(path))
        with pytest.raises(NotCommittedError, match="2 of the samples"):
            store["fields"]


def test_partial_store_sees_later_commits_and_the_publication(path: Path, writer: StoreWriter) -> None:
    with ups_store.open(path, partial=True) as store:
        writer.commit_many([0], samples_of(VALUES, [0]))
        assert store.committed.tolist() == [True, True, False, True]
        writer.commit_many([2], samples_of(VALUES, [2]))
        assert_same_bits({name: store[name] for name in store.arrays}, VALUES)
        writer.finish()
        assert store.committed.all()
        assert_same_bits(store.gather(range(4)), VALUES)
        assert_same_bits({name: store[name] for name in store.arrays}, VALUES)
        assert store.verify().ok


def test_partial_open_of_a_file_with_only_the_rename_left_is_whole(path: Path, writer: StoreWriter) -> None:
    writer.commit_many(range(4), VALUES)
    complete(writer)
    writer.close()
    with ups_store.open(path, partial=True) as store:
        assert store.committed.all()
        assert_same_bits({name: store[name] for name in store.arrays}, VALUES)


def test_pickled_partial_store_opens_what_there_is_then(path: Path, writer: StoreWriter) -> None:
    with ups_store.open(path, partial=True) as store:
        pickled = pickle.dumps(store)
    with pickle.loads(pickled) as copy:
        assert copy.committed.tolist() == [False, True, False, True]
    writer.commit_many(range(4), VALUES)
    writer.finish()
    with pickle.loads(pickled) as copy:
        assert_same_bits(copy.gather(range(4)), VALUES)
    build(path, VALUES, identity={"other": 1})
    with pytest.raises(StoreReplacedError):
        pickle.loads(pickled)


def test_closed_partial_store_keeps_no_descriptor(path: Path, writer: StoreWriter) -> None:
    before = os.listdir("/proc/self/fd")
    store = ups_store.open(path, partial=True)
    store.close()
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(StoreClosedError):
        _ = store.committed


def test_views_of_a_partial_store_stay_valid_after_a_restart(path: Path, writer: StoreWriter) -> None:
    with ups_store.open(path, partial=True) as store:
        view = store.sample(1)["fields"]
    writer.close()
    build(path, mixed_values(seed=1), identity={"other": 1}, on_mismatch="restart")
    assert view.tobytes() == VALUES["fields"][1].tobytes()
    assert np.array_equal(all_arrays(path)["nu"], mixed_values(seed=1)["nu"])

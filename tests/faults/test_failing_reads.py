"""A disk that can't read a page of a store: the error says which file and bytes, and is an `OSError`, too."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ragged_stores import build_ragged
from small_stores import begin, build, mixed_constants, mixed_values, sample_of

import ups_store
from ups_store import CommitError, ReadError
from ups_store.building.decide import hash_at, is_finished, open_partitions
from ups_store.check.doctor import examine
from ups_store.check.garbage import find_garbage
from ups_store.format.layout import Layout
from ups_store.read.catalog import read_finished
from ups_store.read.recovery import building_path
from ups_store.system import files, memory

VALUES = mixed_values()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


def layout_of(path: Path) -> Layout:
    with files.opened(path) as fd:
        return read_finished(fd, path).layout


@contextlib.contextmanager
def spoiled(place: int) -> Iterator[None]:
    """Every read that touches this byte fails."""
    read_at, read_into = files.read_at, files.read_into

    def check(offset: int, nbytes: int) -> None:
        if offset <= place < offset + nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing_read_at(fd: int, offset: int, nbytes: int) -> bytes:
        check(offset, nbytes)
        return read_at(fd, offset, nbytes)

    def failing_read_into(fd: int, offset: int, target: memoryview) -> int:
        check(offset, len(target))
        return read_into(fd, offset, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "read_at", failing_read_at)
        patch.setattr(files, "read_into", failing_read_into)
        yield


def check_error(error: ReadError, path: Path, place: int) -> None:
    assert isinstance(error, OSError)
    assert (error.kind, error.errno, error.path) == ("read_failed", errno.EIO, str(path))
    assert error.byte_range is not None
    assert error.byte_range[0] <= place < error.byte_range[1]
    assert f"{path}, bytes {error.byte_range[0]}.." in str(error)
    assert "it can't be read (input/output error); check the disk" in str(error)


def opened(path: Path, **options: Any) -> ups_store.Store:
    return ups_store.open(path, access="pread", **options)  # type: ignore[return-value]


OPERATIONS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "open": ("fields", lambda path: opened(path)),  # the directory, below
    "gather": ("fields", lambda path: opened(path).gather([0, 1, 2, 3])),
    "gather of what is small": ("nu", lambda path: opened(path).gather([0, 1, 2, 3])),
    "touch": ("fields", lambda path: opened(path, verify="touch").gather([0])),
    "constant": ("x", lambda path: opened(path)["x"]),
    "verify": ("fields", lambda path: opened(path).verify()),
    "preload": ("fields", lambda path: opened(path).preload("copy")),
    "doctor": ("fields", examine),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_read_that_fails_names_file_and_bytes(path: Path, operation: str) -> None:
    build(path, VALUES, constants=mixed_constants())
    array, operate = OPERATIONS[operation]
    place = os.path.getsize(path) - 1 if operation == "open" else layout_of(path).arrays[array].offset
    with spoiled(place), pytest.raises(ReadError) as caught:
        operate(path)
    check_error(caught.value, path, place)
    check_error(pickle.loads(pickle.dumps(caught.value)), path, place)


@pytest.mark.parametrize("part", ["offsets", "checks", "rows"])
def test_read_of_a_ragged_array_that_fails_names_file_and_bytes(path: Path, part: str) -> None:
    build_ragged(path)
    place = getattr(layout_of(path).ragged["points"], part).offset
    with spoiled(place), pytest.raises(ReadError) as caught:
        opened(path).verify() if part == "checks" else opened(path).gather([0, 2])
    check_error(caught.value, path, place)


def test_read_of_an_unfinished_file_that_fails_names_file_and_bytes(path: Path) -> None:
    with begin(path, VALUES) as writer:
        writer.commit(1, sample_of(VALUES, 1))
        table = writer.building.layout.table_offset
        unfinished = building_path(path)
        for operate in (
            lambda: writer.commit(0, sample_of(VALUES, 0)),
            writer.missing,
            writer.check_committed,
        ):
            with spoiled(table), pytest.raises(ReadError) as caught:
                operate()
            check_error(caught.value, unfinished, table)
        with spoiled(table), pytest.raises(CommitError, match="nput/output error") as failed:
            writer.finish()  # as other failures of the file system there
        assert isinstance(failed.value.__cause__, ReadError)
    store = ups_store.open(unfinished, partial=True)
    with spoiled(table), pytest.raises(ReadError) as caught:
        _ = store.committed  # type: ignore[attr-defined]
    check_error(caught.value, unfinished, table)
    with spoiled(0), pytest.raises(ReadError) as caught:
        find_garbage(path.parent)
    check_error(caught.value, unfinished, 0)


def test_populating_pages_that_the_disk_can_not_read_names_file_and_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says EFAULT, where touching the page would have been SIGBUS, as of a file that was cut."""
    build(path, VALUES)

    def fail(*arguments: Any) -> bool:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    monkeypatch.setattr(memory, "populate", fail)
    with ups_store.open(path, access="map") as store, pytest.raises(ReadError) as caught:
        store.preload("page-cache")
    check_error(caught.value, path, os.path.getsize(path) - 1)


def _partitions(path: Path) -> object:
    """What a build finds where the store would be, which is in partitions."""
    for number in range(2):
        os.link(path, path.with_name(f"{path.name.removesuffix('.zarr.zip')}-{number:05d}-of-00002.zarr.zip"))
    path.unlink()
    plan = SimpleNamespace(partition=None)
    return open_partitions(SimpleNamespace(plan=plan, path=path, config_hash="any"))  # type: ignore[arg-type]


@pytest.mark.parametrize("ask", [lambda path: is_finished(path, "any"), hash_at, _partitions])
def test_build_does_not_take_a_store_that_can_not_be_read_for_none(
    path: Path, ask: Callable[[Path], object]
) -> None:
    build(path, VALUES)
    with spoiled(os.path.getsize(path) - 1), pytest.raises(ReadError):
        ask(path)


def test_path_that_the_system_does_not_say_is_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise PermissionError

    build(path, VALUES)
    monkeypatch.setattr(os, "readlink", refuse)
    with files.opened(path) as fd:
        assert files.opened_path(fd) is None

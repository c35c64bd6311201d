"""Preloaded stores in several processes: one copy in RAM, handed over, and gone when they are killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preload_processes import MIB, digest, own_copy, read_all, read_slowly, use_copy
from small_stores import MakeStore

import ups_store
from ups_store import StoreReplacedError
from ups_store.torch import StoreDataset

pytestmark = pytest.mark.multi_process
SPAWN = multiprocessing.get_context("spawn")  # nothing is inherited


@pytest.fixture
def path(make_store: MakeStore) -> Path:
    return make_store({"fields": np.random.default_rng(0).random((16, MIB // 8))}, dims={})


@contextmanager
def process(function: Any, *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """A process that runs the function with a connection to here as its last argument; killed at the end."""
    here, there = SPAWN.Pipe()
    started = SPAWN.Process(target=function, args=(*arguments, there))
    started.start()
    there.close()
    try:
        yield started, here
    finally:
        started.kill()
        started.join()
        here.close()


def kill(killed: Any) -> None:
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL


def holders(inode: int) -> set[int]:
    """Processes, of those that we may look into, with a descriptor of a file in memory."""
    found = set()
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "memfd:" in os.readlink(fd) and fd.stat().st_ino == inode:
                found.add(int(fd.parts[2]))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def test_processes_share_the_pages_of_a_preloaded_store(path: Path) -> None:
    with ups_store.open(path) as store:
        expected, nbytes = digest(store), store.nbytes
        store.preload("page-cache")
    barrier = SPAWN.Barrier(4)
    pipes = [SPAWN.Pipe() for _ in range(4)]
    started = [SPAWN.Process(target=read_all, args=(path, barrier, there)) for _, there in pipes]
    for each in started:
        each.start()
    answers = [here.recv() for here, _ in pipes]
    for each in started:
        each.join()
    assert {answer[0] for answer in answers} == {expected}
    assert sum(answer[1] for answer in answers) <= 1.05 * nbytes
    assert sum(answer[1] for answer in answers) >= 0.8 * nbytes  # they did map it
    assert {answer[2] for answer in answers} == {0}  # no page is anybody's own


def test_shared_copy_outlives_its_owner_and_nothing_outlives_the_processes(path: Path) -> None:
    with ups_store.open(path) as store:
        expected = digest(store)
    with process(own_copy, path) as (owner, from_owner):
        pickled, copy_path = from_owner.recv()
        inode = os.stat(copy_path).st_ino
        with process(use_copy, pickled) as (user, with_user):
            assert with_user.recv()[:2] == (True, expected)
            assert holders(inode) == {owner.pid, user.pid}
            kill(owner)
            with_user.send("again")
            is_copy, read, from_user = with_user.recv()
            assert (is_copy, read) == (True, expected)
            with pytest.warns(UserWarning, match="is gone: the file is used"):
                fallen_back = pickle.loads(pickled)
            assert not fallen_back._file.is_copy
            assert digest(fallen_back) == expected
            other = pickle.loads(from_user)  # whoever has the copy can hand it on
            assert (other._file.is_copy, digest(other)) == (True, expected)
            other.close()
            del other
            kill(user)
            assert holders(inode) == set()


def test_shared_copy_cannot_be_changed_or_cut(path: Path) -> None:
    with ups_store.open(path) as store:
        store.preload("copy", shared=True)
        copy_path = store._file.copy_path
        assert copy_path is not None
        with pytest.raises(PermissionError), copy_path.open("r+b", buffering=0) as file:
            file.write(b"damage")
        with pytest.raises(PermissionError):
            os.truncate(copy_path, 0)


def test_pickled_copy_of_another_store_is_refused(path: Path, make_store: MakeStore) -> None:
    other = make_store({"fields": np.zeros((2, 2048))}, name="other.zarr.zip", dims={})
    with ups_store.open(path) as store, ups_store.open(other) as second:
        second.preload("copy", shared=True)
        function, arguments = store.__reduce__()
        with pytest.raises(StoreReplacedError):
            function(*arguments[:-1], arguments[-1] | {"copy_path": second._file.copy_path})


@pytest.mark.parametrize("what", ["a file", "nothing", "an unsealed file"])
def test_descriptor_that_is_no_copy_any_more_is_not_used(path: Path, what: str) -> None:
    """The owner's process id and descriptor may have become another process's."""
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    there = {"a file": path, "nothing": path.with_name("x"), "an unsealed file": f"/proc/self/fd/{fd}"}[what]
    with ups_store.open(path) as store:
        function, arguments = store.__reduce__()
        with pytest.warns(UserWarning, match="is gone"):
            other = function(*arguments[:-1], arguments[-1] | {"copy_path": Path(there)})
        assert digest(other) == digest(store)
    os.close(fd)


def test_interrupt_is_heard_while_a_disk_is_slow(path: Path) -> None:
    with process(read_slowly, path) as (reader, answers):
        assert answers.recv() == "a step"
        os.kill(reader.pid, signal.SIGINT)
        found = answers.recv()
        while found == "a step":
            found = answers.recv()
        assert found == "interrupted"
        is_copy, num_threads, read = answers.recv()
    assert (is_copy, num_threads) == (False, 1)
    with ups_store.open(path) as store:
        assert read == digest(store)


def test_dataset_takes_its_batches_from_the_copy_in_every_process(path: Path) -> None:
    with ups_store.open(path) as store:
        store.preload("copy", shared=True)
        dataset = pickle.loads(pickle.dumps(StoreDataset(store)))
        os.truncate(path, 0)  # so there is nothing else to take them from
        batch = dataset.batch([3, 0])
        assert np.array_equal(batch["fields"].numpy(), store["fields"][[3, 0]])


def test_closed_store_frees_its_shared_copy(path: Path) -> None:
    store = ups_store.open(path)
    store.preload("copy", shared=True)
    copy_path = store._file.copy_path
    assert copy_path is not None
    inode = os.stat(copy_path).st_ino
    store.close()
    assert holders(inode) == set()

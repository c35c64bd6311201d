"""Stores in memory: the same code, readable by other processes, nothing on a disk, nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from small_stores import (
    IDENTITY,
    all_arrays,
    assert_same_bits,
    begin,
    build,
    mixed_constants,
    mixed_values,
    names_in,
    sample_of,
    samples_of,
)

import ups_store
from ups_store import (
    DiskFullError,
    FormatError,
    NotCommittedError,
    StoreError,
    StoreNotFoundError,
    StoreReplacedError,
)
from ups_store.system import files, memory
from ups_store.writing import create

ANSWER_S = 60  # that another process may take, on a busy machine

Start = Callable[..., tuple[BaseProcess, Connection]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a function in another process, with a pipe as its first argument."""
    processes: list[BaseProcess] = []

    def begin_process(
        work: Callable[..., None], *args: Any, method: str = "spawn"
    ) -> tuple[BaseProcess, Connection]:
        context: Any = multiprocessing.get_context(method)
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, *args))
        process.start()
        theirs.close()
        processes.append(process)
        return process, mine

    yield begin_process
    for process in processes:
        process.kill()
        process.join()
        process.close()


def receive(connection: Connection) -> Any:
    """The next message of another process."""
    assert connection.poll(ANSWER_S), "no answer from the other process"
    return connection.recv()


def open_descriptors() -> set[str]:
    gc.collect()  # stores that other tests have left to it
    return set(os.listdir("/proc/self/fd"))


def shared_memory() -> list[str]:
    """Names in /dev/shm, but locks of other processes, which come and go."""
    return [name for name in names_in(Path("/dev/shm")) if not name.startswith("sem.")]


# --- one process ----------------------------------------------------------------------------------------


def test_store_in_memory_holds_the_bytes_of_one_on_a_disk(tmp_path: Path) -> None:
    values, constants = mixed_values(), mixed_constants()
    path = build(":memory:", values, constants=constants)
    on_disk = build(tmp_path / "a.zarr.zip", values, constants=constants)
    assert path.read_bytes() == on_disk.read_bytes()
    assert_same_bits(all_arrays(path), values)


def test_store_in_memory_leaves_nothing_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shared = shared_memory()
    path = build(":memory:", mixed_values())
    assert (names_in(tmp_path), shared_memory()) == ([], shared)
    assert str(path) == f"/proc/{os.getpid()}/fd/{path.name}"


def test_store_in_memory_is_read_while_it_is_built() -> None:
    values = mixed_values()
    with begin(":memory:", values) as writer:
        writer.commit(2, sample_of(values, 2))
        with ups_store.open(writer.path, partial=True) as store:
            assert store.committed.tolist() == [False, False, True, False]
            assert_same_bits(store.sample(2), sample_of(values, 2))
            with pytest.raises(NotCommittedError):
                store.gather([0])
            writer.commit_many([0, 1, 3], samples_of(values, [0, 1, 3]))
            writer.finish()
            assert store.committed.all()
    with ups_store.open(writer.path, partial=True) as store:
        assert not store.is_partial


def test_store_in_memory_is_committed_by_joined_committers_too() -> None:
    values = mixed_values()
    with begin(":memory:", values) as writer:
        with ups_store.join(writer.path, identity=IDENTITY) as committer:
            assert committer.commit_many([1, 3], samples_of(values, [1, 3])).all()
        assert writer.commit_many(range(4), values).tolist() == [True, False, True, False]
        assert_same_bits(all_arrays(writer.finish()), values)


def test_finished_store_in_memory_can_not_be_changed_by_anybody() -> None:
    path = build(":memory:", mixed_values())
    fd = files.open_existing(path, writable=True)
    for change in (lambda: files.truncate(fd, 0), lambda: files.write_at(fd, 0, b"x")):
        with pytest.raises(PermissionError):
            change()
    files.close(fd)
    with ups_store.open(path) as store:
        assert store.verify().ok


def test_store_in_memory_is_read_in_every_way() -> None:
    values, path = mixed_values(), build(":memory:", mixed_values())
    for access in ("map", "pread"):
        with ups_store.open(path, access=access, verify="touch") as store:
            assert_same_bits(store.gather([3, 0]), samples_of(values, [3, 0]))
            assert 0 < store.residency() <= 1


# --- how long it lives ----------------------------------------------------------------------------------


def test_memory_goes_with_the_path_object() -> None:
    before = open_descriptors()
    path = build(":memory:", mixed_values())
    text = str(path)
    assert Path(text).exists()
    del path
    assert open_descriptors() == before
    with pytest.raises(StoreNotFoundError, match="it was in memory"):
        ups_store.open(text)


def test_memory_lives_as_long_as_a_store_of_this_process() -> None:
    values = mixed_values()
    path = build(":memory:", values)
    store = ups_store.open(str(path))
    del path
    assert_same_bits(pickle.loads(pickle.dumps(store)).sample(1), sample_of(values, 1))
    text = str(store.path)
    del store
    gc.collect()
    assert not Path(text).exists()


def test_view_outlives_everything_else() -> None:
    values = mixed_values()
    path = build(":memory:", values)
    with ups_store.open(path) as store:
        view = store["fields"]
    del store, path
    assert view.tobytes() == values["fields"].tobytes()


def test_creation_that_fails_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    before = open_descriptors()
    for module, name in [(create, "write_skeleton"), (files, "allocate_anonymous")]:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            with pytest.raises(KeyboardInterrupt):
                begin(":memory:", mixed_values())
    gc.collect()
    assert open_descriptors() == before


# --- other processes ------------------------------------------------------------------------------------


def answer_with_sum(connection: Connection, given: ups_store.Store | str) -> None:
    store = ups_store.open(given) if isinstance(given, str) else given
    connection.send(float(store["fields"].sum()))
    connection.recv()
    connection.send(float(store.gather([0, 3])["fields"].sum()))


@pytest.mark.multi_process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("method", "given"), [("spawn", "store"), ("fork", "path")])
def test_other_processes_read_a_store_in_memory(start: Start, method: str, given: str) -> None:
    values = mixed_values()
    path = build(":memory:", values)
    store = ups_store.open(path)
    _, connection = start(answer_with_sum, str(path) if given == "path" else store, method=method)
    assert receive(connection) == float(values["fields"].sum())
    connection.send("go on")
    del store, path  # what the other process has mapped stays
    assert receive(connection) == float(values["fields"][[0, 3]].sum())


def join_and_commit(connection: Connection, path: str, samples: list[int]) -> None:
    values = mixed_values()
    with ups_store.join(path, identity=IDENTITY) as committer:
        connection.send(committer.commit_many(samples, samples_of(values, samples)).tolist())
        connection.recv()
        try:
            committer.commit(0, sample_of(values, 0))
        except StoreReplacedError as error:
            connection.send(error)


@pytest.mark.multi_process
def test_other_processes_commit_to_a_store_in_memory(start: Start) -> None:
    values = mixed_values()
    with begin(":memory:", values) as writer:
        connections = [start(join_and_commit, str(writer.path), s)[1] for s in ([0, 2], [1, 3])]
        assert [receive(connection) for connection in connections] == [[True, True], [True, True]]
        writer.finish()
    for connection in connections:
        connection.send("once more")
        assert isinstance(receive(connection), StoreReplacedError)
    assert_same_bits(all_arrays(writer.path), values)


def build_and_wait(connection: Connection) -> None:
    writer = begin(":memory:", mixed_values())
    writer.commit(1, sample_of(mixed_values(), 1))
    finished = build(":memory:", mixed_values())
    connection.send((str(writer.path), str(finished)))
    connection.recv()


@pytest.mark.multi_process
def test_killed_owner_leaves_nothing_but_what_others_have_open(start: Start, tmp_path: Path) -> None:
    shared = shared_memory()
    process, connection = start(build_and_wait)
    unfinished, finished = receive(connection)
    store = ups_store.open(finished)
    committer = ups_store.join(unfinished, identity=IDENTITY)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert_same_bits(store.sample(2), sample_of(mixed_values(), 2))
    for path in (unfinished, finished):
        with pytest.raises(StoreNotFoundError, match="it was in memory"):
            ups_store.open(path, partial=True)
    with committer, pytest.raises(StoreReplacedError):
        committer.commit(0, sample_of(mixed_values(), 0))
    with pytest.raises(StoreNotFoundError):
        pickle.loads(pickle.dumps(store))
    assert shared_memory() == shared


def fork_and_wait(connection: Connection) -> None:
    path = build(":memory:", mixed_values())
    if os.fork() == 0:
        store = ups_store.open(path)  # by the parent's name
        text, num_samples = str(path), len(store)
        del store, path
        connection.send((os.getpid(), text, num_samples))
        connection.recv()
        os._exit(0)
    os.wait()


@pytest.mark.multi_process
def test_forked_child_keeps_no_memory_of_a_killed_owner(start: Start) -> None:
    process, connection = start(fork_and_wait)
    child, text, num_samples = receive(connection)
    assert num_samples == 4
    try:
        assert process.pid is not None
        inode = os.stat(text).st_ino
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        left = [os.stat(f"/proc/{child}/fd/{fd}").st_ino for fd in os.listdir(f"/proc/{child}/fd")]
        assert inode not in left
    finally:
        os.kill(child, signal.SIGKILL)


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["open", "join"])
def test_name_of_all_stores_in_memory_names_none(use: str) -> None:
    with pytest.raises(StoreNotFoundError, match=r"open\(writer\.path\)"):
        ups_store.open(":memory:") if use == "open" else ups_store.join(":memory:", identity={})


def test_unfinished_store_in_memory_is_not_found_without_partial() -> None:
    with begin(":memory:", mixed_values()) as writer:
        with pytest.raises(StoreNotFoundError, match="it is being built"):
            ups_store.open(writer.path)
        with pytest.raises(NotCommittedError):
            writer.finish()


def test_path_of_a_file_in_memory_is_no_place_for_another_store() -> None:
    path = build(":memory:", mixed_values())
    with pytest.raises(FormatError, match="names a file in memory") as caught:
        begin(path, mixed_values(), on_mismatch="restart")
    assert caught.value.kind == "not_a_file"


def test_store_that_does_not_fit_is_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 5000)
    monkeypatch.setattr(files, "create_anonymous", None)
    with pytest.raises(DiskFullError, match="5,000 free") as caught:
        begin(":memory:", mixed_values())
    error = caught.value
    assert (error.kind, error.exit_code, error.free_bytes) == ("memory_full", 6, 5000)
    assert error.needed_bytes > 5000


def test_memory_that_others_took_meanwhile_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(28, os.strerror(28))

    before = open_descriptors()
    monkeypatch.setattr(files, "allocate_anonymous", refuse)
    with pytest.raises(DiskFullError) as caught:
        begin(":memory:", mixed_values())
    assert caught.value.kind == "memory_full"
    assert open_descriptors() == before


@pytest.mark.parametrize("lacking", ["memfd_create", "allowed", "proc"])
def test_system_without_files_in_memory_is_told(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    if lacking == "memfd_create":
        monkeypatch.delattr(os, "memfd_create")
    elif lacking == "allowed":
        monkeypatch.setattr(files, "create_anonymous", forbid)
    else:
        monkeypatch.setattr(files, "descriptor_path", lambda fd: Path(f"/none/fd/{fd}"))
    with pytest.raises(StoreError, match="Linux with memfd_create and /proc") as caught:
        begin(":memory:", mixed_values())
    assert caught.value.kind == "unsupported"


def test_memory_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal makes the kernel begin a piece again: one piece could take for ever."""
    taken: list[tuple[int, int]] = []
    real = os.posix_fallocate

    def allocate(fd: int, offset: int, nbytes: int) -> None:
        taken.append((offset, nbytes))
        real(fd, offset, nbytes)

    monkeypatch.setattr(files, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with begin(":memory:", mixed_values()) as writer:
        total = writer.building.layout.building_nbytes
    assert taken[0] == (0, 4096)
    assert sum(nbytes for _, nbytes in taken) == total == os.stat(writer.path).st_size


def test_memory_is_freed_at_the_end_of_the_program_without_a_word() -> None:
    code = (
        "import numpy as np, ups_store\n"
        "w = ups_store.create(':memory:', {'u': ups_store.ArraySpec((1, 4), 'int8')}, identity={})\n"
        "w.commit(0, {'u': np.zeros(4, 'int8')})\n"
        "s = ups_store.open(w.finish())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=ANSWER_S)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_only_the_path_of_a_descriptor_is_in_memory() -> None:
    assert files.is_in_memory(Path("/proc/12/fd/3"))
    for path in ("/proc/self/fd/3", "/proc/12/fd/3/x", "/proc/12/fd", "fd/3"):
        assert not files.is_in_memory(Path(path))


def test_parts_of_the_path_keep_no_memory() -> None:
    path = build(":memory:", mixed_values())
    assert (path / "x").file is None
    assert pickle.loads(pickle.dumps(path)) == path
    assert pickle.loads(pickle.dumps(path)).file is None
    assert memory.keeping(Path(str(path))) is path

"""A disk that is full or fails: typed errors, nothing half-committed, nothing left lying about.

`ups_store.system.files` holds every system call of the package; here failing ones replace its functions.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
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
from ups_store import CommitError, DiskFullError, FormatError, StoreReplacedError, TruncatedError
from ups_store.system import files, memory, parallel
from ups_store.writing import commit as commit_module


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


class Failing:
    """A function that fails from its `nth` call on, `times` times.

    Attributes:
        num_calls: How often it was called.
    """

    def __init__(self, real: Callable[..., Any], code: int, *, nth: int = 1, times: int = 1) -> None:
        self.real, self.code, self.nth, self.times = real, code, nth, times
        self.num_calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        if self.nth <= self.num_calls < self.nth + self.times:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*args, **options)


def fail(patch: pytest.MonkeyPatch, name: str, code: int, *, nth: int = 1, times: int = 1) -> Failing:
    failing = Failing(getattr(files, name), code, nth=nth, times=times)
    patch.setattr(files, name, failing)
    return failing


# --- no room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("name", ["allocate", "write_at"])
def test_create_without_room_says_how_much_it_needs(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    fail(monkeypatch, name, code)
    monkeypatch.setattr(files, "free_bytes", lambda folder: 12_345)
    found = "a limit of the file system" if code == errno.EFBIG else "12,345 free"
    with pytest.raises(DiskFullError, match=found) as caught:
        begin(path, mixed_values(), constants=mixed_constants())
    error = caught.value
    assert (error.kind, error.exit_code, error.errno, error.free_bytes) == ("disk_full", 6, code, 12_345)
    assert isinstance(error, OSError)
    assert names_in(path.parent) == []
    monkeypatch.undo()
    with begin(path, mixed_values(), constants=mixed_constants()) as writer:
        assert error.needed_bytes == os.stat(writer.building.building_path).st_size


def test_room_is_measured_in_the_folder_of_the_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "allocate", errno.ENOSPC)
    with pytest.raises(DiskFullError) as caught:
        begin(path, mixed_values())
    status = os.statvfs(path.parent)
    assert 0 < caught.value.free_bytes <= status.f_blocks * status.f_frsize


@pytest.mark.parametrize("name", ["allocate", "write_at", "sync", "sync_folder", "link"])
def test_create_on_a_failing_disk_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fail(monkeypatch, name, errno.EIO)
    with pytest.raises(CommitError, match=os.strerror(errno.EIO)) as caught:
        begin(path, mixed_values())
    assert caught.value.path == str(path)
    assert names_in(path.parent) == []


def test_create_whose_last_sync_fails_leaves_a_file_to_continue(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "sync_folder", errno.EIO, nth=2)
    with pytest.raises(CommitError, match=os.strerror(errno.EIO)):
        begin(path, mixed_values())
    assert names_in(path.parent) == [f"{path.name}.building"]
    build(path, mixed_values())
    assert_same_bits(all_arrays(path), mixed_values())


def test_create_that_can_not_note_its_owner_holds_no_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_writes = 1 + 5 + 1  # zarr.json of group and arrays, tail header
    with monkeypatch.context() as patch:
        failing = fail(patch, "write_at", errno.EIO, nth=num_writes + 1)
        with pytest.raises(CommitError, match="not begun"):
            begin(path, mixed_values())
        assert failing.num_calls == num_writes + 1
    build(path, mixed_values())
    assert_same_bits(all_arrays(path), mixed_values())


def test_restart_without_room_keeps_the_unfinished_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit(2, sample_of(values, 2))
    with monkeypatch.context() as patch:
        fail(patch, "allocate", errno.ENOSPC)
        with pytest.raises(DiskFullError):
            begin(path, values, identity={"other": 1}, on_mismatch="restart")
    assert names_in(path.parent) == [f"{path.name}.building"]
    with begin(path, values) as writer:
        assert writer.missing().tolist() == [0, 1, 3]


# --- commits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2], ids=["sync of the bytes", "sync of the records"])
def test_commit_whose_sync_fails_commits_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit(3, sample_of(values, 3))
        with monkeypatch.context() as patch:
            fail(patch, "sync_data", errno.EIO, nth=nth)
            with pytest.raises(CommitError, match=r"samples 0\.\.2 were not committed") as caught:
                writer.commit_many([2, 0], samples_of(values, [2, 0]))
        assert isinstance(caught.value.__cause__, OSError)
        for call in (writer.missing, writer.finish, lambda: writer.commit(1, sample_of(values, 1))):
            with pytest.raises(CommitError, match="an earlier commit"):
                call()
    with begin(path, values) as writer:
        assert writer.missing().tolist() == [0, 1, 2]
        writer.commit_many(range(4), values)
        writer.finish()
    assert names_in(path.parent) == [path.name]
    assert_same_bits(all_arrays(path), values)


def test_commit_on_a_disk_that_stays_broken_still_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        fail(monkeypatch, "sync_data", errno.EIO, nth=2)
        num_writes = 5  # four arrays with elements and the record
        failing = fail(monkeypatch, "write_at", errno.EROFS, nth=num_writes + 1)
        with pytest.raises(CommitError, match=os.strerror(errno.EIO)):
            writer.commit(0, sample_of(values, 0))
        assert failing.num_calls == num_writes + 1


@pytest.mark.parametrize("nth", [1, 3, 5], ids=["first slot", "later array", "record"])
def test_commit_whose_write_fails_commits_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    values = mixed_values()
    with begin(path, values) as writer, monkeypatch.context() as patch:
        failing = fail(patch, "write_at", errno.EIO, nth=nth)
        with pytest.raises(CommitError, match=r"samples 1\.\.1 "):
            writer.commit(1, sample_of(values, 1))
        assert failing.num_calls >= nth
    with begin(path, values) as writer:
        assert len(writer.missing()) == 4


def test_commit_without_room_is_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are reserved, yet a copy-on-write file system may need more."""
    values = mixed_values()
    with begin(path, values) as writer:
        fail(monkeypatch, "write_at", errno.ENOSPC)
        with pytest.raises(DiskFullError) as caught:
            writer.commit(1, sample_of(values, 1))
        assert caught.value.needed_bytes == writer.building.layout.building_nbytes
        with pytest.raises(CommitError, match="an earlier commit"):
            writer.missing()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["disk full", "quota used up"])
@pytest.mark.parametrize("nth", range(1, 6))  # four arrays with elements and the record
def test_commit_without_room_for_any_of_its_writes_is_continued_once_there_is_some(
    path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, code: int
) -> None:
    values = mixed_values()
    with begin(path, values) as writer, monkeypatch.context() as patch:
        writer.commit(3, sample_of(values, 3))
        fail(patch, "write_at", code, nth=nth)
        with pytest.raises(DiskFullError) as caught:
            writer.commit_many([0, 1], samples_of(values, [0, 1]))
        assert (caught.value.errno, caught.value.exit_code) == (code, 6)
    with begin(path, values) as writer:
        assert writer.missing().tolist() == [0, 1, 2]
    build(path, values)
    assert_same_bits(all_arrays(path), values)


@pytest.mark.parametrize("nth", [1, 5, 9, 16, 17])  # four writes a sample, then the records
def test_commit_in_pieces_of_which_one_fails_commits_none(
    path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    values = mixed_values()
    monkeypatch.setattr(commit_module, "DURABLE_BLOCK_BYTES", 1)
    monkeypatch.setattr(commit_module, "NUM_THREADS", 1)
    with begin(path, values) as writer, monkeypatch.context() as patch:
        failing = fail(patch, "write_at", errno.EIO, nth=nth)
        with pytest.raises(CommitError, match=r"samples 0\.\.3 were not committed"):
            writer.commit_many(range(4), values)
        assert failing.num_calls == (nth if nth < 17 else 18)  # records are cleared again
    with begin(path, values) as writer:
        assert len(writer.missing()) == 4


@pytest.mark.parametrize("failing_thread", ["MainThread", "ups_store_0"])
def test_commit_by_threads_of_which_one_fails_commits_none(
    path: Path, monkeypatch: pytest.MonkeyPatch, failing_thread: str
) -> None:
    values, threads, together = mixed_values(), set(), threading.Barrier(2)
    monkeypatch.setattr(commit_module, "DURABLE_BLOCK_BYTES", 1)
    monkeypatch.setattr(parallel, "_pool", functools.cache(parallel._pool.__wrapped__))

    def write_at(fd: int, offset: int, data: memoryview) -> None:
        name = threading.current_thread().name
        if name not in threads:  # each has begun when one of them fails
            threads.add(name)
            together.wait(timeout=30)
        if name == failing_thread:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd, offset, data)

    with begin(path, values) as writer, monkeypatch.context() as patch:
        real = files.write_at
        patch.setattr(files, "write_at", write_at)
        with pytest.raises(CommitError, match=r"samples 0\.\.3 were not committed"):
            writer.commit_many(range(4), values)
        assert threads == {"MainThread", "ups_store_0"}
    with begin(path, values) as writer:
        assert len(writer.missing()) == 4


def test_commit_by_threads_is_the_same_as_one_by_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, one_by_one = mixed_values(), path.with_name("one_by_one.zarr.zip")
    monkeypatch.setattr(commit_module, "DURABLE_BLOCK_BYTES", 1)
    with begin(path, values) as writer:
        writer.commit_many([2, 0, 3, 1], {name: array[[2, 0, 3, 1]] for name, array in values.items()})
        writer.finish()
    with begin(one_by_one, values) as writer:
        for i in range(4):
            writer.commit(i, sample_of(values, i))
        writer.finish()
    assert path.read_bytes() == one_by_one.read_bytes()
    assert ups_store.open(path).verify().ok


def test_hint_to_the_disk_that_is_not_taken_does_no_harm(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = files.start_writeback

    def start(fd: int, offset: int, nbytes: int) -> None:
        started.append(nbytes)
        real(-1, offset, nbytes)  # EBADF

    monkeypatch.setattr(files, "start_writeback", start)
    build(path, mixed_values())
    assert started == [4 * 5184 // 4096 * 4096]  # whole pages of slots of `fields`
    assert_same_bits(all_arrays(path), mixed_values())


def test_interrupted_commit_makes_the_writer_refuse_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    values = mixed_values()
    with begin(path, values) as writer, monkeypatch.context() as patch:
        patch.setattr(files, "sync_data", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.commit(0, sample_of(values, 0))
        with pytest.raises(CommitError):
            writer.commit(1, sample_of(values, 1))


def test_lazy_commits_are_not_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = mixed_values()
    with begin(path, values, durability="lazy") as writer:
        failing = fail(monkeypatch, "sync_data", errno.EIO)
        writer.commit_many(range(4), values)
        assert failing.num_calls == 0
        with pytest.raises(CommitError, match="not finished"):
            writer.finish()


def test_durable_commit_syncs_the_bytes_before_the_record(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, events = mixed_values(), []
    with begin(path, values) as writer:
        table = writer.building.layout.table_offset
        write_at, sync_data = files.write_at, files.sync_data

        def recording_write(fd: int, offset: int, data: memoryview) -> None:
            events.append("record" if offset >= table else "bytes")
            write_at(fd, offset, data)

        def recording_sync(fd: int) -> None:
            events.append("sync")
            sync_data(fd)

        monkeypatch.setattr(files, "write_at", recording_write)
        monkeypatch.setattr(files, "sync_data", recording_sync)
        writer.commit_many([0, 1], samples_of(values, [0, 1]))
    assert events == ["bytes"] * 4 + ["sync", "record", "sync"]


# --- finishing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("sync_data", 1),
        ("write_at", 1),
        ("write_at", 9),
        ("sync_data", 2),
        ("truncate", 1),
        ("sync", 1),
        ("rename", 1),
    ],
)
def test_finish_that_fails_anywhere_is_repeated_by_the_next_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    values = mixed_values()
    with begin(path, values, durability="lazy") as writer:
        writer.commit_many(range(4), values)
        with monkeypatch.context() as patch:
            fail(patch, name, errno.EIO, nth=nth)
            with pytest.raises(CommitError) as caught:
                writer.finish()
        assert caught.value.path == f"{path}.building"
        assert not path.exists()
        with pytest.raises(CommitError, match="an earlier commit or finish failed"):
            writer.finish()
    with begin(path, values) as writer:
        assert writer.missing().tolist() == []
        writer.finish()
    assert names_in(path.parent) == [path.name]
    assert_same_bits(all_arrays(path), values)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["disk full", "quota used up"])
def test_finish_without_room_for_any_of_its_writes_is_continued_once_there_is_some(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    values, failures = mixed_values(), list[tuple[int, int]]()
    while not path.exists():
        with begin(path, values) as writer, monkeypatch.context() as patch:
            writer.commit_many(range(4), values)
            fail(patch, "write_at", code, nth=len(failures) + 1)
            try:
                writer.finish()
            except DiskFullError as error:
                failures.append((error.errno, error.exit_code))
    assert failures == [(code, 6)] * 9  # two writes an array, and the directory
    assert_same_bits(all_arrays(path), values)


def test_finish_whose_rename_did_not_become_durable_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit_many(range(4), values)
        fail(monkeypatch, "sync_folder", errno.EIO)
        with pytest.raises(CommitError, match="not published"):
            writer.finish()
    assert_same_bits(all_arrays(path), values)


def test_failed_publication_of_a_finished_file_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = mixed_values()
    for _ in range(2):
        with begin(path, values) as writer, monkeypatch.context() as patch:
            writer.commit_many(range(4), values)
            fail(patch, "rename", errno.EACCES)
            with pytest.raises(CommitError, match="not published"):
                writer.finish()
    build(path, values)
    assert_same_bits(all_arrays(path), values)


def test_join_after_a_failed_commit_sees_the_samples_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = mixed_values()
    with begin(path, values) as writer, monkeypatch.context() as patch:
        fail(patch, "sync_data", errno.EIO, nth=2)
        with pytest.raises(CommitError):
            writer.commit_many(range(4), values)
        with ups_store.join(path, identity=IDENTITY) as committer:
            assert committer.missing().tolist() == [0, 1, 2, 3]


# --- what the system does or tells only in part ---------------------------------------------------------


def test_short_reads_and_writes_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, pwrite = os.pread, os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda fd, nbytes, offset: pread(fd, min(nbytes, 1000), offset))
        patch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
        build(path, mixed_values(), constants=mixed_constants())
        assert_same_bits(all_arrays(path), mixed_values())


def test_short_write_before_a_full_disk_is_no_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, left = os.pwrite, [7000]  # bytes that the disk still takes

    def write(fd: int, data: memoryview, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = pwrite(fd, data[: left[0]], offset)
        left[0] -= written
        return written

    values = mixed_values()
    with begin(path, values) as writer, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(DiskFullError):
            writer.commit_many([0, 1], samples_of(values, [0, 1]))
    with begin(path, values) as writer:
        assert len(writer.missing()) == 4


@contextlib.contextmanager
def hail() -> Iterator[list[int]]:
    """SIGUSR1 to this thread, over and over; those that came. Timers and SIGALRM are pytest-timeout's."""
    came: list[int] = []
    ended, target = threading.Event(), threading.get_ident()

    def send() -> None:
        while not ended.wait(1e-4):
            signal.pthread_kill(target, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    sender.start()
    try:
        yield came
    finally:
        ended.set()
        sender.join()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # drops what is still pending
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_build_under_a_hail_of_signals_is_the_same(path: Path, place: str) -> None:
    """A system call that a signal interrupts (EINTR) is begun again."""
    values = mixed_values(200)
    with hail() as came:
        while len(came) <= 10:  # on a busy machine a build may see few of them
            path.unlink(missing_ok=True)
            found = build(path if place == "disk" else ":memory:", values)
            assert_same_bits(all_arrays(found), values)


# --- folders and files that others take away --------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO])
def test_create_in_a_folder_that_can_not_be_written_says_why(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fail(monkeypatch, "create_new", code)
    with pytest.raises(CommitError, match=os.strerror(code)) as caught:
        begin(path, mixed_values())
    assert (caught.value.path, caught.value.exit_code) == (str(path), 1)
    assert names_in(path.parent) == []


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with an unfinished store, which this user can't write to any more."""
    place = tmp_path / "place"
    place.mkdir()
    begin(place / "a.zarr.zip", mixed_values()).close()
    if os.geteuid() != 0:
        place.chmod(0o555)
        yield place
        place.chmod(0o755)
        return
    commands = [["mount", "--bind", place, place], ["mount", "-o", "remount,bind,ro", place, place]]
    if any(subprocess.run(command, capture_output=True, check=False).returncode for command in commands):
        pytest.skip("mounting isn't allowed here")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_read_only_folder_is_a_typed_error_and_readable(read_only_folder: Path) -> None:
    with pytest.raises(CommitError, match="not begun") as caught:
        begin(read_only_folder / "b.zarr.zip", mixed_values())
    assert isinstance(caught.value.__cause__, OSError)
    if os.geteuid() == 0:  # the folder is mounted read-only, and so is the file in it
        with pytest.raises(CommitError, match="Read-only file system"):
            begin(read_only_folder / "a.zarr.zip", mixed_values())
    with ups_store.open(read_only_folder / "a.zarr.zip", partial=True) as store:
        assert not store.committed.any()
    assert names_in(read_only_folder) == ["a.zarr.zip.building"]


@pytest.mark.parametrize("taken", ["file", "folder"])
def test_file_deleted_under_the_writer_is_said_and_begun_anew(path: Path, taken: str) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit(0, sample_of(values, 0))
        shutil.rmtree(path.parent) if taken == "folder" else writer.building.building_path.unlink()
        for call in (lambda: writer.commit(1, sample_of(values, 1)), writer.finish):
            with pytest.raises(StoreReplacedError, match="published, removed or restarted"):
                call()
    path.parent.mkdir(exist_ok=True)
    assert names_in(path.parent) == []
    with begin(path, values) as writer:
        assert len(writer.missing()) == 4


@pytest.mark.parametrize("nbytes", [0, 5000, -1, 1])
def test_file_cut_or_lengthened_under_the_writer_is_said(path: Path, nbytes: int) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit_many(range(4), values)
        expected = writer.building.layout.building_nbytes
        found = nbytes if nbytes > 1 or not nbytes else expected + nbytes
        os.truncate(writer.building.building_path, found)
        for call in (lambda: writer.commit(1, sample_of(values, 1)), writer.finish):
            with pytest.raises(TruncatedError, match="changed the length of the unfinished file") as caught:
                call()
            assert (caught.value.expected, caught.value.found) == (expected, found)
            writer._failed = False  # a finish that fails makes the writer refuse more
    with pytest.raises(FormatError):
        begin(path, values)


# --- what else the system tells only in part --------------------------------------------------------------


def test_read_past_the_end_returns_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"123")
    fd = files.open_existing(tmp_path / "short")
    assert (files.read_at(fd, 1, 10), files.read_at(fd, 3, 10)) == (b"23", b"")
    files.close(fd)


def test_boot_that_the_system_does_not_tell_is_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError

    assert any(files.boot_id())
    monkeypatch.setattr(Path, "read_text", refuse)
    assert files.boot_id() == bytes(16)


def test_residency_that_the_system_does_not_tell_is_an_error(path: Path) -> None:
    build(path, mixed_values())
    fd = files.open_existing(path)
    mapping = memory.map_private(fd, 4096)
    files.close(fd)
    with pytest.raises(OSError, match="mincore") as caught:
        memory.resident_nbytes(mapping, 1 << 36)  # no process has so much mapped in one piece here
    assert caught.value.errno == errno.ENOMEM

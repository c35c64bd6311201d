"""A disk that is full or fails: typed errors, nothing half-committed, nothing left lying about.

`ups_store.files` holds every system call of the package; here its functions are replaced by failing ones.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
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
from ups_store import CommitError, DiskFullError, files


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
    with pytest.raises(DiskFullError, match="12,345 free") as caught:
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
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        begin(path, mixed_values())
    assert names_in(path.parent) == []


def test_create_whose_last_sync_fails_leaves_a_file_to_continue(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "sync_folder", errno.EIO, nth=2)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        begin(path, mixed_values())
    assert names_in(path.parent) == [f"{path.name}.building"]
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
    mapping = files.map_private(fd, 4096)
    files.close(fd)
    with pytest.raises(OSError, match="mincore") as caught:
        files.resident_nbytes(mapping, 1 << 36)  # no process has so much mapped in one piece here
    assert caught.value.errno == errno.ENOMEM

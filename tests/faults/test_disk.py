"""The disk in memory that crash tests rely on: what is durable, what may be left, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from lossy_disk import Disk, PowerLoss, installed

from ups_store.errors import StoreNotFoundError
from ups_store.system import files, locks

A, B = Path("/a/x"), Path("/b/x")


def images(disk: Disk) -> list[dict[Path, bytes]]:
    return list(disk.after_power_loss())


def test_what_was_synced_stays_and_what_was_not_may_be_lost_kept_or_torn() -> None:
    disk = Disk()
    fd = disk.create_new(A)
    disk.write_at(fd, 0, b"d" * 1024)
    disk.sync(fd)
    assert {A in names for names in images(disk)} == {True, False}, "the folder wasn't synced"
    disk.sync_folder(A.parent)
    assert images(disk) == [{A: b"d" * 1024}]
    disk.write_at(fd, 0, b"n" * 1024)
    left = {names[A] for names in images(disk)}
    assert {b"d" * 1024, b"n" * 1024, b"n" * 512 + b"d" * 512, b"d" * 512 + b"n" * 512} <= left
    assert disk.read(A) == b"n" * 1024


def test_of_several_changes_any_may_be_lost_and_lengths_are_changes_too() -> None:
    disk = Disk({A: b"old"})
    fd = disk.open_existing(A, writable=True)
    disk.allocate(fd, 6)
    disk.write_at(fd, 3, b"new")
    disk.truncate(fd, 5)
    left = {names[A] for names in images(disk)}
    assert {b"old", b"old\0\0\0", b"oldnew", b"oldne", b"old\0\0"} <= left
    disk.allocate(fd, 2)
    assert disk.size(fd) == 5, "allocation shortens nothing"


def test_names_of_one_folder_come_in_order_and_those_of_two_in_any() -> None:
    disk = Disk({A: b"1", B: b"2"})
    disk.rename(A, A.with_name("y"))
    disk.remove(B)
    found = [frozenset(names) for names in images(disk)]
    assert set(found) == {
        frozenset({A, B}),
        frozenset({A.with_name("y"), B}),
        frozenset({A.with_name("y")}),
        frozenset({A}),
    }


def test_unsynced_changes_of_several_files_are_kept_or_lost_apart() -> None:
    disk = Disk({A: b"1", B: b"2"})
    for path in (A, B):
        disk.write_at(disk.open_existing(path, writable=True), 0, b"n")
    left = {(names[A], names[B]) for names in images(disk)}
    assert left == {(b"1", b"2"), (b"n", b"n"), (b"1", b"n"), (b"n", b"2")}


def test_a_lost_folder_takes_along_what_is_in_it() -> None:
    disk, folder = Disk(), Path("/a/folder")
    disk.create_folder(folder)
    with pytest.raises(FileExistsError):
        disk.create_folder(folder)
    fd = disk.create_new(folder / "x")
    disk.write_at(fd, 0, b"1")
    disk.sync(fd)
    disk.sync_folder(folder)
    assert set().union(*(names for names in images(disk))) == {folder / "x"}
    assert {} in images(disk), "its own name wasn't durable"
    disk.remove_folder(folder)
    assert disk.names() == [folder / "x"], "it isn't empty"
    disk.remove(folder / "x")
    disk.remove_folder(folder)
    assert not disk.exists(folder)


def test_the_power_goes_before_an_operation_and_nothing_works_after_it() -> None:
    disk = Disk({A: b"1"}, lose_power_at=1)
    fd = disk.open_existing(A, writable=True)
    disk.write_at(fd, 0, b"2")
    with pytest.raises(PowerLoss):
        disk.write_at(fd, 0, b"3")
    with pytest.raises(PowerLoss):
        disk.read_at(fd, 0, 1)
    disk.remove(A)
    disk.remove_folder(A.parent)
    assert disk.read(A) == b"2"
    disk.go_on()
    assert disk.read_at(fd, 0, 1) == b"2", "only the process died"


def test_names_are_refused_as_a_file_system_does() -> None:
    disk = Disk({A: b"1"})
    for refused in (lambda: disk.create_new(A), lambda: disk.link(A, A)):
        with pytest.raises(FileExistsError):
            refused()
    with pytest.raises(StoreNotFoundError):
        disk.open_existing(B)
    assert disk.read(B) is None
    assert disk.last_write(B) is None
    disk.link(A, B)
    assert disk.is_file_at(disk.open_existing(A), B)


def test_locks_are_of_the_file_and_go_with_their_descriptor() -> None:
    disk = Disk({A: b"1"})
    first, second = disk.open_existing(A), disk.open_existing(A)
    assert disk.try_lock(first, 0, 4)
    assert not disk.try_lock(second, 3)
    assert disk.try_lock(second, 4)
    disk.unlock(first, 0, 4)
    assert disk.try_lock(second, 3, exclusive=False)
    assert disk.try_lock(first, 3, exclusive=False)
    disk.close(second)
    assert disk.try_lock(first, 4)


def test_files_that_a_library_writes_in_a_watched_folder_are_unsynced_writes(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"o" * 9000)
    disk = Disk(watched=tmp_path)
    new.write_bytes(b"n" * 5000)
    old.write_bytes(b"o" * 4096 + b"c")
    assert {names.get(new, b"") for names in images(disk)} >= {b"", b"n" * 5000}
    assert {len(names[old]) for names in images(disk)} >= {9000, 4097}
    disk.link(new, tmp_path / "second")
    disk.rename(new, old)
    assert old.read_bytes() == b"n" * 5000
    disk.remove(old)
    (tmp_path / "second").unlink()
    with pytest.raises(StoreNotFoundError):
        disk.open_existing(tmp_path / "second")
    assert not old.exists()


def test_installed_takes_the_place_of_the_file_system_for_a_block(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_bytes(b"real")
    disk = Disk()
    with files.opened(real) as outside, installed(disk):
        fd = files.create_new(A)
        files.write_at(fd, 0, b"12")
        target = bytearray(4)
        assert files.read_into(fd, 0, memoryview(target)) == 2
        assert files.copy_range(outside, 1, fd, 2, 3) == 3
        assert (files.size(fd), files.size(outside)) == (5, 4)
        assert files.read_at(fd, 0, 9) == b"12eal"
        assert locks.try_lock(fd, 0)
        assert files.names_in(A.parent) == ["x"]
        files.start_writeback(fd, 0, 4)
    assert disk.num_writebacks == 1
    assert not files.exists(A)
